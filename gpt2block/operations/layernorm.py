"""LayerNorm forward: five kernels of the documents, and two beyond them."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

import numpy as np

from gpt2block.operations._rows import share
from gpt2block.operations._types import Geometry, Inputs, Operation, Sizes, Variant

BLOCKS = (32, 64, 128, 256, 512, 1024)
KEPT = 64  # bytes of a row that a thread of kernel 6 keeps in registers, at most
MAX_THREADS = 1024  # of a block
KEPT_BY_MOST = 32  # where a row takes so many threads, which leaves each of them 64 registers
NARROW = "narrow"  # the variant whose out is narrower than gamma and beta
MANY = 2**31  # rows: a team of `narrow` is as for so many of them, whatever their number is
TEAMS = 512  # threads on an SM that hold rows of `narrow` at the same time
HELD = 96  # registers for a thread's part of gamma, beta and its rows of x, in a block of 128
MOST_EACH = 2  # rows of a team


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


@lru_cache(maxsize=1024)
def narrow_geometry(
    float_x: bool, rows: int, C: int, width: int, sms: int, split: bool = False
) -> Geometry:
    """Of variant `narrow` for `rows` of C channels, `width` elements a vector.

    split: x of float, out in two parts. How a row is shared out follows from C and width alone, so
    that its bits do; teams take several rows where there are more than `sms` multiprocessors hold
    at once. Raises InputError when a row does not fit in registers.
    """
    shape = share(MANY, C, width, sms)
    values = shape.held * width
    room = HELD if shape.block <= 128 else HELD - 16
    each = 1
    while (
        each < MOST_EACH
        and each * TEAMS * sms < rows * shape.threads
        and 2 * values + 2 * each * values * (4 if float_x else 2) // 4 <= room
    ):
        each *= 2
    defines = (
        ("LN_WIDTH", width),
        ("LN_THREADS", shape.threads),
        ("LN_VECTORS", shape.held),
        ("LN_ROWS", shape.rows),
        ("LN_EACH", each),
    )
    kernel = OPERATION.variant(NARROW).kernels[2 if split else 1 if float_x else 0]
    return Geometry(kernel, (ceil(rows / (shape.rows * each)),), (shape.block,), defines=defines)


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
            "layernorm/ladder.cu",
            ("layernorm_forward_kernel1",),
            "a thread a row, loops over C",
            BLOCKS,
            block=64,
        ),
        Variant(
            "2",
            "layernorm/ladder.cu",
            ("mean_kernel", "rstd_kernel", "normalization_kernel"),
            "three kernels: a block a row with a tree in shared memory, then a thread an element",
            BLOCKS,
        ),
        Variant(
            "3",
            "layernorm/warp.cu",
            ("layernorm_forward_kernel3",),
            "a warp a row by cooperative groups, all steps in one kernel, streaming hints",
            BLOCKS,
            block=512,
        ),
        Variant(
            "4",
            "layernorm/warp.cu",
            ("layernorm_forward_kernel4",),
            "as 3 with var = E[x²] - E[x]²: one pass over x less",
            BLOCKS,
            block=512,
        ),
        Variant(
            "5",
            "layernorm/ladder.cu",
            ("layernorm_forward_kernel5",),
            "a block a row, reduced in two stages: warps, then the first warp",
            BLOCKS,
            block=128,
        ),
        Variant(
            "6",
            "layernorm/rows.cu",
            ("layernorm_forward_kernel6",),
            "rows in registers, 16-byte loads, x read once; float32, float16 and bfloat16",
            BLOCKS,
            block=64,
            source="beyond the documents",
        ),
        Variant(
            NARROW,
            "layernorm/narrow.cu",
            ("layernorm_narrow", "layernorm_narrow_float", "layernorm_narrow_split"),
            "for tensor cores: float γ and β, out in 16 bits or in two parts of them, a few rows a "
            "team, overlapping launches",
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
            "layernorm/skeleton.cu",
            ("layernorm768_kernel", "layernorm_kernel"),
            "what the ten-step block runs: a block a row, without mean and rstd",
            source="ten-step block",
        ),
    ),
)
