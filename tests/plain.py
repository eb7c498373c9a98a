"""The plain float32 evaluation that every kernel's error is measured against.

Each sum is one sequential chain of multiply and add, rounded to float32 at every step: the textbook
loop, not BLAS, whose blocked sums are several times more accurate. A kernel's error may be twice
the error of this evaluation plus a rounding term (the rule of flash-attention's tests). `xp` is
NumPy or CuPy.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gpt2block import reference

Array = Any  # a NumPy or CuPy array, float32


def normal(seed: int, *shape: int) -> Array:
    """Return normal values with mean 0.5, so that an omitted mean or bias changes results."""
    return (np.random.default_rng(seed).standard_normal(shape) + 0.5).astype(np.float32)


def exact(name: str, *arguments: Any, **attrs: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Call a function of `reference` with all NumPy arrays but integer ones in float64."""
    wide = [
        a.astype(np.float64) if isinstance(a, np.ndarray) and a.dtype.kind not in "iu" else a
        for a in arguments
    ]
    return np.asarray(getattr(reference, name)(*wide, **attrs))


def running_sum(terms: Array, xp: Any = np) -> Array:
    """Sum over the last axis, one term after the other. (..., n) → (..., 1)."""
    total = xp.zeros((*terms.shape[:-1], 1), dtype=xp.float32)
    for i in range(terms.shape[-1]):
        total = total + terms[..., i : i + 1]
    return total


def product(a: Array, b: Array, xp: Any = np, dtype: Any = np.float32) -> Array:
    """Return a · b, (..., M, K) · (..., K, N), adding along K in order, in `dtype`.

    CuPy's own product needs cuBLAS, which an installation of this package does not have.
    """
    total = xp.zeros((*a.shape[:-1], b.shape[-1]), dtype)
    for k in range(a.shape[-1]):
        total = total + a[..., k : k + 1] * b[..., k : k + 1, :]
    return total


def fused_product(a: Array, b: Array, xp: Any = np) -> Array:
    """Return a · b as `product`, with a fused multiply-add for each term."""
    total, wide = xp.zeros((*a.shape[:-1], b.shape[-1]), np.float32), b.astype(np.float64)
    for k in range(a.shape[-1]):
        total = (total + a[..., k : k + 1] * wide[k : k + 1]).astype(np.float32)
    return total


def layernorm(x: Array, gamma: Array, beta: Array, eps: float = 1e-5, xp: Any = np) -> Array:
    C = xp.float32(x.shape[-1])
    mean = running_sum(x, xp) / C
    var = running_sum((x - mean) * (x - mean), xp) / C
    return (x - mean) / xp.sqrt(var + xp.float32(eps)) * gamma + beta


def tensor_core_product(a: Array, w: Array, xp: Any = np) -> Array:
    """Return a (..., K) · w (K, N) as tensor cores add: 16 terms at once, truncated to float32.

    Because they truncate instead of rounding, their long sums are less accurate than float32 sums.
    """
    total = xp.zeros((*a.shape[:-1], w.shape[1]), xp.float32)
    for k in range(0, a.shape[-1], 16):
        parts = a[..., k : k + 16].astype(xp.float64), w[k : k + 16].astype(xp.float64)
        exact = total.astype(xp.float64) + product(*parts, xp, xp.float64)
        total = exact.astype(xp.float32)
        over = xp.abs(total) > xp.abs(exact)
        total = xp.where(over, xp.nextafter(total, xp.float32(0)), total)
    return total


def matmul_bias(a: Array, w: Array, bias: Array | None = None, xp: Any = np) -> Array:
    total = product(a, w, xp)
    return total if bias is None else total + bias


def attention(
    qkv: Array, n_head: int, causal: bool = False, xp: Any = np, window: int | None = None
) -> Array:
    *batch, T, three_c = qkv.shape
    heads = qkv.reshape(*batch, T, 3, n_head, -1)
    q, k, v = (xp.swapaxes(heads[..., i, :, :], -2, -3) for i in range(3))  # (..., NH, T, HS)
    scores = product(q, xp.swapaxes(k, -1, -2), xp) / xp.float32(math.sqrt(q.shape[-1]))
    if causal:
        scores = xp.where(visible(T, window, xp), scores, xp.float32(-np.inf))
    p = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    out = product(p, v, xp) / running_sum(p, xp)
    return xp.ascontiguousarray(xp.swapaxes(out, -2, -3)).reshape(*batch, T, three_c // 3)


def visible(T: int, window: int | None, xp: Any = np) -> Array:
    """Return a causal mask (T, T): a row sees keys up to its own, or the last `window` of them."""
    every: Array = xp.tri(T, dtype=bool)
    return every if window is None else every & ~xp.tri(T, k=-window, dtype=bool)


def add(a: Array, b: Array, xp: Any = np) -> Array:
    return a + b


def gelu(x: Array, xp: Any = np) -> Array:
    inner = xp.float32(math.sqrt(2 / math.pi)) * (x + xp.float32(0.044715) * x * x * x)
    return xp.float32(0.5) * x * (xp.float32(1) + xp.tanh(inner))


def rope(
    x: Array, start: int = 0, theta: float = 1e4, half_split: bool = False
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Compute RoPE with each step rounded to float32, and the result to the dtype of x (NumPy)."""
    T, D = x.shape[-3], x.shape[-1]
    position = np.arange(start, start + T, dtype=np.float32)[:, None, None]
    angle = position / np.float32(theta) ** (np.arange(0, D, 2, dtype=np.float32) / np.float32(D))
    wide = x.astype(np.float32)
    out = np.empty_like(wide)
    first, second = (np.s_[: D // 2], np.s_[D // 2 :]) if half_split else (np.s_[::2], np.s_[1::2])
    r, i = wide[..., first], wide[..., second]
    out[..., first] = r * np.cos(angle) - i * np.sin(angle)
    out[..., second] = r * np.sin(angle) + i * np.cos(angle)
    return np.asarray(out.astype(x.dtype).astype(np.float32))


def block_forward(x: Array, w: dict[str, Array], n_head: int, causal: bool, xp: Any = np) -> Array:
    """Compute the ten steps of a GPT-2 block; `w` maps the twelve names to arrays of `xp`."""
    ln1 = layernorm(x, w["gamma1"], w["beta1"], xp=xp)
    attn = attention(matmul_bias(ln1, w["w_qkv"], w["b_qkv"], xp), n_head, causal, xp)
    x1 = x + matmul_bias(attn, w["w_attn"], w["b_attn"], xp)
    ff1 = matmul_bias(layernorm(x1, w["gamma2"], w["beta2"], xp=xp), w["w_fc"], w["b_fc"], xp)
    return x1 + matmul_bias(gelu(ff1, xp), w["w_proj"], w["b_proj"], xp)


def rounding(truth: Array) -> float:
    """Return flash-attention's rounding term: twice the largest error of adding and subtracting 0.3
    in float32.
    """
    values = np.asarray(truth, dtype=np.float32)
    return 2 * float(np.abs(values + np.float32(0.3) - np.float32(0.3) - values).max())


def rounding_of_bfloat16_terms(x: Array, w: Array) -> float:
    """Return a bound of the change of GELU(x w), or x w, if x (M, K) is two terms of bfloat16.

    Rounding to bfloat16 errs by at most 2^-9 of the value, so two terms err by at most 2^-18 of x.
    The slope of GELU is below 1.13.
    """
    return 1.13 * 2.0**-18 * float((np.abs(x).astype(np.float64) @ np.abs(w)).max())


def assert_as_accurate(got: Array, truth: Array, plain: Array, terms: float = 0.0) -> None:
    """Assert that the error of `got` against float64 `truth` is at most twice the error of `plain`
    plus a rounding term.

    terms: further error that the representation of the operands permits.
    """
    assert got.shape == truth.shape
    assert got.dtype == np.float32
    assert np.isfinite(got).all(), "an element was not written"
    error = float(np.abs(got - truth).max())
    limit = 2 * float(np.abs(plain - truth).max()) + rounding(truth) + terms
    assert error <= limit, f"error {error:.3g} is over {limit:.3g}"
