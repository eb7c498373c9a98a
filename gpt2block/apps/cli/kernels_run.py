"""Run `gpt2block kernels`: built-in variants or a user's kernel, on a GPU or the emulator."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import typer

from gpt2block import emulator
from gpt2block.apps.cli import counters, kernels
from gpt2block.apps.cli.codes import WRONG as NO_VERDICT
from gpt2block.apps.cli.display import console, print_json, progress_bar, tracked
from gpt2block.apps.cli.kernels_options import KernelsOptions, OwnOptions
from gpt2block.apps.cli.listing import rung
from gpt2block.apps.cli.mine import print_source, print_verdict, print_why
from gpt2block.apps.cli.rungs import check_variants, print_rungs, rungs_report
from gpt2block.cuda import doctor
from gpt2block.errors import DeviceError, InputError, NotJudged, lines
from gpt2block.files.writing import write_file
from gpt2block.judge import on_cpu
from gpt2block.judge.cases import Case, resolved_seed
from gpt2block.judge.kernel import MINE, Kernel, matched
from gpt2block.judge.kernel_check import CheckJob
from gpt2block.judge.solutions import solution as solution_of
from gpt2block.judge.source import read
from gpt2block.judge.templates import template as template_of
from gpt2block.judge.verdict import Verdict
from gpt2block.judge.why import EMULATOR_ONLY
from gpt2block.judge.why_page import html_of
from gpt2block.ops import workload
from gpt2block.ops.bench import ceilings
from gpt2block.ops.bench.variants import CEILINGS, measure_variants
from gpt2block.ops.operation import Attrs, Operation, Sizes, Variant
from gpt2block.ops.registry import all_sizes, find, parse_sizes, stated_sizes

T = TypeVar("T")
CPU, CUDA = "cpu", "cuda"
SIZES_OF_A_VARIANT = 2  # sizes to emulate; most variants compile one program per size


class Request(NamedTuple):
    """A request to run an operation's variants, or a user's kernel for it, with options."""

    operation: Operation
    variants: tuple[Variant, ...]
    stored: tuple[str, str]
    options: KernelsOptions
    own: OwnOptions

    @property
    def steps(self) -> bool:
        """Whether the steps of the threads of a problem are requested."""
        return self.own.why or self.own.why_page is not None


def run(options: KernelsOptions, own: OwnOptions) -> bool:
    """List, print or run kernels. Return False if a result is wrong or no kernel could run."""
    if options.operation is None:
        if options.as_json:
            print_json(kernels.operations_report())
        else:
            kernels.list_operations(console())
        return True
    op = find(options.operation)
    if own.template:
        print(template_of(op), end="")
        return True
    if own.solution is not None:
        print(solution_of(op, own.solution), end="")
        return True
    if options.source is not None:
        print_source(console(), op, rung(op, options.source))
        return True
    parse_sizes(op, options.shape)
    variants = op.variants if options.variant is None else (op.variant(options.variant),)
    stored = workload.check_storage(op, options.dtype, options.layout)
    user = None
    if own.mine is not None:
        text = read(own.mine, own.kernel, own.grid, own.block, own.shared)
        user = matched(text, op, stored, own.args)
    if options.counters and (lacking := emulator.missing()):
        raise DeviceError(*lines(f"--counters: {lacking}"))
    request = Request(op, variants, stored, options, own)
    if options.counters and user is None:
        return _count_variants(request)
    return _run(request, user, options.device)


def _run(request: Request, user: Kernel | None, device: str | None) -> bool:
    """Run kernels on a GPU or the emulator. Return False if a result is wrong or none could run."""
    if device not in (None, CPU, CUDA):
        raise InputError(f"--device {device}: expected cuda or cpu")
    problem = None if device == CPU else doctor.cuda_problem()
    if device != CPU and problem is None:
        if request.steps:
            option = "--why" if request.own.why else "--why-page"
            raise InputError(f"{option}: {EMULATOR_ONLY}: add --device cpu")
        return _check_own(request, user, True) if user else _on_gpu(request)
    if device == CUDA:
        return _not_run(request, user, f"{problem}: this needs a GPU, and {doctor.ADVICE}")
    try:
        on_cpu.require_emulator()
    except DeviceError as error:
        if problem is None:
            raise
        return _not_run(request, user, f"{problem}; {error}")
    if problem and not request.options.as_json:
        print(f"note: running on the CPU: {problem}", file=sys.stderr)
    return _check_own(request, user, False) if user else _on_cpu(request, problem)


def _not_run(request: Request, user: Kernel | None, problem: str) -> bool:
    """Print the variants, then on stderr why no kernel was run; with --json only the reason.

    Return False. Raise DeviceError for a user's kernel, which is then neither right nor wrong.
    """
    why = f"{request.operation.name}: no kernel was run: {problem}"
    if user:
        raise DeviceError(*lines(why))
    if request.options.as_json:
        print_json({"run": False, "why": why})
    else:
        _list(request)
        print(f"error: {why}", file=sys.stderr)
    return False


def _list(request: Request) -> None:
    """List all variants, unless one variant or JSON was requested."""
    every = request.variants == request.operation.variants
    if every and not request.options.as_json:
        kernels.list_variants(console(), request.operation)


def _small(request: Request) -> list[tuple[Sizes, Attrs]]:
    """Return sizes to emulate: the last two of the operation, or the last one with --shape."""
    known, shape = request.operation.cases, request.options.shape
    if shape is None:
        return list(known[-SIZES_OF_A_VARIANT:])
    sizes, attrs = known[-1]
    return [({**sizes, **stated_sizes(request.operation, shape)}, attrs)]


def _on_cpu(request: Request, problem: str | None) -> bool:
    """Check the built-in variants on the emulator. Return False if a result was wrong."""
    operation, as_json = request.operation, request.options.as_json
    small = _small(request)
    _list(request)
    variants = tracked(request.variants, "variants", hidden=as_json)
    rungs, skipped = check_variants(operation, variants, request.stored, small)
    if as_json:
        print_json(rungs_report(operation, rungs, skipped, problem))
    else:
        sizes = [each for each, _ in small]
        print_rungs(console(), operation, rungs, skipped, sizes, request.stored[0])
    return bool(rungs) and all(each.right for each in rungs)


def _on_gpu(request: Request) -> bool:
    """Time the built-in variants on the GPU. Return False if a result was wrong."""
    operation, options = request.operation, request.options
    shape = options.shape
    _list(request)
    ceiling = ceilings.measured(CEILINGS)
    results = [
        measure_variants(operation, request.variants, at, ceiling, request.stored)
        for at in (all_sizes(operation) if shape is None else [parse_sizes(operation, shape)])
    ]
    measured = [rows for rows, _ in results]
    skipped = [line for _, lines in results for line in lines]
    if options.as_json:
        print_json(kernels.measured_report(measured, skipped, ceiling))
    elif len(results) > 1:
        kernels.print_series(console(), operation, measured, skipped, ceiling)
    else:
        kernels.print_measurements(console(), *results[0], ceiling)
    return all(row.right for rows in measured for row in rows)


def _with_progress(results: Iterable[T], cases: Sequence[Case], hidden: bool) -> Iterator[T]:
    """Yield results of checks; meanwhile, a progress bar shows the check that runs."""
    labels = [*(each.label for each in cases), "sizes that a GPU times"]
    with progress_bar("{task.description}", hidden) as bar:
        task = bar.add_task(f"compiling, then at {labels[0]}", total=len(labels))
        for done, found in enumerate(results, 1):
            yield found
            bar.update(task, completed=done, description=f"at {labels[min(done, len(cases))]}")


def _check_own(request: Request, user: Kernel, on_gpu: bool) -> bool:
    """Check a user's kernel, on a GPU also its times. Return False if it is wrong."""
    options = request.options
    stated = stated_sizes(request.operation, options.shape)
    watched = partial(_with_progress, hidden=options.as_json)
    job = CheckJob(user, request.stored, stated, resolved_seed(request.own.seed), watched)
    if not on_gpu:
        return _show_own(request, job.on_cpu(request.steps))
    return _show_own(request, job.on_gpu(tuple(each.name for each in request.variants)))


def _count(
    request: Request, user: Kernel | None = None
) -> tuple[list[counters.KernelCounts], list[str]]:
    """Count a user's kernel and the fastest variant, or all built-in variants."""
    stated = stated_sizes(request.operation, request.options.shape)
    operation = request.operation
    variants: Sequence[Variant | None] = request.variants
    if user is not None:
        operation = user.as_operation()
        variants = operation.variant(MINE), counters.fastest(operation, request.stored[0])
    at = counters.reduced(request.operation, stated)
    return counters.count_all(operation, variants, at, request.stored)


def _count_variants(request: Request) -> bool:
    """Print the counters of the built-in variants. Return False if none could run."""
    counts = _count(request)
    if request.options.as_json:
        print_json(counters.report(*counts))
    else:
        counters.print_totals(console(), *counts)
    return bool(counts[0])


def _show_own(request: Request, verdict: Verdict) -> bool:
    """Print the verdict. Raise an exception, for exit code 2, if the kernel was not judged."""
    page = request.own.why_page
    if page is not None and verdict.why is not None:
        write_file(page, html_of(verdict, verdict.why).encode())
    wanted = request.options.counters and verdict.right
    counted = _count(request, verdict.kernel) if wanted else None
    if request.options.as_json:
        print_json(verdict.as_dict() | ({"counters": counters.report(*counted)} if counted else {}))
        if verdict.reason is not None:
            raise typer.Exit(NO_VERDICT)
    elif verdict.reason is not None:
        raise NotJudged(verdict.reason)
    else:
        print_verdict(console(), verdict)
        if request.own.why and verdict.why is not None:
            print_why(console(), verdict.kernel.source, verdict.why)
        if counted:
            counters.print_lines(console(), *counted)
        if page is not None and verdict.why is not None:
            none = f"{page} has no steps: {verdict.why.note}"
            print(f"The steps are in {page}." if verdict.why.steps else none)
    return verdict.right
