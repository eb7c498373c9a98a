"""Tiles and launch geometry of matmul/prompt/rmsnorm_mma.cu: RMSNorm and products by mma.sync."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from gpt2block.cuda.kernels import Geometry, defines_of, size_defines
from gpt2block.ops.products import count_tiles, room

FILE = "matmul/prompt/rmsnorm_mma.cu"

# Approximate rates of an SM, per clock.
MULTIPLY_ADDS = 1000  # multiply-adds of mma.sync per clock and SM
BYTES = 28  # bytes per clock that an SM reads from the L2 cache
MIN_STAGES = 4  # minimum slices in shared memory if an SM holds several blocks


class RmsnormTile(NamedTuple):
    """A block's tile and its division among warps: constants of
    matmul/prompt/rmsnorm_mma_tile.cuh."""

    rows: int
    columns: int
    warps: tuple[int, int, int]  # warps along rows, columns and K
    slice: int  # values along K in a slice
    stages: int  # maximum slices in shared memory
    blocks: int  # maximum blocks per SM


# Products of few rows are memory-bound: many slices are in flight, and the warps divide K. With
# many rows, tensor cores are the bound: a warp computes about 64x64 outputs, which reduces
# shared-memory traffic. Tiles of 16x192 and 128x224 divide the 2 · 11,008 columns of Llama's
# feed-forward evenly among 132 SMs.
TILES = (
    RmsnormTile(16, 32, (1, 1, 8), 128, 8, 1),
    RmsnormTile(16, 64, (1, 1, 4), 64, 6, 3),
    RmsnormTile(32, 32, (1, 1, 8), 128, 8, 1),
    RmsnormTile(32, 64, (1, 1, 4), 64, 6, 2),
    RmsnormTile(64, 32, (2, 1, 4), 64, 8, 1),
    RmsnormTile(16, 192, (1, 1, 8), 128, 4, 1),
    RmsnormTile(64, 64, (2, 1, 4), 64, 8, 1),
    RmsnormTile(64, 128, (1, 2, 4), 64, 6, 1),
    RmsnormTile(128, 128, (2, 2, 2), 64, 6, 1),
    RmsnormTile(128, 128, (2, 4, 1), 32, 6, 1),
    RmsnormTile(128, 224, (2, 4, 1), 64, 6, 1),
    RmsnormTile(128, 256, (2, 4, 1), 64, 6, 1),
)


def fits(N: int, K: int, x_stride: int, weight: int, layout: str) -> bool:
    """Whether the kernels support these sizes: each row must start on a multiple of 16 bytes.

    weight: bytes of a weight. layout: "KN" or "NK". The arrays must be aligned to 16 bytes, too.
    """
    row = N if layout == "KN" else K  # weights per row in memory
    return not (N % 8 or K % 8 or x_stride % 8 or row * weight % 16)


@lru_cache(maxsize=1024)
def geometry(
    matrices: int,
    M: int,
    N: int,
    K: int,
    *,
    weight: int,
    layout: str,
    sms: int,
    max_shared: int,
    norm: bool = True,
    residual: bool = False,
    tile: RmsnormTile | None = None,
) -> Geometry:
    """Return the geometry of rmsnorm_matmul_mma (one matrix) or rmsnorm_ffn_mma (two matrices).

    Each matrix has N columns. weight: bytes of a weight. layout: "KN" or "NK". sms: multiprocessors
    of the GPU. max_shared: bytes of shared memory that a block may request. norm: whether x is
    normalized. residual: whether a residual is added to x. tile: used instead of the best of
    `TILES`.
    """
    whole = [
        fit
        for candidate in (TILES if tile is None else (tile,))
        if (fit := _fit(candidate, weight, layout, max_shared, norm, residual))
        and not (weight == 1 and candidate.columns // candidate.warps[1] % 16)
    ]
    chosen = min(whole, key=lambda tile: _cost(tile, matrices, M, N, weight, sms))
    warps_m, warps_n, warps_k = chosen.warps
    defines = (
        *size_defines("MMA", chosen, "rows columns"),
        *defines_of(MMA_WARPS_M=warps_m, MMA_WARPS_N=warps_n, MMA_WARPS_K=warps_k),
        *size_defines("MMA", chosen, "slice stages blocks"),
        *defines_of(MMA_W_NK=int(layout == "NK"), MMA_NORM=int(norm), MMA_RESIDUAL=int(residual)),
    )
    kernel = "rmsnorm_matmul_mma" if matrices == 1 else "rmsnorm_ffn_mma"
    shared = max(chosen.stages * _stage(chosen, weight, layout, norm, residual), _end(chosen))
    grid = count_tiles(chosen, M, N * matrices)
    return Geometry(kernel, (grid,), (32 * warps_m * warps_n * warps_k,), shared, defines)


def _cost(tile: RmsnormTile, matrices: int, M: int, N: int, weight: int, sms: int) -> float:
    """Estimated clocks that the SM with the most tiles needs for each value along K."""
    multiply = tile.rows * tile.columns / MULTIPLY_ADDS
    load = (2 * tile.rows + weight * tile.columns) / BYTES
    return ceil(count_tiles(tile, M, N * matrices) / sms) * max(multiply, load)


def _stage(tile: RmsnormTile, weight: int, layout: str, norm: bool, residual: bool) -> int:
    """Bytes of shared memory for one slice along K of x, gamma, the residual and the weights."""
    chunks = tile.slice // 8
    x = 16 * tile.rows * (chunks + (2 if weight == 1 and layout == "NK" else 1))
    lines, wide = (tile.slice, tile.columns) if layout == "KN" else (tile.columns, tile.slice)
    weights = 16 * lines * (wide * weight // 16 | 1)
    return x * (1 + residual) + 2 * tile.slice * norm + weights


def _end(tile: RmsnormTile) -> int:
    """Bytes of shared memory in which warps of a block exchange sums after the last slice."""
    _, warps_n, warps_k = tile.warps
    return 4 * tile.rows * warps_k * (tile.columns + 8 + warps_n)


def _fit(
    tile: RmsnormTile, weight: int, layout: str, max_shared: int, norm: bool, residual: bool
) -> RmsnormTile | None:
    """Return `tile` with the blocks and slices that fit in shared memory; None if too few fit."""
    stage = _stage(tile, weight, layout, norm, residual)
    for blocks in range(tile.blocks, 0, -1):
        own = room(max_shared, blocks)
        stages = min(tile.stages, own // stage)
        if _end(tile) <= own and stages >= (2 if blocks == 1 else MIN_STAGES):
            return tile._replace(stages=stages, blocks=blocks)
    return None
