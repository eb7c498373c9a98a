"""`gpt2block` in this process: its exit code, what it prints, and the line of an error."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import sys
from typing import Any, NamedTuple

from gpt2block import cli


class Ended(NamedTuple):
    """A finished command."""

    code: Any
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.err == ""
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """What a command says that is refused: one line, and exit code 2."""
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
            if signal.getsignal(number) is not handler:  # `serve` ends on its own
                signal.signal(number, handler)


def printed(*arguments: object) -> str:
    """What a command prints that succeeds without a word on stderr."""
    ended = gpt2block(*arguments)
    assert (ended.code, ended.err) == (0, "")
    return ended.out
