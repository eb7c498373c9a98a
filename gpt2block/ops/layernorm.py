"""LayerNorm forward: five kernels of the documents, and two beyond them."""

from __future__ import annotations

import math
from functools import lru_cache
from math import ceil
from typing import Any, Literal, NamedTuple, overload

import numpy as np

from gpt2block.checks import check_flag
from gpt2block.config import check_eps
from gpt2block.cuda import cupy
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
    storage,
)
from gpt2block.cuda.kernels import Defines, Geometry, Launch, launch
from gpt2block.errors import InputError
from gpt2block.ops._rows import share
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant, check_block
from gpt2block.ops.two_part import SPLIT, check_one_scale
from gpt2block.ops.warm import call
from gpt2block.weights.two_part import SplitMatrix

BLOCKS = (32, 64, 128, 256, 512, 1024)
KEPT = 64  # bytes of a row that a thread of kernel 6 keeps in registers, at most
MAX_THREADS = 1024  # of a block
KEPT_BY_MOST = 32  # where a row takes so many threads, which leaves each of them 64 registers
NARROW = "narrow"  # the variant whose out is narrower than gamma and beta
MANY = 2**31  # rows: a team of `narrow` is as for so many of them, whatever their number is
TEAMS = 512  # threads on an SM that hold rows of `narrow` at the same time
HELD = 96  # registers for a thread's part of gamma, beta and its rows of x, in a block of 128
MOST_EACH = 2  # rows of a team


class RowShape(NamedTuple):
    """How kernel 6 shares out a row: LN_WIDTH, LN_THREADS and LN_VECTORS of its source."""

    width: int  # elements a load
    threads: int  # a row
    vectors: int  # a thread; 0: too many for registers, the row is read three times


def row_shape(C: int, itemsize: int, alignment: int = 16) -> RowShape:
    """The widest loads that C and the alignment of the arrays (in bytes) allow, up to 16 bytes.

    Then the fewest threads that can keep the row, because a row of one warp needs no barrier.
    """
    width = 16 // itemsize
    while C % width or alignment % (width * itemsize):
        width //= 2
    vectors = C // width
    threads = 1
    row = C * itemsize
    while threads < MAX_THREADS and threads < vectors and (threads < 32 or threads * KEPT < row):
        threads *= 2
    held = ceil(vectors / threads)
    fits = held * width * itemsize <= (KEPT if threads < MAX_THREADS else KEPT_BY_MOST)
    return RowShape(width, threads, held if fits else 0)


@lru_cache(maxsize=1024)
def narrow_geometry(
    float_x: bool, rows: int, C: int, width: int, sms: int, split: bool = False
) -> Geometry:
    """Of variant `narrow` for `rows` of C channels, `width` elements a vector.

    split: x of float, out in two parts. How a row is shared out follows from C and width alone, so
    that its bits do; teams take several rows where there are more than `sms` multiprocessors hold
    at once. Raises InputError when a row does not fit in registers.
    """
    shape = share(MANY, C, width, sms)
    values = shape.held * width
    room = HELD if shape.block <= 128 else HELD - 16
    each = 1
    while (
        each < MOST_EACH
        and each * TEAMS * sms < rows * shape.threads
        and 2 * values + 2 * each * values * (4 if float_x else 2) // 4 <= room
    ):
        each *= 2
    defines = (
        ("LN_WIDTH", width),
        ("LN_THREADS", shape.threads),
        ("LN_VECTORS", shape.held),
        ("LN_ROWS", shape.rows),
        ("LN_EACH", each),
    )
    kernel = OPERATION.variant(NARROW).kernels[2 if split else 1 if float_x else 0]
    return Geometry(kernel, (ceil(rows / (shape.rows * each)),), (shape.block,), defines=defines)


def make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    """x (B, T, C), gamma (C,), beta (C,)."""
    B, T, C = sizes["B"], sizes["T"], sizes["C"]
    normal = (rng.standard_normal(shape) + 0.5 for shape in ((B, T, C), (C,), (C,)))
    return tuple(array.astype(np.float32) for array in normal)


BLOCK = 256  # of the ten-step kernels
MAX_ROWS = 2**31 - 1
MAX_C = 2**30
STATS_VARIANT = 6  # where none is asked for, but something that the ten-step kernels do not do


def layernorm_bound(gamma: Any, beta: Any) -> float:
    """The largest magnitude of LayerNorm's result: C values of variance 1 are sqrt(C) at most."""
    return math.sqrt(len(gamma)) * float(np.abs(gamma).max()) + float(np.abs(beta).max())


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    eps: float,
    variant: str | int | None = None,
    block: int | None = None,
    stats: bool = True,
    mean: CudaArray | None = None,
    rstd: CudaArray | None = None,
    dtype: str | None = None,
    bound: float | None = None,
) -> Bound:
    """inputs (x (..., C), gamma (C,), beta (C,)), out (..., C); `extra` is (mean, rstd), (...).

    variant 1 to 6: the ladder, where None is the ten-step block's kernel, which has no `extra`.
    Variant 6 takes float16 and bfloat16 too, and leaves mean and rstd out without `stats`.

    "narrow", which None is where x has 16 bits: no `extra`, gamma and beta float32; x is float32 or
    has the dtype of out. Also where out is a SplitMatrix with one scale, and x float32; dtype
    "split" makes a new one, with the scale of `bound`, or of what gamma and beta allow.
    """
    x, gamma, beta = inputs
    check_eps(eps)
    check_flag("stats", stats)
    if isinstance(out, SplitMatrix) or dtype is not None or bound is not None:
        unused = (block, mean, rstd)
        if variant not in (None, NARROW) or any(each is not None for each in unused):
            raise InputError("layernorm: a result in two parts is for variant narrow alone")
        return _bind_split(x, gamma, beta, out, float(eps), dtype, bound)
    if variant == NARROW or (variant is None and storage(x) != "float32"):
        if block is not None or mean is not None or rstd is not None:
            raise InputError("layernorm variant narrow: it has no block, mean and rstd: use 6")
        return _bind_narrow(x, gamma, beta, out, float(eps))
    if variant is None:
        if block is not None or mean is not None or rstd is not None:
            raise InputError("layernorm: block, mean and rstd need a variant: pass variant=1 to 6")
        return _bind_ten_step(x, gamma, beta, out, eps)
    chosen = OPERATION.variant(variant)
    dtype = _storage(chosen, x)
    check("x", x, dtype=dtype)
    *rows, C = x.shape
    check("gamma", gamma, (C,), dtype)
    check("beta", beta, (C,), dtype)
    N = x.size // C
    if N > MAX_ROWS or C > MAX_C:
        raise InputError(f"x: at most {MAX_ROWS:,} rows of {MAX_C:,} channels, got {x.shape}")
    size = check_block(OPERATION.name, chosen, block)
    given = {"x": x, "gamma": gamma, "beta": beta}
    out = output(out, x.shape, dtype, apart=given)
    if not stats and chosen.name == "6" and (mean is not None or rstd is not None):
        raise InputError("layernorm: mean and rstd are written with stats only: pass stats=True")
    extra: tuple[CudaArray, ...] = ()
    if stats or chosen.name != "6":
        mean = output(mean, tuple(rows), name="mean", apart={**given, "out": out})
        rstd = output(rstd, tuple(rows), name="rstd", apart={**given, "out": out, "mean": mean})
        extra = (mean, rstd)
    arrays = (x, gamma, beta, out, *(extra or (None, None)))
    if chosen.name == "6":
        return Bound(out, (_rows(arrays, float(eps), N, C, size, block),), extra)
    return Bound(out, _ladder(chosen, arrays, float(eps), N, C, size), extra)


def _bind_ten_step(x: Any, gamma: Any, beta: Any, out: CudaArray | None, eps: float) -> Bound:
    check("x", x)
    C = x.shape[-1]
    check("gamma", gamma, (C,))
    check("beta", beta, (C,))
    out = output(out, x.shape, apart={"x": x, "gamma": gamma, "beta": beta})
    rows = x.size // C
    name, width = ("layernorm768_kernel", ()) if C == 768 else ("layernorm_kernel", (C,))
    args = (x, out, gamma, beta, rows, *width)
    defines = (("LN_EPS", f"{float(eps)!r}f"),)
    return Bound(
        out, (launch("layernorm/skeleton.cu", name, (rows,), (BLOCK,), args, defines=defines),)
    )


def _bind_split(
    x: Any,
    gamma: Any,
    beta: Any,
    out: SplitMatrix | None,
    eps: float,
    dtype: str | None,
    bound: float | None,
) -> Bound:
    """float32 rows in, two parts with one scale out."""
    if dtype not in (None, SPLIT):
        raise InputError(f"dtype {dtype!r}: expected {SPLIT!r} or none")
    check("x", x)
    C = x.shape[-1]
    check("gamma", gamma, (C,))
    check("beta", beta, (C,))
    if out is None:
        if bound is None:
            bound = layernorm_bound(cupy.asnumpy(gamma), cupy.asnumpy(beta))
        out = SplitMatrix.empty(x.shape, bound)
    else:
        check_one_scale(out, x.shape, bound)
        check_apart("out", out, {"x": x, "gamma": gamma, "beta": beta})
    rows = x.size // C
    if rows > MAX_ROWS:
        raise InputError(f"x: at most {MAX_ROWS:,} rows, got {rows:,}")
    width = _width(C, x, gamma, beta, out.parts)
    sms = device_attribute("MultiProcessorCount")
    where = narrow_geometry(True, rows, C, width, sms, split=True)
    args = (x, gamma, beta, out.parts, 1 / (out.one_scale or 1.0), eps, rows, C)
    file = OPERATION.variant(NARROW).file
    return Bound(out, (launch_at(file, where, args, storage="float16"),))


def _width(C: int, *arrays: CudaArray) -> int:
    """Elements of a vector: 16 bytes of the last array, unless C or how arrays start forbids it."""
    width = 16 // int(arrays[-1].itemsize)
    while C % width or any(a.data.ptr % min(16, width * a.itemsize) for a in arrays):
        width //= 2
    return width


def _bind_narrow(x: Any, gamma: Any, beta: Any, out: CudaArray | None, eps: float) -> Bound:
    stored = storage(x)
    check("x", x, dtype=stored)
    C = x.shape[-1]
    check("gamma", gamma, (C,))
    check("beta", beta, (C,))
    dtype = storage(out) if stored == "float32" and out is not None else stored
    out = output(out, x.shape, dtype, apart={"x": x, "gamma": gamma, "beta": beta})
    rows = x.size // C
    if rows > MAX_ROWS:
        raise InputError(f"x: at most {MAX_ROWS:,} rows, got {rows:,}")
    float_x = stored == "float32"
    width = _width(C, x, gamma, beta, out)
    where = narrow_geometry(float_x, rows, C, width, device_attribute("MultiProcessorCount"))
    args = (x, gamma, beta, out, eps, rows, C)
    file = OPERATION.variant(NARROW).file
    return Bound(out, (launch_at(file, where, args, storage=dtype),))


def _storage(variant: Variant, x: Any) -> str:
    """The dtype that x, gamma, beta and out must have; InputError when the variant has no such."""
    return storage(x) if variant.name == "6" else "float32"


def _ladder(
    variant: Variant, arrays: tuple[Any, ...], eps: float, N: int, C: int, block: int
) -> tuple[Launch, ...]:
    """The documents' kernels, 1 to 5; arrays: x, gamma, beta, out, mean, rstd."""
    x, gamma, beta, out, mean, rstd = arrays
    grids_and_args: dict[str, list[tuple[tuple[int, ...], tuple[Any, ...]]]] = {
        "1": [((ceil(N / block),), (*arrays, eps, N, C))],
        "2": [
            ((N,), (x, mean, C)),
            ((N,), (x, mean, rstd, eps, C)),
            ((N, ceil(C / block)), (x, mean, rstd, gamma, beta, out, C)),
        ],
        "3": [((ceil(N / (block // 32)),), (*arrays, eps, N, C))],
        "4": [((ceil(N / (block // 32)),), (*arrays, eps, N, C))],
        "5": [((N,), (*arrays, eps, C))],
    }
    # 3 and 4 ask their group for the block's size: one program serves all.
    defines: Defines = () if variant.name in "34" else (("LN_BLOCK", block),)
    return tuple(
        launch(variant.file, kernel, grid, (block,), args, defines=defines)
        for kernel, (grid, args) in zip(variant.kernels, grids_and_args[variant.name], strict=True)
    )


def _rows(
    arrays: tuple[Any, ...], eps: float, N: int, C: int, block: int, asked: int | None
) -> Launch:
    """Kernel 6, with the constants that fit C and the arrays' alignment."""
    x = arrays[0]
    together = alignment(*(array.data.ptr for array in arrays[:4]))
    shape = row_shape(C, x.dtype.itemsize, together)
    if shape.threads > block:
        if asked is not None:
            raise InputError(
                f"layernorm variant 6: block size {block}: a row of {C:,} channels takes "
                f"{shape.threads} threads: expected at least that, at most {MAX_THREADS}"
            )
        block = shape.threads
    rows = block // shape.threads
    names = ("LN_WIDTH", "LN_THREADS", "LN_VECTORS", "LN_ROWS")
    defines = tuple(zip(names, (*shape, rows), strict=True))
    args, grid = (*arrays, eps, N, C), (ceil(N / rows),)
    file, kernel = "layernorm/rows.cu", "layernorm_forward_kernel6"
    return launch(file, kernel, grid, (block,), args, defines=defines, storage=x.dtype.name)


OPERATION = Operation(
    name="layernorm",
    document="the LayerNorm kernels",
    idea="(x - mean) · rstd · γ + β over each row; mean and rstd are stored too",
    sizes={"B": 8, "T": 1024, "C": 768},
    variants=(
        Variant(
            "1",
            "layernorm/ladder.cu",
            ("layernorm_forward_kernel1",),
            "a thread a row, loops over C",
            BLOCKS,
            block=64,
        ),
        Variant(
            "2",
            "layernorm/ladder.cu",
            ("mean_kernel", "rstd_kernel", "normalization_kernel"),
            "three kernels: a block a row with a tree in shared memory, then a thread an element",
            BLOCKS,
        ),
        Variant(
            "3",
            "layernorm/warp.cu",
            ("layernorm_forward_kernel3",),
            "a warp a row by cooperative groups, all steps in one kernel, streaming hints",
            BLOCKS,
            block=512,
        ),
        Variant(
            "4",
            "layernorm/warp.cu",
            ("layernorm_forward_kernel4",),
            "as 3 with var = E[x²] - E[x]²: one pass over x less",
            BLOCKS,
            block=512,
        ),
        Variant(
            "5",
            "layernorm/ladder.cu",
            ("layernorm_forward_kernel5",),
            "a block a row, reduced in two stages: warps, then the first warp",
            BLOCKS,
            block=128,
        ),
        Variant(
            "6",
            "layernorm/rows.cu",
            ("layernorm_forward_kernel6",),
            "rows in registers, 16-byte loads, x read once; float32, float16 and bfloat16",
            BLOCKS,
            block=64,
            source="beyond the documents",
        ),
        Variant(
            NARROW,
            "layernorm/narrow.cu",
            ("layernorm_narrow", "layernorm_narrow_float", "layernorm_narrow_split"),
            "for tensor cores: float γ and β, out in 16 bits or in two parts of them, a few rows a "
            "team, overlapping launches",
            source="beyond the documents",
        ),
    ),
    make=make,
    traffic=lambda s: 2 * s["itemsize"] * s["B"] * s["T"] * s["C"],  # read x, write out
    flops=lambda s: 8 * s["B"] * s["T"] * s["C"],
    bound="memory",
    attrs={"eps": 1e-5},
    dtypes=("float32", "float16", "bfloat16"),
    auxiliary=(
        Variant(
            "none",
            "layernorm/skeleton.cu",
            ("layernorm768_kernel", "layernorm_kernel"),
            "what the ten-step block runs: a block a row, without mean and rstd",
            source="ten-step block",
        ),
    ),
    largest=lambda _, weights, names: layernorm_bound(weights[names[1]], weights[names[2]]),
    binder=bind,
)


@overload
def layernorm(
    x: CudaArray,
    gamma: CudaArray,
    beta: CudaArray,
    eps: float = ...,
    variant: str | int | None = ...,
    block: int | None = ...,
    stats: Literal[False] = ...,
    dtype: str | None = ...,
) -> CudaArray: ...


@overload
def layernorm(
    x: CudaArray,
    gamma: CudaArray,
    beta: CudaArray,
    eps: float = ...,
    variant: str | int | None = ...,
    block: int | None = ...,
    *,
    stats: Literal[True],
) -> tuple[CudaArray, CudaArray, CudaArray]: ...


def layernorm(
    x: CudaArray,
    gamma: CudaArray,
    beta: CudaArray,
    eps: float = 1e-5,
    variant: str | int | None = None,
    block: int | None = None,
    stats: bool = False,
    dtype: str | None = None,
) -> CudaArray | tuple[CudaArray, CudaArray, CudaArray]:
    """`reference.layernorm` on CuPy arrays; raises InputError.

    variant: 1 to 5 are the documents' ladder, float32; 6 is the fastest, float16 and bfloat16 too.
    "narrow" takes an x of 16 bits with gamma and beta of float32, C up to 16,384. None is the
    ten-step block's kernel, or 6 or narrow for what that cannot do. dtype "split": narrow of a
    float32 x, and the result is a SplitMatrix, which `gemm` takes. With `stats`: (out, mean,
    rstd), where mean and rstd are float32 of shape x.shape[:-1].
    """
    arrays = contiguous(x, gamma, beta)
    if stats and variant == NARROW:
        raise InputError("layernorm variant narrow: it gives no mean and rstd: use variant 6")
    half = storage(x) != "float32"
    wide = isinstance(gamma, cupy.ndarray) and gamma.dtype == cupy.float32
    if variant is None and (stats or (half and not wide)):
        variant = STATS_VARIANT
    options = {"variant": variant, "block": block, "stats": stats, "dtype": dtype}
    bound = call(bind, arrays, eps=eps, **options)
    return (bound.out, *bound.extra) if stats else bound.out
