"""Llama's feed-forward in one kernel that writes partial sums; operations that add these sums.

The kernels, matmul/decode/ffn_mma.cu and, for GGUF weights, ffn_mma_gguf.cu, compute up to four
rows. The kernels store one sum per split of the last product; a split is the range of K of one
cluster. `linear_sums`, `rope_sums` and, in `gpt2block.ops.rmsnorm`, `rmsnorm_sums` add these sums
to the residual stream when they load it. A row has the same bits as with `rmsnorm` (variant
stream), `linear` (variant mma or gguf), `rope_append` and `silu_mul`. x_dtype rounds operands of
products, as in `linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from gpt2block.cuda.arrays import check_address, max_shared, multiprocessors
from gpt2block.cuda.cards import gpu
from gpt2block.cuda.formats import FILE as OF_FILE
from gpt2block.cuda.formats import GGUF
from gpt2block.cuda.kernels import Defines, Geometry, Launch, launch_at, nonzero_defines
from gpt2block.errors import InputError
from gpt2block.models.weights.gguf import TYPES, GgufMatrix
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops.call import CACHE, Call, Refusal, UncheckedCall, accept, needs, refuse, supports
from gpt2block.ops.engines import linear_gguf as blocks
from gpt2block.ops.engines import linear_mma as mma
from gpt2block.ops.engines import linear_mma_tiles as mma_tiles
from gpt2block.ops.engines.epilogues import Epilogue, add_sums, append_sums, check_rope_heads
from gpt2block.ops.engines.rows import WARP, power_of_two
from gpt2block.ops.operands import count_define, rounds
from gpt2block.ops.operation import REQUIRED, Operation, Variant, variant
from gpt2block.ops.products import Matmul, gate_define, shared_for_blocks, storage_of
from gpt2block.ops.products import limits as card_limits

FILE, KERNEL = "matmul/decode/ffn_mma.cu", "decode_ffn_mma"
BLOCKS_FILE, BLOCKS_KERNEL = "matmul/decode/ffn_mma_gguf.cu", "decode_ffn_mma_gguf"
MAX_ROWS = 4  # maximum rows of x; for more rows, separate kernels are faster
MAX_ROTATED = 16  # maximum rows of `rope_sums` without partial sums
# Decoding uses `rope_sums` with norms of heads, without partial sums, up to this number of rows.
# The operation itself takes MAX_ROTATED rows. Qwen3-0.6B, NVIDIA H200: steps of 2 and 4 rows take
# 601 and 652 us instead of 743 and 798, but steps of 8 rows take 954 us instead of 871 by wgmma.
MAX_NORMED_HEADS = 4
# On GPUs with overlapping launches, products fuse norms next to a kernel for the norms of heads up
# to this number of rows. Qwen3-0.6B on an NVIDIA H200 with the kernels of an RTX 5090: steps of 8
# rows take 938 us instead of 954, but steps of 16 rows 1,318 instead of 1,166. With the kernels of
# an RTX 4090, whose launches do not overlap, before attention normalized heads there, they take
# 1,059 instead of 1,130 and 1,389 instead of 1,460.
MAX_BESIDE_HEADS = 8
MAX_CHANNELS = mma.MAX_NORMED  # maximum C: RMSNorm needs one unit per split
MULTIPLE = 16  # divides C: FP8 rows allow 16-byte loads, and all blocks have equally many outputs
PORTABLE, WHOLE = 8, 100  # maximum blocks of a portable cluster; minimum SMs for larger clusters
MAX_REGISTERS = 144  # maximum registers per lane for weights in flight
DTYPES = mma.TERM_DTYPES


class Cluster(NamedTuple):
    """Thread block cluster, which computes one split (range) of H. Results do not depend on it."""

    blocks: int  # blocks per cluster
    copied: bool  # whether weights of the last product are loaded to shared memory, not registers


# Clusters, fastest on an H200 first. Blocks of large clusters load fewer weights; small clusters
# exchange less data.
ONE_ROW = Cluster(16, False), Cluster(8, True)
MORE_ROWS = Cluster(8, True), Cluster(16, False)


class GpuLimits(NamedTuple):
    """Limits of a GPU: multiprocessors, bytes of shared memory per block, blocks per cluster."""

    sms: int
    max_shared: int
    most_clustered: int


def limits() -> GpuLimits:
    """Return the limits of the current device."""
    return GpuLimits(multiprocessors(), max_shared(), gpu().most_clustered)


@lru_cache(maxsize=1024)
def geometry(M: int, C: int, H: int, dtype: str, of: GpuLimits) -> Geometry | None:
    """Return the launch geometry for x (M, C) and h (M, H), or None if none is supported.

    dtype: dtype of the weights. of: limits of the GPU.
    """
    if dtype not in DTYPES or C % MULTIPLE:
        return None
    rows = power_of_two(M)
    for cluster in _clusters(M, C, H, of):
        shared = shared_bytes(rows, C, H, dtype, cluster)
        if shared <= of.max_shared and registers(C, H, dtype, cluster) <= MAX_REGISTERS:
            launch_geometry = geometry_of(rows, C, H, cluster, shared)
            return launch_geometry.with_defines((("FF_COPIED", int(cluster.copied)),))
    return None


def plan(
    M: int, C: int, H: int, dtype: str, types: tuple[str, str] | None = None, terms: int = mma.TERMS
) -> Geometry | Refusal:
    """Return the launch of `gated_sums` for x (M, C) and h (M, H), or the reason to refuse.

    dtype: dtype of the weights. types, terms: as in `blocks_geometry`, for GGUF weights.
    """
    if types:
        launch_geometry = blocks_geometry(M, C, H, types, terms, limits())
        multiple, of_dtype, weights, advice = blocks.COLUMNS, "", "", ": use linear"
    else:
        launch_geometry, multiple = geometry(M, C, H, dtype, limits()), MULTIPLE
        of_dtype, weights = f", {dtype}", f"weights of {', '.join(DTYPES)}, "
        advice = ": use linear and silu_mul"
    return needs("has_clusters", advice) or launch_geometry or Refusal(
        f"x {(M, C)}, {H:,} channels{of_dtype}: expected up to {MAX_ROWS} rows of up to "
        f"{MAX_CHANNELS:,} channels, a multiple of {multiple}, equal splits of the channels "
        f"between the products, {weights}and clusters that fit in {limits().max_shared:,} bytes "
        f"of shared memory per block{advice}"
    )  # fmt: skip


def plan_sums(
    M: int, N: int, K: int, dtype: str, head: int = 0, normed: bool = False, summed: bool = True
) -> Geometry | Refusal:
    """Return the launch of a product that adds partial sums, or the reason to refuse.

    head: channels per head with RoPE, else 0. normed: whether heads have norms. summed: whether x
    has partial sums.
    """
    most = MAX_ROWS if summed or not head else MAX_ROTATED
    possible = normed_columns(head) if normed else mma.COLUMNS
    refused = Refusal.first(
        (head and K > MAX_CHANNELS, f"K {K:,}: expected up to {MAX_CHANNELS:,}"),
        (most < M, f"{M:,} rows: expected up to {most}"),
        mma.refusal(dtype, K),
        (N >= mma.MANY_COLUMNS, f"{N:,} outputs: expected less than {mma.MANY_COLUMNS:,}"),
        (not possible,
         f"heads of {head} channels: expected a multiple of 8, at most {PORTABLE} times 32"),
    )  # fmt: skip
    options = {"norm": 2 if head else 0, "columns": possible, **card_limits(mma.STATIC)}
    launch_geometry = refused or mma.geometry(M, N, K, dtype, **options)
    if isinstance(launch_geometry, Geometry) and normed and mma.columns_of(launch_geometry) < head:
        refused = needs("has_clusters", ", as a head has several blocks")
    too_long = Refusal(f"K {K:,}: a row does not fit in shared memory")
    return refused or launch_geometry or too_long


def geometry_of(rows: int, C: int, H: int, cluster: Cluster, shared: int) -> Geometry:
    """Return the launch geometry, a cluster per split of H. shared: bytes per block."""
    defines = (("DECODE_K", C), ("DECODE_ROWS", rows), ("FF_H", H), ("FF_CLUSTER", cluster.blocks))
    grid, block = (cluster.blocks * mma.splits(H)[0],), (WARP * mma.splits(C)[0],)
    return Geometry(KERNEL, grid, block, shared, defines)


def shared_bytes(rows: int, C: int, H: int, dtype: str, cluster: Cluster) -> int:
    """Return the bytes of shared memory per block of ffn_mma.cu: x, h, sums and weights."""
    parts, own, length = mma.splits(C)[0], *_split(H, cluster)
    padding, weight = (64, 2) if dtype in mma.BYTES else (16, 1)
    x = mma.shared_bytes(mma.MmaLayout(0, 1, True, parts, 1, rows), C, dtype, 2)
    hidden = ceil(2 * (2 * length + padding) / 128) * 128 + padding
    arrived = ceil(x / 16) * 16 + rows * (hidden + 4 * own + parts * 2 * own * 4)
    copied = _columns(C, cluster) * length * weight * 8 * parts if cluster.copied else 0
    return ceil((arrived + 8) / 16) * 16 + copied


def registers(C: int, H: int, dtype: str, cluster: Cluster) -> int:
    """Return the registers per lane that hold weights in flight."""
    own, length = _split(H, cluster)
    weight = mma.BYTES.get(dtype, 1)
    last = 0 if cluster.copied else _columns(C, cluster) * length
    return (2 * own * mma.UNIT // mma.ROW_GROUP + last) * mma.ROW_GROUP * weight // (4 * WARP)


def _clusters(M: int, C: int, H: int, of: GpuLimits) -> list[Cluster]:
    """Return the clusters that a GPU with these limits can run, fastest first.

    There are none for too many rows or channels, or if the splits of H are not equal.
    """
    parts, each = mma.splits(H)
    if M > MAX_ROWS or C > MAX_CHANNELS or parts * each * mma.UNIT != H:
        return []
    most = of.most_clustered if of.sms >= WHOLE else min(of.most_clustered, PORTABLE)
    return [each for each in (ONE_ROW if M == 1 else MORE_ROWS) if each.blocks <= most]


def _split(H: int, cluster: Cluster) -> tuple[int, int]:
    """Return (channels of h that a block computes, channels that its cluster computes)."""
    length = mma.splits(H)[1] * mma.UNIT
    return length // cluster.blocks, length


def _columns(C: int, cluster: Cluster) -> int:
    """Return the groups of eight of outputs per warp in the last product."""
    return ceil(ceil(C / cluster.blocks / mma.ROW_GROUP) / mma.splits(C)[0])


@lru_cache(maxsize=1024)
def blocks_geometry(
    M: int, C: int, H: int, types: tuple[str, str], terms: int, of: GpuLimits
) -> Geometry | None:
    """Return the launch geometry for GGUF weights, or None if the sizes are not supported.

    types: GGUF types of w_gate (and w_up), and of w_down. terms: 16-bit terms per value of x.
    """
    if C % blocks.COLUMNS:
        return None
    rows = power_of_two(M)
    for cluster in _clusters(M, C, H, of):
        shared = blocks_shared_bytes(rows, C, H, types, terms, cluster.blocks)
        if shared <= of.max_shared:
            shared = shared_for_blocks(of.max_shared, 2 if M == 1 else 1, shared)
            numbers = (TYPES[name].number for name in types)
            defines = tuple(zip(("GGUF_TYPE_0", "FF_TYPE"), numbers, strict=True))
            launch_geometry = geometry_of(rows, C, H, cluster, shared).with_defines(defines)
            return launch_geometry._replace(kernel=BLOCKS_KERNEL)
    return None


def blocks_shared_bytes(
    rows: int, C: int, H: int, types: tuple[str, str], terms: int, cluster: int
) -> int:
    """Return the bytes of shared memory per block of ffn_mma_gguf.cu: x, h, sums, weights."""
    parts, (_, units) = mma.splits(C)[0], mma.splits(H)
    length = mma.UNIT * units
    own, tiles = length // cluster, ceil(C / blocks.COLUMNS)
    x = rows * blocks.SharedMemory(parts, 1, 0, 2, terms).row(parts)
    hidden = ceil(terms * (2 * length + 64 + 16 * units) / 128) * 128 + 64
    arrived = ceil(x / 16) * 16 + rows * (4 * length + hidden + 4 * own + 8 * parts * own)
    slots = (own // mma.ROW_GROUP, ceil(tiles / (parts * cluster)) * units)
    weights = sum(n * blocks.slot_bytes(name) for n, name in zip(slots, types, strict=True))
    return ceil((arrived + 8) / 16) * 16 + parts * weights


def splits_of(
    dtype: str,
    M: int,
    shapes: Mapping[str, tuple[int, ...]],
    types: Collection[tuple[str, str]] = (),
    head_size: int = 0,
) -> int:
    """Return the option `splits` for M rows, or 0 if the layer cannot use `gated_sums`.

    A layer must be Llama's, without biases, without norms on the outputs of attention and
    feed-forward, without a gate of attention, and without short convolutions or gated delta nets in
    place of attention. dtype: dtype of the weights. shapes: shapes of the layer's tensors, by name.
    types: pairs of GGUF types of w_gate and w_down, of all layers; empty if a matrix has no GGUF
    blocks. head_size: channels per head, used for GGUF blocks.
    """
    if not _is_plain(shapes) or {"w_in", "w_g"} & shapes.keys():
        return 0
    C, H = shapes["w_gate"]
    if dtype == OF_FILE:
        whole = types and "gamma_q" not in shapes and head_size % blocks.COLUMNS == 0
        fits = whole and all(supports(plan(M, C, H, dtype, pair)) for pair in types)
    else:
        (K, N), (D,) = shapes["w_qkv"], shapes.get("gamma_q", (head_size,))
        o, each = shapes["w_o"], (M, N, K, dtype, D, "gamma_q" in shapes)
        plans = plan(M, C, H, dtype), plan_sums(*each), plan_sums(M, o[1], o[0], dtype)
        fits = o[0] % MULTIPLE == 0 and all(map(supports, plans))
    return mma.splits(H)[0] if fits else 0


class Fusions(NamedTuple):
    """Operations that are fused with products of few rows of floats, besides bias and residual."""

    norms: bool = False  # the RMSNorm of x
    rope: bool = False  # RoPE, if heads have no norms or `heads` is set
    gate: bool = False  # the activation of the gate, and its product with the other matrix
    heads: bool = False  # norms of the heads of q and k
    attention: bool = False  # attention fuses these norms, RoPE and appending to the kv_cache


def fusions(dtype: str, M: int, shapes: Mapping[str, tuple[int, ...]], head_size: int) -> Fusions:
    """Return what products of M rows by matmul/decode/mma.cu or mma_tiles.cu fuse in a layer.

    On a GPU with wgmma, layers without norms of outputs fuse all or nothing, because wgmma fuses
    RoPE and the gate of the others. dtype: dtype of the weights, not GGUF. Other arguments: as in
    `splits_of`.
    """
    if dtype not in DTYPES or "w_gate" not in shapes:
        return Fusions()
    found, plain = _supported(dtype, M, shapes, head_size), _is_plain(shapes)
    if MAX_ROTATED < M:
        return found
    normed = "gamma_q" in shapes
    fuses_all = found.norms and found.rope and (found.heads or not normed)
    beside_heads = gpu().has_overlap and normed and M > MAX_BESIDE_HEADS
    if plain and (beside_heads or (gpu().has_wgmma and not fuses_all)):
        return Fusions()
    if gpu().has_wgmma and not _has_any(shapes, OF_OUTPUTS):
        return Fusions(*(plain,) * 3, found.heads)
    return found


def _supported(
    dtype: str, M: int, shapes: Mapping[str, tuple[int, ...]], head_size: int
) -> Fusions:
    """Return what the kernels for M rows can fuse in a layer. Arguments: as in `fusions`."""
    C, H = shapes["w_gate"]
    gated = Matmul(M, H, C, dtype, up=True)
    of_gate = mma_tiles.plan(gated) if mma.most_rows() < M else mma.plan(gated)
    gate = H % 8 == 0 and supports(of_gate)
    if MAX_ROTATED < M:
        return Fusions(gate=gate)
    of_x = *(Matmul(M, shapes[name][1], C, dtype) for name in FIRST if name in shapes), gated
    norms = C % MULTIPLE == 0 and all(supports(mma.plan(p._replace(norm=2))) for p in of_x)
    qkv = Matmul(M, shapes["w_qkv"][1], C, dtype, head=head_size)
    rope = supports(mma.plan(qkv))
    heads = plan_sums(M, qkv.N, C, dtype, head_size, normed=True, summed=False)
    # Heads have norms of their own, not one norm of all heads together.
    of_head = shapes.get("gamma_q") == (head_size,) and M <= MAX_NORMED_HEADS
    of_head = of_head and gpu().has_clusters and _is_plain(shapes)
    return Fusions(norms, rope, gate, of_head and norms and rope and supports(heads))


FIRST = "w_qkv", "w_in"  # matrices that multiply the norm of a layer's input
OF_OUTPUTS = "gamma_attn", "gamma_ff"  # norms of the outputs of attention and feed-forward


def _is_plain(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether a layer is Llama's without biases, norms of outputs and experts."""
    return "w_gate" in shapes and not _has_any(shapes, ("b_", "beta", "router", *OF_OUTPUTS))


def _has_any(shapes: Mapping[str, tuple[int, ...]], beginnings: tuple[str, ...]) -> bool:
    return any(name.startswith(beginnings) for name in shapes)


def normed_columns(D: int) -> tuple[int, ...]:
    """Return the possible columns per block of a cluster that normalizes a head of D channels.

    A cluster has at most PORTABLE blocks, and the columns per block are a power of two.
    """
    return tuple(c for c in (32, 16, 8) if D % c == 0 and D // c <= PORTABLE)


@variant("gated_sums", FILE, KERNEL)
def _gated_sums(c: Call) -> Launch:
    accept(needs("has_clusters", ": use linear and silu_mul"))
    dtypes = {w.dtype for w in (c.w_gate, c.w_up, c.w_down)}
    refuse(len(dtypes) > 1, f"weights of {', '.join(sorted(dtypes))}: expected one dtype")
    launch_geometry = _checked(plan(c.M, c.C, c.H, c.w_gate.dtype), c)
    gate, up = ((w.data, w.scale) for w in (c.w_gate, c.w_up))
    args = (c.x, c.gamma, *gate, *up, c.w_down.data, c.sums, c.eps, c.M)
    return launch_at(FILE, launch_geometry, args, *storage_of(c.w_gate))


def types_of(*matrices: WeightMatrix) -> tuple[str, str] | Refusal:
    """Return the GGUF types of w_gate and w_down, or a refusal. matrices: w_gate, w_up, w_down."""
    ranges = [w.ranges for w in matrices if isinstance(w, GgufMatrix) and len(w.ranges) == 1]
    if len(ranges) < len(matrices) or ranges[0] != ranges[1]:
        return Refusal(
            "weights: expected GgufMatrices of a type each, w_gate's and w_up's the same"
        )
    return ranges[0][0][0], ranges[2][0][0]


@variant("gated_sums_gguf", BLOCKS_FILE, BLOCKS_KERNEL)
def _gated_blocks(c: Call) -> Launch:
    accept(needs("has_clusters", ": use linear"))
    matrices = c.w_gate, c.w_up, c.w_down
    types, terms = accept(types_of(*matrices)), 1 if rounds(c.x_dtype, GGUF) else mma.TERMS
    launch_geometry = _checked(plan(c.M, c.C, c.H, GGUF, types, terms), c)
    args = (c.x, c.gamma, *(w.data for w in matrices), c.sums, c.eps, c.M)
    return launch_at(BLOCKS_FILE, launch_geometry, args, *storage_of(c.w_gate))


def _checked(of_sizes: Geometry | Refusal, c: Call) -> Geometry:
    """Check splits and addresses of a call of `gated_sums`; return its complete launch geometry."""
    launch_geometry, splits = accept(of_sizes), mma.splits(c.H)[0]
    refuse(c.splits != splits, f"splits: expected {splits}, got {c.splits}")
    c.output("sums")
    c.check_addresses("x", "gamma", "w_gate", "w_up", "w_down", "sums")
    rounding = count_define(rounds(c.x_dtype, c.w_gate.dtype))
    return launch_geometry.with_defines((*rounding, *gate_define(c.gelu)))


def _check_sums(c: Call) -> None:
    if (c.sums is None) != (c.w_down is None):
        raise InputError("expected sums and w_down, or neither")


def _check_sums_of_blocks(c: Call) -> None:
    _check_sums(c)
    c.rounded = rounds(c.x_dtype, c.w.dtype)
    c.check_addresses("sums")
    dtype = GGUF if c.w_down is None else c.w_down.dtype
    refuse(dtype != GGUF, f"w is a GgufMatrix, w_down {dtype}: expected a GgufMatrix, too")


def _product(c: Call, epilogue: Epilogue) -> Launch:
    """Return a Launch of matmul/decode/mma.cu's kernel with an epilogue that adds partial sums."""
    _check_sums(c)
    D, normed = epilogue.head, "gamma_q" in epilogue.args
    facts = c.M, c.N, c.K, c.w.dtype, D, normed, c.sums is not None
    launch_geometry = accept(plan_sums(*facts))
    defines: Defines = (("DECODE_SUMS", epilogue.splits), *nonzero_defines(DECODE_ROPE=D))
    defines += count_define(rounds(c.x_dtype, c.w.dtype))
    if normed:
        cluster = D // mma.columns_of(launch_geometry)
        defines += (("DECODE_QK_NORM", 1), ("DECODE_CLUSTER", cluster))
    args = {"x": c.x, "w": c.w.data, "scale": c.w.scale, "M": c.M, "N": c.N}
    args |= {"gamma": c.gamma, "eps": c.eps} if D else {}
    return epilogue.launch(mma.FILE, launch_geometry, defines, args, c.w)


@variant("linear_sums", mma.FILE, mma.KERNEL)
def _linear_sums(c: Call) -> Launch:
    c.check_addresses("x", "w")
    return _product(c, add_sums(c))


@variant("linear_sums_gguf", blocks.FILE, blocks.KERNEL)
def _linear_blocks(c: Call) -> tuple[Launch, ...]:
    _check_sums_of_blocks(c)
    c.check_addresses("x", "w")
    return blocks.launch(c, add_sums(c))


@variant("rope_sums", mma.FILE, mma.KERNEL)
def _rope_sums(c: Call) -> Launch:
    c.check_addresses("x", "gamma", "w", "sums")
    check_address("by", c.by, 8)
    return _product(c, append_sums(c))


@variant("rope_sums_gguf", blocks.FILE, blocks.KERNEL)
def _rope_blocks(c: Call) -> tuple[Launch, ...]:
    _check_sums_of_blocks(c)
    refuse(c.gamma_q is not None, "a GgufMatrix: expected no norms of heads")
    c.check_addresses("x", "gamma", "w")
    check_address("by", c.by, 8)
    return blocks.launch(c, append_sums(c))


def _prepare_rope(unchecked: UncheckedCall) -> Call:
    """Check a call of `rope_sums`, including the number of w's outputs and the kv_cache's dtype."""
    c = _of_blocks("w", _rope_sums, _rope_blocks)(unchecked)
    if (c.gamma_q is None) != (c.gamma_k is None):
        raise InputError("expected gamma_q and gamma_k, or neither")
    check_rope_heads(c)
    return c


def _of_blocks(name: str, others: Variant, of_blocks: Variant) -> Callable[[UncheckedCall], Call]:
    """Return a `prepare` function, which selects `of_blocks` if weights `name` are a GgufMatrix."""

    def prepare(unchecked: UncheckedCall) -> Call:
        c = unchecked.checked()
        c.order = (of_blocks if getattr(c, name).dtype == GGUF else others,)
        return c

    return prepare


GATED_SUMS = Operation(
    name="gated_sums",
    variants=(_gated_sums, _gated_blocks),
    options={"splits": 1, "eps": 1e-6, "gelu": False, "x_dtype": None},
    prepare=_of_blocks("w_gate", _gated_sums, _gated_blocks),
)

LINEAR_SUMS = Operation(
    name="linear_sums",
    variants=(_linear_sums, _linear_blocks),
    options={"x_dtype": None},
    prepare=_of_blocks("w", _linear_sums, _linear_blocks),
)

ROPE_SUMS = Operation(
    name="rope_sums",
    variants=(_rope_sums,),
    options={"n_head": REQUIRED, "eps": 1e-6, **CACHE, "x_dtype": None, "growth": None},
    prepare=_prepare_rope,
    parts=(_rope_blocks,),
)
