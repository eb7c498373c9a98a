"""Common code of row kernels: limits, and the number of threads that share a row in registers."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from gpt2block.cuda.arrays import CudaArray
from gpt2block.errors import InputError

MAX_ROWS = 2**31 - 1  # the most blocks of a grid
MAX_VALUES = 2**30  # of a row
WARP = 32
VALUES = 32  # that a thread keeps in registers
THREADS = 512  # that can share a row
LONGEST_IN_REGISTERS = VALUES * THREADS
FEW_THREADS = 256  # more share it only where the row does not fit otherwise
FILLED = 1024  # threads on an SM that keep its memory busy
BLOCK = 128  # where a row has one warp or a part of one


def power_of_two(n: int) -> int:
    """The smallest power of two that is n or more."""
    return 1 << (n - 1).bit_length()


class RowShape(NamedTuple):
    """A launch of a kernel that keeps its rows in registers."""

    threads: int  # that share a row
    held: int  # loads a thread keeps
    rows: int  # a block takes
    grid: int

    @property
    def block(self) -> int:
        return self.threads * self.rows


def check_rows(name: str, x: CudaArray, longest: int = MAX_VALUES) -> int:
    """The number of rows of x (..., n); InputError where a kernel cannot count them or n."""
    rows = int(x.size) // int(x.shape[-1])
    if rows > MAX_ROWS or x.shape[-1] > longest:
        raise InputError(
            f"{name}: expected at most {MAX_ROWS:,} rows of {longest:,} values, got {x.shape}"
        )
    return rows


@lru_cache(maxsize=1024)
def share(rows: int, n: int, width: int, sms: int, block: int | None = None) -> RowShape:
    """The shape for `rows` of `n` values, `width` a load, on a GPU with `sms` multiprocessors.

    Few rows get a thread for every load, so that all loads are in flight at once; many rows get a
    warp each, which needs no barrier. `block` sets the threads of a row, one row a block.
    Raises InputError when a row does not fit in the registers of its threads.
    """
    loads, most = n // width, VALUES // width
    threads = block or _threads(loads, most, FILLED * sms // rows)
    held = ceil(loads / threads)
    if held > most:
        todo = "use a larger block" if threads < THREADS else "use another variant"
        raise InputError(
            f"rows of {n:,} values: the registers of {threads} threads hold "
            f"{threads * VALUES:,}: {todo}"
        )
    together = BLOCK // threads if threads <= WARP and block is None else 1
    return RowShape(threads, held, together, ceil(rows / together))


def _threads(loads: int, most: int, wanted: int) -> int:
    """About `wanted` threads per row, with as few as possible idle."""
    if loads < WARP:
        return power_of_two(loads)
    fewest = min(most, ceil(loads / max(1, min(wanted, FEW_THREADS))))
    choices = range(fewest, min(most, 2 * fewest) + 1)  # loads a thread
    warps = {held: ceil(ceil(loads / held) / WARP) for held in choices}
    held = min(choices, key=lambda held: (warps[held] * held, held))
    return min(THREADS, warps[held] * WARP)
