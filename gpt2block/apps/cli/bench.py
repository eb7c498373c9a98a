"""Run `gpt2block bench`: compare times with hardware limits, and results with float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite

from rich.console import Console
from rich.markup import escape

from gpt2block.apps import bench
from gpt2block.apps.bench import BenchRow, Report
from gpt2block.apps.bench.decoding import SAMPLED, STEPS, TURNS
from gpt2block.apps.cli.display import console, new_table, print_json, print_table, tracked
from gpt2block.cuda.timing import REPLAYS
from gpt2block.ops.bench.race import CACHES, MAX_SETS

TITLES: Mapping[str, str] = {  # kind of benchmark → title; sizes replace the names in braces
    "block": "GPT-2 small's block, B x T",
    "decode": "A step of decoding, {position} tokens in the cache",
}
KERNELS = (  # how kernels are timed
    f"us: one call of a CUDA graph, median of {REPLAYS} replays, contenders in turn, inputs",
    f"rotated over copies that fill {CACHES} times the L2 cache, at most {MAX_SETS}",
    "ours: launches overlap and K may be split, as in the graph of a block",
    "% matmul, % copy: of those ceilings, for the least operations and bytes required",
    "max rel: error against float64 relative to the largest value; ok: within rounding",
)
TOKENS = ("tokens/s", "% floor")
MODEL = (  # how a model is timed
    "{n_layer} layers of {n_embd} channels, random weights",
    "times of calls from Python, until the result is on the host, contenders in turn",
    f"a step: median of {TURNS} turns of {STEPS}",
    f"sampled: temperature {SAMPLED.temperature}, top-k {SAMPLED.top_k}, top-p {SAMPLED.top_p}",
    "% floor: share of the least time, that of reading all weights once in each step",
    "and the keys and values of all sequences once, at the rate of the copy",
    "max rel: error of logits, log-probabilities relative to the largest exact logit",
)


def race(works: list[bench.Work], device: str | None, as_json: bool) -> bool:
    """Time kernels or a model. Return False if a result is wrong."""
    report = bench.run(tracked(works, "bench"), device)
    if as_json:
        print_json(asdict(report))
    else:
        print_report(console(), report)
    return report.right


def print_report(out: Console, report: Report, titles: Mapping[str, str] = TITLES) -> None:
    """Print the method, the measured hardware limits, and a table for each kind of benchmark."""
    out.print(escape(", ".join(f"{name} {version}" for name, version in report.versions.items())))
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in report.ceilings.tflop_s.items())
    out.print(f"ceilings in this run: copy {report.ceilings.copy_gb_s:.0f} GB/s; cuBLAS for")
    out.print(f"M = N = K = 8192: {rates} TFLOP/s")
    of_models = [row.sizes for row in report.rows if "n_layer" in row.sizes]
    for line in MODEL if of_models else KERNELS:
        out.print(line.format(**of_models[0]) if of_models else line)
    out.print("x first: time divided by that of the first line; wrong results are left out")
    for kind, title in titles.items():
        rows = [row for row in report.rows if row.what == kind]
        if rows:
            out.print()
            _print_kind(out, title.format(**rows[0].sizes), rows)
    if report.skipped:
        out.print()
    for line in report.skipped:
        out.print(f"not run: {escape(line)}")


def _print_kind(out: Console, title: str, rows: Sequence[BenchRow]) -> None:
    rates = ("TFLOP/s", "% matmul", "% copy") if rows[0].tokens_s is None else TOKENS
    columns = ("us", *rates, "x first", "max rel", "")
    table = new_table(("work", "dtype", "by"), columns, title)
    last = None
    for row in rows:
        work = row.work, row.dtype
        table.add_row(
            *(("", "") if work == last else work),
            escape(row.contender),
            *_figures(row),
            _times_first(row, rows),
            f"{row.max_rel:.1e}",
            "ok" if row.right else "[bold red]WRONG[/]",
        )
        last = work
    print_table(out, table)


def _figures(row: BenchRow) -> tuple[str, ...]:
    """Return a row's cells for time and rates."""
    if row.tokens_s is None:
        percent = f"{row.percent_matmul:.1f}", f"{row.percent_copy:.1f}"
        return f"{row.us:.2f}", f"{row.tflop_s:.1f}", *percent
    return f"{row.us:.1f}", f"{row.tokens_s:,.0f}", f"{row.percent_copy:.1f}"


def _times_first(row: BenchRow, rows: Sequence[BenchRow]) -> str:
    """Return the time of `row` divided by that of its work's first row, or "" if one is wrong."""
    first = next(each for each in rows if (each.work, each.dtype) == (row.work, row.dtype))
    if not first.right or not row.right:
        return ""
    ratio = row.us / first.us
    return f"{ratio:.2f}" if isfinite(ratio) else ""
