"""Attention on CUDA: kernels_cu/attention.cu."""

from __future__ import annotations

from typing import Any

import cupy

from gpt2block.errors import InputError
from gpt2block.kernels import Defines, launch, load
from gpt2block.ops._arrays import (
    Bound,
    CudaArray,
    Shape,
    check,
    contiguous,
    device_attribute,
    output,
)

FILE = "attention.cu"
BLOCK = 256
MAX_BATCH = 65535


def bind(
    inputs: tuple[Any, ...], out: CudaArray | None = None, *, n_head: int, causal: bool
) -> Bound:
    """inputs (qkv (T, 3C) or (B, T, 3C),), out (T, C) or (B, T, C)."""
    (qkv,) = inputs
    check("qkv", qkv)
    if qkv.ndim not in (2, 3) or qkv.shape[-1] % (3 * n_head):
        raise InputError(
            f"qkv: expected (T, 3C) or (B, T, 3C) with C a multiple of n_head {n_head}, "
            f"got {qkv.shape}"
        )
    *batch, T, three_c = qkv.shape
    head_size = three_c // 3 // n_head
    if head_size > BLOCK:
        raise InputError(f"head size {head_size}: the kernel takes at most {BLOCK}")
    if qkv.data.ptr % 16:
        raise InputError("qkv: expected data aligned to 16 bytes: pass a copy, qkv.copy()")
    check_limits(qkv.shape, n_head=n_head, causal=causal)
    out = output(out, (*batch, T, three_c // 3))

    name, defines = _kernel(n_head, head_size, causal)
    grid = (T, n_head, batch[0] if batch else 1)
    scores = 4 * T
    return Bound(
        out,
        (launch(FILE, name, grid, (BLOCK,), (qkv, out, T), shared=scores, defines=defines),),
    )


def _kernel(n_head: int, head_size: int, causal: bool) -> tuple[str, Defines]:
    name = "mha_causal_kernel" if causal else "mha_nocausal_kernel"
    return name, (("NH", n_head), ("HS", head_size))


def check_limits(qkv: Shape, *, n_head: int, causal: bool) -> None:
    """InputError when B passes the grid's third axis, or T a row of scores in shared memory."""
    *batch, T, three_c = qkv
    if batch and batch[0] > MAX_BATCH:
        raise InputError(f"B {batch[0]:,}: a batch can have at most {MAX_BATCH:,} sequences")
    static = load(FILE, *_kernel(n_head, three_c // 3 // n_head, causal)).shared_size_bytes
    limit = device_attribute("MaxSharedMemoryPerBlockOptin") - static
    if limit < 4 * T:
        raise InputError(
            f"T {T:,}: a row of scores takes {4 * T:,} bytes of shared memory, this GPU has "
            f"{limit:,} for it: T can be at most {limit // 4:,}"
        )


def attention(qkv: CudaArray, n_head: int, causal: bool = False) -> CudaArray:
    """`reference.attention` on a float32 CuPy array; raises InputError.

    T is limited by the GPU's opt-in shared memory: about 57,000 on an H200.
    """
    if isinstance(qkv, cupy.ndarray) and qkv.data.ptr % 16:
        qkv = qkv.copy()
    return bind(contiguous(qkv), n_head=n_head, causal=causal).run()
