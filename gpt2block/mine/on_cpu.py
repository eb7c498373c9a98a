"""Kernels on the emulator: a user's own and the built-in ones, in three orders of threads."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf, isnan
from typing import Any

import numpy as np

from gpt2block import emulator
from gpt2block.bench import measure
from gpt2block.cuda import kernels
from gpt2block.cuda.arrays import Bound
from gpt2block.emulator import ORDERS, Checks, ShimError, emulated
from gpt2block.errors import DeviceError, InputError, KernelError
from gpt2block.mine import check
from gpt2block.mine.check import Case, Checked
from gpt2block.mine.finding import Finding, of_compiler, of_emulator
from gpt2block.mine.kernel import Kernel, described
from gpt2block.mine.source import Source
from gpt2block.ops.operation import Attrs, Operation, Sizes, Variant

LIMIT_S = 10.0  # of one launch
# Order and search for races of each launch: first under AddressSanitizer, whose reports say most.
RUNS = ((ORDERS[0], False), (ORDERS[0], True), *((order, False) for order in ORDERS[1:]))
Prepared = tuple[Operation, Sizes, tuple[Any, ...], measure.Truth]


def require_emulator() -> None:
    """Raise DeviceError with what to install if the emulator cannot run."""
    if problem := emulator.missing():
        raise DeviceError(
            f"--device cpu compiles kernels with g++, but {problem}: {emulator.INSTALL}"
        )


def check_kernel(
    kernel: Kernel, cases: Sequence[Case], limit_s: float = LIMIT_S
) -> Iterator[Checked | Finding]:
    """The result of each case; ends with a Finding at the first problem.

    A case runs forward under AddressSanitizer, then with the search for races, then in the other
    orders. limit_s: of each of these launches.
    """
    require_emulator()
    if ptx := _inline_ptx(kernel.source):
        yield ptx
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of g++, which a cached program does not repeat
        _compile_ahead(kernel, cases[0])
        for case in cases:
            found = _in_every_order(kernel, case, limit_s)
            yield found
            if isinstance(found, Finding):
                return


def _inline_ptx(source: Source) -> Finding | None:
    """The first line with instructions of a GPU, which g++ cannot compile."""
    for number, line in enumerate(source.text.splitlines(), 1):
        if re.search(r"\basm\b", line.partition("//")[0]):
            what = (
                "inline PTX (asm) is for a GPU; of lib/sm80.cuh, the emulator has cp.async and mma"
            )
            return Finding(what, (number,))
    return None


def _in_every_order(kernel: Kernel, case: Case, limit_s: float) -> Checked | Finding:
    """The worst result of three orders, if no launch reports anything."""
    runs: list[Checked] = []
    for order, races in RUNS:
        at = f"at {described(case.sizes)}, {order} order"
        texts: list[str] = []
        try:
            with emulated(order, checks=Checks(races, limit_s, texts.append)):
                run = check.compare(kernel, case, guarded=False)
        except ShimError as error:
            if "does not compile" in str(error):
                return of_compiler(kernel.source, error.report)
            return replace(of_emulator(kernel.source, error.report, at), printed="".join(texts))
        problem = run.problem and f"{run.problem} ({order} order)"
        runs.append(replace(run, problem=problem, printed="".join(texts)))
    wrong = [run for run in runs if run.problem]
    if wrong:
        at = f"at {described(case.sizes)}"
        return Finding(wrong[0].problem, at=at, printed=wrong[0].printed)
    worst = max(runs, key=lambda run: inf if isnan(run.max_rel) else run.max_rel)
    return replace(worst, printed=runs[0].printed)


def _compile_ahead(kernel: Kernel, case: Case) -> None:
    """Start both programs, so that two cores compile at the same time."""
    from gpt2block.emulator import stand_in  # noqa: PLC0415  (it replaces CuPy only when used)

    with emulated():
        arrays = tuple(map(measure.uploaded, case.inputs))
        stand_in.compile_ahead(kernel.bind(arrays, **case.attrs).launches)


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
            for order, races in sorted(RUNS, key=lambda run: run[1]):  # errors before races
                with emulated(order, checks=Checks(races)):
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
