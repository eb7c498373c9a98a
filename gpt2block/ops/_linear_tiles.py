"""The linear layer for many rows on CUDA: matmul/tiles.cu."""

from __future__ import annotations

from typing import Any

from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    alignment,
    check,
    device_attribute,
    launch_at,
    output,
)
from gpt2block.cuda.kernels import FP8
from gpt2block.errors import InputError
from gpt2block.operations.linear_tiles import FILE, LONGEST, MOST_LOADED, geometry
from gpt2block.weights.matrix import WeightMatrix

MAX_SIZE = 2**31 - 1024  # of M and N: what an int holds, and a tile more


def bind_tiles(
    inputs: tuple[Any, ...], out: CudaArray | None = None, *, gelu: bool = False
) -> Bound:
    """inputs (x (..., K), w, bias (N,) or None, residual (..., N) or None), out (..., N).

    w: a WeightMatrix (N, K) on the GPU, of any dtype. x, bias, residual and out are float32;
    residual may be out itself. The bits of a row depend on this row, w, bias and its residual
    alone, not on how many rows there are. Raises InputError.
    """
    x, w, bias, residual = inputs
    check("x", x)
    K = x.shape[-1]
    dtype = _check_weights(w, K)
    N = w.N
    if bias is not None:
        check("bias", bias, (N,))
    M = x.size // K
    if max(M, N) > MAX_SIZE or K > LONGEST:
        raise InputError(
            f"x {x.shape}, w ({N}, {K}): expected at most {MAX_SIZE:,} rows or outputs, and "
            f"{LONGEST:,} inputs"
        )
    shape = (*x.shape[:-1], N)
    if residual is not None:
        check("residual", residual, shape)
    given = {"x": x, "w": w, "bias": bias}
    out = output(out, shape, apart=given, in_place={"residual": residual})

    item = w.data.itemsize
    load = min(MOST_LOADED, alignment(K * item, w.data.data.ptr) // item)
    rows = [array.data.ptr for array in (out, residual) if array is not None]
    how = geometry(
        M,
        N,
        item,
        load,
        4 if alignment(4 * N, *rows) == 16 else 1,
        gelu,
        device_attribute("MultiProcessorCount"),
        device_attribute("MaxSharedMemoryPerBlockOptin"),
    )
    args = (x, w.data, w.scale, bias, residual, out, M, K, N)
    storage, weights = ("float32", dtype) if dtype in FP8 else (dtype, None)
    return Bound(out, (launch_at(FILE, how, args, storage, weights),))


def _check_weights(w: Any, K: int) -> str:
    """The dtype of a WeightMatrix that fits; InputError for anything else."""
    if not isinstance(w, WeightMatrix):
        raise InputError(f"w: expected a WeightMatrix, got {type(w).__name__}: use .quantize")
    if w.layout != "NK":
        raise InputError(f"w: expected layout 'NK', (N, K) in memory, got {w.layout!r}")
    check("w", w.data, dtype="uint8" if w.dtype in FP8 else w.dtype)
    if w.K != K:
        raise InputError(f"w: expected K {K} to match x, got {w.K}")
    if w.scale is not None:
        check("scale", w.scale, (w.N,))
    return w.dtype
