"""RMSNorm and the product that follows it, as in Llama: projections, and the feed-forward.

`rmsnorm_matmul` is (x rms γ) W, with RoPE on the heads of the result on request. `rmsnorm_ffn` is
silu(n W1) (n W3) for n = (x + residual) rms γ. Kernels: llama/rmsnorm_matmul.cu (matvec),
llama/rmsnorm_matmul_mma.cu (mma, unfused), llama/rmsnorm_matmul_hopper.cu (hopper).
"""

from __future__ import annotations

from numbers import Integral
from typing import Any, NamedTuple, overload

import numpy as np

from gpt2block.checks import check_flag
from gpt2block.config import check_eps
from gpt2block.cuda import cupy
from gpt2block.cuda import overlap as overlapping
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
from gpt2block.errors import InputError
from gpt2block.ops import _rmsnorm_hopper as hopper
from gpt2block.ops import _rmsnorm_matvec as matvec
from gpt2block.ops import _rmsnorm_mma as mma
from gpt2block.ops._matrix import check_weights, storage_of
from gpt2block.ops._tensor_cores import HOPPER_CAPABILITY, MMA_CAPABILITY, MULTIPLE
from gpt2block.ops.operation import Inputs, Operation, Shape, Sizes, Variant
from gpt2block.ops.rmsnorm import bind as bind_rmsnorm
from gpt2block.ops.rope import bind as bind_rope
from gpt2block.ops.rope import check_turn, exponent_step
from gpt2block.ops.warm import call
from gpt2block.weights.matrix import WeightMatrix

DTYPES = ("float16", "bfloat16", "float32", *FP8)
MAX_BLOCKS = 65535  # along the grid's second axis
LONGEST_FOR_FEW = 24_000  # values of a row that fit in any GPU's shared memory
FEW_ROWS = 2  # up to here the variant matvec is the fastest on an H200
UNFUSED_FROM = 64  # rows from which unfused is the fastest for the feed-forward
HOPPER_FROM = 2**28  # multiplications for which hopper is worth one more launch


class Rotation(NamedTuple):
    """RoPE of the product, on heads of `head_dim` columns; 0 for none."""

    head_dim: int = 0
    start: int = 0
    theta: float = 10000.0
    half_split: bool = False


class Job(NamedTuple):
    """Either operation, checked: one matrix for rmsnorm_matmul, two for rmsnorm_ffn."""

    x: CudaArray  # (..., T, K), its last axis contiguous
    residual: CudaArray | None
    gamma: CudaArray | None  # None once x is normalised
    matrices: tuple[WeightMatrix, ...]
    out: CudaArray
    eps: float
    stride: int  # from one row of x to the next
    rotation: Rotation = Rotation()

    @property
    def storage(self) -> str:
        return str(self.x.dtype.name)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N, K."""
        K = self.x.shape[-1]
        return self.x.size // K, self.matrices[0].N, K

    @property
    def fused_head_dim(self) -> int:
        """That of the tensor-core kernels, which rotate neighbours alone; 0 for no rotation."""
        return 0 if self.rotation.half_split else self.rotation.head_dim

    def rotated(self, head_dim: int) -> tuple[int | float, ...]:
        """The last arguments of the kernels of rmsnorm_matmul, which rotate unless 0 is given."""
        if len(self.matrices) == 2:
            return ()
        step = exponent_step(self.rotation.theta, self.rotation.head_dim or 2)
        return (self.x.shape[-2], head_dim, self.rotation.start, *step)

    def launch(
        self, file: str, geometry: Geometry, head_dim: int, total: CudaArray | None = None
    ) -> Launch:
        """A kernel for matvec or mma. total: memory for x + residual."""
        weights = [array for w in self.matrices for array in (w.data, w.scale)]
        inputs: tuple[Any, ...] = (self.x, self.gamma)
        if len(self.matrices) == 2:
            inputs = (self.x, self.residual, total, self.gamma)
        args = (*inputs, *weights, self.out, self.eps, self.stride, *self.sizes)
        types = storage_of(self.matrices[0], self.storage)
        return launch_at(file, geometry, (*args, *self.rotated(head_dim)), *types)

    def rope(self) -> tuple[Launch, ...]:
        """RoPE of the result as a launch of its own."""
        head_dim, start, theta, half_split = self.rotation
        if not head_dim:
            return ()
        heads = self.out.reshape(-1, self.out.shape[-2], self.matrices[0].N // head_dim, head_dim)
        rope = bind_rope((heads,), heads, start=start, theta=theta, half_split=half_split)
        return rope.launches

    def norm(self) -> Bound:
        """RMSNorm as a launch of its own."""
        return bind_rmsnorm((self.x, self.gamma, self.residual), eps=self.eps)


def _fused(job: Job, file: str, geometry: Geometry, head_dim: int) -> Bound:
    """One launch, and one for RoPE where the kernel does not rotate."""
    total = None if job.residual is None else cupy.empty(job.x.shape, job.storage)
    launch = job.launch(file, geometry, head_dim, total)
    rope = () if head_dim else job.rope()
    return Bound(job.out, (launch, *rope), () if total is None else (total,))


def _launch_matvec(job: Job) -> Bound:
    return _fused(job, matvec.FILE, _matvec_geometry(job, job.rotation), job.rotation.head_dim)


def _matvec_geometry(job: Job, rotation: Rotation) -> Geometry:
    """InputError where rows are too long, or too many."""
    M, N, K = job.sizes
    first = job.matrices[0]
    arrays = [a.data.ptr for a in (job.x, job.gamma, job.residual) if a is not None]
    width = 16 // job.x.itemsize
    while K % width or job.stride % width or alignment(*arrays) % (width * job.x.itemsize):
        width //= 2
    pairing: matvec.Pairing = (
        "halves" if rotation.head_dim and rotation.half_split else "neighbours"
    )
    most_shared = device_attribute("MaxSharedMemoryPerBlockOptin") - 1024  # static, and its own
    geometry = matvec.geometry(
        M,
        N,
        K,
        width,
        first.data.itemsize,
        first.layout,
        "two matrices" if len(job.matrices) == 2 else pairing,
        rotation.head_dim,
        alignment(*(w.data.data.ptr for w in job.matrices)),
        most_shared,
    )
    if geometry is None:
        raise InputError(
            f"K {K:,}: a row of {4 * K:,} bytes does not fit in the {most_shared:,} bytes of this "
            "GPU's shared memory: variant mma has no such limit, for float16 and bfloat16"
        )
    if geometry.grid[1] > MAX_BLOCKS:
        most = MAX_BLOCKS * (M // geometry.grid[1])
        raise InputError(f"x: about {most:,} rows of K {K:,} at most for matvec, got {M:,}")
    return geometry


def _launch_mma(job: Job) -> Bound:
    return _fused(job, mma.FILE, _mma_geometry(job), job.fused_head_dim)


def _mma_geometry(job: Job) -> Geometry:
    first = job.matrices[0]
    return mma.geometry(
        len(job.matrices),
        *job.sizes,
        weight=first.data.itemsize,
        layout=first.layout,
        sms=device_attribute("MultiProcessorCount"),
        most_shared=device_attribute("MaxSharedMemoryPerBlockOptin"),
        norm=job.gamma is not None,
        residual=job.residual is not None,
    )


def _mma_problem(job: Job) -> str | None:
    if compute_capability() < MMA_CAPABILITY:
        return "needs a GPU of compute capability 8.0 or newer: use variant matvec"
    if job.storage == "float32":
        return "takes float16 and bfloat16: use variant matvec"
    _, N, K = job.sizes
    first = job.matrices[0]
    fits = mma.fits(N, K, job.stride, first.data.itemsize, first.layout)
    if not (fits and _aligned(job, job.x, job.gamma, job.residual)):
        return (
            "expected K, N and the stride of x in multiples of 8 (rows of FP8 weights of 16), "
            f"arrays on 16 bytes, got K {K}, N {N}, stride {job.stride}: use variant matvec"
        )
    return None


def _aligned(job: Job, *others: CudaArray | None) -> bool:
    """Whether weights, output and others start on multiples of 16 bytes."""
    arrays = (job.out, *(w.data for w in job.matrices), *others)
    return alignment(*(array.data.ptr for array in arrays if array is not None)) == 16


def _launch_unfused(job: Job) -> Bound:
    norm = job.norm()
    normed = job._replace(x=norm.out, gamma=None, residual=None, stride=job.x.shape[-1])
    if _mma_problem(job) is None:
        file, geometry = mma.FILE, _mma_geometry(normed)
    else:
        file, geometry = matvec.FILE, _matvec_geometry(job, Rotation())
    launches = (*norm.launches, normed.launch(file, geometry, 0), *job.rope())
    return Bound(job.out, launches, (*norm.extra, norm.out))


def _launch_hopper(job: Job) -> Bound:
    norm, head_dim = job.norm(), job.fused_head_dim
    matrices = tuple(w.data for w in job.matrices)
    product = hopper.launch(
        norm.out, matrices, job.matrices[0].layout, job.out, *job.rotated(head_dim)
    )
    launches = (*norm.launches, overlapping.early(product), *(() if head_dim else job.rope()))
    return Bound(job.out, launches, (*norm.extra, norm.out))


def _hopper_problem(job: Job) -> str | None:
    if compute_capability() != HOPPER_CAPABILITY:
        return "needs a GPU of compute capability 9.0 (Hopper): use variant mma"
    if job.storage == "float32" or job.matrices[0].dtype in FP8:
        return "takes float16 and bfloat16, and weights of the same: use variant mma or matvec"
    _, N, K = job.sizes
    if not _aligned(job) or N % MULTIPLE or K % MULTIPLE:
        return (
            "expected K and N in multiples of 8, weights and out on 16 bytes, "
            f"got K {K}, N {N}: use variant matvec"
        )
    return None


def _preferred(job: Job) -> tuple[str, ...]:
    """The variants to try, the fastest first; matvec where nothing else can run."""
    M, N, K = job.sizes
    if M <= FEW_ROWS:
        return ("matvec",) if K <= LONGEST_FOR_FEW else ("mma", "matvec")
    two = len(job.matrices) == 2
    names = ("hopper",) if M * N * K * len(job.matrices) >= HOPPER_FROM else ()
    unfused = two and job.residual is None and M >= UNFUSED_FROM and _mma_problem(job) is None
    return (*names, "unfused" if unfused else "mma", "matvec")


def _check(
    x: Any,
    residual: Any,
    gamma: Any,
    weights: dict[str, Any],
    out: CudaArray | None,
    eps: float,
) -> Job:
    dtype = storage(x)
    check_eps(eps)
    check("x", x, dtype=dtype, strided=True)
    if x.ndim < 2:
        raise InputError(f"x: expected (..., T, K), got {x.shape}")
    stride = checked_row_stride("x", x)
    check("gamma", gamma, (x.shape[-1],), dtype)
    if residual is not None:
        check("residual", residual, x.shape, dtype)
    matrices = {name: _matrix(name, w, x) for name, w in weights.items()}
    (first_name, first), *others = matrices.items()
    for name, w in others:
        if (w.N, w.dtype, w.layout) != (first.N, first.dtype, first.layout):
            raise InputError(
                f"{name}: expected N {first.N}, {first.dtype}, layout {first.layout} as "
                f"{first_name}, got N {w.N}, {w.dtype}, layout {w.layout}"
            )
    given = {"x": x, "residual": residual, "gamma": gamma, **matrices}
    out = output(out, (*x.shape[:-1], first.N), dtype, apart=given)
    return Job(x, residual, gamma, tuple(matrices.values()), out, float(eps), stride)


def _matrix(name: str, w: Any, x: CudaArray) -> WeightMatrix:
    """Weights in the dtype of x or FP8, checked; an array is (K, N)."""
    dtype = storage(x)
    if not isinstance(w, WeightMatrix):
        check(name, w, dtype=dtype)
        w = WeightMatrix(w, dtype)
    elif w.dtype not in FP8:
        check(name, w.data, dtype=dtype)
    return check_weights(name, w, ("x", x), layout=None)


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
    job = _check(x, None, gamma, {"w": w}, out, eps)
    if head_dim is not None:
        N = job.matrices[0].N
        whole = isinstance(head_dim, Integral) and not isinstance(head_dim, bool)
        if not whole or head_dim < 2 or head_dim % 2 or N % head_dim:
            raise InputError(f"head_dim {head_dim!r}: expected an even number that divides N {N}")
    check_turn(start, theta, job.x.shape[-2])
    rotation = Rotation(int(head_dim or 0), int(start), float(theta), half_split)
    job = job._replace(rotation=rotation)
    bound: Bound = RMSNORM_MATMUL.choose(job, variant, _preferred(job)).launch(job)
    return bound


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
    job = _check(x, residual, gamma, {"w1": w1, "w3": w3}, out, eps)
    bound: Bound = RMSNORM_FFN.choose(job, variant, _preferred(job)).launch(job)
    return bound


def _shape(x: Shape, gamma: Shape, w: Shape, *_: Shape | None, **attrs: Any) -> Shape:
    return (*x[:-1], w[1])


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


def _variants(names: tuple[str, str, str], unfused: str, tiles: str) -> tuple[Variant, ...]:
    return (
        Variant(
            "matvec",
            matvec.FILE,
            (names[0],),
            "few rows: every weight read once, requested before x; the norm's factor at the end",
            launch=_launch_matvec,
        ),
        Variant(
            "mma",
            mma.FILE,
            (names[1],),
            "many rows: tiles on tensor cores (mma.sync), the norm in the same loop over K",
            launch=_launch_mma,
            problem=_mma_problem,
        ),
        Variant(
            "unfused",
            mma.FILE,
            (names[1],),
            f"rmsnorm in a kernel of its own, then the product{unfused}: x is normalised once",
            launch=_launch_unfused,
        ),
        Variant(
            "hopper",
            hopper.FILE,
            (names[2],),
            f"the product by TMA and wgmma, which fetches weights while rmsnorm runs; {tiles}",
            dtypes=("float16", "bfloat16"),
            launch=_launch_hopper,
            problem=_hopper_problem,
        ),
    )


RMSNORM_MATMUL = Operation(
    name="rmsnorm_matmul",
    document="kernl's Llama kernels",
    idea="(x · rms · γ) W, with RoPE on heads of head_dim columns on request",
    sizes={"M": 16, "K": 4096, "N": 4096},
    variants=_variants(
        ("rmsnorm_matvec", "rmsnorm_matmul_mma", "rmsnorm_matmul_hopper"),
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
    shape=_shape,
    series=("M", 512),
    binder=bind_matmul,
)


RMSNORM_FFN = Operation(
    name="rmsnorm_ffn",
    document="kernl's Llama kernels",
    idea="n = (x + residual) · rms · γ, then silu(n W1) · (n W3)",
    sizes={"M": 16, "K": 4096, "N": 11008},
    variants=_variants(
        ("rmsnorm_ffn_matvec", "rmsnorm_ffn_mma", "rmsnorm_ffn_hopper"),
        "s",
        "columns of W1 and W3 next to each other",
    ),
    make=_make_ffn,
    traffic=lambda s: 2 * _random_matrix(s) + _activations(s),
    flops=lambda s: 4 * s["M"] * s["K"] * s["N"],
    bound="either",
    attrs={},
    dtypes=DTYPES,
    matrices=(2, 3),
    shape=_shape,
    layout="NK",
    series=("M", 512),
    binder=bind_ffn,
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
