"""`check` and `check_kernel` check a user's kernel, as `gpt2block kernels --mine` does."""

from __future__ import annotations

import atexit
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gpt2block.checks import named_options
from gpt2block.cuda import doctor
from gpt2block.errors import Argument, DeviceError, InputError, shown
from gpt2block.judge import on_cpu
from gpt2block.judge.cases import Case, cases, resolved_seed
from gpt2block.judge.kernel import Kernel, described, matched
from gpt2block.judge.sizes import too_large
from gpt2block.judge.source import OWN, read
from gpt2block.judge.verdict import Verdict
from gpt2block.judge.why import EMULATOR_ONLY
from gpt2block.ops import workload
from gpt2block.ops.operation import Operation, Sizes
from gpt2block.ops.registry import find, stated_sizes

Watched = Callable[[Iterable[Any], Sequence[Case]], Iterable[Any]]
FILE = "my.cu"  # file name of a source that is passed as text


@named_options()
def check(
    source: str | Path,
    operation: str,
    *,
    kernel: str | None = None,
    grid: str | None = None,
    block: str | None = None,
    shared: str | None = None,
    args: str | None = None,
    shape: Mapping[str, int] | None = None,
    dtype: str | None = None,
    layout: str | None = None,
    device: str | None = None,
    seed: int | None = None,
    why: bool = False,
) -> Verdict:
    """Check a user's CUDA kernel, as `gpt2block kernels OPERATION --mine FILE.cu` does.

    Compares every output with float64 at several sizes. The emulator also finds accesses out of
    bounds, races and divergent barriers, with their lines. Prints nothing, and times nothing.

    source: the text of a `.cu` file, or its path. On the emulator, a kernel has no access to files,
    processes or the network. operation: name of an operation, such as "layernorm". kernel: name of
    the kernel, if the file has several.
    grid, block, shared: expressions such as "ceil(N / 8)", which replace the launch line's. args:
    the argument of each parameter, such as "x,out,N,C". shape: the only sizes to check, such as
    {"C": 768}. dtype: dtype of the arrays. layout: layout of weights. device: "cpu" for the
    emulator, which needs g++; "cuda"; or None for a GPU if there is one, else the emulator. seed:
    seed of the random sizes, at least 0; None for a new one, which is in the result. why: add the
    steps of the threads that the problem names, which needs the emulator. Raises InputError for an
    invalid source or argument, and DeviceError. Errors of the kernel, including compiler errors,
    are in the result, as is the reason why a kernel cannot be judged.
    """
    found = find(operation)
    if device not in (None, "cpu", "cuda"):
        raise InputError(f"device: expected 'cpu', 'cuda' or None, got {shown(device)}")
    if not isinstance(shape, Mapping | None):
        raise InputError(f"shape: expected sizes such as {{'C': 768}}, got {shown(shape)}")
    sizes = ",".join(f"{name}={n}" for name, n in (shape or {}).items())
    stated = stated_sizes(found, sizes or None)
    stored = workload.check_storage(found, dtype, layout)
    launch = {"kernel": kernel, "grid": grid, "block": block, "shared": shared}
    for name, value in launch.items():
        if not isinstance(value, str | None):
            raise InputError(f"{name}: expected a text such as '256', got {shown(value)}")
    user = _match(source, found, stored, args, launch)
    job = CheckJob(user, stored, stated, resolved_seed(seed))
    problem = doctor.cuda_problem() if device != "cpu" else "the CPU was requested"
    if device == "cuda" and problem:
        raise DeviceError(f"device 'cuda': {problem}: {doctor.ADVICE}")
    if why and not problem:
        raise InputError(f"why: {EMULATOR_ONLY}: expected ", Argument("device", "cpu"))
    return job.on_cpu(why) if problem else job.on_gpu()


@dataclass(frozen=True)
class CheckJob:
    """The checks of a user's kernel: at stated sizes alone, or at all sizes and random ones.

    stored: (dtype, layout), as `workload.check_storage` returns them. watched: wraps the iteration
    over the results, such as a progress bar.
    """

    user: Kernel
    stored: tuple[str, str]
    stated: Sizes
    seed: int
    watched: Watched = lambda results, given: results

    @property
    def sizes(self) -> Sizes:
        """The sizes that a GPU times."""
        return {**self.user.operation.workload.sizes, **self.stated}

    def on_cpu(self, steps: bool) -> Verdict:
        """Check the kernel on the emulator. steps: whether `Verdict.why` is requested."""
        if self.stated and too_large(self.user.operation, self.stated):
            what = f" {described(self.stated)}: too large for the emulator: state smaller sizes"
            raise InputError(Argument("shape"), what)
        cases = self._cases()
        timed = on_cpu.TimedSizes(self.sizes, self.stored[1], self.stated)
        results = on_cpu.check_kernel(self.user, cases, timed=timed, steps=steps)
        return self._verdict("cpu", self.watched(results, cases), steps)

    def on_gpu(self, variants: tuple[str, ...] | None = None) -> Verdict:
        """Check the kernel on the GPU. variants: built-in ones to time it with; None: no times."""
        from gpt2block.judge import on_gpu  # noqa: PLC0415  (imports benchmarks)

        cases, at = self._cases(), None if variants is None else self.sizes
        job = on_gpu.ChildJob(self.user, cases, variants or (), at, self.stored)
        return self._verdict("cuda", self.watched(on_gpu.run(job), cases))

    def _cases(self) -> tuple[Case, ...]:
        return cases(self.user, self.stored[1], self.stated, self.seed)

    def _verdict(self, device: str, results: Iterable[Any], steps: bool = False) -> Verdict:
        seed = None if self.stated else self.seed  # stated sizes are checked alone
        return Verdict.of(self.user, device, results, seed, steps, self.sizes)


def check_kernel(operation: str, source: str | Path, **options: Any) -> Verdict:
    """Check a user's CUDA kernel for an operation; the same as `gpt2block.judge.check`.

    operation: name of an operation, such as "layernorm". source: the text of a `.cu` file, or its
    path. options: keywords of `gpt2block.judge.check`. Raises InputError for an invalid source or
    argument, and DeviceError.
    """
    return check(source, operation, **options)


def _match(
    source: str | Path,
    operation: Operation,
    stored: tuple[str, str],  # (dtype, layout)
    args: str | None,
    launch: Mapping[str, str | None],
) -> Kernel:
    """Read a source and match its kernel with the operation. launch: keywords of `read`."""
    file = _file(source)
    try:
        return matched(read(file, **launch), operation, stored, args)
    except InputError as error:
        # OWN is the option --mine; in Python, the argument `source` names the file.
        parts = ("source" if part == OWN else part for part in error.parts)
        if file != source:  # source is a text: leave out the temporary folder
            parts = (p.replace(f"{file.parent}/", "") if isinstance(p, str) else p for p in parts)
        raise InputError(*parts) from None


def _file(source: str | Path) -> Path:
    """Return the path of a source; a source passed as text is written to a temporary file."""
    if not isinstance(source, (str, Path)):
        raise InputError(
            f"source: expected the text of a .cu file or its path, got {shown(source)}"
        )
    if isinstance(source, Path) or (source and not ("\n" in source or "__global__" in source)):
        return Path(source)
    data = source.encode(errors="surrogatepass")
    folder = _folder() / hashlib.sha256(data).hexdigest()[:16]  # equal texts compile once
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_bytes(data)
    return folder / FILE


@cache
def _folder() -> Path:
    """Create a temporary folder for sources passed as text; delete it when this process ends."""
    folder = tempfile.mkdtemp(prefix="gpt2block-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
