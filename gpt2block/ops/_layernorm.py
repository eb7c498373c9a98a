"""LayerNorm on CUDA: the ten-step kernels of layernorm/skeleton.cu, and the ladder."""

from __future__ import annotations

from math import ceil
from typing import Any, Literal, overload

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
from gpt2block.cuda.kernels import Defines, Launch, launch
from gpt2block.errors import InputError
from gpt2block.operations._types import Variant, check_block
from gpt2block.operations.layernorm import (
    MAX_THREADS,
    NARROW,
    OPERATION,
    narrow_geometry,
    row_shape,
)
from gpt2block.ops._split import SPLIT, check_one_scale
from gpt2block.ops._warm import call
from gpt2block.plan import layernorm_bound
from gpt2block.weights.two_part import SplitMatrix

BLOCK = 256  # of the ten-step kernels
MAX_ROWS = 2**31 - 1
MAX_C = 2**30
STATS_VARIANT = 6  # where none is asked for, but something that the ten-step kernels do not do


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
