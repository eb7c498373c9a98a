"""Kernels on the emulator: a user's own and the built-in ones, in three orders of threads."""

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
from gpt2block.errors import DeviceError, InputError, KernelError
from gpt2block.mine import check
from gpt2block.mine.arguments import sizes_at, values
from gpt2block.mine.cases import Case
from gpt2block.mine.check import Checked
from gpt2block.mine.confined import confined
from gpt2block.mine.finding import Finding, explained, of_compiler, of_emulator
from gpt2block.mine.kernel import Kernel, described
from gpt2block.mine.refused import Needs, refused, too_many, without_literals
from gpt2block.mine.source import UserSource
from gpt2block.ops.operation import Attrs, Operation, Sizes, Variant

LIMIT_S = 10.0  # of one launch
OTHER = "--shape checks and times others"


class EmulatedRun(NamedTuple):
    """How a launch runs: the order of threads, what it looks for, and how it is compiled.

    A user's kernel is compiled so that nothing is right by chance.
    """

    order: emulator.Order
    races: bool = False
    rehearsed: bool = False  # after two launches on other values in the same process
    build: Build = "patterned"
    fill: int = check.NAN_BYTE  # the bytes of the outputs before


# First under AddressSanitizer, whose reports say most.
RUNS = (
    EmulatedRun(ORDERS[0]),
    EmulatedRun(ORDERS[0], races=True),
    EmulatedRun(ORDERS[1], rehearsed=True, build="unoptimised", fill=check.POSITIVE_BYTE),
    EmulatedRun(ORDERS[2], fill=check.NEGATIVE_BYTE),
)
_INCLUDED = r"^[ \t]*#[ \t]*include[ \t]*<(%s)>"
# What the emulator cannot judge, and what to do instead.
_ON_GPU = {
    r"\b(asm|__asm__|__asm)\b": "does not run inline PTX: of lib/sm80.cuh it has cp.async and mma",
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
    """Raise DeviceError with what to install if the emulator cannot run."""
    if problem := emulator.missing():
        raise DeviceError(
            f"the emulator compiles kernels with g++, but {problem}: {emulator.INSTALL}"
        )


def check_kernel(
    kernel: Kernel, cases: Sequence[Case], limit_s: float = LIMIT_S, timed: Sizes | None = None
) -> Iterator[Checked | Finding]:
    """The result of each case; ends with a Finding at the first problem.

    timed: the sizes that a GPU times, by default the documented ones, at which a launch is only
    evaluated.

    The compiler of CUDA reads the file before. A case runs forward under AddressSanitizer, then
    with the search for races, then in the other orders; one with special inputs only forward.
    limit_s: of each of these launches.
    """
    require_emulator()
    _check_judged(kernel.source)
    needs = refused(kernel)
    if isinstance(needs, Finding):
        yield needs
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of g++, which a cached program does not repeat
        _compile_ahead(kernel, cases[0])
        for case in cases:
            found = _checked(kernel, case, needs, limit_s)
            yield found
            if isinstance(found, Finding):
                return
    at = timed or kernel.operation.sizes
    try:
        late = _unlaunchable(kernel, sizes_at(kernel.operation, at), needs)
    except InputError as error:
        late = Finding(str(error))
    if late:
        what = f"{late.what}\nright at the sizes before; a GPU times {described(at)}: {OTHER}"
        yield replace(late, what=what)


def _unlaunchable(kernel: Kernel, sizes: Mapping[str, int], needs: Needs) -> Finding | None:
    """Why no launch of these sizes (`Values.sizes`) can run; raises InputError, too."""
    with emulated():
        most = int(device_attribute("MaxSharedMemoryPerBlockOptin"))
        return too_many(kernel, needs, kernel.geometry(sizes), most)


def _check_judged(source: UserSource) -> None:
    """InputError for what only a GPU can run: instructions and headers that g++ cannot compile."""
    text = without_literals(source.text)
    for pattern, what in _ON_GPU.items():
        if found := re.search(pattern, text, re.MULTILINE):
            place = f"{source.file}:{text.count(chr(10), 0, found.start()) + 1}"
            raise InputError(f"{place}: {found[1]}: the emulator {what}, or check it on a GPU")


def _checked(kernel: Kernel, case: Case, needs: Needs, limit_s: float) -> Checked | Finding:
    """The result of a case, or why it cannot be launched. Raises InputError at a usual size."""
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
    """The worst result of three orders, if no launch reports anything."""
    done: list[Checked] = []
    notes: list[str] = []
    for run in RUNS[:1] if case.name else RUNS:
        found = _run(kernel, case, run, limit_s, notes)
        if _wrong(found):
            for easier, cause in (
                (run._replace(rehearsed=False), check.of_second_launch),
                (run._replace(fill=check.NAN_BYTE), check.of_old_values),
            ):
                if easier != run and not _wrong(_run(kernel, case, easier, limit_s, [])):
                    wrong = found if isinstance(found, Finding) else check.finding(found, case)
                    return cause(wrong)
        if isinstance(found, Finding):
            return found
        done.append(found)
    for each in done:
        if each.problem:
            wrong = check.finding(replace(each, printed=done[0].printed), case)
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
    """The result of one launch, or what the emulator reports. notes: gets what may be a cause."""
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
            found = check.compare(kernel, case, guarded=False, fill=run.fill)
    except ShimError as error:
        if "does not compile" in str(error):
            return of_compiler(kernel.source, error.report)
        at = f"at {case.label}, {run.order} order"
        return replace(of_emulator(kernel.source, error.report, at), printed="".join(texts))
    problem = found.problem and f"{found.problem} ({run.order} order)"
    return replace(found, problem=problem, printed="".join(texts))


def _compile_ahead(kernel: Kernel, case: Case) -> None:
    """Start both programs, so that two cores compile at the same time."""
    from gpt2block.emulator import stand_in  # noqa: PLC0415  (it replaces CuPy only when used)

    with emulated():
        arrays = tuple(map(measure.uploaded, case.inputs))
        checks = [Checks(run.races, build=run.build) for run in RUNS]
        stand_in.compile_ahead(kernel.bind(arrays, **case.attrs).launches, checks)


@dataclass(frozen=True)
class Rung:
    """A built-in variant on the emulator: its worst error over sizes and orders."""

    variant: str
    kernels: tuple[str, ...]
    sizes: tuple[Sizes, ...]  # that it takes
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
    """Every variant at every size that it takes, and a line for each that cannot run.

    seen: gets the variants and gives them back one by one, such as a progress bar.
    """
    require_emulator()
    dtype, layout = stored
    prepared = []
    for sizes, attrs in cases:
        own = replace(operation, attrs={**operation.attrs, **attrs})
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
    """A variant at each size, or why it takes none."""
    taken: list[Sizes] = []
    off, why = (0.0, 0.0), ""
    for operation, sizes, host, truth in prepared:
        try:
            for run in sorted(RUNS, key=lambda run: run.races):  # errors before races
                with emulated(run.order, checks=Checks(run.races)):
                    arrays = tuple(map(measure.uploaded, host))  # a launch keeps none alive
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
    """Start every program, so that two cores compile while the first ones run."""
    from gpt2block.emulator import stand_in  # noqa: PLC0415  (it replaces CuPy only when used)

    with emulated():
        for variant in variants:
            for operation, _, host, _ in prepared:
                with suppress(InputError, KernelError):  # which `_variant` reports
                    arrays = tuple(map(measure.uploaded, host))
                    stand_in.compile_ahead(_bound(operation, variant, arrays).launches)


def _bound(operation: Operation, variant: Variant, arrays: tuple[Any, ...]) -> Bound:
    options = {**operation.attrs, **measure.options_for(operation, variant)}
    return operation.bind(arrays, **options)
