"""Show the steps of the threads that a problem of a user's kernel names, up to the problem."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpt2block.cuda import kernels
from gpt2block.emulator import stand_in
from gpt2block.emulator.ptx import engine
from gpt2block.emulator.ptx.encode import UnsupportedError
from gpt2block.emulator.ptx.engine import Result, Thread, Trace, TraceStep
from gpt2block.judge import comparison
from gpt2block.judge.arguments import values
from gpt2block.judge.cases import Case
from gpt2block.judge.comparison import Checked
from gpt2block.judge.finding import Finding, as_json, declared, dtype_of, element
from gpt2block.judge.kernel import Kernel

BUDGET = 10_000_000  # warp instructions of a launch, which end one that does not end
MAX_ROWS = 60  # maximum number of rows in a terminal
_LONGEST_LOOP = 24  # maximum number of steps of an iteration that is folded
_FIRST_ROWS = 15  # rows that are kept if a folded table is too long; the last rows are kept, too
# Letter of a mangled name → dtype of the value that a shuffle sends.
_SENT = {"f": "f4", "d": "f8", "i": "i4", "j": "u4", "l": "i8", "m": "u8"}
_WRITER = (
    "No thread is known to be wrong: these are steps of the one that wrote the first wrong element."
)
NO_STEPS = "There are no steps to show"
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

    def as_dict(self) -> dict[str, object]:
        """Return the step as a dict that can be written as JSON."""
        return as_json(self, ("thread", "line", "event", "problem"))


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

    def rows(self, most: int = MAX_ROWS) -> list[StepRow]:
        """Return the rows of a table: repeated iterations of a loop are one row."""
        rows = folded(self.steps)
        if len(rows) <= most:
            return rows
        last = most - _FIRST_ROWS - 1
        kept = [*rows[:_FIRST_ROWS], *rows[-last:]]
        left = len(self.steps) - sum(row.step is not None for row in kept)
        text = f"… {left:,} steps are left out"
        text += " here and below" if any(row.step is None for row in kept) else ""
        return [*kept[:_FIRST_ROWS], StepRow(0, None, text), *kept[_FIRST_ROWS:]]

    def as_dict(self) -> dict[str, object]:
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
        end = at + period * count
        rows += [StepRow(i + 1, steps[i]) for i in range(at, at + period)]
        if count > 1:
            left = f"… {period * (count - 2):,} steps of the same lines are left out"
            last = [StepRow(i + 1, steps[i]) for i in range(end - period, end)]
            rows += [StepRow(0, None, left), *last]
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


class EmulatedRun(NamedTuple):
    """Settings of an emulated launch.

    order: of threads and blocks. debug: whether the kernel is compiled without optimisation, which
    removes accesses. variant: chooses the values of registers on which no result may depend. fill:
    byte that fills the outputs before the launch. checks: whether to search for errors.
    """

    order: engine.Order
    debug: bool = False
    variant: int = 0
    fill: int = comparison.NAN_BYTE
    checks: bool = True


@dataclass(frozen=True)
class Launcher:
    """Launches a kernel on the inputs of a case, in the run in which a problem was found."""

    kernel: Kernel
    case: Case
    mode: EmulatedRun
    capability: str

    def launch(self, debug: bool, trace: Trace) -> tuple[Result, Checked | None]:
        """Launch the kernel; return what the engine has found, and the result if the launch ends.

        debug: whether the kernel is compiled without optimisation.
        """
        source, seen = self.kernel.source, list[Result]()
        checks = engine.Checks(True, BUDGET, self.mode.variant, debug, seen.append, trace=trace)
        loaded = kernels.load(str(source.path), source.name, self.kernel.defines)
        loaded.found.module.module(debug).memory.clear()
        checked = None
        with suppress(stand_in.EmulatorError):  # the problem ends the launch
            checked = self.compared(checks)
        return seen[-1], checked

    def compared(self, checks: engine.Checks) -> Checked:
        """Launch the kernel; return its result. Raises EmulatorError for an error of the kernel."""
        run, waits = self.mode, self.kernel.source.waits
        device = stand_in.device(run.order, stand_in.MULTIPROCESSORS, checks, self.capability)
        with device, stand_in.early_launches(() if waits else None):
            return comparison.compare(self.kernel, self.case, guarded=False, fill=run.fill)

    def element(self, name: str, index: int) -> tuple[str, int] | None:
        """Return the parameter and the byte of an element of an output."""
        kernel, case = self.kernel, self.case
        output = values(kernel.operation, case.inputs, case.attrs).outputs[name]
        parameters = zip(kernel.source.parameters, kernel.names, strict=True)
        names = [each.name for each, argument in parameters if argument == name]
        return (names[0], index * np.dtype(output.dtype).itemsize) if names else None


def why(launcher: Launcher, finding: Finding) -> Why:
    """Return the steps of the threads that a Finding names, or a note that says why not.

    The steps of a kernel that is compiled without optimisation have the order of the source. If
    the problem does not occur in it, the steps are those of the compilation that has the problem.
    """
    for debug in dict.fromkeys((True, launcher.mode.debug)):
        with suppress(UnsupportedError):
            result, checked = launcher.launch(debug, Trace())
            problems = [each for each in result.findings if _same(each, finding)]
            if problems:
                return _up_to(launcher, debug, problems[0])
            if checked and checked.first_wrong and not finding.lines:
                return _up_to_write(launcher, debug, *checked.first_wrong)
    return Why(note=f"{NO_STEPS}: the problem did not occur again.")


def _same(problem: engine.Finding, finding: Finding) -> bool:
    """Return whether an error of a launch has a line and a thread that a Finding names."""
    named = finding.threads or (str(problem.now),)
    same = problem.now.line in finding.lines and str(problem.now) in named
    return same or (problem.kind == "endless" and finding.kind == "does_not_end")


def _up_to(launcher: Launcher, debug: bool, problem: engine.Finding) -> Why:
    """Return the steps of the threads of a problem. The last one is the problem."""
    places = [problem.now, *([problem.other] if problem.other else [])]
    threads = tuple(dict.fromkeys(each[:2] for each in places))
    result, _ = launcher.launch(debug, Trace(threads))
    told = _Telling(launcher.kernel, len({block for block, _ in threads}) > 1)
    at = [i for i, step in enumerate(result.steps) if _is(step, problem)]
    end = at[0 if problem.kind == "unwritten" else -1] + 1 if at else len(result.steps)
    steps = [told.step(each) for each in result.steps[:end]]
    if problem.kind in ("barrier", "mask"):
        last = {step.thread: i for i, step in enumerate(steps)}
        for i in last.values():
            steps[i] = replace(steps[i], problem=True)
    elif at:
        event = steps[-1].event + told.problem(problem, steps)
        steps[-1] = replace(steps[-1], event=event, problem=True)
    else:
        said = f"{problem.verb or f'{problem.kind}:'} {problem.text}"
        steps.append(replace(told.step(TraceStep(problem.now, said)), problem=True))
    return _why(result, steps)


def _why(result: Result, steps: Sequence[ThreadStep], note: str = "") -> Why:
    left = f"The first {result.left_out:,} steps are left out." if result.left_out else ""
    return Why(tuple(steps), " ".join(filter(None, (note, left))))


def _is(step: TraceStep, problem: engine.Finding) -> bool:
    """Return whether a step is the access that is a problem."""
    return (
        step.at[:2] == problem.now[:2]
        and step.at.line == problem.now.line
        and step.array == problem.array
        and problem.verb.startswith(step.kind)
        and step.byte <= problem.byte < step.byte + max(1, step.size)
    )


def _up_to_write(launcher: Launcher, debug: bool, name: str, index: int) -> Why:
    """Return the steps of the thread that writes an element of an output, up to the last write."""
    wrong = launcher.element(name, index)
    writes = launcher.launch(debug, Trace(element=wrong))[0].steps if wrong else ()
    result, _ = launcher.launch(debug, Trace([each.at[:2] for each in writes[-1:]]))
    at = [i for i, step in enumerate(result.steps) if step == writes[-1]]
    if not at:
        return Why(note=f"{NO_STEPS}: no write of the first wrong element is known.")
    told = _Telling(launcher.kernel, several=False)
    steps = [told.step(each) for each in result.steps[: at[-1] + 1]]
    return _why(result, [*steps[:-1], replace(steps[-1], problem=True)], _WRITER)


@dataclass
class _Telling:
    """Describes steps. several: whether the threads have different blocks."""

    kernel: Kernel
    several: bool
    sent: dict[Thread, TraceStep] = field(default_factory=dict)  # the last exchange of a thread

    def step(self, step: TraceStep) -> ThreadStep:
        """Describe a step."""
        at, file = step.at, Path(step.at.file).name
        thread = f"block {at.block}, {at}" if self.several else str(at)
        line = at.line if at.line and file == self.kernel.source.file else None
        said: tuple[str, tuple[tuple[str, str], ...]] = step.kind, ()
        if step.kind in ("gathers", "receives"):
            said = self._exchange(step), ()
        elif step.size:
            said = self._access(step)
        return ThreadStep(thread, line, f"{file}:{at.line}" if at.line else "", *said)

    def problem(self, problem: engine.Finding, steps: Sequence[ThreadStep]) -> str:
        """Return a clause that says what is wrong with the last step."""
        count = problem.size // self._dtype(problem.array, problem.now, problem.bytes).itemsize
        has = f", outside: {problem.array} has {count:,} elements"
        return {
            "race": _earlier(steps),
            "read-only": _earlier(steps),
            "out of bounds": has if count else ", outside" if problem.array else "",
            "misaligned": f": the address must be divisible by {problem.bytes}",
            "unwritten": ", which no thread has written",
            "before the wait": ", before wait_for_previous()",
        }.get(problem.kind, "")

    def _dtype(self, array: str, at: engine.Where, size: int, opcode: str = "") -> np.dtype:
        """Return the dtype of the accessed elements, of bytes if it is not known."""
        declared_as = dtype_of(declared(self.kernel.source, array, at.line)[0], self.kernel.dtype)
        for dtype in (declared_as, declared_as.base):
            if dtype.itemsize and size % dtype.itemsize == 0:
                return dtype
        of = re.search(r"\.([fs])(16|32|64)$", opcode)
        return np.dtype(f"{'f' if of[1] == 'f' else 'i'}{int(of[2]) // 8}" if of else f"V{size}")

    def _access(self, step: TraceStep) -> tuple[str, tuple[tuple[str, str], ...]]:
        if not step.array:
            return f"{step.kind} address {step.byte:#x}, outside of all arrays", ()
        dtype = self._dtype(step.array, step.at, step.size, step.opcode)
        names = [
            element(self.kernel.source, step.array, byte, dtype.itemsize, step.at.line)
            for byte in range(step.byte, step.byte + step.size, dtype.itemsize)
        ]
        now, old = _texts(step.value, dtype), ", ".join(_texts(step.before, dtype))
        label = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        known = ", ".join([*now, *["…"] * (len(now) < len(names))])
        event = f"{step.kind} {label}"
        if old:
            event += f": {old} → {known}" if now else f", which holds {old}"
        elif now:
            event += f" = {known}"
        return event, tuple(zip(names, [*now, *[""] * len(names)], strict=False))

    def _exchange(self, step: TraceStep) -> str:
        type_ = re.search(r"_syncj([a-z])", step.function) if "shfl" in step.opcode else None
        known = "?" if step.size == 1 else _SENT.get(type_[1] if type_ else "", "")
        value = "".join(_texts(step.value, np.dtype(known or f"V{step.size or 1}")))
        if step.kind == "gathers":
            self.sent[step.at[:2]] = step
            return f"waits for the lanes {step.byte:#010x}" + (f", sends {value}" if value else "")
        sent = self.sent.get(step.at[:2])
        if sent is None or sent.source < 0:
            return f"receives {value}"
        if not sent.byte >> sent.source & 1:
            return f"receives no value: lane {sent.source} does not take part"
        return f"receives {value} from lane {sent.source}"


def _texts(data: bytes, dtype: np.dtype) -> list[str]:
    """Return the values of the elements of which all bytes are known."""
    whole = data[: len(data) // dtype.itemsize * dtype.itemsize]
    return list(map(_text, np.frombuffer(whole, dtype).tolist())) if whole else []


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, bytes):
        return f"0x{value[::-1].hex()}"
    return f"{value:g}" if isinstance(value, float) else str(int(value))


def _earlier(steps: Sequence[ThreadStep]) -> str:
    """Return a clause that names the other thread's step with which the last step races."""
    end = steps[-1]
    elements = {element for element, _ in end.values}
    reads = end.event.startswith("reads")
    for i in range(len(steps) - 2, -1, -1):
        step = steps[i]
        other = step.thread != end.thread and elements & {element for element, _ in step.values}
        if other and not (reads and step.event.startswith("reads")):
            return f": nothing orders it after step {i + 1}"
    return ""
