"""Handle Ctrl-C by a KeyboardInterrupt or an immediate exit, also while NVRTC compiles kernels.

While it compiles, NVRTC replaces the process's handler of SIGINT. NVRTC's handler calls exit(4) on
the thread that gets the signal. The process may then abort, or crash if another thread compiles.
Therefore SIGINT is blocked in all threads, so that no handler can run; a separate thread waits for
SIGINT and passes it to the main thread as SIGUSR1.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time

from gpt2block.apps.cli.codes import INTERRUPTED

TYPE_CHECKING = False  # type checkers assume True; importing `typing` would be slow
if TYPE_CHECKING:
    from typing import Any, NoReturn


def end_at_once_on_interrupt() -> None:
    """Make Ctrl-C exit at once, unless SIGINT is ignored or the caller has set a handler."""
    _replace_handler(signal.default_int_handler, _end_at_once)


def raise_on_interrupt() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again; undoes `end_at_once_on_interrupt`."""
    if signal.getsignal(signal.SIGINT) is _end_at_once:
        sys.unraisablehook = _raise_later
    _replace_handler(_end_at_once, signal.default_int_handler)


def receive_on_a_thread() -> None:
    """Block SIGINT in this and all later threads. One thread passes SIGINT to Python's handler.

    The main thread must call this function before it imports libraries that start threads. Does
    nothing if the caller ignores SIGINT or has set a handler.
    """
    if sys.platform != "win32" and signal.getsignal(signal.SIGINT) is _end_at_once:
        signal.signal(signal.SIGUSR1, _call_handler)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        _thread.start_new_thread(_pass_on, (_thread.get_ident(),))


def _replace_handler(old: object, new: Any) -> None:
    if signal.getsignal(signal.SIGINT) is old:
        try:  # noqa: SIM105  (importing contextlib is slow)
            signal.signal(signal.SIGINT, new)
        except ValueError:  # only the main thread can set signal handlers
            pass


def _raise_later(unraisable: Any) -> None:
    """Interrupt again after a KeyboardInterrupt in a `__del__`, where Python drops it."""
    if unraisable.exc_type is KeyboardInterrupt:
        _thread.start_new_thread(_interrupt_soon, ())  # here it would be dropped, too
    else:
        sys.__unraisablehook__(unraisable)


def _interrupt_soon() -> None:
    time.sleep(0.01)
    _thread.interrupt_main()


def _pass_on(main_thread: int) -> NoReturn:
    while True:
        signal.sigwait({signal.SIGINT})
        signal.pthread_kill(main_thread, signal.SIGUSR1)


def _call_handler(_: int, frame: object) -> None:
    handler: Any = signal.getsignal(signal.SIGINT)
    if callable(handler):
        handler(signal.SIGINT, frame)


def _end_at_once(*_: object) -> NoReturn:
    os._exit(INTERRUPTED)
