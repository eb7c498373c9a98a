"""Counters of the kernels of an operation on the engine: accesses, conflicts and other events.

The numbers do not depend on a GPU. Counters with the value that Nsight Compute reads on a GPU also
have its metric's name (`gpt2block.emulator.ptx.counters.METRICS`). Tables show them for the lines
of a kernel, or for all variants of an operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gpt2block.apps.cli.display import new_table
from gpt2block.cuda import kernels
from gpt2block.emulator import emulated
from gpt2block.emulator.ptx.counters import METRICS, Counts, Line, total
from gpt2block.emulator.ptx.engine import Checks, Result
from gpt2block.emulator.stand_in import EmulatorError
from gpt2block.errors import InputError
from gpt2block.judge.kernel import described
from gpt2block.judge.sizes import cost, name_of_row
from gpt2block.ops import workload
from gpt2block.ops.operation import Operation, Sizes, Variant

CAPABILITY, MULTIPROCESSORS = "90", 132  # an NVIDIA H200
# The fastest float32 variants there of operations whose default has the bits of another document.
FASTEST = {"attention": "online", "layernorm": "6", "matmul_bias": "registers"}
MAX_COST = 0.3  # largest judge.sizes.cost of reduced sizes
KEPT = {"attention": "C", "trimat": "HS"}  # size that is not reduced, if it is no row's length
# The counters in tables; JSON has bytes, too.
SHOWN = [k for k, name in enumerate(Counts._fields) if name not in ("load_bytes", "store_bytes")]
NOTE = "Counted on the CPU: PTX instructions and requests of warps, and sectors of 32 bytes."


@dataclass(frozen=True)
class KernelCounts:
    """The counters of a launch of a variant's kernel."""

    variant: str
    kernel: str
    file: str
    sizes: Sizes
    lines: Mapping[Line, Counts]

    @property
    def total(self) -> Counts:
        return total(self.lines.values())

    def place(self, line: Line) -> str:
        """Return the number of a line of the kernel's file; for a line elsewhere also its file."""
        own = line.file.endswith(self.file)
        return str(line.number) if own else f"{Path(line.file).name}:{line.number}"

    def text(self, line: Line) -> str:
        """Return the source of a line, or "" for a line that no file has."""
        lines = Path(line.file).read_text("utf-8-sig").splitlines()
        return lines[line.number - 1].strip() if 0 < line.number <= len(lines) else ""

    def as_dict(self) -> dict[str, object]:
        """Return a dict for JSON."""
        named = {name: getattr(self, name) for name in ("variant", "kernel", "file", "sizes")}
        lines = [{**line._asdict(), **counts._asdict()} for line, counts in self.lines.items()]
        return {**named, "total": self.total._asdict(), "lines": lines}


def count_all(
    operation: Operation, variants: Iterable[Variant | None], sizes: Sizes, stored: tuple[str, str]
) -> tuple[list[KernelCounts], list[str]]:
    """Return the counters of variants, and a line of text for each one that cannot run.

    variants: None for the variant that the operation chooses on an NVIDIA H200. stored: (dtype,
    layout), as `workload.check_storage` returns them.
    """
    counts: list[KernelCounts] = []
    skipped: list[str] = []
    for variant in variants:
        try:
            counts += count(operation, variant, sizes, stored)
        except (InputError, EmulatorError) as error:
            skipped.append(f"{variant.name if variant else operation.name}: {error}")
    return counts, skipped


def count(
    operation: Operation, variant: Variant | None, sizes: Sizes, stored: tuple[str, str]
) -> list[KernelCounts]:
    """Launch a variant on the engine and return the counters of its kernels.

    Raises InputError if the variant does not support the sizes, and EmulatorError.
    """
    host, _ = workload.inputs_and_truth(operation, sizes, *stored)
    chosen = {} if variant is None else workload.options_for(operation, variant)
    results: list[Result] = []
    checks = Checks(counters=True, seen=results.append)
    with emulated("forward", MULTIPROCESSORS, checks, CAPABILITY):
        arrays = tuple(map(workload.uploaded, host))  # keep them alive while the kernels run
        bound = operation.bind(arrays, **operation.workload.attrs, **chosen)
        bound.run()
    names = [each.name for each in bound.launches]
    of = variant or next(v for v in operation.table if names[0] in v.kernels)
    own = str(kernels.SOURCE_DIR / of.file)  # lines of the kernel's file name it without the folder
    return [
        KernelCounts(of.name, name, of.file, sizes, {
            line if Path(line.file).is_file() else line._replace(file=own): counts
            for line, counts in result.counts.items()
        })
        for name, result in zip(names, results, strict=True)
    ]  # fmt: skip


def fastest(operation: Operation, dtype: str) -> Variant | None:
    """Return the fastest built-in variant on an NVIDIA H200, or None for the default one."""
    known = dtype == "float32" and operation.name in FASTEST
    return operation.variant(FASTEST[operation.name]) if known else None


def reduced(operation: Operation, stated: Sizes) -> Sizes:
    """Return the documented sizes, halved until a launch is short: B first, then the largest.

    The sizes that a user states, and the length of a row, keep their values.
    """
    sizes = {**operation.workload.sizes, **stated}
    kept = {*stated, KEPT.get(operation.name) or name_of_row(operation, sizes)}
    while cost(operation, sizes, operation.workload.attrs) > MAX_COST:
        free = [name for name, size in sizes.items() if name not in kept and size > 1]
        if not free:
            break
        sizes[max(free, key=lambda name: (name == "B", sizes[name]))] //= 2
    return sizes


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
