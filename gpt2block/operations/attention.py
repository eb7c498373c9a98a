"""Attention: its variants, and the launches of each."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

import numpy as np

from gpt2block.errors import InputError
from gpt2block.operations._tensor_cores import room
from gpt2block.operations._types import Geometry, Inputs, Operation, Sizes, Variant

FILE = "attention/skeleton.cu"
NAIVE = "attention/ladder.cu"
ONLINE = "attention/online.cu"
MHA_BLOCK = 256
LARGEST_HEAD = 256  # of mha and online
BLOCKS = (32, 64, 128, 256, 512, 1024)
MOST_BLOCKS = 2**31 - 1, 65535  # of a grid, along its first axis and along the others
WARPS = (4, 2, 1)  # of a block of `online`, the best first
KEYS = (64, 32)  # of a tile

MMA = "attention/mma.cu"
MMA_FP32 = "attention/mma_two_part.cu"
HOPPER = "attention/hopper.cu"
SIXTEEN_BITS = ("float16", "bfloat16")
# Variants for these, the best last, and the channels of a head that they take.
TENSOR_CORES = ("mma", "hopper")
TENSOR_HEAD = 64
HOPPER_TILE = 128  # queries, and keys
HOPPER_THREADS = 288  # two warpgroups that multiply, a warp that copies
HOPPER_SHARED = 181408  # bytes: eight tiles of K or V, two of queries, the output on its way
MMA_THREADS = 128  # of a block of either of `MMA_TILES`
MMA_STAGE = 2 * 64 * 144  # bytes in shared memory of a tile of 64 keys, K and V
CACHED = 32 << 20  # bytes of K and V that the L2 cache holds on to


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
            dtypes=("float32",),
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
            dtypes=("float32",),
        ),
        Variant(
            "online",
            ONLINE,
            ("attention_forward_online",),
            "tiles of K and V in shared memory, online softmax, 8×8 a thread: no T×T scores, any T",
            tuple(32 * warps for warps in (1, 2, 4, 8)),
            128,
            source="beyond the documents",
            dtypes=("float32",),
        ),
        Variant(
            "mma",
            MMA,
            ("attention_mma",),
            "tensor cores (mma.sync), 16 or 32 queries a warp: scores stay in registers, a ring of "
            "tiles of K and V by cp.async; ragged batches",
            block=MMA_THREADS,
            source="beyond the documents",
            dtypes=SIXTEEN_BITS,
        ),
        Variant(
            "hopper",
            HOPPER,
            ("attention_hopper",),
            "tensor cores (wgmma), 64 queries a warpgroup: a warp has K and V copied (TMA), scores "
            "and P V are multiplied beside the softmax, a block has many tiles; ragged batches",
            block=HOPPER_THREADS,
            source="beyond the documents",
            dtypes=SIXTEEN_BITS,
        ),
    ),
    make=_make,
    traffic=lambda s: 4 * s["itemsize"] * s["B"] * s["T"] * s["C"],
    flops=lambda s: 2 * s["B"] * s["T"] * (s["T"] + 1) * s["C"],
    bound="compute",
    attrs={"n_head": 12, "causal": True},
    dtypes=("float32", *SIXTEEN_BITS),
    beside=(
        Variant(
            "mma_fp32",
            MMA_FP32,
            ("attention_fp32_mma",),
            "the accuracy of float32 from tensor cores: matrices split into two of fp16, three "
            "products for one",
            source="Ootomo and Yokota (2022), for the split",
        ),
    ),
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


class Tile(NamedTuple):
    """A block of the mma kernel, and what it costs."""

    warps: int
    frags: int  # of 16 queries, that a warp has
    blocks: int  # that an SM holds
    alone: int  # clocks for 64 keys when the SM has no other block
    together: int  # and of each block when it has all of them

    @property
    def queries(self) -> int:
        return 16 * self.warps * self.frags


# 32 queries a warp read K and V half as often from shared memory; 16 fill an SM with fewer rows.
MMA_TILES = (Tile(4, 2, 2, 1700, 950), Tile(4, 1, 3, 850, 520))


@lru_cache(maxsize=1024)
def mma_geometry(
    B: int,
    T: int,
    NH: int,
    causal: bool,
    *,
    sms: int,
    most_shared: int,
    tile: Tile | None = None,
) -> tuple[Geometry, int]:
    """For B sequences, the longest of T rows; and the heads whose blocks run side by side.

    sms, most_shared: the GPU's multiprocessors, and the bytes of shared memory that a block of it
    may ask for. tile: instead of the best of `MMA_TILES`. Raises InputError for what a grid cannot
    take.
    """
    if tile is None:
        tile = min(MMA_TILES, key=lambda tile: _clocks(tile, B, T, NH, causal, sms))
    grid = _checked_grid(B, T, NH, tile.queries)
    stages = 3 if room(most_shared, tile.blocks) >= 3 * MMA_STAGE else 2
    defines = (
        ("ATT_CAUSAL", int(causal)),
        ("ATT_WARPS", tile.warps),
        ("ATT_FRAGS", tile.frags),
        ("ATT_STAGES", stages),
        ("ATT_BLOCKS", tile.blocks),
    )
    how = Geometry("attention_mma", (grid,), (32 * tile.warps,), stages * MMA_STAGE, defines)
    return how, together(B, T, NH, causal)


def hopper_geometry(B: int, T: int, NH: int, causal: bool, *, sms: int) -> tuple[Geometry, int]:
    """For B sequences, the longest of T rows, on `sms` multiprocessors; and the heads of a band.

    Raises InputError for more tiles than the kernel can count.
    """
    tiles = B * NH * ceil(T / HOPPER_TILE)
    if tiles >= 2**30:
        raise InputError(
            f"B {B:,}, T {T:,} and {NH:,} heads make {tiles:,} tiles, variant hopper counts to "
            f"{2**30:,}: use smaller batches"
        )
    how = Geometry(
        "attention_hopper",
        (min(tiles, sms),),
        (HOPPER_THREADS,),
        HOPPER_SHARED,
        (("ATT_CAUSAL", int(causal)),),
    )
    return how, together(B, T, NH, causal)


@lru_cache(maxsize=1024)
def mma_fp32_geometry(
    B: int, T: int, NH: int, causal: bool, *, most_shared: int
) -> tuple[Geometry, int]:
    """As `mma_geometry`, for split matrices: one tile, 4 warps of 16 queries."""
    warps, blocks, stage = 4, 2, 2 * MMA_STAGE
    grid = _checked_grid(B, T, NH, 16 * warps)
    stages = 3 if room(most_shared, blocks) >= 3 * stage else 2
    defines = (("ATT_CAUSAL", int(causal)), ("ATT_WARPS", warps), ("ATT_STAGES", stages))
    how = Geometry("attention_fp32_mma", (grid,), (32 * warps,), stages * stage, defines)
    return how, together(B, 2 * T, NH, causal)


def _checked_grid(B: int, T: int, NH: int, queries: int) -> int:
    """Blocks of so many queries; InputError for more than a grid can have."""
    grid = B * NH * ceil(T / queries)
    if grid > MOST_BLOCKS[0]:
        raise InputError(
            f"B {B:,}, T {T:,} and {NH:,} heads make a grid of {grid:,} blocks, CUDA takes "
            f"{MOST_BLOCKS[0]:,}: use smaller batches"
        )
    return grid


def together(B: int, T: int, NH: int, causal: bool) -> int:
    """Heads whose tiles of queries take turns.

    One after the other where all tiles are alike. With a causal mask the last tile of each has most
    to do and comes first, of as many heads as have their K and V in the L2 cache.
    """
    if not causal:
        return 1
    parts = ceil(B * NH * T * 4 * TENSOR_HEAD / CACHED)
    return ceil(B * NH / parts)


def _clocks(tile: Tile, B: int, T: int, NH: int, causal: bool, sms: int) -> float:
    """For one tile of keys, of the SM that has most blocks; with a causal mask half are short."""
    tiles = ceil(T / tile.queries)
    blocks = B * NH * tiles / sms
    if causal:
        return max(tile.alone, blocks * (tiles + 1) / (2 * tiles) * tile.together)
    rounds, rest = divmod(ceil(blocks), tile.blocks)
    last = max(tile.alone, rest * tile.together) if rest else 0
    return rounds * tile.blocks * tile.together + last
