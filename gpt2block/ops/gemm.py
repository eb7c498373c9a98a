"""The product on tensor cores, [residual +] [gelu](a w + bias), sums in float32.

Use it for many rows of 16-bit activations and weights (N, K), of float16 activations and FP8
weights, or for float32 accuracy from two-part matrices. `linear` takes float32 activations with
weights of any dtype and size; `matmul_bias` takes plain float32 matrices (K, N). Kernels:
matmul/mma.cu, matmul/hopper.cu, for FP8 weights fp8/widen.cu, and for two-part matrices
matmul/mma_two_part.cu, matmul/hopper_two_part.cu, matmul/two_part.cu.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gpt2block.checks import check_flag
from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    arrays_of,
    check,
    check_address,
    check_apart,
    compute_capability,
    contiguous,
    device_attribute,
    launch_at,
    output,
    storage,
)
from gpt2block.cuda.kernels import FP8, Launch
from gpt2block.cuda.tensor_maps import NO_MAP, tensor_map
from gpt2block.errors import InputError
from gpt2block.ops import _gemm_hopper as hopper
from gpt2block.ops import _gemm_mma as mma
from gpt2block.ops import _rmsnorm_hopper as two_matrices
from gpt2block.ops import _stored as stored
from gpt2block.ops import _widened as widened
from gpt2block.ops import two_part
from gpt2block.ops._matrix import check_weights
from gpt2block.ops._tensor_cores import HOPPER_CAPABILITY, MMA_CAPABILITY, MULTIPLE
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant, largest_product
from gpt2block.ops.warm import call
from gpt2block.weights.matrix import WeightMatrix
from gpt2block.weights.two_part import TwoPartMatrix


class Job(NamedTuple):
    """A product, checked."""

    a: Any  # (..., K); an array or, as w, a TwoPartMatrix
    w: Any  # (N, K)
    w_scale: CudaArray | None  # of w, if it is an array
    bias: CudaArray | None
    residual: CudaArray | None
    up: WeightMatrix | None  # (N, K): out = silu(a w) (a up)
    out: Any  # (..., N); an array, or of two-part matrices a TwoPartMatrix
    gelu: bool
    split_k: bool
    early: bool  # whether w may be loaded before the previous kernel has ended

    @property
    def two_part(self) -> bool:
        return isinstance(self.w, TwoPartMatrix)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N, K."""
        K = self.a.shape[-1]
        return self.a.size // K, self.out.shape[-1], K

    @property
    def other_out(self) -> bool:
        """Whether the result has the other format: float32, or two-part for two-part inputs."""
        if self.two_part:
            return isinstance(self.out, TwoPartMatrix)
        return bool(self.out.dtype.name == "float32")

    @property
    def constants(self) -> dict[str, Any]:
        """The properties that determine the geometry, in addition to the sizes."""
        return {
            "two_part": self.two_part,
            "gelu": self.gelu,
            "residual": self.residual is not None,
            "other_out": self.other_out,
            "scaled": self.w_scale is not None,
            "early": self.early,
            "sms": device_attribute("MultiProcessorCount"),
        }

    @property
    def two_part_outputs(self) -> tuple[CudaArray | None, CudaArray | None, float]:
        """out and its parts, one of them None, and 1 / the scale of the parts."""
        if self.other_out:
            return None, self.out.parts, 1 / (self.out.one_scale or 1.0)
        return self.out, None, 1.0


def _launch_mma(job: Job) -> Launch:
    most_shared = device_attribute("MaxSharedMemoryPerBlockOptin")
    geometry = mma.geometry(*job.sizes, **job.constants, most_shared=most_shared)
    a, w, w_scale, bias, residual = job[:5]
    args: tuple[Any, ...]
    if job.two_part:
        args = (a.parts, a.scale, w.parts, w.scale, bias, residual, *job.two_part_outputs)
        return launch_at(mma.TWO_PART_FILE, geometry, (*args, *job.sizes), "float16")
    outputs, none = (residual, job.out), (None, None)
    args = (a, w, w_scale, bias, *((*none, *outputs) if job.other_out else (*outputs, *none)))
    return launch_at(mma.FILE, geometry, (*args, *job.sizes), a.dtype.name)


def _mma_problem(job: Job) -> str | None:
    if compute_capability() < MMA_CAPABILITY:
        return "needs a GPU of compute capability 8.0 or newer: use ops.linear"
    if job.up is not None:
        return "multiplies by one matrix: use ops.rmsnorm_ffn, or ops.silu_mul of two products"
    return None


def _launch_hopper(job: Job) -> Launch:
    if job.up is not None:
        return two_matrices.launch(job.a, (job.w, job.up.data), "NK", job.out)
    M, N, K = job.sizes
    geometry, tile = hopper.geometry(M, N, K, **job.constants, split_k=job.split_k)
    box_a = (1, tile.rows, hopper.SLICE)
    box_w = (1, tile.columns // tile.shares, hopper.SLICE)
    box_out = (1, 64, tile.chunk)
    args: tuple[Any, ...]
    if job.two_part:
        out, parts, per_scale = job.two_part_outputs
        map_out = NO_MAP if parts is None else tensor_map(parts, box_out)
        args = (tensor_map(job.a.parts, box_a), tensor_map(job.w.parts, box_w), map_out)
        args += (job.a.scale, job.w.scale, job.bias, job.residual, out, per_scale)
        return launch_at(hopper.TWO_PART_FILE, geometry, (*args, M, N, K), "float16")
    args = (
        tensor_map(job.a.reshape(1, M, K), box_a),
        tensor_map(job.w.reshape(1, N, K), box_w),
    )
    outputs = (job.residual, job.out)
    if job.other_out:
        args += (NO_MAP, NO_MAP, job.w_scale, job.bias, *outputs)
    else:
        maps = (NO_MAP if x is None else tensor_map(x.reshape(1, M, N), box_out) for x in outputs)
        args += (*maps, job.w_scale, job.bias, None, None)
    return launch_at(hopper.FILE, geometry, (*args, M, N, K), job.a.dtype.name)


def _hopper_problem(_: Job) -> str | None:
    if compute_capability() != HOPPER_CAPABILITY:
        return "needs a GPU of compute capability 9.0 (Hopper): use variant mma"
    return None


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    gelu: bool = False,
    split_k: bool = False,
    dtype: str | None = None,
    variant: str | None = None,
    bound: float | None = None,
) -> Bound:
    """inputs (a (..., K), w, bias (N,), residual (..., N), up, memory), out (..., N).

    a: float16 or bfloat16. w: a WeightMatrix of that dtype, or with float16 of FP8, layout "NK".
    bias: float32. out and residual: `dtype`, which is that of a or float32; by default that of out,
    or without one that of a. residual may be out itself. Inputs missing at the end are None. The
    bits of a row depend only on this row, w, bias and its residual; with `split_k` also on the
    number of rows, since K may be summed in parts, which is faster for few rows. FP8 weights are
    converted to float16, exactly, by a launch of their own, into `memory` of at least as many
    elements; with None, new memory. up: a second WeightMatrix, of w's dtype (float16 or bfloat16)
    and shape, by variant hopper: out, of the dtype of a, is silu(a w) (a up). Raises InputError.

    Two-part matrices: w (N, K) is a TwoPartMatrix; a is one, or float32, which is converted first.
    residual is float32. out is float32 or, without a residual, a TwoPartMatrix with one scale; for
    dtype "two_part" a new one, with the scale for `bound`. split_k has no effect.
    """
    a, w, bias, residual, up, memory = (*inputs, *(None,) * 4)[:6]
    gelu, split_k = check_flag("gelu", gelu), check_flag("split_k", split_k)
    parts = isinstance(w, TwoPartMatrix) or isinstance(a, TwoPartMatrix)
    if parts:
        _check_two_part(a, w)
    elif bound is not None:
        raise InputError("bound: expected TwoPartMatrix inputs: only a two-part result has a bound")
    else:
        _check_16_bits(a, w)
    N, K = w.shape if parts else (w.N, w.K)
    if max(a.size // K, N, K) > two_part.LARGEST:
        raise InputError(
            f"a {a.shape}, w ({N}, {K}): expected at most {two_part.LARGEST:,} of each size"
        )
    if N % MULTIPLE or K % MULTIPLE:
        raise InputError(
            f"w: expected K and N in multiples of {MULTIPLE}, got K {K}, N {N}: add zeros, "
            "or use ops.linear"
        )
    if bias is not None:
        check("bias", bias, (N,))
    if up is not None:
        check_weights("up", up, ("a", a))
    others = {"a": a, "w": w, "bias": bias, "up": up, "memory": memory}
    shape = (*a.shape[:-1], N)
    if parts:
        out = _two_part_output(out, shape, dtype, bound, others, residual)
    else:
        out = _output(out, shape, dtype, others, residual)
    for name, value in {**others, "residual": residual, "out": out}.items():
        for each, array in arrays_of(name, value).items():
            check_address(each, array)
    before, operands = _operands(a, w, memory)
    early = parts or not before.launches
    job = Job(*operands, bias, residual, up, out, gelu, split_k, early)
    if up is not None:
        _check_up(job, up)
    launch = OPERATION.choose(job, variant).launch(job)
    return Bound(out, (*before.launches, launch), before.extra)


def _operands(a: Any, w: Any, memory: CudaArray | None) -> tuple[Bound, tuple[Any, Any, Any]]:
    """The conversion of a or w that a product needs first, and its a, w and w_scale."""
    nothing = Bound(None, ())
    if isinstance(w, TwoPartMatrix):
        if isinstance(a, TwoPartMatrix):
            return nothing, (a, w, None)
        before = two_part.bind((a,))
        return before._replace(extra=(before.out.parts, before.out.scale)), (before.out, w, None)
    if w.dtype not in FP8:
        return nothing, (a, w.data, w.scale)
    before = widened.bind(w, memory)
    return before._replace(extra=(before.out,)), (a, before.out, w.scale)


def _check_16_bits(a: Any, w: Any) -> None:
    own = storage(a)
    check("a", a, dtype=own)
    if own not in OPERATION.dtypes:
        raise InputError(
            f"a: expected {' or '.join(OPERATION.dtypes)}, got {own}: use a TwoPartMatrix as w, "
            "or ops.linear"
        )
    check_weights("w", w, ("a", a))
    if w.dtype in FP8 and own == "float16":
        return
    if w.dtype != own:
        raise InputError(
            f"w: expected {own}, as a has, got {w.dtype}: "
            f"use WeightMatrix.quantize(w, {own!r}, 'NK')"
        )


def _check_up(job: Job, up: WeightMatrix) -> None:
    """InputError unless the kernel for two matrices computes the product.

    It loads both before the previous kernel has ended, so that w must not be converted first.
    """
    _, N, K = job.sizes
    others = {
        "two-part matrices": job.two_part,
        "a result of another dtype": job.other_out,
        "FP8 weights": not job.early,
        "bias": job.bias is not None,
        "residual": job.residual is not None,
        "gelu": job.gelu,
    }
    given = [name for name, there in others.items() if there]
    if given or (up.N, up.dtype) != (N, storage(job.a)):
        got = " with ".join([f"({up.N}, {up.K}) of {up.dtype}", *given])
        raise InputError(
            f"up: expected ({N}, {K}) of the dtype of a, w and the result, float16 or bfloat16, "
            f"and neither bias, residual nor gelu, got {got}: use ops.silu_mul of two products"
        )


def _output(
    out: Any, shape: tuple[int, ...], dtype: str | None, others: dict[str, Any], residual: Any
) -> CudaArray:
    """16 bits or float32, as is the residual."""
    own = others["a"].dtype.name
    if dtype is None:
        dtype = own if out is None else getattr(getattr(out, "dtype", None), "name", own)
    if dtype not in (own, "float32"):
        raise InputError(f"dtype {dtype!r}: expected {own}, as a has, or float32")
    if residual is not None:
        check("residual", residual, shape, dtype)
    return output(out, shape, dtype, apart=others, in_place={"residual": residual})


def _check_two_part(a: Any, w: Any) -> None:
    two_part.check_two_part("w", w)
    if w.ndim != 2:
        raise InputError(f"w: expected a TwoPartMatrix (N, K), got {w.shape}")
    if isinstance(a, TwoPartMatrix):
        two_part.check_two_part("a", a)
    else:
        check("a", a)
    if a.shape[-1] != w.shape[1]:
        raise InputError(f"w: expected K {a.shape[-1]} to match a, got {w.shape[1]}")


def _two_part_output(
    out: Any,
    shape: tuple[int, ...],
    dtype: str | None,
    bound: float | None,
    others: dict[str, Any],
    residual: Any,
) -> CudaArray | TwoPartMatrix:
    """float32, or a TwoPartMatrix whose rows have one scale; apart from the other arguments."""
    if dtype is None:
        dtype = two_part.TWO_PART if isinstance(out, TwoPartMatrix) else "float32"
    if dtype == "float32":
        if bound is not None:
            raise InputError(f"bound: expected dtype {two_part.TWO_PART!r}, of a two-part result")
        if residual is not None:
            check("residual", residual, shape)
        return output(out, shape, apart=others, in_place={"residual": residual})
    if dtype != two_part.TWO_PART:
        raise InputError(
            f"dtype {dtype!r}: expected float32 or {two_part.TWO_PART!r} with a TwoPartMatrix"
        )
    if residual is not None:
        raise InputError("residual: expected none with a two-part result: its bound is not known")
    if out is None and bound is None:
        raise InputError(
            "bound: expected the largest magnitude that the result can have, which gives all its "
            "rows one scale"
        )
    if out is None:
        return TwoPartMatrix.empty(shape, bound)
    two_part.check_one_scale(out, shape, bound)
    check_apart("out", out, others)
    return out


def _make(s: Sizes, rng: np.random.Generator) -> Inputs:
    a = rng.standard_normal((s["M"], s["K"]), dtype=np.float32)
    w = rng.standard_normal((s["K"], s["N"]), dtype=np.float32) / np.float32(s["K"] ** 0.5)
    return a, w


OPERATION = Operation(
    name="gemm",
    document="gpt2block",
    idea="[residual +] [gelu](a W + bias), 16 bits in, sums in float32",
    sizes={"M": 1024, "K": 768, "N": 3072},
    variants=(
        Variant(
            "mma",
            mma.FILE,
            (mma.KERNEL,),
            "tiles on tensor cores (mma.sync), one ring of slices through all tiles of a block",
            launch=_launch_mma,
            problem=_mma_problem,
        ),
        Variant(
            "hopper",
            hopper.FILE,
            (hopper.KERNEL,),
            "TMA and wgmma: one warpgroup loads, two multiply in turn, which hides the epilogues",
            launch=_launch_hopper,
            problem=_hopper_problem,
        ),
    ),
    auxiliary=(
        Variant(
            "split",
            mma.TWO_PART_FILE,
            (mma.TWO_PART_KERNEL,),
            "float32 accuracy: three products of float16 parts, sums promoted every 128 of K",
        ),
        Variant(
            "split hopper",
            hopper.TWO_PART_FILE,
            (hopper.TWO_PART_KERNEL,),
            "the same by TMA and wgmma: sums are promoted while the cross terms are multiplied",
        ),
        Variant(
            "split rows",
            two_part.FILE,
            ("split_rows",),
            "one warp per row: the scale from the largest magnitude, then both parts",
        ),
        Variant(
            "join rows",
            two_part.FILE,
            ("join_rows",),
            "the inverse, for some rows of a matrix",
        ),
        Variant(
            "widen",
            widened.FILE,
            (widened.KERNEL,),
            "FP8 weights as float16, before a product with float16 activations",
        ),
        Variant(
            "store",
            stored.FILE,
            (stored.KERNEL,),
            "weights of a checkpoint in another dtype, or transposed to (N, K)",
        ),
    ),
    make=_make,
    traffic=lambda s: s["weight"] * s["K"] * s["N"] + s["itemsize"] * s["M"] * (s["K"] + s["N"]),
    flops=lambda s: 2 * s["M"] * s["K"] * s["N"],
    bound="either",
    attrs={},
    dtypes=("bfloat16", "float16"),
    matrices=(1,),
    layout="NK",
    shape=lambda a, w, *others, **attrs: (*a[:-1], w[1]),
    largest=largest_product,
    binder=bind,
)


def gemm(
    a: CudaArray | TwoPartMatrix,
    w: WeightMatrix | TwoPartMatrix,
    bias: CudaArray | None = None,
    residual: CudaArray | None = None,
    up: WeightMatrix | None = None,
    gelu: bool = False,
    split_k: bool = False,
    dtype: str | None = None,
    variant: str | None = None,
    bound: float | None = None,
) -> Any:
    """`reference.gemm` on CuPy arrays, by tensor cores; raises InputError.

    a (..., K): float16 or bfloat16. w: a `WeightMatrix` of that dtype, or with float16 of FP8,
    layout "NK"; the scales of FP8 weights are applied to the sums. bias (N,): float32. residual
    (..., N) and the result: `dtype`, that of a (the default) or "float32". K and N are multiples of
    8. Sums, bias, GELU and residual in float32, rounded once. A row's result has the same bits
    alone and among others, unless `split_k` permits summing K in parts, which is faster for few
    rows. Without a variant: the fastest of this GPU. With `up`, of w's dtype (16 bits) and shape,
    the result is silu(a w) (a up), in the dtype of a, without bias, residual and gelu, on GPUs of
    compute capability 9.0 only.

    With the accuracy of float32: a is float32 or a TwoPartMatrix, and w a TwoPartMatrix (N, K),
    such as TwoPartMatrix.from_float32(w.T). The result is float32, or, without a residual and with
    dtype "two_part", a TwoPartMatrix with one scale for all rows, from the largest magnitude it can
    have, `bound`; anything more than twice as large becomes infinite. Infinity and NaN in a and w
    have the same effect as in float32, except that infinity times a number below 2^-39 of the
    largest of its row gives NaN. Source: Ootomo and Yokota, "Recovering single precision accuracy
    from Tensor Cores while surpassing the FP32 theoretical peak performance" (2022).
    """
    a, bias, residual = contiguous(a, bias, residual)
    options = {"gelu": gelu, "split_k": split_k, "dtype": dtype, "variant": variant, "bound": bound}
    return call(bind, (a, w, bias, residual, up), **options).out
