"""The product of the tensor-core tier: its variants, and the launches of matmul/mma*.cu."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from gpt2block.checks import check_flag
from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    arrays_of,
    check,
    check_apart,
    compute_capability,
    contiguous,
    device_attribute,
    launch_at,
    output,
    storage,
)
from gpt2block.cuda.kernels import Defines, Geometry, Launch
from gpt2block.cuda.tensor_maps import NO_MAP, tensor_map
from gpt2block.errors import InputError
from gpt2block.ops._gemm_hopper import FILE as GEMM_HOPPER_FILE
from gpt2block.ops._gemm_hopper import KERNEL as GEMM_HOPPER_KERNEL
from gpt2block.ops._gemm_hopper import SLICE, SPLIT_KERNEL, epilogue
from gpt2block.ops._gemm_hopper import SPLIT_FILE as GEMM_HOPPER_SPLIT_FILE
from gpt2block.ops._gemm_hopper import geometry as gemm_hopper_geometry
from gpt2block.ops._gemm_hopper import split_geometry as gemm_hopper_split_geometry
from gpt2block.ops._tensor_cores import HOPPER_CAPABILITY, MMA_CAPABILITY, MULTIPLE, room
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant, largest_product
from gpt2block.ops.two_part import (
    ALIGNED,
    LARGEST,
    ROWS_FILE,
    SPLIT,
    check_one_scale,
    check_split,
)
from gpt2block.ops.two_part import bind as bind_two_part
from gpt2block.ops.warm import call
from gpt2block.weights.matrix import WeightMatrix
from gpt2block.weights.two_part import SplitMatrix

FILE = "matmul/mma.cu"
SPLIT_FILE = "matmul/mma_two_part.cu"

# What an SM does in a clock, about: multiply-adds, bytes from the L2 cache, of shared memory, and
# to memory. And the clocks of a step of 16 of K, however small the tile.
MULTIPLY_ADDS = 1050
L2_BYTES = 28
SHARED_BYTES = 112
STORED_BYTES = 32
STEP = 40
FEWEST_STAGES = 3


def _make(s: Sizes, rng: np.random.Generator) -> Inputs:
    a = rng.standard_normal((s["M"], s["K"]), dtype=np.float32)
    w = rng.standard_normal((s["K"], s["N"]), dtype=np.float32) / np.float32(s["K"] ** 0.5)
    return a, w


class Tile(NamedTuple):
    """A block's tile, and how its warps share it: the constants of kernels_cu/matmul/mma.cuh."""

    rows: int
    columns: int
    warps: tuple[int, int]  # along rows and columns
    slice: int  # of K
    stages: int  # at most
    early: int  # slices of the weights asked for before the kernel before has ended
    blocks: int = 1  # on an SM


# Few rows: many bytes on their way. 64x96, 128x144 and 128x192 give 1,024 rows of GPT-2's products
# 128 tiles each, one for nearly every SM of 132. Many rows: warps of 64x64 or near it, for shared
# memory's sake, and tiles as large as the registers hold, for the L2 cache's.
TILES = (
    Tile(16, 32, (1, 4), 128, 8, 6),
    Tile(32, 32, (2, 2), 128, 8, 4),
    Tile(64, 48, (2, 2), 128, 6, 3),
    Tile(64, 96, (2, 2), 64, 8, 3),
    Tile(128, 128, (2, 2), 64, 3, 1, blocks=2),
    Tile(128, 144, (4, 2), 64, 6, 2),
    Tile(128, 192, (2, 4), 64, 5, 1),
    Tile(128, 256, (2, 4), 64, 4, 1),
)

# With two parts of each matrix and three sums for each output.
SPLIT_TILES = (
    Tile(16, 32, (1, 4), 64, 8, 6),
    Tile(32, 32, (2, 2), 64, 8, 4),
    Tile(64, 48, (2, 2), 64, 6, 3),
    Tile(64, 96, (2, 4), 64, 5, 2),
    Tile(128, 64, (4, 2), 64, 4, 1),
    Tile(128, 96, (4, 2), 64, 4, 1),
)


@lru_cache(maxsize=1024)
def geometry(
    M: int,
    N: int,
    K: int,
    *,
    gelu: bool = False,
    residual: bool = False,
    float_out: bool = False,
    sms: int,
    most_shared: int,
    tile: Tile | None = None,
) -> Geometry:
    """The launch of gemm_mma for a (M, K) and w (N, K).

    sms, most_shared: the GPU's multiprocessors, and the bytes of shared memory that a block of it
    may ask for. tile: instead of the best of `TILES`. The results are the same bits for any.
    """
    choice = (tile,) if tile else TILES
    chosen = _chosen(choice, M, N, K, sms, most_shared, 1)
    ends = epilogue(gelu, residual, "GEMM_FLOAT_OUT", float_out)
    return _launched("gemm_mma", chosen, M, N, sms, 1, ends)


@lru_cache(maxsize=1024)
def split_geometry(
    M: int,
    N: int,
    K: int,
    *,
    gelu: bool = False,
    residual: bool = False,
    split_out: bool = False,
    sms: int,
    most_shared: int,
    tile: Tile | None = None,
) -> Geometry:
    """The launch of gemm_split_mma; as `geometry`, with the tiles `SPLIT_TILES`."""
    choice = (tile,) if tile else SPLIT_TILES
    chosen = _chosen(choice, M, N, K, sms, most_shared, 2)
    ends = epilogue(gelu, residual, "GEMM_SPLIT_OUT", split_out)
    return _launched("gemm_split_mma", chosen, M, N, sms, 2, ends)


def _chosen(
    choice: tuple[Tile, ...], M: int, N: int, K: int, sms: int, most_shared: int, parts: int
) -> Tile:
    fitting = [fit for each in choice if (fit := _fit(each, most_shared, parts))]
    return min(fitting, key=lambda each: _clocks(each, M, N, K, sms, parts))


def _launched(
    kernel: str, tile: Tile, M: int, N: int, sms: int, parts: int, ends: Defines
) -> Geometry:
    warps_m, warps_n = tile.warps
    defines = (
        ("GEMM_M", tile.rows),
        ("GEMM_N", tile.columns),
        ("GEMM_WARPS_M", warps_m),
        ("GEMM_WARPS_N", warps_n),
        ("GEMM_SLICE", tile.slice),
        ("GEMM_STAGES", tile.stages),
        ("GEMM_EARLY", tile.early),
        ("GEMM_BLOCKS", tile.blocks),
        *ends,
    )
    grid = min(_tiles(tile, M, N), sms * tile.blocks)
    shared = tile.stages * parts * _slice(tile)
    return Geometry(kernel, (grid,), (32 * warps_m * warps_n,), shared, defines)


def _tiles(tile: Tile, M: int, N: int) -> int:
    return ceil(M / tile.rows) * ceil(N / tile.columns)


def _slice(tile: Tile) -> int:
    """Bytes of one part of a slice in shared memory."""
    return 2 * tile.slice * (tile.rows + tile.columns)


def _clocks(tile: Tile, M: int, N: int, K: int, sms: int, parts: int) -> float:
    """Of the SM that has most tiles, about. Of two parts there are three products."""
    sides, size = tile.rows + tile.columns, tile.rows * tile.columns
    warps_m, warps_n = tile.warps
    read = tile.rows * warps_n + tile.columns * warps_m  # rows of shared memory
    step = max(
        STEP * parts,
        16 * size * (2 * parts - 1) / MULTIPLY_ADDS,
        32 * sides * parts / L2_BYTES,
        32 * (read + sides) * parts / SHARED_BYTES,
    )
    store = 2 * parts * size / STORED_BYTES / tile.blocks  # while other blocks multiply
    return ceil(_tiles(tile, M, N) / sms) * (ceil(K / 16) * step + store)


def _fit(tile: Tile, most_shared: int, parts: int) -> Tile | None:
    """The tile with as many blocks and stages as shared memory holds; None where it has no room."""
    for blocks in range(tile.blocks, 0, -1):
        stages = min(tile.stages, room(most_shared, blocks) // (parts * _slice(tile)))
        if stages >= FEWEST_STAGES:
            return tile._replace(stages=stages, blocks=blocks, early=min(tile.early, stages - 1))
    return None


class Job(NamedTuple):
    """A product, checked."""

    a: Any  # (..., K); an array or, as w, a SplitMatrix
    w: Any  # (N, K) in memory; a WeightMatrix or a SplitMatrix
    bias: CudaArray | None
    residual: CudaArray | None
    out: Any  # (..., N); an array, or beside split matrices a SplitMatrix
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
        K = self.a.shape[-1]
        return self.a.size // K, self.out.shape[-1], K


class Way(NamedTuple):
    """How a variant does a job."""

    problem: Callable[[], str | None]  # why it cannot on this GPU; None: it can
    launch: Callable[[Job], Launch]
    launch_split: Callable[[Job], Launch]  # of split matrices


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
    """inputs (a (..., K), w, bias (N,) or None, residual (..., N) or None), out (..., N).

    a: float16 or bfloat16. w: a WeightMatrix of that dtype, layout "NK". bias: float32. out and
    residual: `dtype`, which is that of a or float32; the one out has where none is given, else that
    of a. residual may be out itself. What is missing at the end of inputs is None. The bits of a
    row depend on this row, w, bias and its residual alone; with `split_k` on the number of rows,
    too: K may then be added up in parts, which is faster for few rows. Raises InputError.

    a: or a SplitMatrix, or float32, which is split first, and w (N, K) a SplitMatrix. residual is
    float32, and so is out, or without a residual it is a SplitMatrix with one scale; a new one has
    that of `bound`, for dtype "split". There is no split_k: nothing of K is added up in parts.
    """
    a, w, bias, residual = (*inputs, *(None,) * 2)[:4]
    gelu, split_k = check_flag("gelu", gelu), check_flag("split_k", split_k)
    if isinstance(w, SplitMatrix) or isinstance(a, SplitMatrix):
        return _bind_split(a, w, bias, residual, out, gelu, dtype, variant, bound)
    if bound is not None:
        raise InputError("bound: of a result in two parts, but a and w are no split matrices")
    job = _check(a, w, bias, residual, out, dtype)._replace(gelu=gelu, split_k=split_k)
    return Bound(job.out, (_choose(variant).launch(job),))


def _check(a: Any, w: Any, bias: Any, residual: Any, out: Any, dtype: str | None) -> Job:
    own = storage(a)
    check("a", a, dtype=own)
    if own not in OPERATION.dtypes:
        raise InputError(
            f"a: expected {' or '.join(OPERATION.dtypes)}, got {own}: use a SplitMatrix as w, "
            "or ops.linear"
        )
    if dtype is None:
        dtype = own if out is None else getattr(getattr(out, "dtype", None), "name", own)
    if dtype not in (own, "float32"):
        raise InputError(f"dtype {dtype!r}: expected {own}, as a has, or float32")
    _check_weights(a, w, own)
    if bias is not None:
        check("bias", bias, (w.N,))
    shape = (*a.shape[:-1], w.N)
    if residual is not None:
        check("residual", residual, shape, dtype)
    others = {"a": a, "w": w, "bias": bias}
    out = output(out, shape, dtype, apart=others, in_place={"residual": residual})
    _check_aligned(**others, residual=residual, out=out)
    return Job(a, w, bias, residual, out)


def _bind_split(
    a: Any,
    w: Any,
    bias: Any,
    residual: Any,
    out: Any,
    gelu: bool,
    dtype: str | None,
    variant: str | None,
    bound: float | None,
) -> Bound:
    """Split matrices; an a in float32 becomes one, which is then what Bound.extra holds."""
    check_split("w", w)
    if w.ndim != 2:
        raise InputError(f"w: expected a split matrix (N, K), got {w.shape}")
    if isinstance(a, SplitMatrix):
        check_split("a", a)
    else:
        check("a", a)
    N, K = w.shape
    if a.shape[-1] != K:
        raise InputError(f"w: expected K {a.shape[-1]} to match a, got {K}")
    _check_sizes(a, N, K)
    if bias is not None:
        check("bias", bias, (N,))
    others = {"a": a, "w": w, "bias": bias}
    out = _split_output(out, (*a.shape[:-1], N), dtype, bound, others, residual)
    if residual is not None:
        if isinstance(out, SplitMatrix):
            raise InputError(
                "residual: expected none beside a result in two parts: no bound is known for one"
            )
        check("residual", residual, out.shape)
    _check_aligned(**others, residual=residual, out=out)
    before: tuple[Launch, ...] = ()
    extra: tuple[CudaArray, ...] = ()
    if not isinstance(a, SplitMatrix):
        first = bind_two_part((a,))
        a, before = first.out, first.launches
        extra = a.parts, a.scale
    job = Job(a, w, bias, residual, out, gelu)
    return Bound(out, (*before, _choose(variant).launch_split(job)), extra)


def _split_output(
    out: Any,
    shape: tuple[int, ...],
    dtype: str | None,
    bound: float | None,
    others: Mapping[str, Any],
    residual: CudaArray | None,
) -> CudaArray | SplitMatrix:
    """float32, or a SplitMatrix whose rows have one scale; apart from the other arguments."""
    if dtype is None:
        dtype = SPLIT if isinstance(out, SplitMatrix) else "float32"
    if dtype not in ("float32", SPLIT):
        raise InputError(f"dtype {dtype!r}: expected float32 or {SPLIT!r} beside a split matrix")
    if dtype == "float32":
        if bound is not None:
            raise InputError(f"bound: of a result in two parts: expected dtype {SPLIT!r}")
        return output(out, shape, apart=others, in_place={"residual": residual})
    if out is None:
        if bound is None:
            raise InputError(
                "bound: expected the largest magnitude that the result can have, which gives all "
                "its rows one scale"
            )
        return SplitMatrix.empty(shape, bound)
    check_one_scale(out, shape, bound)
    check_apart("out", out, others)
    return out


def _check_weights(a: CudaArray, w: Any, dtype: str) -> None:
    if not isinstance(w, WeightMatrix):
        raise InputError(
            f"w: expected a WeightMatrix, got {type(w).__name__}: use WeightMatrix.quantize"
        )
    if w.layout != "NK" or w.dtype != dtype:
        raise InputError(
            f"w: expected {dtype}, as a has, in layout 'NK', (N, K) in memory, "
            f"got {w.dtype}, {w.layout!r}: use WeightMatrix.quantize(w, {dtype!r}, 'NK')"
        )
    check("w", w.data, dtype=dtype)
    K = int(a.shape[-1])
    if w.K != K:
        raise InputError(f"w: expected K {K} to match a, got {w.K}")
    _check_sizes(a, w.N, K)


def _check_sizes(a: CudaArray | SplitMatrix, N: int, K: int) -> None:
    if max(a.size // K, N, K) > LARGEST:
        raise InputError(f"a {a.shape}, w ({N}, {K}): expected at most {LARGEST:,} of each size")
    if N % MULTIPLE or K % MULTIPLE:
        raise InputError(
            f"w: expected K and N in multiples of {MULTIPLE}, got K {K}, N {N}: add zeros, "
            "or use ops.linear"
        )


def _check_aligned(**arguments: Any) -> None:
    for given, value in arguments.items():
        for name, array in arrays_of(given, value).items():
            if array.data.ptr % ALIGNED:
                raise InputError(f"{name}: expected data aligned to {ALIGNED} bytes: pass a copy")


def _choose(variant: str | None) -> Way:
    """The variant asked for, or the first of `WAYS` that this GPU has."""
    if variant is None:
        for way in WAYS.values():
            if way.problem() is None:
                return way
    name = OPERATION.variant(variant or LAST).name
    problem = WAYS[name].problem()
    if problem is not None:
        raise InputError(f"gemm variant {name}: {problem}")
    return WAYS[name]


def _mma_problem() -> str | None:
    if compute_capability() < MMA_CAPABILITY:
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


def _mma_split(job: Job) -> Launch:
    where = split_geometry(
        *job.sizes,
        gelu=job.gelu,
        residual=job.residual is not None,
        split_out=isinstance(job.out, SplitMatrix),
        sms=device_attribute("MultiProcessorCount"),
        most_shared=device_attribute("MaxSharedMemoryPerBlockOptin"),
    )
    out, parts, per_scale = _split_outputs(job)
    operands = (job.a.parts, job.a.scale, job.w.parts, job.w.scale)
    args = (*operands, job.bias, job.residual, out, parts, per_scale, *job.sizes)
    return launch_at(SPLIT_FILE, where, args, storage="float16")


def _split_outputs(job: Job) -> tuple[CudaArray | None, CudaArray | None, float]:
    """out, its parts, 1 / their scale: what there is of them."""
    if isinstance(job.out, SplitMatrix):
        return None, job.out.parts, 1 / (job.out.one_scale or 1.0)
    return job.out, None, 1.0


def _hopper_problem() -> str | None:
    if compute_capability() != HOPPER_CAPABILITY:
        return "needs a GPU of compute capability 9.0 (Hopper): use variant mma"
    return None


def _hopper(job: Job) -> Launch:
    M, N, K = job.sizes
    where, tile = gemm_hopper_geometry(
        M,
        N,
        K,
        gelu=job.gelu,
        residual=job.residual is not None,
        float_out=job.float_out,
        split_k=job.split_k,
        sms=device_attribute("MultiProcessorCount"),
    )
    a = tensor_map(job.a.reshape(1, M, K), (1, tile.rows, SLICE))
    rows = tile.columns // tile.shares  # of w, that a block loads
    w = tensor_map(job.w.data.reshape(1, N, K), (1, rows, SLICE))
    outputs = (job.residual, job.out)
    if job.float_out:
        args: tuple[Any, ...] = (a, w, NO_MAP, NO_MAP, job.bias, *outputs)
    else:
        boxes = (1, 64, tile.chunk)
        maps = (NO_MAP if x is None else tensor_map(x.reshape(1, M, N), boxes) for x in outputs)
        args = (a, w, *maps, job.bias, None, None)
    return launch_at(GEMM_HOPPER_FILE, where, (*args, M, N, K), storage=job.storage)


def _hopper_split(job: Job) -> Launch:
    where, tile = gemm_hopper_split_geometry(
        *job.sizes,
        gelu=job.gelu,
        residual=job.residual is not None,
        split_out=isinstance(job.out, SplitMatrix),
        sms=device_attribute("MultiProcessorCount"),
    )
    a = tensor_map(job.a.parts, (1, tile.rows, SLICE))
    w = tensor_map(job.w.parts, (1, tile.columns // tile.shares, SLICE))
    out, parts, per_scale = _split_outputs(job)
    to = NO_MAP if parts is None else tensor_map(parts, (1, 64, tile.chunk))
    rest = (job.a.scale, job.w.scale, job.bias, job.residual, out, per_scale)
    args = (a, w, to, *rest, *job.sizes)
    return launch_at(GEMM_HOPPER_SPLIT_FILE, where, args, storage="float16")


WAYS: Mapping[str, Way] = {  # the fastest first; the last one takes whatever any takes
    "hopper": Way(_hopper_problem, _hopper, _hopper_split),
    "mma": Way(_mma_problem, _mma, _mma_split),
}
LAST = "mma"


OPERATION = Operation(
    name="gemm",
    document="GPT-2",
    idea="[residual +] [gelu](a W + bias), 16 bits in, sums in float32",
    sizes={"M": 1024, "K": 768, "N": 3072},
    variants=(
        Variant(
            "mma",
            FILE,
            ("gemm_mma",),
            "tiles on tensor cores (mma.sync), one ring of slices through all tiles of a block",
        ),
        Variant(
            "hopper",
            GEMM_HOPPER_FILE,
            (GEMM_HOPPER_KERNEL,),
            "TMA and wgmma: one warpgroup loads, two multiply in turn, so that epilogues are free",
        ),
    ),
    auxiliary=(
        Variant(
            "split",
            SPLIT_FILE,
            ("gemm_split_mma",),
            "float accuracy: three products of float16 parts, sums promoted every 128 of K",
        ),
        Variant(
            "split hopper",
            GEMM_HOPPER_SPLIT_FILE,
            (SPLIT_KERNEL,),
            "the same by TMA and wgmma: sums are promoted while the cross terms are multiplied",
        ),
        Variant(
            "split rows",
            ROWS_FILE,
            ("split_rows",),
            "a warp a row: its largest magnitude makes the scale, then both parts",
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
    shape=lambda a, w, bias=None, residual=None: (*a[:-1], w[1]),
    largest=largest_product,
    binder=bind,
)


def gemm(
    a: CudaArray | SplitMatrix,
    w: WeightMatrix | SplitMatrix,
    bias: CudaArray | None = None,
    residual: CudaArray | None = None,
    gelu: bool = False,
    split_k: bool = False,
    dtype: str | None = None,
    variant: str | None = None,
    bound: float | None = None,
) -> Any:
    """`reference.gemm` on CuPy arrays, by tensor cores; raises InputError.

    a (..., K): float16 or bfloat16. w: a `WeightMatrix` of that dtype, layout "NK". bias (N,):
    float32. residual (..., N) and the result: `dtype`, that of a or "float32"; that of a where none
    is given. K and N are multiples of 8. Sums, bias, GELU and residual in float32, rounded once.
    A row's result is the same bits alone and among others, unless `split_k` allows to add up K in
    parts, which is faster for few rows. Without a variant: the fastest that this GPU has.

    Or in the accuracy of float32: a float32, or a `SplitMatrix`, and w a SplitMatrix (N, K), such
    as SplitMatrix.split(w.T). The result is float32, or, without a residual, with dtype "split" a
    SplitMatrix with one scale for all rows, from the largest magnitude it can have, `bound`; what
    is more than twice as large becomes infinite. Infinity and NaN in a and w make of a result what
    they make of it in float32, but for infinity beside a number below 2^-39 of the largest of its
    row, which gives NaN. Source: Ootomo and Yokota, "Recovering single precision accuracy from
    Tensor Cores while surpassing the FP32 theoretical peak performance" (2022).
    """
    a, bias, residual = contiguous(a, bias, residual)
    options = {"gelu": gelu, "split_k": split_k, "dtype": dtype, "variant": variant, "bound": bound}
    return call(bind, (a, w, bias, residual), **options).out
