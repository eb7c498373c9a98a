"""Print or plot the report of works, and free the memory of models between works."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.llama import RandomLlama
from benchmarks.plots import draw, draw_decoding
from benchmarks.token_works import ModelWork
from gpt2block.apps.bench import Report, Work
from gpt2block.apps.cli.bench import TITLES, print_report
from gpt2block.apps.cli.display import console, print_json, tracked

FURTHER_TITLES = {
    "gemm": "Products with bias, C = 768",
    "attention": "Attention, 12 heads of 64, B x T",
    "prompt": "A prompt, to the logits after its last token",
    "first": "A prompt and its first new token, by generate",
    "generate": "Prompts of {shortest} to {longest} tokens, {new} new tokens for each",
}


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--plot", type=Path, help="plot gpt2block's results to this file")
    parser.add_argument("--json", action="store_true")


def show(report: Report, peers: set[str], as_json: bool, plot: Path | None) -> bool:
    """Print a report and plot it; return whether all results of gpt2block are right.

    peers: names of the implementations of other libraries.
    """
    if as_json:
        print_json(asdict(report))
    else:
        print_report(console(), report, {**TITLES, **FURTHER_TITLES})
    ours = replace(report, rows=[row for row in report.rows if row.contender not in peers])
    if plot is not None:
        (draw_decoding if any(row.what == "decode" for row in ours.rows) else draw)(ours, plot)
    return ours.right


def released(works: list[Work]) -> Iterator[Work]:
    """Yield works; before the first work of another model, free the memory of the one before."""
    model = None
    for work in tracked(works, "benchmarks"):
        following = work.task.model if isinstance(work, ModelWork) else None
        if isinstance(model, RandomLlama) and following is not model:
            model.release()
        model = following
        yield work
