"""Rotary position embedding: a pair of channels turns by an angle that grows with its position.

(r, i) → (r cos a - i sin a, r sin a + i cos a), a = position / theta^(2k / D) for pair k. Kernel:
llama/rope.cu.
"""

from __future__ import annotations

import math
from functools import lru_cache
from math import ceil
from numbers import Integral, Real
from typing import Any, NamedTuple

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
    same_memory,
    storage,
)
from gpt2block.cuda.kernels import Geometry, Launch
from gpt2block.errors import InputError
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant, check_block
from gpt2block.ops.warm import call

FILE = "llama/rope.cu"
BLOCK = 256
BLOCKS = (32, 64, 128, 256, 512)
FILLED = 256  # threads on an SM: with so many each may take several heads
MOST_POSITIONS = 2**20  # beyond it, angles leave the range of the polynomials in llama/rotation.cuh
MAX_BATCH = 65535  # an axis of the grid
MAX_STRIDE = 2**31 - 1
_HELD = 8  # loads of a thread in flight
_LAST_AXIS = 64  # threads of a block along its third axis: CUDA's limit


def exponent_step(theta: float, D: int) -> tuple[float, float]:
    """2 log2(theta) / D as the sum of two float32 numbers.

    Pair k turns by 2^(-k step) a position.
    """
    step = 2 * math.log2(theta) / D
    high = float(np.float32(step))
    return high, float(np.float32(step - high))


@lru_cache(maxsize=1024)
def choose_geometry(
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

    width: elements a load at most; where there are few threads, each gets fewer pairs, as their
    arithmetic takes the longest. block: threads of a block at most.
    """
    block = block or BLOCK

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
    return Geometry("rope_pairs", grid, (x, y, z), defines=defines)


class Job(NamedTuple):
    """A checked call; strides of batch, position and head are in elements."""

    x: CudaArray
    out: CudaArray
    strides: tuple[int, int, int]
    out_strides: tuple[int, int, int]
    start: int
    theta: float
    half_split: bool
    block: int | None


def _launch(job: Job) -> tuple[Launch, ...]:
    x, out, strides, out_strides, start, theta, half_split, block = job
    B, T, H, D = x.shape if x.ndim == 4 else (1, *x.shape)
    item = x.dtype.itemsize
    distances = (D // 2 if half_split else D, *strides, *out_strides)
    aligned = alignment(x.data.ptr, out.data.ptr, *(item * distance for distance in distances))
    sms = device_attribute("MultiProcessorCount")
    geometry = choose_geometry(B, T, H, D, half_split, aligned // item, sms, block)
    pairs = (stride for pair in zip(strides, out_strides, strict=True) for stride in pair)
    args = (x, out, *pairs, start, *exponent_step(theta, D), T, H)
    return (launch_at(FILE, geometry, args, storage=x.dtype.name),)


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    start: int = 0,
    theta: float = 10000.0,
    half_split: bool = False,
    block: int | None = None,
) -> Bound:
    """inputs (x (T, H, D) or (B, T, H, D),), out as x, or x itself.

    x may have any strides, except that the last axis must be contiguous.
    """
    (x,) = inputs
    half_split = check_flag("half_split", half_split)
    check_block(OPERATION.name, OPERATION.variants[0], block)
    dtype = storage(x)
    check("x", x, dtype=dtype, strided=True)
    _check_sizes(x)
    check_turn(start, theta, x.shape[-3])
    strides = _strides(x)
    if strides is None:
        raise InputError(
            f"x: expected a contiguous last axis, got strides {x.strides} for shape "
            f"{x.shape}: use cupy.ascontiguousarray"
        )
    if out is None or not (isinstance(out, cupy.ndarray) and same_memory(x, out)):
        out = output(out, x.shape, dtype, apart={"x": x})
    elif not _distinct(x):
        raise InputError("out: elements of x share memory: expected another array")
    out_strides = _strides(out)
    if out_strides is None:
        raise InputError(f"x: expected at most {MAX_STRIDE:,} channels a position, got {x.shape}")
    job = Job(x, out, strides, out_strides, int(start), float(theta), half_split, block)
    return Bound(out, _launch(job))


def _check_sizes(x: CudaArray) -> None:
    if x.ndim not in (3, 4):
        raise InputError(f"x: expected (T, H, D) or (B, T, H, D), got {x.shape}")
    B, D = x.shape[0] if x.ndim == 4 else 1, x.shape[-1]
    if D % 2:
        raise InputError(f"x: head size D {D}: expected an even one, as channels turn in pairs")
    if B > MAX_BATCH:
        raise InputError(f"x: expected at most {MAX_BATCH:,} sequences in a call, got {B:,}")


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


def _distinct(x: CudaArray) -> bool:
    """Whether, as far as strides tell, no two elements share memory."""
    reach = x.dtype.itemsize
    for stride, n in sorted((abs(s), n) for s, n in zip(x.strides, x.shape, strict=True) if n > 1):
        if stride < reach:
            return False
        reach = stride * n
    return True


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    shape = sizes["T"], sizes["H"], sizes["D"]
    return (rng.standard_normal(shape, dtype=np.float32) + np.float32(0.5),)


OPERATION = Operation(
    name="rope",
    document="kernl's Llama kernels",
    idea="(r, i) → (r cos a - i sin a, r sin a + i cos a), a = position / theta^(2k / D)",
    sizes={"T": 16, "H": 32, "D": 128},
    variants=(
        Variant(
            "pairs",
            FILE,
            ("rope_pairs",),
            "each thread rotates the same pairs of several heads, which share sines and cosines",
            BLOCKS,
            BLOCK,
            launch=_launch,
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
    block: int | None = None,
    out: CudaArray | None = None,
) -> CudaArray:
    """`reference.rope` on a float16, bfloat16 or float32 CuPy array; raises InputError.

    x (T, H, D) or (B, T, H, D), D even; position t of it is start + t, at most 2²⁰ - 1. A view is
    read in place, such as Q or K in rows of QKV, where its last axis is contiguous; else it is
    copied first. The result is contiguous; `out=x` overwrites x.
    """
    if isinstance(x, cupy.ndarray) and x.ndim and x.size and out is not x and _strides(x) is None:
        (x,) = contiguous(x)
    turn = {"start": start, "theta": theta, "half_split": half_split}
    return call(bind, (x,), out, **turn, block=block).out
