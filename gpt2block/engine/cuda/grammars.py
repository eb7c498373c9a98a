"""Decoding steps with grammars: masks of allowed tokens, and determined tokens as drafts.

A mask depends on all tokens before it, so that the host must read a step's tokens before it can
compute the next step's masks. Such a step therefore runs in two parts: the forward pass is launched
at once, the host computes the masks meanwhile, and the sampler follows when masks are copied.

The sampler leaves out a sequence whose mask takes long, and its logits are copied. The sequence is
in no further step until its mask is there. Then a sampler draws its token from the copied logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import CudaArray, pinned
from gpt2block.engine.grammars import Masker, MaskJob, Matcher
from gpt2block.engine.model import Ids
from gpt2block.engine.speculation import SpeculationPolicy
from gpt2block.ops.drafts import MAX_DRAFTS, DraftTokens
from gpt2block.ops.sample_token import Masks
from gpt2block.sampling import mask_words

ANY_NUMBER = 2**30  # value of `DraftTokens.left` if only the host counts the tokens left to draw
Drafted = Sequence[Sequence[int]]  # for each slot of a step, the tokens in its rows after the first


class PinnedPair:
    """Two buffers in pinned host memory that take turns, so that a copy needs no wait."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._pairs = [(pinned(shape), cupy.cuda.Event(disable_timing=True)) for _ in range(2)]

    def next(self) -> tuple[Ids, Any]:
        """Return a buffer whose last copy has ended, and the event to record after a new copy."""
        self._pairs.reverse()
        buffer, sent = self._pairs[0]
        sent.synchronize()
        return buffer, sent


class HostMasks:
    """Masks for the rows of a step, which the host computes and copies to the device."""

    def __init__(self, rows: int, V: int) -> None:
        # The index and the masks are in one array, so that one copy suffices.
        self._rows, self._words = rows, mask_words(V)
        self._host = PinnedPair((rows * (1 + self._words),))
        self._both = cupy.zeros(rows * (1 + self._words), "int32")
        self.on_device = Masks(self._both[:rows], self._both[rows:].reshape(rows, self._words))

    def write(self, jobs: Sequence[MaskJob | None], together: int) -> None:
        """Copy the masks of slots with `together` rows each on the stream.

        jobs: for each slot, its masks; None: all tokens are allowed.
        """
        both, sent = self._host.next()
        index, masks = both[: self._rows], both[self._rows :].reshape(-1, self._words)
        index[:] = 0
        at = 0
        for slot, job in enumerate(jobs):
            if job is not None:
                words, first = job.result(), slot * together
                count = min(len(words), together)
                index[first : first + count] = np.arange(at + 1, at + 1 + count)
                masks[at : at + count] = words[:count]
                at += count
        used = self._rows + at * self._words
        self._both[:used].set(both[:used])
        sent.record()


class Pending(NamedTuple):
    """A step whose forward pass is launched, but not its sampler."""

    step: Any  # DecodingStep
    slots: Ids
    drafts: Drafted
    expected: Ids | int = 1  # number of tokens for each slot if all draft tokens are right


class SlotMatchers:
    """The Matchers of a decoding's slots, and the tokens that the grammars determine next.

    These tokens are known before they are sampled. Therefore one step computes the rows of several
    such tokens, as it does for draft tokens.
    """

    def __init__(self, slots: int, most: int) -> None:
        """most: maximum draft tokens of a slot in a step."""
        self.of: list[Matcher | None] = [None] * slots
        self.masked = np.zeros(slots, bool)  # whether each slot has a matcher, and is not late
        self.pace = SpeculationPolicy(slots)  # times of steps with different numbers of rows
        # {slot: long mask, copy of its logits}
        self.late: dict[int, tuple[MaskJob, CudaArray]] = {}
        self.masker = Masker()
        self._next: list[list[int]] = [[] for _ in range(slots)]
        self._buffer = PinnedPair((slots, most))

    def begin(self, slot: int, matcher: Matcher | None) -> None:
        """Set the Matcher of a new sequence."""
        self.of[slot], self.masked[slot], self._next[slot] = matcher, matcher is not None, []
        self.late.pop(slot, None)  # left by a sequence that ended before its last step

    def compute(
        self, slots: Ids, drafts: Drafted, find: bool
    ) -> tuple[list[MaskJob | None], list[int]]:
        """Return for each slot the masks of the next sampler, and the indices of late masks.

        None: all tokens are allowed. drafts: of the rows that this sampler reads. find: whether to
        find determined tokens. The matchers must have accepted all tokens of earlier samplers.
        """
        jobs: list[MaskJob | None] = []
        for slot, drafted in zip(slots.tolist(), drafts, strict=True):
            matcher, (late, _) = self.of[slot], self.late.pop(slot, (None, None))
            jobs.append(late or (matcher and MaskJob(matcher, drafted, find)))
        self.masker.compute(job for job in jobs if job is not None and job.future is None)
        if not self.masker.late:
            return jobs, []
        return jobs, [n for n, job in enumerate(jobs) if job and not self.masker.ready(job)]

    def ready(self) -> list[int]:
        """Return the late slots whose masks are ready."""
        return [slot for slot, (job, _) in self.late.items() if self.masker.ready(job)]

    def wait(self) -> None:
        """Wait for one of the late masks, but not long."""
        self.masker.wait(job for job, _ in self.late.values())

    def stop(self, slots: Ids) -> None:
        for slot in slots.tolist():
            self.late.pop(slot, None)

    def expected(self, slots: Ids) -> list[list[int]]:
        """Return for each slot the tokens that are determined after the last sampler's tokens."""
        return [self._next[slot] for slot in slots.tolist()]

    def expect(self, slots: Ids, jobs: Sequence[MaskJob | None], together: int) -> None:
        """Store the tokens that are determined after the tokens of a sampler with these masks."""
        for slot, job in zip(slots.tolist(), jobs, strict=True):
            drafted, forced = (job.drafts[: together - 1], job.forced) if job else ((), [])
            right = 0
            while right < min(len(drafted), len(forced)) and drafted[right] == forced[right]:
                right += 1
            self._next[slot] = [*forced[right + 1 : right + 1 + MAX_DRAFTS]]

    def write(self, slots: Ids, drafts: Drafted, to: DraftTokens) -> None:
        """Copy the draft tokens of `slots` to the device. All other slots get none."""
        buffer, sent = self._buffer.next()
        buffer[:] = -1
        for slot, drafted in zip(slots.tolist(), drafts, strict=True):
            buffer[slot, : len(drafted)] = drafted
        to.draft[: len(buffer)].set(buffer)
        sent.record()
