"""Tiles of the attention kernels: how many queries and keys a block takes, grids, shared memory.

`online`, in float32, holds tiles of Q, K and V in shared memory; attention_cached uses the same
tiles. The kernels on tensor cores hold the queries in registers and a ring of tiles of K and V in
shared memory, or both there. Heads there have 64, 128 or 256 channels.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from gpt2block.cuda.kernels import Defines, Geometry, float_define
from gpt2block.errors import InputError
from gpt2block.ops._products import room
from gpt2block.ops.call import Call

MOST_BLOCKS = 2**31 - 1, 65535  # of a grid, along its first axis and along the others
WARPS = (4, 2, 1)  # of a block of `online`, the best first
KEYS = (64, 32)  # of a tile of `online`

TENSOR_HEADS = (64, 128)  # channels of a head that the kernels on tensor cores take
MMA_HEADS = (*TENSOR_HEADS, 256)  # and those of 16 bits by mma
HOPPER_TILE = 128  # queries, and keys
HOPPER_THREADS = 384  # two warpgroups that multiply, a warp that copies, three for the kv_cache
# Bytes: eight or four tiles of K or V, two of queries, the output to be copied, barriers.
HOPPER_SHARED = {64: 181408, 128: 230496}
# Alternate keys: half as many queries, and room for sums that are passed on.
ALTERNATE_HEAD, ALTERNATE_TILE, ALTERNATE_SHARED = 64, 64, 199840
HOPPER_MOST_TILES = 2**30 - 1  # that the kernel's counters hold
HOPPER_TWO_PART_HEAD = 64  # channels of a head of two-part matrices
HOPPER_TWO_PART_TILE = 64  # queries, and keys
HOPPER_TWO_PART_THREADS = 384  # two warpgroups that multiply, and one of which a thread copies
# Bytes: eight tiles of K or V, two of queries, sums that are passed on, barriers, the alignment.
HOPPER_TWO_PART_SHARED = 184480
CACHED = 32 << 20  # bytes of K and V that the L2 cache keeps


# --- float32


def scored(geometry: Geometry, c: Call) -> Geometry:
    """The launch with the call's scale of scores in the place of 1 / sqrt(HS), and its window."""
    window: Defines = () if c.window is None else (("ATT_WINDOW", c.window),)
    return geometry.with_defines((*float_define("ATT_SCALE", c.softmax_scale), *window))


def heads_defines(NH: int, NKV: int, HS: int) -> Defines:
    """Constants of a kernel: heads of Q, heads of K and of V, channels of a head."""
    return ("NH", NH), ("NKV", NKV), ("HS", HS)


def warp_queries(HS: int) -> int:
    """Queries of a warp of `online`: fewer for a larger head, so that sums stay in registers."""
    return 32 if HS <= 64 else 16 if HS <= 128 else 8


def shared_bytes(HS: int, warps: int, keys: int) -> int:
    """Shared memory for the tiles of `online`: Q, K, V, and 32 keys' weights of each query."""
    queries = warps * warp_queries(HS)
    stride = 4 * (ceil(HS / 4) | 1)
    return 4 * ((queries + keys) * stride + keys * 32 * ceil(HS / 32) + queries * 48)


@lru_cache(maxsize=1024)
def online_geometry(
    B: int, T: int, NH: int, HS: int, *, NKV: int, block: int | None, most_shared: int
) -> Geometry:
    """The launch of `online` for B sequences of length T.

    block: threads, or None for the best number. most_shared: bytes of shared memory that a block
    can have. Raises InputError where no tile fits, or T is too long for a grid.
    """
    warps, keys = _online_tile(HS, T, block, most_shared)
    queries = warps * warp_queries(HS)
    blocks = ceil(T / queries)
    if blocks > MOST_BLOCKS[1]:
        raise InputError(f"T {T:,}: variant online takes at most {MOST_BLOCKS[1] * queries:,}")
    defines = (*heads_defines(NH, NKV, HS), ("AO_WARPS", warps), ("AO_KEYS", keys))
    shared = shared_bytes(HS, warps, keys)
    return Geometry("attention_forward_online", (B * NH, blocks), (32 * warps,), shared, defines)


def _online_tile(HS: int, T: int, block: int | None, most_shared: int) -> tuple[int, int]:
    """Warps of a block and keys of a tile: the largest that fit, without warps that T leaves idle.

    The largest is the one with most queries times keys, and of two equal ones that with more keys.
    """
    if block is None:
        useful = max(1, ceil(T / warp_queries(HS)))
        choices = [warps for warps in WARPS if warps < 2 * useful]
    else:
        choices = [block // 32]
    tiles = [(warps, keys) for warps in choices for keys in KEYS]
    tiles.sort(key=lambda tile: (-tile[0] * tile[1], -tile[1]))
    for warps, keys in tiles:
        if shared_bytes(HS, warps, keys) <= most_shared:
            return warps, keys
    smallest = min(shared_bytes(HS, *tile) for tile in tiles)
    todo = "use variant mha" if block is None else "use a smaller block"
    raise InputError(
        f"head size {HS}: the smallest tiles of variant online take {smallest:,} bytes of shared "
        f"memory, this GPU has {most_shared:,} for them: {todo}"
    )


# --- tensor cores


class AttentionTile(NamedTuple):
    """A block of the mma kernel, and the time it takes."""

    warps: int
    frags: int  # of 16 queries, that a warp has
    blocks: int  # that a multiprocessor holds
    alone: int  # clocks for 64 keys when the multiprocessor has no other block
    together: int  # and of each block when it has all of them

    @property
    def queries(self) -> int:
        return 16 * self.warps * self.frags


# By the size of a head. 32 queries a warp read K and V half as often from shared memory; 16 fill a
# GPU with fewer rows, and leave registers for larger heads.
MMA_TILES = {
    64: (AttentionTile(4, 2, 2, 1700, 950), AttentionTile(4, 1, 3, 850, 520)),
    128: (AttentionTile(4, 1, 2, 1700, 950),),
    256: (AttentionTile(4, 1, 2, 3400, 1900),),
}


@lru_cache(maxsize=1024)
def mma_geometry(
    B: int,
    T: int,
    NH: int,
    causal: bool,
    *,
    sms: int,
    most_shared: int,
    HS: int = TENSOR_HEADS[0],
    serves: int = 1,
    tile: AttentionTile | None = None,
) -> tuple[Geometry, int]:
    """The launch of `mma` for B sequences, the longest of T rows; and `together`'s heads.

    sms, most_shared: the GPU's multiprocessors, and the bytes of shared memory that a block can
    have. serves: heads of Q that share a head of K. tile: instead of the fastest one. Raises
    InputError for too large a grid.
    """
    if tile is None:
        tile = min(MMA_TILES[HS], key=lambda tile: _clocks(tile, B, T, NH, causal, sms))
    grid = _grid(B, T, NH, tile.queries)
    stage = mma_stage(HS)
    queries = 0 if HS in TENSOR_HEADS else tile.queries * _row_bytes(HS)  # that stay there
    stages = 3 if room(most_shared, tile.blocks) >= 3 * stage + queries else 2
    defines = (
        ("ATT_CAUSAL", int(causal)),
        *tensor_heads_defines(HS, serves),
        ("ATT_WARPS", tile.warps),
        ("ATT_FRAGS", tile.frags),
        ("ATT_STAGES", stages),
        ("ATT_BLOCKS", tile.blocks),
    )
    shared = stages * stage + queries
    geometry = Geometry("attention_mma", grid, (32 * tile.warps,), shared, defines)
    return geometry, together(B, T, NH, causal, HS, serves)


@lru_cache(maxsize=1024)
def two_part_geometry(
    B: int,
    T: int,
    NH: int,
    causal: bool,
    one_scale: bool,
    *,
    most_shared: int,
    HS: int = TENSOR_HEADS[0],
    serves: int = 1,
) -> tuple[Geometry, int]:
    """As `mma_geometry`, for two-part matrices: one tile, 4 warps of 16 queries for each half.

    one_scale: all rows have the same scale. Raises InputError also where no tile fits.
    """
    warps, stage = 4, 2 * mma_stage(HS)
    queries = stage // 2  # bytes of 64 queries
    grid = _grid(B, T, NH, 16 * warps)
    blocks = 2 if causal and one_scale and room(most_shared, 2) >= 2 * stage + queries else 1
    stages = 3 if room(most_shared, blocks) >= 3 * stage + queries else 2
    defines = (
        ("ATT_CAUSAL", int(causal)),
        *tensor_heads_defines(HS, serves),
        ("ATT_ONE_SCALE", int(one_scale)),
        ("ATT_WARPS", warps),
        ("ATT_STAGES", stages),
        ("ATT_BLOCKS", blocks),
    )
    shared = stages * stage + queries
    if shared > most_shared:
        raise InputError(
            f"head size {HS}: two-part matrices take {shared:,} bytes of shared memory, this GPU "
            f"has {most_shared:,}: use float32 and variant online"
        )
    geometry = Geometry("attention_fp32_mma", grid, (64 * warps,), shared, defines)
    return geometry, together(B, 2 * T, NH, causal, HS, serves)


def hopper_geometry(
    B: int,
    T: int,
    NH: int,
    causal: bool,
    *,
    sms: int,
    HS: int = TENSOR_HEADS[0],
    serves: int = 1,
) -> tuple[Geometry, int]:
    """As `mma_geometry`, for `hopper`, whose blocks take several tiles each.

    Raises InputError for more tiles than the kernel can count.
    """
    tiles = _hopper_tiles(B, T, NH, HOPPER_TILE)
    grid, block = (min(tiles, sms),), (HOPPER_THREADS,)
    defines = (("ATT_CAUSAL", int(causal)), *tensor_heads_defines(HS, serves))
    geometry = Geometry("attention_hopper", grid, block, HOPPER_SHARED[HS], defines)
    return geometry, together(B, T, NH, causal, HS, serves)


def alternate_geometry(
    B: int, T: int, NH: int, causal: bool, *, sms: int, serves: int = 1
) -> tuple[Geometry, int]:
    """As `hopper_geometry`, for blocks whose warpgroups take alternate keys of 64 queries."""
    head, tiles = ALTERNATE_HEAD, _hopper_tiles(B, T, NH, ALTERNATE_TILE)
    grid, block = (min(tiles, sms),), (HOPPER_THREADS,)
    defines = (("ATT_CAUSAL", int(causal)), *tensor_heads_defines(head, serves))
    geometry = Geometry("attention_hopper_alternate", grid, block, ALTERNATE_SHARED, defines)
    return geometry, together(B, T, NH, causal, head, serves)


class Rate(NamedTuple):
    """How long a Hopper kernel takes, in us on an NVIDIA H200, for heads of 64 channels."""

    queries: int  # of a tile
    warpgroups: int  # that share the keys of a query
    start: float
    step: float  # 128 keys of a tile, of each of these warpgroups
    more: float  # for each further tile of a block

    def time(self, B: int, T: int, NH: int, causal: bool, sms: int, rows: int) -> float:
        """Estimate for B sequences of at most T rows, and `rows` rows in all."""
        tiles = NH * min(B * ceil(T / self.queries), rows // self.queries + B)
        longest = ceil(T / (128 * self.warpgroups))
        rounds = ceil(tiles / sms)
        if causal:  # a tile sees half of the keys on average, and blocks with short tiles get more
            mean = (ceil(T / 128) + self.warpgroups) / (2 * self.warpgroups)
            steps = max(longest, rounds, tiles / sms * mean)
        else:
            steps = rounds * longest
        return self.start + self.step * steps + self.more * max(0.0, tiles / sms - 1)

    def after(self, sequences: int, T: int, NH: int, sms: int) -> float:
        """The same for 128 keys of T rows each, all of which see many keys before them."""
        tiles = NH * sequences * ceil(T / self.queries)
        return ceil(tiles / sms) * self.step / self.warpgroups


WHOLE_KEYS, ALTERNATE_KEYS = Rate(HOPPER_TILE, 1, 3.5, 1.2, 1.4), Rate(64, 2, 2.9, 1.5, 0.7)


@lru_cache(maxsize=1024)
def alternates(B: int, T: int, NH: int, causal: bool, sms: int, rows: int) -> bool:
    """Whether blocks with alternate keys are faster than those with all keys of a query."""
    sizes = (B, T, NH, causal, sms, rows)
    return ALTERNATE_KEYS.time(*sizes) < WHOLE_KEYS.time(*sizes)


@lru_cache(maxsize=1024)
def cached_hopper_geometry(
    B: int, T: int, NH: int, N: int, P: int, *, sms: int, HS: int, serves: int
) -> tuple[Geometry, int]:
    """As `hopper_geometry`, or `alternate_geometry` where that is faster, over a kv_cache.

    N: rows of all B sequences, of which none has more than T, so that about N / T have any. P: the
    most keys of a sequence; how many it has is known on the device alone.
    """
    tiles, those = _hopper_tiles(B, T + HOPPER_TILE, NH, ALTERNATE_TILE), ceil(N / T)
    rates = (rate.after(those, T, NH, sms) for rate in (ALTERNATE_KEYS, WHOLE_KEYS))
    if HS == ALTERNATE_HEAD and next(rates) < next(rates):
        geometry, _ = alternate_geometry(those, T, NH, True, sms=sms, serves=serves)
    else:
        geometry, _ = hopper_geometry(those, T, NH, True, sms=sms, HS=HS, serves=serves)
    kernel = geometry.kernel.replace("attention", "attention_cached")
    geometry = geometry._replace(kernel=kernel, grid=(min(tiles, sms),))
    return geometry.with_defines((("ATT_CACHED", 1),)), together(those, P, NH, True, HS, serves)


@lru_cache(maxsize=1024)
def hopper_two_part_geometry(
    B: int,
    T: int,
    NH: int,
    causal: bool,
    one_scale: bool,
    *,
    sms: int,
    serves: int = 1,
) -> tuple[Geometry, int]:
    """As `hopper_geometry`, for two-part matrices."""
    head, tiles = HOPPER_TWO_PART_HEAD, _hopper_tiles(B, T, NH, HOPPER_TWO_PART_TILE)
    defines = (
        ("ATT_CAUSAL", int(causal)),
        *tensor_heads_defines(head, serves),
        ("ATT_ONE_SCALE", int(one_scale)),
    )
    geometry = Geometry(
        "attention_fp32_hopper",
        (min(tiles, sms),),
        (HOPPER_TWO_PART_THREADS,),
        HOPPER_TWO_PART_SHARED,
        defines,
    )
    return geometry, together(B, 2 * T, NH, causal, head, serves)


def _hopper_tiles(B: int, T: int, NH: int, queries: int) -> int:
    """How many tiles of queries there are; InputError for more than the kernels can count."""
    tiles = B * NH * ceil(T / queries)
    if tiles > HOPPER_MOST_TILES:
        raise InputError(
            f"B {B:,}, T {T:,} and {NH:,} heads make {tiles:,} tiles, variant hopper counts to "
            f"{HOPPER_MOST_TILES:,}: use smaller batches"
        )
    return tiles


def mma_stage(HS: int) -> int:
    """Bytes of shared memory for K and V of 64 keys, or of 32 where heads have 256 channels."""
    return 2 * (64 if HS in TENSOR_HEADS else 32) * _row_bytes(HS)


def _row_bytes(HS: int) -> int:
    """Of a row there, which has 16 bytes more than its numbers."""
    return 2 * HS + 16


def tensor_heads_defines(HS: int, serves: int) -> Defines:
    """The same of a kernel on tensor cores; serves: heads of Q that share a head of K."""
    return ("ATT_SIZE", HS), ("ATT_SERVES", serves)


def _grid(B: int, T: int, NH: int, queries: int) -> tuple[int]:
    """A block for every `queries` of a head; InputError for more than a grid can have."""
    blocks = B * NH * ceil(T / queries)
    if blocks > MOST_BLOCKS[0]:
        raise InputError(
            f"B {B:,}, T {T:,} and {NH:,} heads make a grid of {blocks:,} blocks, CUDA takes "
            f"{MOST_BLOCKS[0]:,}: use smaller batches"
        )
    return (blocks,)


def together(
    B: int, T: int, NH: int, causal: bool, HS: int = TENSOR_HEADS[0], serves: int = 1
) -> int:
    """How many heads' tiles of queries are interleaved in the order of blocks.

    Without a mask all tiles take equally long, and each head follows the one before. With a causal
    mask the last tile of each head takes longest and comes first, of as many heads as have their K
    and V in the L2 cache.
    """
    if not causal:
        return 1
    parts = ceil(B * NH // serves * T * 4 * HS / CACHED)  # 2 HS values of 2 bytes for a key
    return ceil(B * NH / parts)


def _clocks(tile: AttentionTile, B: int, T: int, NH: int, causal: bool, sms: int) -> float:
    """Estimated clocks for a tile of 64 keys on the multiprocessor that has most blocks.

    With a causal mask a block visits about half of the keys.
    """
    tiles = ceil(T / tile.queries)
    blocks = B * NH * tiles / sms
    if causal:
        return max(tile.alone, blocks * (tiles + 1) / (2 * tiles) * tile.together)
    rounds, rest = divmod(ceil(blocks), tile.blocks)
    last = max(tile.alone, rest * tile.together) if rest else 0
    return rounds * tile.blocks * tile.together + last
