"""The command `gpt2block kernels`."""

from __future__ import annotations

import typer

from gpt2block.apps.cli.codes import FAILED
from gpt2block.apps.cli.kernels_options import KernelsOptions, OwnOptions
from gpt2block.errors import InputError


def kernels(options: KernelsOptions, own: OwnOptions) -> None:
    """List all operations, or list one operation's variants, compare them with float64, time them.

    Without a GPU, or with --device cpu, an emulator runs the kernels on the CPU and checks them.
    The exit code is 1 if a result is wrong or no kernel could run.
    """
    from gpt2block.apps.cli.kernels_run import run  # noqa: PLC0415  (slow to import)

    _check_together(options, own)
    if not run(options, own):
        raise typer.Exit(FAILED)


def _check_together(options: KernelsOptions, own: OwnOptions) -> None:
    """Raise InputError for options that exclude each other or require another option."""
    values = {
        "--mine": own.mine,
        "--source": options.source,
        "--template": own.template or None,
        "--solution": own.solution,
    }
    stated = [name for name, value in values.items() if value is not None]
    if len(stated) > 1:
        raise InputError(f"{stated[0]} and {stated[1]}: choose one of them")
    needing = {f"--{name}": value for name, value in vars(options).items() if name != "as_json"}
    needing = {name: each for name, each in (values | needing).items() if each not in (None, False)}
    if needing and options.operation is None:
        name, value = next(iter(needing.items()))
        typed = name if value is True else f"{name} {value}"
        raise InputError(
            f"{name} needs an operation, such as layernorm: gpt2block kernels layernorm {typed}; "
            "gpt2block kernels lists all operations"
        )
    for name in ("kernel", "grid", "block", "shared", "seed", "args", "why", "why_page"):
        if getattr(own, name) not in (None, False) and own.mine is None:
            raise InputError(f"--{name.replace('_', '-')} is an option of --mine: add it")
