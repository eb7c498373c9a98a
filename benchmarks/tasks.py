"""Tasks of whole models to time: fused steps in stages, prompts, and continuations of prompts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.decoding import RandomModel, Steps
from benchmarks.stages import staged
from benchmarks.works import GeneratedSequences
from gpt2block.cuda import cupy
from gpt2block.engine.generation.generate import generate
from gpt2block.engine.generation.options import Options
from gpt2block.engine.model import Floats, Ids, cache_tensors
from gpt2block.errors import InputError
from gpt2block.ops.bench.race import Captured
from gpt2block.sampling import Sampling


def stage(
    steps: Steps, device: int, fusions: Collection[str], shared: list[Any], rounds: int
) -> Captured:
    """Return a Captured whose replay runs `rounds` greedy decoding steps with these fusions.

    fusions: may include "graph" (a CUDA graph) and "overlap" (of consecutive kernels). shared:
    the large kv_cache of all stages; each stage rewrites it from the prompts.
    """
    prompts, M = steps.prompts(), steps.rows
    engine: Any = steps.model.on(device).engine
    with engine.running():
        if not shared:
            shared.append(engine.new_cache(M, steps.end))
        cache = shared[0]
        cache.lengths = [0] * M
        first = engine.forward(prompts, "last", cache)
        tokens = cupy.asarray(np.array([logits.argmax() for logits in first], np.int32))
        positions = cupy.asarray(np.full(M, steps.start, np.int32))
        rows = cupy.asarray(np.arange(M + 1, dtype=np.int32))
        batch = {"tokens": tokens, "positions": positions, "row": rows[:M]}
        batch |= {"cu_seqlens": rows, "start": positions}
        caches = cache_tensors(cache)
        recording = engine.recordings.make(
            lambda do: staged(do, engine.config, fusions),
            {**engine.given(), **caches, **batch},
            overlapping="overlap" in fusions,
        )
    columns = [tokens.get()]

    def replay() -> None:
        with engine.running():
            for _ in range(rounds):
                if "graph" in fusions:
                    recording.repeat(engine.stream)
                else:
                    recording.run()
                tokens[...] = recording.out.argmax(axis=1)
                positions[...] += 1
                columns.append(tokens.get())

    def written() -> GeneratedSequences:
        with engine.running():
            logits = recording.out.get().astype(np.float64)
        largest = logits.max(axis=1, keepdims=True)
        scores = logits - largest - np.log(np.exp(logits - largest).sum(axis=1, keepdims=True))
        return steps.written(np.stack(columns, axis=1), lambda row, token: scores[row, token])

    return Captured(replay, (written,), cache)


@dataclass(frozen=True)
class Prompt:
    """Task: compute the logits at the last token of one prompt of T tokens."""

    model: RandomModel
    T: int

    @property
    def ids(self) -> Ids:
        return self.model.prompts([self.T])[0]

    def run(self, compute: Callable[[], Floats], rounds: int) -> Captured:
        """Return a Captured whose replay calls `compute`, which returns host logits (1, V)."""
        logits: list[Floats] = []

        def replay() -> None:
            logits[:] = [compute() for _ in range(rounds)]

        return Captured(replay, (lambda: logits[-1],))

    def computed(self, device: int, rounds: int) -> Captured:
        on, ids = self.model.on(device), self.ids
        return self.run(lambda: on(ids, last=True)[None], rounds)


@dataclass(frozen=True)
class Continuations:
    """Task: continue many prompts by `new` tokens each."""

    model: RandomModel
    prompts: Sequence[Ids]
    new: int

    def run(
        self,
        generate: Callable[[], Any],
        rounds: int,
        written: Callable[[Any], GeneratedSequences] | None = None,
    ) -> Captured:
        """Return a Captured whose replay calls `generate`.

        written: function that returns the sequences to check from the result of `generate`. By
        default the result is a list of greedy tokens per prompt.
        """
        found: list[Any] = []

        def replay() -> None:
            for _ in range(rounds):
                found[:] = generate()

        return Captured(replay, (lambda: (written or self.written)(found),))

    def written(
        self,
        new: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]] | None = None,
        greedy: bool = True,
    ) -> GeneratedSequences:
        """Return sequences to check. Raises InputError unless each prompt got `self.new` tokens.

        new: new tokens per prompt. logprobs: their log-probabilities, if they are known.
        """
        lengths = sorted({len(tokens) for tokens in new})
        if lengths != [self.new]:
            raise InputError(f"expected {self.new} new tokens for each prompt, got {lengths}")
        checked = sorted({0, len(new) // 2, len(new) - 1})
        return GeneratedSequences(
            [np.array([*self.prompts[i], *new[i]], np.int32) for i in checked],
            None if logprobs is None else [logprobs[i][-1] for i in checked],
            greedy,
        )

    def generated(self, device: int, sampling: Sampling, rounds: int) -> Captured:
        engine = self.model.on(device).engine
        options = Options(
            max_new_tokens=self.new, sampling=sampling, seed=sampling.seed, stop_ids=()
        )

        def written(found: Sequence[Any]) -> GeneratedSequences:
            tokens, logprobs = (
                [getattr(f, name) for f in found] for name in ("tokens", "logprobs")
            )
            return self.written(tokens, logprobs, sampling.temperature == 0)

        return self.run(lambda: generate(engine, None, self.prompts, options), rounds, written)
