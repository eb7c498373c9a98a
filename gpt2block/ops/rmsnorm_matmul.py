"""RMSNorm and the matrix products that follow it in Llama: projections and the feed-forward.

`rmsnorm_matmul` is (x rms γ) W, optionally with RoPE on the heads of the result. `rmsnorm_ffn` is
silu(n W1) (n W3), or gelu(n W1) (n W3), for n = (x + residual) rms γ. Kernels:
matmul/decode/rmsnorm_cores.cu (matvec), matmul/prompt/rmsnorm_mma.cu (mma, unfused),
matmul/prompt/rmsnorm_wgmma.cu (wgmma).
"""

from __future__ import annotations

from numbers import Integral
from typing import Any, overload

from gpt2block.cuda import overlap as overlapping
from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    alignment,
    check,
    checked_row_stride,
    contiguous,
    in_rows,
)
from gpt2block.cuda.kernels import FP8, Geometry, Launch, launch_at
from gpt2block.errors import InputError
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops.call import Call, Refusal, UncheckedCall, accept, needs, refuse, storage
from gpt2block.ops.engines import rmsnorm_matvec as matvec
from gpt2block.ops.engines import rmsnorm_mma as mma
from gpt2block.ops.engines import rmsnorm_wgmma as wgmma
from gpt2block.ops.operation import Operation, Sizes, Variant, Workload, variant
from gpt2block.ops.products import SMALL, gate_define, in_multiples, limits, storage_of
from gpt2block.ops.rmsnorm import OPERATION as RMSNORM
from gpt2block.ops.rope import OPERATION as ROPE
from gpt2block.ops.rope import check_rotation, exponent_step
from gpt2block.ops.warm import call

DTYPES = ("float16", "bfloat16", "float32", *FP8)
MAX_BLOCKS = 65535  # maximum blocks along the grid's second axis
MAX_MATVEC_K = 24_000  # values of a row that fit in any GPU's shared memory
MAX_MATVEC_ROWS = 2  # maximum rows for which variant matvec is the fastest on an H200
UNFUSED_FROM = 64  # minimum rows for which variant unfused is the fastest feed-forward
WGMMA_FROM = 2**28  # minimum multiplications for which wgmma's additional launch pays off


def _fused_head_dim(c: Call) -> int:
    """Return the argument head_dim of the tensor-core kernels; 0 if they do not fuse RoPE.

    The kernels fuse RoPE only for neighbouring channels, not for halves of a head.
    """
    return 0 if c.half_split else int(c.head_dim)


def _turn(c: Call, head_dim: int) -> tuple[int | float, ...]:
    """Return the RoPE arguments of rmsnorm_matmul's kernels. head_dim 0 means no RoPE."""
    if len(c.matrices) == 2:
        return ()
    return (c.x.shape[-2], head_dim, c.start, *exponent_step(c.theta, c.head_dim or 2))


def _product(
    c: Call, file: str, geometry: Geometry, head_dim: int, normed: CudaArray | None = None
) -> Launch:
    """Launch a matvec or mma kernel. `normed`: x after the norm, if another launch computes it."""
    stride = c.stride
    x, residual, total, gamma = c.x, c.residual, c.h, c.gamma
    if normed is not None:
        x, residual, total, gamma, stride = normed, None, None, None, c.K
    inputs = (x, gamma) if len(c.matrices) == 1 else (x, residual, total, gamma)
    weights = [array for w in c.matrices for array in (w.data, w.scale)]
    args = (*inputs, *weights, c.output("out"), c.eps, stride, *c.sizes, *_turn(c, head_dim))
    geometry = geometry.with_defines(gate_define(c.gelu))
    return launch_at(file, geometry, args, *storage_of(c.matrices[0], c.storage))


def _launches_of(c: Call, file: str, geometry: Geometry, head_dim: int) -> tuple[Launch, ...]:
    """Return the launch of a kernel and, if it does not fuse RoPE, a second launch for RoPE."""
    if c.residual is not None:
        c.output("h")
    return (_product(c, file, geometry, head_dim), *(() if head_dim else _rope(c)))


def _norm(c: Call) -> Bound:
    """Bind RMSNorm as a separate launch."""
    norm = RMSNORM.bind_on_device((c.x, c.gamma, c.residual), eps=c.eps)
    c.h, c.kept = (*norm.extra, None)[0], (norm.out,)
    return norm


def _rope(c: Call) -> tuple[Launch, ...]:
    """Return a tuple with a launch that applies RoPE to the result; empty if head_dim is 0."""
    if not c.head_dim:
        return ()
    out = c.output("out")
    heads = out.reshape(-1, out.shape[-2], c.N // c.head_dim, c.head_dim)
    rotation = {"start": c.start, "theta": c.theta, "half_split": c.half_split}
    return ROPE.bind_on_device((heads,), heads, **rotation).launches


def _matvec(c: Call) -> tuple[Launch, ...]:
    return _launches_of(c, matvec.FILE, _matvec_geometry(c, c.head_dim), c.head_dim)


def _matvec_geometry(c: Call, head_dim: int) -> Geometry:
    """Return the geometry of variant matvec. head_dim: channels per head for fused RoPE, or 0.

    Raises UnsupportedCall if there are too many rows, or if they are too long.
    """
    first = c.matrices[0]
    arrays = [a.data.ptr for a in (c.x, c.gamma, c.residual) if a is not None]
    width = 16 // c.x.itemsize
    while c.K % width or c.stride % width or alignment(*arrays) % (width * c.x.itemsize):
        width //= 2
    pairing: matvec.Pairing = "halves" if head_dim and c.half_split else "neighbours"
    max_shared = limits(static=1024)["max_shared"]
    geometry = matvec.geometry(
        *c.sizes,
        width,
        first.data.itemsize,
        first.layout,
        "two matrices" if len(c.matrices) == 2 else pairing,
        head_dim,
        alignment(*(w.data.data.ptr for w in c.matrices)),
        max_shared,
    )
    chosen = accept(
        geometry
        or Refusal(
            f"K {c.K:,}: a row of {4 * c.K:,} bytes does not fit in the {max_shared:,} bytes of "
            "this GPU's shared memory: variant mma has no such limit, for float16 and bfloat16"
        )
    )
    most = MAX_BLOCKS * (c.rows // chosen.grid[1])
    too_many = f"x: variant matvec takes about {most:,} rows of K {c.K:,}, got {c.rows:,}"
    refuse(chosen.grid[1] > MAX_BLOCKS, too_many)
    return chosen


def _mma(c: Call) -> tuple[Launch, ...]:
    accept(_mma_refusal(c))
    return _launches_of(c, mma.FILE, _mma_geometry(c), _fused_head_dim(c))


def _mma_geometry(c: Call, norm: bool = True) -> Geometry:
    """Return the geometry of variant mma. norm: whether the kernel normalizes x."""
    first = c.matrices[0]
    return mma.geometry(
        len(c.matrices),
        *c.sizes,
        weight=first.data.itemsize,
        layout=first.layout,
        **limits(),
        norm=norm,
        residual=norm and c.residual is not None,
    )


def _mma_refusal(c: Call) -> Refusal | None:
    """Return a refusal unless variant mma supports the call."""
    first = c.matrices[0]
    fits = mma.fits(c.N, c.K, c.stride, first.data.itemsize, first.layout)
    return Refusal.first(
        needs("has_mma", ": use variant matvec"),
        (c.storage == "float32", "takes float16 and bfloat16: use variant matvec"),
        (
            not (fits and _aligned(c, c.x, c.gamma, c.residual)),
            "expected K, N and the stride of x in multiples of 8 (rows of FP8 weights of 16), "
            f"arrays on 16 bytes, got K {c.K}, N {c.N}, stride {c.stride}: use variant matvec",
        ),
    )


def _aligned(c: Call, *others: CudaArray | None) -> bool:
    """Whether weights, output and the arrays `others` start on multiples of 16 bytes."""
    arrays = (c.output("out"), *(w.data for w in c.matrices), *others)
    return alignment(*(array.data.ptr for array in arrays if array is not None)) == 16


def _unfused(c: Call) -> tuple[Launch, ...]:
    if not _mma_refusal(c):
        file, geometry = mma.FILE, _mma_geometry(c, norm=False)
    else:
        file, geometry = matvec.FILE, _matvec_geometry(c, 0)
    norm = _norm(c)
    return (*norm.launches, _product(c, file, geometry, 0, norm.out), *_rope(c))


def _wgmma(c: Call) -> tuple[Launch, ...]:
    accept(needs("has_wgmma", ": use variant mma"))
    types = "takes float16 and bfloat16, and weights of the same: use variant mma or matvec"
    refuse(c.storage == "float32" or c.matrices[0].dtype in FP8, types)
    refuse(
        not _aligned(c) or not in_multiples(c.N, c.K),
        "expected K and N in multiples of 8, weights and out on 16 bytes, "
        f"got K {c.K}, N {c.N}: use variant matvec",
    )
    norm, head_dim = _norm(c), _fused_head_dim(c)
    matrices = tuple(w.data for w in c.matrices)
    rotation = _turn(c, head_dim)
    layout = c.matrices[0].layout
    product = wgmma.launch(norm.out, matrices, layout, c.output("out"), *rotation, gelu=c.gelu)
    return (*norm.launches, overlapping.overlapped(product), *(() if head_dim else _rope(c)))


def _preferred(c: Call) -> tuple[str, ...]:
    """Return names of the variants to try, fastest first. The last is always matvec."""
    if c.rows <= MAX_MATVEC_ROWS:
        return ("matvec",) if c.K <= MAX_MATVEC_K else ("mma", "matvec")
    count = len(c.matrices)
    names = ("wgmma",) if c.rows * c.N * c.K * count >= WGMMA_FROM else ()
    many = count == 2 and c.residual is None and c.rows >= UNFUSED_FROM
    return (*names, "unfused" if many and not _mma_refusal(c) else "mma", "matvec")


def _checked(unchecked: UncheckedCall, **more: Any) -> Call:
    """Check a call of rmsnorm_matmul or rmsnorm_ffn. Weights can be arrays (K, N)."""
    places, inputs = unchecked.contract.matrices, list(unchecked.inputs)
    names = tuple(unchecked.contract.inputs[place].name for place in places)
    for place, name in zip(places, names, strict=True):
        inputs[place] = _matrix(name, inputs[place])
    c = unchecked._replace(inputs=tuple(inputs)).checked(**more)
    if c.x.ndim < 2:
        raise InputError(f"x: expected (..., T, K), got {c.x.shape}")
    c.sizes, c.stride = (c.rows, c.N, c.K), checked_row_stride("x", c.x)
    c.matrices = tuple(getattr(c, name) for name in names)
    first = c.matrices[0]
    for name, w in zip(names, c.matrices, strict=True):
        if w.dtype not in FP8:
            check(name, w.data, dtype=c.storage)
        if (w.dtype, w.layout) != (first.dtype, first.layout):
            raise InputError(
                f"{name}: expected {first.dtype}, layout {first.layout} as {names[0]}, "
                f"got {w.dtype}, layout {w.layout}"
            )
    return c


def _matrix(name: str, w: object) -> WeightMatrix:
    """Return w as a WeightMatrix. w is a WeightMatrix or an array (K, N)."""
    if isinstance(w, WeightMatrix):
        return w
    check(name, w, dtype=storage(w))
    return WeightMatrix(w, storage(w))


def _prepare_matmul(unchecked: UncheckedCall) -> Call:
    start, theta, head_dim = (unchecked.options[name] for name in ("start", "theta", "head_dim"))
    # start, theta and head_dim are checked below, when the sizes are known.
    c = _checked(unchecked, start=None, theta=None, head_dim=None)
    if head_dim is not None:
        whole = isinstance(head_dim, Integral) and not isinstance(head_dim, bool)
        if not whole or head_dim < 2 or head_dim % 2 or c.N % head_dim:
            raise InputError(f"head_dim {head_dim!r}: expected an even number that divides N {c.N}")
    c.start, c.theta = check_rotation(start, theta, c.x.shape[-2])
    c.head_dim = int(head_dim or 0)
    c.residual = c.h = None  # only rmsnorm_ffn adds a residual; h is the sum
    c.gelu = False
    c.order = _preferred(c)
    return c


def _prepare_ffn(unchecked: UncheckedCall) -> Call:
    """Check a call of rmsnorm_ffn. With a residual, Bound.extra[0] is x + residual."""
    c = _checked(unchecked)
    c.head_dim, c.half_split = 0, False
    c.order = _preferred(c)
    return c


def _random_matrix(s: Sizes) -> int:
    return s["weight"] * s["K"] * s["N"]


def _activations(s: Sizes) -> int:
    return s["itemsize"] * s["M"] * (s["K"] + s["N"])


def _variants(few: str, many: str, wgmma_kernel: str) -> tuple[Variant, ...]:
    return (
        variant("matvec", matvec.FILE, few)(_matvec),
        variant("mma", mma.FILE, many)(_mma),
        variant("unfused", mma.FILE, many)(_unfused),
        variant("wgmma", wgmma.FILE, wgmma_kernel, dtypes=("float16", "bfloat16"))(_wgmma),
    )


OPERATION = Operation(
    name="rmsnorm_matmul",
    variants=_variants("rmsnorm_matvec", "rmsnorm_matmul_mma", "rmsnorm_matmul_wgmma"),
    options={"eps": 1e-6, "start": 0, "theta": 10000.0, "half_split": False}
    | dict.fromkeys(("head_dim", "variant")),
    prepare=_prepare_matmul,
    workload=Workload(
        document="kernl's Llama kernels",
        idea="(x · rms · γ) W, with RoPE on heads of head_dim columns on request",
        sizes={"M": 16, "K": 4096, "N": 4096},
        traffic=lambda s: _random_matrix(s) + _activations(s),
        flops=lambda s: 2 * s["M"] * s["K"] * s["N"],
        bound="either",
        attrs={"eps": 1e-6, "head_dim": 128, "theta": 10000.0},
        small=(
            {"M": 1, "K": 16, "N": 24, "head_dim": 8},
            {"M": 5, "K": 40, "N": 32, "head_dim": 16},
            {"M": 17, "K": 96, "N": 256},
        ),
        dtypes=DTYPES,
        matrices=(2,),
        series=("M", 512),
    ),
)


RMSNORM_FFN = Operation(
    name="rmsnorm_ffn",
    variants=_variants("rmsnorm_ffn_matvec", "rmsnorm_ffn_mma", "rmsnorm_ffn_wgmma"),
    options={"eps": 1e-6, "gelu": False, "variant": None},
    prepare=_prepare_ffn,
    workload=Workload(
        document="kernl's Llama kernels",
        idea="n = (x + residual) · rms · γ, then silu(n W1) · (n W3)",
        sizes={"M": 16, "K": 4096, "N": 11008},
        traffic=lambda s: 2 * _random_matrix(s) + _activations(s),
        flops=lambda s: 4 * s["M"] * s["K"] * s["N"],
        bound="either",
        attrs={"eps": 1e-6},
        small=SMALL,
        dtypes=DTYPES,
        matrices=(2, 3),
        layout="NK",
        series=("M", 512),
    ),
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
    """Compute `reference.rmsnorm_matmul` on CuPy arrays. Raises InputError.

    x (..., T, K) and gamma in float16, bfloat16 or float32; rows of x may be a constant distance
    apart. w: an array (K, N) of the same dtype, or a `WeightMatrix` of this dtype or FP8, in either
    layout. The default variant was the fastest on an H200: matvec for one or two rows; for more
    rows, wgmma on a GPU with wgmma if the matrix is large, else mma. matvec is the default if the
    sizes or the GPU allow no other variant. The last bits of a row can depend on the number of
    rows.
    """
    inputs = (in_rows(x), *contiguous(gamma), w)
    rotation: dict[str, Any] = {"head_dim": head_dim, "start": start, "theta": theta}
    rotation |= {"half_split": half_split, "variant": variant}
    return call(OPERATION, inputs, eps=eps, **rotation).out


@overload
def rmsnorm_ffn(
    x: CudaArray,
    gamma: CudaArray,
    w1: CudaArray | WeightMatrix,
    w3: CudaArray | WeightMatrix,
    eps: float = ...,
    residual: None = ...,
    variant: str | None = ...,
    gelu: bool = ...,
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
    gelu: bool = ...,
) -> tuple[CudaArray, CudaArray]: ...


def rmsnorm_ffn(
    x: CudaArray,
    gamma: CudaArray,
    w1: CudaArray | WeightMatrix,
    w3: CudaArray | WeightMatrix,
    eps: float = 1e-6,
    residual: CudaArray | None = None,
    variant: str | None = None,
    gelu: bool = False,
) -> CudaArray | tuple[CudaArray, CudaArray]:
    """Compute `reference.rmsnorm_ffn` on CuPy arrays. Raises InputError.

    dtypes, weights and variants are as in `rmsnorm_matmul`. One default differs: for many rows
    without a residual, unfused replaces mma. With a residual the result is a pair: the output, and
    x + residual in the dtype of x.
    """
    gamma, residual = contiguous(gamma, residual)
    inputs = (in_rows(x), gamma, w1, w3, residual)
    bound = call(RMSNORM_FFN, inputs, eps=eps, gelu=gelu, variant=variant)
    return bound.out if residual is None else (bound.out, bound.extra[0])
