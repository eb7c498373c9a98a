"""RMSNorm: x / sqrt(mean(x²) + eps) · weight over each row.

Kernels: llama/rmsnorm.cu (rows) and, for the passes of a whole model, llama/rmsnorm_stream.cu.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, gcd
from typing import Any, NamedTuple

import numpy as np

from gpt2block.checks import check_choice
from gpt2block.config import check_eps
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    alignment,
    check,
    check_address,
    checked_row_stride,
    contiguous,
    device_attribute,
    in_rows,
    launch_at,
    output,
    row_alignment,
    storage,
)
from gpt2block.cuda.kernels import STORAGE, Geometry, Launch
from gpt2block.errors import InputError
from gpt2block.ops._rows import LONGEST_IN_REGISTERS, check_rows, share
from gpt2block.ops._terms import check_terms, stored_defines
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant, check_block
from gpt2block.ops.warm import call
from gpt2block.plan import Terms

FILE = "llama/rmsnorm.cu"
STREAM = "llama/rmsnorm_stream.cu"
MOST_STREAM_THREADS = 256
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
    to_terms: Terms | None = None  # what out has in the place of floats


def _launch(job: Job) -> tuple[Launch, ...]:
    x, weight, residual, total, out, stride, eps, block, _ = job
    C, item = x.shape[-1], x.dtype.itemsize
    rows = x.size // C
    aligned = alignment(x.data.ptr, item * stride, row_alignment(C, weight, residual, total, out))
    sms = device_attribute("MultiProcessorCount")
    geometry = choose_geometry(rows, C, aligned // item, sms, block, residual is not None)
    args = (x, residual, weight, total, out, stride, eps, rows)
    return (launch_at(FILE, geometry, args, storage=x.dtype.name),)


def stream_geometry(rows: int, C: int) -> Geometry:
    """For `rows` of C channels; the order of additions follows from C alone."""
    width = gcd(4, C)
    threads = min(32 * ceil(C / (32 * width)), MOST_STREAM_THREADS)
    defines = (("RS_C", C), ("RS_WIDTH", width), ("RS_THREADS", threads))
    return Geometry("rmsnorm_stream", (rows,), (threads,), defines=defines)


def _launch_stream(job: Job) -> tuple[Launch, ...]:
    C = job.x.shape[-1]
    geometry = stream_geometry(job.x.size // C, C)
    terms = stored_defines("RS_TERMS", job.to_terms)
    geometry = geometry._replace(defines=(*geometry.defines, *terms))
    for name, array in (("x", job.x), ("weight", job.weight), ("out", job.out)):
        check_address(name, array, array.itemsize * gcd(4, C))
    args = (job.x, job.weight, job.out, job.eps)
    return (launch_at(STREAM, geometry, args, storage=job.out.dtype.name),)


def _bind_stream(
    x: Any, weight: Any, out: Any, eps: float, dtype: str | None, to_terms: Terms | None
) -> Bound:
    """Variant stream: x and weight float32; out float32, float16 or bfloat16."""
    check("x", x)
    check("weight", weight, x.shape[-1:])
    check_rows("x", x)
    if dtype is None:
        dtype = "float32" if out is None else storage(out)
    check_choice("dtype", dtype, STORAGE)
    out = output(out, x.shape, dtype, apart={"x": x, "weight": weight})
    if to_terms and dtype != "float32":
        raise InputError(f"rmsnorm: terms of {to_terms}: expected out in float32, got {dtype}")
    check_terms(to_terms, x.shape[-1])
    job = Job(x, weight, None, None, out, x.shape[-1], float(eps), None, to_terms)
    return Bound(out, _launch_stream(job))


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    eps: float = 1e-6,
    block: int | None = None,
    variant: str | None = None,
    dtype: str | None = None,
    to_terms: Terms | None = None,
) -> Bound:
    """inputs (x (..., C), weight (C,), maybe residual (..., C)), out (..., C), all of one dtype.

    With a residual, x + residual takes the place of x, and is what `extra` holds. The rows of x may
    be any constant distance apart. block: the threads that share a row.

    variant: "rows", or "stream", which takes contiguous float32 rows, without residual and block,
    and writes `dtype`, by default that of out; a row has the same bits in any number of rows.
    to_terms: what a float32 out has in the place of floats, as `linear` takes them.
    """
    x, weight, residual = (*inputs, None)[:3]
    check_eps(eps)
    chosen = OPERATION.variant(variant or "rows")
    if chosen.name == "stream":
        if residual is not None or block is not None:
            raise InputError("rmsnorm variant stream: has no residual and no block: use rows")
        return _bind_stream(x, weight, out, eps, dtype, to_terms)
    check_block(OPERATION.name, chosen, block)
    if dtype is not None or to_terms is not None:
        raise InputError("rmsnorm variant rows: writes the dtype of x: use variant stream")
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
        Variant(
            "stream",
            STREAM,
            ("rmsnorm_stream",),
            "the float32 rows of a model: bits that do not depend on the batch, out in any dtype, "
            "overlapping launches",
            dtypes=("float32",),
            launch=_launch_stream,
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
    variant: str | None = None,
) -> CudaArray:
    """`reference.rmsnorm` on float16, bfloat16 or float32 CuPy arrays; raises InputError.

    x (..., C), weight (C,) of the same dtype; sums are float32. A view whose rows are a constant
    distance apart, such as some columns of a matrix, is read in place; any other is copied first.
    With `out` (..., C), not x itself, the result is written there.
    More threads share a row where there are few rows, so the same row may differ in its last bits
    in a batch of another size; `block`, the threads of a row, fixes it. variant: "rows", the
    default, or "stream", see `bind`.
    """
    (weight,) = contiguous(weight)
    x = contiguous(x)[0] if variant == "stream" else in_rows(x)
    return call(bind, (x, weight), out, eps=eps, block=block, variant=variant).out
