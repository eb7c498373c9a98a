"""The linear layer, [residual +] [gelu]((LayerNorm(x) or x) w + bias), sums in float32.

In decoding, a linear layer for q, k and v also appends k and v to the kv_cache. wgmma kernels for
large matrices also fuse RoPE.

Use it for float32 activations and weights (N, K) of any dtype, or on GPUs without tensor cores.
matmul/decode/mma.cu computes few rows, as in decoding. mma_tiles.cu computes more rows, and
wgmma.cu large matrices or more rows, with the same bits. matmul/decode/cores.cu runs where these
kernels do not apply, matmul/prompt/cores.cu for many rows. `gemm` is faster for many rows of 16-bit
activations; `matmul_bias` takes plain float32 matrices (K, N).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import gcd
from typing import NamedTuple

from gpt2block.contract import Contract
from gpt2block.cuda.arrays import (
    CudaArray,
    alignment,
    check,
    check_address,
    contiguous,
    row_alignment,
)
from gpt2block.cuda.cards import gpu
from gpt2block.cuda.formats import FILE, GGUF
from gpt2block.cuda.kernels import (
    FP8,
    HI_LO,
    Geometry,
    Launch,
    cache_dtype,
    launch_at,
    nonzero_defines,
)
from gpt2block.errors import InputError
from gpt2block.models.weights.hi_lo import HiLoMatrix, scale_for
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops.all_gather import ALL_GATHER, ALL_GATHER_NORM
from gpt2block.ops.call import CACHE, Call, Parts, UncheckedCall, accept, needs, refuse, supports
from gpt2block.ops.engines import linear_gguf as blocks
from gpt2block.ops.engines import linear_matvec as matvec
from gpt2block.ops.engines import linear_mma as mma
from gpt2block.ops.engines import linear_mma_tiles as mma_tiles
from gpt2block.ops.engines import linear_tiles as tiles
from gpt2block.ops.engines import linear_wgmma as wgmma
from gpt2block.ops.engines.epilogues import (
    Ends,
    Epilogue,
    add,
    append,
    append_rope,
    check_rope_heads,
)
from gpt2block.ops.engines.thresholds import SAME_ENGINE, min_weights
from gpt2block.ops.experts import STEPS as EXPERTS
from gpt2block.ops.gated_sums import GATED_SUMS, LINEAR_SUMS, ROPE_SUMS
from gpt2block.ops.gguf import chunk_sums
from gpt2block.ops.low_rank import ADD_LOW_RANK
from gpt2block.ops.operands import (
    CHUNK,
    Operand,
    check_operand,
    count_define,
    ordered,
    rounds,
    stored_scale,
)
from gpt2block.ops.operation import REQUIRED, Launches, Operation, Variant, Workload, variant
from gpt2block.ops.products import SMALL, Matmul, gate_define, limits, storage_of
from gpt2block.ops.warm import call

DECODING_ROWS = 16  # maximum rows of x for which the kernels of decoding are the default variants
# maximum M N K for which mma is faster than mma_tiles for M > MORE_ROWS
MAX_MMA_PRODUCTS = 80_000_000
# Matrices with fewer weights than the largest of a layer divided by MUCH_SMALLER do not decide for
# the other matrices. Gemma 4 E2B, NVIDIA H200, 8 rows: 3,453 -> 2,267 us a step, with wgmma for its
# matrices of embeddings for layers 2,406. SAME_INPUT: {matrix: one that must read x in its format},
# Qwen3.5-0.8B, 64 rows: 2,430 -> 2,246 us.
MUCH_SMALLER = 16
SAME_INPUT = {"w_ba": "w_in"}
# Contracts of `reference.linear` and `reference.linear_qkv` if w is a HiLoMatrix.
HI_LO_LINEAR = Contract.parse(
    "x f32 ... K; w hi_lo N K; bias? f32 N; gamma? beta? f32 K; residual? f32 ... N; "
    "up? rows K N; workspace? f32 H -> out~residual f32 ... N"
)
HI_LO_QKV = Contract.parse(
    "x f32 M K; w hi_lo N K; bias? f32 N; gamma? beta? f32 K; k v kv B P C; row position i32 M "
    "-> q f32 M C; k v kv B P C"
)
MAX_OUTPUTS = 2**31 - 2**16  # maximum M and N: an int still holds them plus a block's columns
# normalizes: whether GGUF products can fuse RMSNorm. wgmma_takes: whether wgmma supports w.
MORE_ROWS, normalizes, wgmma_takes = mma.MORE_ROWS, blocks.normalizes, wgmma.takes_blocks


def operands_of(
    dtype: str,
    M: int,
    shapes: Mapping[str, tuple[int, int]],
    rounded: bool = False,
    fused: bool = False,
) -> dict[str, tuple[Operand, ...]]:
    """Return, for each product of a layer, each `Operand` in which x can be stored, fastest first.

    M: rows of x. dtype: dtype of the weights. shapes: (K, N) of the matrices, by name. rounded:
    whether x is rounded to one term per value. fused: whether products that read floats fuse
    RMSNorm, RoPE and the gate. A product without an `Operand` reads x as floats: floats are faster
    for few rows, and necessary for products without tensor cores or with tf32. The caller sets the
    scale of hi/lo terms. `engines.THRESHOLDS` lists the measured sizes. With GGUF blocks, floats
    are faster up to 8 rows with wgmma, else up to 16: a step of a 7B model in Q4_K_M (H100) takes
    3.1 ms for 8 rows. For 16 rows it takes 4.9 ms by mma, and 3.8 ms by wgmma.
    """
    if dtype == "float32" or needs("has_bf16" if dtype == "bfloat16" else "has_mma"):
        return {}
    wide = wgmma.operand(dtype, rounded)
    if dtype in (FILE, GGUF):
        reads = rounded and _blocks_read_operand(M, (K for K, _ in shapes.values()))
        return dict.fromkeys(shapes, (wide,)) if reads else {}
    in_place = Operand(HI_LO) if dtype == HI_LO else wide._replace(width=0)
    kinds = ("fp8",) if dtype in FP8 else ("gated",) * ("w_gate" in shapes)
    least = min_weights(M, (*kinds, *("fused",) * fused))
    sizes, found = _deciding_sizes(M, shapes), dict[str, tuple[Operand, ...]]()
    for name, (K, N) in shapes.items():
        faster = [wide] * (sizes[name] >= least) + [in_place] * (mma.most_rows() < M)
        found[name] = _supported(Matmul(M, N, K, dtype, rounded=rounded), faster)
    return {name: operands for name, operands in found.items() if operands}


def _supported(p: Matmul, operands: Iterable[Operand]) -> tuple[Operand, ...]:
    """Return the operands in which a kernel reads x of a product."""
    plans = {o: wgmma.plan if ordered(o) else mma_tiles.plan for o in operands}
    return tuple(o for o, plan in plans.items() if supports(plan(p._replace(operand=o))))


def _blocks_read_operand(M: int, inputs: Iterable[int]) -> bool:
    """Return whether products of M rows with GGUF blocks are faster with operands than floats."""
    most_floats = blocks.JOINT_ROWS if gpu().has_wgmma else DECODING_ROWS
    return most_floats < M and all(map(blocks.reads_operand, inputs))


def _deciding_sizes(M: int, shapes: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Return, for each product of M rows, the weights of the matrix that decides its engine."""
    sizes = {name: K * N for name, (K, N) in shapes.items()}
    own = {name: sizes[SAME_INPUT.get(name, name)] for name in shapes}
    if M > SAME_ENGINE:
        return own
    least = max(size for name, size in sizes.items() if name != "lm_head") / MUCH_SMALLER
    smallest = min(size for size in sizes.values() if size >= least)
    return {name: smallest if size >= least else 0 for name, size in own.items()}


ROUNDING = ("float16", "float8_e5m2", "float8_e4m3fn", FILE)  # weights for which x is rounded


def can_round(dtype: str, inputs: Iterable[int]) -> bool:
    """Return whether decoding rounds x to ROUNDED. inputs: the number of inputs of each matrix.

    Rounding is faster, and costs almost no accuracy, with weights of a dtype in ROUNDING if all
    products run on tensor cores. x is then rounded for any number of rows, so that a row has the
    same bits alone and in any batch. Otherwise, x has two terms or stays float32.
    """
    return dtype in ROUNDING and all(not mma.refusal(dtype, K) for K in inputs)


def workspace_floats(dtype: str, N: int) -> int:
    """Return the size of `workspace` for products with N outputs, or 0 if none reads it.

    dtype: dtype of the weights, "file" for GGUF blocks.
    """
    has = gpu()
    reads = dtype == FILE and has.has_mma and not has.has_wgmma
    return blocks.COUNTERS + mma.MAX_SPLITS * blocks.MAX_ROWS * N if reads else 0


def _few_rows(
    c: Call, file: str, geometry: Geometry, load: int, end: Epilogue, **own: float
) -> Launch:
    """Return a Launch of a kernel for few rows of floats.

    load: bytes of w per load of a lane. own: arguments that other kernels do not have.
    """
    check_address("w", c.w.data, load)
    c.check_addresses("x", "gamma", "beta", loaded=gcd(4, c.K))
    args = {"x": c.x, "gamma": c.gamma, "beta": c.beta, "eps": c.eps, "M": c.M, "N": c.N, **own}
    args |= {"w": c.w.data, "scale": c.w.scale, "bias": c.bias}
    defines = count_define(c.rounded)
    if c.up:
        check_address("up", c.up.data, load)
        args |= {"up": c.up.data, "up_scale": c.up.scale}
        defines += (("DECODE_UP", 1), *gate_define(c.gelu))
        end = end._replace(args={**end.args, "gelu": 0})
    return end.launch(file, geometry, defines, args, c.w)


def _by_cores(c: Call, epilogue: Ends) -> Launch:
    """Return a Launch of the kernel in matmul/decode/cores.cu."""
    geometry, size = accept(matvec.plan(Matmul.of(c))), int(c.w.data.itemsize)
    load = matvec.order(c.w.whole_N, c.K, size)[0] * size
    _send_after(c)
    return _few_rows(c, matvec.FILE, geometry, load, epilogue(c))


def _by_mma(c: Call, epilogue: Ends) -> Launch:
    """Return a Launch of the kernel in matmul/decode/mma.cu."""
    geometry, end = accept(mma.plan(Matmul.of(c))), epilogue(c)
    end = end._replace(defines=(*end.defines, *nonzero_defines(DECODE_ROPE=end.head)))
    return _few_rows(c, mma.FILE, geometry, mma.LOADED, end, x_scale=c.x_scale)


def _send_after(c: Call) -> None:
    """Let another kernel send out to the other GPUs, if option `to_peers` is given."""
    if c.to_peers is not None:
        c.after, c.to_peers = (*c.after, c.to_peers.launch(c.output("out"))), None


def _by_mma_tiles(c: Call, epilogue: Ends) -> Launch:
    """Return a Launch of the kernel in matmul/decode/mma_tiles.cu."""
    geometry = accept(mma_tiles.plan(Matmul.of(c)))
    _send_after(c)
    c.check_addresses("w", "x", "up")
    defines = count_define(c.rounded)
    args = {"x": c.x, "w": c.w.data, "scale": c.w.scale, "M": c.M, "N": c.N, "K": c.K}
    if c.up:
        args |= {"up": c.up.data, "up_scale": c.up.scale, "out": c.output("out")}
        geometry = geometry.with_defines((*defines, *gate_define(c.gelu)))
        return launch_at(mma_tiles.FILE, geometry, args, *storage_of(c.w))
    args |= {"bias": c.bias, "x_scale": c.x_scale, "out_scale": stored_scale(c.to_operand)}
    return epilogue(c).launch(mma_tiles.FILE, geometry, defines, args, c.w)


def _by_wgmma(c: Call, epilogue: Ends) -> tuple[Launch, ...]:
    """Return the Launches of the kernel in matmul/decode/wgmma.cu or wgmma_gguf.cu."""
    if c.to_peers and (c.w.dtype == GGUF or c.N % 2 or c.to_peers.args["all_columns"] % 2):
        _send_after(c)  # the kernel sends pairs of columns
    return wgmma.launch(c, epilogue(c))


def _by_mma_gguf(c: Call, epilogue: Ends) -> tuple[Launch, ...]:
    """Return the Launches of a kernel in matmul/decode/mma_gguf.cu."""
    end = epilogue(c)
    c.check_addresses("x", "w", "gamma", "beta")
    if end.head:
        check_address("by", c.by, 8)
    return blocks.launch(c, end)


class Engine(NamedTuple):
    """A kernel that multiplies rows of decoding. The functions raise UnsupportedCall."""

    name: str
    file: str
    kernel: str
    launch: Callable[[Call, Ends], Launches]
    other: tuple[str, ...] = ()  # another kernel of `linear`

    def then(self, epilogue: Ends, prefix: str = "") -> Variant:
        """Return the variant with an epilogue. The name of the variant begins with `prefix`."""

        def launch(c: Call) -> Launches:
            expected = f"x {c.x.shape}, {c.N:,} outputs: expected at most {MAX_OUTPUTS:,} of both"
            refuse(max(c.M, c.N) > MAX_OUTPUTS, expected)
            return self.launch(c, epilogue)

        kernels = self.kernel, *(() if prefix else self.other)
        return Variant(prefix + self.name, self.file, kernels, launch)


ENGINES = (
    Engine("matvec", matvec.FILE, matvec.KERNEL, _by_cores),
    Engine("mma", mma.FILE, mma.KERNEL, _by_mma),
    Engine("mma_tiles", mma_tiles.FILE, mma_tiles.KERNEL, _by_mma_tiles, (mma_tiles.GATED,)),
    Engine("wgmma", wgmma.FILE, wgmma.KERNEL, _by_wgmma),
)
GGUF_ENGINES = (
    Engine("gguf", blocks.FILE, blocks.KERNEL, _by_mma_gguf, (blocks.DIVIDED,)),
    Engine("gguf_wgmma", wgmma.GGUF_FILE, wgmma.GGUF_KERNEL, _by_wgmma),
)


@variant("tiles", tiles.FILE, tiles.KERNEL)
def _tiles(c: Call) -> Launches:
    if c.w.dtype == GGUF:
        return _by_mma_gguf(c, epilogue=add)
    p, M, N, K, data = Matmul.of(c), c.M, c.N, c.K, c.w.data
    accept(matvec.refusal(p))
    floats = "takes and gives floats, of one matrix: use variant wgmma"
    most = f"at most {tiles.MAX_SIZE:,} rows or outputs, and {tiles.MAX_K:,} inputs"
    refuse(p.norm, "takes no gamma and beta: use variant matvec")
    refuse(p.operand or p.to_operand or p.up, floats)
    too_many = max(M, N) > tiles.MAX_SIZE or K > tiles.MAX_K
    refuse(too_many, f"x {c.x.shape}, w ({N}, {K}): expected {most}")
    _send_after(c)
    geometry = tiles.geometry(
        M,
        N,
        size=data.itemsize,
        load=min(tiles.MAX_LOADED, alignment(K * data.itemsize, data.data.ptr) // data.itemsize),
        store=4 if row_alignment(N, c.output("out"), c.residual) == 16 else 1,
        gelu=c.gelu,
        **limits(),
    )
    args = (c.x, data, c.w.scale, c.bias, c.residual, c.output("out"), M, K, N)
    return launch_at(tiles.FILE, geometry, args, *storage_of(c.w))


def _decoding(c: Call, operation: Operation) -> tuple[Variant, ...]:
    """Return variants for decoding, preferred first. All tensor-core variants give equal bits."""
    few_rows, on_tensor_cores, more_rows, by_wgmma = operation.variants[:4]
    if c.w.dtype == GGUF:
        return (_with_blocks(c, QKV_GGUF if operation is LINEAR_QKV else LINEAR_GGUF),)
    if ordered(c.operand):
        return (by_wgmma,)
    most = mma.most_rows() if c.N < mma.MANY_COLUMNS else MORE_ROWS
    few = c.M * c.N * c.K <= MAX_MMA_PRODUCTS or most >= c.M
    tiles_first = c.to_operand or (c.gamma is None and not few)
    tiles = (more_rows,) if c.gamma is None else ()  # also if a row does not fit in shared memory
    others = () if c.rounded else (few_rows,)
    return (*tiles, on_tensor_cores, *others) if tiles_first else (on_tensor_cores, *tiles, *others)


def _with_blocks(c: Call, variants: tuple[Variant, ...]) -> Variant:
    """Return the variant of GGUF_ENGINES: wgmma, where there is one, reads operands in order."""
    return variants[ordered(c.operand) and gpu().has_wgmma]


def _prepare(unchecked: UncheckedCall) -> Call:
    """Check a call of `linear`, and list the variants to try.

    decoding: whether to use the variants for few rows, so that the bits of a row do not depend on
    other rows. w: a WeightMatrix (N, K), or a HiLoMatrix for variants mma and mma_tiles. x_bound:
    with a HiLoMatrix, the largest magnitude of x or its LayerNorm, by default 2^15; this bound
    determines the scale of x's terms. operand: the `Operand` in which x is stored
    (lib/operands.cuh), one of `operands_of`; None with gamma, and with x_bound, because hi/lo terms
    have a scale. to_operand: the `Operand` in which out is stored for another product with such
    weights; with `Operand.summed`, only with `up` and GGUF blocks. up: a second WeightMatrix of w's
    dtype and shape; variants mma and wgmma then compute silu(x w) (x up) or gelu(x w) (x up).
    x_dtype: "float16" rounds floats of x, or their norm, in tensor-core kernels of decoding with
    float16 or FP8 weights. A stored `operand` is rounded if `Operand.rounded` is set. workspace:
    floats for sums, initially 0 (`workspace_floats`), of one CUDA stream; None: not used. to_peers:
    the `PeerStores` of out, which is then sent to other GPUs, too, by this kernel if it can.
    """
    c = _checked(unchecked, with_hi_lo=HI_LO_LINEAR)
    c.M = c.rows
    _check(c)
    if c.up is not None and (c.up.dtype != c.w.dtype or c.bias is not None):
        raise InputError(f"up: {c.up.dtype}: expected {c.w.dtype}, as w has, and no bias")
    few = c.decoding or c.M <= DECODING_ROWS or c.gamma is not None or c.w.dtype in (HI_LO, GGUF)
    c.order = _decoding(c, OPERATION) if few else (_tiles,)
    return c


def _checked(unchecked: UncheckedCall, with_hi_lo: Contract) -> Call:
    """Return the checked call and set its scale of x. with_hi_lo: contract for a HiLoMatrix w."""
    if not isinstance(unchecked.inputs[1], HiLoMatrix):
        if unchecked.options["x_bound"] is not None:
            raise InputError("x_bound: expected a HiLoMatrix: only with one x has a scale")
        c = unchecked.checked()
        c.x_scale = 1.0
        return c
    c = unchecked.checked(with_hi_lo)
    c.w = Parts(c.w.parts, c.w.scale)
    if c.operand and c.x_bound is not None:
        raise InputError("x_bound: terms have a scale: expected either")
    c.x_scale = stored_scale(c.operand) if c.x_bound is None else scale_for(c.x_bound)
    return c


def _prepare_qkv(unchecked: UncheckedCall) -> Call:
    """Check a call of `linear_qkv`, and list the variants to try.

    k and v have the FP8 format of the option, or else the dtype of the weights (float16 with FP8
    weights, float32 with a HiLoMatrix). No two rows of x may have the same row and position of
    the cache. k and v of a token outside the cache are not stored. Other options: as in `linear`.
    """
    c = _checked(unchecked, with_hi_lo=HI_LO_QKV)
    c.T, c.to_operand, c.up = cache_dtype(c.w.dtype), None, None
    _check(c)
    if c.fp8_cache is None:
        check("k", c.k, dtype=c.T)
    if c.N != 3 * c.C:
        raise InputError(f"w: expected {3 * c.C} outputs, 3C as k has C channels, got {c.N}")
    c.order = _decoding(c, LINEAR_QKV)
    return c


def _prepare_rope(unchecked: UncheckedCall) -> Call:
    """Check a call of `linear_rope`, and choose the variant.

    x is an `operand` in the order of wgmma, or x is floats, which x_dtype "float16" rounds. N is
    (n_head + 2 n_kv_head) D; the cache has C = n_kv_head D channels. RoPE rotates half-split pairs
    of q and k. k and v are as in `linear_qkv`. The host does not read row and position; kernels do
    not store k and v outside the cache. q is bitwise equal to `linear` followed by `rope_append`.
    """
    absent = dict.fromkeys(("to_operand", "up", "gamma", "beta"))
    c = unchecked.checked(**absent, eps=0.0, x_scale=1.0)
    c.T = cache_dtype(c.w.dtype)
    c.rounded = rounds(c.operand.x_dtype if c.operand else c.x_dtype, c.w.dtype)
    floats = LINEAR_ROPE.variants[c.operand is not None]
    c.order = (_with_blocks(c, ROPE_GGUF) if c.w.dtype == GGUF else floats,)
    check_rope_heads(c)
    return c


def _check(c: Call) -> None:
    """Raise InputError unless gamma, beta, and the `Operand` of x and of out are compatible."""
    if c.gamma is None and c.beta is not None:
        raise InputError("beta: expected gamma, too")
    if c.operand and c.x_dtype is not None:
        raise InputError("x_dtype: terms are rounded or not: expected either")
    c.rounded = rounds(c.operand.x_dtype if c.operand else c.x_dtype, c.w.dtype)
    stored = [each for each in (c.operand, c.to_operand) if each is not None]
    if not stored:
        return
    if any(each.rounded != c.rounded for each in stored):
        raise InputError(f"terms of {c.to_operand}: expected both x and out rounded, or neither")
    shapes = {"w": (c.K, c.N)}
    known = operands_of(c.w.dtype, mma.most_rows() + 1, shapes, c.rounded).get("w", ())
    kinds = {each.dtype for each in known}
    orders = {0} if c.w.dtype == HI_LO else {0, wgmma.width(c.w.dtype)}
    unknown = any(each.dtype not in kinds or each.width not in orders for each in stored)
    if unknown or (c.operand and c.gamma is not None):
        raise InputError(
            f"w: {c.w.dtype}, {c.K} inputs, {c.N} outputs: expected terms of "
            f"{' or '.join(kinds) or 'no dtype'}, without gamma and beta: pass floats"
        )
    begins = c.w.begins if c.w.dtype == GGUF else ()  # a block computes columns of one type
    check_operand(c.to_operand, c.N, gcd(CHUNK, *begins) if c.up is not None else 1)


LINEAR_GGUF = tuple(engine.then(add) for engine in GGUF_ENGINES)
QKV_GGUF = tuple(engine.then(append, "qkv_") for engine in GGUF_ENGINES)
ROPE_GGUF = tuple(engine.then(append_rope, "rope_") for engine in GGUF_ENGINES)

LINEAR_QKV = Operation(
    name="linear_qkv",
    variants=tuple(engine.then(append, "qkv_") for engine in ENGINES),
    options={"eps": 1e-5, "operand": None, **CACHE, "x_bound": None, "x_dtype": None},
    prepare=_prepare_qkv,
    parts=QKV_GGUF,
)

LINEAR_ROPE = Operation(
    name="linear_rope",
    variants=tuple(engine.then(append_rope, "rope_") for engine in ENGINES[1::2]),
    options={"n_head": REQUIRED, "operand": None, **CACHE, "x_dtype": None, "growth": None},
    prepare=_prepare_rope,
    parts=ROPE_GGUF,
)

OPERATION = Operation(
    name="linear",
    variants=(*(engine.then(add) for engine in ENGINES), _tiles),
    options={"gelu": False, "eps": 1e-5, "decoding": False}
    | dict.fromkeys(("variant", "operand", "to_operand", "x_bound", "x_dtype", "to_peers")),
    prepare=_prepare,
    parts=(*LINEAR_GGUF, chunk_sums),
    steps=(
        ADD_LOW_RANK,
        *(LINEAR_QKV, LINEAR_ROPE, LINEAR_SUMS, ROPE_SUMS, GATED_SUMS),
        *(ALL_GATHER, ALL_GATHER_NORM),
        *EXPERTS,
    ),
    workload=Workload(
        idea="[residual +] [gelu]((norm(x) or x) W + bias)",
        sizes={"M": 1, "K": 768, "N": 2304},
        mean=0.0,
        optional=("bias",),
        traffic=lambda s: s["weight"] * s["K"] * s["N"] + 4 * (s["M"] * (s["K"] + s["N"]) + s["N"]),
        flops=lambda s: 2 * s["M"] * s["K"] * s["N"],
        bound="either",
        small=SMALL,
        matrices=(1,),
        layout="NK",
    ),
)


def linear(
    x: CudaArray,
    w: WeightMatrix | HiLoMatrix,
    bias: CudaArray | None = None,
    gamma: CudaArray | None = None,
    beta: CudaArray | None = None,
    residual: CudaArray | None = None,
    gelu: bool = False,
    eps: float = 1e-5,
    variant: str | None = None,
    x_bound: float | None = None,
) -> CudaArray:
    """Compute `reference.linear` on CuPy arrays. Raises InputError.

    x (..., K), bias (N,), gamma and beta (K,), residual (..., N): float32. w: a `WeightMatrix` in
    layout "NK", of any dtype, or on GPUs from compute capability 8.0 on a `HiLoMatrix`. x_bound:
    with a HiLoMatrix, the largest magnitude of x or its norm, by default 2^15. variant: by
    default mma for up to 16 rows or with gamma (matvec on GPUs before compute capability 8.0, or if
    a row of w is no multiple of 16 bytes), else tiles, or mma_tiles with a HiLoMatrix. gamma
    without beta, for RMSNorm, needs variant mma. For one variant, the result of a row has the same
    bits alone and among other rows.
    """
    inputs = (*contiguous(x), w, *contiguous(bias, gamma, beta, residual))
    return call(OPERATION, inputs, gelu=gelu, eps=eps, variant=variant, x_bound=x_bound).out
