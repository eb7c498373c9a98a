"""The application and its commands `block`, `check` and `bench`.

`gpt2block.cli.main` calls `run`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.table import Table

from gpt2block import bench as benches
from gpt2block import doctor, emulator, walkthrough
from gpt2block.array_checks import FLOATS
from gpt2block.bench import block_against_document
from gpt2block.bench.decode_plot import draw_decoding
from gpt2block.bench.roofline import check_file, draw
from gpt2block.checkpoints import BUNDLED
from gpt2block.cli import bench as cli_bench
from gpt2block.cli import compare as cli_compare
from gpt2block.cli import complete
from gpt2block.cli import convert as cli_convert
from gpt2block.cli import explain as cli_explain
from gpt2block.cli import kernels_command as cli_kernels_command
from gpt2block.cli import map as cli_map
from gpt2block.cli import model as cli_model
from gpt2block.cli.codes import FAILED, INTERRUPTED, WRONG
from gpt2block.cli.display import console, for_json, new_table, print_table, shown, tracked
from gpt2block.cli.model import Device, Json, OptionalInt, OptionalStr, Peer, Revision, path_of
from gpt2block.cli.terms import in_terms_of_options
from gpt2block.errors import CheckpointError, DeviceError, InputError

DEFAULT_SEQ_LEN = 128

_UsageError: Any = typer.BadParameter.__base__  # Click's, or Typer's own copy of it

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="GPT-2 on readable CUDA kernels, each compared with a NumPy reference.",
)
cli_map.register(app)
cli_convert.register(app)
cli_compare.register(app)
cli_explain.register(app)
cli_model.register(app)  # generate, score, info: first in the help


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"gpt2block {doctor.version()}")
        raise typer.Exit


@app.callback()
def _gpt2block(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: gpt2block block --text 'To be, or not to be' --layer 2")
def block(
    weights: Annotated[
        str,
        typer.Option(
            help="A Hugging Face directory, .safetensors file or hub id.",
            autocompletion=complete.models,
        ),
    ] = BUNDLED,
    revision: Revision = None,
    size: Annotated[
        OptionalStr,
        typer.Option(
            help="Random weights of gpt2, gpt2-medium, gpt2-large or gpt2-xl.",
            autocompletion=complete.sizes,
        ),
    ] = None,
    layer: Annotated[int, typer.Option(help="Index of the block whose steps are shown.")] = 0,
    text: Annotated[
        OptionalStr, typer.Option(help="Input text; by default a passage of Shakespeare.")
    ] = None,
    seq_len: Annotated[
        OptionalInt, typer.Option(help="Tokens per row; by default the whole text.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Rows; row b is the text rotated by b tokens.")] = 1,
    causal: Annotated[bool, typer.Option(help="Attend only to earlier tokens.")] = True,
    dtype: Annotated[
        str,
        typer.Option(help="float32, bfloat16 or float16.", autocompletion=complete.one_of(*FLOATS)),
    ] = "float32",
    kernels: Annotated[
        str, typer.Option(help="skeleton (ten steps), fused (seven steps) or auto.")
    ] = "auto",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Run a GPT-2 block and compare every step with float64 NumPy."""
    if size is None:
        result = walkthrough.with_trained_weights(
            weights, layer, text, seq_len, batch, causal, device, _progress, dtype, kernels,
            revision,
        )  # fmt: skip
    elif text is not None or weights != BUNDLED or revision is not None or layer != 0:
        raise InputError(
            "--size uses random weights: leave out --weights, --revision, --layer and --text"
        )
    else:
        length = DEFAULT_SEQ_LEN if seq_len is None else seq_len
        result = walkthrough.with_random_weights(
            size, length, batch, causal, device, dtype, kernels
        )
    if as_json:
        print(json.dumps(for_json(asdict(result))))
    else:
        _print_walkthrough(result)


def _progress(indices: Iterable[int]) -> Iterable[int]:
    return tracked(list(indices), "blocks")


def _print_walkthrough(result: walkthrough.Walkthrough) -> None:
    out = console()
    out.print(f"device   {shown(result.device)}")
    out.print(f"weights  {shown(result.weights)}, mask: {result.mask}")
    out.print(f"input    {shown(result.input)}")
    if result.device.startswith("CPU"):
        out.print(f"kernels  none run: {result.dtype} NumPy compared with float64")
    elif result.dtype != "float32":
        out.print(f"kernels  {result.kernels}, {result.dtype}")
    table = new_table(
        ("step", "kernel", "shape"), ("ms", "max abs", "max rel", "total abs", "total rel")
    )
    for row in result.steps:
        values = (row.max_abs, row.max_rel, row.total_abs, row.total_rel)
        table.add_row(
            row.name,
            row.kernel,
            "x".join(map(str, row.shape)),
            f"{row.ms:.4f}",
            *(f"{value:.1e}" for value in values),
        )
    print_table(out, table)
    lines = (
        "Errors against float64; rel: relative to the tensor's largest value. max: of the step",
        "alone, fed exact inputs; total: accumulated from x on.",
    )
    out.print(("\n" if out.width >= len(lines[0]) else " ").join(lines))
    if result.stream:
        marks = ", ".join(f"{error:.1e}" for error in result.stream)
        out.print(f"Residual stream after each block, rel: {marks}")
        words = ", ".join(f"{token!r} {p:.1%}" for token, p in result.next_tokens)
        out.print(f"Most likely next tokens: {shown(words)}")


@app.command(epilog="Example: gpt2block check --json")
def check(as_json: Json = False) -> None:
    """Check Python, CuPy, driver, device and compilers; print the command that fixes each problem.

    A note marks a part that works but should be changed. The last line says what runs here: NumPy,
    the emulator, which needs g++, and kernels on a GPU. The exit code is 0 if kernels can run on a
    GPU of this machine, else 1.
    """
    of_gpu, of_emulator = doctor.examine(), emulator.check()
    numpy = all(found.ok for found in of_gpu if found.name in ("Python", "NumPy"))
    ok = all(found.ok for found in of_gpu)
    runs = {"NumPy": numpy, "emulator": numpy and of_emulator.ok, "GPU": ok}
    checks = [*of_gpu, of_emulator]
    if as_json:
        print(json.dumps({"ok": ok, "runs": runs, "checks": [asdict(found) for found in checks]}))
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
    for found in checks:
        mark = "[yellow]note[/]" if found.ok and found.fix else "[green]ok[/]"
        mark = mark if found.ok else "[red]no[/]"
        table.add_row(mark, found.name, shown(found.detail))
        if found.fix:
            table.add_row("", "", f"[bold]→ {shown(found.fix)}[/]")
    console().print(table)


@app.command(epilog="Example: gpt2block bench --what gemm --peer torch --plot roofline.png")
def bench(
    device: Device = None,
    decode: Annotated[
        bool,
        typer.Option("--decode", help="Time whole GPT-2, from tokens to tokens, random weights."),
    ] = False,
    llama: Annotated[
        bool,
        typer.Option("--llama", help="Time a whole Llama, random weights, with each fusion."),
    ] = False,
    what: Annotated[
        OptionalStr,
        typer.Option(help="block, gemm, attention or all: compare these with the ceilings."),
    ] = None,
    rows: Annotated[
        OptionalStr,
        typer.Option(
            help="With --decode or --llama: rows decoded together, such as 1,8,64; default 1 to "
            "256, with --llama 1,4,16,64."
        ),
    ] = None,
    size: Annotated[
        OptionalStr,
        typer.Option(
            help="With --decode: gpt2 (the default), gpt2-medium, -large or -xl. With --llama: 7b "
            "(the default), 1b or small."
        ),
    ] = None,
    dtype: Annotated[
        OptionalStr,
        typer.Option(
            help="Only bfloat16, float16 or float32; with --decode that of the weights, by default "
            "bfloat16, also float8_e5m2 or float8_e4m3fn; with --llama by default float16 (1b: "
            "bfloat16), then float8_e5m2.",
            autocompletion=complete.dtypes,
        ),
    ] = None,
    kv_dtype: Annotated[
        OptionalStr,
        typer.Option(
            help="With --decode or --llama: float8_e5m2 or float8_e4m3fn for keys and values.",
            autocompletion=complete.dtypes,
        ),
    ] = None,
    only: Annotated[
        OptionalStr,
        typer.Option(help="Only work with this text in its name, such as 8x1024 or M=128."),
    ] = None,
    peer: Peer = None,
    plot: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="Plot the roofline, or the rates of decoding, to this PNG file.",
            parser=path_of,
            metavar="PATH",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Time GPT-2's block, and compare it with the figures of LeetGPU's GPT-2 block challenge.

    With --what, --dtype, --only, --peer or --plot: compare blocks, matrix products and attention
    with the ceilings of this GPU and with PyTorch. With --decode: steps of decoding, a prompt and
    many prompts, compared with the least time that reading weights, keys and values takes, with
    PyTorch and with transformers. With --llama: the same for a Llama, whose steps are also timed
    with fewer fusions. The exit code is then 1 if a result of gpt2block is wrong.
    """
    whole = _whole_model(decode, llama, {"--what": what, "--only": only, "--plot": plot})
    if not whole and (rows, size, kv_dtype) != (None, None, None):
        given = "--rows" if rows is not None else "--size" if size is not None else "--kv-dtype"
        raise InputError(f"{given} is an option of --decode and --llama: add one of them")
    if whole or (what, dtype, only, peer, plot) != (None,) * 5:
        if whole:
            works_of = benches.llama_works if llama else benches.decode_works
            works = works_of(dtype, rows, size, kv_dtype)
        else:
            works = benches.chosen_works(what or "all", dtype, only)
        if plot is not None:
            check_file(plot)
        report = benches.run(works, device, peer, _timed)
        _show_race(report, as_json, plot, draw_decoding if decode else draw)
        return
    times = block_against_document(device)
    if as_json:
        print(json.dumps([asdict(row) for row in times]))
        return
    columns = ("T", "mask", "GPU ms", "document ms", "times faster")
    table = new_table((), (*columns, "block(x, out) µs", "block(x) µs"))
    for row in times:
        document = (f"{row.document_ms:.3f}", f"{row.speedup:.2f}") if row.document_ms else ("", "")
        host = (f"{row.out_us:.1f}", f"{row.call_us:.1f}")
        table.add_row(str(row.T), row.mask, f"{row.ms:.4f}", *document, *host)
    out = console()
    out.print(shown(times[0].device))
    out.print(
        "GPT-2 small, float32, B = 1. GPU: the graph, calls queued one behind the other, median."
    )
    out.print("Document: its own solve on an H200, device memory allocated in every call.")
    out.print("µs: host time of a warm call from Python, which does not wait for the GPU.")
    print_table(out, table)


def _whole_model(decode: bool, llama: bool, of_kernels: dict[str, Any]) -> bool:
    """Whether a whole model is timed. Raises InputError for options that do not apply to it.

    of_kernels: option → value of those that --llama, and except for --plot --decode, do not take.
    """
    if decode and llama:
        raise InputError("--decode times GPT-2, --llama a Llama: leave out one")
    given = [name for name, value in of_kernels.items() if value is not None]
    if llama and given == ["--plot"]:
        raise InputError("--plot: expected --decode or kernels with it, got --llama")
    chosen = [name for name in given if name != "--plot"]
    if (decode or llama) and chosen:
        whole = "--llama" if llama else "--decode"
        raise InputError(f"{chosen[0]} chooses kernels, {whole} times whole models: leave out one")
    return decode or llama


def _timed(works: list[benches.Work]) -> Iterable[benches.Work]:
    return tracked(works, "bench")


def _show_race(
    report: benches.Report,
    as_json: bool,
    plot: Path | None,
    plotted: Callable[[benches.Report, Path], None],
) -> None:
    if as_json:
        print(json.dumps(for_json(report.as_dict())))
    else:
        cli_bench.print_report(console(), report)
    if plot is not None:
        plotted(report, plot)
    if not report.right:
        raise typer.Exit(FAILED)


cli_kernels_command.register(app)


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code; errors name options such as `--top-k`."""
    root = typer.main.get_command(app)
    _join_lines(root)
    try:
        return int(root.main(arguments, standalone_mode=False) or 0)
    except typer.Abort:  # raised for Ctrl-C by older versions of Typer
        return INTERRUPTED
    except _UsageError as error:
        message, context = error.format_message(), error.ctx
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help, or empty
            print(message, end="")
            return WRONG
        more = f" (see {context.command_path} --help)" if context else ""
        raise InputError(f"{message.rstrip('.')}{more}") from None
    except (CheckpointError, DeviceError, InputError) as error:
        command = _command(root, arguments)
        raise type(error)(in_terms_of_options(str(error), command, arguments)) from error


def _join_lines(group: Any) -> None:
    """Remove the line breaks of docstrings from the help of commands, which has a width itself."""
    for command in group.commands.values():
        paragraphs = cleandoc(command.help or "").split("\n\n")
        command.help = "\n\n".join(" ".join(each.split()) for each in paragraphs)
        if hasattr(command, "commands"):
            _join_lines(command)


def _command(root: Any, arguments: list[str]) -> Any:
    """The command named by the arguments."""
    found = root
    for word in arguments:
        commands = getattr(found, "commands", {})
        if word not in commands:
            break
        found = commands[word]
    return found
