"""The command `gpt2block kernels`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NamedTuple, Optional

import typer

from gpt2block import bench as benches
from gpt2block import doctor
from gpt2block.bench import ceilings, measure
from gpt2block.bench.roofline import check_file
from gpt2block.bench.torch_peers import check_peer
from gpt2block.bench.variants import CEILINGS, Measurement, measure_variants
from gpt2block.cli import complete
from gpt2block.cli.codes import FAILED
from gpt2block.cli.display import console, for_json, tracked
from gpt2block.cli.kernels import (
    draw_sweep,
    list_operations,
    operations_json,
    print_measurements,
    print_series,
)
from gpt2block.cli.mine import (
    Outcome,
    outcome_json,
    print_outcome,
    print_rungs,
    print_source,
    rungs_json,
)
from gpt2block.cli.model import Json, OptionalStr, Peer, path_of
from gpt2block.errors import DeviceError, InputError
from gpt2block.mine import check, on_cpu, on_gpu
from gpt2block.mine.arguments import Attrs, contract, small_cases
from gpt2block.mine.kernel import Kernel, matched
from gpt2block.mine.listing import rung
from gpt2block.mine.source import read
from gpt2block.mine.templates import template as template_of
from gpt2block.ops.operation import Operation, Sizes, Variant
from gpt2block.ops.registry import all_sizes, find, parse_sizes, stated_sizes

CPU, CUDA = "cpu", "cuda"
OWN = "Your own kernel"
SIZES_OF_A_VARIANT = 2  # on the emulator: many variants compile a program for each


class Request(NamedTuple):
    """The options that the built-in variants and a user's kernel share."""

    operation: Operation
    variants: tuple[Variant, ...]
    shape: str | None
    stored: tuple[str, str]
    peer: str | None
    sweep: bool
    plot: Path | None
    as_json: bool


def register(to: typer.Typer) -> None:
    """Add the command to an application."""
    to.command(epilog="Example: gpt2block kernels layernorm --mine my.cu")(kernels)


def kernels(
    operation: Annotated[
        OptionalStr,
        typer.Argument(
            help="An operation; without it, all operations are listed.",
            autocompletion=complete.operations,
        ),
    ] = None,
    variant: Annotated[
        OptionalStr,
        typer.Option(
            help="One variant; by default all variants.", autocompletion=complete.variants
        ),
    ] = None,
    shape: Annotated[
        OptionalStr,
        typer.Option(help="Sizes that differ from the default ones, such as B=1,T=128."),
    ] = None,
    sweep: Annotated[bool, typer.Option(help="Time every block size of a variant.")] = False,
    plot: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="Sweep, and plot the rates by block size to this PNG file.",
            parser=path_of,
            metavar="PATH",
        ),
    ] = None,
    peer: Peer = None,
    dtype: Annotated[
        OptionalStr,
        typer.Option(
            help="Dtype of the arrays; float8_e5m2 and float8_e4m3fn are for weights.",
            autocompletion=complete.dtypes,
        ),
    ] = None,
    layout: Annotated[
        OptionalStr, typer.Option(help="Memory layout of the weights: KN or NK.")
    ] = None,
    device: Annotated[
        OptionalStr,
        typer.Option(
            help="cuda, or cpu: an emulator, which needs g++ and checks results at small sizes. "
            "By default the GPU if there is one.",
            autocompletion=complete.devices,
        ),
    ] = None,
    source: Annotated[
        OptionalStr,
        typer.Option(
            help="Print the source of a variant, by its name or its place from 1.",
            autocompletion=complete.variants,
        ),
    ] = None,
    mine: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="Check a kernel of your own, and time it in one race with the variants.",
            parser=path_of,
            metavar="FILE.cu",
            rich_help_panel=OWN,
        ),
    ] = None,
    template: Annotated[
        bool,
        typer.Option(
            "--template",
            help="Print a file to begin with: slow, but right.",
            rich_help_panel=OWN,
        ),
    ] = False,
    kernel: Annotated[
        OptionalStr,
        typer.Option(help="The kernel, if the file has several.", rich_help_panel=OWN),
    ] = None,
    grid: Annotated[
        OptionalStr,
        typer.Option(
            help="Blocks, such as 'ceil(N / 8)' or 'T, NH'; by default as the file says in a "
            "line // launch: grid=... block=... shared=...",
            rich_help_panel=OWN,
        ),
    ] = None,
    block: Annotated[
        OptionalStr,
        typer.Option(help="Threads of a block, such as 256 or '16, 16'.", rich_help_panel=OWN),
    ] = None,
    shared: Annotated[
        OptionalStr,
        typer.Option(
            help="Bytes of extern __shared__ memory, such as '4 * C'.", rich_help_panel=OWN
        ),
    ] = None,
    args: Annotated[
        OptionalStr,
        typer.Option(
            help="The argument of each parameter, such as x,out,N,C; by default by their names.",
            rich_help_panel=OWN,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the kernels; compare the variants of an operation with float64 and time them.

    Without a GPU, or with --device cpu, an emulator runs the kernels on the CPU and checks them.
    The exit code is 1 if a result is wrong or no kernel could run.
    """
    own = {"kernel": kernel, "grid": grid, "block": block, "shared": shared}
    _check_together(operation, mine, source, template, {**own, "args": args})
    if operation is None:
        if as_json:
            print(operations_json())
        else:
            list_operations(console())
        return
    found = find(operation)
    if template:
        print(template_of(found), end="")
        return
    if source is not None:
        print_source(console(), found, rung(found, source))
        return
    parse_sizes(found, shape)
    variants = found.variants if variant is None else (found.variant(variant),)
    stored = measure.check_storage(found, dtype, layout)
    if peer is not None:
        check_peer(peer, found.name)
    if plot is not None:
        check_file(plot)
    every = sweep or plot is not None
    request = Request(found, variants, shape, stored, peer, every, plot, as_json)
    user = None if mine is None else matched(read(mine, **own), found, stored, args)
    right = _run(request, user, device)
    if not right:
        raise typer.Exit(FAILED)


def _check_together(
    operation: str | None,
    mine: Path | None,
    source: str | None,
    template: bool,
    own: Mapping[str, str | None],
) -> None:
    """Raise InputError for options that need each other, or exclude each other."""
    given = [
        name
        for name, value in (
            ("--mine", mine),
            ("--source", source),
            ("--template", template or None),
        )
        if value is not None
    ]
    if len(given) > 1:
        raise InputError(f"{given[0]} and {given[1]}: choose one of them")
    if given and operation is None:
        raise InputError(f"{given[0]} needs an operation: gpt2block kernels layernorm {given[0]}")
    stray = [name for name, value in own.items() if value is not None]
    if stray and mine is None:
        raise InputError(f"--{stray[0]} is an option of --mine: add it")


def _run(request: Request, user: Kernel | None, device: str | None) -> bool:
    """Run on the GPU or on the emulator; False if a result is wrong or nothing could run."""
    if device not in (None, CPU, CUDA):
        raise InputError(f"--device {device}: expected cuda or cpu")
    problem = None if device == CPU else doctor.cuda_problem()
    if device != CPU and problem is None:
        return _own_on_gpu(request, user) if user else _on_gpu(request)
    needed = "--peer" if request.peer else "--sweep and --plot" if request.sweep else None
    if device == CUDA or (needed and problem):
        _print_not_run(request, f"{problem}: this needs a GPU, and {doctor.ADVICE}")
        return False
    if needed:
        raise InputError(f"{needed}: times are measured on a GPU: leave out --device cpu")
    try:
        on_cpu.require_emulator()
    except DeviceError as error:
        if problem is None:
            raise
        _print_not_run(request, f"{problem}; {error}")
        return False
    if problem and not request.as_json:
        print(f"note: running on the CPU: {problem}", file=sys.stderr)
    return _own_on_cpu(request, user) if user else _on_cpu(request, problem)


def _print_not_run(request: Request, problem: str) -> None:
    """Print why no kernel was run and what to do, or a JSON object to stdout."""
    why = f"{request.operation.name}: no kernel was run: {problem}"
    if request.as_json:
        print(json.dumps({"run": False, "why": why}))
    else:
        print(f"error: {why}", file=sys.stderr)


def _small(request: Request, count: int = 99) -> list[tuple[Sizes, Attrs]]:
    """The last reduced sizes, or the very last with those of --shape."""
    cases = small_cases(request.operation)
    if request.shape is None:
        return list(cases[-count:])
    sizes, attrs = cases[-1]
    return [({**sizes, **stated_sizes(request.operation, request.shape)}, attrs)]


def _on_cpu(request: Request, problem: str | None) -> bool:
    operation = request.operation
    cases = _small(request, SIZES_OF_A_VARIANT)
    rungs, skipped = on_cpu.check_variants(
        operation,
        request.variants,
        request.stored,
        cases,
        lambda variants: tracked(variants, "variants", hidden=request.as_json),
    )
    if request.as_json:
        print(rungs_json(operation, rungs, skipped, problem))
    else:
        sizes = [each for each, _ in cases]
        print_rungs(console(), operation, rungs, skipped, sizes, request.stored[0])
    return bool(rungs) and all(each.right for each in rungs)


def _own_on_cpu(request: Request, user: Kernel) -> bool:
    layout = request.stored[1]
    cases = [check.case(user, sizes, attrs, layout) for sizes, attrs in _small(request)]
    return _show_own(request, user, Outcome.of(on_cpu.check_kernel(user, cases)), CPU)


def _own_on_gpu(request: Request, user: Kernel) -> bool:
    layout = request.stored[1]
    cases = contract(request.operation).cases
    job = on_gpu.Job(
        user,
        tuple(check.case(user, sizes, attrs, layout) for sizes, attrs in cases),
        tuple(each.name for each in request.variants),
        parse_sizes(request.operation, request.shape),
        request.stored,
        request.peer,
        request.sweep,
    )
    found = Outcome.of(on_gpu.run(job))
    if found.raced and request.plot is not None:
        device = doctor.describe_device(0)
        draw_sweep(found.raced.rows, found.raced.ceiling, device, request.plot)
    return _show_own(request, user, found, CUDA)


def _show_own(request: Request, user: Kernel, found: Outcome, device: str) -> bool:
    if request.as_json:
        print(outcome_json(user, found, device))
    else:
        print_outcome(console(), user, found, device == CPU)
    return found.right


def _on_gpu(request: Request) -> bool:
    """Time the built-in variants."""
    operation, every = request.operation, request.sweep
    sizes = parse_sizes(operation, request.shape)
    series = [sizes] if request.shape is not None or every else all_sizes(operation)
    ceiling = ceilings.measured(CEILINGS)
    results = [
        measure_variants(
            operation, request.variants, at, ceiling, request.stored, every, request.peer
        )
        for at in series
    ]
    return _show_measured(operation, ceiling, results, request.as_json, request.plot)


def _show_measured(
    found: Operation,
    ceiling: benches.Ceilings,
    results: list[tuple[list[Measurement], list[str]]],
    as_json: bool,
    plot: Path | None,
) -> bool:
    """Print the result of each size and plot the first; False if a variant was wrong."""
    measured = [rows for rows, _ in results]
    skipped = [line for _, lines in results for line in lines]
    if as_json:
        tflop_s = {f"fp{bits}_tflop_s": ceiling.tflop_s[f"float{bits}"] for bits in (32, 16)}
        report = {
            "ceilings": {"copy_gb_s": ceiling.copy_gb_s, **tflop_s},
            "rows": [asdict(row) for rows in measured for row in rows],
            "skipped": skipped,
        }
        print(json.dumps(for_json(report)))
    elif len(results) > 1:
        print_series(console(), found, measured, skipped, ceiling)
    else:
        print_measurements(console(), *results[0], ceiling)
    if plot is not None:
        draw_sweep(measured[0], ceiling, doctor.describe_device(0), plot)
    return all(row.right for rows in measured for row in rows)
