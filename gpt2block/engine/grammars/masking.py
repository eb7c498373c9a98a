"""Compute the masks of many texts in threads, so that a mask that takes long delays no other text.

llguidance computes a mask without the GIL, but cannot be interrupted, and all copies of a compiled
grammar's Matcher share a lock. The jobs of one compiled grammar therefore run one after the other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as Unfinished
from contextlib import suppress
from dataclasses import dataclass, field
from threading import get_ident

import numpy as np
from numpy.typing import NDArray

from gpt2block.engine.grammars.matching import LONG_S, Matcher
from gpt2block.sampling import mask_words

THREADS, LATE_THREADS = 256, 2  # most threads of masks that are waited for, and of others


@dataclass(eq=False)
class MaskJob:
    """Computes the mask of a text's next token, and the masks after its draft tokens.

    find: whether to find `forced`, the result of Matcher.forced. future: of the job's thread.
    """

    matcher: Matcher
    drafts: Sequence[int] = ()
    find: bool = False
    masks: NDArray[np.int32] = field(init=False)
    forced: Sequence[int] = ()
    future: Future[None] | None = None
    done: bool = False

    def run(self) -> None:
        words = mask_words(self.matcher.vocab_size)
        self.masks = np.empty((1 + len(self.drafts), words), np.int32)
        self.matcher.write(self.drafts, self.masks)
        if self.find:
            self.forced = self.matcher.forced()
        self.done = True

    @property
    def runs(self) -> bool:
        return self.future is not None and not self.future.done()

    def result(self) -> NDArray[np.int32]:
        """Wait for the masks. Raises the error of the job."""
        if not self.done and self.future is not None:
            self.future.result()
        return self.masks


@dataclass
class _Thread:
    """Runs jobs in order, and measures the CPU time of the job that runs."""

    jobs: deque[MaskJob]
    clock: Callable[[], float] = time.perf_counter
    since: float = field(default_factory=time.perf_counter)

    def run(self) -> None:
        if hasattr(time, "pthread_getcpuclockid"):  # else elapsed time, as on macOS and Windows
            number = time.pthread_getcpuclockid(get_ident())
            self.clock = lambda: time.clock_gettime(number)
        with suppress(IndexError):  # `rest` has taken the last job
            while self.jobs:
                job = self.jobs.popleft()
                self.since = self.clock()
                job.run()

    def rest(self) -> deque[MaskJob] | None:
        """Take the jobs that are not begun if the one that runs takes long; else return None."""
        if self.clock() - self.since <= LONG_S:
            return None
        taken = deque[MaskJob]()
        with suppress(IndexError):
            while True:
                taken.append(self.jobs.popleft())
        return taken


class Masker:
    """Runs jobs in threads, and waits for all that do not take long. late: jobs that did or may."""

    def __init__(self) -> None:
        self._quick, self._slow = ThreadPoolExecutor(THREADS), ThreadPoolExecutor(LATE_THREADS)
        self.late: list[MaskJob] = []

    def compute(self, jobs: Iterable[MaskJob]) -> None:
        """Run jobs, and wait until each is `ready` or takes long: more than LONG_S of CPU time.

        A job is not waited for if a recent mask of its text took long, or its grammar is in use.
        """
        self.late = [job for job in self.late if job.runs]
        quick = deque(jobs)
        while quick:
            slow = (job for job in quick if job.matcher.slow)
            in_use = {job.matcher.compiled for job in (*self.late, *slow)}
            late = [job for job in quick if job.matcher.compiled in in_use]
            for job in late:
                job.future = self._slow.submit(job.run)
            self.late += late
            begun = [job for job in quick if job not in late]
            thread, rest = _Thread(deque(begun)), None
            future = self._quick.submit(thread.run)
            for job in begun:
                job.future = future
            while rest is None:
                with suppress(Unfinished):
                    future.result(LONG_S)
                    break
                rest = thread.rest()
            quick = rest or deque()
            self.late += [job for job in begun if not (job.done or job in quick)]

    def ready(self, job: MaskJob) -> bool:
        """Whether a job is done, and no late job of its grammar runs."""
        compiled = job.matcher.compiled
        return not any(each.runs for each in self.late if each.matcher.compiled is compiled)

    def wait(self, jobs: Iterable[MaskJob]) -> None:
        """Wait until one of these jobs is done, or for LONG_S."""
        wait([job.future for job in jobs if job.future is not None], LONG_S, FIRST_COMPLETED)
