"""How many rows of each sequence a step of decoding computes: its last token, and guesses."""

from __future__ import annotations

from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from gpt2block.ops.guesses import GUESSED, MOST_GUESSES, RIGHT, TAKEN
from gpt2block.run.model import Ids

TOGETHER = (1, 4, 1 + MOST_GUESSES)  # rows of a sequence
UNKNOWN = (1.0, 1.3, 1.6)  # what a step of them takes, of one of 1, until it is known
WEIGHT = 1 / 6  # of the newest token in the mean of those guessed
GAIN = 1.03  # that guesses have to promise
OLDER = 1.01  # by which a time grows with each step, so that it is measured again


class Pace:
    """Chooses rows by how often guesses were right lately, and by what steps have taken.

    A guess is counted in steps of one row, too: there it costs nothing to see whether the token
    that was drawn is the guessed one. Times are those between results, with all that the host does.
    Nothing of this changes a token.
    """

    def __init__(self, slots: int) -> None:
        self._right = np.zeros(slots)  # the share of guessed tokens that were drawn, lately
        self._times: dict[tuple[int, int], float] = {}  # of a step of slots, and rows of each
        self._last: float | None = None

    def begin(self, slots: Ids) -> None:
        """Sequences begin in these slots."""
        self._right[slots] = 0
        self._last = None  # the next result waits for their prompts

    def add(self, slots: Ids, flags: Ids) -> None:
        """Count the rows of a step, (N, together), of these slots."""
        for row in flags.T:
            counted = row & TAKEN > 0
            right = (row[counted] & (GUESSED | RIGHT)) == (GUESSED | RIGHT)
            at = slots[counted]
            self._right[at] += WEIGHT * (right - self._right[at])

    def result(self, count: int, together: int) -> None:
        """A step of so many slots has ended, and its result was read."""
        now, before = perf_counter(), self._last
        self._last = now
        if before is not None:
            kind = count, together
            known = self._times.get(kind, np.inf)
            self._times[kind] = min(known * OLDER, now - before)

    def together(self, slots: Ids, count: int, most: int) -> int:
        """How many rows of each of these slots the next step computes, `most` in all.

        count: the slots of the step, some of which may be empty.
        """
        right = self._right[slots]
        one = self._times.get((count, 1), 1.0)
        best, fastest = 1, len(slots) / one * GAIN
        for rows, unknown in zip(TOGETHER[1:], UNKNOWN[1:], strict=True):
            if count * rows > most:
                break
            rate = _expected(right, rows).sum() / self._times.get((count, rows), one * unknown)
            if rate > fastest:
                best, fastest = rows, rate
        return best


def _expected(right: NDArray[np.float64], rows: int) -> NDArray[np.float64]:
    """The tokens that rows of a sequence give on average, if each guess is right that often."""
    tokens: NDArray[np.float64] = np.sum([right**n for n in range(rows)], axis=0)
    return tokens
