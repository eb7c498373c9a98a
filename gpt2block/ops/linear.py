"""The linear layer, [residual +] [gelu]((LayerNorm(x) or x) w + bias), sums in float32.

Use it for float32 activations and weights (N, K) of any dtype, or where a GPU has no tensor cores:
matmul/decode_mma.cu for few rows, as in decoding, and with the same bits matmul/decode_tiles.cu for
more of them, or matmul/decode.cu where these do not apply; matmul/tiles.cu for many rows. `gemm` is
faster for many rows of 16-bit activations; `matmul_bias` takes plain float32 matrices (K, N).
"""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import numpy as np

from gpt2block.checks import check_flag
from gpt2block.config import check_eps
from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    alignment,
    check,
    check_address,
    check_apart,
    compute_capability,
    contiguous,
    device_attribute,
    launch_at,
    output,
    row_alignment,
)
from gpt2block.cuda.kernels import CACHE_WITH_FP8, FP8, Geometry, Launch
from gpt2block.errors import InputError
from gpt2block.ops import _linear_matvec as matvec
from gpt2block.ops import _linear_mma as mma
from gpt2block.ops import _linear_mma_tiles as mma_tiles
from gpt2block.ops import _linear_tiles as tiles
from gpt2block.ops._matrix import check_weights, storage_of
from gpt2block.ops._tensor_cores import MMA_CAPABILITY
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant
from gpt2block.ops.warm import call
from gpt2block.weights.matrix import WeightMatrix

FEW_ROWS = 16  # up to here the kernels for decoding are the default variants
DECODING = "mma", "matvec"  # variants of decoding steps: the first one that supports the job
MORE_ROWS = 16  # from here on LayerNorm is a step of its own, and mma_tiles can be faster than mma
FEW_PRODUCTS = 80_000_000  # M N K: up to here mma is faster than mma_tiles with more rows, too
MAX_OUTPUTS = 2**31 - 2**16  # N of these: what an int holds, and a block more
MAX_BLOCKS = 65535  # along the grid's second axis


class Job(NamedTuple):
    """A linear layer, checked."""

    x: CudaArray  # (..., K)
    w: WeightMatrix  # (N, K)
    bias: CudaArray | None
    gamma: CudaArray | None
    beta: CudaArray | None
    residual: CudaArray | None = None
    out: CudaArray = None  # (..., N)
    gelu: bool = False
    eps: float = 1e-5
    terms: bool = False  # x has terms in the place of floats
    to_terms: bool = False  # out has

    @property
    def M(self) -> int:  # noqa: N802
        return int(self.x.size // self.w.K)

    @property
    def products(self) -> tuple[Any, ...]:
        """The first arguments of all kernels of matmul/decode.cu and matmul/decode_mma.cu."""
        return self.x, self.gamma, self.beta, self.w.data, self.w.scale, self.bias


def terms_of(dtype: str, *Ks: int) -> str | None:
    """The dtype of the terms of x, for products of decoding with weights of `dtype` and these K.

    None: these products take no terms, because they are not on tensor cores, or of tf32.
    """
    multiple = mma.LOADED // mma.BYTES.get(dtype, 1)
    if dtype == "float32" or compute_capability() < MMA_CAPABILITY or any(K % multiple for K in Ks):
        return None
    return dtype if dtype == "bfloat16" else "float16"


def _most_shared() -> int:
    return device_attribute("MaxSharedMemoryPerBlockOptin") - 1024  # static, and its own


def _geometry(module: Any, job: Job, kernel: str) -> Geometry | None:
    """module: matvec or mma."""
    options = {"terms": True} if job.terms else {}
    geometry: Geometry | None = module.geometry(
        kernel,
        job.M,
        job.w.N,
        job.w.K,
        job.w.dtype if module is mma else job.w.data.itemsize,
        norm=job.gamma is not None,
        sms=device_attribute("MultiProcessorCount"),
        most_shared=_most_shared(),
        **options,
    )
    return geometry


def _decoding_problem(module: Any, job: Job) -> str | None:
    if job.w.N > MAX_OUTPUTS:
        return f"w: expected at most {MAX_OUTPUTS:,} outputs, got {job.w.N:,}"
    if job.to_terms or (job.terms and module is matvec):
        return "takes and gives floats: use variant mma_tiles for terms"
    geometry = _geometry(module, job, "")
    if geometry is None:
        return (
            f"K {job.w.K:,}: a row does not fit in the {_most_shared():,} bytes of this GPU's "
            "shared memory: variant tiles has no such limit"
        )
    if geometry.grid[1] > MAX_BLOCKS:
        return f"{job.M:,} rows: too many for this variant: use variant tiles"
    return None


def _matvec_problem(job: Job) -> str | None:
    return _decoding_problem(matvec, job)


def _mma_problem(job: Job) -> str | None:
    return _order_problem(job.w) or _decoding_problem(mma, job)


def _mma_tiles_problem(job: Job) -> str | None:
    if job.gamma is not None:
        return "takes no gamma and beta: use variant mma, or layernorm's variant decode before it"
    if job.w.N > MAX_OUTPUTS or job.M > MAX_OUTPUTS:
        return f"x {job.x.shape}, {job.w.N:,} outputs: expected at most {MAX_OUTPUTS:,} of both"
    return _order_problem(job.w)


def _order_problem(w: WeightMatrix) -> str | None:
    """Why a product cannot have the order of additions of decoding on tensor cores."""
    if compute_capability() < MMA_CAPABILITY:
        return "needs a GPU of compute capability 8.0 or newer: use variant matvec"
    multiple = mma.LOADED // w.data.itemsize
    if w.K % multiple:
        expected = f"expected a multiple of {multiple} for {w.dtype}"
        return f"K {w.K:,}: {expected}: use variant matvec"
    return None


def _decoding_variants(job: Job) -> tuple[str, ...]:
    """The variants of a decoding step, the preferred one first; those on tensor cores agree."""
    few = job.M * job.w.N * job.w.K <= FEW_PRODUCTS or job.M <= MORE_ROWS
    tiles_first = job.to_terms or (job.gamma is None and not few)
    return ("mma_tiles", *DECODING) if tiles_first else DECODING


def _check_addresses(job: Job, of_w: int) -> None:
    """The alignment of the loads of a kernel for decoding; of_w: bytes of one of w."""
    check_address("w", job.w.data, of_w)
    for name in ("x", "gamma", "beta"):
        if getattr(job, name) is not None:
            check_address(name, getattr(job, name), 4 * gcd(4, job.w.K))


def _launch_decoding(module: Any, job: Job, kernel: str, args: tuple[Any, ...], T: str) -> Launch:
    """Launch a kernel of matmul/decode.cu or matmul/decode_mma.cu; T: its type with FP8 weights."""
    size = job.w.data.itemsize
    vector = mma.LOADED if module is mma else matvec.order(job.w.N, job.w.K, size)[0] * size
    _check_addresses(job, vector)
    geometry = _geometry(module, job, kernel)
    assert geometry is not None
    return launch_at(module.FILE, geometry, args, *storage_of(job.w, T))


def _linear_args(job: Job) -> tuple[Any, ...]:
    return (*job.products, job.residual, job.out, job.eps, job.M, job.w.N, int(job.gelu))


def _launch_matvec(job: Job) -> Launch:
    return _launch_decoding(matvec, job, "linear_matvec", _linear_args(job), "float32")


def _launch_mma(job: Job) -> Launch:
    return _launch_decoding(mma, job, "linear_decode_mma", _linear_args(job), "float32")


def _launch_decode_tiles(job: Job, kernel: str, args: tuple[Any, ...], T: str) -> Launch:
    """Launch a kernel of matmul/decode_tiles.cu; T: its type with FP8 weights."""
    check_address("w", job.w.data)
    check_address("x", job.x)
    tile = mma_tiles.choose(
        job.M,
        job.w.N,
        job.w.K,
        job.w.dtype,
        capability=compute_capability(),
        sms=device_attribute("MultiProcessorCount"),
        most_shared=_most_shared(),
    )
    sizes = (job.M, job.w.N, job.w.K, job.w.dtype)
    geometry = mma_tiles.geometry(kernel, *sizes, tile, job.terms, job.to_terms)
    first = (job.x, job.w.data, job.w.scale, job.bias)
    return launch_at(mma_tiles.FILE, geometry, (*first, *args), *storage_of(job.w, T))


def _launch_mma_tiles(job: Job) -> Launch:
    args = (job.residual, job.out, job.M, job.w.N, job.w.K, int(job.gelu))
    return _launch_decode_tiles(job, "linear_decode_tiles", args, "float32")


def _tiles_problem(job: Job) -> str | None:
    if job.gamma is not None:
        return "takes no gamma and beta: use variant matvec"
    N, K = job.w.N, job.w.K
    if max(job.M, N) > tiles.MAX_SIZE or K > tiles.MAX_K:
        return (
            f"x {job.x.shape}, w ({N}, {K}): expected at most {tiles.MAX_SIZE:,} rows or outputs, "
            f"and {tiles.MAX_K:,} inputs"
        )
    return None


def _launch_tiles(job: Job) -> Launch:
    M, N, K = job.M, job.w.N, job.w.K
    data = job.w.data
    geometry = tiles.geometry(
        M,
        N,
        data.itemsize,
        min(tiles.MOST_LOADED, alignment(K * data.itemsize, data.data.ptr) // data.itemsize),
        4 if row_alignment(N, job.out, job.residual) == 16 else 1,
        job.gelu,
        device_attribute("MultiProcessorCount"),
        device_attribute("MaxSharedMemoryPerBlockOptin"),
    )
    args = (job.x, data, job.w.scale, job.bias, job.residual, job.out, M, K, N)
    return launch_at(tiles.FILE, geometry, args, *storage_of(job.w))


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    gelu: bool = False,
    eps: float = 1e-5,
    variant: str | None = None,
    decoding: bool = False,
    terms: bool = False,
    to_terms: str | None = None,
) -> Bound:
    """inputs (x (..., K), w, bias, gamma, beta, residual (..., N)), out (..., N).

    w: a WeightMatrix (N, K). Later inputs may be None or missing; residual may be out. decoding:
    choose a variant as for few rows, so that a row has the same bits in any number of rows. terms:
    x has terms of the dtype `terms_of(w.dtype, K)` in the place of its floats (lib/terms.cuh), and
    no gamma; to_terms: this dtype, and out has them, for another product with such weights.
    """
    x, w, bias, gamma, beta, residual = (*inputs, *(None,) * 4)[:6]
    gelu = check_flag("gelu", gelu)
    given = _check(x, w, bias, gamma, beta, eps)
    shape = (*x.shape[:-1], w.N)
    if residual is not None:
        check("residual", residual, shape)
    out = output(out, shape, apart=given, in_place={"residual": residual})
    _check_terms(w, gamma, terms, to_terms)
    job = Job(x, w, bias, gamma, beta, residual, out, gelu, float(eps), terms, to_terms is not None)
    few = decoding or job.M <= FEW_ROWS or gamma is not None
    return Bound(
        out,
        (
            OPERATION.choose(job, variant, _decoding_variants(job) if few else ("tiles",)).launch(
                job
            ),
        ),
    )


def bind_qkv(
    x: CudaArray,
    w: WeightMatrix,
    bias: CudaArray | None,
    gamma: CudaArray | None,
    beta: CudaArray | None,
    k_cache: CudaArray,
    v_cache: CudaArray,
    row: CudaArray,
    position: CudaArray,
    q: CudaArray | None = None,
    eps: float = 1e-5,
    terms: bool = False,
) -> Bound:
    """LayerNorm(x) W + bias: q (M, C), and k and v of x[m] into position[m] of row[m] of a cache.

    x (M, K), w a WeightMatrix (3C, K), caches (B, n_ctx, C) in the dtype of the weights, or in
    float16 with FP8 weights, row and position int32 (M,), no two of them alike. k and v of a token
    outside the cache are dropped. Without gamma and beta, x is not normalized. terms: as in `bind`.
    `out` is q. Raises InputError.
    """
    if getattr(x, "ndim", 2) != 2:
        raise InputError(f"x: expected (M, K), got {x.shape}")
    given = _check(x, w, bias, gamma, beta, eps)
    _check_terms(w, gamma, terms)
    job = Job(x, w, bias, gamma, beta, terms=terms)
    if w.N % 3:
        raise InputError(f"w: expected 3C outputs for q, k and v, got {w.N}")
    M, C = job.M, w.N // 3
    kept = CACHE_WITH_FP8 if w.dtype in FP8 else w.dtype
    check("k_cache", k_cache, dtype=kept)
    if k_cache.ndim != 3 or k_cache.shape[2] != C:
        raise InputError(f"k_cache: expected (B, n_ctx, {C}), got {k_cache.shape}")
    check("v_cache", v_cache, k_cache.shape, kept)
    check("row", row, (M,), "int32")
    check("position", position, (M,), "int32")
    given.update(row=row, position=position)
    q = output(q, (M, C), name="q", apart=given)
    check_apart("k_cache", k_cache, {**given, "q": q})
    check_apart("v_cache", v_cache, {**given, "q": q, "k_cache": k_cache})
    arrays = (row, position, q, k_cache, v_cache)
    sizes = (C, *k_cache.shape[:2])
    variant = OPERATION.choose(job, None, _decoding_variants(job)).name
    if variant == "mma_tiles":
        args = (*arrays, M, w.K, *sizes)
        return Bound(q, (_launch_decode_tiles(job, "qkv_decode_tiles", args, kept),))
    args = (*job.products, *arrays, float(eps), M, *sizes)
    module, kernel = (mma, "qkv_decode_mma") if variant == "mma" else (matvec, "qkv_matvec")
    return Bound(q, (_launch_decoding(module, job, kernel, args, kept),))


def _check_terms(w: WeightMatrix, gamma: Any, terms: bool, to_terms: str | None = None) -> None:
    if not terms and to_terms is None:
        return
    kind = terms_of(w.dtype, w.K)
    odd = to_terms is not None and (to_terms != kind or w.N % 2)
    if kind is None or odd or (terms and gamma is not None):
        raise InputError(
            f"w: {w.dtype}, {w.K} inputs, {w.N} outputs: expected terms of {kind or 'no dtype'}, "
            "without gamma and beta, and an even number of outputs: pass floats"
        )


def _check(x: Any, w: Any, bias: Any, gamma: Any, beta: Any, eps: float) -> dict[str, Any]:
    """The inputs of both functions, by name."""
    check_eps(eps)
    check("x", x)
    check_weights("w", w, ("x", x))
    if bias is not None:
        check("bias", bias, (w.N,))
    if (gamma is None) != (beta is None):
        raise InputError("gamma and beta: expected both, or neither")
    for name, array in (("gamma", gamma), ("beta", beta)):
        if array is not None:
            check(name, array, (w.K,))
    return {"x": x, "w": w, "bias": bias, "gamma": gamma, "beta": beta}


def _make(s: Sizes, rng: np.random.Generator) -> Inputs:
    x = rng.standard_normal((s["M"], s["K"]), dtype=np.float32)
    w = rng.standard_normal((s["K"], s["N"]), dtype=np.float32) / np.float32(s["K"] ** 0.5)
    return x, w, rng.standard_normal(s["N"], dtype=np.float32)


OPERATION = Operation(
    name="linear",
    document="gpt2block",
    idea="[residual +] [gelu]((LayerNorm(x) or x) W + bias)",
    sizes={"M": 1, "K": 768, "N": 2304},
    variants=(
        Variant(
            "matvec",
            matvec.FILE,
            ("linear_matvec",),
            "few rows: all weights requested before x; LayerNorm of x in each block",
            launch=_launch_matvec,
            problem=_matvec_problem,
        ),
        Variant(
            "mma",
            mma.FILE,
            ("linear_decode_mma",),
            "few rows on tensor cores, x in two terms: the same bits in any batch",
            launch=_launch_mma,
            problem=_mma_problem,
        ),
        Variant(
            "mma_tiles",
            mma_tiles.FILE,
            ("linear_decode_tiles",),
            "more rows on tensor cores, with the bits of mma: tiles, K split over a cluster",
            launch=_launch_mma_tiles,
            problem=_mma_tiles_problem,
        ),
        Variant(
            "tiles",
            tiles.FILE,
            (tiles.KERNEL,),
            "many rows: register tiles in the order of k, narrow weights widened in shared memory",
            launch=_launch_tiles,
            problem=_tiles_problem,
        ),
    ),
    auxiliary=(
        Variant("qkv", matvec.FILE, ("qkv_matvec",), "matvec, with k and v into the KV cache"),
        Variant("qkv_mma", mma.FILE, ("qkv_decode_mma",), "mma, with k and v into the KV cache"),
        Variant(
            "qkv_mma_tiles",
            mma_tiles.FILE,
            ("qkv_decode_tiles",),
            "mma_tiles, with k and v into the KV cache",
        ),
    ),
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
    layout "NK", of any dtype. Without a variant: up to 16 rows and with gamma, mma, or matvec on
    GPUs before compute capability 8.0 and where rows of w do not have a multiple of 16 bytes; else
    tiles. A row's result has the same bits alone and among others for the same variant.
    """
    inputs = (*contiguous(x), w, *contiguous(bias, gamma, beta, residual))
    return call(bind, inputs, gelu=gelu, eps=eps, variant=variant).out
