"""The linear layer for few rows, matmul/decode/cores.cu: its layouts and its geometry."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, gcd
from typing import NamedTuple

from gpt2block.cuda.kernels import Geometry
from gpt2block.ops._rows import WARP, power_of_two

FILE = "matmul/decode/cores.cu"
MANY_COLUMNS = 16384  # from here on a block goes through several groups of columns
PART = 256  # of K, a warp's
MOST_STEPS = 3  # loads of a column in flight
MOST_WARPS = 12  # that share K
PREFERRED_WARPS = (6, 12), (12, 18)  # of a block, fewest and most: for few rows, for more
MORE_ROWS = 4
MOST_ROWS = 8, 16  # of x that a block takes; with MANY_COLUMNS
MOST_LOADED = 12  # vectors that a thread waits for
HELD = 32  # values of a row alone that a thread can keep in registers
ROW_BYTES = 103_000  # of x in shared memory, with several rows
COLUMNS = (1, 2, 3, 4, 5, 6)  # that a group can have
BEST_COLUMNS = 6
FEWEST = 4, 12  # columns of a block: fewer are done no sooner; for few rows, for more
EACH_BLOCK = 4  # columns that take as long as loading x into a block


class MatvecLayout(NamedTuple):
    """The partition of a product. Results depend only on the first three fields."""

    width: int  # weights of a load
    split: int  # warps that share K
    steps: int  # loads of a column in flight
    columns: int  # of a group
    groups: int  # of a block
    loop: bool  # blocks process several groups of columns
    blocks: int  # that an SM should have room for
    rows: int  # of a block


def order(N: int, K: int, weight: int) -> tuple[int, int, int]:
    """Width, split and steps of a Layout, which determine the order of an output's additions.

    weight: bytes of a weight.
    """
    width = 16 // weight
    while K % width:
        width //= 2
    if weight == 1 and width > 1 and K % (WARP * width) and not K % (WARP * width // 2):
        width //= 2  # every lane has as many loads as any other
    split = 1
    if N < MANY_COLUMNS:
        parts = ceil(K / PART)
        split = ceil(parts / ceil(parts / MOST_WARPS))
        split = min(split, ceil(K / (WARP * width)))
    units = ceil(K / (WARP * width * split))  # loads of a column in all, by each thread
    return width, split, ceil(units / ceil(units / MOST_STEPS))


def layout(M: int, N: int, K: int, weight: int, sms: int) -> MatvecLayout:
    """The layout for M rows on a GPU with `sms` multiprocessors."""
    width, split, steps = order(N, K, weight)
    rows = min(MOST_ROWS[N >= MANY_COLUMNS], power_of_two(M))
    while rows > 1 and 4 * rows * K > ROW_BYTES:
        rows //= 2
    if N >= MANY_COLUMNS:
        blocks = 2 if rows <= 4 else 1
        columns, groups = 4, 8 if blocks == 2 else 12
    else:
        columns, groups = _columns(N, split, steps, rows, sms)
        blocks = 1
    return MatvecLayout(width, split, steps, columns, groups, N >= MANY_COLUMNS, blocks, rows)


def _columns(N: int, split: int, steps: int, rows: int, sms: int) -> tuple[int, int]:
    """Columns of a group and groups of a block, such that all multiprocessors have as many."""
    more = rows >= MORE_ROWS
    fewest, most = PREFERRED_WARPS[more]

    def cost(candidate: tuple[int, int]) -> tuple[int, int, int]:
        columns, groups = candidate
        block, warps = columns * groups, groups * split
        busiest = ceil(ceil(N / block) / sms) * (max(block, FEWEST[more]) + EACH_BLOCK)
        odd = max(0, fewest - warps) + max(0, warps - most)
        cost = (odd, busiest) if more else (busiest, odd)
        return *cost, abs(columns - BEST_COLUMNS)

    candidates = [
        (columns, groups)
        for columns in COLUMNS
        if columns * steps <= MOST_LOADED
        for groups in range(1, max(1, most // split) + 1)
    ]
    return min(candidates, key=cost)


@lru_cache(maxsize=1024)
def geometry(
    kernel: str,
    M: int,
    N: int,
    K: int,
    weight: int,
    *,
    norm: bool = False,
    sms: int = 132,
    most_shared: int = 232_448,
    cut: MatvecLayout | None = None,
) -> Geometry | None:
    """The launch of a kernel; None when a row does not fit in `most_shared` bytes.

    weight: bytes of one. cut: a layout instead of the one that `layout` chooses.
    """
    cut = cut or layout(M, N, K, weight, sms)
    while (shared := 4 * shared_floats(cut, K, norm)) > most_shared:
        if cut.rows == 1:
            return None
        cut = cut._replace(rows=cut.rows // 2)
    defines = (
        ("LM_K", K),
        ("LM_NORM", int(norm)),
        ("LM_ROWS", cut.rows),
        ("LM_WIDTH", cut.width),
        ("LM_SPLIT", cut.split),
        ("LM_COLUMNS", cut.columns),
        ("LM_GROUPS", cut.groups),
        ("LM_STEPS", cut.steps),
        ("LM_LOOP", int(cut.loop)),
        ("LM_BLOCKS", cut.blocks),
        ("LM_X", gcd(4, K)),
    )
    blocks = ceil(N / (cut.columns * cut.groups))
    grid = (min(blocks, sms * cut.blocks) if cut.loop else blocks, ceil(M / cut.rows))
    return Geometry(kernel, grid, (WARP * cut.groups * cut.split,), shared, defines)


def shared_floats(cut: MatvecLayout, K: int, norm: bool) -> int:
    """Bytes of shared memory of matmul/decode/cores.cu: rows of x, gamma and beta, warps' sums."""
    chunk = WARP * cut.width * cut.split * cut.steps
    padded = chunk * ceil(K / chunk)
    held = cut.rows == 1 and padded <= HELD * WARP * cut.split
    rows = 0 if held and not norm else cut.rows + 2 * norm
    return rows * padded + cut.split * cut.rows * cut.groups * cut.columns
