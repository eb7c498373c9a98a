"""The verdict on a user's kernel: a value for programs, which is also shown as a text and table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from html import escape
from math import isnan
from time import perf_counter
from typing import Any

from gpt2block.engine.notebook import paragraph, table, text_table
from gpt2block.errors import NotJudged
from gpt2block.judge.comparison import BenchmarkResult, Checked
from gpt2block.judge.finding import Finding, as_json, headline, numbered
from gpt2block.judge.hints import hints
from gpt2block.judge.kernel import MINE, Kernel, described
from gpt2block.judge.why import RIGHT as NOTHING_WRONG
from gpt2block.judge.why import Why
from gpt2block.ops.operation import Sizes

SCHEMA = 1  # version of `Verdict.as_dict`; docs/verdict.schema.json describes it
RIGHT, WRONG, NOT_JUDGED = "right", "wrong", "not judged"
VERDICTS = (RIGHT, WRONG, NOT_JUDGED)
CPU, GPU = "on the CPU, by an emulator of CUDA", "on the GPU"
FOUND_NONE = "Found no access out of bounds, no race and no divergent barrier."
ALL_ORDERS = f"Right in forward, reverse, shuffled and interleaved thread order. {FOUND_NONE}"
NO_TIMES = "No times: those of an emulator say nothing about a GPU."
COLUMNS = ("sizes", "grid", "block", "shared", "max abs", "max rel")  # columns of the checks' table
NO_STEPS = "There are no steps to show: no launch at a small size has found the problem."
RED = "color: #c62828; font-weight: bold"


@dataclass(frozen=True, repr=False)
class Verdict:
    """The result of `gpt2block.judge.check`. Text and notebooks show it as a table and a summary.

    `verdict`: "right", "wrong" or "not judged". `right`: whether it is "right". `findings`: the
    problems of a wrong kernel; the checks end at the first one, which is also `problem` (None
    without one). A finding has a `kind` such as "race" or "out_of_bounds", a `text`, `lines` of the
    source, `threads`, `sizes`, and for a wrong result `max_abs`, `max_rel` and `bound`. `checks`:
    the results before the first problem, one for each size and kind of inputs, with `sizes`,
    `inputs` ("" for random numbers), `geometry` (grid, block, bytes of shared memory), `max_abs`,
    `max_rel` (relative to the largest value) and `bound`, the largest relative error that rounding
    explains. `reason`: why the kernel was not judged, else None. `printed`: text that the kernel
    printed. `device`: "cpu" (the emulator) or "cuda". `seconds`: time of the checks. `benchmark`:
    times on a GPU if they were measured, else None. `seed`: seed of the random sizes and inputs, or
    None if the checks had none. `summary`: the last lines of the text. `hints`: properties of the
    source that are no errors, such as arithmetic in double. `why`: with `why=True` the steps of the
    threads that the problem names, as `steps` with `thread`, `line`, `event` and `problem`, or no
    steps and a `note` that says why; else None. `timed_sizes`: the sizes that a GPU times.
    `fidelity`: which of the kernel's instructions the emulator approximates; None on a GPU.
    """

    kernel: Kernel
    device: str
    checks: tuple[Checked, ...] = ()
    findings: tuple[Finding, ...] = ()
    reason: str | None = None
    seconds: float = 0.0
    seed: int | None = None
    benchmark: BenchmarkResult | None = None
    why: Why | None = None
    timed_sizes: Sizes = field(default_factory=dict)
    fidelity: str | None = None

    @classmethod
    def of(
        cls,
        kernel: Kernel,
        device: str,
        results: Iterable[Checked | Finding | BenchmarkResult | Why | str],
        seed: int | None = None,
        steps: bool = False,
        timed_sizes: Sizes | None = None,
    ) -> Verdict:
        """Collect the results of the checks, which run while this function iterates over them.

        steps: whether `why` is requested. timed_sizes: sizes that a GPU times; None: the documented
        sizes of the operation.
        """
        collected: list[Checked | Finding | BenchmarkResult | Why | str] = []
        reason, begun = None, perf_counter()
        try:
            collected.extend(results)
        except NotJudged as error:
            reason = str(error)
        findings = [each for each in collected if isinstance(each, Finding)]
        timed = next((each for each in collected if isinstance(each, BenchmarkResult)), None)
        told = next((each for each in collected if isinstance(each, Why)), None)
        if steps and told is None:
            told = Why(note=NO_STEPS if findings or reason is not None else NOTHING_WRONG)
        return cls(
            kernel,
            device,
            tuple(each for each in collected if isinstance(each, Checked)),
            (*findings, *_timed_wrong(timed)),
            reason,
            perf_counter() - begun,
            seed,
            timed,
            told,
            timed_sizes or kernel.operation.workload.sizes,
            next((each for each in collected if isinstance(each, str)), None),
        )

    @property
    def verdict(self) -> str:
        if self.reason is not None:
            return NOT_JUDGED
        return WRONG if self.findings else RIGHT

    @property
    def right(self) -> bool:
        return self.verdict == RIGHT

    @property
    def problem(self) -> Finding | None:
        return self.findings[0] if self.findings else None

    @property
    def printed(self) -> str:
        """Text that the kernel printed in the first check in which it printed any."""
        texts = [each.printed for each in self.checks] + [each.printed for each in self.findings]
        return next(filter(None, texts), "")

    @property
    def hints(self) -> tuple[str, ...]:
        """Properties of the source that are no errors, such as arithmetic in double."""
        compiles = all(each.kind != "does_not_compile" for each in self.findings)
        judged = compiles and self.reason is None
        return hints(self.kernel.source, not self.right) if judged else ()

    @property
    def at_timed_sizes(self) -> str:
        """Whether the kernel is right at the sizes that a GPU times: a phrase."""
        timed, checked = self.timed_sizes, [dict(each.sizes) for each in self.checks]
        if dict(timed) in checked:
            return "right at these sizes, too"
        if all(any(at[name] == size for at in checked) for name, size in timed.items()):
            return "right at sizes of which some are reduced"
        return "not checked at these sizes"

    @property
    def title(self) -> str:
        """Operation, kernel, file and device."""
        source, place = self.kernel.source, CPU if self.device == "cpu" else GPU
        return f"{self.kernel.operation.name}: {source.name} of {source.file}, {place}"

    @property
    def summary(self) -> str:
        """The last lines of the text: the problem and source lines, the reason, or the success."""
        if self.reason is not None:
            return f"Not judged: {self.reason}"
        if self.problem is None:
            return f"{ALL_ORDERS}\n{self.fidelity}" if self.device == "cpu" else "Right."
        source = self.kernel.source
        lines = (headline(source, self.problem), *numbered(source, self.problem), self.problem.at)
        return "\n".join(filter(None, lines))

    def as_dict(self) -> dict[str, Any]:
        """Return everything as a dict that can be written as JSON (docs/verdict.schema.json)."""
        timed = self.benchmark
        return {
            "schema": SCHEMA,
            **as_json(self, ("verdict", "right", "reason")),
            "operation": self.kernel.operation.name,
            "file": str(self.kernel.source.path),
            "kernel": self.kernel.source.name,
            "dtype": self.kernel.dtype,
            **as_json(self, ("device", "seconds", "seed", "fidelity")),
            "findings": [each.as_dict() for each in self.findings],
            "checks": [_check_as_dict(each) for each in self.checks],
            **as_json(self, ("hints", "printed")),
            "benchmark": timed
            and {
                "rows": [as_json(row, (*asdict(row), "right")) for row in timed.rows],
                "skipped": timed.skipped,
            },
        } | ({"why": self.why.as_dict()} if self.why else {})

    def __str__(self) -> str:
        return self._shown(str, text_table, self.summary)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        style = "" if self.right else RED
        said = f'<pre style="white-space: pre-wrap; {style}">{escape(self.summary)}</pre>'
        return self._shown(paragraph, table, said)

    def _shown(self, text: Callable[[str], str], table: Callable[..., str], summary: str) -> str:
        parts = [text(self.title)]
        if self.printed:
            parts.append(text(f"{self.kernel.source.name} prints:\n{self.printed.rstrip()}"))
        if self.checks:
            rows = [(row.label, *row.launched, row.max_abs, row.max_rel) for row in self.checks]
            parts.append(table(COLUMNS, rows))
        return "\n".join((*parts, summary, *(text(f"hint: {each}") for each in self.hints)))


def _check_as_dict(check: Checked) -> dict[str, object]:
    grid, block, shared = check.geometry
    launched = {"grid": list(grid), "block": list(block), "shared": shared}
    off = as_json(check, ("max_abs", "max_rel", "bound"))
    return {"sizes": dict(check.sizes), "inputs": check.inputs, **launched, **off}


def _timed_wrong(timed: BenchmarkResult | None) -> list[Finding]:
    """Return a Finding if the kernel's result was wrong when it was timed, else an empty list."""
    return [
        Finding(
            "wrong at the benchmark's sizes: largest error "
            f"{'not finite' if isnan(row.max_rel) else f'{row.max_rel:.1e} of the largest value'}",
            at=f"at {described(row.sizes)}",
            max_abs=row.max_abs,
            max_rel=row.max_rel,
        )
        for row in (timed.rows if timed else ())
        if row.variant == MINE and not row.right
    ]
