"""Judge all kernels of a folder in parallel, and compare the verdicts with expected ones.

A table names the kernels, or each file names its operation in a comment. Child processes check the
kernels. A kernel whose check crashes or hangs ends only its own child process.
"""

from __future__ import annotations

import csv
import os
import re
import shlex
import signal
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import StringIO
from multiprocessing import active_children, resource_tracker
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from time import perf_counter
from typing import Any

from gpt2block.errors import Argument, InputError, PrintableError, printable
from gpt2block.judge.child import ProcessExited, Send, Stage, supervised
from gpt2block.judge.finding import as_json
from gpt2block.judge.kernel_check import check
from gpt2block.judge.source import read_text
from gpt2block.judge.templates import names
from gpt2block.judge.verdict import NOT_JUDGED, RIGHT, VERDICTS, WRONG
from gpt2block.ops.registry import find, stated_sizes

SCHEMA = 1  # version of the output of `gpt2block judge --json`
TABLE = "table.csv"
COLUMNS = ("file", "operation", "expected", "kind", "options", "note")
OPTIONS = ("dtype", "layout", "shape", "kernel", "grid", "block", "shared", "args")
FIRST_LINES = 20  # lines of a file that may name its operation
LIMIT_S = 900.0  # time limit of the check of a kernel
CHUNK = 8  # maximum number of kernels for one child process, which takes 1.4 s to start
_OPERATION = re.compile(r"^[ \t]*//[ \t]*operation:[ \t]*(\w+)", re.MULTILINE)


@dataclass(frozen=True)
class KernelFile:
    """A kernel to judge. file: its path in the folder. expected: a verdict, or "" for none."""

    path: Path
    file: str
    operation: str
    expected: str = ""
    kind: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Judged:
    """The verdict on an entry. said: the first line of the finding or reason, all lines of an
    error of the file, or "" if the kernel is right.

    result: `Verdict.as_dict()`, or None if the check ended without a `Verdict`.
    """

    entry: KernelFile
    verdict: str
    seconds: float
    said: str = ""
    result: Mapping[str, Any] | None = None

    @property
    def finding(self) -> str:
        """The kind of the first finding, or ""."""
        findings = self.result["findings"] if self.result else ()
        return str(findings[0]["kind"]) if findings else ""

    def as_dict(self) -> dict[str, Any]:
        """Return the entry and its verdict as a dict that can be written as JSON."""
        columns = as_json(self.entry, COLUMNS) | {"options": dict(self.entry.options)}
        return columns | as_json(self, ("verdict", "finding", "seconds", "said", "result"))


def entries(folder: Path, operation: str | None = None) -> list[KernelFile]:
    """Return the kernels of a folder: the rows of its table, or all `.cu` files without a table.

    operation: operation of the files that name none. Raises InputError, which names the line.
    """
    if not folder.is_dir():
        problem = "expected a folder, got a file" if folder.exists() else "no such folder"
        raise InputError(f"{folder}: {problem}")
    table = folder / TABLE
    if operation is not None:
        find(operation, names())
        if table.is_file():
            raise InputError(Argument("operation"), f": {TABLE} names the operations: leave it out")
    files = list(_rows(table)) if table.is_file() else _files(folder, operation)
    if not files:
        raise InputError(f"{folder}: no kernel: expected .cu files, or rows in {TABLE}")
    return files


def _files(folder: Path, operation: str | None) -> list[KernelFile]:
    files = []
    for path in sorted(folder.rglob("*.cu")):
        file = path.relative_to(folder).as_posix()
        try:
            named = _OPERATION.search("\n".join(read_text(path).splitlines()[:FIRST_LINES]))
        except InputError as error:
            if operation is None:
                raise InputError(error.message(lambda _: "").strip()) from None
            named = None  # the check says why nothing can read the file
        name = named[1] if named else operation
        if name is None:
            raise InputError(
                f"{file}: no operation: write a line such as // operation: layernorm at the top of "
                "the file, or pass --operation"
            )
        try:
            find(name, names())
        except InputError as error:
            raise InputError(f"{file}: {error}") from None
        files.append(KernelFile(path, file, name))
    return files


def _rows(table: Path) -> Iterator[KernelFile]:
    try:
        reader = csv.DictReader(StringIO(table.read_text("utf-8-sig")))
    except UnicodeDecodeError as error:
        raise InputError(f"{table.name}: expected UTF-8, byte {error.start} is not") from None
    names = reader.fieldnames or ()
    wrong = [name for name in names if name not in COLUMNS]
    if wrong or not {"file", "operation"} <= set(names):
        got = f"column {wrong[0]!r}" if wrong else f"columns {', '.join(names) or 'none'}"
        raise InputError(
            f"{table.name}: {got}: expected file, operation and optionally {', '.join(COLUMNS[2:])}"
        )
    for row in reader:
        try:
            yield _entry(table.parent, row)
        except InputError as error:
            raise InputError(f"{table.name}:{reader.line_num}: {error}") from None


def _entry(folder: Path, row: Mapping[str | None, str]) -> KernelFile:
    if None in row:
        raise InputError("more values than columns: quote a value that has a comma")
    values = {name: (row.get(name) or "").strip() for name in COLUMNS}
    path = folder / values["file"]
    if not path.is_file():
        raise InputError(f"file {values['file']!r}: no such file")
    if values["expected"] not in ("", RIGHT, WRONG):
        raise InputError(f"expected: {values['expected']!r}: expected 'right' or 'wrong'")
    options = _options(values.pop("options"))
    stated_sizes(find(values["operation"], names()), options.get("shape"))
    return KernelFile(path, options=options, **values)


def _options(text: str) -> dict[str, str]:
    """Parse options such as --dtype float16 --block=64."""
    try:
        words = deque(shlex.split(text))
    except ValueError as error:
        raise InputError(f"options: {text!r}: {error}") from None
    options: dict[str, str] = {}
    while words:
        name, equals, value = words.popleft().partition("=")
        if name.removeprefix("--") not in OPTIONS or not name.startswith("--"):
            known = ", ".join(f"--{each}" for each in OPTIONS)
            raise InputError(f"options: {name!r}: expected one of {known}")
        if not equals and not words:
            raise InputError(f"options: {name} needs a value")
        options[name[2:]] = value if equals else words.popleft()
    return options


def judge(
    kernels: Sequence[KernelFile], jobs: int, limit_s: float = LIMIT_S, **options: object
) -> Iterator[Judged]:
    """Check kernels in `jobs` child processes; yield each verdict as soon as it is known.

    limit_s: time limit of each check, in seconds. options: keywords of `check` for all kernels.
    """
    most = max(1, min(CHUNK, len(kernels) // jobs))
    chunks = deque(list(kernels[i : i + most]) for i in range(0, len(kernels), most))
    done: SimpleQueue[Judged | Exception] = SimpleQueue()
    args = chunks, limit_s, options, done
    threads = [Thread(target=_work, args=args, daemon=True) for _ in range(min(jobs, len(chunks)))]
    for thread in threads:
        thread.start()
    try:
        for _ in kernels:
            result = done.get()
            if isinstance(result, Exception):
                raise result
            yield result
    finally:
        while any(thread.is_alive() for thread in threads):
            chunks.clear()
            for child in active_children():
                if child.name == _serve.__name__:
                    child.kill()
            threads[0].join(0.05)


def _work(
    chunks: deque[list[KernelFile]],
    limit_s: float,
    options: Mapping[str, object],
    done: SimpleQueue[Judged | Exception],
) -> None:
    """Check chunks of kernels until none is left, each in a child process.

    If a process ends early, the rest of its chunk becomes another chunk. An exception ends the
    thread, and is put in the queue of verdicts.
    """
    if hasattr(signal, "pthread_sigmask"):  # Ctrl-C ends the parent, which kills the children
        resource_tracker.ensure_running()  # starting it unblocks the signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with suppress(IndexError):  # no chunk is left
            while chunk := chunks.popleft():
                begun, args = perf_counter(), (chunk, limit_s, options)
                for result in supervised(_serve, args, Stage("the check", limit_s), daemon=False):
                    entry = chunk.pop(0)
                    if isinstance(result, ProcessExited):
                        done.put(_describe_exit(entry, result, perf_counter() - begun))
                        chunks.extendleft([chunk] if chunk else ())
                    else:
                        done.put(result)
                        begun = perf_counter()
    except Exception as error:
        done.put(error)


def _describe_exit(entry: KernelFile, end: ProcessExited, seconds: float) -> Judged:
    code = end.exitcode
    what = f"took more than {end.stage.limit_s:g} s" if code is None else f"ended with code {code}"
    return Judged(entry, NOT_JUDGED, seconds, f"the process of the check {what}")


def _serve(
    send: Send, chunk: Sequence[KernelFile], limit_s: float, options: Mapping[str, object]
) -> None:
    """Run in the child process: check the kernels and send a `Judged` for each."""
    for entry in chunk:
        send(Stage(f"the check of {entry.file}", limit_s))
        send(judged(entry, **options))


def judged(entry: KernelFile, **options: Any) -> Judged:
    """Check one kernel. An exception, such as one for an unreadable file, is the reason.

    options: further keywords of `check`.
    """
    begun = perf_counter()
    options |= entry.options
    try:
        if "shape" in options:
            options["shape"] = stated_sizes(find(entry.operation), options["shape"])
        verdict = check(entry.path, entry.operation, **options)
    except PrintableError as error:
        said = error.message(lambda argument: f"--{argument.name} {argument.value}".rstrip())
    except Exception as error:  # an error of the checks must not stop the other kernels
        said = f"{type(error).__name__}: {printable(str(error))}"
    else:
        text = verdict.reason or (verdict.problem.text if verdict.problem else "")
        first, _, rest = text.partition("\n")
        said = f"{first} {rest.partition(chr(10))[0]}" if first.endswith(":") else first
        return Judged(entry, verdict.verdict, verdict.seconds, said, verdict.as_dict())
    return Judged(entry, NOT_JUDGED, perf_counter() - begun, said)


def confusion(found: Sequence[Judged]) -> dict[str, dict[str, int]]:
    """Return {expected verdict: {verdict: count}}; "" stands for kernels without an expectation."""
    counts = Counter((each.entry.expected, each.verdict) for each in found)
    used = [expected for expected in (RIGHT, WRONG, "") if any(expected == e for e, _ in counts)]
    return {e: {verdict: counts[e, verdict] for verdict in VERDICTS} for e in used}


def disagreements(verdicts: Sequence[Judged]) -> list[Judged]:
    """Return the kernels whose verdict is not the expected one.

    If no kernel has an expected verdict, all are expected to be right.
    """
    if any(each.entry.expected for each in verdicts):
        return [each for each in verdicts if each.entry.expected not in ("", each.verdict)]
    return [each for each in verdicts if each.verdict != RIGHT]


def default_jobs() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
