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

# The counters in tables; JSON has bytes, too.
SHOWN = [k for k, name in enumerate(Counts._fields) if name not in ("load_bytes", "store_bytes")]
NOTE = "Counted on the CPU: PTX instructions and requests of warps, and sectors of 32 bytes."


def print_lines(out: Console, counted: Sequence[KernelCounts], skipped: Iterable[str]) -> None:
    """Print a table for each kernel: the counters of its lines that do more than arithmetic."""
    for each in counted:
        shown = {line: counts for line, counts in each.lines.items() if any(counts[1:])}
        rest = total(counts for line, counts in each.lines.items() if line not in shown)
        rows = [(each.place(at), counts) for at, counts in shown.items()]
        rows += [("other", rest), ("all", each.total)]
        out.print(f"\n{escape(f'{each.variant}: {each.kernel}')}, {described(each.sizes)}")
        out.print(_table("line", rows, [each.text(at) for at in shown]))
    _print_end(out, skipped)


def print_totals(out: Console, counted: Sequence[KernelCounts], skipped: Iterable[str]) -> None:
    """Print a row for each variant, and for each kernel of a variant that has several."""
    of = Counter(each.variant for each in counted)
    names = [each.variant + f": {each.kernel}" * (of[each.variant] > 1) for each in counted]
    out.print(_table("variant", [*zip(names, (each.total for each in counted), strict=True)]))
    _print_end(out, skipped)


def _print_end(out: Console, skipped: Iterable[str]) -> None:
    for line in skipped:
        out.print(f"not counted: {escape(line)}")
    out.print(NOTE)


def report(counted: Iterable[KernelCounts], skipped: Sequence[str]) -> dict[str, object]:
    """Return counters for JSON, with the names that they have in Nsight Compute."""
    kernels = [each.as_dict() for each in counted]
    return {"metrics": METRICS, "kernels": kernels, "skipped": skipped}


def _table(name: str, rows: Sequence[tuple[str, Counts]], sources: Sequence[str] = ()) -> Table:
    """Return a table of counters, without those that are 0 in all rows.

    sources: lines of source for the first rows, in a last column that is cut off at the width.
    """
    used = [k for k in SHOWN if any(counts[k] for _, counts in rows)]
    table = new_table((name,), [Counts._fields[k].replace("_", "\n") for k in used])
    table.padding, table.pad_edge, table.expand = (0, 1, 0, 0), False, bool(sources)
    if sources:
        table.add_column("source", no_wrap=True, overflow="ellipsis", ratio=1)
    for number, (left, counts) in enumerate(rows):
        numbers = [f"{counts[k]:,}" if counts[k] else "" for k in used]
        table.add_row(escape(left), *numbers, *map(escape, sources[number : number + 1]))
    return table
