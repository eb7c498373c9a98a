"""Launches of the kernels that convert matrices on a GPU, for checked arrays.

`WeightMatrix.quantize` and `TwoPartMatrix.from_float32` run them, and `gpt2block.ops` describes
them as operations. Kernels: fp8/absmax.cu, fp8/convert.cu, matmul/store.cu and matmul/two_part.cu.
"""

from __future__ import annotations

from math import ceil

from gpt2block.cuda.arrays import CudaArray
from gpt2block.cuda.kernels import Defines, Geometry, launch_at
from gpt2block.cuda.requests import Launch
from gpt2block.errors import InputError

LAYOUTS = ("KN", "NK")  # (K, N) or (N, K) in memory
LARGEST = 2**31 - 1  # of any size: what an int holds
LARGEST_OPERAND = 2**31 - 2**16  # of an operand of gemm: and a tile more

ABSMAX_FILE = "fp8/absmax.cu"
ABSMAX_BLOCK = 512
LANES = 4  # neighbouring threads in a row of absmax_kn_kernel

FP8_FILE = "fp8/convert.cu"
FP8_BLOCK = 256
ELEMENTS = 16  # of a thread of to_fp8_kernel, all in flight at once

STORE_FILE = "matmul/store.cu"
TILE = 32  # rows and columns of a block of store_weights
STORED_FROM: dict[str, Defines] = {
    "float32": (),
    "float16": (("FROM_FP16", 1),),
    "bfloat16": (("FROM_BF16", 1),),
}

TWO_PART_FILE = "matmul/two_part.cu"
TWO_PART_WARPS = 4  # of a block of split_rows, a row each


def check_sizes(name: str, shape: tuple[int, ...], largest: int = LARGEST) -> None:
    """InputError where a kernel cannot count rows or columns."""
    if max(shape) > largest:
        raise InputError(f"{name}: expected at most {largest:,} rows and columns, got {shape}")


def vector_width(n: int, *arrays: CudaArray) -> int:
    """Elements of a load: 16 bytes of the last array, unless n or an address forbids it."""
    width = 16 // int(arrays[-1].itemsize)
    while n % width or any(a.data.ptr % min(16, width * a.itemsize) for a in arrays):
        width //= 2
    return width


def absmax(w: CudaArray, most: CudaArray, layout: str) -> Launch:
    """most (N,): the largest magnitude of each output channel of w, (K, N) or, "NK", (N, K)."""
    rows, columns = w.shape
    width = _width(w.itemsize, columns, _alignment(w))
    defines = (("FP8_WIDTH", width), ("FP8_BLOCK", ABSMAX_BLOCK), ("FP8_LANES", LANES))
    kernel, grid, sizes = "absmax_nk_kernel", rows, w.shape[1:]
    if layout == "KN":
        kernel, grid, sizes = "absmax_kn_kernel", ceil(columns / (LANES * width)), w.shape
    geometry = Geometry(kernel, (grid,), (ABSMAX_BLOCK,), defines=defines)
    return launch_at(ABSMAX_FILE, geometry, (w, most, *sizes), storage=w.dtype.name)


def to_fp8(
    x: CudaArray,
    scale: CudaArray | None,
    out: CudaArray,
    format: str,
    layout: str,
    saturate: bool = True,
    block: int = FP8_BLOCK,
    elements: int = ELEMENTS,
) -> Launch:
    """out, as x: x / scale, or x without scale, in bytes; a thread takes so many elements."""
    row = None if scale is None else x.shape[1]  # without rows the kernel checks the end
    width = min(elements, _width(x.itemsize, row or 0, _alignment(x, scale, out)))
    defines = (
        ("FP8_WIDTH", width),
        ("FP8_VECTORS", elements // width),
        ("FP8_SATURATE", int(saturate)),
        ("FP8_SCALE", 0 if row is None else 1 + LAYOUTS.index(layout)),
    )
    grid = (ceil(x.size / (block * elements)),)
    geometry = Geometry("to_fp8_kernel", grid, (block,), defines=defines)
    args = (x, scale, out, x.size, row or x.size)
    return launch_at(FP8_FILE, geometry, args, storage=x.dtype.name, weights=format)


def _alignment(*arrays: CudaArray | None) -> int:
    """Of all of them, in elements."""
    return min(int(a.data.ptr & -a.data.ptr) // int(a.itemsize) for a in arrays if a is not None)


def _width(itemsize: int, row: int, alignment: int) -> int:
    """The most elements a load, a power of two, 16 bytes at most, that divides both."""
    width = 16 // itemsize
    while row % width or alignment % width:
        width //= 2
    return width


def store(w: CudaArray, out: CudaArray, transposed: bool = False) -> Launch:
    """out (R, C) or, transposed, (C, R): w (R, C) rounded to the float dtype of out."""
    R, C = w.shape
    defines = (*STORED_FROM[w.dtype.name], ("STORE_TRANSPOSED", int(transposed)))
    grid = (ceil(R / TILE) * ceil(C / TILE),)
    geometry = Geometry("store_weights", grid, (TILE, 8), defines=defines)
    return launch_at(STORE_FILE, geometry, (w.view("uint8"), out, R, C), storage=out.dtype.name)


def two_part(x: CudaArray, parts: CudaArray, scale: CudaArray) -> Launch:
    """parts (2, rows, K) and scale (rows,) of a `TwoPartMatrix`, for x (..., K)."""
    _, rows, K = parts.shape
    width = vector_width(K, parts, x)
    defines = (("SPLIT_WIDTH", width), ("SPLIT_ROWS", TWO_PART_WARPS))
    grid = (ceil(rows / TWO_PART_WARPS),)
    geometry = Geometry("split_rows", grid, (32 * TWO_PART_WARPS,), defines=defines)
    return launch_at(TWO_PART_FILE, geometry, (x, parts, scale, rows, K), "float16")
