"""Check a user's kernel on the emulator, in four orders of threads."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf, isnan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpt2block import emulator
from gpt2block.cuda import kernels
from gpt2block.cuda.arrays import device_attribute
from gpt2block.emulator import ORDERS, emulated, stand_in
from gpt2block.emulator.ptx import engine, table
from gpt2block.emulator.ptx.encode import Encoded, UnsupportedError, encode
from gpt2block.emulator.ptx.parse import Module
from gpt2block.errors import DeviceError, InputError, KernelError, NotJudged, lines
from gpt2block.judge import comparison, refused, sizes
from gpt2block.judge.arguments import sizes_at, values
from gpt2block.judge.cases import OTHER_SIZES, Case
from gpt2block.judge.cases import case as case_of
from gpt2block.judge.comparison import Checked
from gpt2block.judge.finding import Finding, compiler_finding, declared, dtype_of, engine_finding
from gpt2block.judge.kernel import Kernel, described, matched
from gpt2block.judge.source import read
from gpt2block.judge.templates import path_of
from gpt2block.judge.why import EmulatedRun, Launcher, Why, why
from gpt2block.ops.operation import Sizes

BUDGET = engine.BUDGET  # warp instructions of a launch
LARGE_BUDGET = 60_000_000  # warp instructions of a launch at the sizes that a GPU times
# A kernel counts as endless if it executes this many times the template's instructions.
FACTOR = 100
ORDER_COUNTS = (
    ", and the result is right if they run one after the other from the first: it depends on the "
    "order of threads, which a GPU does not define"
)
PLACE_COUNTS = (
    "the result depends on the multiprocessor, the clock or the addresses of arrays, which differ "
    "between GPUs and launches"
)
OTHER = "--shape checks and times others"
MAX_BUDGET = 2_000_000_000  # warp instructions of a launch that the template needs, too
MAX_AGAIN = 1_000_000  # warp instructions of a launch that is repeated in other orders
MAX_KEPT = 64  # bytes of a variable that may hold counts from one launch for the next
LATER = (*range(40), 1000, 1_000_000, 2**29, 2**31)  # launches after which such counts are tried
# Names by which a file can tell compilers and GPUs apart; such a file must be right for several.
_TELLS = re.compile(
    r"\b(?:__CUDA_ARCH\w*|__CUDACC\w*|__NVCC\w*|__CUDA_API\w*|CUDA\w*_VERSION|CUDART_VERSION|"
    r"__NV_ARCH\w*|NV_(?:IF|DISPATCH|PROVIDES|IS)\w*|__GNUC\w*|__VERSION__|__clang\w*|__PTX\w*|"
    r"__EDG\w*|__cplusplus|arch::\w+|current_arch)\b"
)


RUNS = (
    EmulatedRun("forward"),
    EmulatedRun("reverse", debug=True, variant=1, fill=comparison.POSITIVE_BYTE),
    EmulatedRun("interleaved", variant=3, fill=comparison.NEGATIVE_BYTE),
    EmulatedRun("shuffled", variant=2),
)
LARGE_RUN = EmulatedRun("forward", checks=False)


def require_emulator() -> None:
    """Raise DeviceError, which says what to install, if the emulator cannot run."""
    if problem := emulator.missing():
        raise DeviceError(*lines(f"the emulator cannot run: {problem}"))


class TimedSizes(NamedTuple):
    """The sizes that a GPU times, the layout of the weights, and the names of stated sizes."""

    sizes: Sizes
    layout: str
    stated: Collection[str]


def check_kernel(
    kernel: Kernel, cases: Sequence[Case], timed: TimedSizes | None = None, steps: bool = False
) -> Iterator[Checked | Finding | Why | str]:
    """Check a user's kernel on each case; yield the results, and stop with a Finding at a problem.

    The first result is a text: how exactly the emulator executes the kernel's instructions.
    A case runs in all `RUNS`; a case with `once` runs only in the first. timed: the sizes that a
    GPU times. At these sizes, or if they are too large, at those of `sizes.parts`, only the result
    is checked. steps: after a Finding, yield the steps of its threads. Raises NotJudged if the
    emulator cannot run the kernel.
    """
    require_emulator()
    path = str(kernel.source.path)
    needs: Finding | refused.ResourceUsage | None = None
    wrong = False
    for capability in (refused.USUAL, refused.WGMMA):
        if capability < refused.capability_of(kernel):
            continue
        with emulated(capability=capability), ThreadPoolExecutor(1) as pool:
            function = kernels.load(path, kernel.source.name, kernel.defines)  # starts to compile
            pool.submit(_compile_unoptimised, kernel, capability)
            needs = needs or refused.refused(kernel)
            if isinstance(needs, Finding):
                yield needs
                return
            if needs.capability != capability == refused.USUAL:
                continue
            judge = _Judge(kernel, needs, function, capability, steps)
            again = capability != needs.capability
            for result in judge.results(cases, None if again else timed):
                if not (again and isinstance(result, Checked | str)):
                    yield result
                wrong |= isinstance(result, Finding)  # the steps of its threads may follow
        if wrong or not _TELLS.search(refused.without_literals(kernel.source.text)):
            return


def _compile_unoptimised(kernel: Kernel, capability: str) -> None:
    path = str(kernel.source.path)
    code = kernels.program(path, kernel.defines, kernel.source.name)
    stand_in.RawModule(code, kernels.options(path, int(capability))).module(debug=True)


class _OverBudgetError(Exception):
    """A launch has executed as many instructions as it may. found: a thread that still runs."""

    def __init__(self, found: engine.Finding, budget: int) -> None:
        super().__init__(str(found))
        self.found, self.budget = found, budget


class _Ran(NamedTuple):
    """A launch's result, what else the emulator has noted, and the executed instructions."""

    found: Checked | Finding
    notes: tuple[engine.Finding, ...]
    instructions: int

    @property
    def wrong(self) -> bool:
        return isinstance(self.found, Finding) or bool(self.found.problem)


@dataclass
class _Judge:
    """Launches a kernel on the cases, in two threads."""

    kernel: Kernel
    needs: refused.ResourceUsage
    function: Any
    capability: str
    steps: bool = False  # whether to yield the steps of a Finding's threads
    runs: Sequence[EmulatedRun] = RUNS
    first: Case | None = None
    ended: bool = False  # whether no further case needs to run
    examined: bool = False  # whether values that launches leave in variables were examined

    def results(
        self, cases: Sequence[Case], timed: TimedSizes | None
    ) -> Iterator[Checked | Finding | Why | str]:
        """Yield the results of all cases, up to the first Finding."""
        source = self.kernel.source
        try:
            made = self._encode()
        except NotJudged:  # a KernelError, too
            raise
        except KernelError as error:
            yield compiler_finding(source, str(error))
            return
        except DeviceError as error:
            raise NotJudged(f"{source.file}: not judged: {error}") from None
        yield table.fidelity(made.forms, len(made.code))
        self.first, *further = cases
        keeps = any(v.space == "global" and v.name[0] != "$" for v in made.variables)
        pool = ThreadPoolExecutor(1 if keeps else 2)
        try:
            launched = [pool.submit(self._check, self.first)]
            large: Future[list[Checked | Finding]] | None = None
            if timed and timed.sizes not in [each.sizes for each in cases]:
                large = pool.submit(self._check_timed_sizes, timed)
            launched += [pool.submit(self._check, case) for case in further]
            for case, each in zip(cases, launched, strict=True):
                found, run = each.result()
                yield found
                if isinstance(found, Finding):
                    self.ended = True
                    if self.steps:
                        yield why(Launcher(self.kernel, case, run, self.capability), found)
                    return
            yield from large.result() if large else ()
        finally:
            self.ended = True
            pool.shutdown(cancel_futures=True)

    def _module(self, debug: bool) -> Module:
        found: Module = self.function.found.module.module(debug)
        return found

    def _forget(self) -> None:
        """Give the variables of the file the values that they have before the first launch."""
        for debug in (False, True):
            self._module(debug).memory.clear()

    def _encode(self) -> Encoded:
        """Return the kernel's instructions. Raises NotJudged if the emulator lacks one."""
        source = self.kernel.source
        self._forget()
        module = self._module(debug=False)
        try:
            encode(self._module(debug=True), source.name)
        except UnsupportedError:
            self.runs = [run for run in RUNS if not run.debug]
        try:
            return encode(module, source.name)
        except UnsupportedError as error:
            at = error.place
            own = at and Path(module.files.get(at.file, "")).name == source.file
            line = at.line if at and own else source.number
            raise NotJudged(
                f"{source.file}:{line}: not judged: the emulator does not execute {error}: check "
                "the kernel on a GPU"
            ) from None

    def _check(self, case: Case) -> tuple[Checked | Finding, EmulatedRun]:
        """Return the result of a case, or a Finding if there is a problem, and the last run.

        Raises InputError for a case of usual sizes with an invalid launch geometry.
        """
        try:
            at = values(self.kernel.operation, case.inputs, case.attrs).sizes
            if finding := _check_launch(self.kernel, at, self.needs):
                return replace(finding, at=f"at {case.label}"), RUNS[0]
            return self._run_in_every_order(case)
        except NotJudged:
            raise
        except InputError as error:
            if not case.hint:
                raise
            return Finding(f"{error}\n{case.hint}", at=f"at {case.label}"), RUNS[0]

    def _run_in_every_order(self, case: Case) -> tuple[Checked | Finding, EmulatedRun]:
        """Return the worst result of a case in all thread orders, or the first Finding."""
        done: list[Checked] = []
        for run in (each._replace(variant=each.variant + case.variant) for each in self.runs):
            try:
                ran = self._run(case, run)
            except _OverBudgetError as error:
                ran = self._check_end(case, run, error)
            if not ran.wrong:
                ran = ran._replace(found=self._examine_variables(case, run, ran) or ran.found)
            if ran.wrong:
                printed = done[0].printed if done else ran.found.printed
                return replace(self._explain(case, run, ran), printed=printed), run
            assert isinstance(ran.found, Checked)
            done.append(ran.found)
            if case.once or (case is not self.first and ran.instructions >= MAX_AGAIN):
                break
        worst = max(done, key=lambda each: inf if isnan(each.max_rel) else each.max_rel)
        return replace(worst, printed=done[0].printed), RUNS[0]

    def _explain(self, case: Case, run: EmulatedRun, ran: _Ran) -> Finding:
        """Return the Finding of a wrong run; name the setting without which the kernel is right."""
        result = ran.found
        wrong = result if isinstance(result, Finding) else comparison.finding(result, case)
        if wrong.kind in ("race", "does_not_end", "kept_state", "uninitialized", "read_only"):
            return wrong
        easier = [
            (run, comparison.SECOND_LAUNCH),
            (run._replace(fill=comparison.NAN_BYTE), comparison.OLD_VALUES),
            (run._replace(variant=0), PLACE_COUNTS),
            (run._replace(order=ORDERS[0], debug=False, variant=0), ORDER_COUNTS),
        ]
        for tried, cause in easier[: 2 if isinstance(result, Finding) else None]:
            self._forget()
            if tried != run or cause is comparison.SECOND_LAUNCH:
                with suppress(_OverBudgetError):
                    if not self._run(case, tried).wrong:
                        if cause is not ORDER_COUNTS:
                            return comparison.because(wrong, cause)
                        ran_in = r"\nthe threads ran in \w+ order"
                        return replace(wrong, text=re.sub(ran_in, rf"\g<0>{cause}", wrong.text))
        if isinstance(result, Finding):
            return wrong
        with suppress(_OverBudgetError):  # the compiler may have removed the cause
            cause_of = self._run(case, run._replace(debug=True, checks=True)).found
            if isinstance(cause_of, Finding):
                return cause_of
        return wrong

    def _examine_variables(self, case: Case, run: EmulatedRun, ran: _Ran) -> Finding | None:
        """Return a Finding if values that earlier launches left make a later launch wrong."""
        left = next((each for each in ran.notes if each.kind == "kept"), None)
        if left is None or self.examined or run.debug:  # -G keeps results that no code uses
            return None
        self.examined = True
        finding = engine_finding(self.kernel.source, left, f"at {case.label}, {run.order} order")
        if left.size > MAX_KEPT:
            return finding
        memory = self._module(run.debug).memory
        before = {name: bytes(data) for name, data in memory.items()}
        if self._run(case, run).wrong:
            return finding
        after = {name: bytes(data) for name, data in memory.items()}
        if after == before:  # no count: the launch uses what another one has computed
            return finding
        for launches in LATER:
            for name, data in after.items():
                memory[name] = _advance(before[name], data, launches)
            if self._run(case, run).wrong:
                return finding
        self._forget()
        return None

    def _check_end(self, case: Case, run: EmulatedRun, error: _OverBudgetError) -> _Ran:
        """Return the result of a launch that executes more than BUDGET instructions.

        It is a Finding if the launch executes FACTOR times the instructions of the template. Raises
        NotJudged if both are very many.
        """
        operation, source = self.kernel.operation, self.kernel.source
        stored = (self.kernel.dtype, operation.workload.layout)
        template = matched(read(path_of(operation)), operation, stored)
        function = kernels.load(str(template.source.path), template.source.name, template.defines)
        judge = replace(self, kernel=template, function=function)
        usual = judge._run(case, EmulatedRun("forward"), MAX_BUDGET).instructions
        budget = FACTOR * usual
        try:
            if budget > error.budget:
                budget = min(budget, MAX_BUDGET)
                return self._run(case, run, budget)
        except _OverBudgetError as late:
            error = late
        if budget < FACTOR * usual:
            raise NotJudged(
                f"{source.file}: not judged: a launch still runs after {budget:,} instructions of "
                f"warps at {case.label}: check the kernel on a GPU, or state other sizes"
            )
        finding = engine_finding(source, error.found, f"at {case.label}, {run.order} order")
        text = f"{finding.text} after {error.budget:,} instructions of warps"
        return _Ran(replace(finding, text=f"{text}\nthe template executes {usual:,}"), (), 0)

    def _run(self, case: Case, run: EmulatedRun, budget: int | None = None) -> _Ran:
        """Launch the kernel once. Raises _OverBudgetError, and NotJudged."""
        source, at = self.kernel.source, f"at {case.label}, {run.order} order"
        seen: list[engine.Result] = []
        budget = budget or BUDGET
        checks = engine.Checks(run.checks, budget, run.variant, run.debug, seen.append)
        result: Checked | Finding
        try:
            checked = Launcher(self.kernel, case, run, self.capability).compared(checks)
            ran = f"\nthe threads ran in {run.order} order" if run.order != ORDERS[0] else ""
            result = replace(checked, problem=checked.problem and checked.problem + ran)
        except stand_in.EmulatorError as error:
            if error.finding.kind == "endless":
                raise _OverBudgetError(error.finding, budget) from None
            result = engine_finding(source, error.finding, at)
        except engine.LaunchError as error:
            raise NotJudged(f"{source.file}: not judged: {error}") from None
        notes = tuple(note for each in seen for note in each.findings if not note.fatal)
        unwritten = [each for each in notes if run.debug and self._matters(each)]
        if isinstance(result, Checked) and unwritten:
            result = engine_finding(source, unwritten[0], at)
        printed = "".join(each.printed for each in seen)
        return _Ran(replace(result, printed=printed), notes, sum(r.instructions for r in seen))

    def _matters(self, note: engine.Finding) -> bool:
        """Return whether a kernel that is not optimised reads a value that nothing has written.

        Objects of classes are copied with members that have no value, such as padding.
        """
        source, now = self.kernel.source, note.now
        of_user = note.kind == "unwritten" and Path(now.file).name == source.file
        ctype, _ = declared(source, note.array, now.line)
        return of_user and (not note.local or dtype_of(ctype, self.kernel.dtype).itemsize > 0)

    def _check_timed_sizes(self, timed: TimedSizes) -> list[Checked | Finding]:
        """Return results at the timed sizes or, if these take too long, at `sizes.parts`."""
        operation = self.kernel.operation
        try:
            late = _check_launch(self.kernel, sizes_at(operation, timed.sizes), self.needs)
        except InputError as error:
            late = Finding(str(error))
        if late:
            text = f"{late.text}\nright at the sizes before; a GPU times {described(timed.sizes)}"
            return [replace(late, text=f"{text}: {OTHER}")]
        parts = sizes.parts(operation, timed.sizes, timed.stated)
        found = self._check_large(sizes.whole(operation, timed.sizes), timed.layout)
        return found or self._check_large(parts, timed.layout)

    def _check_large(self, cases: Iterable[sizes.Case], layout: str) -> list[Checked | Finding]:
        """Run cases of large sizes up to the first Finding; leave out cases that take too long."""
        results: list[Checked | Finding] = []
        for at, attrs in cases:
            if self.ended:
                break
            case = replace(case_of(self.kernel, at, attrs, layout), hint=OTHER_SIZES, once=True)
            with suppress(_OverBudgetError):
                ran = self._run(case, LARGE_RUN, LARGE_BUDGET)
                results.append(self._explain(case, LARGE_RUN, ran) if ran.wrong else ran.found)
            if results and isinstance(results[-1], Finding):
                break
        return results


def _check_launch(
    kernel: Kernel, at: Mapping[str, int], needs: refused.ResourceUsage
) -> Finding | None:
    """Return a Finding if no GPU can launch the kernel at these sizes. Raises InputError."""
    most = int(device_attribute("MaxSharedMemoryPerBlockOptin"))
    return refused.too_many(kernel, needs, kernel.geometry(at), most)


def _advance(before: bytes, after: bytes, launches: int) -> bytearray:
    """Return a variable after further launches, each of which changes its words as one did."""
    end = len(after) // 4 * 4
    words, old = (np.frombuffer(each[:end], np.uint32) for each in (after, before))
    made = words + (words - old) * np.uint32(launches)
    return bytearray(made.tobytes() + after[end:])
