"""LayerNorm: (x - mean) · rstd · γ + β over each row.

Kernels: layernorm/skeleton.cu (LeetGPU's GPT-2 block challenge: the default for float32);
layernorm/ladder.cu and warp.cu (llm.c's kernels, 1 to 5); layernorm/rows.cu (6), narrow.cu and
decode.cu.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
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
    check_address,
    check_apart,
    contiguous,
    device_attribute,
    launch_at,
    output,
    storage,
)
from gpt2block.cuda.kernels import Geometry, Launch, launch
from gpt2block.errors import InputError
from gpt2block.ops._rows import check_rows, share
from gpt2block.ops._terms import check_terms, stored_defines
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant, check_block
from gpt2block.ops.two_part import TWO_PART, check_one_scale
from gpt2block.ops.warm import call
from gpt2block.plan import Terms
from gpt2block.weights.two_part import TwoPartMatrix

BLOCKS = (32, 64, 128, 256, 512, 1024)
SKELETON_BLOCK = 256
KEPT = 64  # bytes of a row that a thread of kernel 6 keeps in registers, at most
MAX_THREADS = 1024  # of a block
KEPT_BY_MOST = 32  # the same with MAX_THREADS threads, which have 64 registers each
NARROW = "narrow"  # the variant whose out is narrower than gamma and beta
DECODE = "decode"  # the variant with the bits of `linear`'s own LayerNorm
MOST_DECODE_ROWS = 8  # of a block
MANY = 2**31  # rows: the teams of `narrow` are sized for many rows, whatever the number
TEAMS = 512  # threads on an SM that hold rows of `narrow` at the same time
HELD = 96  # registers for a thread's part of gamma, beta and its rows of x, in a block of 128
MOST_EACH = 2  # rows of a team
STATS_VARIANT = 6  # the default where the skeleton's kernels lack an option


class RowShape(NamedTuple):
    """How kernel 6 distributes a row: LN_WIDTH, LN_THREADS and LN_VECTORS of its source."""

    width: int  # elements a load
    threads: int  # a row
    vectors: int  # a thread; 0: too many for registers, the row is read three times


def row_shape(C: int, itemsize: int, alignment: int = 16) -> RowShape:
    """The widest loads that C and the alignment of the arrays (in bytes) allow, up to 16 bytes.

    Then the fewest threads that can keep the row: a row of one warp needs no barrier.
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
    float_x: bool, rows: int, C: int, width: int, sms: int, two_part: bool = False
) -> Geometry:
    """Of variant `narrow` for `rows` of C channels, `width` elements a vector.

    two_part: x of float, out in two parts. How a row is shared among threads follows from C and
    width alone, and so do its bits; teams take several rows where there are more than `sms`
    multiprocessors hold at once. Raises InputError when a row does not fit in registers.
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
    kernel = "layernorm_narrow" + ("_split" if two_part else "_float" if float_x else "")
    return Geometry(kernel, (ceil(rows / (shape.rows * each)),), (shape.block,), defines=defines)


class Request(NamedTuple):
    """The properties that determine whether a variant supports a call."""

    stored: str  # the dtype of x
    two_part: bool  # the result is a TwoPartMatrix
    options: bool  # block, mean or rstd is given


class Job(NamedTuple):
    """A checked call: x and out (..., C) as N rows, mean and rstd (...) or None."""

    x: CudaArray
    gamma: CudaArray
    beta: CudaArray
    out: Any  # an array or a TwoPartMatrix
    mean: CudaArray | None
    rstd: CudaArray | None
    eps: float
    N: int
    C: int
    block: int
    requested: bool  # whether the caller chose the block
    to_terms: Terms | None  # what out has in the place of floats

    @property
    def every(self) -> tuple[Any, ...]:
        """The arguments of a kernel with all outputs."""
        return self[:9]


def _launch_skeleton(job: Job) -> tuple[Launch, ...]:
    name, width = ("layernorm768_kernel", ()) if job.C == 768 else ("layernorm_kernel", (job.C,))
    args = (job.x, job.out, job.gamma, job.beta, job.N, *width)
    defines = (("LN_EPS", f"{job.eps!r}f"),)
    file, block = "layernorm/skeleton.cu", (SKELETON_BLOCK,)
    return (launch(file, name, (job.N,), block, args, defines=defines),)


def _ladder(job: Job, kernel: str, grid: tuple[int, ...], args: tuple[Any, ...]) -> Launch:
    defines = (("LN_BLOCK", job.block),)
    return launch("layernorm/ladder.cu", kernel, grid, (job.block,), args, defines=defines)


def _launch_threads(job: Job) -> tuple[Launch, ...]:
    return (_ladder(job, "layernorm_forward_kernel1", (ceil(job.N / job.block),), job.every),)


def _launch_three(job: Job) -> tuple[Launch, ...]:
    x, gamma, beta, out, mean, rstd, eps, N, C, block, *_ = job
    return (
        _ladder(job, "mean_kernel", (N,), (x, mean, C)),
        _ladder(job, "rstd_kernel", (N,), (x, mean, rstd, eps, C)),
        _ladder(
            job,
            "normalization_kernel",
            (N, ceil(C / block)),
            (x, mean, rstd, gamma, beta, out, C),
        ),
    )


def _launch_warps(kernel: str, job: Job) -> tuple[Launch, ...]:
    """The kernel reads the block size at run time: one program serves all."""
    grid = (ceil(job.N / (job.block // 32)),)
    return (launch("layernorm/warp.cu", kernel, grid, (job.block,), job.every),)


def _launch_blocks(job: Job) -> tuple[Launch, ...]:
    return (_ladder(job, "layernorm_forward_kernel5", (job.N,), (*job[:7], job.C)),)


def _launch_rows(job: Job) -> tuple[Launch, ...]:
    """Compile with constants for C and the alignment of the arrays."""
    x, gamma, beta, out, *_ = job
    itemsize = x.dtype.itemsize
    shape = row_shape(job.C, itemsize, alignment(*(a.data.ptr for a in (x, gamma, beta, out))))
    if job.requested and shape.threads > job.block:
        raise InputError(
            f"layernorm variant 6: block size {job.block}: a row of {job.C:,} channels takes "
            f"{shape.threads} threads: expected at least that, at most {MAX_THREADS}"
        )
    block = max(job.block, shape.threads)
    rows = block // shape.threads
    names = ("LN_WIDTH", "LN_THREADS", "LN_VECTORS", "LN_ROWS")
    defines = tuple(zip(names, (*shape, rows), strict=True))
    file, kernel, grid = "layernorm/rows.cu", "layernorm_forward_kernel6", (ceil(job.N / rows),)
    stored = x.dtype.name
    return (launch(file, kernel, grid, (block,), job.every, defines=defines, storage=stored),)


def _launch_narrow(job: Job) -> tuple[Launch, ...]:
    x, gamma, beta, out, _, _, eps, N, C, *_ = job
    two_part = isinstance(out, TwoPartMatrix)
    written, scale = (out.parts, (1 / (out.one_scale or 1.0),)) if two_part else (out, ())
    width = _width(C, x, gamma, beta, written)
    sms = device_attribute("MultiProcessorCount")
    geometry = narrow_geometry(x.dtype == np.float32, N, C, width, sms, two_part)
    args = (x, gamma, beta, written, *scale, eps, N, C)
    return (launch_at("layernorm/narrow.cu", geometry, args, storage=written.dtype.name),)


def _launch_decode(job: Job) -> tuple[Launch, ...]:
    """One warp per row, in as many blocks as possible. The loads are part of the order of sums."""
    x, gamma, beta, out, _, _, eps, N, C, *_ = job
    loaded = math.gcd(4, C)
    for name in ("x", "gamma", "beta", "out"):
        check_address(name, getattr(job, name), 4 * loaded)
    rows = min(MOST_DECODE_ROWS, ceil(N / device_attribute("MultiProcessorCount")))
    sizes = (("LN_C", C), ("LN_X", loaded), ("LN_ROWS", rows))
    defines = (*sizes, *stored_defines("LN_TERMS", job.to_terms))
    geometry = Geometry("layernorm_decode", (ceil(N / rows),), (32 * rows,), defines=defines)
    return (launch_at("layernorm/decode.cu", geometry, (x, gamma, beta, out, eps, N)),)


def _width(C: int, *arrays: CudaArray) -> int:
    """Elements of a vector: 16 bytes of the last array, unless C or an address forbids it."""
    width = 16 // int(arrays[-1].itemsize)
    while C % width or any(a.data.ptr % min(16, width * a.itemsize) for a in arrays):
        width //= 2
    return width


def _skeleton_problem(request: Request) -> str | None:
    return "block, mean and rstd need a variant: pass variant=1 to 6" if request.options else None


def _rows_problem(request: Request) -> str | None:
    return "a result in two parts is for variant narrow alone" if request.two_part else None


def _ladder_problem(request: Request) -> str | None:
    if request.stored != "float32":
        return f"x: expected float32, got {request.stored}: use .astype('float32')"
    return _rows_problem(request)


def _decode_problem(request: Request) -> str | None:
    if request.options:
        return "decode has no block, mean and rstd: use variant 6"
    return _ladder_problem(request)


def _narrow_problem(request: Request) -> str | None:
    return "narrow has no block, mean and rstd: use variant 6" if request.options else None


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | TwoPartMatrix | None = None,
    *,
    eps: float,
    variant: str | int | None = None,
    block: int | None = None,
    stats: bool = True,
    mean: CudaArray | None = None,
    rstd: CudaArray | None = None,
    dtype: str | None = None,
    bound: float | None = None,
    to_terms: Terms | None = None,
) -> Bound:
    """inputs (x (..., C), gamma (C,), beta (C,)), out (..., C); `extra` is (mean, rstd), (...).

    variant 1 to 6: the ladder. None is the kernel of the ten-step block, without `extra`, for
    float32, and "narrow" for 16 bits. Variant 6 takes float16 and bfloat16 too, and leaves mean and
    rstd out without `stats`.

    "decode", for float32, has the bits of the LayerNorm in `linear`; it has no `extra` either.
    to_terms: what out has in the place of floats, as `linear` takes them.

    "narrow" has no `extra`; gamma and beta are float32, and x is float32 or has the dtype of out.
    Also where out is a TwoPartMatrix with one scale, and x float32; dtype "two_part" makes a new
    one, with the scale of `bound`, or of what gamma and beta allow.
    """
    x, gamma, beta = inputs
    eps = check_eps(eps)
    check_flag("stats", stats)
    two_part = isinstance(out, TwoPartMatrix) or dtype is not None or bound is not None
    stored = "float32" if two_part else storage(x)
    options = any(option is not None for option in (block, mean, rstd))
    request = Request(stored, two_part, options)
    if variant is None and not two_part and stored == "float32":
        chosen = SKELETON
        if problem := chosen.problem(request):
            raise InputError(f"layernorm: {problem}")
    else:
        chosen = OPERATION.choose(request, variant, (NARROW,))
    check("x", x, dtype=stored)
    C = x.shape[-1]
    vectors = "float32" if chosen.name == NARROW else stored
    if to_terms and chosen.name != DECODE:
        raise InputError(
            f"layernorm: terms of {to_terms}, variant {chosen.name}: expected variant decode"
        )
    check_terms(to_terms, C)
    check("gamma", gamma, (C,), vectors)
    check("beta", beta, (C,), vectors)
    N = check_rows("x", x)
    size = check_block(OPERATION.name, chosen, block)
    given = {"x": x, "gamma": gamma, "beta": beta}
    if two_part:
        out = _two_part_output(x, gamma, beta, out, dtype, bound)
    else:
        narrowed = chosen.name == NARROW and stored == "float32" and out is not None
        out = output(out, x.shape, storage(out) if narrowed else stored, apart=given)
    extra: tuple[CudaArray, ...] = ()
    if chosen.name not in WITHOUT_STATS:
        if stats or chosen.launch is not _launch_rows:  # the ladder always writes them
            given["out"] = out
            mean = output(mean, x.shape[:-1], name="mean", apart=given)
            rstd = output(rstd, x.shape[:-1], name="rstd", apart={**given, "mean": mean})
            extra = (mean, rstd)
        elif mean is not None or rstd is not None:
            raise InputError(
                "layernorm: mean and rstd are written with stats only: pass stats=True"
            )
    job = Job(x, gamma, beta, out, mean, rstd, eps, N, C, size, block is not None, to_terms)
    return Bound(out, chosen.launch(job), extra)


def _two_part_output(
    x: CudaArray,
    gamma: CudaArray,
    beta: CudaArray,
    out: TwoPartMatrix | None,
    dtype: str | None,
    bound: float | None,
) -> TwoPartMatrix:
    """`out`, checked, or a new TwoPartMatrix with one scale."""
    if dtype not in (None, TWO_PART):
        raise InputError(f"dtype {dtype!r}: expected {TWO_PART!r} or none")
    if out is None:
        if bound is None:
            bound = layernorm_bound(cupy.asnumpy(gamma), cupy.asnumpy(beta))
        return TwoPartMatrix.empty(x.shape, bound)
    check_one_scale(out, x.shape, bound)
    check_apart("out", out, {"x": x, "gamma": gamma, "beta": beta})
    return out


def layernorm_bound(gamma: Any, beta: Any) -> float:
    """The largest magnitude of LayerNorm's result: C values of variance 1 are sqrt(C) at most."""
    return math.sqrt(len(gamma)) * float(np.abs(gamma).max()) + float(np.abs(beta).max())


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    """x (B, T, C), gamma (C,), beta (C,)."""
    B, T, C = sizes["B"], sizes["T"], sizes["C"]
    normal = (rng.standard_normal(shape) + 0.5 for shape in ((B, T, C), (C,), (C,)))
    return tuple(array.astype(np.float32) for array in normal)


SKELETON = Variant(
    "skeleton",
    "layernorm/skeleton.cu",
    ("layernorm768_kernel", "layernorm_kernel"),
    "the ten-step plan's kernel: one block per row, without mean and rstd",
    source="LeetGPU's GPT-2 block challenge",
    launch=_launch_skeleton,
    problem=_skeleton_problem,
)

WITHOUT_STATS = (NARROW, DECODE, SKELETON.name)

OPERATION = Operation(
    name="layernorm",
    document="llm.c's LayerNorm kernels",
    idea="(x - mean) · rstd · γ + β over each row; mean and rstd are stored too",
    sizes={"B": 8, "T": 1024, "C": 768},
    variants=(
        Variant(
            "1",
            "layernorm/ladder.cu",
            ("layernorm_forward_kernel1",),
            "one thread per row, loops over C",
            BLOCKS,
            block=64,
            launch=_launch_threads,
            problem=_ladder_problem,
        ),
        Variant(
            "2",
            "layernorm/ladder.cu",
            ("mean_kernel", "rstd_kernel", "normalization_kernel"),
            "three kernels: one block per row, tree in shared memory; then one thread per element",
            BLOCKS,
            launch=_launch_three,
            problem=_ladder_problem,
        ),
        Variant(
            "3",
            "layernorm/warp.cu",
            ("layernorm_forward_kernel3",),
            "one warp per row by cooperative groups, all steps in one kernel, streaming hints",
            BLOCKS,
            block=512,
            launch=partial(_launch_warps, "layernorm_forward_kernel3"),
            problem=_ladder_problem,
        ),
        Variant(
            "4",
            "layernorm/warp.cu",
            ("layernorm_forward_kernel4",),
            "as 3 with var = E[x²] - E[x]²: one pass fewer over x",
            BLOCKS,
            block=512,
            launch=partial(_launch_warps, "layernorm_forward_kernel4"),
            problem=_ladder_problem,
        ),
        Variant(
            "5",
            "layernorm/ladder.cu",
            ("layernorm_forward_kernel5",),
            "one block per row, reduced in two stages: warps, then the first warp",
            BLOCKS,
            block=128,
            launch=_launch_blocks,
            problem=_ladder_problem,
        ),
        Variant(
            "6",
            "layernorm/rows.cu",
            ("layernorm_forward_kernel6",),
            "rows in registers, 16-byte loads, x read once; float32, float16 and bfloat16",
            BLOCKS,
            block=64,
            source="gpt2block",
            launch=_launch_rows,
            problem=_rows_problem,
        ),
        Variant(
            NARROW,
            "layernorm/narrow.cu",
            ("layernorm_narrow", "layernorm_narrow_float", "layernorm_narrow_split"),
            "for tensor cores: float32 γ and β, out in 16 bits or two-part, a few rows per team of "
            "threads, overlapping launches",
            source="gpt2block",
            launch=_launch_narrow,
            problem=_narrow_problem,
        ),
        Variant(
            DECODE,
            "layernorm/decode.cu",
            ("layernorm_decode",),
            "decoding: one warp per row, with the bits of the LayerNorm in `linear`; overlapping "
            "launches",
            source="gpt2block",
            dtypes=("float32",),
            launch=_launch_decode,
            problem=_decode_problem,
        ),
    ),
    make=_make,
    traffic=lambda s: 2 * s["itemsize"] * s["B"] * s["T"] * s["C"],  # read x, write out
    flops=lambda s: 8 * s["B"] * s["T"] * s["C"],
    bound="memory",
    attrs={"eps": 1e-5},
    dtypes=("float32", "float16", "bfloat16"),
    auxiliary=(SKELETON,),
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

    variant: 1 to 5 are llm.c's kernels, float32; 6 is the fastest, float16 and bfloat16 too.
    "narrow" takes an x of 16 bits with gamma and beta of float32, C up to 16,384. "decode" has the
    bits of `linear` with gamma and beta, float32. None is the
    ten-step block's kernel, or 6 or narrow for what that cannot do. dtype "two_part": narrow of a
    float32 x; the result is a TwoPartMatrix, which `gemm` takes. With `stats`: (out, mean, rstd),
    where mean and rstd are float32 of shape x.shape[:-1].
    """
    arrays = contiguous(x, gamma, beta)
    if stats and variant in (NARROW, DECODE):
        raise InputError(f"layernorm variant {variant}: it gives no mean and rstd: use variant 6")
    half = storage(x) != "float32"
    wide = isinstance(gamma, cupy.ndarray) and gamma.dtype == cupy.float32
    if variant is None and (stats or (half and not wide)):
        variant = STATS_VARIANT
    options = {"variant": variant, "block": block, "stats": stats, "dtype": dtype}
    bound = call(bind, arrays, eps=eps, **options)
    return (bound.out, *bound.extra) if stats else bound.out
