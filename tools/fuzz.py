"""Call gpt2block with random arguments and files, and check its results independently.

    python tools/fuzz.py                                      # 20,000 calls, all areas on NumPy
    python tools/fuzz.py --area tokenizers --calls 1000 --seed 7
    python tools/fuzz.py --area checkpoints --seed 7 --case 123   # one case, with its traceback

No case uses the network. A case depends only on the seed, its area and its number, so the command
printed for a failure reproduces it. The exit code is 1 when a case failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from fuzzing import NUMPY_AREAS, Area, Difference, Outcome, area, generator

from gpt2block.errors import printable

SECONDS = 20  # time limit of a case; a longer one counts as a hang
GRACE = 10  # further seconds until the process of a case that cannot be interrupted is killed
CHUNK = 25  # cases that a process runs before it reports
SHOWN = 60  # failures printed at most
SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # fsync is fast in memory
ENVIRONMENT = {  # of the worker processes: no network, one thread each
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
    """A case that failed, and how to run it again."""

    area: str
    seed: int
    case: int
    kind: Kind
    message: str

    @property
    def command(self) -> str:
        return f"tools/fuzz.py --area {self.area} --seed {self.seed} --case {self.case}"


class Chunk(NamedTuple):
    """Cases `first` … `end` - 1 of an area."""

    area: str
    seed: int
    first: int
    end: int


@dataclass
class Tally:
    """The outcomes of an area's cases."""

    area: str
    calls: int = 0
    right: int = 0
    refused: int = 0
    seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.calls += other.calls
        self.right += other.right
        self.refused += other.refused
        self.seconds += other.seconds
        self.failures += other.failures


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeLimitError in this block after so many seconds."""

    def stop(signum: int, frame: Any) -> None:
        raise TimeLimitError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    begun = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)  # repeated, in case the first one was caught
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if time.monotonic() - begun > seconds:
        raise TimeLimitError(f"done after {time.monotonic() - begun:.0f} s, the limit is {seconds}")


def run_case(tested: Area, seed: int, case: int) -> Outcome:
    """Run one case in a new folder. Raises whatever the case raises."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=SCRATCH))
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"), time_limit(SECONDS):
            warnings.simplefilter("ignore")
            return tested.case(generator(seed, tested.name, case), folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def judged(tested: Area, seed: int, case: int) -> Outcome | Failure:
    """Run a case; return its outcome, or its failure."""
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


def run_chunk(chunk: Chunk, current: Any) -> Tally:
    """Run the cases of a chunk; `current.value` is set to the number of the running one."""
    tested, found = area(chunk.area), Tally(chunk.area)
    begun = time.perf_counter()
    for case in range(chunk.first, chunk.end):
        current.value = case
        outcome = judged(tested, chunk.seed, case)
        found.calls += 1
        if isinstance(outcome, Failure):
            found.failures.append(outcome)
        elif outcome == "right":
            found.right += 1
        else:
            found.refused += 1
    found.seconds = time.perf_counter() - begun
    return found


def limit_memory(more: int) -> None:
    """Limit this process to `more` bytes of address space in addition to the present size."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def work(connection: Any, current: Any, names: Sequence[str]) -> None:
    """Main function of a process: receive chunks and send tallies, until None is received."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust prints every panic
    limits = [tested.memory for tested in map(area, names)]  # imported before the limit is set
    if all(limit is not None for limit in limits):
        limit_memory(max(limit for limit in limits if limit is not None))
    while (chunk := connection.recv()) is not None:
        connection.send(run_chunk(chunk, current))


class Worker:
    """A process, which is replaced when it dies or hangs."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._context = multiprocessing.get_context("spawn")
        self._current = self._context.Value("q", -1, lock=False)
        self._start()

    def _start(self) -> None:
        self._connection, other = self._context.Pipe()
        self._process = self._context.Process(
            target=work, args=(other, self._current, self._names), daemon=False
        )
        self._process.start()
        other.close()

    def run(self, chunk: Chunk) -> Tally:
        """Run a chunk. A case that ends its process is a failure; the other cases still run."""
        found = Tally(chunk.area)
        while chunk.first < chunk.end:
            self._current.value = -1
            try:
                self._connection.send(chunk)
            except OSError:
                self._process.join(GRACE)
            problem = self._answer()
            if isinstance(problem, Tally):
                found.add(problem)
                return found
            case = self._current.value
            if case < 0:
                raise RuntimeError(f"a process ended before its first case: {problem}")
            self._process.kill()
            self._process.join()
            kind: Kind = "hang" if problem == "hang" else "traceback"
            # The tally of the cases before the failing one is lost, so they run again.
            chunk_before = chunk._replace(end=case)
            self._start()
            failure = Failure(chunk.area, chunk.seed, case, kind, f"the process: {problem}")
            found.add(Tally(chunk.area, calls=1, failures=[failure]))
            if chunk_before.first < chunk_before.end:
                found.add(self.run(chunk_before))
            chunk = chunk._replace(first=case + 1)
        return found

    def _answer(self) -> Tally | str:
        """Return the process's tally, or a message on how the process ended."""
        last, since = self._current.value, time.monotonic()
        while not self._connection.poll(0.5):
            if not self._process.is_alive():
                return f"ended with exit code {self._process.exitcode}"
            if self._current.value != last:
                last, since = self._current.value, time.monotonic()
            elif last >= 0 and time.monotonic() - since > SECONDS + GRACE:
                return "hang"
        try:
            found: Tally = self._connection.recv()
            return found
        except (EOFError, OSError):
            self._process.join(GRACE)
            return f"ended with exit code {self._process.exitcode}"

    def close(self) -> None:
        self._connection.send(None)
        self._process.join(GRACE)
        if self._process.is_alive():
            self._process.kill()


def chunks_of(areas: Sequence[Area], calls: int, seed: int) -> list[Chunk]:
    """Divide the calls by the areas' shares, at least one each, into chunks."""
    total = sum(tested.share for tested in areas)
    found = []
    for tested in areas:
        count = max(1, round(calls * tested.share / total))
        found += [
            Chunk(tested.name, seed, first, min(first + CHUNK, count))
            for first in range(0, count, CHUNK)
        ]
    return found


def run_all(areas: Sequence[Area], calls: int, seed: int, jobs: int) -> list[Tally]:
    """Run all cases in `jobs` processes, with progress on stderr."""
    todo: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
    chunks = chunks_of(areas, calls, seed)
    for chunk in chunks:
        todo.put(chunk)
    total = sum(chunk.end - chunk.first for chunk in chunks)
    tallies = {tested.name: Tally(tested.name) for tested in areas}
    lock, printed, errors = threading.Lock(), [time.monotonic()], []

    def drive() -> None:
        worker = Worker([tested.name for tested in areas])
        try:
            while True:
                try:
                    chunk = todo.get_nowait()
                except queue.Empty:
                    return
                found = worker.run(chunk)
                with lock:
                    tallies[chunk.area].add(found)
                    _progress(tallies, total, printed)
        except Exception as error:
            errors.append(error)
        finally:
            worker.close()

    threads = [threading.Thread(target=drive) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return list(tallies.values())


def _progress(tallies: dict[str, Tally], total: int, printed: list[float]) -> None:
    """Print a line every five seconds. printed: the time of the last one, updated."""
    if time.monotonic() - printed[0] < 5:
        return
    printed[0] = time.monotonic()
    calls = sum(tally.calls for tally in tallies.values())
    failures = sum(len(tally.failures) for tally in tallies.values())
    print(f"{calls:,} of {total:,} calls, {failures:,} failures", file=sys.stderr, flush=True)


def table(tallies: Sequence[Tally]) -> str:
    """Return the summary as text."""
    kinds: tuple[Kind, ...] = ("traceback", "silent difference", "hang")
    heads = ("area", "calls", "right", "refused", "tracebacks", "differences", "hangs", "seconds")
    total = Tally("total")
    for tally in tallies:
        total.add(tally)
    rows = [heads]
    for tally in (*tallies, total):
        counts = Counter(failure.kind for failure in tally.failures)
        numbers = (tally.calls, tally.right, tally.refused, *(counts[kind] for kind in kinds))
        rows.append((tally.area, *(f"{n:,}" for n in numbers), f"{tally.seconds:.1f}"))  # type: ignore[arg-type]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="On a GPU: --area ops.",
    )
    parser.add_argument("--area", action="append", help=f"{', '.join(NUMPY_AREAS)}, ops; repeat")
    parser.add_argument("--calls", type=int, default=20_000, help="cases in all (20,000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--case", type=int, help="run only this case of one --area, in this process"
    )
    parser.add_argument("--json", type=Path, help="write the summary and all failures to this file")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="processes")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    names = arguments.area or list(NUMPY_AREAS)
    if "ops" not in names:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CUDA needs more address space than the limit
    try:
        areas = [area(name) for name in names]
    except ModuleNotFoundError as error:  # an unknown area, or a package that it needs
        parser.error(f"--area: {error}")
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
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(tally) for tally in tallies], indent=1) + "\n")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
