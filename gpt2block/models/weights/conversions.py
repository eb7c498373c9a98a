"""Launch the kernels that convert matrices on a GPU. The callers have checked the arrays.

`WeightMatrix.quantize` and `HiLoMatrix.from_float32` run these launches, and `gpt2block.ops`
describes them as operations. Kernels: fp8/absmax.cu, fp8/convert.cu, elementwise/store_weights.cu
and elementwise/hi_lo.cu.
"""

from __future__ import annotations

from math import ceil, gcd

from gpt2block.cuda.arrays import CudaArray
from gpt2block.cuda.kernels import Defines, Geometry, float_define, launch_at
from gpt2block.cuda.requests import Launch
from gpt2block.errors import InputError

LAYOUTS = ("KN", "NK")  # order of the axes in memory: (K, N) or (N, K)
LARGEST = 2**31 - 1  # largest size of an axis, which kernels count with int
LARGEST_OPERAND = 2**31 - 2**16  # largest axis of gemm's operands: axis + tile must fit in an int

ABSMAX_FILE = "fp8/absmax.cu"
ABSMAX_BLOCK = 512
LANES = 4  # neighbouring threads per row in absmax_kn_kernel

FP8_FILE = "fp8/convert.cu"
FP8_BLOCK = 256
ELEMENTS = 16  # elements per thread of to_fp8_kernel, whose loads are in flight at once

STORE_FILE = "elementwise/store_weights.cu"
TILE = 32  # rows and columns per block of store_weights
STORED_FROM: dict[str, Defines] = {
    "float32": (),
    "float16": (("FROM_FP16", 1),),
    "bfloat16": (("FROM_BF16", 1),),
}

HI_LO_FILE = "elementwise/hi_lo.cu"
HI_LO_WARPS = 4  # warps per block of split_rows; each warp converts a row


def check_sizes(name: str, shape: tuple[int, ...], largest: int = LARGEST) -> None:
    """Raise InputError if an axis is larger than `largest`, the limit that a kernel can index."""
    if max(shape) > largest:
        raise InputError(f"{name}: expected at most {largest:,} rows and columns, got {shape}")


def vector_width(n: int, *arrays: CudaArray) -> int:
    """Return the elements per load for all arrays: at most 16 bytes of the last array.

    Fewer bytes are loaded if n, the length of rows, or the address of an array requires it.
    """
    width = 16 // int(arrays[-1].itemsize)
    while n % width or any(a.data.ptr % min(16, width * a.itemsize) for a in arrays):
        width //= 2
    return width


def absmax(w: CudaArray, most: CudaArray, layout: str) -> Launch:
    """Return a launch that writes the largest magnitude of each output channel of w to `most` (N,).

    w: (K, N), or (N, K) for layout "NK".
    """
    rows, columns = w.shape
    width = _width(columns, w)
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
    """Return a launch that writes FP8 values of x / scale (of x if scale is None) to `out`.

    out has the shape of x. elements: number of elements that a thread converts.
    """
    row = None if scale is None else x.shape[1]  # row length, not needed without scales
    width = min(elements, _width(row or 0, x, scale, out))
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


def _width(row: int, x: CudaArray, *others: CudaArray | None) -> int:
    """Return the elements per load: at most 16 bytes of x, a divisor of row length and addresses.

    Addresses are counted in elements of their array.
    """
    places = (a.data.ptr // a.itemsize for a in (x, *others) if a is not None)
    return gcd(16 // x.itemsize, row, *places)


def store(w: CudaArray, out: CudaArray, transposed: bool = False) -> Launch:
    """Return a launch that rounds w (R, C) to the dtype of out (R, C), or (C, R) if transposed."""
    R, C = w.shape
    defines = (*STORED_FROM[w.dtype.name], ("STORE_TRANSPOSED", int(transposed)))
    grid = (ceil(R / TILE) * ceil(C / TILE),)
    geometry = Geometry("store_weights", grid, (TILE, 8), defines=defines)
    return launch_at(STORE_FILE, geometry, (w.view("uint8"), out, R, C), storage=out.dtype.name)


def hi_lo(
    x: CudaArray, parts: CudaArray, scale: CudaArray, one_scale: float | None = None
) -> Launch:
    """Return a launch that writes `parts` and `scale` of a `HiLoMatrix` for x (..., K).

    one_scale: the scale of all rows, which is stored already.
    """
    _, rows, K = parts.shape
    width = vector_width(K, parts, x)
    sizes = (("SPLIT_WIDTH", width), ("SPLIT_ROWS", HI_LO_WARPS))
    defines = (*sizes, *float_define("SPLIT_UNIT", one_scale))
    grid = (ceil(rows / HI_LO_WARPS),)
    geometry = Geometry("split_rows", grid, (32 * HI_LO_WARPS,), defines=defines)
    return launch_at(HI_LO_FILE, geometry, (x, parts, scale, rows, K), "float16")
