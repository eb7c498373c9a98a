"""Ctrl-C ends a command with KeyboardInterrupt or at once, also while NVRTC compiles kernels.

During a compile NVRTC replaces the process's handler of SIGINT. Its own calls exit(4) on the
thread that gets the signal, in which the process may abort, or crash if it is another thread than
the one that compiles. So SIGINT is blocked in all threads, where no handler can run; a thread of
its own waits for it and passes it to the main thread as SIGUSR1.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys

from gpt2block.cli.codes import INTERRUPTED

TYPE_CHECKING = False  # type checkers take it as True; importing typing is slow
if TYPE_CHECKING:
    from typing import Any, NoReturn


def end_at_once_on_interrupt() -> None:
    """Make Ctrl-C end the process, unless it is ignored or the caller has a handler of its own."""
    _replace_handler(signal.default_int_handler, _end_at_once)


def raise_on_interrupt() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again after `end_at_once_on_interrupt`."""
    _replace_handler(_end_at_once, signal.default_int_handler)


def receive_on_a_thread() -> None:
    """Keep SIGINT from handlers other than Python's, in this thread and those it will start.

    For a process whose main thread calls it before it imports libraries that start threads.
    Does nothing where the caller ignores SIGINT or has a handler of its own.
    """
    if sys.platform != "win32" and signal.getsignal(signal.SIGINT) is _end_at_once:
        signal.signal(signal.SIGUSR1, _call_handler)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        _thread.start_new_thread(_pass_on, (_thread.get_ident(),))


def _replace_handler(old: Any, new: Any) -> None:
    if signal.getsignal(signal.SIGINT) is old:
        try:  # noqa: SIM105  (importing contextlib is slow)
            signal.signal(signal.SIGINT, new)
        except ValueError:  # not the main thread, which alone sets and receives signals
            pass


def _pass_on(main_thread: int) -> NoReturn:
    while True:
        signal.sigwait({signal.SIGINT})
        signal.pthread_kill(main_thread, signal.SIGUSR1)


def _call_handler(_: int, frame: Any) -> None:
    handler: Any = signal.getsignal(signal.SIGINT)
    if callable(handler):
        handler(signal.SIGINT, frame)


def _end_at_once(*_: Any) -> NoReturn:
    os._exit(INTERRUPTED)
