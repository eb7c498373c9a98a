"""The causal half of attention's scores: its variants, and the launch of each."""

from __future__ import annotations

from math import ceil

import numpy as np

from gpt2block.operations._types import Geometry, Inputs, Operation, Sizes, Variant

FILE = "trimat.cu"
PIPELINED = "trimat_pipelined.cu"
FILL = "trimat_fill"  # after each variant, when what stands above the diagonal matters
BLOCKS = (32, 64, 128, 256)
SIDE = 8  # of a thread's tile
TILE = 128  # side of a block's tile, from tri4 on
FILL_ROWS = 8  # that a block of trimat_fill takes, a warp each


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    shape = (sizes["B"], sizes["T"], 3, sizes["NH"], sizes["HS"])
    return (rng.standard_normal(shape, dtype=np.float32) + np.float32(0.5),)


def _outputs(sizes: Sizes) -> int:
    """Elements on and below the diagonal."""
    return sizes["B"] * sizes["NH"] * sizes["T"] * (sizes["T"] + 1) // 2


OPERATION = Operation(
    name="trimat",
    document="attention's causal scores",
    idea="out[i, j] = Q_i · K_j / sqrt(HS) for j ≤ i",
    sizes={"B": 8, "T": 1024, "NH": 12, "HS": 64},
    variants=(
        Variant(
            "naive",
            FILE,
            ("matmul_tri_naive",),
            "a thread an 8×8 tile, straight from global memory; tiles above the diagonal skipped",
            BLOCKS,
        ),
        Variant(
            "registers",
            FILE,
            ("matmul_tri_registers",),
            "8 values of Q and 8 of K in registers, 64 outer-product sums a step",
            BLOCKS,
        ),
        Variant(
            "tri3",
            FILE,
            ("matmul_tri3",),
            "the same with float4 loads and stores",
            BLOCKS,
        ),
        Variant(
            "tri4",
            FILE,
            ("matmul_tri4",),
            "16×16 threads a 128×128 tile, slices of 32 through shared memory",
        ),
        Variant(
            "tri5",
            PIPELINED,
            ("matmul_tri5",),
            "two buffers and cp.async, a grid of needed tiles only, no bank conflicts",
            source="beyond the documents",
        ),
    ),
    make=_make,
    traffic=lambda sizes: (
        4 * (2 * sizes["B"] * sizes["T"] * sizes["NH"] * sizes["HS"] + _outputs(sizes))
    ),
    flops=lambda sizes: 2 * sizes["HS"] * _outputs(sizes),
    bound="compute",
    attrs={"fill": None},
    beside=(
        Variant(
            "any", FILE, (FILL,), "writes what stands above the diagonal, where it is asked for"
        ),
    ),
)


def geometry(variant: Variant, B: int, T: int, NH: int, HS: int, threads: int) -> Geometry:
    """For B sequences of length T with NH heads of HS channels; `threads` of a block."""
    tiles = ceil(T / TILE)
    rows = threads // SIDE  # 8 tiles side by side, this many one above the other
    grid: tuple[int, ...] = (ceil(T / SIDE**2), ceil(T / (SIDE * rows)), B * NH)
    block: tuple[int, ...] = (SIDE, rows)
    if variant.name == "tri5":
        grid, block = (tiles * (tiles + 1) // 2, B * NH), (threads,)
    elif variant.name == "tri4":
        grid, block = (tiles, tiles, B * NH), (16, 16)
    (kernel,) = variant.kernels
    return Geometry(kernel, grid, block, defines=(("NH", NH), ("HS", HS)))


def fill_geometry(B: int, T: int, NH: int, HS: int) -> Geometry:
    """For trimat_fill."""
    grid = (ceil(B * NH * T / FILL_ROWS),)
    return Geometry(FILL, grid, (32 * FILL_ROWS,), defines=(("NH", NH), ("HS", HS)))
