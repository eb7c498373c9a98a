"""Matrix product with bias on CUDA: kernels_cu/matmul.cu."""

from __future__ import annotations

from math import ceil, prod
from typing import Any

from gpt2block.errors import InputError
from gpt2block.kernels import launch
from gpt2block.ops._arrays import Bound, CudaArray, Shape, check, contiguous, output

TILE = 16
MAX_ROWS = 65535 * TILE


def bind(inputs: tuple[Any, ...], out: CudaArray | None = None) -> Bound:
    """inputs (a (..., K), w (K, N), bias (N,) or None), out (..., N)."""
    a, w, bias = inputs
    check("a", a)
    check("w", w)
    K = a.shape[-1]
    if w.ndim != 2 or w.shape[0] != K:
        raise InputError(f"w: expected shape ({K}, N) to match a {a.shape}, got {w.shape}")
    N = w.shape[1]
    if bias is not None:
        check("bias", bias, (N,))
    check_limits(a.shape)
    out = output(out, (*a.shape[:-1], N))
    M = a.size // K
    grid = (ceil(N / TILE), ceil(M / TILE))
    args = (a, w, bias, out, M, K, N)
    return Bound(out, (launch("matmul.cu", "matmul_bias_tiled", grid, (TILE, TILE), args),))


def check_limits(a: Shape, *_: Shape) -> None:
    """InputError when the rows pass the grid's second axis."""
    rows = prod(a[:-1])
    if rows > MAX_ROWS:
        raise InputError(f"{rows:,} rows (B · T): matmul_bias_tiled takes at most {MAX_ROWS:,}")


def matmul_bias(a: CudaArray, w: CudaArray, bias: CudaArray | None = None) -> CudaArray:
    """`reference.matmul_bias` on float32 CuPy arrays; raises InputError.

    At most 1,048,560 rows: the grid's second axis counts tiles of 16 rows.
    """
    return bind(contiguous(a, w, bias)).run()
