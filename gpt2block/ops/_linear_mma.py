"""The linear layer for few rows on tensor cores, matmul/decode_mma.cu: its geometry."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from gpt2block.cuda.kernels import Geometry

FILE = "matmul/decode_mma.cu"
WARP = 32
UNIT = 128  # of K: splits have whole units
MOST_SPLITS = 8
OCTET = 8  # columns
LOADED = 16  # bytes of a row of W that a lane loads at once
MANY_COLUMNS = 16384  # from here on warps go through several groups of columns
MOST_ROWS = 16  # of x that a block takes
FEWEST_COLUMNS, MOST_COLUMNS = 4, 24  # of a block
MOST_REGISTERS = 96  # of weights in flight
MOST_FLIGHT = 3  # units of K in flight: more are too many instructions
FLOAT = 4  # bytes
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}  # of a weight; 1 with FP8
TERMS = {"float32": 2, "bfloat16": 3}  # of 16 bits, of x in shared memory; the others 2


class Layout(NamedTuple):
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


def layout(M: int, N: int, K: int, dtype: str, sms: int) -> Layout:
    """The layout for M rows on a GPU with `sms` multiprocessors; dtype: of the weights."""
    rows = min(MOST_ROWS, 1 << (M - 1).bit_length())
    parts, each = splits(K)
    weight = BYTES.get(dtype, 1)
    if N >= MANY_COLUMNS:
        columns, units = 2 * OCTET, ceil(K / UNIT)
        some = (n for n in range(1, MOST_FLIGHT + 1) if units % n == 0)
        flight = max(n for n in some if n == 1 or _fits(columns, n, weight))
        return Layout(columns, flight, True, 12, 1, rows)
    waves = ceil(N / (sms * MOST_COLUMNS))
    columns = max(FEWEST_COLUMNS, ceil(N / (sms * waves)))
    some = range(1, min(each, MOST_FLIGHT) + 1)
    flight = max(n for n in some if n == 1 or _fits(columns, n, weight))
    blocks = 2 if weight == FLOAT and rows < MOST_ROWS else 1
    return Layout(columns, flight, False, parts, blocks, rows)


def _fits(columns: int, flight: int, weight: int) -> bool:
    """Whether that many units in flight fit in a lane's registers."""
    octets = ceil(columns / OCTET)
    return flight * octets * UNIT * weight * OCTET // (WARP * 4) <= MOST_REGISTERS


@lru_cache(maxsize=1024)
def geometry(
    kernel: str,
    M: int,
    N: int,
    K: int,
    dtype: str,
    *,
    norm: bool = False,
    sms: int = 132,
    most_shared: int = 232_448,
    cut: Layout | None = None,
) -> Geometry | None:
    """The launch of a kernel; None when a row does not fit in `most_shared` bytes.

    dtype: of the weights. cut: a layout instead of the one that `layout` chooses.
    """
    cut = cut or layout(M, N, K, dtype, sms)
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
    )
    blocks = ceil(N / (cut.columns * (cut.warps if cut.loop else 1)))
    grid = (min(blocks, sms * cut.blocks) if cut.loop else blocks, ceil(M / cut.rows))
    return Geometry(kernel, grid, (WARP * cut.warps,), shared, defines)


def shared_bytes(cut: Layout, K: int, dtype: str, norm: bool) -> int:
    """Bytes of shared memory of matmul/decode_mma.cu: rows of x, their statistics, splits' sums."""
    parts, each = splits(K)
    row = 2 * TERMS.get(dtype, 2) * parts * each * UNIT + (64 if dtype in BYTES else 16)
    sums = 0 if cut.loop else FLOAT * parts * cut.rows * cut.columns
    return cut.rows * (row + 8 * norm) + sums
