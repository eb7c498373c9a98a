"""What `gpt2block bench` prints of a race against PyTorch and the ceilings."""

from __future__ import annotations

from math import isfinite

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gpt2block.bench import KINDS, Report, Row
from gpt2block.bench.ceilings import TF32
from gpt2block.bench.measure import CACHES, MOST_SETS
from gpt2block.cuda.timing import REPLAYS

TITLES = {
    "block": "GPT-2 small's block, B x T",
    "gemm": "Products with bias, C = 768",
    "attention": "Attention, 12 heads of 64, B x T",
}


def print_report(out: Console, report: Report) -> None:
    """A table for each kind of work, a row for each contender; how, and against what, above it."""
    versions = report.versions
    out.print(escape(", ".join(f"{name} {version}" for name, version in versions.items())))
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in report.ceilings.tflop_s.items())
    out.print(
        f"ceilings in this run: copy {report.ceilings.copy_gb_s:.0f} GB/s; cuBLAS, 8192 cubed,"
    )
    out.print(f"{rates} TFLOP/s")
    out.print(
        f"us: a call within a CUDA graph, median of {REPLAYS} replays, all taking turns, over"
    )
    out.print(f"up to {MOST_SETS} copies of the data, {CACHES} times the L2 cache where so many do")
    out.print("ours: launches overlap, and K may be added up in parts, as in a block's graph")
    out.print(
        "% matmul, % copy: of those ceilings, for the operations and bytes no way gets around"
    )
    out.print("max rel: off from float64, by the largest value; ok: that is rounding")
    out.print("x ours: how many times as long as the first of ours; no wrong result counts")
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
    table = Table(box=None, padding=(0, 1), header_style="bold", title=TITLES[kind])
    table.title_justify = "left"
    for name in ("work", "dtype", "by"):
        table.add_column(name, no_wrap=True)
    for name in ("us", "TFLOP/s", "% matmul", "% copy", "x ours", "max rel", ""):
        table.add_column(name, justify="right", no_wrap=True)
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
            _against(row, rows),
            f"{row.max_rel:.1e}",
            "ok" if row.right else "[bold red]WRONG[/]",
        )
        last = work
    out.print(table)
    if any(row.arithmetic == TF32 for row in rows):
        out.print(f"*: of the {TF32} ceiling, and right as far as {TF32} is")
    notes = {(row.contender, row.note) for row in rows if row.note}
    for contender, note in sorted(notes):
        of_it = [f"{r.dtype} {r.work}" for r in rows if (r.contender, r.note) == (contender, note)]
        out.print(escape(f"{contender}: {note}: {', '.join(of_it)}"))


def _against(row: Row, rows: list[Row]) -> str:
    """× ours of a row; nothing where one of the two is wrong."""
    ours = [r for r in rows if (r.work, r.dtype) == (row.work, row.dtype) and not r.peer]
    if not ours or not ours[0].right or not row.right:
        return ""
    ratio = row.us / ours[0].us
    return f"{ratio:.2f}" if isfinite(ratio) else ""
