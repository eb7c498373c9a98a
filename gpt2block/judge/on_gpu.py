"""Check a user's kernel on the GPU, then time it together with the built-in variants.

The kernel runs in a child process: a kernel that hangs can only be stopped with its process, and a
kernel that accesses an invalid address makes its process's CUDA context unusable.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpt2block.cuda import kernels
from gpt2block.cuda.arrays import compute_capability
from gpt2block.emulator.ptx import nvrtc
from gpt2block.errors import DeviceError, InputError, KernelError, NotJudged
from gpt2block.judge import comparison
from gpt2block.judge.cases import Case
from gpt2block.judge.child import ProcessExited, Send, Stage, supervised
from gpt2block.judge.comparison import BenchmarkResult, Checked
from gpt2block.judge.finding import Finding, compiler_finding
from gpt2block.judge.kernel import MINE, Kernel, described
from gpt2block.ops import workload
from gpt2block.ops.bench import ceilings
from gpt2block.ops.bench.variants import CEILINGS, measure_variants
from gpt2block.ops.operation import Sizes

START = Stage("the start of CUDA", 120.0)
COMPILE = Stage("the compiler", 60.0)
CHECK_S, RACE_S = 20.0, 600.0
SHOWN = ": --device cpu shows the line"


@dataclass(frozen=True)
class ChildJob:
    """The work of the child process: to check a kernel and, optionally, to time it.

    variants: names of the built-in variants in the benchmark. sizes: sizes of the benchmark; None
    for checks only.
    """

    kernel: Kernel
    cases: tuple[Case, ...]
    variants: tuple[str, ...]
    sizes: Sizes | None
    stored: tuple[str, str]
    check_s: float = CHECK_S  # time limit of a check in seconds


def run(job: ChildJob) -> Iterator[Checked | Finding | BenchmarkResult]:
    """Run a job; yield results of the cases and of the benchmark; stop at the first Finding.

    A kernel that is wrong only for special inputs is still timed. Raises InputError for sizes at
    which the kernel cannot be launched, and DeviceError.
    """
    for message in supervised(serve, (job,), START):
        if isinstance(message, (DeviceError, InputError)):
            raise message
        if isinstance(message, ProcessExited):
            yield _describe_exit(job.kernel, message)
        else:
            yield message


def serve(send: Send, job: ChildJob) -> None:
    """Run in the child process: check the kernel, then time it."""
    try:
        if _compile(send, job) and _right(send, job) and job.sizes:
            _race(send, job, job.sizes)
    except (DeviceError, InputError) as error:
        send(error)


def _race(send: Send, job: ChildJob, sizes: Sizes) -> None:
    send(Stage(f"the race at {described(sizes)}", RACE_S))
    raced = job.kernel.as_operation()
    variants = [each for each in raced.variants if each.name in (*job.variants, MINE)]
    ceiling = ceilings.measured(CEILINGS)
    try:
        rows, skipped = measure_variants(raced, variants, sizes, ceiling, job.stored)
    except Exception as error:
        send(_describe_error(error, described(sizes)))
        return
    send(BenchmarkResult(rows, skipped, ceiling))


def _compile(send: Send, job: ChildJob) -> bool:
    """Compile the file with NVRTC; send its errors, and return whether there were none.

    NVRTC first compiles within limits of time and memory, which a file may exceed.
    """
    send(COMPILE)
    case, path = job.cases[0], str(job.kernel.source.path)
    capability = compute_capability()
    build = nvrtc.compile(
        kernels.program(path, job.kernel.defines),
        name="kernel.cu",
        arch=f"sm_{capability}",
        options=[each for each in kernels.options(path, capability) if each[:2] == "-I"],
    )
    if isinstance(build, nvrtc.Refused) and build.reason:
        raise NotJudged(f"{job.kernel.source.file}: not judged: {build.reason}")
    arrays = tuple(map(workload.uploaded, case.inputs))
    try:
        for launch in job.kernel.bind(arrays, **case.attrs).launches:
            launch.function.found  # noqa: B018  (waits for the compiler)
    except KernelError as error:
        send(compiler_finding(job.kernel.source, str(error)))
        return False
    return True


def _right(send: Send, job: ChildJob) -> bool:
    """Check each case and send its result; return whether cases of ordinary inputs are right."""
    for case in job.cases:
        send(Stage(f"the check at {case.label}", job.check_s))
        try:
            result = _launch(job.kernel, case)
        except InputError as error:
            if not case.hint:
                raise
            result = Finding(f"{error}\n{case.hint}", at=f"at {case.label}")
        except Exception as error:
            result = _describe_error(error, case.label)
        send(result)
        if isinstance(result, Finding):
            return result.kind == "fragile"
    return True


def _launch(kernel: Kernel, case: Case) -> Checked | Finding:
    """Launch a kernel three times, the third with another fill byte; return the result."""
    first, second = (comparison.compare(kernel, case, guarded=True) for _ in range(2))
    if first.problem:
        return comparison.finding(first, case)
    if second.problem:
        return comparison.because(comparison.finding(second, case), comparison.SECOND_LAUNCH)
    third = comparison.compare(kernel, case, guarded=True, fill=comparison.POSITIVE_BYTE)
    if third.problem:
        return comparison.because(comparison.finding(third, case), comparison.OLD_VALUES)
    return first


def _describe_error(error: Exception, where: str) -> Finding:
    """Return the Finding for a CUDA exception, after which the context is unusable.

    Re-raise any other exception.
    """
    if not type(error).__name__.startswith(("CUDA", "OutOfMemory")):
        raise error
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if "IllegalAddress" in said or "illegal memory access" in said:
        said = f"reads or writes out of bounds{SHOWN}"
    elif "MisalignedAddress" in said or "misaligned address" in said:
        said = f"a misaligned access, such as a float4 at an odd address{SHOWN}"
    return Finding(said, at=f"at {where}")


def _describe_exit(kernel: Kernel, end: ProcessExited) -> Finding:
    """Return the Finding for a child process that was killed at its time limit or crashed."""
    if end.exitcode is None:
        still = f"{kernel.source.name} still runs after {end.stage.limit_s:g} s"
        what = f"{still}, and was ended{SHOWN}"
    else:
        what = f"the process of the kernel ended with exit code {end.exitcode}"
    return Finding(what, at=f"during {end.stage.name}")
