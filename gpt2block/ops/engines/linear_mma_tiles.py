"""Tiles and geometry of matmul/decode/mma_tiles.cu, the linear layer for decoding many rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from gpt2block.cuda.cards import gpu
from gpt2block.cuda.formats import GGUF
from gpt2block.cuda.kernels import HI_LO, Geometry, nonzero_defines, size_defines
from gpt2block.ops.call import Refusal
from gpt2block.ops.engines import linear_mma as mma
from gpt2block.ops.engines.linear_mma import BYTES, FLOAT, UNIT, splits
from gpt2block.ops.engines.rows import WARP
from gpt2block.ops.operands import ordered
from gpt2block.ops.products import Matmul, count_tiles, limits, room

FILE, KERNEL = "matmul/decode/mma_tiles.cu", "decode_mma_tiles"
GATED = f"{KERNEL}_up"  # the kernel for two matrices, whose columns alternate
PAD = 16  # floats of padding after each row of sums in shared memory
LONG_K = 2048  # minimum K for which a block reads so much of x that other tiles are faster
FILLED, FULL = 1.4, 2.0  # minimum blocks per multiprocessor: with large tiles; with small tiles


class MmaLinearTile(NamedTuple):
    """Compile-time constants that determine the speed of a kernel, but not its results."""

    rows: int  # rows of x per tile
    columns: int  # columns of the product (rows of w) per tile
    warps: tuple[int, int]  # warps along the rows and along the columns of a tile
    stages: int  # slices of K in shared memory
    chunks: int = 1  # chunks per slice of K; a chunk is 64 bytes of each row of w
    cluster: int = 1  # blocks per cluster, which divide K
    blocks: int = 1  # minimum blocks per multiprocessor (__launch_bounds__)
    groups: int = 1  # groups of warps per block, which divide K; without clusters


# Larger tiles read x and w less often from the L2 cache. More small tiles run at the same time:
# tensor cores wait less. With 4-byte weights, large tiles need too many registers.
SMALL = MmaLinearTile(32, 128, (2, 4), 4, blocks=2)  # tile for up to 32 rows of x
SLIM = MmaLinearTile(64, 32, (4, 1), 5, blocks=3)
SLIM_LONG = MmaLinearTile(64, 32, (4, 2), 5, blocks=2)  # tile for 4-byte weights and K >= LONG_K
EVEN = MmaLinearTile(64, 64, (2, 2), 5, blocks=2)  # largest tile for 4-byte weights
WIDE = MmaLinearTile(64, 96, (2, 3), 5, blocks=2)
LARGE = MmaLinearTile(64, 128, (2, 2), 4, blocks=2)
TILES = SMALL, SLIM, SLIM_LONG, EVEN, WIDE, LARGE
# Tiles for GPUs without clusters, where groups of warps divide K.
FINE = MmaLinearTile(16, 32, (1, 2), 4, groups=8)
MEDIUM = MmaLinearTile(32, 64, (2, 2), 4, groups=2)
# ALONE: {tile: maximum tiles per multiprocessor for which it is faster than larger tiles}.
ALONE = {FINE: FILLED, FINE._replace(groups=4): FILLED, MEDIUM: 3}
# Without asynchronous copies, registers hold the next slice.
WITHOUT_COPIES = {FINE._replace(groups=4, stages=2): 8, EVEN._replace(stages=2): math.inf}


def shared_bytes(tile: MmaLinearTile, K: int, dtype: str) -> int:
    """Return the bytes of dynamic shared memory per block: sums, and slices of x and w."""
    weight = BYTES.get(dtype, 1)
    parts, units = splits(K)
    block_k = ceil(parts / tile.cluster / tile.groups) * units * UNIT  # values of K per group
    # values of K per slice: a chunk has 64 bytes of a row of w, or of each half of hi/lo weights
    slice_k = tile.chunks * 64 * (1 + (dtype == HI_LO)) // weight
    stages = tile.stages if tile.groups > 1 else min(tile.stages, ceil(min(block_k, K) / slice_k))
    # The first group, if it is no cluster, adds its parts in one plane.
    planes = parts if tile.cluster > 1 else parts - ceil(parts / tile.groups) + 1
    sums = 4 * planes * ceil(tile.rows / tile.cluster) * (tile.columns + PAD)
    slices = tile.groups * stages * slice_k * (4 * tile.rows + weight * tile.columns)
    return ceil(sums / 128) * 128 + slices


@lru_cache(maxsize=1024)
def choose(
    M: int,
    N: int,
    K: int,
    dtype: str,
    *,
    clusters: bool,
    copies: bool = True,
    sms: int,
    max_shared: int,
    gated: bool = False,
) -> MmaLinearTile:
    """Return the tile for x (M, K) and weights (N, K) on a GPU with `sms` multiprocessors.

    dtype: dtype of the weights. clusters, copies: whether the GPU has clusters, and asynchronous
    copies. max_shared: maximum bytes of dynamic shared memory per block. gated: whether half of the
    N columns are of another matrix, on a GPU without clusters. The cluster is the smallest that
    divides the splits of K equally and lets the grid fill the GPU.
    """
    floats = BYTES.get(dtype) == FLOAT
    alone = {} if clusters else _alone_tiles(copies, gated, floats)
    if found := _alone(M, N, K, dtype, sms, max_shared, alone):
        return found
    parts = splits(K)[0]
    fitting = [n for n in (range(1, parts + 1) if clusters else (1,)) if parts % n == 0]

    def enough(tile: MmaLinearTile, full: float) -> list[int]:
        """Return cluster sizes with which the grid has `full` blocks, or else the largest size.

        Blocks of larger clusters need less memory for sums.
        """
        tiles = count_tiles(tile, M, N)
        return [n for n in fitting if tiles * n >= full] or fitting[-1:]

    tile, filled = _preferred(M, N, K, floats, sms, gated)
    # EVEN if SLIM needs a second wave of blocks
    grid = count_tiles(tile, M, N) * enough(tile, filled)[0]
    if floats and tile is SLIM and grid > tile.blocks * sms:
        tile, filled = EVEN, FILLED * sms
    candidates = (
        (candidate, blocks)
        for one, full in ((tile, filled), (SLIM, FULL * sms))  # SLIM if the tile does not fit
        for cluster in enough(one, full)
        for blocks in range(min(one.blocks, ceil(count_tiles(one, M, N) * cluster / sms)), 0, -1)
        for candidate in _pipelines(one._replace(cluster=cluster), dtype)
    )
    for candidate, blocks in candidates:
        if shared_bytes(candidate, K, dtype) <= room(max_shared, blocks):
            return candidate._replace(blocks=blocks)
    return SLIM._replace(stages=2, blocks=1)


def _preferred(
    M: int, N: int, K: int, floats: bool, sms: int, gated: bool
) -> tuple[MmaLinearTile, float]:
    """Return the fastest tile if it fits, and the blocks from which the grid fills the GPU.

    floats: whether weights have 4 bytes. Other arguments: as in `choose`.
    """
    wide, large = (EVEN, EVEN) if floats else (WIDE, LARGE)
    if gated or SMALL.rows >= M:
        return SMALL if SMALL.rows >= M else LARGE, FILLED * sms
    if count_tiles(wide, M, N) >= FILLED * sms:
        return wide, FILLED * sms
    if K >= LONG_K and SLIM.rows < M:
        return large, math.inf
    return SLIM_LONG if floats and K >= LONG_K else SLIM, FULL * sms


def _alone_tiles(copies: bool, gated: bool, floats: bool) -> Mapping[MmaLinearTile, float]:
    """Return tiles for GPUs without clusters, as ALONE. floats: whether weights have 4 bytes."""
    if floats:
        wide = {EVEN._replace(warps=(4, 2), stages=2, blocks=1): math.inf}
        return {} if copies else wide
    if gated:
        return {MEDIUM: ALONE[MEDIUM]}
    return ALONE if copies else WITHOUT_COPIES


def _alone(
    M: int,
    N: int,
    K: int,
    dtype: str,
    sms: int,
    max_shared: int,
    possible: Mapping[MmaLinearTile, float],
) -> MmaLinearTile | None:
    """Return the tile whose groups of warps divide K, or None if larger tiles are faster."""
    few = (tile for tile, most in possible.items() if count_tiles(tile, M, N) <= most * sms)
    stages = (tile._replace(stages=n) for tile in few for n in range(tile.stages, 1, -1))
    return next((t for t in stages if shared_bytes(t, K, dtype) <= max_shared), None)


def _pipelines(tile: MmaLinearTile, dtype: str) -> Iterator[MmaLinearTile]:
    """Yield variants of the tile with other slice sizes and stages, most bytes in flight first."""
    if dtype in BYTES and dtype != HI_LO and tile.warps[0] * tile.warps[1] % 4 == 0:
        yield tile._replace(chunks=2, stages=SMALL.stages)  # longer slices need fewer barriers
    for stages in range(tile.stages, 1, -1):
        yield tile._replace(stages=stages)


@lru_cache(maxsize=1024)
def geometry(
    M: int,
    N: int,
    K: int,
    dtype: str,
    tile: MmaLinearTile,
    operand: bool = False,
    to_operand: bool = False,
    gated: bool = False,
) -> Geometry:
    """Return the launch of the kernel for x (M, K) and weights (N, K) of `dtype`.

    operand, to_operand: whether x, and the result, are stored as 16-bit terms instead of floats.
    gated: whether half of the N columns are of another matrix.
    """
    warps_m, warps_n = tile.warps
    defines = (
        *size_defines("DECODE", tile, "rows columns"),
        ("DECODE_WARPS_M", warps_m),
        ("DECODE_WARPS_N", warps_n),
        *size_defines("DECODE", tile, "chunks stages cluster blocks"),
        *nonzero_defines(DECODE_OPERAND=operand, DECODE_OUT_OPERAND=to_operand, DECODE_UP=gated),
        *nonzero_defines(DECODE_GROUPS=tile.groups if tile.groups > 1 else 0),
    )
    grid = (tile.cluster * count_tiles(tile, M, N),)
    block = (WARP * warps_m * warps_n * tile.groups,)
    return Geometry(GATED if gated else KERNEL, grid, block, shared_bytes(tile, K, dtype), defines)


def plan(p: Matmul) -> Geometry | Refusal:
    """Return the launch of the kernel for a product, or the reason to refuse."""
    card, sizes = gpu(), (p.M, p.outputs, p.K, p.dtype)
    alone = card.has_clusters or not card.has_bf16 or p.dtype not in mma.TERM_DTYPES
    in_order = ordered(p.operand) or ordered(p.to_operand)
    refused = Refusal.first(
        (p.dtype == GGUF, "takes no GgufMatrix: use variant tiles"),
        (p.norm,
         "takes no gamma and beta: use variant mma, or layernorm's variant decode before it"),
        (in_order or (p.up and (alone or p.residual)),
         "takes and gives floats, or terms in their places, of one matrix: use variant wgmma"),
        mma.refusal(p.dtype, p.K, ": use variant matvec"),
    )  # fmt: skip
    copies = {"clusters": card.has_clusters, "copies": card.has_bf16}
    operands = p.operand is not None, p.to_operand is not None
    return refused or geometry(
        *sizes, choose(*sizes, **copies, **limits(mma.STATIC), gated=p.up), *operands, gated=p.up
    )
