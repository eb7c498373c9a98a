"""The linear layer of decoding with weights in blocks of GGUF: launches of decode_gguf.cu."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Any

from gpt2block.config.formats import GGUF
from gpt2block.cuda.arrays import check_address, compute_capability, device_attribute
from gpt2block.cuda.kernels import Defines, Geometry, cache_dtype, launch_at
from gpt2block.cuda.requests import Launch
from gpt2block.ops._linear_mma import FLOAT, MOST_SPLITS, TERMS, UNIT, splits
from gpt2block.ops._linear_mma_tiles import CLUSTER_CAPABILITY
from gpt2block.ops._products import MMA_CAPABILITY, gate_define, room, storage_of
from gpt2block.ops._rows import WARP, power_of_two
from gpt2block.ops._terms import count_define
from gpt2block.ops.call import Call
from gpt2block.ops.gguf import range_defines
from gpt2block.ops.operation import Unfit
from gpt2block.weights.gguf import BORDER, OCTET, TYPES

FILE = "matmul/decode_gguf.cu"
COLUMNS = BORDER  # of a warp
WARPS = range(12, 0, -1)  # of a block with one split
FEW_ROWS, MOST_ROWS = 8, 64  # of a block with all splits, and with one
FLIGHT = 3  # slots of a ring
BLOCKS = 2  # of an SM: of the next kernel, none fits beside them
OF_EIGHT = 7  # eighths of the clusters that multiprocessors have room for which run at a time


@lru_cache(maxsize=1024)
def geometry(
    kernel: str,
    M: int,
    K: int,
    ranges: tuple[tuple[str, int], ...],
    *,
    norm: int = 0,
    up: bool = False,
    rope: int = 0,
    terms: int,
    capability: int,
    sms: int,
    most_shared: int,
) -> Geometry | None:
    """The launch for x (M, K); None where a row does not fit, or types begin within a block.

    ranges: types and numbers of outputs. norm: of x, 0 none, 1 LayerNorm, 2 RMSNorm. up: of two
    matrices. rope: channels of a head. terms: of x. most_shared: bytes of shared memory that a
    block can have.
    """
    each = 2 if up else 1
    begins = [each * sum(n for _, n in ranges[:i]) for i in range(1, len(ranges))]
    columns = each * sum(n for _, n in ranges)
    parts, units = splits(K)
    slot = 2 * max(OCTET * (UNIT * TYPES[t].bits // 8 + TYPES[t].of_scales) for t, _ in ranges)
    if any(begin % (rope or COLUMNS) for begin in begins):
        return None

    def shared(rows: int, warps: int, kept: int, planes: int, pitch: int) -> int:
        term = 2 * units * UNIT + 64
        split = FLOAT * units * UNIT if norm == 1 and terms == 1 else terms * term
        row = ceil(kept * (split + terms * 16 * units) / 128) * 128 + 64
        row += (0, 8, FLOAT * parts)[norm]
        return ceil(rows * (row + FLOAT * planes * pitch) / 16) * 16 + warps * FLIGHT * slot

    rows = power_of_two(M)
    together = shared(rows, parts, parts, 2 * parts, COLUMNS)
    if norm or (rows <= FEW_ROWS and together <= most_shared):
        while together > most_shared or rows > FEW_ROWS:
            rows //= 2
            if not rows:
                return None
            together = shared(rows, parts, parts, 2 * parts, COLUMNS)
        return _geometry(
            kernel, M, K, rows, ceil(columns / COLUMNS), together, parts, 1, sms, most_shared
        )
    cluster = parts if capability >= CLUSTER_CAPABILITY else 1
    fitting = [n for n in WARPS if not any(at % (COLUMNS * n) for at in begins)]

    def apart(rows: int, warps: int) -> int:
        return shared(rows, warps, 1, 2, COLUMNS * warps + 8)

    def turns(rows: int, warps: int) -> float:  # and how long one takes, which unpacks and adds
        blocks = 1 if rows > 2 * FEW_ROWS else _blocks(apart(rows, warps), most_shared)
        count = ceil(ceil(columns / (COLUMNS * warps)) / _most(sms, blocks, cluster))
        return ceil(M / rows) * count * blocks * (4 + warps) * (5 + rows / 8)

    most = min(MOST_ROWS, rows)
    possible = [(most >> i, warps) for i in range(most.bit_length()) for warps in fitting]
    possible = [each for each in possible if apart(*each) <= most_shared]
    if not possible:
        return None
    rows, warps = min(possible, key=lambda each: turns(*each))
    groups = ceil(columns / (COLUMNS * warps))
    return _geometry(
        kernel, M, K, rows, groups, apart(rows, warps), warps, cluster, sms, most_shared, False
    )


def normalizes(M: int, K: int) -> bool:
    """Whether a product of M rows with K inputs has their RMSNorm: a split is one unit then."""
    return M <= FEW_ROWS and K <= UNIT * MOST_SPLITS


def launch(
    c: Call, kernel: str, args: tuple[Any, ...], cache: str | None = None, rope: int = 0
) -> Launch:
    """A kernel of decode_gguf.cu; args: its arguments. cache: the FP8 format of the kv_cache.

    rope: channels of a head.
    """
    if compute_capability() < MMA_CAPABILITY:
        raise Unfit("needs a GPU of compute capability 8.0 or newer")
    up, gamma, beta, terms = (getattr(c, name, None) for name in ("up", "gamma", "beta", "terms"))
    norm = 0 if gamma is None else 1 if beta is not None else 2
    if up is not None and up.ranges != c.w.ranges:
        raise Unfit(f"up: expected types {c.w.ranges}, got {up.ranges}")
    if terms or getattr(c, "to_terms", None):
        raise Unfit("takes and gives floats")
    if norm == 2 and not normalizes(c.M, c.K):
        raise Unfit(f"RMSNorm of {c.M:,} rows of {c.K:,}: expected fewer: use rmsnorm")
    most_shared = device_attribute("MaxSharedMemoryPerBlockOptin") - 1024  # static, and its own
    found = geometry(
        kernel,
        *(c.M, c.K, c.w.ranges),
        norm=norm,
        up=up is not None,
        rope=rope,
        terms=1 if c.rounded else TERMS,
        capability=compute_capability(),
        sms=device_attribute("MultiProcessorCount"),
        most_shared=most_shared,
    )
    if found is None:
        raise Unfit(f"K {c.K:,}: a split of a row does not fit in this GPU's shared memory")
    for name, array in (("x", c.x), ("gamma", gamma), ("beta", beta), ("w", c.w.data)):
        if array is not None:
            check_address(name, array)
    more: Defines = (("LM_NORM", norm),) if norm else ()
    more += (("LM_UP", 1), *gate_define(c.gelu)) if up is not None else ()
    more += (("LM_ROPE", rope),) if rope else ()
    found = found.with_defines((*more, *count_define(c.rounded), *range_defines(c.w)))
    return launch_at(FILE, found, args, *storage_of(c.w, cache_dtype(c.w.dtype)), cache)


def launch_rope(
    c: Call, gamma: Any, bias: Any, eps: float, n_ctx: int, cache: str | None
) -> Launch:
    """rope_decode_gguf, of x or, with gamma, of its RMSNorm."""
    D = 2 * c.P
    if c.w.dtype != GGUF:
        raise Unfit("takes a GgufMatrix")
    if D % BORDER:
        raise Unfit(f"heads of {D} channels: expected a multiple of {BORDER}")
    check_address("by", c.by, 8)
    arrays = (c.x, gamma, c.w.data, bias, c.by, c.row, c.position, c.out, c.k, c.v)
    args = (*arrays, eps, c.M, c.N, c.n_head, c.C // D, c.B, n_ctx)
    return launch(c, "rope_decode_gguf", args, cache, D)


def _blocks(shared: int, most_shared: int) -> int:
    """Blocks of an SM."""
    return next(n for n in range(BLOCKS, 0, -1) if n == 1 or shared <= room(most_shared, n))


def _most(sms: int, blocks: int, cluster: int) -> int:
    """Clusters that run at a time: some multiprocessors do not belong to one of eight."""
    most = sms * blocks // cluster
    return max(1, most * OF_EIGHT // 8 if cluster > 4 else most)


def _geometry(
    kernel: str,
    M: int,
    K: int,
    rows: int,
    groups: int,
    shared: int,
    warps: int,
    cluster: int,
    sms: int,
    most_shared: int,
    together: bool = True,
) -> Geometry:
    """The launch with such blocks, of which each has some of the groups of columns."""
    blocks = 1 if rows > 2 * FEW_ROWS else _blocks(shared, most_shared)
    defines = (
        ("LM_K", K),
        ("LM_ROWS", rows),
        ("LM_FLIGHT", FLIGHT),
        ("LM_BLOCKS", blocks),
        ("GGUF_TOGETHER", int(together)),
        *((("LM_WARPS", warps), ("GGUF_CLUSTER", cluster)) if not together else ()),
    )
    turns = ceil(groups / _most(sms, blocks, cluster))
    grid = cluster * ceil(groups / turns), ceil(M / rows)
    return Geometry(kernel, grid, (WARP * warps,), shared, defines)
