"""Benchmarks of `gpt2block bench --decode`: decoding steps of a GPT-2 with random weights.

Times are host times of Python calls that return with their results in host memory. The scripts of
`benchmarks/` use the same classes for other models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block.apps.bench.works import STEPS_OF_A_BLOCK, GeneratedSequences, Work
from gpt2block.checks import check_choice
from gpt2block.cuda import cupy, timing
from gpt2block.cuda.formats import DTYPES, Formats, itemsize, own_cache_dtype
from gpt2block.cuda.kernels import FP8
from gpt2block.engine.cuda.decoding import IN_FLIGHT
from gpt2block.engine.model import Ids, Sampled, start_all, token_bytes
from gpt2block.errors import InputError
from gpt2block.files.parameters.arrays import random_model
from gpt2block.model import Model
from gpt2block.models.config import ModelConfig, model_shapes, product_shapes, size
from gpt2block.ops.bench.race import Capture, Captured, Contender
from gpt2block.sampling import Sampling

STEPS = 16  # decoding steps in one timed replay
TURNS = timing.REPLAYS
DIFFERENT = 3  # number of different prompts; sequence b has prompt b mod DIFFERENT
ROWS = "1,2,4,8,16,32,64,128,256"
MAX_ROWS = 4096
GREEDY = Sampling(temperature=0)
SAMPLED = Sampling(temperature=0.8, top_k=50, top_p=0.9, seed=0)
NAME = "gpt2block"

Captures = Mapping[str, Capture]  # name of an implementation → its `capture`


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


def model_work(
    model: RandomModel,
    what: str,
    name: str,
    sizes: Mapping[str, int],
    ours: Callable[[int], Captures],
    **fields: Any,
) -> Work:
    """Return a benchmark of a whole model that times calls from Python instead of CUDA graphs.

    fields: other fields of Work. There are no copies of the inputs, as the weights exceed the L2
    cache. With an FP8 kv_cache the tolerance is bfloat16's, eight times float16's: keys and values
    near a tie may round up or down, by relative steps of 1/4 or 1/8, which attention averages.
    """
    fp8 = model.cache_dtype in FP8
    config = vars(model.config)
    stored = [f"kv_cache {model.cache_dtype}"] if fp8 else []
    shown = [each for each in ("n_layer", "n_embd", "n_kv_head") if each in config]

    def contenders(sets: object, device: int) -> Iterator[Contender]:
        for by, capture in ours(device).items():
            yield Contender(by, capture, own_cache_dtype(model.dtype))

    return Work(
        what,
        ", ".join([name, *stored]),
        model.dtype,
        {**sizes, **{each: config[each] for each in shown}},
        truth=model.last_logits,
        ours=contenders,
        roundings=STEPS_OF_A_BLOCK,
        rounding="bfloat16" if fp8 else None,
        **fields,
    )


def decode(steps: Steps, ours: Callable[[int], Captures] | None = None) -> Work:
    """Return the benchmark of a decoding step, which reads all weights, keys and values once.

    ours: returns implementations for a device, by default greedy and sampled steps of `generate`.
    """
    model, rows, keys = steps.model, steps.rows, steps.rows * steps.position
    return model_work(
        model,
        "decode",
        f"{rows} rows" if rows > 1 else "1 row",
        {"rows": rows, "position": steps.position},
        ours or partial(by_samplings, steps.decoded),
        flops=2 * rows * model.matrix_elements + model.attention_flops(keys),
        traffic=model.weight_bytes + keys * model.token_bytes,
        rounds=STEPS,
        turns=TURNS,
        tokens=rows,
    )


def by_samplings(run: Callable[..., Captured], device: int) -> Captures:
    """Return {name: `capture`} of a greedy and of a sampled run."""
    samplings = {NAME: GREEDY, "sampled": SAMPLED}
    return {by: partial(run, device, each) for by, each in samplings.items()}


def decode_works(
    dtype: str | None = None,
    rows: str | None = None,
    name: str | None = None,
    cache: str | None = None,
) -> list[Work]:
    """Return the benchmarks of decoding steps of a GPT-2, in the order they are timed.

    rows: a list that `parse_rows` accepts. The other arguments are those of `random_gpt2`.
    """
    model = random_gpt2(dtype, name, cache)
    return [decode(Steps(model, n)) for n in parse_rows(rows or ROWS)]


def random_gpt2(dtype: str | None, name: str | None, cache: str | None) -> RandomModel:
    """Return a GPT-2 with random weights. Raises InputError.

    dtype: dtype of the weights, by default bfloat16. name: name of the size, by default gpt2.
    cache: dtype of the kv_cache.
    """
    config = size(name or "gpt2")
    if dtype is not None:
        check_choice("--dtype", dtype, DTYPES)
    return RandomModel(config, dtype or "bfloat16", cache)


def parse_rows(text: str) -> tuple[int, ...]:
    """Parse a list of numbers of sequences such as "1,8,64". Raises InputError."""
    words = text.split(",")
    if not all(w.strip().isdecimal() and len(w) < 10 and 0 < int(w) <= MAX_ROWS for w in words):
        raise InputError(
            f"--rows: expected numbers from 1 to {MAX_ROWS:,} such as 1,8,64, got {text!r}"
        )
    return tuple(dict.fromkeys(map(int, words)))
