"""LayerNorm forward: five kernels of the documents, and one beyond them."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import numpy as np

from gpt2block.operations._types import Inputs, Operation, Sizes, Variant

BLOCKS = (32, 64, 128, 256, 512, 1024)
KEPT = 64  # bytes of a row that a thread of kernel 6 keeps in registers, at most
MAX_THREADS = 1024  # of a block
KEPT_BY_MOST = 32  # where a row takes so many threads, which leaves each of them 64 registers


class RowShape(NamedTuple):
    """How kernel 6 shares out a row: LN_WIDTH, LN_THREADS and LN_VECTORS of its source."""

    width: int  # elements a load
    threads: int  # a row
    vectors: int  # a thread; 0: too many for registers, the row is read three times


def row_shape(C: int, itemsize: int, alignment: int = 16) -> RowShape:
    """The widest loads that C and the alignment of the arrays (in bytes) allow, up to 16 bytes.

    Then the fewest threads that can keep the row, because a row of one warp needs no barrier.
    """
    width = 16 // itemsize
    while C % width or alignment % (width * itemsize):
        width //= 2
    vectors = C // width
    threads = 1
    row = C * itemsize
    while threads < MAX_THREADS and threads < vectors and (threads < 32 or threads * KEPT < row):
        threads *= 2
    held = ceil(vectors / threads)
    fits = held * width * itemsize <= (KEPT if threads < MAX_THREADS else KEPT_BY_MOST)
    return RowShape(width, threads, held if fits else 0)


def make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    """x (B, T, C), gamma (C,), beta (C,)."""
    B, T, C = sizes["B"], sizes["T"], sizes["C"]
    normal = (rng.standard_normal(shape) + 0.5 for shape in ((B, T, C), (C,), (C,)))
    return tuple(array.astype(np.float32) for array in normal)


OPERATION = Operation(
    name="layernorm",
    document="the LayerNorm kernels",
    idea="(x - mean) · rstd · γ + β over each row; mean and rstd are stored too",
    sizes={"B": 8, "T": 1024, "C": 768},
    variants=(
        Variant(
            "1",
            "layernorm_forward.cu",
            ("layernorm_forward_kernel1",),
            "a thread a row, loops over C",
            BLOCKS,
            block=64,
        ),
        Variant(
            "2",
            "layernorm_forward.cu",
            ("mean_kernel", "rstd_kernel", "normalization_kernel"),
            "three kernels: a block a row with a tree in shared memory, then a thread an element",
            BLOCKS,
        ),
        Variant(
            "3",
            "layernorm_warp.cu",
            ("layernorm_forward_kernel3",),
            "a warp a row by cooperative groups, all steps in one kernel, streaming hints",
            BLOCKS,
            block=512,
        ),
        Variant(
            "4",
            "layernorm_warp.cu",
            ("layernorm_forward_kernel4",),
            "as 3 with var = E[x²] - E[x]²: one pass over x less",
            BLOCKS,
            block=512,
        ),
        Variant(
            "5",
            "layernorm_forward.cu",
            ("layernorm_forward_kernel5",),
            "a block a row, reduced in two stages: warps, then the first warp",
            BLOCKS,
            block=128,
        ),
        Variant(
            "6",
            "layernorm_rows.cu",
            ("layernorm_forward_kernel6",),
            "rows in registers, 16-byte loads, x read once; float32, float16 and bfloat16",
            BLOCKS,
            block=64,
            source="beyond the documents",
        ),
    ),
    make=make,
    traffic=lambda s: 2 * s["itemsize"] * s["B"] * s["T"] * s["C"],  # read x, write out
    flops=lambda s: 8 * s["B"] * s["T"] * s["C"],
    bound="memory",
    attrs={"eps": 1e-5},
    dtypes=("float32", "float16", "bfloat16"),
    beside=(
        Variant(
            "none",
            "layernorm.cu",
            ("layernorm768_kernel", "layernorm_kernel"),
            "what the ten-step block runs: a block a row, without mean and rstd",
            source="ten-step block",
        ),
    ),
)
