"""Tiles, launch geometry and launches of the linear layer for decoding by wgmma.

Kernels: matmul/decode/wgmma.cu and, for weights in GGUF blocks, wgmma_gguf.cu.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from gpt2block.cuda.formats import FILE as OF_FILE
from gpt2block.cuda.formats import GGUF
from gpt2block.cuda.kernels import HI_LO, Defines, Geometry, Launch, nonzero_defines, size_defines
from gpt2block.cuda.tensor_maps import tensor_map
from gpt2block.models.weights.gguf import BORDER, ROW_GROUP, GgufMatrix
from gpt2block.ops.call import Call, Refusal, accept, needs
from gpt2block.ops.engines.epilogues import Epilogue
from gpt2block.ops.engines.linear_mma import BYTES, HALF_SPLITS, LOADED, MAX_SPLITS, UNIT, splits
from gpt2block.ops.engines.rows import power_of_two
from gpt2block.ops.gguf import range_defines, sums_of
from gpt2block.ops.operands import CHUNK, IN_ORDER, Operand, count_define, head_multiple, ordered
from gpt2block.ops.products import Matmul, gate_define, limits, room, same_types, shared_for_blocks

FILE, KERNEL = "matmul/decode/wgmma.cu", "decode_wgmma"
GGUF_FILE, GGUF_KERNEL = "matmul/decode/wgmma_gguf.cu", "decode_wgmma_gguf"
OPERAND_ROWS = 64  # rows of x per tile of 16-bit terms, and maximum rows per block
MIN_ROWS = 4  # minimum rows of x per block
MIN_COLUMNS = 8  # minimum columns of wgmma's operand x; a column is one term of a row of x
LINE = 128  # bytes of a row of W in a slice of K
BOX = 64  # values of K of x per copy; divides K
GROUP_COLUMNS, GROUP_WARPS = 64, 4  # outputs and warps per warpgroup
MAX_GROUPS = 3  # maximum warpgroups per block that multiply
ROPE_BOX = 32  # rows of W per copy with RoPE; a divisor of half a head's channels
ALIGNMENT = 1024  # bytes to which shared memory is aligned
BARRIERS, CONSTANTS = 512, 512  # maximum bytes of static shared memory per block, per warpgroup
PAIR = 8  # bytes of two float32 sums
LONG_ROW = 16_384  # bytes of a row of weights from which on one block per SM is fastest
SHORT_K = 1024  # K up to which two sets of warps, which both load the weights, were faster than one
MIN_STAGES = 4  # minimum stages of a ring, if another tile is possible
PLACES = {1: 1.0, 2: 1.0, 3: 0.85}  # blocks per cluster: fraction of the SMs that are usable
FEWER_PLACES = 0.75  # fraction of the SMs that clusters of 4 or more blocks can use


class WgmmaLinearTile(NamedTuple):
    """The constants of a kernel that determine its speed, but not its results."""

    rows: int  # rows of x per block
    groups: int  # warpgroups per block that multiply, 64 columns each
    splits: int = 1  # blocks per cluster that divide K
    shares: int = 1  # blocks per cluster that read the same rows of x
    blocks: int = 1  # blocks that should fit on a multiprocessor
    stages: int = 2  # slices of K in the ring
    tiles: int = 2  # tiles of GGUF blocks in the ring of weights
    depth: int = 1  # sets of warps, each with rings, that divide the K of a block
    teams: int = 1  # sets of warps that divide the rows of x of a block

    @property
    def threads(self) -> int:
        """Threads per block, in warps that multiply and in one warp or one warpgroup that copies.

        With three warpgroups that multiply, a fourth warpgroup copies.
        """
        copying = GROUP_WARPS if self.groups == MAX_GROUPS else 1
        return 32 * (GROUP_WARPS * self.groups * self.teams + copying) * self.depth

    def columns(self, two: bool) -> int:
        """Outputs per block. two: whether the block multiplies two rows of weights per output."""
        return GROUP_COLUMNS * self.groups // (1 + two)


class WgmmaProduct(NamedTuple):
    """The sizes and formats of a product of x (M, K) and weights (N, K).

    outputs: (N,), or the number of outputs of each GGUF type. two: whether each output needs two
    rows of weights, of two gated matrices or, with RoPE, of the halves of a head. rounded: whether
    x has one term per value. row_group, units: `GgufMatrix.tile` and `.units` of the weights, or 0
    and
    0. summed: whether the kernel also stores the sums of chunks of the outputs.
    """

    M: int
    outputs: tuple[int, ...]
    K: int
    dtype: str
    two: bool = False
    rounded: bool = False
    row_group: int = 0
    units: int = 0
    summed: bool = False

    def grid(self, tile: WgmmaLinearTile) -> int:
        """Return the number of blocks in the grid."""
        groups = sum(ceil(n / tile.columns(self.two)) for n in self.outputs)
        shared = tile.shares * ceil(groups / tile.shares)
        return tile.splits * shared * ceil(self.M / OPERAND_ROWS)

    def stage_bytes(self, tile: WgmmaLinearTile) -> int:
        """Return the bytes of a ring stage: slices of x and, unless W has GGUF blocks, of W."""
        columns = max(MIN_COLUMNS, (1 if self.rounded else 2) * tile.rows)
        if self.row_group:
            return ceil((2 * UNIT + UNIT // 8) * columns / ALIGNMENT) * ALIGNMENT
        x_bytes = 2 * columns * (LINE // BYTES.get(self.dtype, 1))
        return LINE * GROUP_COLUMNS * tile.groups + x_bytes

    def sums_bytes(self, tile: WgmmaLinearTile) -> int:
        """Return the bytes of sums that a block receives and, with GGUF blocks, of its own sums."""
        tiles, parts = GROUP_WARPS * tile.groups * tile.rows // MIN_ROWS, splits(self.K)[0]
        messages, kept = (0 if tile.splits == 1 else parts), 0
        # two sums per output: of splits 0 to 3, of the others
        if self.row_group and tile.splits < 3:
            halves = ceil(parts / HALF_SPLITS)
            messages, kept = (0, halves) if tile.splits == 1 else (1, 2 * tile.depth - 1)
            kept *= max(tiles, 2 * GROUP_WARPS * tile.groups)
        return (messages * ceil(tiles / tile.splits) + kept) * 32 * PAIR

    def static_bytes(self, tile: WgmmaLinearTile) -> int:
        """Return the maximum bytes of static shared memory of a block."""
        # With `summed`, a float for each four columns of a chunk, in each row of the tile.
        fours = 4 * (CHUNK // 4) * tile.rows if self.summed else 0
        return BARRIERS + (CONSTANTS * tile.teams + fours) * tile.groups

    def shared_bytes(self, tile: WgmmaLinearTile) -> int:
        """Return the bytes of dynamic shared memory of a block: rings of slices, and sums."""
        ring = tile.stages * self.stage_bytes(tile)
        ring += tile.tiles * GROUP_COLUMNS // ROW_GROUP * tile.groups * self.row_group
        return ALIGNMENT + tile.depth * ring + self.sums_bytes(tile)

    def block_bytes(self, tile: WgmmaLinearTile) -> int:
        """Return the maximum bytes of shared memory of a block, static and dynamic."""
        return self.static_bytes(tile) + self.shared_bytes(tile)


def width(dtype: str) -> int:
    """Return `Operand.width` for weights of `dtype`: values of a row that a lane loads at once."""
    if dtype in (GGUF, OF_FILE):
        return IN_ORDER
    return LOADED // BYTES.get(dtype, 1)


def operand(dtype: str, rounded: bool = False) -> Operand:
    """Return the `Operand` in which x is stored for weights of a dtype."""
    return Operand("bfloat16" if dtype == "bfloat16" else "float16", width(dtype), rounded=rounded)


def _can_share(parts: int, blocks: int) -> bool:
    """Return whether each block gets at least one split of K if `blocks` blocks divide `parts`."""
    return (blocks - 1) * ceil(parts / blocks) < parts


def _many_rows(p: WgmmaProduct, sms: int) -> WgmmaLinearTile:
    """Return a tile for more than 32 rows, for which wgmma and shared memory limit the speed.

    The tile has the fewest warpgroups with which no SM has a second block. If less than half of the
    SMs have a block, several blocks divide K; large clusters can use fewer SMs. Such a block has
    two sets of warps if the epilogue combines two rows of weights and K is short. Blocks that share
    x read it less often.
    """
    tiles = [WgmmaLinearTile(OPERAND_ROWS, groups) for groups in range(1, MAX_GROUPS + 1)]
    grids = {tile: p.grid(tile) for tile in tiles}
    fitting = [tile for tile in tiles if grids[tile] <= sms]
    if fitting:
        tile = fitting[0]
    else:  # the tile with the fewest columns per SM; the widest tile if several have so few
        tile = min(tiles[:0:-1], key=lambda tile: tile.groups * ceil(grids[tile] / sms))
    waves = grids[tile] / sms
    if waves >= 0.5:
        shares = 1 if tile.groups == 1 else 4 if waves < 1.4 and p.M <= OPERAND_ROWS else 2
        return tile._replace(shares=shares)
    shared = [n for n in range(1, MAX_SPLITS + 1) if _can_share(splits(p.K)[0], n)]
    most = max(n for n in shared if n * grids[tile] <= sms * PLACES.get(n, FEWER_PLACES))
    return tile._replace(splits=most, teams=2 if p.two and most > 1 and p.K <= SHORT_K else 1)


def _few_rows(p: WgmmaProduct, rows: int, sms: int) -> list[WgmmaLinearTile]:
    """Return tiles for up to 32 rows, preferred tiles first. Memory bandwidth limits the speed.

    One block per SM with a deep ring reads long rows of weights at the highest rate. For short rows
    there are more blocks, so that blocks of the next kernel start early.
    """
    tile, parts = WgmmaLinearTile(rows, 1, blocks=3), splits(p.K)[0]
    grid = p.grid(tile)
    tiles: list[WgmmaLinearTile] = []
    alone = parts % 2 == 0 and 0.9 * sms <= 2 * grid <= sms
    if alone and (p.K * BYTES.get(p.dtype, 1) >= LONG_ROW or rows > 16):
        tiles.append(tile._replace(splits=2, blocks=1))
    for n in (1, 2, 4, 8):
        if _can_share(parts, n):
            tile = tile._replace(splits=n, rows=max(rows, n))  # each block completes some sums
            if n * grid >= 1.4 * sms:
                break
    if tile.splits > 1:  # clusters of 2 blocks fill SMs evenly, larger clusters need room
        blocks = min(tile.blocks, ceil(2 * grid / sms)) if tile.splits == 2 else tile.blocks
        tiles.append(tile._replace(blocks=blocks))
    if not tiles or grid >= sms:
        blocks = 2 if 3 < grid / sms < 4 or grid <= 2 * sms else 3
        shares = 4 if grid <= 3 * sms else 2
        tiles.append(tile._replace(rows=rows, splits=1, shares=shares, blocks=blocks))
    return tiles


def _of_blocks(p: WgmmaProduct, rows: int, sms: int) -> WgmmaLinearTile:
    """Return the tile for weights in GGUF blocks; the rules follow measurements on an H100.

    Up to 32 rows, K is divided until a multiprocessor has about three blocks. For more rows, a
    multiprocessor has one block, with a deep ring, if the block has MAX_GROUPS warpgroups or if
    all blocks then run at once; otherwise two blocks. If it has one block, of one warpgroup, with
    half of a K of MAX_SPLITS splits, this block has two sets of warps. Blocks of one warpgroup
    that do not divide K form clusters that share x.
    """
    parts, each = splits(p.K)
    possible = [n for n in (1, 2, 4) if parts > HALF_SPLITS * (n > 1) and (n < 3 or parts % n == 0)]
    if p.summed:  # each block finishes the same rows in all warps, and adds up their outputs
        possible = [n for n in possible if rows // MIN_ROWS % n == 0]

    def duration(tile: WgmmaLinearTile) -> float:
        """Estimate the µs for more than 32 rows: a time per 128 values of K, and a constant."""
        waves, wide = p.grid(tile) / sms, tile.groups > 1
        turns, unit = (ceil(waves), 1.0) if wide else (ceil(waves / 2), 0.55 if waves <= 1 else 0.8)
        return turns * (unit * parts * each / tile.splits + (12 if wide else 8))

    if rows == OPERAND_ROWS:
        halves = possible[:2]  # clusters of 4 blocks, which exchange more sums, are slower
        tiles = [WgmmaLinearTile(rows, groups, n) for groups in (1, MAX_GROUPS) for n in halves]
        tile = min(tiles, key=duration)
        once = tile.groups == MAX_GROUPS or p.grid(tile) <= sms
        deep = once and tile.groups == 1 and tile.splits == 2 and parts == MAX_SPLITS
        tile = tile._replace(blocks=1 if once else 2, depth=2 if deep else 1)
    else:
        tile = WgmmaLinearTile(rows, 1, blocks=3)
        enough = 2.5 * sms / p.grid(tile)
        tile = tile._replace(splits=next((n for n in possible if n >= enough), possible[-1]))
    if tile.splits == 1 and tile.groups == 1:
        tile = tile._replace(shares=4 if rows == OPERAND_ROWS else 2)
    return tile


def _with_stages(p: WgmmaProduct, tile: WgmmaLinearTile, max_shared: int) -> WgmmaLinearTile | None:
    """Return the tile with all stages that fit, and fewer blocks per SM if 2 stages do not fit."""
    slices = ceil(p.K * BYTES.get(p.dtype, 1) / LINE)
    for blocks in range(tile.blocks, 0, -1):
        left = room(max_shared, blocks) - p.block_bytes(tile)
        # tile.depth: sets of warps, each with rings, that divide the K of a block
        stages = tile.stages + left // (tile.depth * p.stage_bytes(tile))
        if stages >= tile.stages:
            most = max(2, slices // (tile.splits * tile.depth))
            return tile._replace(blocks=blocks, stages=min(stages, most))
    return None


def _fitted(p: WgmmaProduct, tile: WgmmaLinearTile, max_shared: int) -> WgmmaLinearTile | None:
    """Return the tile with the largest rings. A ring of GGUF tiles spans at most x's K."""
    fitted = _with_stages(p, tile, max_shared)
    while fitted and p.row_group:
        more = tile._replace(blocks=fitted.blocks, tiles=fitted.tiles + 1)
        deeper = _with_stages(p, more, max_shared)
        if not deeper or deeper.blocks < fitted.blocks or deeper.stages < p.units * deeper.tiles:
            break
        fitted = deeper
    return fitted


@lru_cache(maxsize=1024)
def choose(p: WgmmaProduct, sms: int, max_shared: int) -> WgmmaLinearTile:
    """Return the tile for a product. Rules follow measurements on an H200, for few rows an H100.

    max_shared: bytes of shared memory that a block may request. If the sums that a block receives
    leave few stages, K is not split.
    """
    rows = max(MIN_ROWS, power_of_two(min(p.M, OPERAND_ROWS)))
    if p.row_group:
        tiles = [_of_blocks(p, rows, sms)]
    else:
        tiles = _few_rows(p, rows, sms) if rows < OPERAND_ROWS else [_many_rows(p, sms)]
    for tile in tiles:
        fitted = _fitted(p, tile, max_shared)
        if fitted and (fitted.stages >= MIN_STAGES or tile is tiles[-1]):
            return fitted
    return (
        WgmmaLinearTile(rows, 1) if p.row_group else tiles[-1]._replace(splits=1, blocks=1, teams=1)
    )


@lru_cache(maxsize=1024)
def geometry(
    p: WgmmaProduct,
    tile: WgmmaLinearTile,
    *,
    gated: bool = False,
    to_operand: bool = False,
    head: int = 0,
) -> Geometry:
    """Return the launch geometry for a product and a tile.

    gated: whether there are two matrices. to_operand: whether the result is stored as terms. head:
    with RoPE, the channels of a head; an output is then a pair of channels.
    """
    defines = (
        *size_defines("DECODE", tile, "rows groups splits shares stages blocks"),
        *nonzero_defines(
            DECODE_GATED=gated, DECODE_OUT_OPERAND=to_operand, DECODE_ROPE=head,
            DECODE_TILES=tile.tiles * (p.row_group > 0), DECODE_DEPTH=tile.depth * (tile.depth > 1),
            DECODE_TEAMS=tile.teams * (tile.teams > 1), OPERAND_SUMS=p.summed,
        ),
        *count_define(p.rounded),
    )  # fmt: skip
    kernel = GGUF_KERNEL if p.row_group else KERNEL
    return Geometry(kernel, (p.grid(tile),), (tile.threads,), p.shared_bytes(tile), defines)


def takes_blocks(w: GgufMatrix, head: int = 0) -> bool:
    """Return whether wgmma kernels support this matrix. head: channels of a head, with RoPE."""
    return w.K % UNIT == 0 and w.begins_at(head or BORDER)


def plan(p: Matmul) -> tuple[Geometry, WgmmaLinearTile] | Refusal:
    """Return the launch of the kernel for a product, and its tile, or the reason to refuse."""
    w, wanted = p.blocks[0] if p.blocks else None, operand(p.dtype, p.rounded)
    head, multiple = 0 if w else p.head, head_multiple(p.operand)
    in_order = ordered(p.operand) and (p.to_operand is None or ordered(p.to_operand))
    refused = Refusal.first(
        needs("has_wgmma", f": use {'linear and rope_append' if p.head else 'variant mma_tiles'}"),
        (head and p.operand != wanted, f"terms of {p.operand}: expected {wanted}"),
        (head % multiple, f"heads of {head} channels: expected a multiple of {multiple}"),
        (not in_order, "takes and gives terms in the order of wgmma: use variant mma_tiles"),
        (p.dtype == HI_LO, "takes no HiLoMatrix: use variant mma_tiles"),
        (not w and p.K % BOX, f"K {p.K:,}: expected a multiple of {BOX}: use variant mma_tiles"),
        (w and not (p.rounded and takes_blocks(w, p.head)),
         f"w {w}: expected x rounded, and K in multiples of {UNIT}: pass floats"),
        same_types(p.blocks),
    )  # fmt: skip
    if refused:
        return refused
    pair = 2 if p.head else 1
    outputs = [n // pair for _, n in w.ranges] if w else [p.N // pair]
    facts = p.M, tuple(outputs), p.K, p.dtype, p.up or p.head > 0, p.rounded
    of = WgmmaProduct(*facts, *((w.tile, w.units, p.summed) if w else ()))
    tile, max_shared = choose(of, **limits()), limits()["max_shared"]
    chosen = geometry(of, tile, gated=p.up, to_operand=p.to_operand is not None, head=p.head)
    if w or tile.rows == OPERAND_ROWS:  # with OPERAND_ROWS, two blocks per SM would be slower
        most = tile.blocks if w else 1
        chosen = chosen._replace(shared=shared_for_blocks(max_shared, most, chosen.shared))
    return chosen, tile


def launch(c: Call, epilogue: Epilogue) -> tuple[Launch, ...]:
    """Return the launches of a product, or raise UnsupportedCall.

    For GGUF types with minimums, a launch that sums chunks of x precedes the product, unless x is
    stored with the sums.
    """
    p = Matmul.of(c)
    launch_geometry, tile = accept(plan(p))
    in_blocks, gated = c.w.dtype == GGUF, p.up
    c.check_addresses("x", "w", "up")
    before: tuple[Launch, ...] = ()
    defines: Defines = ()
    args = {"x": c.x, "bias": c.bias, "M": c.M, "N": c.N, "K": c.K}
    matrices = {"w": c.w, "up": c.up} if gated else {"w": c.w}
    if in_blocks:
        sums, before = sums_of(c)
        args["chunk_sums"] = sums
        args |= {name: m.data for name, m in matrices.items()}
        defines = range_defines(c.w)
    else:
        box = (1, ROPE_BOX if p.head else tile.columns(gated), LINE // c.w.data.itemsize)
        for name, m in matrices.items():
            args[name] = tensor_map(m.data.reshape(1, m.N, m.K), box)
        args |= {"scale": c.w.scale, "up_scale": c.up.scale if gated else None}
    defines += gate_define(c.gelu) if gated else ()
    file = GGUF_FILE if in_blocks else FILE
    return (*before, epilogue.launch(file, launch_geometry, defines, args, c.w))
