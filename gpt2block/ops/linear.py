"""The linear layer, [residual +] [gelu]((LayerNorm(x) or x) w + bias), sums in float32.

Use it for float32 activations and weights (N, K) of any dtype, or where a GPU has no tensor cores:
matmul/decode_mma.cu for few rows, as in decoding, and with the same bits matmul/decode_tiles.cu for
more of them and matmul/decode_hopper.cu for large matrices; matmul/decode.cu where these do not
apply; matmul/tiles.cu for many rows. `gemm` is faster for many rows of 16-bit activations;
`matmul_bias` takes plain float32 matrices (K, N).
"""

from __future__ import annotations

from collections.abc import Mapping
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
from gpt2block.cuda.kernels import Geometry, Launch, cache_dtype
from gpt2block.errors import InputError
from gpt2block.ops import _linear_hopper as hopper
from gpt2block.ops import _linear_matvec as matvec
from gpt2block.ops import _linear_mma as mma
from gpt2block.ops import _linear_mma_tiles as mma_tiles
from gpt2block.ops import _linear_tiles as tiles
from gpt2block.ops._kv_cache import array_dtype
from gpt2block.ops._matrix import check_weights, storage_of
from gpt2block.ops._tensor_cores import HOPPER_CAPABILITY, MMA_CAPABILITY
from gpt2block.ops._terms import check_terms
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant
from gpt2block.ops.warm import call
from gpt2block.plan import Terms
from gpt2block.weights.matrix import WeightMatrix

FEW_ROWS = 16  # up to here the kernels for decoding are the default variants
DECODING = "mma", "matvec"  # variants of decoding steps: the first one that supports the job
MORE_ROWS = 16  # from here on LayerNorm is a step of its own, and mma_tiles can be faster than mma
FEW_PRODUCTS = 80_000_000  # M N K: up to here mma is faster than mma_tiles with more rows, too
# From here on variant hopper is faster, measured on an H200: N K for 17 rows or more; of a layer's
# smallest matrix N K for up to 3 rows, and M N K for 4 to 16.
MEDIUM_MATRIX, LARGE_MATRIX, LARGE_PRODUCTS = 4_000_000, 12_000_000, 16_000_000
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
    terms: Terms | None = None  # x has these in the place of floats
    to_terms: Terms | None = None  # out has
    up: WeightMatrix | None = None  # (N, K): out = silu(x w) (x up)

    @property
    def M(self) -> int:  # noqa: N802
        return int(self.x.size // self.w.K)

    @property
    def products(self) -> tuple[Any, ...]:
        """The first arguments of all kernels of matmul/decode.cu and matmul/decode_mma.cu."""
        return self.x, self.gamma, self.beta, self.w.data, self.w.scale, self.bias


def terms_of(
    dtype: str, M: int, shapes: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[Terms, ...]]:
    """The terms that the x of each product of a layer can have for decoding M rows, fastest first.

    dtype: of the weights. shapes: (K, N) of the matrices. None where x has floats, because that is
    faster for few rows, or because these products are not on tensor cores, or of tf32. Up to
    MORE_ROWS rows all products of a layer are of one kind: with two in turn, launches overlap less.
    """
    multiple = mma.LOADED // mma.BYTES.get(dtype, 1)
    if dtype == "float32" or compute_capability() < MMA_CAPABILITY:
        return {}
    wide = hopper.terms(dtype)
    smallest = min(K * N for K, N in shapes.values())

    def found(K: int, N: int) -> tuple[Terms, ...]:
        if M > MORE_ROWS:
            faster = N * K >= MEDIUM_MATRIX
        else:
            enough = LARGE_PRODUCTS // M if M >= hopper.FEWEST_ROWS else LARGE_MATRIX
            faster = smallest >= enough
        possible = compute_capability() == HOPPER_CAPABILITY and K % mma.UNIT == 0
        in_place = (Terms(wide.dtype),) if M > MORE_ROWS and K % multiple == 0 else ()
        return (wide, *in_place) if possible and faster else in_place

    return {name: terms for name, shape in shapes.items() if (terms := found(*shape))}


def _most_shared() -> int:
    return device_attribute("MaxSharedMemoryPerBlockOptin") - 1024  # static, and its own


def _geometry(module: Any, job: Job, kernel: str) -> Geometry | None:
    """module: matvec or mma."""
    options = {"terms": True} if job.terms is not None else {}
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
    if job.to_terms or (job.terms and (module is matvec or job.terms.width)) or job.up:
        return "takes and gives floats, of one matrix: use variant mma_tiles for terms, or hopper"
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
    if job.up or any(terms and terms.width for terms in (job.terms, job.to_terms)):
        return "takes and gives floats, or terms in their places, of one matrix: use variant hopper"
    return _order_problem(job.w)


def _hopper_problem(job: Job) -> str | None:
    if compute_capability() != HOPPER_CAPABILITY:
        return "needs a GPU of compute capability 9.0 (Hopper): use variant mma_tiles"
    if job.w.N > MAX_OUTPUTS or job.M > MAX_OUTPUTS:
        return f"x {job.x.shape}, {job.w.N:,} outputs: expected at most {MAX_OUTPUTS:,} of both"
    if job.terms is None or not job.terms.width or (job.to_terms and not job.to_terms.width):
        return "takes and gives terms in the order of wgmma: use variant mma_tiles"
    return hopper.problem(job.w.K)


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
    if job.terms and job.terms.width:
        return ("hopper",)
    few = job.M * job.w.N * job.w.K <= FEW_PRODUCTS or job.M <= MORE_ROWS
    tiles_first = job.to_terms or (job.gamma is None and not few)
    return ("mma_tiles", *DECODING) if tiles_first else DECODING


def _check_addresses(job: Job, of_w: int) -> None:
    """The alignment of the loads of a kernel for decoding; of_w: bytes of one of w."""
    check_address("w", job.w.data, of_w)
    for name in ("x", "gamma", "beta"):
        if getattr(job, name) is not None:
            check_address(name, getattr(job, name), 4 * gcd(4, job.w.K))


def _launch_decoding(
    module: Any, job: Job, kernel: str, args: tuple[Any, ...], T: str, cache: str | None = None
) -> Launch:
    """Launch a kernel of matmul/decode.cu or matmul/decode_mma.cu; T: its type with FP8 weights.

    cache: as in `launch`.
    """
    size = job.w.data.itemsize
    vector = mma.LOADED if module is mma else matvec.order(job.w.N, job.w.K, size)[0] * size
    _check_addresses(job, vector)
    geometry = _geometry(module, job, kernel)
    assert geometry is not None
    return launch_at(module.FILE, geometry, args, *storage_of(job.w, T), cache)


def _linear_args(job: Job) -> tuple[Any, ...]:
    return (*job.products, job.residual, job.out, job.eps, job.M, job.w.N, int(job.gelu))


def _launch_matvec(job: Job) -> Launch:
    return _launch_decoding(matvec, job, "linear_matvec", _linear_args(job), "float32")


def _launch_mma(job: Job) -> Launch:
    return _launch_decoding(mma, job, "linear_decode_mma", _linear_args(job), "float32")


def _launch_decode_tiles(
    job: Job, kernel: str, args: tuple[Any, ...], T: str, cache: str | None = None
) -> Launch:
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
    ends = job.terms is not None, job.to_terms is not None
    geometry = mma_tiles.geometry(kernel, *sizes, tile, *ends)
    first = (job.x, job.w.data, job.w.scale, job.bias)
    return launch_at(mma_tiles.FILE, geometry, (*first, *args), *storage_of(job.w, T), cache)


def _launch_mma_tiles(job: Job) -> Launch:
    args = (job.residual, job.out, job.M, job.w.N, job.w.K, int(job.gelu))
    return _launch_decode_tiles(job, "linear_decode_tiles", args, "float32")


def _launch_hopper(job: Job) -> Launch:
    scales = job.w.scale, job.up.scale if job.up else None
    ends = (*scales, job.bias, job.residual, job.out, job.M, job.w.N, job.w.K, int(job.gelu))
    given = hopper.Given(job.x, (job.w, job.up), to_terms=job.to_terms is not None)
    return hopper.launch("linear_decode_hopper", given, "float32", ends)


def _tiles_problem(job: Job) -> str | None:
    if job.gamma is not None:
        return "takes no gamma and beta: use variant matvec"
    if job.terms or job.to_terms or job.up:
        return "takes and gives floats, of one matrix: use variant hopper"
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
    terms: Terms | None = None,
    to_terms: Terms | None = None,
) -> Bound:
    """inputs (x (..., K), w, bias, gamma, beta, residual (..., N), up), out (..., N).

    w: a WeightMatrix (N, K). Later inputs may be None or missing; residual may be out. decoding:
    choose a variant as for few rows, so that a row has the same bits in any number of rows. terms:
    what x has in the place of its floats (lib/terms.cuh), one of `terms_of`, and no gamma;
    to_terms: what out has, for another product with such weights. up: a second WeightMatrix, of
    w's dtype and shape: out is silu(x w) (x up), by variant hopper.
    """
    x, w, bias, gamma, beta, residual, up = (*inputs, *(None,) * 5)[:7]
    gelu = check_flag("gelu", gelu)
    given = _check(x, w, bias, gamma, beta, eps)
    shape = (*x.shape[:-1], w.N)
    if residual is not None:
        check("residual", residual, shape)
    out = output(out, shape, apart=given, in_place={"residual": residual})
    _check_terms(w, gamma, terms, to_terms)
    if up is not None:
        _check_up(up, w, x, bias, gelu)
    job = Job(x, w, bias, gamma, beta, residual, out, gelu, float(eps), terms, to_terms, up)
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
    terms: Terms | None = None,
    kv_dtype: str | None = None,
) -> Bound:
    """LayerNorm(x) W + bias: q (M, C), and k and v of x[m] into position[m] of row[m] of a cache.

    x (M, K), w a WeightMatrix (3C, K), caches (B, n_ctx, C) in the dtype of the weights, in float16
    with FP8 weights, or uint8 of the FP8 format kv_dtype, row and position int32 (M,), no two of
    them alike. k and v of a token outside the cache are dropped. Without gamma and beta, x is not
    normalized. terms: as in `bind`. `out` is q. Raises InputError.
    """
    if getattr(x, "ndim", 2) != 2:
        raise InputError(f"x: expected (M, K), got {x.shape}")
    given = _check(x, w, bias, gamma, beta, eps)
    _check_terms(w, gamma, terms)
    job = Job(x, w, bias, gamma, beta, terms=terms)
    if w.N % 3:
        raise InputError(f"w: expected 3C outputs for q, k and v, got {w.N}")
    M, C = job.M, w.N // 3
    T = cache_dtype(w.dtype)
    kept = T if kv_dtype is None else array_dtype(k_cache, kv_dtype)
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
        return Bound(q, (_launch_decode_tiles(job, "qkv_decode_tiles", args, T, kv_dtype),))
    if variant == "hopper":
        ends = (w.scale, bias, *arrays, M, w.K, *sizes)
        product = hopper.Given(x, (w,))
        return Bound(q, (hopper.launch("qkv_decode_hopper", product, T, ends, kv_dtype),))
    args = (*job.products, *arrays, float(eps), M, *sizes)
    module, kernel = (mma, "qkv_decode_mma") if variant == "mma" else (matvec, "qkv_matvec")
    return Bound(q, (_launch_decoding(module, job, kernel, args, T, kv_dtype),))


def _check_terms(
    w: WeightMatrix, gamma: Any, terms: Terms | None, to_terms: Terms | None = None
) -> None:
    given = [each for each in (terms, to_terms) if each is not None]
    if not given:
        return
    known = terms_of(w.dtype, MORE_ROWS + 1, {"w": (w.K, w.N)}).get("w", ())
    kinds = {each.dtype for each in known}
    orders = {0, hopper.width(w.dtype)}
    unknown = any(each.dtype not in kinds or each.width not in orders for each in given)
    if unknown or (terms and gamma is not None):
        raise InputError(
            f"w: {w.dtype}, {w.K} inputs, {w.N} outputs: expected terms of "
            f"{' or '.join(kinds) or 'no dtype'}, without gamma and beta: pass floats"
        )
    check_terms(to_terms, w.N)


def _check_up(up: Any, w: WeightMatrix, x: Any, bias: Any, gelu: bool) -> None:
    check_weights("up", up, ("x", x))
    if (up.dtype, up.N) != (w.dtype, w.N) or bias is not None or gelu:
        raise InputError(
            f"up: {up.dtype}, {up.N} outputs: expected {w.dtype}, {w.N} outputs as w has, and "
            "neither bias nor gelu"
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
            "hopper",
            hopper.FILE,
            ("linear_decode_hopper",),
            "large matrices on Hopper, with the bits of mma: wgmma, x as terms",
            launch=_launch_hopper,
            problem=_hopper_problem,
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
        Variant(
            "qkv_hopper",
            hopper.FILE,
            ("qkv_decode_hopper",),
            "hopper, with k and v into the KV cache",
        ),
        Variant(
            "rope_hopper",
            hopper.ROPE_FILE,
            ("rope_decode_hopper",),
            "qkv_hopper with RoPE of q and k",
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
