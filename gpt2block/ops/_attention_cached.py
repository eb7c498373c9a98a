"""Attention over a kv_cache on CUDA: cached.cu, decode.cu and kv_cache.cu of kernels_cu/attention.

A kv_cache is two arrays, keys and values, each (B, n_ctx, C) in float32, float16 or bfloat16.
"""

from __future__ import annotations

from math import ceil
from numbers import Integral
from typing import Any

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    alignment,
    check,
    check_apart,
    contiguous,
    device_attribute,
    launch_at,
    output,
    storage,
)
from gpt2block.errors import InputError
from gpt2block.operations import attention_cached as launches
from gpt2block.operations.attention_cached import OPERATION, SPLIT_KEYS
from gpt2block.ops._warm import call

SPLIT, APPEND = OPERATION.beside


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    n_head: int,
    longest: int,
    variant: str = "tiles",
) -> Bound:
    """inputs (qkv (N, 3C), k, v (B, n_ctx, C), cu_seqlens (B + 1,), start (B,)), out (N, C).

    qkv and out: both float32, or both in the dtype of k. Q of sequence b is in rows cu_seqlens[b]
    to cu_seqlens[b + 1] - 1 of qkv, `longest` of them at most, at positions from start[b] on; k and
    v already hold their keys and values. cu_seqlens and start, int32, are not read back: what they
    name beyond qkv or the cache is left out.
    """
    qkv, k, v, cu_seqlens, start = inputs
    OPERATION.variant(variant)
    dtype, B, n_ctx, C = _cache(k, v)
    _heads(n_head, C)
    check("qkv", qkv, dtype=_of_rows(qkv, dtype))
    if qkv.ndim != 2 or qkv.shape[1] != 3 * C:
        raise InputError(f"qkv: expected (N, {3 * C}), as k has {C} channels, got {qkv.shape}")
    check("cu_seqlens", cu_seqlens, (B + 1,), "int32")
    check("start", start, (B,), "int32")
    if isinstance(longest, bool) or not isinstance(longest, Integral) or longest < 1:
        raise InputError(f"longest: expected a number of queries, got {longest!r}")
    return _tiles(qkv, k, v, cu_seqlens, start, out, n_head, int(longest), 0, dtype, n_ctx)


def bind_sequence(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    start: int,
    n_head: int,
    variant: str = "tiles",
) -> Bound:
    """inputs (q (T, C), k, v (start + T, C) or longer), out (T, C): one sequence."""
    q, k, v = inputs
    OPERATION.variant(variant)
    for name, array in (("q", q), ("k", k)):
        check(name, array, dtype="float32" if name == "q" else storage(array))
        if array.ndim != 2:
            raise InputError(f"{name}: expected two axes, got shape {array.shape}")
    dtype, _, n_ctx, C = _cache(k[None], v[None] if isinstance(v, cupy.ndarray) else v)
    _heads(n_head, C)
    T = q.shape[0]
    check("q", q, (T, C))
    if isinstance(start, bool) or not isinstance(start, Integral) or not 0 <= start <= n_ctx - T:
        raise InputError(
            f"start: expected 0 to {n_ctx - T:,} for {T:,} queries and {n_ctx:,} keys, "
            f"got {start!r}"
        )
    return _tiles(q, k, v, None, None, out, n_head, T, int(start), dtype, n_ctx)


def _tiles(
    q: CudaArray,
    k: CudaArray,
    v: CudaArray,
    cu_seqlens: CudaArray | None,
    start: CudaArray | None,
    out: CudaArray | None,
    n_head: int,
    longest: int,
    at_once: int,
    dtype: str,
    n_ctx: int,
) -> Bound:
    N, distance = q.shape
    C = k.shape[-1]
    B = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    given = {"q": q, "k": k, "v": v, "cu_seqlens": cu_seqlens, "start": start}
    out = output(out, (N, C), q.dtype.name, apart=given)
    for name, array in (("q", q), ("k", k), ("v", v), ("out", out)):
        _aligned(name, array, 16)
    limit = device_attribute("MaxSharedMemoryPerBlockOptin")
    narrow = q.dtype.name != "float32"
    where = launches.tiles(B, longest, n_head, C // n_head, k.itemsize, limit, narrow)
    args = (q, k, v, cu_seqlens, start, out, distance, n_ctx, N, B, at_once)
    (only,) = OPERATION.variants
    return Bound(out, (launch_at(only.file, where, args, dtype),))


def bind_split(inputs: tuple[Any, ...], out: CudaArray | None = None, *, n_head: int) -> Bound:
    """inputs (q (B, C), k, v (B, n_ctx, C), position (B,), arrived (B, NH)); out (B, C).

    Sequence b's query sees keys 0 to position[b], its own, which the cache already holds; a
    position beyond the cache counts as its last, and a row at one below 0 is not written. arrived,
    int32, is all 0 before and after a run, and of use to one run at a time; None makes one.

    Extra: parts (B, S, NH, HS) and stats (B, S, NH, 2) of the S = ceil(n_ctx / 128) splits of the
    keys, sums of 2^(s - m) v, and m, the maximum of the split's scores s times log2(e), with the
    sum of 2^(s - m); splits behind the position are not written; `arrived` where it was made.
    """
    q, k, v, position, arrived = inputs
    dtype, B, n_ctx, C = _cache(k, v)
    _heads(n_head, C)
    check("q", q, (B, C))
    check("position", position, (B,), "int32")
    made = arrived is None
    if made:
        arrived = cupy.zeros((B, n_head), "int32")
    check("arrived", arrived, (B, n_head), "int32")
    given = {"q": q, "k": k, "v": v, "position": position, "arrived": arrived}
    out = output(out, (B, C), apart=given)
    HS, S = C // n_head, ceil(n_ctx / SPLIT_KEYS)
    where = launches.split(B, n_ctx, n_head, HS, k.itemsize)
    width = dict(where.defines)["AS_WIDTH"]
    for name, array in (("q", q), ("k", k), ("v", v)):
        _aligned(name, array, min(16, int(width) * array.itemsize))
    parts = cupy.empty((B, S, n_head, HS), "float32")
    stats = cupy.empty((B, S, n_head, 2), "float32")
    args = (q, k, v, position, parts, stats, n_ctx, out, arrived)
    extra = (parts, stats, *([arrived] if made else []))
    return Bound(out, (launch_at(SPLIT.file, where, args, dtype),), extra)


def bind_append(inputs: tuple[Any, ...], out: tuple[CudaArray, CudaArray]) -> Bound:
    """inputs (qkv (N, 3C), row (N,), position (N,), both int32), out (k, v), (B, n_ctx, C) each.

    Columns C to 2C - 1 of row n become k[row[n], position[n]], the last C columns v there. qkv:
    float32, or in the dtype of k. row and position are not read back: one outside the cache is left
    out.
    """
    qkv, row, position = inputs
    k, v = out
    dtype, B, n_ctx, C = _cache(k, v)
    check_apart("v", v, {"k": k})
    of_rows = _of_rows(qkv, dtype)
    check("qkv", qkv, dtype=of_rows)
    N = qkv.shape[0]
    check("qkv", qkv, (N, 3 * C), of_rows)
    check("row", row, (N,), "int32")
    check("position", position, (N,), "int32")
    aligned = alignment(qkv.data.ptr), alignment(k.data.ptr, v.data.ptr)
    where = launches.append(N, C, k.itemsize, *aligned, of_rows != "float32")
    args = (qkv, row, position, k, v, C, B, n_ctx)
    return Bound(k, (launch_at(APPEND.file, where, args, dtype),), (v,))


def _cache(k: Any, v: Any) -> tuple[str, int, int, int]:
    """Checks both halves of a kv_cache: their dtype, B, n_ctx and C."""
    dtype = storage(k)
    check("k", k, dtype=dtype)
    if k.ndim != 3:
        raise InputError(f"k: expected (B, n_ctx, C), got shape {k.shape}")
    check("v", v, k.shape, dtype)
    B, n_ctx, C = k.shape
    return dtype, B, n_ctx, C


def _of_rows(qkv: Any, kept: str) -> str:
    """The dtype that new rows must have beside a cache of dtype `kept`: that, or float32."""
    return kept if storage(qkv) == kept else "float32"


def _heads(n_head: Any, C: int) -> None:
    if isinstance(n_head, bool) or not isinstance(n_head, Integral) or n_head < 1 or C % n_head:
        raise InputError(f"n_head: expected a divisor of the {C} channels, got {n_head!r}")


def _aligned(name: str, array: CudaArray, to: int) -> None:
    if array.data.ptr % to:
        raise InputError(f"{name}: expected data aligned to {to} bytes: pass a copy, {name}.copy()")


def attention_cached(
    q: CudaArray, k: CudaArray, v: CudaArray, start: int, n_head: int, variant: str = "tiles"
) -> CudaArray:
    """`reference.attention_cached` on CuPy arrays; raises InputError.

    q (T, C) float32, k and v (start + T, C) or longer, float32, float16 or bfloat16 → (T, C). A
    query gets the same bits however its sequence is cut into calls. Heads of at most 256 channels.
    """
    options = {"start": start, "n_head": n_head, "variant": variant}
    return call(bind_sequence, contiguous(q, k, v), **options).out


def attention_packed(
    qkv: CudaArray,
    k: CudaArray,
    v: CudaArray,
    cu_seqlens: CudaArray,
    start: CudaArray,
    n_head: int,
    longest: int,
) -> CudaArray:
    """Causal attention of several sequences' new tokens over a kv_cache that holds them already.

    qkv (N, 3C) float32 or in the dtype of k, the rows of one sequence after those of another, k and
    v (B, n_ctx, C), cu_seqlens (B + 1,) and start (B,) int32 → (N, C), as qkv. Rows cu_seqlens[b]
    to cu_seqlens[b + 1] - 1 are sequence b's, at positions from start[b] on; it may have none, and
    has at most `longest`. A sequence gets the same bits alone and in any batch. Raises InputError.
    """
    arrays = contiguous(qkv, k, v, cu_seqlens, start)
    return call(bind, arrays, n_head=n_head, longest=longest).out


def attention_split(
    q: CudaArray, k: CudaArray, v: CudaArray, position: CudaArray, n_head: int
) -> CudaArray:
    """Attention of one query a sequence over a kv_cache, the keys in splits of 128.

    q (B, C) float32, k and v (B, n_ctx, C), position (B,) int32 → (B, C), as `bind_split` says.
    Raises InputError. Source: Dao et al., "Flash-Decoding for long-context inference" (2023).
    """
    return bind_split((*contiguous(q, k, v, position), None), n_head=n_head).run()


def kv_append(
    qkv: CudaArray, k: CudaArray, v: CudaArray, row: CudaArray, position: CudaArray
) -> None:
    """K and V of qkv (N, 3C) into the kv_cache k, v (B, n_ctx, C), in its dtype.

    qkv: float32, or in the dtype of k and v. Row n belongs to sequence row[n], at position[n],
    int32 on the device; what lies outside the cache is left out. Two rows must not name the same
    place. Raises InputError.
    """
    bind_append(contiguous(qkv, row, position), (k, v)).run()
