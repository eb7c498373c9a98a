"""The numbers of open connections of all front processes, in memory that they share."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import numpy as np


class Connections:
    """Counts of open connections, one for each front process. file: descriptor of the shared file.

    A process changes its own count only, and reads all counts.
    """

    def __init__(self, file: int, processes: int) -> None:
        size = 4 * processes
        if os.fstat(file).st_size < size:
            os.ftruncate(file, size)
        self._counts = np.frombuffer(mmap.mmap(file, size), np.uint32)

    def of_process(self, index: int) -> Callable[[int], int]:
        """Return a function that sets the count of a process, and returns the sum of all counts."""

        def total(own: int) -> int:
            self._counts[index] = own
            return int(self._counts.sum())

        return total
