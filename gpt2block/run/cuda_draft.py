"""Guesses of a smaller model: a draft of the next tokens, which a decoding verifies.

The smaller model has a kv_cache and a sampler of its own. Before each step of the decoding it draws
the next tokens of each slot, with the random numbers that the larger one will use, so that sampled
texts agree as well. What it computes changes no token: it only decides how many a step gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from gpt2block.cuda import cupy
from gpt2block.ops.sample_token import Slots, bind_place
from gpt2block.run.cuda_caches import CudaCache, copy_slots
from gpt2block.run.cuda_passes import CudaPasses
from gpt2block.run.cuda_prefill import prefill_starts
from gpt2block.run.cuda_steps import DecodingSteps, steps_of
from gpt2block.run.model import Ids, Start


class Draft:
    """The smaller model's part of a decoding; its slots are those of the decoding."""

    def __init__(self, model: CudaPasses, cache: CudaCache) -> None:
        self._model, self._cache = model, cache
        self._steps = steps_of(model, cache)
        self._steps.restart()

    @contextmanager
    def _between(self, stream: Any) -> Iterator[None]:
        """Run after what another stream has been given, and let it wait for this."""
        given, done = (cupy.cuda.Event(disable_timing=True) for _ in range(2))
        given.record(stream)
        with self._model.running():
            self._model.stream.wait_event(given)
            yield
            done.record(self._model.stream)
        stream.wait_event(done)

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """As `Decoding.copy`."""
        with self._model.running():
            copy_slots(self._cache, copies)

    def extend(self, group: Sequence[Start]) -> None:
        """Compute the new tokens of prompts, all of which begin, or all continue."""
        with self._model.running():
            prefill_starts(self._model, self._cache, group, last=False)

    def start(self, group: Sequence[Start]) -> None:
        """The same of prompts that are complete then."""
        slots = np.array([start.slot for start in group], np.int32)
        with self._model.running():
            logits = prefill_starts(self._model, self._cache, group, last=True)
            self._steps.begin(self._model, group, slots, logits)

    def guess(self, slots: Ids, count: int, steps: DecodingSteps, stream: Any) -> None:
        """Let slots of a decoding have so many guesses; steps, stream: those of the decoding.

        The last guess is computed as well: it may be right, and the next one follows it.
        """
        assert steps.guesses is not None
        own = self._steps
        with self._between(stream):
            step = own.of(self._model, slots)
            own.place(slots, step)
            cupy.copyto(own.state.position, steps.state.position)
            cupy.copyto(own.state.step, steps.state.step)
            row, tokens, positions = (a[: step.rows] for a in (own.row, own.tokens, own.positions))
            bind_place(steps.state, Slots(row, tokens, positions, step.turn)).run()
            for n in range(count + 1):
                step.recording.repeat(self._model.stream)
                if n < count:
                    cupy.copyto(steps.guesses.guess[:, n], own.state.token)
