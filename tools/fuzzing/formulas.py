"""`gpt2block.reference` with random arguments, compared with the formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from fuzzing import Difference, Outcome, accepted, check_equal, refused_or
from fuzzing import gpt2 as plain
from fuzzing.values import odd_argument, pick
from gpt2block import BlockWeights, InputError, reference

Array = NDArray[Any]
Arguments = dict[str, Any]


class Draw:
    """Random arrays of one float dtype, some of them strided."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.dtype: Any = pick(rng, np.float32, np.float64)

    def size(self, most: int = 5) -> int:
        return int(self.rng.integers(1, most))

    def batch(self) -> tuple[int, ...]:
        return pick(self.rng, (), (2,), (1,), (2, 3))

    def array(self, *shape: int) -> Array:
        values = self.rng.standard_normal(shape).astype(self.dtype)
        if self.rng.random() < 0.2:  # every second element of a larger array
            strided = np.zeros((*shape[:-1], 2 * shape[-1]), self.dtype)
            strided[..., ::2] = values
            return strided[..., ::2]
        return np.asfortranarray(values) if self.rng.random() < 0.2 else values

    def ids(self, most: int, *shape: int) -> Array:
        return self.rng.integers(0, most, shape).astype(pick(self.rng, np.int32, np.int64))


class Formula(NamedTuple):
    """For a function of `reference`: how to draw its arguments, and the formula in float64."""

    draw: Callable[[Draw], Arguments]
    truth: Callable[..., Any]


def check_ids(ids: Any, most: int) -> None:
    if ids.dtype.kind not in "iu" or (ids.size and not (ids.min() >= 0 and ids.max() < most)):
        raise ValueError("no ids")


def wide(value: Any) -> Any:
    """Convert floats to float64 and keep integers. Raises TypeError for anything else."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("a mask")
    if value is None:
        return value
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    array = np.asarray(value)
    if array.dtype.kind not in "fiu":
        raise TypeError(f"no numbers: {array.dtype}")
    if array.dtype.kind in "iu":
        return array
    return array.astype(np.float64) if array.ndim or isinstance(value, np.ndarray) else float(value)


# --- the formulas


def _encoder(ids: Array, wte: Array, wpe: Array) -> Array:
    check_ids(ids, len(wte))
    result: Array = wte[ids] + wpe[: ids.shape[-1]]
    return result


def _encoder_rows(ids: Array, positions: Array, wte: Array, wpe: Array) -> Array:
    check_ids(ids, len(wte))
    check_ids(positions, len(wpe))
    result: Array = wte[ids] + wpe[positions]
    return result


def _layernorm(x: Array, gamma: Array, beta: Array, eps: float = 1e-5) -> Array:
    return plain.layernorm(x, gamma, beta, eps)


def _stats(x: Array, eps: float = 1e-5) -> tuple[Array, Array]:
    return x.mean(-1), 1 / np.sqrt(x.var(-1) + eps)


def _matmul(a: Array, w: Array, bias: Array | None = None) -> Array:
    if w.ndim != 2 or (bias is not None and bias.shape != w.shape[1:]):
        raise ValueError("no matrix")
    result: Array = a @ w + (0 if bias is None else bias)
    return result


def _attention(qkv: Array, n_head: int, causal: bool = False) -> Array:
    size = qkv.shape[-1] // 3 // n_head
    if n_head < 1 or 3 * n_head * size != qkv.shape[-1]:
        raise ValueError("heads")
    if not size:
        return qkv
    rows = qkv.reshape(-1, *qkv.shape[-2:])
    q, k, v = np.split(rows, 3, -1)
    out = np.empty_like(q)
    for b in range(len(rows)):
        for first in range(0, n_head * size, size):
            s = slice(first, first + size)
            out[b, :, s] = plain.attention(q[b, :, s], k[b, :, s], v[b, :, s], bool(causal))
    return out.reshape(*qkv.shape[:-1], -1)


def _attention_cached(q: Array, k: Array, v: Array, start: int, n_head: int) -> Array:
    T, C = q.shape
    if start < 0 or n_head < 1 or C % n_head or k.shape != v.shape or len(k) < start + T:
        raise ValueError("sizes")
    size, out = C // n_head, np.empty_like(q)
    for t in range(T):
        for s in (slice(a, a + size) for a in range(0, C, size)):
            seen = slice(start + t + 1)
            out[t, s] = plain.softmax(q[t, s] @ k[seen, s].T / math.sqrt(size)) @ v[seen, s]
    return out


def _softmax(scores: Array, causal: bool = False) -> Array:
    if causal:
        seen = np.tri(scores.shape[-1], dtype=bool)
        return np.where(seen, plain.softmax(np.where(seen, scores, -np.inf)), 0)
    return plain.softmax(scores)


def _trimat(qkv: Array, fill: float | None = None) -> Array:
    B, T, three, NH, HS = qkv.shape
    if three != 3:
        raise ValueError("three")
    out = np.full((B, NH, T, T), np.nan if fill is None else fill, np.float64)
    for b, h, i in np.ndindex(B, NH, T):
        for j in range(i + 1):
            out[b, h, i, j] = qkv[b, i, 0, h] @ qkv[b, j, 1, h] / math.sqrt(HS)
    return out


def _linear(
    x: Array, w: Array, bias: Array | None = None, gamma: Array | None = None,
    beta: Array | None = None, residual: Array | None = None, gelu: bool = False, eps: float = 1e-5,
) -> Array:  # fmt: skip
    if (gamma is None) != (beta is None):
        raise ValueError("one of two")
    n = x if gamma is None or beta is None else plain.layernorm(x, gamma, beta, eps)
    product = _matmul(n, w, bias)
    product = plain.gelu(product) if gelu else product
    if residual is not None and residual.shape != product.shape:
        raise ValueError("residual")
    return product if residual is None else product + residual


def _add(a: Array, b: Array) -> Array:
    result: Array = np.asarray(a + b)
    return result


def _layernorm_gelu(
    x: Array, gamma: Array | None = None, beta: Array | None = None, eps: float = 1e-5
) -> Array:
    n = plain.layernorm(x, np.float64(1), np.float64(0), eps)
    return plain.gelu(n * (1 if gamma is None else gamma) + (0 if beta is None else beta))


def _rmsnorm(x: Array, weight: Array, eps: float = 1e-6) -> Array:
    result: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    return result


def _rope(x: Array, start: int = 0, theta: float = 10000.0, half_split: bool = False) -> Array:
    D = x.shape[-1]
    if D % 2 or not theta > 0 or start < 0:
        raise ValueError("sizes")
    out = np.empty_like(x)
    for t in range(x.shape[-3]):
        for k in range(D // 2):
            a = (start + t) / theta ** (2 * k / D)
            i, j = (k, k + D // 2) if half_split else (2 * k, 2 * k + 1)
            real, imaginary = x[..., t, :, i], x[..., t, :, j]
            out[..., t, :, i] = real * math.cos(a) - imaginary * math.sin(a)
            out[..., t, :, j] = real * math.sin(a) + imaginary * math.cos(a)
    return out


def _rmsnorm_matmul(
    x: Array, gamma: Array, w: Array, eps: float = 1e-6, head_dim: int | None = None,
    start: int = 0, theta: float = 10000.0, half_split: bool = False,
) -> Array:  # fmt: skip
    product = _matmul(_rmsnorm(x, gamma, eps), w)
    if head_dim is None:
        return product
    if head_dim < 1:
        raise ValueError("head_dim")
    heads = product.reshape(*product.shape[:-1], -1, head_dim)
    return _rope(heads, start, theta, half_split).reshape(product.shape)


def _ffn(
    x: Array, gamma: Array, w1: Array, w3: Array, eps: float = 1e-6, residual: Array | None = None
) -> Any:
    if residual is not None and residual.shape != x.shape:
        raise ValueError("residual")
    h = x if residual is None else x + residual
    n = _rmsnorm(h, gamma, eps)
    a, b = _matmul(n, w1), _matmul(n, w3)
    out = a / (1 + np.exp(-a)) * b
    return out if residual is None else (out, h)


def _log_likelihood(logits: Array, targets: Array) -> Array:
    if targets.dtype.kind not in "iu" or targets.shape != logits.shape[:-1]:
        raise ValueError("targets")
    known = (targets >= 0) & (targets < logits.shape[-1])
    logp = plain.log_softmax(logits)
    found = np.take_along_axis(logp, np.where(known, targets, 0)[..., None], -1)[..., 0]
    return np.where(known, found, np.nan)


def _eps(d: Draw) -> float:
    return float(d.rng.choice([1e-5, 1e-2]))


def _with(d: Draw, required: Arguments, **optional: Callable[[], Any]) -> Arguments:
    """Return the required arguments and some of the optional ones."""
    return required | {name: make() for name, make in optional.items() if d.rng.random() < 0.5}


def _draw_linear(d: Draw) -> Arguments:
    K, N, batch = d.size(), d.size(), (*d.batch(), d.size())
    found = _with(
        d, {"x": d.array(*batch, K), "w": d.array(K, N)},
        bias=lambda: d.array(N), residual=lambda: d.array(*batch, N), gelu=lambda: True,
    )  # fmt: skip
    norm = {"gamma": d.array(K), "beta": d.array(K), "eps": _eps(d)}
    return found | (norm if d.rng.random() < 0.5 else {})


def _draw_encoder(d: Draw) -> Arguments:
    V, T, C = d.size(9), d.size(), d.size()
    return {"ids": d.ids(V, *d.batch(), T), "wte": d.array(V, C), "wpe": d.array(T + 2, C)}


def _draw_rows(d: Draw) -> Arguments:
    V, n, N, C = d.size(9), d.size(9), d.size(), d.size()
    return {
        "ids": d.ids(V, N), "positions": d.ids(n, N), "wte": d.array(V, C), "wpe": d.array(n, C),
    }  # fmt: skip


def _draw_norm(d: Draw, *names: str) -> Arguments:
    C = d.size()
    x = {"x": d.array(*d.batch(), d.size(), C)}
    return x | {name: d.array(C) for name in names} | {"eps": _eps(d)}


def _draw_attention(d: Draw) -> Arguments:
    n = d.size(4)
    qkv = d.array(*pick(d.rng, (), (2,)), d.size(), 3 * n * d.size(4))
    return {"qkv": qkv, "n_head": n, "causal": bool(d.rng.random() < 0.5)}


def _draw_cached(d: Draw) -> Arguments:
    n, T, start = d.size(4), d.size(20), int(d.rng.integers(0, 5))
    C, more = n * d.size(4), int(d.rng.integers(0, 3))
    kv = [d.array(start + T + more, C) for _ in range(2)]
    return {"q": d.array(T, C), "k": kv[0], "v": kv[1], "start": start, "n_head": n}


def _draw_softmax(d: Draw) -> Arguments:
    T = d.size()
    if d.rng.random() < 0.5:
        return {"scores": d.array(*d.batch(), T, T), "causal": True}
    return {"scores": d.array(*d.batch(), T, d.size(8))}


def _draw_trimat(d: Draw) -> Arguments:
    qkv = d.array(d.size(3), d.size(), 3, d.size(3), d.size())
    return _with(d, {"qkv": qkv}, fill=lambda: pick(d.rng, 0.0, -math.inf, -1e4))


def _draw_rope(d: Draw) -> Arguments:
    x = d.array(*d.batch(), d.size(), d.size(3), 2 * d.size(4))
    return _with(
        d, {"x": x}, start=lambda: int(d.rng.integers(0, 50)), theta=lambda: 500.0,
        half_split=lambda: True,
    )  # fmt: skip


def _draw_rms(d: Draw) -> Arguments:
    K, D = d.size(), 2 * d.size(3)
    found = {
        "x": d.array(*d.batch(), d.size(), K),
        "gamma": d.array(K),
        "w": d.array(K, D * d.size(3)),
    }
    heads = {"head_dim": D, "start": d.size(30), "half_split": bool(d.rng.random() < 0.5)}
    return found | (heads if d.rng.random() < 0.5 else {})


def _draw_ffn(d: Draw) -> Arguments:
    K, N, batch = d.size(), d.size(), (*d.batch(), d.size())
    found = {"x": d.array(*batch, K), "gamma": d.array(K), "w1": d.array(K, N), "w3": d.array(K, N)}
    return _with(d, found, residual=lambda: d.array(*batch, K), eps=lambda: _eps(d))


def _draw_likelihood(d: Draw) -> Arguments:
    V, batch = d.size(9), (*d.batch(), d.size())
    return {"logits": d.array(*batch, V), "targets": d.ids(V, *batch) - int(d.rng.random() < 0.1)}


def _draw_add(d: Draw) -> Arguments:
    shape = (*d.batch(), d.size(), d.size())
    return {"a": d.array(*shape), "b": d.array(*shape)}


def _draw_matmul(d: Draw) -> Arguments:
    K, N = d.size(), d.size()
    found = {"a": d.array(*d.batch(), d.size(), K), "w": d.array(K, N)}
    return _with(d, found, bias=lambda: d.array(N))


FORMULAS: Mapping[str, Formula] = {
    "encoder": Formula(_draw_encoder, _encoder),
    "encoder_rows": Formula(_draw_rows, _encoder_rows),
    "layernorm": Formula(lambda d: _draw_norm(d, "gamma", "beta"), _layernorm),
    "layernorm_stats": Formula(_draw_norm, _stats),
    "matmul_bias": Formula(_draw_matmul, _matmul),
    "attention": Formula(_draw_attention, _attention),
    "attention_cached": Formula(_draw_cached, _attention_cached),
    "softmax": Formula(_draw_softmax, _softmax),
    "trimat": Formula(_draw_trimat, _trimat),
    "linear": Formula(_draw_linear, _linear),
    "add": Formula(_draw_add, _add),
    "gelu": Formula(lambda d: {"x": d.array(*d.batch(), d.size())}, plain.gelu),
    "layernorm_gelu": Formula(lambda d: _draw_norm(d, "gamma", "beta"), _layernorm_gelu),
    "rmsnorm": Formula(lambda d: _draw_norm(d, "weight"), _rmsnorm),
    "rope": Formula(_draw_rope, _rope),
    "rmsnorm_matmul": Formula(_draw_rms, _rmsnorm_matmul),
    "rmsnorm_ffn": Formula(_draw_ffn, _ffn),
    "log_likelihood": Formula(_draw_likelihood, _log_likelihood),
}


def case(rng: np.random.Generator, folder: Path) -> Outcome:
    if rng.random() < 0.1:
        return pick(rng, _fp8, _split, _block)(rng)
    name = str(pick(rng, *FORMULAS))
    formula, draw = FORMULAS[name], Draw(rng)
    arguments = formula.draw(draw)
    changed = rng.random() < 0.5
    if changed:
        other = str(pick(rng, *arguments))
        arguments[other] = odd_argument(rng)
    function = getattr(reference, name)
    attempt = refused_or if changed else accepted
    got = attempt(lambda: function(**arguments))
    if isinstance(got, str):
        return "refused"
    try:
        flags = ("causal", "gelu", "half_split")
        known = {n: v if n in flags else wide(v) for n, v in arguments.items()}
        truth = formula.truth(**known)
    except Exception as error:
        raise Difference(f"{name}: accepted {other} = {_description(arguments[other])}") from error
    tolerance = 2e-2 if changed else 2e-3 if draw.dtype == np.float32 else 1e-9
    pairs = zip(got, truth, strict=True) if isinstance(truth, tuple) else [(got, truth)]
    for one, exact in pairs:
        plain.check_close(name, one, exact, tolerance)
    return "right"


def _description(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{type(value).__name__} {value.dtype} {value.shape}"
    return ascii(value)[:60]


def _fp8(rng: np.random.Generator) -> Outcome:
    """Compare FP8 bytes with ml_dtypes."""
    name = pick(rng, "float8_e5m2", "float8_e4m3fn")
    kind: Any = getattr(ml_dtypes, name)
    exponents = rng.integers(-20, 20, (3, 5)).astype(np.float32)
    x = (rng.standard_normal((3, 5)) * 2.0**exponents).astype(np.float32)
    saturate = bool(rng.random() < 0.5)
    got = accepted(lambda: reference.to_fp8(x, name, saturate))
    largest = {"float8_e5m2": 57344.0, "float8_e4m3fn": 448.0}[name]
    exact = np.clip(x, -largest, largest) if saturate else x
    check_equal("to_fp8", got.tolist(), exact.astype(kind).view(np.uint8).tolist())
    back = accepted(lambda: reference.from_fp8(got, name))
    plain.check_close("from_fp8", back, got.view(kind).astype(np.float64), 0)
    odd = odd_argument(rng)
    function: Any = pick(rng, reference.to_fp8, reference.from_fp8)
    other = refused_or(lambda: function(odd, name))
    if not isinstance(other, str) and isinstance(odd, np.ma.MaskedArray):
        raise Difference("FP8 of a masked array")
    return "right"


def _split(rng: np.random.Generator) -> Outcome:
    draw = Draw(rng)
    x = draw.array(*draw.batch(), draw.size(), draw.size()).astype(np.float32)
    parts, scale = accepted(lambda: reference.two_part(x))
    joined = accepted(lambda: reference.joined(parts, scale))
    plain.check_close("split", joined, x.reshape(-1, x.shape[-1]).astype(np.float64), 1e-6)
    odd = odd_argument(rng)
    refused_or(lambda: reference.two_part(odd))
    refused_or(lambda: reference.joined(odd, scale))
    return "right"


def _block(rng: np.random.Generator) -> Outcome:
    odd = odd_argument(rng)
    weights = BlockWeights.random(int(rng.integers(99)), plain_config(rng))
    result = refused_or(lambda: reference.block_forward(odd, weights), InputError)
    return result if isinstance(result, str) else "right"


def plain_config(rng: np.random.Generator) -> Any:
    """Return the GPT2Config of a tiny model."""
    from gpt2block import GPT2Config  # noqa: PLC0415

    sizes = plain.random_sizes(rng)
    return GPT2Config(
        n_layer=sizes.n_layer, n_head=sizes.n_head, n_embd=sizes.n_embd, n_ctx=sizes.n_ctx,
        vocab_size=sizes.vocab_size, eps=sizes.eps, tie_word_embeddings=sizes.tied,
    )  # fmt: skip
