"""Tiles and launch geometry of matmul/prompt/mma.cu and matmul/prompt/mma_hi_lo.cu, which
multiply matrices with mma.sync."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from gpt2block.cuda.kernels import Defines, Geometry, defines_of, nonzero_defines
from gpt2block.ops.products import count_tiles, room

FILE = "matmul/prompt/mma.cu"
KERNEL = "gemm_mma"
HI_LO_FILE = "matmul/prompt/mma_hi_lo.cu"
HI_LO_KERNEL = "gemm_split_mma"

# Approximate rates of an SM, per clock.
MULTIPLY_ADDS = 1050
L2_BYTES = 28  # bytes per clock that an SM reads from the L2 cache
SHARED_BYTES = 112  # bytes per clock that an SM reads from or writes to shared memory
STORED_BYTES = 32  # bytes per clock that an SM writes to device memory
STEP = 40  # minimum clocks per step of 16 values along K, for any tile
MIN_STAGES = 3
MUCH_SHARED = 200 << 10  # bytes of shared memory per block with which `TILES` alone are the fastest


class MmaGemmTile(NamedTuple):
    """A block's tile and its division among warps: constants of kernels_cu/lib/matmul/mma.cuh."""

    rows: int
    columns: int
    warps: tuple[int, int]  # warps along rows and columns
    slice: int  # values along K in a slice
    stages: int  # maximum slices in shared memory
    early: int  # slices of weights that are requested before the previous kernel has ended
    blocks: int = 1  # blocks per SM


# Tiles for few rows keep many bytes in flight. Tiles of 64x96, 128x144 and 128x192 divide each
# product of GPT-2 with 1,024 rows into 128 tiles, one for nearly every SM of 132. For many rows,
# tiles are as large as the registers allow, which reduces L2 traffic; about 64x64 outputs per warp
# reduce shared-memory traffic.
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

# More tiles for GPUs with less than MUCH_SHARED, such as 8.9 with 99 KB and 8.0 with 163 KB.
SMALL_TILES = (
    MmaGemmTile(64, 64, (2, 2), 64, 6, 3),
    MmaGemmTile(128, 96, (2, 2), 64, 3, 1),
)

# Tiles for two matrices. A warp has 32 columns of each.
GATED_TILES = (
    MmaGemmTile(16, 128, (1, 2), 64, 8, 4),
    MmaGemmTile(32, 128, (1, 2), 64, 8, 3),
    MmaGemmTile(64, 128, (2, 2), 64, 6, 3),
    MmaGemmTile(128, 128, (2, 2), 64, 3, 1, blocks=2),
)

# Tiles for HiLoMatrix operands, whose kernel keeps three sums per output.
HI_LO_TILES = (
    MmaGemmTile(16, 32, (1, 4), 64, 8, 6),
    MmaGemmTile(32, 32, (2, 2), 64, 8, 4),
    MmaGemmTile(64, 48, (2, 2), 64, 6, 3),
    MmaGemmTile(64, 96, (2, 4), 64, 5, 2),
    MmaGemmTile(128, 64, (4, 2), 64, 4, 1),
    MmaGemmTile(128, 96, (4, 2), 64, 4, 1),
)


def _of_two_slices(*tiles: MmaGemmTile) -> tuple[MmaGemmTile, ...]:
    return tuple(tile._replace(stages=2, early=1, blocks=1) for tile in tiles)


# Tiles for GPUs without asynchronous copies: registers hold a slice while another is multiplied.
WIDE, GATED_WIDE = MmaGemmTile(128, 128, (2, 4), 64, 2, 1), GATED_TILES[3]._replace(warps=(4, 2))
WITHOUT_COPIES = _of_two_slices(*TILES[:2], SMALL_TILES[0], TILES[3], WIDE)
GATED_WITHOUT_COPIES = _of_two_slices(GATED_TILES[0], GATED_TILES[2], GATED_WIDE)
HI_LO_WITHOUT_COPIES = _of_two_slices(*HI_LO_TILES[:2], MmaGemmTile(64, 64, (2, 4), 64, 2, 1))


@lru_cache(maxsize=1024)
def geometry(
    M: int,
    N: int,
    K: int,
    *,
    hi_lo: bool = False,
    gated: bool = False,
    gelu: bool = False,
    residual: bool = False,
    other_out: bool = False,
    scaled: bool = False,
    early: bool = True,
    copies: bool = True,
    sms: int,
    max_shared: int,
    tile: MmaGemmTile | None = None,
) -> Geometry:
    """Return the geometry of gemm_split_mma if `hi_lo`, else of gemm_mma. a: (M, K), w: (N, K).

    gated: whether there is a second matrix. other_out: whether the result is float32; with hi_lo,
    whether it is a hi/lo matrix. scaled: whether w has scales. early: whether w may be loaded
    before the previous kernel has ended. copies: whether the GPU has asynchronous copies. sms:
    multiprocessors of the GPU. max_shared: bytes of shared memory that a block may request. tile:
    used instead of the best tile. The result has the same bits for any tile.
    """
    parts, columns = 1 + hi_lo, N * (1 + gated)
    candidates = (tile,) if tile else _candidates(hi_lo, gated, copies, max_shared)
    memory = tuple(room(max_shared, blocks) for blocks in (1, 2))
    fitting = [fit for each in candidates if (fit := _fit(each, memory, parts))]
    tile = min(fitting, key=lambda each: _clocks(each, M, columns, K, sms, parts))
    warps_m, warps_n = tile.warps
    defines = (
        *defines_of(GEMM_M=tile.rows, GEMM_N=tile.columns, GEMM_WARPS_M=warps_m),
        *defines_of(GEMM_WARPS_N=warps_n, GEMM_SLICE=tile.slice, GEMM_STAGES=tile.stages),
        *defines_of(GEMM_EARLY=tile.early * early, GEMM_BLOCKS=tile.blocks),
        *epilogue(hi_lo, gelu, residual, other_out, scaled),
        *nonzero_defines(GEMM_GATED=gated),
    )
    grid = min(count_tiles(tile, M, columns), sms * tile.blocks)
    shared = tile.stages * parts * _slice(tile)
    kernel = HI_LO_KERNEL if hi_lo else KERNEL
    return Geometry(kernel, (grid,), (32 * warps_m * warps_n,), shared, defines)


def _candidates(hi_lo: bool, gated: bool, copies: bool, max_shared: int) -> tuple[MmaGemmTile, ...]:
    """Return the tiles from which `geometry` chooses. Arguments are as there."""
    if hi_lo:
        return HI_LO_TILES if copies else HI_LO_WITHOUT_COPIES
    if gated:
        return GATED_TILES if copies else GATED_WITHOUT_COPIES
    if not copies:
        return WITHOUT_COPIES
    return TILES if max_shared >= MUCH_SHARED else TILES + SMALL_TILES


def epilogue(hi_lo: bool, gelu: bool, residual: bool, other_out: bool, scaled: bool) -> Defines:
    """Compile-time constants that select the epilogue of an mma or wgmma kernel."""
    return (
        ("GEMM_GELU", int(gelu)),
        ("GEMM_RESIDUAL", int(residual)),
        ("GEMM_SPLIT_OUT" if hi_lo else "GEMM_FLOAT_OUT", int(other_out)),
        *nonzero_defines(GEMM_SCALED=scaled),
    )


def _slice(tile: MmaGemmTile) -> int:
    """Bytes of shared memory for a 16-bit slice of `a` and `w`. HiLoMatrix inputs need two."""
    return 2 * tile.slice * (tile.rows + tile.columns)


def _clocks(tile: MmaGemmTile, M: int, N: int, K: int, sms: int, parts: int) -> float:
    """Estimated clocks of the SM with the most tiles. parts: 2 for HiLoMatrix inputs, else 1."""
    sides, size = tile.rows + tile.columns, tile.rows * tile.columns
    warps_m, warps_n = tile.warps
    read = tile.rows * warps_n + tile.columns * warps_m  # rows that warps load from shared memory
    step = max(
        STEP * parts,
        16 * size * (2 * parts - 1) / MULTIPLY_ADDS,
        32 * sides * parts / L2_BYTES,
        32 * (read + sides) * parts / SHARED_BYTES,
    )
    store = 2 * parts * size / STORED_BYTES / tile.blocks  # clocks; blocks of an SM overlap
    tiles = ceil(M / tile.rows) * ceil(N / tile.columns)
    return ceil(tiles / sms) * (ceil(K / 16) * step + store)


def _fit(tile: MmaGemmTile, memory: tuple[int, ...], parts: int) -> MmaGemmTile | None:
    """Return `tile` with the blocks and slices that fit in shared memory, or None if too few fit.

    If few long slices fit, twice as many slices of half the length are faster.
    memory: bytes of shared memory per block with 1, 2, … blocks on a multiprocessor.
    """
    for blocks in range(tile.blocks, 0, -1):
        stages = min(tile.stages, memory[blocks - 1] // (parts * _slice(tile)))
        if stages == MIN_STAGES < tile.stages and tile.slice > 64:
            return _fit(tile._replace(slice=64, stages=2 * MIN_STAGES), memory, parts)
        if stages >= min(MIN_STAGES, tile.stages):
            return tile._replace(stages=stages, blocks=blocks, early=min(tile.early, stages - 1))
    return None
