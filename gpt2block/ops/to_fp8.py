"""To FP8: x, or x / scale, as a byte; and the largest magnitudes, from which scales are made.

Kernels: fp8/convert.cu, fp8/absmax.cu.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from gpt2block.checks import check_flag
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import Bound, CudaArray, check, contiguous, launch_at, output, storage
from gpt2block.cuda.kernels import FP8, Geometry, Launch
from gpt2block.errors import InputError
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant, check_block
from gpt2block.weights.matrix import LAYOUTS, check_layout

FILE = "fp8/convert.cu"
ABSMAX_FILE = "fp8/absmax.cu"
NORMS_FILE = "fp8/row_norms.cu"
BLOCK = 256
BLOCKS = (64, 128, 256, 512, 1024)
ELEMENTS = 16  # of a thread, all in flight at once
LANES = 4  # neighbouring threads in a row of absmax_kn_kernel
ABSMAX_BLOCK = 512


class Job(NamedTuple):
    """A checked call: x, scale (N,) or None with its layout, and out."""

    x: CudaArray
    scale: CudaArray | None
    out: CudaArray
    format: str
    saturate: bool
    layout: str
    block: int | None


def _alignment(*arrays: CudaArray | None) -> int:
    """Of all of them, in elements."""
    return min(int(a.data.ptr & -a.data.ptr) // int(a.itemsize) for a in arrays if a is not None)


def _width(itemsize: int, row: int, alignment: int) -> int:
    """The most elements a load, a power of two, 16 bytes at most, that divides both."""
    width = 16 // itemsize
    while row % width or alignment % width:
        width //= 2
    return width


@lru_cache(maxsize=1024)
def choose_geometry(
    size: int, row: int | None, layout: str, saturate: bool, width: int, vectors: int, block: int
) -> Geometry:
    """For `size` elements, in rows of `row` where they have scales.

    A thread takes `vectors` loads of `width` elements.
    """
    defines = (
        ("FP8_WIDTH", width),
        ("FP8_VECTORS", vectors),
        ("FP8_SATURATE", int(saturate)),
        ("FP8_SCALE", 0 if row is None else 1 + LAYOUTS.index(layout)),
    )
    grid = (ceil(size / (block * width * vectors)),)
    return Geometry("to_fp8_kernel", grid, (block,), defines=defines)


def _launch(job: Job, width: int, vectors: int) -> tuple[Launch, ...]:
    x, row = job.x, None if job.scale is None else job.x.shape[1]
    block = job.block or BLOCK
    geometry = choose_geometry(x.size, row, job.layout, job.saturate, width, vectors, block)
    args = (x, job.scale, job.out, x.size, row or x.size)
    return (launch_at(FILE, geometry, args, storage=x.dtype.name, weights=job.format),)


def _launch_element(job: Job) -> tuple[Launch, ...]:
    return _launch(job, 1, 1)


def _launch_vectors(job: Job) -> tuple[Launch, ...]:
    row = 0 if job.scale is None else job.x.shape[1]  # without rows the kernel checks the end
    width = _width(job.x.itemsize, row, _alignment(job.x, job.scale, job.out))
    return _launch(job, width, ELEMENTS // width)


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    format: str = "float8_e5m2",
    saturate: bool = True,
    scale: CudaArray | None = None,
    layout: str = "KN",
    variant: str | int | None = None,
    block: int | None = None,
) -> Bound:
    """inputs (x,) of any shape, out as x, uint8; with `scale` (N,) x is (K, N) or, "NK", (N, K)."""
    (x,) = inputs
    dtype = storage(x)
    check("x", x, dtype=dtype)
    if not isinstance(format, str) or format not in FP8:
        raise InputError(f"unknown FP8 format {format!r}: expected one of {', '.join(FP8)}")
    saturate = check_flag("saturate", saturate)
    check_layout(layout)
    if scale is not None:
        if x.ndim != 2:
            raise InputError(f"x: expected a matrix, as scale is given, got shape {x.shape}")
        check("scale", scale, (x.shape[layout.index("N")],))
    out = output(out, x.shape, "uint8", apart={"x": x, "scale": scale})
    job = Job(x, scale, out, format, saturate, layout, block)
    chosen = OPERATION.choose(job, variant, ("vectors",))
    check_block(OPERATION.name, chosen, block)
    return Bound(out, chosen.launch(job))


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    return (rng.standard_normal((sizes["K"], sizes["N"]), dtype=np.float32) + np.float32(0.5),)


OPERATION = Operation(
    name="to_fp8",
    document="kernl's Llama kernels",
    idea="x as a byte, E5M2 or E4M3FN, rounded to nearest even",
    sizes={"K": 4096, "N": 11008},
    variants=(
        Variant(
            "element",
            FILE,
            ("to_fp8_kernel",),
            "one thread per element",
            BLOCKS,
            launch=_launch_element,
        ),
        Variant(
            "vectors",
            FILE,
            ("to_fp8_kernel",),
            "16 elements per thread, 16-byte loads, all in flight at once",
            BLOCKS,
            launch=_launch_vectors,
        ),
    ),
    make=_make,
    traffic=lambda s: (s["itemsize"] + 1) * s["K"] * s["N"],
    flops=lambda s: s["K"] * s["N"],
    bound="memory",
    attrs={"format": "float8_e5m2"},
    auxiliary=(
        Variant(
            "absmax",
            ABSMAX_FILE,
            ("absmax_kn_kernel", "absmax_nk_kernel"),
            "the largest magnitude of each output channel, for scales; finds infinity and NaN",
        ),
        Variant(
            "row_norms",
            NORMS_FILE,
            ("row_norms",),
            "squares of the norms of an FP8 matrix's rows, which bound its products",
        ),
    ),
    dtypes=("float32", "float16", "bfloat16"),
    binder=bind,
)


def to_fp8(
    x: CudaArray,
    format: str = "float8_e5m2",
    saturate: bool = True,
    scale: CudaArray | None = None,
    layout: str = "KN",
    variant: str | int | None = None,
    block: int | None = None,
    out: CudaArray | None = None,
) -> CudaArray:
    """`reference.to_fp8` on a float32, float16 or bfloat16 CuPy array. Raises InputError.

    format: "float8_e5m2" or "float8_e4m3fn"; the bytes are uint8, the same as in NumPy. For the
    weights of a product, `WeightMatrix.quantize` chooses the scales and refuses infinity and NaN.
    With `scale`, every one of which must be a positive normal number: x / scale, layout "KN" or
    "NK".
    """
    x, scale = contiguous(x, scale)
    options = {"format": format, "saturate": saturate, "scale": scale, "layout": layout}
    return bind((x,), out, variant=variant, block=block, **options).run()


def absmax_geometry(
    layout: str, rows: int, columns: int, itemsize: int, alignment: int
) -> Geometry:
    """For a matrix as it lies in memory: rows are K of layout "KN", N of "NK"."""
    width = _width(itemsize, columns, alignment)
    defines = (("FP8_WIDTH", width), ("FP8_BLOCK", ABSMAX_BLOCK), ("FP8_LANES", LANES))
    if layout == "KN":
        kernel, grid = "absmax_kn_kernel", (ceil(columns / (LANES * width)),)
    else:
        kernel, grid = "absmax_nk_kernel", (rows,)
    return Geometry(kernel, grid, (ABSMAX_BLOCK,), defines=defines)


def absmax(w: CudaArray, layout: str = "KN") -> CudaArray:
    """The largest magnitude of each output channel: w (K, N) or, "NK", (N, K) → (N,) float32.

    Infinity where a channel holds infinity or NaN; zero where nothing is a normal float32.
    """
    (w,) = contiguous(w)
    dtype = storage(w)
    check("w", w, dtype=dtype)
    check_layout(layout)
    if w.ndim != 2:
        raise InputError(f"w: expected a matrix, got shape {w.shape}")
    rows, columns = w.shape
    if max(rows, columns) >= 2**31:
        raise InputError(f"w: expected fewer than 2^31 rows and columns, got {w.shape}")
    geometry = absmax_geometry(layout, rows, columns, w.itemsize, _alignment(w))
    most = cupy.empty(w.shape[layout.index("N")], "float32")
    sizes = (rows, columns) if layout == "KN" else (columns,)
    launch_at(ABSMAX_FILE, geometry, (w, most, *sizes), storage=dtype).run()
    return most
