"""Counters of the kernels of an operation on the engine: accesses, conflicts and other events.

The numbers do not depend on a GPU. Counters with the value that Nsight Compute reads on a GPU also
have its metric's name (`gpt2block.ptx.counters.METRICS`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2block.bench import measure
from gpt2block.emulator import emulated
from gpt2block.emulator.stand_in import Checks
from gpt2block.ops.operation import Operation, Sizes, Variant
from gpt2block.ptx.counters import METRICS, Counts, Line, total
from gpt2block.ptx.engine import Result

CAPABILITY, MULTIPROCESSORS = "90", 132  # of an NVIDIA H200, whose fastest variants are the default


@dataclass(frozen=True)
class KernelCounts:
    """The counters of a launch. variant: its name, or "" for a kernel that no variant names."""

    variant: str
    kernel: str
    file: str
    lines: Mapping[Line, Counts]

    @property
    def total(self) -> Counts:
        return total(self.lines.values())

    def place(self, line: Line) -> str:
        """Return the number of a line of the kernel's file; for a line elsewhere also its file."""
        own = line.file.endswith(self.file)
        return str(line.number) if own else f"{Path(line.file).name}:{line.number}"

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        lines = [
            {"file": line.file, "line": line.number, **counts._asdict()}
            for line, counts in self.lines.items()
        ]
        named = {"variant": self.variant, "kernel": self.kernel, "file": self.file}
        return {**named, "total": self.total._asdict(), "metrics": METRICS, "lines": lines}


def count(
    operation: Operation, variant: Variant | None, sizes: Sizes, stored: tuple[str, str]
) -> tuple[KernelCounts, ...]:
    """Launch a variant on the engine and return the counters of its kernels.

    variant: None for the variant that the operation chooses on an NVIDIA H200. stored: (dtype,
    layout), as `measure.check_storage` returns them. Raises InputError if the variant does not
    support the sizes.
    """
    host, _ = measure.inputs_and_truth(operation, sizes, *stored)
    chosen = {} if variant is None else measure.options_for(operation, variant)
    results: list[Result] = []
    checks = Checks(counters=True, seen=results.append)
    with emulated("forward", MULTIPROCESSORS, checks, CAPABILITY):
        arrays = tuple(map(measure.uploaded, host))  # which stay alive until the kernels have run
        bound = operation.bind(arrays, **operation.workload.attrs, **chosen)
        bound.run()
    launches = zip(bound.launches, results, strict=True)
    return tuple(_counts(operation, each.name, result) for each, result in launches)


def _counts(operation: Operation, kernel: str, result: Result) -> KernelCounts:
    of = next((each for each in operation.table if kernel in each.kernels), None)
    return KernelCounts(of.name if of else "", kernel, of.file if of else "", result.counts)
