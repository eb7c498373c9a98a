"""Advise one thread for matrix products if other programs keep the cores busy.

OpenBLAS's threads wait for each other in busy loops, so that a thread without a core delays all.
The number of threads is never changed within a process, as the last bits of results depend on it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from threading import Thread
from typing import Any

from gpt2block.cli import THREADS

SLOW = 1e9  # bytes per second: a step that reads the weights more slowly is slow
FEW = 16  # tokens of a step whose time is that of reading the weights
STEPS = 3  # number of slow steps after which products are measured
LEAST = 1.5  # ratio of times from which on one thread is advised
PRODUCTS = (
    "import numpy, timeit; x, w = numpy.ones((1, 1024), 'f'), numpy.ones((1024, 8192), 'f'); "
    "count, seconds = timeit.Timer(lambda: x @ w).autorange(); print(seconds / count)"
)


class SlowSteps:
    """Counts the slow steps of a model on the CPU, as its `watcher`. nbytes: of its weights.

    tell: function that gets the advice as soon as steps are slow, from another thread; by default,
    `advise` prints the advice.
    """

    def __init__(self, nbytes: int, tell: Callable[[str], None] | None = None) -> None:
        self._nbytes, self._tell, self._slow = nbytes, tell, 0

    def __call__(self, tokens: int, seconds: float) -> None:
        self._slow += tokens <= FEW and seconds * SLOW > self._nbytes
        if self._tell and self._slow == STEPS:
            Thread(target=lambda: self.advise(self._tell), daemon=True).start()

    def advise(self, tell: Any = lambda line: print(f"note: {line}", file=sys.stderr)) -> None:
        """Tell, once after slow steps, if one thread is faster."""
        if self._slow < STEPS or os.environ.get(THREADS[0]) == "1":
            return
        self._slow = -sys.maxsize
        ratio = seconds_of_product() / seconds_of_product(**dict.fromkeys(THREADS, "1"))
        if ratio >= LEAST:
            tell(
                f"while other programs use the cores, a matrix product is {ratio:.1f} times as "
                "fast with one thread: --threads 1, or OPENBLAS_NUM_THREADS=1 before Python starts"
            )


def seconds_of_product(**variables: str) -> float:
    """Return the time of a matrix product in a child process with these environment variables."""
    command = [sys.executable, "-c", PRODUCTS]
    environment = {**os.environ, **variables}
    return float(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)


def advise(engine: Any) -> None:
    """Print a note on stderr if the steps of an engine on the CPU were slow."""
    if getattr(engine, "watcher", None):
        engine.watcher.advise()
