"""Tables, JSON and plots of `gpt2block kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gpt2block.apps.cli.display import new_table, print_table
from gpt2block.apps.cli.plots import End, check_file, label_ends, save
from gpt2block.judge.kernel import MINE
from gpt2block.ops.bench.ceilings import Ceilings
from gpt2block.ops.bench.race import CACHES, MAX_SETS
from gpt2block.ops.bench.variants import Measurement, ceiling_for
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


def draw_sweep(rows: list[Measurement], ceiling: Ceilings, device: str, file: Path) -> None:
    """Plot rates by block size: a labelled line per variant, and a line for the hardware limit.

    Raises InputError if matplotlib is missing or the file cannot be written.
    """
    check_file(file)
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    lines: list[tuple[str, float, str]] = []  # (label, rate at the line's right end, color)
    for index, name in enumerate(dict.fromkeys(row.variant for row in rows)):
        of_it = [row for row in rows if row.variant == name]
        best = max(of_it, key=lambda row: row.rate)
        color, title = f"C{index}", f"variant {name}" if name.isdigit() else name
        if best.block is None:
            axes.axhline(best.rate, color=color)
            lines.append((f"{title}: {best.rate:.4g}, one block size", best.rate, color))
            continue
        blocks = [row.block or 0 for row in of_it]
        axes.plot(blocks, [row.rate for row in of_it], "o-", color=color)
        at = f", best at {best.block}" if len(of_it) > 1 else f" at {best.block}"
        lines.append((f"{title}: {best.rate:.4g}{at}", of_it[-1].rate, color))
    limit, label = _ceiling_of(rows[0], ceiling)
    axes.axhline(limit, color="black", linestyle="--")
    lines.append((f"{label}: {limit:.4g}", limit, "black"))
    ticks = sorted({row.block for row in rows if row.block is not None})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(block) for block in ticks])
    axes.set_xlabel("threads of a block")
    axes.set_ylabel(rows[0].unit)
    top = 1.06 * max(rate for _, rate, _ in lines)
    axes.set_ylim(0, top)
    axes.grid(alpha=0.3)
    sizes = ", ".join(f"{name}={size}" for name, size in rows[0].sizes.items())
    title = f"{rows[0].operation}, {sizes}, {rows[0].dtype}\n{device}"
    axes.set_title(title, fontsize=10, loc="left")
    right = axes.get_xlim()[1]
    ends = [End(text, (right, rate), rate / top, color) for text, rate, color in lines]
    label_ends(axes, ends, 10)
    save(figure, file)


def _ceiling_of(row: Measurement, ceiling: Ceilings) -> tuple[float, str]:
    """Return the hardware limit in the unit of the result `row`; its label ("copy", "cuBLAS …")."""
    if row.unit == "GB/s":
        return ceiling.copy_gb_s, "copy"
    of_it = "float32" if row.dtype == "float32" else "float16"
    return ceiling_for(ceiling, row.dtype), f"cuBLAS {of_it}"
