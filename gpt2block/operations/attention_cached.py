"""Attention over a kv_cache, and the cache itself: variants and launches.

`split` is decoding's, one query a sequence; `tiles` takes several, in packed rows; `append` puts
new keys and values into the cache.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

import numpy as np

from gpt2block.errors import InputError
from gpt2block.operations._types import Geometry, Inputs, Operation, Sizes, Variant
from gpt2block.operations.attention import (
    LARGEST_HEAD,
    MOST_BLOCKS,
    shared_bytes,
    warp_queries,
)

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
    beside=(
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
)


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
def split(B: int, n_ctx: int, NH: int, HS: int, itemsize: int) -> Geometry:
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
def tiles(
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


def append(
    N: int, C: int, itemsize: int, of_rows: int, of_cache: int, narrow: bool = False
) -> Geometry:
    """For N rows. of_rows, of_cache: their alignment in bytes. narrow: one dtype for both."""
    width = vector_width(itemsize, C)
    own = itemsize if narrow else 4
    while min(16, own * width) > of_rows or itemsize * width > of_cache:
        width //= 2
    threads = min(32 * ceil(2 * C / (32 * width)), APPEND_MOST_THREADS)
    kernel = OPERATION.beside[1].kernels[narrow]
    return Geometry(kernel, (N,), (threads,), defines=(("KV_WIDTH", width),))
