"""Tiles and geometry of matmul/mma.cu and matmul/mma_two_part.cu, products by mma.sync."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from gpt2block.cuda.kernels import Defines, Geometry
from gpt2block.ops._products import count_tiles, room

FILE = "matmul/mma.cu"
KERNEL = "gemm_mma"
TWO_PART_FILE = "matmul/mma_two_part.cu"
TWO_PART_KERNEL = "gemm_split_mma"

# What an SM does in a clock, about: multiply-adds, bytes from the L2 cache, of shared memory, and
# to memory. And the clocks of a step of 16 of K, however small the tile.
MULTIPLY_ADDS = 1050
L2_BYTES = 28
SHARED_BYTES = 112
STORED_BYTES = 32
STEP = 40
FEWEST_STAGES = 3


class MmaGemmTile(NamedTuple):
    """A block's tile, and how its warps share it: the constants of kernels_cu/matmul/mma.cuh."""

    rows: int
    columns: int
    warps: tuple[int, int]  # along rows and columns
    slice: int  # of K
    stages: int  # at most
    early: int  # slices of the weights requested before the previous kernel has ended
    blocks: int = 1  # on an SM


# Few rows: many bytes in flight. 64x96, 128x144 and 128x192 give 1,024 rows of GPT-2's products
# 128 tiles each, one for nearly every SM of 132. Many rows: warps of 64x64 or near it, for shared
# memory's sake, and tiles as large as the registers hold, for the L2 cache's.
TILES = (
    MmaGemmTile(16, 32, (1, 4), 128, 8, 6),
    MmaGemmTile(32, 32, (2, 2), 128, 8, 4),
    MmaGemmTile(64, 48, (2, 2), 128, 6, 3),
    MmaGemmTile(64, 96, (2, 2), 64, 8, 3),
    MmaGemmTile(128, 128, (2, 2), 64, 3, 1, blocks=2),
    MmaGemmTile(128, 144, (4, 2), 64, 6, 2),
    MmaGemmTile(128, 192, (2, 4), 64, 5, 1),
    MmaGemmTile(128, 256, (2, 4), 64, 4, 1),
)

# For two-part matrices, with three sums for each output.
TWO_PART_TILES = (
    MmaGemmTile(16, 32, (1, 4), 64, 8, 6),
    MmaGemmTile(32, 32, (2, 2), 64, 8, 4),
    MmaGemmTile(64, 48, (2, 2), 64, 6, 3),
    MmaGemmTile(64, 96, (2, 4), 64, 5, 2),
    MmaGemmTile(128, 64, (4, 2), 64, 4, 1),
    MmaGemmTile(128, 96, (4, 2), 64, 4, 1),
)


@lru_cache(maxsize=1024)
def geometry(
    M: int,
    N: int,
    K: int,
    *,
    two_part: bool = False,
    gelu: bool = False,
    residual: bool = False,
    other_out: bool = False,
    scaled: bool = False,
    early: bool = True,
    sms: int,
    most_shared: int,
    tile: MmaGemmTile | None = None,
) -> Geometry:
    """The launch of gemm_mma, or gemm_split_mma for two-part matrices, for a (M, K) and w (N, K).

    other_out: whether the result is float32, or of two-part matrices a two-part matrix. scaled:
    whether w has scales. early: whether w may be loaded before the previous kernel has ended. sms,
    most_shared: the GPU's multiprocessors, and the bytes of shared memory that a block may request.
    tile: instead of the best one. The results are the same bits for any.
    """
    parts = 1 + two_part
    candidates = (tile,) if tile else TWO_PART_TILES if two_part else TILES
    memory = tuple(room(most_shared, blocks) for blocks in (1, 2))
    fitting = [fit for each in candidates if (fit := _fit(each, memory, parts))]
    tile = min(fitting, key=lambda each: _clocks(each, M, N, K, sms, parts))
    warps_m, warps_n = tile.warps
    defines = (
        ("GEMM_M", tile.rows),
        ("GEMM_N", tile.columns),
        ("GEMM_WARPS_M", warps_m),
        ("GEMM_WARPS_N", warps_n),
        ("GEMM_SLICE", tile.slice),
        ("GEMM_STAGES", tile.stages),
        ("GEMM_EARLY", tile.early * early),
        ("GEMM_BLOCKS", tile.blocks),
        *epilogue(two_part, gelu, residual, other_out, scaled),
    )
    grid = min(count_tiles(tile, M, N), sms * tile.blocks)
    shared = tile.stages * parts * _slice(tile)
    kernel = TWO_PART_KERNEL if two_part else KERNEL
    return Geometry(kernel, (grid,), (32 * warps_m * warps_n,), shared, defines)


def epilogue(two_part: bool, gelu: bool, residual: bool, other_out: bool, scaled: bool) -> Defines:
    """The constants of the epilogue, also of the kernels for Hopper."""
    return (
        ("GEMM_GELU", int(gelu)),
        ("GEMM_RESIDUAL", int(residual)),
        ("GEMM_SPLIT_OUT" if two_part else "GEMM_FLOAT_OUT", int(other_out)),
        *((("GEMM_SCALED", 1),) if scaled else ()),
    )


def _slice(tile: MmaGemmTile) -> int:
    """Bytes of one part of a slice in shared memory."""
    return 2 * tile.slice * (tile.rows + tile.columns)


def _clocks(tile: MmaGemmTile, M: int, N: int, K: int, sms: int, parts: int) -> float:
    """Clocks of the SM that has most tiles, about. Two-part operands make three products."""
    sides, size = tile.rows + tile.columns, tile.rows * tile.columns
    warps_m, warps_n = tile.warps
    read = tile.rows * warps_n + tile.columns * warps_m  # rows of shared memory
    step = max(
        STEP * parts,
        16 * size * (2 * parts - 1) / MULTIPLY_ADDS,
        32 * sides * parts / L2_BYTES,
        32 * (read + sides) * parts / SHARED_BYTES,
    )
    store = 2 * parts * size / STORED_BYTES / tile.blocks  # while other blocks multiply
    tiles = ceil(M / tile.rows) * ceil(N / tile.columns)
    return ceil(tiles / sms) * (ceil(K / 16) * step + store)


def _fit(tile: MmaGemmTile, memory: tuple[int, ...], parts: int) -> MmaGemmTile | None:
    """The tile with as many blocks and stages as shared memory holds; None where it has no room.

    memory: bytes for each of 1, 2, … blocks on a multiprocessor.
    """
    for blocks in range(tile.blocks, 0, -1):
        stages = min(tile.stages, memory[blocks - 1] // (parts * _slice(tile)))
        if stages >= FEWEST_STAGES:
            return tile._replace(stages=stages, blocks=blocks, early=min(tile.early, stages - 1))
    return None
