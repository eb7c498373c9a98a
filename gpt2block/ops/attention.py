"""Attention: its variants, and the launches of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import ceil
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from gpt2block.checks import check_flag
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    Shape,
    check,
    check_apart,
    compute_capability,
    device_attribute,
    launch_at,
    on_16_bytes,
    output,
    storage,
)
from gpt2block.cuda.kernels import Geometry, Launch, load
from gpt2block.cuda.tensor_maps import tensor_map
from gpt2block.errors import InputError
from gpt2block.ops._tensor_cores import HOPPER_CAPABILITY, MMA_CAPABILITY, room
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant, check_block
from gpt2block.ops.two_part import check_split
from gpt2block.ops.warm import call
from gpt2block.weights.two_part import SplitMatrix

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


MAX_BATCH = 65535


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    n_head: int,
    causal: bool,
    variant: str | None = None,
    block: int | None = None,
    cu_seqlens: CudaArray | None = None,
    max_seqlen: int | None = None,
) -> Bound:
    """inputs (qkv (T, 3C) or (B, T, 3C),), out (T, C) or (B, T, C); extra: naive's scores.

    With cu_seqlens and max_seqlen: qkv (N, 3C), out (N, C). variant None: mha for float32, for
    float16 and bfloat16 the best that the GPU has. Otherwise as `attention`. A SplitMatrix in is
    a SplitMatrix out.
    """
    (qkv,) = inputs
    causal = check_flag("causal", causal)
    if isinstance(qkv, SplitMatrix):
        if variant not in (None, "mma") or block is not None:
            raise InputError("attention of a split matrix: expected variant mma, and no block")
        return _bind_split(qkv, cu_seqlens, max_seqlen, out, _heads(n_head), causal)
    dtype = storage(qkv)
    if variant is None:
        variant = _on_tensor_cores() if dtype in SIXTEEN_BITS else "mha"
    chosen = OPERATION.variant(variant)
    if block is not None:
        check_block(OPERATION.name, chosen, block)
    tensor_cores = chosen.name in TENSOR_CORES
    if tensor_cores:
        _check_tensor_cores(chosen, qkv)
    check("qkv", qkv, dtype=dtype if tensor_cores else "float32")
    n_head = _heads(n_head)
    _check_shape(qkv, n_head)
    _check_aligned("qkv", qkv)
    if tensor_cores:
        return _bind_tensor_cores(chosen, qkv, cu_seqlens, max_seqlen, out, n_head, causal)
    if cu_seqlens is not None or max_seqlen is not None:
        raise InputError(
            f"cu_seqlens and max_seqlen: variant {chosen.name} takes sequences of one length: "
            "use float16 or bfloat16"
        )
    where = _launches(chosen, qkv.shape, n_head, causal, block)
    if variant == "mha":
        check_limits(qkv.shape, n_head=n_head, causal=causal)
    *batch, T, three_c = qkv.shape
    B, C = batch[0] if batch else 1, three_c // 3
    out = output(out, (*batch, T, C), apart={"qkv": qkv})
    if variant == "naive":
        return _bind_naive(qkv, out, (B, n_head, T, T), where, int(causal))
    (only,) = where
    args: tuple[Any, ...] = (qkv, out, T)
    if variant == "online":
        _check_aligned("out", out)
        args = (*args, int(causal))
    return Bound(out, (launch_at(chosen.file, only, args),))


def _heads(n_head: Any) -> int:
    if isinstance(n_head, bool) or not isinstance(n_head, Integral) or n_head < 1:
        raise InputError(f"n_head: expected a number of heads, got {n_head!r}")
    return int(n_head)


def _check_shape(qkv: CudaArray | SplitMatrix, n_head: int) -> None:
    if qkv.ndim not in (2, 3) or qkv.shape[-1] % (3 * n_head):
        raise InputError(
            f"qkv: expected (T, 3C) or (B, T, 3C) with C a multiple of n_head {n_head}, "
            f"got {qkv.shape}"
        )


def _bind_split(
    qkv: SplitMatrix,
    cu_seqlens: CudaArray | None,
    max_seqlen: int | None,
    out: SplitMatrix | None,
    n_head: int,
    causal: bool,
) -> Bound:
    """float32 in two parts, the accuracy of float32."""
    if problem := _not_here("mma"):
        raise InputError(f"attention of a split matrix: {problem}")
    check_split("qkv", qkv)
    _check_shape(qkv, n_head)
    C = qkv.shape[-1] // 3
    if C // n_head != TENSOR_HEAD:
        raise InputError(
            f"head size {C // n_head}: split matrices have {TENSOR_HEAD}: use float32, of which "
            "variant online takes heads of up to 256"
        )
    B, T = _sequences(qkv, cu_seqlens, max_seqlen)
    shape = (*qkv.shape[:-1], C)
    if out is None:
        out = SplitMatrix.empty(shape)
    else:
        check_split("out", out, shape)
        check_apart("out", out, {"qkv": qkv, "cu_seqlens": cu_seqlens})
    limit = device_attribute("MaxSharedMemoryPerBlockOptin")
    where, together = mma_fp32_geometry(B, T, n_head, causal, most_shared=limit)
    sizes = (qkv.size // (3 * C), B, T, n_head, together)
    args = (qkv.parts, qkv.scale, cu_seqlens, out.parts, out.scale, *sizes)
    return Bound(out, (launch_at(MMA_FP32, where, args, storage="float16"),))


class _Job(NamedTuple):
    """What a tensor-core kernel is given, checked."""

    qkv: CudaArray
    cu_seqlens: CudaArray | None
    out: CudaArray
    B: int
    T: int  # of the longest sequence
    n_head: int


def _check_tensor_cores(variant: Variant, qkv: Any) -> None:
    """That this GPU has the variant, and that it takes the dtype of qkv."""
    if problem := _not_here(variant.name):
        raise InputError(f"variant {variant.name}: {problem}")
    if storage(qkv) == "float32" and isinstance(qkv, cupy.ndarray):
        raise InputError(
            f"qkv: expected {' or '.join(SIXTEEN_BITS)} for variant {variant.name}, got "
            f"{qkv.dtype}: use .astype('float16')"
        )


def _bind_tensor_cores(
    variant: Variant,
    qkv: CudaArray,
    cu_seqlens: CudaArray | None,
    max_seqlen: int | None,
    out: CudaArray | None,
    n_head: int,
    causal: bool,
) -> Bound:
    C = qkv.shape[-1] // 3
    if C // n_head != TENSOR_HEAD:
        raise InputError(
            f"head size {C // n_head}: variant {variant.name} takes {TENSOR_HEAD}: use float32, of "
            "which variant online takes heads of up to 256"
        )
    dtype = storage(qkv)
    B, T = _sequences(qkv, cu_seqlens, max_seqlen)
    out = output(out, (*qkv.shape[:-1], C), dtype, apart={"qkv": qkv, "cu_seqlens": cu_seqlens})
    _check_aligned("out", out)
    job = _Job(qkv, cu_seqlens, out, B, T, n_head)
    return Bound(out, (_TENSOR_CORES[variant.name](job, causal, dtype),))


def _bind_mma(job: _Job, causal: bool, dtype: str) -> Launch:
    where, together = mma_geometry(
        job.B,
        job.T,
        job.n_head,
        causal,
        sms=device_attribute("MultiProcessorCount"),
        most_shared=device_attribute("MaxSharedMemoryPerBlockOptin"),
    )
    return launch_at(OPERATION.variant("mma").file, where, (*job, together), dtype)


def _bind_hopper(job: _Job, causal: bool, dtype: str) -> Launch:
    sms = device_attribute("MultiProcessorCount")
    where, together = hopper_geometry(job.B, job.T, job.n_head, causal, sms=sms)
    sequences = job.qkv if job.qkv.ndim == 3 else job.qkv.reshape(1, *job.qkv.shape)
    boxes = tensor_map(sequences, (1, HOPPER_TILE, TENSOR_HEAD))
    return launch_at(OPERATION.variant("hopper").file, where, (boxes, *job, together), dtype)


# What makes the launch of each of TENSOR_CORES.
_TENSOR_CORES: Mapping[str, Callable[[_Job, bool, str], Launch]] = {
    "mma": _bind_mma,
    "hopper": _bind_hopper,
}


def _not_here(variant: str) -> str | None:
    """What a variant on tensor cores needs that this GPU has not, and what to use instead."""
    capability = compute_capability()
    if capability < MMA_CAPABILITY:
        return "needs a GPU of compute capability 8.0 or newer: use float32 and variant online"
    if variant == "hopper" and capability != HOPPER_CAPABILITY:
        return "needs a GPU of compute capability 9.0 (Hopper): use variant mma"
    return None


def _on_tensor_cores() -> str:
    """The best variant for 16-bit qkv that this GPU has; without any the oldest, for its error."""
    return next((v for v in reversed(TENSOR_CORES) if not _not_here(v)), TENSOR_CORES[0])


def _sequences(
    qkv: CudaArray | SplitMatrix, cu_seqlens: CudaArray | None, max_seqlen: int | None
) -> tuple[int, int]:
    """How many, and the length of the longest."""
    if cu_seqlens is None:
        if max_seqlen is not None:
            raise InputError("max_seqlen: belongs to cu_seqlens, which is not given")
        *batch, T, _ = qkv.shape
        return (batch[0] if batch else 1), T
    check("cu_seqlens", cu_seqlens, dtype="int32")
    if cu_seqlens.ndim != 1 or cu_seqlens.size < 2:
        raise InputError(
            f"cu_seqlens: expected shape (B + 1,), where each sequence starts and the end of the "
            f"last, got {cu_seqlens.shape}"
        )
    if qkv.ndim != 2:
        raise InputError(f"qkv: expected (N, 3C) beside cu_seqlens, got {qkv.shape}")
    N = qkv.shape[0]
    if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, Integral):
        raise InputError(
            f"max_seqlen: expected the length of the longest sequence, got {max_seqlen!r}"
        )
    if not 1 <= max_seqlen <= N:
        raise InputError(f"max_seqlen: expected 1 to the {N:,} rows of qkv, got {max_seqlen}")
    return cu_seqlens.size - 1, int(max_seqlen)


def _check_aligned(name: str, array: CudaArray) -> None:
    if array.data.ptr % 16:
        raise InputError(f"{name}: expected data aligned to 16 bytes: pass a copy, {name}.copy()")


def _launches(
    variant: Variant, qkv: Shape, n_head: int, causal: bool, block: int | None = None
) -> tuple[Geometry, ...]:
    *batch, T, three_c = qkv
    limit = device_attribute("MaxSharedMemoryPerBlockOptin")
    sizes = (batch[0] if batch else 1, T, n_head, three_c // 3 // n_head)
    return geometry(variant, *sizes, causal, block, limit)


def _bind_naive(
    qkv: CudaArray, out: CudaArray, shape: Shape, where: tuple[Geometry, ...], causal: int
) -> Bound:
    B, NH, T, _ = shape
    try:
        scores = cupy.empty(shape, dtype="float32")
    except cupy.cuda.memory.OutOfMemoryError as error:
        raise InputError(
            f"variant naive: its scores take {4e-9 * B * NH * T * T:,.1f} GB, more than this GPU "
            "has free: use variant online, which stores none"
        ) from error
    arguments = (
        (qkv, scores, T, causal),
        (scores, T, B * NH * T, causal),
        (qkv, scores, out, T, out.size, causal),
    )
    file = OPERATION.variant("naive").file
    calls = tuple(launch_at(file, step, args) for step, args in zip(where, arguments, strict=True))
    return Bound(out, calls, (scores,))


def check_limits(qkv: Shape, *, n_head: int, causal: bool) -> None:
    """InputError when B passes the grid's third axis, or T a row of scores in shared memory."""
    *batch, T, _ = qkv
    if batch and batch[0] > MAX_BATCH:
        raise InputError(f"B {batch[0]:,}: a batch can have at most {MAX_BATCH:,} sequences")
    mha = OPERATION.variant("mha")
    (only,) = _launches(mha, qkv, n_head, causal)
    static = load(mha.file, only.kernel, only.defines).shared_size_bytes
    limit = device_attribute("MaxSharedMemoryPerBlockOptin") - static
    if limit < only.shared:
        raise InputError(
            f"T {T:,}: a row of scores takes {only.shared:,} bytes of shared memory, this GPU has "
            f"{limit:,} for it: T can be at most {limit // 4:,}"
        )


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
    auxiliary=(
        Variant(
            "mma_fp32",
            MMA_FP32,
            ("attention_fp32_mma",),
            "the accuracy of float32 from tensor cores: matrices split into two of fp16, three "
            "products for one",
            source="Ootomo and Yokota (2022), for the split",
        ),
    ),
    shape=lambda qkv: (*qkv[:-1], qkv[-1] // 3),
    largest=lambda qkv, *_: qkv,  # a weighted mean of some of them
    check_limits=check_limits,
    binder=bind,
)


def attention(
    qkv: CudaArray | SplitMatrix,
    n_head: int,
    causal: bool = False,
    variant: str | None = None,
    block: int | None = None,
    cu_seqlens: CudaArray | None = None,
    max_seqlen: int | None = None,
) -> Any:
    """`reference.attention` on a CuPy array (T, 3C) or (B, T, 3C); raises InputError.

    float32 is for the variants mha (the default), naive and online. mha: T is limited by the GPU's
    opt-in shared memory, about 57,000 on an H200. naive: by device memory, as it stores B · n_head
    · T² scores. online: any T, with tiles of K and V and the online softmax; its block sizes are 32
    threads for every 32 queries (16 where a head has more than 64 channels, 8 with more than 128).
    Heads of more than 256 channels are for naive alone.

    float16 and bfloat16, with heads of 64 channels, are for mma and, on GPUs of compute capability
    9.0, hopper: the default is the best that the GPU has. Both run on tensor cores: sums and
    softmax in float32, the softmax's weights rounded before they are multiplied; the result has the
    dtype of qkv. Any T. A row's result depends on its own sequence alone, to the bit. With
    cu_seqlens, int32 (B + 1,), qkv is (N, 3C): the rows of B sequences one after the other, of
    which sequence b starts at row cu_seqlens[b] and ends before row cu_seqlens[b + 1]; none is
    longer than max_seqlen. The numbers are in device memory and not looked at here: that they do
    not fall, nor pass N, and that max_seqlen is right is the caller's word. Rows that belong to no
    sequence are not written.

    A SplitMatrix of heads of 64 channels, on the same GPUs: in the accuracy of float32, the result
    a SplitMatrix, too. A row's scale is the largest of the rows that it sees.

    Sources: Dao et al., "FlashAttention" (2022); Dao, "FlashAttention-2" (2023); of hopper Shah et
    al., "FlashAttention-3" (2024); of split matrices Ootomo and Yokota (2022), see `gemm`.
    """
    qkv = on_16_bytes("qkv", qkv)
    options = {"n_head": n_head, "causal": causal, "variant": variant, "block": block}
    if cu_seqlens is None and max_seqlen is None:
        return call(bind, (qkv,), **options).out
    return call(_bind_packed, (qkv, cu_seqlens), **options, max_seqlen=max_seqlen).out


def _bind_packed(inputs: tuple[Any, ...], out: CudaArray | None = None, **options: Any) -> Bound:
    """`bind` with cu_seqlens among the inputs, so that `call` knows its address."""
    qkv, cu_seqlens = inputs
    return bind((qkv,), out, cu_seqlens=cu_seqlens, **options)
