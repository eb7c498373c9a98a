"""Choose how many tokens per sequence a decoding step computes: its last token and draft tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from gpt2block.engine.model import Ids
from gpt2block.engine.recorder import rounded_up
from gpt2block.ops.drafts import MAX_DRAFTS, RIGHT, TAKEN

ROWS = (4, 1 + MAX_DRAFTS)  # possible rows (tokens) per sequence in a step with draft tokens
# Assumed times of steps with 4 and with 1 + MAX_DRAFTS rows per sequence, relative to one row,
# until measured. First pair: up to MAX_MEMORY_BOUND sequences. Second: more sequences
# (compute-bound products).
UNKNOWN = ((1.3, 1.6), (2.0, 3.2))
MAX_MEMORY_BOUND = 4
# initial shares of right draft tokens: after a wrong draft token; after a right draft token; after
# a last row without a draft token (OPEN), in a step whose draft tokens were all right
RIGHT_FIRST = 0.0, 0.25, 0.4
OPEN = 2
MAX_SHARE = 0.999  # maximum share of right draft tokens that is assumed
# minimum share of right draft tokens at which a step with draft tokens is considered
MIN_SHARE = 0.1
WEIGHT = 1 / 6  # weight of the newest draft token in the running share of right draft tokens
GAIN = 1.03  # expected speedup that a step with draft tokens must exceed
NEWEST = 9  # number of a kind's newest times, of which the median counts
FORGOTTEN = (
    128  # number of timed steps after which the times of a kind that did not run are dropped
)


class StepTimes:
    """Times of decoding steps by kind: number of slots, a power of two, and rows per slot.

    The median ignores single times in which the host was interrupted, or read results late. A kind
    that has not run for FORGOTTEN steps has no time, so that a step can try the kind again.
    """

    def __init__(self) -> None:
        self._newest: dict[tuple[int, int], deque[float]] = {}
        self._ran: dict[tuple[int, int], int] = {}  # number of the kind's last timed step
        self._steps = 0

    def add(self, slots: int, rows: int, seconds: float) -> None:
        """Add the time of a step with `rows` rows for each of `slots` slots."""
        kind = 1 << (slots - 1).bit_length(), rows
        self._steps += 1
        if self._steps - self._ran.get(kind, -FORGOTTEN) > FORGOTTEN:
            self._newest[kind] = deque(maxlen=NEWEST)
        self._newest[kind].append(seconds)
        self._ran[kind] = self._steps

    def get(self, kind: tuple[int, int]) -> float | None:
        """Return the median of a kind's newest times, in seconds, or None if it has no time."""
        if self._steps - self._ran.get(kind, -FORGOTTEN) >= FORGOTTEN:
            return None
        newest = sorted(self._newest[kind])
        return newest[(len(newest) - 1) // 2]


class SpeculationPolicy:
    """Chooses the rows per sequence of a step from times and recent accuracy of draft tokens.

    A step with one row, too, counts whether the draft of its next token is right: comparing the
    sampled token with the draft token costs nothing. Right draft tokens come in runs. Therefore
    draft tokens after a right draft token, after a wrong one, and after a row without one have
    separate shares. Times are intervals between results, including the host's work. The choice
    changes no token.
    """

    def __init__(self, slots: int, times: StepTimes | None = None, low: float = MIN_SHARE) -> None:
        """times: times that earlier policies have measured for the same steps.

        low: minimum share of right draft tokens at which a step with draft tokens is considered.
        """
        # Per slot: shares of right draft tokens, as in RIGHT_FIRST.
        self._shares = [list(RIGHT_FIRST) for _ in range(slots)]
        self._state = [0] * slots  # per slot: whether the last draft token was right, or OPEN
        self._low = low
        self._times = StepTimes() if times is None else times
        self._last: float | None = None

    def begin(self, slots: Ids) -> None:
        """Reset the shares of right draft tokens of slots in which new sequences begin."""
        for slot in slots:
            self._shares[slot], self._state[slot] = list(RIGHT_FIRST), 0
        self.skip()  # the next interval includes prompts

    def skip(self) -> None:
        """Do not time the current interval, in which the host records a step or starts prompts."""
        self._last = None

    def add(self, slots: Ids, flags: Ids, drafted: int | None = None) -> None:
        """Update the shares of right draft tokens of N slots. flags: (N, rows per slot), of a step.

        drafted: number of first rows with draft tokens of the draft; None for all rows. This loop
        takes 2 us for a slot with 8 rows; NumPy's operations would take 90 us.
        """
        for slot, of_rows in zip(slots.tolist(), flags.tolist(), strict=True):
            shares, state = self._shares[slot], self._state[slot]
            for flag in of_rows[:drafted]:
                if not flag & TAKEN:  # this row's token was not accepted
                    break
                right = flag & RIGHT > 0
                shares[state] += WEIGHT * (right - shares[state])
                state = int(right)
            last_taken = drafted is not None and of_rows[drafted:] and of_rows[-1] & TAKEN
            self._state[slot] = OPEN if last_taken else state

    def result(self, slots: int, together: int) -> None:
        """Record the time since the last result as the time of a step. together: rows per slot."""
        now, before = perf_counter(), self._last
        self._last = now
        if before is not None:
            self._times.add(slots, together, now - before)

    def for_forced(self, counts: NDArray[np.int64], most: int) -> int:
        """Return the rows per slot of a step whose draft tokens are almost certainly right.

        counts: the number of draft tokens of each slot. most: maximum of all rows of the step.
        """
        return self._fastest(lambda rows: len(counts) + np.minimum(counts, rows - 1).sum(),
                             len(counts), most)  # fmt: skip

    def together(self, slots: Ids, most: int) -> int:
        """Return the rows (tokens) per slot for the next step. most: maximum of all its rows."""
        if len(slots) * ROWS[0] > most:
            return 1
        shares = [(self._shares[slot][self._state[slot]], self._shares[slot][1]) for slot in slots]
        if max(first for first, _ in shares) < self._low:
            return 1
        return self._fastest(lambda rows: sum(_expected(*share, rows) for share in shares),
                             len(slots), most)  # fmt: skip

    def _fastest(self, expected: Callable[[int], float], slots: int, most: int) -> int:
        """Return the rows per slot with the most tokens per second.

        expected: function from the rows per slot to the expected number of tokens of a step.
        """
        count = rounded_up(slots, 1)
        one = self._times.get((count, 1)) or 1.0
        best, fastest = 1, slots / one * GAIN
        for rows, unknown in zip(ROWS, UNKNOWN[count > MAX_MEMORY_BOUND], strict=True):
            if count * rows > most:
                break
            time = self._times.get((count, rows)) or one * unknown
            rate = float(expected(rows)) / time
            if rate > fastest:
                best, fastest = rows, rate
        return best


def _expected(first: float, later: float, rows: int) -> float:
    """Return the expected number of accepted tokens of a sequence in a step with `rows` rows."""
    later = min(later, MAX_SHARE)
    return 1 + first * (1 - later ** (rows - 1)) / (1 - later)
