"""The linear layer on CUDA: matmul/decode.cu for few rows; with k and v into the KV cache."""

from __future__ import annotations

from math import gcd, prod
from typing import Any

from gpt2block.checks import check_flag
from gpt2block.config import check_eps
from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    check,
    check_apart,
    contiguous,
    device_attribute,
    launch_at,
    output,
)
from gpt2block.cuda.kernels import FP8
from gpt2block.errors import InputError
from gpt2block.operations._types import Geometry
from gpt2block.operations.linear import FEW_ROWS, FILE, OPERATION, geometry, order
from gpt2block.ops._warm import call
from gpt2block.weights.matrix import WeightMatrix

MOST_BLOCKS = 65535  # along the grid's second axis
CACHE_BESIDE_FP8 = "bfloat16"
LARGEST = 2**31 - 2**16  # N: what an int holds, and a block more


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    gelu: bool = False,
    eps: float = 1e-5,
    variant: str | None = None,
) -> Bound:
    """inputs (x (..., K), w, bias, gamma, beta, residual (..., N)), out (..., N).

    w: a WeightMatrix (N, K). What follows it may be None, or missing; residual may be out.
    """
    x, w, bias, gamma, beta, residual = (*inputs, *(None,) * 4)[:6]
    gelu = check_flag("gelu", gelu)
    check_eps(eps)
    shape = getattr(x, "shape", ())
    few = bool(shape) and prod(shape[:-1]) <= FEW_ROWS
    chosen = ("matvec" if few or gamma is not None else "tiles") if variant is None else variant
    if OPERATION.variant(chosen).name == "tiles":
        from gpt2block.ops._linear_tiles import bind_tiles  # noqa: PLC0415

        if gamma is not None or beta is not None:
            raise InputError("linear variant tiles: takes no gamma and beta: use variant matvec")
        return bind_tiles((x, w, bias, residual), out, gelu=gelu)

    K, M = _rows("x", x)
    _check_product(w, K, bias)
    _check_norm(gamma, beta, K)
    shape = (*x.shape[:-1], w.N)
    if residual is not None:
        check("residual", residual, shape)
    given = {"x": x, "w": w, "bias": bias, "gamma": gamma, "beta": beta}
    out = output(out, shape, apart=given, in_place={"residual": residual})
    where = _where("linear_matvec", M, w, norm=gamma is not None)
    args = (x, gamma, beta, w.data, w.scale, bias, residual, out, float(eps), M, w.N, int(gelu))
    return Bound(out, (_launch(where, args, w),))


def bind_qkv(
    x: CudaArray,
    w: WeightMatrix,
    bias: CudaArray | None,
    gamma: CudaArray | None,
    beta: CudaArray | None,
    k_cache: CudaArray,
    v_cache: CudaArray,
    position: CudaArray,
    q: CudaArray | None = None,
    eps: float = 1e-5,
) -> Bound:
    """LayerNorm(x) W + bias: q (M, C), and k and v of row m into position[m] of its cache.

    x (M, K), w a WeightMatrix (3C, K), caches (M, n_ctx, C) in the dtype of the weights, beside
    FP8 in bfloat16, position int32 (M,). At a position outside 0 … n_ctx - 1 the cache stays as it
    is. Without gamma and beta, x is taken as it is. `out` is q. Raises InputError.
    """
    if getattr(x, "ndim", 2) != 2:
        raise InputError(f"x: expected (M, K), got {x.shape}")
    K, M = _rows("x", x)
    _check_product(w, K, bias)
    _check_norm(gamma, beta, K)
    if w.N % 3:
        raise InputError(f"w: expected 3C outputs for q, k and v, got {w.N}")
    C = w.N // 3
    kept = CACHE_BESIDE_FP8 if w.dtype in FP8 else w.dtype
    check("k_cache", k_cache, dtype=kept)
    if k_cache.ndim != 3 or (k_cache.shape[0], k_cache.shape[2]) != (M, C):
        raise InputError(f"k_cache: expected ({M}, n_ctx, {C}), got {k_cache.shape}")
    check("v_cache", v_cache, k_cache.shape, kept)
    check("position", position, (M,), "int32")
    given = {"x": x, "w": w, "bias": bias, "gamma": gamma, "beta": beta, "position": position}
    q = output(q, (M, C), name="q", apart=given)
    check_apart("k_cache", k_cache, {**given, "q": q})
    check_apart("v_cache", v_cache, {**given, "q": q, "k_cache": k_cache})
    where = _where("qkv_matvec", M, w, norm=gamma is not None)
    n_ctx = k_cache.shape[1]
    product = (x, gamma, beta, w.data, w.scale, bias)
    args = (*product, position, q, k_cache, v_cache, float(eps), M, C, n_ctx)
    return Bound(q, (_launch(where, args, w, kept),))


def _rows(name: str, x: Any) -> tuple[int, int]:
    """K and M of an activation (..., K)."""
    check(name, x)
    K = int(x.shape[-1])
    _aligned(name, x, 4 * gcd(4, K))
    return K, x.size // K


def _check_product(w: Any, K: int, bias: Any) -> None:
    if not isinstance(w, WeightMatrix):
        raise InputError(f"w: expected a WeightMatrix, got {type(w).__name__}: use .quantize")
    if w.layout != "NK":
        raise InputError(f"w: expected layout 'NK', (N, K) in memory, got {w.layout!r}")
    check("w", w.data, dtype="uint8" if w.dtype in FP8 else w.dtype)
    if w.K != K:
        raise InputError(f"w: expected K {K} to match the input, got {w.K}")
    if w.N > LARGEST:
        raise InputError(f"w: expected at most {LARGEST:,} outputs, got {w.N:,}")
    _aligned("w", w.data, order(w.N, K, w.data.itemsize)[0] * w.data.itemsize)
    if w.scale is not None:
        check("scale", w.scale, (w.N,))
    if bias is not None:
        check("bias", bias, (w.N,))


def _check_norm(gamma: Any, beta: Any, K: int) -> None:
    if (gamma is None) != (beta is None):
        raise InputError("gamma and beta: expected both, or neither")
    for name, array in (("gamma", gamma), ("beta", beta)):
        if array is not None:
            check(name, array, (K,))
            _aligned(name, array, 4 * gcd(4, K))


def _aligned(name: str, array: CudaArray, size: int) -> None:
    if array.data.ptr % size:
        raise InputError(f"{name}: expected data aligned to {size} bytes: pass a copy")


def _where(kernel: str, M: int, w: WeightMatrix, **options: Any) -> Geometry:
    most_shared = device_attribute("MaxSharedMemoryPerBlockOptin") - 1024  # static, and its own
    sms = device_attribute("MultiProcessorCount")
    size = w.data.itemsize
    where = geometry(kernel, M, w.N, w.K, size, sms=sms, most_shared=most_shared, **options)
    if where is None:
        raise InputError(
            f"K {w.K:,}: a row does not fit in the {most_shared:,} bytes of this GPU's shared "
            "memory: variant tiles has no such limit"
        )
    if where.grid[1] > MOST_BLOCKS:
        raise InputError(f"{M:,} rows: too many for matvec: use variant tiles")
    return where


def _launch(
    where: Geometry, args: tuple[Any, ...], w: WeightMatrix, kept: str | None = None
) -> Any:
    """kept: what the kernel's `T` is; that of the weights, or float32, where it has none."""
    if w.dtype in FP8:
        return launch_at(FILE, where, args, storage=kept or "float32", weights=w.dtype)
    return launch_at(FILE, where, args, storage=w.dtype)


def linear(
    x: CudaArray,
    w: WeightMatrix,
    bias: CudaArray | None = None,
    gamma: CudaArray | None = None,
    beta: CudaArray | None = None,
    residual: CudaArray | None = None,
    gelu: bool = False,
    eps: float = 1e-5,
    variant: str | None = None,
) -> CudaArray:
    """`reference.linear` on CuPy arrays; raises InputError.

    x (..., K), bias (N,), gamma and beta (K,), residual (..., N): float32. w: a `WeightMatrix` in
    layout "NK", of any dtype. Without a variant: matvec up to 16 rows and with gamma, else tiles.
    A row's result is the same bits alone and among others, as long as the variant is the same.
    """
    inputs = (*contiguous(x), w, *contiguous(bias, gamma, beta, residual))
    return call(bind, inputs, gelu=gelu, eps=eps, variant=variant).out
