"""Compile rules of strangers in other processes first, within limits of time and memory.

The rules come with requests to a server and in receipts. Compiling a rule of a few bytes can take
any time and memory, and llguidance cannot be interrupted. Therefore a child process, which has
loaded the model's vocabulary, creates a fork for each rule. The fork compiles the rule and computes
its first mask. The system ends a fork at its limits. A fork exists before its rule arrives, so that
creating it delays no request.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn, cast
from weakref import WeakKeyDictionary

from gpt2block.engine.grammars import Grammar, Matcher, Vocabulary, vocabulary_of
from gpt2block.errors import InputError

POSSIBLE = sys.platform == "linux"  # other systems lack limits of memory, or forks
SECONDS, MEMORY = 5.0, 2**29  # defaults of `seconds` and `memory`
MAX_OF_RULES = 2**31  # most bytes that compiling the rules took that are kept or in use
STACK = 2**20  # most bytes of a fork's stack; threads that compile the rule later have more
WALL = 6  # a fork ends after WALL times its CPU time, too, if no core is free
NICE = 10  # added to the niceness of a fork
ENDED = 3  # exit code of a fork if the process that sends rules has ended


class Trial:
    """A child process that compiles one rule at a time. It starts with the first rule.

    vocabulary: arguments of Vocabulary. seconds, memory: most CPU time of a rule, and most bytes by
    which the memory of its fork may grow.
    """

    def __init__(self, vocabulary: Any, seconds: float = SECONDS, memory: int = MEMORY) -> None:
        self._given, self._lock = (vocabulary, seconds, memory), Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def matcher(self, rule: Grammar) -> Matcher:
        """Return a Matcher at the start of a text; compile a rule first if none is kept.

        Raises as `run` does, and MemoryError if the rules in use take too much memory.
        """
        vocabulary = vocabulary_of(*self._given[0])
        with self._lock:
            if (kept := vocabulary.kept(rule)) is not None:
                return kept
            grown = self.run(rule)
        if vocabulary.grown + grown > MAX_OF_RULES:
            raise MemoryError(f"{rule.name}: the rules in use take too much memory")
        return vocabulary.matcher(rule, grown)

    def run(self, rule: Grammar) -> int:
        """Compile a rule; return the bytes by which memory has grown, 0 where no limit is possible.

        Raises InputError if the rule cannot be compiled within the limits, and ChildProcessError if
        the process has ended. The next call then starts another process.
        """
        if not POSSIBLE:
            return 0
        try:
            if self._process is None:
                self._begin()
            self._connection.send(rule)
            result: int | str = self._connection.recv()
        except (EOFError, OSError):
            self.close()
            raise ChildProcessError(f"{rule.name}: the compiler's process has ended") from None
        if isinstance(result, str):
            raise InputError(result)
        if result < 0:
            raise InputError(f"{rule.name}: {self._limit(-result)}: expected a simpler one")
        return result

    def close(self) -> None:
        """End the process. A call that waits for it raises ChildProcessError."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _begin(self) -> None:
        vocabulary, *limits = self._given
        self._connection, theirs = Pipe()
        with tempfile.TemporaryFile() as file, theirs:
            pickle.dump(vocabulary, file)
            file.seek(0)
            command = [sys.executable, "-m", __name__, *map(str, (theirs.fileno(), *limits))]
            # A group of its own: Ctrl-C in a terminal signals its parent, which ends the group.
            self._process = subprocess.Popen(
                command, stdin=file, pass_fds=[theirs.fileno()], start_new_session=True
            )

    def _limit(self, number: int) -> str:
        """Return the limit for which a signal has ended a fork."""
        _, seconds, memory = self._given
        if number in (signal.SIGPROF, signal.SIGALRM):
            return f"compiling takes more than {seconds:g} s of CPU time"
        if number == signal.SIGABRT:
            return f"compiling takes more than {memory >> 20} MiB of memory"
        return "it is nested too deeply" if number == signal.SIGSEGV else "it cannot be compiled"


_trials: WeakKeyDictionary[Vocabulary, Trial] = WeakKeyDictionary()


def trial_of(*vocabulary: Any) -> Trial:
    """Return the Trial with default limits for a Vocabulary. vocabulary: its arguments."""
    return _trials.setdefault(vocabulary_of(*vocabulary), Trial(vocabulary))


def main() -> None:
    """Compile rules in forks until the process that sends the rules ends."""
    connection, seconds, memory = Connection(int(sys.argv[1])), float(sys.argv[2]), int(sys.argv[3])
    vocabulary, code = Vocabulary(*pickle.load(sys.stdin.buffer)), 0
    while code != ENDED:
        pid = os.fork()
        if not pid:
            _compile_one(connection, vocabulary, seconds, memory)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code < 0:
            connection.send(code)


def _compile_one(
    connection: Connection, vocabulary: Vocabulary, seconds: float, memory: int
) -> NoReturn:
    """Wait for a rule, compile it, send the result, and end this process."""
    # If memory runs out, `result` stays as if SIGABRT had ended this process: see Trial._limit.
    code, result = ENDED, cast("int | str", -signal.SIGABRT)
    with suppress(EOFError, OSError):
        rule: Grammar = connection.recv()
        _, before = _set_limits(seconds, memory)
        with suppress(MemoryError):
            try:
                vocabulary.matcher(rule)
                result = max(0, _memory()[1] - before)  # bytes that no file backs
            except InputError as error:
                result = str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)  # a signal now would send a second result
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(result)
        code = 0
    os._exit(code)


def _set_limits(seconds: float, memory: int) -> tuple[int, int]:
    """Limit the time, memory and stack of this process, lower its priority; return `_memory`."""
    import resource  # noqa: PLC0415  (the module is missing on Windows)

    os.nice(NICE)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # llguidance may abort
    usage = _memory()
    for kind, limit in (
        (resource.RLIMIT_AS, usage[0] + memory),
        (resource.RLIMIT_STACK, STACK),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WALL * seconds)
    return usage


def _memory() -> tuple[int, int]:
    """Return the bytes of this process's addresses, and of its memory that no file backs."""
    size, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return size * os.sysconf("SC_PAGESIZE"), (resident - shared) * os.sysconf("SC_PAGESIZE")


if __name__ == "__main__":
    main()
