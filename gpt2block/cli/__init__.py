"""What a shell sees of a command, however it ends: streams, exit code, one line for an error.

The commands are in `cli_app`, which only `main` imports: it takes a third of a second, and Ctrl-C
must be quiet during it.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from io import BufferedWriter, FileIO, TextIOWrapper

TYPE_CHECKING = False  # as type checkers know it: typing takes its time
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any, NoReturn, TextIO

FAILED, WRONG, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141  # the last two as a shell gives them


class OutputError(Exception):
    """Standard output cannot be written.

    It is no OSError, so that it reaches `main` through code that handles those of files, and
    through Rich, which answers a closed pipe by itself.
    """

    def __init__(self, cause: OSError) -> None:
        super().__init__(f"cannot write to standard output: {cause.strerror}")
        self.pipe_closed = cause.errno == errno.EPIPE


class _Output(FileIO):
    """Standard output or error. After a write that failed, all that follows is dropped.

    Only standard output raises: what cannot be said on standard error is lost either way.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._dropped = False

    def write(self, data: Any) -> int | None:  # type: ignore[override]  # its type is 3.12's Buffer
        if not self._dropped:
            try:
                return super().write(data)
            except OSError as error:
                self._dropped = True
                if self.fileno() == 1:
                    raise OutputError(error) from None
        return memoryview(data).nbytes


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a command and exit: 0, what the command says, or 2 with one line on stderr.

    1 when standard output cannot be written. Ctrl-C and a closed pipe are quiet: 130 and 141.
    arguments: those of the process by default.
    """
    _end_at_once_on_interrupt()
    _set_up_streams()
    code = WRONG
    try:
        try:
            code = _run(sys.argv[1:] if arguments is None else arguments)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except OutputError as error:
        code = PIPE_CLOSED if error.pipe_closed else FAILED
        if not error.pipe_closed:
            print(f"error: {error}", file=sys.stderr)
    if arguments is None:  # nothing is left to interrupt but Python's own end
        _end_at_once_on_interrupt()
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    """The exit code of a command; our own errors and the system's become one line on stderr."""
    from gpt2block.errors import (  # noqa: PLC0415
        CheckpointError,
        DeviceError,
        InputError,
        KernelError,
        printable,
    )

    try:
        return int(_commands().run(arguments))
    except MemoryError as error:  # CuPy's out of memory is one, too
        line = f"not enough memory for this: {error}"
    except (CheckpointError, DeviceError, InputError, KernelError, OSError) as error:
        line = str(error)
    print(f"error: {printable(line)}", file=sys.stderr)
    return WRONG


def _commands() -> ModuleType:
    """The module of the commands; from then on Ctrl-C is a KeyboardInterrupt.

    During the import it ends the process: extension modules turn an exception into another one.
    """
    try:
        from gpt2block.cli import app as cli_app  # noqa: PLC0415
    finally:
        if signal.getsignal(signal.SIGINT) is _end_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli_app


def _end_at_once_on_interrupt() -> None:
    """Unless Ctrl-C is ignored, as in the background of a script, or the caller handles it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        try:  # noqa: SIM105  (contextlib takes its time, too)
            signal.signal(signal.SIGINT, _end_at_once)
        except ValueError:  # only the main thread may set it, and only that receives it
            pass


def _end_at_once(*_: Any) -> NoReturn:
    os._exit(INTERRUPTED)


def _set_up_streams() -> None:
    """Standard streams that exist and take every character; a failing write is an OutputError."""
    for descriptor, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        _fill(descriptor, mode)  # 1 only reads, so that a write fails
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = _checked(sys.stdout, 1)
    sys.stderr = _checked(sys.stderr, 2)


def _fill(descriptor: int, mode: int) -> None:
    """A closed descriptor becomes the null device, before a file is opened under its number."""
    try:
        os.fstat(descriptor)
    except OSError:
        null = os.open(os.devnull, mode)
        if null != descriptor:
            os.dup2(null, descriptor)
            os.close(null)
        os.set_inheritable(descriptor, True)  # so that children have the same


def _checked(stream: TextIO | None, descriptor: int) -> TextIO:
    """The stream, or one to the descriptor without it, through `_Output`; "?" for what it lacks.

    A stream of another kind, such as a notebook's or a test's, stays what it is.
    """
    if stream is None:
        return TextIOWrapper(BufferedWriter(_Output(descriptor)), errors="replace")
    if not isinstance(stream, TextIOWrapper):
        return stream
    stream.reconfigure(errors="replace")
    raw = getattr(stream.buffer, "raw", stream.buffer)
    if type(raw) is not FileIO or raw.fileno() != descriptor:
        return stream
    stream.flush()
    output: Any = _Output(descriptor)
    return TextIOWrapper(
        output if stream.write_through else BufferedWriter(output),
        stream.encoding,
        "replace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
