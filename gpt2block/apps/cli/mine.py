"""Output of `gpt2block kernels`: results of a user's kernel and of the emulator, and sources."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from gpt2block.apps.cli.display import new_table, print_table, printable_lines
from gpt2block.apps.cli.kernels import print_measurements
from gpt2block.apps.cli.listing import listing
from gpt2block.judge.comparison import Checked
from gpt2block.judge.finding import headline, numbered
from gpt2block.judge.kernel import MINE, described
from gpt2block.judge.source import UserSource
from gpt2block.judge.verdict import ALL_ORDERS, COLUMNS, NO_TIMES, Verdict
from gpt2block.judge.why import Why
from gpt2block.ops.bench.variants import Measurement
from gpt2block.ops.operation import Operation, Variant

MAX_LINES = 20  # maximum number of lines of a kernel's output to show
WIDTH_OF_NUMBERS = 24  # characters of the columns of numbers, and of the spaces between columns
LONGEST_EVENT = 46  # characters of an event that is not folded


def print_verdict(out: Console, verdict: Verdict) -> None:
    """Print a kernel's checks, then its error or, if it was timed, its rank among the variants."""
    source = verdict.kernel.source
    out.print(escape(verdict.title))
    if verdict.printed:  # the output for one size; other sizes print similar text
        _print_text(out, source, verdict.printed)
    if verdict.checks:
        _print_checked(out, verdict.checks)
    for each in verdict.findings:
        out.print(f"[bold red]{escape(headline(source, each))}[/]")
        for line in numbered(source, each):
            out.print(escape(line), no_wrap=True, overflow="ellipsis")
        if each.at:
            out.print(escape(each.at))
    if verdict.right and verdict.device == "cpu":
        out.print(ALL_ORDERS)
        out.print(f"{escape(verdict.fidelity or '')}.")
        out.print(f"A GPU times {described(verdict.timed_sizes)}: {verdict.at_timed_sizes}.")
        if verdict.seed is not None:
            out.print(f"Random sizes: seed {verdict.seed}.")
        out.print(NO_TIMES)
    for hint in verdict.hints:
        out.print(f"hint: {escape(hint)}")
    if verdict.benchmark:
        timed = verdict.benchmark
        out.print()
        print_measurements(out, timed.rows, timed.skipped, timed.ceiling)
        out.print(rank(timed.rows))


def _print_text(out: Console, source: UserSource, text: str) -> None:
    lines = printable_lines(text).splitlines()
    out.print(f"{escape(source.name)} prints:")
    for line in lines[:MAX_LINES]:
        out.print(f"  {escape(line)}", no_wrap=True, overflow="ellipsis")
    if len(lines) > MAX_LINES:
        out.print(f"  and {len(lines) - MAX_LINES:,} more lines")


def _print_checked(out: Console, checked: Sequence[Checked]) -> None:
    sizes, *figures = COLUMNS
    table = new_table((sizes,), (*figures, ""))
    for row in checked:
        errors = (f"{row.max_abs:.1e}", f"{row.max_rel:.1e}")
        table.add_row(row.label, *map(str, row.launched), *errors, "ok")
    print_table(out, table)


def print_why(out: Console, source: UserSource, why: Why) -> None:
    """Print the steps of the threads of a problem, with their source lines."""
    if why.note:
        out.print(escape(why.note))
    if not why.steps:
        return
    rows = why.rows()
    threads = [thread.removeprefix("thread ") for thread in why.threads]
    longest = max(len(text if step is None else step.event) for _, step, text in rows)
    event = min(longest, LONGEST_EVENT, out.width // 2)
    code = max(12, out.width - event - max(map(len, threads)) - WIDTH_OF_NUMBERS)
    table = new_table((), ("step",))
    table.add_column("thread", no_wrap=True)
    table.add_column("line", no_wrap=True)
    table.add_column("event", min_width=event, overflow="fold")
    table.add_column("source", max_width=code, no_wrap=True, overflow="ellipsis")
    for number, step, text in rows:
        if step is None:
            table.add_row("", "", "", text, "")
            continue
        line = str(step.line) if step.line else step.place
        words = (line, step.event, source.line(step.line or 0).strip().expandtabs(4))
        style = "bold red" if step.problem else None
        thread = step.thread.removeprefix("thread ")
        table.add_row(str(number), thread, *map(escape, words), style=style)
    out.print(table)


def rank(rows: Sequence[Measurement]) -> str:
    """Describe the rank of the user's kernel among all measured kernels."""
    mine = next((row for row in rows if row.variant == MINE), None)
    others = [row for row in rows if row.variant != MINE]
    if mine is None or not others:
        return "" if mine else "your kernel did not run: see above"
    best = min(others, key=lambda row: row.gpu_us)
    place = 1 + sum(row.gpu_us < mine.gpu_us for row in others)
    ratio = mine.gpu_us / best.gpu_us
    time = f"is {1 / ratio:.2f} times as fast" if ratio < 1 else f"takes {ratio:.2f} times as long"
    next_step = "" if ratio < 1 else " --counters shows what takes time."
    return (
        f"Your kernel is number {place} of {len(rows)}, {mine.percent:.0f} % of the ceiling; "
        f"it {time} as {best.variant}, the fastest other one.{next_step}"
    )


def print_source(out: Console, operation: Operation, variant: Variant) -> None:
    """Print a variant's source file without its other kernels, in color on a terminal."""
    parts = listing(variant)
    if not sys.stdout.isatty():
        print("\n\n".join(text.strip("\n") for _, text in parts))
        return
    from rich.syntax import Syntax  # noqa: PLC0415  (slow to import)

    out.print(f"[bold]{operation.name} {variant.name}[/]: {escape(variant.idea)}")
    out.print(f"kernels_cu/{escape(variant.file)}\n")
    for i, (start, text) in enumerate(parts):
        if i:
            out.print("[dim]    ⋮[/]")
        first = start + len(text) - len(text.lstrip("\n"))
        code = Syntax(
            text.strip("\n"), "cuda", line_numbers=True, start_line=first, word_wrap=True,
            theme="ansi_dark", background_color="default",
        )  # fmt: skip
        out.print(code)
