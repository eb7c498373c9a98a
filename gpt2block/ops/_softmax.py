"""Softmax over rows on CUDA: kernels_cu/softmax/ladder.cu."""

from __future__ import annotations

from typing import Any

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
from gpt2block.errors import InputError
from gpt2block.operations._types import check_block
from gpt2block.operations.softmax import (
    FILE,
    LONGEST_IN_REGISTERS,
    OPERATION,
    geometry,
)
from gpt2block.ops._warm import call

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
