"""The product of the tensor-core tier: its variants, and the launches of matmul/mma*.cu."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

import numpy as np

from gpt2block.cuda.kernels import Defines
from gpt2block.operations import _hopper_gemm
from gpt2block.operations._tensor_cores import room
from gpt2block.operations._types import Geometry, Inputs, Operation, Sizes, Variant

FILE = "matmul/mma.cu"
SPLIT_FILE = "matmul/mma_two_part.cu"
ROWS_FILE = "matmul/two_part.cu"

# What an SM does in a clock, about: multiply-adds, bytes from the L2 cache, of shared memory, and
# to memory. And the clocks of a step of 16 of K, however small the tile.
MULTIPLY_ADDS = 1050
L2_BYTES = 28
SHARED_BYTES = 112
STORED_BYTES = 32
STEP = 40
FEWEST_STAGES = 3
WARPS = 4  # of a block of split_rows, a row each


def _make(s: Sizes, rng: np.random.Generator) -> Inputs:
    a = rng.standard_normal((s["M"], s["K"]), dtype=np.float32)
    w = rng.standard_normal((s["K"], s["N"]), dtype=np.float32) / np.float32(s["K"] ** 0.5)
    return a, w


OPERATION = Operation(
    name="gemm",
    document="GPT-2",
    idea="[residual +] [gelu](a W + bias), 16 bits in, sums in float32",
    sizes={"M": 1024, "K": 768, "N": 3072},
    variants=(
        Variant(
            "mma",
            FILE,
            ("gemm_mma",),
            "tiles on tensor cores (mma.sync), one ring of slices through all tiles of a block",
        ),
        Variant(
            "hopper",
            _hopper_gemm.FILE,
            (_hopper_gemm.KERNEL,),
            "TMA and wgmma: one warpgroup loads, two multiply in turn, so that epilogues are free",
        ),
    ),
    beside=(
        Variant(
            "split",
            SPLIT_FILE,
            ("gemm_split_mma",),
            "float accuracy: three products of float16 parts, sums promoted every 128 of K",
        ),
        Variant(
            "split hopper",
            _hopper_gemm.SPLIT_FILE,
            (_hopper_gemm.SPLIT_KERNEL,),
            "the same by TMA and wgmma: sums are promoted while the cross terms are multiplied",
        ),
        Variant(
            "split rows",
            ROWS_FILE,
            ("split_rows",),
            "a warp a row: its largest magnitude makes the scale, then both parts",
        ),
    ),
    make=_make,
    traffic=lambda s: s["weight"] * s["K"] * s["N"] + s["itemsize"] * s["M"] * (s["K"] + s["N"]),
    flops=lambda s: 2 * s["M"] * s["K"] * s["N"],
    bound="either",
    attrs={},
    dtypes=("bfloat16", "float16"),
    matrices=(1,),
    layout="NK",
)


class Tile(NamedTuple):
    """A block's tile, and how its warps share it: the constants of kernels_cu/matmul/mma.cuh."""

    rows: int
    columns: int
    warps: tuple[int, int]  # along rows and columns
    slice: int  # of K
    stages: int  # at most
    early: int  # slices of the weights asked for before the kernel before has ended
    blocks: int = 1  # on an SM


# Few rows: many bytes on their way. 64x96, 128x144 and 128x192 give 1,024 rows of GPT-2's products
# 128 tiles each, one for nearly every SM of 132. Many rows: warps of 64x64 or near it, for shared
# memory's sake, and tiles as large as the registers hold, for the L2 cache's.
TILES = (
    Tile(16, 32, (1, 4), 128, 8, 6),
    Tile(32, 32, (2, 2), 128, 8, 4),
    Tile(64, 48, (2, 2), 128, 6, 3),
    Tile(64, 96, (2, 2), 64, 8, 3),
    Tile(128, 128, (2, 2), 64, 3, 1, blocks=2),
    Tile(128, 144, (4, 2), 64, 6, 2),
    Tile(128, 192, (2, 4), 64, 5, 1),
    Tile(128, 256, (2, 4), 64, 4, 1),
)

# With two parts of each matrix and three sums for each output.
SPLIT_TILES = (
    Tile(16, 32, (1, 4), 64, 8, 6),
    Tile(32, 32, (2, 2), 64, 8, 4),
    Tile(64, 48, (2, 2), 64, 6, 3),
    Tile(64, 96, (2, 4), 64, 5, 2),
    Tile(128, 64, (4, 2), 64, 4, 1),
    Tile(128, 96, (4, 2), 64, 4, 1),
)


@lru_cache(maxsize=1024)
def geometry(
    M: int,
    N: int,
    K: int,
    *,
    gelu: bool = False,
    residual: bool = False,
    float_out: bool = False,
    sms: int,
    most_shared: int,
    tile: Tile | None = None,
) -> Geometry:
    """The launch of gemm_mma for a (M, K) and w (N, K).

    sms, most_shared: the GPU's multiprocessors, and the bytes of shared memory that a block of it
    may ask for. tile: instead of the best of `TILES`. The results are the same bits for any.
    """
    choice = (tile,) if tile else TILES
    chosen = _chosen(choice, M, N, K, sms, most_shared, 1)
    ends = _hopper_gemm.epilogue(gelu, residual, "GEMM_FLOAT_OUT", float_out)
    return _launched("gemm_mma", chosen, M, N, sms, 1, ends)


@lru_cache(maxsize=1024)
def split_geometry(
    M: int,
    N: int,
    K: int,
    *,
    gelu: bool = False,
    residual: bool = False,
    split_out: bool = False,
    sms: int,
    most_shared: int,
    tile: Tile | None = None,
) -> Geometry:
    """The launch of gemm_split_mma; as `geometry`, with the tiles `SPLIT_TILES`."""
    choice = (tile,) if tile else SPLIT_TILES
    chosen = _chosen(choice, M, N, K, sms, most_shared, 2)
    ends = _hopper_gemm.epilogue(gelu, residual, "GEMM_SPLIT_OUT", split_out)
    return _launched("gemm_split_mma", chosen, M, N, sms, 2, ends)


def rows_geometry(rows: int, width: int) -> Geometry:
    """The launch of split_rows, `width` elements a load."""
    defines = (("SPLIT_WIDTH", width), ("SPLIT_ROWS", WARPS))
    return Geometry("split_rows", (ceil(rows / WARPS),), (32 * WARPS,), defines=defines)


def _chosen(
    choice: tuple[Tile, ...], M: int, N: int, K: int, sms: int, most_shared: int, parts: int
) -> Tile:
    fitting = [fit for each in choice if (fit := _fit(each, most_shared, parts))]
    return min(fitting, key=lambda each: _clocks(each, M, N, K, sms, parts))


def _launched(
    kernel: str, tile: Tile, M: int, N: int, sms: int, parts: int, ends: Defines
) -> Geometry:
    warps_m, warps_n = tile.warps
    defines = (
        ("GEMM_M", tile.rows),
        ("GEMM_N", tile.columns),
        ("GEMM_WARPS_M", warps_m),
        ("GEMM_WARPS_N", warps_n),
        ("GEMM_SLICE", tile.slice),
        ("GEMM_STAGES", tile.stages),
        ("GEMM_EARLY", tile.early),
        ("GEMM_BLOCKS", tile.blocks),
        *ends,
    )
    grid = min(_tiles(tile, M, N), sms * tile.blocks)
    shared = tile.stages * parts * _slice(tile)
    return Geometry(kernel, (grid,), (32 * warps_m * warps_n,), shared, defines)


def _tiles(tile: Tile, M: int, N: int) -> int:
    return ceil(M / tile.rows) * ceil(N / tile.columns)


def _slice(tile: Tile) -> int:
    """Bytes of one part of a slice in shared memory."""
    return 2 * tile.slice * (tile.rows + tile.columns)


def _clocks(tile: Tile, M: int, N: int, K: int, sms: int, parts: int) -> float:
    """Of the SM that has most tiles, about. Of two parts there are three products."""
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
    return ceil(_tiles(tile, M, N) / sms) * (ceil(K / 16) * step + store)


def _fit(tile: Tile, most_shared: int, parts: int) -> Tile | None:
    """The tile with as many blocks and stages as shared memory holds; None where it has no room."""
    for blocks in range(tile.blocks, 0, -1):
        stages = min(tile.stages, room(most_shared, blocks) // (parts * _slice(tile)))
        if stages >= FEWEST_STAGES:
            return tile._replace(stages=stages, blocks=blocks, early=min(tile.early, stages - 1))
    return None
