"""The NumPy meaning of every operation: what a kernel must compute, readable against the formula.

float32 in, float32 out; float64 in, float64 out. float64 is the truth that everything else is held
against. Shapes: B batch, T sequence length, C channels (n_embd), NH heads (n_head), HS = C / NH.
Every function takes (T, C) as well as (B, T, C).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from gpt2block.weights import BlockWeights

Array = NDArray[np.floating[Any]]


def encoder(ids: NDArray[np.integer[Any]], wte: Array, wpe: Array) -> Array:
    """Token plus position embedding. ids (..., T), wte (V, C), wpe (n_ctx, C) → (..., T, C)."""
    embedded: Array = wte[ids] + wpe[: ids.shape[-1]]
    return embedded


def layernorm(x: Array, gamma: Array, beta: Array, eps: float = 1e-5) -> Array:
    """(x - mean) / sqrt(var + eps) · γ + β over the last axis.

    x (..., C), gamma (C,), beta (C,) → (..., C). Source: Ba et al., "Layer Normalization" (2016).
    """
    mean: Array = x.mean(axis=-1, keepdims=True)
    var: Array = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    std: Array = np.sqrt(var + eps)
    return (x - mean) / std * gamma + beta


def layernorm_stats(x: Array, eps: float = 1e-5) -> tuple[Array, Array]:
    """What LayerNorm keeps of each row for a backward pass: mean and 1 / sqrt(var + eps).

    x (..., C) → (...), (...).
    """
    mean: Array = x.mean(axis=-1)
    var: Array = ((x - mean[..., None]) ** 2).mean(axis=-1)
    rstd: Array = 1 / np.sqrt(var + eps)
    return mean, rstd


def matmul_bias(a: Array, w: Array, bias: Array | None = None) -> Array:
    """a · w + bias. a (..., K), w (K, N), bias (N,) or None → (..., N)."""
    return a @ w if bias is None else a @ w + bias


def attention(qkv: Array, n_head: int, causal: bool = False) -> Array:
    """softmax(Q Kᵀ / sqrt(HS)) V for each head.

    qkv (..., T, 3C): a row is [Q | K | V] with the heads packed side by side inside each.
    → (..., T, C). With `causal`, row i sees keys 0…i; what lies beyond is skipped, NaN or not.
    Source: Vaswani et al., "Attention Is All You Need" (2017).
    """
    *batch, T, three_c = qkv.shape
    heads = qkv.reshape(*batch, T, 3, n_head, three_c // 3 // n_head)
    out = np.empty_like(heads[..., 0, :, :])  # (..., T, NH, HS)
    for h in range(n_head):
        q, k, v = (heads[..., i, h, :] for i in range(3))  # (..., T, HS)
        scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])  # (..., T, T)
        out[..., h, :] = _weighted_sum(softmax(scores, causal), v, causal)
    return out.reshape(*batch, T, three_c // 3)


def softmax(scores: Array, causal: bool = False) -> Array:
    """exp(s - max) / Σ exp(s - max) over the last axis; a score of -inf weighs exactly nothing.

    With `causal`, scores are (..., T, T) and row t sees columns 0…t: the others are 0, and what
    stood there is skipped, NaN or not. What a row of -inf alone sees becomes NaN.
    """
    if causal:
        seen = np.tri(scores.shape[-1], dtype=bool)
        causal_weights: Array = np.where(seen, softmax(np.where(seen, scores, -np.inf)), 0)
        return causal_weights
    weights: Array = np.exp(scores - scores.max(axis=-1, keepdims=True))
    total: Array = weights.sum(axis=-1, keepdims=True)
    return weights / total


def _weighted_sum(p: Array, v: Array, causal: bool) -> Array:
    """p · v, where a masked row of v is skipped even when it is NaN (0 · NaN would be NaN).

    p (..., T, T), v (..., T, HS) → (..., T, HS).
    """
    finite = np.isfinite(v)
    if finite.all():
        return p @ v
    out = p @ np.where(finite, v, 0)
    for t in np.flatnonzero(~finite.all(axis=(*range(v.ndim - 2), -1))):
        seen = slice(t if causal else 0, None)  # the rows that see key t
        out[..., seen, :] += p[..., seen, t, None] * np.where(finite, 0, v)[..., None, t, :]
    return out


def trimat(qkv: Array, fill: float | None = None) -> Array:
    """The causal half of Q Kᵀ / sqrt(HS) for each head: what a query may see.

    qkv (B, T, 3, NH, HS), of which Q and K are used → (B, NH, T, T). Above the diagonal stands
    `fill`; None leaves that half unspecified, and NaN stands there so that nobody relies on it.
    """
    q, k = (qkv[:, :, i].swapaxes(1, 2) for i in range(2))  # (B, NH, T, HS)
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    above = scores.dtype.type(math.nan if fill is None else fill)
    result: Array = np.where(np.tri(q.shape[-2], dtype=bool), scores, above)
    return result


def add(a: Array, b: Array) -> Array:
    """a + b, the residual connection. Same shapes."""
    return a + b


def gelu(x: Array) -> Array:
    """0.5 x (1 + tanh(sqrt(2/π) (x + 0.044715 x³))), GPT-2's GELU.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), the tanh approximation.
    """
    cube = x * x * x  # x**3 calls pow, twenty times slower
    tanh: Array = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * cube))
    return 0.5 * x * (1 + tanh)


def layernorm_gelu(
    x: Array, gamma: Array | None = None, beta: Array | None = None, eps: float = 1e-5
) -> Array:
    """GELU of LayerNorm over the last axis; gamma and beta (C,) may each be missing. → as x."""
    C = x.shape[-1]
    gamma = np.ones(C, x.dtype) if gamma is None else gamma
    beta = np.zeros(C, x.dtype) if beta is None else beta
    return gelu(layernorm(x, gamma, beta, eps))


def block_forward(x: Array, w: BlockWeights, causal: bool = False) -> Array:
    """The ten-step Pre-LN block. x (T, C) or (B, T, C) → same shape, in the dtype of x."""
    w = w.astype(x.dtype)
    ln1 = layernorm(x, w.gamma1, w.beta1, w.eps)
    qkv = matmul_bias(ln1, w.w_qkv, w.b_qkv)
    attn = attention(qkv, w.n_head, causal)
    proj = matmul_bias(attn, w.w_attn, w.b_attn)
    x1 = add(x, proj)
    ln2 = layernorm(x1, w.gamma2, w.beta2, w.eps)
    ff1 = matmul_bias(ln2, w.w_fc, w.b_fc)
    ff2 = matmul_bias(gelu(ff1), w.w_proj, w.b_proj)
    return add(x1, ff2)
