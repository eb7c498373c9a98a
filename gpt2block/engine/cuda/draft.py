"""Speculative decoding: a smaller model, or a block, drafts tokens, which a decoding step verifies.

The draft model has its own kv_cache and sampler. Before each step of the decoding it samples the
next tokens of each slot with the random numbers that the larger model will use, so that sampled
draft tokens can be right, too. Draft tokens change no token, only how many tokens a step yields.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from gpt2block.cuda import cupy
from gpt2block.engine.cuda.caches import CudaCache, copy_slots
from gpt2block.engine.cuda.passes import CudaPasses
from gpt2block.engine.cuda.prefill import prefill_starts
from gpt2block.engine.cuda.steps import DecodingStep, DecodingSteps, can_draft, steps_of
from gpt2block.engine.model import Ids, Start, cache_tensors
from gpt2block.engine.passes import STREAM
from gpt2block.engine.passes.rewriting import run
from gpt2block.engine.speculation import MIN_SHARE, ROWS
from gpt2block.ops.sample_token import Slots, bind_place


class Draft:
    """A draft model that drafts next tokens, with a kv_cache of the Decoding's slots.

    If the larger model is on several GPUs, each GPU has a copy of the draft. All copies make the
    same draft tokens.
    """

    least_rows = ROWS[0]  # minimum rows per slot of a decoding step
    in_flight = 2  # maximum launched steps whose results the host has not read
    least_share = MIN_SHARE  # minimum share of right draft tokens for which steps verify drafts

    def __init__(self, model: CudaPasses, cache: CudaCache) -> None:
        self._model, self._cache = model, cache
        self._steps = steps_of(model, cache)
        self._steps.restart()

    @contextmanager
    def _between(self, stream: Any) -> Iterator[None]:
        """Run the with block on the draft's stream, after work that was queued on `stream`.

        Later work of `stream` waits for the block's work. Events order the streams; the host does
        not wait.
        """
        given, done = (cupy.cuda.Event(disable_timing=True) for _ in range(2))
        given.record(stream)
        with self._model.running():
            self._model.stream.wait_event(given)
            yield
            done.record(self._model.stream)
        stream.wait_event(done)

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy the draft's keys and values from slots to other slots; see `Decoding.copy`."""
        with self._model.running():
            copy_slots(self._cache, copies)

    def extend(self, group: Sequence[Start]) -> None:
        """Compute parts of prompts. Either all prompts are new, or all continue cached tokens."""
        with self._model.running():
            prefill_starts(self._model, self._cache, group, last=False)

    def start(self, group: Sequence[Start], running: Ids) -> None:
        """Compute the rest of the prompts, and start their sequences in the draft's slots.

        All prompts are new, or all continue cached tokens. running: slots of the next draft tokens,
        for which kernels are compiled while the prompts run; empty if other prompts follow.
        """
        slots = np.array([start.slot for start in group], np.int32)
        with self._model.running():
            logits = prefill_starts(self._model, self._cache, group, last=True)
            self._steps.begin(self._model, group, slots, logits)
            if len(running):
                self._steps.of(self._model, running).recording(self._model)

    def follow(self, step: DecodingStep, slots: Ids, steps: DecodingSteps) -> None:
        """Read the rows of a decoding step whose sampler is launched."""

    def propose(self, slots: Ids, count: int, steps: DecodingSteps, stream: object) -> None:
        """Write `count` draft tokens per slot into `steps`, whose launches run on `stream`.

        K and V of the last draft token are also computed: if it is right, the next step continues
        it.
        """
        assert steps.drafts is not None
        own = self._steps
        with self._between(stream):
            step = own.of(self._model, slots)
            own.place(slots, step)
            cupy.copyto(own.state.position, steps.state.position)
            cupy.copyto(own.state.step, steps.state.step)
            row, tokens, positions = (a[: step.rows] for a in (own.row, own.tokens, own.positions))
            bind_place(steps.state, Slots(row, tokens, positions, step.turn)).run()
            for n in range(count + 1):
                step.recording(self._model).repeat(self._model.stream)
                if n < count:
                    cupy.copyto(steps.drafts.draft[:, n], own.state.token)


class BlockDraft(Draft):
    """The block of a model that drafts tokens from the model's residual stream.

    A step of the block reads a token, and the row of the stream at the position before it. After
    each decoding step, `follow` computes the rows of the tokens that the step has sampled; the last
    one that is taken drafts the next token. Further draft tokens come from the block's own rows.
    """

    # The host reads a step's result while the block computes, and then chooses the next step. A
    # step of one row shows, too, whether the block's next token is right.
    least_rows, in_flight, least_share = 1, 1, 0.4

    def __init__(self, model: CudaPasses, cache: CudaCache) -> None:
        super().__init__(model, cache)
        # `_order`: the slots of the first `_rows`
        self._rows, self._order = cache.stream_rows, np.empty(0, np.int32)
        self._of_slots = self._rows.copy()

    def extend(self, group: Sequence[Start]) -> None:
        """Do nothing: prompts of the model compute the block's keys and values."""

    def start(self, group: Sequence[Start], running: Ids) -> None:
        """Start the sampler of the sequences in the draft's slots."""
        slots = np.array([start.slot for start in group], np.int32)
        self._steps.begin(self._model, group, slots, self._steps.logits)

    def _step(self, slots: Ids, steps: DecodingSteps, ahead: int) -> DecodingStep:
        """Return the block's step for slots, with their rows of the stream, tokens and positions.

        ahead: number of draft tokens after the tokens that the model has sampled.
        """
        own = self._steps
        if not np.array_equal(slots, self._order):
            self._of_slots[cupy.asarray(self._order)] = self._rows[: len(self._order)]
            self._rows[: len(slots)] = self._of_slots[cupy.asarray(slots)]
            self._order = slots
        step = own.of(self._model, slots)
        cupy.copyto(own.state.position, steps.state.position)
        own.state.step[...] = steps.state.step + ahead
        own.place(slots, step, again=True)
        return step

    def follow(self, step: DecodingStep, slots: Ids, steps: DecodingSteps) -> None:
        """Compute the tokens that `step` has sampled, and draft the token after the last one."""
        if not can_draft(slots):
            return  # the next step has one row per slot
        first, model, rows = self._step(slots, steps, 0), self._model, step.rows
        if step.follower is None:
            (positions, last), count = step.followed, first.rows
            operands = model.decoding.operands(rows)
            inputs = {"tokens": step.by_row[0], "row": steps.row[:rows], "positions": positions}
            inputs |= {STREAM: steps.stream_rows[:rows], "stream_index": last[:count]}
            tensors = {**model.given(), **cache_tensors(self._cache), **inputs}
            planned = model.decoding.steps(tensors, rows, operands, step.together, count)
            step.follower = model.recordings.make(
                lambda do: run(planned, do, "logits"),
                tensors,
                {"logits": self._steps.logits[:count], "stream_rows": self._rows[:count]},
                overlapping=True,
                fuses=True,
            )
            step.follower.after = first.sampler
        step.follower.repeat(model.stream)

    def propose(self, slots: Ids, count: int, steps: DecodingSteps, stream: object) -> None:
        """Write `count` draft tokens per slot into `steps`, of which `follow` drafted the first."""
        assert steps.drafts is not None
        for n in range(count):
            if n == 1:
                step = self._step(slots, steps, 1)
            if n:
                step.recording(self._model).repeat(stream)
            cupy.copyto(steps.drafts.draft[:, n], self._steps.state.token)
