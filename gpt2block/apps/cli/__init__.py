"""Entry point of the command line: standard streams, exit codes and one-line error messages.

The commands are defined in `gpt2block.apps.cli.app`. Only `main` imports it: the import takes a
fifth of a second or more, and Ctrl-C must not print a traceback during it.
"""

from __future__ import annotations

import errno
import os
import sys
from io import BufferedWriter, FileIO, TextIOWrapper

from gpt2block.apps.cli import interrupts
from gpt2block.apps.cli.codes import FAILED, INTERRUPTED, PIPE_CLOSED, WRONG

TYPE_CHECKING = False  # type checkers assume True; importing `typing` would be slow
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn, TextIO


class OutputError(Exception):
    """Raised if writing to standard output fails.

    Not a subclass of OSError: code that handles errors of files, and Rich, which handles a closed
    pipe itself, must let it pass to `main`.
    """

    def __init__(self, cause: OSError) -> None:
        super().__init__(f"cannot write to standard output: {cause.strerror}")
        self.pipe_closed = cause.errno == errno.EPIPE


class _Output(FileIO):
    """Standard output or standard error. After a failed write, all later writes are dropped.

    A failed write to standard output raises OutputError; one to standard error is ignored.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._dropped = False

    def write(self, data: Any) -> int | None:  # type: ignore[override]  # Buffer needs 3.12
        if not self._dropped:
            try:
                return super().write(data)
            except OSError as error:
                self._dropped = True
                if self.fileno() == 1:
                    raise OutputError(error) from None
        return memoryview(data).nbytes


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a command and exit with its exit code, or with 2 and one line on stderr for an error.

    Exits with 1 if standard output cannot be written. Ctrl-C exits with 130 and a closed pipe with
    141, without a message. arguments: words of the command line; by default the process's.
    """
    interrupts.end_at_once_on_interrupt()
    if arguments is None:
        interrupts.receive_on_a_thread()
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
    if arguments is None:  # from now on, Ctrl-C can only interrupt Python's shutdown
        interrupts.end_at_once_on_interrupt()
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    """Run a command and return its exit code. Expected errors become lines on stderr."""
    from gpt2block import errors  # noqa: PLC0415
    from gpt2block.engine.threads import set_threads  # noqa: PLC0415

    try:
        set_threads(arguments)
        return _import_commands(arguments)(arguments)
    except MemoryError as error:  # CuPy's OutOfMemoryError is a subclass
        said = errors.printable(f"not enough memory: {error}")
    except (errors.CheckpointError, errors.DeviceError, errors.InputError) as error:
        said = str(error)
    except (errors.KernelError, OSError) as error:
        said = errors.printable(str(error))
    print(f"error: {said}", file=sys.stderr)
    return WRONG


def _import_commands(arguments: list[str]) -> Callable[[list[str]], int]:
    """Import the command to run; return a function that runs command lines of this command.

    Afterwards, Ctrl-C raises KeyboardInterrupt instead of exiting. During the import Ctrl-C ends
    the process at once, because extension modules turn a KeyboardInterrupt into other exceptions.
    """
    try:
        from gpt2block.apps.cli import app  # noqa: PLC0415

        application = app.application(*arguments[:1])
    finally:
        interrupts.raise_on_interrupt()
    return lambda words: app.run(application, words)


def _set_up_streams() -> None:
    """Open closed standard streams, replace unencodable characters, and check writes to stdout."""
    for descriptor, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        _open_null_if_closed(descriptor, mode)  # a closed stdout becomes read-only: writes fail
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = _checked(sys.stdout, 1)
    sys.stderr = _checked(sys.stderr, 2)


def _open_null_if_closed(descriptor: int, mode: int) -> None:
    """Open the null device as `descriptor` if it is closed, before another file gets it."""
    try:
        os.fstat(descriptor)
    except OSError:
        null = os.open(os.devnull, mode)
        if null != descriptor:
            os.dup2(null, descriptor)
            os.close(null)
        os.set_inheritable(descriptor, True)  # child processes inherit standard streams


def _checked(stream: TextIO | None, descriptor: int) -> TextIO:
    """Return a stream that writes through `_Output`, with "?" for unencodable characters.

    None becomes a new stream on the descriptor. Streams that do not write to the descriptor
    themselves, such as a notebook's or a test's, are returned unchanged.
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
