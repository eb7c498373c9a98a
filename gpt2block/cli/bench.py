"""Tables of `gpt2block bench` that compare kernels with PyTorch and the ceilings."""

from __future__ import annotations

from math import isfinite

from rich.console import Console
from rich.markup import escape

from gpt2block.bench import KINDS, Report, Row
from gpt2block.bench.ceilings import TF32
from gpt2block.bench.measure import CACHES, MOST_SETS
from gpt2block.cli.display import new_table, print_table
from gpt2block.cuda.timing import REPLAYS

TITLES = {
    "block": "GPT-2 small's block, B x T",
    "gemm": "Products with bias, C = 768",
    "attention": "Attention, 12 heads of 64, B x T",
}


def print_report(out: Console, report: Report) -> None:
    """Print the method and the ceilings, then a table for each kind of work."""
    versions = report.versions
    out.print(escape(", ".join(f"{name} {version}" for name, version in versions.items())))
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in report.ceilings.tflop_s.items())
    out.print(f"ceilings in this run: copy {report.ceilings.copy_gb_s:.0f} GB/s; cuBLAS for")
    out.print(f"M = N = K = 8192: {rates} TFLOP/s")
    out.print(
        f"us: one call of a CUDA graph, median of {REPLAYS} replays, contenders in turn, inputs"
    )
    out.print(f"rotated over copies that fill {CACHES} times the L2 cache, at most {MOST_SETS}")
    out.print("ours: launches overlap and K may be split, as in the graph of a block")
    out.print("% matmul, % copy: of those ceilings, for the least operations and bytes required")
    out.print("max rel: error against float64 by the largest value; ok: within rounding")
    out.print("x ours: time divided by that of our first kernel; wrong results are left out")
    for kind in KINDS:
        rows = [row for row in report.rows if row.what == kind]
        if rows:
            out.print()
            _print_kind(out, kind, rows)
    if report.skipped:
        out.print()
    for line in report.skipped:
        out.print(f"not run: {escape(line)}")


def _print_kind(out: Console, kind: str, rows: list[Row]) -> None:
    columns = ("us", "TFLOP/s", "% matmul", "% copy", "x ours", "max rel", "")
    table = new_table(("work", "dtype", "by"), columns, TITLES[kind])
    last = None
    for row in rows:
        work = row.work, row.dtype
        table.add_row(
            *(("", "") if work == last else work),
            escape(row.contender) if row.peer else f"[bold]{escape(row.contender)}[/]",
            f"{row.us:.2f}",
            f"{row.tflop_s:.1f}",
            f"{row.percent_matmul:.1f}" + ("*" if row.arithmetic == TF32 else ""),
            f"{row.percent_copy:.1f}",
            _times_ours(row, rows),
            f"{row.max_rel:.1e}",
            "ok" if row.right else "[bold red]WRONG[/]",
        )
        last = work
    print_table(out, table)
    if any(row.arithmetic == TF32 for row in rows):
        out.print(f"*: of the {TF32} ceiling, with the rounding error of {TF32}")
    notes = {(row.contender, row.note) for row in rows if row.note}
    for contender, note in sorted(notes):
        works = [f"{r.dtype} {r.work}" for r in rows if (r.contender, r.note) == (contender, note)]
        out.print(escape(f"{contender}: {note}: {', '.join(works)}"))


def _times_ours(row: Row, rows: list[Row]) -> str:
    """The time of a row divided by that of our first kernel; "" if one of the results is wrong."""
    ours = [r for r in rows if (r.work, r.dtype) == (row.work, row.dtype) and not r.peer]
    if not ours or not ours[0].right or not row.right:
        return ""
    ratio = row.us / ours[0].us
    return f"{ratio:.2f}" if isfinite(ratio) else ""
