"""Attention over a kv_cache, and the kernels that fill the cache.

Variants `tiles` (attention/prompt/cores.cu) and, on tensor cores, `mma` (attention/prompt/mma.cu)
and `wgmma` (attention/prompt/wgmma.cu) take several queries of each sequence, in packed rows.
`split` (attention/decode/split.cu) is for decoding: one query per sequence, with the keys divided
into splits of 32; attention/decode/append.cu also computes norms of heads and RoPE.
attention/cache/kv_cache.cu has `append`, which writes new keys and values to the cache; `round`,
which rounds keys and values of a prompt that tensor cores read from qkv instead of the cache; and
`copy`, which copies the keys and values of a common prefix to another sequence.

kv_dtype is the FP8 format of k and v of uint8, or None if k and v have a float dtype.
"""

from __future__ import annotations

import math
from functools import lru_cache
from math import ceil, gcd
from typing import Any

from gpt2block.checks import check_integer
from gpt2block.cuda.arrays import (
    Composite,
    CudaArray,
    alignment,
    check,
    contiguous,
    max_shared,
    multiprocessors,
)
from gpt2block.cuda.cards import gpu
from gpt2block.cuda.formats import CACHE_WITH_FP8
from gpt2block.cuda.kernels import Geometry, Launch, defines_of, launch_at
from gpt2block.cuda.tensor_maps import tensor_map
from gpt2block.errors import InputError
from gpt2block.ops import delta
from gpt2block.ops.attention import MMA, SIXTEEN_BITS, WGMMA, WGMMA_ALTERNATE
from gpt2block.ops.call import (
    HI_LO,
    Call,
    UncheckedCall,
    accept,
    check_format,
    needs,
    refuse,
    storage,
)
from gpt2block.ops.engines import attention_tiles as tiles
from gpt2block.ops.engines.attention_tiles import (
    HEADS_WITH_NORMS,
    MAX_BLOCKS,
    TENSOR_HEADS,
    AttentionSizes,
)
from gpt2block.ops.engines.rows import power_of_two
from gpt2block.ops.operands import check_operand, stored_defines, stored_scale
from gpt2block.ops.operation import REQUIRED, Operation, Workload, variant
from gpt2block.ops.products import limits
from gpt2block.ops.short_conv import SHORT_CONV
from gpt2block.ops.warm import call

TILES = "attention/prompt/cores.cu"
SPLIT = "attention/decode/split.cu"
APPEND_SPLIT = "attention/decode/append.cu"
APPEND = "attention/cache/kv_cache.cu"
APPEND_HI_LO = "attention/cache/kv_cache_hi_lo.cu"
LARGEST_HEAD = 512  # maximum channels per head of variants tiles and split
LARGEST_STATIC = 256  # maximum channels per head for which split has static shared memory
# (warps, keys), largest tile first
TILE_SIZES = ((4, 64), (2, 64), (4, 32), (1, 64), (2, 32), (1, 32))
SPLIT_KEYS = 32  # keys per split; one warp of kernel `split` processes a split
SPAN_SPLITS = 32  # splits whose results are combined at a time
SPLIT_WARPS = 4  # warps per block on a GPU with clusters; on other GPUs the minimum
# Warps per block if each block has a multiprocessor of its own. H200, heads of Qwen3-0.6B, 8 rows
# at position 496: clusters of two such blocks took 6.0 µs. Clusters of four blocks of 4 warps took
# 10.5 µs, because not all of them ran at once. On another H200 the times were equal.
WIDE_SPLIT_WARPS = 8
SPLIT_WARPS_OF_SM = {1: 16, 2: 16, 4: 12}  # maximum warps per SM by itemsize of the cache
SPLIT_WARPS_OF_SM_GROUPED = {1: 12, 2: 8, 4: 8}  # maximum warps per SM, with several q heads each
FP8_GROUPED_WIDTH = 8  # FP8 elements per load that registers allow with several heads of q per warp
# Vectors of K (and as many of V) in flight per thread, with FP8 or large heads; 8 would spill
FEWER_VECTORS = 4
MAX_QUERIES = 4  # maximum heads of q per warp
MAX_CLUSTER = 8  # maximum blocks per cluster
APPEND_MAX_THREADS = 256  # maximum threads per block of kernel `append`
COPY_THREADS, COPY_BLOCKS = 256, 8  # threads per block; maximum blocks that copy K (or V) of a slot
START = 512  # position of the first query in the documented case


Heads = tuple[int, int, int]  # heads of q, heads of k, channels per head


@lru_cache(maxsize=1024)
def tiles_geometry(
    B: int, longest: int, heads: Heads, itemsize: int, shared_limit: int, narrow: bool = False
) -> Geometry:
    """Return the geometry of variant `tiles` for B sequences of at most `longest` queries.

    narrow: whether queries have a 16-bit dtype instead of float32. shared_limit: bytes of shared
    memory that a block can have. The keys per tile, which alone determine the order of additions,
    follow from shared_limit, HS and itemsize. Raises InputError.
    """
    NH, _, HS = heads
    _check_head(HS)
    pieces = itemsize < 4 and HS % (16 // itemsize) == 0
    one = tiles.one_tile(HS, shared_limit - pieces * tiles.KEYS[-1] * HS * itemsize)
    pieces = pieces and not one
    for warps, keys in TILE_SIZES:
        staged = keys * HS * itemsize if pieces else 0
        shared = tiles.shared_bytes(HS, warps, keys, one) + staged
        if shared <= shared_limit:
            break
    else:
        raise InputError(
            f"head size {HS}: the smallest tiles take {shared:,} bytes of shared memory, this GPU "
            f"has {shared_limit:,} for them"
        )
    blocks = ceil(longest / (warps * tiles.warp_queries(HS)))
    if MAX_BLOCKS[0] < B * NH or blocks > MAX_BLOCKS[1]:
        raise InputError(
            f"B {B:,}, {NH:,} heads, longest {longest:,}: too many for a grid, which CUDA limits "
            f"to {MAX_BLOCKS[0]:,} heads of sequences and {MAX_BLOCKS[1]:,} blocks of each"
        )
    sizes = ("AO_WARPS", warps), ("AO_KEYS", keys), *tiles.one_tile_define(HS, one)
    defines = (*tiles.heads_defines(*heads), *sizes)
    kernel = "attention_cached_narrow" if narrow else "attention_cached"
    return Geometry(kernel, (B * NH, blocks), (32 * warps,), shared, defines)


@lru_cache(maxsize=1024)
def split_geometry(
    M: int,
    n_ctx: int,
    heads: Heads,
    itemsize: int,
    sms: int,
    shared_limit: int,
    clusters: bool,
    serves: int | None = None,
) -> Geometry:
    """Return the geometry of kernel `split` for M queries on a GPU with `sms` multiprocessors.

    clusters: whether the GPU has thread block clusters. shared_limit: bytes of shared memory that a
    block can have. serves: heads of q per head of K in the whole model, if `heads` are of a share,
    or None. The order of additions depends only on the channels of a head and on itemsize, and
    with FP8 on whether a warp of the whole model has several heads of q.
    """
    NH, NKV, HS = heads
    _check_head(HS)
    if max(M, NH) > MAX_BLOCKS[1]:
        raise InputError(f"M {M:,}, {NH:,} heads: expected at most {MAX_BLOCKS[1]:,} of each")
    possible = _queries_of_team(NH // NKV, HS, shared_limit)
    width = gcd(16 // itemsize, HS)  # elements per load
    if itemsize == 1 and _queries_of_team(serves or NH // NKV, HS, shared_limit)[-1] > 1:
        width = gcd(FP8_GROUPED_WIDTH, HS)
        possible = [queries for queries in possible if queries > 1] or [1]
    wanted = min(ceil(n_ctx / SPLIT_KEYS), SPAN_SPLITS)  # desired warps for each group of q heads
    for queries in possible:  # fewer heads per warp are faster if the GPU runs all warps at once
        teams = NKV * ceil(NH // NKV / queries)
        held = (SPLIT_WARPS_OF_SM if queries == 1 else SPLIT_WARPS_OF_SM_GROUPED)[itemsize]
        at_once = held * sms // (M * teams)
        if at_once >= wanted and n_ctx <= SPLIT_KEYS * SPAN_SPLITS:
            break
    if clusters:
        warps, cluster = WIDE_SPLIT_WARPS, _cluster_of(wanted, at_once, WIDE_SPLIT_WARPS)
        if cluster <= 2 and M * teams * cluster <= sms:
            held = warps
        else:
            warps, cluster = SPLIT_WARPS, _cluster_of(wanted, at_once, SPLIT_WARPS)
    else:
        warps, cluster = min(max(min(wanted, at_once), SPLIT_WARPS), held), 1
    defines = (
        *tiles.heads_defines(*heads),
        *defines_of(AS_WIDTH=width, AS_QUERIES=queries, AS_WARPS=warps, AS_CLUSTER=cluster),
        *defines_of(AS_BLOCKS=1 if HS > LARGEST_STATIC else max(held // warps, 1)),
    )
    if itemsize == 1 or HS > LARGEST_STATIC:
        defines = (*defines, ("AS_VECTORS", FEWER_VECTORS))
    dynamic = queries > 1 or HS > LARGEST_STATIC
    shared = _split_shared(queries, HS) if dynamic else 0
    return Geometry("attention_split", (cluster, teams, M), (32 * warps,), shared, defines)


def _cluster_of(wanted: int, at_once: int, warps: int) -> int:
    """Return the blocks per cluster, a power of two, for blocks of `warps` warps.

    wanted: desired warps per team. at_once: warps per team that the GPU runs at the same time.
    """
    most = max(at_once // warps, 1)
    largest = 3 * most >= 4 * MAX_CLUSTER  # clusters of MAX_CLUSTER blocks leave some SMs idle
    most = min(most, MAX_CLUSTER if largest else MAX_CLUSTER // 2)
    cluster = power_of_two(ceil(wanted / warps))
    while cluster > most:
        cluster //= 2
    return cluster


def _queries_of_team(serves: int, HS: int, shared_limit: int) -> list[int]:
    """Return the possible numbers of q heads per warp, which share loads of K and V, ascending.

    serves: heads of q with the same head of K, which are divided into teams of about equal size.
    Registers and shared memory limit the largest number.
    """
    largest = MAX_QUERIES if HS <= LARGEST_STATIC else 2  # registers hold no more
    equal = {ceil(serves / ceil(serves / most)) for most in range(2, largest + 1)}
    return [1, *sorted(q for q in equal - {1} if _split_shared(q, HS) <= shared_limit)]


def _split_shared(queries: int, HS: int) -> int:
    """Bytes of shared memory for SPAN_SPLITS splits: HS + 2 floats for each split and query."""
    return 4 * queries * SPAN_SPLITS * (HS + 2)


def append_geometry(
    N: int, C: int, W: int, itemsize: int, of_rows: int, of_cache: int, narrow: bool = False
) -> Geometry:
    """Return the geometry of kernel `append` for N rows of W channels, the last 2C being K and V.

    of_rows, of_cache: alignment in bytes of the rows, and of the cache. narrow: whether the rows
    have a 16-bit dtype instead of float32.
    """
    width = gcd(16 // max(itemsize, 2), C, W)  # elements per load; 2 bytes each with an FP8 cache
    row_itemsize = max(itemsize, 2) if narrow else 4
    while min(16, row_itemsize * width) > of_rows or itemsize * width > of_cache:
        width //= 2
    return _over_rows("kv_append_narrow" if narrow else "kv_append", N, C, width)


def _over_rows(kernel: str, N: int, C: int, width: int) -> Geometry:
    """Return a geometry of one block per row. Each thread moves `width` elements of K or V."""
    threads = min(32 * ceil(2 * C / (32 * width)), APPEND_MAX_THREADS)
    return Geometry(kernel, (N,), (threads,), defines=(("KV_WIDTH", width),))


def _check_head(HS: int) -> None:
    if HS > LARGEST_HEAD:
        raise InputError(f"head size {HS}: attention over a kv_cache takes at most {LARGEST_HEAD}")


def _heads(name: str, Q: int, n_head: int, C: int) -> Heads:
    """Return n_head, n_kv_head and head size for Q channels of queries and C channels of K.

    name: argument with the queries, for the InputError if the sizes do not fit.
    """
    if Q % n_head:
        raise InputError(f"n_head: expected a divisor of the {Q} channels of queries, got {n_head}")
    HS = Q // n_head
    if C % HS or n_head % (C // HS):
        raise InputError(
            f"{name}: {n_head} heads of {HS} channels: expected k of as many heads or of a divisor "
            f"of them, got k of {C} channels"
        )
    return n_head, C // HS, HS


def _check_rows(c: Call) -> None:
    """Raise InputError unless rows of qkv are [Q | K | V], float32 or in the dtype of the cache.

    With a cache of FP8, rows can have any dtype. The channels of Q are a multiple of the C channels
    of k.
    """
    if c.storage not in ("float32", HI_LO, c.kv_storage) and c.fp8_cache is None:
        check("qkv", c.qkv)
    if c.W < 3 * c.C or c.W % c.C:
        raise InputError(
            f"qkv: expected (N, {3 * c.C}), or a larger multiple of k's {c.C} channels, "
            f"got {c.qkv.shape}"
        )


@variant("tiles", TILES, "attention_cached", "attention_cached_narrow")
def _tiles(c: Call) -> Launch:
    """Launch variant `tiles`. Queries are the first Q channels of the rows of `rows_of_q`.

    Each of B sequences has at most `longest` queries.
    """
    q, first = c.rows_of_q, c.contract.inputs[0].name
    heads = _heads(first, c.Q, c.n_head, c.C)
    c.check_addresses(first, "k", "v", "out")
    narrow = q.dtype.name != "float32"
    geometry = tiles_geometry(c.B, c.longest, heads, c.k.itemsize, max_shared(), narrow)
    args = (q, c.k, c.v, c.cu_seqlens, c.starts, c.out, q.shape[1], c.P, len(q), c.B, c.first)
    T = q.dtype.name if c.fp8_cache else storage(c.k)
    return launch_at(TILES, tiles.with_scores(geometry, c), args, T, cache=c.fp8_cache)


@variant("mma", MMA, "attention_cached_mma")
def _mma(c: Call) -> Launch:
    """Launch variant `mma`, which is bitwise equal to `attention`'s mma over the whole sequence."""
    n_head, n_kv_head, HS = _heads("qkv", c.Q, c.n_head, c.C)
    accept(needs("has_mma", ": use variant tiles"))
    types = "takes qkv, k and v of float16 or bfloat16: use variant tiles"
    refuse(c.fp8_cache is not None or c.storage not in SIXTEEN_BITS, types)
    accept(tiles.mma_refusal(HS, ": use variant tiles"))
    c.check_addresses("qkv", "k", "v", "out")
    sizes = AttentionSizes(c.B, c.longest, n_head, True, HS, n_head // n_kv_head)
    plain, together = tiles.mma_geometry(sizes, **limits())
    defines = (*plain.defines, ("ATT_CACHED", 1))
    geometry = plain._replace(kernel="attention_cached_mma", defines=defines)
    arrays = c.qkv, c.k, c.v, c.cu_seqlens, c.start, c.out
    args = (*arrays, c.W, c.P, c.N, *sizes[:3], together)
    return launch_at(MMA, tiles.with_scores(geometry, c), args, c.storage)


@variant("wgmma_few", WGMMA_ALTERNATE, "attention_cached_wgmma_alternate")
def _wgmma_few(c: Call) -> Launch:
    """Launch the kernel that variant `wgmma` selects if few queries make this kernel faster."""
    return _wgmma_launch(c, WGMMA_ALTERNATE)


@variant("wgmma", WGMMA, "attention_cached_wgmma")
def _wgmma(c: Call) -> Any:
    """Launch variant `wgmma`. k and v can also be FP8.

    Results are bitwise equal to `attention`'s variant wgmma over the whole sequence.
    """
    n_head, n_kv_head, HS = _heads("qkv", c.Q, c.n_head, c.C)
    accept(needs("has_wgmma", ": use variant mma"))
    types = "takes qkv of float16 or bfloat16: use variant tiles"
    refuse(c.storage not in SIXTEEN_BITS, types)
    accept(tiles.wgmma_refusal(HS))
    c.check_addresses("qkv", "k", "v", "out")
    c.sizes = AttentionSizes(c.B, c.longest, n_head, True, HS, n_head // n_kv_head)
    c.geometry, c.band = tiles.cached_wgmma_geometry(c.sizes, c.N, c.P, sms=multiprocessors())
    if c.geometry.kernel in _wgmma_few.kernels:
        return _wgmma_few.launch(c)
    return _wgmma_launch(c, WGMMA)


def _wgmma_launch(c: Call, file: str) -> Launch:
    box = 1, tiles.WGMMA_TILE, TENSOR_HEADS[0]
    maps = (tensor_map(each, box) for each in (c.qkv[None], c.k, c.v))
    args = (*maps, c.k, c.v, c.cu_seqlens, c.start, c.out, c.P, c.N, *c.sizes[:3], c.band)
    return launch_at(file, tiles.with_scores(c.geometry, c), args, c.storage, cache=c.fp8_cache)


def continues_exactly(head_size: int, kv_dtype: str | None) -> bool:
    """Whether `attention_packed` and `attention_varlen` agree bitwise in 16 bits on this device.

    kv_dtype: FP8 format of the kv_cache, or None.
    """
    return kv_dtype is None or not tiles.wgmma_refusal(head_size)


def _packed(unchecked: UncheckedCall) -> Call:
    """Check an `attention_packed` call. Rows of sequence b: cu_seqlens[b] to cu_seqlens[b + 1] - 1.

    A sequence has at most `longest` queries, at positions from start[b] on. k and v already contain
    their keys and values. cu_seqlens and start are not read back to the host: the kernel skips rows
    beyond qkv and positions beyond the cache.
    """
    c = unchecked.checked()
    c.longest = check_integer("longest", c.longest, 1, math.inf, "a number of queries")
    _check_rows(c)
    c.rows_of_q, c.Q, c.starts, c.first = c.qkv, c.W - 2 * c.C, c.start, 0
    return c


def _queries(unchecked: UncheckedCall) -> Call:
    """Check an `attention_queries` call, which is `attention_packed` for rows of queries only."""
    c = unchecked.checked()
    c.longest = check_integer("longest", c.longest, 1, math.inf, "a number of queries")
    if c.storage not in ("float32", c.kv_storage) and c.fp8_cache is None:
        check("q", c.q)
    c.rows_of_q, c.starts, c.first, c.qkv, c.W = c.q, c.start, 0, c.q, c.Q
    return c


def _one_sequence(unchecked: UncheckedCall) -> Call:
    c = unchecked.checked()
    expected = f"0 to {c.P - c.T:,} for {c.T:,} queries and {c.P:,} keys"
    c.first = check_integer("start", c.start, 0, c.P - c.T, expected)
    c.rows_of_q, c.B, c.longest, c.cu_seqlens, c.starts = c.q, 1, c.T, None, None
    return c


@variant("split", SPLIT, "attention_split")
def _split(c: Call) -> Launch:
    """Launch kernel `split`. Query m belongs to sequence row[m] and sees keys 0 to position[m].

    The cache already holds these keys, including the query's own. A position beyond the cache
    counts as the last one; for a row outside the cache, or a position below 0, nothing is written.
    to_operand: the `Operand` to store in out for `linear`, instead of floats; their dtype is the
    dtype of k (hi/lo for float32, any for FP8). together: neighbouring rows per sequence, a power
    of two; their positions are successive or -1. serves: as in `split_geometry`. to_peers: the
    `PeerStores` of out, which is then sent to other GPUs, too.
    """
    if c.together < 1 or c.together & (c.together - 1) or c.M % c.together:
        raise InputError(
            f"together: expected a power of two that divides {c.M} rows, got {c.together}"
        )
    return _split_launch(c, SPLIT, "q", together=c.together)


@variant("append and split", APPEND_SPLIT, "attention_append")
def _append_and_split(c: Call) -> Launch:
    """Launch attention_append, for rows [Q | K | V] with heads of HEADS_WITH_NORMS channels.

    K and V of a row outside the cache are not written. Other arguments: as in `_split`.
    """
    c.Q, c.serves, c.to_peers = c.W - 2 * c.C, None, None
    if c.Q <= 0 or c.n_head * c.D != c.Q or c.D != 2 * c.H:
        raise InputError(
            f"qkv {c.qkv.shape}: expected {c.n_head} heads of {c.D} channels, as gamma_q has, then "
            f"twice the {c.C} channels of k, and {c.D // 2} rotations in by, got {c.H}"
        )
    accept(tiles.append_refusal(c.D))
    c.check_addresses("by", "gamma_q", "gamma_k")
    of_token = {"by": c.by, "gamma_q": c.gamma_q, "gamma_k": c.gamma_k, "eps": c.eps}
    return _split_launch(c, APPEND_SPLIT, "qkv", **of_token)


def fuses_norms(head_size: int) -> bool:
    """Whether decoding is faster if attention norms and rotates heads, on this device.

    If kernels overlap, qk_norm_append adds less time to a step than its work adds to attention.
    """
    return not gpu().has_overlap and not tiles.append_refusal(head_size)


def _split_launch(c: Call, file: str, q: str, **more: Any) -> Launch:
    """Return a launch of a kernel by `split_geometry`.

    q: name of the rows with the queries. more: arguments that only this kernel has.
    """
    heads = _heads(q, c.Q, c.n_head, c.C)
    if c.serves is not None:
        fewest = heads[0] // heads[1]
        expected = f"at least {fewest}, the heads of q per head of k"
        check_integer("serves", c.serves, fewest, math.inf, expected)
    sms, clusters = multiprocessors(), gpu().has_clusters
    limit = max_shared()
    if file == APPEND_SPLIT:
        limit -= 4 * (MAX_QUERIES + 2) * HEADS_WITH_NORMS[-1]  # static: heads of q, k and v
    geometry = split_geometry(c.M, c.P, heads, c.k.itemsize, sms, limit, clusters, c.serves)
    kernel = "attention_split" if file == SPLIT else "attention_append"
    geometry = tiles.with_scores(geometry, c)._replace(kernel=kernel)
    if more.get("together", 1) > 1:
        geometry = geometry.with_defines((("AS_DRAFTS", 1),))
    T = "float32" if c.fp8_cache else c.kv_storage
    if c.to_operand is not None:
        own = HI_LO if c.kv_storage == "float32" else c.kv_storage
        if (c.to_operand.dtype != own and c.fp8_cache is None) or heads[-1] % 2:
            raise InputError(
                f"terms of {c.to_operand}, k {c.kv_storage}, head size {heads[-1]}: expected the "
                "16-bit dtype of k, or hi_lo next to float32, and an even head size"
            )
        check_operand(c.to_operand, c.Q, heads[-1])
        ends = stored_defines("AS_OPERAND", c.to_operand)
        geometry = geometry.with_defines(ends)
    width = int(dict(geometry.defines)["AS_WIDTH"])
    c.check_addresses(q, "k", "v", loaded=width)
    args = {q: getattr(c, q), "k": c.k, "v": c.v, "row": c.row, "position": c.position, **more}
    args |= {"B": c.B, "n_ctx": c.P, "out_scale": stored_scale(c.to_operand)}
    args["out"] = c.output("out")
    if c.to_peers is not None:
        if c.to_operand:
            raise InputError("sends: expected floats, without to_operand")
        geometry = geometry.with_defines((("AS_PEER_STORES", 1), *c.to_peers.defines))
        args |= c.to_peers.args
    return launch_at(file, geometry, args, T, cache=c.fp8_cache)


@variant("append", APPEND, "kv_append", "kv_append_narrow")
def _append(c: Call) -> Launch:
    """Launch `append`: write the last 2C columns of row n to k and v at [row[n], position[n]].

    row and position are not read back to the host: the kernel skips rows outside the cache.
    """
    _check_rows(c)
    narrow = c.storage != "float32"
    aligned = alignment(c.qkv.data.ptr), alignment(c.k.data.ptr, c.v.data.ptr)
    geometry = append_geometry(c.N, c.C, c.W, c.k.itemsize, *aligned, narrow)
    args = (c.qkv, c.row, c.position, c.k, c.v, c.C, c.W, c.B, c.P)
    with_fp8 = c.storage if narrow else CACHE_WITH_FP8
    T = with_fp8 if c.fp8_cache else c.kv_storage
    return launch_at(APPEND, geometry, args, T, cache=c.fp8_cache)


@variant("append split", APPEND_HI_LO, "kv_append_split")
def _append_hi_lo(c: Call) -> Launch:
    refuse(c.storage != HI_LO, "qkv: expected a HiLoMatrix")
    _check_rows(c)
    check("k", c.k)
    aligned = alignment(2 * c.qkv.parts.data.ptr), alignment(c.k.data.ptr, c.v.data.ptr)
    geometry = append_geometry(c.N, c.C, c.W, c.k.itemsize, *aligned)
    geometry = geometry._replace(kernel="kv_append_split")
    args = (c.qkv.parts, c.qkv.scale, c.row, c.position, c.k, c.v, c.C, c.W, c.B, c.P)
    return launch_at(APPEND_HI_LO, geometry, args, "float16")


@variant("round", APPEND, "kv_round")
def _round(c: Call) -> Launch:
    """Launch kernel `round`: round K and V to FP8, and store the values in qkv's dtype."""
    check_format(c.fp8_cache)
    if c.storage == "float32":
        check("qkv", c.qkv, dtype=CACHE_WITH_FP8)
    n_kv_head = check_integer("n_kv_head", c.n_kv_head, 1, c.n_head, f"at most n_head {c.n_head}")
    heads = c.n_head + 2 * n_kv_head
    if c.W % heads:
        raise InputError(f"qkv: expected (N, W) of {heads} heads, got {c.qkv.shape}")
    C = c.W // heads * n_kv_head
    width = gcd(alignment(c.qkv.data.ptr) // c.qkv.itemsize, C, c.W)
    geometry = _over_rows("kv_round", c.N, C, width)
    return launch_at(APPEND, geometry, (c.qkv, C, c.W), c.storage, cache=c.fp8_cache)


@variant("copy", APPEND, "kv_copy", block=COPY_THREADS)
def _copy(c: Call) -> Launch:
    """Copy slots source[m] of kv to slots target[m]. Pairs with a slot out of range are skipped.

    A target must not be a source or a target of another pair.
    """
    halves, B, P, C = c.kv.shape
    itemsize = c.kv.itemsize
    width = gcd(16 // itemsize, C, alignment(c.kv.data.ptr) // itemsize)
    blocks = min(ceil(P * C / (width * COPY_THREADS)), COPY_BLOCKS)
    geometry = Geometry("kv_copy", (blocks, c.M, halves), (COPY_THREADS,))
    geometry = geometry.with_defines((("KV_WIDTH", width),))
    args = (c.kv, c.source, c.target, c.count, C, B, P)
    T = CACHE_WITH_FP8 if c.fp8_cache else c.kv_storage
    return launch_at(APPEND, geometry, args, T, cache=c.fp8_cache)


_OPTIONS = {"n_head": REQUIRED, **dict.fromkeys(("softmax_scale", "window", "kv_dtype"))}
_SEVERAL: Any = {
    "variants": (_tiles, _mma, _wgmma),
    "parts": (_wgmma_few,),
    "options": {**_OPTIONS, "longest": REQUIRED, "variant": None},
}
ATTENTION_PACKED = Operation(name="attention_packed", **_SEVERAL, prepare=_packed)
ATTENTION_QUERIES = Operation(name="attention_queries", **_SEVERAL, prepare=_queries)
ATTENTION_SPLIT = Operation(
    name="attention_split",
    variants=(_split,),
    options={**_OPTIONS, "together": 1, **dict.fromkeys(("to_operand", "serves", "to_peers"))},
)
ATTENTION_APPEND = Operation(
    name="attention_append",
    variants=(_append_and_split,),
    options={**_OPTIONS, "eps": 1e-6, "to_operand": None},
)
KV_APPEND = Operation(
    name="kv_append", variants=(_append, _append_hi_lo), options={"kv_dtype": None}
)
KV_ROUND = Operation(
    name="kv_round",
    variants=(_round,),
    options={"n_head": REQUIRED, "n_kv_head": REQUIRED, "kv_dtype": REQUIRED},
)

KV_COPY = Operation(
    name="kv_copy",
    variants=(_copy,),
    options={"kv_dtype": None},
    line="kv kv H B P C; source target count i32 M -> kv kv H B P C",
)

OPERATION = Operation(
    name="attention_cached",
    variants=(_tiles,),
    options={"start": REQUIRED, **_OPTIONS},
    prepare=_one_sequence,
    steps=(
        ATTENTION_PACKED,
        ATTENTION_QUERIES,
        ATTENTION_SPLIT,
        ATTENTION_APPEND,
        KV_APPEND,
        KV_ROUND,
        KV_COPY,
        SHORT_CONV,
        *delta.STEPS,
    ),
    workload=Workload(
        idea="softmax(Q Kᵀ / sqrt(HS)) V, queries at positions start + t, K and V from a kv_cache",
        sizes={"T": 128, "C": 768},
        traffic=lambda s: 4 * s["C"] * (2 * s["T"] + 2 * (START + s["T"])),
        # 4 C for each query and each key that the query sees
        flops=lambda s: 4 * s["C"] * (s["T"] * START + s["T"] * (s["T"] + 1) // 2),
        bound="compute",
        attrs={"start": START, "n_head": 12},
        axes={"Q": "C", "P": "start+T"},
        small=({"T": 17, "C": 128, "n_head": 2},),
    ),
)


def attention_cached(
    q: CudaArray,
    k: CudaArray,
    v: CudaArray,
    start: int,
    n_head: int,
    kv_dtype: str | None = None,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> CudaArray:
    """Compute `reference.attention_cached` on CuPy arrays. Raises InputError.

    q (T, Q) float32, k and v (start + T, C) or longer, float32, float16, bfloat16 or, as uint8, the
    FP8 format kv_dtype → (T, Q). With grouped queries, k and v have fewer heads: Q is a multiple of
    C. The bits of a query's result do not depend on the division of its sequence into calls. Heads
    have at most 512 channels. softmax_scale, window: as in `attention`.
    """
    options: dict[str, Any] = {"start": start, "n_head": n_head, "kv_dtype": kv_dtype}
    options |= {"softmax_scale": softmax_scale, "window": window}
    return call(OPERATION, contiguous(q, k, v), **options).out


def attention_packed(
    qkv: CudaArray,
    k: CudaArray,
    v: CudaArray,
    cu_seqlens: CudaArray,
    start: CudaArray,
    n_head: int,
    longest: int,
    kv_dtype: str | None = None,
    variant: str | None = None,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> CudaArray:
    """Causal attention of new tokens of several sequences. A kv_cache holds their keys and values.

    qkv (N, Q + 2C), float32 or in the dtype of k, holds the rows of one sequence after another. Q
    is C, or with grouped queries a multiple of C. k and v (B, n_ctx, C), cu_seqlens (B + 1,) and
    start (B,) int32 → (N, Q), in the dtype of qkv. Sequence b has rows cu_seqlens[b] to
    cu_seqlens[b + 1] - 1, none or at most `longest`, at positions from start[b] on. kv_dtype: as in
    `attention_cached`; with kv_dtype, qkv can have any float dtype. variant: "wgmma", on the
    tensor cores of a Hopper GPU, for qkv of 16 bits, k of the same dtype or FP8 and heads of 64 or
    128 channels; "mma", on tensor cores, for k of 16 bits and heads of 64, 128 or 256 channels; or
    "tiles"; by default the first of these that supports the call. The bits of a sequence are the
    same alone and in any batch, and for any division into calls. "wgmma" and "mma" give the same
    bits as the same variants of `attention` over the whole sequence. Raises InputError.
    softmax_scale, window: as in `attention`.
    """
    arrays = contiguous(qkv, k, v, cu_seqlens, start)
    options: dict[str, Any] = {"n_head": n_head, "longest": longest, "kv_dtype": kv_dtype}
    options |= {"variant": variant, "softmax_scale": softmax_scale, "window": window}
    return call(ATTENTION_PACKED, arrays, **options).out


def attention_split(
    q: CudaArray,
    k: CudaArray,
    v: CudaArray,
    row: CudaArray,
    position: CudaArray,
    n_head: int,
    kv_dtype: str | None = None,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> CudaArray:
    """Attention of single queries over a kv_cache, with the keys divided into splits of 32.

    q (M, Q) float32, k and v (B, n_ctx, C), row and position (M,) int32 → (M, Q). Query m sees keys
    0 to position[m] of row[m]. Nothing is written for rows outside the cache. Raises InputError.
    Source: Dao et al., "Flash-Decoding for long-context inference" (2023).
    """
    arrays = contiguous(q, k, v, row, position)
    options: dict[str, object] = {"n_head": n_head, "kv_dtype": kv_dtype}
    options |= {"softmax_scale": softmax_scale, "window": window}
    return ATTENTION_SPLIT.bind_on_device(arrays, **options).run()


def kv_append(
    qkv: CudaArray | Composite,
    k: CudaArray,
    v: CudaArray,
    row: CudaArray,
    position: CudaArray,
    kv_dtype: str | None = None,
) -> None:
    """Write K and V of rows [Q | K | V] of qkv to the kv_cache k, v (B, n_ctx, C).

    K and V are converted to the dtype of the kv_cache. qkv: float32, or in the dtype of k and v, or
    for a cache of FP8 in a 16-bit dtype. kv_dtype: as in `attention_cached`. Row n is written to
    sequence row[n] at position[n], both int32 on the device; rows outside the cache are skipped.
    Two rows must not have the same destination. Raises InputError.
    """
    qkv, row, position = contiguous(qkv, row, position)
    KV_APPEND.bind_on_device((qkv, k, v, row, position), kv_dtype=kv_dtype).run()


def kv_round(qkv: CudaArray, n_head: int, n_kv_head: int, kv_dtype: str) -> CudaArray:
    """Apply `reference.kv_round` in place to qkv, a C-contiguous CuPy array, and return qkv.

    qkv (N, W), rows [Q | K | V] of float16 or bfloat16. Raises InputError.
    """
    options = {"n_head": n_head, "n_kv_head": n_kv_head, "kv_dtype": kv_dtype}
    return KV_ROUND.bind_on_device((qkv,), **options).run()
