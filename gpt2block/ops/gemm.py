"""Matrix product on tensor cores, [residual +] [gelu](a w + bias), with sums in float32.

Use it for many rows of 16-bit activations and weights (N, K), of float16 activations and FP8
weights, or for float32 accuracy from hi/lo matrices. `linear` takes float32 activations with
weights of any dtype and size; `matmul_bias` takes plain float32 matrices (K, N).

Kernels: matmul/prompt/mma.cu, matmul/prompt/wgmma.cu. For FP8 weights and GGUF blocks:
matmul/prompt/wgmma_fp8.cu, matmul/prompt/wgmma_gguf.cu, fp8/widen.cu, gguf/rows.cu. For hi/lo
matrices: matmul/prompt/mma_hi_lo.cu, matmul/prompt/wgmma_hi_lo.cu, elementwise/hi_lo.cu.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from gpt2block.contract import Contract
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import (
    CudaArray,
    arrays_of,
    check_address,
    check_apart,
    contiguous,
    multiprocessors,
)
from gpt2block.cuda.cards import gpu
from gpt2block.cuda.formats import GGUF
from gpt2block.cuda.kernels import FP8, IN_BYTES, Geometry, Launch, launch_at
from gpt2block.cuda.tensor_maps import NO_MAP, tensor_map
from gpt2block.errors import InputError
from gpt2block.models.weights.conversions import LARGEST_OPERAND
from gpt2block.models.weights.gguf import GgufMatrix
from gpt2block.models.weights.hi_lo import HiLoMatrix
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops import gguf
from gpt2block.ops.call import HI_LO, Call, UncheckedCall, accept, needs, storage
from gpt2block.ops.engines import gemm_mma as mma
from gpt2block.ops.engines import gemm_wgmma as wgmma
from gpt2block.ops.engines import rmsnorm_wgmma as two_matrices
from gpt2block.ops.hi_lo import OPERATION as TO_HI_LO
from gpt2block.ops.hi_lo import TAKE, check_one_scale
from gpt2block.ops.operation import Operation, Workload, variant
from gpt2block.ops.products import MULTIPLE, SMALL, in_multiples, limits
from gpt2block.ops.stored import OPERATION as STORE
from gpt2block.ops.warm import call

Box = tuple[int, int, int]
Boxes = tuple[Box, Box, Box]  # boxes of the tensor maps of a, w and out
WITH_HI_LO = Contract.parse(
    "a a_dtype ... K; w hi_lo N K; bias? f32 N; residual? f32 ... N; up? rows K N "
    "-> out~residual out_dtype ... N"
)
WIDEN_FILE = "fp8/widen.cu"
WIDEN_WIDTH = 16  # weights per load of widen_fp8
WIDEN_VECTORS = 2  # loads per thread of widen_fp8
WIDEN_BLOCK = 256


@variant("widen", WIDEN_FILE, "widen_fp8")
def _widen(c: Call) -> Any:
    if isinstance(c.w, GgufMatrix):
        return gguf.widen.launch(c)
    size = c.N * c.K
    check_address("w", c.w.data)
    grid = (ceil(size / (WIDEN_WIDTH * WIDEN_VECTORS * WIDEN_BLOCK)),)
    defines = (("WIDEN_VECTORS", WIDEN_VECTORS),)
    geometry = Geometry("widen_fp8", grid, (WIDEN_BLOCK,), defines=defines)
    return launch_at(WIDEN_FILE, geometry, (c.w.data, c.out, size), "float16", c.w.dtype)


def _prepare_widen(unchecked: UncheckedCall) -> Call:
    """Check a call that converts w to float16 and applies scales of GGUF blocks, but not of FP8.

    memory: array for out with at least as many elements, or None for a new array.
    """
    c = unchecked.checked()
    size = c.N * c.K
    if size % WIDEN_WIDTH and not isinstance(c.w, GgufMatrix):
        raise InputError(f"w {c.w.data.shape}: expected a multiple of {WIDEN_WIDTH} weights")
    if c.memory is not None:
        check_apart("memory", c.memory, {"w": c.w})
        if c.memory.size < size:
            raise InputError(f"memory: expected at least {size:,} elements, got {c.memory.size:,}")
        c.out = c.memory.reshape(-1)[:size].reshape(c.N, c.K)
    check_address("memory", c.output("out"))
    return c


WIDEN = Operation(
    name="widen",
    variants=(_widen,),
    prepare=_prepare_widen,
    line="w rows K N; memory? f16 ... -> out? f16 N K",
)


def _constants(c: Call) -> dict[str, object]:
    """Return the keyword arguments for `geometry` of variant mma or wgmma, except sizes."""
    return {
        "hi_lo": c.hi_lo,
        "gelu": c.gelu,
        "residual": c.residual is not None,
        "other_out": c.other_out,
        "scaled": c.scale is not None,
        "early": c.early,
        "sms": multiprocessors(),
    }


def _outputs(c: Call) -> tuple[CudaArray | None, CudaArray | None, float]:
    """Return (out, None, 1) or, if out is a HiLoMatrix, (None, out.parts, 1 / out's scale)."""
    if c.other_out:
        return None, c.output("out").parts, 1 / (c.out.one_scale or 1.0)
    return c.output("out"), None, 1.0


def _mma_geometry(c: Call) -> Geometry:
    more: dict[str, Any] = {"gated": c.up is not None, "copies": gpu().has_bf16, **limits()}
    return mma.geometry(*c.sizes, **{**_constants(c), **more})


@variant("split", mma.HI_LO_FILE, mma.HI_LO_KERNEL)
def _mma_hi_lo(c: Call) -> Launch:
    operands = (c.a.parts, c.a.scale, c.w.parts, c.w.scale, c.bias, c.residual)
    args = (*operands, *_outputs(c), *c.sizes)
    return launch_at(mma.HI_LO_FILE, _mma_geometry(c), args, "float16")


@variant("mma", mma.FILE, mma.KERNEL)
def _mma(c: Call) -> Any:
    accept(needs("has_mma", ": use ops.linear"))
    if c.hi_lo:
        return _mma_hi_lo.launch(c)
    other = c.residual if c.up is None else c.up.data
    outputs, none = (other, c.output("out")), (None, None)
    ends = (*none, *outputs) if c.other_out else (*outputs, *none)
    args = (c.a, c.weights, c.scale, c.bias, *ends, *c.sizes)
    return launch_at(mma.FILE, _mma_geometry(c), args, c.storage)


def _wgmma_geometry(c: Call, **of_weights: object) -> tuple[Geometry, Boxes]:
    """Return geometry and boxes of tensor maps. of_weights: fp8 or row_group."""
    geometry, tile = wgmma.geometry(*c.sizes, **_constants(c), split_k=c.split_k, **of_weights)
    a, w = (1, tile.rows, wgmma.SLICE), (1, tile.columns // tile.shares, wgmma.SLICE)
    return geometry, (w, a, (1, tile.chunk, 64)) if of_weights else (a, w, (1, 64, tile.chunk))


@variant("split wgmma", wgmma.HI_LO_FILE, wgmma.HI_LO_KERNEL)
def _wgmma_hi_lo(c: Call) -> Launch:
    geometry, (a, w, written) = _wgmma_geometry(c)
    out, parts, per_scale = _outputs(c)
    map_out = NO_MAP if parts is None else tensor_map(parts, written)
    maps = (tensor_map(c.a.parts, a), tensor_map(c.w.parts, w), map_out)
    args = (*maps, c.a.scale, c.w.scale, c.bias, c.residual, out, per_scale, *c.sizes)
    return launch_at(wgmma.HI_LO_FILE, geometry, args, "float16")


def _wgmma_launch(c: Call, **of_weights: object) -> tuple[Geometry, tuple[Any, ...]]:
    """Return geometry and arguments of a 16-bit product. GGUF blocks have no tensor map."""
    M, N, K = c.sizes
    workspace: tuple[object, ...] = ()
    if of_weights:
        workspace = (c.stream_k_workspace,)
        of_weights["streams"] = c.stream_k_workspace is not None
    geometry, (a, w, written) = _wgmma_geometry(c, **of_weights)
    weights = c.weights if "row_group" in of_weights else tensor_map(c.weights.reshape(1, N, K), w)
    maps = tensor_map(c.a.reshape(1, M, K), a), weights
    outputs: tuple[Any, ...] = (c.residual, c.output("out"))
    if c.other_out:
        ends = (NO_MAP, NO_MAP, c.scale, c.bias, *outputs)
    else:
        out = (NO_MAP if x is None else tensor_map(x.reshape(1, M, N), written) for x in outputs)
        ends = (*out, c.scale, c.bias, None, None)
    return geometry, (*maps, *ends, *workspace, M, N, K)


@variant("fp8 wgmma", wgmma.FP8_FILE, wgmma.FP8_KERNEL)
def _wgmma_fp8(c: Call) -> Launch:
    return launch_at(wgmma.FP8_FILE, *_wgmma_launch(c, fp8=True), c.storage, c.w.dtype)


@variant("gguf wgmma", wgmma.GGUF_FILE, wgmma.GGUF_KERNEL)
def _wgmma_gguf(c: Call) -> Launch:
    geometry, args = _wgmma_launch(c, row_group=c.w.tile)
    geometry = geometry.with_defines(gguf.range_defines(c.w))
    return launch_at(wgmma.GGUF_FILE, geometry, args, c.storage, GGUF)


@variant("wgmma", wgmma.FILE, wgmma.KERNEL)
def _wgmma(c: Call) -> Any:
    accept(needs("has_wgmma", ": use variant mma"))
    if c.up is not None:
        return two_matrices.launch(c.a, (c.weights, c.up.data), "NK", c.output("out"), gelu=c.gelu)
    if c.hi_lo:
        return _wgmma_hi_lo.launch(c)
    if c.weights.dtype == "uint8":
        return (_wgmma_gguf if c.w.dtype == GGUF else _wgmma_fp8).launch(c)
    return launch_at(wgmma.FILE, *_wgmma_launch(c), c.storage)


def _prepare(unchecked: UncheckedCall) -> Call:
    """Check a call of `gemm`. A HiLoMatrix result has one scale for all rows.

    dtype: by default the dtype of out, else of a; float32 for hi/lo matrices. FP8 weights that
    the product kernel does not support are first converted to float16, exactly, by a separate
    launch, into `memory`, (S,) with at least as many elements, or into a new array. With a hi/lo
    w, a float32 `a` is first converted to hi/lo. stream_k_workspace: floats, initially 0, for
    partial sums that one cluster passes to the next on Hopper, with FP8 weights and GGUF blocks;
    all multiprocessors then get equal parts of the product.
    """
    a, w, *_ = unchecked.inputs
    hi_lo_a = isinstance(a, HiLoMatrix)
    hi_lo = hi_lo_a or isinstance(w, HiLoMatrix)
    dtype = _out_dtype(unchecked.options["dtype"], unchecked.out, None if hi_lo else storage(a))
    c = unchecked.checked(
        WITH_HI_LO if hi_lo else None,
        hi_lo=hi_lo,
        a_dtype=HI_LO if hi_lo_a else "float32",
        out_dtype=dtype,
        other_out=dtype == (HI_LO if hi_lo else "float32"),
    )
    c.sizes = c.rows, c.N, c.K
    _check(c)
    c.before = _conversions(c)
    if c.up is not None:
        _check_up(c)
    return c


def _out_dtype(dtype: str | None, out: object, own: str | None) -> str:
    """Return the result's dtype or "hi_lo". `own`: dtype of `a`, None for a HiLoMatrix."""
    known = ("float32", HI_LO) if own is None else (own, "float32")
    if dtype is None:
        out_dtype = getattr(getattr(out, "dtype", None), "name", "")
        out_dtype = HI_LO if isinstance(out, HiLoMatrix) else out_dtype
        return out_dtype if out_dtype in known else known[0]
    if dtype not in known:
        with_parts = f"float32 or {HI_LO!r} with a HiLoMatrix"
        expected = with_parts if own is None else f"{own}, like a, or float32"
        raise InputError(f"dtype {dtype!r}: expected {expected}")
    return dtype


def _check(c: Call) -> None:
    """Raise InputError if no kernel supports the sizes, dtypes or addresses of a call."""
    if max(c.sizes) > LARGEST_OPERAND:
        raise InputError(
            f"a {c.a.shape}, w ({c.N}, {c.K}): expected at most {LARGEST_OPERAND:,} of each size"
        )
    if not in_multiples(c.N, c.K):
        raise InputError(
            f"w: expected K and N in multiples of {MULTIPLE}, got K {c.K}, N {c.N}: add zeros, "
            "or use ops.linear"
        )
    if c.hi_lo:
        _check_hi_lo_result(c)
    else:
        _check_16_bits(c)
    for name in ("a", "w", "bias", "residual", "up", "memory", "stream_k_workspace", "out"):
        for each, array in arrays_of(name, vars(c).get(name)).items():
            check_address(each, array)


def _check_hi_lo_result(c: Call) -> None:
    """Raise InputError if a HiLoMatrix out has several scales, or a float32 out has a bound."""
    out = vars(c).get("out")
    if c.out_dtype != HI_LO:
        if c.bound is not None:
            raise InputError(f"bound: only for a hi/lo result: use dtype={HI_LO!r}")
    elif c.residual is not None:
        raise InputError("residual: expected none with a hi/lo result: its bound is not known")
    elif out is not None:
        check_one_scale(out, c.bound)
    elif c.bound is None:
        raise InputError(
            "bound: expected the largest magnitude that the result can have, which gives all its "
            "rows one scale"
        )


def _check_16_bits(c: Call) -> None:
    if c.bound is not None:
        raise InputError("bound: expected HiLoMatrix inputs: only a hi/lo result has a bound")
    if c.storage not in OPERATION.workload.dtypes:
        raise InputError(
            f"a: expected {' or '.join(OPERATION.workload.dtypes)}, got {c.storage}: use a "
            "HiLoMatrix as w, or ops.linear"
        )
    if c.w.dtype != c.storage and not (c.w.dtype in IN_BYTES and c.storage == "float16"):
        raise InputError(
            f"w: expected {c.storage}, like a, got {c.w.dtype}: "
            f"use WeightMatrix.quantize(w, {c.storage!r}, 'NK')"
        )


def _conversions(c: Call) -> tuple[Launch, ...]:
    """Set `weights`, `scale` and `early` of a call. Return any launches that convert `a` or `w`.

    early: whether w may be loaded before the previous kernel has ended.
    """
    c.early, c.weights, c.scale, c.kept = True, None, None, ()
    if c.hi_lo:
        if isinstance(c.a, HiLoMatrix):
            return ()
        before = TO_HI_LO.bind_on_device((c.a,))
        c.a, c.kept = before.out, tuple(arrays_of("", before.out).values())
        return before.launches
    c.weights, c.scale = c.w.data, c.w.scale
    if c.w.dtype not in IN_BYTES:
        return ()
    if c.up is None and c.variant in (None, "wgmma") and widens(c.w):
        if c.stream_k_workspace is not None:
            size, needed = c.stream_k_workspace.size, _workspace_floats()
            if size < needed:
                raise InputError(f"stream_k_workspace: expected {needed:,} zeros, got {size:,}")
        return ()
    before = WIDEN.bind_on_device((c.w, c.memory))
    c.early, c.weights, c.kept = False, before.out, (before.out,)
    return before.launches


def widens(w: WeightMatrix) -> bool:
    """Whether the product kernel itself converts FP8 weights (N, K) or GGUF blocks to 16 bits.

    TMA needs FP8 rows whose bytes are a multiple of 16. All GGUF blocks of a tile must
    have one type.
    """
    if isinstance(w, GgufMatrix):
        return gpu().has_wgmma and w.begins_at(wgmma.MAX_ROWS)
    return gpu().has_wgmma and w.dtype in FP8 and w.K % 16 == 0


def allocate_stream_k_workspace() -> CudaArray:
    """Allocate a workspace for products, on one CUDA stream, of weights that `widens` accepts."""
    return cupy.zeros(_workspace_floats(), "float32")


def _workspace_floats() -> int:
    return wgmma.workspace_floats(multiprocessors())


def _check_up(c: Call) -> None:
    """Raise InputError unless the kernel for two matrices, `w` and `up`, supports the call.

    The kernel loads both matrices before the previous kernel has ended, so no launch may convert w.
    """
    others = {
        "hi/lo matrices": c.hi_lo,
        "a result of another dtype": c.other_out,
        "FP8 weights": not c.hi_lo and c.w.dtype in IN_BYTES,
        "bias": c.bias is not None,
        "residual": c.residual is not None,
    }
    unsupported = [name for name, present in others.items() if present]
    if unsupported or c.up.dtype != c.storage:
        raise InputError(
            f"up: expected the dtype of a, w and the result, float16 or bfloat16, and neither "
            f"bias nor residual, got {' with '.join([c.up.dtype, *unsupported])}: use ops.silu_mul "
            "of two products"
        )


OPERATION = Operation(
    name="gemm",
    variants=(_mma, _wgmma),
    options={"gelu": False, "split_k": False, **dict.fromkeys(("dtype", "variant", "bound"))},
    prepare=_prepare,
    parts=(_mma_hi_lo, _wgmma_hi_lo, _wgmma_fp8, _wgmma_gguf, gguf.widen, gguf.pack),
    steps=(TO_HI_LO, TAKE, WIDEN, STORE),
    workload=Workload(
        idea="[residual +] [gelu](a W + bias), 16 bits in, sums in float32",
        sizes={"M": 1024, "K": 768, "N": 3072},
        mean=0.0,
        traffic=lambda s: (
            s["weight"] * s["K"] * s["N"] + s["itemsize"] * s["M"] * (s["K"] + s["N"])
        ),
        flops=lambda s: 2 * s["M"] * s["K"] * s["N"],
        bound="either",
        small=SMALL,
        dtypes=("bfloat16", "float16"),
        matrices=(1,),
        layout="NK",
    ),
)


def gemm(
    a: CudaArray | HiLoMatrix,
    w: WeightMatrix | HiLoMatrix,
    bias: CudaArray | None = None,
    residual: CudaArray | None = None,
    up: WeightMatrix | None = None,
    gelu: bool = False,
    split_k: bool = False,
    dtype: str | None = None,
    variant: str | None = None,
    bound: float | None = None,
) -> Any:
    """Compute `reference.gemm` on CuPy arrays with tensor cores. Raises InputError.

    a (..., K): float16 or bfloat16. w: a `WeightMatrix` with layout "NK" in the dtype of a, or in
    FP8 if a is float16; the scales of FP8 weights are applied to the sums. bias (N,): float32.
    residual (..., N) and the result have dtype `dtype`: the dtype of a (the default) or "float32".
    K and N are multiples of 8. Sums, bias, GELU and residual are computed in float32 and rounded
    once. A row's result has the same bits alone and with other rows, unless `split_k` permits
    summing K in parts, which is faster for few rows. The default variant is the fastest on this
    GPU. With `up`, which has the dtype (16 bits) and shape of w, the result is silu(a w) (a up), or
    gelu(a w) (a up), in the dtype of a, without bias and residual.

    Float32 accuracy: a is float32 or a HiLoMatrix, and w a HiLoMatrix (N, K), such as
    HiLoMatrix.from_float32(w.T). The result is float32. Without a residual, and with dtype
    "hi_lo", the result is a HiLoMatrix with one scale for all rows, computed from `bound`,
    the largest magnitude that the result can have; values more than twice as large become infinite.
    Infinity and NaN in a and w have the same effect as in float32, except that infinity times a
    number below 2^-39 of the largest number of its row gives NaN. Source: Ootomo and Yokota,
    "Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical
    peak performance" (2022).
    """
    a, bias, residual = contiguous(a, bias, residual)
    options: dict[str, Any] = {"gelu": gelu, "split_k": split_k, "dtype": dtype, "bound": bound}
    return call(OPERATION, (a, w, bias, residual, up), variant=variant, **options).out
