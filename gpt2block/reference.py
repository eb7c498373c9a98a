"""The NumPy reference of every operation, written to be easily compared with the formula.

A function computes in its input's dtype, float32 or float64, and returns this dtype. For 16-bit
inputs, `takes` converts arguments to float32 and results back. Kernels are compared with the
reference in float64. Shapes: B batch, T sequence length, C channels (n_embd), NH heads (n_head),
HS = C / NH. Functions accept (T, C) and (B, T, C). `takes` checks the arguments against the
contract in its line, and raises InputError.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpt2block.checks import as_float, check_blocks, check_integer, is_plain, normed_together
from gpt2block.contract import Contract, takes, unchecked
from gpt2block.errors import InputError, shown
from gpt2block.models.config import RECENT, SAVED
from gpt2block.models.number_formats import from_fp8 as from_fp8  # noqa: PLC0414  (in this module)
from gpt2block.models.number_formats import hi_lo as hi_lo  # noqa: PLC0414
from gpt2block.models.number_formats import joined as joined  # noqa: PLC0414
from gpt2block.models.number_formats import to_fp8 as to_fp8  # noqa: PLC0414
from gpt2block.sampling import MAX_ALTERNATIVES, Sampling, check_alternatives, choose, rows_of

if TYPE_CHECKING:
    from gpt2block.files.parameters.gpt2 import BlockWeights
    from gpt2block.files.parameters.llama import LlamaBlockWeights
    from gpt2block.models.weights.matrix import WeightMatrix

Array = NDArray[np.floating]
Integers = NDArray[np.integer]
Matrix: TypeAlias = "Array | WeightMatrix"  # weights (K, N)
Growth = tuple[float, int] | None  # (β, n): a query's factor grows with its position

# Number of queries that attention_cached processes together, to skip keys after the last of these
# queries. Products of 16 queries (16 x 256 x 64) are too small for BLAS to use several threads;
# waking threads on a busy machine may take longer than the product.
QUERIES = 16
MATCH = 3  # draft_tokens searches for an earlier occurrence of up to 3 last tokens


@takes("ids i32 ... T; wte f32 V C; wpe f32 P C -> out f32 ... T C")
def encoder(ids: Integers, wte: Array, wpe: Array) -> Array:
    """Add token and position embeddings. ids (..., T), wte (V, C), wpe (n_ctx, C) → (..., T, C)."""
    _check_places("ids", ids, len(wte))
    if ids.shape[-1] > len(wpe):
        raise InputError(f"ids: {ids.shape[-1]} tokens, wpe has {len(wpe)} positions")
    embedded: Array = wte[ids] + wpe[: ids.shape[-1]]
    return embedded


@takes("ids positions i32 N; wte table V C; wpe? f32 P C -> out f32 N C")
def encoder_rows(
    ids: Integers, positions: Integers, wte: Matrix, wpe: Array | None = None, factor: float = 1.0
) -> Array:
    """Add token and position embeddings, with a separate position for each token.

    ids (N,), positions (N,), wte (V, C) or a WeightMatrix, wpe (n_ctx, C) → (N, C). Without wpe,
    only the rows of wte are returned. factor: multiplies the rows of wte.
    """
    table: Array = wte if isinstance(wte, np.ndarray) else wte.dequantized().T
    _check_places("ids", ids, len(table))
    embedded: Array = table[ids] if factor == 1 else table[ids] * table.dtype.type(factor)
    if wpe is None:
        return embedded
    _check_places("positions", positions, len(wpe))
    placed: Array = embedded.astype(wpe.dtype, copy=False) + wpe[positions]
    return placed


@takes("x any ... C; gamma beta other C -> out out_dtype ... C; mean? rstd? f32 ...")
def layernorm(x: Array, gamma: Array, beta: Array, eps: float = 1e-5) -> Array:
    """LayerNorm: (x - mean) / sqrt(var + eps) · γ + β over the last axis.

    x (..., C), gamma (C,), beta (C,) → (..., C). Source: Ba et al., "Layer Normalization" (2016).
    """
    mean: Array = x.mean(axis=-1, keepdims=True)
    var: Array = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    std: Array = np.sqrt(var + eps)
    return (x - mean) / std * gamma + beta


@takes("x any ... C -> mean rstd f32 ...")
def layernorm_stats(x: Array, eps: float = 1e-5) -> tuple[Array, Array]:
    """Return mean and 1 / sqrt(var + eps) of each row, which LayerNorm's backward pass uses.

    x (..., C) → (...), (...).
    """
    mean: Array = x.mean(axis=-1)
    var: Array = ((x - mean[..., None]) ** 2).mean(axis=-1)
    rstd: Array = 1 / np.sqrt(var + eps)
    return mean, rstd


@takes("a f32 ... K; w f32 K N; bias? f32 N -> out f32 ... N")
def matmul_bias(a: Array, w: Array, bias: Array | None = None) -> Array:
    """Matrix product a · w + bias. a (..., K), w (K, N), bias (N,) or None → (..., N)."""
    return a @ w if bias is None else a @ w + bias


@takes(
    "qkv mixed ... T W -> out mixed ... T W*n_head//(n_head+2*n_kv_head); "
    "scores? f32 ... n_head T T"
)
def attention(
    qkv: Array,
    n_head: int,
    causal: bool = False,
    n_kv_head: int | None = None,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> Array:
    """Attention: softmax(Q Kᵀ / sqrt(HS)) V for each head.

    qkv (..., T, 3C) → (..., T, C). A row of qkv is [Q | K | V]; each part has the channels of head
    0, then of head 1, and so on. With `causal`, row i sees keys 0…i; later keys have no effect,
    even if NaN. With n_kv_head < n_head, Q has n_head heads and K and V have n_kv_head heads each;
    each head of K and V is shared by n_head / n_kv_head neighbouring heads of Q. softmax_scale:
    replaces 1 / sqrt(HS). window: with `causal`, row i sees only keys i - window + 1…i.
    Sources: Vaswani et al., "Attention Is All You Need" (2017); Ainslie et al., "GQA" (2023).
    """
    *batch, T, width = qkv.shape
    shared = n_head if n_kv_head is None else n_kv_head
    if n_head % shared or width % (n_head + 2 * shared):
        rows = f"3C, C a multiple of n_head {n_head}"
        if n_kv_head is not None:
            rows = (
                f"{n_head} + 2 · {shared} heads, where the first number is a multiple of the other"
            )
        raise InputError(f"qkv: expected rows of {rows}, got {width}")
    if window is not None and not causal:
        raise InputError("window: needs causal=True")
    visible = _visible_keys(T, T, 0, window) if causal else None
    heads = qkv.reshape(*batch, T, n_head + 2 * shared, -1)
    out = np.empty_like(heads[..., :n_head, :])  # (..., T, NH, HS)
    for h in range(n_head):
        at = n_head + h * shared // n_head  # index of the head of K
        q, k, v = (heads[..., i, :] for i in (h, at, at + shared))  # (..., T, HS)
        p = _attention_weights(q, k, visible, softmax_scale)  # (..., T, T)
        out[..., h, :] = _weighted_sum(p, v, visible)
    return out.reshape(*batch, T, -1)


@takes("q f32 T Q; k v kv P C -> out f32 T Q")
def attention_cached(
    q: Array,
    k: Array,
    v: Array,
    start: int,
    n_head: int,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> Array:
    """Causal attention of a sequence's new tokens over its cached and new keys and values.

    q (T, C), queries at positions start … start + T - 1; k, v (start + T, C), of which further rows
    are ignored → (T, C), in the dtype of q. The query at position p sees keys 0…p. k and v may have
    fewer heads; each is then shared by equally many neighbouring heads of q. softmax_scale, window:
    as in `attention`.
    """
    T, C = q.shape
    HS, n_kv_head = C // n_head, k.shape[1] * n_head // C
    wrong = C % n_head or n_kv_head * HS != k.shape[1] or n_head % max(1, n_kv_head)
    if wrong or start + T > len(k):
        raise InputError(
            f"expected C a multiple of n_head {n_head}, heads of q a multiple of those of k, and "
            f"keys of start + T = {start + T} tokens, got q {q.shape}, k {k.shape}"
        )
    k, v = (a[: start + T].astype(q.dtype, copy=False) for a in (k, v))
    if T > QUERIES:
        firsts = range(0, T, QUERIES)
        parts = [
            unchecked(attention_cached)(
                q[t : t + QUERIES], k, v, start + t, n_head, softmax_scale, window
            )
            for t in firsts
        ]
        return np.concatenate(parts)
    past = 0 if window is None else max(0, start - window + 1)  # number of keys before all windows
    k, v, start = k[past:], v[past:], start - past
    visible = _visible_keys(T, start + T, start, window)
    # G heads of q share a head of k: q (KV heads, G, T, HS), k (KV heads, 1, start + T, HS).
    q = q.reshape(T, n_kv_head, -1, HS).transpose(1, 2, 0, 3)
    k, v = (a.reshape(-1, n_kv_head, 1, HS).transpose(1, 2, 0, 3) for a in (k, v))
    p = _attention_weights(q, k, visible, softmax_scale)  # (KV heads, G, T, start + T)
    if np.isfinite(v).all():
        out: Array = p @ v
    else:  # masked NaNs must not count, but 0 · NaN is NaN
        each = enumerate(visible)
        parts = [p[:, :, t : t + 1, keys] @ v[:, :, keys] for t, keys in each]
        out = np.concatenate(parts, axis=2)
    return np.ascontiguousarray(out.transpose(2, 0, 1, 3)).reshape(T, C)


@takes("qkv mixed N W; k v kv B P C; row position i32 N -> k v kv B P C")
def kv_append(qkv: Array, k: Array, v: Array, row: Integers, position: Integers) -> Array:
    """Write K and V of rows [Q | K | V] into a kv_cache, in place; return the cache's `k`.

    qkv (N, Q + 2C), rows [Q | K | V] with Q at least C; k, v (B, n_ctx, C); row n belongs to
    sequence row[n], at position[n].
    """
    C = k.shape[-1]
    if qkv.shape[1] < 3 * C or qkv.shape[1] % C:
        raise InputError(
            f"qkv: expected (N, {3 * C}), or more queries of k's {C} channels, got {qkv.shape}"
        )
    _check_places("row", row, len(k))
    _check_places("position", position, k.shape[1])
    new = qkv[:, -2 * C :].astype(k.dtype, copy=False)
    k[row, position], v[row, position] = new[:, :C], new[:, C:]
    return k


@takes(
    "bcx f32 M W; taps f32 C 1 L; bias? f32 C; k? kv B P C; row position i32 M "
    "-> out out_dtype M C; k? kv B P C"
)
def short_conv(
    bcx: Array, taps: Array, bias: Array | None, k: Array | None, row: Integers, position: Integers
) -> Array:
    """Compute y_t = C_t · (bias + Σ_j taps_j · u_(t - L + 1 + j)), u = B · x, in each channel.

    bcx (M, 3C), rows [B | C | x]; taps (C, 1, L), bias (C,) → y (M, C). Row m belongs to sequence
    row[m], at position[m]; u is 0 before position 0. k (n, n_ctx, C) has u of earlier positions,
    and receives u of these rows, rounded to its dtype; without k, all sequences begin here.
    """
    C, _, L = taps.shape
    if bcx.shape[1] != 3 * C:
        raise InputError(f"bcx: expected (M, {3 * C}) for taps of {C} channels, got {bcx.shape}")
    b, c, x = np.split(bcx, 3, axis=1)
    if k is None:
        k = np.zeros((int(row.max()) + 1, int(position.max()) + 1, C), bcx.dtype)
    _check_places("row", row, len(k))
    _check_places("position", position, k.shape[1])
    k[row, position] = (b * x).astype(k.dtype, copy=False)
    sums: Array = np.zeros_like(b) if bias is None else np.broadcast_to(bias, b.shape)
    for j in range(L):
        at = position - (L - 1 - j)
        earlier = k[row, np.maximum(at, 0)].astype(b.dtype, copy=False)
        sums = sums + taps[:, 0, j] * np.where(at[:, None] >= 0, earlier, 0)
    return c * sums


@takes("qkv any N W -> qkv any N W")
def kv_round(qkv: Array, n_head: int, n_kv_head: int, kv_dtype: str) -> Array:
    """Round K and V in rows [Q | K | V] to numbers of the FP8 format `kv_dtype`.

    qkv (N, W), rows [Q | K | V] → (N, W); Q is unchanged. kv_dtype: "float8_e5m2" or
    "float8_e4m3fn". Magnitudes above the largest FP8 number become this number.
    """
    heads = n_head + 2 * n_kv_head
    if qkv.shape[1] % heads:
        raise InputError(f"qkv: expected (N, W) of {heads} heads, got {qkv.shape}")
    Q = qkv.shape[1] // heads * n_head
    rounded = from_fp8(to_fp8(qkv[:, Q:], kv_dtype), kv_dtype)
    return np.concatenate([qkv[:, :Q], rounded.astype(qkv.dtype)], axis=1)


@takes("qkv any N W; k v kv B P C; cu_seqlens i32 B+1; start i32 B -> out any N W-2*C")
def attention_packed(
    qkv: Array,
    k: Array,
    v: Array,
    cu_seqlens: Integers,
    start: Integers,
    n_head: int,
    longest: int | None = None,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> Array:
    """Compute `attention_cached` for several sequences, whose rows in qkv are concatenated.

    qkv (N, Q + 2C), rows [Q | K | V]; k, v (B, n_ctx, C), which already contain the new keys and
    values → (N, Q). Rows cu_seqlens[b] to cu_seqlens[b + 1] - 1 belong to sequence b, at positions
    from start[b] on. longest: number of rows of the longest sequence, used only by kernels.
    """
    C = k.shape[-1]
    Q = qkv.shape[1] - 2 * C
    if Q < C or Q % C or len(cu_seqlens) != len(k) + 1:
        raise InputError(
            f"expected qkv (N, {3 * C}), or more queries, and cu_seqlens ({len(k) + 1},), as k is "
            f"{k.shape}, got {qkv.shape} and {cu_seqlens.shape}"
        )
    return unchecked(attention_queries)(
        qkv[:, :Q], k, v, cu_seqlens, start, n_head, longest, softmax_scale, window
    )


@takes("q any N Q; k v kv B P C; cu_seqlens i32 B+1; start i32 B -> out any N Q")
def attention_queries(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens: Integers,
    start: Integers,
    n_head: int,
    longest: int | None = None,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> Array:
    """Compute `attention_packed` for rows q (N, Q) of queries only → (N, Q)."""
    out = np.zeros(q.shape, q.dtype)
    for b, (first, end) in enumerate(_spans(cu_seqlens, len(q))):
        at = int(start[b])
        keys = at + end - first
        if not 0 <= at <= keys <= k.shape[1]:
            raise InputError(f"start: expected 0 to {k.shape[1] - end + first}, got {at}")
        if end > first:
            out[first:end] = unchecked(attention_cached)(
                q[first:end], k[b, :keys], v[b, :keys], at, n_head, softmax_scale, window
            )
    return out


@takes(
    "qkv mixed N W; cu_seqlens i32 S; k? v? kv R P D; row? position? i32 N "
    "-> out mixed N W*n_head//(n_head+2*n_kv_head); k? v? kv R P D"
)
def attention_varlen(
    qkv: Array,
    cu_seqlens: Integers,
    k: Array | None = None,
    v: Array | None = None,
    row: Integers | None = None,
    position: Integers | None = None,
    *,
    n_head: int,
    causal: bool = False,
    max_seqlen: int | None = None,
    n_kv_head: int | None = None,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> Array:
    """Compute `attention` within each of several sequences, packed as in `attention_packed`.

    With k, v, row and position, K and V of the sequences are also appended to the kv_cache, as by
    `kv_append`.
    """
    heads = n_head + 2 * (n_head if n_kv_head is None else n_kv_head)
    if qkv.shape[1] % heads:
        raise InputError(f"qkv: expected (N, W), W a multiple of {heads} heads, got {qkv.shape}")
    if k is not None and v is not None and row is not None and position is not None:
        of_all = slice(int(cu_seqlens[0]), int(cu_seqlens[-1]))
        unchecked(kv_append)(qkv[of_all], k, v, row[of_all], position[of_all])
    elif any(array is not None for array in (k, v, row, position)):
        raise InputError("expected k, v, row and position, or none of them")
    out = np.zeros((len(qkv), qkv.shape[1] // heads * n_head), qkv.dtype)
    for first, end in _spans(cu_seqlens, len(qkv)):
        if end > first:
            out[first:end] = attention(
                qkv[first:end], n_head, causal, n_kv_head, softmax_scale, window
            )
    return out


@takes("q f32 M Q; k v kv B P C; row position i32 M -> out f32 M Q")
def attention_split(
    q: Array,
    k: Array,
    v: Array,
    row: Integers,
    position: Integers,
    n_head: int,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> Array:
    """Attention of one query per sequence: query m sees keys 0 to position[m] of cache row row[m].

    q (M, C); k, v (B, n_ctx, C), or with fewer heads as in `attention_cached`; row, position (M,)
    → (M, C). The result is zero for a query with a negative row or position.
    """
    for name, values, end in (("position", position, k.shape[1]), ("row", row, len(k))):
        if int(values.max()) >= end:
            raise InputError(f"{name}: expected below {end}, got {int(values.max())}")
    out = np.zeros_like(q)
    for m, (b, at) in enumerate(zip(row.tolist(), position.tolist(), strict=True)):
        if b >= 0 and at >= 0:
            one, options = q[m : m + 1], (n_head, softmax_scale, window)
            out[m] = unchecked(attention_cached)(one, k[b], v[b], at, *options)[0]
    return out


@takes(
    "qkv f32 M W; by f32 M H 2; gamma_q gamma_k f32 D; k v kv B P C; row position i32 M "
    "-> out f32 M W-2*C; k v kv B P C"
)
def attention_append(
    qkv: Array,
    by: Array,
    gamma_q: Array,
    gamma_k: Array,
    k: Array,
    v: Array,
    row: Integers,
    position: Integers,
    n_head: int,
    eps: float = 1e-6,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> Array:
    """Apply `qk_norm` and the rotations `by` to one token per sequence, then `attention_split`.

    qkv (M, Q + 2C), by (M, D / 2, 2), a result of `rotations`, gamma_q and gamma_k (D,), k, v
    (B, n_ctx, C), row, position (M,) → (M, Q). K and V of token m are written to position[m] of
    row[m].
    """
    normed = qk_norm(qkv, gamma_q, gamma_k, n_head, k.shape[-1] // len(gamma_q), eps)
    q = _append_rotated(normed, by, k, v, row, position, n_head)
    scores = (softmax_scale, window)
    return unchecked(attention_split)(q, k, v, row, position, n_head, *scores)


def _attention_weights(
    q: Array, k: Array, visible: NDArray[np.bool_] | None, softmax_scale: float | None = None
) -> Array:
    """Compute softmax(Q Kᵀ / sqrt(HS)); keys that a query does not see get weight 0.

    q (..., T, HS), k (..., P, HS), visible (T, P), or None if all keys are visible → (..., T, P).
    softmax_scale: as in `attention`.
    """
    scores = q @ k.swapaxes(-1, -2)
    scores = scores / math.sqrt(q.shape[-1]) if softmax_scale is None else scores * softmax_scale
    return unchecked(softmax)(scores if visible is None else np.where(visible, scores, -np.inf))


def _visible_keys(T: int, P: int, start: int, window: int | None) -> NDArray[np.bool_]:
    """Return the mask (T, P) of P keys that queries at positions start … start + T - 1 see."""
    visible: NDArray[np.bool_] = np.tri(T, P, start, dtype=bool)
    if window is not None:
        visible &= ~np.tri(T, P, start - window, dtype=bool)
    return visible


@takes("scores f32 ... T -> out~scores f32 ... T")
def softmax(scores: Array, causal: bool = False) -> Array:
    """Softmax: exp(s - max) / Σ exp(s - max) over the last axis; a score of -inf has weight 0.

    With `causal`, scores are (..., T, T) and row t sees columns 0…t. The other weights are 0, and
    their scores have no effect, even if NaN. If a row sees only -inf, its weights are NaN.
    """
    if causal:
        if scores.ndim < 2 or scores.shape[-2] != scores.shape[-1]:
            raise InputError(f"scores: causal, expected (..., T, T), got {scores.shape}")
        visible = np.tri(scores.shape[-1], dtype=bool)
        causal_weights: Array = np.where(
            visible, unchecked(softmax)(np.where(visible, scores, -np.inf)), 0
        )
        return causal_weights
    weights: Array = np.exp(scores - scores.max(axis=-1, keepdims=True))
    total: Array = weights.sum(axis=-1, keepdims=True)
    return weights / total


def _weighted_sum(p: Array, v: Array, visible: NDArray[np.bool_] | None) -> Array:
    """Return p · v (weights · values). A masked row of v has no effect, even if it contains NaN.

    p (..., T, T), v (..., T, HS) → (..., T, HS).
    """
    finite = np.isfinite(v)
    if finite.all():
        return p @ v
    out = p @ np.where(finite, v, 0)
    for t in np.flatnonzero(~finite.all(axis=(*range(v.ndim - 2), -1))):
        rows = slice(None) if visible is None else visible[:, t]  # rows that see key t
        out[..., rows, :] += p[..., rows, t, None] * np.where(finite, 0, v)[..., None, t, :]
    return out


@takes("qkv f32 B T 3 NH HS -> out f32 B NH T T")
def trimat(qkv: Array, fill: float | None = None) -> Array:
    """Compute the causal (lower triangular) scores Q Kᵀ / sqrt(HS) for each head.

    qkv (B, T, 3, NH, HS), of which Q and K are used → (B, NH, T, T). fill: value of the elements
    above the diagonal; with None they are unspecified, and here NaN, so that no caller uses them.
    """
    number = math.nan if fill is None else as_float(fill)
    if number is None:
        raise InputError(f"fill: expected a number, got {shown(fill)}")
    q, k = (qkv[:, :, i].swapaxes(1, 2) for i in range(2))  # (B, NH, T, HS)
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    with np.errstate(over="ignore"):
        above = scores.dtype.type(number)
    if math.isfinite(number) and np.isinf(above):
        raise InputError(f"fill: expected a number that {scores.dtype} holds, got {shown(fill)}")
    result: Array = np.where(np.tri(q.shape[-2], dtype=bool), scores, above)
    return result


@takes(
    "x f32 ... K; w rows K N; bias? f32 N; gamma? beta? f32 K; residual? f32 ... N; "
    "up? rows K N; workspace? f32 H -> out~residual f32 ... N"
)
def linear(
    x: Array,
    w: Matrix,
    bias: Array | None = None,
    gamma: Array | None = None,
    beta: Array | None = None,
    residual: Array | None = None,
    up: Matrix | None = None,
    workspace: Array | None = None,
    gelu: bool = False,
    eps: float = 1e-5,
) -> Array:
    """Compute residual + f(n · w + bias), n = x or norm(x); bias, residual, f are optional.

    n = LayerNorm(x) with gamma and beta, RMSNorm(x) with gamma alone, else x. f is GELU if `gelu`,
    else the identity. With `up` (K, N), f(a) = silu(a) (n · up), or gelu(a) (n · up) if `gelu`.
    x (..., K), w (K, N), bias (N,), gamma and beta (K,), residual (..., N) → (..., N). workspace:
    memory of kernels, which is not read.
    """
    if gamma is None and beta is not None:
        raise InputError("beta: expected gamma, too")
    n = x if gamma is None else _normed(x, gamma, beta, eps)
    product = matmul_bias(n, _matrix(w, x), bias)
    if up is not None:
        product = silu_mul(product, n @ _matrix(up, x), gelu)
    elif gelu:
        product = _gelu(product)
    return product if residual is None else residual + product


@takes(
    "x f32 M K; w rows K N; bias? f32 N; gamma? beta? f32 K; k v kv B P C; row position i32 M "
    "-> q f32 M C; k v kv B P C"
)
def linear_qkv(
    x: Array,
    w: Matrix,
    bias: Array | None,
    gamma: Array | None,
    beta: Array | None,
    k: Array,
    v: Array,
    row: Integers,
    position: Integers,
    eps: float = 1e-5,
) -> Array:
    """Compute Q, K and V of a token per sequence by `linear`; write K and V into a kv_cache.

    x (M, C), w (C, 3C), bias (3C,), k, v (B, n_ctx, C), row, position (M,) → q (M, C). k and v of
    token m are written to position[m] of row[m].
    """
    qkv = linear(x, w, bias, gamma, beta, eps=eps)
    unchecked(kv_append)(qkv, k, v, row, position)
    return qkv[:, : k.shape[-1]]


@takes(
    "a any ... K; w rows K N; bias? f32 N; residual? out_dtype ... N; up? rows K N; "
    "memory? f16 S; stream_k_workspace? f32 H -> out~residual out_dtype ... N"
)
def gemm(
    a: Array,
    w: Matrix,
    bias: Array | None = None,
    residual: Array | None = None,
    up: Matrix | None = None,
    gelu: bool = False,
    split_k: bool = False,
) -> Array:
    """Compute residual + f(a · w + bias) with optional residual, activation f and bias.

    f is GELU if `gelu`, else the identity. With `up` (K, N), f(c) = silu(c) (a · up), or gelu(c) (a
    · up) if `gelu`. a (..., K), w (K, N), bias (N,), residual (..., N) → (..., N). split_k: whether
    a kernel may split the sums over K; the option has no effect on this reference.
    """
    return linear(a, w, bias, residual=residual, up=up, gelu=gelu)


@takes(
    "y any M N; x other M K; a f32 R K; b f32 R P; spans i32 L S 2; row i32 M; adapter i32 B; "
    "up? any M N -> y any M N; up? any M N"
)
def add_low_rank(
    y: Array,
    x: Array,
    a: Array,
    b: Array,
    spans: Integers,
    row: Integers,
    adapter: Integers,
    up: Array | None = None,
) -> Array:
    """Add (x aᵀ) b to the rows y of sequences with an adapter (LoRA), in place.

    y (M, N), x (M, K), a (R, K), b (R, N) → (M, N). Row m belongs to sequence row[m], whose adapter
    has the number adapter[row[m]]; rows with a negative number of either are unchanged. spans
    (L, S, 2): rows first to end - 1 of a and b that adapter l has for the columns of tile s, of
    which there are S; its other rows are 0 there. up (M, N): further columns of y, for b (R, 2N).
    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).
    """
    numbers, N = np.where(row < 0, -1, adapter[row]), y.shape[1]
    for number in np.unique(numbers[numbers >= 0]).tolist():
        tiles = spans[number][spans[number][:, 0] < spans[number][:, 1]]
        if len(tiles):
            own, rows = slice(tiles[:, 0].min(), tiles[:, 1].max()), numbers == number
            terms = x[rows] @ a[own].T @ b[own]
            y[rows] += terms[:, :N]
            if up is not None:
                up[rows] += terms[:, N:]
    return y


@takes("x f32 M C; router f32 E C; bias? f32 E -> routes f32 M 2*n_used")
def route(
    x: Array,
    router: Array,
    bias: Array | None = None,
    *,
    n_used: int,
    sigmoid: bool = False,
    normed: bool = False,
    factor: float = 1.0,
    eps: float = 0.0,
) -> Array:
    """Choose n_used of E experts for each row, and return their numbers and their weights.

    x (M, C), router (E, C), bias (E,) or None → (M, 2 n_used): the numbers of a row's experts, as
    floats, then their weights. The scores of a row are softmax(x routerᵀ), or with `sigmoid` the
    sigmoid of each. The row chooses the highest scores plus bias, in descending order; of equal
    ones, the expert with the lower number is first. A weight is the expert's score, without bias;
    with `normed`, the weights of a row are divided by their sum plus `eps`; finally they are
    multiplied by `factor`. Source: Shazeer et al., "Outrageously Large Neural Networks" (2017); for
    sigmoid and bias, DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024).
    """
    check_integer("n_used", n_used, 1, len(router), f"1 to {len(router)}, the number of experts")
    logits = x @ router.T
    if sigmoid:
        with np.errstate(over="ignore"):  # an infinite exp(-x) correctly gives 0
            scores = 1 / (1 + np.exp(-logits))
    else:
        scores = unchecked(softmax)(logits)
    order = np.argsort(-(scores if bias is None else scores + bias), axis=-1, kind="stable")
    chosen = order[:, :n_used]
    weights = np.take_along_axis(scores, chosen, axis=-1)
    if normed:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + x.dtype.type(eps))
    return np.concatenate([chosen.astype(x.dtype), weights * x.dtype.type(factor)], axis=-1)


@takes("routes f32 M R -> tiles i32 1*min(M*R//2,M*R//2//min(rows,M)+n_expert) 1+min(rows,M)")
def expert_tiles(routes: Array, n_expert: int, rows: int) -> NDArray[np.int32]:
    """Sort the choices of all rows by expert, and divide them into tiles of one expert each.

    routes (M, 2 K): as `route` returns them. Choice k of row m has the number m K + k. rows: the
    most choices of a tile; M if M is less. → (T, 1 + rows), T the most tiles that there can be: a
    tile has the number of its expert, and the numbers of choices of this expert, in ascending
    order; -1 stands for a missing one. Tiles are in ascending order of experts. All numbers of a
    tile after the last one are -1.
    """
    chosen, rows = routes[:, : routes.shape[1] // 2].ravel(), min(rows, len(routes))
    most = min(len(chosen), len(chosen) // rows + n_expert)
    tiles, n = np.full((most, 1 + rows), -1, np.int32), 0
    for expert in range(n_expert):
        of_expert = np.flatnonzero(chosen == expert)
        for first in range(0, len(of_expert), rows):
            own = of_expert[first : first + rows]
            tiles[n, 0], tiles[n, 1 : 1 + len(own)], n = expert, own, n + 1
    return tiles


@takes("x f32 M K; w_gate w_up rows K N; tiles i32 T R -> out f32 M*n_used N//n_expert")
def experts_gated(
    x: Array,
    w_gate: Matrix,
    w_up: Matrix,
    tiles: Integers,
    n_expert: int,
    n_used: int,
    gelu: bool = False,
) -> Array:
    """Compute silu(x w_gate) · (x w_up), or GELU, with the columns of each row's chosen experts.

    x (M, K), w_gate and w_up (K, n_expert H), of which expert e has the columns e H to
    (e + 1) H - 1, tiles as `expert_tiles` returns them → (M n_used, H): row m n_used + k has choice
    k of row m.
    """
    gate, up = _matrix(w_gate, x), _matrix(w_up, x)
    H = gate.shape[1] // n_expert
    out = np.zeros((len(x) * n_used, H), x.dtype)
    for expert, choices in _by_expert(tiles):
        own, rows = slice(expert * H, (expert + 1) * H), x[choices // n_used]
        out[choices] = unchecked(silu_mul)(rows @ gate[:, own], rows @ up[:, own], gelu)
    return out


@takes("h f32 P K; w_down rows K N; tiles i32 T R -> out f32 P N//n_expert")
def experts_down(h: Array, w_down: Matrix, tiles: Integers, n_expert: int) -> Array:
    """Multiply each row of `experts_gated` by the columns of its expert.

    h (P, H), w_down (H, n_expert C), of which expert e has the columns e C to (e + 1) C - 1
    → (P, C).
    """
    w = _matrix(w_down, h)
    C = w.shape[1] // n_expert
    out = np.zeros((len(h), C), h.dtype)
    for expert, choices in _by_expert(tiles):
        out[choices] = h[choices] @ w[:, expert * C : (expert + 1) * C]
    return out


def _by_expert(tiles: Integers) -> Iterator[tuple[int, Integers]]:
    """Return the number of each expert that rows choose, and the numbers of these choices."""
    for expert in np.unique(tiles[tiles[:, 0] >= 0, 0]).tolist():
        choices = tiles[tiles[:, 0] == expert, 1:]
        yield expert, choices[choices >= 0]


@takes("y f32 P N; routes f32 M R; residual f32 M N -> out~residual f32 M N")
def add_experts(y: Array, routes: Array, residual: Array) -> Array:
    """Add to each row the results of its experts, times their weights, in the order of the choice.

    y (M K, N): row m K + k is the result of choice k of row m; routes (M, 2 K) as `route` returns
    them; residual (M, N) → residual + (... (weight 0 · y 0 + weight 1 · y 1) + ...), (M, N).
    """
    M, K = len(residual), routes.shape[1] // 2
    y = y.reshape(M, K, -1)
    total = np.zeros_like(residual)
    for k in range(K):
        total += routes[:, K + k, None] * y[:, k]
    return residual + total


@takes("x mixed N C; indices i32 B -> out out_dtype B C")
def take(x: Array, indices: Integers) -> Array:
    """Return rows of x by index. x (N, C), indices (B,) → (B, C)."""
    _check_places("indices", indices, len(x))
    taken: Array = x[indices]
    return taken


@takes("x any ... C")
def rows(x: Array, first: int, end: int) -> Array:
    """Return a view of rows `first` to `end` - 1 of x."""
    check_integer("first", first, 0, len(x) - 1, f"0 to {len(x) - 1}")
    check_integer("end", end, first + 1, len(x), f"{first + 1} to {len(x)}")
    return x[first:end]


@takes("a b f32 ... -> out~a~b f32 ...")
def add(a: Array, b: Array) -> Array:
    """Return a + b, the residual connection, for arrays of the same shape."""
    return a + b


@takes("x f32 ... -> x f32 ...")
def gelu(x: Array) -> Array:
    """GPT-2's GELU: 0.5 x (1 + tanh(sqrt(2/π) (x + 0.044715 x³))).

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), the tanh approximation.
    """
    cube = x * x * x  # x**3 calls pow, twenty times slower
    tanh: Array = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * cube))
    return 0.5 * x * (1 + tanh)


_gelu = gelu  # alias for functions whose argument `gelu` hides the function


@takes("x f32 ... -> out~x f32 ...")
def relu_squared(x: Array) -> Array:
    """Square ReLU: max(x, 0)².

    Source: So et al., "Primer: Searching for Efficient Transformers" (2021).
    """
    positive: Array = np.maximum(x, 0)
    return positive * positive


@takes("x f32 ... -> out~x f32 ...")
def cap(x: Array, limit: float) -> Array:
    """Soft-cap logits: limit · tanh(x / limit). A logit of -inf, an excluded token, stays -inf.

    Source: Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size" (2024).
    """
    capped: Array = np.where(x == -np.inf, x, limit * np.tanh(x / limit))
    return capped


@takes("x f32 ... C; gamma? beta? f32 C -> out~x f32 ... C")
def layernorm_gelu(
    x: Array, gamma: Array | None = None, beta: Array | None = None, eps: float = 1e-5
) -> Array:
    """Compute gelu(layernorm(x)) over the last axis; gamma and beta (C,) are optional."""
    C = x.shape[-1]
    gamma = np.ones(C, x.dtype) if gamma is None else gamma
    beta = np.zeros(C, x.dtype) if beta is None else beta
    return gelu(layernorm(x, gamma, beta, eps))


@takes(
    "x strided ... C; weight any C; residual? any ... C -> out out_dtype ... C; total? any ... C"
)
def rmsnorm(x: Array, weight: Array, eps: float = 1e-6) -> Array:
    """RMSNorm: x / sqrt(mean(x²) + eps) · weight over the last axis.

    x (..., C), weight (C,) → (..., C).
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
    """
    rms: Array = np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    return x / rms * weight


@takes("x f32 ... C; weight f32 C; residual f32 ... C; scale? f32 S -> out~residual f32 ... C")
def rmsnorm_add(
    x: Array, weight: Array, residual: Array, scale: Array | None = None, eps: float = 1e-6
) -> Array:
    """Return residual + rmsnorm(x); residual has the shape of x, weight is as in `rmsnorm`.

    scale (1,): multiplies the sum.
    """
    added: Array = residual + rmsnorm(x, weight, eps)
    return added if scale is None else added * scale


@takes("x f32 N W; weight f32 P; residual f32 N W -> out~residual f32 N W")
def rmsnorm_groups(x: Array, weight: Array, residual: Array, eps: float = 1e-6) -> Array:
    """Return residual + the `rmsnorm` of each group of P neighbouring channels of x.

    x, residual (N, W) with W a multiple of P, weight (P,) → (N, W).
    """
    N, W = x.shape
    if W % len(weight):
        raise InputError(f"x: expected rows of a multiple of {len(weight)} channels, got {W}")
    return residual + rmsnorm(x.reshape(N, -1, len(weight)), weight, eps).reshape(N, W)


@takes("x any ... C; channels? i32 C -> out out_dtype ... C")
def operand(x: Array, channels: Array | None = None) -> Array:
    """Convert x (..., C) to the format that GPU matrix products read. Here, x keeps its dtype.

    On a GPU: 16-bit numbers, or the `Operand` of decoding. channels: the channel of x for each
    channel of the result, for products with a matrix whose inputs have this order.
    """
    return x if channels is None else x[..., channels]


@takes("x strided ... T H D -> out~x any ... T H D")
def rope(x: Array, start: int = 0, theta: float = 10000.0, half_split: bool = False) -> Array:
    """Rotary position embedding: rotate each pair (r, i) to (r cos a - i sin a, r sin a + i cos a).

    x (..., T, H, D), D even; row t has position start + t. Pair k consists of channels 2k and 2k +
    1, or with `half_split` of k and k + D / 2. The angle a of pair k is position / theta^(2k / D).
    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
    """
    T, D = x.shape[-3], x.shape[-1]
    if D % 2:
        raise InputError(f"x: head size D {D}: expected an even one, as pairs of channels rotate")
    position, k = np.arange(start, start + T)[:, None, None], np.arange(D // 2)
    angle = position / float(theta) ** (2 * k / D)
    return _rotated(x, np.cos(angle), np.sin(angle), half_split)


@takes("qkv any ... T W; positions i32 T; frequencies f64 P -> out~qkv any ... T W")
def rope_qkv(
    qkv: Array,
    positions: Integers,
    frequencies: Array,
    n_head: int,
    n_kv_head: int,
    half_split: bool = False,
    factor: float = 1.0,
    growth: Growth = None,
) -> Array:
    """Apply `rope` to the queries and keys of rows [Q | K | V], with a position for each row.

    qkv (..., T, (n_head + 2 n_kv_head) D), positions (T,) → the same shape; V is copied.
    frequencies (D / 2,): pair k of a head rotates by position · frequencies[k] radians, and is
    multiplied by factor unless frequencies[k] is 0. float64 keeps angles exact at large positions.
    growth: (β, n) multiplies queries by 1 + β log(1 + ⌊position / n⌋).
    """
    D, rotating = 2 * frequencies.shape[-1], n_head + n_kv_head
    if qkv.shape[-1] != (rotating + n_kv_head) * D:
        raise InputError(
            f"qkv: expected {rotating + n_kv_head} heads of {D} channels, got {qkv.shape[-1]}"
        )
    heads = qkv.reshape(*qkv.shape[:-1], -1, D)
    cos, sin = _rotations(positions[:, None, None], frequencies, factor)
    rotated = _rotated(heads[..., :rotating, :], cos, sin, half_split)
    _grow(rotated[..., :n_head, :], positions, growth)
    return np.concatenate([rotated, heads[..., rotating:, :]], axis=-2).reshape(qkv.shape)


@takes("qkv any N W; positions i32 N; frequencies f64 B P; row i32 N -> out~qkv any N W")
def rope_packed(
    qkv: Array,
    positions: Integers,
    frequencies: Array,
    row: Integers,
    n_head: int,
    n_kv_head: int,
    half_split: bool = False,
    factor: float = 1.0,
    growth: Growth = None,
) -> Array:
    """Apply `rope_qkv` to packed rows, with separate frequencies for each sequence.

    qkv (N, W), positions (N,), frequencies (B, D / 2), row (N,): the sequence of each row → (N, W).
    """
    own = frequencies[row][:, None]
    turn = (n_head, n_kv_head, half_split, factor, growth)
    return unchecked(rope_qkv)(qkv, positions, own, *turn)


@takes(
    "qkv f32 N W; frequencies f64 ... P; k v kv B S C; row position i32 N -> out f32 N W-2*C; "
    "k v kv B S C"
)
def rope_append(
    qkv: Array,
    frequencies: Array,
    k: Array,
    v: Array,
    row: Integers,
    position: Integers,
    n_head: int,
    half_split: bool = False,
    factor: float = 1.0,
    growth: Growth = None,
) -> Array:
    """Apply `rope_qkv` to one token per sequence; write K and V into a kv_cache; return Q.

    qkv (N, Q + 2C), rows [Q | K | V], frequencies (D / 2,), k, v (B, n_ctx, C), row, position (N,)
    → q (N, Q). K and V of token n are written to position[n] of row[n]. Frequencies (B, D / 2) are
    separate for each sequence, as in `rope_packed`.
    """
    n_kv_head = k.shape[-1] // max(1, 2 * frequencies.shape[-1])
    own = frequencies if frequencies.ndim == 1 else frequencies[row][:, None]
    turn = (n_head, n_kv_head, half_split, factor, growth)
    rotated = unchecked(rope_qkv)(qkv, position, own, *turn)
    unchecked(kv_append)(rotated, k, v, row, position)
    return rotated[:, : -2 * k.shape[-1]]


@takes("qkv any ... W; gamma_q any G; gamma_k any H -> out~qkv any ... W")
def qk_norm(
    qkv: Array,
    gamma_q: Array,
    gamma_k: Array,
    n_head: int,
    n_kv_head: int,
    eps: float = 1e-6,
    values: bool = False,
) -> Array:
    """Apply `rmsnorm` to each head of the queries and keys of rows [Q | K | V].

    qkv (..., (n_head + 2 n_kv_head) D), gamma_q (D,) for each head of Q, gamma_k (D,) for each head
    of K → the shape of qkv; V is copied. With gamma_q (n_head D,) and gamma_k (n_kv_head D,), there
    is one norm over all heads of Q, and one over all heads of K. values: apply `rmsnorm`, with
    weights of 1, to each head of V, too.
    Sources: Qwen Team, "Qwen3 Technical Report" (2025); OLMo Team, "2 OLMo 2 Furious" (2024).
    """
    normed = n_head + n_kv_head
    D, rest = divmod(qkv.shape[-1], normed + n_kv_head)
    if rest:
        raise InputError(f"qkv: expected {normed + n_kv_head} heads, got {qkv.shape[-1]} channels")
    q, k, v = np.split(qkv, [n_head * D, normed * D], axis=-1)
    if not normed_together(gamma_q.shape, gamma_k.shape, n_head, n_kv_head, D):
        q, k = (rows.reshape(*rows.shape[:-1], -1, D) for rows in (q, k))
    q, k = (
        unchecked(rmsnorm)(rows, gamma, eps).reshape(*qkv.shape[:-1], heads * D)
        for rows, gamma, heads in ((q, gamma_q, n_head), (k, gamma_k, n_kv_head))
    )
    if values:
        heads = v.reshape(*v.shape[:-1], -1, D)
        v = rmsnorm(heads, np.ones(D, v.dtype), eps).reshape(v.shape)
    return np.concatenate([q, k, v], axis=-1).astype(qkv.dtype, copy=False)


@takes(
    "qkv any ... T W; positions i32 T; frequencies f64 P; gamma_q f32 G; gamma_k f32 H "
    "-> out~qkv any ... T W"
)
def qk_norm_rope(
    qkv: Array,
    positions: Integers,
    frequencies: Array,
    gamma_q: Array,
    gamma_k: Array,
    n_head: int,
    n_kv_head: int,
    eps: float = 1e-6,
    values: bool = False,
    queries: bool = False,
) -> Array:
    """Apply `qk_norm`, then `rope_qkv` with half_split=True; arguments as in both functions.

    queries: rows are queries only, (..., T, n_head D).
    """
    n_kv_head = 0 if queries else n_kv_head
    normed = unchecked(qk_norm)(qkv, gamma_q, gamma_k, n_head, n_kv_head, eps, values)
    return unchecked(rope_qkv)(normed, positions, frequencies, n_head, n_kv_head, True)


@takes(
    "qkv f32 N W; frequencies f64 P; k v kv B S C; row position i32 N; gamma_q f32 G; "
    "gamma_k f32 H -> out f32 N W-2*C; k v kv B S C"
)
def qk_norm_append(
    qkv: Array,
    frequencies: Array,
    k: Array,
    v: Array,
    row: Integers,
    position: Integers,
    gamma_q: Array,
    gamma_k: Array,
    n_head: int,
    eps: float = 1e-6,
    values: bool = False,
) -> Array:
    """Apply `qk_norm`, then `rope_append` with half_split=True; arguments as in both functions."""
    n_kv_head = k.shape[-1] // (2 * len(frequencies))
    normed = qk_norm(qkv, gamma_q, gamma_k, n_head, n_kv_head, eps, values)
    return rope_append(normed, frequencies, k, v, row, position, n_head, True)


@takes(
    "x f32 M K; w rows K N; bias? f32 N; by f32 M P 2; k v kv B S C; row position i32 M "
    "-> out f32 M 2*P*n_head; k v kv B S C"
)
def linear_rope(
    x: Array,
    w: Matrix,
    bias: Array | None,
    by: Array,
    k: Array,
    v: Array,
    row: Integers,
    position: Integers,
    n_head: int,
    growth: Growth = None,
) -> Array:
    """Compute `rope_append` of x · w + bias, with half-split pairs; `by`: cosines and sines.

    x (M, C), w (C, Q + 2 KV), bias (Q + 2 KV,), by (M, D / 2, 2), a result of `rotations`, k, v
    (B, n_ctx, KV), row, position (M,) → q (M, Q).
    """
    return _append_rotated(linear(x, w, bias), by, k, v, row, position, n_head, growth)


def _normed(x: Array, gamma: Array, beta: Array | None, eps: float) -> Array:
    """Return LayerNorm of x, or RMSNorm if beta is None."""
    return rmsnorm(x, gamma, eps) if beta is None else layernorm(x, gamma, beta, eps)


def _append_rotated(
    qkv: Array,
    by: Array,
    k: Array,
    v: Array,
    row: Integers,
    position: Integers,
    n_head: int,
    growth: Growth = None,
) -> Array:
    """Rotate the heads of Q and K in rows [Q | K | V]; append K and V to a kv_cache, return Q."""
    D = 2 * by.shape[1]
    rotating = n_head + k.shape[-1] // D
    if k.shape[-1] % D or qkv.shape[1] != n_head * D + 2 * k.shape[-1]:
        raise InputError(
            f"w: expected {n_head} heads of {D} channels, as by has, and twice the "
            f"{k.shape[-1]} of k, got {qkv.shape[1]} outputs"
        )
    heads = qkv.reshape(len(qkv), -1, D)
    heads[:, :rotating] = _rotated(heads[:, :rotating], by[:, None, :, 0], by[:, None, :, 1], True)
    _grow(heads[:, :n_head], position, growth)
    qkv = heads.reshape(len(qkv), -1)
    unchecked(kv_append)(qkv, k, v, row, position)
    return qkv[:, : n_head * D]


@takes("position i32 N; frequencies f64 ... P; row? i32 N -> out f32 N P 2")
def rotations(
    position: Integers, frequencies: Array, row: Integers | None = None, factor: float = 1.0
) -> Array:
    """Return the cosines and sines of RoPE's angles, position times frequency, in radians.

    position (N,), frequencies (D / 2,) → (N, D / 2, 2). factor: as in `rope_qkv`. row: the sequence
    of each position, for frequencies (B, D / 2) that are separate for each sequence.
    """
    frequencies = frequencies if row is None else frequencies[row]
    both = _rotations(position[:, None], frequencies.astype(np.float64), factor)
    return np.stack(both, axis=-1).astype(np.float32)


def _rotations(position: Integers, frequencies: Array, factor: float) -> tuple[Array, Array]:
    """Return cosines and sines of position · frequencies, times factor for nonzero frequencies."""
    angle, times = position * frequencies, np.where(frequencies == 0, 1.0, factor)
    return times * np.cos(angle), times * np.sin(angle)


def _grow(q: Array, position: Integers, growth: Growth) -> None:
    """Multiply queries (..., T, H, D) in place by the factor of their positions (T,)."""
    if growth is not None:
        beta, span = growth
        q *= (1 + beta * np.log1p(position // span)).astype(q.dtype)[:, None, None]


def _rotated(x: Array, cos: Array, sin: Array, half_split: bool) -> Array:
    """Rotate the channel pairs of x (..., T, H, D) by angles; cos and sin are (T, 1, D / 2)."""
    D = x.shape[-1]
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    first, second = (np.s_[: D // 2], np.s_[D // 2 :]) if half_split else (np.s_[::2], np.s_[1::2])
    r, i = x[..., first], x[..., second]
    out = np.empty_like(x)
    out[..., first], out[..., second] = r * cos - i * sin, r * sin + i * cos
    return out


@takes("x strided ... K; gamma any K; w matrix K N -> out any ... N")
def rmsnorm_matmul(
    x: Array,
    gamma: Array,
    w: Matrix,
    eps: float = 1e-6,
    head_dim: int | None = None,
    start: int = 0,
    theta: float = 10000.0,
    half_split: bool = False,
) -> Array:
    """Return rmsnorm(x) · w; with `head_dim`, apply RoPE to each head of head_dim columns.

    x (..., T, K), gamma (K,), w (K, N) → (..., T, N); row t has position start + t.
    """
    product: Array = rmsnorm(x, gamma, eps) @ _matrix(w, x)
    if head_dim is None:
        return product
    if x.ndim < 2 or product.shape[-1] % head_dim:
        raise InputError(
            f"with head_dim {head_dim} expected x (..., T, K) and N a multiple of it, "
            f"got {x.shape}, N {product.shape[-1]}"
        )
    heads = product.reshape(*product.shape[:-1], -1, head_dim)
    return rope(heads, start, theta, half_split).reshape(product.shape)


@takes(
    "x strided ... K; gamma any K; w1 w3 matrix K N; residual? any ... K "
    "-> out any ... N; h? any ... K"
)
def rmsnorm_ffn(
    x: Array,
    gamma: Array,
    w1: Matrix,
    w3: Matrix,
    eps: float = 1e-6,
    residual: Array | None = None,
    gelu: bool = False,
) -> Array | tuple[Array, Array]:
    """Compute silu(n w1) · (n w3) with n = rmsnorm(h): a gated feed-forward without w2.

    x, residual (..., K), gamma (K,), w1, w3 (K, N) → (..., N). With a residual, h = x + residual
    and the result is a pair: (..., N) and h. Without residual, h = x. gelu: use GELU instead of
    SiLU.
    Source: Shazeer, "GLU Variants Improve Transformer" (2020).
    """
    h = x if residual is None else x + residual
    n = rmsnorm(h, gamma, eps)
    out = silu_mul(n @ _matrix(w1, x), n @ _matrix(w3, x), gelu)
    return out if residual is None else (out, h)


@takes("x f32 M C; gamma f32 C; w_gate w_up rows C H; w_down rows H C -> sums f32 1*splits M C")
def gated_sums(
    x: Array,
    gamma: Array,
    w_gate: Matrix,
    w_up: Matrix,
    w_down: Matrix,
    splits: int,
    eps: float = 1e-6,
    gelu: bool = False,
) -> Array:
    """Multiply column ranges of h = silu(n w_gate) (n w_up), n = rmsnorm(x), by rows of w_down.

    x (M, C), gamma (C,), w_gate, w_up (C, H), w_down (H, C) → (splits, M, C). gelu: use GELU
    instead of SiLU. Scales of FP8 weights w_down are not applied here, but to the sum of the
    results (`linear_sums`).
    """
    n = rmsnorm(x, gamma, eps)
    h = silu_mul(n @ _matrix(w_gate, x), n @ _matrix(w_up, x), gelu)
    if splits < 1 or h.shape[1] % splits:
        raise InputError(f"splits: expected a divisor of {h.shape[1]:,} channels, got {splits}")
    parts = zip(np.split(h, splits, 1), np.split(_matrix(w_down, x), splits), strict=True)
    sums: Array = np.stack([part @ w for part, w in parts]) / _scales(w_down, x)
    return sums


@takes(
    "x f32 M K; w rows K N; residual f32 M N; sums? f32 S M N; w_down? rows H N "
    "-> out~residual f32 M N"
)
def linear_sums(
    x: Array, w: Matrix, residual: Array, sums: Array | None = None, w_down: Matrix | None = None
) -> Array:
    """Return residual + x · w + Σ sums · the scales of w_down; `sums`: a result of `gated_sums`.

    x (M, K), w (K, N), residual (M, N), sums (splits, M, N), w_down (H, N) → (M, N). Only FP8
    weights w_down have scales, one for each output.
    """
    return linear(x, w, residual=_with_sums(residual, sums, w_down))


@takes(
    "x f32 M K; gamma f32 K; w rows K N; sums? f32 S M K; w_down? rows H K; by f32 M P 2; "
    "k v kv B T C; row position i32 M; gamma_q? gamma_k? f32 2*P "
    "-> out f32 M 2*P*n_head; k v kv B T C"
)
def rope_sums(
    x: Array,
    gamma: Array,
    w: Matrix,
    sums: Array | None,
    w_down: Matrix | None,
    by: Array,
    k: Array,
    v: Array,
    row: Integers,
    position: Integers,
    gamma_q: Array | None = None,
    gamma_k: Array | None = None,
    *,
    n_head: int,
    eps: float = 1e-6,
    growth: Growth = None,
) -> Array:
    """Compute `linear_rope` of rmsnorm(x + Σ sums · the scales of w_down), as in `linear_sums`.

    x (M, K), gamma (K,), w (K, Q + 2 KV), sums (splits, M, K), w_down (H, K); gamma_q, gamma_k
    (D,): for norms of heads as in `qk_norm`, or both None; other arguments as in `linear_rope`.
    """
    n = rmsnorm(_with_sums(x, sums, w_down), gamma, eps)
    qkv = linear(n, w)
    if gamma_q is not None and gamma_k is not None:
        qkv = qk_norm(qkv, gamma_q, gamma_k, n_head, k.shape[-1] // len(gamma_q), eps)
    return _append_rotated(qkv, by, k, v, row, position, n_head, growth)


@takes("x f32 M C; weight f32 C; sums f32 S M C; w_down rows H C -> out f32 M C")
def rmsnorm_sums(x: Array, weight: Array, sums: Array, w_down: Matrix, eps: float = 1e-6) -> Array:
    """Return `rmsnorm` of x + Σ sums · the scales of w_down, as in `linear_sums`.

    x (M, C), weight (C,), sums (splits, M, C), w_down (H, C) → (M, C).
    """
    return rmsnorm(_with_sums(x, sums, w_down), weight, eps)


def _with_sums(x: Any, sums: Array | None, w_down: Matrix | None) -> Any:
    """Return x + Σ sums · the scales of w_down, or x if sums is None."""
    if (sums is None) != (w_down is None):
        raise InputError("expected sums and w_down, or neither")
    if sums is None or w_down is None:
        return x
    return x + sums.sum(axis=0) * _scales(w_down, x)


def _scales(w: Matrix, like: Array) -> Any:
    """Return the scales of FP8 weights, one per output; 1 for weights without scales."""
    scale = None if isinstance(w, np.ndarray) else w.scale
    return 1 if scale is None else np.asarray(scale, like.dtype)


@takes("gate up any ... -> out~gate~up any ...")
def silu_mul(gate: Array, up: Array, gelu: bool = False, sigmoid: bool = False) -> Array:
    """Return SiLU(gate) · up, GELU(gate) · up or sigmoid(gate) · up, for equal shapes.

    sigmoid(x) = 1 / (1 + exp(-x)), and SiLU(x) = x sigmoid(x).
    """
    if gelu:
        return _gelu(gate) * up
    with np.errstate(over="ignore"):  # an infinite exp(-x) correctly gives -0
        gated: Array = (1 if sigmoid else gate) / (1 + np.exp(-gate)) * up
    return gated


@takes("gate f32 M C; up? f32 M C -> out out_dtype M C")
def activate(gate: Array, up: Array | None, gelu: bool = False, fast: bool = False) -> Array:
    """Return SiLU(gate) or GELU(gate), times `up` unless it is None.

    fast: on a GPU, use the approximations of products of prompts on tensor cores.
    """
    return unchecked(silu_mul)(gate, np.ones_like(gate) if up is None else up, gelu)


@takes("gate f32 N P; rows f32 N W -> out~gate f32 N P")
def gated_columns(gate: Array, rows: Array, first: int, gelu: bool = False) -> Array:
    """Return `silu_mul` of gate (N, P) and the P columns of rows (N, W) from column `first` on."""
    P = gate.shape[1]
    if not 0 <= first <= rows.shape[1] - P:
        raise InputError(f"first: expected 0 to {rows.shape[1] - P}, got {first}")
    return unchecked(silu_mul)(gate, rows[:, first : first + P], gelu)


@takes("row positions i32 N; held i32 B 2 -> out i32 B 6; held i32 B 2")
def delta_spans(
    row: Integers, positions: Integers, held: Integers, steps: bool = False
) -> NDArray[np.int32]:
    """Return, for each of B slots, which tokens a pass computes, and from which state it continues.

    A slot holds two states of a gated delta net: the states after the first held[slot] tokens, or
    -1 for none. Row n is the token at positions[n] of slot row[n]; the rows of a slot are
    neighbours. Rows with a negative slot or position are not computed.

    → (B, 6): first row, position of the first row, position after the last row; number of tokens of
    the state from which the pass continues, and its index, or -1 to begin with zeros; index of the
    state that the pass replaces. All are 0 for a slot without rows. The pass computes tokens after
    its state again, at most REPLAYED. The pass replaces the other state by the state after its last
    row or, with `steps`, after its first row, as later rows may be refused draft tokens. `held` is
    updated. A pass that runs again has the same result.
    """
    spans = np.zeros((len(held), 6), np.int32)
    computed = (row >= 0) & (positions >= 0)
    for slot in np.unique(row[computed]).tolist():
        own = np.flatnonzero(computed & (row == slot))
        start = int(positions[own[0]])
        end = start + len(own)
        known = [(n, i) for i, n in enumerate(held[slot].tolist()) if 0 <= n <= start]
        base, source = max(known, default=(start, -2)) if start else (0, -1)
        if source == -2 or start - base > REPLAYED:
            raise InputError(
                f"positions: expected 0, or at most {REPLAYED} more than the tokens of a state of "
                f"slot {slot}, {held[slot].tolist()}, got {start}"
            )
        target = 1 - max(source, 0) if start else 0
        spans[slot] = own[0], start, end, base, source, target
        held[slot, 1 - target] = base if start else -1
        held[slot, target] = start + 1 if steps else end
    return spans


REPLAYED = 7  # maximum number of tokens that a pass computes again; 1 + 2 REPLAYED <= RECENT


@takes(
    "x f32 N W; ba f32 N A; conv f32 D 1 4; rate dt_bias f32 H; row i32 N; spans i32 B 6; "
    "state? f32 B 2 P; recent? f32 B R Y -> out f32 N+7*B D+2*H"
)
def delta_inputs(
    x: Array,
    ba: Array,
    conv: Array,
    rate: Array,
    dt_bias: Array,
    row: Integers,
    spans: Integers,
    state: Array | None = None,
    recent: Array | None = None,
    *,
    n_k_head: int,
    k_size: int,
) -> Array:
    """Compute q, k, v, decay and β of a gated delta net: the inputs of `delta_rule`.

    x (N, D + V), rows [q | k | v | z] with D channels of q, k and v; ba (N, 2H), rows [b | a] for H
    heads of v; conv (D, 1, 4); rate, dt_bias (H,); spans: from `delta_spans` → rows [q | k | v |
    decay | β]. Each channel of q, k and v is a weighted sum of 4 tokens, a causal convolution, then
    SiLU. q and k have n_k_head heads of k_size channels. Each head is divided by its Euclidean
    norm, and q also by the square root of k_size. decay = exp(-rate softplus(a + dt_bias)), β =
    sigmoid(b). The first N rows of the result are those of x. Rows of tokens that are computed
    again follow: 7 for each slot, undefined if unused. state, recent: as for `delta_rule`.
    """
    D, H, K = len(conv), len(rate), n_k_head * k_size
    out = np.zeros((len(x) + REPLAYED * len(spans), D + 2 * H), x.dtype)
    for slot, span in enumerate(spans.tolist()):
        first, start, end, base, *_ = span
        if end == start:
            continue
        raw = _delta_rows(np.hstack([x[:, :D], ba]), D, slot, span, state, recent, base - 3, end)
        mixed = np.zeros((end - base, D), x.dtype)
        for n in range(4):
            mixed += raw[n : len(raw) - 3 + n, :D] * conv[:, 0, n]
        mixed = unchecked(silu_mul)(mixed, np.ones_like(mixed))
        for channels in (mixed[:, :K], mixed[:, K : 2 * K]):
            heads = channels.reshape(len(mixed), n_k_head, k_size)  # a view
            heads /= np.sqrt((heads * heads).sum(axis=-1, keepdims=True) + 1e-6)
        mixed[:, :K] /= np.sqrt(np.asarray(k_size, x.dtype))
        b, a = np.split(raw[3:, D:], 2, axis=1)
        decay = np.exp(-rate * np.logaddexp(0, a + dt_bias, dtype=x.dtype))
        beta = unchecked(silu_mul)(b, np.ones_like(b), sigmoid=True)
        rows, replayed = np.concatenate([mixed, decay, beta], axis=1), start - base
        out[len(x) + REPLAYED * slot :][:replayed] = rows[:replayed]
        out[first : first + end - start] = rows[replayed:]
    return out


def _delta_rows(
    x: Array,
    D: int,
    slot: int,
    span: Sequence[int],
    state: Array | None,
    recent: Array | None,
    begin: int,
    end: int,
) -> Array:
    """Return rows [q | k | v | b | a] of the positions `begin` to `end` - 1 of a slot.

    x: the new rows. Rows of tokens before the state have no b and a; rows before the first token
    are zeros.
    """
    first, start, _, base, source, _ = span
    rows = np.zeros((end - begin, x.shape[1]), x.dtype)
    for n, at in enumerate(range(begin, end)):
        if at >= start:
            rows[n] = x[first + at - start]
        elif at >= base and recent is not None:
            rows[n] = recent[slot, at % RECENT]
        elif source >= 0 and state is not None:
            rows[n, :D] = state[slot, source, : 3 * D].reshape(3, D)[at - base + 3]
    return rows


@takes(
    "x f32 N W; ba f32 N A; rows f32 E Y; conv f32 D 1 4; spans i32 B 6; state? f32 B 2 P; "
    "recent? f32 B R Y; pool? f32 S P; saved? i32 B M "
    "-> out f32 N W-D; state? f32 B 2 P; recent? f32 B R Y; pool? f32 S P"
)
def delta_rule(
    x: Array,
    ba: Array,
    rows: Array,
    conv: Array,
    spans: Integers,
    state: Array | None = None,
    recent: Array | None = None,
    pool: Array | None = None,
    saved: Integers | None = None,
    *,
    n_k_head: int,
    k_size: int,
    steps: bool = False,
    tiled: bool = False,
) -> Array:
    """Apply the gated delta rule, token by token: S ← decay S; S ← S + β (v - S k) kᵀ; o = S q.

    x, ba, conv: as for `delta_inputs`; rows: its result (N + 7B, D + 2H) → o (N, V). S is a matrix
    for each head of v. Neighbouring heads of v share a head of q and k; with `tiled`, heads of v
    whose numbers have the same remainder do.

    state (B, 2, P): two states of each slot; a state is the last three rows [q | k | v], then S of
    all heads, (V / H, k_size) each. recent (B, RECENT, D + 2H): rows [q | k | v | b | a] of tokens
    after the newer state, by position modulo RECENT. Both are updated as `delta_spans` says, with
    the same `steps`. pool (S, P): states after the first 256, 512, … tokens of slots, and after the
    last token of a pass, in entries saved (B, M); the last column is that of the last token. -1:
    the state is not kept. A row has the same bits however a text is divided into passes. Source:
    Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024).
    """
    D, H, x = len(conv), ba.shape[1] // 2, np.hstack([x[:, : len(conv)], ba])
    K = n_k_head * k_size
    out = np.zeros((len(x), D - 2 * K), x.dtype)
    of_head = np.arange(H) % n_k_head if tiled else np.arange(H) // (H // n_k_head)
    for slot, span in enumerate(spans.tolist()):
        first, start, end, base, source, target = span
        S = np.zeros((H, (D - 2 * K) // H, k_size), x.dtype)
        if source >= 0 and state is not None:
            S = state[slot, source, 3 * D :].reshape(S.shape).copy()
        written = start + 1 if steps else end
        for at in range(base, end):
            again = at < start
            r = rows[len(x) + REPLAYED * slot + at - base if again else first + at - start]
            q, k = (part.reshape(n_k_head, k_size)[of_head] for part in (r[:K], r[K : 2 * K]))
            v = r[2 * K : D].reshape(H, -1)
            S *= r[D : D + H, None, None]
            change = r[D + H :, None] * (v - (S @ k[:, :, None])[:, :, 0])
            S += change[:, :, None] * k[:, None]
            if not again:
                out[first + at - start] = (S @ q[:, :, None]).ravel()
            places = [] if state is None or at + 1 != written else [state[slot, target]]
            if saved is not None and pool is not None and not again:
                whole, rest = divmod(at + 1, SAVED)
                entries = [saved[slot, whole - 1]] * (rest == 0) + [saved[slot, -1]] * (
                    at + 1 == end
                )
                places += [pool[entry] for entry in entries if entry >= 0]
            if places:
                last = _delta_rows(x, D, slot, span, state, recent, at - 2, at + 1)[:, :D]
            for place in places:
                place[...] = np.concatenate([last.ravel(), S.ravel()])
        if recent is not None:
            for at in range(written, end):
                recent[slot, at % RECENT] = x[first + at - start]
    return out


@takes("o f32 N V; x f32 N W; gamma f32 G -> out~o f32 N V")
def gated_rmsnorm(o: Array, x: Array, gamma: Array, eps: float = 1e-6) -> Array:
    """Return rmsnorm(o) · SiLU(z) of each head, where z are the last channels of the rows of x.

    o (N, V) of heads of G channels, x (N, W), gamma (G,) → (N, V).
    """
    heads = o.reshape(len(o), -1, len(gamma))
    z = np.ascontiguousarray(x[:, -o.shape[1] :])
    return unchecked(silu_mul)(z, unchecked(rmsnorm)(heads, gamma, eps).reshape(o.shape))


def _spans(cu_seqlens: Integers, N: int) -> list[tuple[int, int]]:
    """Return pairs (first row, last row + 1), one per sequence. Raises InputError for bad input."""
    ends = cu_seqlens.tolist()
    if ends != sorted(ends) or ends[0] < 0 or ends[-1] > N:
        raise InputError(f"cu_seqlens: expected numbers that rise from 0 to {N}, got {ends[:9]}")
    return list(pairwise(ends))


def _check_places(name: str, indices: Integers, count: int) -> None:
    """Raise InputError for an index outside 0…count - 1; NumPy would accept negative indices."""
    least, most = int(indices.min()), int(indices.max())
    if least < 0 or most >= count:
        raise InputError(f"{name}: expected 0 to {count - 1}, got {least if least < 0 else most}")


def _matrix(w: Matrix, like: Array) -> Array:
    """Return weights (K, N) as an array in the dtype of `like`."""
    matrix: Array = w if isinstance(w, np.ndarray) else w.dequantized()
    return matrix.astype(like.dtype, copy=False)


@takes("logits f32 ... V; targets i32 ... -> out f32 ...")
def log_likelihood(logits: Array, targets: Integers) -> Array:
    """Return each row's log-probability of its target: logits[target] - log Σ exp(logits).

    logits (..., V), targets (...) → (...). The result is NaN for a target outside 0…V-1, and for a
    row with NaN or +inf, or only -inf.
    """
    V = logits.shape[-1]
    known = (targets >= 0) & (targets < V)
    at = np.where(known, targets, 0)[..., None]
    with np.errstate(invalid="ignore"):
        shifted = logits - logits.max(axis=-1, keepdims=True)
        total: Array = np.exp(shifted).sum(axis=-1)
        logprobs: Array = np.take_along_axis(shifted, at, axis=-1)[..., 0] - np.log(total)
    return np.where(known, logprobs, logprobs.dtype.type(math.nan))


@takes("logits f32 M V -> ids i32 M K; logprobs f32 M K")
def top_logprobs(logits: Array, K: int = MAX_ALTERNATIVES) -> tuple[NDArray[np.int32], Array]:
    """Return the K most likely tokens of each row and their log-probabilities, both (M, K).

    Equal logits are sorted by id. If a row has fewer than K tokens, the other places have id -1 and
    log-probability -inf. The log-probabilities of a row with NaN are NaN. K: 1 to 20.
    """
    K, (M, V) = check_alternatives("K", K, least=1), logits.shape
    ids = np.full((M, K), -1, np.int32)
    logprobs = np.full((M, K), -np.inf, logits.dtype)
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :K]
    ids[:, :V] = order
    with np.errstate(invalid="ignore", over="ignore"):
        shifted = logits - logits.max(axis=-1, keepdims=True)
        total = np.exp(shifted).sum(axis=-1, keepdims=True)
        logprobs[:, :V] = np.take_along_axis(shifted, order, axis=-1) - np.log(total)
    return ids, logprobs


@takes("tokens i32 T -> draft i32 K")
def draft_tokens(tokens: NDArray[np.int32], K: int = 7) -> NDArray[np.int32]:
    """Draft a sequence's next K tokens: the tokens after an earlier occurrence of its last tokens.

    The latest earlier occurrence of the last three tokens is used, or of the last two or one if
    there is none. If the sequence ends before the K-th draft token, the draft tokens repeat from
    the first. All draft tokens are -1 if the last token is new. Source: Saxena, "Prompt Lookup
    Decoding" (2023).
    """
    last = len(tokens) - 1
    for length in range(min(MATCH, last), 0, -1):
        places = np.arange(length - 1, last)
        of_end = [tokens[places - n] == tokens[last - n] for n in range(length)]
        places = places[np.all(of_end, axis=0)]
        if len(places):
            first = places[-1] + 1
            draft: NDArray[np.int32] = tokens[first + np.arange(K) % (last + 1 - first)]
            return draft.astype(np.int32)
    return np.full(K, -1, np.int32)


@takes("logits f32 B V; occurred? u8 B V; counts? i32 B V; masks? i32 B (V+31)//32 -> token i32 B")
def sample_token(
    logits: Array,
    sampling: Sampling | Sequence[Sampling] | None = None,
    step: int = 0,
    occurred: NDArray[np.uint8] | None = None,
    counts: NDArray[np.int32] | None = None,
    masks: NDArray[np.int32] | None = None,
) -> NDArray[np.int32]:
    """Draw the next token of each row by `sampling.choose`. logits (B, V) → (B,).

    sampling: the settings of all rows, or a list with settings of each row. step: the number of
    tokens sampled so far. occurred (B, V): nonzero for tokens that have occurred. counts (B, V):
    how often each token was sampled; a sampled token also counts as occurred. masks (B, ceil(V /
    32)): bit t % 32 of word t / 32 is 1 for an allowed token t; None: all tokens are allowed. The
    result is -1 for a row with NaN, or if the logits of all allowed tokens are -inf.
    """
    rows, shape = rows_of(sampling, len(logits)), logits.shape
    occurred = np.zeros(shape, np.uint8) if occurred is None else occurred
    counts = np.zeros(shape, np.int32) if counts is None else counts
    allowed = [None] * len(rows) if masks is None else masks
    told = zip(logits, rows, occurred | (counts > 0), counts, allowed, strict=True)
    tokens = [choose(x, row, step, marks, *more).token for x, row, marks, *more in told]
    return np.array(tokens, np.int32)


@takes("x any ... K; w u8 N K//256 144 -> out f32 ... N")
def blocks_matmul(x: Array, w: NDArray[np.uint8]) -> Array:
    """Return x · Wᵀ for W (N, K) in blocks of type Q4_K, stored as in a GGUF file.

    x (..., K), w (N, K / 256, 144) → (..., N). A block has 256 weights: float16 d and dmin; 12
    bytes with s and m of 6 bits for each of 8 sub-blocks; 4-bit codes q, 32 bytes for each two
    sub-blocks. A weight is d s q - dmin m. Source: ggml's quantized types.
    """
    check_blocks(x.shape[-1])
    d, dmin = np.moveaxis(w[..., :4].copy().view("<f2").astype(x.dtype)[..., None], 2, 0)
    first, second, last = np.moveaxis(w[..., 4:16].reshape(*w.shape[:2], 3, 4), 2, 0)
    s = np.concatenate([first & 63, last & 15 | first >> 6 << 4], axis=-1)
    m = np.concatenate([second & 63, last >> 4 | second >> 6 << 4], axis=-1)
    pairs = w[..., 16:].reshape(*w.shape[:2], 4, 1, 32)
    q = np.concatenate([pairs & 15, pairs >> 4], axis=-2).reshape(*w.shape[:2], 8, 32)
    weights = (d * s)[..., None] * q - (dmin * m)[..., None]
    out: Array = x @ weights.reshape(len(w), -1).T
    return out


@takes("x any ... T C")
def block_forward(x: Array, w: BlockWeights, causal: bool = False) -> Array:
    """Compute GPT-2's ten-step Pre-LN block. x (T, C) or (B, T, C) → shape and dtype of x."""
    _check_weights(x, w, "BlockWeights", "w_qkv")
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


@takes("x any ... T C; positions i32 T")
def llama_block_forward(
    x: Array, w: LlamaBlockWeights, positions: Integers, causal: bool = True
) -> Array:
    """Compute a Llama block. x (T, C) or (B, T, C), positions (T,) → shape and dtype of x."""
    _check_weights(x, w, "LlamaBlockWeights", "w_gate")
    w = w.astype(x.dtype)
    rms1 = rmsnorm(x, w.gamma1, w.eps)
    qkv = matmul_bias(rms1, w.w_qkv, w.b_qkv)
    rope = rope_qkv(qkv, positions, w.frequencies, w.n_head, w.n_kv_head, w.half_split)
    attn = attention(rope, w.n_head, causal, w.n_kv_head)
    x1 = add(x, matmul_bias(attn, w.w_o, w.b_o))
    rms2 = rmsnorm(x1, w.gamma2, w.eps)
    gate = matmul_bias(rms2, w.w_gate, w.b_gate)
    up = matmul_bias(rms2, w.w_up, w.b_up)
    ff = silu_mul(gate, up)
    return add(x1, matmul_bias(ff, w.w_down, w.b_down))


def _check_weights(x: Array, w: Any, kind: str, tensor: str) -> None:
    """Raise InputError unless w has this tensor of its kind, and the width of x."""
    width = getattr(w, "n_embd", None)
    if not hasattr(w, tensor) or width != x.shape[-1]:
        raise InputError(
            f"w: expected {kind} as wide as x, {x.shape[-1]}, got {type(w).__name__}, {width}"
        )


def all_gathered(shards: Sequence[Array], residual: Array | None = None) -> Array:
    """Return the whole matrix whose columns several GPUs have computed, plus a residual.

    shards: for each GPU a matrix (M, S) of neighbouring columns, in the order of the columns; S can
    differ. residual: (M, N), N the sum of all S. Raises InputError.
    """
    matrices = list(shards) if isinstance(shards, (list, tuple)) else []
    if not matrices or not all(
        _is_matrix(shard, getattr(matrices[0], "shape", ())[:1]) for shard in matrices
    ):
        raise InputError(f"shards: expected float matrices with equal rows, got {shown(shards)}")
    N = sum(shard.shape[1] for shard in matrices)
    if residual is not None and not (
        _is_matrix(residual, matrices[0].shape[:1]) and len(residual.T) == N
    ):
        raise InputError(f"residual: expected ({len(matrices[0])}, {N}), got {shown(residual)}")
    whole = np.concatenate(matrices, axis=-1)
    return whole if residual is None else residual + whole


def _is_matrix(array: Any, rows: tuple[int, ...]) -> bool:
    """Return whether `array` is a float matrix. rows: the number of its rows, in a tuple."""
    known = is_plain(array) and array.ndim == 2 and array.dtype.char in "efdE"
    return known and array.shape[:1] == rows


# Contracts of a GPU's all-gather (its part of `gathered`), and of an all-gather followed by
# `rmsnorm`.
_PEERS = "abort i32 Q; own to_1? to_2? to_3? to_4? to_5? to_6? to_7? i64 P"
_ALL_GATHER = f"shard mixed M S; residual? f32 M N; {_PEERS} -> out~residual mixed M N"
_ALL_GATHER_NORM = (
    f"shard f32 M S; residual f32 M N; weight f32 N; {_PEERS} -> out f32 M N; residual f32 M N"
)

# Contracts of the functions in this module, by name, and of the two all-gathers.
CONTRACTS: Mapping[str, Contract] = {
    **{name: each.contract for name, each in vars().copy().items() if hasattr(each, "contract")},
    "all_gather": Contract.parse(_ALL_GATHER),
    "all_gather_norm": Contract.parse(_ALL_GATHER_NORM),
}
