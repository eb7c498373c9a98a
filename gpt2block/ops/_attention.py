"""Attention on CUDA: kernels_cu/attention.cu, attention_forward.cu, attention_online.cu."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import cupy

from gpt2block.errors import InputError
from gpt2block.kernels import load
from gpt2block.operations._types import Geometry, Variant, check_block
from gpt2block.operations.attention import OPERATION, geometry
from gpt2block.ops._arrays import (
    Bound,
    CudaArray,
    Shape,
    check,
    contiguous,
    device_attribute,
    launch_at,
    output,
)
from gpt2block.ops._warm import call

MAX_BATCH = 65535


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    n_head: int,
    causal: bool,
    variant: str = "mha",
    block: int | None = None,
) -> Bound:
    """inputs (qkv (T, 3C) or (B, T, 3C),), out (T, C) or (B, T, C); extra: naive's scores."""
    (qkv,) = inputs
    chosen = OPERATION.variant(variant)
    if block is not None:
        check_block(OPERATION.name, chosen, block)
    check("qkv", qkv)
    if isinstance(n_head, bool) or not isinstance(n_head, Integral) or n_head < 1:
        raise InputError(f"n_head: expected a number of heads, got {n_head!r}")
    n_head = int(n_head)
    if qkv.ndim not in (2, 3) or qkv.shape[-1] % (3 * n_head):
        raise InputError(
            f"qkv: expected (T, 3C) or (B, T, 3C) with C a multiple of n_head {n_head}, "
            f"got {qkv.shape}"
        )
    _check_aligned("qkv", qkv)
    where = _launches(chosen, qkv.shape, n_head, causal, block)
    if variant == "mha":
        check_limits(qkv.shape, n_head=n_head, causal=causal)
    *batch, T, three_c = qkv.shape
    B, C = batch[0] if batch else 1, three_c // 3
    out = output(out, (*batch, T, C))
    if variant == "naive":
        return _bind_naive(qkv, out, (B, n_head, T, T), where, int(bool(causal)))
    (only,) = where
    args: tuple[Any, ...] = (qkv, out, T)
    if variant == "online":
        _check_aligned("out", out)
        args = (*args, int(bool(causal)))
    return Bound(out, (launch_at(chosen.file, only, args),))


def _check_aligned(name: str, array: CudaArray) -> None:
    if array.data.ptr % 16:
        raise InputError(f"{name}: expected data aligned to 16 bytes: pass a copy, {name}.copy()")


def _launches(
    variant: Variant, qkv: Shape, n_head: int, causal: bool, block: int | None = None
) -> tuple[Geometry, ...]:
    *batch, T, three_c = qkv
    limit = device_attribute("MaxSharedMemoryPerBlockOptin")
    sizes = (batch[0] if batch else 1, T, n_head, three_c // 3 // n_head)
    return geometry(variant, *sizes, bool(causal), block, limit)


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
    qkv: CudaArray,
    n_head: int,
    causal: bool = False,
    variant: str = "mha",
    block: int | None = None,
) -> CudaArray:
    """`reference.attention` on a float32 CuPy array (T, 3C) or (B, T, 3C); raises InputError.

    mha: T is limited by the GPU's opt-in shared memory, about 57,000 on an H200. naive: by device
    memory, as it stores B · n_head · T² scores. online: any T, with tiles of K and V and the online
    softmax; its block sizes are 32 threads for every 32 queries (16 where a head has more than 64
    channels, 8 with more than 128). Heads of more than 256 channels are for naive alone.

    Source of online: Dao et al., "FlashAttention" (2022).
    """
    if isinstance(qkv, cupy.ndarray) and qkv.data.ptr % 16:
        qkv = qkv.copy()
    options = {"n_head": n_head, "causal": causal, "variant": variant, "block": block}
    return call(bind, contiguous(qkv), **options).out
