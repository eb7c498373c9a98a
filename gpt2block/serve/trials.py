"""Compile rules of requests in other processes first, within limits of time and memory.

Compiling a rule of a few bytes can take any time and memory, and llguidance cannot be interrupted.
Therefore a child process of the server, which has loaded the model's vocabulary, creates a fork for
each rule. The fork compiles the rule and computes its first mask. The system ends a fork at its
limits. A fork exists before its rule arrives, so that creating it delays no request.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn, cast

from gpt2block.errors import InputError
from gpt2block.grammars import Grammar, Vocabulary
from gpt2block.serve.protocol import ApiError

POSSIBLE = sys.platform == "linux"  # other systems lack limits of memory, or forks
MEMORY = 2**29  # default of most bytes per rule
STACK = 2**20  # most bytes of a fork's stack; threads of the server, which compile later, have more
WALL = 6  # a fork ends after WALL times its CPU time, too, if no core is free
NICE = 10  # added to the niceness of a fork
ENDED = 3  # exit code of a fork if the server has ended


class Trials:
    """Compiles rules in `count` child processes. A process starts when a rule needs it.

    vocabulary: arguments of Vocabulary. seconds, memory: most CPU time per rule, and most bytes by
    which the memory of a fork may grow.
    """

    def __init__(
        self, count: int, vocabulary: tuple[Any, ...], seconds: float, memory: int = MEMORY
    ) -> None:
        self._given = vocabulary, seconds, memory
        time = f"compiling takes more than {seconds:g} s of CPU time"
        self._limits = {  # by the signal that ends a fork
            signal.SIGPROF: time,
            signal.SIGALRM: time,
            signal.SIGABRT: f"compiling takes more than {memory >> 20} MiB of memory",
            signal.SIGSEGV: "it is nested too deeply",
        }
        self._idle: SimpleQueue[_Child | None] = SimpleQueue()  # None: not started
        self._running: set[_Child] = set()
        for _ in range(count):
            self._idle.put(None)

    def run(self, rule: Grammar) -> int:
        """Compile a rule; return the bytes by which memory has grown. Blocks the thread.

        Raises InputError if the rule cannot be compiled within the limits, and ApiError if the
        process has ended.
        """
        child = self._idle.get()
        try:
            if child is None:
                child = _Child(*self._given)
                self._running.add(child)
            found = child.compile(rule)
        except (EOFError, OSError):
            if child is not None:
                self._running.discard(child)
                child.end()
                child = None
            problem = f"{rule.name}: the process that compiles rules has ended: try again"
            raise ApiError(503, problem, code="overloaded") from None
        finally:
            self._idle.put(child)
        if isinstance(found, str):
            raise InputError(found)
        if found < 0:
            limit = self._limits.get(-found, "it cannot be compiled")
            raise InputError(f"{rule.name}: {limit}: expected a simpler one")
        return found

    def close(self) -> None:
        """End all processes. Calls that wait for them end."""
        for child in [*self._running]:
            child.end()


class _Child:
    """A child process that compiles one rule at a time. Arguments: as for Trials."""

    def __init__(self, vocabulary: tuple[Any, ...], seconds: float, memory: int) -> None:
        self._connection, theirs = Pipe()
        with tempfile.TemporaryFile() as file, theirs:
            pickle.dump(vocabulary, file)
            file.seek(0)
            given = theirs.fileno(), seconds, memory
            command = [sys.executable, "-m", __name__, *map(str, given)]
            # A group of its own: Ctrl-C in a terminal signals the server, which ends the group.
            self._process = subprocess.Popen(
                command, stdin=file, pass_fds=[theirs.fileno()], start_new_session=True
            )

    def compile(self, rule: Grammar) -> int | str:
        """Compile a rule. Raises EOFError or OSError if the process has ended.

        Returns the bytes by which memory has grown, or the problem, or -n if signal n has ended it.
        """
        self._connection.send(rule)
        found: int | str = self._connection.recv()
        return found

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def main() -> None:
    """Compile rules in forks until the server ends."""
    connection, seconds, memory = Connection(int(sys.argv[1])), float(sys.argv[2]), int(sys.argv[3])
    vocabulary = Vocabulary(*pickle.load(sys.stdin.buffer))
    while True:
        pid = os.fork()
        if not pid:
            _compile_one(connection, vocabulary, seconds, memory)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code == ENDED:
            return
        if code < 0:
            connection.send(code)


def _compile_one(
    connection: Connection, vocabulary: Vocabulary, seconds: float, memory: int
) -> NoReturn:
    """Wait for a rule, compile it, send the result, and end this process."""
    code, found = ENDED, cast("int | str", -signal.SIGABRT)
    with suppress(EOFError, OSError):
        rule: Grammar = connection.recv()
        _limit(seconds, memory)
        before = _memory()
        try:
            vocabulary.matcher(rule)
            found = max(0, _memory() - before)
        except InputError as error:
            found = str(error)
        except MemoryError:
            pass
        signal.setitimer(signal.ITIMER_PROF, 0)  # a signal now would send a second result
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(found)
        code = 0
    os._exit(code)


def _limit(seconds: float, memory: int) -> None:
    """Limit the CPU time, memory and stack of this process, and lower its priority."""
    import resource  # noqa: PLC0415  (the module is missing on Windows)

    os.nice(NICE)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # llguidance may abort
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory
    for kind, limit in ((resource.RLIMIT_AS, most), (resource.RLIMIT_STACK, STACK)):
        resource.setrlimit(kind, (limit, limit))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WALL * seconds)


def _memory() -> int:
    """Return the bytes of this process's memory that no file backs."""
    (found,) = re.findall(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found) << 10


if __name__ == "__main__":
    main()
