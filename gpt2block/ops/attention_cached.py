"""Attention over a kv_cache, and the kernel that fills the cache.

`tiles` (attention/cached.cu) takes several queries of each sequence, in packed rows. `split`
(attention/decode.cu) is for decoding: one query a sequence, the keys in splits of 32. `append`
(attention/kv_cache.cu) writes new keys and values to the cache, `round` (there, too) rounds those
of a prompt that tensor cores attend to without the cache.

kv_dtype is None where k and v are arrays of a float dtype, or the FP8 format of k and v of uint8.
"""

from __future__ import annotations

import math
from functools import lru_cache
from math import ceil, gcd
from typing import Any

import numpy as np

from gpt2block.checks import check_integer
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    alignment,
    check,
    check_address,
    check_apart,
    compute_capability,
    contiguous,
    device_attribute,
    launch_at,
    output,
    same_memory,
    storage,
)
from gpt2block.cuda.kernels import CACHE_WITH_FP8, Geometry
from gpt2block.errors import InputError
from gpt2block.ops._attention_tiles import (
    MOST_BLOCKS,
    heads_defines,
    shared_bytes,
    warp_queries,
)
from gpt2block.ops._kv_cache import array_dtype, check_cache, check_format
from gpt2block.ops._rows import power_of_two
from gpt2block.ops._terms import check_terms, order_define
from gpt2block.ops.attention import LARGEST_HEAD
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant
from gpt2block.ops.two_part import check_two_part
from gpt2block.ops.warm import call
from gpt2block.plan import Terms
from gpt2block.weights.two_part import TwoPartMatrix

TILES = "attention/cached.cu"
SPLIT = "attention/decode.cu"
APPEND = "attention/kv_cache.cu"
APPEND_TWO_PART = "attention/kv_cache_two_part.cu"
TILE_SIZES = ((4, 64), (2, 64), (4, 32), (1, 64), (2, 32), (1, 32))  # warps, keys; the best first
SPLIT_KEYS = 32  # of a warp of `split`
SPAN_SPLITS = 32  # splits that are combined at a time
SPLIT_WARPS = 4  # of a block
SPLIT_WARPS_OF_SM = {1: 16, 2: 16, 4: 12}  # by the cache's itemsize: what the registers hold
SPLIT_WARPS_OF_SM_GROUPED = {1: 12, 2: 8, 4: 8}  # where a warp has several heads of q
FP8_GROUPED_WIDTH = 8  # elements a load there: registers hold so many of q and sums of each head
FP8_VECTORS = 4  # of K, and of V, that a thread has in flight; with 8, registers spill
MOST_QUERIES = 4  # heads of q of a warp
MOST_CLUSTER = 8  # blocks
CLUSTERS_FROM = 90  # compute capability
APPEND_MOST_THREADS = 256
START = 512  # of the documented sizes


@lru_cache(maxsize=1024)
def tiles_geometry(
    B: int,
    longest: int,
    NH: int,
    NKV: int,
    HS: int,
    itemsize: int,
    shared_limit: int,
    narrow: bool = False,
) -> Geometry:
    """For B sequences of at most `longest` queries; narrow: those have the cache's dtype.

    shared_limit: bytes of shared memory that a block can have. The keys of a tile, on which alone
    the order of additions depends, follow from it, HS and itemsize. Raises InputError.
    """
    _check_head(HS)
    for warps, keys in TILE_SIZES:
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
    defines = (*heads_defines(NH, NKV, HS), ("AO_WARPS", warps), ("AO_KEYS", keys))
    kernel = "attention_cached_narrow" if narrow else "attention_cached"
    return Geometry(kernel, (heads, blocks), (32 * warps,), shared, defines)


@lru_cache(maxsize=1024)
def split_geometry(
    M: int,
    n_ctx: int,
    NH: int,
    NKV: int,
    HS: int,
    itemsize: int,
    sms: int,
    shared_limit: int,
    clusters: bool,
) -> Geometry:
    """For M queries, on a GPU with `sms` multiprocessors; clusters: whether it has them.

    shared_limit: bytes of shared memory that a block can have. The order of additions follows from
    HS and itemsize alone, with FP8 also from whether a warp has several heads of q.
    """
    _check_head(HS)
    if max(M, NH) > MOST_BLOCKS[1]:
        raise InputError(f"M {M:,}, {NH:,} heads: expected at most {MOST_BLOCKS[1]:,} of each")
    queries = _queries_of_team(NH // NKV, HS, shared_limit)
    width = gcd(16 // itemsize, HS)  # elements a load
    if itemsize == 1 and queries > 1:
        width = gcd(FP8_GROUPED_WIDTH, HS)
    teams = NKV * ceil(NH // NKV / queries)
    held = (SPLIT_WARPS_OF_SM if queries == 1 else SPLIT_WARPS_OF_SM_GROUPED)[itemsize]
    at_once = held * sms // (M * teams)
    wanted = min(ceil(n_ctx / SPLIT_KEYS), SPAN_SPLITS)  # warps of a team
    if clusters:
        most = min(max(at_once // SPLIT_WARPS, 1), MOST_CLUSTER)
        warps, cluster = SPLIT_WARPS, power_of_two(ceil(wanted / SPLIT_WARPS))
        while cluster > most:
            cluster //= 2
    else:
        warps, cluster = min(max(min(wanted, at_once), SPLIT_WARPS), held), 1
    defines = (
        *heads_defines(NH, NKV, HS),
        ("AS_WIDTH", width),
        ("AS_QUERIES", queries),
        ("AS_WARPS", warps),
        ("AS_CLUSTER", cluster),
        ("AS_BLOCKS", max(held // warps, 1)),
    )
    if itemsize == 1:
        defines = (*defines, ("AS_VECTORS", FP8_VECTORS))
    shared = _split_shared(queries, HS) if queries > 1 else 0
    return Geometry("attention_split", (cluster, teams, M), (32 * warps,), shared, defines)


def _queries_of_team(serves: int, HS: int, shared_limit: int) -> int:
    """Heads of q that share loads of K and V, of `serves` that have the same head of K.

    The most that registers and shared memory hold, in teams of about equal size.
    """
    for most in range(MOST_QUERIES, 1, -1):
        queries = ceil(serves / ceil(serves / most))
        if _split_shared(queries, HS) <= shared_limit:
            return queries
    return 1


def _split_shared(queries: int, HS: int) -> int:
    """Bytes for the splits of a span: a part for each channel, the maximum and the sum."""
    return 4 * queries * SPAN_SPLITS * (HS + 2)


def append_geometry(
    N: int, C: int, W: int, itemsize: int, of_rows: int, of_cache: int, narrow: bool = False
) -> Geometry:
    """For N rows of W channels, of which the last 2C are K and V.

    of_rows, of_cache: their alignment in bytes. narrow: one dtype for both.
    """
    width = gcd(16 // max(itemsize, 2), C, W)  # elements a load; next to FP8, T has 16 bits
    row_itemsize = max(itemsize, 2) if narrow else 4
    while min(16, row_itemsize * width) > of_rows or itemsize * width > of_cache:
        width //= 2
    return _over_rows("kv_append_narrow" if narrow else "kv_append", N, C, width)


def _over_rows(kernel: str, N: int, C: int, width: int) -> Geometry:
    """A block for each row, whose threads take `width` elements of its K and V at a time."""
    threads = min(32 * ceil(2 * C / (32 * width)), APPEND_MOST_THREADS)
    return Geometry(kernel, (N,), (threads,), defines=(("KV_WIDTH", width),))


def _check_head(HS: int) -> None:
    if HS > LARGEST_HEAD:
        raise InputError(f"head size {HS}: attention over a kv_cache takes at most {LARGEST_HEAD}")


def _kv_heads(name: str, Q: int, n_head: Any, KV: int) -> int:
    """The heads of K and V, KV channels, if `name` has Q channels of queries; or InputError."""
    expected = f"a divisor of the {Q} channels of queries"
    n_head = check_integer("n_head", n_head, 1, math.inf, expected)
    if Q % n_head:
        raise InputError(f"n_head: expected {expected}, got {n_head}")
    HS = Q // n_head
    if KV % HS or n_head % (KV // HS):
        raise InputError(
            f"{name}: {n_head} heads of {HS} channels: expected k of as many heads or of a divisor "
            f"of them, got k of {KV} channels"
        )
    n_kv_head: int = KV // HS
    return n_kv_head


def _check_rows(qkv: Any, cache_dtype: str, C: int) -> int:
    """The channels of Q of rows [Q | K | V], float32 or in the dtype of the cache; or InputError.

    Next to a cache of FP8, rows can have any dtype. C: the channels of k, which Q has too or a
    multiple of them.
    """
    dtype = storage(qkv)
    check("qkv", qkv, dtype=dtype if cache_dtype in (dtype, "uint8") else "float32")
    if qkv.ndim != 2 or qkv.shape[1] < 3 * C or qkv.shape[1] % C:
        raise InputError(
            f"qkv: expected (N, {3 * C}), or more queries of k's {C} channels, got {qkv.shape}"
        )
    return int(qkv.shape[1]) - 2 * C


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    n_head: int,
    longest: int,
    kv_dtype: str | None = None,
) -> Bound:
    """inputs (qkv (N, Q + 2C), k, v (B, n_ctx, C), cu_seqlens (B + 1,), start (B,)), out (N, Q).

    qkv and out: both float32, or both in the dtype of k, or with FP8 in one of 16 bits; Q is C, or
    a multiple of it where queries are grouped. The queries of sequence b are in rows cu_seqlens[b]
    to cu_seqlens[b + 1] - 1 of qkv, at most `longest` of them, at positions from start[b] on; k and
    v already hold their keys and values. cu_seqlens and start, int32, are not read back: the kernel
    skips rows beyond qkv and positions beyond the cache.
    """
    qkv, k, v, cu_seqlens, start = inputs
    dtype, B, _, C = check_cache(k, v, kv_dtype)
    Q = _check_rows(qkv, dtype, C)
    n_kv_head = _kv_heads("qkv", Q, n_head, C)
    check("cu_seqlens", cu_seqlens, (B + 1,), "int32")
    check("start", start, (B,), "int32")
    longest = check_integer("longest", longest, 1, math.inf, "a number of queries")
    return _launch_tiles(inputs, out, B, Q, (n_head, n_kv_head), longest, kv_dtype)


def bind_sequence(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    start: int,
    n_head: int,
    kv_dtype: str | None = None,
) -> Bound:
    """inputs (q (T, Q), k, v (start + T, C) or longer), out (T, Q): one sequence."""
    q, k, v = inputs
    for name, array in (("q", q), ("k", k)):
        check(name, array, dtype="float32" if name == "q" else array_dtype(array, kv_dtype))
        if array.ndim != 2:
            raise InputError(f"{name}: expected two axes, got shape {array.shape}")
    halves = k[None], v[None] if isinstance(v, cupy.ndarray) else v
    _, _, n_ctx, C = check_cache(*halves, kv_dtype)
    T, Q = q.shape
    n_kv_head = _kv_heads("q", Q, n_head, C)
    expected = f"0 to {n_ctx - T:,} for {T:,} queries and {n_ctx:,} keys"
    start = check_integer("start", start, 0, n_ctx - T, expected)
    return _launch_tiles((*inputs, None, None), out, 1, Q, (n_head, n_kv_head), T, kv_dtype, start)


def _launch_tiles(
    inputs: tuple[Any, ...],
    out: CudaArray | None,
    B: int,
    Q: int,
    heads: tuple[int, int],
    longest: int,
    kv_dtype: str | None,
    first: int = 0,
) -> Bound:
    """Without cu_seqlens and start: one sequence, from position `first` on.

    Q: channels of queries; heads: of them, and of K and V.
    """
    q, k, v, _, _ = inputs
    N, stride = q.shape
    n_ctx = k.shape[-2]
    apart = dict(zip(("q", "k", "v", "cu_seqlens", "start"), inputs, strict=True))
    out = output(out, (N, Q), q.dtype.name, apart=apart)
    for name, array in (("q", q), ("k", k), ("v", v), ("out", out)):
        check_address(name, array)
    limit = device_attribute("MaxSharedMemoryPerBlockOptin")
    narrow = q.dtype.name != "float32"
    geometry = tiles_geometry(B, longest, *heads, Q // heads[0], k.itemsize, limit, narrow)
    args = (*inputs, out, stride, n_ctx, N, B, first)
    T = q.dtype.name if kv_dtype else storage(k)
    return Bound(out, (launch_at(TILES, geometry, args, T, cache=kv_dtype),))


def bind_split(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    n_head: int,
    to_terms: Terms | None = None,
    kv_dtype: str | None = None,
) -> Bound:
    """inputs (q (M, Q), k, v (B, n_ctx, C), row, position (M,)); out (M, Q).

    Query m is of sequence row[m], and sees its keys 0 to position[m], its own, which the cache
    already holds. A position beyond the cache counts as its last; for a row outside the cache, or a
    position below 0, nothing is written. to_terms: of the dtype of k, or with FP8 of any, what out
    has in the place of floats, as `linear` takes them.
    """
    q, k, v, row, position = inputs
    dtype, B, n_ctx, C = check_cache(k, v, kv_dtype)
    check("q", q)
    if q.ndim != 2:
        raise InputError(
            f"q: expected (M, {C}), or more queries of k's {C} channels, got {q.shape}"
        )
    M, Q = q.shape
    n_kv_head = _kv_heads("q", Q, n_head, C)
    check("row", row, (M,), "int32")
    check("position", position, (M,), "int32")
    apart = {"q": q, "k": k, "v": v, "row": row, "position": position}
    out = output(out, (M, Q), apart=apart)
    sms, clusters = device_attribute("MultiProcessorCount"), compute_capability() >= CLUSTERS_FROM
    sizes = (M, n_ctx, n_head, n_kv_head, Q // n_head)
    limit = device_attribute("MaxSharedMemoryPerBlockOptin")
    geometry = split_geometry(*sizes, k.itemsize, sms, limit, clusters)
    T = "float32" if kv_dtype else dtype
    if to_terms is not None:
        T = to_terms.dtype if kv_dtype else dtype
        if to_terms.dtype != T or k.itemsize > 2 or Q // n_head % 2:
            raise InputError(
                f"terms of {to_terms}, k {dtype}, head size {Q // n_head}: expected the 16-bit "
                "dtype of k, and an even head size"
            )
        check_terms(to_terms, Q)
        ends = (("AS_TERMS", 1), *order_define(to_terms))
        geometry = geometry._replace(defines=(*geometry.defines, *ends))
    width = int(dict(geometry.defines)["AS_WIDTH"])
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_address(name, array, min(16, width * array.itemsize))
    args = (q, k, v, row, position, B, n_ctx, out)
    return Bound(out, (launch_at(SPLIT, geometry, args, T, cache=kv_dtype),))


def bind_append(
    inputs: tuple[Any, ...], out: tuple[CudaArray, CudaArray], *, kv_dtype: str | None = None
) -> Bound:
    """inputs (qkv (N, W), row (N,), position (N,), both int32), out (k, v), (B, n_ctx, C) each.

    Rows are [Q | K | V]: W is 3C, or more where queries are grouped. The last 2C columns of row n
    become k[row[n], position[n]] and v there. qkv: float32, or in the dtype of k or next to FP8 in
    one of 16 bits, or for float32 caches a TwoPartMatrix. row and position are not read back: the
    kernel skips those outside the cache.
    """
    qkv, row, position = inputs
    k, v = out
    dtype, B, n_ctx, C = check_cache(k, v, kv_dtype)
    check_apart("v", v, {"k": k})
    N = qkv.shape[0]
    check("row", row, (N,), "int32")
    check("position", position, (N,), "int32")
    if isinstance(qkv, TwoPartMatrix):
        return _append_two_part(inputs, out)
    W = _check_rows(qkv, dtype, C) + 2 * C
    narrow = qkv.dtype.name != "float32"
    aligned = alignment(qkv.data.ptr), alignment(k.data.ptr, v.data.ptr)
    geometry = append_geometry(N, C, W, k.itemsize, *aligned, narrow)
    args = (qkv, row, position, k, v, C, W, B, n_ctx)
    T = dtype
    if kv_dtype is not None:
        T = qkv.dtype.name if narrow else CACHE_WITH_FP8
    return Bound(k, (launch_at(APPEND, geometry, args, T, cache=kv_dtype),), (v,))


def bind_round(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    n_head: int,
    n_kv_head: int,
    kv_dtype: str,
) -> Bound:
    """inputs (qkv (N, W),), rows [Q | K | V] in 16 bits; out is qkv, or None for it.

    K and V are rounded in place to the numbers of an FP8 format, which both 16-bit dtypes have.
    """
    (qkv,) = inputs
    check_format(kv_dtype)
    dtype = storage(qkv)
    check("qkv", qkv, dtype=CACHE_WITH_FP8 if dtype == "float32" else dtype)
    n_head = check_integer("n_head", n_head, 1, math.inf, "a number of heads")
    n_kv_head = check_integer("n_kv_head", n_kv_head, 1, n_head, f"at most n_head {n_head}")
    heads = n_head + 2 * n_kv_head
    if qkv.ndim != 2 or qkv.shape[1] % heads:
        raise InputError(f"qkv: expected (N, W) of {heads} heads, got {qkv.shape}")
    if out is not None and not same_memory(qkv, out):
        raise InputError("out: expected qkv itself: K and V are rounded in place")
    N, W = qkv.shape
    C = W // heads * n_kv_head
    width = gcd(alignment(qkv.data.ptr) // qkv.itemsize, C, W)
    geometry = _over_rows("kv_round", N, C, width)
    return Bound(qkv, (launch_at(APPEND, geometry, (qkv, C, W), dtype, cache=kv_dtype),))


def _append_two_part(inputs: tuple[Any, ...], out: tuple[CudaArray, CudaArray]) -> Bound:
    qkv, row, position = inputs
    k, v = out
    B, n_ctx, C = k.shape
    check_two_part("qkv", qkv)
    if qkv.ndim != 2 or qkv.shape[0] != row.size or qkv.shape[1] < 3 * C or qkv.shape[1] % C:
        raise InputError(
            f"qkv: expected ({row.size}, {3 * C}), or more queries of k's {C} channels, "
            f"got {qkv.shape}"
        )
    N, W = qkv.shape
    check("k", k)
    aligned = alignment(2 * qkv.parts.data.ptr), alignment(k.data.ptr, v.data.ptr)
    geometry = append_geometry(N, C, W, k.itemsize, *aligned)._replace(kernel="kv_append_split")
    args = (qkv.parts, qkv.scale, row, position, k, v, C, W, B, n_ctx)
    return Bound(k, (launch_at(APPEND_TWO_PART, geometry, args, "float16"),), (v,))


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    T, C = sizes["T"], sizes["C"]
    q, k, v = (
        rng.standard_normal((rows, C), dtype=np.float32) + np.float32(0.5)
        for rows in (T, START + T, START + T)
    )
    return q, k, v


def _flops(sizes: Sizes) -> int:
    """4 C for every query and each key that it sees."""
    T = sizes["T"]
    return 4 * sizes["C"] * (T * START + T * (T + 1) // 2)


OPERATION = Operation(
    name="attention_cached",
    document="gpt2block",
    idea="softmax(Q Kᵀ / sqrt(HS)) V, queries at positions start + t, K and V from a kv_cache",
    sizes={"T": 128, "C": 768},
    variants=(
        Variant(
            "tiles",
            TILES,
            ("attention_cached", "attention_cached_narrow"),
            "attention's `online` over packed rows of several sequences; a query's bits depend on "
            "its own sequence only; q in float32, or in 16 bits",
            launch=_launch_tiles,
        ),
    ),
    make=_make,
    traffic=lambda s: 4 * s["C"] * (2 * s["T"] + 2 * (START + s["T"])),
    flops=_flops,
    bound="compute",
    attrs={"start": START, "n_head": 12},
    auxiliary=(
        Variant(
            "split",
            SPLIT,
            ("attention_split",),
            "decoding: one warp per 32 keys of a head, the next keys in flight; splits are "
            "combined in shared memory, for few rows that of a cluster",
        ),
        Variant(
            "append",
            APPEND,
            ("kv_append", "kv_append_narrow"),
            "writes K and V of packed rows to the kv_cache, converted to its dtype where needed",
        ),
        Variant(
            "round",
            APPEND,
            ("kv_round",),
            "rounds K and V of packed rows in place to what a kv_cache of FP8 can hold",
        ),
        Variant(
            "append split",
            APPEND_TWO_PART,
            ("kv_append_split",),
            "the same from two-part rows",
        ),
    ),
    binder=bind_sequence,
)


def attention_cached(
    q: CudaArray,
    k: CudaArray,
    v: CudaArray,
    start: int,
    n_head: int,
    kv_dtype: str | None = None,
) -> CudaArray:
    """`reference.attention_cached` on CuPy arrays; raises InputError.

    q (T, Q) float32, k and v (start + T, C) or longer, float32, float16, bfloat16 or, as uint8, the
    FP8 format kv_dtype → (T, Q). With grouped queries, k and v have fewer heads: Q is a multiple of
    C. The bits of a query's result do not depend on how its sequence is divided into calls. Heads
    have at most 256 channels.
    """
    options = {"start": start, "n_head": n_head, "kv_dtype": kv_dtype}
    return call(bind_sequence, contiguous(q, k, v), **options).out


def attention_packed(
    qkv: CudaArray,
    k: CudaArray,
    v: CudaArray,
    cu_seqlens: CudaArray,
    start: CudaArray,
    n_head: int,
    longest: int,
    kv_dtype: str | None = None,
) -> CudaArray:
    """Causal attention of several sequences' new tokens over a kv_cache that holds them already.

    qkv (N, Q + 2C), float32 or in the dtype of k, holds the rows of one sequence after another, Q
    being C or with grouped queries a multiple of it; k and v (B, n_ctx, C), cu_seqlens (B + 1,) and
    start (B,) int32 → (N, Q), in the dtype of qkv. Sequence
    b has rows cu_seqlens[b] to cu_seqlens[b + 1] - 1, none or at most `longest`, at positions from
    start[b] on. kv_dtype: as in `attention_cached`; qkv has any float dtype then. The bits of a
    sequence are the same alone and in any batch. Raises InputError.
    """
    arrays = contiguous(qkv, k, v, cu_seqlens, start)
    return call(bind, arrays, n_head=n_head, longest=longest, kv_dtype=kv_dtype).out


def attention_split(
    q: CudaArray,
    k: CudaArray,
    v: CudaArray,
    row: CudaArray,
    position: CudaArray,
    n_head: int,
    kv_dtype: str | None = None,
) -> CudaArray:
    """Attention of single queries over a kv_cache, the keys in splits of 32.

    q (M, Q) float32, k and v (B, n_ctx, C), row and position (M,) int32 → (M, Q); see `bind_split`.
    Raises InputError. Source: Dao et al., "Flash-Decoding for long-context inference" (2023).
    """
    arrays = contiguous(q, k, v, row, position)
    return bind_split(arrays, n_head=n_head, kv_dtype=kv_dtype).run()


def kv_append(
    qkv: CudaArray,
    k: CudaArray,
    v: CudaArray,
    row: CudaArray,
    position: CudaArray,
    kv_dtype: str | None = None,
) -> None:
    """Write K and V of rows [Q | K | V] of qkv to the kv_cache k, v (B, n_ctx, C), in its dtype.

    qkv: float32, or in the dtype of k and v, or next to FP8 in one of 16 bits. kv_dtype: as in
    `attention_cached`. Row n goes to sequence row[n] at position[n], both int32 on the device; rows
    outside the cache are skipped. Two rows must not have the same destination. Raises InputError.
    """
    bind_append(contiguous(qkv, row, position), (k, v), kv_dtype=kv_dtype).run()


def kv_round(qkv: CudaArray, n_head: int, n_kv_head: int, kv_dtype: str) -> CudaArray:
    """`reference.kv_round` in place, on a C-contiguous CuPy array; returns qkv.

    qkv (N, W), rows [Q | K | V] of float16 or bfloat16. Raises InputError.
    """
    return bind_round((qkv,), n_head=n_head, n_kv_head=n_kv_head, kv_dtype=kv_dtype).run()
