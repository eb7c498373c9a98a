"""FP8 on CUDA: kernels_cu/fp8/convert.cu."""

from __future__ import annotations

from typing import Any

from gpt2block.checks import check_flag
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import Bound, CudaArray, check, contiguous, launch_at, output, storage
from gpt2block.cuda.kernels import FP8
from gpt2block.errors import InputError
from gpt2block.operations import fp8
from gpt2block.operations._types import check_block
from gpt2block.weights.matrix import check_layout

FASTEST = "vectors"


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
    arrays = [x]
    saturate = check_flag("saturate", saturate)
    check_layout(layout)
    if scale is not None:
        if x.ndim != 2:
            raise InputError(f"x: expected a matrix, as it has scales, got shape {x.shape}")
        check("scale", scale, (x.shape[layout.index("N")],))
        arrays.append(scale)
    out = output(out, x.shape, "uint8", apart={"x": x, "scale": scale})
    arrays.append(out)
    chosen = fp8.OPERATION.variant(FASTEST if variant is None else variant)
    if block is not None:
        check_block(fp8.OPERATION.name, chosen, block)
    row = None if scale is None else x.shape[1]
    where = fp8.geometry(
        chosen, x.size, x.itemsize, _alignment(arrays), row, layout, saturate, block
    )
    args = (x, scale, out, x.size, row or x.size)
    return Bound(out, (launch_at(fp8.FILE, where, args, storage=dtype, weights=format),))


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
    where = fp8.absmax(layout, rows, columns, w.itemsize, _alignment([w]))
    most = cupy.empty(w.shape[layout.index("N")], "float32")
    sizes = (rows, columns) if layout == "KN" else (columns,)
    args = (w, most, *sizes)
    launch_at(fp8.FILE, where, args, storage=dtype).run()
    return most


def _alignment(arrays: list[CudaArray]) -> int:
    """Of all of them, in elements."""
    return min(int(a.data.ptr & -a.data.ptr) // int(a.itemsize) for a in arrays)
