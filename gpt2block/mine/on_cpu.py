"""Check a user's kernel and built-in kernels on the emulator, in three orders of threads."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from math import inf, isnan
from typing import Any, NamedTuple

import numpy as np

from gpt2block import emulator
from gpt2block.bench import measure
from gpt2block.cuda import kernels
from gpt2block.cuda.arrays import Bound, device_attribute
from gpt2block.emulator import ORDERS, Build, Checks, ShimError, emulated
from gpt2block.errors import DeviceError, InputError, KernelError, NotJudged
from gpt2block.mine import comparison
from gpt2block.mine.arguments import sizes_at, values
from gpt2block.mine.cases import Case
from gpt2block.mine.comparison import Checked
from gpt2block.mine.confined import confined
from gpt2block.mine.finding import Finding, explained, of_compiler, of_emulator
from gpt2block.mine.kernel import Kernel, described
from gpt2block.mine.refused import ResourceUsage, refused, too_many, without_literals
from gpt2block.mine.source import UserSource
from gpt2block.ops.operation import Attrs, Operation, Sizes, Variant

LIMIT_S = 10.0  # time limit of one launch in seconds
OTHER = "--shape checks and times others"


class EmulatedRun(NamedTuple):
    """Settings of an emulated launch: thread order, errors to search for, mode of compilation.

    A user's kernel is built "patterned": g++ fills uninitialized variables with a pattern, so that
    a kernel that reads them cannot be right by chance.
    """

    order: emulator.Order
    races: bool = False
    rehearsed: bool = False  # whether two launches on other values come first in the same process
    build: Build = "patterned"
    fill: int = comparison.NAN_BYTE  # byte that fills the outputs before the launch


# The first run uses AddressSanitizer, whose reports have the most details.
RUNS = (
    EmulatedRun(ORDERS[0]),
    EmulatedRun(ORDERS[0], races=True),
    EmulatedRun(ORDERS[1], rehearsed=True, build="unoptimised", fill=comparison.POSITIVE_BYTE),
    EmulatedRun(ORDERS[2], fill=comparison.NEGATIVE_BYTE),
)
_INCLUDED = r"^[ \t]*#[ \t]*include[ \t]*<(%s)>"
# Regex of code that the emulator cannot run → the limitation, and what to do instead.
_ON_GPU = {
    _INCLUDED % r"(?:cub|thrust)/.*": "has no CUB and no Thrust: write by hand what the file uses, "
    "such as the reduction of lib/common.cuh",
    _INCLUDED % r"cuda_fp\d\.h": "has no type of 8 bits: convert by hand, as fp8/convert.cu does",
    _INCLUDED % r"cuda/(?:barrier|pipeline)|cooperative_groups/memcpy_async\.h": "does not have "
    "this header: use __syncthreads() and, for copies, cuda_pipeline.h",
    _INCLUDED % r"(?:cuda|cute|cutlass)/.*|cu(?:rand|blas)\w*\.h": "does not have this header: "
    "write by hand what the file uses",
}
Prepared = tuple[Operation, Sizes, tuple[Any, ...], measure.Truth]


def require_emulator() -> None:
    """Raise DeviceError, which says what to install, if the emulator cannot run."""
    if problem := emulator.missing():
        raise DeviceError(
            f"the emulator compiles kernels with g++, but {problem}: {emulator.INSTALL}"
        )


def check_kernel(
    kernel: Kernel, cases: Sequence[Case], limit_s: float = LIMIT_S, timed: Sizes | None = None
) -> Iterator[Checked | Finding]:
    """Check a user's kernel on each case; yield the results, and stop with a Finding at a problem.

    First, NVRTC compiles the file. An ordinary case runs in forward order under AddressSanitizer,
    then with the search for races, then in the other orders. A case of special inputs runs only in
    forward order. limit_s: time limit of each launch. timed: the sizes that a GPU would time, by
    default the documented sizes; only the launch geometry is evaluated for them.
    """
    require_emulator()
    _check_judged(kernel.source)
    emulator.loader.translated(emulator.Source.shipped(str(kernel.source.path)), kernel.defines)
    needs = refused(kernel)
    if isinstance(needs, Finding):
        yield needs
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # g++ does not repeat warnings for a cached program
        _compile_ahead(kernel, cases[0])
        for case in cases:
            found = _checked(kernel, case, needs, limit_s)
            yield found
            if isinstance(found, Finding):
                return
    at = timed or kernel.operation.workload.sizes
    try:
        late = _unlaunchable(kernel, sizes_at(kernel.operation, at), needs)
    except InputError as error:
        late = Finding(str(error))
    if late:
        what = f"{late.what}\nright at the sizes before; a GPU times {described(at)}: {OTHER}"
        yield replace(late, what=what)


def _unlaunchable(kernel: Kernel, sizes: Mapping[str, int], needs: ResourceUsage) -> Finding | None:
    """Return a Finding if no GPU can run the kernel's launch at these sizes, else None.

    Raises InputError for an invalid launch geometry.
    """
    with emulated():
        most = int(device_attribute("MaxSharedMemoryPerBlockOptin"))
        return too_many(kernel, needs, kernel.geometry(sizes), most)


def _check_judged(source: UserSource) -> None:
    """Raise NotJudged for instructions and headers that the emulator does not support."""
    text = without_literals(source.text)
    for pattern, what in _ON_GPU.items():
        if match := re.search(pattern, text, re.MULTILINE):
            place = f"{source.file}:{text.count(chr(10), 0, match.start()) + 1}"
            raise NotJudged(f"{place}: {match[1]}: the emulator {what}, or check it on a GPU")


def _checked(kernel: Kernel, case: Case, needs: ResourceUsage, limit_s: float) -> Checked | Finding:
    """Check a kernel on one case; return the result, or a Finding if there is a problem.

    Raises InputError for a case of usual sizes with an invalid launch geometry.
    """
    try:
        sizes = values(kernel.operation, case.inputs, case.attrs).sizes
        if finding := _unlaunchable(kernel, sizes, needs):
            return replace(finding, at=f"at {case.label}")
        return _in_every_order(kernel, case, limit_s)
    except InputError as error:
        if not case.hint:
            raise
        return Finding(f"{error}\n{case.hint}", at=f"at {case.label}")


def _in_every_order(kernel: Kernel, case: Case, limit_s: float) -> Checked | Finding:
    """Run a case in three thread orders; return the worst result, or the first Finding."""
    done: list[Checked] = []
    notes: list[str] = []
    for run in RUNS[:1] if case.name else RUNS:
        found = _run(kernel, case, run, limit_s, notes)
        if _wrong(found):
            for easier, cause in (
                (run._replace(rehearsed=False), comparison.of_second_launch),
                (run._replace(fill=comparison.NAN_BYTE), comparison.of_old_values),
            ):
                if easier != run and not _wrong(_run(kernel, case, easier, limit_s, [])):
                    wrong = found if isinstance(found, Finding) else comparison.finding(found, case)
                    return cause(wrong)
        if isinstance(found, Finding):
            return found
        done.append(found)
    for each in done:
        if each.problem:
            wrong = comparison.finding(replace(each, printed=done[0].printed), case)
            text = emulator.Source.shipped(str(kernel.source.path))
            unset = emulator.unset_variables(text, kernel.defines)
            return explained(kernel.source, wrong, [*notes, *unset])
    worst = max(done, key=lambda each: inf if isnan(each.max_rel) else each.max_rel)
    return replace(worst, printed=done[0].printed)


def _wrong(found: Checked | Finding) -> bool:
    return isinstance(found, Finding) or bool(found.problem)


def _run(
    kernel: Kernel, case: Case, run: EmulatedRun, limit_s: float, notes: list[str]
) -> Checked | Finding:
    """Launch a kernel in the emulator; return the result, or a Finding if the emulator fails.

    notes: list to which the emulator's notes about possible causes are added.
    """
    texts: list[str] = []
    limit_s *= 3 if run.rehearsed else 1
    checks = Checks(
        run.races, limit_s, texts.append, run.rehearsed, confined(run.races), run.build,
        notes.append,
    )  # fmt: skip
    try:
        with (
            emulated(run.order, checks=checks) as device,
            device.early_launches() if kernel.source.waits else nullcontext(),
        ):
            found = comparison.compare(kernel, case, guarded=False, fill=run.fill)
    except ShimError as error:
        if "does not compile" in str(error):
            return of_compiler(kernel.source, error.report)
        at = f"at {case.label}, {run.order} order"
        return replace(of_emulator(kernel.source, error.report, at), printed="".join(texts))
    problem = found.problem and f"{found.problem} ({run.order} order)"
    return replace(found, problem=problem, printed="".join(texts))


def _compile_ahead(kernel: Kernel, case: Case) -> None:
    """Start compiling the emulator's programs for a kernel, so that they compile in parallel."""
    from gpt2block.emulator import stand_in  # noqa: PLC0415  (replaces CuPy only if it is used)

    with emulated():
        arrays = tuple(map(measure.uploaded, case.inputs))
        checks = [Checks(run.races, build=run.build) for run in RUNS]
        stand_in.compile_ahead(kernel.bind(arrays, **case.attrs).launches, checks)


@dataclass(frozen=True)
class Rung:
    """The result of a built-in variant on the emulator: its worst error over sizes and orders."""

    variant: str
    kernels: tuple[str, ...]
    sizes: tuple[Sizes, ...]  # sizes that the variant supports
    max_abs: float
    max_rel: float
    dtype: str
    problem: str = ""

    @property
    def right(self) -> bool:
        return not self.problem and self.max_rel <= measure.tolerance(self.dtype)


def check_variants(
    operation: Operation,
    variants: Iterable[Variant],
    stored: tuple[str, str],
    cases: Sequence[tuple[Sizes, Attrs]],
    seen: Callable[[Sequence[Variant]], Iterable[Variant]] = iter,
) -> tuple[list[Rung], list[str]]:
    """Check every variant at every size that it supports; return results and messages.

    There is a message for each variant that cannot run. seen: wraps the iteration over the
    variants, such as a progress bar.
    """
    require_emulator()
    dtype, layout = stored
    prepared = []
    for sizes, attrs in cases:
        own = operation.with_workload(attrs={**operation.workload.attrs, **attrs})
        prepared.append((own, sizes, *measure.inputs_and_truth(own, sizes, dtype, layout)))
    variants = tuple(variants)
    _compile_all(variants, prepared)
    rungs, skipped = [], []
    for variant in seen(variants):
        if required := kernels.architecture(variant.file):
            skipped.append(
                f"{variant.name}: wgmma and TMA, instructions of {required}, are not emulated"
            )
            continue
        found = _variant(variant, prepared, dtype)
        if isinstance(found, str):
            skipped.append(f"{variant.name}: {found}")
        else:
            rungs.append(found)
    return rungs, skipped


def _variant(
    variant: Variant,
    prepared: Sequence[Prepared],
    dtype: str,
) -> Rung | str:
    """Check a variant at each size that it supports; if it supports none, return the reason."""
    taken: list[Sizes] = []
    off, why = (0.0, 0.0), ""
    for operation, sizes, host, truth in prepared:
        try:
            for run in sorted(RUNS, key=lambda run: run.races):  # search for races last
                with emulated(run.order, checks=Checks(run.races)):
                    arrays = tuple(map(measure.uploaded, host))  # keep arrays alive
                    bound = _bound(operation, variant, arrays)
                    measure.poison(bound.out, arrays)
                    found = measure.errors(np.asarray(bound.run()), truth)
                off = max(off, found, key=lambda each: inf if isnan(each[1]) else each[1])
        except InputError as error:
            prefix = f"{operation.name} variant {variant.name}: "
            why = why or str(error).removeprefix(prefix)
            continue
        except ShimError as error:
            problem = f"{error.report.splitlines()[0]} at {described(sizes)}"
            return Rung(variant.name, variant.kernels, (sizes,), *off, dtype, problem)
        taken.append(sizes)
    if not taken:
        return why
    return Rung(variant.name, variant.kernels, tuple(taken), *off, dtype)


def _compile_all(variants: Iterable[Variant], prepared: Sequence[Prepared]) -> None:
    """Start compiling the programs of all variants, so that some compile while others run."""
    from gpt2block.emulator import stand_in  # noqa: PLC0415  (replaces CuPy only if it is used)

    with emulated():
        for variant in variants:
            for operation, _, host, _ in prepared:
                with suppress(InputError, KernelError):  # `_variant` reports these errors
                    arrays = tuple(map(measure.uploaded, host))
                    stand_in.compile_ahead(_bound(operation, variant, arrays).launches)


def _bound(operation: Operation, variant: Variant, arrays: tuple[Any, ...]) -> Bound:
    options = {**operation.workload.attrs, **measure.options_for(operation, variant)}
    return operation.bind(arrays, **options)
