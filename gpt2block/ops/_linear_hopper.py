"""The linear layer for decoding by wgmma: its geometry and launches.

Kernels: matmul/decode/wgmma.cu and, with RoPE, matmul/decode/wgmma_rope.cu; for weights in blocks
of GGUF matmul/decode/wgmma_gguf.cu and decode_hopper_gguf_rope.cu.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Any, NamedTuple

from gpt2block.config.formats import FILE as OF_FILE
from gpt2block.config.formats import GGUF
from gpt2block.cuda.arrays import check_address, device_attribute
from gpt2block.cuda.kernels import Geometry, launch_at
from gpt2block.cuda.requests import Launch
from gpt2block.cuda.tensor_maps import NO_MAP, tensor_map
from gpt2block.ops._linear_mma import BYTES, HALF_SPLITS, LOADED, MOST_SPLITS, UNIT, splits
from gpt2block.ops._rows import power_of_two
from gpt2block.ops.call import Call
from gpt2block.ops.gguf import chunk_sums, range_defines
from gpt2block.ops.operation import UnsupportedCall
from gpt2block.ops.products import filled, gate_define, room, storage_of
from gpt2block.ops.terms import IN_ORDER, Terms, count_define
from gpt2block.weights.gguf import BORDER, OCTET, TYPES, GgufMatrix
from gpt2block.weights.matrix import WeightMatrix

FILE = "matmul/decode/wgmma.cu"
ROPE_FILE = "matmul/decode/wgmma_rope.cu"
GGUF_FILE = "matmul/decode/wgmma_gguf.cu"
GGUF_ROPE_FILE = "matmul/decode/wgmma_gguf_rope.cu"
TERM_ROWS = 64  # of a tile of terms, and the most that a block has
FEWEST_ROWS = 4
FEWEST_COLUMNS = 8  # of x as an operand, each a term of a row
LINE = 128  # bytes of a row of W, in a slice
GROUP_COLUMNS, GROUP_WARPS = 64, 4  # of A, and of a warpgroup
MOST_GROUPS = 3
ROPE_BOX = 32  # rows of W that are copied at once, with RoPE: what half a head is a multiple of
ALIGNMENT = 1024  # of shared memory
BARRIERS, CONSTANTS = 512, 512  # bytes of a block at most, and of a warpgroup
PAIR = 8  # bytes of two sums
LONG_ROW = 16_384  # bytes of a row of weights
LEAST_STAGES = 4
PLACES = {1: 1.0, 2: 1.0, 3: 0.85}  # of the SMs, that clusters of so many blocks find; larger 0.75


class HopperLinearTile(NamedTuple):
    """The constants of a kernel that decide how fast it is, never what it computes."""

    rows: int
    groups: int  # warpgroups that multiply, 64 columns each
    splits: int = 1  # blocks that share K
    shares: int = 1  # blocks that share x
    blocks: int = 1  # that a multiprocessor should have room for
    stages: int = 2
    tiles: int = 2  # of blocks of GGUF, in their ring
    depth: int = 1  # sets of warps, each with rings, that share the half of K that a block has

    @property
    def threads(self) -> int:
        """Those that multiply, and a warp that copies; with three warpgroups it is one of four."""
        of_copies = GROUP_WARPS if self.groups == MOST_GROUPS else 1
        return 32 * (GROUP_WARPS * self.groups + of_copies) * self.depth

    def columns(self, gated: bool) -> int:
        return GROUP_COLUMNS * self.groups // (1 + gated)

    def grid(self, M: int, N: int | tuple[int, ...], gated: bool) -> int:
        """Blocks of a product (M, N); gated: of two matrices. N: or that of each type of blocks."""
        parts = (N,) if isinstance(N, int) else N
        groups = sum(ceil(n / self.columns(gated)) for n in parts)
        return self.splits * self.shares * ceil(groups / self.shares) * ceil(M / TERM_ROWS)


def width(dtype: str) -> int:
    """Values of a row of weights that a lane loads at once, which the order of terms depends on."""
    if dtype in (GGUF, OF_FILE):
        return IN_ORDER
    return LOADED // BYTES.get(dtype, 1)


def terms(dtype: str, rounded: bool = False) -> Terms:
    """Those of x for weights of a dtype."""
    return Terms("bfloat16" if dtype == "bfloat16" else "float16", width(dtype), rounded=rounded)


def _static(tile: HopperLinearTile) -> int:
    """Bytes of shared memory that the kernel itself has."""
    return BARRIERS + CONSTANTS * tile.groups


def _stage(tile: HopperLinearTile, dtype: str, rounded: bool, octet: int = 0) -> int:
    """Bytes of a slice of K: of W, and of x, which has one term where rounded, else two.

    octet: bytes of a tile of blocks of GGUF, or 0.
    """
    columns = max(FEWEST_COLUMNS, (1 if rounded else 2) * tile.rows)
    if octet:
        return ceil((2 * UNIT + UNIT // 8) * columns / ALIGNMENT) * ALIGNMENT
    of_x = 2 * columns * (LINE // BYTES.get(dtype, 1))
    return LINE * GROUP_COLUMNS * tile.groups + of_x


def _sums(tile: HopperLinearTile, K: int, octet: int = 0) -> int:
    """Bytes of the sums that a block receives, or of blocks of GGUF keeps."""
    tiles, parts = GROUP_WARPS * tile.groups * tile.rows // FEWEST_ROWS, splits(K)[0]
    messages, kept = (0 if tile.splits == 1 else parts), 0
    if octet and tile.splits < 3:  # of the halves of the splits that a block has
        halves = ceil(parts / HALF_SPLITS)
        messages, kept = (0, halves) if tile.splits == 1 else (1, 2 * tile.depth - 1)
        kept *= max(tiles, 2 * GROUP_WARPS * tile.groups)
    return (messages * ceil(tiles / tile.splits) + kept) * 32 * PAIR


def shared_bytes(
    tile: HopperLinearTile, K: int, dtype: str, rounded: bool = False, octet: int = 0
) -> int:
    """The dynamic shared memory of a block: the ring, and received sums.

    dtype: of the weights. rounded: x, to one term. octet: bytes of a tile of blocks of GGUF, or 0.
    """
    ring = tile.stages * _stage(tile, dtype, rounded, octet)
    ring += tile.tiles * GROUP_COLUMNS // OCTET * tile.groups * octet
    return ALIGNMENT + tile.depth * ring + _sums(tile, K, octet)


def _can_share(parts: int, blocks: int) -> bool:
    """Whether each of these blocks has a split of K, of so many in order."""
    return (blocks - 1) * ceil(parts / blocks) < parts


def _many_rows(M: int, N: int, K: int, gated: bool, sms: int) -> HopperLinearTile:
    """A tile of more than 32 rows. wgmma and shared memory are the bound: one block on an SM.

    The fewest warpgroups with which no SM has a second block; where less than half of the SMs have
    one, K is shared. Large clusters find fewer places. x is read less often with shares.
    """
    tiles = [HopperLinearTile(TERM_ROWS, groups) for groups in range(1, MOST_GROUPS + 1)]
    grids = {tile: tile.grid(M, N, gated) for tile in tiles}
    fitting = [tile for tile in tiles if grids[tile] <= sms]
    if fitting:
        tile = fitting[0]
    else:  # the fewest columns for one after another, of equals the widest tile
        tile = min(tiles[:0:-1], key=lambda tile: tile.groups * ceil(grids[tile] / sms))
    waves = grids[tile] / sms
    if waves >= 0.5:
        shares = 1 if tile.groups == 1 else 4 if waves < 1.4 and M <= TERM_ROWS else 2
        return tile._replace(shares=shares)
    shared = [n for n in range(1, MOST_SPLITS + 1) if _can_share(splits(K)[0], n)]
    found = max(n for n in shared if n * grids[tile] <= sms * PLACES.get(n, 0.75))
    return tile._replace(splits=found)


def _few_rows(
    rows: int, M: int, N: int, K: int, dtype: str, gated: bool, sms: int
) -> list[HopperLinearTile]:
    """Tiles of up to 32 rows, the preferred one first. Memory is the bound.

    One block on each SM, with a deep ring, reads long rows of weights at the highest rate. Else
    there are many blocks, the next kernel's among them.
    """
    tile, parts = HopperLinearTile(rows, 1, blocks=3), splits(K)[0]
    grid = tile.grid(M, N, gated)
    found: list[HopperLinearTile] = []
    alone = parts % 2 == 0 and 0.9 * sms <= 2 * grid <= sms
    if alone and (K * BYTES.get(dtype, 1) >= LONG_ROW or rows > 16):
        found.append(tile._replace(splits=2, blocks=1))
    for n in (1, 2, 4, 8):
        if _can_share(parts, n):
            tile = tile._replace(splits=n, rows=max(rows, n))  # a block finishes 4 rows or more
            if n * grid >= 1.4 * sms:
                break
    if tile.splits > 1:  # clusters of two blocks fill an SM evenly, larger ones need some room
        blocks = min(tile.blocks, ceil(2 * grid / sms)) if tile.splits == 2 else tile.blocks
        found.append(tile._replace(blocks=blocks))
    if not found or grid >= sms:
        blocks = 2 if 3 < grid / sms < 4 or grid <= 2 * sms else 3
        shares = 4 if grid <= 3 * sms else 2
        found.append(tile._replace(rows=rows, splits=1, shares=shares, blocks=blocks))
    return found


def _with_stages(
    tile: HopperLinearTile, K: int, dtype: str, most_shared: int, rounded: bool, octet: int = 0
) -> HopperLinearTile | None:
    """The tile with as many stages as fit, with fewer blocks on an SM where two do not."""
    slices = ceil(K * BYTES.get(dtype, 1) / LINE)
    for blocks in range(tile.blocks, 0, -1):
        left = room(most_shared, blocks) - _static(tile)
        left -= shared_bytes(tile, K, dtype, rounded, octet)
        stages = tile.stages + left // (tile.depth * _stage(tile, dtype, rounded, octet))
        if stages >= tile.stages:
            most = max(2, slices // (tile.splits * tile.depth))
            return tile._replace(blocks=blocks, stages=min(stages, most))
    return None


def _with_rings(
    tile: HopperLinearTile, K: int, most_shared: int, octet: int, units: int
) -> HopperLinearTile | None:
    """The tile with the stages and tiles of blocks that fit, where stages reach at least as far.

    octet: bytes of a tile, of so many units of K.
    """
    found = _with_stages(tile, K, GGUF, most_shared, True, octet)
    while found:
        more = tile._replace(blocks=found.blocks, tiles=found.tiles + 1)
        fitted = _with_stages(more, K, GGUF, most_shared, True, octet)
        if not fitted or fitted.blocks < found.blocks or fitted.stages < units * fitted.tiles:
            break
        found = fitted
    return found


@lru_cache(maxsize=1024)
def choose(
    M: int,
    N: int,
    K: int,
    dtype: str,
    gated: bool,
    sms: int,
    most_shared: int,
    rounded: bool = False,
) -> HopperLinearTile:
    """The tile for x (M, K) and weights (N, K), as measured on an H200, few rows on an H100.

    gated: of two matrices, with N outputs. rounded: x, to one term. Where received sums leave few
    stages, K is not split.
    """
    rows = max(FEWEST_ROWS, power_of_two(min(M, TERM_ROWS)))
    if rows < TERM_ROWS:
        tiles = _few_rows(rows, M, N, K, dtype, gated, sms)
    else:
        tiles = [_many_rows(M, N, K, gated, sms)]
    for tile in tiles:
        fitted = _with_stages(tile, K, dtype, most_shared, rounded)
        if fitted and (fitted.stages >= LEAST_STAGES or tile is tiles[-1]):
            return fitted
    return tiles[-1]._replace(splits=1, blocks=1)


@lru_cache(maxsize=1024)
def choose_blocks(
    M: int,
    N: tuple[int, ...],
    K: int,
    octet: int,
    units: int,
    gated: bool,
    sms: int,
    most_shared: int,
) -> HopperLinearTile:
    """The tile for weights in blocks of GGUF, as measured on an H100.

    N: outputs of each type. octet, units: bytes of a tile of blocks, and what it has of K. K is
    divided until multiprocessors have about three blocks of up to 32 rows; of more rows they have
    one with deep rings, where that is enough, and two sets of warps for its half of K. Blocks that
    do not share K share x.
    """
    rows, (parts, each) = max(FEWEST_ROWS, power_of_two(min(M, TERM_ROWS))), splits(K)
    possible = [n for n in (1, 2, 4) if parts > HALF_SPLITS * (n > 1) and (n < 3 or parts % n == 0)]

    def duration(tile: HopperLinearTile) -> float:
        """Of more than 32 rows, in us: of so many units in turn, and what is the same for any K."""
        waves, wide = tile.grid(M, N, gated) / sms, tile.groups > 1
        turns, unit = (ceil(waves), 1.0) if wide else (ceil(waves / 2), 0.55 if waves <= 1 else 0.8)
        return turns * (unit * parts * each / tile.splits + (12 if wide else 8))

    if rows == TERM_ROWS:
        halves = possible[:2]  # sums of more splits than halves cost more than they save
        tiles = [HopperLinearTile(rows, groups, n) for groups in (1, MOST_GROUPS) for n in halves]
        tile = min(tiles, key=duration)
        once = tile.groups == MOST_GROUPS or tile.grid(M, N, gated) <= sms
        deep = once and tile.groups == 1 and tile.splits == 2 and parts == MOST_SPLITS
        tile = tile._replace(blocks=1 if once else 2, depth=2 if deep else 1)
    else:
        tile = HopperLinearTile(rows, 1, blocks=3)
        enough = 2.5 * sms / tile.grid(M, N, gated)
        tile = tile._replace(splits=next((n for n in possible if n >= enough), possible[-1]))
    if tile.splits == 1 and tile.groups == 1:
        tile = tile._replace(shares=4 if rows == TERM_ROWS else 2)
    found = _with_rings(tile, K, most_shared, octet, units)
    return found or HopperLinearTile(rows, 1)


@lru_cache(maxsize=1024)
def geometry(
    kernel: str,
    M: int,
    N: int,
    K: int,
    dtype: str,
    tile: HopperLinearTile,
    *,
    gated: bool = False,
    to_terms: bool = False,
    head: int = 0,
    rounded: bool = False,
    octet: int = 0,
    parts: tuple[int, ...] = (),
) -> Geometry:
    """The launch of a kernel for x (M, K) and N outputs, of weights of `dtype`.

    gated: of two matrices. to_terms: whether the result has terms. head: the channels of a head
    whose pairs RoPE turns; an output is a pair. rounded: x and the result, to one term. octet:
    bytes of a tile of blocks of GGUF, or 0. parts: N of each type of these.
    """
    defines = (
        ("DH_ROWS", tile.rows),
        ("DH_GROUPS", tile.groups),
        ("DH_SPLITS", tile.splits),
        ("DH_SHARES", tile.shares),
        ("DH_STAGES", tile.stages),
        ("DH_BLOCKS", tile.blocks),
        *((("DH_GATED", 1),) if gated else ()),
        *((("DH_OUT_TERMS", 1),) if to_terms else ()),
        *((("DH_ROPE", head),) if head else ()),
        *((("DH_TILES", tile.tiles),) if octet else ()),
        *((("DH_DEPTH", tile.depth),) if tile.depth > 1 else ()),
        *count_define(rounded),
    )
    grid = (tile.grid(M, parts or N, gated or head > 0),)
    shared = shared_bytes(tile, K, dtype, rounded, octet)
    return Geometry(kernel, grid, (tile.threads,), shared, defines)


def _check_addresses(c: Call, matrices: tuple[WeightMatrix | None, ...]) -> None:
    """Raise InputError unless x and the matrices, w and up, are aligned for the copy engine."""
    check_address("x", c.x)
    for name, matrix in zip(("w", "up"), matrices, strict=False):
        if matrix is not None:
            check_address(name, matrix.data)


def launch(
    c: Call,
    kernel: str,
    matrices: tuple[WeightMatrix | None, ...],
    args: tuple[Any, ...],
    head: int = 0,
) -> Launch:
    """Launch a kernel of one of both files, or raise UnsupportedCall.

    matrices: w, and where the kernel takes one, up of a gated product. args: the kernel's arguments
    after x and the matrices. head: the channels of a head, with RoPE.
    """
    if c.K % UNIT:
        raise UnsupportedCall(f"K {c.K:,}: expected a multiple of {UNIT}: use variant mma_tiles")
    gated = c.up is not None
    two = gated or head > 0
    sizes = c.M, c.N // 2 if head else c.N, c.K, c.w.dtype
    sms = device_attribute("MultiProcessorCount")
    most_shared = device_attribute("MaxSharedMemoryPerBlockOptin")
    tile = choose(*sizes, two, sms, most_shared, c.rounded)
    box = (1, ROPE_BOX if head else tile.columns(two), LINE // c.w.data.itemsize)
    _check_addresses(c, matrices)
    maps = [NO_MAP if m is None else tensor_map(m.data.reshape(1, m.N, m.K), box) for m in matrices]
    to_terms = c.to_terms is not None
    made = geometry(
        kernel, *sizes, tile, gated=gated, to_terms=to_terms, head=head, rounded=c.rounded
    )
    if gated:
        made = made.with_defines(gate_define(c.gelu))
    if tile.rows == TERM_ROWS:  # two blocks on an SM, for which small tiles leave room, are slower
        made = made._replace(shared=filled(most_shared, 1, made.shared))
    file = ROPE_FILE if head else FILE
    return launch_at(file, made, (c.x, *maps, *args), *storage_of(c.w, c.T), c.kv_dtype)


def takes_blocks(w: GgufMatrix, head: int = 0) -> bool:
    """Whether a product by wgmma takes these blocks. head: the channels of a head, with RoPE."""
    return w.K % UNIT == 0 and not any(begin % (head or BORDER) for begin in w.begins)


def launch_blocks(
    c: Call,
    kernel: str,
    matrices: tuple[WeightMatrix | None, ...],
    args: tuple[Any, ...],
    head: int = 0,
) -> Launch:
    """Launch a kernel for GGUF blocks, or raise UnsupportedCall. args include the bias.

    Where a type has minimums, the sums of x come first, unless x is summed: in the half of x that
    rounded terms leave free.
    """
    if not c.rounded or not takes_blocks(c.w, head):
        raise UnsupportedCall(
            f"w {c.w}: expected x rounded, and K in multiples of {UNIT}: pass floats"
        )
    if c.up is not None and c.up.ranges != c.w.ranges:
        raise UnsupportedCall(f"up: expected types {c.w.ranges}, got {c.up.ranges}")
    two = c.up is not None or head > 0
    octet = c.w.tile
    parts = tuple(n // 2 if head else n for _, n in c.w.ranges)
    sizes = c.M, sum(parts), c.K
    sms = device_attribute("MultiProcessorCount")
    most_shared = device_attribute("MaxSharedMemoryPerBlockOptin")
    tile = choose_blocks(c.M, parts, c.K, octet, c.w.units, two, sms, most_shared)
    _check_addresses(c, matrices)
    c.sums = None
    if any(TYPES[name].minimum for name, _ in c.w.ranges):
        c.sums = c.x.reshape(-1)[c.M * c.K // 2 :]
        c.before = () if c.terms.summed else (chunk_sums.launch(c),)
    blocks = (m if m is None else m.data for m in matrices)
    to_terms = c.to_terms is not None
    made = geometry(
        kernel, *sizes, GGUF, tile, gated=c.up is not None, to_terms=to_terms, head=head,
        rounded=True, octet=octet, parts=parts,
    ).with_defines(range_defines(c.w))  # fmt: skip
    if c.up is not None:
        made = made.with_defines(gate_define(c.gelu))
    made = made._replace(shared=filled(most_shared, tile.blocks, made.shared))
    args = (c.x, *blocks, c.sums, *args)
    file = GGUF_ROPE_FILE if head else GGUF_FILE
    return launch_at(file, made, args, *storage_of(c.w, c.T), c.kv_dtype)
