"""`Predictor`: a model as a function of batches, for Dask, Ray or a loop of your own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpt2block import tokenizer as tokenizers
from gpt2block.bulk import tasks
from gpt2block.bulk.tasks import Kind, Row, Task, TaskName
from gpt2block.checkpoints import ON_BOARD
from gpt2block.engines.model import Ids
from gpt2block.engines.model_cpu import NumpyModel
from gpt2block.errors import CheckpointError, InputError
from gpt2block.model import GPT2

Batch = Mapping[str, Any]  # column → one value a record
INPUTS = ("text", "tokens")
GROUP = 8192  # tokens that a GPU's engine scores or embeds in one go, TOKENS_AT_ONCE there
_NOTHING: Mapping[Kind, Any] = {"float": np.nan, "int": 0, "text": ""}


class Problem(NamedTuple):
    """Why a record has no result."""

    reason: str


class Predictor:
    """Scores, continues or embeds the records of a batch.

    task: "score" (options: stride, logprobs), "generate" (those of `GPT2.generate`, and logprobs)
    or "embed" (pooling). model, device, dtype: as in `GPT2.from_pretrained`. tokenizer: a path, as
    for `tokenizer.from_path`. batch_tokens: computed together at most.

    The model is loaded here. A pickle holds the arguments alone, and what comes of it loads the
    model when it is first called: once in every process, however many batches follow.

    What comes of a record depends on it, its seed and the options, not on the records beside it:
    with NumPy each record is computed by itself, as the last bits of a BLAS's products depend on
    their number of rows; on a GPU the kernels see to it.

    Raises InputError for wrong options, CheckpointError, DeviceError.
    """

    def __init__(
        self,
        task: TaskName,
        model: str | Path = ON_BOARD,
        *,
        device: str | None = None,
        dtype: str = "float32",
        tokenizer: str | Path | None = None,
        batch_tokens: int = 16384,
        **options: Any,
    ) -> None:
        self.task, self.name, self.device, self.dtype = task, model, device, dtype
        self.tokenizer, self.batch_tokens, self.options = tokenizer, batch_tokens, options
        self._task  # noqa: B018  (loads the model and checks the options)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _LOADED}

    @cached_property
    def model(self) -> GPT2:
        """The loaded model."""
        return GPT2.from_pretrained(self.name, self.device, self.dtype)

    @cached_property
    def encoding(self) -> Any:
        """The tokenizer; None where there is none, which is enough for token ids."""
        if self.tokenizer is not None:
            return tokenizers.from_path(self.tokenizer, self.model.config.vocab_size)
        try:
            return self.model.tokenizer
        except CheckpointError:
            return None

    @cached_property
    def _task(self) -> Task:
        engine = self.model.engine
        return tasks.make(self.task, engine.config, self.encoding, self.batch_tokens, self.options)

    @property
    def columns(self) -> Mapping[str, Kind]:
        """Of the results, in order."""
        return self._task.columns

    def __call__(self, batch: Batch) -> dict[str, Any]:
        """The batch's columns, and those of the results, as arrays.

        batch: "text", or "tokens" (rows of ids), and perhaps "seed", an integer of 64 bits for each
        record; without it the option `seed` and the record itself make one. `error` is "" or says
        why a record has no result; its other columns then hold NaN, 0 or nothing.

        score: log_likelihood (nats), perplexity, n_tokens and n_bytes (predicted), logprobs.
        generate: completion, finish_reason, n_tokens, completion_tokens, logprobs.
        embed: embedding, n_tokens.
        """
        name = next((name for name in INPUTS if name in batch), None)
        if name is None:
            raise InputError(f"batch: expected a column text or tokens, got {', '.join(batch)}")
        values = list(batch[name])
        seeds = batch.get("seed")
        rows = self.rows(values, None if seeds is None else [int(seed) for seed in seeds])
        columns: dict[str, Any] = dict(batch)
        for column, kind in self.columns.items():
            found = [None if isinstance(row, Problem) else row[column] for row in rows]
            columns[column] = self._column(kind, found)
        reasons = [row.reason if isinstance(row, Problem) else "" for row in rows]
        columns["error"] = np.array(reasons, object)
        return columns

    def rows(
        self, values: Sequence[Any], seeds: Sequence[int] | None = None
    ) -> list[Row | Problem]:
        """What came of each record: its columns, or a Problem. The records are texts or ids."""
        found: list[Row | Problem | None] = [None] * len(values)
        ids: dict[int, Ids] = {}
        for index, value in enumerate(values):
            try:
                ids[index] = self._ids(value)
            except InputError as error:
                found[index] = Problem(str(error))
        if seeds is None:
            seeds = [self._own_seed(ids.get(index)) for index in range(len(values))]
        for part in self._batches(ids):
            for index, row in zip(part, self._run(part, ids, seeds), strict=True):
                found[index] = row
        return [row for row in found if row is not None]

    def _ids(self, value: Any) -> Ids:
        """InputError for a record that cannot be computed."""
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise InputError(f"not text: half of a surrogate pair at {error.start}") from error
        elif not isinstance(value, (list, tuple, np.ndarray)):
            raise InputError(f"expected text or token ids, got {type(value).__name__}")
        elif not len(value):
            value = np.empty(0, np.int32)
        vocab_size = self.model.config.vocab_size
        try:
            ids = tokenizers.token_ids(self.encoding, value, vocab_size, self.task)
        except InputError as error:
            raise InputError(str(error).removeprefix(f"{self.task}: ")) from error
        except (ValueError, OverflowError, TypeError) as error:  # tiktoken's, NumPy's
            raise InputError(f"cannot be read as tokens: {error}") from error
        problem = self._task.problem(ids)
        if problem:
            raise InputError(problem)
        return ids

    def _batches(self, ids: Mapping[int, Ids]) -> Iterator[list[int]]:
        """Records of like length together, the longest first: what does not fit shows at once.

        A batch has whole groups of the engine's: some records more would cost as much as a group.
        """
        alone = isinstance(self.model.engine, NumpyModel)
        at_once = 1 if alone else self._task.at_once
        part: list[int] = []
        tokens = group = 0
        for index in sorted(ids, key=lambda index: (-len(ids[index]), index)):
            length = len(ids[index])
            border = group + length > GROUP
            room = self.batch_tokens - tokens
            needed = max(GROUP, length) if border else length
            if part and (len(part) == at_once or needed > room):
                yield part
                part, tokens, group = [], 0, 0
            elif border:
                group = 0
            part.append(index)
            tokens += length
            group += length
        if part:
            yield part

    def _run(
        self, part: Sequence[int], ids: Mapping[int, Ids], seeds: Sequence[int]
    ) -> list[Row | Problem]:
        """A batch; where one of its records fails, each by itself."""
        records, own = [ids[index] for index in part], [seeds[index] for index in part]
        try:
            return list(self._task.run(self.model.engine, records, own))
        except InputError as error:
            if len(part) == 1:
                return [Problem(str(error))]
        return [row for index in part for row in self._run([index], ids, seeds)]

    def _own_seed(self, ids: Ids | None) -> int:
        """Of a record that came without one."""
        return 0 if ids is None else record_seed(self.options.get("seed", 0), ids.tobytes())

    def _column(self, kind: Kind, values: list[Any]) -> Any:
        if kind in ("float", "int", "text"):
            filled = [_NOTHING[kind] if value is None else value for value in values]
            return np.array(filled, {"float": np.float64, "int": np.int64}.get(kind, object))
        if kind == "vector":
            blank = np.full(self.model.config.n_embd, np.nan, np.float32)
            filled = [blank if value is None else value for value in values]
            return np.stack(filled) if filled else np.empty((0, len(blank)), np.float32)
        column = np.empty(len(values), object)
        for index, value in enumerate(values):
            column[index] = _blank(kind) if value is None else value
        return column


def _blank(kind: Kind) -> Any:
    """A list of nothing, of the type that the others have."""
    return [] if kind == "texts" else np.empty(0, np.float32 if kind == "floats" else np.int32)


_LOADED = ("model", "encoding", "_task")


def record_seed(seed: int, record: int | bytes) -> int:
    """A record's seed of 64 bits, of the job's and the record's number, or the record itself."""
    if isinstance(record, int):
        record = record.to_bytes(8, "little")
    key = seed.to_bytes(8, "little")
    return int.from_bytes(blake2b(record, digest_size=8, key=key).digest(), "little")
