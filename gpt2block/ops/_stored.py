"""Weights in the dtype and the layout of products. Kernel: matmul/store.cu."""

from __future__ import annotations

from math import ceil

from gpt2block.array_checks import FLOATS
from gpt2block.checks import meant
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import CudaArray, check, launch_at, storage
from gpt2block.cuda.kernels import Defines, Geometry
from gpt2block.errors import InputError

FILE = "matmul/store.cu"
KERNEL = "store_weights"
TILE = 32  # rows and columns of a block
FROM: dict[str, Defines] = {
    "float32": (),
    "float16": (("FROM_FP16", 1),),
    "bfloat16": (("FROM_BF16", 1),),
}


def stored(w: CudaArray, dtype: str, transposed: bool = False) -> CudaArray:
    """A matrix (R, C) rounded to a float dtype, as (R, C) or, transposed, (C, R).

    w: C-contiguous, or the transposed view of such a matrix. A view of w if no element moves.
    Raises InputError.
    """
    if dtype not in FLOATS:
        known = f"expected one of {', '.join(FLOATS)}{meant(dtype, FLOATS)}"
        raise InputError(f"dtype {dtype!r}: {known}")
    if isinstance(w, cupy.ndarray) and w.flags.f_contiguous and not w.flags.c_contiguous:
        w, transposed = w.T, not transposed
    given = storage(w)
    check("w", w, dtype=given)
    if w.ndim != 2 or max(w.shape) >= 2**31:
        raise InputError(f"w: expected a matrix of less than 2^31 rows, columns, got {w.shape}")
    if given == dtype and not transposed:
        return w
    rows, columns = w.shape
    out = cupy.empty((columns, rows) if transposed else (rows, columns), FLOATS[dtype])
    defines = (*FROM[given], ("STORE_TRANSPOSED", int(transposed)))
    grid = (ceil(rows / TILE) * ceil(columns / TILE),)
    geometry = Geometry(KERNEL, grid, (TILE, 8), defines=defines)
    launch_at(FILE, geometry, (w.view("uint8"), out, rows, columns), storage=dtype).run()
    return out
