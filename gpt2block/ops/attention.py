"""Self-attention of sequences: softmax(Q Kᵀ / sqrt(HS)) V, with or without a causal mask.

Variants `mha` (skeleton.cu), `naive` (ladder.cu) and `online` (online.cu) in learn/attention
compute in float32. Variants `mma` (mma.cu) and `wgmma` (wgmma.cu) in attention/prompt use tensor
cores with float16 or bfloat16. Both variants also take hi/lo matrices, with the accuracy of float32
(mma_hi_lo.cu, wgmma_hi_lo.cu).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from math import ceil
from typing import Any

from gpt2block.checks import check_integer
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    Shape,
    check,
    check_address,
    max_shared,
    multiprocessors,
    on_16_bytes,
)
from gpt2block.cuda.cards import gpu
from gpt2block.cuda.kernels import Defines, Geometry, Launch, launch_at, load
from gpt2block.cuda.tensor_maps import tensor_map
from gpt2block.errors import InputError
from gpt2block.models.weights.hi_lo import HiLoMatrix
from gpt2block.ops.call import HI_LO, Call, UncheckedCall, UnsupportedCall, accept, needs, refuse
from gpt2block.ops.engines import attention_tiles as tiles
from gpt2block.ops.engines.attention_tiles import (
    MAX_BLOCKS,
    MMA_HEADS,
    TENSOR_HEADS,
    AttentionSizes,
)
from gpt2block.ops.operation import REQUIRED, Operation, Workload, variant
from gpt2block.ops.products import limits
from gpt2block.ops.warm import call

FILE = "learn/attention/skeleton.cu"
NAIVE = "learn/attention/ladder.cu"
ONLINE = "learn/attention/online.cu"
MMA = "attention/prompt/mma.cu"
MMA_HI_LO = "attention/prompt/mma_hi_lo.cu"
WGMMA = "attention/prompt/wgmma.cu"
WGMMA_ALTERNATE = "attention/prompt/wgmma_alternate.cu"
WGMMA_HI_LO = "attention/prompt/wgmma_hi_lo.cu"

SIXTEEN_BITS = ("float16", "bfloat16")
TENSOR_CORES = ("wgmma", "mma")  # variants for 16-bit dtypes, preferred first
APPENDING = ("wgmma",)  # variants that also write K and V to a kv_cache
TENSOR_HEAD = TENSOR_HEADS[0]  # channels per head that all tensor-core variants support
LARGEST_HEAD = 256  # maximum channels per head of variants mha and online
MAX_BATCH = MAX_BLOCKS[1]  # maximum sequences of variant mha
BLOCK = 256  # threads per block of variant mha; default threads of variant naive
BLOCKS = (32, 64, 128, 256, 512, 1024)
ONLINE_BLOCKS = (32, 64, 128, 256)
OF_HI_LO = "Ootomo and Yokota (2022), for hi/lo matrices"  # source of variants
OF_WGMMA: Any = {"block": tiles.WGMMA_THREADS, "source": "gpt2block", "dtypes": SIXTEEN_BITS}
MMA_THREADS = 128  # threads per block with any tile of `MMA_TILES`


def naive_geometry(
    B: int, T: int, NH: int, HS: int, threads: int, NKV: int
) -> tuple[Geometry, ...]:
    """Return the geometry of three launches: one thread per score, per row of scores, per output.

    Raises InputError if a grid is too large.
    """
    rows = B * NH * T
    grids = {
        "attention_query_key_kernel1": rows * ceil(T / threads),
        "attention_softmax_kernel1": ceil(rows / threads),
        "attention_value_kernel1": ceil(rows * HS / threads),
    }
    largest = max(grids.values())
    if largest > MAX_BLOCKS[0]:
        raise InputError(
            f"variant naive: B {B:,}, T {T:,} and {NH:,} heads make a grid of {largest:,} "
            f"blocks, CUDA takes {MAX_BLOCKS[0]:,}: use variant online"
        )
    defines = tiles.heads_defines(NH, NKV, HS)
    return tuple(
        Geometry(kernel, (blocks,), (threads,), defines=defines) for kernel, blocks in grids.items()
    )


# --- float32 variants: mha, naive, online


def _fit_dtype(c: Call, *dtypes: str) -> None:
    expected = f"expected {' or '.join(dtypes[:2])}, got {c.storage}"
    refuse(c.storage == HI_LO and HI_LO not in dtypes, "takes no hi/lo matrix: use variant mma")
    refuse(c.storage not in dtypes, f"qkv: {expected}: use .astype('{dtypes[0]}')")


def _fit_float32(c: Call) -> None:
    _fit_dtype(c, "float32")
    of_one_length = "cu_seqlens: float32 takes sequences of one length: use float16 or bfloat16"
    refuse(c.cu_seqlens is not None, of_one_length)


def _fit_naive(c: Call) -> None:
    _fit_float32(c)
    scales = "softmax_scale: divides by the square root of the head size: use variant online"
    refuse(c.softmax_scale is not None, scales)
    refuse(c.window is not None, "window: attends to all earlier tokens: use variant online")


def _fit_online(c: Call) -> None:
    _fit_float32(c)
    expected = f"head size {c.HS}: expected at most {LARGEST_HEAD} (naive takes any)"
    refuse(c.HS > LARGEST_HEAD, expected)


def _fit_mha(c: Call) -> Geometry:
    """Return the geometry of variant mha: one block per query and head; scores in shared memory.

    Raises UnsupportedCall if there are too many sequences, or if a row of scores does not fit.
    """
    _fit_naive(c)
    _fit_online(c)
    refuse(c.B > MAX_BATCH, f"B {c.B:,}: a batch can have at most {MAX_BATCH:,} sequences")
    kernel = "mha_causal_kernel" if c.causal else "mha_nocausal_kernel"
    defines = tiles.heads_defines(c.n_head, c.n_kv_head, c.HS)
    geometry = Geometry(kernel, (c.T, c.n_head, c.B), (BLOCK,), 4 * c.T, defines)
    static = load(FILE, geometry.kernel, geometry.defines).shared_size_bytes
    limit = max_shared() - static
    too_long = (
        f"T {c.T:,}: a row of scores takes {geometry.shared:,} bytes of shared memory, this "
        f"GPU has {limit:,} for it: T can be at most {limit // 4:,}"
    )
    refuse(limit < geometry.shared, too_long)
    return geometry


@variant("mha", FILE, "mha_causal_kernel", "mha_nocausal_kernel", dtypes=("float32",))
def _mha(c: Call) -> Launch:
    return launch_at(FILE, _fit_mha(c), (c.qkv, c.output("out"), c.T))


@variant(
    "naive",
    NAIVE,
    "attention_query_key_kernel1",
    "attention_softmax_kernel1",
    "attention_value_kernel1",
    blocks=BLOCKS,
    source="named after llm.c's attention kernels",
    dtypes=("float32",),
)
def _naive(c: Call) -> tuple[Launch, ...]:
    _fit_naive(c)
    geometries = naive_geometry(c.B, c.T, c.n_head, c.HS, c.block, c.n_kv_head)
    causal, rows = int(c.causal), c.B * c.n_head * c.T
    try:
        c.output("scores")
    except cupy.cuda.memory.OutOfMemoryError as error:
        raise InputError(
            f"variant naive: its scores take {4e-9 * rows * c.T:,.1f} GB, more than this GPU "
            "has free: use variant online, which stores none"
        ) from error
    arguments = (
        (c.qkv, c.scores, c.T, causal),
        (c.scores, c.T, rows, causal),
        (c.qkv, c.scores, c.output("out"), c.T, c.out.size, causal),
    )
    return tuple(launch_at(NAIVE, *step) for step in zip(geometries, arguments, strict=True))


@variant(
    "online",
    ONLINE,
    "attention_forward_online",
    blocks=ONLINE_BLOCKS,
    block=128,
    source="gpt2block",
    dtypes=("float32",),
)
def _online(c: Call) -> Launch:
    _fit_online(c)
    check_address("out", c.output("out"))
    block = c.block if c.requested else None
    sizes, options = (c.B, c.T, c.n_head, c.HS), {"NKV": c.n_kv_head, "block": block}
    geometry = tiles.online_geometry(*sizes, **options, max_shared=max_shared())
    args = (c.qkv, c.out, c.T, int(c.causal))
    return launch_at(ONLINE, tiles.with_scores(geometry, c), args)


# --- tensor-core variants: mma and wgmma, for 16-bit dtypes and HiLoMatrix


def _fit_mma(c: Call) -> None:
    accept(needs("has_mma", ": use float32 and variant online"))
    _fit_dtype(c, *SIXTEEN_BITS, HI_LO)
    online = f": use float32, of which variant online takes heads of up to {LARGEST_HEAD}"
    accept(tiles.mma_refusal(c.HS, online, c.storage == HI_LO))


@variant("mma_fp32", MMA_HI_LO, "attention_fp32_mma", source=OF_HI_LO)
def _hi_lo(c: Call) -> Launch:
    one_scale = c.qkv.one_scale is not None
    geometry, together = tiles.hi_lo_geometry(c.sizes, one_scale, max_shared=max_shared())
    parts = (c.qkv.parts, c.qkv.scale, c.cu_seqlens, c.output("out").parts, c.out.scale)
    args = (*parts, c.qkv.size // c.W, *c.sizes[:3], together)
    return launch_at(MMA_HI_LO, tiles.with_scores(geometry, c), args, "float16")


@variant("mma", MMA, "attention_mma", block=MMA_THREADS, source="gpt2block", dtypes=SIXTEEN_BITS)
def _mma(c: Call) -> Any:
    _fit_mma(c)
    if c.storage == HI_LO:
        return _hi_lo.launch(c)
    check_address("out", c.output("out"))
    geometry, together = tiles.mma_geometry(c.sizes, **limits())
    args = (c.qkv, c.cu_seqlens, c.out, *c.sizes[:3], together)
    return launch_at(MMA, tiles.with_scores(geometry, c), args, c.storage)


@variant("wgmma_fp32", WGMMA_HI_LO, "attention_fp32_wgmma", source=OF_HI_LO)
def _wgmma_hi_lo(c: Call) -> Launch:
    takes = f"of hi/lo matrices it takes {tiles.WGMMA_HI_LO_HEAD}: use variant mma"
    refuse(c.HS != tiles.WGMMA_HI_LO_HEAD, f"head size {c.HS}: {takes}")
    one_scale = c.qkv.one_scale is not None
    geometry, together = tiles.wgmma_hi_lo_geometry(c.sizes, one_scale, sms=multiprocessors())
    boxes = tensor_map(c.qkv.parts, (1, tiles.WGMMA_HI_LO_TILE, tiles.WGMMA_HI_LO_HEAD))
    parts = (c.qkv.parts, c.qkv.scale, c.cu_seqlens, c.output("out").parts, c.out.scale)
    args = (boxes, *parts, c.qkv.size // c.W, *c.sizes[:3], together)
    return launch_at(WGMMA_HI_LO, tiles.with_scores(geometry, c), args, "float16")


@variant("wgmma_few", WGMMA_ALTERNATE, "attention_wgmma_alternate", **OF_WGMMA)
def _wgmma_few(c: Call) -> Launch:
    """Launch the kernel that variant `wgmma` selects if few sequences make this kernel faster."""
    sms = multiprocessors()
    return _wgmma_launch(c, WGMMA_ALTERNATE, *tiles.alternate_geometry(c.sizes, sms=sms))


@variant("wgmma", WGMMA, "attention_wgmma", **OF_WGMMA)
def _wgmma(c: Call) -> Any:
    _fit_mma(c)
    accept(tiles.wgmma_refusal(c.HS))
    if c.storage == HI_LO:
        return _wgmma_hi_lo.launch(c)
    sms = multiprocessors()
    if c.HS == tiles.ALTERNATE_HEAD and tiles.alternates(c.sizes, sms, c.rows):
        return _wgmma_few.launch(c)
    return _wgmma_launch(c, WGMMA, *tiles.wgmma_geometry(c.sizes, sms=sms))


def _wgmma_launch(c: Call, file: str, geometry: Geometry, together: int) -> Launch:
    check_address("out", c.output("out"))
    boxes = tensor_map(c.qkv.reshape(-1, *c.qkv.shape[-2:]), (1, tiles.WGMMA_TILE, TENSOR_HEAD))
    args = (boxes, c.qkv, c.cu_seqlens, c.out, *c.sizes[:3], together)
    cache: tuple[CudaArray | int | None, ...] = (None, None, None, None, 0, 0)
    if c.k is not None:
        cache = (c.row, c.position, c.k, c.v, *c.k.shape[:2])
    return launch_at(file, tiles.with_scores(geometry, c), (*args, *cache), c.storage)


# --- checks of calls, for every variant


def _prepare(unchecked: UncheckedCall) -> Call:
    """Check a call of `attention`. The width W of qkv is 3C, or less if n_kv_head < n_head.

    The default is mha for float32, and the fastest variant of the GPU for other dtypes.
    """
    c = _checked(unchecked)
    if c.max_seqlen is not None:
        raise InputError("max_seqlen: expected none without cu_seqlens")
    c.B, c.cu_seqlens, c.k = c.rows, None, None
    c.rows *= c.T
    return _set_heads(c)


def _bind_varlen(unchecked: UncheckedCall) -> Bound:
    """Bind a call with cu_seqlens to a variant. The function `attention` describes the arguments.

    k, v, row and position are as in `kv_append`; only variant wgmma takes them.
    """
    c = _checked(unchecked)
    if c.S < 2:
        raise InputError(
            "cu_seqlens: expected shape (B + 1,), the first row of each sequence and the end of "
            f"the last, got {c.cu_seqlens.shape}"
        )
    expected = f"the length of the longest sequence, 1 to the {c.N:,} rows of qkv"
    c.B, c.T = c.S - 1, check_integer("max_seqlen", c.max_seqlen, 1, c.N, expected)
    c.rows = c.N
    return OPERATION.bound_to(_set_heads(c))


def _checked(unchecked: UncheckedCall) -> Call:
    n_head, n_kv_head = checked_heads(unchecked.options["n_head"], unchecked.options["n_kv_head"])
    return unchecked.checked(n_head=n_head, n_kv_head=n_kv_head)


def _set_heads(c: Call) -> Call:
    """Set the head sizes and preferred variants of a call with B sequences. Raises InputError."""
    heads = c.n_head + 2 * c.n_kv_head
    if c.W % heads or c.qkv.ndim > 3:
        rows = f"(T, 3C) or (B, T, 3C) with C a multiple of n_head {c.n_head}"
        if c.n_kv_head != c.n_head:
            rows = f"(T, W) or (B, T, W) with W a multiple of {c.n_head} + 2 · {c.n_kv_head} heads"
        raise InputError(f"qkv: expected {rows}, got {c.qkv.shape}")
    if c.storage != HI_LO:
        check_address("qkv", c.qkv)
    c.HS = c.W // heads
    if c.cu_seqlens is not None:
        _check_cache(c)
    c.sizes = AttentionSizes(c.B, c.T, c.n_head, c.causal, c.HS, c.n_head // c.n_kv_head)
    if c.window is not None and not c.causal:
        raise InputError("window: needs causal=True")
    float32 = ("mha",) if c.softmax_scale is c.window is None else ("online",)
    preferred = float32 if c.storage == "float32" else TENSOR_CORES
    c.order = preferred if c.k is None else APPENDING
    return c


def _check_cache(c: Call) -> None:
    """Raise InputError unless the kv_cache arrays are all None, or match qkv and each other."""
    arrays = {"k": c.k, "v": c.v, "row": c.row, "position": c.position}
    missing = [name for name, array in arrays.items() if array is None]
    if len(missing) == len(arrays):
        return
    if missing:
        raise InputError(f"{missing[0]}: expected an array: k, v, row and position go together")
    if c.variant not in (None, *APPENDING) or not gpu().has_wgmma:
        raise InputError(
            "k: only variant wgmma, on a GPU of compute capability 9.0, writes to a kv_cache: use "
            "ops.kv_append"
        )
    for name in ("k", "v"):
        check(name, arrays[name], (*c.k.shape[:2], c.n_kv_head * c.HS), c.storage)
        check_address(name, arrays[name])


def checked_heads(n_head: object, n_kv_head: object) -> tuple[int, int]:
    """Return the checked numbers of heads in Q and in K. n_kv_head None: K has as many heads as Q.

    Raises InputError.
    """
    n_head = check_integer("n_head", n_head, 1, math.inf, "a number of heads")
    if n_kv_head is None:
        return n_head, n_head
    expected = f"a divisor of n_head {n_head}"
    n_kv_head = check_integer("n_kv_head", n_kv_head, 1, n_head, expected)
    if n_head % n_kv_head:
        raise InputError(f"n_kv_head: expected {expected}, got {n_kv_head}")
    return n_head, n_kv_head


def _check_fit(name: str, fit: Callable[[Call], object], dtype: str, **sizes: Any) -> None:
    """Raise InputError if `fit`, which computes a launch, raises UnsupportedCall for these sizes.

    sizes: attributes of the call, among them n_head, n_kv_head and HS.
    """
    absent = dict.fromkeys(("cu_seqlens", "softmax_scale", "window"))
    try:
        fit(Call(contract=OPERATION.contract, storage=dtype, **absent, **sizes))
    except UnsupportedCall as problem:
        raise InputError(f"{name}: {problem}") from None


def check_limits(qkv: Shape, *, n_head: int, causal: bool, n_kv_head: int | None = None) -> None:
    """Raise InputError if variant mha does not support float32 qkv of this shape."""
    *batch, T, width = qkv
    NKV = n_head if n_kv_head is None else n_kv_head
    heads = {"n_head": n_head, "n_kv_head": NKV, "HS": width // (n_head + 2 * NKV)}
    sizes = {"B": batch[0] if batch else 1, "T": T, "causal": causal}
    _check_fit("attention variant mha", _fit_mha, "float32", **heads, **sizes)


def check_heads(dtype: str, n_head: int, n_kv_head: int, head_size: int, causal: bool) -> None:
    """Raise InputError if no attention kernel supports these heads on the current device."""
    fit = _fit_mha if dtype == "float32" else _fit_mma
    heads = {"n_head": n_head, "n_kv_head": n_kv_head, "HS": head_size}
    _check_fit("attention", fit, dtype, **heads, B=1, T=1, causal=causal)


def tensor_cores_take(variant: str, head_size: int) -> bool:
    """Whether the variant, "mma" or "wgmma", supports heads of head_size channels."""
    return head_size in {"wgmma": TENSOR_HEADS, "mma": MMA_HEADS}.get(variant, ())


def appends_to_cache(head_size: int) -> bool:
    """Whether a variant that also writes K and V to a kv_cache supports heads, on this device."""
    return not tiles.wgmma_refusal(head_size)


def head_constants(n_head: int, n_kv_head: int, head_size: int) -> Defines:
    """Return the constants with which attention kernels are compiled for these heads.

    A kernel uses some of these constants: tensor-core kernels get the number of heads as an
    argument.
    """
    on_tensor_cores = tiles.tensor_heads_defines(head_size, n_head // n_kv_head)
    return (*tiles.heads_defines(n_head, n_kv_head, head_size), *on_tensor_cores)


def hi_lo_fits(head_size: int) -> bool:
    """Whether the current device can compute attention on a HiLoMatrix with heads of this size.

    The smallest tile of `hi_lo_geometry` has 64 queries and two stages of 32 keys of K and V.
    """
    return head_size in TENSOR_HEADS and 3 * tiles.mma_stage(head_size) <= max_shared()


VARIANTS = (_mha, _naive, _online, _mma, _wgmma)
OPTIONS = {"n_head": REQUIRED, "causal": REQUIRED} | dict.fromkeys(
    ("n_kv_head", "max_seqlen", "softmax_scale", "window", "variant", "block")
)
PARTS = (_hi_lo, _wgmma_few, _wgmma_hi_lo)
VARLEN = Operation(
    name="attention_varlen", variants=VARIANTS, parts=PARTS, options=OPTIONS, prepare=_bind_varlen
)
OPERATION = Operation(
    name="attention",
    variants=VARIANTS,
    options=OPTIONS,
    prepare=_prepare,
    parts=PARTS,
    steps=(VARLEN,),
    workload=Workload(
        document="LeetGPU's GPT-2 block challenge",
        idea="softmax(Q Kᵀ / sqrt(HS)) V",
        sizes={"B": 8, "T": 1024, "C": 768},
        traffic=lambda s: 4 * s["itemsize"] * s["B"] * s["T"] * s["C"],
        flops=lambda s: 2 * s["B"] * s["T"] * (s["T"] + 1) * s["C"],
        bound="compute",
        attrs={"n_head": 12, "causal": True},
        axes={"...": "B", "W": "3*C", "n_kv_head": "n_head"},
        small=(
            {"B": 1, "T": 5, "C": 24, "n_head": 3},
            {"B": 2, "T": 33, "C": 128, "n_head": 2},
            {"B": 1, "T": 70, "C": 24, "n_head": 2},
        ),
        aliases={
            "attn_out": "out",
            "seq_len": "T",
            "C": "W//3",
            "NH": "n_head",
            "HS": "W//(3*n_head)",
        },
        dtypes=("float32", *SIXTEEN_BITS),
    ),
)


def attention(
    qkv: CudaArray | HiLoMatrix,
    n_head: int,
    causal: bool = False,
    variant: str | None = None,
    block: int | None = None,
    cu_seqlens: CudaArray | None = None,
    max_seqlen: int | None = None,
    n_kv_head: int | None = None,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> Any:
    """Compute `reference.attention` on a CuPy array (T, 3C) or (B, T, 3C). Raises InputError.

    With n_kv_head, a divisor of n_head, a row is [Q | K | V] of n_head, n_kv_head and n_kv_head
    heads: each head of K and V serves n_head / n_kv_head neighbouring heads of Q. softmax_scale:
    factor of scores, instead of 1 / sqrt(HS). window: number of keys that a row sees, up to and
    including its own key. mha and naive support neither option; the default is then online.

    float32: variants mha (the default), naive and online. In mha, the GPU's opt-in shared memory
    limits T, to about 57,000 on an H200. naive stores B · n_head · T² scores in device memory.
    online takes any T; a block has 32 threads for every 32 queries (16 queries for heads of more
    than 64 channels, 8 for more than 128). Only naive takes heads of more than 256 channels.

    float16 and bfloat16, with heads of 64, 128 or 256 channels: variant mma and, on GPUs of compute
    capability 9.0, wgmma, which is then the default except for heads of 256 channels. Both run on
    tensor cores: sums and the softmax are float32, the softmax's weights are rounded to the dtype
    of qkv before they are multiplied, and the result has the dtype of qkv. They support any T. The
    bits of a row's result depend only on its own sequence.

    With cu_seqlens, int32 (B + 1,), qkv of 16 bits or hi/lo is (N, 3C): the rows of B sequences,
    one after another. Sequence b starts at row cu_seqlens[b], ends before row cu_seqlens[b + 1] and
    has at most max_seqlen rows. The values of cu_seqlens are not checked: they must not decrease or
    exceed N. Rows outside all sequences are not written.

    A HiLoMatrix with heads of 64 or 128 channels, on the same GPUs as mma: the result has the
    accuracy of float32 and is a HiLoMatrix. The scale of a row is the largest scale of the rows
    that it sees. wgmma is the default on its GPUs for heads of 64 channels.

    Sources: Dao et al., "FlashAttention" (2022); Dao, "FlashAttention-2" (2023); for wgmma Shah et
    al., "FlashAttention-3" (2024); for hi/lo matrices Ootomo and Yokota (2022), see `gemm`; for
    grouped queries Ainslie et al., "GQA" (2023).
    """
    qkv, heads = on_16_bytes("qkv", qkv), {"n_head": n_head, "n_kv_head": n_kv_head}
    options: dict[str, Any] = {**heads, "causal": causal, "variant": variant, "block": block}
    options |= {"max_seqlen": max_seqlen, "softmax_scale": softmax_scale, "window": window}
    if cu_seqlens is not None:
        return call(VARLEN, (qkv, cu_seqlens), **options).out
    return call(OPERATION, (qkv,), **options).out
