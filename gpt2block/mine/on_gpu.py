"""A user's kernel on the GPU: checked, then timed in one race with the built-in variants.

All of it happens in a child process: a kernel that hangs can only be ended with its process, and
one that accesses a wrong address leaves its process without a usable GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpt2block.bench import Ceilings, Measurement, ceilings, measure, measure_variants
from gpt2block.bench.variants import CEILINGS
from gpt2block.errors import DeviceError, InputError, KernelError
from gpt2block.mine import check
from gpt2block.mine.cases import Case
from gpt2block.mine.check import Checked
from gpt2block.mine.child import Ended, Send, Stage, supervised
from gpt2block.mine.finding import Finding, of_compiler
from gpt2block.mine.kernel import MINE, Kernel, described
from gpt2block.ops.operation import Sizes

START = Stage("the start of CUDA", 120.0)
COMPILE = Stage("the compiler", 60.0)
CHECK_S, RACE_S = 20.0, 600.0


@dataclass(frozen=True)
class ChildJob:
    """What the child does.

    variants: the names of the built-in ones in the race. sizes: those of the race; None for checks
    alone.
    """

    kernel: Kernel
    cases: tuple[Case, ...]
    variants: tuple[str, ...]
    sizes: Sizes | None
    stored: tuple[str, str]
    peer: str | None = None
    sweep: bool = False  # every block size of the built-in ones
    check_s: float = CHECK_S  # the time limit of a check


@dataclass(frozen=True)
class Raced:
    """The result of the race; `ceiling` was measured in the same process."""

    rows: list[Measurement]
    skipped: list[str]
    ceiling: Ceilings


def run(job: ChildJob) -> Iterator[Checked | Finding | Raced]:
    """The result of each case, then of the race; ends with a Finding at the first problem.

    A kernel that is wrong on special inputs alone is timed all the same. Raises InputError for
    sizes that a launch cannot have, and DeviceError.
    """
    for message in supervised(serve, (job,), START):
        if isinstance(message, (DeviceError, InputError)):
            raise message
        if isinstance(message, Ended):
            yield _ended(job.kernel, message)
        else:
            yield message


def serve(send: Send, job: ChildJob) -> None:
    """In the child: check, then time."""
    try:
        if _compiled(send, job) and _right(send, job) and job.sizes:
            _race(send, job, job.sizes)
    except (DeviceError, InputError) as error:
        send(error)


def _race(send: Send, job: ChildJob, sizes: Sizes) -> None:
    send(Stage(f"the race at {described(sizes)}", RACE_S))
    raced = job.kernel.as_operation()
    variants = [each for each in raced.variants if each.name in (*job.variants, MINE)]
    ceiling = ceilings.measured(CEILINGS)
    try:
        rows, skipped = measure_variants(
            raced, variants, sizes, ceiling, job.stored, job.sweep, job.peer
        )
    except Exception as error:
        send(_failed(error, described(sizes)))
        return
    send(Raced(rows, skipped, ceiling))


def _compiled(send: Send, job: ChildJob) -> bool:
    """Whether NVRTC accepts the file."""
    send(COMPILE)
    case = job.cases[0]
    arrays = tuple(map(measure.uploaded, case.inputs))
    try:
        for launch in job.kernel.bind(arrays, **case.attrs).launches:
            launch.function.found  # noqa: B018  (waits for the compiler)
    except KernelError as error:
        send(of_compiler(job.kernel.source, str(error)))
        return False
    return True


def _right(send: Send, job: ChildJob) -> bool:
    """Whether every case but special ones is right; sends the result of each."""
    for case in job.cases:
        send(Stage(f"the check at {case.label}", job.check_s))
        try:
            found = _launched(job.kernel, case)
        except InputError as error:
            if not case.hint:
                raise
            found = Finding(f"{error}\n{case.hint}", at=f"at {case.label}")
        except Exception as error:
            found = _failed(error, case.label)
        send(found)
        if isinstance(found, Finding):
            return found.fragile
    return True


def _launched(kernel: Kernel, case: Case) -> Checked | Finding:
    """The result of three launches in this process, of which the last is on other outputs."""
    first, second = (check.compare(kernel, case, guarded=True) for _ in range(2))
    if first.problem:
        return check.finding(first, case)
    if second.problem:
        return check.of_second_launch(check.finding(second, case))
    third = check.compare(kernel, case, guarded=True, fill=check.POSITIVE_BYTE)
    return check.of_old_values(check.finding(third, case)) if third.problem else first


def _failed(error: Exception, where: str) -> Finding:
    """An exception of CUDA, after which the process has no usable GPU; raises any other."""
    if not type(error).__name__.startswith(("CUDA", "OutOfMemory")):
        raise error
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if "IllegalAddress" in said or "illegal memory access" in said:
        said = "reads or writes out of bounds: --device cpu shows the line"
    elif "MisalignedAddress" in said or "misaligned address" in said:
        said = (
            "a misaligned access, such as a float4 at an odd address: --device cpu shows the line"
        )
    return Finding(said, at=f"at {where}")


def _ended(kernel: Kernel, end: Ended) -> Finding:
    """A child that was killed, or that crashed."""
    if end.exitcode is None:
        what = f"{kernel.source.name} still runs after {end.stage.limit_s:g} s, and was ended"
        return Finding(f"{what}: --device cpu shows the line", at=f"during {end.stage.name}")
    return Finding(
        f"the process of the kernel ended with exit code {end.exitcode}",
        at=f"during {end.stage.name}",
    )
