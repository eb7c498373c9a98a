"""Call gpt2block with random arguments and files, and check its results independently.

    python tools/fuzz.py                                      # 20,000 calls, all areas
    python tools/fuzz.py --area tokenizers --calls 1000 --seed 7
    python tools/fuzz.py --area checkpoints --seed 7 --case 123   # one case, with its traceback

No case uses the network. A case depends only on the seed, its area and its number, so the command
printed for a failure reproduces it. The exit code is 1 when a case failed, or when all cases of an
area were refused, or none.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from fuzzing import AREAS, Area, Difference, Refused, area, generator

from gpt2block.emulator.ptx import engine
from gpt2block.errors import printable

SECONDS = 20  # time limit of a case; a longer case counts as a hang
GRACE = 10  # further seconds until the process of a case that cannot be interrupted is killed
SHOWN = 60  # failures printed at most
SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # fsync is fast in memory
ENVIRONMENT = {  # environment of the worker processes: no GPU, no network, one thread each
    "CUDA_VISIBLE_DEVICES": "",  # CUDA needs more address space than the limit
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
Kind = Literal["traceback", "silent difference", "hang"]


class TimeLimitError(BaseException):
    """The case took too long. Not an Exception, so that handlers under test do not catch it."""


@dataclass(frozen=True)
class Failure:
    """A case that failed, and the command that repeats it."""

    area: str
    seed: int
    case: int
    kind: Kind
    message: str

    @property
    def command(self) -> str:
        return f"tools/fuzz.py --area {self.area} --seed {self.seed} --case {self.case}"


Outcome = Failure | Literal["right", "refused"]


@dataclass
class Tally:
    """The outcomes of an area's cases."""

    area: str
    calls: int = 0
    right: int = 0
    refused: int = 0
    seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)

    def add(self, outcome: Outcome, seconds: float) -> None:
        self.calls += 1
        self.right += outcome == "right"
        self.refused += outcome == "refused"
        self.seconds += seconds
        self.failures += [outcome] if isinstance(outcome, Failure) else []


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeLimitError in the with block after this many seconds."""

    def stop(signum: int, frame: Any) -> None:
        raise TimeLimitError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    begun = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)  # repeated, in case the first signal is caught
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if time.monotonic() - begun > seconds:
        raise TimeLimitError(f"done after {time.monotonic() - begun:.0f} s, the limit is {seconds}")


def run_case(tested: Area, seed: int, case: int) -> Outcome:
    """Run one case in a new folder. Raises whatever the case raises, except Refused."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=SCRATCH))
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"), time_limit(SECONDS):
            warnings.simplefilter("ignore")
            tested.case(generator(seed, tested.name, case), folder)
    except Refused:
        return "refused"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return "right"


def judged(tested: Area, seed: int, case: int) -> Outcome:
    """Run a case and return its outcome."""
    try:
        return run_case(tested, seed, case)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        kind: Kind = (
            "silent difference" if isinstance(error, Difference)
            else "hang" if isinstance(error, TimeLimitError)
            else "traceback"
        )  # fmt: skip
        line = "" if kind == "silent difference" else f" at {_source_line(error)}"
        text = printable(f"{type(error).__name__}: {error}{line}", 300)
        return Failure(tested.name, seed, case, kind, text)


def _source_line(error: BaseException) -> str:
    """Return the innermost line of gpt2block, or else of any file, in the error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{os.sep}gpt2block{os.sep}" in frame.filename]
    frame = (ours or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


def limit_memory(more: int) -> None:
    """Limit this process to `more` bytes of address space in addition to the present size."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def work(connection: Any, names: Sequence[str]) -> None:
    """Main function of a process: send that it is ready, then the outcome of each case received."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust prints every panic
    limit_memory(max(tested.memory for tested in map(area, names)))  # after their imports
    connection.send("ready")
    while (case := connection.recv()) is not None:
        name, seed, number = case
        connection.send(judged(area(name), seed, number))


class Worker:
    """A process that runs one case at a time, and is replaced when it dies or hangs."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=work, args=(other, self._names))
        self._process.start()
        other.close()
        try:
            self._connection.recv()
        except EOFError:
            raise RuntimeError("a process ended before its first case") from None

    def run(self, name: str, seed: int, case: int) -> Outcome:
        """Run a case. A case that ends its process, or does not end, is a failure."""
        kind: Kind = "traceback"
        try:
            self._connection.send((name, seed, case))
            if self._connection.poll(SECONDS + GRACE):
                found: Outcome = self._connection.recv()
                return found
            kind, problem = "hang", "hang"
        except (EOFError, OSError):
            self._process.join(GRACE)
            problem = f"ended with exit code {self._process.exitcode}"
        self._process.kill()
        self._process.join()
        self._start()
        return Failure(name, seed, case, kind, f"the process: {problem}")

    def close(self) -> None:
        self._connection.send(None)
        self._process.join(GRACE)
        if self._process.is_alive():
            self._process.kill()


def cases_of(areas: Sequence[Area], calls: int) -> Iterator[tuple[str, int]]:
    """Return area and number of each call. Each area gets its share of the calls, at least one."""
    total = sum(tested.share for tested in areas)
    for tested in areas:
        for case in range(max(1, round(calls * tested.share / total))):
            yield tested.name, case


def run_all(areas: Sequence[Area], calls: int, seed: int, jobs: int) -> list[Tally]:
    """Run all cases in `jobs` processes, with progress on stderr every five seconds."""
    names = [tested.name for tested in areas]
    tallies = {name: Tally(name) for name in names}
    cases = [*cases_of(areas, calls)]
    todo, lock, printed = iter(cases), threading.Lock(), time.monotonic()

    def drive() -> None:
        nonlocal printed
        worker = Worker(names)
        try:
            while True:
                with lock:
                    name, case = next(todo, ("", 0))
                if not name:
                    return
                begun = time.monotonic()
                outcome = worker.run(name, seed, case)
                with lock:
                    now = time.monotonic()
                    tallies[name].add(outcome, now - begun)
                    if now - printed >= 5:
                        printed = now
                        done = sum(tally.calls for tally in tallies.values())
                        failures = sum(len(tally.failures) for tally in tallies.values())
                        progress = f"{done:,} of {len(cases):,} calls, {failures:,} failures"
                        print(progress, file=sys.stderr, flush=True)
        finally:
            worker.close()

    with ThreadPoolExecutor(jobs) as pool:
        for ended in [pool.submit(drive) for _ in range(jobs)]:
            ended.result()
    return list(tallies.values())


def table(tallies: Sequence[Tally]) -> str:
    """Return the summary as text."""
    kinds: tuple[Kind, ...] = ("traceback", "silent difference", "hang")
    heads = ("area", "calls", "right", "refused", "tracebacks", "differences", "hangs", "seconds")
    numbers = [
        [tally.calls, tally.right, tally.refused]
        + [[failure.kind for failure in tally.failures].count(kind) for kind in kinds]
        + [tally.seconds]
        for tally in tallies
    ]
    names = [*(tally.area for tally in tallies), "total"]
    lines = ["{:<13}  {:>7}  {:>7}  {:>7}  {:>10}  {:>11}  {:>5}  {:>7}".format(*heads)]
    for name, row in zip(names, [*numbers, map(sum, zip(*numbers, strict=True))], strict=True):
        form = "{:<13}  {:>7,}  {:>7,}  {:>7,}  {:>10,}  {:>11,}  {:>5,}  {:>7,.1f}"
        lines.append(form.format(name, *row))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--area", action="append", help=f"{', '.join(AREAS)}; repeat")
    parser.add_argument("--calls", type=int, default=20_000, help="total number of cases (20,000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--case", type=int, help="run only this case of one --area, in this process"
    )
    parser.add_argument("--json", type=Path, help="write the summary and all failures to this file")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="processes")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    names = arguments.area or list(AREAS)
    try:
        areas = [area(name) for name in names]
    except ModuleNotFoundError as error:  # an unknown area, or a package that it needs
        parser.error(f"--area: {error}")
    if engine.missing() is None:
        engine._built()  # once, as its compilation takes longer than a case may
    if arguments.case is not None:
        if len(areas) != 1:
            parser.error("--case: give one --area, to which the case belongs")
        print(run_case(areas[0], arguments.seed, arguments.case))
        return
    tallies = run_all(areas, arguments.calls, arguments.seed, arguments.jobs)
    failures = [failure for tally in tallies for failure in tally.failures]
    for failure in failures[:SHOWN]:
        print(f"{failure.command}  # {failure.kind}: {failure.message}")
    if len(failures) > SHOWN:
        print(f"… and {len(failures) - SHOWN:,} more failures: --json FILE writes all of them")
    print(table(tallies))
    one_sided = [each.area for each in tallies if each.calls > 30 and not each.right * each.refused]
    if one_sided:
        print(f"no case was right, or none was refused: {', '.join(one_sided)}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(tally) for tally in tallies], indent=1) + "\n")
    sys.exit(1 if failures or one_sided else 0)


if __name__ == "__main__":
    main()
