"""Check a user's kernel on the emulator, in four orders of threads."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from math import inf, isnan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt2block import emulator
from gpt2block.cuda import kernels
from gpt2block.cuda.arrays import device_attribute
from gpt2block.emulator import ORDERS, emulated, stand_in
from gpt2block.errors import DeviceError, InputError, KernelError, NotJudged
from gpt2block.mine import comparison, sizes
from gpt2block.mine.arguments import sizes_at, values
from gpt2block.mine.cases import OTHER_SIZES, Case
from gpt2block.mine.cases import case as case_of
from gpt2block.mine.comparison import Checked, Fidelity
from gpt2block.mine.finding import Finding, of_compiler, of_engine
from gpt2block.mine.kernel import Kernel, described, matched
from gpt2block.mine.refused import HOPPER, USUAL, ResourceUsage, refused, too_many, without_literals
from gpt2block.mine.source import read
from gpt2block.mine.templates import path_of
from gpt2block.mine.why import Launcher, Why, why
from gpt2block.ops.operation import Sizes
from gpt2block.ptx import engine, table
from gpt2block.ptx.encode import UnsupportedError, encode
from gpt2block.ptx.parse import Module

LARGE_BUDGET = 20_000_000  # warp instructions of a launch at the sizes that a GPU times
FACTOR = 100  # a kernel counts as endless if it executes this many times the template's instructions
ORDER_COUNTS = (
    ", and the result is right if they run one after the other from the first: it depends on the "
    "order of threads, which a GPU does not define"
)
PLACE_COUNTS = (
    "the result depends on the multiprocessor, the clock or the addresses of arrays, which differ "
    "between GPUs and launches"
)
OTHER = "--shape checks and times others"
MOST_KEPT = 64  # bytes of a variable that may hold counts from one launch for the next
LATER = (*range(40), 1000, 1_000_000, 2**29, 2**31)  # launches after which such counts are tried
# Names by which a file can tell compilers and GPUs apart; such a file must be right for several.
_TELLS = re.compile(
    r"\b(?:__CUDA_ARCH\w*|__CUDACC\w*|__NVCC\w*|__CUDA_API\w*|CUDA\w*_VERSION|CUDART_VERSION|"
    r"__NV_ARCH\w*|NV_(?:IF|DISPATCH|PROVIDES|IS)\w*|__GNUC\w*|__VERSION__|__clang\w*|__PTX\w*|"
    r"__EDG\w*|__cplusplus|arch::\w+|current_arch)\b"
)


class EmulatedRun(NamedTuple):
    """Settings of an emulated launch.

    order: of threads and blocks. debug: whether the kernel is compiled without optimisation, which
    removes accesses. variant: chooses the values of registers on which no result may depend. fill:
    byte that fills the outputs before the launch. checks: whether to search for errors.
    """

    order: emulator.Order
    debug: bool = False
    variant: int = 0
    fill: int = comparison.NAN_BYTE
    checks: bool = True


RUNS = (
    EmulatedRun("forward"),
    EmulatedRun("reverse", debug=True, variant=1, fill=comparison.POSITIVE_BYTE),
    EmulatedRun("interleaved", variant=1, fill=comparison.NEGATIVE_BYTE),
    EmulatedRun("shuffled"),
)
LARGE_RUN = EmulatedRun("forward", checks=False)


def require_emulator() -> None:
    """Raise DeviceError, which says what to install, if the emulator cannot run."""
    if problem := emulator.missing():
        raise DeviceError(f"the emulator cannot run: {problem}")


class TimedSizes(NamedTuple):
    """The sizes that a GPU times, the layout of the weights, and the names of stated sizes."""

    sizes: Sizes
    layout: str
    stated: Collection[str]


def check_kernel(
    kernel: Kernel,
    cases: Sequence[Case],
    timed: TimedSizes | None = None,
    steps: bool = False,
) -> Iterator[Checked | Finding | Fidelity | Why]:
    """Check a user's kernel on each case; yield the results, and stop with a Finding at a problem.

    A case runs in all `RUNS`; a case with `once` runs only in the first. timed: the sizes that a
    GPU times. At these sizes, or if they are too large, at those of `sizes.parts`, only the result
    is checked. steps: after a Finding, yield the steps of its threads. Raises NotJudged if the
    emulator cannot run the kernel.
    """
    require_emulator()
    path = str(kernel.source.path)
    needs: Finding | ResourceUsage | None = None
    for capability in (USUAL, HOPPER):
        if capability == USUAL and kernels.architecture(path):
            continue
        with emulated(capability=capability), ThreadPoolExecutor(1) as pool:
            function = kernels.load(path, kernel.source.name, kernel.defines)  # starts to compile
            pool.submit(_compile_unoptimised, kernel, capability)
            needs = needs or refused(kernel)
            if isinstance(needs, Finding):
                yield needs
                return
            if needs.capability != capability == USUAL:
                continue
            judge = _Judge(kernel, needs, function, capability, steps)
            again = capability != needs.capability
            for found in judge.results(cases, None if again else timed):
                if not (again and isinstance(found, Checked | Fidelity)):
                    yield found
                if isinstance(found, Finding):
                    return
        if not _TELLS.search(without_literals(kernel.source.text)):
            return


def _compile_unoptimised(kernel: Kernel, capability: str) -> None:
    path = str(kernel.source.path)
    code = kernels.program(path, kernel.defines, kernel.source.name)
    stand_in.RawModule(code, kernels.options(path, capability)).module(debug=True)


class _OverBudget(Exception):
    """A launch has executed as many instructions as it may. finding: a thread that still runs."""

    def __init__(self, found: engine.Finding, budget: int) -> None:
        super().__init__(str(found))
        self.found, self.budget = found, budget


@dataclass
class _Judge:
    """Launches a kernel on the cases, one after the other."""

    kernel: Kernel
    needs: ResourceUsage
    function: Any
    capability: str
    steps: bool = False  # whether to yield the steps of a Finding's threads
    failed: EmulatedRun = RUNS[0]  # the run that has found a problem
    notes: list[engine.Finding] = field(default_factory=list)  # what is no error in a right kernel
    printed: str = ""
    instructions: int = 0  # that the last launch has executed
    kept: bool = False  # whether variables that launches leave changed were examined

    def results(
        self, cases: Sequence[Case], timed: TimedSizes | None
    ) -> Iterator[Checked | Finding | Fidelity | Why]:
        """Yield the results of all cases, up to the first Finding."""
        try:
            self._forget()
        except KernelError as error:
            yield of_compiler(self.kernel.source, str(error))
            return
        except DeviceError as error:
            raise NotJudged(f"{self.kernel.source.file}: not judged: {error}") from None
        yield self._fidelity()
        for case in cases:
            found = self._checked(case)
            yield found
            if isinstance(found, Finding):
                if self.steps:
                    yield self._why(case, found)
                return
        if timed and timed.sizes not in [each.sizes for each in cases]:
            yield from self._at_timed_sizes(timed)

    def _module(self, debug: bool) -> Module:
        found: Module = self.function.found.module.module(debug)
        return found

    def _forget(self) -> None:
        """Give the variables of the file the values that they have before the first launch."""
        for debug in (False, True):
            self._module(debug).memory.clear()

    def _fidelity(self) -> Fidelity:
        """Describe the kernel's instructions. Raises NotJudged if the emulator lacks one."""
        source = self.kernel.source
        module = self._module(debug=False)
        try:
            made = encode(module, source.name)
        except UnsupportedError as error:
            at = error.place
            own = at and Path(module.files.get(at.file, "")).name == source.file
            place = f"{source.file}:{at.line}" if at and own else source.file
            raise NotJudged(
                f"{place}: not judged: the emulator does not execute {error}: check the kernel on "
                "a GPU"
            ) from None
        return Fidelity(table.fidelity(made.forms, len(made.code)))

    def _checked(self, case: Case) -> Checked | Finding:
        """Return the result of a case, or a Finding if there is a problem.

        Raises InputError for a case of usual sizes with an invalid launch geometry.
        """
        try:
            at = values(self.kernel.operation, case.inputs, case.attrs).sizes
            if finding := _unlaunchable(self.kernel, at, self.needs):
                return replace(finding, at=f"at {case.label}")
            return self._in_every_order(case)
        except NotJudged:
            raise
        except InputError as error:
            if not case.hint:
                raise
            return Finding(f"{error}\n{case.hint}", at=f"at {case.label}")

    def _in_every_order(self, case: Case) -> Checked | Finding:
        """Return the worst result of a case in all thread orders, or the first Finding."""
        done: list[Checked] = []
        for run in self._runs(case):
            try:
                found = self._run(case, run)
                if not _wrong(found) and (kept := self._examined(case, run)):
                    found = kept
            except _OverBudget as error:
                found = self._endless(case, run, error)
            if _wrong(found):
                self.failed = run
                printed = done[0].printed if done else found.printed
                return replace(self._explained(case, run, found), printed=printed)
            assert isinstance(found, Checked)
            done.append(found)
        worst = max(done, key=lambda each: inf if isnan(each.max_rel) else each.max_rel)
        return replace(worst, printed=done[0].printed)

    def _runs(self, case: Case) -> Sequence[EmulatedRun]:
        return RUNS[: 1 if case.once else None]

    def _explained(self, case: Case, run: EmulatedRun, found: Checked | Finding) -> Finding:
        """Return the Finding of a wrong run; name the setting without which the kernel is right."""
        notes = list(self.notes)
        wrong = found if isinstance(found, Finding) else comparison.finding(found, case)
        if isinstance(found, Finding) and found.kind in ("race", "does_not_end", "kept_state"):
            return wrong
        for easier, cause in (
            (run, comparison.of_second_launch),
            (run._replace(fill=comparison.NAN_BYTE), comparison.of_old_values),
            (run._replace(variant=0), _of_place),
            (run._replace(order=ORDERS[0], debug=False, variant=0), _of_order),
        ):
            self._forget()
            if easier != run or cause is comparison.of_second_launch:
                try:
                    if not _wrong(self._run(case, easier)):
                        return cause(wrong)
                except _OverBudget:
                    continue
        said = [f"\nPossibly because {of_engine(self.kernel.source, each, '').text}" for each in notes]
        lines = tuple(each.now.line for each in notes)
        return replace(wrong, text=wrong.text + "".join(said), lines=wrong.lines or lines)

    def _examined(self, case: Case, run: EmulatedRun) -> Finding | None:
        """Return a Finding if values that earlier launches left make a later launch wrong."""
        source, at = self.kernel.source, f"at {case.label}, {run.order} order"
        left = next((each for each in self.notes if each.kind == "kept"), None)
        if left is None or self.kept:
            return None
        self.kept = True
        found = of_engine(source, left, at)
        if left.size > MOST_KEPT:
            return found
        memory = self._module(run.debug).memory
        before = {name: np.frombuffer(bytes(data), np.uint8) for name, data in memory.items()}
        self._run(case, run)
        after = {name: np.frombuffer(bytes(data), np.uint8) for name, data in memory.items()}
        for launches in LATER:
            for name, data in after.items():
                memory[name] = _advanced(before[name], data, launches)
            if _wrong(self._run(case, run)):
                return found
        self._forget()
        return None

    def _endless(self, case: Case, run: EmulatedRun, error: _OverBudget) -> Finding:
        """Return the Finding for a launch that executes FACTOR times the template's instructions.

        Raises NotJudged for other launches.
        """
        operation = self.kernel.operation
        stored = (self.kernel.dtype, operation.workload.layout)
        template = matched(read(path_of(operation)), operation, stored)
        function = kernels.load(str(template.source.path), template.source.name, template.defines)
        judge = replace(self, kernel=template, function=function)
        judge._run(case, run)
        if judge.instructions * FACTOR > error.budget:
            raise NotJudged(
                f"{self.kernel.source.file}: not judged: a launch still runs after "
                f"{error.budget:,} instructions of warps at {case.label}: check the kernel on a "
                "GPU, or state other sizes"
            )
        found = of_engine(self.kernel.source, error.found, f"at {case.label}, {run.order} order")
        return replace(
            found,
            text=f"{found.text} after {error.budget:,} instructions of warps\nthe template executes "
            f"{judge.instructions:,}",
        )

    def _run(
        self, case: Case, run: EmulatedRun, budget: int = engine.BUDGET
    ) -> Checked | Finding:
        """Launch the kernel once. Return the result, or a Finding if the emulator finds an error.

        Raises _OverBudget, and NotJudged.
        """
        source = self.kernel.source
        seen: list[engine.Result] = []
        checks = stand_in.Checks(run.checks, budget, run.variant, run.debug, seen.append)
        device = stand_in.device(run.order, stand_in.MULTIPROCESSORS, checks, self.capability)
        early = stand_in.early_launches() if source.waits else nullcontext()
        error: engine.Finding | None = None
        try:
            with device, early:
                found = comparison.compare(self.kernel, case, guarded=False, fill=run.fill)
        except stand_in.EmulatorError as failed:
            error = failed.finding
        except engine.LaunchError as failed:
            raise NotJudged(f"{source.file}: not judged: {failed}") from None
        self.instructions = sum(each.instructions for each in seen)
        self.notes = [note for each in seen for note in each.findings if not note.fatal]
        printed = "".join(each.printed for each in seen)
        unwritten = [each for each in self.notes if each.kind == "unwritten" and run.debug]
        if error is None and unwritten:
            error = unwritten[0]
        if error and error.kind == "endless":
            raise _OverBudget(error, budget)
        if error:
            at = f"at {case.label}, {run.order} order"
            return replace(of_engine(source, error, at), printed=printed)
        ran = f"\nthe threads ran in {run.order} order" if run.order != ORDERS[0] else ""
        return replace(found, problem=found.problem and found.problem + ran, printed=printed)

    def _why(self, case: Case, found: Finding) -> Why:
        return why(Launcher(self.kernel, case, self.failed, self.capability), found)

    def _at_timed_sizes(self, timed: TimedSizes) -> list[Checked | Finding]:
        """Return results at the timed sizes or, if these take too long, at `sizes.parts`."""
        operation = self.kernel.operation
        try:
            late = _unlaunchable(self.kernel, sizes_at(operation, timed.sizes), self.needs)
        except InputError as error:
            late = Finding(str(error))
        if late:
            text = f"{late.text}\nright at the sizes before; a GPU times {described(timed.sizes)}"
            return [replace(late, text=f"{text}: {OTHER}")]
        of = operation, timed.sizes, timed.stated
        whole, parts = sizes.timed(*of), sizes.parts(*of)
        found = self._all_right(whole, timed.layout)
        return found if found or whole == parts else self._all_right(parts, timed.layout)

    def _all_right(self, cases: Iterable[sizes.Case], layout: str) -> list[Checked | Finding]:
        """Run cases of large sizes up to the first Finding; leave out cases that take too long."""
        found: list[Checked | Finding] = []
        for at, attrs in cases:
            case = replace(case_of(self.kernel, at, attrs, layout), hint=OTHER_SIZES, once=True)
            with suppress(_OverBudget):
                result = self._run(case, LARGE_RUN, LARGE_BUDGET)
                if _wrong(result):
                    found.append(self._explained(case, LARGE_RUN, result))
                    break
                found.append(result)
        return found


def _unlaunchable(kernel: Kernel, at: Mapping[str, int], needs: ResourceUsage) -> Finding | None:
    """Return a Finding if no GPU can run the kernel's launch at these sizes, else None.

    Raises InputError for an invalid launch geometry.
    """
    most = int(device_attribute("MaxSharedMemoryPerBlockOptin"))
    return too_many(kernel, needs, kernel.geometry(at), most)


def _wrong(found: Checked | Finding) -> bool:
    return isinstance(found, Finding) or bool(found.problem)


def _of_order(found: Finding) -> Finding:
    return replace(found, text=found.text + ORDER_COUNTS)


def _of_place(found: Finding) -> Finding:
    return replace(found, text=f"{PLACE_COUNTS}\n{found.text}")


def _advanced(before: NDArray[np.uint8], after: NDArray[np.uint8], launches: int) -> bytearray:
    """Return a variable after further launches, each of which changes its words as one did."""
    end = len(after) // 4 * 4
    words, old = (each[:end].view(np.uint32) for each in (after, before))
    made = words + (words - old) * np.uint32(launches)
    return bytearray(made.tobytes() + after[end:].tobytes())
