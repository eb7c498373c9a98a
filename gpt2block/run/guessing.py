"""How many rows of each sequence a step of decoding computes: its last token, and guesses."""

from __future__ import annotations

from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from gpt2block.ops.guesses import MOST_GUESSES, RIGHT, TAKEN
from gpt2block.run.model import Ids
from gpt2block.run.recorder import rounded_up

ROWS = (4, 1 + MOST_GUESSES)  # rows of a sequence, in the place of one
# Assumed time of a step with each of ROWS, relative to a step with one row per sequence, until it
# is measured: for up to FEW sequences, and for more, where products are bound by operations.
UNKNOWN = ((1.3, 1.6), (2.0, 3.2))
FEW = 4
RIGHT_FIRST = 0.0, 0.25  # the shares of a sequence that begins
LEAST = 0.1  # the smallest share at which guesses can be faster
WEIGHT = 1 / 6  # of the newest token in a share
GAIN = 1.03  # that guesses have to promise
OLDER = 1.01  # by which a time grows with each step, so that it is measured again


class SpeculationPolicy:
    """Chooses rows by how often guesses were right lately, and by what steps have taken.

    A guess is counted in steps of one row, too: there it costs nothing to see whether the token
    that was drawn is the guessed one. Guesses are right in runs, so that one after a right one
    counts apart from one after a wrong one. Times are those between results, with all that the host
    does. Nothing of this changes a token.
    """

    def __init__(self, slots: int) -> None:
        # The shares of guesses that were right after a wrong one, and after a right one.
        self._shares = np.tile(RIGHT_FIRST, (slots, 1))
        self._state = np.zeros(slots, np.int64)  # whether the last one was right
        # Seconds of a step, by number of slots, rounded up to a power of two, and rows per slot.
        self._times: dict[tuple[int, int], float] = {}
        self._last: float | None = None

    def begin(self, slots: Ids) -> None:
        """Sequences begin in these slots."""
        self._shares[slots] = RIGHT_FIRST
        self._state[slots] = 0
        self._last = None  # the next result waits for their prompts

    def add(self, slots: Ids, flags: Ids) -> None:
        """Count the rows of a step, (N, together), of these slots."""
        for row in flags.T:
            counted = row & TAKEN > 0
            at, right = slots[counted], (row[counted] & RIGHT) // RIGHT
            if not len(at):
                break
            place = at, self._state[at]
            self._shares[place] += WEIGHT * (right - self._shares[place])
            self._state[at] = right

    def result(self, slots: int, together: int) -> None:
        """A step of so many slots has ended, and its result was read."""
        now, before = perf_counter(), self._last
        self._last = now
        if before is not None:
            kind = rounded_up(slots, 1), together
            self._times[kind] = min(self._times.get(kind, np.inf) * OLDER, now - before)

    def together(self, slots: Ids, most: int) -> int:
        """How many rows of each of these slots the next step computes, `most` in all."""
        count = rounded_up(len(slots), 1)
        first = self._shares[slots, self._state[slots]]
        if first.max() < LEAST:
            return 1
        later, one = self._shares[slots, 1], self._times.get((count, 1), 1.0)
        best, fastest = 1, len(slots) / one * GAIN
        for rows, unknown in zip(ROWS, UNKNOWN[count > FEW], strict=True):
            if count * rows > most:
                break
            time = self._times.get((count, rows), one * unknown)
            rate = float(_expected(first, later, rows).sum()) / time
            if rate > fastest:
                best, fastest = rows, rate
        return best


def _expected(
    first: NDArray[np.float64], later: NDArray[np.float64], rows: int
) -> NDArray[np.float64]:
    """The tokens that rows of a sequence give on average, by the shares of right guesses."""
    powers: NDArray[np.float64] = np.sum([later**n for n in range(rows - 1)], axis=0)
    return 1 + first * powers
