"""Models with random weights, and steps of decoding with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.works import GeneratedSequences
from gpt2block.cuda import cupy, timing
from gpt2block.cuda.formats import Formats, itemsize
from gpt2block.engine.cuda.decoding import IN_FLIGHT
from gpt2block.engine.model import Ids, Sampled, start_all, token_bytes
from gpt2block.files.parameters.arrays import random_model
from gpt2block.model import Model
from gpt2block.models.config import ModelConfig, model_shapes, product_shapes
from gpt2block.ops.bench.race import Captured
from gpt2block.sampling import Sampling

STEPS = 16  # decoding steps in one timed replay
TURNS = timing.REPLAYS
DIFFERENT = 3  # number of different prompts; sequence b has prompt b mod DIFFERENT
GREEDY = Sampling(temperature=0)
NAME = "gpt2block"


class RandomModel:
    """A model with random weights in one dtype, shared by several benchmarks.

    cache: dtype of keys and values, by default the dtype that suits the weights. NumPy computes the
    reference logits.
    """

    def __init__(self, config: ModelConfig, dtype: str, cache: str | None = None) -> None:
        self.config, self.formats = config, Formats(dtype, cache)
        self.dtype, self.cache_dtype = dtype, self.formats.cache_dtype
        self._on: dict[str, Model[Any]] = {}
        self._logits: dict[bytes, NDArray[np.float64]] = {}

    def on(self, device: int | None) -> Model[Any]:
        """Return the model on this GPU or, for None, on the CPU; the first call creates it."""
        name = "cpu" if device is None else f"cuda:{device}"
        if name not in self._on:
            self._on[name] = self._create(name)
        return self._on[name]

    def _create(self, device: str) -> Model[Any]:
        tensors = random_model(0, self.config)
        return Model.from_tensors(self.config, tensors, device, self.dtype, self.cache_dtype)

    def _exact_logits(self, ids: Ids) -> NDArray[np.float32]:
        """Compute the reference logits (V,) at a sequence's last token."""
        logits: NDArray[np.float32] = self.on(None)(ids, last=True)
        return logits

    def last_logits(self, ids: Ids) -> NDArray[np.float64]:
        """Return the reference logits (V,) at a sequence's last token, cached for later calls."""
        key = ids.tobytes()
        if key not in self._logits:
            self._logits[key] = self._exact_logits(ids).astype(np.float64)
        return self._logits[key]

    def prompts(self, lengths: Iterable[int]) -> list[Ids]:
        """Return a prompt of random token ids for each of the lengths."""
        rng = np.random.default_rng(0)
        V = self.config.vocab_size
        return [rng.integers(V, size=length).astype(np.int32) for length in lengths]

    @property
    def matrix_elements(self) -> int:
        """Number of elements in all weight matrices of a forward pass, including lm_head."""
        blocks = sum(math.prod(shape) for shape in product_shapes(self.config).values())
        return blocks + self.config.vocab_size * self.config.n_embd

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a decoding step reads: matrices in `dtype`, vectors in float32."""
        shapes = model_shapes(self.config).values()
        vectors = sum(math.prod(shape) for shape in shapes if len(shape) != 2)
        return self._matrix_bytes + 4 * vectors

    @property
    def _matrix_bytes(self) -> int:
        return itemsize(self.dtype) * self.matrix_elements

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values that attention of all layers reads."""
        caches = self.config.layer_caches
        read = [each if each.values else each._replace(keys=0) for each in caches]
        return token_bytes(read, self.formats)

    def attention_flops(self, keys: int) -> int:
        """Return the FLOPs of all layers' attention, if each head scores `keys` query-key pairs."""
        layers = sum(each.values > 0 for each in self.config.layer_caches)
        return 4 * layers * self.config.q_width * keys


@dataclass(frozen=True)
class Steps:
    """Task: decode `rows` sequences step by step, when each has about `position` tokens."""

    model: RandomModel
    rows: int
    position: int = 512

    @property
    def start(self) -> int:
        """Prompt length in tokens, so that the average position of timed steps is `position`."""
        return self.position - STEPS * (2 + TURNS) // 2

    @property
    def end(self) -> int:
        """Length of each sequence in tokens after all replays of STEPS decoding steps each."""
        return self.start + STEPS * (1 + TURNS)

    def prompts(self) -> list[Ids]:
        different = self.model.prompts([self.start] * DIFFERENT)
        return [different[n % DIFFERENT] for n in range(self.rows)]

    def decoded(self, device: int, sampling: Sampling, rounds: int) -> Captured:
        """Start decoding by the model's engine; return a Captured that replays `rounds` steps."""
        engine, prompts = self.model.on(device).engine, self.prompts()
        end = min(self.model.config.n_ctx, self.end + IN_FLIGHT)
        decoding = start_all(engine, prompts, [sampling] * self.rows, end - self.start + 1)
        steps: list[Sampled] = []
        waiting = set(range(self.rows))
        while waiting:  # run until the last group of prompts has its first tokens
            steps.append(decoding.next())
            waiting -= set(steps[-1].slots.tolist())

        def replay() -> None:
            for _ in range(rounds):
                steps.append(decoding.next())
            cupy.cuda.Device().synchronize()  # include the next step, already launched, in the time

        def written() -> GeneratedSequences:
            tokens: list[list[int]] = [[] for _ in prompts]
            logprobs = np.empty(self.rows)
            for step in steps:
                for slot, token in zip(step.slots.tolist(), step.tokens.tolist(), strict=True):
                    tokens[slot].append(token)
                logprobs[step.slots] = step.logprobs
            found = self.written(tokens, lambda n, token: logprobs[n])
            return found._replace(greedy=sampling.temperature == 0)

        return Captured(replay, (written,))

    def written(
        self, tokens: Sequence[Sequence[int]] | np.ndarray, logprob: Callable[[int, int], float]
    ) -> GeneratedSequences:
        """Return the sequences (prompt and new tokens) that are checked.

        tokens: the new tokens of every sequence. logprob: returns the log-probability of a last
        token, from the sequence's number and the token.
        """
        kept, prompts = sorted({*range(min(self.rows, DIFFERENT)), self.rows - 1}), self.prompts()
        sequences = [np.array([*prompts[n], *tokens[n]], np.int32) for n in kept]
        logprobs = [float(logprob(n, int(tokens[n][-1]))) for n in kept]
        return GeneratedSequences(sequences, logprobs)
