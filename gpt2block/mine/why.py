"""Show the steps of the threads that a problem of a user's kernel names, up to the problem."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from gpt2block.emulator import Build, Checks, Order, ShimError, stand_in
from gpt2block.emulator import trace as traced
from gpt2block.emulator.loader import dynamic_arrays
from gpt2block.emulator.trace import Trace
from gpt2block.errors import NotJudged
from gpt2block.mine import comparison
from gpt2block.mine.arguments import values
from gpt2block.mine.cases import Case
from gpt2block.mine.confined import confined
from gpt2block.mine.finding import Finding
from gpt2block.mine.kernel import Kernel
from gpt2block.mine.source import UserSource

MOST_ROWS = 60  # maximum number of rows in a terminal
_LONGEST_LOOP = 24  # maximum number of steps of an iteration that is folded
_FIRST_ROWS = 15  # rows that are kept if a folded table is too long; the last rows are kept, too
_UNTIL = {  # kind of a finding → problem at which a traced launch ends
    "race": "race",
    "read_only": "race",
    "divergent_barrier": "barrier",
    "out_of_bounds": "outside",
}
_TYPES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}  # dtype → type T
_NUMBERS = r"\((\d+), (\d+), (\d+)\)"
_PLACE = re.compile(rf"block {_NUMBERS}, thread {_NUMBERS}")
_VERB = re.compile("reads|writes|atomically changes")  # event of an access that races
_WRONG = re.compile(r"elements of (\w+) are wrong.*?\b\1\[([\d, ]+)\]", re.DOTALL)
UNWRITTEN = "which no thread has written"
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
    """Launches a kernel on the inputs of a case, in the order in which a problem was found."""

    kernel: Kernel
    case: Case
    order: Order
    fill: int
    build: Build
    limit_s: float

    def run(self, until: str, threads: Sequence[traced.Thread] = ()) -> Trace:
        """Launch the kernel, and return its steps up to the problem `until` (see `Trace`)."""
        trace = Trace(until, _types(self.kernel), threads)
        within = confined(True, self.limit_s)
        checks = Checks(
            races=True, limit_s=self.limit_s, within=within, build=self.build, trace=trace
        )
        device = stand_in.device(self.order, stand_in.MULTIPROCESSORS, checks)
        early = stand_in.early_launches() if self.kernel.source.waits else nullcontext()
        with suppress(ShimError), device, early:  # the problem ends the launch
            comparison.compare(self.kernel, self.case, guarded=False, fill=self.fill)
        return trace


def _types(kernel: Kernel) -> dict[str, str]:
    """Return the C++ types of the elements of arguments and of dynamic shared arrays."""
    types = {p.name: p.ctype.rstrip("*") for p in kernel.source.parameters}
    types |= dynamic_arrays(kernel.source.text)
    own = _TYPES[kernel.dtype]
    return {name: own if ctype in ("T", "W") else ctype for name, ctype in types.items()}


def why(launcher: Launcher, found: Finding) -> Why:
    """Return the steps of the threads that a Finding names, or a note that says why not."""
    unwritten = UNWRITTEN in found.text
    until = "unwritten" if unwritten else _UNTIL.get(found.kind, "")
    wrong = _WRONG.search(found.text)
    if not until and wrong:
        until = _wrote(launcher, wrong[1], wrong[2])
    if not until:
        return Why(note=f"There are no steps to show for a finding of kind {found.kind}.")
    try:
        return _steps(launcher, found, until)
    except NotJudged as error:
        return Why(note=f"There are no steps to show: {error}")


def _steps(launcher: Launcher, found: Finding, until: str) -> Why:
    threads = _named(launcher, found) if until == "outside" else launcher.run(until).met
    if not threads:
        return Why(note="There are no steps to show: the problem did not occur again.")
    trace = launcher.run(until, tuple(dict.fromkeys(threads)))
    if trace.long:
        return Why(note=f"There are no steps to show: there are {len(trace.steps):,} or more.")
    steps = trace.steps
    if until == "outside" and not any(step.outside for step in steps[-1:]):
        steps = _until_line(steps, launcher.kernel.source, found)
    if until == "race":
        steps = _until_race(steps, trace.threads[0], launcher.kernel.source, found)
    if until.startswith("wrote:"):
        steps = _until_write(steps, until)
    if not steps:
        return Why(note="There are no steps to show: the threads access no memory.")
    note = ""
    if until.startswith("wrote:"):
        note = "No thread is known to be wrong: these are the steps of the thread that wrote the "
        note += "first wrong element."
    return Why(_described(launcher, steps, until, trace.threads), note)


def _geometry(launcher: Launcher) -> tuple[tuple[int, ...], tuple[int, ...]]:
    case, kernel = launcher.case, launcher.kernel
    grid, block, _ = kernel.geometry(values(kernel.operation, case.inputs, case.attrs).sizes)
    return grid, block


def _named(launcher: Launcher, found: Finding) -> tuple[traced.Thread, ...]:
    """Return the thread whose block and thread a Finding names, if it names one."""
    place = _PLACE.search(found.at)
    if not place:
        return ()
    grid, block = _geometry(launcher)
    numbers = [*map(int, place.groups())]
    return ((_number(numbers[:3], grid), _number(numbers[3:], block)),)


def _number(at: Sequence[int], extents: Sequence[int]) -> int:
    """Return the number of a block or thread, whose first coordinate changes fastest."""
    return sum(each * prod(extents[:i]) for i, each in enumerate(at))


def _coordinates(number: int, extents: Sequence[int]) -> str:
    x, y, _ = (*extents, 1, 1)[:3]
    return f"({number % x}, {number // x % y}, {number // x // y})"


def _until_race(
    steps: Sequence[traced.TraceStep], of: traced.Thread, source: UserSource, found: Finding
) -> list[traced.TraceStep]:
    """Return the steps up to a thread's access that races, in the first line of a Finding.

    It is the last access of the Finding's kind there. Later steps are left out: a race of a read
    that an atomicCAS might compare is reported only after further steps.
    """
    verb = _VERB.search(found.text)
    places = [f"{source.file}:{line}" for line in found.lines[:1]]
    for i in range(len(steps) - 1, -1, -1):
        step = steps[i]
        same = verb and step.of == of and step.event.startswith(verb[0])
        if same and step.place.split("/")[-1] in places:
            return list(steps[: i + 1])
    return list(steps)


def _until_line(
    steps: Sequence[traced.TraceStep], source: UserSource, found: Finding
) -> list[traced.TraceStep]:
    """Return the steps up to the access outside of a shared variable, in the line of a Finding.

    In the program that traces, shared variables are contiguous, so that the access reaches another
    variable. It is the first access in the line to another variable than the same code accessed
    before; if there is none, the first access in the line.
    """
    places = [f"{source.file}:{line}" for line in found.lines]
    at = [i for i, step in enumerate(steps) if step.site and step.place.split("/")[-1] in places]
    variables: dict[int, int] = {}  # address of the code → variable that it has accessed before
    for i in at:
        if variables.setdefault(steps[i].site, steps[i].variable) != steps[i].variable:
            break
    else:
        i = at[0] if at else -1
    return [*steps[:i], _of_unknown(steps[i])] if at else []


def _of_unknown(step: traced.TraceStep) -> traced.TraceStep:
    event = f"{step.event.partition(' ')[0]} outside of a shared or constant variable"
    return replace(step, event=event, values=())


def _wrote(launcher: Launcher, name: str, index: str) -> str:
    """Return the problem "wrote:…" for an element of an output, or "" if it is not known."""
    case, kernel = launcher.case, launcher.kernel
    output = values(kernel.operation, case.inputs, case.attrs).outputs.get(name)
    parameters = zip(kernel.source.parameters, kernel.names, strict=True)
    parameter = next((p.name for p, argument in parameters if argument == name), None)
    numbers = [int(each) for each in index.split(",")]
    if output is None or parameter is None or len(numbers) != len(output.shape):
        return ""
    flat = 0
    for extent, each in zip(output.shape, numbers, strict=True):
        flat = flat * extent + each
    size = comparison.itemsize(output)
    return f"wrote:{parameter}:{flat * size}:{flat}"


def _until_write(steps: Sequence[traced.TraceStep], until: str) -> list[traced.TraceStep]:
    """Return the steps up to the last write of the element that `until` names."""
    _, name, _, index = until.split(":")
    writes = [
        i
        for i, step in enumerate(steps)
        if not step.event.startswith("reads")
        and any(element == f"{name}[{index}]" for element, _ in step.values)
    ]
    return list(steps[: writes[-1] + 1]) if writes else []


def _described(
    launcher: Launcher,
    steps: Sequence[traced.TraceStep],
    until: str,
    threads: Sequence[traced.Thread],
) -> tuple[ThreadStep, ...]:
    """Return the steps with names of threads, and with the problem in the last one."""
    grid, block = _geometry(launcher)
    blocks = {number for number, _ in threads}

    def named(of: traced.Thread) -> str:
        name = f"thread {_coordinates(of[1], block)}"
        return name if len(blocks) == 1 else f"block {_coordinates(of[0], grid)}, {name}"

    file = re.escape(launcher.kernel.source.file)
    described = []
    for step in steps:
        place = step.place.split("/")[-1]
        line = re.fullmatch(rf"{file}:(\d+)", place)
        number = int(line[1]) if line else None
        described.append(ThreadStep(named(step.of), number, place, step.event, step.values))
    return tuple(_with_problem(described, until))


def _with_problem(steps: list[ThreadStep], until: str) -> list[ThreadStep]:
    """Mark the last step, or for a divergent barrier the last step of each thread."""
    if until == "barrier":
        last = {step.thread: i for i, step in enumerate(steps)}
        for i in last.values():
            steps[i] = replace(steps[i], problem=True)
        return steps
    end = steps[-1]
    event = end.event
    if until == "race":
        event += _earlier(steps)
    elif until == "unwritten":
        event += f", {UNWRITTEN}"
    return [*steps[:-1], replace(end, event=event, problem=True)]


def _earlier(steps: Sequence[ThreadStep]) -> str:
    """Return a phrase that names the other thread's step with which the last step races."""
    end = steps[-1]
    elements = {element for element, _ in end.values}
    reads = end.event.startswith("reads")
    for i in range(len(steps) - 2, -1, -1):
        step = steps[i]
        other = step.thread != end.thread and elements & {element for element, _ in step.values}
        if other and not (reads and step.event.startswith("reads")):
            return f": nothing orders it after step {i + 1}"
    return ""
