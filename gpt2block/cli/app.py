"""The Typer application: its commands in the order of the help, and its usage errors.

`gpt2block.cli.main` calls `run`.
"""

from __future__ import annotations

from typing import Any

import typer

from gpt2block import doctor
from gpt2block.cli import map as cli_map
from gpt2block.cli.bench_command import bench
from gpt2block.cli.block import block
from gpt2block.cli.chat import chat
from gpt2block.cli.check import check
from gpt2block.cli.codes import INTERRUPTED, WRONG
from gpt2block.cli.compare import compare
from gpt2block.cli.convert import convert
from gpt2block.cli.explain import explain
from gpt2block.cli.generate import generate
from gpt2block.cli.info import info
from gpt2block.cli.judge import judge
from gpt2block.cli.kernels_command import kernels
from gpt2block.cli.options import add_command
from gpt2block.cli.profile import profile
from gpt2block.cli.score import score
from gpt2block.cli.serve import serve
from gpt2block.config.formats import refuse_removed
from gpt2block.errors import INSTEAD, InputError

_UsageError: Any = typer.BadParameter.__base__  # UsageError of Click, or of Typer's copy of Click

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="GPT-2, Llama, Qwen, Gemma and others on readable CUDA kernels, each compared with a "
    "NumPy reference.",
)
add_command(app, generate, "generate 'To be, or not to be' --seed 7")
add_command(app, chat, "chat --system 'You answer in one sentence.'")
add_command(app, serve, "serve --model smollm2 --port 8000")
add_command(app, score, "score LICENSE --stride 64")
add_command(app, explain, "explain 'To be, or not to be' -o page.html")
add_command(app, compare, "compare 'To be, or not to be' --dtype bfloat16")
add_command(app, profile, "profile generate --rows 8 --dtype bfloat16 -o trace.json")
add_command(app, kernels, "kernels layernorm --mine my.cu")
add_command(app, judge, "judge homework --csv verdicts.csv")
add_command(app, block, "block --text 'To be, or not to be' --layer 2")
add_command(app, bench, "bench --what gemm --plot roofline.png")
add_command(app, info, "info shakespeare --json")
add_command(app, convert, "convert out/ckpt.pt my-model --dtype bfloat16")
add_command(app, check, "check --json")
app.add_typer(cli_map.app, name="map")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"gpt2block {doctor.version()}")
        raise typer.Exit


VERSION: Any = typer.Option(
    False, "--version", callback=_print_version, is_eager=True, help="Print the version."
)


@app.callback()
def _gpt2block(version: bool = VERSION) -> None:
    pass


def run(arguments: list[str]) -> int:
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
