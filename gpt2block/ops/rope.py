"""Rotary position embedding: its variant, and the launch."""

from __future__ import annotations

import math
from functools import lru_cache
from math import ceil
from numbers import Integral, Real
from typing import Any

import numpy as np

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
from gpt2block.cuda.kernels import Geometry
from gpt2block.errors import InputError
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant, check_block
from gpt2block.ops.warm import call

FILE = "llama/rope.cu"
BLOCKS = (32, 64, 128, 256, 512)
FILLED = 256  # threads on an SM: with so many each may take several heads
MOST_POSITIONS = (
    2**20
)  # llama/rotation.cuh: further on its angles would leave its polynomials' range
_HELD = 8  # loads of a thread on their way
_LAST_AXIS = 64  # threads of a block along its third axis: CUDA's limit


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    shape = sizes["T"], sizes["H"], sizes["D"]
    return (rng.standard_normal(shape, dtype=np.float32) + np.float32(0.5),)


def exponent_step(theta: float, D: int) -> tuple[float, float]:
    """2 log2(theta) / D as the sum of two float32 numbers.

    Pair k turns by 2^(-k step) a position.
    """
    step = 2 * math.log2(theta) / D
    high = float(np.float32(step))
    return high, float(np.float32(step - high))


@lru_cache(maxsize=1024)
def geometry(
    variant: Variant,
    B: int,
    T: int,
    H: int,
    D: int,
    half_split: bool,
    width: int,
    sms: int,
    block: int | None = None,
) -> Geometry:
    """For B sequences of T positions and H heads of D channels, on `sms` multiprocessors.

    width: elements a load at most; few threads get fewer pairs each, as it is their arithmetic
    that is waited for. block: threads of a block at most.
    """
    (kernel,) = variant.kernels
    block = block or variant.block

    def across(width: int) -> int:
        """Threads for a head of a position."""
        return ceil(D // 2 / (width if half_split else max(1, width // 2)))

    heads, smallest = B * T * H, 1 if half_split else 2
    while width > smallest and heads * across(width // 2) <= FILLED * sms:
        width //= 2
    loads = 2 if half_split or width == 1 else 1
    together = 1  # heads a thread
    while 2 * together <= min(H, _HELD // loads) and (
        heads * across(width) >= 2 * together * FILLED * sms
    ):
        together *= 2
    x = min(across(width), block)
    y = min(ceil(H / together), block // x)
    z = min(T, max(1, block // (x * y)), _LAST_AXIS)
    defines = (
        ("ROPE_D", D),
        ("ROPE_HALF_SPLIT", int(half_split)),
        ("ROPE_WIDTH", width),
        ("ROPE_THREADS", x),
        ("ROPE_HEADS", together),
    )
    grid = (ceil(T / z), ceil(H / (y * together)), B)
    return Geometry(kernel, grid, (x, y, z), defines=defines)


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


OPERATION = Operation(
    name="rope",
    document="Llama operations",
    idea="(r, i) → (r cos a - i sin a, r sin a + i cos a), a = position / theta^(2k / D)",
    sizes={"T": 16, "H": 32, "D": 128},
    variants=(
        Variant(
            "pairs",
            FILE,
            ("rope_pairs",),
            "a thread the same pairs of several heads: sines and cosines are taken once for all",
            BLOCKS,
            block=256,
        ),
    ),
    make=_make,
    traffic=lambda s: 2 * s["itemsize"] * s["T"] * s["H"] * s["D"],
    flops=lambda s: 3 * s["T"] * s["H"] * s["D"],
    bound="memory",
    attrs={},
    dtypes=("float16", "bfloat16", "float32"),
    binder=bind,
)


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
