"""Threads that run at the same time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable


def together(work: Callable[[int], None], threads: int = 8) -> list[BaseException]:
    """Run `work` in concurrent threads that switch often; return the errors they raised."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        running = [threading.Thread(target=run, args=(n,)) for n in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    return errors
