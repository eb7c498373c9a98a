"""The product of the tensor-core tier on CUDA: mma/gemm.cu and hopper/gemm.cu."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gpt2block.errors import InputError
from gpt2block.kernels import Launch
from gpt2block.operations import _hopper_gemm
from gpt2block.operations.gemm import CAPABILITY, FILE, MULTIPLE, OPERATION, geometry
from gpt2block.ops._arrays import (
    Bound,
    CudaArray,
    check,
    compute_capability,
    contiguous,
    device_attribute,
    launch_at,
    output,
    overlap,
    storage,
)
from gpt2block.ops._warm import call
from gpt2block.tensor_maps import NO_MAP, tensor_map
from gpt2block.weight_matrix import WeightMatrix

LARGEST = 2**31 - 2**16  # M, N and K: what an int holds, and a tile more
ALIGNED = 16


class Job(NamedTuple):
    """A product, checked."""

    a: CudaArray  # (..., K)
    w: WeightMatrix  # (N, K) in memory
    bias: CudaArray | None
    residual: CudaArray | None
    out: CudaArray  # (..., N)
    gelu: bool = False
    split_k: bool = False

    @property
    def storage(self) -> str:
        return str(self.a.dtype.name)

    @property
    def float_out(self) -> bool:
        return bool(self.out.dtype.name == "float32")

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N, K."""
        return self.a.size // self.w.K, self.w.N, self.w.K


class Way(NamedTuple):
    """How a variant does a job."""

    problem: Callable[[Job], str | None]  # why it cannot; None: it can
    launch: Callable[[Job], Launch]


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    gelu: bool = False,
    split_k: bool = False,
    dtype: str | None = None,
    variant: str | None = None,
) -> Bound:
    """inputs (a (..., K), w, bias (N,) or None, residual (..., N) or None), out (..., N).

    a: float16 or bfloat16. w: a WeightMatrix of that dtype, layout "NK". bias: float32. out and
    residual: `dtype`, which is that of a or float32; the one out has where none is given, else that
    of a. residual may be out itself. What is missing at the end of inputs is None. The bits of a
    row depend on this row, w, bias and its residual alone; with `split_k` on the number of rows,
    too: K may then be added up in parts, which is faster for few rows. Raises InputError.
    """
    a, w, bias, residual = (*inputs, *(None,) * 2)[:4]
    job = _check(a, w, bias, residual, out, dtype)._replace(gelu=bool(gelu), split_k=bool(split_k))
    return Bound(job.out, (_choose(job, variant).launch(job),))


def _check(a: Any, w: Any, bias: Any, residual: Any, out: Any, dtype: str | None) -> Job:
    own = storage(a)
    check("a", a, dtype=own)
    if own not in OPERATION.dtypes:
        raise InputError(
            f"a: expected {' or '.join(OPERATION.dtypes)}, got {own}: ops.linear takes float32"
        )
    if dtype is None:
        dtype = own if out is None else getattr(getattr(out, "dtype", None), "name", own)
    if dtype not in (own, "float32"):
        raise InputError(f"dtype {dtype!r}: expected {own}, as a has, or float32")
    _check_weights(a, w, own)
    if bias is not None:
        check("bias", bias, (w.N,))
    out = output(out, (*a.shape[:-1], w.N), dtype)
    if residual is not None:
        check("residual", residual, out.shape, dtype)
    _check_memory(out, residual, {"a": a, "w": w.data, "bias": bias})
    return Job(a, w, bias, residual, out)


def _check_weights(a: CudaArray, w: Any, dtype: str) -> None:
    if not isinstance(w, WeightMatrix):
        raise InputError(f"w: expected a WeightMatrix, got {type(w).__name__}: use .quantize")
    if w.layout != "NK" or w.dtype != dtype:
        raise InputError(
            f"w: expected {dtype}, as a has, in layout 'NK', (N, K) in memory, "
            f"got {w.dtype}, {w.layout!r}"
        )
    check("w", w.data, dtype=dtype)
    K = int(a.shape[-1])
    if w.K != K:
        raise InputError(f"w: expected K {K} to match a, got {w.K}")
    if max(a.size // K, w.N, K) > LARGEST:
        raise InputError(f"a {a.shape}, w ({w.N}, {K}): expected at most {LARGEST:,} of each size")
    if w.N % MULTIPLE or K % MULTIPLE:
        raise InputError(f"w: expected K and N in multiples of {MULTIPLE}, got K {K}, N {w.N}")


def _check_memory(out: CudaArray, residual: CudaArray | None, others: Mapping[str, Any]) -> None:
    """Where the arrays start, and that what is written overlaps nothing that is read."""
    for name, array in {**others, "residual": residual, "out": out}.items():
        if array is not None and array.data.ptr % ALIGNED:
            raise InputError(f"{name}: expected data aligned to {ALIGNED} bytes: pass a copy")
    for name, array in others.items():
        if array is not None and overlap(out, array):
            raise InputError(f"out: overlaps {name}: expected another array")
    if residual is not None and residual.data.ptr != out.data.ptr and overlap(out, residual):
        raise InputError("out: overlaps residual in part: expected residual itself, or another")


def _choose(job: Job, variant: str | None) -> Way:
    """The variant asked for, or the first of `WAYS` that can do the job."""
    if variant is None:
        for way in WAYS.values():
            if way.problem(job) is None:
                return way
    name = OPERATION.variant(variant or LAST).name
    problem = WAYS[name].problem(job)
    if problem is not None:
        raise InputError(f"gemm variant {name}: {problem}")
    return WAYS[name]


def _mma_problem(job: Job) -> str | None:
    if compute_capability() < CAPABILITY:
        return "needs a GPU of compute capability 8.0 or newer: use ops.linear"
    return None


def _mma(job: Job) -> Launch:
    where = geometry(
        *job.sizes,
        gelu=job.gelu,
        residual=job.residual is not None,
        float_out=job.float_out,
        sms=device_attribute("MultiProcessorCount"),
        most_shared=device_attribute("MaxSharedMemoryPerBlockOptin"),
    )
    outputs = (job.residual, job.out)
    both = (None, None, *outputs) if job.float_out else (*outputs, None, None)
    args = (job.a, job.w.data, job.bias, *both, *job.sizes)
    return launch_at(FILE, where, args, storage=job.storage)


def _hopper_problem(job: Job) -> str | None:
    if compute_capability() != _hopper_gemm.CAPABILITY:
        return "needs a GPU of compute capability 9.0 (Hopper)"
    return None


def _hopper(job: Job) -> Launch:
    M, N, K = job.sizes
    where, tile = _hopper_gemm.geometry(
        M,
        N,
        K,
        gelu=job.gelu,
        residual=job.residual is not None,
        float_out=job.float_out,
        split_k=job.split_k,
        sms=device_attribute("MultiProcessorCount"),
    )
    a = tensor_map(job.a.reshape(1, M, K), (1, tile.rows, _hopper_gemm.SLICE))
    rows = tile.columns // tile.shares  # of w, that a block loads
    w = tensor_map(job.w.data.reshape(1, N, K), (1, rows, _hopper_gemm.SLICE))
    outputs = (job.residual, job.out)
    if job.float_out:
        args: tuple[Any, ...] = (a, w, NO_MAP, NO_MAP, job.bias, *outputs)
    else:
        boxes = (1, 64, tile.chunk)
        maps = (NO_MAP if x is None else tensor_map(x.reshape(1, M, N), boxes) for x in outputs)
        args = (a, w, *maps, job.bias, None, None)
    return launch_at(_hopper_gemm.FILE, where, (*args, M, N, K), storage=job.storage)


WAYS: Mapping[str, Way] = {  # the fastest first; the last one takes whatever any takes
    "hopper": Way(_hopper_problem, _hopper),
    "mma": Way(_mma_problem, _mma),
}
LAST = "mma"


def gemm(
    a: CudaArray,
    w: WeightMatrix,
    bias: CudaArray | None = None,
    residual: CudaArray | None = None,
    gelu: bool = False,
    split_k: bool = False,
    dtype: str | None = None,
    variant: str | None = None,
) -> CudaArray:
    """`reference.gemm` on CuPy arrays, by tensor cores; raises InputError.

    a (..., K): float16 or bfloat16. w: a `WeightMatrix` of that dtype, layout "NK". bias (N,):
    float32. residual (..., N) and the result: `dtype`, that of a or "float32"; that of a where none
    is given. K and N are multiples of 8. Sums, bias, GELU and residual in float32, rounded once.
    A row's result is the same bits alone and among others, unless `split_k` allows to add up K in
    parts, which is faster for few rows. Without a variant: the fastest that this GPU has.
    """
    a, bias, residual = contiguous(a, bias, residual)
    options = {"gelu": gelu, "split_k": split_k, "dtype": dtype, "variant": variant}
    return call(bind, (a, w, bias, residual), **options).out
