"""Set the number of threads for matrix products; advise one thread if the cores are busy.

OpenBLAS's threads wait for each other in busy loops, so that a thread without a core delays all.
The number of threads is never changed within a process, as the last bits of results depend on it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

# Variables from which libraries of matrix products read their number of threads; OpenBLAS's first.
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
SLOW = 1e9  # bytes per second: a step that reads the weights more slowly is slow
MEMORY_BOUND_TOKENS = 16  # tokens of a step whose time is that of reading the weights
STEPS = 3  # number of slow steps after which products are measured
MIN_RATIO = 1.5  # ratio of times from which on one thread is advised
PRODUCTS = (
    "import numpy, timeit; x, w = numpy.ones((1, 1024), 'f'), numpy.ones((1024, 8192), 'f'); "
    "count, seconds = timeit.Timer(lambda: x @ w).autorange(); print(seconds / count)"
)


def set_threads(words: list[str]) -> None:
    """Set the number of threads that --threads states, which NumPy reads when it is imported."""
    for word, next_word in zip(words, [*words[1:], ""], strict=False):
        name, _, value = word.partition("=")
        if name == "--threads" and "numpy" not in sys.modules:
            os.environ.update(dict.fromkeys(THREADS, value or next_word))


def slow_steps(nbytes: int) -> Callable[[int, float], None]:
    """Return a function that gets tokens and seconds of each step of a model on the CPU.

    After slow steps, it prints a note on stderr, once, if one thread is faster. nbytes: of the
    model's weights.
    """
    slow = 0

    def watch(tokens: int, seconds: float) -> None:
        nonlocal slow
        slow += tokens <= MEMORY_BOUND_TOKENS and seconds * SLOW > nbytes
        if slow != STEPS or os.environ.get(THREADS[0]) == "1":
            return
        slow += 1
        ratio = seconds_of_product() / seconds_of_product(**dict.fromkeys(THREADS, "1"))
        if ratio >= MIN_RATIO:
            line = (
                f"note: while other programs use the cores, a matrix product is {ratio:.1f} times "
                "as fast with one thread: --threads 1, or OPENBLAS_NUM_THREADS=1 before Python "
                "starts"
            )
            print(f"\n{line}" if sys.stderr.isatty() else line, file=sys.stderr)

    return watch


def seconds_of_product(**variables: str) -> float:
    """Return the time of a matrix product in a child process with these environment variables."""
    command = [sys.executable, "-c", PRODUCTS]
    environment = {**os.environ, **variables}
    return float(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
