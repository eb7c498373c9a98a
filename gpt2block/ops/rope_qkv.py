"""RoPE of packed rows [Q | K | V], with a position for each row.

`rope_qkv` (positions/rope_qkv.cu) returns the rows with Q and K rotated, in place if requested.
`rope_append` (positions/rope_append.cu), for decoding, returns Q and writes K and V to a kv_cache.
`rope_packed` is `rope_qkv` with separate frequencies (B, P) for each sequence; the argument row has
the sequence number of each row. `rope_append` and `rotations` take such frequencies, too.
"""

from __future__ import annotations

from math import ceil, gcd

import numpy as np

from gpt2block.cuda.arrays import CudaArray, alignment, contiguous, multiprocessors, same_memory
from gpt2block.cuda.kernels import Defines, Geometry, Launch, float_define, launch_at
from gpt2block.errors import InputError
from gpt2block.ops.attention import checked_heads
from gpt2block.ops.call import Call
from gpt2block.ops.engines.epilogues import growth_defines
from gpt2block.ops.operation import REQUIRED, Inputs, Operation, Sizes, Workload, variant
from gpt2block.ops.rope import MAX_BATCH, choose_geometry
from gpt2block.ops.warm import call

FILE = "positions/rope_qkv.cu"
APPEND = "positions/rope_append.cu"
ROTATIONS = "positions/rotations.cu"
ROTATION_THREADS = 128
HEADS = {"n_head": 32, "n_kv_head": 8}  # heads in the documented case
CHANNELS = 48  # heads of Q, K and V per row in the documented case


def _geometry(c: Call, kernel: str, B: int, T: int, heads: int, aligned: int) -> Geometry:
    """Return a kernel's geometry. `aligned`: alignment in elements of the start of all arrays."""
    D = 2 * c.P
    width = gcd(aligned, D // 2 if c.half_split else D)
    sms = multiprocessors()
    geometry = choose_geometry(B, T, heads, D, c.half_split, width, sms)._replace(kernel=kernel)
    return geometry.with_defines((*_factor_define(c), *growth_defines(c.growth)))


def _factor_define(c: Call) -> Defines:
    """Return the compile-time constant with RoPE's factor for rotated pairs, or () if it is 1."""
    return float_define("ROPE_FACTOR", c.factor, 1.0)


@variant("rows", FILE, "rope_qkv")
def _rows(c: Call) -> Launch:
    """Launch rope_qkv for rows of n_head + 2 n_kv_head heads. The host does not check positions."""
    return _over_rows(c, "rope_qkv", c.rows, c.T)


@variant("packed", FILE, "rope_packed")
def _packed(c: Call) -> Launch:
    """Launch rope_packed. The host does not check values of `row` and `positions`."""
    return _over_rows(c, "rope_packed", 1, c.N, c.row)


def _over_rows(c: Call, kernel: str, B: int, T: int, *row: CudaArray) -> Launch:
    """Launch a kernel on rows of qkv. `row`: sequence of each row, if frequencies are (B, P)."""
    n_head, n_kv_head = checked_heads(c.n_head, c.n_kv_head)
    D, rotated, heads = 2 * c.P, n_head + n_kv_head, n_head + 2 * n_kv_head
    if c.qkv.ndim > 3 or heads * D != c.W:
        raise InputError(
            f"qkv: expected (T, {heads * D}) or (B, T, {heads * D}), {heads} heads of {D} channels "
            f"for {c.P} frequencies, got {c.qkv.shape}"
        )
    if B > MAX_BATCH:
        raise InputError(f"qkv: expected at most {MAX_BATCH:,} sequences in a call, got {B:,}")
    out = c.output("out")
    moved = rotated if same_memory(c.qkv, out) else heads
    aligned = alignment(c.qkv.data.ptr, out.data.ptr) // c.qkv.itemsize
    geometry = _geometry(c, kernel, B, T, moved, aligned)
    geometry = geometry.with_defines((("ROPE_QUERIES", n_head),) if c.growth else ())
    arrays, sequences = (c.qkv, c.positions, c.frequencies, *row, out), (c.B,) if row else ()
    args = (*arrays, T, rotated, moved, heads, *sequences)
    return launch_at(FILE, geometry, args, c.storage)


@variant("append", APPEND, "rope_append")
def _append(c: Call) -> Launch:
    """Launch rope_append for C = n_kv_head D channels of K and W = n_head D + 2C of qkv.

    row and position are not read back to the host: the kernel skips K and V outside the cache.
    """
    _check_own(c, (c.B,) if c.leading else ())
    n_head, n_kv_head = heads_to_append(c)
    of_cache = alignment(c.k.data.ptr, c.v.data.ptr) // c.k.itemsize
    aligned = min(4, alignment(c.qkv.data.ptr, c.output("out").data.ptr) // 4, of_cache)
    geometry = _geometry(c, "rope_append", 1, c.N, n_head + 2 * n_kv_head, aligned)
    geometry = geometry.with_defines((("ROPE_OWN", 1),) if c.leading else ())
    arrays = (c.qkv, c.row, c.position, c.frequencies, c.k, c.v, c.out)
    args = (*arrays, c.N, n_head, n_kv_head, c.B, c.S)
    T = "float32" if c.fp8_cache else c.kv_storage
    return launch_at(APPEND, geometry, args, T, cache=c.fp8_cache)


def heads_to_append(c: Call) -> tuple[int, int]:
    """Return n_head and n_kv_head for rows qkv with heads of 2P channels, and for a kv_cache k, v.

    Raises InputError if the rows or the kv_cache have other sizes.
    """
    D = 2 * c.P
    if c.C % D:
        raise InputError(
            f"k: expected (B, n_ctx, C), C a multiple of {D} channels, got {c.k.shape}"
        )
    n_head, n_kv_head = checked_heads(c.n_head, c.C // D)
    width = (n_head + 2 * n_kv_head) * D
    if width != c.W:
        raise InputError(
            f"qkv: expected (N, {width}), {n_head} heads of {D} channels and twice the {c.C} "
            f"of k, got {c.qkv.shape}"
        )
    return n_head, n_kv_head


@variant("rotations", ROTATIONS, "rope_rotations", "rope_rotations_packed")
def _rotations(c: Call) -> Launch:
    """Launch rope_rotations, or with `row` rope_rotations_packed, whose frequencies are (B, P)."""
    shared = c.row is None
    B = () if shared else c.leading[:1] or ("B",)
    _check_own(c, B)
    kernel, row = ("rope_rotations", ()) if shared else ("rope_rotations_packed", (c.row,))
    args = (c.position, c.frequencies, *row, c.output("out"))
    grid = (ceil(c.N * c.P / ROTATION_THREADS),)
    geometry = Geometry(kernel, grid, (ROTATION_THREADS,), defines=_factor_define(c))
    return launch_at(ROTATIONS, geometry, (*args, c.N, c.P, *B))


def _check_own(c: Call, B: tuple[int | str, ...]) -> None:
    """Raise InputError unless frequencies have shape (*B, P). B: () if all sequences share them."""
    if c.leading != B:
        expected = f"({B[0]}, {c.P})" if B else f"({c.P},)"
        raise InputError(f"frequencies: expected shape {expected}, got {c.frequencies.shape}")


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    T, D = sizes["T"], sizes["D"]
    qkv = rng.standard_normal((T, CHANNELS * D), dtype=np.float32) + np.float32(0.5)
    positions = rng.integers(0, 8192, T, dtype=np.int32)
    return qkv, positions, 10000.0 ** (-np.arange(0, D, 2) / D)


_FACTORS = {"half_split": False, "factor": 1.0, "growth": None}
ROPE_APPEND = Operation(
    name="rope_append",
    variants=(_append,),
    options={"n_head": REQUIRED, **_FACTORS, "kv_dtype": None},
)
ROTATE = Operation(name="rotations", variants=(_rotations,), options={"factor": 1.0})
_TURN = {"n_head": REQUIRED, "n_kv_head": REQUIRED, **_FACTORS}
ROPE_PACKED = Operation(name="rope_packed", variants=(_packed,), options=_TURN)

OPERATION = Operation(
    name="rope_qkv",
    variants=(_rows,),
    options=_TURN,
    steps=(ROPE_APPEND, ROTATE, ROPE_PACKED),
    workload=Workload(
        idea="rope of Q and K in rows [Q | K | V], each row at a position of its own",
        sizes={"T": 16, "D": 128},
        draw=_make,
        traffic=lambda s: 2 * s["itemsize"] * s["T"] * CHANNELS * s["D"],
        flops=lambda s: 3 * s["T"] * CHANNELS * s["D"],
        attrs=HEADS,
        small=({"T": 5, "D": 8},),
        dtypes=("float16", "bfloat16", "float32"),
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
    factor: float = 1.0,
    growth: tuple[float, int] | None = None,
) -> CudaArray:
    """Compute `reference.rope_qkv` on CuPy arrays. Raises InputError.

    qkv (T, W) or (B, T, W), W = (n_head + 2 n_kv_head) D, float32, float16 or bfloat16; positions
    (T,) int32; frequencies (D / 2,) float64 → as qkv. `out=qkv` overwrites qkv.
    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
    """
    arrays = (*(contiguous(qkv) if out is not qkv else (qkv,)), *contiguous(positions, frequencies))
    heads = {"n_head": n_head, "n_kv_head": n_kv_head, "half_split": half_split}
    return call(OPERATION, arrays, out, **heads, factor=factor, growth=growth).out


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
    factor: float = 1.0,
    growth: tuple[float, int] | None = None,
) -> CudaArray:
    """Compute `reference.rope_append` on CuPy arrays: return rotated Q, write K and V to the cache.

    qkv (N, W) float32, frequencies (D / 2,) or per sequence (B, D / 2) float64, k and v
    (B, n_ctx, C) float32, float16, bfloat16 or, as uint8, the FP8 format kv_dtype, row and position
    (N,) int32 → (N, n_head D) float32. Two rows must not have the same destination. Raises
    InputError.
    """
    qkv, frequencies, row, position = contiguous(qkv, frequencies, row, position)
    inputs = (qkv, frequencies, k, v, row, position)
    turn = {"half_split": half_split, "factor": factor, "growth": growth}
    return ROPE_APPEND.bind_on_device(inputs, n_head=n_head, kv_dtype=kv_dtype, **turn).run()
