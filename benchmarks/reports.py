"""Run works; print or plot their report, and free the memory of models between works."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from benchmarks.decoding import STEPS, TURNS
from benchmarks.labels import check_file
from benchmarks.llama import RandomLlama
from benchmarks.plots import draw, draw_decoding
from benchmarks.run import BenchRow, Report, run
from benchmarks.token_works import SAMPLED, ModelWork
from benchmarks.works import Work
from gpt2block.apps.cli.display import console, new_table, print_json, print_table, tracked
from gpt2block.cuda.timing import REPLAYS
from gpt2block.errors import InputError
from gpt2block.ops.bench.race import CACHES, MAX_SETS

TITLES: Mapping[str, str] = {  # kind of benchmark → title; sizes replace the names in braces
    "block": "GPT-2 small's block, B x T",
    "decode": "A step of decoding, {position} tokens in the cache",
    "gemm": "Products with bias, C = 768",
    "attention": "Attention, 12 heads of 64, B x T",
    "prompt": "A prompt, to the logits after its last token",
    "first": "A prompt and its first new token, by generate",
    "generate": "Prompts of {shortest} to {longest} tokens, {new} new tokens for each",
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


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--dtype")
    parser.add_argument("--only", help="time only works whose name contains this text")
    parser.add_argument("--torch", action="store_true", help="compare with PyTorch")
    parser.add_argument("--plot", type=Path, help="plot gpt2block's results to this file")
    parser.add_argument("--json", action="store_true")


def time_and_show(works: list[Work], given: Namespace) -> int:
    """Time works and show the report; return 1 if a result of gpt2block is wrong, else 0.

    given: the options of `add_options`. Raises InputError, DeviceError.
    """
    if given.plot:
        check_file(given.plot)
    chosen = [work for work in works if given.only is None or given.only in work.name]
    if not chosen:
        raise InputError(f"--only {given.only!r}: no name contains it; a name is {works[0].name!r}")
    peers = set[str]()  # names of the implementations of other libraries
    if given.torch:
        from benchmarks.torch_peers import compare  # noqa: PLC0415  (loads cuBLAS before CuPy)

        report, peers = compare(chosen)
    else:
        report = run(released(chosen))
    if given.json:
        print_json(asdict(report))
    else:
        print_report(console(), report)
    ours = replace(report, rows=[row for row in report.rows if row.contender not in peers])
    if given.plot:
        plot = draw_decoding if any(row.what == "decode" for row in ours.rows) else draw
        plot(ours, given.plot)
    return int(not ours.right)


def released(works: list[Work]) -> Iterator[Work]:
    """Yield works; before the first work of another model, free the memory of the one before."""
    model = None
    for work in tracked(works, "benchmarks"):
        following = work.task.model if isinstance(work, ModelWork) else None
        if isinstance(model, RandomLlama) and following is not model:
            model.release()
        model = following
        yield work


def print_report(out: Console, report: Report) -> None:
    """Print the method, the measured hardware limits, and a table for each kind of benchmark."""
    out.print(escape(", ".join(f"{name} {version}" for name, version in report.versions.items())))
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in report.ceilings.tflop_s.items())
    out.print(f"ceilings in this run: copy {report.ceilings.copy_gb_s:.0f} GB/s; cuBLAS for")
    out.print(f"M = N = K = 8192: {rates} TFLOP/s")
    of_models = [row.sizes for row in report.rows if "n_layer" in row.sizes]
    for line in MODEL if of_models else KERNELS:
        out.print(line.format(**of_models[0]) if of_models else line)
    out.print("x first: time divided by that of the first line; wrong results are left out")
    for kind, title in TITLES.items():
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
    return f"{row.us / first.us:.2f}" if first.right and row.right else ""
