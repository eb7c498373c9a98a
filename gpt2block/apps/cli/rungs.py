"""Check built-in kernels on the emulator, in four orders of threads, and print the results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import inf, isnan
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from gpt2block.apps.cli.display import new_table, print_table
from gpt2block.cuda import kernels
from gpt2block.emulator import ORDERS, emulated, stand_in
from gpt2block.emulator.ptx.engine import CHECKED
from gpt2block.errors import InputError
from gpt2block.judge.kernel import described
from gpt2block.judge.refused import USUAL, WGMMA
from gpt2block.judge.verdict import CPU, FOUND_NONE, NO_TIMES
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
) -> tuple[list[Rung], list[str]]:
    """Check every variant at every size that it supports; return results and messages.

    There is a message for each variant that cannot run.
    """
    dtype, layout = stored
    prepared = []
    for sizes, attrs in cases:
        own = operation.with_workload(attrs={**operation.workload.attrs, **attrs})
        prepared.append((own, sizes, *workload.inputs_and_truth(own, sizes, dtype, layout)))
    rungs, skipped = [], []
    for variant in variants:
        rung = _variant(variant, prepared, dtype)
        if isinstance(rung, str):
            skipped.append(f"{variant.name}: {rung}")
        else:
            rungs.append(rung)
    return rungs, skipped


def _variant(variant: Variant, prepared: Sequence[Prepared], dtype: str) -> Rung | str:
    """Check a variant at each size that it supports; if it supports none, return the reason."""
    taken: list[Sizes] = []
    off, why = (0.0, 0.0), ""
    capability = WGMMA if kernels.architecture(variant.file) else USUAL
    for operation, sizes, host, truth in prepared:
        try:
            for order in ORDERS:
                with emulated(order, checks=CHECKED, capability=capability):
                    arrays = tuple(map(workload.uploaded, host))  # keep arrays alive
                    options = workload.options_for(operation, variant)
                    bound = operation.bind(arrays, **operation.workload.attrs, **options)
                    workload.poison(bound.out, arrays)
                    found = workload.errors(np.asarray(bound.run()), truth)
                off = max(off, found, key=lambda each: inf if isnan(each[1]) else each[1])
        except InputError as error:
            why = why or str(error).removeprefix(f"{operation.name} variant {variant.name}: ")
            continue
        except stand_in.EmulatorError as error:
            problem = f"{error} at {described(sizes)}"
            return Rung(variant.name, variant.kernels, (sizes,), *off, dtype, problem)
        taken.append(sizes)
    if not taken:
        return why
    return Rung(variant.name, variant.kernels, tuple(taken), *off, dtype)


def print_rungs(
    out: Console,
    operation: Operation,
    rungs: Sequence[Rung],
    skipped: Sequence[str],
    sizes: Sequence[Sizes],
    dtype: str,
) -> None:
    """Print the built-in variants' results on the emulator."""
    out.print(f"{operation.name}, {dtype}, {CPU}")
    ran = "; ".join(described(each).replace(",", "") for each in sizes)
    documented = described(operation.workload.sizes).replace(",", "")
    out.print(f"reduced sizes: {ran} (on a GPU {documented})")
    table = new_table(("variant", "kernels"), ("sizes", "max abs", "max rel", ""))
    for rung in rungs:
        table.add_row(
            rung.variant,
            " ".join(rung.kernels),
            f"{len(rung.sizes)} of {len(sizes)}",
            f"{rung.max_abs:.1e}",
            f"{rung.max_rel:.1e}",
            "ok" if rung.right else "WRONG",
        )
    print_table(out, table)
    for rung in rungs:
        if rung.problem:
            out.print(f"{rung.variant}: {escape(rung.problem)}")
    for line in skipped:
        out.print(f"not run: {escape(line)}")
    if rungs:
        out.print("Worst errors of four thread orders, against float64.")
    if rungs and not any(rung.problem for rung in rungs):
        out.print(FOUND_NONE)
    out.print(NO_TIMES)


def rungs_report(
    operation: Operation, rungs: Sequence[Rung], skipped: Sequence[str], note: str | None
) -> dict[str, object]:
    """Return the emulator's results for JSON. `note`: why no GPU is used, None for --device cpu."""
    return {
        "operation": operation.name,
        "device": "cpu",
        "note": note,
        "rows": [asdict(rung) | {"right": rung.right} for rung in rungs],
        "skipped": list(skipped),
    }
