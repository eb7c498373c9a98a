"""RoPE: each pair of channels is rotated by an angle proportional to its row's position.

(r, i) → (r cos a - i sin a, r sin a + i cos a), a = position / theta^(2k / D) for pair k. Kernel:
learn/positions/rope.cu.
"""

from __future__ import annotations

import math
from functools import lru_cache
from math import ceil

import numpy as np

from gpt2block.checks import check_integer, check_number
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import (
    CudaArray,
    alignment,
    contiguous,
    element_strides,
    multiprocessors,
    same_memory,
)
from gpt2block.cuda.kernels import Geometry, Launch, defines_of, launch_at
from gpt2block.errors import InputError
from gpt2block.ops.call import Call, UncheckedCall
from gpt2block.ops.operation import Operation, Workload, variant
from gpt2block.ops.warm import call

FILE = "learn/positions/rope.cu"
BLOCK = 256
BLOCKS = (32, 64, 128, 256, 512)
FILLED = 256  # minimum threads per SM for threads to process several heads each
MAX_POSITIONS = 2**20  # range of positions for the polynomials in lib/rotation.cuh
MAX_BATCH = 65535  # maximum sequences: limit of an axis of the grid
MAX_STRIDE = 2**31 - 1
_HELD = 8  # loads in flight per thread
_LAST_AXIS = 64  # maximum threads of a block along its third axis (CUDA's limit)


def exponent_step(theta: float, D: int) -> tuple[float, float]:
    """Return two float32 numbers whose sum is step = 2 log2(theta) / D.

    The angle of pair k grows by 2^(-k step) radians per position.
    """
    step = 2 * math.log2(theta) / D
    high = float(np.float32(step))
    return high, float(np.float32(step - high))


@lru_cache(maxsize=1024)
def choose_geometry(
    B: int, T: int, H: int, D: int, half_split: bool, width: int, sms: int, block: int | None = None
) -> Geometry:
    """Return the geometry for B sequences of T positions and H heads of D channels.

    width: elements per load at most. If threads are few, each gets fewer pairs, because the
    arithmetic of pairs takes most of the time. sms: multiprocessors of the GPU. block: threads per
    block at most.
    """
    block = block or BLOCK

    def across(width: int) -> int:
        """Return the threads that process one head at one position."""
        return ceil(D // 2 / (width if half_split else max(1, width // 2)))

    heads, smallest = B * T * H, 1 if half_split else 2
    while width > smallest and heads * across(width // 2) <= FILLED * sms:
        width //= 2
    loads = 2 if half_split or width == 1 else 1
    together = 1  # heads per thread
    while 2 * together <= min(H, _HELD // loads) and (
        heads * across(width) >= 2 * together * FILLED * sms
    ):
        together *= 2
    x = min(across(width), block)
    y = min(ceil(H / together), block // x)
    z = min(T, max(1, block // (x * y)), _LAST_AXIS)
    defines = (
        *defines_of(ROPE_D=D, ROPE_HALF_SPLIT=int(half_split), ROPE_WIDTH=width, ROPE_THREADS=x),
        *defines_of(ROPE_HEADS=together),
    )
    grid = (ceil(T / z), ceil(H / (y * together)), B)
    return Geometry("rope_pairs", grid, (x, y, z), defines=defines)


@variant("pairs", FILE, "rope_pairs", blocks=BLOCKS, block=BLOCK)
def _pairs(c: Call) -> Launch:
    strides, out_strides = _strides(c.x), _strides(c.output("out"))
    if strides is None:
        raise InputError(
            f"x: expected a contiguous last axis, got strides {c.x.strides} for shape "
            f"{c.x.shape}: use cupy.ascontiguousarray"
        )
    if out_strides is None:
        raise InputError(f"x: expected at most {MAX_STRIDE:,} channels a position, got {c.x.shape}")
    item = c.x.itemsize
    distances = (c.D // 2 if c.half_split else c.D, *strides, *out_strides)
    aligned = alignment(c.x.data.ptr, c.out.data.ptr, *(item * distance for distance in distances))
    width, block = aligned // item, c.block if c.requested else None
    geometry = choose_geometry(c.rows, c.T, c.H, c.D, c.half_split, width, multiprocessors(), block)
    pairs = (stride for pair in zip(strides, out_strides, strict=True) for stride in pair)
    args = (c.x, c.out, *pairs, c.start, *exponent_step(c.theta, c.D), c.T, c.H)
    return launch_at(FILE, geometry, args, c.storage)


def _prepare(unchecked: UncheckedCall) -> Call:
    """Check a call of `rope`. x may have any strides except on its last axis, even if out is x."""
    x, out = unchecked.inputs[0], unchecked.out
    itself = all(isinstance(a, cupy.ndarray) for a in (x, out)) and same_memory(x, out)
    rotation = unchecked.options["start"], unchecked.options["theta"]  # checked below
    c = unchecked._replace(out=None if itself else out).checked(start=None, theta=None)
    if len(c.leading) > 1:
        raise InputError(f"x: expected (T, H, D) or (B, T, H, D), got {x.shape}")
    if c.D % 2:
        raise InputError(f"x: head size D {c.D}: expected an even size: RoPE rotates pairs")
    if c.rows > MAX_BATCH:
        raise InputError(f"x: expected at most {MAX_BATCH:,} sequences in a call, got {c.rows:,}")
    c.start, c.theta = check_rotation(*rotation, c.T)
    if itself:
        if not _distinct(x):
            raise InputError("out: elements of x share memory: expected another array")
        c.out = out
    return c


def check_rotation(start: object, theta: object, T: int) -> tuple[int, float]:
    """Return start and theta, checked for T positions. Raises InputError for too large angles."""
    most = MAX_POSITIONS - T
    expected = f"a whole number from 0 to {most:,} for {T:,} positions"
    start = check_integer("start", start, 0, most, expected)
    return start, check_number("theta", theta, 1, 2.0**100, "a number from 1 to 2^100")


def _strides(x: CudaArray) -> tuple[int, int, int] | None:
    """Return the strides of batch, position and head in elements; None if kernels lack support."""
    strides = element_strides(x) if x.ndim in (3, 4) else None
    if strides is None or any(abs(stride) > MAX_STRIDE for stride in strides[-2:]):
        return None
    batch, position, head = strides if x.ndim == 4 else (0, *strides)
    return batch, position, head


def _distinct(x: CudaArray) -> bool:
    """Whether no two elements of x share memory, according to its strides."""
    reach = x.dtype.itemsize
    for stride, n in sorted((abs(s), n) for s, n in zip(x.strides, x.shape, strict=True) if n > 1):
        if stride < reach:
            return False
        reach = stride * n
    return True


OPERATION = Operation(
    name="rope",
    variants=(_pairs,),
    options={"start": 0, "theta": 10000.0, "half_split": False, "block": None},
    prepare=_prepare,
    workload=Workload(
        document="kernl's Llama kernels",
        idea="(r, i) → (r cos a - i sin a, r sin a + i cos a), a = position / theta^(2k / D)",
        sizes={"T": 16, "H": 32, "D": 128},
        traffic=lambda s: 2 * s["itemsize"] * s["T"] * s["H"] * s["D"],
        flops=lambda s: 3 * s["T"] * s["H"] * s["D"],
        attrs={"start": 0, "theta": 10000.0},
        small=({"T": 5, "H": 3, "D": 8}, {"T": 3, "H": 5, "D": 10, "start": 9, "theta": 500.0}),
        dtypes=("float16", "bfloat16", "float32"),
        aliases={"pos0": "start", "position": "start", "N": "T", "n_head": "H", "head_dim": "D"},
    ),
)


def rope(
    x: CudaArray,
    start: int = 0,
    theta: float = 10000.0,
    half_split: bool = False,
    block: int | None = None,
    out: CudaArray | None = None,
) -> CudaArray:
    """Compute `reference.rope` on a float16, bfloat16 or float32 CuPy array. Raises InputError.

    x (T, H, D) or (B, T, H, D), D even; row t has position start + t, at most 2²⁰ - 1. A view with
    a contiguous last axis, such as Q or K in rows of QKV, is read in place; any other view is
    copied first. The result is contiguous; `out=x` overwrites x.
    """
    if isinstance(x, cupy.ndarray) and x.ndim and x.size and out is not x and _strides(x) is None:
        (x,) = contiguous(x)
    rotation = {"start": start, "theta": theta, "half_split": half_split}
    return call(OPERATION, (x,), out, **rotation, block=block).out
