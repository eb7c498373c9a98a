"""Collect the results of the checks and the benchmark of a user's kernel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from gpt2block.mine.comparison import Checked
from gpt2block.mine.finding import Finding
from gpt2block.mine.kernel import Kernel
from gpt2block.mine.on_gpu import BenchmarkResult

CPU, GPU = "on the CPU, by an emulator of CUDA", "on the GPU"
FOUND_NONE = "Found no access out of bounds, no race and no divergent barrier."
RIGHT = f"Right in forward, reverse and shuffled thread order. {FOUND_NONE}"


COLUMNS = ("sizes", "grid", "block", "shared", "max abs", "max rel")  # columns of the checks' table


def printed(checked: Iterable[Checked], problem: Finding | None) -> str:
    """Return the text that the kernel printed in the first check in which it printed any."""
    texts = (each.printed for each in (*checked, *((problem,) if problem else ())))
    return next(filter(None, texts), "")


def titled(kernel: Kernel, on_cpu: bool) -> str:
    """Return the title of a check: operation, kernel, file and device."""
    source = kernel.source
    return f"{kernel.operation.name}: {source.name} of {source.file}, {CPU if on_cpu else GPU}"


@dataclass
class CheckOutcome:
    """Results of the checks, in order. problem: the Finding that ended the checks, or None."""

    checked: list[Checked] = field(default_factory=list)
    problem: Finding | None = None
    raced: BenchmarkResult | None = None

    @classmethod
    def of(cls, results: Iterable[Checked | Finding | BenchmarkResult]) -> CheckOutcome:
        found = cls()
        for result in results:
            if isinstance(result, Checked):
                found.checked.append(result)
            elif isinstance(result, Finding):
                found.problem = result
            else:
                found.raced = result
        return found

    @property
    def right(self) -> bool:
        rows = self.raced.rows if self.raced else []
        return self.problem is None and all(row.right for row in rows)

    def report(self, kernel: Kernel, device: str) -> dict[str, Any]:
        """Return all results as a dict that can be written as JSON."""
        found: dict[str, Any] = {
            "operation": kernel.operation.name,
            "file": str(kernel.source.path),
            "kernel": kernel.source.name,
            "device": device,
            "right": self.right,
            "checked": [
                {
                    "sizes": dict(row.sizes),
                    "inputs": row.inputs,
                    **dict(zip(("grid", "block", "shared"), row.geometry, strict=True)),
                    "max_abs": row.max_abs,
                    "max_rel": row.max_rel,
                    "bound": row.bound,
                    "printed": row.printed,
                }
                for row in self.checked
            ],
            "problem": asdict(self.problem) if self.problem else None,
        }
        if self.raced:
            found |= {
                "rows": [asdict(row) for row in self.raced.rows],
                "skipped": self.raced.skipped,
            }
        return found
