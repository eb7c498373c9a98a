"""Check built-in kernels on the emulator, in four orders of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf, isnan
from typing import Any

import numpy as np

from gpt2block.cuda import kernels
from gpt2block.cuda.arrays import Bound
from gpt2block.emulator import ORDERS, emulated, stand_in
from gpt2block.errors import InputError
from gpt2block.mine.kernel import described
from gpt2block.mine.on_cpu import require_emulator
from gpt2block.mine.refused import HOPPER, USUAL
from gpt2block.ops import workload
from gpt2block.ops.operation import Attrs, Operation, Sizes, Variant

Prepared = tuple[Operation, Sizes, tuple[Any, ...], workload.Truth]


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
        return not self.problem and self.max_rel <= workload.tolerance(self.dtype)


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
        prepared.append((own, sizes, *workload.inputs_and_truth(own, sizes, dtype, layout)))
    variants = tuple(variants)
    rungs, skipped = [], []
    for variant in seen(variants):
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
    capability = HOPPER if kernels.architecture(variant.file) else USUAL
    for operation, sizes, host, truth in prepared:
        try:
            for order in ORDERS:
                with emulated(order, checks=stand_in.CHECKED, capability=capability):
                    arrays = tuple(map(workload.uploaded, host))  # keep arrays alive
                    bound = _bound(operation, variant, arrays)
                    workload.poison(bound.out, arrays)
                    found = workload.errors(np.asarray(bound.run()), truth)
                off = max(off, found, key=lambda each: inf if isnan(each[1]) else each[1])
        except InputError as error:
            prefix = f"{operation.name} variant {variant.name}: "
            why = why or str(error).removeprefix(prefix)
            continue
        except stand_in.EmulatorError as error:
            problem = f"{error} at {described(sizes)}"
            return Rung(variant.name, variant.kernels, (sizes,), *off, dtype, problem)
        taken.append(sizes)
    if not taken:
        return why
    return Rung(variant.name, variant.kernels, tuple(taken), *off, dtype)


def _bound(operation: Operation, variant: Variant, arrays: tuple[Any, ...]) -> Bound:
    options = {**operation.workload.attrs, **workload.options_for(operation, variant)}
    return operation.bind(arrays, **options)
