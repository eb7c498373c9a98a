"""The tasks on tokenized records: score, generate, embed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from gpt2block.config import ModelConfig, check_count
from gpt2block.errors import InputError
from gpt2block.run.model import Ids, ModelEngine
from gpt2block.sampling import Sampling
from gpt2block.text import scoring
from gpt2block.text.encoding import Encoding, token_sizes
from gpt2block.text.generation import Overflow, Run

TaskName = Literal["score", "generate", "embed"]
Kind = Literal["float", "int", "text", "floats", "ints", "texts", "vector"]
Row = dict[str, Any]  # the results of a record by column
NAN = (
    "the logits are NaN: the weights hold infinity or NaN, or numbers too large for their dtype: "
    "try dtype='float32'"
)


class Task(Protocol):
    """A task whose options have been checked."""

    @property
    def columns(self) -> Mapping[str, Kind]:
        """The result columns and their kinds, in order."""

    @property
    def tokens_at_once(self) -> int:
        """The maximum number of tokens in a batch of several records."""

    def problem(self, ids: Ids) -> str | None:
        """Return why this record cannot be computed; None where it can."""

    def run(self, engine: ModelEngine, records: Sequence[Ids], seeds: Sequence[int]) -> list[Row]:
        """Return the records' rows in order. Raises InputError where computing one fails."""


class Scoring:
    """The log-likelihood of each record's tokens after the first.

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
        self._n_ctx, self.tokens_at_once = config.n_ctx, batch_tokens
        self._stride = max(1, config.n_ctx // 2) if stride is None else stride
        check_count("stride", self._stride)
        if self._stride >= config.n_ctx:
            raise InputError(
                f"stride: expected 1 to {config.n_ctx - 1}, less than n_ctx, got {self._stride}"
            )
        self._logprobs = bool(logprobs)
        self._sizes = None if encoding is None else token_sizes(encoding, config.vocab_size)
        self.columns: dict[str, Kind] = {
            "log_likelihood": "float",
            "perplexity": "float",
            "n_tokens": "int",
        }
        if self._sizes is not None:
            self.columns["n_bytes"] = "int"
        if self._logprobs:
            self.columns["logprobs"] = "floats"

    def problem(self, ids: Ids) -> str | None:
        return None if len(ids) > 1 else f"expected at least two tokens, got {len(ids)}"

    def run(self, engine: ModelEngine, records: Sequence[Ids], seeds: Sequence[int]) -> list[Row]:
        short = [ids for ids in records if len(ids) <= self._n_ctx]
        found = iter(engine.log_likelihood(short) if short else ())
        return [
            self._row(ids, next(found) if len(ids) <= self._n_ctx else self._windows(engine, ids))
            for ids in records
        ]

    def _windows(self, engine: ModelEngine, ids: Ids) -> NDArray[np.float32]:
        """Return the log-probabilities (nats) of a record that is longer than the context."""
        parts, at_once = [], self.tokens_at_once
        for windows in scoring.window_batches([ids], self._n_ctx, self._stride, at_once):
            found = engine.log_likelihood([window.tokens for window in windows])
            parts += [nats[-window.scored :] for window, nats in zip(windows, found, strict=True)]
        return np.concatenate(parts)

    def _row(self, ids: Ids, nats: NDArray[np.float32]) -> Row:
        total, count = float(np.sum(nats, dtype=np.float64)), len(ids) - 1
        if math.isnan(total):
            raise InputError(NAN)
        perplexity = math.exp(-total / count) if -total / count < 700 else math.inf
        row: Row = {"log_likelihood": total, "perplexity": perplexity, "n_tokens": count}
        if self._sizes is not None:
            row["n_bytes"] = int(self._sizes[ids[1:]].sum())
        if self._logprobs:
            row["logprobs"] = nats
        return row


class Generating:
    """A continuation of each record, or `samples` of them.

    options: those of `generation.generate`. logprobs: also return the tokens and their
    log-probabilities. A batch has any number of records: the engine computes `rows_at_once` of them
    together.
    """

    tokens_at_once = 2**31

    def __init__(
        self,
        config: ModelConfig,
        encoding: Encoding | None,
        batch_tokens: int,
        logprobs: bool = False,
        samples: int = 1,
        seed: int = 0,
        **options: Any,
    ) -> None:
        Sampling(seed=seed)
        self._encoding = encoding
        self._options: dict[str, Any] = {"samples": samples} | options
        self._config = config
        self._tokens = bool(logprobs) or encoding is None
        self._logprobs = bool(logprobs)
        # Run checks the options; it uses the engine only when the first token is computed.
        engine: Any = SimpleNamespace(config=config)
        Run(engine, encoding, [[0]], **self._options)
        several = samples > 1
        self._single = not several
        self.columns: dict[str, Kind] = {
            "completion": "texts" if several else "text",
            "finish_reason": "texts" if several else "text",
            "n_tokens": "int",
        }
        # With several samples these are lists of lists.
        self.columns |= {"completion_tokens": "ints"} if self._tokens else {}
        self.columns |= {"logprobs": "floats"} if self._logprobs else {}

    def problem(self, ids: Ids) -> str | None:
        try:
            engine: Any = SimpleNamespace(config=self._config)
            Run(engine, self._encoding, [ids], **self._options)
        except InputError as error:
            return str(error).removeprefix("prompt 0: ")
        return None

    def run(self, engine: ModelEngine, records: Sequence[Ids], seeds: Sequence[int]) -> list[Row]:
        samples = self._options["samples"]
        run = Run(engine, self._encoding, list(records), **self._options)
        for index, one in enumerate(run.rows):
            one.sampling = replace(one.sampling, seed=seeds[index // samples])
        run.finish()
        written = [one.result() for one in run.rows]
        rows = []
        for first in range(0, len(written), samples):
            group = written[first : first + samples]
            row: dict[str, list[Any]] = {
                "completion": [one.text for one in group],
                "finish_reason": [one.finish_reason for one in group],
                "completion_tokens": [list(one.tokens) for one in group],
                "logprobs": [np.array(one.logprobs, np.float32) for one in group],
            }
            found = {name: row[name][0] if self._single else row[name]
                     for name in self.columns if name in row}  # fmt: skip
            rows.append({**found, "n_tokens": sum(len(one.tokens) for one in group)})
        return rows


class Embedding:
    """A vector for each record: the mean or the last of its states after the final LayerNorm.

    overflow: as in `scoring.embed`.
    """

    def __init__(
        self,
        config: ModelConfig,
        encoding: Encoding | None,
        batch_tokens: int,
        pooling: scoring.Pooling = "mean",
        overflow: Overflow = "error",
    ) -> None:
        scoring.check_embed_options(pooling, overflow)
        self._n_ctx, self._pooling, self.tokens_at_once = config.n_ctx, pooling, batch_tokens
        self._overflow: Overflow = overflow
        self.columns: dict[str, Kind] = {"embedding": "vector", "n_tokens": "int"}

    def problem(self, ids: Ids) -> str | None:
        fits = len(ids) >= 1 and (len(ids) <= self._n_ctx or self._overflow == "truncate")
        return None if fits else f"expected 1 to {self._n_ctx} tokens, got {len(ids)}"

    def run(self, engine: ModelEngine, records: Sequence[Ids], seeds: Sequence[int]) -> list[Row]:
        vectors = scoring.embed(
            engine, None, list(records), self._pooling, self.tokens_at_once, self._overflow
        )
        if not np.isfinite(vectors).all():
            raise InputError(NAN.replace("logits are", "vector holds"))
        return [
            {"embedding": vector, "n_tokens": min(len(ids), self._n_ctx)}
            for vector, ids in zip(vectors, records, strict=True)
        ]


TASKS: Mapping[str, Callable[..., Task]] = {
    "score": Scoring,
    "generate": Generating,
    "embed": Embedding,
}


def make(
    name: str,
    config: ModelConfig,
    encoding: Encoding | None,
    batch_tokens: int,
    options: Mapping[str, Any],
) -> Task:
    """Return a task. Raises InputError for an unknown task, and for unknown or wrong options."""
    if name not in TASKS:
        raise InputError(f"task: expected one of {', '.join(TASKS)}, got {name!r}")
    check_count("batch_tokens", batch_tokens)
    try:
        return TASKS[name](config, encoding, batch_tokens, **options)
    except TypeError as error:
        raise InputError(f"{name}: {str(error).rpartition('() ')[2]}") from error
