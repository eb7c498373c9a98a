"""What `gpt2block bench --decode` times: GPT-2 from tokens to tokens, with random weights.

A step of decoding for several numbers of rows, a prompt, and many prompts with their continuations.
Times are those of calls from Python whose results are on the host.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpt2block.architectures.gpt2_weights import GPT2Weights
from gpt2block.bench.race import Capture, Contender, Run, refuse
from gpt2block.bench.works import STEPS_OF_A_BLOCK, Sets, Work, Written
from gpt2block.checks import check_choice
from gpt2block.config import GPT2Config, ModelConfig, model_shapes, size
from gpt2block.config.formats import DTYPES, Formats, itemsize, own_cache_dtype
from gpt2block.cuda import cupy, timing
from gpt2block.cuda.kernels import FP8
from gpt2block.errors import InputError
from gpt2block.model import GPT2, Model
from gpt2block.run.cuda_decoding import IN_FLIGHT
from gpt2block.run.model import (
    Floats,
    Ids,
    Sampled,
    start_all,
)
from gpt2block.sampling import Sampling

if TYPE_CHECKING:
    from gpt2block.bench.torch_peers import TorchPeers

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PEER_ROWS = (1, 8, 64, 256)  # of ROWS; compiling PyTorch's step takes seconds for each
MOST_ROWS = 4096
STEPS = 16  # of decoding in one turn
TURNS = timing.REPLAYS
FIRST_PROMPTS = 480, 1000  # tokens
DIFFERENT = 3  # prompts of a decoding; row b has prompt b mod DIFFERENT
GREEDY = Sampling(temperature=0)
SAMPLED = Sampling(temperature=0.8, top_k=50, top_p=0.9, seed=0)
NAME = "gpt2block"
UNFUSED = "unfused"  # the first stage of a Llama
NOTES = {
    UNFUSED: "a kernel for each operation, launched from Python; + adds to the line above",
    "transformers": "generate, left-padded to one batch",
    "transformers, paged": "generate_batch, which is continuous batching",
}

Config = TypeVar("Config", bound=ModelConfig)


class RandomModel(ABC, Generic[Config]):
    """A model with random weights in one dtype; several works share it."""

    def __init__(
        self,
        config: Config,
        dtype: str,
        kv_dtype: str | None = None,
    ) -> None:
        self.config, self.formats = config, Formats(dtype, kv_dtype)
        self.dtype, self.kv_dtype = dtype, self.formats.cache_dtype
        self.device = 0  # that of the last call of `on`
        self._on: dict[int, Model[Any]] = {}
        self._logits: dict[bytes, NDArray[np.float64]] = {}

    def on(self, device: int) -> Model[Any]:
        """The model on a GPU, created at the first call."""
        self.device = device
        if device not in self._on:
            self._on[device] = self._made(f"cuda:{device}")
        return self._on[device]

    @abstractmethod
    def _made(self, device: str) -> Model[Any]:
        """The model on a device."""

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

    def prompt_flops(self, T: int) -> int:
        """FLOPs of a prompt of T tokens, to the logits after its last one."""
        head = self.config.vocab_size * self.config.n_embd
        products = 2 * T * (self.matrix_elements - head) + 2 * head
        return products + self.attention_flops(T * (T + 1) // 2)

    def attention_flops(self, keys: int) -> int:
        """FLOPs of attention in all layers, for queries that see so many keys in total."""
        return 4 * self.config.n_layer * self.config.q_width * keys


class RandomGPT2(RandomModel[GPT2Config]):
    """GPT-2, with weights on the host as well; the results are compared with NumPy's."""

    @cached_property
    def weights(self) -> GPT2Weights:
        return GPT2Weights.random(0, self.config)

    @cached_property
    def _reference(self) -> GPT2:
        return self._made("cpu")

    def _made(self, device: str) -> GPT2:
        stored = self.dtype, False, self.kv_dtype
        return GPT2(self.weights, device, *stored)

    def _exact_logits(self, ids: Ids) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self._reference(ids, last=True)
        return logits


Captures = Mapping[str, Capture]  # by the names of contenders


def model_work(
    model: RandomModel[Any],
    what: str,
    name: str,
    sizes: Mapping[str, int],
    ours: Callable[[int], Captures],
    theirs: Callable[[TorchPeers], Captures],
    **fields: Any,
) -> Work:
    """A work of a whole model: calls from Python, not graphs; fields: further ones of Work.

    The model has its weights, which exceed the L2 cache. With a kv_cache of FP8 the rounding errors
    are those of bfloat16, eight times those of float16: keys and values near a tie are rounded to
    either side, by steps of 1/4 or 1/8 of them, which attention averages.
    """
    fp8 = model.kv_dtype in FP8
    config = vars(model.config)
    stored = [f"kv_cache {model.kv_dtype}"] if fp8 else []
    shown = [each for each in ("n_layer", "n_embd", "n_kv_head") if each in config]

    def contenders(captures: Captures, peer: bool) -> Iterator[Contender]:
        for by, capture in captures.items():
            note = partial(str, NOTES.get(by, ""))
            yield Contender(by, peer, capture, own_cache_dtype(model.dtype), note)

    def peers(sets: Sets, torch: TorchPeers) -> Iterator[Contender]:
        captures = theirs(torch)
        if fp8:
            why = f"no PyTorch operation here takes a kv_cache of {model.kv_dtype}"
            captures = dict.fromkeys(captures, partial(refuse, why))
        return contenders(captures, True)

    return Work(
        what,
        ", ".join([name, *stored]),
        model.dtype,
        {**sizes, **{each: config[each] for each in shown}},
        ours=lambda sets, device: contenders(ours(device), False),
        theirs=peers,
        roundings=STEPS_OF_A_BLOCK,
        rounding="bfloat16" if fp8 else None,
        **fields,
    )


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

    def work(
        self, ours: Callable[[int], Captures], theirs: Callable[[TorchPeers], Captures]
    ) -> Work:
        """A step; all weights are read once, and the keys and values of all rows once."""
        model, keys = self.model, self.rows * self.position
        return model_work(
            model,
            "decode",
            f"{self.rows} rows" if self.rows > 1 else "1 row",
            {"rows": self.rows, "position": self.position},
            flops=2 * self.rows * model.matrix_elements + model.attention_flops(keys),
            traffic=model.weight_bytes + keys * model.token_bytes,
            truth=model.last_logits,
            ours=ours,
            theirs=theirs,
            rounds=STEPS,
            turns=TURNS,
            tokens=self.rows,
        )

    def decoded(self, device: int, sampling: Sampling, rounds: int) -> Run:
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

        return Run(replay, (written,))

    def written(
        self, tokens: Sequence[Sequence[int]] | NDArray[Any], logprob: Callable[[int, int], Any]
    ) -> Written:
        """The rows that are checked, after the new tokens of all rows.

        logprob: of a row and its last token.
        """
        rows, prompts = sorted({*range(min(self.rows, DIFFERENT)), self.rows - 1}), self.prompts()
        sequences = [np.array([*prompts[row], *tokens[row]], np.int32) for row in rows]
        return Written(sequences, [float(logprob(row, int(tokens[row][-1]))) for row in rows])


def decode(model: RandomGPT2, rows: int, peers: bool = True, position: int = 512) -> Work:
    """A step of decoding. peers: whether PyTorch takes part."""
    steps = Steps(model, rows, position)
    samplings = {NAME: GREEDY, "sampled": SAMPLED}

    def theirs(torch: TorchPeers) -> Captures:
        compiled = partial(torch.of_models.steps, steps, "cuda", torch.repeated)
        return {"torch.compile": compiled} if peers else {}

    return steps.work(
        lambda device: {by: partial(steps.decoded, device, s) for by, s in samplings.items()},
        theirs,
    )


def prompt(
    model: RandomModel[Any],
    T: int = 1024,
    theirs: Callable[[TorchPeers, Ids], Captures] = lambda torch, ids: {},
) -> Work:
    """One prompt, to the logits after its last token."""
    (ids,) = model.prompts([T])

    def capture(device: int, rounds: int) -> Run:
        on = model.on(device)
        logits: list[Floats] = []

        def replay() -> None:
            logits[:] = [on(ids, last=True) for _ in range(rounds)]

        return Run(replay, (lambda: logits[-1][None],))

    return model_work(
        model,
        "prompt",
        f"1x{T}",
        {"T": T},
        flops=model.prompt_flops(T),
        traffic=model.weight_bytes,
        truth=lambda: model.last_logits(ids),
        ours=lambda device: {NAME: partial(capture, device)},
        theirs=lambda torch: theirs(torch, ids),
        rounds=4,
        turns=TURNS,
    )


@dataclass(frozen=True)
class Continuations:
    """Many prompts, each continued by `new` tokens, greedily."""

    model: RandomGPT2
    prompts: Sequence[Ids]
    new: int

    def run(self, generate: Callable[[], Any], rounds: int) -> Run:
        """generate: gives the new tokens of each prompt."""
        found: list[Any] = []

        def replay() -> None:
            for _ in range(rounds):
                found[:] = generate()

        return Run(replay, (lambda: self.written(found),))

    def written(self, new: Sequence[Sequence[int]]) -> Written:
        """Those that are checked. Raises InputError for a continuation of a wrong length."""
        lengths = sorted({len(tokens) for tokens in new})
        if lengths != [self.new]:
            raise InputError(f"{self.new} new tokens of each prompt were requested, got {lengths}")
        checked = sorted({0, len(new) // 2, len(new) - 1})
        return Written([np.array([*self.prompts[i], *new[i]], np.int32) for i in checked])

    def generated(self, device: int, rounds: int) -> Run:
        from gpt2block.generation.generate import generate  # noqa: PLC0415  (tiktoken imports slowly)

        engine = self.model.on(device).engine
        options: dict[str, Any] = {"max_new_tokens": self.new, "temperature": 0, "stop_ids": ()}

        def tokens() -> list[Sequence[int]]:
            return [each.tokens for each in generate(engine, None, self.prompts, **options)]

        return self.run(tokens, rounds)


def first_token(model: RandomGPT2, T: int) -> Work:
    """A prompt of T ids and one new token, by `generate` from Python."""
    one = Continuations(model, model.prompts([T]), 1)
    return model_work(
        model,
        "first",
        f"1x{T}",
        {"T": T},
        flops=model.prompt_flops(T),
        traffic=model.weight_bytes,
        truth=model.last_logits,
        ours=lambda device: {NAME: partial(one.generated, device)},
        theirs=lambda torch: {},
        rounds=4,
        turns=TURNS,
        tokens=1,
    )


def generate(model: RandomGPT2, prompts: int = 512, new: int = 128, longest: int = 256) -> Work:
    """Prompts of 16 to `longest` tokens, each continued by `new` tokens, in one batch."""
    lengths = np.random.default_rng(1).integers(16, longest + 1, size=prompts).tolist()
    seen = sum(n * new + new * (new - 1) // 2 for n in lengths)  # keys that each new token sees
    many = Continuations(model, model.prompts(lengths), new)

    def theirs(torch: TorchPeers) -> Captures:
        return {
            "transformers": partial(torch.of_models.generated, many, "cuda"),
            "transformers, paged": partial(torch.of_models.generated_in_pages, many, "cuda"),
        }

    tokens = sum(lengths) + prompts * new
    return model_work(
        model,
        "generate",
        f"{prompts} prompts",
        {"prompts": prompts, "new": new},
        flops=2 * tokens * model.matrix_elements + model.attention_flops(seen),
        traffic=new * model.weight_bytes + seen * model.token_bytes,
        truth=model.last_logits,
        ours=lambda device: {NAME: partial(many.generated, device)},
        theirs=theirs,
        rounds=1,
        turns=1,
        tokens=prompts * new,
    )


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
    name: the size of the model, such as "gpt2". kv_dtype: as in `RandomModel`.
    """
    dtype = dtype or "bfloat16"
    check_choice("--dtype", dtype, DTYPES)
    model = RandomGPT2(size(name or "gpt2"), dtype, kv_dtype)
    counts = ROWS if rows is None else parse_rows(rows)
    steps = [decode(model, n, rows is not None or n in PEER_ROWS) for n in counts]
    firsts = [first_token(model, T) for T in FIRST_PROMPTS]
    return [*steps, prompt(model), *firsts, generate(model)]
