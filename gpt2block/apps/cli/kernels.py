"""Tables and JSON of `gpt2block kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gpt2block.apps.cli.display import new_table, print_table
from gpt2block.judge.kernel import MINE
from gpt2block.ops.bench.ceilings import Ceilings
from gpt2block.ops.bench.race import CACHES, MAX_SETS
from gpt2block.ops.bench.variants import Measurement
from gpt2block.ops.registry import OPERATIONS, Operation
from gpt2block.ops.workload import tolerance


def list_operations(out: Console) -> None:
    """Print a line for every operation: its name, the number of its variants and its formula."""
    table = new_table(("operation",), ("variants",))
    table.add_column("")
    for operation in OPERATIONS.values():
        table.add_row(operation.name, str(len(operation.table)), escape(operation.workload.idea))
    print_table(out, table)
    out.print("gpt2block kernels OPERATION lists the variants of an operation and checks them.")


def list_variants(out: Console, operation: Operation) -> None:
    """Print an operation's variants: name, kernels, and the idea of each variant."""
    workload = operation.workload
    out.print(f"[bold]{operation.name}[/]  {escape(workload.idea)}  ({workload.document})")
    table = Table(box=None, padding=(0, 1), show_header=False)
    for variant in operation.table:
        table.add_row("", variant.name, ", ".join(variant.kernels), escape(variant.idea))
    out.print(table)


def operations_report() -> list[dict[str, object]]:
    """Return every operation with its variants, for JSON."""
    return [
        {
            "operation": operation.name,
            "document": operation.workload.document,  # where its kernels come from
            "idea": operation.workload.idea,
            "sizes": dict(operation.workload.sizes),
            "dtypes": operation.workload.dtypes,
            "variants": [variant.described() for variant in operation.variants],
            # kernels that do not run on their own
            "auxiliary": [variant.described() for variant in operation.auxiliary],
        }
        for operation in OPERATIONS.values()
    ]


def measured_report(
    measured: Sequence[list[Measurement]], skipped: list[str], ceiling: Ceilings
) -> dict[str, object]:
    """Return for JSON: the hardware limits, all measurements, and why variants were skipped."""
    tflop_s = {f"fp{bits}_tflop_s": ceiling.tflop_s[f"float{bits}"] for bits in (32, 16)}
    return {
        "ceilings": {"copy_gb_s": ceiling.copy_gb_s, **tflop_s},
        "rows": [asdict(row) for rows in measured for row in rows],
        "skipped": skipped,
    }


def print_measurements(
    out: Console, rows: list[Measurement], skipped: list[str], ceiling: Ceilings
) -> None:
    """Print a row per measurement: times, rate, % of hardware limit, errors, other libraries."""
    at = ", ".join(f"{name} {size}" for name, size in rows[0].sizes.items())
    _print_method(out, f"{rows[0].operation}, {at}", rows[0].dtype, ceiling)
    peers = list(rows[0].peers)
    columns = ("variant", "block", "GPU µs", "call µs", rows[0].unit, "% ceiling")
    errors = ("max abs", "max rel", "")
    table = new_table((), (*columns, *errors, *(f"x {peer}" for peer in peers)))
    for row in rows:
        table.add_row(
            row.variant,
            "" if row.block is None else str(row.block),
            f"{row.gpu_us:.2f}",
            "" if row.call_us is None else f"{row.call_us:.1f}",
            f"{row.rate:.0f}" if row.unit == "GB/s" else f"{row.rate:.2f}",
            f"{row.percent:.1f}",
            f"{row.max_abs:.1e}",
            f"{row.max_rel:.1e}",
            "ok" if row.right else "WRONG",
            *(f"{row.peers[peer] / row.gpu_us:.2f}" for peer in peers),
            style="bold" if row.variant == MINE else None,
        )
    print_table(out, table)
    for line in skipped:
        out.print(f"not run: {escape(line)}")
    for peer in peers:
        out.print(f"{peer}: {rows[0].peers[peer]:.2f} µs on the same buffers, timed in turn")


def _print_method(out: Console, what: str, dtype: str, ceiling: Ceilings) -> None:
    """Print the measured operation, the method of measurement, and the hardware limits."""
    out.print(f"{what}, {dtype}; medians, inputs rotated over copies that")
    out.print(f"fill {CACHES} times the L2 cache, at most {MAX_SETS} copies")
    out.print(
        f"ceilings in this run: copy {ceiling.copy_gb_s:.0f} GB/s, cuBLAS float32 "
        f"{ceiling.tflop_s['float32']:.1f} and float16 {ceiling.tflop_s['float16']:.0f} TFLOP/s"
    )
    out.print(
        f"ok: the error against float64 is at most {tolerance(dtype):.1e} of the largest value, "
        "the rounding error"
    )


def print_series(
    out: Console,
    operation: Operation,
    series: list[list[Measurement]],
    skipped: list[str],
    ceiling: Ceilings,
) -> None:
    """Print GPU µs, one row per size and one column per variant.

    Below the table: the sizes at which another variant becomes the fastest, and what did not run.
    """
    first = series[0][0]
    name, _ = operation.workload.series or ("", 1)
    fixed = ", ".join(f"{key} {size}" for key, size in first.sizes.items() if key != name)
    _print_method(out, f"{first.operation}, {fixed}", first.dtype, ceiling)
    variants = list(dict.fromkeys(row.variant for rows in series for row in rows))
    peers = list(first.peers)
    table = new_table((), (name, *variants, *peers, "fastest", "% ceiling", "max rel", ""))
    fastest: list[tuple[int, str]] = []
    for rows in series:
        us = {row.variant: row.gpu_us for row in rows}
        best = min(rows, key=lambda row: row.gpu_us)
        fastest.append((best.sizes[name], best.variant))
        table.add_row(
            str(best.sizes[name]),
            *(f"{us[variant]:.2f}" if variant in us else "not run" for variant in variants),
            *(f"{rows[0].peers[peer]:.2f}" for peer in peers),
            best.variant,
            f"{best.percent:.1f} of {best.unit}",
            f"{max(row.max_rel for row in rows):.1e}",
            "ok" if all(row.right for row in rows) else "WRONG",
        )
    print_table(out, table)
    for (_, before), (size, variant) in pairwise(fastest):
        if variant != before:
            out.print(f"from {name} = {size} on, {variant} is faster than {before}")
    for line in dict.fromkeys(skipped):
        out.print(f"not run: {escape(line)}")
