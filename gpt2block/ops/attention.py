"""Attention of sequences over themselves: softmax(Q Kᵀ / sqrt(HS)) V, with or without a mask.

`mha` (attention/skeleton.cu), `naive` (ladder.cu) and `online` (online.cu) compute in float32,
`mma` (mma.cu) and `hopper` (hopper.cu) on tensor cores with float16 or bfloat16. `mma` takes
two-part matrices, too, with the accuracy of float32 (mma_two_part.cu).
"""

from __future__ import annotations

import math
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from gpt2block.checks import check_flag, check_integer
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    Shape,
    check,
    check_address,
    check_apart,
    compute_capability,
    device_attribute,
    launch_at,
    on_16_bytes,
    output,
    storage,
)
from gpt2block.cuda.kernels import Defines, Geometry, load
from gpt2block.cuda.tensor_maps import tensor_map
from gpt2block.errors import InputError
from gpt2block.ops._attention_tiles import (
    HOPPER_THREADS,
    HOPPER_TILE,
    MOST_BLOCKS,
    TENSOR_HEADS,
    heads_defines,
    hopper_geometry,
    mma_geometry,
    online_geometry,
    tensor_heads_defines,
    two_part_bytes,
    two_part_geometry,
)
from gpt2block.ops._tensor_cores import HOPPER_CAPABILITY, MMA_CAPABILITY
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant, check_block
from gpt2block.ops.two_part import TWO_PART, check_two_part
from gpt2block.ops.warm import call
from gpt2block.weights.two_part import TwoPartMatrix

FILE = "attention/skeleton.cu"
NAIVE = "attention/ladder.cu"
ONLINE = "attention/online.cu"
MMA = "attention/mma.cu"
MMA_TWO_PART = "attention/mma_two_part.cu"
HOPPER = "attention/hopper.cu"

SIXTEEN_BITS = ("float16", "bfloat16")
TENSOR_CORES = ("hopper", "mma")  # variants for 16 bits, in order of preference
TENSOR_HEAD = TENSOR_HEADS[0]  # channels of a head that all variants on tensor cores take
LARGEST_HEAD = 256  # of mha and online
MAX_BATCH = MOST_BLOCKS[1]  # sequences of mha
BLOCK = 256  # threads of mha, and by default of naive
BLOCKS = (32, 64, 128, 256, 512, 1024)
ONLINE_BLOCKS = (32, 64, 128, 256)
MMA_THREADS = 128  # of a block of either of `MMA_TILES`


def mha_geometry(B: int, T: int, NH: int, HS: int, causal: bool, NKV: int) -> Geometry:
    """One block per query and head, with a row of scores in shared memory."""
    kernel = "mha_causal_kernel" if causal else "mha_nocausal_kernel"
    return Geometry(kernel, (T, NH, B), (BLOCK,), 4 * T, heads_defines(NH, NKV, HS))


def naive_geometry(
    B: int, T: int, NH: int, HS: int, threads: int, NKV: int
) -> tuple[Geometry, ...]:
    """Three launches: one thread per score, per row of scores, per output.

    Raises InputError for too large a grid.
    """
    rows = B * NH * T
    grids = {
        "attention_query_key_kernel1": rows * ceil(T / threads),
        "attention_softmax_kernel1": ceil(rows / threads),
        "attention_value_kernel1": ceil(rows * HS / threads),
    }
    largest = max(grids.values())
    if largest > MOST_BLOCKS[0]:
        raise InputError(
            f"variant naive: B {B:,}, T {T:,} and {NH:,} heads make a grid of {largest:,} "
            f"blocks, CUDA takes {MOST_BLOCKS[0]:,}: use variant online"
        )
    defines = heads_defines(NH, NKV, HS)
    return tuple(
        Geometry(kernel, (blocks,), (threads,), defines=defines) for kernel, blocks in grids.items()
    )


class Job(NamedTuple):
    """A checked call."""

    qkv: Any  # a CuPy array or a TwoPartMatrix; None where only its shape and dtype matter
    cu_seqlens: CudaArray | None
    dtype: str  # of qkv: "float32", "float16", "bfloat16" or "two_part"
    B: int  # sequences
    T: int  # rows of the longest one
    NH: int
    NKV: int  # heads of K and of V
    HS: int
    causal: bool
    block: int | None = None  # threads; None for the variant's own choice


# --- float32: mha, naive, online


def _dtype_problem(job: Job, *dtypes: str) -> str | None:
    if job.dtype in dtypes:
        return None
    if job.dtype == TWO_PART:
        return "takes no two-part matrix: use variant mma"
    expected = " or ".join(dtypes)
    return f"qkv: expected {expected}, got {job.dtype}: use .astype('{dtypes[0]}')"


def _naive_problem(job: Job) -> str | None:
    if problem := _dtype_problem(job, "float32"):
        return problem
    if job.cu_seqlens is not None:
        return "cu_seqlens: float32 takes sequences of one length: use float16 or bfloat16"
    return None


def _online_problem(job: Job) -> str | None:
    large = f"head size {job.HS}: expected at most {LARGEST_HEAD} (naive takes any)"
    return _naive_problem(job) or (large if job.HS > LARGEST_HEAD else None)


def _mha_problem(job: Job) -> str | None:
    """Also the limits of the grid's third axis, and of a row of scores in shared memory."""
    if problem := _online_problem(job):
        return problem
    if job.B > MAX_BATCH:
        return f"B {job.B:,}: a batch can have at most {MAX_BATCH:,} sequences"
    geometry = mha_geometry(job.B, job.T, job.NH, job.HS, job.causal, job.NKV)
    static = load(FILE, geometry.kernel, geometry.defines).shared_size_bytes
    limit = device_attribute("MaxSharedMemoryPerBlockOptin") - static
    if limit < geometry.shared:
        return (
            f"T {job.T:,}: a row of scores takes {geometry.shared:,} bytes of shared memory, this "
            f"GPU has {limit:,} for it: T can be at most {limit // 4:,}"
        )
    return None


def _launch_mha(job: Job, out: CudaArray) -> Bound:
    geometry = mha_geometry(job.B, job.T, job.NH, job.HS, job.causal, job.NKV)
    return Bound(out, (launch_at(FILE, geometry, (job.qkv, out, job.T)),))


def _launch_naive(job: Job, out: CudaArray) -> Bound:
    """Extra: the scores (B, NH, T, T)."""
    qkv, T, causal, rows = job.qkv, job.T, int(job.causal), job.B * job.NH * job.T
    geometries = naive_geometry(job.B, T, job.NH, job.HS, job.block or BLOCK, job.NKV)
    try:
        scores = cupy.empty((job.B, job.NH, T, T), dtype="float32")
    except cupy.cuda.memory.OutOfMemoryError as error:
        raise InputError(
            f"variant naive: its scores take {4e-9 * rows * T:,.1f} GB, more than this GPU "
            "has free: use variant online, which stores none"
        ) from error
    arguments = (
        (qkv, scores, T, causal),
        (scores, T, rows, causal),
        (qkv, scores, out, T, out.size, causal),
    )
    steps = zip(geometries, arguments, strict=True)
    return Bound(out, tuple(launch_at(NAIVE, *step) for step in steps), (scores,))


def _launch_online(job: Job, out: CudaArray) -> Bound:
    check_address("out", out)
    most_shared = device_attribute("MaxSharedMemoryPerBlockOptin")
    sizes = (job.B, job.T, job.NH, job.HS)
    geometry = online_geometry(*sizes, NKV=job.NKV, block=job.block, most_shared=most_shared)
    return Bound(out, (launch_at(ONLINE, geometry, (job.qkv, out, job.T, int(job.causal))),))


# --- tensor cores: mma, also for two-part matrices, and hopper


def _mma_problem(job: Job) -> str | None:
    if compute_capability() < MMA_CAPABILITY:
        return "needs a GPU of compute capability 8.0 or newer: use float32 and variant online"
    if job.dtype != TWO_PART and (problem := _dtype_problem(job, *SIXTEEN_BITS)):
        return problem
    return _mma_heads_problem(job)


def _mma_heads_problem(job: Job) -> str | None:
    if job.HS not in TENSOR_HEADS:
        sizes = " and ".join(map(str, TENSOR_HEADS))
        return (
            f"head size {job.HS}: tensor cores take {sizes}: use float32, of which variant online "
            f"takes heads of up to {LARGEST_HEAD}"
        )
    return None


def _hopper_problem(job: Job) -> str | None:
    if problem := _mma_problem(job) or _dtype_problem(job, *SIXTEEN_BITS):
        return problem
    if compute_capability() != HOPPER_CAPABILITY:
        return "needs a GPU of compute capability 9.0 (Hopper): use variant mma"
    return None


def _launch_mma(job: Job, out: CudaArray | TwoPartMatrix) -> Bound:
    sizes = (job.B, job.T, job.NH)
    options = {
        "most_shared": device_attribute("MaxSharedMemoryPerBlockOptin"),
        "HS": job.HS,
        "serves": job.NH // job.NKV,
    }
    if isinstance(job.qkv, TwoPartMatrix):
        rows = job.qkv.size // job.qkv.shape[-1]
        one_scale = job.qkv.one_scale is not None
        geometry, together = two_part_geometry(*sizes, job.causal, one_scale, **options)
        parts = (job.qkv.parts, job.qkv.scale, job.cu_seqlens, out.parts, out.scale)
        launch = launch_at(MMA_TWO_PART, geometry, (*parts, rows, *sizes, together), "float16")
        return Bound(out, (launch,))
    check_address("out", out)
    sms = device_attribute("MultiProcessorCount")
    geometry, together = mma_geometry(*sizes, job.causal, sms=sms, **options)
    args = (job.qkv, job.cu_seqlens, out, *sizes, together)
    return Bound(out, (launch_at(MMA, geometry, args, job.dtype),))


def _launch_hopper(job: Job, out: CudaArray) -> Bound:
    check_address("out", out)
    qkv, sizes = job.qkv, (job.B, job.T, job.NH)
    sms = device_attribute("MultiProcessorCount")
    heads = {"HS": job.HS, "serves": job.NH // job.NKV}
    geometry, together = hopper_geometry(*sizes, job.causal, sms=sms, **heads)
    boxes = tensor_map(qkv.reshape(-1, *qkv.shape[-2:]), (1, HOPPER_TILE, TENSOR_HEAD))
    args = (boxes, qkv, job.cu_seqlens, out, *sizes, together)
    return Bound(out, (launch_at(HOPPER, geometry, args, job.dtype),))


# --- every variant


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | TwoPartMatrix | None = None,
    *,
    n_head: int,
    causal: bool,
    n_kv_head: int | None = None,
    variant: str | None = None,
    block: int | None = None,
    cu_seqlens: CudaArray | None = None,
    max_seqlen: int | None = None,
) -> Bound:
    """inputs (qkv (T, W) or (B, T, W),), out (T, C) or (B, T, C); extra: naive's scores.

    W is 3C, or less with n_kv_head below n_head. With cu_seqlens and max_seqlen: qkv (N, W), out
    (N, C). variant None: mha for float32, for float16 and bfloat16 the best that the GPU has.
    Otherwise as `attention`. The output for a TwoPartMatrix is a TwoPartMatrix.
    """
    (qkv,) = inputs
    causal = check_flag("causal", causal)
    n_head, n_kv_head = _check_heads(n_head, n_kv_head)
    dtype = _check_qkv(qkv, n_head, n_kv_head)
    B, T = _sequences(qkv, cu_seqlens, max_seqlen)
    HS = qkv.shape[-1] // (n_head + 2 * n_kv_head)
    job = Job(qkv, cu_seqlens, dtype, B, T, n_head, n_kv_head, HS, causal, block)
    order = ("mha",) if dtype == "float32" else TENSOR_CORES
    chosen = OPERATION.choose(job, variant, order)
    if block is not None:
        check_block(OPERATION.name, chosen, block)
    bound: Bound = chosen.launch(job, _output(job, out))
    return bound


def _check_heads(n_head: Any, n_kv_head: Any) -> tuple[int, int]:
    """The numbers of heads of Q, and of K and V, which by default are as many."""
    n_head = check_integer("n_head", n_head, 1, math.inf, "a number of heads")
    if n_kv_head is None:
        return n_head, n_head
    expected = f"a divisor of n_head {n_head}"
    n_kv_head = check_integer("n_kv_head", n_kv_head, 1, n_head, expected)
    if n_head % n_kv_head:
        raise InputError(f"n_kv_head: expected {expected}, got {n_kv_head}")
    return n_head, n_kv_head


def _check_qkv(qkv: Any, n_head: int, n_kv_head: int) -> str:
    """The dtype of qkv, "two_part" for a TwoPartMatrix; InputError for a wrong array or shape."""
    dtype = TWO_PART if isinstance(qkv, TwoPartMatrix) else storage(qkv)
    if dtype == TWO_PART:
        check_two_part("qkv", qkv)
    else:
        check("qkv", qkv, dtype=dtype)
        check_address("qkv", qkv)
    if qkv.ndim not in (2, 3) or qkv.shape[-1] % (n_head + 2 * n_kv_head):
        rows = f"(T, 3C) or (B, T, 3C) with C a multiple of n_head {n_head}"
        if n_kv_head != n_head:
            rows = f"(T, W) or (B, T, W) with W a multiple of {n_head} + 2 · {n_kv_head} heads"
        raise InputError(f"qkv: expected {rows}, got {qkv.shape}")
    return dtype


def _sequences(
    qkv: CudaArray | TwoPartMatrix, cu_seqlens: CudaArray | None, max_seqlen: int | None
) -> tuple[int, int]:
    """How many, and the length of the longest."""
    if cu_seqlens is None:
        if max_seqlen is not None:
            raise InputError("max_seqlen: belongs to cu_seqlens, which is not given")
        return (qkv.shape[0] if qkv.ndim == 3 else 1), qkv.shape[-2]
    check("cu_seqlens", cu_seqlens, dtype="int32")
    if cu_seqlens.ndim != 1 or cu_seqlens.size < 2:
        raise InputError(
            f"cu_seqlens: expected shape (B + 1,), where each sequence starts and the end of the "
            f"last, got {cu_seqlens.shape}"
        )
    if qkv.ndim != 2:
        raise InputError(f"qkv: expected (N, 3C) with cu_seqlens, got {qkv.shape}")
    N = qkv.shape[0]
    expected = f"the length of the longest sequence, 1 to the {N:,} rows of qkv"
    return cu_seqlens.size - 1, check_integer("max_seqlen", max_seqlen, 1, N, expected)


def _output(job: Job, out: Any) -> Any:
    """`out`, checked, or a new output."""
    shape = (*job.qkv.shape[:-1], job.NH * job.HS)
    apart = {"qkv": job.qkv, "cu_seqlens": job.cu_seqlens}
    if job.dtype != TWO_PART:
        return output(out, shape, job.dtype, apart=apart)
    if out is None:
        return TwoPartMatrix.empty(shape)
    check_two_part("out", out, shape)
    check_apart("out", out, apart)
    return out


def check_limits(qkv: Shape, *, n_head: int, causal: bool, n_kv_head: int | None = None) -> None:
    """Raise InputError for a shape of float32 qkv that mha does not support."""
    *batch, T, width = qkv
    NKV = n_head if n_kv_head is None else n_kv_head
    B, HS = batch[0] if batch else 1, width // (n_head + 2 * NKV)
    OPERATION.choose(Job(None, None, "float32", B, T, n_head, NKV, HS, causal), "mha")


def check_heads(dtype: str, n_head: int, n_kv_head: int, head_size: int, causal: bool) -> None:
    """Raise InputError if `bind` has no kernel for such heads on the current device."""
    job = Job(None, None, dtype, 1, 1, n_head, n_kv_head, head_size, causal)
    OPERATION.choose(job, None, ("mha",) if dtype == "float32" else TENSOR_CORES)


def tensor_cores_take(variant: str, n_head: int, n_kv_head: int, head_size: int) -> bool:
    """Whether "mma" or "hopper" computes such heads, on a GPU that runs its instructions."""
    job = Job(None, None, "float16", 1, 1, n_head, n_kv_head, head_size, True)
    return variant in TENSOR_CORES and _mma_heads_problem(job) is None


def head_constants(n_head: int, n_kv_head: int, head_size: int) -> Defines:
    """The constants that kernels of attention are compiled with for such heads.

    Each kernel has some of them: the number of heads is an argument of those on tensor cores.
    """
    on_tensor_cores = tensor_heads_defines(head_size, n_head // n_kv_head)
    return (*heads_defines(n_head, n_kv_head, head_size), *on_tensor_cores)


def two_part_fits(head_size: int) -> bool:
    """Whether the current device has the shared memory for two-part heads of this size."""
    return two_part_bytes(head_size) <= device_attribute("MaxSharedMemoryPerBlockOptin")


def _shape(qkv: Shape, *, n_head: int, n_kv_head: int | None = None, **attrs: Any) -> Shape:
    heads = n_head + 2 * (n_head if n_kv_head is None else n_kv_head)
    return (*qkv[:-1], qkv[-1] // heads * n_head)


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    shape = (sizes["B"], sizes["T"], 3 * sizes["C"])
    return (rng.standard_normal(shape, dtype=np.float32) + np.float32(0.5),)


OPERATION = Operation(
    name="attention",
    document="LeetGPU's GPT-2 block challenge",
    idea="softmax(Q Kᵀ / sqrt(HS)) V",
    sizes={"B": 8, "T": 1024, "C": 768},
    variants=(
        Variant(
            "mha",
            FILE,
            ("mha_causal_kernel", "mha_nocausal_kernel"),
            "one block per query and head: scores, exp and sum, weighted sum of V",
            dtypes=("float32",),
            launch=_launch_mha,
            problem=_mha_problem,
        ),
        Variant(
            "naive",
            NAIVE,
            (
                "attention_query_key_kernel1",
                "attention_softmax_kernel1",
                "attention_value_kernel1",
            ),
            "three kernels: one thread per score, per row, per output; T×T scores in memory",
            BLOCKS,
            source="named after llm.c's attention kernels",
            dtypes=("float32",),
            launch=_launch_naive,
            problem=_naive_problem,
        ),
        Variant(
            "online",
            ONLINE,
            ("attention_forward_online",),
            "tiles of K and V in shared memory, online softmax, 8×8 per thread; no T×T scores",
            ONLINE_BLOCKS,
            128,
            source="gpt2block",
            dtypes=("float32",),
            launch=_launch_online,
            problem=_online_problem,
        ),
        Variant(
            "mma",
            MMA,
            ("attention_mma",),
            "tensor cores (mma.sync), 16 or 32 queries per warp: scores stay in registers, a ring "
            "of tiles of K and V by cp.async; ragged batches",
            block=MMA_THREADS,
            source="gpt2block",
            dtypes=SIXTEEN_BITS,
            launch=_launch_mma,
            problem=_mma_problem,
        ),
        Variant(
            "hopper",
            HOPPER,
            ("attention_hopper",),
            "tensor cores (wgmma), 64 queries per warpgroup: one warp copies K and V (TMA), the "
            "softmax overlaps the products, each block processes many tiles; ragged batches",
            block=HOPPER_THREADS[TENSOR_HEAD],
            source="gpt2block",
            dtypes=SIXTEEN_BITS,
            launch=_launch_hopper,
            problem=_hopper_problem,
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
            MMA_TWO_PART,
            ("attention_fp32_mma",),
            "float32 accuracy on tensor cores: each float32 matrix as two in float16, three "
            "products instead of one",
            source="Ootomo and Yokota (2022), for two-part matrices",
            launch=_launch_mma,
            problem=_mma_problem,
        ),
    ),
    shape=_shape,
    largest=lambda qkv, *_: qkv,  # the result is a weighted mean of rows of V
    check_limits=check_limits,
    binder=bind,
)


def attention(
    qkv: CudaArray | TwoPartMatrix,
    n_head: int,
    causal: bool = False,
    variant: str | None = None,
    block: int | None = None,
    cu_seqlens: CudaArray | None = None,
    max_seqlen: int | None = None,
    n_kv_head: int | None = None,
) -> Any:
    """`reference.attention` on a CuPy array (T, 3C) or (B, T, 3C); raises InputError.

    With n_kv_head, a divisor of n_head, a row is [Q | K | V] of n_head, n_kv_head and n_kv_head
    heads: each head of K and V serves n_head / n_kv_head neighbouring heads of Q.

    float32: variants mha (the default), naive and online. mha takes a T that the GPU's opt-in
    shared memory limits, about 57,000 on an H200. naive stores B · n_head · T² scores in device
    memory. online takes any T; its block sizes are 32 threads for every 32 queries (16 where a head
    has more than 64 channels, 8 where it has more than 128). Only naive takes heads of more than
    256 channels.

    float16 and bfloat16, with heads of 64 or 128 channels: variant mma and, on GPUs of compute
    capability 9.0, hopper, which is then the default. Both run on tensor cores: sums and the
    softmax are float32, the softmax's weights are rounded to the dtype of qkv before they
    are multiplied, and the result has that dtype. They support any T. The bits of a row's result
    depend only on its own sequence.

    With cu_seqlens, int32 (B + 1,), qkv of 16 bits or two-part is (N, 3C): the rows of B sequences,
    one after another. Sequence b starts at row cu_seqlens[b], ends before row cu_seqlens[b + 1] and
    has at most max_seqlen rows. The numbers are not checked: they must not decrease or exceed N.
    Rows outside all sequences are not written.

    A TwoPartMatrix with heads of 64 or 128 channels, on the same GPUs as mma: the result has the
    accuracy of float32 and is a TwoPartMatrix. A row's scale is the largest of the rows that it
    sees.

    Sources: Dao et al., "FlashAttention" (2022); Dao, "FlashAttention-2" (2023); for hopper Shah et
    al., "FlashAttention-3" (2024); for two-part matrices Ootomo and Yokota (2022), see `gemm`; for
    grouped queries Ainslie et al., "GQA" (2023).
    """
    inputs = on_16_bytes("qkv", qkv), cu_seqlens
    options = {"n_head": n_head, "causal": causal, "variant": variant, "block": block}
    options |= {"n_kv_head": n_kv_head}
    return call(_bind_packed, inputs, **options, max_seqlen=max_seqlen).out


def _bind_packed(inputs: tuple[Any, ...], out: CudaArray | None = None, **options: Any) -> Bound:
    """`bind` with cu_seqlens among the inputs, so that `call` can replace its address."""
    qkv, cu_seqlens = inputs
    return bind((qkv,), out, cu_seqlens=cu_seqlens, **options)
