"""Counters of a launch by line of the source, as cpp/counters.h counts them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt2block.emulator.ptx.parse import Place


class Line(NamedTuple):
    """A line of a source. file: as the compiler was told."""

    file: str
    number: int


class Counts(NamedTuple):
    """Counters of a line or of a kernel.

    A request is a warp instruction that accesses memory; a sector is 32 bytes of global memory.
    bank_conflicts: turns of shared memory beyond the first of each pass, which serves 32, 16 or 8
    lanes for accesses of up to 4, 8 and 16 bytes. Loads of global memory include asynchronous
    copies, but no atomic operations. branches: conditional ones; in a uniform one, all lanes take
    the same way.
    """

    instructions: int = 0
    load_requests: int = 0
    load_sectors: int = 0
    load_bytes: int = 0
    store_requests: int = 0
    store_sectors: int = 0
    store_bytes: int = 0
    copied_bytes: int = 0
    atomics: int = 0
    shared_requests: int = 0
    bank_conflicts: int = 0
    local_bytes: int = 0
    shuffles: int = 0
    barriers: int = 0
    branches: int = 0
    uniform_branches: int = 0


def total(lines: Iterable[Counts]) -> Counts:
    """Return the sums of the counters of lines."""
    return Counts(*map(sum, zip(Counts(), *lines, strict=True)))


# Nsight Compute's names of the counters that have the same meaning and value there.
METRICS = {
    "load_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld",
    "load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld",
    "store_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_st",
    "store_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st",
    "bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared",
}


def by_line(
    counts: NDArray[np.int64], places: Iterable[Place], files: Mapping[int, str]
) -> dict[Line, Counts]:
    """Return the counters of the lines with executed instructions, in the source's order.

    counts: a row for each place of a kernel, into which a launch counts.
    """
    lines = (Line(files.get(each.file, ""), each.line) for each in places)
    found = sorted(zip(lines, counts.tolist(), strict=True))
    return {line: Counts(*numbers) for line, numbers in found if any(numbers)}
