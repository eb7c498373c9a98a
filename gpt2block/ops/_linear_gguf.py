"""The linear layer of decoding with weights in blocks of GGUF: launches of mma_gguf.cu."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate
from math import ceil
from typing import Any, NamedTuple

from gpt2block.config.formats import GGUF
from gpt2block.cuda.arrays import check_address, compute_capability, device_attribute
from gpt2block.cuda.kernels import Defines, Geometry, cache_dtype, launch_at
from gpt2block.cuda.requests import Launch
from gpt2block.ops._linear_mma import FLOAT, MOST_SPLITS, TERMS, UNIT, splits
from gpt2block.ops._linear_mma_tiles import CLUSTER_CAPABILITY
from gpt2block.ops._rows import WARP, power_of_two
from gpt2block.ops.call import Call
from gpt2block.ops.gguf import range_defines
from gpt2block.ops.operation import UnsupportedCall
from gpt2block.ops.products import MMA_CAPABILITY, filled, gate_define, room, storage_of
from gpt2block.ops.terms import count_define
from gpt2block.weights.gguf import BORDER, OCTET, TYPES, GgufMatrix

FILE = "matmul/decode/mma_gguf.cu"
COLUMNS = BORDER  # of a warp
WARPS = range(12, 0, -1)  # of a block with one split
FEW_ROWS, MOST_ROWS = 8, 64  # of a block with all splits, and with one
MOST_NORMED = 32  # rows of a product that normalizes them
FLIGHT = 3  # slots of a ring
STATIC = 1024  # bytes of shared memory of a block that are not dynamic, at most
BLOCKS = 2  # of an SM: of the next kernel, none fits beside them
EXCHANGE = 200  # of sums in a cluster, in the unit of `duration`
OF_EIGHT = 7  # eighths of the clusters that multiprocessors have room for which run at a time


class SharedMemory(NamedTuple):
    """What determines the bytes of a block.

    slot: bytes of a unit of a warp's columns, of the type with the most. norm, terms: of x.
    """

    parts: int  # splits of K
    units: int  # of a split
    slot: int
    norm: int
    terms: int

    def of(self, cut: Cut) -> int:
        """Rows of x, sums of two turns, and the rings of the warps."""
        kept, planes, pitch = 1, 2, COLUMNS * cut.warps + 8
        if cut.together:
            kept, planes, pitch = self.parts, 2 * self.parts, COLUMNS
        return (
            ceil(cut.rows * (self.row(kept) + FLOAT * planes * pitch) / 16) * 16
            + cut.warps * FLIGHT * self.slot
        )

    def row(self, kept: int) -> int:
        """A row of x, of so many splits."""
        split = self.terms * (2 * self.units * UNIT + 64)
        if self.norm == 1 and self.terms == 1:
            split = FLOAT * self.units * UNIT
        row = ceil(kept * (split + self.terms * 16 * self.units) / 128) * 128 + 64
        return row + (0, 8, FLOAT * self.parts)[self.norm]


class Cut(NamedTuple):
    """How the work is divided: results do not depend on it."""

    rows: int  # of a block
    warps: int
    together: bool  # a block has all splits of K, else one of them

    @property
    def columns(self) -> int:
        """Of a block."""
        return COLUMNS * (1 if self.together else self.warps)


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
    ends = [(2 if up else 1) * end for end in accumulate(n for _, n in ranges)]
    parts, units = splits(K)
    memory = SharedMemory(parts, units, max(slot_bytes(t) for t, _ in ranges), norm, terms)

    def fitting(cuts: Iterable[Cut]) -> list[Cut]:
        return [cut for cut in cuts if memory.of(cut) <= most_shared]

    if any(begin % (rope or COLUMNS) for begin in ends[:-1]):
        return None
    few = _halved(min(M, FEW_ROWS))
    found = fitting(Cut(rows, parts, together=True) for rows in few)[:1]
    if not norm and [cut.rows for cut in found] != _halved(M)[:1]:
        warps = [n for n in WARPS if not any(begin % (COLUMNS * n) for begin in ends[:-1])]
        rows = _halved(min(M, MOST_ROWS))
        found += fitting(Cut(n, each, together=False) for n in rows for each in warps)
    if not found:
        return None

    def turns(cut: Cut) -> tuple[int, int]:
        """Blocks of an SM, and how many groups of columns each of them has."""
        room_for = _blocks(cut, memory.of(cut), most_shared)
        most = max(1, _most(sms, room_for, cluster(cut)) // ceil(M / cut.rows))
        return room_for, ceil(ceil(ends[-1] / cut.columns) / most)

    def cluster(cut: Cut) -> int:
        return 1 if cut.together or capability < CLUSTER_CAPABILITY else parts

    def duration(cut: Cut) -> float:  # of unpacking, once for all rows, and of adding
        room_for, count = turns(cut)
        exchange = EXCHANGE if cluster(cut) > 1 else 0
        return exchange + count * room_for * (4 + cut.warps) * (5 + cut.rows / 8)

    cut = min(found, key=duration)
    blocks, count = turns(cut)
    defines = (
        ("LM_K", K),
        ("LM_ROWS", cut.rows),
        ("LM_FLIGHT", FLIGHT),
        ("LM_BLOCKS", blocks),
        ("GGUF_TOGETHER", int(cut.together)),
        *(() if cut.together else (("LM_WARPS", cut.warps), ("GGUF_CLUSTER", cluster(cut)))),
    )
    grid = cluster(cut) * ceil(ceil(ends[-1] / cut.columns) / count), ceil(M / cut.rows)
    # No block of the next kernel beside these: an SM that had one would later have three, others
    # one. A step of a 7B takes 1.94 ms in place of 2.19 (H100).
    shared = filled(most_shared + STATIC, blocks, memory.of(cut))
    return Geometry(kernel, grid, (WARP * cut.warps,), shared, defines)


def slot_bytes(name: str) -> int:
    """Those of a unit of a warp's columns, of a type."""
    return 2 * OCTET * (UNIT * TYPES[name].bits // 8 + TYPES[name].of_scales)


def _halved(rows: int) -> list[int]:
    """The power of two from so many rows on, its half, and so on."""
    return [power_of_two(rows) >> i for i in range(power_of_two(rows).bit_length())]


def _blocks(cut: Cut, shared: int, most_shared: int) -> int:
    """Blocks of an SM."""
    most = 1 if cut.rows > 2 * FEW_ROWS else BLOCKS
    return next(n for n in range(most, 0, -1) if n == 1 or shared <= room(most_shared, n))


def _most(sms: int, blocks: int, cluster: int) -> int:
    """Clusters that run at a time: some multiprocessors do not belong to one of eight."""
    most = sms * blocks // cluster
    return max(1, most * OF_EIGHT // 8 if cluster > 4 else most)


def normalizes(M: int, K: int) -> bool:
    """Whether a product of M rows with K inputs has their RMSNorm: a split is one unit then."""
    return M <= MOST_NORMED and K <= UNIT * MOST_SPLITS


def norm_of(gamma: Any, beta: Any) -> int:
    """Return LM_NORM, the norm of x that a product fuses: 0 none, 1 LayerNorm, 2 RMSNorm."""
    return 0 if gamma is None else 1 if beta is not None else 2


def launch(
    c: Call,
    kernel: str,
    args: tuple[Any, ...],
    *,
    rounded: bool,
    norm: int = 0,
    up: GgufMatrix | None = None,
    sums: int = 0,
    cache: str | None = None,
    rope: int = 0,
) -> Launch:
    """Launch a kernel of mma_gguf.cu, or raise UnsupportedCall.

    args: the arguments of the kernel. rounded: whether x has one term per value. norm: as `norm_of`
    returns it. up: the second matrix of a gated product. sums: partial sums per value of the
    residual stream that the kernel adds. cache: the FP8 format of the kv_cache. rope: channels of a
    head, with RoPE.
    """
    if compute_capability() < MMA_CAPABILITY:
        raise UnsupportedCall("needs a GPU of compute capability 8.0 or newer")
    if up is not None and up.ranges != c.w.ranges:
        raise UnsupportedCall(f"up: expected types {c.w.ranges}, got {up.ranges}")
    if norm == 2 and not normalizes(c.M, c.K):
        raise UnsupportedCall(f"RMSNorm of {c.M:,} rows of {c.K:,}: expected fewer: use rmsnorm")
    how = geometry(
        kernel,
        *(c.M, c.K, c.w.ranges),
        norm=norm,
        up=up is not None,
        rope=rope,
        terms=1 if rounded else TERMS,
        capability=compute_capability(),
        sms=device_attribute("MultiProcessorCount"),
        most_shared=device_attribute("MaxSharedMemoryPerBlockOptin") - STATIC,
    )
    if how is None:
        raise UnsupportedCall(
            f"K {c.K:,}: a split of a row does not fit in this GPU's shared memory"
        )
    defines: Defines = (("LM_NORM", norm),) if norm else ()
    defines += (("LM_UP", 1), *gate_define(c.gelu)) if up is not None else ()
    defines += (("LM_ROPE", rope),) if rope else ()
    defines += (("LM_SUMS", sums),) if sums else ()
    how = how.with_defines((*defines, *count_define(rounded), *range_defines(c.w)))
    return launch_at(FILE, how, args, *storage_of(c.w, cache_dtype(c.w.dtype)), cache)


def check_addresses(**arrays: Any) -> None:
    """Raise InputError unless each array, by its name, is aligned as the kernels load it."""
    for name, array in arrays.items():
        if array is not None:
            check_address(name, array)


def launch_rope(
    c: Call,
    *,
    rounded: bool,
    gamma: Any = None,
    bias: Any = None,
    sums: Any = None,
    splits: int = 0,
    eps: float = 0.0,
    n_ctx: int,
) -> Launch:
    """Launch rope_decode_gguf on x or, with gamma, on its RMSNorm.

    sums: partial sums that are added to x, `splits` per value, or None.
    """
    D = 2 * c.P
    if c.w.dtype != GGUF:
        raise UnsupportedCall("takes a GgufMatrix")
    if D % BORDER:
        raise UnsupportedCall(f"heads of {D} channels: expected a multiple of {BORDER}")
    check_addresses(x=c.x, gamma=gamma, w=c.w.data)
    check_address("by", c.by, 8)
    arrays = (c.x, gamma, c.w.data, bias, sums, c.by, c.row, c.position, c.out, c.k, c.v)
    args = (*arrays, eps, c.M, c.N, c.n_head, c.C // D, c.B, n_ctx)
    options: Any = {"norm": norm_of(gamma, None), "sums": splits, "cache": c.kv_dtype}
    return launch(c, "rope_decode_gguf", args, rounded=rounded, rope=D, **options)
