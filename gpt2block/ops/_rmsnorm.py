"""RMSNorm over rows on CUDA: kernels_cu/rmsnorm.cu."""

from __future__ import annotations

from typing import Any

from gpt2block.errors import InputError
from gpt2block.operations._types import check_block
from gpt2block.operations.rmsnorm import OPERATION, geometry
from gpt2block.ops._arrays import (
    Bound,
    CudaArray,
    alignment,
    check,
    checked_row_stride,
    contiguous,
    device_attribute,
    in_rows,
    launch_at,
    output,
    overlap,
    storage,
)
from gpt2block.ops._warm import call

MAX_ROWS = 2**31 - 1
MAX_C = 2**30


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    eps: float = 1e-6,
    variant: str = "rows",
    block: int | None = None,
) -> Bound:
    """inputs (x (..., C), weight (C,)), out (..., C), all of one dtype.

    The rows of x may lie apart, at one distance. block: the threads that share a row.
    """
    x, weight = inputs
    chosen = OPERATION.variant(variant)
    if block is not None:
        check_block(OPERATION.name, chosen, block)
    dtype = storage(x)
    check("x", x, dtype=dtype, strided=True)
    C = x.shape[-1]
    check("weight", weight, (C,), dtype)
    rows = x.size // C
    if rows > MAX_ROWS or C > MAX_C:
        raise InputError(f"x: at most {MAX_ROWS:,} rows of {MAX_C:,} channels, got {x.shape}")
    stride = checked_row_stride("x", x)
    out = output(out, x.shape, dtype)
    if overlap(x, out):
        raise InputError("out: overlaps x: expected another array, as this is not done in place")

    item = x.dtype.itemsize
    width = alignment(x.data.ptr, weight.data.ptr, out.data.ptr, item * C, item * stride) // item
    where = geometry(chosen, rows, C, width, device_attribute("MultiProcessorCount"), block)
    args = (x, weight, out, stride, float(eps), rows)
    return Bound(out, (launch_at(chosen.file, where, args, storage=dtype),))


def rmsnorm(
    x: CudaArray,
    weight: CudaArray,
    eps: float = 1e-6,
    variant: str = "rows",
    block: int | None = None,
    out: CudaArray | None = None,
) -> CudaArray:
    """`reference.rmsnorm` on float16, bfloat16 or float32 CuPy arrays; raises InputError.

    x (..., C), weight (C,) of the same dtype; sums are float32. A view whose rows lie at one
    distance, such as some columns of a matrix, is read where it is; any other is copied first.
    With `out` (..., C), not x itself, the result is written there.
    More threads share a row where there are few rows, so the same row may differ in its last bits
    in a batch of another size; `block`, the threads of a row, fixes it.
    """
    (weight,) = contiguous(weight)
    return call(bind, (in_rows(x), weight), out, eps=eps, variant=variant, block=block).out
