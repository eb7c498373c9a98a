"""RMSNorm with the product behind it, as in Llama: projections, and the feed-forward."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from numbers import Integral
from typing import Any, Literal, NamedTuple, overload

import numpy as np

from gpt2block.checks import check_flag
from gpt2block.config import check_eps
from gpt2block.cuda import cupy
from gpt2block.cuda import overlap as overlapping  # the module; `overlap` is of two arrays
from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    alignment,
    check,
    checked_row_stride,
    compute_capability,
    contiguous,
    device_attribute,
    in_rows,
    launch_at,
    output,
    storage,
)
from gpt2block.cuda.kernels import FP8, Geometry, Launch
from gpt2block.cuda.tensor_maps import tensor_map
from gpt2block.errors import InputError
from gpt2block.ops._gemm_hopper import SLICE
from gpt2block.ops._rmsnorm_hopper import FILE as RMSNORM_HOPPER_FILE
from gpt2block.ops._rmsnorm_hopper import geometry as rmsnorm_hopper_geometry
from gpt2block.ops._rmsnorm_hopper import rows_loaded, weight_box
from gpt2block.ops._rmsnorm_mma import FILE as RMSNORM_MMA_FILE
from gpt2block.ops._rmsnorm_mma import fits as rmsnorm_mma_fits
from gpt2block.ops._rmsnorm_mma import geometry as rmsnorm_mma_geometry
from gpt2block.ops._tensor_cores import HOPPER_CAPABILITY, MMA_CAPABILITY, MULTIPLE
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant
from gpt2block.ops.rmsnorm import bind as bind_rmsnorm
from gpt2block.ops.rope import bind as bind_rope
from gpt2block.ops.rope import check_turn, exponent_step
from gpt2block.ops.warm import call
from gpt2block.weights.matrix import WeightMatrix

FILE = "llama/rmsnorm_matmul.cu"
TILES = "llama/rmsnorm_matmul_mma.cu"
DTYPES = ("float16", "bfloat16", "float32", *FP8)
WARP = 32
MOST_ROWS = 4  # of x that a block of the matvec kernels takes
MOST_SUMS = 64  # that a thread of them keeps in registers
Pairing = Literal["neighbours", "halves", "two matrices"]


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def _make_matmul(s: Sizes, rng: np.random.Generator) -> Inputs:
    x, gamma = _normal(rng, s["M"], s["K"]), 1 + _normal(rng, s["K"]) / 10
    return x, gamma, _normal(rng, s["K"], s["N"]) / np.float32(s["K"] ** 0.5)


def _make_ffn(s: Sizes, rng: np.random.Generator) -> Inputs:
    return *_make_matmul(s, rng), _normal(rng, s["K"], s["N"]) / np.float32(s["K"] ** 0.5)


def _random_matrix(s: Sizes) -> int:
    return s["weight"] * s["K"] * s["N"]


def _activations(s: Sizes) -> int:
    return s["itemsize"] * s["M"] * (s["K"] + s["N"])


def _variants(matvec: str, mma: str, hopper: str, after: str, beside: str) -> tuple[Variant, ...]:
    return (
        Variant(
            "matvec",
            FILE,
            (matvec,),
            "few rows: every weight read once, asked for before x; the norm's factor at the end",
        ),
        Variant(
            "mma",
            TILES,
            (mma,),
            "many rows: tiles on tensor cores (mma.sync), the norm in the same loop over K",
        ),
        Variant(
            "unfused",
            TILES,
            (mma,),
            f"rmsnorm by itself first, then the product{after}: x is normalised once",
        ),
        Variant(
            "hopper",
            RMSNORM_HOPPER_FILE,
            (hopper,),
            f"the product by TMA and wgmma, which fetches weights while rmsnorm runs; {beside}",
            dtypes=("float16", "bfloat16"),
        ),
    )


@lru_cache(maxsize=1024)
def matvec(
    M: int,
    N: int,
    K: int,
    x_width: int,
    weight: int,
    layout: str,
    pairing: Pairing,
    head_dim: int,
    alignment: int,
    most_shared: int,
) -> Geometry | None:
    """The launch of a matvec kernel; None when a row does not fit in `most_shared` bytes.

    x_width: values of x in a load. weight: bytes of one. pairing: how columns go together,
    neighbours, those half a head apart, or those of two matrices. alignment: of the weights, in
    bytes. Threads, strips and unrolling are the best ones measured on an H200 at one row.
    """
    two = pairing == "two matrices"
    halves = pairing == "halves"
    rows = min(MOST_ROWS, 1 << (M - 1).bit_length())
    strips = 2 if layout == "NK" or pairing != "neighbours" else 1
    unit = K if layout == "NK" else head_dim // 2 if halves else N  # vectors do not cross its end
    width = 16 // weight
    if layout == "KN":
        width = min(width, MOST_SUMS // (strips * rows))
    while unit % width or alignment % (width * weight):
        width //= 2
    if layout == "NK":
        threads, lanes = 256, WARP
        step, pairs = WARP * width, threads // WARP
        unroll = 8 if weight > 1 else 2 if two else 4
        parts = 0
    else:
        threads = 256 if two else 512
        lanes = min(WARP, max(1, (64 if two else 32 // strips) // width))
        while halves and unit % (lanes * width):
            lanes //= 2
        step, pairs = threads // lanes, lanes * width * strips // 2
        unroll = 8 if weight > 1 and strips == 1 else 4
        parts = 4 * threads // WARP * strips * lanes * width
    row = 4 * step * ceil(K / step) + parts
    while rows > 1 and rows * row > most_shared:
        rows //= 2
    if row > most_shared:
        return None
    defines = (
        ("MV_NK", int(layout == "NK")),
        ("MV_ROWS", rows),
        ("MV_X", x_width),
        ("MV_WIDTH", width),
        ("MV_UNROLL", min(unroll, ceil(K / step))),
        ("MV_THREADS", threads),
        ("MV_LANES", lanes),
        ("MV_STRIPS", strips),
        ("MV_HALF_SPLIT", int(halves)),
    )
    columns = N if two else ceil(N / 2)
    kernel = "rmsnorm_ffn_matvec" if two else "rmsnorm_matvec"
    grid = (ceil(columns / pairs), ceil(M / rows))
    return Geometry(kernel, grid, (threads,), rows * row, defines)


MOST_BLOCKS = 65535  # along the grid's second axis
LONGEST_FOR_FEW = 24_000  # values of a row that fit in any GPU's shared memory
FEW_ROWS = 2  # up to here the variant "matvec" is the fastest on an H200
UNFUSED_FROM = 64  # rows, with which "unfused" is it for the feed-forward
HOPPER_FROM = 2**28  # multiplications, with which "hopper" is worth a launch more


class Job(NamedTuple):
    """What both operations have in common, checked."""

    operation: Operation
    x: CudaArray  # (..., K), its last axis contiguous
    residual: CudaArray | None
    gamma: CudaArray
    matrices: tuple[WeightMatrix, ...]
    out: CudaArray
    eps: float
    stride: int  # from one row of x to the next

    @property
    def storage(self) -> str:
        return str(self.x.dtype.name)

    @property
    def weights(self) -> str | None:
        """The FP8 format of the weights, if they have one."""
        dtype = self.matrices[0].dtype
        return dtype if dtype in FP8 else None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N, K."""
        K = self.x.shape[-1]
        return self.x.size // K, self.matrices[0].N, K


def _check(
    operation: Operation,
    x: Any,
    residual: Any,
    gamma: Any,
    weights: tuple[tuple[str, Any], ...],
    out: CudaArray | None,
    eps: float,
) -> Job:
    dtype = storage(x)
    check_eps(eps)
    check("x", x, dtype=dtype, strided=True)
    if x.ndim < 2:
        raise InputError(f"x: expected (..., T, K), got {x.shape}")
    stride = checked_row_stride("x", x)
    K = x.shape[-1]
    check("gamma", gamma, (K,), dtype)
    if residual is not None:
        check("residual", residual, x.shape, dtype)
    matrices = tuple(_matrix(name, w, K, dtype) for name, w in weights)
    first = matrices[0]
    for (name, _), w in zip(weights, matrices, strict=True):
        if (w.N, w.dtype, w.layout) != (first.N, first.dtype, first.layout):
            raise InputError(
                f"{name}: expected N {first.N}, {first.dtype}, layout {first.layout} as "
                f"{weights[0][0]}, got N {w.N}, {w.dtype}, layout {w.layout}"
            )
    given = {"x": x, "residual": residual, "gamma": gamma}
    given |= {name: w for (name, _), w in zip(weights, matrices, strict=True)}
    out = output(out, (*x.shape[:-1], first.N), dtype, apart=given)
    return Job(operation, x, residual, gamma, matrices, out, float(eps), stride)


def _matrix(name: str, w: Any, K: int, storage: str) -> WeightMatrix:
    """Weights as they are given, checked; an array is (K, N)."""
    data, dtype = (w.data, w.dtype) if isinstance(w, WeightMatrix) else (w, storage)
    check(name, data, dtype="uint8" if dtype in FP8 else storage)
    matrix = w if isinstance(w, WeightMatrix) else WeightMatrix(w, storage)
    if matrix.K != K:
        raise InputError(f"{name}: expected K {K} to match x, got {matrix.K} ({matrix.layout})")
    return matrix


def bind_matmul(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    eps: float = 1e-6,
    head_dim: int | None = None,
    start: int = 0,
    theta: float = 10000.0,
    half_split: bool = False,
    variant: str | None = None,
) -> Bound:
    """inputs (x (..., T, K), gamma (K,), w (K, N) or WeightMatrix), out (..., T, N)."""
    x, gamma, w = inputs
    half_split = check_flag("half_split", half_split)
    job = _check(RMSNORM_MATMUL, x, None, gamma, (("w", w),), out, eps)
    M, N, K = job.sizes
    turns = head_dim is not None
    if head_dim is not None:
        whole = isinstance(head_dim, Integral) and not isinstance(head_dim, bool)
        if not whole or head_dim < 2 or head_dim % 2 or N % head_dim:
            raise InputError(f"head_dim {head_dim!r}: expected an even number that divides N {N}")
        head_dim = int(head_dim)
    check_turn(start, theta, job.x.shape[-2])
    chosen = _choose(job, variant)
    scale, seq_len = job.matrices[0].scale, job.x.shape[-2]

    turn = (int(start), *exponent_step(float(theta), head_dim or 2))

    def product(x: CudaArray, gamma: Any, stride: int, dim: int) -> tuple[Any, ...]:
        data = job.matrices[0].data
        return (x, gamma, data, scale, job.out, job.eps, stride, M, N, K, seq_len, dim, *turn)

    if chosen == "matvec":
        pairing: Pairing = "halves" if turns and half_split else "neighbours"
        where = _matvec(job, pairing, head_dim or 0)
        args = product(job.x, job.gamma, job.stride, head_dim or 0)
        return Bound(job.out, (_launch(job, FILE, where, args),))

    apart = turns and (half_split or chosen == "unfused")  # the angle in a launch of its own
    rope = _turn(job, head_dim or 0, start, theta, half_split) if apart else ()
    dim = 0 if apart else head_dim or 0
    if chosen == "mma":
        args = product(job.x, job.gamma, job.stride, dim)
        return Bound(job.out, (_launch(job, RMSNORM_MMA_FILE, _tiles(job), args), *rope))
    norm = bind_rmsnorm((job.x, job.gamma), eps=job.eps)
    if chosen == "hopper":
        by_wgmma = _hopper(job, norm.out, dim > 0, (seq_len, dim, *turn))
        return Bound(job.out, (*norm.launches, by_wgmma, *rope), (norm.out,))
    file, where = _without_norm(job)
    args = product(norm.out, None, K, dim)
    return Bound(job.out, (*norm.launches, _launch(job, file, where, args), *rope), (norm.out,))


def _turn(
    job: Job, head_dim: int, start: int, theta: float, half_split: bool
) -> tuple[Launch, ...]:
    heads = job.out.reshape(-1, job.out.shape[-2], job.matrices[0].N // head_dim, head_dim)
    bound = bind_rope((heads,), heads, start=start, theta=theta, half_split=half_split)
    return bound.launches


def bind_ffn(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    eps: float = 1e-6,
    variant: str | None = None,
) -> Bound:
    """inputs (x (..., T, K), gamma (K,), w1, w3, and maybe residual (..., T, K)), out (..., T, N).

    w1, w3: (K, N), or WeightMatrix. With a residual x + residual is the first of `extra`.
    """
    x, gamma, w1, w3, residual = (*inputs, None)[:5]
    job = _check(RMSNORM_FFN, x, residual, gamma, (("w1", w1), ("w3", w3)), out, eps)
    M, N, K = job.sizes
    chosen = _choose(job, variant)
    first, second = job.matrices
    both = (first.data, first.scale, second.data, second.scale)
    if chosen in ("unfused", "hopper"):
        norm = bind_rmsnorm((job.x, job.gamma, residual), eps=job.eps)
        kept = (*norm.extra, norm.out)
        if chosen == "hopper":
            by_wgmma = _hopper(job, norm.out, False, ())
            return Bound(job.out, (*norm.launches, by_wgmma), kept)
        file, where = _without_norm(job)
        args = (norm.out, None, None, None, *both, job.out, job.eps, K, M, N, K)
        return Bound(job.out, (*norm.launches, _launch(job, file, where, args)), kept)
    file, where = (
        (FILE, _matvec(job, "two matrices"))
        if chosen == "matvec"
        else (RMSNORM_MMA_FILE, _tiles(job))
    )
    h = None if residual is None else cupy.empty(job.x.shape, job.storage)
    args = (job.x, residual, h, job.gamma, *both, job.out, job.eps, job.stride, M, N, K)
    return Bound(job.out, (_launch(job, file, where, args),), () if h is None else (h,))


def _choose(job: Job, variant: str | None) -> str:
    """The variant asked for, or the fastest; InputError when it cannot do this."""
    M, N, K = job.sizes
    problem = _not_for_tiles(job)
    if variant is None:
        much = M > FEW_ROWS and M * N * K * len(job.matrices) >= HOPPER_FROM
        if much and not _not_for_hopper(job):
            return "hopper"
        fits = job.x.shape[-1] <= LONGEST_FOR_FEW
        if problem or (M <= FEW_ROWS and fits):
            return "matvec"
        apart = len(job.matrices) == 2 and job.residual is None and M >= UNFUSED_FROM
        return "unfused" if apart else "mma"
    name = job.operation.variant(variant).name
    if name == "mma" and problem:
        raise InputError(f"{job.operation.name} variant mma: {problem}: use variant matvec")
    if name == "hopper" and (problem := _not_for_hopper(job)):
        raise InputError(f"{job.operation.name} variant hopper: {problem}")
    return name


def _not_for_hopper(job: Job) -> str | None:
    """Why the kernels with wgmma cannot do this."""
    if compute_capability() != HOPPER_CAPABILITY:
        return "needs a GPU of compute capability 9.0 (Hopper): use variant mma"
    if job.storage == "float32" or job.weights:
        return "takes float16 and bfloat16, and weights of the same: use variant mma or matvec"
    _, N, K = job.sizes
    aligned = all(array.data.ptr % 16 == 0 for array in (job.out, *(w.data for w in job.matrices)))
    if not aligned or N % MULTIPLE or K % MULTIPLE:
        return (
            "expected K and N in multiples of 8, weights and out on 16 bytes, "
            f"got K {K}, N {N}: use variant matvec"
        )
    return None


def _not_for_tiles(job: Job) -> str | None:
    """Why the tensor-core kernels cannot do this."""
    if compute_capability() < MMA_CAPABILITY:
        return "needs a GPU of compute capability 8.0 or newer"
    if job.storage == "float32":
        return "takes float16 and bfloat16"
    _, N, K = job.sizes
    first = job.matrices[0]
    arrays = [job.x, job.gamma, job.out, *(w.data for w in job.matrices)]
    arrays += [] if job.residual is None else [job.residual]
    aligned = all(array.data.ptr % 16 == 0 for array in arrays)
    if not (aligned and rmsnorm_mma_fits(N, K, job.stride, first.data.itemsize, first.layout)):
        return (
            "expected K, N and the stride of x in multiples of 8 (rows of FP8 weights of 16), "
            f"arrays on 16 bytes, got K {K}, N {N}, stride {job.stride}"
        )
    return None


def _hopper(job: Job, normed: CudaArray, turns: bool, rest: tuple[Any, ...]) -> Launch:
    """The product of what the launch before it has normalised."""
    M, N, K = job.sizes
    layout, matrices = job.matrices[0].layout, len(job.matrices)
    sms = device_attribute("MultiProcessorCount")
    where, tile = rmsnorm_hopper_geometry(matrices, M, N, K, layout=layout, turns=turns, sms=sms)
    box = weight_box(tile, matrices, layout)
    maps = (
        tensor_map(
            normed.reshape(1, M, K),
            (1, rows_loaded(tile, M), SLICE),
        ),
        *(tensor_map(w.data.reshape(1, *w.data.shape), box) for w in job.matrices),
        tensor_map(job.out.reshape(1, M, N), (1, 64, tile.chunk)),
    )
    launch = _launch(job, RMSNORM_HOPPER_FILE, where, (*maps, M, N, K, *rest))
    return overlapping.early(launch)


def _tiles(job: Job, norm: bool = True) -> Geometry:
    M, N, K = job.sizes
    first = job.matrices[0]
    return rmsnorm_mma_geometry(
        len(job.matrices),
        M,
        N,
        K,
        weight=first.data.itemsize,
        layout=first.layout,
        sms=device_attribute("MultiProcessorCount"),
        most_shared=device_attribute("MaxSharedMemoryPerBlockOptin"),
        norm=norm,
        residual=norm and job.residual is not None,
    )


def _without_norm(job: Job) -> tuple[str, Geometry]:
    """The product alone: file and launch of the kernel that can do it."""
    if _not_for_tiles(job):
        pairing: Pairing = "neighbours" if len(job.matrices) == 1 else "two matrices"
        return FILE, _matvec(job, pairing)
    return RMSNORM_MMA_FILE, _tiles(job, norm=False)


def _matvec(job: Job, pairing: Pairing, head_dim: int = 0) -> Geometry:
    M, N, K = job.sizes
    first = job.matrices[0]
    arrays = [a.data.ptr for a in (job.x, job.gamma, job.residual) if a is not None]
    width = 16 // job.x.itemsize
    while K % width or job.stride % width or alignment(*arrays) % (width * job.x.itemsize):
        width //= 2
    weights = [w.data.data.ptr for w in job.matrices]
    most_shared = device_attribute("MaxSharedMemoryPerBlockOptin") - 1024  # static, and its own
    where = matvec(
        M,
        N,
        K,
        width,
        first.data.itemsize,
        first.layout,
        pairing,
        head_dim,
        alignment(*weights),
        most_shared,
    )
    if where is None:
        raise InputError(
            f"K {K:,}: a row of {4 * K:,} bytes does not fit in the {most_shared:,} bytes of this "
            "GPU's shared memory: variant mma has no such limit, for float16 and bfloat16"
        )
    if where.grid[1] > MOST_BLOCKS:
        most = MOST_BLOCKS * (M // where.grid[1])
        raise InputError(f"x: about {most:,} rows of K {K:,} at most for matvec, got {M:,}")
    return where


def _launch(job: Job, file: str, where: Geometry, args: tuple[Any, ...]) -> Launch:
    return launch_at(file, where, args, storage=job.storage, weights=job.weights)


RMSNORM_MATMUL = Operation(
    name="rmsnorm_matmul",
    document="Llama operations",
    idea="(x · rms · γ) W, with RoPE on heads of head_dim columns if asked for",
    sizes={"M": 16, "K": 4096, "N": 4096},
    variants=_variants(
        "rmsnorm_matvec",
        "rmsnorm_matmul_mma",
        "rmsnorm_matmul_hopper",
        ", then rope",
        "rope in its epilogue",
    ),
    make=_make_matmul,
    traffic=lambda s: _random_matrix(s) + _activations(s),
    flops=lambda s: 2 * s["M"] * s["K"] * s["N"],
    bound="either",
    attrs={"head_dim": 128},
    dtypes=DTYPES,
    matrices=(2,),
    series=("M", 512),
    binder=bind_matmul,
)


def rmsnorm_matmul(
    x: CudaArray,
    gamma: CudaArray,
    w: CudaArray | WeightMatrix,
    eps: float = 1e-6,
    head_dim: int | None = None,
    start: int = 0,
    theta: float = 10000.0,
    half_split: bool = False,
    variant: str | None = None,
) -> CudaArray:
    """`reference.rmsnorm_matmul` on CuPy arrays; raises InputError.

    x (..., T, K) and gamma in float16, bfloat16 or float32; rows of x may lie apart. w: an array
    (K, N) of the same dtype, or a `WeightMatrix` of that or FP8, in either layout. Without a
    variant: matvec for one row or two, for more hopper on a GPU that has wgmma, where the matrix is
    large, and mma elsewhere, as measured on an H200; matvec where the sizes or the GPU allow
    nothing else. A row's last bits can depend on the number of rows.
    """
    return call(
        bind_matmul,
        (in_rows(x), *contiguous(gamma), w),
        eps=eps,
        head_dim=head_dim,
        start=start,
        theta=theta,
        half_split=half_split,
        variant=variant,
    ).out


RMSNORM_FFN = Operation(
    name="rmsnorm_ffn",
    document="Llama operations",
    idea="n = (x + residual) · rms · γ, then silu(n W1) · (n W3)",
    sizes={"M": 16, "K": 4096, "N": 11008},
    variants=_variants(
        "rmsnorm_ffn_matvec",
        "rmsnorm_ffn_mma",
        "rmsnorm_ffn_hopper",
        "s",
        "columns of W1 and W3 beside each other",
    ),
    make=_make_ffn,
    traffic=lambda s: 2 * _random_matrix(s) + _activations(s),
    flops=lambda s: 4 * s["M"] * s["K"] * s["N"],
    bound="either",
    attrs={},
    dtypes=DTYPES,
    matrices=(2, 3),
    layout="NK",
    series=("M", 512),
    binder=bind_ffn,
)


@overload
def rmsnorm_ffn(
    x: CudaArray,
    gamma: CudaArray,
    w1: CudaArray | WeightMatrix,
    w3: CudaArray | WeightMatrix,
    eps: float = ...,
    residual: None = ...,
    variant: str | None = ...,
) -> CudaArray: ...


@overload
def rmsnorm_ffn(
    x: CudaArray,
    gamma: CudaArray,
    w1: CudaArray | WeightMatrix,
    w3: CudaArray | WeightMatrix,
    eps: float = ...,
    *,
    residual: CudaArray,
    variant: str | None = ...,
) -> tuple[CudaArray, CudaArray]: ...


def rmsnorm_ffn(
    x: CudaArray,
    gamma: CudaArray,
    w1: CudaArray | WeightMatrix,
    w3: CudaArray | WeightMatrix,
    eps: float = 1e-6,
    residual: CudaArray | None = None,
    variant: str | None = None,
) -> CudaArray | tuple[CudaArray, CudaArray]:
    """`reference.rmsnorm_ffn` on CuPy arrays; raises InputError.

    dtypes, weights and variants as in `rmsnorm_matmul`, but where it is not hopper and without a
    residual the default for many rows is unfused. With a residual the result is a pair: the output,
    and x + residual in the dtype of x.
    """
    gamma, residual = contiguous(gamma, residual)
    bound = call(bind_ffn, (in_rows(x), gamma, w1, w3, residual), eps=eps, variant=variant)
    return bound.out if residual is None else (bound.out, bound.extra[0])
