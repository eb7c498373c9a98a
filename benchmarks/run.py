"""Run benchmarks; compare rates with the rates of cuBLAS and of a copy.

Every implementation reads the same buffers, and its result is compared with float64.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.works import Work
from gpt2block.cuda import cupy, doctor
from gpt2block.cuda.cards import chosen
from gpt2block.ops import workload
from gpt2block.ops.bench.ceilings import Ceilings, measured
from gpt2block.ops.bench.race import Contender, Timed, first_line, race


@dataclass(frozen=True)
class BenchRow:
    """The measurement of one implementation in one benchmark."""

    what: str
    work: str
    dtype: str
    sizes: Mapping[str, int]
    contender: str
    arithmetic: str  # arithmetic of matrix products: the dtype, or "tf32"
    us: float
    tflop_s: float
    gb_s: float
    percent_matmul: float  # TFLOP/s as % of cuBLAS on large matrices in the same arithmetic
    percent_copy: float  # gb_s as % of the GB/s of a copy in device memory
    intensity: float  # FLOPs per byte of the minimum traffic
    max_abs: float  # largest absolute difference from float64
    max_rel: float  # max_abs relative to the largest absolute value
    right: bool  # whether max_rel is at most the tolerance for rounding
    copies: int  # number of copies of the inputs, used in turn
    tokens_s: float | None = None  # generated tokens per second; None without generation


@dataclass(frozen=True)
class Report:
    versions: Mapping[str, str]
    ceilings: Ceilings
    rows: list[BenchRow]
    skipped: list[str]  # one line of text per implementation that did not run, with the reason

    @property
    def right(self) -> bool:
        """Whether every result is correct."""
        return all(row.right for row in self.rows)


def run(works: Iterable[Work]) -> Report:
    """Run all benchmarks on the first GPU. Raises DeviceError."""
    doctor.require_cuda("benchmarks")
    rows: list[BenchRow] = []
    skipped: list[str] = []
    best = measured()
    for work in works:
        try:
            sets = work.sets()
            timed, lines = rows_of(work, work.ours(sets, 0), len(sets), best)
        except MemoryError as error:
            timed, lines = [], [f"{work.what} {work.dtype} {work.name}: {first_line(error)}"]
        rows += timed
        skipped += lines
        sets = []  # drop references, so that device memory can be freed
        cupy.get_default_memory_pool().free_all_blocks()
    return Report(_versions(), best, rows, list(dict.fromkeys(skipped)))


def rows_of(
    work: Work, entrants: Iterable[Contender], copies: int, best: Ceilings
) -> tuple[list[BenchRow], list[str]]:
    """Time a benchmark; return report rows of implementations that ran, and the others' errors."""
    timed, refused = race(entrants, copies, work.check, work.rounds, times=work.times)
    rows = [row_of(work, each, copies, best) for each in timed]
    return rows, [f"{work.what} {work.dtype}: {each.name}: {why}" for each, why in refused]


def row_of(work: Work, timed: Timed, copies: int, best: Ceilings) -> BenchRow:
    each, us, (max_abs, max_rel) = timed
    tflop_s, gb_s = 1e-6 * work.flops / us, 1e-3 * work.traffic / us
    return BenchRow(
        what=work.what,
        work=work.name,
        dtype=work.dtype,
        sizes=work.sizes,
        contender=each.name,
        arithmetic=each.arithmetic,
        us=us,
        tflop_s=tflop_s,
        gb_s=gb_s,
        percent_matmul=100 * tflop_s / best.tflop_s[each.arithmetic],
        percent_copy=100 * gb_s / best.copy_gb_s,
        intensity=work.flops / work.traffic,
        max_abs=max_abs,
        max_rel=max_rel,
        right=max_rel <= tolerance(work, each.arithmetic),  # False if max_rel is NaN
        copies=copies,
        tokens_s=1e6 * work.tokens / us if work.tokens else None,
    )


def tolerance(work: Work, arithmetic: str) -> float:
    """Return the largest relative error that rounding can cause in a benchmark's outputs."""
    return work.roundings * workload.tolerance(work.rounding or arithmetic)


def _versions() -> dict[str, str]:
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    return {
        "GPU": properties["name"].decode(),
        "SMs": str(properties["multiProcessorCount"]),
        **({"kernels of": card.describe()} if (card := chosen()) else {}),
        "driver": _driver(),
        "driver's CUDA": _dotted(runtime.driverGetVersion()),
        "CUDA": _dotted(runtime.runtimeGetVersion()),
        "NVRTC": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "CuPy": cupy.__version__,
        "NumPy": np.__version__,
        "Python": platform.python_version(),
        "gpt2block": doctor.version(),
    }


def _dotted(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _driver(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return the version of the NVIDIA driver from its file in /proc, or "unknown"."""
    try:
        match = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", file.read_text(encoding="utf-8"))
    except OSError:
        match = None
    return match[1] if match else "unknown"
