"""RoPE of packed rows [Q | K | V], with a position for each row.

`rope_qkv` (llama/rope_qkv.cu) returns the rows with Q and K turned, in place if requested;
`rope_append` (llama/rope_append.cu), for decoding, returns Q and writes K and V to a kv_cache.
"""

from __future__ import annotations

import math
from math import gcd
from typing import Any

import numpy as np

from gpt2block.checks import check_flag, check_integer
from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    alignment,
    check,
    check_apart,
    contiguous,
    device_attribute,
    launch_at,
    output,
    same_memory,
    storage,
)
from gpt2block.cuda.kernels import Geometry
from gpt2block.errors import InputError
from gpt2block.ops._kv_cache import check_cache
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant
from gpt2block.ops.rope import MAX_BATCH, choose_geometry
from gpt2block.ops.warm import call

FILE = "llama/rope_qkv.cu"
APPEND = "llama/rope_append.cu"
ROTATIONS = "llama/rotations.cu"
ROTATION_THREADS = 128
HEADS = {"n_head": 32, "n_kv_head": 8}  # of the documented sizes
CHANNELS = 48  # heads of a row of them


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    n_head: int,
    n_kv_head: int,
    half_split: bool = False,
) -> Bound:
    """inputs (qkv (T, W) or (B, T, W), positions (T,), frequencies (D / 2,)), out as qkv, or qkv.

    W is (n_head + 2 n_kv_head) D. positions are int32 and not read back, frequencies float64.
    """
    qkv, positions, frequencies = inputs
    dtype = storage(qkv)
    check("qkv", qkv, dtype=dtype)
    D = _check_frequencies(frequencies)
    turning, heads = _heads(n_head, n_kv_head)
    if qkv.ndim not in (2, 3) or qkv.shape[-1] != heads * D:
        raise InputError(
            f"qkv: expected (T, {heads * D}) or (B, T, {heads * D}), {heads} heads of {D} channels "
            f"as frequencies has {D // 2}, got {qkv.shape}"
        )
    B, T = (1, *qkv.shape)[-3:-1]
    if B > MAX_BATCH:
        raise InputError(f"qkv: expected at most {MAX_BATCH:,} sequences in a call, got {B:,}")
    check("positions", positions, (T,), "int32")
    apart = {"positions": positions, "frequencies": frequencies}
    out = output(out, qkv.shape, dtype, apart=apart, in_place={"qkv": qkv})
    return _launch((qkv, positions, frequencies), out, turning, heads, half_split)


def _launch(
    inputs: tuple[CudaArray, ...], out: CudaArray, turning: int, heads: int, half_split: bool
) -> Bound:
    qkv, positions, frequencies = inputs
    B, T = (1, *qkv.shape)[-3:-1]
    moved = turning if same_memory(qkv, out) else heads
    aligned = alignment(qkv.data.ptr, out.data.ptr) // qkv.itemsize
    geometry = _geometry("rope_qkv", B, T, moved, 2 * len(frequencies), half_split, aligned)
    args = (qkv, positions, frequencies, out, T, turning, moved, heads)
    return Bound(out, (launch_at(FILE, geometry, args, storage(qkv)),))


def bind_append(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    n_head: int,
    half_split: bool = False,
    kv_dtype: str | None = None,
) -> Bound:
    """inputs (qkv (N, W), frequencies (D / 2,), k, v (B, n_ctx, C), row, position (N,)).

    out (N, Q); C is n_kv_head D, Q is n_head D, W is Q + 2C. qkv and out are float32, k and v have
    any float dtype or are uint8, of the FP8 format kv_dtype. row and position are int32 and not
    read back: K and V of rows outside the cache are left out.
    """
    qkv, frequencies, k, v, row, position = inputs
    check("qkv", qkv)
    D = _check_frequencies(frequencies)
    n_kv_head = check_heads(D, k, v, kv_dtype)
    _, heads = _heads(n_head, n_kv_head)
    if qkv.ndim != 2 or qkv.shape[1] != heads * D:
        raise InputError(
            f"qkv: expected (N, {heads * D}), {n_head} heads of {D} channels and twice the "
            f"{n_kv_head * D} of k, got {qkv.shape}"
        )
    N, (B, n_ctx, _) = len(qkv), k.shape
    check("row", row, (N,), "int32")
    check("position", position, (N,), "int32")
    apart = {"qkv": qkv, "frequencies": frequencies, "row": row, "position": position}
    for name, cache in (("k", k), ("v", v)):
        check_apart(name, cache, apart)
    out = output(out, (N, n_head * D), apart={**apart, "k": k, "v": v})
    of_cache = alignment(k.data.ptr, v.data.ptr) // k.itemsize
    aligned = min(4, alignment(qkv.data.ptr, out.data.ptr) // 4, of_cache)
    geometry = _geometry("rope_append", 1, N, heads, D, half_split, aligned)
    args = (qkv, row, position, frequencies, k, v, out, N, n_head, n_kv_head, B, n_ctx)
    T = "float32" if kv_dtype else storage(k)
    return Bound(out, (launch_at(APPEND, geometry, args, T, cache=kv_dtype),), (k, v))


def bind_rotations(inputs: tuple[Any, ...], out: CudaArray | None = None) -> Bound:
    """inputs (position (N,) int32, frequencies (D / 2,) float64), out (N, D / 2, 2) float32."""
    position, frequencies = inputs
    pairs = _check_frequencies(frequencies) // 2
    check("position", position, dtype="int32")
    if position.ndim != 1:
        raise InputError(f"position: expected (N,), got {position.shape}")
    N = len(position)
    apart = {"position": position, "frequencies": frequencies}
    out = output(out, (N, pairs, 2), apart=apart)
    grid = (math.ceil(N * pairs / ROTATION_THREADS),)
    geometry = Geometry("rope_rotations", grid, (ROTATION_THREADS,))
    return Bound(out, (launch_at(ROTATIONS, geometry, (position, frequencies, out, N, pairs)),))


def check_heads(D: int, k: Any, v: Any, kv_dtype: str | None) -> int:
    """Check a kv_cache, k and v (B, n_ctx, C), of heads of D channels: their number."""
    _, _, _, C = check_cache(k, v, kv_dtype)
    if C % D:
        raise InputError(f"k: expected (B, n_ctx, C), C a multiple of {D} channels, got {k.shape}")
    check_apart("v", v, {"k": k})
    return C // D


def _check_frequencies(frequencies: Any) -> int:
    """The channels of a head."""
    check("frequencies", frequencies, dtype="float64")
    if frequencies.ndim != 1:
        raise InputError(f"frequencies: expected (D / 2,), got {frequencies.shape}")
    return 2 * len(frequencies)


def _heads(n_head: Any, n_kv_head: Any) -> tuple[int, int]:
    """The heads of Q and K, and those of a row."""
    n_head = check_integer("n_head", n_head, 1, math.inf, "a number of heads")
    expected = f"a divisor of n_head {n_head}"
    n_kv_head = check_integer("n_kv_head", n_kv_head, 1, n_head, expected)
    if n_head % n_kv_head:
        raise InputError(f"n_kv_head: expected {expected}, got {n_kv_head}")
    return n_head + n_kv_head, n_head + 2 * n_kv_head


def _geometry(
    kernel: str, B: int, T: int, heads: int, D: int, half_split: bool, aligned: int
) -> Geometry:
    """aligned: elements that the first of every array is aligned to."""
    half_split = check_flag("half_split", half_split)
    width = gcd(aligned, D // 2 if half_split else D)
    sms = device_attribute("MultiProcessorCount")
    return choose_geometry(B, T, heads, D, half_split, width, sms)._replace(kernel=kernel)


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    T, D = sizes["T"], sizes["D"]
    qkv = rng.standard_normal((T, CHANNELS * D), dtype=np.float32) + np.float32(0.5)
    positions = rng.integers(0, 8192, T, dtype=np.int32)
    return qkv, positions, 10000.0 ** (-np.arange(0, D, 2) / D)


OPERATION = Operation(
    name="rope_qkv",
    document="gpt2block",
    idea="rope of Q and K in rows [Q | K | V], each row at a position of its own",
    sizes={"T": 16, "D": 128},
    variants=(
        Variant(
            "rows",
            FILE,
            ("rope_qkv",),
            "as `rope`, with positions and frequencies in device memory; overlapping launches",
            launch=_launch,
        ),
    ),
    make=_make,
    traffic=lambda s: 2 * s["itemsize"] * s["T"] * CHANNELS * s["D"],
    flops=lambda s: 3 * s["T"] * CHANNELS * s["D"],
    bound="memory",
    attrs=HEADS,
    dtypes=("float16", "bfloat16", "float32"),
    binder=bind,
    auxiliary=(
        Variant(
            "append",
            APPEND,
            ("rope_append",),
            "decoding: the same, with K and V written to the kv_cache in its dtype",
        ),
        Variant(
            "rotations",
            ROTATIONS,
            ("rope_rotations",),
            "decoding: cosines and sines, once for all layers",
        ),
    ),
)


def rope_qkv(
    qkv: CudaArray,
    positions: CudaArray,
    frequencies: CudaArray,
    n_head: int,
    n_kv_head: int,
    half_split: bool = False,
    out: CudaArray | None = None,
) -> CudaArray:
    """`reference.rope_qkv` on CuPy arrays; raises InputError.

    qkv (T, W) or (B, T, W), W = (n_head + 2 n_kv_head) D, float32, float16 or bfloat16; positions
    (T,) int32; frequencies (D / 2,) float64 → as qkv. `out=qkv` overwrites qkv.
    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
    """
    arrays = (*(contiguous(qkv) if out is not qkv else (qkv,)), *contiguous(positions, frequencies))
    heads = {"n_head": n_head, "n_kv_head": n_kv_head, "half_split": half_split}
    return call(bind, arrays, out, **heads).out


def rope_append(
    qkv: CudaArray,
    frequencies: CudaArray,
    k: CudaArray,
    v: CudaArray,
    row: CudaArray,
    position: CudaArray,
    n_head: int,
    half_split: bool = False,
    kv_dtype: str | None = None,
) -> CudaArray:
    """`reference.rope_append` on CuPy arrays: Q turned, and K and V in the kv_cache.

    qkv (N, W) float32, frequencies (D / 2,) float64, k and v (B, n_ctx, C) float32, float16,
    bfloat16 or, as uint8, the FP8 format kv_dtype, row and position (N,) int32 → (N, n_head D)
    float32; see `bind_append`. Two rows must not have the same destination. Raises InputError.
    """
    qkv, frequencies, row, position = contiguous(qkv, frequencies, row, position)
    inputs = (qkv, frequencies, k, v, row, position)
    return bind_append(inputs, n_head=n_head, half_split=half_split, kv_dtype=kv_dtype).run()
