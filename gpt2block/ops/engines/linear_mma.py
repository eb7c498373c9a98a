"""Layouts and launch geometry of matmul/decode/mma.cu, a linear layer on tensor cores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from gpt2block.cuda.cards import gpu
from gpt2block.cuda.formats import GGUF
from gpt2block.cuda.kernels import FP8, HI_LO, Geometry, nonzero_defines, size_defines
from gpt2block.ops.call import Refusal, needs
from gpt2block.ops.engines.rows import WARP, power_of_two
from gpt2block.ops.operands import head_multiple, ordered
from gpt2block.ops.products import Matmul, limits

FILE, KERNEL = "matmul/decode/mma.cu", "decode_mma"
UNIT = 128  # values of K per unit; a split (a range of K, summed separately) is 1 or more units
MAX_SPLITS = 8  # maximum splits of K
RMSNORM = 2  # value of the macro DECODE_NORM for kernels that compute RMSNorm of x
MAX_NORMED = UNIT * MAX_SPLITS  # maximum channels of x whose RMSNorm a product fuses
HALF_SPLITS = 4  # with GGUF blocks, splits 0 to 3 and the other splits are added separately
ROW_GROUP = 8  # columns of the product (rows of w) per row group
LOADED = 16  # bytes of a row of w per load of a lane
MANY_COLUMNS = 16384  # minimum outputs N for which warps loop over groups of columns
# Layout if warps loop over groups of columns. With 50,257 columns, a warp of an H200 has 2 groups.
LOOP_COLUMNS, LOOP_WARPS = 16, 12
LOOP_ROWS, LOOP_REGISTERS = 16, 96  # rows of x per block; registers per lane for weights in flight
FLOAT_LOOP_WARPS = 8  # warps per block with 4-byte weights and many rows, whose sums need registers
ROWS_PER_MMA = 4  # rows of x per mma
COLUMNS = (32, 24, 16, 8)  # possible columns per block; an mma instruction computes 8 columns
PAIRED_COLUMNS = (32, 16)  # possible columns per block, half of them of each of two matrices
MAX_FLIGHT = 3  # maximum units of K in flight per lane; more need too many instructions
ROOM_REGISTERS = 96  # maximum registers per lane for weights in flight with two blocks per SM
MAX_UNITS = 8  # maximum units per split with two blocks per SM
# The grid has at least one block for 2 multiprocessors, or one for 3 if weights have 4 bytes,
# splits have several units of K, or there are several blocks along M.
MIN_BLOCKS = 2, 3
# Without overlapping launches, no other kernel loads weights on the other multiprocessors: the grid
# has at least one block for so many.
MIN_BLOCKS_ALONE = 1.4
MORE_ROWS = 16  # maximum rows with fused LayerNorm; for more, mma_tiles can be faster than mma
# Maximum rows for which this kernel is faster than mma_tiles.cu without asynchronous copies.
ROWS_WITHOUT_COPIES = 64
FLOAT = 4  # bytes per float32
BYTES = {"float32": 4, HI_LO: 4, "float16": 2, "bfloat16": 2}  # bytes per weight; 1 for others
TERMS = 2  # 16-bit terms per value of x
TERM_DTYPES = ("float16", "bfloat16", *FP8)  # dtypes of weights whose values are one 16-bit term
STATIC = 1024  # maximum bytes of static shared memory per block
MAX_BLOCKS = 65535  # maximum blocks along the second axis of a grid
FLOATS_ALONE = "takes and gives floats: use variant mma_tiles for terms, or wgmma"
ONE_MATRIX = "takes one matrix: use variant wgmma"


class Limits(NamedTuple):
    """Limits of blocks that do not loop over columns, measured on an H200."""

    rows: tuple[tuple[int, int], ...]  # pairs: maximum M, and the fastest rows of x per block
    max_rows: int  # rows of x per block for larger M
    columns: int  # maximum columns per block
    nbytes: int  # maximum bytes of weights per block; more would take one multiprocessor too long
    registers: int  # maximum registers per lane for weights in flight


NARROW = Limits(((8, 4), (64, 8)), 16, 32, 150_000, 144)
FLOATS = Limits(((8, ROWS_PER_MMA),), 8, 16, 150_000, 192)


class MmaLayout(NamedTuple):
    """Partition of a product among blocks and warps. Results do not depend on the partition."""

    columns: int  # columns of the product (rows of w) per block, or per warp if `loop`
    flight: int  # units of 128 values of K in flight per lane
    loop: bool  # whether warps loop over groups of columns
    warps: int  # warps per block
    blocks: int  # minimum blocks per multiprocessor (__launch_bounds__)
    rows: int  # rows of x per block


def splits(K: int) -> tuple[int, int]:
    """Return (splits of K, units of 128 per split), which determine the order of additions."""
    units = ceil(K / UNIT)
    each = ceil(units / MAX_SPLITS)
    return ceil(units / each), each


def layout(
    M: int,
    N: int,
    K: int,
    dtype: str,
    sms: int,
    columns: Sequence[int] = COLUMNS,
    overlaps: bool = True,
    row_blocks: int = 0,
) -> MmaLayout:
    """Return the layout for x (M, K) on a GPU with `sms` multiprocessors.

    dtype: dtype of the weights. columns: possible columns per block, in descending order; the
    last number is used if no other fits. Only COLUMNS permits warps that loop over groups of them.
    overlaps: whether launches overlap. row_blocks: number of blocks with the same columns, which do
    not loop over groups of them; 0: as many blocks as M rows need.
    """
    if N >= MANY_COLUMNS and columns == COLUMNS and not row_blocks:
        return _loop(M, N, K, dtype, sms)
    return _block(M, N, K, dtype, sms, columns, overlaps, row_blocks)


def _loop(M: int, N: int, K: int, dtype: str, sms: int) -> MmaLayout:
    """Return a layout for MANY_COLUMNS outputs or more, in which warps loop over columns."""
    weight = BYTES.get(dtype, 1)
    rows = power_of_two(min(M, LOOP_ROWS))
    units = [n for n in range(1, MAX_FLIGHT + 1) if ceil(K / UNIT) % n == 0]
    # sums of the rows take registers
    registers = LOOP_REGISTERS * 8 // (4 + max(rows, ROWS_PER_MMA))
    flight = _flight(units, LOOP_COLUMNS, weight, registers)
    crowded = weight == FLOAT and 2 * rows >= LOOP_ROWS
    return MmaLayout(
        LOOP_COLUMNS, flight, True, FLOAT_LOOP_WARPS if crowded else LOOP_WARPS, 1, rows
    )


def _block(
    M: int,
    N: int,
    K: int,
    dtype: str,
    sms: int,
    possible: Sequence[int],
    overlaps: bool,
    row_blocks: int,
) -> MmaLayout:
    """Return a layout for fewer outputs, in which each block computes one group of columns.

    Two blocks of 4 rows are faster than one block of 8 rows, although each of them reads the
    weights: 8 rows of x and their LayerNorm take longer than reading the weights again from L2.
    """
    weight = BYTES.get(dtype, 1)
    floats = weight == FLOAT  # float32 or hi/lo weights
    limits = FLOATS if floats else NARROW
    rows = next((rows for up_to, rows in limits.rows if up_to >= M), limits.max_rows)
    rows = min(rows, power_of_two(M))
    row_blocks = row_blocks or ceil(M / rows)
    parts, each = splits(K)
    share = MIN_BLOCKS[floats or each > 1 or row_blocks > 1] if overlaps else MIN_BLOCKS_ALONE
    fewest = sms / share
    fitting = [c for c in possible if c <= limits.columns and c * K * weight <= limits.nbytes]
    columns = next((c for c in fitting if row_blocks * ceil(N / c) >= fewest), possible[-1])
    most = MAX_FLIGHT - (dtype == HI_LO and rows > 2)
    units = list(range(1, min(each, most) + 1)) if rows <= ROWS_PER_MMA or not floats else [1]
    flight = _flight(units, columns, weight, limits.registers)
    once = flight == each or (dtype == HI_LO and flight < MAX_FLIGHT)
    room = floats and each <= MAX_UNITS and _room(columns, flight, rows, once)
    return MmaLayout(columns, flight, False, parts, 1 + room, rows)


def _room(columns: int, flight: int, rows: int, once: bool) -> bool:
    """Return whether the registers of an SM suffice for two blocks, if weights have 4 bytes.

    The second block belongs to the next kernel. once: whether all units of a split are in flight at
    once, or enough registers remain to load the other units later.
    """
    if rows > ROWS_PER_MMA:
        return columns == ROW_GROUP and flight == 1
    return once and flight * _unit_registers(columns, FLOAT) <= ROOM_REGISTERS


def _flight(units: list[int], columns: int, weight: int, registers: int) -> int:
    """Return the largest number in `units` of units of K whose weights fit in `registers`."""
    unit = _unit_registers(columns, weight)
    return max(n for n in units if n == 1 or n * unit <= registers)


def _unit_registers(columns: int, weight: int) -> int:
    """Return the registers per lane for the weights of `columns` columns and 128 values of K."""
    return columns * UNIT * weight // (WARP * 4)


@lru_cache(maxsize=1024)
def geometry(
    M: int,
    N: int,
    K: int,
    dtype: str,
    *,
    norm: int = 0,
    sms: int = 132,
    max_shared: int = 232_448,
    operand: bool = False,
    columns: Sequence[int] = COLUMNS,
    overlaps: bool = True,
    rows_first: bool = False,
    cut: MmaLayout | None = None,
) -> Geometry | None:
    """Return the launch of the kernel, or None if a row of x does not fit in `max_shared` bytes.

    dtype: dtype of the weights. norm: norm of x, 0 none, 1 LayerNorm, 2 RMSNorm. operand: whether x
    is stored as 16-bit terms. columns, overlaps: as for `layout`. rows_first: whether
    neighbouring blocks have the same columns, so that the L2 cache needs to hold few weights. cut:
    the layout to use; by default, the result of `layout`.
    """
    cut = cut or layout(M, N, K, dtype, sms, columns, overlaps)
    while (shared := shared_bytes(cut, K, dtype, norm)) > max_shared:
        if cut.rows == 1:
            return None
        cut = cut._replace(rows=cut.rows // 2)
    defines = (
        ("DECODE_K", K),
        ("DECODE_NORM", int(norm)),
        *size_defines("DECODE", cut, "rows columns flight loop warps blocks"),
        *nonzero_defines(DECODE_OPERAND=operand),
    )
    blocks = ceil(N / (cut.columns * (cut.warps if cut.loop else 1)))
    columns_and_rows = min(blocks, sms * cut.blocks) if cut.loop else blocks, ceil(M / cut.rows)
    if rows_first and not cut.loop:
        defines += (("DECODE_ROWS_FIRST", 1),)
        columns_and_rows = columns_and_rows[::-1]
    return Geometry(KERNEL, columns_and_rows, (WARP * cut.warps,), shared, defines)


def itemsize_of(dtype: str) -> int:
    """Return the bytes per weight of this dtype, or per half of a hi/lo weight."""
    return 2 if dtype == HI_LO else BYTES.get(dtype, 1)


def refusal(dtype: str, K: int, instead: str = "") -> Refusal | None:
    """Return a refusal if tensor-core kernels of decoding do not support weights or the GPU.

    The weights have K inputs, and no GGUF blocks. instead: advice.
    """
    multiple = LOADED // itemsize_of(dtype)
    return Refusal.first(
        (dtype == GGUF, "takes no GgufMatrix: use variant tiles"),
        needs("has_bf16" if dtype == "float32" else "has_mma", instead),
        (K % multiple, f"K {K:,}: expected a multiple of {multiple} for {dtype}{instead}"),
    )


def columns_of(geometry: Geometry) -> int:
    """Return the columns per block of a launch geometry."""
    return int(dict(geometry.defines)["DECODE_COLUMNS"])


def fit(geometry: Geometry | None, p: Matmul) -> Geometry | Refusal:
    """Return a geometry for few rows, or a refusal if the rows are too long, or too many."""
    if geometry is None:
        return Refusal(
            f"K {p.K:,}: a row does not fit in the {limits(STATIC)['max_shared']:,} bytes of "
            "this GPU's shared memory: variant tiles has no such limit"
        )
    too_many = f"{p.M:,} rows: too many for this variant: use variant tiles"
    return Refusal.first((geometry.grid[1] > MAX_BLOCKS, too_many)) or geometry


def plan(p: Matmul) -> Geometry | Refusal:
    """Return the launch of the kernel for a product, or the reason to refuse."""
    multiple = head_multiple(p.operand)
    columns, card, many = PAIRED_COLUMNS if p.up else COLUMNS, gpu(), p.outputs >= MANY_COLUMNS
    refused = Refusal.first(
        (p.to_operand, FLOATS_ALONE),
        (p.head and (p.head % multiple or many),
         f"heads of {p.head} channels, {p.N:,} outputs: expected a multiple of {multiple}, and "
         f"less than {MANY_COLUMNS:,} outputs: use linear and rope_append"),
        refusal(p.dtype, p.K, ": use variant matvec"),
        (ordered(p.operand), FLOATS_ALONE),
        (p.up and p.residual, ONE_MATRIX),
        (p.norm == RMSNORM and (p.K > MAX_NORMED or many),
         f"gamma without beta, K {p.K:,}, {p.outputs:,} outputs: expected up to {MAX_NORMED:,} "
         f"inputs and less than {MANY_COLUMNS:,} outputs: use rmsnorm before it"),
    )  # fmt: skip
    return refused or fit(geometry(
        p.M, p.outputs, p.K, p.dtype, norm=p.norm, operand=p.operand is not None, columns=columns,
        overlaps=card.has_overlap, rows_first=not card.has_bf16, **limits(STATIC),
    ), p)  # fmt: skip


def most_rows() -> int:
    """Return the maximum rows for which variant mma, which reads floats, is preferred."""
    return MORE_ROWS if gpu().has_bf16 else ROWS_WITHOUT_COPIES


def shared_bytes(cut: MmaLayout, K: int, dtype: str, norm: int) -> int:
    """Return the bytes of shared memory per block: rows of x, statistics of norms, split sums."""
    parts, each = splits(K)
    padding = 16 if dtype in FP8 else 64
    term = 2 * each * UNIT + padding
    split = FLOAT * each * UNIT if dtype == "float32" else TERMS * term
    row = ceil(parts * split / 128) * 128 + padding
    sums = 0 if cut.loop else FLOAT * parts * cut.rows * cut.columns
    return cut.rows * (row + (0, 8, FLOAT * parts)[norm]) + sums
