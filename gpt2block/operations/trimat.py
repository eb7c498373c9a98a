"""The causal half of attention's scores: its variants, and the launch of each."""

from __future__ import annotations

from math import ceil

import numpy as np

from gpt2block.errors import InputError
from gpt2block.operations._tensor_cores import RESERVED
from gpt2block.operations._types import Geometry, Inputs, Operation, Sizes, Variant

FILE = "trimat/ladder.cu"
PIPELINED = "trimat/pipelined.cu"
MMA = "trimat/mma.cu"
FILL = "trimat_fill"  # after each variant, when what stands above the diagonal matters
BLOCKS = (32, 64, 128, 256)
SIDE = 8  # of a thread's tile
TILE = 128  # side of a block's tile, from tri4 on
FILL_ROWS = 8  # that a block of trimat_fill takes, a warp each

# Of tri6, on tensor cores.
MMA_LARGEST_HEAD = 128
MMA_THREADS = 128
MMA_BLOCKS = 3  # on an SM, at most: what its registers and shared memory hold
MOST_SPAN = 8  # tiles of K for one of Q
CACHED = 24 << 20  # bytes of Q and K that stay in the L2 cache while out passes through it
MOST_BLOCKS = 2**31 - 1  # of a grid


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
        Variant(
            "tri6",
            MMA,
            ("matmul_tri6",),
            "tensor cores at float accuracy: rows split in two of float16 as they arrive",
            block=MMA_THREADS,
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
    """For B sequences of length T with NH heads of HS channels; `threads` of a block.

    Of every variant but tri6, which has `mma_geometry`.
    """
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


def mma_geometry(
    B: int,
    T: int,
    NH: int,
    HS: int,
    *,
    sms: int,
    most_shared: int,
    span: int | None = None,
    together: int | None = None,
    tile: int | None = None,
) -> tuple[Geometry, tuple[int, int, int]]:
    """The launch of tri6, and its arguments after T: heads, span and together.

    sms, most_shared: the GPU's multiprocessors, and the bytes of shared memory that a block of it
    may ask for. span, together, tile: instead of the best; the results are the same bits for any.
    Raises InputError for more blocks than a grid can have.
    """
    heads, most_blocks = B * NH, MMA_BLOCKS if HS <= 64 else MMA_BLOCKS - 1
    tile = tile or (TILE if HS <= 64 else TILE // 2)
    tiles = ceil(T / tile)
    shared = 2 * tile * (4 * 16 * ceil(HS / 16) + 16) + 12 * tile
    blocks = max(1, min(most_blocks, (most_shared + RESERVED) // (shared + RESERVED)))
    if span is None:  # as long as every block of a full GPU has one
        span = max(1, min(MOST_SPAN, heads * tiles * (tiles + 1) // 2 // (blocks * sms)))
    if together is None:
        bands = ceil(8 * heads * T * HS / CACHED)
        together = ceil(heads / bands)
    whole, rest = divmod(tiles, span)
    segments = span * whole * (whole + 1) // 2 + rest * (whole + 1)
    if heads * segments > MOST_BLOCKS:
        raise InputError(
            f"B {B:,}, T {T:,} and {NH:,} heads make a grid of {heads * segments:,} blocks, CUDA "
            f"takes {MOST_BLOCKS:,}: use smaller batches"
        )
    defines = (("NH", NH), ("HS", HS), ("TRI_TILE", tile), ("TRI_BLOCKS", blocks))
    how = Geometry("matmul_tri6", (heads * segments,), (MMA_THREADS,), shared, defines)
    return how, (heads, span, together)


def fill_geometry(B: int, T: int, NH: int, HS: int) -> Geometry:
    """For trimat_fill."""
    grid = (ceil(B * NH * T / FILL_ROWS),)
    return Geometry(FILL, grid, (32 * FILL_ROWS,), defines=(("NH", NH), ("HS", HS)))
