"""Show the steps of the threads that a problem of a user's kernel names, up to the problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpt2block.mine.cases import Case
from gpt2block.mine.finding import Finding
from gpt2block.mine.kernel import Kernel

MOST_ROWS = 60  # maximum number of rows in a terminal
_LONGEST_LOOP = 24  # maximum number of steps of an iteration that is folded
_FIRST_ROWS = 15  # rows that are kept if a folded table is too long; the last rows are kept, too
EMULATOR_ONLY = "the emulator shows the steps of threads"
RIGHT = "The kernel is right: there are no steps to show."


@dataclass(frozen=True)
class ThreadStep:
    """A step of a thread, in the order in which the emulator ran the threads.

    thread: "thread (1, 0, 0)", after its block if the threads have different blocks. line: line
    number in the user's file, or None. place: "file:line", or "" if it is not known. event: the
    access, barrier or exchange. values: accessed elements and their values, such as ("x[12]",
    "0.5"), "" for a value that is not known. problem: whether the step is the problem.
    """

    thread: str
    line: int | None
    place: str
    event: str
    values: tuple[tuple[str, str], ...] = ()
    problem: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the step as a dict that can be written as JSON."""
        return {
            "thread": self.thread,
            "line": self.line,
            "event": self.event,
            "problem": self.problem,
        }


class StepRow(NamedTuple):
    """A row of the table in a terminal. number: of the step, from 1; 0 for omitted steps."""

    number: int
    step: ThreadStep | None
    text: str = ""


@dataclass(frozen=True)
class Why:
    """Steps of the threads that a finding names, or a note that says why there are none."""

    steps: tuple[ThreadStep, ...] = ()
    note: str = ""

    @property
    def threads(self) -> tuple[str, ...]:
        """The threads, in the order of their first steps."""
        return tuple(dict.fromkeys(step.thread for step in self.steps))

    def rows(self, most: int = MOST_ROWS) -> list[StepRow]:
        """Return the rows of a table: repeated iterations of a loop are one row."""
        rows = folded(self.steps)
        if len(rows) <= most:
            return rows
        last = most - _FIRST_ROWS - 1
        shown = sum(row.step is not None for row in (*rows[:_FIRST_ROWS], *rows[-last:]))
        hidden = sum(row.step is None for row in (*rows[:_FIRST_ROWS], *rows[-last:]))
        left = len(self.steps) - shown
        text = f"… {left:,} steps are left out{' here and below' if hidden else ''}"
        return [*rows[:_FIRST_ROWS], StepRow(0, None, text), *rows[-last:]]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as a dict that can be written as JSON."""
        return {"steps": [step.as_dict() for step in self.steps], "note": self.note}


def folded(steps: Sequence[ThreadStep]) -> list[StepRow]:
    """Return a row for each step. Of four or more equal iterations only two are shown.

    Iterations are equal if they have the same threads, lines and kinds of events.
    """
    keys = [(step.thread, step.place, step.event.partition(" ")[0], step.problem) for step in steps]
    rows: list[StepRow] = []
    at = 0
    while at < len(steps):
        period, count = _iterations(keys, at)
        if count < 4:
            rows.append(StepRow(at + 1, steps[at]))
            at += 1
            continue
        end = at + period * count
        left = period * (count - 2)
        rows += [StepRow(i + 1, steps[i]) for i in range(at, at + period)]
        rows.append(StepRow(0, None, f"… {left:,} steps of the same lines are left out"))
        rows += [StepRow(i + 1, steps[i]) for i in range(end - period, end)]
        at = end
    return rows


def _iterations(keys: Sequence[object], at: int) -> tuple[int, int]:
    """Return the length and the number of the equal iterations that begin at a step."""
    for period in range(1, _LONGEST_LOOP + 1):
        count = 1
        first = keys[at : at + period]
        while keys[at + period * count : at + period * (count + 1)] == first:
            count += 1
        if count >= 4 and len(first) == period:
            return period, count
    return 1, 1


@dataclass(frozen=True)
class Launcher:
    """Launches a kernel on the inputs of a case, in the run in which a problem was found."""

    kernel: Kernel
    case: Case
    run: Any  # an EmulatedRun of on_cpu
    capability: str


def why(launcher: Launcher, found: Finding) -> Why:
    """Return the steps of the threads that a Finding names, or a note that says why not."""
    return Why(note=f"There are no steps to show for a finding of kind {found.kind}.")
