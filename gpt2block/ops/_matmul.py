"""Matrix product with bias on CUDA: matmul/skeleton.cu, matmul/ladder.cu, matmul/registers.cu."""

from __future__ import annotations

from math import prod
from typing import Any

from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    Shape,
    check,
    contiguous,
    device_attribute,
    launch_at,
    output,
)
from gpt2block.errors import InputError
from gpt2block.operations.matmul import OPERATION, TILE, geometry
from gpt2block.ops._warm import call

MAX_ROWS = 65535 * TILE  # of the variant tiled: the grid's second axis
MAX_SIZE = 2**31 - 1024  # of M, K and N: what an int holds, and a tile more


def bind(inputs: tuple[Any, ...], out: CudaArray | None = None, *, variant: str = "tiled") -> Bound:
    """inputs (a (..., K), w (K, N), bias (N,) or None), out (..., N)."""
    a, w, bias = inputs
    chosen = OPERATION.variant(variant)
    check("a", a)
    check("w", w)
    K = a.shape[-1]
    if w.ndim != 2 or w.shape[0] != K:
        raise InputError(f"w: expected shape ({K}, N) to match a {a.shape}, got {w.shape}")
    N = w.shape[1]
    if bias is not None:
        check("bias", bias, (N,))
    if chosen.name == "tiled":
        check_limits(a.shape)
    M = a.size // K
    if max(M, K, N) > MAX_SIZE:
        raise InputError(f"a {a.shape}, w {w.shape}: expected at most {MAX_SIZE:,} rows or columns")
    out = output(out, (*a.shape[:-1], N), apart={"a": a, "w": w, "bias": bias})

    width = 1 if N % 4 or w.data.ptr % 16 or out.data.ptr % 16 else 4
    how = geometry(chosen, M, N, width, device_attribute("MultiProcessorCount"))
    return Bound(out, (launch_at(chosen.file, how, (a, w, bias, out, M, K, N)),))


def check_limits(a: Shape, *_: Shape) -> None:
    """InputError when the rows pass the grid's second axis."""
    rows = prod(a[:-1])
    if rows > MAX_ROWS:
        raise InputError(f"{rows:,} rows (B · T): matmul_bias_tiled takes at most {MAX_ROWS:,}")


def matmul_bias(
    a: CudaArray, w: CudaArray, bias: CudaArray | None = None, variant: str = "tiled"
) -> CudaArray:
    """`reference.matmul_bias` on float32 CuPy arrays; raises InputError.

    a (..., K), w (K, N), bias (N,) or None → (..., N). Variants: naive, tiled, coarsened,
    registers. The variant tiled takes at most 1,048,560 rows: its grid's second axis counts tiles
    of 16 rows. All but registers add the products of an output in the order of k.
    """
    return call(bind, contiguous(a, w, bias), variant=variant).out
