"""`gpt2block check`: report which parts of gpt2block can run on this machine."""

from __future__ import annotations

from dataclasses import asdict

import typer
from rich.table import Table

from gpt2block import emulator
from gpt2block.apps.cli.codes import FAILED
from gpt2block.apps.cli.display import console, print_json, shown
from gpt2block.apps.cli.options import json_option
from gpt2block.cuda import doctor


def check(as_json: bool = json_option()) -> None:
    """Check Python, CuPy, driver, device and compilers; print the command that fixes each problem.

    A note marks a part that works but should be changed. The last line says what runs here: NumPy,
    the emulator, which needs NVRTC and g++, and kernels on a GPU. The exit code is 0 if kernels can
    run on a GPU of this machine, else 1.
    """
    of_gpu, of_emulator = doctor.examine(), emulator.check()
    numpy = all(found.ok for found in of_gpu if found.name in ("Python", "NumPy"))
    ok = all(found.ok for found in of_gpu)
    runs = {"NumPy": numpy, "emulator": numpy and of_emulator.ok, "GPU": ok}
    checks = [*of_gpu, of_emulator]
    if as_json:
        print_json({"ok": ok, "runs": runs, "checks": [asdict(found) for found in checks]})
    else:
        _print_checks(checks)
        here, missing = ([name for name in runs if runs[name] is is_so] for is_so in (True, False))
        print(
            f"runs here: {', '.join(here) or 'nothing'}"
            f"{'; not here: ' if missing else ''}{', '.join(missing)}"
        )
    raise typer.Exit(0 if ok else FAILED)


def _print_checks(checks: list[doctor.Check]) -> None:
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        mark = "[yellow]note[/]" if check.ok and check.fix else "[green]ok[/]"
        mark = mark if check.ok else "[red]no[/]"
        table.add_row(mark, check.name, shown(check.detail))
        if check.fix:
            table.add_row("", "", f"[bold]→ {shown(check.fix)}[/]")
    console().print(table)
