"""Attention on CUDA.

float32: attention/skeleton.cu, attention/ladder.cu, attention/online.cu. float16 and bfloat16:
attention/mma.cu and attention/hopper.cu. Split matrices: attention/mma_two_part.cu.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, NamedTuple

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
from gpt2block.cuda.kernels import Launch, load
from gpt2block.cuda.tensor_maps import tensor_map
from gpt2block.errors import InputError
from gpt2block.operations._tensor_cores import HOPPER_CAPABILITY, MMA_CAPABILITY
from gpt2block.operations._types import Geometry, Variant, check_block
from gpt2block.operations.attention import (
    HOPPER_TILE,
    MMA_FP32,
    OPERATION,
    SIXTEEN_BITS,
    TENSOR_CORES,
    TENSOR_HEAD,
    geometry,
    hopper_geometry,
    mma_fp32_geometry,
    mma_geometry,
)
from gpt2block.ops._split import check_split
from gpt2block.ops._warm import call
from gpt2block.weights.two_part import SplitMatrix

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
