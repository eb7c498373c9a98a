"""Common code of kernels that process rows: limits, and the number of threads per row."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from gpt2block.cuda.arrays import CudaArray
from gpt2block.errors import InputError

MAX_ROWS = 2**31 - 1  # maximum rows per launch, with one block per row
MAX_VALUES = 2**30  # maximum values per row
WARP = 32
VALUES = 32  # maximum values of a row that a thread keeps in registers
THREADS = 512  # maximum threads per row
ROW_BLOCKS = (32, 64, 128, 256, 512)  # block sizes that set the threads per row
LONGEST_IN_REGISTERS = VALUES * THREADS
MAX_REGISTER_THREADS = 256  # maximum threads per row if their registers can hold the row
FILLED = 1024  # threads per SM that suffice to saturate memory bandwidth
BLOCK = 128  # threads per block if a row has at most one warp


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


class RowShape(NamedTuple):
    """Launch sizes of a kernel that keeps its rows in registers."""

    threads: int  # threads per row
    held: int  # loads per thread and row; registers keep the loaded values
    rows: int  # rows per block
    grid: int

    @property
    def block(self) -> int:
        return self.threads * self.rows


def check_rows(name: str, x: CudaArray, longest: int = MAX_VALUES) -> int:
    """Return the number of rows of x (..., n). Raises InputError for too many rows or a large n."""
    rows = int(x.size) // int(x.shape[-1])
    if rows > MAX_ROWS or x.shape[-1] > longest:
        raise InputError(
            f"{name}: expected at most {MAX_ROWS:,} rows of {longest:,} values, got {x.shape}"
        )
    return rows


@lru_cache(maxsize=1024)
def share(rows: int, n: int, width: int, sms: int, block: int | None = None) -> RowShape:
    """Return the launch sizes for `rows` rows of `n` values on a GPU with `sms` multiprocessors.

    width: values per load. Few rows get one thread per load, so that all loads are in flight at
    once; many rows get one warp each, which needs no barrier. block: threads per row, with one row
    per block; None chooses. Raises InputError if a row does not fit in its threads' registers.
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
    """Return a number of threads per row near `wanted` with which few threads are idle."""
    if loads < WARP:
        return power_of_two(loads)
    fewest = min(most, ceil(loads / max(1, min(wanted, MAX_REGISTER_THREADS))))
    choices = range(fewest, min(most, 2 * fewest) + 1)  # loads per thread
    warps = {held: ceil(ceil(loads / held) / WARP) for held in choices}
    held = min(choices, key=lambda held: (warps[held] * held, held))
    return min(THREADS, warps[held] * WARP)
