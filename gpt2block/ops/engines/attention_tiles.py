"""Launch geometry of attention kernels: queries and keys per tile, grids, bytes of shared memory.

Variant `online`, in float32, keeps tiles of Q, K and V in shared memory; `attention_cached` uses
the same tiles. Tensor-core kernels keep a ring of tiles of K and V in shared memory, and the
queries in registers or in shared memory. These kernels take heads of 64, 128 or 256 channels.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from gpt2block.cuda.kernels import Defines, Geometry, defines_of, float_define
from gpt2block.errors import InputError
from gpt2block.ops.call import Call, Refusal, needs
from gpt2block.ops.products import room

MAX_BLOCKS = 2**31 - 1, 65535  # maximum blocks of a grid: along x; along y or z
WARPS = (4, 2, 1)  # warps per block of variant `online`, fastest first
KEYS = (64, 32)  # keys per tile of variant `online`, fastest first

ONE_BLOCK = 64 << 10  # bytes of shared memory per block that are all of a multiprocessor
ONE_TILE = 256  # channels per head above which K and V share memory
TENSOR_HEADS = (64, 128)  # channels per head that all tensor-core kernels support
MMA_HEADS = (*TENSOR_HEADS, 256)  # channels per head that variant mma supports in 16 bits
HEADS_WITH_NORMS = 64, 128, 256  # channels per head that attention_append takes
WGMMA_TILE = 128  # queries per tile, and keys per tile, of variant wgmma
# Threads of wgmma's kernels: two consumer warpgroups, 1 warp that copies, 3 warps that write the
# kv_cache
WGMMA_THREADS = 384
# WGMMA_SHARED: bytes of shared memory per block, by channels per head. The memory holds tiles of K
# and V (eight for 64 channels, four for 128), two tiles of queries, a tile of output, and barriers.
WGMMA_SHARED = {64: 181408, 128: 230496}
# Constants of the kernel whose two warpgroups process alternate groups of 128 keys: channels per
# head, queries per tile, and bytes of shared memory, including the second warpgroup's sums.
ALTERNATE_HEAD, ALTERNATE_TILE, ALTERNATE_SHARED = 64, 64, 199840
WGMMA_MAX_TILES = 2**30 - 1  # maximum tiles per launch: range of the kernels' counters
WGMMA_HI_LO_HEAD = 64  # channels per head that wgmma supports for a HiLoMatrix
WGMMA_HI_LO_TILE = 64  # queries per tile, and keys per tile, for a HiLoMatrix
# WGMMA_HI_LO_SHARED: bytes of shared memory per block. The memory holds eight tiles of K and V, two
# tiles of queries, the sums that the second warpgroup passes to the first, barriers and padding.
WGMMA_HI_LO_SHARED = 184480
CACHED = 32 << 20  # bytes of K and V that the L2 cache is assumed to keep


# --- float32


def with_scores(geometry: Geometry, c: Call) -> Geometry:
    """Return `geometry` with compile-time constants for the call's softmax scale and window."""
    window: Defines = () if c.window is None else (("ATT_WINDOW", c.window),)
    return geometry.with_defines((*float_define("ATT_SCALE", c.softmax_scale), *window))


def mma_refusal(head_size: int, instead: str, hi_lo: bool = False) -> Refusal | None:
    """Return a refusal unless variant mma supports these heads, of a HiLoMatrix with `hi_lo`."""
    heads = TENSOR_HEADS if hi_lo else MMA_HEADS
    takes = f"head size {head_size}: tensor cores take {', '.join(map(str, heads))}{instead}"
    return Refusal.first((head_size not in heads, takes))


def wgmma_refusal(head_size: int) -> Refusal | None:
    """Return a refusal unless variant wgmma supports these heads, on this GPU."""
    takes = f"takes {' and '.join(map(str, TENSOR_HEADS))}: use variant mma"
    return Refusal.first(
        needs("has_wgmma", ": use variant mma"),
        (head_size not in TENSOR_HEADS, f"head size {head_size}: {takes}"),
    )


def append_refusal(head_size: int) -> Refusal | None:
    """Return a refusal unless attention_append supports these heads."""
    takes = ", ".join(map(str, HEADS_WITH_NORMS))
    why = f"head size {head_size}: takes {takes}: use qk_norm_append"
    return Refusal.first((head_size not in HEADS_WITH_NORMS, why))


def heads_defines(NH: int, NKV: int, HS: int) -> Defines:
    """Compile-time constants of float32 kernels: heads of Q, heads of K and V, head size."""
    return ("NH", NH), ("NKV", NKV), ("HS", HS)


def warp_queries(HS: int) -> int:
    """Queries per warp of variant `online`: fewer for larger heads, to keep sums in registers."""
    return 32 if HS <= 64 else 16 if HS <= 128 else 8 if HS <= 256 else 4


def one_tile(HS: int, max_shared: int) -> bool:
    """Whether K and V of variant `online` share memory, instead of each having their own."""
    return HS > ONE_TILE or shared_bytes(HS, WARPS[-1], KEYS[-1]) > max_shared


def shared_bytes(HS: int, warps: int, keys: int, one: bool = False) -> int:
    """Bytes of shared memory per block of variant `online`: Q, K, V, and 32 weights per query.

    one: whether K and V have the same bytes (`one_tile`).
    """
    queries = warps * warp_queries(HS)
    stride, values = 4 * (ceil(HS / 4) | 1), 32 * ceil(HS / 32)
    of_key = max(stride, values) if one else stride + values
    return 4 * (queries * stride + keys * of_key + queries * 48)


def one_tile_define(HS: int, one: bool) -> Defines:
    """Return the constant of lib/attention/online.cuh for `one_tile`; () for its default."""
    return (("AO_ONE_TILE", 1),) if one and HS <= ONE_TILE else ()


@lru_cache(maxsize=1024)
def online_geometry(
    B: int, T: int, NH: int, HS: int, *, NKV: int, block: int | None, max_shared: int
) -> Geometry:
    """Return the launch geometry of variant `online` for B sequences of length T.

    block: threads per block, or None for the best number. max_shared: bytes of shared memory that
    a block can have. Raises InputError if no tile fits in shared memory or the grid is too large.
    """
    one = one_tile(HS, max_shared)
    warps, keys = _online_tile(HS, T, block, max_shared, one)
    queries = warps * warp_queries(HS)
    blocks = ceil(T / queries)
    if blocks > MAX_BLOCKS[1]:
        raise InputError(f"T {T:,}: variant online takes at most {MAX_BLOCKS[1] * queries:,}")
    sizes = ("AO_WARPS", warps), ("AO_KEYS", keys), *one_tile_define(HS, one)
    defines, shared = (*heads_defines(NH, NKV, HS), *sizes), shared_bytes(HS, warps, keys, one)
    return Geometry("attention_forward_online", (B * NH, blocks), (32 * warps,), shared, defines)


def _online_tile(HS: int, T: int, block: int | None, max_shared: int, one: bool) -> tuple[int, int]:
    """Return (warps per block, keys per tile) of the largest tile that fits in shared memory.

    Fewer than half of the warps are idle. The largest tile has the largest product of warps and
    keys; among equal products, the most keys.
    """
    if block is None:
        useful = max(1, ceil(T / warp_queries(HS)))
        choices = [warps for warps in WARPS if warps < 2 * useful]
    else:
        choices = [block // 32]
    tiles = [(warps, keys) for warps in choices for keys in KEYS]
    tiles.sort(key=lambda tile: (-tile[0] * tile[1], -tile[1]))
    for warps, keys in tiles:
        if shared_bytes(HS, warps, keys, one) <= max_shared:
            return warps, keys
    smallest = min(shared_bytes(HS, *tile, one) for tile in tiles)
    todo = "use variant mha" if block is None else "use a smaller block"
    raise InputError(
        f"head size {HS}: the smallest tiles of variant online take {smallest:,} bytes of shared "
        f"memory, this GPU has {max_shared:,} for them: {todo}"
    )


# --- geometry of the tensor-core kernels


class AttentionSizes(NamedTuple):
    """Sizes of attention over B sequences of up to T rows, on tensor cores."""

    B: int
    T: int
    NH: int  # heads of Q
    causal: bool
    HS: int = TENSOR_HEADS[0]  # channels per head
    serves: int = 1  # heads of Q that share a head of K

    @property
    def defines(self) -> Defines:
        """The compile-time constants of all tensor-core kernels."""
        return (("ATT_CAUSAL", int(self.causal)), *tensor_heads_defines(self.HS, self.serves))

    def tiles(self, queries: int) -> int:
        """Return the number of a head's tiles, which have `queries` rows each."""
        return self.B * self.NH * ceil(self.T / queries)

    def together(self, itemsize: int = 2) -> int:
        """Number of heads that consecutive blocks process in turn, one query tile of each head.

        Without a mask all tiles take equally long, and the heads follow one another. With a causal
        mask the last tile of a head takes longest and comes first. As many heads are interleaved as
        have room for their K and V, of `itemsize` bytes per value, in the L2 cache.
        """
        if not self.causal:
            return 1
        heads, of_key = self.B * self.NH, 2 * itemsize * self.HS  # bytes of K and V per key
        return ceil(heads / ceil(heads // self.serves * self.T * of_key / CACHED))


class AttentionTile(NamedTuple):
    """Tile sizes of a block of variant `mma`, and its estimated time in clocks."""

    warps: int
    frags: int  # fragments per warp, each 16 queries
    blocks: int  # blocks that fit on a multiprocessor
    alone: int  # clocks per 64 keys if the block is alone on a multiprocessor
    together: int  # clocks per block for 64 keys if `blocks` blocks share a multiprocessor

    @property
    def queries(self) -> int:
        return 16 * self.warps * self.frags

    def clocks(self, of: AttentionSizes, sms: int) -> float:
        """Estimated clocks, per 64 keys, of the multiprocessor with the most blocks.

        With a causal mask a block processes about half of the keys.
        """
        tiles = ceil(of.T / self.queries)
        blocks = of.B * of.NH * tiles / sms
        if of.causal:
            return max(self.alone, blocks * (tiles + 1) / (2 * tiles) * self.together)
        rounds, rest = divmod(ceil(blocks), self.blocks)
        last = max(self.alone, rest * self.together) if rest else 0
        return rounds * self.blocks * self.together + last


# MMA_TILES: candidate tiles, by channels per head. Compared with 16 queries per warp, 32 queries
# halve the reads of K and V from shared memory per query. With 16 queries per warp, fewer rows fill
# a GPU, and more registers remain for larger heads.
MMA_TILES = {
    64: (AttentionTile(4, 2, 2, 1700, 950), AttentionTile(4, 1, 3, 850, 520)),
    128: (AttentionTile(4, 1, 2, 1700, 950),),
    256: (AttentionTile(4, 1, 2, 3400, 1900),),
}


@lru_cache(maxsize=1024)
def mma_geometry(
    of: AttentionSizes, *, sms: int, max_shared: int, tile: AttentionTile | None = None
) -> tuple[Geometry, int]:
    """Return the geometry of `mma`, and how many heads take turns (`AttentionSizes.together`).

    sms: multiprocessors of the GPU. max_shared: bytes of shared memory that a block can have.
    tile: used instead of the fastest tile. Raises InputError if the grid is too large.
    """
    tile = tile or min(MMA_TILES[of.HS], key=lambda tile: tile.clocks(of, sms))
    keys = mma_keys(of.HS)
    if _mma_shared(of.HS, tile, keys) > max_shared:
        keys, tile = keys // 2, tile if of.HS in TENSOR_HEADS else tile._replace(warps=2)
    grid = _grid(of, tile.queries)
    stage = mma_stage(of.HS, keys)
    queries = _mma_shared(of.HS, tile, keys) - 2 * stage
    stages = 3 if room(max_shared, tile.blocks) >= 3 * stage + queries else 2
    defines = (
        *of.defines,
        *defines_of(ATT_WARPS=tile.warps, ATT_FRAGS=tile.frags, ATT_STAGES=stages),
        *defines_of(ATT_BLOCKS=tile.blocks if max_shared > ONE_BLOCK else 1),
        *keys_define(of.HS, keys),
    )
    shared = stages * stage + queries
    return Geometry("attention_mma", grid, (32 * tile.warps,), shared, defines), of.together()


@lru_cache(maxsize=1024)
def hi_lo_geometry(of: AttentionSizes, one_scale: bool, *, max_shared: int) -> tuple[Geometry, int]:
    """Return the values of `mma_geometry` for a kernel that reads qkv from a HiLoMatrix.

    Two groups of 4 warps process the 64 queries of a tile. one_scale: whether all rows have the
    same scale.
    Raises InputError if the grid is too large or the tile does not fit in shared memory.
    """
    warps, queries = 4, mma_stage(of.HS)  # queries: bytes of 64 queries
    keys = 64 if 2 * 2 * mma_stage(of.HS) + queries <= max_shared else 32
    stage = 2 * mma_stage(of.HS, keys)
    grid = _grid(of, 16 * warps)
    blocks = 2 if of.causal and one_scale and room(max_shared, 2) >= 2 * stage + queries else 1
    stages = 3 if room(max_shared, blocks) >= 3 * stage + queries else 2
    defines = (
        *of.defines,
        *defines_of(ATT_ONE_SCALE=int(one_scale), ATT_WARPS=warps, ATT_STAGES=stages),
        *defines_of(ATT_BLOCKS=blocks),
        *keys_define(of.HS, keys),
    )
    shared = stages * stage + queries
    if shared > max_shared:
        raise InputError(
            f"head size {of.HS}: hi/lo matrices take {shared:,} bytes of shared memory, this GPU "
            f"has {max_shared:,}: use float32 and variant online"
        )
    return Geometry("attention_fp32_mma", grid, (64 * warps,), shared, defines), of.together(4)


@lru_cache(maxsize=1024)
def wgmma_geometry(of: AttentionSizes, *, sms: int) -> tuple[Geometry, int]:
    """Return the geometry of variant `wgmma`, and how many heads take turns.

    A block processes several tiles. Raises InputError if there are more tiles than it can count.
    """
    shared = WGMMA_SHARED[of.HS]
    return _of_tiles("attention_wgmma", of, WGMMA_TILE, shared, sms), of.together()


@lru_cache(maxsize=1024)
def alternate_geometry(of: AttentionSizes, *, sms: int) -> tuple[Geometry, int]:
    """Return the two values of `wgmma_geometry` for two warpgroups that alternate between keys.

    Each warpgroup processes half of the keys.
    """
    kernel, shared = "attention_wgmma_alternate", ALTERNATE_SHARED
    return _of_tiles(kernel, of, ALTERNATE_TILE, shared, sms), of.together()


@lru_cache(maxsize=1024)
def wgmma_hi_lo_geometry(of: AttentionSizes, one_scale: bool, *, sms: int) -> tuple[Geometry, int]:
    """Return the same two values as `wgmma_geometry`, for a qkv that is a HiLoMatrix."""
    kernel, shared = "attention_fp32_wgmma", WGMMA_HI_LO_SHARED
    geometry = _of_tiles(kernel, of, WGMMA_HI_LO_TILE, shared, sms)
    return geometry.with_defines((("ATT_ONE_SCALE", int(one_scale)),)), of.together(4)


def _of_tiles(kernel: str, of: AttentionSizes, queries: int, shared: int, sms: int) -> Geometry:
    """Return the geometry of a wgmma kernel whose blocks process tiles of `queries` rows in turn.

    shared: bytes of shared memory per block. Raises InputError if there are too many tiles.
    """
    grid = (min(_wgmma_tiles(of, queries), sms),)
    return Geometry(kernel, grid, (WGMMA_THREADS,), shared, of.defines)


class Rate(NamedTuple):
    """Times of a Hopper attention kernel for heads of 64 channels, in us on an NVIDIA H200."""

    queries: int  # queries per tile
    warpgroups: int  # warpgroups among which the keys of a query are divided
    start: float  # us per launch
    step: float  # us in which a warpgroup processes 128 keys for a tile
    more: float  # additional us for each tile that a block computes after its first tile

    def time(self, of: AttentionSizes, sms: int, rows: int) -> float:
        """Estimated µs of a launch for B sequences of at most T rows each, `rows` rows in total."""
        tiles = of.NH * min(of.B * ceil(of.T / self.queries), rows // self.queries + of.B)
        longest = ceil(of.T / (128 * self.warpgroups))
        rounds = ceil(tiles / sms)
        if of.causal:  # a tile sees half of the keys on average; short tiles balance the load
            mean = (ceil(of.T / 128) + self.warpgroups) / (2 * self.warpgroups)
            steps = max(longest, rounds, tiles / sms * mean)
        else:
            steps = rounds * longest
        return self.start + self.step * steps + self.more * max(0.0, tiles / sms - 1)

    def after(self, of: AttentionSizes, sms: int) -> float:
        """Estimated µs for 128 earlier keys per sequence, which all T rows of the sequence see."""
        return ceil(of.tiles(self.queries) / sms) * self.step / self.warpgroups


WHOLE_KEYS, ALTERNATE_KEYS = Rate(WGMMA_TILE, 1, 3.5, 1.2, 1.4), Rate(64, 2, 2.9, 1.5, 0.7)


@lru_cache(maxsize=1024)
def alternates(of: AttentionSizes, sms: int, rows: int) -> bool:
    """Whether the Hopper kernel that divides keys between two warpgroups is estimated faster."""
    return ALTERNATE_KEYS.time(of, sms, rows) < WHOLE_KEYS.time(of, sms, rows)


@lru_cache(maxsize=1024)
def cached_wgmma_geometry(of: AttentionSizes, N: int, P: int, *, sms: int) -> tuple[Geometry, int]:
    """Return the faster of `wgmma_geometry` and `alternate_geometry`, for keys in a kv_cache.

    N: rows of all B sequences together. P: maximum number of keys of a sequence. Only the device
    knows the actual numbers: the estimate is for N / T sequences of T rows, the maximum.
    """
    tiles = _wgmma_tiles(of._replace(T=of.T + WGMMA_TILE), ALTERNATE_TILE)
    of = of._replace(B=ceil(N / of.T))
    few = of.HS == ALTERNATE_HEAD and ALTERNATE_KEYS.after(of, sms) < WHOLE_KEYS.after(of, sms)
    geometry, _ = (alternate_geometry if few else wgmma_geometry)(of, sms=sms)
    kernel = geometry.kernel.replace("attention", "attention_cached")
    geometry = geometry._replace(kernel=kernel, grid=(min(tiles, sms),))
    return geometry.with_defines((("ATT_CACHED", 1),)), of._replace(T=P).together()


def _wgmma_tiles(of: AttentionSizes, queries: int) -> int:
    """Return the number of query tiles. Raises InputError if kernels cannot count so many tiles."""
    tiles = of.tiles(queries)
    if tiles > WGMMA_MAX_TILES:
        raise InputError(
            f"B {of.B:,}, T {of.T:,} and {of.NH:,} heads make {tiles:,} tiles, variant wgmma "
            f"counts to {WGMMA_MAX_TILES:,}: use smaller batches"
        )
    return tiles


def mma_keys(HS: int) -> int:
    """Keys per tile of the kernels for `mma.sync`, if two stages and the queries fit."""
    return 64 if HS in TENSOR_HEADS else 32


def mma_stage(HS: int, keys: int = 64) -> int:
    """Bytes of a ring stage: 16-bit rows of K and V for `keys` keys."""
    return 2 * keys * _row_bytes(HS)


def _mma_shared(HS: int, tile: AttentionTile, keys: int) -> int:
    """Least bytes of shared memory per block: two stages, and queries not kept in registers."""
    queries = 0 if HS in TENSOR_HEADS else tile.queries * _row_bytes(HS)
    return 2 * mma_stage(HS, keys) + queries


def keys_define(HS: int, keys: int) -> Defines:
    """Return the constant of lib/attention/mma_tile.cuh for keys per tile; () for its default."""
    return () if keys == mma_keys(HS) else (("ATT_KEYS", keys),)


def _row_bytes(HS: int) -> int:
    """Bytes of a row in shared memory: HS values of 16 bits, and 16 bytes of padding."""
    return 2 * HS + 16


def tensor_heads_defines(HS: int, serves: int) -> Defines:
    """Compile-time constants of a tensor-core kernel. serves: number of Q heads per head of K."""
    return ("ATT_SIZE", HS), ("ATT_SERVES", serves)


def _grid(of: AttentionSizes, queries: int) -> tuple[int]:
    """Return a grid, one block per head and `queries` rows. Raises InputError if too large."""
    blocks = of.tiles(queries)
    if blocks > MAX_BLOCKS[0]:
        raise InputError(
            f"B {of.B:,}, T {of.T:,} and {of.NH:,} heads make a grid of {blocks:,} blocks, CUDA "
            f"takes {MAX_BLOCKS[0]:,}: use smaller batches"
        )
    return (blocks,)
