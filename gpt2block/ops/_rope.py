"""Rotary position embedding on CUDA: kernels_cu/llama/rope.cu."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from gpt2block.checks import check_flag
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    alignment,
    check,
    contiguous,
    device_attribute,
    element_strides,
    launch_at,
    output,
    storage,
)
from gpt2block.errors import InputError
from gpt2block.operations._types import check_block
from gpt2block.operations.rope import MOST_POSITIONS, OPERATION, exponent_step, geometry
from gpt2block.ops._warm import call

MAX_BATCH = 65535  # an axis of the grid
MAX_STRIDE = 2**31 - 1


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    start: int = 0,
    theta: float = 10000.0,
    half_split: bool = False,
    variant: str = "pairs",
    block: int | None = None,
) -> Bound:
    """inputs (x (T, H, D) or (B, T, H, D),), out as x, or x itself.

    x may have any strides but that of its last axis, where neighbours must be neighbours.
    """
    (x,) = inputs
    half_split = check_flag("half_split", half_split)
    chosen = OPERATION.variant(variant)
    if block is not None:
        check_block(OPERATION.name, chosen, block)
    dtype = storage(x)
    check("x", x, dtype=dtype, strided=True)
    B, T, H, D = _sizes(x)
    check_turn(start, theta, T)
    strides = _strides(x)
    if strides is None:
        raise InputError(
            f"x: expected neighbours along the last axis, got strides {x.strides} for shape "
            f"{x.shape}: use cupy.ascontiguousarray"
        )
    if out is None or not _same(x, out):
        out = output(out, x.shape, dtype, apart={"x": x})
    elif not _distinct(x):
        raise InputError("out: x has elements at one place in memory: expected another array")
    out_strides = _strides(out)
    if out_strides is None:
        raise InputError(f"x: expected at most {MAX_STRIDE:,} channels a position, got {x.shape}")

    item = x.dtype.itemsize
    half = D // 2 if half_split else D
    distances = (item * stride for stride in (half, *strides, *out_strides))
    width = alignment(x.data.ptr, out.data.ptr, *distances) // item
    sms = device_attribute("MultiProcessorCount")
    where = geometry(chosen, B, T, H, D, half_split, width, sms, block)
    both = (number for pair in zip(strides, out_strides, strict=True) for number in pair)
    args = (x, out, *both, int(start), *exponent_step(float(theta), D), T, H)
    return Bound(out, (launch_at(chosen.file, where, args, storage=dtype),))


def _sizes(x: CudaArray) -> tuple[int, int, int, int]:
    if x.ndim not in (3, 4):
        raise InputError(f"x: expected (T, H, D) or (B, T, H, D), got {x.shape}")
    B, T, H, D = x.shape if x.ndim == 4 else (1, *x.shape)
    if D % 2:
        raise InputError(f"x: head size D {D}: expected an even one, as channels turn in pairs")
    if B > MAX_BATCH:
        raise InputError(f"x: expected at most {MAX_BATCH:,} sequences in a call, got {B:,}")
    return B, T, H, D


def check_turn(start: Any, theta: Any, T: int) -> None:
    whole = isinstance(start, Integral) and not isinstance(start, bool)
    if not whole or not 0 <= start <= MOST_POSITIONS - T:
        raise InputError(
            f"start: expected a whole number from 0 to {MOST_POSITIONS - T:,} for {T:,} positions, "
            f"got {start!r}"
        )
    number = isinstance(theta, Real) and not isinstance(theta, bool)
    if not number or not 1 <= theta < math.inf or theta > 2.0**100:
        raise InputError(f"theta: expected a number from 1 to 2^100, got {theta!r}")


def _strides(x: CudaArray) -> tuple[int, int, int] | None:
    """In elements, of batch, position and head; None where the kernel cannot take them."""
    strides = element_strides(x) if x.ndim in (3, 4) else None
    if strides is None or any(abs(stride) > MAX_STRIDE for stride in strides[-2:]):
        return None
    batch, position, head = strides if x.ndim == 4 else (0, *strides)
    return batch, position, head


def _same(x: CudaArray, out: Any) -> bool:
    return isinstance(out, cupy.ndarray) and (
        (x.data.ptr, x.shape, x.strides, x.dtype)
        == (out.data.ptr, out.shape, out.strides, out.dtype)
    )


def _distinct(x: CudaArray) -> bool:
    """Whether every element has a place of its own, as far as strides tell."""
    reach = x.dtype.itemsize
    for stride, n in sorted((abs(s), n) for s, n in zip(x.strides, x.shape, strict=True) if n > 1):
        if stride < reach:
            return False
        reach = stride * n
    return True


def rope(
    x: CudaArray,
    start: int = 0,
    theta: float = 10000.0,
    half_split: bool = False,
    variant: str = "pairs",
    block: int | None = None,
    out: CudaArray | None = None,
) -> CudaArray:
    """`reference.rope` on a float16, bfloat16 or float32 CuPy array; raises InputError.

    x (T, H, D) or (B, T, H, D), D even; position t of it is start + t, at most 2²⁰ - 1. A view is
    read where it is, such as Q or K in rows of QKV, as long as its last axis has neighbours in
    memory; else it is copied first. The result is contiguous; with `out=x` it takes the place of x.
    """
    if isinstance(x, cupy.ndarray) and x.ndim and x.size and out is not x and _strides(x) is None:
        (x,) = contiguous(x)
    turn = {"start": start, "theta": theta, "half_split": half_split}
    return call(bind, (x,), out, **turn, variant=variant, block=block).out
