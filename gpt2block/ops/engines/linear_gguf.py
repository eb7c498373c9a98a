"""Launches of matmul/decode/mma_gguf.cu, the linear layer of decoding for GGUF weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import accumulate
from math import ceil
from typing import NamedTuple

from gpt2block.cuda.arrays import CudaArray, device_attribute
from gpt2block.cuda.cards import gpu
from gpt2block.cuda.formats import GGUF
from gpt2block.cuda.kernels import Defines, Geometry, Launch
from gpt2block.models.weights.gguf import BORDER, ROW_GROUP, TYPES
from gpt2block.ops.call import Call
from gpt2block.ops.engines.epilogues import Epilogue
from gpt2block.ops.engines.linear_mma import FLOAT, MAX_SPLITS, TERMS, UNIT, splits
from gpt2block.ops.engines.rows import WARP, power_of_two
from gpt2block.ops.gguf import range_defines, sums_of
from gpt2block.ops.operands import CHUNK, IN_ORDER, count_define
from gpt2block.ops.operation import UnsupportedCall
from gpt2block.ops.products import gate_define, needs_mma, room, shared_for_blocks

FILE, KERNEL = "matmul/decode/mma_gguf.cu", "decode_mma_gguf"
DIVIDED = f"{KERNEL}_parts"  # the kernel whose blocks divide K, and exchange sums in memory
COUNTERS = 1024  # counters before these sums
PARTS = 4, 2  # possible numbers of blocks that divide K
ADDING = 150  # time to add sums in memory, in the unit of `duration`
COLUMNS = BORDER  # columns of the product (rows of w) per warp
WARPS = range(12, 0, -1)  # possible warps per block if all multiply the same split (range of K)
JOINT_ROWS, MAX_ROWS = 8, 64  # maximum rows of x per block if a WorkSplit is `together`, and if not
STAGED_WARPS = 8  # warps per block if it multiplies all splits apart, with sums in registers
# Possible rows and warps of such a block if x is an operand; registers limit its threads.
# COPYING_US (3.6 + rows / 8) (1.8 + warps of a scheduler): µs of a block for a unit of K.
# ADDING_US: µs of the other work, by the number of blocks that divide K. Fitted to products of a
# model with 7 billion weights and 64 rows, on an H200 with the kernels of 8.9.
COPYING_ROWS = 32, 64
COPYING_WARPS = 16, 12, 10, 8, 7, 6, 5, 4, 2, 1
COPYING_THREADS = {32: 512, 64: 384}
COPYING_US, ADDING_US = 0.0337, {1: 3, 2: 8, 4: 15}
SCHEDULERS = 4  # per multiprocessor
STAGED_COST = 1.2  # relative time of such a block, in the unit of `duration`
MAX_NORMED = 32  # maximum rows of x in products that fuse RMSNorm
# Values of K for which they also fuse it, for one row, on GPUs whose blocks have at most 163 KB of
# shared memory: 7.5 to 8.9 and 12.0.
LONG_NORMED = range(2048, 4097, 1024)
FLIGHT = 3  # slots in the ring of a warp; a slot holds 128 values of K of the warp's columns
MAX_FLIGHT = 6  # maximum slots if only one block fits on a multiprocessor
# Registers per lane that hold x: HELD for JOINT_ROWS rows of a unit, at most MAX_HELD for a split.
HELD, MAX_HELD, MAX_TILES = 16, 176, 2  # MAX_TILES: maximum rows, in multiples of JOINT_ROWS
STAGED_BYTES = 2 * (2 * UNIT + 64) + 4 * 16  # bytes of shared memory for a row's term, if staged
STATIC = 1024  # maximum bytes of static shared memory per block
BLOCKS = 2  # maximum blocks per multiprocessor; no block of the next kernel fits next to them
EXCHANGE = 200  # time to exchange sums in a cluster, in the unit of `duration`
OF_EIGHT = 7  # clusters that run, of every 8 that would fit, if a cluster has more than 4 blocks


class SharedMemory(NamedTuple):
    """Sizes that determine the bytes of shared memory per block of mma_gguf.cu.

    slot: maximum bytes of a slot in a warp's ring (`slot_bytes`) over all GGUF types. norm: norm of
    x, as `norm_of` returns it. terms: 16-bit terms per value of x. staged: whether blocks that are
    not `together` hold a unit of x at a time. copied: whether this unit is copied from an operand.
    """

    parts: int  # splits of K
    units: int  # units of 128 values of K per split
    slot: int
    norm: int
    terms: int
    staged: bool = False
    copied: bool = False

    def of(self, cut: WorkSplit) -> int:
        """Return the bytes per block: rows of x, sums, and a ring of weights for each warp."""
        row, planes, pitch = self.row(1), 2, COLUMNS * cut.warps + 8
        if cut.together:
            row, planes, pitch = self.row(self.parts), 2 * self.parts, COLUMNS
        elif self.copied:
            row, planes = max(cut.flight * 2 * UNIT + (cut.flight + 1) * 16, FLOAT * pitch), 0
        elif self.staged:
            row, planes = STAGED_BYTES * self.terms, 0
        row = 0 if cut.held else row
        rings = cut.warps * cut.flight * self.slot
        return ceil(cut.rows * (row + FLOAT * planes * pitch) / 16) * 16 + rings

    def row(self, kept: int) -> int:
        """Return the bytes of shared memory per row of x for `kept` of the splits (ranges) of K."""
        split = self.terms * (2 * self.units * UNIT + 64)
        if self.norm == 1 and self.terms == 1:
            split = FLOAT * self.units * UNIT
        row = ceil(kept * (split + self.terms * 16 * self.units) / 128) * 128 + 64
        return row + (0, 8, FLOAT * self.parts)[self.norm]


class WorkSplit(NamedTuple):
    """Division of a product among blocks and warps. Results do not depend on the division."""

    rows: int  # rows of x per block
    warps: int  # warps per block
    together: bool  # True: each warp multiplies another split of K; False: all the same split
    held: bool = False  # whether registers hold x instead of shared memory
    flight: int = FLIGHT
    shares: int = 1  # without clusters, blocks that divide K and add sums in memory

    @property
    def columns(self) -> int:
        """Columns of the product (rows of w) that a block computes at a time."""
        return COLUMNS * (1 if self.together else self.warps)


@lru_cache(maxsize=1024)
def geometry(
    M: int,
    K: int,
    ranges: tuple[tuple[str, int], ...],
    *,
    norm: int = 0,
    up: bool = False,
    rope: int = 0,
    terms: int,
    clusters: bool,
    holds: bool = False,
    operand: bool = False,
    summed: bool = False,
    sms: int,
    max_shared: int,
    workspace: int = 0,
) -> Geometry | None:
    """Return the launch geometry for x (M, K), or None if no `WorkSplit` is possible.

    This is so if a row of x does not fit in shared memory, or if the outputs of a GGUF type do not
    begin at a multiple of COLUMNS, or of the channels of a head.

    ranges: GGUF types and their numbers of outputs. norm: norm of x, 0 none, 1 LayerNorm, 2
    RMSNorm. up: whether there is a second matrix. rope: channels per head with RoPE, else 0. terms:
    16-bit terms per value of x. clusters: whether blocks form clusters. holds: whether registers
    may hold x. operand: whether x is an operand of one term. summed: whether a block of a product
    with `up` also adds up chunks of outputs. max_shared: maximum bytes of dynamic shared memory per
    block. workspace: floats of memory for counters and sums, with which blocks can divide K; 0 with
    a norm, RoPE or `up`.
    """
    ends = [(2 if up else 1) * end for end in accumulate(n for _, n in ranges)]
    parts, units = splits(K)
    staged = not clusters or parts == 1  # a block that is not `together` multiplies all splits
    slot = max(slot_bytes(t) for t, _ in ranges)
    memory = SharedMemory(parts, units, slot, norm, terms, staged, operand)

    def fitting(candidates: Iterable[WorkSplit]) -> list[WorkSplit]:
        return [cut for cut in candidates if memory.of(cut) <= max_shared]

    def groups(cut: WorkSplit) -> int:
        return ceil(ends[-1] / cut.columns) * ceil(M / cut.rows)

    if any(begin % (rope or COLUMNS) for begin in ends[:-1]):
        return None
    if operand:
        cuts = fitting(_of_operand(M, ends, 2 * CHUNK if summed else COLUMNS))
    else:
        cuts = _cuts(M, parts, units, ends, norm, terms, holds, staged, fitting)
    if not cuts:
        return None

    if staged and workspace >= COUNTERS + parts * M * ends[-1]:
        apart = [cut for cut in cuts if not cut.together and groups(cut) <= COUNTERS]
        cuts += [cut._replace(shares=n) for cut in apart for n in PARTS if parts % n == 0]

    def turns(cut: WorkSplit) -> tuple[int, int]:
        """Return (blocks per multiprocessor, groups of columns that a block computes in turn)."""
        room_for = _blocks(cut, memory.of(cut), max_shared)
        most = max(1, _most(sms, room_for, sharing(cut)) // ceil(M / cut.rows))
        return room_for, ceil(ceil(ends[-1] / cut.columns) / most)

    def sharing(cut: WorkSplit) -> int:
        """Return the number of blocks with the same columns, each with a part of K."""
        return cut.shares if cut.together or staged else parts

    # Time estimate per warp, in relative units: 5 to unpack weights, 1 to multiply 8 rows of x.
    def duration(cut: WorkSplit) -> float:
        room_for, count = turns(cut)
        if operand:  # µs
            of_unit = COPYING_US * (3.6 + cut.rows / 8) * (1.8 + ceil(cut.warps / SCHEDULERS))
            return of_unit * count * parts * units / cut.shares + ADDING_US[cut.shares]
        exchange = (ADDING if staged else EXCHANGE) if sharing(cut) > 1 else 0
        work = count * room_for * (4 + cut.warps) * (5 + cut.rows / 8)
        if staged and not cut.together:  # a warp also stores terms of x
            stored = 3 * cut.rows / 8 / cut.warps
            work += count * room_for * (4 + cut.warps) * stored
            work *= STAGED_COST * parts / cut.shares
        return exchange + work

    cut = min(cuts, key=duration)
    blocks, count = turns(cut)
    if holds and blocks == 1 and cut.together:
        deeper = (cut._replace(flight=n) for n in range(MAX_FLIGHT, FLIGHT - 1, -1))
        cut = fitting(deeper)[0]
    clustered = 1 if staged else parts
    defines = (
        ("DECODE_K", K),
        ("DECODE_ROWS", cut.rows),
        ("DECODE_FLIGHT", cut.flight),
        ("DECODE_BLOCKS", blocks),
        ("GGUF_TOGETHER", int(cut.together)),
        *((("GGUF_HELD", 1),) if cut.held else ()),
        *((("DECODE_OPERAND", 1), ("OPERAND_WIDTH", IN_ORDER)) if operand else ()),
        *(() if cut.together else (("DECODE_WARPS", cut.warps), ("GGUF_CLUSTER", clustered))),
        *((("GGUF_PARTS", cut.shares),) if cut.shares > 1 else ()),
    )
    grid = sharing(cut) * ceil(ceil(ends[-1] / cut.columns) / count), ceil(M / cut.rows)
    # The launch requests so much memory that no block of the next kernel starts next to these
    # blocks. Otherwise some multiprocessors would later run three blocks and others one. A decoding
    # step of a model with 7 billion weights takes 1.94 ms instead of 2.19 ms (H100).
    shared = shared_for_blocks(max_shared + STATIC, blocks, memory.of(cut))
    kernel = DIVIDED if cut.shares > 1 else KERNEL
    return Geometry(kernel, grid, (WARP * cut.warps,), shared, defines)


def _cuts(
    M: int,
    parts: int,
    units: int,
    ends: list[int],
    norm: int,
    terms: int,
    holds: bool,
    staged: bool,
    fitting: Callable[[Iterable[WorkSplit]], list[WorkSplit]],
) -> list[WorkSplit]:
    """Return possible divisions of a product, as `fitting` keeps them. ends: ends of the ranges."""
    few = _halvings(min(M, JOINT_ROWS))
    cuts = fitting(WorkSplit(rows, parts, together=True) for rows in few)[:1]
    if holds and not norm and [cut.rows for cut in cuts] != few[:1]:
        most = JOINT_ROWS * min(MAX_TILES, MAX_HELD // (HELD * units))
        held = (WorkSplit(rows, parts, True, held=True) for rows in _halvings(min(M, most)) if most)
        cuts += fitting(held)[:1]
    if not norm and [cut.rows for cut in cuts] != _halvings(M)[:1]:
        warps = [n for n in WARPS if not any(begin % (COLUMNS * n) for begin in ends[:-1])]
        rows = _halvings(min(M, MAX_ROWS))
        if staged:
            warps = [n for n in (STAGED_WARPS, 4, 2, 1) if n in warps][:1]
            least = 1 if cuts else max(warps)  # if nothing else fits, blocks have empty rows
            rows = [n for n in _halvings(min(max(M, least), MAX_ROWS)) if n * terms**2 <= MAX_ROWS]
        apart = (WorkSplit(n, each, together=False) for n in rows for each in warps)
        cuts += fitting(cut for cut in apart if cut.rows >= cut.warps or not staged)
    return cuts


def _of_operand(M: int, ends: list[int], multiple: int) -> list[WorkSplit]:
    """Return possible divisions of an operand's product. `multiple` divides a block's columns."""
    warps = [n for n in COPYING_WARPS if COLUMNS * n % multiple == 0]
    warps = [n for n in warps if not any(begin % (COLUMNS * n) for begin in ends[:-1])]
    possible = [rows for rows in COPYING_ROWS if rows == min(COPYING_ROWS) or rows < 2 * M]
    cuts = (WorkSplit(n, w, together=False) for n in possible for w in warps)
    return [cut for cut in cuts if cut.rows <= WARP * cut.warps <= COPYING_THREADS[cut.rows]]


def slot_bytes(name: str) -> int:
    """Return the bytes of 128 values of K for a warp's columns, in weights of this GGUF type."""
    return 2 * ROW_GROUP * (UNIT * TYPES[name].bits // 8 + TYPES[name].of_scales)


def _halvings(rows: int) -> list[int]:
    """Return a list of powers of two: the smallest that is at least `rows`, its half, ..., 1."""
    return [power_of_two(rows) >> i for i in range(power_of_two(rows).bit_length())]


def _blocks(cut: WorkSplit, shared: int, max_shared: int) -> int:
    """Return the number of blocks with `shared` bytes that run on a multiprocessor at a time."""
    most = 1 if cut.held or cut.rows > 2 * JOINT_ROWS else BLOCKS
    return next(n for n in range(most, 0, -1) if n == 1 or shared <= room(max_shared, n))


def _most(sms: int, blocks: int, cluster: int) -> int:
    """Return the number of clusters that run at a time; large clusters cannot use every SM."""
    most = sms * blocks // cluster
    return max(1, most * OF_EIGHT // 8 if cluster > 4 else most)


def normalizes(M: int, K: int) -> bool:
    """Return whether products of x (M, K) can fuse RMSNorm, which limits the sizes of M and K."""
    if K in LONG_NORMED:
        return M == 1 and device_attribute("MaxSharedMemoryPerBlockOptin") <= 163 << 10
    return M <= MAX_NORMED and K <= UNIT * MAX_SPLITS


def norm_of(gamma: CudaArray | None, beta: CudaArray | None) -> int:
    """Return DECODE_NORM, the norm of x that a product fuses: 0 none, 1 LayerNorm, 2 RMSNorm."""
    return 0 if gamma is None else 1 if beta is not None else 2


def launch(c: Call, epilogue: Epilogue) -> tuple[Launch, ...]:
    """Return the launches for x and w of a call, or raise UnsupportedCall.

    A call can have gamma and beta, the parameters of a norm of x, with eps; bias; up, the second
    matrix of a gated product; and workspace, floats that are 0 before and after each launch, for
    counters, and then for sums. c.rounded: whether x is rounded to one 16-bit term per value.
    """
    given = vars(c).get
    gamma, beta, bias, up, workspace = map(given, ("gamma", "beta", "bias", "up", "workspace"))
    norm, holds = norm_of(gamma, beta), c.rounded and not gpu().has_wgmma
    operand, to_operand = given("operand"), given("to_operand")
    summed = to_operand is not None and to_operand.summed
    copies = holds and gpu().has_bf16 and c.K % UNIT == 0
    if operand and not (copies and operand.for_blocks):
        raise UnsupportedCall(
            f"K {c.K:,}, terms of {operand}: expected a multiple of {UNIT}, rounded float16 in the "
            "order of wgmma, and a GPU from 8.0 without wgmma: pass floats"
        )
    if to_operand and not (operand and to_operand.for_blocks):
        raise UnsupportedCall(
            f"terms of {to_operand}, x of {operand or 'floats'}: expected both in the order of "
            "wgmma"
        )
    if c.w.dtype != GGUF:
        raise UnsupportedCall("takes a GgufMatrix")
    needs_mma()
    if epilogue.head % BORDER:
        raise UnsupportedCall(f"heads of {epilogue.head} channels: expected a multiple of {BORDER}")
    if up is not None and up.ranges != c.w.ranges:
        raise UnsupportedCall(f"up: expected types {c.w.ranges}, got {up.ranges}")
    if norm == 2 and not normalizes(c.M, c.K):
        raise UnsupportedCall(f"RMSNorm of {c.M:,} rows of {c.K:,}: expected fewer: use rmsnorm")
    launch_geometry = geometry(
        *(c.M, c.K, c.w.ranges),
        norm=norm,
        up=up is not None,
        rope=epilogue.head,
        terms=1 if c.rounded else TERMS,
        clusters=gpu().has_clusters and not holds,
        holds=holds,
        operand=operand is not None,
        summed=summed,
        sms=device_attribute("MultiProcessorCount"),
        max_shared=device_attribute("MaxSharedMemoryPerBlockOptin") - STATIC,
        workspace=0
        if workspace is None or norm or up or epilogue.name != "ADD"
        else workspace.size,
    )
    if launch_geometry is None:
        raise UnsupportedCall(
            f"K {c.K:,}: a split of a row does not fit in this GPU's shared memory: use a "
            "WeightMatrix"
        )
    defines: Defines = (("DECODE_NORM", norm),) if norm else ()
    defines += (("DECODE_UP", 1), *gate_define(c.gelu)) if up is not None else ()
    defines += (("DECODE_ROPE", epilogue.head),) if epilogue.head else ()
    defines += (("DECODE_SUMS", epilogue.splits),) if epilogue.splits else ()
    defines += (("DECODE_OUT_OPERAND", 1),) if to_operand else ()
    defines += (("OPERAND_SUMS", 1),) if summed else ()
    defines += (*count_define(c.rounded), *range_defines(c.w))
    sums, before = sums_of(c) if operand else (None, ())
    if launch_geometry.kernel == DIVIDED:
        args = {"x": c.x, "w": c.w.data, "bias": bias, "workspace": workspace, "M": c.M, "N": c.N}
        args["sums"] = sums
        return (*before, epilogue.launch(FILE, launch_geometry, defines, args, c.w))
    matrices = {"w": c.w.data, "up": None if up is None else up.data}
    norms = {"gamma": gamma, "beta": beta, "eps": given("eps", 0.0)}
    args = {"x": c.x, **matrices, **norms, "bias": bias, "M": c.M, "N": c.N, "sums": sums}
    return (*before, epilogue.launch(FILE, launch_geometry, defines, args, c.w))
