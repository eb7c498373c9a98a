"""RMSNorm: x / sqrt(mean(x²) + eps) · weight over each row.

Kernel: llama/rmsnorm.cu.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from gpt2block.config import check_eps
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import (
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
    row_alignment,
    storage,
)
from gpt2block.cuda.kernels import Geometry, Launch
from gpt2block.ops._rows import LONGEST_IN_REGISTERS, check_rows, share
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant, check_block
from gpt2block.ops.warm import call

FILE = "llama/rmsnorm.cu"
BLOCKS = (32, 64, 128, 256, 512)
MOST_THREADS = 1024  # of a longer row


@lru_cache(maxsize=1024)
def choose_geometry(
    rows: int,
    C: int,
    width: int,
    sms: int,
    block: int | None = None,
    residual: bool = False,
) -> Geometry:
    """For `rows` of C channels, `width` a load, on a GPU with `sms` multiprocessors.

    block: the threads that share a row; None chooses them. residual: whether one is added first.
    Raises InputError when a row does not fit in the registers of `block` threads.
    """
    if C > LONGEST_IN_REGISTERS:
        threads, held, together = block or MOST_THREADS, 0, 1
    else:
        shape = share(rows, C, width, sms, block)
        threads, held, together = shape.threads, shape.held, shape.rows
    defines = (
        ("RMS_C", C),
        ("RMS_WIDTH", width),
        ("RMS_THREADS", threads),
        ("RMS_VECTORS", held),
        ("RMS_ROWS", together),
        ("RMS_RESIDUAL", int(residual)),
    )
    return Geometry(
        "rmsnorm_rows", (ceil(rows / together),), (threads * together,), defines=defines
    )


class Job(NamedTuple):
    """A checked call: x (..., C), its rows `stride` elements apart; total is x + residual."""

    x: CudaArray
    weight: CudaArray
    residual: CudaArray | None
    total: CudaArray | None
    out: CudaArray
    stride: int
    eps: float
    block: int | None


def _launch(job: Job) -> tuple[Launch, ...]:
    x, weight, residual, total, out, stride, eps, block = job
    C, item = x.shape[-1], x.dtype.itemsize
    rows = x.size // C
    aligned = alignment(x.data.ptr, item * stride, row_alignment(C, weight, residual, total, out))
    sms = device_attribute("MultiProcessorCount")
    geometry = choose_geometry(rows, C, aligned // item, sms, block, residual is not None)
    args = (x, residual, weight, total, out, stride, eps, rows)
    return (launch_at(FILE, geometry, args, storage=x.dtype.name),)


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    eps: float = 1e-6,
    block: int | None = None,
) -> Bound:
    """inputs (x (..., C), weight (C,), maybe residual (..., C)), out (..., C), all of one dtype.

    With a residual, x + residual takes the place of x, and is what `extra` holds. The rows of x may
    be any constant distance apart. block: the threads that share a row.
    """
    x, weight, residual = (*inputs, None)[:3]
    check_eps(eps)
    check_block(OPERATION.name, OPERATION.variants[0], block)
    dtype = storage(x)
    check("x", x, dtype=dtype, strided=True)
    check("weight", weight, x.shape[-1:], dtype)
    check_rows("x", x)
    stride = checked_row_stride("x", x)
    if residual is not None:
        check("residual", residual, x.shape, dtype)
    total = None if residual is None else cupy.empty(x.shape, dtype)
    given = {"x": x, "weight": weight, "residual": residual}
    out = output(out, x.shape, dtype, apart=given)
    launches = _launch(Job(x, weight, residual, total, out, stride, float(eps), block))
    return Bound(out, launches, () if total is None else (total,))


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    M, C = sizes["M"], sizes["C"]
    normal = (rng.standard_normal(shape, dtype=np.float32) for shape in ((M, C), C))
    return tuple(array + np.float32(0.5) for array in normal)


OPERATION = Operation(
    name="rmsnorm",
    document="kernl's Llama kernels",
    idea="x / sqrt(mean(x²) + eps) · weight over each row",
    sizes={"M": 16, "C": 4096},
    variants=(
        Variant(
            "rows",
            FILE,
            ("rmsnorm_rows",),
            "rows in registers, x read once, the weight loaded with it; at most one barrier",
            BLOCKS,
            launch=_launch,
        ),
    ),
    make=_make,
    traffic=lambda s: s["itemsize"] * (2 * s["M"] * s["C"] + s["C"]),
    flops=lambda s: 4 * s["M"] * s["C"],
    bound="memory",
    attrs={"eps": 1e-6},
    dtypes=("float16", "bfloat16", "float32"),
    binder=bind,
)


def rmsnorm(
    x: CudaArray,
    weight: CudaArray,
    eps: float = 1e-6,
    block: int | None = None,
    out: CudaArray | None = None,
) -> CudaArray:
    """`reference.rmsnorm` on float16, bfloat16 or float32 CuPy arrays; raises InputError.

    x (..., C), weight (C,) of the same dtype; sums are float32. A view whose rows are a constant
    distance apart, such as some columns of a matrix, is read in place; any other is copied first.
    With `out` (..., C), not x itself, the result is written there.
    More threads share a row where there are few rows, so the same row may differ in its last bits
    in a batch of another size; `block`, the threads of a row, fixes it.
    """
    (weight,) = contiguous(weight)
    return call(bind, (in_rows(x), weight), out, eps=eps, block=block).out
