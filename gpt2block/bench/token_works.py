"""What `gpt2block bench --decode` times: GPT-2 from tokens to tokens, with random weights.

A step of decoding for several numbers of rows, a prompt, and many prompts with their continuations.
Times are those of calls from Python whose results are on the host.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt2block.architectures.gpt2_weights import GPT2Weights
from gpt2block.bench import measure
from gpt2block.bench.measure import Host
from gpt2block.bench.works import STEPS_OF_A_BLOCK, Work
from gpt2block.checks import check_choice
from gpt2block.config import GPT2Config, ModelConfig, model_shapes, size
from gpt2block.cuda import timing
from gpt2block.cuda.kernels import FP8
from gpt2block.errors import InputError
from gpt2block.model import GPT2, Model
from gpt2block.run.model import DTYPES, Ids, itemsize, kv_cache_dtype

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PEER_ROWS = (1, 8, 64, 256)  # of ROWS; compiling PyTorch's step takes seconds for each
MOST_ROWS = 4096
STEPS = 16  # of decoding in one turn
DIFFERENT = 3  # prompts of a decoding; row b has prompt b mod DIFFERENT


class RandomModel(ABC):
    """A model with random weights in one dtype; several works share it."""

    def __init__(self, config: ModelConfig, dtype: str, kv_dtype: str | None = None) -> None:
        """kv_dtype: as in `kv_cache_dtype`."""
        self.config, self.dtype, self.kv_dtype = config, dtype, kv_cache_dtype(dtype, kv_dtype)
        self._logits: dict[bytes, NDArray[np.float64]] = {}

    @abstractmethod
    def on(self, device: int) -> Model[Any]:
        """The model on a GPU, created at the first call."""

    @abstractmethod
    def _exact_logits(self, ids: Ids) -> NDArray[np.float32]:
        """The logits (V,) after a sequence, which results are compared with."""

    def last_logits(self, ids: Ids) -> NDArray[np.float64]:
        """The logits (V,) after a sequence, which results are compared with; remembered."""
        key = ids.tobytes()
        if key not in self._logits:
            self._logits[key] = self._exact_logits(ids).astype(np.float64)
        return self._logits[key]

    def prompts(self, lengths: Iterable[int]) -> list[Ids]:
        """Random token ids."""
        rng = np.random.default_rng(0)
        V = self.config.vocab_size
        return [rng.integers(V, size=length).astype(np.int32) for length in lengths]

    @property
    def matrix_elements(self) -> int:
        """Elements of the matrices that a token is multiplied with, lm_head included."""
        shapes = self.config.block_shapes().values()
        block = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
        return self.config.n_layer * block + self.config.vocab_size * self.config.n_embd

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a step reads: matrices in the dtype, vectors in float32."""
        shapes = model_shapes(self.config).values()
        vectors = sum(shape[0] for shape in shapes if len(shape) == 1)
        return itemsize(self.dtype) * self.matrix_elements + 4 * vectors

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of a token in all layers."""
        return 2 * self.config.n_layer * self.config.kv_width * itemsize(self.kv_dtype)


class RandomGPT2(RandomModel):
    """GPT-2, with weights on the host as well; the results are compared with NumPy's."""

    config: GPT2Config

    def __init__(self, config: GPT2Config, dtype: str, kv_dtype: str | None = None) -> None:
        super().__init__(config, dtype, kv_dtype)
        self._on: dict[int, GPT2] = {}

    @cached_property
    def weights(self) -> GPT2Weights:
        return GPT2Weights.random(0, self.config)

    @cached_property
    def _reference(self) -> GPT2:
        return GPT2(self.weights, device="cpu", dtype=self.dtype, kv_dtype=self.kv_dtype)

    def on(self, device: int) -> GPT2:
        if device not in self._on:
            name = f"cuda:{device}"
            self._on[device] = GPT2(self.weights, name, self.dtype, kv_dtype=self.kv_dtype)
        return self._on[device]

    def _exact_logits(self, ids: Ids) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self._reference(ids, last=True)
        return logits


class Written(NamedTuple):
    """Some of the sequences that a contender has continued.

    logprobs: the log-probability of the last token of each, if the contender returns it. greedy:
    whether that token was the most likely one.
    """

    sequences: Sequence[Ids]
    logprobs: Sequence[float] | None = None
    greedy: bool = True


@dataclass(frozen=True)
class TokenWork(Work):
    """A work of a whole model; `dtype` is that of its weights."""

    model: RandomModel
    turns: ClassVar[int] = timing.REPLAYS
    roundings = STEPS_OF_A_BLOCK

    def sets(self) -> list[Host]:
        return [{}]  # the model has its weights, which exceed the L2 cache

    def times(self, replays: Mapping[str, Callable[[], None]]) -> dict[str, float]:
        return timing.interleaved_host_ms(replays, self.turns)

    def check(self, replay: Callable[[], None], outs: tuple[Any, ...]) -> tuple[float, float]:
        """Errors of the last tokens: the difference of their logits from the largest ones, and
        that of their log-probabilities, by NumPy; relative to the largest logit."""
        replay()
        (written,) = outs
        sequences, logprobs, greedy = written()
        found = []
        for i, ids in enumerate(sequences):
            logits = self.model.last_logits(ids[:-1])
            top, chosen = logits.max(), logits[ids[-1]]
            off = [top - chosen] if greedy else []
            if logprobs is not None:
                exact = chosen - top - np.log(np.exp(logits - top).sum())
                off.append(abs(logprobs[i] - exact))
            found.append((np.max(off), np.max(off) / np.abs(logits).max()))
        worst, relative = np.max(found, axis=0)  # NaN if one of them is
        return float(worst), float(relative)

    @property
    def rounding(self) -> str | None:
        """With a kv_cache of FP8 that of bfloat16, eight times the errors of float16.

        Keys and values near a tie are rounded to either side, by steps of 1/4 or 1/8 of them, which
        attention averages.
        """
        return "bfloat16" if self.model.kv_dtype in FP8 else None

    @property
    def sizes(self) -> dict[str, int]:
        return super().sizes | {n: getattr(self.model.config, n) for n in ("n_layer", "n_embd")}

    def named_with_cache(self, name: str) -> str:
        """The name of a work, with the dtype of the kv_cache where it is FP8."""
        kv_dtype = self.model.kv_dtype
        return f"{name}, kv_cache {kv_dtype}" if kv_dtype in FP8 else name

    def attention_flops(self, keys: int) -> int:
        """FLOPs of attention in all layers, for queries that see so many keys in total."""
        return 4 * self.model.config.n_layer * self.model.config.q_width * keys


@dataclass(frozen=True)
class DecodeWork(TokenWork):
    """A step of decoding: the next token of every row, with about `position` tokens before it."""

    rows: int
    peers: bool = True
    position: int = 512
    what = "decode"
    named = "rows", "position"
    rounds: ClassVar[int] = STEPS

    @property
    def name(self) -> str:
        return self.named_with_cache(f"{self.rows} rows" if self.rows > 1 else "1 row")

    @property
    def tokens(self) -> int:
        return self.rows

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.model.matrix_elements + self.attention_flops(
            self.rows * self.position
        )

    @property
    def traffic(self) -> int:
        """Bytes of all weights once, and of the keys and values of all rows once."""
        return self.model.weight_bytes + self.rows * self.position * self.model.token_bytes

    @property
    def start(self) -> int:
        """Tokens of a prompt; `position` is the middle of the turns after the checked one."""
        return self.position - self.rounds * (2 + self.turns) // 2

    @property
    def end(self) -> int:
        """Tokens of a sequence after all turns."""
        return self.start + self.rounds * (1 + self.turns)

    def prompts(self) -> list[Ids]:
        different = self.model.prompts([self.start] * DIFFERENT)
        return [different[row % DIFFERENT] for row in range(self.rows)]

    @property
    def checked(self) -> list[int]:
        """The rows whose results are checked."""
        return sorted({*range(min(self.rows, DIFFERENT)), self.rows - 1})


@dataclass(frozen=True)
class PromptWork(TokenWork):
    """One prompt, to the logits after its last token."""

    T: int = 1024
    what = "prompt"
    named = ("T",)
    rounds = 4

    @property
    def name(self) -> str:
        return self.named_with_cache(f"1x{self.T}")

    @property
    def flops(self) -> int:
        c = self.model.config
        head = c.vocab_size * c.n_embd
        products = 2 * self.T * (self.model.matrix_elements - head) + 2 * head
        return products + self.attention_flops(self.T * (self.T + 1) // 2)

    @property
    def traffic(self) -> int:
        return self.model.weight_bytes

    def check(self, replay: Callable[[], None], outs: tuple[Any, ...]) -> tuple[float, float]:
        """Errors of the logits, which are compared with NumPy's."""
        replay()
        (logits,) = outs
        return measure.errors(logits(), self.model.last_logits(self.prompt()))

    def prompt(self) -> Ids:
        return self.model.prompts([self.T])[0]


@dataclass(frozen=True)
class GenerateWork(TokenWork):
    """Many prompts of 16 to `longest` tokens, each continued by `new` tokens, greedily."""

    model: RandomGPT2
    prompts: int = 512
    new: int = 128
    longest: int = 256
    what = "generate"
    named = "prompts", "new"
    rounds = 1
    turns = 1

    @property
    def name(self) -> str:
        return self.named_with_cache(f"{self.prompts} prompts")

    @property
    def tokens(self) -> int:
        return self.prompts * self.new

    @property
    def lengths(self) -> list[int]:
        rng = np.random.default_rng(1)
        return [int(n) for n in rng.integers(16, self.longest + 1, size=self.prompts)]

    @property
    def _seen(self) -> int:
        """The sum of the keys that each new token sees."""
        return sum(n * self.new + self.new * (self.new - 1) // 2 for n in self.lengths)

    @property
    def flops(self) -> int:
        """Those of the new tokens, and of the matrices of the prompts."""
        tokens = sum(self.lengths) + self.tokens
        return 2 * tokens * self.model.matrix_elements + self.attention_flops(self._seen)

    @property
    def traffic(self) -> int:
        """Bytes of `new` steps with all prompts in one batch."""
        return self.new * self.model.weight_bytes + self._seen * self.model.token_bytes

    def ids(self) -> list[Ids]:
        return self.model.prompts(self.lengths)

    @property
    def checked(self) -> list[int]:
        """The prompts whose continuations are checked."""
        return sorted({0, self.prompts // 2, self.prompts - 1})


def parse_rows(text: str) -> tuple[int, ...]:
    """Numbers of rows from a list such as "1,8,64". Raises InputError."""
    words = text.split(",")
    if not all(w.strip().isdecimal() and len(w) < 10 and 0 < int(w) <= MOST_ROWS for w in words):
        raise InputError(
            f"--rows: expected numbers from 1 to {MOST_ROWS:,} such as 1,8,64, got {text!r}"
        )
    return tuple(dict.fromkeys(map(int, words)))


def decode_works(
    dtype: str | None = None,
    rows: str | None = None,
    name: str | None = None,
    kv_dtype: str | None = None,
) -> list[Work]:
    """The works in the order they are timed. Raises InputError.

    rows: as `parse_rows` takes them; by default ROWS, of which PyTorch takes part in PEER_ROWS.
    name: the size of the model, such as "gpt2". kv_dtype: as in `kv_cache_dtype`.
    """
    dtype = dtype or "bfloat16"
    check_choice("--dtype", dtype, DTYPES)
    model = RandomGPT2(size(name or "gpt2"), dtype, kv_dtype)
    steps = (
        [DecodeWork(dtype, model, n, n in PEER_ROWS) for n in ROWS]
        if rows is None
        else [DecodeWork(dtype, model, n) for n in parse_rows(rows)]
    )
    return [*steps, PromptWork(dtype, model), GenerateWork(dtype, model)]
