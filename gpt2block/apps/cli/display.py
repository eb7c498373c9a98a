"""Output shared by the commands: consoles, tables, progress bars and escaped text."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from time import perf_counter
from typing import Any, TypeVar

from rich import progress
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gpt2block.cuda import requests
from gpt2block.errors import printable

T = TypeVar("T")
WIDTH_WHEN_PIPED = 120
_ANY_WIDTH = 10_000
_COLUMNS = re.compile("[1-9][0-9]{0,3}")
_LONGEST_LINE = 4096  # maximum characters of a name or path
_UNNOTICED = 0.3  # seconds of a step before a message appears


def console() -> Console:
    """Return a console on stdout. Width: COLUMNS if set, else the terminal's; 120 in a pipe."""
    stated = os.environ.get("COLUMNS", "")
    piped = None if sys.stdout.isatty() else WIDTH_WHEN_PIPED
    return Console(width=int(stated) if _COLUMNS.fullmatch(stated) else piped, highlight=False)


def shown(text: str) -> str:
    """Return `text` as one line of Rich markup, with control characters escaped."""
    return escape(printable(text, _LONGEST_LINE))


def for_json(value: object) -> Any:
    """Return `value` with NaN and infinity, which JSON does not have, replaced by None."""
    if isinstance(value, dict):
        return {key: for_json(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(for_json(entry) for entry in value)
    return None if isinstance(value, float) and not isfinite(value) else value


def print_json(value: object) -> None:
    """Print JSON, with null for NaN and infinity."""
    print(json.dumps(for_json(value)))


def printable_lines(text: str) -> str:
    """Return `text` with control characters escaped, except for newlines and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def new_table(left: Iterable[str], right: Iterable[str] = (), title: str | None = None) -> Table:
    """Return an empty table: left-aligned columns `left`, then right-aligned columns `right`."""
    table = Table(box=None, padding=(0, 1), header_style="bold", title=title, title_justify="left")
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def print_table(out: Console, table: Table) -> None:
    """Print a table. If it is too wide, narrow its spacing and put headers on several lines.

    Text that is still too wide is folded; numbers are never cut off to fit.
    """
    any_width = out.options.update(width=_ANY_WIDTH)
    if out.measure(table, options=any_width).maximum > out.width:
        table.padding, table.pad_edge = (0, 1, 0, 0), False
        for column in table.columns:
            column.header = str(column.header).replace(" ", "\n")
    out.print(table)


def say(line: str) -> None:
    """Print a line to stderr, dimmed on a terminal."""
    Console(stderr=True, highlight=False).print(shown(line), style="dim", soft_wrap=True)


def print_facts(facts: dict[str, str]) -> None:
    """Print names and values in two columns."""
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        table.add_row(name, shown(fact))
    console().print(table)


def progress_bar(
    label: str, hidden: bool = False, done: progress.ProgressColumn | None = None
) -> progress.Progress:
    """Return a progress bar on stderr, removed at the end; hidden unless stderr is a terminal.

    done: the column of the part that is done; by default its percentage.
    """
    return progress.Progress(
        progress.TextColumn(label),
        progress.BarColumn(),
        done or progress.TaskProgressColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=hidden or not sys.stderr.isatty(),
    )


def tracked(items: Collection[T], label: str, hidden: bool = False) -> Iterator[T]:
    """Iterate over `items` with a progress bar."""
    with progress_bar(label, hidden) as bar:
        yield from bar.track(items, len(items))


@contextmanager
def working(step: Callable[[], str] = lambda: "", hidden: bool = False) -> Iterator[None]:
    """Show on a line of stderr, if it is a terminal, the step that runs, and for how long.

    step: returns the name of the step; while kernels are compiled, their number is shown instead.
    The line appears if the `with` block takes longer than a moment, and is removed at the end.
    """
    begun, kernels = perf_counter(), (0, 0)

    def count(ready: int, requested: int) -> None:
        nonlocal kernels
        kernels = ready, requested

    def line() -> Text:
        ready, requested = kernels
        compiling = f"compiling kernels, at the first start only: {ready} of {requested}"
        text, seconds = step() if ready == requested else compiling, perf_counter() - begun
        return Text(f"{text}, {seconds:.0f} s" if text and seconds > _UNNOTICED else "")

    if hidden or not sys.stderr.isatty():
        yield
        return
    own: dict[str, Any] = {"transient": True, "redirect_stdout": False, "redirect_stderr": False}
    with requests.watched(count), Live(get_renderable=line, console=Console(stderr=True), **own):
        yield


@contextmanager
def unechoed() -> Iterator[None]:
    """Let a terminal show what is typed during the `with` block when it is read, not at once."""
    if sys.platform == "win32" or not os.isatty(0):
        yield
        return
    import termios  # noqa: PLC0415  (not on Windows)

    before = termios.tcgetattr(0)
    termios.tcsetattr(0, termios.TCSANOW, [*before[:3], before[3] & ~termios.ECHO, *before[4:]])
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSANOW, before)


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"


def on_each_gpu(weights: Sequence[int], kv_cache_per_token: int) -> tuple[str, str]:
    """Return texts of the bytes on each GPU: of the weights, and of a token's keys and values."""
    least, most = megabytes(min(weights)), megabytes(max(weights))
    return least if least == most else f"{least} to {most}", megabytes(kv_cache_per_token)
