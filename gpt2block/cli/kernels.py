"""What `gpt2block kernels` prints and draws."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gpt2block.bench import Ceilings, Measurement
from gpt2block.bench.measure import CACHES, MOST_SETS, tolerance
from gpt2block.bench.variants import ceiling_for
from gpt2block.errors import InputError
from gpt2block.ops.registry import OPERATIONS, Operation


def list_operations(out: Console) -> None:
    """Every operation with its variants, their kernels and what each changes."""
    for operation in OPERATIONS.values():
        out.print(f"[bold]{operation.name}[/]  {escape(operation.idea)}  ({operation.document})")
        table = Table(box=None, padding=(0, 1), show_header=False)
        for variant in (*operation.variants, *operation.auxiliary):
            table.add_row("", variant.name, ", ".join(variant.kernels), escape(variant.idea))
        out.print(table)


def operations_json() -> str:
    """The same as JSON."""
    return json.dumps(
        [
            {
                "operation": operation.name,
                "document": operation.document,
                "idea": operation.idea,
                "sizes": dict(operation.sizes),
                "dtypes": operation.dtypes,
                "variants": [variant.described() for variant in operation.variants],
                "auxiliary": [variant.described() for variant in operation.auxiliary],
            }
            for operation in OPERATIONS.values()
        ]
    )


def print_measurements(
    out: Console, rows: list[Measurement], skipped: list[str], ceiling: Ceilings
) -> None:
    """A row a measurement: times, rate, share of the ceiling, peers, error."""
    at = ", ".join(f"{name} {size}" for name, size in rows[0].sizes.items())
    _print_how(out, f"{rows[0].operation}, {at}", rows[0].dtype, ceiling)
    table = Table(box=None, padding=(0, 1), header_style="bold")
    peers = list(rows[0].peers)
    names = [
        "variant",
        "block",
        "GPU µs",
        "call µs",
        rows[0].unit,
        "% ceiling",
        "max abs",
        "max rel",
        "",
    ]
    for name in (*names, *(f"x {peer}" for peer in peers)):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.variant,
            "" if row.block is None else str(row.block),
            f"{row.gpu_us:.2f}",
            f"{row.call_us:.1f}",
            f"{row.rate:.0f}" if row.unit == "GB/s" else f"{row.rate:.2f}",
            f"{row.percent:.1f}",
            f"{row.max_abs:.1e}",
            f"{row.max_rel:.1e}",
            "ok" if row.right else "WRONG",
            *(f"{row.peers[peer] / row.gpu_us:.2f}" for peer in peers),
        )
    out.print(table)
    for line in skipped:
        out.print(f"not run: {escape(line)}")
    for peer in peers:
        out.print(f"{peer}: {rows[0].peers[peer]:.2f} µs on the same buffers, taking turns")


def _print_how(out: Console, what: str, dtype: str, ceiling: Ceilings) -> None:
    """What was measured, how, and the ceilings."""
    out.print(f"{what}, {dtype}; medians, over up to {MOST_SETS} copies of the")
    out.print(f"data in turn, {CACHES} times the L2 cache where so many are enough")
    out.print(
        f"ceilings in this run: copy {ceiling.copy_gb_s:.0f} GB/s, cuBLAS float32 "
        f"{ceiling.tflop_s['float32']:.1f} and float16 {ceiling.tflop_s['float16']:.0f} TFLOP/s"
    )
    out.print(
        f"ok: off from float64 by {tolerance(dtype):.1e} of the largest value at most, "
        "which is rounding"
    )


def print_series(
    out: Console,
    operation: Operation,
    series: list[list[Measurement]],
    skipped: list[str],
    ceiling: Ceilings,
) -> None:
    """A row a size, a column a variant: GPU µs, where the fastest changes, what did not run."""
    first = series[0][0]
    name, _ = operation.series or ("", 1)
    fixed = ", ".join(f"{key} {size}" for key, size in first.sizes.items() if key != name)
    _print_how(out, f"{first.operation}, {fixed}", first.dtype, ceiling)
    variants = list(dict.fromkeys(row.variant for rows in series for row in rows))
    peers = list(first.peers)
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for column in (name, *variants, *peers, "fastest", "% ceiling", "max rel", ""):
        table.add_column(column, justify="right", no_wrap=True)
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
    out.print(table)
    for (_, before), (size, variant) in pairwise(fastest):
        if variant != before:
            out.print(f"from {name} = {size} on, {variant} is faster than {before}")
    for line in dict.fromkeys(skipped):
        out.print(f"not run: {escape(line)}")


def draw_sweep(rows: list[Measurement], ceiling: Ceilings, device: str, file: Path) -> None:
    """Rate by block size, a line a variant, and the ceiling; InputError without matplotlib."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise InputError("--plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for index, name in enumerate(dict.fromkeys(row.variant for row in rows)):
        points = [(row.block, row.rate) for row in rows if row.variant == name]
        blocks = [block for block, _ in points if block is not None]
        color = f"C{index}"
        if blocks:
            axes.plot(blocks, [rate for _, rate in points], "o-", color=color, label=name)
        else:
            axes.axhline(points[0][1], color=color, label=f"{name}, one block size")
    unit = rows[0].unit
    dtype = rows[0].dtype
    best = ceiling.copy_gb_s if unit == "GB/s" else ceiling_for(ceiling, dtype)
    label = "copy" if unit == "GB/s" else f"cuBLAS {'float32' if dtype == 'float32' else 'float16'}"
    axes.axhline(best, color="black", linestyle="--", label=f"{label}, {best:.0f} {unit}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("block size (threads)")
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    sizes = ", ".join(f"{name}={size}" for name, size in rows[0].sizes.items())
    axes.set_title(f"{rows[0].operation}, {sizes}, {dtype}\n{device}", fontsize=9)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8, title="variant")
    try:
        figure.savefig(file, dpi=130)
    except (OSError, ValueError) as error:
        raise InputError(f"--plot {file}: {error}") from error
