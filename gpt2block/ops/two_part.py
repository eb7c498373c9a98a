"""float32 rows as two-part matrices: high and low float16 parts, a scale a row.

Kernel: matmul/two_part.cu. `gemm`, `attention` and `layernorm` take or make such matrices.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    arrays_of,
    check,
    check_address,
    check_apart,
    contiguous,
    launch_at,
    output,
)
from gpt2block.cuda.kernels import Geometry
from gpt2block.errors import InputError
from gpt2block.weights.two_part import TwoPartMatrix

FILE = "matmul/two_part.cu"
WARPS = 4  # of a block of split_rows, a row each
JOIN_THREADS = 256  # of a block of join_rows, at most
LARGEST = 2**31 - 2**16  # of any size: what an int holds, and a tile more
TWO_PART = "two_part"  # in place of a dtype: a TwoPartMatrix


def geometry(rows: int, width: int) -> Geometry:
    """The launch of split_rows, `width` elements a load."""
    defines = (("SPLIT_WIDTH", width), ("SPLIT_ROWS", WARPS))
    return Geometry("split_rows", (ceil(rows / WARPS),), (32 * WARPS,), defines=defines)


def bind(inputs: tuple[Any, ...], out: TwoPartMatrix | None = None) -> Bound:
    """inputs (x (..., K),), float32; out: a TwoPartMatrix of that shape. Raises InputError."""
    (x,) = inputs
    check("x", x)
    K = int(x.shape[-1])
    rows = x.size // K
    if max(rows, K) > LARGEST:
        raise InputError(f"x {x.shape}: expected at most {LARGEST:,} rows, and as many columns")
    if out is None:
        out = TwoPartMatrix.empty(x.shape)
    else:
        check_two_part("out", out, x.shape)
        check_apart("out", out, {"x": x})
    width = 4
    while K % width or x.data.ptr % (4 * width) or out.parts.data.ptr % (2 * width):
        width //= 2
    args = (x, out.parts, out.scale, rows, K)
    return Bound(out, (launch_at(FILE, geometry(rows, width), args, "float16"),))


def bind_take(inputs: tuple[Any, ...], out: CudaArray | None = None) -> Bound:
    """inputs (matrix (N, K), a TwoPartMatrix, indices (B,), int32), out (B, K), float32.

    The rows of these indices, joined. Indices are not read back: they must be those of rows. Raises
    InputError.
    """
    matrix, indices = inputs
    check_two_part("matrix", matrix)
    if matrix.ndim != 2:
        raise InputError(f"matrix: expected (N, K), got {matrix.shape}")
    check("indices", indices, dtype="int32")
    if indices.ndim != 1:
        raise InputError(f"indices: expected (B,), got {indices.shape}")
    N, K = matrix.shape
    apart = {"matrix": matrix, "indices": indices}
    out = output(out, (indices.size, K), apart=apart)
    width = 4
    while K % width or out.data.ptr % (4 * width):
        width //= 2
    block = min(JOIN_THREADS, 32 * ceil(K / (32 * width)))
    defines = (("SPLIT_WIDTH", width), ("SPLIT_ROWS", WARPS))
    geometry = Geometry("join_rows", (indices.size,), (block,), defines=defines)
    args = (matrix.parts, matrix.scale, indices, out, N, K)
    return Bound(out, (launch_at(FILE, geometry, args, "float16"),))


def two_part(x: CudaArray) -> TwoPartMatrix:
    """`reference.two_part` of a float32 CuPy array (..., K): the same bits; raises InputError."""
    made: TwoPartMatrix = bind(contiguous(x)).run()
    return made


def check_two_part(name: str, matrix: Any, shape: tuple[int, ...] | None = None) -> None:
    """InputError unless it is a TwoPartMatrix on the current device, of `shape` where one is given.

    Its arrays start on 16 bytes.
    """
    if not isinstance(matrix, TwoPartMatrix):
        raise InputError(
            f"{name}: expected a TwoPartMatrix, got {type(matrix).__name__}: "
            "use TwoPartMatrix.from_float32"
        )
    if shape is not None and matrix.shape != shape:
        raise InputError(f"{name}: expected shape {shape}, got {matrix.shape}")
    for part, array in arrays_of(name, matrix).items():
        check(part, array, dtype=array.dtype.name)
        check_address(part, array)


def check_one_scale(out: Any, shape: tuple[int, ...], bound: float | None) -> None:
    """InputError unless it is a TwoPartMatrix as `TwoPartMatrix.empty(shape, bound)` makes it.

    A bound is an argument of `empty` and must not be passed in addition to its result.
    """
    check_two_part("out", out, shape)
    if bound is not None or out.one_scale is None:
        raise InputError("out: expected one scale for all rows and no bound: TwoPartMatrix.empty")
