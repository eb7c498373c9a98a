"""The linear layer for few rows on tensor cores, matmul/decode/mma.cu: its geometry."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from gpt2block.cuda.kernels import FP8, TWO_PART, Geometry
from gpt2block.ops._rows import WARP, power_of_two

FILE = "matmul/decode/mma.cu"
UNIT = 128  # of K: splits have whole units
MOST_SPLITS = 8
HALF_SPLITS = 4  # with blocks of GGUF, whose sums are added to each other before the others are
OCTET = 8  # columns
LOADED = 16  # bytes of a row of W that a lane loads at once
MANY_COLUMNS = 16384  # from here on warps go through several groups of columns
LOOP_COLUMNS, LOOP_WARPS = 16, 12  # 50,257 columns are then two groups for each warp of an H200
LOOP_ROWS, LOOP_REGISTERS = 16, 96  # of x, and of weights in flight
FLOAT_LOOP_WARPS = 8  # the sums of many rows leave no registers for more
FEW_ROWS = 4  # of an mma
COLUMNS = (32, 24, 16, 8)  # of a block: whole octets, because an mma of fewer columns takes as long
MOST_FLIGHT = 3  # units of K in flight: more are too many instructions
ROOM_REGISTERS = 96  # of weights in flight: with so many, an SM has room for another block
MOST_UNITS = 8  # of a split, with which that holds
FEWEST_BLOCKS = 2, 3  # one for so many multiprocessors; of several rows or units, or float weights
FLOAT = 4  # bytes
BYTES = {"float32": 4, TWO_PART: 4, "float16": 2, "bfloat16": 2}  # of a weight; 1 with others
TERMS = 2  # of x, of 16 bits


class Limits(NamedTuple):
    """Of blocks that do not loop, measured on an H200."""

    rows: tuple[tuple[int, int], ...]  # up to so many, a block takes so many: more are faster
    most_rows: int
    columns: int
    nbytes: int  # of weights: more take long on one multiprocessor
    registers: int  # of weights in flight


NARROW = Limits(((8, 4), (64, 8)), 16, 32, 150_000, 144)
FLOATS = Limits(((8, FEW_ROWS),), 8, 16, 150_000, 192)


class MmaLayout(NamedTuple):
    """The partition of a product; results do not depend on it."""

    columns: int  # of a block, or of a warp if `loop`
    flight: int  # units of K in flight
    loop: bool  # warps process several groups of columns
    warps: int  # of a block
    blocks: int  # that an SM should have room for
    rows: int  # of a block


def splits(K: int) -> tuple[int, int]:
    """The splits of K, and the units of each, which determine the order of additions."""
    units = ceil(K / UNIT)
    each = ceil(units / MOST_SPLITS)
    return ceil(units / each), each


def layout(
    M: int, N: int, K: int, dtype: str, sms: int, columns: Sequence[int] = COLUMNS
) -> MmaLayout:
    """The layout for M rows on a GPU with `sms` multiprocessors; dtype: of the weights.

    columns: of a block, those that are possible, the last one always.
    """
    if N >= MANY_COLUMNS:
        return _loop(M, N, K, dtype, sms)
    return _block(M, N, K, dtype, sms, columns)


def _loop(M: int, N: int, K: int, dtype: str, sms: int) -> MmaLayout:
    """A layout for many columns."""
    weight = BYTES.get(dtype, 1)
    rows = power_of_two(min(M, LOOP_ROWS))
    units = [n for n in range(1, MOST_FLIGHT + 1) if ceil(K / UNIT) % n == 0]
    registers = LOOP_REGISTERS * 8 // (4 + max(rows, FEW_ROWS))  # rows have sums in others
    flight = _flight(units, LOOP_COLUMNS, weight, registers)
    crowded = weight == FLOAT and 2 * rows >= LOOP_ROWS
    return MmaLayout(
        LOOP_COLUMNS, flight, True, FLOAT_LOOP_WARPS if crowded else LOOP_WARPS, 1, rows
    )


def _block(M: int, N: int, K: int, dtype: str, sms: int, possible: Sequence[int]) -> MmaLayout:
    """A layout in which a block has some columns.

    Two blocks of 4 rows are faster than one of 8, and so on, although they read the weights twice:
    loading x and its LayerNorm takes longer than the second read, from L2.
    """
    weight = BYTES.get(dtype, 1)
    floats = weight == FLOAT  # or two-part
    limits = FLOATS if floats else NARROW
    rows = next((rows for up_to, rows in limits.rows if up_to >= M), limits.most_rows)
    rows = min(rows, power_of_two(M))
    of_rows = ceil(M / rows)  # blocks
    parts, each = splits(K)
    fewest = sms / FEWEST_BLOCKS[floats or each > 1 or of_rows > 1]
    fitting = [c for c in possible if c <= limits.columns and c * K * weight <= limits.nbytes]
    columns = next((c for c in fitting if of_rows * ceil(N / c) >= fewest), possible[-1])
    most = MOST_FLIGHT - (dtype == TWO_PART and rows > 2)
    units = list(range(1, min(each, most) + 1)) if rows <= FEW_ROWS or not floats else [1]
    flight = _flight(units, columns, weight, limits.registers)
    once = flight == each or (dtype == TWO_PART and flight < MOST_FLIGHT)
    room = floats and each <= MOST_UNITS and _room(columns, flight, rows, once)
    return MmaLayout(columns, flight, False, parts, 1 + room, rows)


def _room(columns: int, flight: int, rows: int, once: bool) -> bool:
    """Whether an SM has registers for two blocks of 4 bytes a weight, one of the next kernel.

    once: no unit is loaded after another, which takes registers, or there are enough of them.
    """
    if rows > FEW_ROWS:
        return columns == OCTET and flight == 1
    return once and flight * _unit_registers(columns, FLOAT) <= ROOM_REGISTERS


def _flight(units: list[int], columns: int, weight: int, registers: int) -> int:
    """The most units in flight that fit in so many registers of a lane, at least one."""
    unit = _unit_registers(columns, weight)
    return max(n for n in units if n == 1 or n * unit <= registers)


def _unit_registers(columns: int, weight: int) -> int:
    """The registers of a lane for a unit of so many columns."""
    return columns * UNIT * weight // (WARP * 4)


@lru_cache(maxsize=1024)
def geometry(
    kernel: str,
    M: int,
    N: int,
    K: int,
    dtype: str,
    *,
    norm: int = 0,
    sms: int = 132,
    most_shared: int = 232_448,
    terms: bool = False,
    columns: Sequence[int] = COLUMNS,
    cut: MmaLayout | None = None,
) -> Geometry | None:
    """The launch of a kernel; None when a row does not fit in `most_shared` bytes.

    dtype: of the weights. norm: of x, 0 none, 1 LayerNorm, 2 RMSNorm. terms: x has terms in the
    place of floats. columns: as for `layout`. cut: a layout instead of the one of `layout`.
    """
    cut = cut or layout(M, N, K, dtype, sms, columns)
    while (shared := shared_bytes(cut, K, dtype, norm)) > most_shared:
        if cut.rows == 1:
            return None
        cut = cut._replace(rows=cut.rows // 2)
    defines = (
        ("LM_K", K),
        ("LM_NORM", int(norm)),
        ("LM_ROWS", cut.rows),
        ("LM_COLUMNS", cut.columns),
        ("LM_FLIGHT", cut.flight),
        ("LM_LOOP", int(cut.loop)),
        ("LM_WARPS", cut.warps),
        ("LM_BLOCKS", cut.blocks),
        *((("LM_TERMS", 1),) if terms else ()),
    )
    blocks = ceil(N / (cut.columns * (cut.warps if cut.loop else 1)))
    grid = (min(blocks, sms * cut.blocks) if cut.loop else blocks, ceil(M / cut.rows))
    return Geometry(kernel, grid, (WARP * cut.warps,), shared, defines)


def shared_bytes(cut: MmaLayout, K: int, dtype: str, norm: int) -> int:
    """Bytes of shared memory of matmul/decode/mma.cu: rows of x, their statistics, splits' sums."""
    parts, each = splits(K)
    padding = 16 if dtype in FP8 else 64
    term = 2 * each * UNIT + padding
    split = FLOAT * each * UNIT if dtype == "float32" else TERMS * term
    row = ceil(parts * split / 128) * 128 + padding
    sums = 0 if cut.loop else FLOAT * parts * cut.rows * cut.columns
    return cut.rows * (row + (0, 8, FLOAT * parts)[norm]) + sums
