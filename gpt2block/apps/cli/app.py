"""The Typer application: its commands in the order of the help, and its usage errors.

`gpt2block.apps.cli.main` calls `run`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer

from gpt2block.apps.cli.codes import INTERRUPTED, WRONG
from gpt2block.apps.cli.options import add_command
from gpt2block.cuda.formats import refuse_removed
from gpt2block.errors import INSTEAD, InputError

_UsageError: Any = typer.BadParameter.__base__  # UsageError of Click, or of Typer's copy of Click

MODULES = {"kernels": "kernels_command"}  # else named as the command
EXAMPLES = {  # command → its example, in the order of the help
    "generate": "generate 'To be, or not to be' --seed 7",
    "chat": "chat --system 'You answer in one sentence.'",
    "serve": "serve --model smollm2 --port 8000",
    "score": "score LICENSE --stride 64",
    "verify": "verify receipts.jsonl --sample 20",
    "explain": "explain 'To be, or not to be' -o page.html",
    "compare": "compare 'To be, or not to be' --dtype bfloat16",
    "profile": "profile generate --rows 8 --dtype bfloat16 -o trace.json",
    "kernels": "kernels layernorm --mine my.cu",
    "judge": "judge homework --csv verdicts.csv",
    "block": "block --text 'To be, or not to be' --layer 2",
    "info": "info shakespeare --json",
    "convert": "convert out/ckpt.pt my-model --dtype bfloat16",
    "check": "check --json",
    "map": "",  # a group, whose commands have examples
}


def application(first: str = "") -> typer.Typer:
    """Return the application. first: first word of the command line.

    If `first` is a command, the application has only this command: importing the modules of all
    commands takes longer than most commands.
    """
    app = typer.Typer(
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        help="GPT-2, Llama, Qwen, Gemma and others on readable CUDA kernels, each compared with a "
        "NumPy reference.",
    )
    app.callback()(_gpt2block)
    names = (first,) if first in EXAMPLES else tuple(EXAMPLES)
    for name in names if first != "--version" else ():
        module = import_module(f"gpt2block.apps.cli.{MODULES.get(name, name)}")
        if name == "map":
            app.add_typer(module.app, name=name)
        else:
            add_command(app, getattr(module, name), EXAMPLES[name])
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from gpt2block.cuda import doctor  # noqa: PLC0415  (slow to import)

        print(f"gpt2block {doctor.version()}")
        raise typer.Exit


VERSION: Any = typer.Option(
    False, "--version", callback=_print_version, is_eager=True, help="Print the version."
)


def _gpt2block(version: bool = VERSION) -> None:
    pass


def run(app: typer.Typer, arguments: list[str]) -> int:
    """Run one command line and return its exit code. Raises InputError for usage errors."""
    try:
        command = typer.main.get_command(app)
        return int(command.main(arguments, standalone_mode=False) or 0)
    except typer.Abort:  # raised for Ctrl-C by older versions of Typer
        return INTERRUPTED
    except _UsageError as error:
        message, context = error.format_message(), error.ctx
        if type(error).__name__ == "NoArgsIsHelpError":  # message: the help text or ""
            print(message, end="")
            return WRONG
        refuse_removed([getattr(error, "option_name", "").lstrip("-")], "--")
        more = f" (see {context.command_path} --help)" if context else ""
        raise InputError(f"{message.rstrip('.')}{_advice(message)}{more}") from None


def _advice(message: str) -> str:
    """Return words for a usage error: the command or option that does what was typed."""
    if "extra argument" in message:
        return ": write a text with spaces in quotes, as in gpt2block generate 'To be, or not'"
    typed = message.rstrip(".").split()[-1].strip("'")
    return f": type {INSTEAD['command line'][typed]}" if typed in INSTEAD["command line"] else ""
