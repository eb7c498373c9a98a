"""Attention over a kv_cache, and the cache itself: variants and launches.

`split` is decoding's, one query a sequence; `tiles` takes several, in packed rows; `append` puts
new keys and values into the cache.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from numbers import Integral
from typing import Any

import numpy as np

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
from gpt2block.cuda.kernels import Geometry
from gpt2block.errors import InputError
from gpt2block.ops.attention import (
    LARGEST_HEAD,
    MOST_BLOCKS,
    shared_bytes,
    warp_queries,
)
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant
from gpt2block.ops.warm import call

SPLIT_KEYS = 128  # of a block of `split`: what its parts and statistics are about
SPLIT_VECTORS = 8  # of K, and of V, that a thread has on their way
SPLIT_MOST_THREADS = 512
MOST_SPLITS = 2048  # splits of a head that its last block puts together
TILES = ((4, 64), (2, 64), (4, 32), (1, 64), (2, 32), (1, 32))  # warps, keys; the best first
APPEND_MOST_THREADS = 256
START = 512  # of the documented sizes


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    T, C = sizes["T"], sizes["C"]
    q, k, v = (
        rng.standard_normal((rows, C), dtype=np.float32) + np.float32(0.5)
        for rows in (T, START + T, START + T)
    )
    return q, k, v


def _pairs(sizes: Sizes) -> int:
    """Of a query and a key that it sees."""
    T = sizes["T"]
    return T * START + T * (T + 1) // 2


def vector_width(itemsize: int, *counts: int) -> int:
    """The most elements a load, a power of two of at most 16 bytes, that divides all counts."""
    width = 16 // itemsize
    while any(count % width for count in counts):
        width //= 2
    return width


def check_head(HS: int) -> None:
    if HS > LARGEST_HEAD:
        raise InputError(f"head size {HS}: attention over a kv_cache takes at most {LARGEST_HEAD}")


@lru_cache(maxsize=1024)
def split_geometry(B: int, n_ctx: int, NH: int, HS: int, itemsize: int) -> Geometry:
    """For B queries; the arithmetic's order follows from HS and itemsize alone."""
    check_head(HS)
    S = ceil(n_ctx / SPLIT_KEYS)
    if S > MOST_SPLITS:
        most = MOST_SPLITS * SPLIT_KEYS
        raise InputError(f"n_ctx {n_ctx:,}: splits of at most {most:,} keys are put together")
    if max(B, NH) > MOST_BLOCKS[1]:
        raise InputError(f"B {B:,}, {NH:,} heads: expected at most {MOST_BLOCKS[1]:,} of each")
    width = vector_width(itemsize, HS)
    vectors = HS // width
    lanes = min(_power_above(vectors), 32)
    pieces = _power_above(ceil(vectors / lanes))
    threads = SPLIT_KEYS * lanes * pieces // SPLIT_VECTORS
    threads = min(max(threads, 32), SPLIT_MOST_THREADS)
    defines = (
        ("NH", NH),
        ("HS", HS),
        ("AS_KEYS", SPLIT_KEYS),
        ("AS_WIDTH", width),
        ("AS_THREADS", threads),
        ("AS_VECTORS", SPLIT_VECTORS),
    )
    return Geometry("attention_split", (S, NH, B), (threads,), 8 * S, defines)


def _power_above(n: int) -> int:
    """The smallest power of two that is n or more."""
    return 1 << (n - 1).bit_length()


@lru_cache(maxsize=1024)
def tiles_geometry(
    B: int,
    longest: int,
    NH: int,
    HS: int,
    itemsize: int,
    shared_limit: int,
    narrow: bool = False,
) -> Geometry:
    """For B sequences of at most `longest` queries; narrow: those have the cache's dtype.

    shared_limit: bytes of shared memory that a block can have. The keys of a tile, on which alone
    the order of additions depends, follow from it, HS and itemsize.
    """
    check_head(HS)
    for warps, keys in TILES:
        staged = keys * HS * itemsize if itemsize < 4 and HS % (16 // itemsize) == 0 else 0
        shared = shared_bytes(HS, warps, keys) + staged
        if shared <= shared_limit:
            break
    else:
        raise InputError(
            f"head size {HS}: the smallest tiles take {shared:,} bytes of shared memory, this GPU "
            f"has {shared_limit:,} for them"
        )
    blocks = ceil(longest / (warps * warp_queries(HS)))
    heads = B * NH
    if heads > MOST_BLOCKS[0] or blocks > MOST_BLOCKS[1]:
        raise InputError(
            f"B {B:,}, {NH:,} heads, longest {longest:,}: too many for a grid, which CUDA limits "
            f"to {MOST_BLOCKS[0]:,} heads of sequences and {MOST_BLOCKS[1]:,} blocks of each"
        )
    defines = (("NH", NH), ("HS", HS), ("AO_WARPS", warps), ("AO_KEYS", keys))
    kernel = OPERATION.variants[0].kernels[narrow]
    return Geometry(kernel, (heads, blocks), (32 * warps,), shared, defines)


def append_geometry(
    N: int, C: int, itemsize: int, of_rows: int, of_cache: int, narrow: bool = False
) -> Geometry:
    """For N rows. of_rows, of_cache: their alignment in bytes. narrow: one dtype for both."""
    width = vector_width(itemsize, C)
    own = itemsize if narrow else 4
    while min(16, own * width) > of_rows or itemsize * width > of_cache:
        width //= 2
    threads = min(32 * ceil(2 * C / (32 * width)), APPEND_MOST_THREADS)
    kernel = OPERATION.auxiliary[1].kernels[narrow]
    return Geometry(kernel, (N,), (threads,), defines=(("KV_WIDTH", width),))


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
    where = tiles_geometry(B, longest, n_head, C // n_head, k.itemsize, limit, narrow)
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
    where = split_geometry(B, n_ctx, n_head, HS, k.itemsize)
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
    where = append_geometry(N, C, k.itemsize, *aligned, of_rows != "float32")
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


OPERATION = Operation(
    name="attention_cached",
    document="beyond the documents",
    idea="softmax(Q Kᵀ / sqrt(HS)) V, queries at positions start + t, K and V from a kv_cache",
    sizes={"T": 128, "C": 768},
    variants=(
        Variant(
            "tiles",
            "attention/cached.cu",
            ("attention_cached", "attention_cached_narrow"),
            "the walk of attention's `online` over packed rows of several sequences; a query's "
            "bits depend on its own sequence alone; q in float32, or in 16 bits",
        ),
    ),
    make=_make,
    traffic=lambda s: 4 * s["C"] * (2 * s["T"] + 2 * (START + s["T"])),
    flops=lambda s: 4 * _pairs(s) * s["C"],
    bound="compute",
    attrs={"start": START, "n_head": 12},
    auxiliary=(
        Variant(
            "split",
            "attention/decode.cu",
            ("attention_split",),
            "decoding: a block 128 keys of a head, all loads on their way at once; the last block "
            "puts the splits together",
        ),
        Variant(
            "append",
            "attention/kv_cache.cu",
            ("kv_append", "kv_append_narrow"),
            "K and V of packed rows into the kv_cache, narrowed to its dtype, or in it already",
        ),
    ),
    binder=bind_sequence,
)
SPLIT, APPEND = OPERATION.auxiliary


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
