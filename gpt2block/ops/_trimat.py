"""The causal half of attention's scores on CUDA: ladder.cu, pipelined.cu, mma.cu of trimat."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    check,
    compute_capability,
    device_attribute,
    launch_at,
    on_16_bytes,
    output,
)
from gpt2block.errors import InputError
from gpt2block.operations._tensor_cores import MMA_CAPABILITY
from gpt2block.operations._types import check_block
from gpt2block.operations.trimat import (
    FILE,
    MMA_LARGEST_HEAD,
    OPERATION,
    fill_geometry,
    geometry,
    mma_geometry,
)
from gpt2block.ops._warm import call

MAX_HEADS = 65535  # an axis of the grid


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    fill: float | None = None,
    variant: str | None = None,
    block: int | None = None,
) -> Bound:
    """inputs (qkv (B, T, 3, NH, HS),), out (B, NH, T, T). variant None: as `trimat`."""
    (qkv,) = inputs
    if variant is None:
        variant = "tri5" if _not_on_tensor_cores(qkv) else "tri6"
    chosen = OPERATION.variant(variant)
    threads = check_block(OPERATION.name, chosen, block)
    value = _checked_fill(fill)
    check("qkv", qkv)
    if qkv.ndim != 5 or qkv.shape[2] != 3:
        raise InputError(f"qkv: expected (B, T, 3, NH, HS), got {qkv.shape}")
    B, T, _, NH, HS = qkv.shape
    if HS % 4:
        raise InputError(
            f"qkv: head size {HS}: expected a multiple of 4, as rows are read 16 bytes at a time"
        )
    if chosen.name == "tri6" and (problem := _not_on_tensor_cores(qkv)):
        raise InputError(f"variant tri6: {problem}: use variant tri5")
    if B * NH > MAX_HEADS:
        raise InputError(f"B · NH {B * NH:,}: expected at most {MAX_HEADS:,} heads in a call")
    out = output(out, (B, NH, T, T), apart={"qkv": qkv})
    for name, array in (("qkv", qkv), ("out", out)):
        if array.data.ptr % 16:
            raise InputError(f"{name}: expected data aligned to 16 bytes: pass a copy, .copy()")

    if chosen.name == "tri6":
        where, more = mma_geometry(
            B,
            T,
            NH,
            HS,
            sms=device_attribute("MultiProcessorCount"),
            most_shared=device_attribute("MaxSharedMemoryPerBlockOptin"),
        )
        launches = [launch_at(chosen.file, where, (qkv, out, T, *more))]
    else:
        where = geometry(chosen, B, T, NH, HS, threads)
        launches = [launch_at(chosen.file, where, (qkv, out, T))]
    if value is not None and T > 1:
        args = (out, T, B * NH * T, value)
        launches.append(launch_at(FILE, fill_geometry(B, T, NH, HS), args))
    return Bound(out, tuple(launches))


def _not_on_tensor_cores(qkv: Any) -> str | None:
    """Why tri6 cannot run; None: it can, or qkv is nothing that any variant takes."""
    if isinstance(qkv, cupy.ndarray) and qkv.ndim and qkv.shape[-1] > MMA_LARGEST_HEAD:
        return f"takes heads of up to {MMA_LARGEST_HEAD} channels, got {qkv.shape[-1]}"
    if compute_capability() < MMA_CAPABILITY:
        return "needs a GPU of compute capability 8.0 or newer"
    return None


def _checked_fill(fill: Any) -> float | None:
    """A number that float32 holds, or None."""
    if fill is None:
        return None
    number = isinstance(fill, (int, float, np.floating)) and not isinstance(fill, bool)
    if not number or float(np.finfo(np.float32).max) < abs(fill) != math.inf:
        raise InputError(
            f"fill: expected None or a float32 number such as 0.0, -inf or nan, got {fill!r}"
        )
    return float(fill)


def trimat(
    qkv: CudaArray,
    fill: float | None = None,
    variant: str | None = None,
    block: int | None = None,
) -> CudaArray:
    """`reference.trimat` on a float32 CuPy array; raises InputError.

    The default variant is tri6 where the GPU has what it needs, compute capability 8.0, and heads
    have at most 128 channels, else tri5. tri6 runs on tensor cores and is at least as accurate as
    the others, which add up in float32: it splits each value into two of float16, with a scale for
    each row. A value keeps 22 bits, counted from the largest of its row. Source: Ootomo and Yokota,
    "Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical
    peak performance" (2022).

    With `fill` None what stands above the diagonal is whatever was in the new array's memory, or
    computed values: up to the end of the 8×8 tile that the diagonal crosses (naive, registers,
    tri3), of the 128×128 tile (tri4), or of the diagonal's group of four (tri5 and tri6, and there
    only when T is a multiple of 4). HS must be a multiple of 4, and B · NH at most 65,535.
    """
    qkv = on_16_bytes("qkv", qkv)
    return call(bind, (qkv,), fill=fill, variant=variant, block=block).out
