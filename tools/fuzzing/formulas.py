"""`gpt2block.reference` with random arguments, compared with the formulas in float64."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from fuzzing import Difference, Rng, accepted, attempt, check, check_equal, refuses
from fuzzing import gpt2 as plain
from fuzzing.op_calls import RULES, Draw, Known, Rule, drawn_call
from fuzzing.values import odd_argument, swapped
from gpt2block import BlockWeights, reference

Array = NDArray[Any]
Arguments = dict[str, Any]


class Small(Draw):
    """Small arrays of one float dtype, some of them strided or of another byte order.

    large: the numbers may be around 300, so that their squares exceed the range of float16.
    """

    def __init__(self, rng: Rng, large: bool = False) -> None:
        super().__init__(rng)
        self.kind: Any = rng.pick(np.float32, np.float64, np.float16)
        self.scale = rng.pick(1, 300) if large else 1

    def size(self, most: int = 5) -> int:
        return self.rng.whole(1, min(most, 5))

    def rows(self) -> tuple[int, ...]:
        return (*self.rng.pick((), (2,), (1,), (2, 3)), self.size())

    def array(self, *shape: int, dtype: str = "") -> Array:
        values = (self.scale * self.rng.standard_normal(shape)).astype(self.kind)
        if self.rng.chance(0.2):
            values = swapped(values)
        if self.rng.chance(0.2):  # every second element of a larger array
            strided = np.zeros((*shape[:-1], 2 * shape[-1]), self.kind)
            strided[..., ::2] = values
            return strided[..., ::2]
        return np.asfortranarray(values) if self.rng.chance(0.2) else values

    def matrix(self, kind: str, shape: tuple[int, ...], known: Known) -> Array:
        return self.array(*shape)

    def ids(self, shape: Any, V: int) -> Any:
        return self.rng.integers(0, V, shape).astype(self.rng.pick(np.int32, np.int64, ">i4"))


def drawn(name: str, d: Small) -> Arguments:
    """Draw the arguments of a function, without some that have defaults."""
    function = getattr(reference, name)
    call = drawn_call(d, RULES_BY_NAME.get(name, Rule(name)), function)
    arrays = {key: value for key, value in call.arrays.items() if value is not None}
    parameters = inspect.signature(function).parameters
    required = {key for key, one in parameters.items() if one.default is one.empty}
    kept = {k: v for k, v in call.options.items() if k in required or d.rng.chance(0.5)}
    return arrays | kept


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


def _encoder_rows(ids: Array, positions: Array, wte: Array, wpe: Array | None = None) -> Array:
    check_ids(ids, len(wte))
    check_ids(positions, 2**31 if wpe is None else len(wpe))
    result: Array = wte[ids] + (0 if wpe is None else wpe[positions])
    return result


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
    beta: Array | None = None, residual: Array | None = None, up: Array | None = None,
    gelu: bool = False, eps: float = 1e-5,
) -> Array:  # fmt: skip
    if (gamma is None) != (beta is None):
        raise ValueError("one of two")
    n = x if gamma is None or beta is None else plain.layernorm(x, gamma, beta, eps)
    product = _matmul(n, w, bias)
    product = plain.gelu(product) if gelu else product
    product = product if up is None else _silu_mul(product, _matmul(n, up))
    if residual is not None and residual.shape != product.shape:
        raise ValueError("residual")
    return product if residual is None else product + residual


def _add(a: Array, b: Array) -> Array:
    result: Array = np.asarray(a + b)
    return result


def _silu_mul(gate: Array, up: Array) -> Array:
    result: Array = gate / (1 + np.exp(-gate)) * up
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
    out = _silu_mul(_matmul(n, w1), _matmul(n, w3))
    return out if residual is None else (out, h)


def _log_likelihood(logits: Array, targets: Array) -> Array:
    if targets.dtype.kind not in "iu" or targets.shape != logits.shape[:-1]:
        raise ValueError("targets")
    known = (targets >= 0) & (targets < logits.shape[-1])
    logp = plain.log_softmax(logits)
    found = np.take_along_axis(logp, np.where(known, targets, 0)[..., None], -1)[..., 0]
    return np.where(known, found, np.nan)


FORMULAS: Mapping[str, Callable[..., Any]] = {
    "encoder": _encoder,
    "encoder_rows": _encoder_rows,
    "layernorm": plain.layernorm,
    "layernorm_stats": _stats,
    "matmul_bias": _matmul,
    "attention": _attention,
    "attention_cached": _attention_cached,
    "softmax": _softmax,
    "trimat": _trimat,
    "linear": _linear,
    "add": _add,
    "gelu": plain.gelu,
    "silu_mul": _silu_mul,
    "layernorm_gelu": _layernorm_gelu,
    "rmsnorm": _rmsnorm,
    "rope": _rope,
    "rmsnorm_matmul": _rmsnorm_matmul,
    "rmsnorm_ffn": _ffn,
    "log_likelihood": _log_likelihood,
}
RULES_BY_NAME = {rule.op: rule for rule in reversed(RULES)}  # the first one of a name


def case(rng: Rng, folder: Path) -> None:
    if rng.chance(0.1):
        rng.pick(_fp8, _split, _block)(rng)
        return
    name = rng.pick(*FORMULAS)
    d = Small(rng, name in ("layernorm", "layernorm_stats", "rmsnorm", "rmsnorm_matmul"))
    arguments = drawn(name, d)
    changed, other = rng.chance(0.5), rng.pick(*arguments)
    if changed:
        arguments[other] = odd_argument(rng)
    got = attempt(not changed, getattr(reference, name), **arguments)
    try:
        flags = ("causal", "gelu", "half_split")
        known = {n: v if n in flags else wide(v) for n, v in arguments.items()}
        truth = FORMULAS[name](**known)
    except Exception as error:
        raise Difference(f"{name}: accepted {other} = {_description(arguments[other])}") from error
    tolerance = 2e-2 if changed else 1e-9 if d.kind == np.float64 else 2e-3
    for one, exact in zip(got, truth, strict=True) if isinstance(truth, tuple) else [(got, truth)]:
        with np.errstate(over="ignore"):  # values beyond the range of float16 become infinite
            rounded = np.asarray(exact, one.dtype) if one.dtype == np.float16 else exact
        plain.check_close(name, one, rounded, tolerance)


def _description(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{type(value).__name__} {value.dtype} {value.shape}"
    return ascii(value)[:60]


def _fp8(rng: Rng) -> None:
    """Compare FP8 bytes with ml_dtypes."""
    name = rng.pick("float8_e5m2", "float8_e4m3fn")
    kind: Any = getattr(ml_dtypes, name)
    exponents = rng.integers(-20, 20, (3, 5)).astype(np.float32)
    x = (rng.standard_normal((3, 5)) * 2.0**exponents).astype(np.float32)
    saturate = rng.chance(0.5)
    got = accepted(reference.to_fp8, x, name, saturate)
    largest = {"float8_e5m2": 57344.0, "float8_e4m3fn": 448.0}[name]
    exact = np.clip(x, -largest, largest) if saturate else x
    check_equal("to_fp8", got.tolist(), exact.astype(kind).view(np.uint8).tolist())
    back = accepted(reference.from_fp8, got, name)
    plain.check_close("from_fp8", back, got.view(kind).astype(np.float64), 0)
    odd = odd_argument(rng)
    refused = refuses(rng.pick(reference.to_fp8, reference.from_fp8), odd, name)
    check(refused or not isinstance(odd, np.ma.MaskedArray), "FP8 of a masked array")


def _split(rng: Rng) -> None:
    d = Small(rng)
    x = d.array(*d.rows(), d.size()).astype(np.float32)
    parts, scale = accepted(reference.two_part, x)
    joined = accepted(reference.joined, parts, scale)
    plain.check_close("split", joined, x.reshape(-1, x.shape[-1]).astype(np.float64), 1e-6)
    odd = odd_argument(rng)
    refuses(reference.two_part, odd)
    refuses(reference.joined, odd, scale)


def _block(rng: Rng) -> None:
    odd = odd_argument(rng)
    weights = BlockWeights.random(rng.whole(99), plain.random_config(rng))
    attempt(False, reference.block_forward, odd, weights)
