"""Tasks on tokenized records (score, generate, embed), and `Problem`, the error of a record."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from gpt2block.checks import check_flag, check_integer
from gpt2block.engine.adapters import Adapters
from gpt2block.engine.generation import scoring
from gpt2block.engine.generation.generate import Run
from gpt2block.engine.generation.options import Options, Overflow
from gpt2block.engine.generation.sequences import BAD_WEIGHTS
from gpt2block.engine.model import Ids, ModelEngine
from gpt2block.errors import CheckpointError, DeviceError, InputError, KernelError, printable
from gpt2block.files.checkpoints.embedding_files import EmbeddingDefaults, Pooling, chosen
from gpt2block.files.tokenizers.encoding import Encoding, token_sizes
from gpt2block.models.config import ModelConfig
from gpt2block.sampling import Sampling

TaskName = Literal["score", "generate", "embed"]
Kind = Literal["float", "int", "text", "floats", "ints", "texts", "vector"]
Row = dict[str, Any]  # column → result of a record; may have more columns than Task.columns
# Interrupts, and errors that the model or the device causes, not a record.
_NOT_FROM_RECORD = (
    KeyboardInterrupt, SystemExit, GeneratorExit, CheckpointError, DeviceError, KernelError
)  # fmt: skip


class Problem(NamedTuple):
    """The reason why a record has no result."""

    reason: str
    no_memory: bool = False  # memory ran out: the computer, not the record, may be the cause


def problem_of(error: BaseException) -> Problem:
    """Convert an error to the Problem of a record; re-raise an error that no record can cause.

    error: a BaseException, as panics of a tokenizer written in Rust are BaseExceptions. The prefix
    "prompt 0: " and the like is removed: a task numbers its inputs, and the record is the only one.
    """
    if isinstance(error, MemoryError):
        return Problem(printable(f"not enough memory: {error}"), no_memory=True)
    of_cuda = "CUDA" in type(error).__name__ or type(error).__module__.startswith("cupy")
    if isinstance(error, _NOT_FROM_RECORD) or of_cuda:
        raise error
    if isinstance(error, InputError):
        return Problem(re.sub("^(text|prompt|input) 0: ", "", str(error)))
    return Problem(printable(f"{type(error).__name__}: {error}"))


class Task(Protocol):
    """A task whose options have been checked."""

    columns: dict[str, Kind]  # name of a result column → kind, in the order of the output
    tokens_at_once: int  # maximum number of tokens in a batch of several records

    def problem(self, ids: Ids) -> str | None:
        """Return the reason why this record cannot be computed; None if it can be computed."""

    def run(self, engine: ModelEngine, records: Sequence[Ids], seeds: Sequence[int]) -> list[Row]:
        """Return the rows of results in the records' order. Raises InputError if a record fails."""


class Scoring(Task):
    """Task `score`: the log-likelihood of each record's tokens after the first.

    stride: as in `scoring.score`. logprobs: also return the log-probability of every token.
    """

    def __init__(
        self,
        config: ModelConfig,
        encoding: Encoding | None,
        batch_tokens: int,
        stride: int | None = None,
        logprobs: bool = False,
    ) -> None:
        self.tokens_at_once = batch_tokens
        most = config.n_ctx - 1
        stride = max(1, config.n_ctx // 2) if stride is None else stride
        self._stride = check_integer("stride", stride, 1, most, f"1 to {most}, less than n_ctx")
        # Number of bytes of each token in the vocabulary, computed once for all records.
        self._sizes = None if encoding is None else token_sizes(encoding, config.vocab_size)
        self.columns = {"log_likelihood": "float", "perplexity": "float", "n_tokens": "int"}
        if encoding is not None:
            self.columns["n_bytes"] = "int"
        if logprobs:
            self.columns["logprobs"] = "floats"

    def problem(self, ids: Ids) -> str | None:
        return None if len(ids) > 1 else f"expected at least two tokens, got {len(ids)}"

    def run(self, engine: ModelEngine, records: Sequence[Ids], seeds: Sequence[int]) -> list[Row]:
        scores = scoring.score(
            engine, None, list(records), stride=self._stride, tokens_at_once=self.tokens_at_once
        )
        return [
            {
                "log_likelihood": score.log_likelihood,
                "perplexity": score.perplexity,
                "n_tokens": score.n_tokens,
                "n_bytes": None if self._sizes is None else int(self._sizes[ids[1:]].sum()),
                "logprobs": score.tokens.logprobs,
            }
            for ids, score in zip(records, scores, strict=True)
        ]


class Generating(Task):
    """Task `generate`: `samples` continuations of each record.

    options: the keywords of `GPT2.generate`. logprobs: also return the tokens and their
    log-probabilities. receipts: also return the receipt of each text, as JSON. The number of
    records in a batch is not limited: the engine computes `rows_at_once` sequences together.
    """

    tokens_at_once = 2**31

    def __init__(
        self,
        config: ModelConfig,
        encoding: Encoding | None,
        batch_tokens: int,
        logprobs: bool = False,
        receipts: bool = False,
        samples: int = 1,
        seed: int = 0,
        **options: object,
    ) -> None:
        Sampling(seed=seed)  # raises InputError for an invalid seed
        self._config, self._encoding = config, encoding
        self._options = Options.of({**options, "samples": samples, "seed": 0, "receipt": receipts})
        self._checked = replace(self._options, adapter=None)  # the model checks the adapter
        self._start([[0]])  # raises InputError for options that do not fit the model
        text: Kind = "texts" if samples > 1 else "text"
        self.columns = {"completion": text, "finish_reason": text, "n_tokens": "int"}
        # With several samples per record, columns of ints and floats hold lists of lists.
        if logprobs or encoding is None:
            self.columns["completion_tokens"] = "ints"
        if logprobs:
            self.columns["logprobs"] = "floats"
        if receipts:
            self.columns["receipt"] = text

    def _start(self, prompts: object, engine: ModelEngine | None = None) -> Run:
        """Check the prompts; return a Run that generates. Only the generation needs `engine`."""
        config: Any = SimpleNamespace(config=self._config, adapters=Adapters.none())
        options = self._options if engine else self._checked
        return Run(engine or config, self._encoding, prompts, options)

    def problem(self, ids: Ids) -> str | None:
        try:
            self._start([ids])
        except InputError as error:
            return problem_of(error).reason
        return None

    def run(self, engine: ModelEngine, records: Sequence[Ids], seeds: Sequence[int]) -> list[Row]:
        run, samples = self._start(list(records), engine), self._options.samples
        for index, one in enumerate(run.sequences):
            one.sampling = replace(one.sampling, seed=seeds[index // samples])
        run.finish()
        written = [one.result() for one in run.sequences]
        rows = []
        for first in range(0, len(written), samples):
            group = written[first : first + samples]
            row: dict[str, list[object]] = {
                "completion": [one.text for one in group],
                "finish_reason": [one.finish_reason for one in group],
                "completion_tokens": [list(one.tokens) for one in group],
                "logprobs": [np.array(one.logprobs, np.float32) for one in group],
                "receipt": [json.dumps(one.receipt, separators=(",", ":")) for one in group],
            }
            results = row if samples > 1 else {name: values[0] for name, values in row.items()}
            rows.append({**results, "n_tokens": sum(len(one.tokens) for one in group)})
        return rows


class Embedding(Task):
    """Task `embed`: the embedding of a record, as `Model.embed` computes it.

    pooling, overflow, normalize: as in `scoring.embed`. None stands for the model's own value,
    which `choose` looks up. own: pooling and normalization after `choose`.
    """

    def __init__(
        self,
        config: ModelConfig,
        encoding: Encoding | None,
        batch_tokens: int,
        pooling: Pooling | None = None,
        overflow: Overflow = "error",
        normalize: bool | None = None,
    ) -> None:
        self._n_ctx, self.tokens_at_once = config.n_ctx, batch_tokens
        self._pooling, self._normalize = pooling, normalize
        self._overflow: Overflow = overflow
        self.columns = {"embedding": "vector", "n_tokens": "int"}

    def choose(self, defaults: Callable[[], EmbeddingDefaults]) -> None:
        """Choose pooling and normalization as `chosen` does, and check the options."""
        self.own = chosen(self._pooling, self._normalize, defaults)
        scoring.check_embed_options(self.own.pooling, self._overflow)
        check_flag("normalize", self.own.normalize)

    def problem(self, ids: Ids) -> str | None:
        fits = len(ids) >= 1 and (len(ids) <= self._n_ctx or self._overflow == "truncate")
        return None if fits else f"expected 1 to {self._n_ctx} tokens, got {len(ids)}"

    def run(self, engine: ModelEngine, records: Sequence[Ids], seeds: Sequence[int]) -> list[Row]:
        vectors = scoring.embed(
            engine, None, list(records), self.own.pooling, self.tokens_at_once, self._overflow,
            normalize=self.own.normalize,
        )  # fmt: skip
        if not np.isfinite(vectors).all():
            raise InputError("the vector holds NaN: ", *BAD_WEIGHTS)
        return [
            {"embedding": vector, "n_tokens": min(len(ids), self._n_ctx)}
            for vector, ids in zip(vectors, records, strict=True)
        ]


TASKS: Mapping[str, Callable[..., Task]] = {
    "score": Scoring,
    "generate": Generating,
    "embed": Embedding,
}
