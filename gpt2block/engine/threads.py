"""Set the number of threads for matrix products; advise one thread if the cores are busy.

OpenBLAS's threads wait for each other in busy loops, so that a thread without a core delays all.
The number of threads is never changed within a process, as the last bits of results depend on it.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import timeit
from contextlib import suppress
from functools import cache
from time import time

# Variables from which libraries of matrix products read their number of threads; OpenBLAS's first.
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
SETUP = "import numpy; x, w = numpy.ones((1, 1024), 'f'), numpy.ones((1024, 1024), 'f'); x @ w"
PRODUCTS = 10  # number of products that are timed: 1 ms if the cores are idle
SLOW = 4.2e-3  # seconds of a product, which reads 4.2 MB, from which the cores may be busy
MIN_RATIO = 1.5  # ratio of times from which on one thread is advised
KEPT = 3600  # seconds for which the time of a product with one thread is kept


def set_threads(words: list[str]) -> None:
    """Set the number of threads that --threads states, which NumPy reads when it is imported."""
    for word, next_word in zip(words, [*words[1:], ""], strict=False):
        name, _, value = word.partition("=")
        if name == "--threads" and "numpy" not in sys.modules:
            os.environ.update(dict.fromkeys(THREADS, value or next_word))


@cache
def advise_one_thread() -> None:
    """Print a note on stderr, once, if products are slow and one thread is faster."""
    if os.environ.get(THREADS[0]) == "1" or (seconds := seconds_of_product()) < SLOW:
        return
    ratio = seconds / seconds_with_one_thread()
    if ratio >= MIN_RATIO:
        print(
            f"note: while other programs use the cores, a matrix product is {ratio:.1f} times as "
            "fast with one thread: --threads 1, or OPENBLAS_NUM_THREADS=1 before Python starts",
            file=sys.stderr,
        )


def seconds_of_product() -> float:
    """Return the time of a matrix product in this process."""
    return timeit.timeit("x @ w", SETUP, number=PRODUCTS) / PRODUCTS


def seconds_with_one_thread() -> float:
    """Return the time of a product in a child process with one thread, or in an earlier child.

    The time is kept for this machine: a home folder may be that of several machines.
    """
    from gpt2block.emulator.ptx import cache as kept  # noqa: PLC0415  (slow to import)

    name = f"product-{platform.node()}"
    with suppress(ValueError):  # there is no text, or it is damaged
        begun, seconds = map(float, (kept.read(name) or "").split())
        if 0 <= time() - begun < KEPT:
            return seconds
    code = f"import timeit; print(timeit.timeit('x @ w', {SETUP!r}, number={PRODUCTS}))"
    environment = {**os.environ, **dict.fromkeys(THREADS, "1")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    seconds = float(done.stdout or "inf") / PRODUCTS  # inf: no advice if the child fails
    kept.write(name, f"{time()} {seconds}")
    return seconds
