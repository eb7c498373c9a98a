"""RMSNorm over rows: its variant, and the launch."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Any

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
    storage,
)
from gpt2block.cuda.kernels import Geometry
from gpt2block.errors import InputError
from gpt2block.ops._rows import THREADS, VALUES, share
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant, check_block
from gpt2block.ops.warm import call

FILE = "llama/rmsnorm.cu"
BLOCKS = (32, 64, 128, 256, 512)
LONGEST_IN_REGISTERS = VALUES * THREADS
MOST_THREADS = 1024  # of a longer row


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    M, C = sizes["M"], sizes["C"]
    normal = (rng.standard_normal(shape, dtype=np.float32) for shape in ((M, C), C))
    return tuple(array + np.float32(0.5) for array in normal)


@lru_cache(maxsize=1024)
def geometry(
    variant: Variant,
    rows: int,
    C: int,
    width: int,
    sms: int,
    block: int | None = None,
    residual: bool = False,
) -> Geometry:
    """For `rows` of C channels, `width` a load, on a GPU with `sms` multiprocessors.

    `block`: the threads that share a row; None: the best there is. residual: whether there is one
    to be added first. Raises InputError when a row
    does not fit in the registers of so few threads.
    """
    (kernel,) = variant.kernels
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
    return Geometry(kernel, (ceil(rows / together),), (threads * together,), defines=defines)


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
    """inputs (x (..., C), weight (C,), maybe residual (..., C)), out (..., C), all of one dtype.

    With a residual, x + residual takes the place of x, and is what `extra` holds.
    The rows of x may lie apart, at one distance. block: the threads that share a row.
    """
    x, weight, residual = (*inputs, None)[:3]
    chosen = OPERATION.variant(variant)
    check_eps(eps)
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
    total = None
    if residual is not None:
        check("residual", residual, x.shape, dtype)
        total = cupy.empty(x.shape, dtype)
    given = {"x": x, "weight": weight, "residual": residual}
    out = output(out, x.shape, dtype, apart=given)

    item = x.dtype.itemsize
    places = [a.data.ptr for a in (x, weight, residual, total, out) if a is not None]
    width = alignment(*places, item * C, item * stride) // item
    sms = device_attribute("MultiProcessorCount")
    where = geometry(chosen, rows, C, width, sms, block, residual is not None)
    args = (x, residual, weight, total, out, stride, float(eps), rows)
    launch = launch_at(chosen.file, where, args, storage=dtype)
    return Bound(out, (launch,), () if total is None else (total,))


OPERATION = Operation(
    name="rmsnorm",
    document="Llama operations",
    idea="x / sqrt(mean(x²) + eps) · weight over each row",
    sizes={"M": 16, "C": 4096},
    variants=(
        Variant(
            "rows",
            FILE,
            ("rmsnorm_rows",),
            "rows in registers, x read once, the weight asked for with it; at most one barrier",
            BLOCKS,
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
