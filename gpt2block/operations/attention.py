"""Attention: its variants, and the launches of each."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

import numpy as np

from gpt2block.errors import InputError
from gpt2block.operations._types import Geometry, Inputs, Operation, Sizes, Variant

FILE = "attention.cu"
NAIVE = "attention_forward.cu"
ONLINE = "attention_online.cu"
MHA_BLOCK = 256
LARGEST_HEAD = 256  # of mha and online
BLOCKS = (32, 64, 128, 256, 512, 1024)
MOST_BLOCKS = 2**31 - 1, 65535  # of a grid, along its first axis and along the others
WARPS = (4, 2, 1)  # of a block of `online`, the best first
KEYS = (64, 32)  # of a tile


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    shape = (sizes["B"], sizes["T"], 3 * sizes["C"])
    return (rng.standard_normal(shape, dtype=np.float32) + np.float32(0.5),)


OPERATION = Operation(
    name="attention",
    document="ten-step block",
    idea="softmax(Q Kᵀ / sqrt(HS)) V",
    sizes={"B": 8, "T": 1024, "C": 768},
    variants=(
        Variant(
            "mha",
            FILE,
            ("mha_causal_kernel", "mha_nocausal_kernel"),
            "a block a query and head: scores, exp and sum, weighted sum of V",
        ),
        Variant(
            "naive",
            NAIVE,
            (
                "attention_query_key_kernel1",
                "attention_softmax_kernel1",
                "attention_value_kernel1",
            ),
            "a thread a score, then a row, then an output: three kernels, T×T scores in memory",
            BLOCKS,
            source="named with the LayerNorm kernels",
        ),
        Variant(
            "online",
            ONLINE,
            ("attention_forward_online",),
            "tiles of K and V in shared memory, online softmax, 8×8 a thread: no T×T scores, any T",
            tuple(32 * warps for warps in (1, 2, 4, 8)),
            128,
            source="beyond the documents",
        ),
    ),
    make=_make,
    traffic=lambda s: 16 * s["B"] * s["T"] * s["C"],
    flops=lambda s: 2 * s["B"] * s["T"] * (s["T"] + 1) * s["C"],
    bound="compute",
    attrs={"n_head": 12, "causal": True},
)


@lru_cache(maxsize=1024)
def geometry(
    variant: Variant,
    B: int,
    T: int,
    NH: int,
    HS: int,
    causal: bool,
    block: int | None,
    shared_limit: int,
) -> tuple[Geometry, ...]:
    """Its launches for B sequences of length T and NH heads of HS channels, one after the other.

    `shared_limit`: bytes of shared memory that a block can have. `block` None: the best there is.
    Raises InputError for what the variant or a grid cannot take.
    """
    defines = (("NH", NH), ("HS", HS))
    if variant.name == "naive":
        rows, outputs, threads = B * NH * T, B * T * NH * HS, block or variant.block
        sizes = (rows * ceil(T / threads), ceil(rows / threads), ceil(outputs / threads))
        if max(sizes) > MOST_BLOCKS[0]:
            raise InputError(
                f"variant naive: B {B:,}, T {T:,} and {NH:,} heads make a grid of {max(sizes):,} "
                f"blocks, CUDA takes {MOST_BLOCKS[0]:,}: use variant online"
            )
        return tuple(
            Geometry(kernel, (size,), (threads,), defines=defines)
            for kernel, size in zip(variant.kernels, sizes, strict=True)
        )
    if HS > LARGEST_HEAD:
        raise InputError(
            f"head size {HS}: variant {variant.name} takes at most {LARGEST_HEAD} (naive takes any)"
        )
    if variant.name == "mha":
        kernel = variant.kernels[0 if causal else 1]
        return (Geometry(kernel, (T, NH, B), (MHA_BLOCK,), 4 * T, defines),)

    warps, keys = _tile(HS, T, block, shared_limit)
    blocks = ceil(T / (warps * warp_queries(HS)))
    if blocks > MOST_BLOCKS[1]:
        longest = MOST_BLOCKS[1] * warps * warp_queries(HS)
        raise InputError(f"T {T:,}: variant online takes at most {longest:,}")
    return (
        Geometry(
            variant.kernels[0],
            (B * NH, blocks),
            (32 * warps,),
            shared_bytes(HS, warps, keys),
            (*defines, ("AO_WARPS", warps), ("AO_KEYS", keys)),
        ),
    )


def warp_queries(HS: int) -> int:
    """Queries of a warp of `online`: fewer for a larger head, so that sums stay in registers."""
    return 32 if HS <= 64 else 16 if HS <= 128 else 8


def shared_bytes(HS: int, warps: int, keys: int) -> int:
    """What the tiles of `online` take: Q, K, V, and 32 keys' weights of each query."""
    queries = warps * warp_queries(HS)
    stride = 4 * (ceil(HS / 4) | 1)
    return 4 * ((queries + keys) * stride + keys * 32 * ceil(HS / 32) + queries * 48)


def _tile(HS: int, T: int, block: int | None, shared_limit: int) -> tuple[int, int]:
    """Warps of a block and keys of a tile: the largest that fit, no more warps than T has use for.

    Smaller tiles of keys before the last halving of the block: a block's queries share them.
    """
    if block is None:
        useful = max(1, ceil(T / warp_queries(HS)))
        choices = [warps for warps in WARPS if warps < 2 * useful]
    else:
        choices = [block // 32]
    tiles = [(warps, keys) for warps in choices for keys in KEYS]
    tiles.sort(key=lambda tile: (-tile[0] * tile[1], -tile[1]))
    for warps, keys in tiles:
        if shared_bytes(HS, warps, keys) <= shared_limit:
            return warps, keys
    smallest = min(shared_bytes(HS, *tile) for tile in tiles)
    todo = "use variant mha" if block is None else "use a smaller block"
    raise InputError(
        f"head size {HS}: the smallest tiles of variant online take {smallest:,} bytes of shared "
        f"memory, this GPU has {shared_limit:,} for them: {todo}"
    )
