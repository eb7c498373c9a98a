"""What is computed with whole models, from tokens to tokens, and the results that are checked.

Times are those of calls from Python whose results are on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block.bench.models import RandomModel
from gpt2block.bench.race import Captured
from gpt2block.bench.stages import staged
from gpt2block.bench.works import Written
from gpt2block.cuda import cupy, timing
from gpt2block.errors import InputError
from gpt2block.run.cuda_decoding import IN_FLIGHT
from gpt2block.run.model import Floats, Ids, Sampled, cache_tensors, start_all
from gpt2block.sampling import Sampling

STEPS = 16  # of decoding in one turn
TURNS = timing.REPLAYS
DIFFERENT = 3  # prompts of a decoding; row b has prompt b mod DIFFERENT


@dataclass(frozen=True)
class Steps:
    """Steps of decoding: the next token of every row, with about `position` tokens before it."""

    model: RandomModel[Any]
    rows: int
    position: int = 512

    @property
    def start(self) -> int:
        """Tokens of a prompt; `position` is the middle of the turns after the checked one."""
        return self.position - STEPS * (2 + TURNS) // 2

    @property
    def end(self) -> int:
        """Tokens of a sequence after all turns."""
        return self.start + STEPS * (1 + TURNS)

    def prompts(self) -> list[Ids]:
        different = self.model.prompts([self.start] * DIFFERENT)
        return [different[row % DIFFERENT] for row in range(self.rows)]

    def decoded(self, device: int, sampling: Sampling, rounds: int) -> Captured:
        """By a decoding, which has room for the steps of all turns."""
        engine, prompts = self.model.on(device).engine, self.prompts()
        end = min(self.model.config.n_ctx, self.end + IN_FLIGHT)
        decoding = start_all(engine, prompts, [sampling] * self.rows, end - self.start + 1)
        steps: list[Sampled] = []
        waiting = set(range(self.rows))
        while waiting:  # prompts that start in several groups have separate first steps
            steps.append(decoding.next())
            waiting -= set(steps[-1].slots.tolist())

        def replay() -> None:
            for _ in range(rounds):
                steps.append(decoding.next())
            cupy.cuda.Device().synchronize()  # the next step is in flight and counts in this turn

        def written() -> Written:
            tokens: list[list[int]] = [[] for _ in prompts]
            logprobs = np.empty(self.rows)
            for step in steps:
                for slot, token in zip(step.slots.tolist(), step.tokens.tolist(), strict=True):
                    tokens[slot].append(token)
                logprobs[step.slots] = step.logprobs
            found = self.written(tokens, lambda row, token: logprobs[row])
            return found._replace(greedy=sampling.temperature == 0)

        return Captured(replay, (written,))

    def staged(
        self, device: int, fusions: Collection[str], shared: list[Any], rounds: int
    ) -> Captured:
        """Greedy, with some of the fusions, as a CUDA graph or not, with or without overlap.

        shared: the kv_cache of all stages, which is large; each writes it again from the prompts.
        """
        prompts, M = self.prompts(), self.rows
        engine: Any = self.model.on(device).engine
        with engine.running():
            if not shared:
                shared.append(engine.new_cache(M, self.end))
            cache = shared[0]
            cache.lengths = [0] * M
            first = engine.forward(prompts, "last", cache)
            tokens = cupy.asarray(np.array([logits.argmax() for logits in first], np.int32))
            positions = cupy.asarray(np.full(M, self.start, np.int32))
            rows = cupy.asarray(np.arange(M + 1, dtype=np.int32))
            batch = {"tokens": tokens, "positions": positions, "row": rows[:M]}
            batch |= {"cu_seqlens": rows, "start": positions}
            caches = cache_tensors(cache, engine.config.n_layer)
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

        def written() -> Written:
            with engine.running():
                logits = recording.out.get().astype(np.float64)
            largest = logits.max(axis=1, keepdims=True)
            scores = logits - largest - np.log(np.exp(logits - largest).sum(axis=1, keepdims=True))
            return self.written(np.stack(columns, axis=1), lambda row, token: scores[row, token])

        return Captured(replay, (written,), cache)

    def written(
        self, tokens: Sequence[Sequence[int]] | NDArray[Any], logprob: Callable[[int, int], Any]
    ) -> Written:
        """The rows that are checked, after the new tokens of all rows.

        logprob: of a row and its last token.
        """
        rows, prompts = sorted({*range(min(self.rows, DIFFERENT)), self.rows - 1}), self.prompts()
        sequences = [np.array([*prompts[row], *tokens[row]], np.int32) for row in rows]
        return Written(sequences, [float(logprob(row, int(tokens[row][-1]))) for row in rows])


@dataclass(frozen=True)
class Prompt:
    """One prompt of T tokens, to the logits after its last one."""

    model: RandomModel[Any]
    T: int

    @property
    def ids(self) -> Ids:
        return self.model.prompts([self.T])[0]

    def run(self, compute: Callable[[], Floats], rounds: int) -> Captured:
        """compute: gives the logits (1, V) on the host."""
        logits: list[Floats] = []

        def replay() -> None:
            logits[:] = [compute() for _ in range(rounds)]

        return Captured(replay, (lambda: logits[-1],))

    def computed(self, device: int, rounds: int) -> Captured:
        on, ids = self.model.on(device), self.ids
        return self.run(lambda: on(ids, last=True)[None], rounds)


@dataclass(frozen=True)
class Continuations:
    """Many prompts, each continued by `new` tokens, greedily."""

    model: RandomModel[Any]
    prompts: Sequence[Ids]
    new: int

    def run(self, generate: Callable[[], Any], rounds: int) -> Captured:
        """generate: gives the new tokens of each prompt."""
        found: list[Any] = []

        def replay() -> None:
            for _ in range(rounds):
                found[:] = generate()

        return Captured(replay, (lambda: self.written(found),))

    def written(self, new: Sequence[Sequence[int]]) -> Written:
        """Those that are checked. Raises InputError for a continuation of a wrong length."""
        lengths = sorted({len(tokens) for tokens in new})
        if lengths != [self.new]:
            raise InputError(f"{self.new} new tokens of each prompt were requested, got {lengths}")
        checked = sorted({0, len(new) // 2, len(new) - 1})
        return Written([np.array([*self.prompts[i], *new[i]], np.int32) for i in checked])

    def generated(self, device: int, rounds: int) -> Captured:
        from gpt2block.generation.generate import generate  # noqa: PLC0415  (tiktoken imports slowly)
        from gpt2block.generation.options import Options  # noqa: PLC0415

        engine = self.model.on(device).engine
        options = Options(max_new_tokens=self.new, sampling=Sampling(temperature=0), stop_ids=())

        def tokens() -> list[Sequence[int]]:
            return [each.tokens for each in generate(engine, None, self.prompts, options)]

        return self.run(tokens, rounds)
