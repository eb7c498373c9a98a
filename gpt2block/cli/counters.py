"""Tables of counters: of the lines of kernels, and of all variants of an operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gpt2block.cli.display import new_table
from gpt2block.mine.counters import KernelCounts
from gpt2block.mine.kernel import described
from gpt2block.ptx.counters import METRICS, Counts, total

NOT_SHOWN = ("load_bytes", "store_bytes")  # in tables; JSON has all counters
NOTE = "Counted on the CPU: PTX instructions and requests of warps, and sectors of 32 bytes."
Row = tuple[tuple[str, ...], Counts]


def print_lines(out: Console, counted: Sequence[KernelCounts]) -> None:
    """Print a table for each kernel: the counters of its lines that do more than arithmetic."""
    for each in counted:
        name = f"{each.variant} ({each.kernel})" if each.variant else each.kernel
        out.print(f"\n[bold]{escape(name)}[/], {escape(each.file)}, {described(each.sizes)}")
        shown = {line: counts for line, counts in each.lines.items() if any(counts[1:])}
        rest = total(counts for line, counts in each.lines.items() if line not in shown)
        rows: list[Row] = [((each.place(at),), counts) for at, counts in shown.items()]
        rows += [(("other",), rest), (("all",), each.total)]
        out.print(_table(("line",), rows, [each.text(at) for at in shown]))
    if counted:
        out.print(NOTE)


def print_totals(out: Console, counted: Sequence[KernelCounts], skipped: Iterable[str]) -> None:
    """Print a row for each variant, and for each kernel of a variant that has several."""
    of = Counter(each.variant for each in counted)
    names = [
        each.variant + (f": {each.kernel}" if of[each.variant] > 1 else "") for each in counted
    ]
    rows: list[Row] = [((name,), each.total) for name, each in zip(names, counted, strict=True)]
    out.print(_table(("variant",), rows))
    for line in skipped:
        out.print(f"not counted: {escape(line)}")
    out.print(NOTE)


def report(counted: Iterable[KernelCounts]) -> dict[str, object]:
    """Return counters for JSON, with the names that they have in Nsight Compute."""
    return {"metrics": METRICS, "kernels": [each.as_dict() for each in counted]}


def _table(names: Sequence[str], rows: Sequence[Row], sources: Sequence[str] = ()) -> Table:
    """Return a table of names and counters, without counters that are 0 in all rows.

    sources: lines of source for the first rows, in a last column that is cut off at the width.
    """
    used = [k for k, name in enumerate(Counts._fields) if any(counts[k] for _, counts in rows)]
    used = [k for k in used if Counts._fields[k] not in NOT_SHOWN]
    table = new_table(names, [Counts._fields[k].replace("_", "\n") for k in used])
    table.padding, table.pad_edge = (0, 1, 0, 0), False
    if sources:
        table.expand = True
        table.add_column("source", no_wrap=True, overflow="ellipsis", ratio=1)
    for number, (left, counts) in enumerate(rows):
        source = sources[number : number + 1]
        numbers = [f"{counts[k]:,}" if counts[k] else "" for k in used]
        table.add_row(*map(escape, left), *numbers, *map(escape, source))
    return table
