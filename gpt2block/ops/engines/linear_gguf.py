"""Launches of matmul/decode/mma_gguf.cu, the linear layer of decoding for GGUF weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from math import ceil
from typing import NamedTuple

from gpt2block.cuda.arrays import max_shared
from gpt2block.cuda.cards import gpu
from gpt2block.cuda.formats import GGUF
from gpt2block.cuda.kernels import Geometry, Launch, launch_at, nonzero_defines, size_defines
from gpt2block.models.weights.gguf import BORDER, ROW_GROUP, TYPES, GgufMatrix
from gpt2block.ops.call import Call, Refusal, accept, needs
from gpt2block.ops.engines.epilogues import Epilogue
from gpt2block.ops.engines.linear_mma import (
    FLOAT,
    MAX_BLOCKS,
    MAX_SPLITS,
    RMSNORM,
    STATIC,
    TERMS,
    UNIT,
    splits,
)
from gpt2block.ops.engines.rows import WARP, power_of_two
from gpt2block.ops.gguf import range_defines, sums_of
from gpt2block.ops.operands import CHUNK, IN_ORDER, count_define
from gpt2block.ops.products import Matmul, gate_define, limits, room, same_types, shared_for_blocks

FILE, KERNEL = "matmul/decode/mma_gguf.cu", "decode_mma_gguf"
DIVIDED = f"{KERNEL}_parts"  # the kernel whose blocks divide K, and exchange sums in memory
OF_EXPERTS = f"{KERNEL}_experts"  # the kernel whose blocks have rows and matrix of an expert
INSTEAD_OF_EXPERTS = ": use weights of another dtype, such as bfloat16, or device='cpu'"
TURNS = 12  # maximum groups of columns per block of an expert, as tiles of rows can be empty
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
BLOCKS = 2  # maximum blocks per multiprocessor; no block of the next kernel fits next to them
EXCHANGE = 200  # time to exchange sums in a cluster, in the unit of `duration`
OF_EIGHT = 7  # clusters that run, of every 8 that would fit, if a cluster has more than 4 blocks


class SharedMemory(NamedTuple):
    """Sizes that determine the bytes of shared memory per block of mma_gguf.cu.

    slot: maximum bytes of a slot in a warp's ring (`slot_bytes`) over all GGUF types. norm: norm of
    x, as in `Matmul`. terms: 16-bit terms per value of x. staged: whether blocks that are
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


class BlocksProduct(NamedTuple):
    """The sizes of a product with GGUF blocks, and the limits of the GPU.

    ends: ends of the ranges of outputs, of both matrices. memory: sizes of shared memory. holds:
    whether registers may hold x. multiple: divides the columns of a block, if x is an operand.
    tiles: with experts, the number of tiles of up to M rows each; else 0.
    """

    M: int
    ends: tuple[int, ...]
    memory: SharedMemory
    holds: bool
    multiple: int
    sms: int
    max_shared: int
    tiles: int = 0

    def fitting(self, cuts: Iterable[WorkSplit]) -> list[WorkSplit]:
        """Return the divisions that fit in shared memory."""
        return [cut for cut in cuts if self.memory.of(cut) <= self.max_shared]

    def bounded(self, columns: int) -> bool:
        """Return whether groups of so many columns have one GGUF type each."""
        return not any(begin % columns for begin in self.ends[:-1])

    def groups(self, cut: WorkSplit) -> int:
        """Return the number of groups of columns."""
        return ceil(self.ends[-1] / cut.columns)

    def row_blocks(self, cut: WorkSplit) -> int:
        """Return the number of blocks with the same columns, each with other rows of x."""
        return max(1, self.tiles) * ceil(self.M / cut.rows)

    def sharing(self, cut: WorkSplit) -> int:
        """Return the number of blocks with the same columns, each with a part of K."""
        return cut.shares if cut.together or self.memory.staged else self.memory.parts

    def turns(self, cut: WorkSplit) -> tuple[int, int]:
        """Return (blocks per multiprocessor, groups of columns that a block computes in turn)."""
        room_for = _blocks(cut, self.memory.of(cut), self.max_shared)
        most = max(1, _most(self.sms, room_for, self.sharing(cut)) // self.row_blocks(cut))
        count = ceil(self.groups(cut) / most)
        return room_for, min(count, TURNS) if self.tiles else count

    def duration(self, cut: WorkSplit) -> float:
        """Estimate the time of a warp: 5 to unpack weights, 1 to multiply 8 rows of x.

        The time is in µs if x is an operand.
        """
        room_for, count = self.turns(cut)
        parts, units, staged = self.memory.parts, self.memory.units, self.memory.staged
        if self.memory.copied:
            of_unit = COPYING_US * (3.6 + cut.rows / 8) * (1.8 + ceil(cut.warps / SCHEDULERS))
            return of_unit * count * parts * units / cut.shares + ADDING_US[cut.shares]
        exchange = (ADDING if staged else EXCHANGE) if self.sharing(cut) > 1 else 0
        work = count * room_for * (4 + cut.warps) * (5 + cut.rows / 8)
        if staged and not cut.together:  # a warp also stores terms of x
            stored = 3 * cut.rows / 8 / cut.warps
            work += count * room_for * (4 + cut.warps) * stored
            work *= STAGED_COST * parts / cut.shares
        return exchange + work

    def cuts(self, workspace: int) -> list[WorkSplit]:
        """Return the possible divisions. workspace: floats with which blocks can divide K."""
        parts, staged, norm = self.memory.parts, self.memory.staged, self.memory.norm
        if self.tiles:
            return self._joint()
        cuts = self._of_operand() if self.memory.copied else self._joint()
        if not (self.memory.copied or norm or [cut.rows for cut in cuts] == _halvings(self.M)[:1]):
            cuts += self._apart(least=1 if cuts else STAGED_WARPS)
        if staged and workspace >= COUNTERS + parts * self.M * self.ends[-1]:
            groups = {cut: self.groups(cut) * ceil(self.M / cut.rows) for cut in cuts}
            apart = [cut for cut in cuts if not cut.together and groups[cut] <= COUNTERS]
            cuts += [cut._replace(shares=n) for cut in apart for n in PARTS if parts % n == 0]
        return cuts

    def _joint(self) -> list[WorkSplit]:
        """Return divisions in which each warp multiplies another split of K."""
        few, parts = _halvings(min(self.M, JOINT_ROWS)), self.memory.parts
        cuts = self.fitting(WorkSplit(rows, parts, together=True) for rows in few)[:1]
        most = JOINT_ROWS * min(MAX_TILES, MAX_HELD // (HELD * self.memory.units))
        if most and self.holds and not self.memory.norm and [cut.rows for cut in cuts] != few[:1]:
            rows = _halvings(min(self.M, most))
            cuts += self.fitting(WorkSplit(n, parts, True, held=True) for n in rows)[:1]
        return cuts

    def _apart(self, least: int) -> list[WorkSplit]:
        """Return divisions in which all warps multiply the same splits of K.

        least: minimum rows of a block of STAGED_WARPS warps; more than M leave some rows empty.
        """
        warps = [n for n in WARPS if self.bounded(COLUMNS * n)]
        rows, staged = _halvings(min(self.M, MAX_ROWS)), self.memory.staged
        if staged:
            warps = [n for n in (STAGED_WARPS, 4, 2, 1) if n in warps][:1]
            rows = _halvings(min(max(self.M, min(least, *warps)), MAX_ROWS))
            rows = [n for n in rows if n * self.memory.terms**2 <= MAX_ROWS]
        apart = (WorkSplit(n, each, together=False) for n in rows for each in warps)
        return self.fitting(cut for cut in apart if cut.rows >= cut.warps or not staged)

    def _of_operand(self) -> list[WorkSplit]:
        """Return divisions for x that is an operand."""
        warps = [n for n in COPYING_WARPS if COLUMNS * n % self.multiple == 0]
        warps = [n for n in warps if self.bounded(COLUMNS * n)]
        possible = [n for n in COPYING_ROWS if n == min(COPYING_ROWS) or n < 2 * self.M]
        cuts = (WorkSplit(n, w, together=False) for n in possible for w in warps)
        return self.fitting(
            cut for cut in cuts if cut.rows <= WARP * cut.warps <= COPYING_THREADS[cut.rows]
        )


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
    tiles: int = 0,
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
    a norm, RoPE or `up`. tiles: with experts, the number of tiles of up to M rows each; else 0.
    """
    ends = tuple((1 + up) * end for end in accumulate(n for _, n in ranges))
    parts, units = splits(K)
    staged = not clusters or parts == 1  # a block that is not `together` multiplies all splits
    slot, multiple = max(slot_bytes(t) for t, _ in ranges), 2 * CHUNK if summed else COLUMNS
    memory = SharedMemory(parts, units, slot, norm, terms, staged, operand)
    p = BlocksProduct(M, ends, memory, holds, multiple, sms, max_shared, tiles)
    cuts = p.cuts(workspace) if p.bounded(rope or COLUMNS) else []
    if not cuts:
        return None
    cut = min(cuts, key=p.duration)
    blocks, count = p.turns(cut)
    if holds and blocks == 1 and cut.together:
        deeper = (cut._replace(flight=n) for n in range(MAX_FLIGHT, FLIGHT - 1, -1))
        cut = p.fitting(deeper)[0]
    apart = int(not cut.together)
    defines = (
        ("DECODE_K", K),
        *size_defines("DECODE", cut, "rows flight"),
        ("DECODE_BLOCKS", blocks),
        ("GGUF_TOGETHER", int(cut.together)),
        *nonzero_defines(
            GGUF_HELD=cut.held, DECODE_OPERAND=operand, OPERAND_WIDTH=IN_ORDER * operand,
            DECODE_WARPS=apart * cut.warps, GGUF_CLUSTER=apart * (1 if staged else parts),
            GGUF_PARTS=cut.shares * (cut.shares > 1),
        ),
    )  # fmt: skip
    grid = p.sharing(cut) * ceil(p.groups(cut) / count), p.row_blocks(cut)
    # The launch requests so much memory that no block of the next kernel starts next to these
    # blocks. Otherwise some multiprocessors would later run three blocks and others one. A decoding
    # step of a model with 7 billion weights takes 1.94 ms instead of 2.19 ms (H100).
    shared = shared_for_blocks(max_shared + STATIC, blocks, memory.of(cut))
    kernel = DIVIDED if cut.shares > 1 else KERNEL
    return Geometry(kernel, grid, (WARP * cut.warps,), shared, defines)


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
        return M == 1 and max_shared() <= 163 << 10
    return M <= MAX_NORMED and K <= UNIT * MAX_SPLITS


def reads_operand(K: int) -> bool:
    """Return whether products with K inputs can read x as an operand of one term."""
    return gpu().has_bf16 and K % UNIT == 0


def plan(p: Matmul) -> Geometry | Refusal:
    """Return the launch of the kernel for a product, or the reason to refuse."""
    operand, stored, holds = p.operand, p.to_operand, p.rounded and not gpu().has_wgmma
    refused = Refusal.first(
        (operand and not (holds and operand.for_blocks and reads_operand(p.K)),
         f"K {p.K:,}, terms of {operand}: expected a multiple of {UNIT}, rounded float16 in the "
         "order of wgmma, and a GPU from 8.0 without wgmma: pass floats"),
        (stored and not (operand and stored.for_blocks),
         f"terms of {stored}, x of {operand or 'floats'}: expected both in the order of wgmma"),
        (p.dtype != GGUF, "takes a GgufMatrix"),
        needs("has_mma"),
        (p.head % BORDER, f"heads of {p.head} channels: expected a multiple of {BORDER}"),
        same_types(p.blocks),
        (p.norm == RMSNORM and not normalizes(p.M, p.K),
         f"RMSNorm of {p.M:,} rows of {p.K:,}: expected fewer: use rmsnorm"),
    )  # fmt: skip
    return refused or geometry(
        p.M, p.K, p.blocks[0].ranges, norm=p.norm, up=p.up, rope=p.head, holds=holds,
        terms=1 if p.rounded else TERMS, clusters=gpu().has_clusters and not holds,
        operand=operand is not None, summed=p.summed,
        workspace=0 if p.norm or p.up else p.workspace, **limits(STATIC),
    ) or _too_long(p.K)  # fmt: skip


def _too_long(K: int) -> Refusal:
    return Refusal(
        f"K {K:,}: a split of a row does not fit in this GPU's shared memory: use a WeightMatrix"
    )


def launch(c: Call, epilogue: Epilogue) -> tuple[Launch, ...]:
    """Return the launches for x and w of a call, or raise UnsupportedCall.

    A call can have gamma and beta, the parameters of a norm of x, with eps; bias; up, the second
    matrix of a gated product; and workspace, floats that are 0 before and after each launch, for
    counters, and then for sums. c.rounded: whether x is rounded to one 16-bit term per value.
    """
    given, p = vars(c).get, Matmul.of(c)
    gamma, beta, bias, up, workspace = map(given, ("gamma", "beta", "bias", "up", "workspace"))
    launch_geometry, norm = accept(plan(p)), p.norm
    defines = nonzero_defines(DECODE_NORM=norm, DECODE_UP=p.up)
    defines += gate_define(c.gelu) if p.up else ()
    defines += nonzero_defines(DECODE_ROPE=p.head, DECODE_SUMS=epilogue.splits)
    defines += nonzero_defines(DECODE_OUT_OPERAND=bool(p.to_operand), OPERAND_SUMS=p.summed)
    defines += (*count_define(c.rounded), *range_defines(c.w))
    sums, before = sums_of(c) if p.operand else (None, ())
    if launch_geometry.kernel == DIVIDED:
        args = {"x": c.x, "w": c.w.data, "bias": bias, "workspace": workspace, "M": c.M, "N": c.N}
        args["sums"] = sums
        return (*before, epilogue.launch(FILE, launch_geometry, defines, args, c.w))
    matrices = {"w": c.w.data, "up": None if up is None else up.data}
    norms = {"gamma": gamma, "beta": beta, "eps": given("eps", 0.0)}
    args = {"x": c.x, **matrices, **norms, "bias": bias, "M": c.M, "N": c.N, "sums": sums}
    return (*before, epilogue.launch(FILE, launch_geometry, defines, args, c.w))


def plan_of_experts(
    blocks: Sequence[GgufMatrix], n_expert: int, T: int, most: int, *, rounded: bool
) -> Geometry | Refusal:
    """Return the launch for T tiles of up to `most` rows of an expert, or the reason to refuse.

    blocks: the matrix of all experts, or the two of a gated product. rounded: as in `Matmul`.
    """
    w, types = blocks[0], [name for name, _ in blocks[0].ranges]
    refused = Refusal.first(
        needs("has_mma"),
        same_types(blocks),
        (len(types) > 1, f"experts with types {', '.join(types)}: expected one type"),
        (w.N % (n_expert * BORDER), f"{w.N:,} outputs of {n_expert} experts: expected a multiple "
         f"of {BORDER} outputs for each"),
    )  # fmt: skip
    if refused:
        return Refusal(refused.reason + INSTEAD_OF_EXPERTS)
    found = geometry(
        most, w.K, ((types[0], w.N // n_expert),), up=len(blocks) > 1, tiles=T,
        terms=1 if rounded else TERMS, clusters=False, **limits(STATIC),
    ) or _too_long(w.K)  # fmt: skip
    if isinstance(found, Refusal):
        return found
    across, shares = found.grid
    planes = ceil(shares / MAX_BLOCKS)  # along the third axis of the grid
    axes = (ceil(shares / planes), planes) if planes > 1 else (shares,)
    return found._replace(kernel=OF_EXPERTS, grid=(across, *axes))


def launch_experts(c: Call, M: int, chosen: int) -> Launch:
    """Return the launch for x, w and tiles of a call, or raise UnsupportedCall.

    A call can have up, the second matrix of a gated product. M: rows of x. chosen: number of
    experts that a row of x uses, all different.
    """
    blocks, most = (c.w,) if c.up is None else (c.w, c.up), min(M, c.R - 1)
    found = accept(plan_of_experts(blocks, c.n_expert, c.T, most, rounded=c.rounded))
    c.check_addresses("x", "w", "up")
    defines = ("DECODE_EXPERTS", chosen), *count_define(c.rounded), *range_defines(c.w)
    if c.up is not None:
        defines += (("DECODE_UP", 1), *gate_define(c.gelu))
    args = {"x": c.x, "tiles": c.tiles, "w": c.w.data, "up": c.up and c.up.data}
    args |= {"out": c.output("out"), "N": c.w.N // c.n_expert, "T": c.T, "places": c.R - 1}
    return launch_at(FILE, found.with_defines(defines), args, "float32", GGUF)
