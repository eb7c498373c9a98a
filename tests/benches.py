"""Helpers of the tests of benchmarks: ceilings and rows of a report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.run import BenchRow, row_of
from benchmarks.works import Work
from gpt2block.ops.bench.ceilings import Ceilings
from gpt2block.ops.bench.race import Captured, Contender, Timed

BEST = Ceilings(4000.0, {"float32": 50.0, "tf32": 400.0, "float16": 700.0, "bfloat16": 800.0})
NO_GPU = "no driver today"


def row(
    work: Work,
    contender: str,
    us: float = 2.0,
    error: float = 0.0,
    **changes: Any,
) -> BenchRow:
    """Return a row of a report. changes: fields to replace."""
    each = Contender(contender, lambda rounds: Captured(lambda: None, ()), work.dtype)
    return replace(row_of(work, Timed(each, us, (error, error)), 3, BEST), **changes)
