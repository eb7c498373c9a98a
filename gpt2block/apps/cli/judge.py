"""`gpt2block judge`: judge all kernels of a folder, and compare the verdicts with expected ones."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape

from gpt2block.apps.cli import complete, display
from gpt2block.apps.cli.codes import FAILED
from gpt2block.apps.cli.options import argument, json_option, option, path_of, path_option
from gpt2block.cuda import doctor
from gpt2block.errors import InputError
from gpt2block.files.writing import check_file, write_file

if TYPE_CHECKING:
    from gpt2block.judge.folder import Judged

CSV_COLUMNS = ("verdict", "finding", "seconds", "said")


def judge(
    folder: Path = argument(
        "A folder of .cu files, with or without a table.csv.", ..., parser=path_of, metavar="FOLDER"
    ),
    operation: str | None = option(
        "Operation of the files that name none, in a folder without a table.",
        complete=complete.operations,
    ),
    device: str | None = option(
        "cuda, or cpu: an emulator. By default the GPU if there is one.",
        complete=complete.devices,
    ),
    jobs: int | None = option("Processes; by default the number of cores.", min=1),
    seed: int | None = option("Seed of the random sizes of all checks; by default a new one."),
    csv_file: Path | None = path_option(
        "Also write this CSV file: a row per kernel.", None, "--csv"
    ),
    as_json: bool = json_option(),
) -> None:
    """Judge every kernel of a folder, and compare the verdicts with expected ones.

    The folder has a table.csv with the columns file, operation and optionally expected (right or
    wrong), kind, options and note. Without a table, each .cu file has a line // operation: NAME.

    Each kernel is checked as by kernels --mine. The exit code is 0 if each verdict is the expected
    one or, without expected ones, if all kernels are right; otherwise it is 1.
    """
    from gpt2block.judge import folder as judging  # noqa: PLC0415  (slow to import)
    from gpt2block.judge.cases import resolved_seed  # noqa: PLC0415

    kernels, seed = judging.entries(folder, operation), resolved_seed(seed)
    _check_device(device)
    if csv_file is not None:
        check_file(csv_file)
    with display.progress_bar("kernels", hidden=as_json) as bar:
        jobs = jobs or judging.default_jobs()
        results = judging.judge(kernels, jobs, device=device, seed=seed)
        verdicts = list(bar.track(results, len(kernels)))
    verdicts.sort(key=lambda each: kernels.index(each.entry))
    if csv_file is not None:
        write_file(csv_file, _as_csv(verdicts, judging.COLUMNS).encode())
    confusion, unexpected = judging.confusion(verdicts), judging.disagreements(verdicts)
    if as_json:
        rows = [each.as_dict() for each in verdicts]
        head = {"schema": judging.SCHEMA, "seed": seed, "confusion": confusion}
        display.print_json({**head, "kernels": rows})
    else:
        _print_kernels(display.console(), verdicts)
        _print_confusion(display.console(), confusion)
        _print_unexpected(display.console(), unexpected)
        print(f"Random sizes: seed {seed}.")
    if unexpected:
        raise typer.Exit(FAILED)


def _check_device(device: str | None) -> None:
    """Raise DeviceError if the device cannot be used, so that not every kernel reports it."""
    from gpt2block.judge.on_cpu import require_emulator  # noqa: PLC0415

    if device not in (None, "cpu", "cuda"):
        raise InputError(f"--device {device}: expected cuda or cpu")
    if device == "cuda":
        doctor.require_cuda("--device cuda")
    elif device == "cpu" or doctor.cuda_problem():
        require_emulator()


def _as_csv(found: Sequence[Judged], columns: Sequence[str]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, (*columns, *CSV_COLUMNS), extrasaction="ignore")
    writer.writeheader()
    for each in found:
        row = each.as_dict()
        options = " ".join(f"--{name}={value}" for name, value in row["options"].items())
        writer.writerow({**row, "options": options, "seconds": f"{each.seconds:.2f}"})
    return stream.getvalue()


def _print_kernels(out: Console, found: Sequence[Judged]) -> None:
    table = display.new_table(("file", "operation", "expected", "verdict"), ("seconds",))
    table.add_column("finding", overflow="fold")
    for each in found:
        entry = each.entry
        names = (entry.file, entry.operation, entry.expected, each.verdict)
        told = each.said.partition("\n")[0]  # all lines follow below the table
        table.add_row(*map(display.shown, names), f"{each.seconds:.1f}", display.shown(told))
    display.print_table(out, table)


def _print_confusion(out: Console, confusion: dict[str, dict[str, int]]) -> None:
    verdicts = next(iter(confusion.values()))
    table = display.new_table(("expected",), verdicts)
    for expected, counts in confusion.items():
        table.add_row(expected or "not stated", *map(str, counts.values()))
    out.print()
    display.print_table(out, table)


def _print_unexpected(out: Console, unexpected: Sequence[Judged]) -> None:
    for each in unexpected:
        entry = each.entry
        told = f" ({display.shown(entry.note)})" if entry.note else ""
        expected = f"expected {entry.expected or 'right'}"
        out.print(f"[bold]{display.shown(entry.file)}[/]: {expected}, found {each.verdict}{told}")
        if each.said:
            out.print(f"  {escape(each.said)}".replace("\n", "\n  "))
