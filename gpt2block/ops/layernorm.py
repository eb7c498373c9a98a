"""LayerNorm: (x - mean) · rstd · γ + β over each row.

Kernels: learn/layernorm/skeleton.cu (LeetGPU's GPT-2 block challenge: the default for float32);
learn/layernorm/ladder.cu and warp.cu (llm.c's kernels, 1 to 5); norms/layernorm_rows.cu (6),
layernorm_narrow.cu and layernorm_decode.cu.
"""

from __future__ import annotations

import math
from functools import lru_cache
from math import ceil
from typing import Any, Literal, NamedTuple, overload

import numpy as np

from gpt2block.contract import Contract
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import CudaArray, alignment, check, contiguous, multiprocessors
from gpt2block.cuda.kernels import Defines, Geometry, Launch, defines_of, launch_at, size_defines
from gpt2block.cuda.launch_lines import stated_launch
from gpt2block.errors import InputError
from gpt2block.models.weights.conversions import vector_width
from gpt2block.models.weights.hi_lo import HiLoMatrix
from gpt2block.ops.call import HI_LO, Call, UncheckedCall, refuse, storage
from gpt2block.ops.engines.rows import check_rows, share
from gpt2block.ops.hi_lo import check_one_scale
from gpt2block.ops.operands import check_operand, stored_defines, stored_scale
from gpt2block.ops.operation import REQUIRED, Inputs, Operation, Sizes, Workload, as_stated, variant
from gpt2block.ops.warm import call
from gpt2block.reference import layernorm_stats

CHALLENGE = "LeetGPU's GPT-2 block challenge"
SKELETON, LADDER = "learn/layernorm/skeleton.cu", "learn/layernorm/ladder.cu"
WARP, ROWS = "learn/layernorm/warp.cu", "norms/layernorm_rows.cu"
BLOCKS = (32, 64, 128, 256, 512, 1024)
SKELETON_BLOCK = 256
KEPT = 64  # maximum bytes of a row that a thread of kernel 6 keeps in registers
MAX_THREADS = 1024  # maximum threads per block
KEPT_BY_MAX_THREADS = 32  # maximum bytes per thread if a block has MAX_THREADS (64 registers each)
NARROW = "narrow"  # variant whose out has a narrower dtype than gamma and beta
DECODE = "decode"  # variant that is bitwise equal to the LayerNorm fused into `linear`
MAX_DECODE_ROWS = 8  # maximum rows per block of variant `decode`
MANY = 2**31  # `narrow` chooses threads per row for MANY rows, whatever the actual number is
TEAMS = 512  # threads per SM that can process rows of `narrow` at the same time
HELD = 96  # registers per thread for gamma, beta and rows of x, in a block of 128 threads
MAX_EACH = 2  # maximum rows per team of threads
STATS_VARIANT = 6  # default variant for calls that variant skeleton does not support


TO_HI_LO = Contract.parse("x f32 ... C; gamma beta f32 C -> out? hi_lo ... C")


class LayerNormRow(NamedTuple):
    """Distribution of a row among threads: LN_WIDTH, LN_THREADS and LN_VECTORS of kernel 6."""

    width: int  # elements per load
    threads: int  # threads per row
    vectors: int  # loads per thread; 0 if registers cannot keep the row: it is read three times


def row_shape(C: int, itemsize: int, alignment: int = 16) -> LayerNormRow:
    """Return the distribution of a row of C channels among threads of kernel 6.

    Loads are as wide as C and the alignment of the arrays (in bytes) allow, up to 16 bytes. The row
    gets the fewest threads that can keep it in registers: a row of one warp needs no barrier.
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
    fits = held * width * itemsize <= (KEPT if threads < MAX_THREADS else KEPT_BY_MAX_THREADS)
    return LayerNormRow(width, threads, held if fits else 0)


@lru_cache(maxsize=1024)
def narrow_geometry(
    float_x: bool, rows: int, C: int, width: int, sms: int, hi_lo: bool = False
) -> Geometry:
    """Return the geometry of `narrow` for rows of C channels, loaded `width` elements at a time.

    float_x: whether x is float32. hi_lo: whether x is float32 and out hi/lo. The division of
    a row among threads, and therefore its bits, depend only on C and width. A team of threads
    processes several rows if there are more rows than `sms` multiprocessors hold at once. Raises
    InputError if a row does not fit in registers.
    """
    shape = share(MANY, C, width, sms)
    values = shape.held * width
    room = HELD if shape.block <= 128 else HELD - 16
    each = 1
    while (
        each < MAX_EACH
        and each * TEAMS * sms < rows * shape.threads
        and 2 * values + 2 * each * values * (4 if float_x else 2) // 4 <= room
    ):
        each *= 2
    defines = (
        *defines_of(LN_WIDTH=width, LN_THREADS=shape.threads, LN_VECTORS=shape.held),
        *defines_of(LN_ROWS=shape.rows, LN_EACH=each),
    )
    kernel = "layernorm_narrow" + ("_split" if hi_lo else "_float" if float_x else "")
    return Geometry(kernel, (ceil(rows / (shape.rows * each)),), (shape.block,), defines=defines)


def _every(c: Call) -> tuple[object, ...]:
    """Return the arguments of a kernel that writes out, mean and rstd."""
    return c.x, c.gamma, c.beta, c.output("out"), c.mean, c.rstd, c.eps, c.rows, c.C


def _fit(c: Call, dtype: str | None = "float32", stats: bool = True, parts: bool = False) -> None:
    """Raise UnsupportedCall or InputError if the kernel does not support the call.

    dtype: required dtype of x, gamma and beta; None: any dtype of x, and float32 gamma and beta.
    stats: whether to allocate mean and rstd, which the kernel writes. parts: whether the kernel can
    write a HiLoMatrix.
    """
    types = f"x: expected {dtype}, got {c.storage}: use .astype({dtype!r})"
    refuse(c.hi_lo and not parts, "a hi/lo result is for variant narrow alone")
    refuse(dtype not in (None, c.storage), types)
    for name in ("gamma", "beta"):
        check(name, getattr(c, name), dtype=dtype or "float32")
    for name in ("mean", "rstd") if stats else ():
        c.output(name)


def _refuse_options(c: Call, reason: str) -> None:
    """Raise UnsupportedCall if the caller passes a block size, or an array for mean or rstd."""
    refuse(c.requested or c.mean is not None or c.rstd is not None, reason)


@variant("skeleton", SKELETON, "layernorm768_kernel", "layernorm_kernel", source=CHALLENGE)
def _skeleton(c: Call) -> Launch:
    _refuse_options(c, "block, mean and rstd need a variant: pass variant=1 to 6")
    _fit(c, stats=False)
    name, width = ("layernorm768_kernel", ()) if c.C == 768 else ("layernorm_kernel", (c.C,))
    args = (c.x, c.output("out"), c.gamma, c.beta, c.rows, *width)
    defines = (("LN_EPS", f"{c.eps!r}f"),)
    geometry = Geometry(name, (c.rows,), (SKELETON_BLOCK,), defines=defines)
    return launch_at(SKELETON, geometry, args)


def _float_args(c: Call) -> tuple[object, ...]:
    """Return the arguments of variants 1 to 5, which take float32, and set N, their rows."""
    _fit(c)
    c.N = c.rows
    return _every(c)


def _block_define(c: Call) -> Defines:
    return (("LN_BLOCK", c.block),)


_threads = as_stated(
    "1", LADDER, "layernorm_forward_kernel1", _float_args, _block_define, blocks=BLOCKS
)


@variant("2", LADDER, "mean_kernel", "rstd_kernel", "normalization_kernel", blocks=BLOCKS)
def _three(c: Call) -> tuple[Launch, ...]:
    _float_args(c)
    steps = {
        "mean_kernel": (c.x, c.mean, c.C),
        "rstd_kernel": (c.x, c.mean, c.rstd, c.eps, c.C),
        "normalization_kernel": (c.x, c.mean, c.rstd, c.gamma, c.beta, c.output("out"), c.C),
    }
    return tuple(
        stated_launch(LADDER, kernel, args, vars(c), c.block, _block_define(c))
        for kernel, args in steps.items()
    )


_one_warp = as_stated("3", WARP, "layernorm_forward_kernel3", _float_args, blocks=BLOCKS)
_one_pass = as_stated("4", WARP, "layernorm_forward_kernel4", _float_args, blocks=BLOCKS)
_blocks = as_stated(
    "5",
    LADDER,
    "layernorm_forward_kernel5",
    lambda c: (*_float_args(c)[:7], c.C),
    _block_define,
    blocks=BLOCKS,
)


@variant("6", ROWS, "layernorm_forward_kernel6", blocks=BLOCKS, block=64, source="gpt2block")
def _rows(c: Call) -> Launch:
    """Launch kernel 6, compiled with constants for C and the alignment of the arrays."""
    if not c.stats and (c.mean is not None or c.rstd is not None):
        raise InputError("layernorm: mean and rstd are written only with stats=True: pass it")
    _fit(c, c.storage, stats=c.stats)
    addresses = (a.data.ptr for a in (c.x, c.gamma, c.beta, c.output("out")))
    shape = row_shape(c.C, c.x.itemsize, alignment(*addresses))
    if c.requested and shape.threads > c.block:
        raise InputError(
            f"layernorm variant 6: block size {c.block}: a row of {c.C:,} channels takes "
            f"{shape.threads} threads: expected at least that, at most {MAX_THREADS}"
        )
    block = max(c.block, shape.threads)
    rows = block // shape.threads
    defines = (*size_defines("LN", shape, "width threads vectors"), ("LN_ROWS", rows))
    grid = (ceil(c.rows / rows),)
    geometry = Geometry("layernorm_forward_kernel6", grid, (block,), defines=defines)
    return launch_at(ROWS, geometry, _every(c), c.storage)


@variant(
    NARROW,
    "norms/layernorm_narrow.cu",
    "layernorm_narrow",
    "layernorm_narrow_float",
    "layernorm_narrow_split",
    source="gpt2block",
)
def _narrow(c: Call) -> Launch:
    _refuse_options(c, "narrow has no block, mean and rstd: use variant 6")
    _fit(c, None, stats=False, parts=True)
    out = c.output("out")
    written, scale = (out.parts, (1 / (out.one_scale or 1.0),)) if c.hi_lo else (out, ())
    width = vector_width(c.C, c.x, c.gamma, c.beta, written)
    sms = multiprocessors()
    geometry = narrow_geometry(c.storage == "float32", c.rows, c.C, width, sms, c.hi_lo)
    args = (c.x, c.gamma, c.beta, written, *scale, c.eps, c.rows, c.C)
    return launch_at("norms/layernorm_narrow.cu", geometry, args, storage=written.dtype.name)


@variant(
    DECODE, "norms/layernorm_decode.cu", "layernorm_decode", source="gpt2block", dtypes=("float32",)
)
def _decode(c: Call) -> Launch:
    """Launch `decode`: one warp per row, with rows divided among as many blocks as possible."""
    _refuse_options(c, "decode has no block, mean and rstd: use variant 6")
    _fit(c, stats=False)
    loaded = math.gcd(4, c.C)  # floats per load; determines the order of additions
    c.check_addresses("x", "gamma", "beta", "out", loaded=loaded)
    rows = min(MAX_DECODE_ROWS, ceil(c.rows / multiprocessors()))
    sizes = (("LN_C", c.C), ("LN_X", loaded), ("LN_ROWS", rows))
    defines = (*sizes, *stored_defines("LN_OPERAND", c.to_operand))
    geometry = Geometry("layernorm_decode", (ceil(c.rows / rows),), (32 * rows,), defines=defines)
    args = (c.x, c.gamma, c.beta, c.out, stored_scale(c.to_operand), c.eps, c.rows)
    return launch_at("norms/layernorm_decode.cu", geometry, args)


def _prepare(unchecked: UncheckedCall) -> Call:
    """Check a call of `layernorm`. Bound.extra is (mean, rstd) if the variant computes them.

    Variants skeleton, narrow and decode compute neither; variant 6 computes both with stats. The
    default is skeleton for float32 and narrow for 16 bits. to_operand: the `Operand` that variant
    decode stores in out for `linear`, instead of floats. A HiLoMatrix out has one scale for all
    rows. dtype "hi_lo" allocates such an out, with a scale from `bound`, or by default from
    gamma and beta.
    """
    options, out = unchecked.options, unchecked.out
    dtype, bound, variant = options["dtype"], options["bound"], options["variant"]
    hi_lo = isinstance(out, HiLoMatrix) or dtype is not None or bound is not None
    if dtype not in (None, HI_LO):
        raise InputError(f"dtype {dtype!r}: expected {HI_LO!r} or none")
    narrowed = variant == NARROW and out is not None
    outputs = (out,) if hi_lo else (out, options["mean"], options["rstd"])
    c = unchecked._replace(out=outputs).checked(
        TO_HI_LO if hi_lo else None,
        hi_lo=hi_lo,
        out_dtype=storage(out if narrowed else unchecked.inputs[0]),
    )
    check_rows("x", c.x)
    check_operand(c.to_operand, c.C)
    if hi_lo:
        c.storage = "float32"
        if out is not None:
            check_one_scale(out, bound)
        else:
            c.bound = layernorm_bound(c.gamma.get(), c.beta.get()) if bound is None else bound
            c.output("out")
    if c.to_operand and variant != DECODE:
        raise InputError(
            f"layernorm: terms of {c.to_operand}, variant {variant}: expected variant decode"
        )
    c.order = (_skeleton if c.storage == "float32" and not hi_lo else _narrow,)
    return c


def layernorm_bound(gamma: Any, beta: Any) -> float:
    """Upper bound of LayerNorm's magnitudes, as C values of variance 1 are at most sqrt(C) each."""
    return math.sqrt(len(gamma)) * float(np.abs(gamma).max()) + float(np.abs(beta).max())


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    """Return random x (B, T, C), gamma (C,) and beta (C,)."""
    B, T, C = sizes["B"], sizes["T"], sizes["C"]
    normal = (rng.standard_normal(shape) + 0.5 for shape in ((B, T, C), (C,), (C,)))
    return tuple(array.astype(np.float32) for array in normal)


OPERATION = Operation(
    name="layernorm",
    variants=(_threads, _three, _one_warp, _one_pass, _blocks, _rows, _narrow, _decode),
    options={"eps": REQUIRED, "stats": True}
    | dict.fromkeys(("variant", "block", "mean", "rstd", "dtype", "bound", "to_operand")),
    prepare=_prepare,
    parts=(_skeleton,),
    workload=Workload(
        document="llm.c's LayerNorm kernels",
        idea="(x - mean) · rstd · γ + β over each row; mean and rstd are stored too",
        sizes={"B": 8, "T": 1024, "C": 768},
        draw=_make,
        traffic=lambda s: 2 * s["itemsize"] * s["B"] * s["T"] * s["C"],  # bytes of x and of out
        flops=lambda s: 8 * s["B"] * s["T"] * s["C"],
        attrs={"eps": 1e-5},
        small=(
            {"B": 1, "T": 1, "C": 24},
            {"B": 1, "T": 5, "C": 33},
            {"B": 2, "T": 17, "C": 128},
            {"B": 1, "T": 3, "C": 769},
        ),
        aliases={"in": "x", "N": "B*T", "rows": "B*T", "seq_len": "B*T"},
        further=lambda x, *_, eps: layernorm_stats(x, eps),
        dtypes=("float32", "float16", "bfloat16"),
    ),
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
    """Compute `reference.layernorm` on CuPy arrays. Raises InputError.

    variant: 1 to 5 are llm.c's kernels, for float32. 6 is the fastest, also for float16 and
    bfloat16. "narrow" takes x of 16 bits with float32 gamma and beta, and C up to 16,384. "decode",
    for float32, gives the same bits as `linear` with gamma and beta. None selects the kernel of the
    ten-step block, or 6 or narrow for calls that this kernel does not support. dtype "hi_lo":
    narrow with a float32 x; the result is a HiLoMatrix, which `gemm` takes. With `stats`, the
    result is (out, mean, rstd), where mean and rstd are float32 of shape x.shape[:-1].
    """
    arrays = contiguous(x, gamma, beta)
    if stats and variant in (NARROW, DECODE):
        raise InputError(f"layernorm variant {variant}: writes no mean and rstd: use variant 6")
    half = storage(x) != "float32"
    wide = isinstance(gamma, cupy.ndarray) and gamma.dtype == cupy.float32
    if variant is None and (stats or (half and not wide)):
        variant = STATS_VARIANT
    bound = call(OPERATION, arrays, eps=eps, variant=variant, block=block, stats=stats, dtype=dtype)
    return (bound.out, bound.extra[0], bound.extra[1]) if stats else bound.out
