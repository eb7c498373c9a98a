"""The linear layer of GPT-2: its variants, and the launches of the kernels for few rows."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, gcd, prod
from typing import Any, NamedTuple

import numpy as np

from gpt2block.checks import check_flag
from gpt2block.config import check_eps
from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    check,
    check_apart,
    contiguous,
    device_attribute,
    launch_at,
    output,
)
from gpt2block.cuda.kernels import FP8, Geometry
from gpt2block.errors import InputError
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant
from gpt2block.ops.warm import call
from gpt2block.weights.matrix import WeightMatrix

FILE = "matmul/decode.cu"
WARP = 32
MANY_COLUMNS = 16384  # from here on a block goes through several groups of columns
PART = 256  # of K, a warp's
MOST_STEPS = 3  # loads of a column in flight
MOST_WARPS = 12  # that share K
PREFERRED_WARPS = (6, 12), (12, 18)  # of a block, fewest and most: for few rows, for more
MORE_ROWS = 4
FEW_ROWS = 16  # up to here this is the default variant
MOST_ROWS = 8, 16  # of x that a block takes; with MANY_COLUMNS
MOST_LOADED = 12  # vectors that a thread waits for
HELD = 32  # values of a row alone that a thread can keep in registers
ROW_BYTES = 103_000  # of x in shared memory, with several rows
COLUMNS = (1, 2, 3, 4, 5, 6)  # that a group can have
BEST_COLUMNS = 6
FEWEST = 4, 12  # columns of a block: fewer are done no sooner; for few rows, for more
EACH_BLOCK = 4  # columns that could be done while a block brings x


def _make(s: Sizes, rng: np.random.Generator) -> Inputs:
    x = rng.standard_normal((s["M"], s["K"]), dtype=np.float32)
    w = rng.standard_normal((s["K"], s["N"]), dtype=np.float32) / np.float32(s["K"] ** 0.5)
    return x, w, rng.standard_normal(s["N"], dtype=np.float32)


class Layout(NamedTuple):
    """How a product is cut. Results depend on the first three alone, the rest is speed."""

    width: int  # weights of a load
    split: int  # warps that share K
    steps: int  # loads of a column in flight
    columns: int  # of a group
    groups: int  # of a block
    loop: bool  # blocks go on with other columns
    blocks: int  # that an SM should have room for
    rows: int  # of a block


def order(N: int, K: int, weight: int) -> tuple[int, int, int]:
    """What fixes the order of an output's additions: width, split and steps of its Layout.

    weight: bytes of one.
    """
    width = 16 // weight
    while K % width:
        width //= 2
    if weight == 1 and width > 1 and K % (WARP * width) and not K % (WARP * width // 2):
        width //= 2  # every lane has as many loads as any other
    split = 1
    if N < MANY_COLUMNS:
        parts = ceil(K / PART)
        split = ceil(parts / ceil(parts / MOST_WARPS))
        split = min(split, ceil(K / (WARP * width)))
    units = ceil(K / (WARP * width * split))  # loads of a column in all, by each thread
    return width, split, ceil(units / ceil(units / MOST_STEPS))


@lru_cache(maxsize=1024)
def layout(M: int, N: int, K: int, weight: int, sms: int) -> Layout:
    """The layout for M rows on a GPU of so many multiprocessors."""
    width, split, steps = order(N, K, weight)
    rows = min(MOST_ROWS[N >= MANY_COLUMNS], 1 << (M - 1).bit_length())
    while rows > 1 and 4 * rows * K > ROW_BYTES:
        rows //= 2
    if N >= MANY_COLUMNS:
        blocks = 2 if rows <= 4 else 1
        columns, groups = 4, 8 if blocks == 2 else 12
    else:
        columns, groups = _columns(N, split, steps, rows, sms)
        blocks = 1
    return Layout(width, split, steps, columns, groups, N >= MANY_COLUMNS, blocks, rows)


def _columns(N: int, split: int, steps: int, rows: int, sms: int) -> tuple[int, int]:
    """Columns of a group and groups of a block, such that all multiprocessors have as many."""
    more = rows >= MORE_ROWS
    fewest, most = PREFERRED_WARPS[more]

    def cost(candidate: tuple[int, int]) -> tuple[int, int, int]:
        columns, groups = candidate
        block, warps = columns * groups, groups * split
        busiest = ceil(ceil(N / block) / sms) * (max(block, FEWEST[more]) + EACH_BLOCK)
        odd = max(0, fewest - warps) + max(0, warps - most)
        cost = (odd, busiest) if more else (busiest, odd)
        return *cost, abs(columns - BEST_COLUMNS)

    candidates = [
        (columns, groups)
        for columns in COLUMNS
        if columns * steps <= MOST_LOADED
        for groups in range(1, max(1, most // split) + 1)
    ]
    return min(candidates, key=cost)


def geometry(
    kernel: str,
    M: int,
    N: int,
    K: int,
    weight: int,
    *,
    norm: bool = False,
    sms: int = 132,
    most_shared: int = 232_448,
    how: Layout | None = None,
) -> Geometry | None:
    """The launch of a kernel; None when a row does not fit in `most_shared` bytes.

    weight: bytes of one. how: another layout than `layout` says.
    """
    how = how or layout(M, N, K, weight, sms)
    while True:
        shared = 4 * shared_floats(how, K, norm)
        if shared <= most_shared or how.rows == 1:
            break
        how = how._replace(rows=how.rows // 2)
    if shared > most_shared:
        return None
    defines = (
        ("LM_K", K),
        ("LM_NORM", int(norm)),
        ("LM_ROWS", how.rows),
        ("LM_WIDTH", how.width),
        ("LM_SPLIT", how.split),
        ("LM_COLUMNS", how.columns),
        ("LM_GROUPS", how.groups),
        ("LM_STEPS", how.steps),
        ("LM_LOOP", int(how.loop)),
        ("LM_BLOCKS", how.blocks),
        ("LM_X", gcd(4, K)),
    )
    blocks = ceil(N / (how.columns * how.groups))
    grid = (min(blocks, sms * how.blocks) if how.loop else blocks, ceil(M / how.rows))
    return Geometry(kernel, grid, (WARP * how.groups * how.split,), shared, defines)


def shared_floats(how: Layout, K: int, norm: bool) -> int:
    """What matmul/decode.cu keeps in shared memory: rows of x, gamma and beta, warps' sums."""
    chunk = WARP * how.width * how.split * how.steps
    padded = chunk * ceil(K / chunk)
    held = how.rows == 1 and padded <= HELD * WARP * how.split
    rows = 0 if held and not norm else how.rows + 2 * norm
    return rows * padded + how.split * how.rows * how.groups * how.columns


MOST_BLOCKS = 65535  # along the grid's second axis
CACHE_BESIDE_FP8 = "bfloat16"
LARGEST = 2**31 - 2**16  # N: what an int holds, and a block more


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    gelu: bool = False,
    eps: float = 1e-5,
    variant: str | None = None,
) -> Bound:
    """inputs (x (..., K), w, bias, gamma, beta, residual (..., N)), out (..., N).

    w: a WeightMatrix (N, K). What follows it may be None, or missing; residual may be out.
    """
    x, w, bias, gamma, beta, residual = (*inputs, *(None,) * 4)[:6]
    gelu = check_flag("gelu", gelu)
    check_eps(eps)
    shape = getattr(x, "shape", ())
    few = bool(shape) and prod(shape[:-1]) <= FEW_ROWS
    chosen = ("matvec" if few or gamma is not None else "tiles") if variant is None else variant
    if OPERATION.variant(chosen).name == "tiles":
        from gpt2block.ops._linear_tiles import bind_tiles  # noqa: PLC0415

        if gamma is not None or beta is not None:
            raise InputError("linear variant tiles: takes no gamma and beta: use variant matvec")
        return bind_tiles((x, w, bias, residual), out, gelu=gelu)

    K, M = _rows("x", x)
    _check_product(w, K, bias)
    _check_norm(gamma, beta, K)
    shape = (*x.shape[:-1], w.N)
    if residual is not None:
        check("residual", residual, shape)
    given = {"x": x, "w": w, "bias": bias, "gamma": gamma, "beta": beta}
    out = output(out, shape, apart=given, in_place={"residual": residual})
    where = _where("linear_matvec", M, w, norm=gamma is not None)
    args = (x, gamma, beta, w.data, w.scale, bias, residual, out, float(eps), M, w.N, int(gelu))
    return Bound(out, (_launch(where, args, w),))


def bind_qkv(
    x: CudaArray,
    w: WeightMatrix,
    bias: CudaArray | None,
    gamma: CudaArray | None,
    beta: CudaArray | None,
    k_cache: CudaArray,
    v_cache: CudaArray,
    position: CudaArray,
    q: CudaArray | None = None,
    eps: float = 1e-5,
) -> Bound:
    """LayerNorm(x) W + bias: q (M, C), and k and v of row m into position[m] of its cache.

    x (M, K), w a WeightMatrix (3C, K), caches (M, n_ctx, C) in the dtype of the weights, beside
    FP8 in bfloat16, position int32 (M,). At a position outside 0 … n_ctx - 1 the cache stays as it
    is. Without gamma and beta, x is taken as it is. `out` is q. Raises InputError.
    """
    if getattr(x, "ndim", 2) != 2:
        raise InputError(f"x: expected (M, K), got {x.shape}")
    K, M = _rows("x", x)
    _check_product(w, K, bias)
    _check_norm(gamma, beta, K)
    if w.N % 3:
        raise InputError(f"w: expected 3C outputs for q, k and v, got {w.N}")
    C = w.N // 3
    kept = CACHE_BESIDE_FP8 if w.dtype in FP8 else w.dtype
    check("k_cache", k_cache, dtype=kept)
    if k_cache.ndim != 3 or (k_cache.shape[0], k_cache.shape[2]) != (M, C):
        raise InputError(f"k_cache: expected ({M}, n_ctx, {C}), got {k_cache.shape}")
    check("v_cache", v_cache, k_cache.shape, kept)
    check("position", position, (M,), "int32")
    given = {"x": x, "w": w, "bias": bias, "gamma": gamma, "beta": beta, "position": position}
    q = output(q, (M, C), name="q", apart=given)
    check_apart("k_cache", k_cache, {**given, "q": q})
    check_apart("v_cache", v_cache, {**given, "q": q, "k_cache": k_cache})
    where = _where("qkv_matvec", M, w, norm=gamma is not None)
    n_ctx = k_cache.shape[1]
    product = (x, gamma, beta, w.data, w.scale, bias)
    args = (*product, position, q, k_cache, v_cache, float(eps), M, C, n_ctx)
    return Bound(q, (_launch(where, args, w, kept),))


def _rows(name: str, x: Any) -> tuple[int, int]:
    """K and M of an activation (..., K)."""
    check(name, x)
    K = int(x.shape[-1])
    _aligned(name, x, 4 * gcd(4, K))
    return K, x.size // K


def _check_product(w: Any, K: int, bias: Any) -> None:
    if not isinstance(w, WeightMatrix):
        raise InputError(f"w: expected a WeightMatrix, got {type(w).__name__}: use .quantize")
    if w.layout != "NK":
        raise InputError(f"w: expected layout 'NK', (N, K) in memory, got {w.layout!r}")
    check("w", w.data, dtype="uint8" if w.dtype in FP8 else w.dtype)
    if w.K != K:
        raise InputError(f"w: expected K {K} to match the input, got {w.K}")
    if w.N > LARGEST:
        raise InputError(f"w: expected at most {LARGEST:,} outputs, got {w.N:,}")
    _aligned("w", w.data, order(w.N, K, w.data.itemsize)[0] * w.data.itemsize)
    if w.scale is not None:
        check("scale", w.scale, (w.N,))
    if bias is not None:
        check("bias", bias, (w.N,))


def _check_norm(gamma: Any, beta: Any, K: int) -> None:
    if (gamma is None) != (beta is None):
        raise InputError("gamma and beta: expected both, or neither")
    for name, array in (("gamma", gamma), ("beta", beta)):
        if array is not None:
            check(name, array, (K,))
            _aligned(name, array, 4 * gcd(4, K))


def _aligned(name: str, array: CudaArray, size: int) -> None:
    if array.data.ptr % size:
        raise InputError(f"{name}: expected data aligned to {size} bytes: pass a copy")


def _where(kernel: str, M: int, w: WeightMatrix, **options: Any) -> Geometry:
    most_shared = device_attribute("MaxSharedMemoryPerBlockOptin") - 1024  # static, and its own
    sms = device_attribute("MultiProcessorCount")
    size = w.data.itemsize
    where = geometry(kernel, M, w.N, w.K, size, sms=sms, most_shared=most_shared, **options)
    if where is None:
        raise InputError(
            f"K {w.K:,}: a row does not fit in the {most_shared:,} bytes of this GPU's shared "
            "memory: variant tiles has no such limit"
        )
    if where.grid[1] > MOST_BLOCKS:
        raise InputError(f"{M:,} rows: too many for matvec: use variant tiles")
    return where


def _launch(
    where: Geometry, args: tuple[Any, ...], w: WeightMatrix, kept: str | None = None
) -> Any:
    """kept: what the kernel's `T` is; that of the weights, or float32, where it has none."""
    if w.dtype in FP8:
        return launch_at(FILE, where, args, storage=kept or "float32", weights=w.dtype)
    return launch_at(FILE, where, args, storage=w.dtype)


OPERATION = Operation(
    name="linear",
    document="GPT-2",
    idea="[residual +] [gelu]((LayerNorm(x) or x) W + bias)",
    sizes={"M": 1, "K": 768, "N": 2304},
    variants=(
        Variant(
            "matvec",
            FILE,
            ("linear_matvec",),
            "few rows: all weights asked for before x; LayerNorm of x in each block",
        ),
        Variant(
            "tiles",
            "matmul/tiles.cu",
            ("linear_tiles",),
            "many rows: registers' tiles in the order of k, narrow weights widened on their way",
        ),
    ),
    auxiliary=(Variant("qkv", FILE, ("qkv_matvec",), "the same, with k and v into the KV cache"),),
    make=_make,
    traffic=lambda s: s["weight"] * s["K"] * s["N"] + 4 * (s["M"] * (s["K"] + s["N"]) + s["N"]),
    flops=lambda s: 2 * s["M"] * s["K"] * s["N"],
    bound="either",
    attrs={},
    matrices=(1,),
    layout="NK",
    binder=bind,
)


def linear(
    x: CudaArray,
    w: WeightMatrix,
    bias: CudaArray | None = None,
    gamma: CudaArray | None = None,
    beta: CudaArray | None = None,
    residual: CudaArray | None = None,
    gelu: bool = False,
    eps: float = 1e-5,
    variant: str | None = None,
) -> CudaArray:
    """`reference.linear` on CuPy arrays; raises InputError.

    x (..., K), bias (N,), gamma and beta (K,), residual (..., N): float32. w: a `WeightMatrix` in
    layout "NK", of any dtype. Without a variant: matvec up to 16 rows and with gamma, else tiles.
    A row's result is the same bits alone and among others, as long as the variant is the same.
    """
    inputs = (*contiguous(x), w, *contiguous(bias, gamma, beta, residual))
    return call(bind, inputs, gelu=gelu, eps=eps, variant=variant).out
