"""Run `gpt2block` commands in this process, with their exit code, output and error line."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
from typing import Any, NamedTuple

from gpt2block.apps import cli


class Ended(NamedTuple):
    """A finished command: its exit code, standard output and standard error."""

    code: Any
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.err == ""
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The message of a refused command, which must be one line, with exit code 2."""
        assert (self.code, self.out) == (2, "")
        assert self.err.startswith("error: ")
        assert self.err.endswith("\n")
        assert self.err.count("\n") == 1
        return self.err.removeprefix("error: ").removesuffix("\n")


def gpt2block(*arguments: object, stdin: bytes | None = None) -> Ended:
    """Run `gpt2block ARGUMENTS`. stdin: None for a terminal."""
    typed = io.TextIOWrapper(io.BytesIO(stdin or b""), encoding="ascii")
    typed.isatty = lambda: stdin is None  # type: ignore[method-assign]
    out, err = io.StringIO(), io.StringIO()
    before, sys.stdin = sys.stdin, typed
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main([str(argument) for argument in arguments])
    except SystemExit as end:
        return Ended(end.code or 0, out.getvalue(), err.getvalue())
    finally:
        sys.stdin = before
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:  # `serve` installs its own handlers
                signal.signal(number, handler)


def python(
    code: str, *arguments: object, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python code in a new process; return its exit code and outputs."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=check, **options)


def printed(*arguments: object) -> str:
    """Return the output of a command that must succeed and write nothing to stderr."""
    ended = gpt2block(*arguments)
    assert (ended.code, ended.err) == (0, "")
    return ended.out
