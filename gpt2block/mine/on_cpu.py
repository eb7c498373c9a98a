"""Check a user's kernel on the emulator, in three orders of threads."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from math import inf, isnan
from threading import Event
from typing import Literal, NamedTuple

from gpt2block import emulator
from gpt2block.bench import measure
from gpt2block.cuda.arrays import device_attribute
from gpt2block.emulator import (
    ORDERS,
    Build,
    Checks,
    OverBudget,
    ShimError,
    emulated,
    programs,
    stand_in,
)
from gpt2block.emulator.library import supported
from gpt2block.errors import DeviceError, InputError, NotJudged
from gpt2block.mine import comparison, sizes
from gpt2block.mine.arguments import sizes_at, values
from gpt2block.mine.cases import OTHER_SIZES, Case
from gpt2block.mine.cases import case as case_of
from gpt2block.mine.comparison import Checked
from gpt2block.mine.confined import confined
from gpt2block.mine.finding import Finding, explained, of_compiler, of_emulator
from gpt2block.mine.kernel import Kernel, described, matched
from gpt2block.mine.refused import ResourceUsage, refused, too_many, without_literals
from gpt2block.mine.reserved import check_text
from gpt2block.mine.source import UserSource, read
from gpt2block.mine.templates import path_of
from gpt2block.mine.why import Launcher, Why, why
from gpt2block.ops.operation import Operation, Sizes

LIMIT_S = 20.0  # limit of CPU time of one launch in seconds
FIRST_S = 5.0  # the limit at the smallest size
FACTOR = 100  # a kernel counts as endless if it takes this many times the template's CPU time
FACTOR_OF_WAITS = 1000  # such a factor for a kernel that waits for another block, at larger sizes
LARGE_S = 3.0  # the limit at the sizes that a GPU times
AHEAD = 3  # cases whose launches are started ahead
LAUNCHES = 40  # launches on other values in the same process, at the smallest size
ORDER_COUNTS = (
    ", and the result is right if they run one after the other from the first: it depends on the "
    "order of threads, which a GPU does not define"
)
OTHER = "--shape checks and times others"


class EmulatedRun(NamedTuple):
    """Settings of an emulated launch: thread order, errors to search for, mode of compilation.

    A user's kernel is built "patterned": g++ fills uninitialized variables with a pattern, so that
    a kernel that reads them cannot be right by chance.
    """

    order: emulator.Order
    races: bool = False
    rehearsed: int = 0  # launches on other values that come first in the same process
    build: Build = "patterned"
    fill: int = comparison.NAN_BYTE  # byte that fills the outputs before the launch


# The first run uses AddressSanitizer, whose reports have the most details.
RUNS = (
    EmulatedRun(ORDERS[0]),
    EmulatedRun(ORDERS[0], races=True),
    EmulatedRun(ORDERS[1], rehearsed=2, build="unoptimised", fill=comparison.POSITIVE_BYTE),
    EmulatedRun(ORDERS[2], fill=comparison.NEGATIVE_BYTE),
)
LARGE_RUN = EmulatedRun(ORDERS[0], build="fast")
_INCLUDED = r"^[ \t]*#[ \t]*include[ \t]*<(%s)>"
# Regex of code that the emulator cannot run → the limitation, and what to do instead.
_ON_GPU = {
    _INCLUDED % rf"(?!(?:{'|'.join(map(re.escape, supported()))})>)"
    r"(?:(?:cub|cuda|cute|cutlass|thrust|cooperative_groups)/[^>]*|cu\w+\.h)": "does not have this "
    "header: write by hand what the file uses",
}


def require_emulator() -> None:
    """Raise DeviceError, which says what to install, if the emulator cannot run."""
    if problem := emulator.missing():
        raise DeviceError(
            f"the emulator compiles kernels with g++, but {problem}: {emulator.INSTALL}"
        )


class TimedSizes(NamedTuple):
    """The sizes that a GPU times, the layout of the weights, and the names of stated sizes."""

    sizes: Sizes
    layout: str
    stated: Collection[str]


def check_kernel(
    kernel: Kernel,
    cases: Sequence[Case],
    limit_s: float = LIMIT_S,
    timed: TimedSizes | None = None,
    steps: bool = False,
) -> Iterator[Checked | Finding | Why]:
    """Check a user's kernel on each case; yield the results, and stop with a Finding at a problem.

    First, NVRTC compiles the file. A case runs in forward order under AddressSanitizer, then with
    the search for races, then in the other orders; a case with `once` runs only in forward order.
    limit_s: limit of CPU time of each launch. timed: the sizes that a GPU times. At these sizes, or
    if they are too large, at those of `sizes.parts`, only the result is checked. steps: after a
    Finding, yield the steps of its threads. Raises NotJudged if the emulator cannot run the kernel.
    """
    require_emulator()
    check_text(kernel.source)
    _check_judged(kernel.source)
    emulator.loader.translated(emulator.Source.shipped(str(kernel.source.path)), kernel.defines)
    needs = refused(kernel)
    if isinstance(needs, Finding):
        yield needs
        return
    with warnings.catch_warnings(), emulated(), _pool() as pool:
        warnings.simplefilter("ignore")  # g++ does not repeat warnings for a cached program
        _compile_ahead(kernel, cases[0])
        yield from _Judge(kernel, needs, limit_s, pool, steps).results(cases, timed)


@contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    """Return a pool whose launches end when the context ends, also if they still run."""
    pool = ThreadPoolExecutor(1 + (os.cpu_count() or 1))  # a thread prepares large inputs
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        programs.stop_confined()


Ran = tuple[Checked | Finding, list[str]]  # a launch's result, and notes about possible causes


@dataclass
class _Judge:
    """Launches a kernel in threads, and collects the results in the order of the cases."""

    kernel: Kernel
    needs: ResourceUsage
    limit_s: float
    pool: ThreadPoolExecutor
    steps: bool = False  # whether to yield the steps of a Finding's threads
    # begun: set when large sizes may run. ended: set when no further case needs to run.
    begun: Event = field(default_factory=Event)
    ended: Event = field(default_factory=Event)

    def results(
        self, cases: Sequence[Case], timed: TimedSizes | None
    ) -> Iterator[Checked | Finding | Why]:
        """Yield the results of all cases, up to the first Finding."""
        launched: dict[int, list[Future[Ran]]] = {}
        large: Future[list[Checked | Finding]] | None = None
        if timed and timed.sizes not in [each.sizes for each in cases]:
            large = self.pool.submit(self._at_timed_sizes, timed)
        try:
            for i, case in enumerate(cases):
                for ahead in range(i, min(len(cases), i + (AHEAD if i else 1))):
                    if ahead not in launched:
                        launched[ahead] = self._launched(cases[ahead], first=ahead == 0)
                found = self._checked(case, launched[i], first=i == 0)
                yield found
                if isinstance(found, Finding):
                    if self.steps:
                        self.pool.shutdown(wait=False, cancel_futures=True)
                        yield self._why(case, found)
                    return
                self.begun.set()
            if large:
                yield from large.result()
        finally:
            self.ended.set()
            self.begun.set()

    def _launched(self, case: Case, first: bool) -> list[Future[Ran]]:
        """Start the launches of a case. first: whether it is the first case."""
        first &= _small(case, self.kernel.operation)
        limit_s = min(FIRST_S, self.limit_s) if first else self.limit_s
        launched = []
        for run in self._runs(case):
            count = LAUNCHES if first and run.rehearsed else run.rehearsed
            settings = run._replace(rehearsed=count)
            launched.append(self.pool.submit(self._run, case, settings, limit_s))
        return launched

    def _runs(self, case: Case) -> Sequence[EmulatedRun]:
        return RUNS[: 1 if case.once else None]

    def _checked(
        self, case: Case, launched: Sequence[Future[Ran]], first: bool
    ) -> Checked | Finding:
        """Return the result of a case, or a Finding if there is a problem.

        Raises InputError for a case of usual sizes with an invalid launch geometry.
        """
        try:
            if finding := self._unlaunchable(case):
                return replace(finding, at=f"at {case.label}")
            return self._in_every_order(case, launched, first)
        except NotJudged:
            raise
        except InputError as error:
            if not case.hint:
                raise
            return Finding(f"{error}\n{case.hint}", at=f"at {case.label}")

    def _why(self, case: Case, found: Finding) -> Why:
        said = f"{found.text}\n{found.at}"
        run = next((run for run in RUNS if f"{run.order} order" in said), RUNS[0])
        # Only a program that is not optimised distinguishes several barriers in the same line.
        build = run.build if found.kind == "divergent_barrier" else "patterned"
        launcher = Launcher(self.kernel, case, run.order, run.fill, build, self.limit_s)
        return why(launcher, found)

    def _unlaunchable(self, case: Case) -> Finding | None:
        at = values(self.kernel.operation, case.inputs, case.attrs).sizes
        return _unlaunchable(self.kernel, at, self.needs)

    def _in_every_order(
        self, case: Case, launched: Sequence[Future[Ran]], first: bool
    ) -> Checked | Finding:
        """Return the worst result of a case in all thread orders, or the first Finding."""
        done: list[Checked] = []
        notes: list[str] = []
        for run, future in zip(RUNS, launched, strict=False):
            try:
                found, noted = future.result()
            except OverBudget as error:
                return self._endless(case, run, error, first)
            notes += noted
            if _wrong(found) and (cause := self._right_if_easier(case, run)):
                wrong = found if isinstance(found, Finding) else comparison.finding(found, case)
                return cause(wrong)
            if isinstance(found, Finding):
                return found
            done.append(found)
        for run, each in zip(RUNS, done, strict=False):
            if each.problem:
                problem = each.problem + (ORDER_COUNTS if run.order != ORDERS[0] else "")
                off = replace(each, problem=problem, printed=done[0].printed)
                return self._explained(off, case, notes)
        worst = max(done, key=lambda each: inf if isnan(each.max_rel) else each.max_rel)
        return replace(worst, printed=done[0].printed)

    def _right_if_easier(self, case: Case, run: EmulatedRun) -> Callable[[Finding], Finding] | None:
        """Explain a wrong run by the setting without which the kernel is right, if there is one."""
        for easier, cause in (
            (run._replace(rehearsed=0), comparison.of_second_launch),
            (run._replace(fill=comparison.NAN_BYTE), comparison.of_old_values),
        ):
            if easier != run:
                with suppress(OverBudget):
                    found, _ = self._run(case, easier, self.limit_s)
                    if not _wrong(found):
                        return cause
        return None

    def _explained(self, found: Checked, case: Case, notes: Sequence[str]) -> Finding:
        source = self.kernel.source
        text = emulator.Source.shipped(str(source.path))
        unset = emulator.unset_variables(text, self.kernel.defines)
        return explained(source, comparison.finding(found, case), [*notes, *unset])

    def _endless(self, case: Case, run: EmulatedRun, error: OverBudget, first: bool) -> Finding:
        """Return the Finding for a launch that takes FACTOR times the CPU time of the template.

        Such a launch at the first sizes counts as endless. At other sizes the factor is
        FACTOR_OF_WAITS, and the launch must wait for another block. Raises NotJudged otherwise.
        """
        operation = self.kernel.operation
        waits = "cooperative launch" in error.report
        limit_s = error.limit_s / (FACTOR if first else FACTOR_OF_WAITS)
        stored = (self.kernel.dtype, operation.workload.layout)
        template = matched(read(path_of(operation)), operation, stored)
        try:
            if first or waits:
                replace(self, kernel=template)._run(case, run, limit_s)
        except OverBudget:
            first = waits = False
        if not (first or waits):
            raise NotJudged(
                f"{self.kernel.source.file}: not judged: a launch still runs after "
                f"{error.limit_s:g} s of CPU time at {case.label}: check the kernel on a GPU, or "
                "state other sizes"
            )
        at = f"at {case.label}, {run.order} order"
        found = of_emulator(self.kernel.source, error.report, at)
        return replace(found, text=f"{found.text}\nthe template needs less than {limit_s:g} s")

    def _run(self, case: Case, run: EmulatedRun, limit_s: float) -> Ran:
        """Launch the kernel once. Return the result, or a Finding if the emulator finds an error.

        Raises OverBudget, and NotJudged.
        """
        texts: list[str] = []
        notes: list[str] = []
        limit_s *= 2 if run.rehearsed else 1
        without_asan = run.races or run.build == "fast"
        checks = Checks(
            run.races, limit_s, texts.append, run.rehearsed, confined(without_asan, limit_s),
            run.build, notes.append, varied=_variation(run, case, self.kernel.operation),
        )  # fmt: skip
        source = self.kernel.source
        try:
            with (
                stand_in.device(run.order, stand_in.MULTIPROCESSORS, checks),
                stand_in.early_launches() if source.waits else nullcontext(),
            ):
                found = comparison.compare(self.kernel, case, guarded=False, fill=run.fill)
        except OverBudget:
            raise
        except ShimError as error:
            if "does not compile" in str(error):
                return self._uncompiled(of_compiler(source, error.report)), notes
            at = f"at {case.label}, {run.order} order"
            wrong = of_emulator(source, error.report, at)
            return replace(wrong, printed="".join(texts)), notes
        ran = f"\nthe threads ran in {run.order} order" if run.order != ORDERS[0] else ""
        problem = found.problem and found.problem + ran
        return replace(found, problem=problem, printed="".join(texts)), notes

    def _uncompiled(self, found: Finding) -> Finding:
        """Return the Finding of g++'s errors; raise NotJudged if NVRTC has accepted the file."""
        if self.needs.accepted:
            said = found.text.replace(":\n", ": ").partition("\n")[0]
            raise NotJudged(
                f"{said}: not judged: CUDA's compiler accepts the file, but the emulator lacks "
                "something that it uses: check the kernel on a GPU"
            )
        return found

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
            self.begun.wait()
            if self.ended.is_set():
                break
            with suppress(OverBudget):
                result, _ = self._run(case, LARGE_RUN, LARGE_S)
                if isinstance(result, Finding) and result.kind == "out_of_bounds":
                    with suppress(OverBudget, NotJudged):  # AddressSanitizer reports the line
                        again, _ = self._run(case, RUNS[0], self.limit_s)
                        result = again if isinstance(again, Finding) else result
                if isinstance(result, Checked) and result.problem:
                    result = comparison.finding(result, case)
                found.append(result)
            if found and isinstance(found[-1], Finding):
                break
        return found


def _unlaunchable(kernel: Kernel, at: Mapping[str, int], needs: ResourceUsage) -> Finding | None:
    """Return a Finding if no GPU can run the kernel's launch at these sizes, else None.

    Raises InputError for an invalid launch geometry.
    """
    most = int(device_attribute("MaxSharedMemoryPerBlockOptin"))
    return too_many(kernel, needs, kernel.geometry(at), most)


def _check_judged(source: UserSource) -> None:
    """Raise NotJudged for instructions and headers that the emulator does not support."""
    text = without_literals(source.text)
    for pattern, what in _ON_GPU.items():
        if match := re.search(pattern, text, re.MULTILINE):
            place = f"{source.file}:{text.count(chr(10), 0, match.start()) + 1}"
            raise NotJudged(f"{place}: {match[1]}: the emulator {what}, or check it on a GPU")


def _small(case: Case, operation: Operation) -> bool:
    """Return whether a case is so small that it can be launched many times."""
    return sizes.cost(operation, case.sizes, case.attrs) < sizes.SMALL


def _variation(
    run: EmulatedRun, case: Case, operation: Operation
) -> Literal["", "before", "after"]:
    """Return when a case also runs on slightly changed arrays: "" (never) unless it is small.

    The first case runs on them "before" the launch that counts, other cases "after" it.
    """
    if not run.rehearsed or not _small(case, operation):
        return ""
    return "before" if run.rehearsed == LAUNCHES else "after"


def _wrong(found: Checked | Finding) -> bool:
    return isinstance(found, Finding) or bool(found.problem)


def _compile_ahead(kernel: Kernel, case: Case) -> None:
    """Start compiling the emulator's programs for a kernel, so that they compile in parallel."""
    arrays = tuple(map(measure.uploaded, case.inputs))
    checks = [Checks(run.races, build=run.build) for run in (*RUNS, LARGE_RUN)]
    stand_in.compile_ahead(kernel.bind(arrays, **case.attrs).launches, checks)
