"""Softmax over rows: its variants, and the launch of each."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Any

import numpy as np

from gpt2block.checks import check_flag
from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    check,
    contiguous,
    device_attribute,
    launch_at,
    output,
)
from gpt2block.cuda.kernels import Geometry
from gpt2block.errors import InputError
from gpt2block.ops._rows import THREADS, VALUES, share
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant, check_block
from gpt2block.ops.warm import call

FILE = "softmax/ladder.cu"
BLOCKS = (32, 64, 128, 256, 512, 1024)
LONGEST_IN_REGISTERS = VALUES * THREADS


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    shape = (sizes["B"], sizes["NH"], sizes["T"], sizes["T"])
    return (rng.standard_normal(shape, dtype=np.float32) + np.float32(0.5),)


def _scores(sizes: Sizes) -> int:
    return sizes["B"] * sizes["NH"] * sizes["T"] ** 2


@lru_cache(maxsize=1024)
def geometry(
    variant: Variant, rows: int, n: int, width: int, sms: int, block: int | None, causal: bool
) -> Geometry:
    """For `rows` of n values, `width` a load (4 or 1), on a GPU with `sms` multiprocessors.

    `block` None: the best there is; for the variant `rows` it is the threads that share a row.
    """
    (kernel,) = variant.kernels
    mask = ("SOFTMAX_CAUSAL", int(causal))
    if variant.name == "rows":
        shape = share(rows, n, width, sms, block)
        held = 1 << (shape.held - 1).bit_length()  # few kernels for many lengths
        defines = (
            mask,
            ("SOFTMAX_WIDTH", width),
            ("SOFTMAX_THREADS", shape.threads),
            ("SOFTMAX_HELD", held),
            ("SOFTMAX_ROWS", shape.rows),
        )
        return Geometry(kernel, (shape.grid,), (shape.block,), defines=defines)
    block = block or variant.block
    if variant.name == "three_pass":
        return Geometry(kernel, (rows,), (block,), defines=(mask, ("SOFTMAX_BLOCK", block)))
    if variant.name == "online_warp":
        return Geometry(kernel, (ceil(rows / (block // 32)),), (block,), defines=(mask,))
    return Geometry(kernel, (rows,), (block,), defines=(mask, ("SOFTMAX_WIDTH", width)))


MAX_ROWS = 2**31 - 1
MAX_N = 2**30


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    causal: bool = False,
    variant: str | int | None = None,
    block: int | None = None,
) -> Bound:
    """inputs (scores (..., n),), with `causal` (..., T, T); out as scores, or scores itself.

    Without a variant: rows in registers where they fit, else online_block.
    """
    (scores,) = inputs
    causal = check_flag("causal", causal)
    check("scores", scores)
    n = scores.shape[-1]
    if causal and scores.shape[-2:] != (n, n):
        raise InputError(f"scores: expected (..., T, T) with causal, got {scores.shape}")
    rows = scores.size // n
    if rows > MAX_ROWS or n > MAX_N:
        raise InputError(
            f"scores: at most {MAX_ROWS:,} rows of {MAX_N:,} values, got {scores.shape}"
        )
    out = output(out, scores.shape, apart={}, in_place={"scores": scores})

    if variant is None:
        variant = "rows" if n <= LONGEST_IN_REGISTERS else "online_block"
    chosen = OPERATION.variant(variant)
    if block is not None:
        check_block(OPERATION.name, chosen, block)
    width = 1 if n % 4 or scores.data.ptr % 16 or out.data.ptr % 16 else 4
    sms = device_attribute("MultiProcessorCount")
    where = geometry(chosen, rows, n, width, sms, block, causal)
    args = (scores, out, rows, n)
    return Bound(out, (launch_at(FILE, where, args),))


OPERATION = Operation(
    name="softmax",
    document="named with the LayerNorm kernels",
    idea="y = exp(x - max) / Σ exp(x - max) over each row",
    sizes={"B": 2, "NH": 12, "T": 1024},
    variants=(
        Variant(
            "three_pass",
            FILE,
            ("softmax_forward_kernel1",),
            "a block a row: maximum, sum, quotient, each a pass over x",
            BLOCKS,
        ),
        Variant(
            "online_warp",
            FILE,
            ("softmax_forward_kernel2",),
            "a warp a row: maximum and sum in one pass",
            BLOCKS,
        ),
        Variant(
            "online_block",
            FILE,
            ("softmax_forward_kernel3",),
            "a block a row, 16-byte loads: rows of any length",
            BLOCKS,
        ),
        Variant(
            "rows",
            FILE,
            ("softmax_forward_kernel4",),
            "rows in registers: x is read once",
            tuple(block for block in BLOCKS if block <= THREADS),
        ),
    ),
    make=_make,
    traffic=lambda sizes: 8 * _scores(sizes),
    flops=lambda sizes: 5 * _scores(sizes),
    bound="memory",
    attrs={},
    binder=bind,
)


def softmax(
    scores: CudaArray,
    causal: bool = False,
    variant: str | int | None = None,
    block: int | None = None,
    out: CudaArray | None = None,
) -> CudaArray:
    """`reference.softmax` on a float32 CuPy array; in place with `out=scores`. Raises InputError.

    With `causal` row t of each (T, T) sees columns 0..t: 0 is written to the others, and what
    stood there is never read. What a row of -inf alone sees becomes NaN, as in NumPy.
    Without a variant: the fastest that fits.
    """
    if out is not scores:
        (scores,) = contiguous(scores)
    return call(bind, (scores,), out, causal=causal, variant=variant, block=block).out
