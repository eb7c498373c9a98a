"""`gpt2block bench`: compare times with hardware limits, or time a block."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from math import isfinite
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from gpt2block import bench
from gpt2block.bench import BenchRow, Report, tasks
from gpt2block.bench.ceilings import TF32
from gpt2block.bench.plots import check_file, draw, draw_decoding
from gpt2block.bench.race import CACHES, MOST_SETS, gpu_index
from gpt2block.bench.token_works import SAMPLED
from gpt2block.cli.display import console, new_table, print_json, print_table, shown, tracked
from gpt2block.cuda.timing import REPLAYS
from gpt2block.errors import check_all

TITLES = {  # kind of benchmark → title of its table; sizes replace the names in braces
    "block": "GPT-2 small's block, B x T",
    "gemm": "Products with bias, C = 768",
    "attention": "Attention, 12 heads of 64, B x T",
    "decode": "A step of decoding, {position} tokens in the cache",
    "prompt": "A prompt, to the logits after its last token",
    "first": "A prompt and its first new token, by generate",
    "generate": "Prompts of {shortest} to {longest} tokens, {new} new tokens for each",
}
COLUMNS = {  # kind of benchmark → columns of its table; kinds that are absent have RATES
    "decode": ("us", "tokens/s", "% floor"),
    "generate": ("s", "tokens/s", "% floor"),
}
RATES = ("us", "TFLOP/s", "% matmul", "% copy")


def race(
    works: list[bench.Work],
    device: str | None,
    plot: Path | None,
    as_json: bool,
) -> bool:
    """Time kernels or models. Return False if a result is wrong."""
    if plot is not None:
        check_all(partial(check_file, plot), later=partial(gpu_index, device))
    report = bench.run(works, device, lambda each: tracked(each, "bench"))
    if as_json:
        print_json(report.as_dict())
    else:
        print_report(console(), report)
    if plot is not None:
        (draw_decoding if works[0].tokens else draw)(report, plot)
    return report.right


def compare_with_document(device: str | None, as_json: bool) -> None:
    """Time GPT-2's block, and print its times next to those of LeetGPU's challenge."""
    times = bench.block_against_document(device)
    if as_json:
        print_json([asdict(row) for row in times])
        return
    columns = ("T", "mask", "GPU ms", "document ms", "times faster")
    table = new_table((), (*columns, "block(x, out) µs", "block(x) µs"))
    for row in times:
        document = (f"{row.document_ms:.3f}", f"{row.speedup:.2f}") if row.document_ms else ("", "")
        host = (f"{row.out_us:.1f}", f"{row.call_us:.1f}")
        table.add_row(str(row.T), row.mask, f"{row.ms:.4f}", *document, *host)
    out = console()
    out.print(shown(times[0].device))
    out.print(
        "GPT-2 small, float32, B = 1. GPU: the graph, calls queued one behind the other, median."
    )
    out.print("Document: its own solve on an H200, device memory allocated in every call.")
    out.print("µs: host time of a warm call from Python, which does not wait for the GPU.")
    print_table(out, table)


def print_report(out: Console, report: Report) -> None:
    """Print the method, the measured hardware limits, and a table for each kind of benchmark."""
    versions = report.versions
    out.print(escape(", ".join(f"{name} {version}" for name, version in versions.items())))
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in report.ceilings.tflop_s.items())
    out.print(f"ceilings in this run: copy {report.ceilings.copy_gb_s:.0f} GB/s; cuBLAS for")
    out.print(f"M = N = K = 8192: {rates} TFLOP/s")
    models = [row for row in report.rows if "n_layer" in row.sizes]
    for line in _decoding(models) if models else _KERNELS:
        out.print(line)
    out.print("x ours: time divided by that of our first line; wrong results are left out")
    for kind in TITLES:
        rows = [row for row in report.rows if row.what == kind]
        if rows:
            out.print()
            _print_kind(out, kind, rows)
    if report.skipped:
        out.print()
    for line in report.skipped:
        out.print(f"not run: {escape(line)}")


_KERNELS = (
    f"us: one call of a CUDA graph, median of {REPLAYS} replays, contenders in turn, inputs",
    f"rotated over copies that fill {CACHES} times the L2 cache, at most {MOST_SETS}",
    "ours: launches overlap and K may be split, as in the graph of a block",
    "% matmul, % copy: of those ceilings, for the least operations and bytes required",
    "max rel: error against float64 relative to the largest value; ok: within rounding",
)


def _decoding(rows: list[BenchRow]) -> tuple[str, ...]:
    """Return lines that explain how whole models are timed. `rows`: results of the models."""
    row, sizes = rows[0], rows[0].sizes
    sampled = (
        f"; sampled: temperature {SAMPLED.temperature}, top-k {SAMPLED.top_k}, "
        f"top-p {SAMPLED.top_p}"
    )
    steps = sampled if any(each.contender == "sampled" for each in rows) else ""
    if "n_kv_head" in sizes:
        name, of, exact = "Llama", "", "float32"
    else:
        name, of, exact = "GPT-2", f" in {row.dtype}", "NumPy"
    divided = f", on {sizes['gpus']} GPUs: rates are of each" if "gpus" in sizes else ""
    return (
        f"{name} of {sizes['n_layer']} layers of {sizes['n_embd']} channels, random weights{of}"
        f"{divided}",
        "times of calls from Python, until the result is on the host, contenders in turn",
        f"a step: median of {tasks.TURNS} turns of {tasks.STEPS}{steps}",
        "% floor: share of the least time, that of reading all weights once in each step",
        "and the keys and values of all rows once, at the rate of the copy",
        f"max rel: error of logits, log-probabilities relative to the largest logit, by {exact}",
    )


def _print_kind(out: Console, kind: str, rows: list[BenchRow]) -> None:
    figures = (*COLUMNS.get(kind, RATES), "x ours", "max rel", "")
    tokens = kind in COLUMNS and len({row.dtype for row in rows}) == 1
    title = TITLES[kind].format(**rows[0].sizes)
    table = new_table(("work", "by") if tokens else ("work", "dtype", "by"), figures, title)
    last = None
    for row in rows:
        work = (row.work,) if tokens else (row.work, row.dtype)
        table.add_row(
            *(("",) * len(work) if work == last else work),
            escape(row.contender) if row.peer else f"[bold]{escape(row.contender)}[/]",
            *_figures(row),
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
        if kind in COLUMNS:
            out.print(escape(f"{contender}: {note}"))
            continue
        works = [f"{r.dtype} {r.work}" for r in rows if (r.contender, r.note) == (contender, note)]
        out.print(escape(f"{contender}: {note}: {', '.join(works)}"))


def _figures(row: BenchRow) -> tuple[str, ...]:
    """Return a row's cells for time and rates, in the columns of its kind of benchmark."""
    if row.what not in COLUMNS:
        star = "*" if row.arithmetic == TF32 else ""
        percent = f"{row.percent_matmul:.1f}{star}", f"{row.percent_copy:.1f}"
        return f"{row.us:.2f}", f"{row.tflop_s:.1f}", *percent
    time = f"{row.us:.1f}" if row.what != "generate" else f"{1e-6 * row.us:.3f}"
    return time, f"{row.tokens_s:,.0f}", f"{row.percent_copy:.1f}"


def _times_ours(row: BenchRow, rows: list[BenchRow]) -> str:
    """Return time of `row` / time of gpt2block's first row; "" if either result is wrong."""
    ours = [r for r in rows if (r.work, r.dtype) == (row.work, row.dtype) and not r.peer]
    if not ours or not ours[0].right or not row.right:
        return ""
    ratio = row.us / ours[0].us
    return f"{ratio:.2f}" if isfinite(ratio) else ""
