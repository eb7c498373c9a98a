"""KV caches of every dtype, including FP8, with and without grouped queries, for tests.

ml_dtypes computes the FP8 codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gpt2block import reference
from tests import plain

Array = NDArray[Any]
Heads = tuple[int, int, int]  # heads of Q, heads of K and V, channels per head
FORMATS: dict[str, Any] = {
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}
DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
KINDS = (*DTYPES, *FORMATS)
NO_PEERS = (*[None] * 8, 0, 0, 0)  # last arguments of attention_split, if it sends nothing
LARGEST = {"float8_e5m2": 57344.0, "float8_e4m3fn": 448.0}
NAN = 0x7F  # a code of NaN in both formats


def codes_of(x: Array, kv_dtype: str) -> NDArray[np.uint8]:
    """Return FP8 codes by ml_dtypes. It does not saturate, so x is limited to the range first."""
    largest = LARGEST[kv_dtype]
    limited = np.clip(x.astype(np.float32), -largest, largest)
    with np.errstate(invalid="ignore"):  # x may contain NaN
        return np.asarray(limited.astype(FORMATS[kv_dtype]).view(np.uint8))


def widened(codes: Array, kv_dtype: str) -> NDArray[np.float32]:
    return np.asarray(codes.view(FORMATS[kv_dtype]).astype(np.float32))


def stored(x: Array, kind: str) -> Array:
    """Return x as a cache of this kind stores it."""
    return codes_of(x, kind) if kind in FORMATS else x.astype(DTYPES[kind])


def repeated(rows: Array, heads: Heads) -> Array:
    """Repeat each head of K or V (..., KV) for every head of Q that it serves: (..., Q)."""
    NH, NKV, HS = heads
    each = rows.reshape(*rows.shape[:-1], NKV, HS)
    return np.repeat(each, NH // NKV, axis=-2).reshape(*rows.shape[:-1], NH * HS)


def row_width(heads: Heads) -> int:
    """Return the number of channels of a row [Q | K | V]."""
    return (heads[0] + 2 * heads[1]) * heads[2]


class Cache(NamedTuple):
    """Keys and values as they are stored, (B, n_ctx, C)."""

    k: Array
    v: Array
    heads: Heads
    kind: str

    @property
    def kv_dtype(self) -> str | None:
        return self.kind if self.kind in FORMATS else None

    def _each(self, change: Callable[[Array], Array]) -> Cache:
        return self._replace(k=change(self.k), v=change(self.v))

    def of(self, sequences: Any) -> Cache:
        """Return the cache of these sequences alone."""
        return self._each(lambda half: np.ascontiguousarray(half[sequences]))

    def longer(self, n_ctx: int) -> Cache:
        """Return the cache with n_ctx more positions, which hold NaN."""
        value = NAN if self.kv_dtype else np.nan
        more = np.full((len(self.k), n_ctx, self.k.shape[2]), value, self.k.dtype)
        return self._each(lambda half: np.concatenate([half, more], axis=1))

    def ungrouped(self) -> Cache:
        """Return the cache with as many heads of K and V as of Q."""
        NH, _, HS = self.heads
        return self._each(lambda half: repeated(half, self.heads))._replace(heads=(NH, NH, HS))

    def numbers(self, sequence: int) -> tuple[Array, Array]:
        """Return K and V of a sequence with as many heads as Q, in float32."""
        k, v = (half[sequence] for half in self.ungrouped()[:2])
        if self.kind in FORMATS:
            return widened(k, self.kind), widened(v, self.kind)
        return k.astype(np.float32), v.astype(np.float32)


def random_cache(heads: Heads, lengths: list[int], n_ctx: int, kind: str) -> Cache:
    """Return random keys and values; positions beyond a sequence's length hold NaN."""
    _, NKV, HS = heads
    x = plain.normal(HS, 2, len(lengths), n_ctx, NKV * HS)
    for b, length in enumerate(lengths):
        x[:, b, length:] = np.nan
    k, v = stored(x, kind)
    return Cache(k, v, heads, kind)


def exact(q: Array, k: Array, v: Array, start: int, n_head: int) -> Array:
    """Return attention (T, C) of queries from position `start` on, computed in float64."""
    q, k, v = (a[: start + len(q)].astype(np.float64) for a in (q, k, v))
    return np.asarray(reference.attention_cached(q, k, v, start, n_head))


def plainly(q: Array, k: Array, v: Array, start: int, n_head: int) -> Array:
    """Compute `plain.attention` for queries from position `start` on."""
    T, C = q.shape
    n = start + T
    heads = [a.astype(np.float32).reshape(-1, n_head, C // n_head) for a in (q, k[:n], v[:n])]
    q, k, v = (head.swapaxes(0, 1) for head in heads)
    scores = plain.product(q, k.swapaxes(1, 2)) / np.float32(math.sqrt(C // n_head))
    scores = np.where(np.tri(T, n, start, dtype=bool), scores, np.float32(-np.inf))
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = plain.product(p, v) / plain.running_sum(p)
    return np.ascontiguousarray(out.swapaxes(0, 1)).reshape(T, C)


def assert_right(got: Array, q: Array, held: Cache, sequence: int, start: int) -> None:
    """Assert that `got` is as accurate as a sequential evaluation in float32.

    q: (T, Q), at positions from `start` on.
    """
    given = q, *held.numbers(sequence), start, held.heads[0]
    plain.assert_as_accurate(got, exact(*given), plainly(*given))
