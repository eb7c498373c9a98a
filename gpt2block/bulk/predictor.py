"""`Predictor`: a callable that maps a model over batches, for Dask, Ray or your own loop."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from gpt2block.bulk.tasks import TASKS, Embedding, Kind, Problem, Row, Task, TaskName, problem_of
from gpt2block.checks import check_choice, check_count, check_integer
from gpt2block.cuda.formats import BY_DEFAULT, REMOVED, FormatOptions, refuse_removed
from gpt2block.engine.adapters import MEMORY
from gpt2block.engine.model import Ids
from gpt2block.engine.numpy.model import NumpyModel
from gpt2block.errors import CheckpointError, InputError
from gpt2block.files.checkpoints import BUNDLED
from gpt2block.files.checkpoints.embedding_files import EmbeddingDefaults
from gpt2block.files.tokenizers import tokenizer as tokenizers
from gpt2block.files.tokenizers.encoding import Encoding
from gpt2block.files.tokenizers.lookup import Lookup, of_outputs
from gpt2block.model import Model, load
from gpt2block.models.config import ModelConfig

Batch = Mapping[str, Any]  # column name → one value per record
INPUTS = ("text", "tokens")
_COLUMNS: Mapping[Kind, tuple[Any, Any]] = {  # kind → (dtype, value if there is no result)
    "float": (np.float64, np.nan), "int": (np.int64, 0), "text": (object, ""),
    "texts": (object, []), "floats": (object, np.empty(0, np.float32)),
    "ints": (object, np.empty(0, np.int32)), "vector": (np.float32, np.nan),
}  # fmt: skip
GROUP = 8192  # tokens that the CUDA engine scores or embeds at once (its TOKENS_AT_ONCE)


@dataclass(frozen=True)
class Arguments:
    """The arguments of a Predictor."""

    task: TaskName
    model: str | Path = BUNDLED
    device: str | None = None
    formats: FormatOptions = BY_DEFAULT
    tokenizer: str | Path | None = None
    revision: str | None = None
    options: dict[str, Any] = field(default_factory=dict)  # options of the task
    batch_tokens: int = 16384
    adapters: tuple[tuple[str, str | Path], ...] = ()  # names and folders
    adapters_memory: float = MEMORY

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle, which in older versions has `dtype`, `kv_dtype` and no `formats`."""
        if "formats" not in state:
            refuse_removed(name for name in state if state[name] is not None)
            names = {"dtype", "kv_dtype", *REMOVED}
            formats = FormatOptions(state["dtype"], state.get("kv_dtype"))
            state = {name: each for name, each in state.items() if name not in names}
            state["formats"] = formats
        vars(self).update(state)

    def checked_task(
        self,
        config: ModelConfig,
        encoding: Encoding | None,
        defaults: Callable[[], EmbeddingDefaults],
    ) -> Task:
        """Check the task and its options, and return the Task. Raises InputError.

        defaults: see `chosen`; only the task `embed` calls it, and can raise CheckpointError.
        """
        check_choice("task", self.task, TASKS)
        check_count("batch_tokens", self.batch_tokens)
        try:
            task = TASKS[self.task](config, encoding, self.batch_tokens, **self.options)
        except TypeError as error:
            raise InputError(f"{self.task}: {str(error).rpartition('() ')[2]}") from error
        if isinstance(task, Embedding):
            task.choose(defaults)
        return task


class Predictor:
    """A callable that scores, continues or embeds the records of a batch.

    task: "score" (options: stride, logprobs), "generate" (options of `GPT2.generate`, and logprobs)
    or "embed" (options: pooling, overflow, normalize). model, device, dtype, kv_dtype, revision,
    adapters, adapters_memory: as in `GPT2.from_pretrained`. tokenizer: a path, as for
    `tokenizer.from_path`. batch_tokens: the maximum number of tokens scored or embedded together.
    Generation uses the engine's `rows_at_once` instead.

    Records of token ids use a tokenizer only if its files are next to the weights, or named by
    `tokenizer`.

    The constructor loads the model. A pickled Predictor contains the arguments only. An unpickled
    Predictor loads the model at its first call, so each process loads it once. The default dtype of
    a GGUF file depends on the device of that process.

    The result of a record depends on the record, its seed and the options, not on the rest of the
    batch. With NumPy each record is computed separately, as the last bits of a BLAS product depend
    on its number of rows. The CUDA kernels compute each row independently of the other rows.

    Raises InputError for wrong options, CheckpointError, DeviceError.
    """

    def __init__(
        self,
        task: TaskName,
        model: str | Path = BUNDLED,
        *,
        device: str | None = None,
        dtype: str | None = None,
        tokenizer: str | Path | None = None,
        revision: str | None = None,
        kv_dtype: str | None = None,
        batch_tokens: int = 16384,
        adapters: Mapping[str, str | Path] | None = None,
        adapters_memory: float = MEMORY,
        **options: object,
    ) -> None:
        refuse_removed(options, "Predictor: ")
        formats = FormatOptions(dtype, kv_dtype)
        self.arguments = Arguments(
            task, model, device, formats, tokenizer, revision, options, batch_tokens,
            tuple((adapters or {}).items()), adapters_memory,
        )  # fmt: skip
        self._task  # noqa: B018  (loads the model and checks the options)

    @classmethod
    def later(cls, arguments: Arguments) -> Predictor:
        """Return a Predictor that loads its model at the first call, as after unpickling."""
        predictor = cls.__new__(cls)
        predictor.arguments = arguments
        return predictor

    def __getstate__(self) -> dict[str, object]:
        return {"arguments": self.arguments}

    @cached_property
    def model(self) -> Model[Any]:
        """The loaded model."""
        arguments = self.arguments
        given = arguments.model, arguments.device, arguments.formats, iter, arguments.revision
        return load(Model, *given, dict(arguments.adapters), arguments.adapters_memory)

    @cached_property
    def _lookup(self) -> Lookup:
        if self.arguments.tokenizer is None:
            return self.model.lookup
        return Lookup(None, self.model.config.vocab_size, self.arguments.tokenizer)

    _has_text = False  # whether the tokenizer has been loaded for text

    def load_tokenizer(self) -> None:
        """Make `encoding` load the tokenizer, even by a download, as a batch of texts does."""
        if not self._has_text:
            self._has_text = True
            vars(self).pop("_task", None)

    @property
    def encoding(self) -> Encoding | None:
        """The tokenizer; None without one or, before `load_tokenizer`, if it needs a download."""
        return of_outputs(self._lookup) if self._has_text else self._lookup.local_encoding

    @cached_property
    def _task(self) -> Task:
        model = self.model
        return self.arguments.checked_task(
            model.config, self.encoding, lambda: model.embedding_defaults
        )

    @property
    def columns(self) -> Mapping[str, Kind]:
        """Mapping of the results' column names to their kinds, in the order of the output."""
        return self._task.columns

    def __call__(self, batch: Batch) -> dict[str, Any]:
        """Return the batch's columns and the result columns, as arrays.

        batch: "text", or "tokens" (sequences of ids), and optionally "seed", an integer from 0 to
        2**64 - 1 for each record; by default it is derived from the option `seed` and the record.
        The result column `error` is "", or the reason why a record has no result; the other result
        columns of such a record are NaN, 0 or empty.

        A column of the batch that has the name of a result column is replaced.

        score: log_likelihood (nats), perplexity, n_tokens and n_bytes (predicted), logprobs.
        generate: completion, finish_reason, n_tokens, completion_tokens, logprobs.
        embed: embedding (n_embd,), n_tokens.

        Raises InputError unless batch is a mapping from names to columns of one length.
        """
        if not isinstance(batch, Mapping):
            raise InputError(
                f"batch: expected a mapping from names to columns, got {type(batch).__name__}"
            )
        name = next((name for name in INPUTS if name in batch), None)
        if name is None:
            got = ", ".join(map(str, batch)) or "none"
            raise InputError(f"batch: expected a column text or tokens, got {got}")
        values = _entries(name, batch[name])
        seeds = None if batch.get("seed") is None else _entries("seed", batch["seed"])
        if seeds is not None and len(seeds) != len(values):
            raise InputError(
                f"seed: expected one for each of the {len(values)} records, got {len(seeds)}"
            )
        if any(isinstance(value, str) for value in values):
            self.load_tokenizer()
        rows = self.rows(values, seeds)
        columns: dict[str, object] = dict(batch)
        for column, kind in self.columns.items():
            found = [None if isinstance(row, Problem) else row[column] for row in rows]
            columns[column] = self._column(kind, found)
        reasons = [row.reason if isinstance(row, Problem) else "" for row in rows]
        columns["error"] = np.array(reasons, object)
        return columns

    def rows(
        self,
        values: Sequence[object],
        seeds: Sequence[object] | None = None,
        progress: Callable[[int], None] = lambda records: None,
    ) -> list[Row | Problem]:
        """Return for each record {column: result}, or a Problem if the record cannot be computed.

        values: texts, token ids or Problems; a Problem is returned unchanged. progress: called with
        the number of records computed since the last call.
        """
        results: list[Row | Problem | None] = [None] * len(values)
        ids: dict[int, Ids] = {}
        own: dict[int, int] = {}
        base = self.arguments.options.get("seed", 0)
        for index, value in enumerate(values):
            if isinstance(value, Problem):
                results[index] = value
                continue
            try:
                tokens = self._ids(value)
                if seeds is None:
                    own[index] = record_seed(base, tokens.tobytes())
                else:
                    expected = "an integer from 0 to 2**64 - 1"
                    own[index] = check_integer("seed", seeds[index], 0, 2**64 - 1, expected)
                ids[index] = tokens
            except BaseException as error:
                results[index] = problem_of(error)
        for part in self._batches(ids):
            for index, row in zip(part, self._run(part, ids, own), strict=True):
                results[index] = row
            progress(len(part))
        return [row for row in results if row is not None]

    def _ids(self, value: object) -> Ids:
        """Return a record's token ids. Raises InputError for a record that cannot be computed."""
        if isinstance(value, str):
            if self.encoding is None:
                raise InputError(f"text needs a tokenizer: {self._missing()}")
        elif not isinstance(value, (list, tuple, np.ndarray)):
            raise InputError(f"expected text or token ids, got {type(value).__name__}")
        elif not len(value):
            value = np.empty(0, np.int32)
        vocab_size, task = self.model.config.vocab_size, self.arguments.task
        try:
            encode = tokenizers.whole_text_ids if task == "embed" else tokenizers.token_ids
            ids = encode(self.encoding, value, vocab_size, task)
        except InputError as error:
            raise InputError(str(error).removeprefix(f"{task}: ")) from error
        except (ValueError, OverflowError, TypeError) as error:  # raised by tiktoken or NumPy
            raise InputError(f"cannot be read as tokens: {error}") from error
        problem = self._task.problem(ids)
        if problem:
            raise InputError(problem)
        return ids

    def _missing(self) -> str:
        """Return the reason why there is no tokenizer."""
        try:
            self._lookup.encoding  # noqa: B018  (raises)
        except CheckpointError as error:
            return str(error)
        return "the first record of the input has token ids: put texts into a separate job"

    def _batches(self, ids: Mapping[int, Ids]) -> Iterator[list[int]]:
        """Yield batches of records of similar length, beginning with the longest (most memory).

        The engine computes groups of GROUP tokens, and a partly filled group takes as long as a
        full group. A batch therefore starts another group only if the task allows enough tokens to
        fill it.
        """
        separate = isinstance(self.model.engine, NumpyModel)
        most = self._task.tokens_at_once
        part: list[int] = []
        tokens = group = 0
        for index in sorted(ids, key=lambda index: (-len(ids[index]), index)):
            length = len(ids[index])
            starts_group = group + length > GROUP
            available = most - tokens
            needed = max(GROUP, length) if starts_group else length
            if part and (separate or needed > available):
                yield part
                part, tokens, group = [], 0, 0
            elif starts_group:
                group = 0
            part.append(index)
            tokens += length
            group += length
        if part:
            yield part

    def _run(
        self, part: Sequence[int], ids: Mapping[int, Ids], seeds: Mapping[int, int]
    ) -> list[Row | Problem]:
        """Compute a batch; if the computation fails, compute each half of the batch separately."""
        records, own = [ids[index] for index in part], [seeds[index] for index in part]
        try:
            return list(self._task.run(self.model.engine, records, own))
        except BaseException as error:
            problem = problem_of(error)
            if len(part) == 1:
                return [problem]
        middle = len(part) // 2
        halves = part[:middle], part[middle:]
        return [row for half in halves for row in self._run(half, ids, seeds)]

    def _column(self, kind: Kind, values: list[object]) -> Any:
        """Return an array of the values; None (no result) becomes NaN, 0 or an empty value."""
        dtype, blank = _COLUMNS[kind]
        entry = (self.model.config.n_embd,) if kind == "vector" else ()
        column = np.empty((len(values), *entry), dtype)
        for index, value in enumerate(values):
            column[index] = copy(blank) if value is None else value
        return column


def _entries(name: str, column: Any) -> list[object]:
    """Return the entries of `column`, one per record. Raises InputError if it is not a column."""
    if isinstance(column, np.ma.MaskedArray):
        raise InputError(
            f"{name}: expected an array without a mask, got a NumPy masked array: leave out the "
            "masked records, or use .filled()"
        )
    if isinstance(column, Iterator):  # a column is read twice: it is also part of the result
        raise InputError(
            f"{name}: expected a column that can be read twice, got {type(column).__name__}: use "
            "list(column)"
        )
    if not isinstance(column, (str, bytes, Mapping, set, frozenset)):
        with suppress(TypeError):  # raised by scalars and by arrays of zero dimensions
            return list(column)
    raise InputError(
        f"{name}: expected a column with an entry for each record, got {type(column).__name__}"
    )


def record_seed(seed: int, record: int | bytes) -> int:
    """Return a record's seed of 64 bits, a keyed hash of the record.

    seed: the job's seed, the key. record: the record's index, or its bytes.
    """
    if not isinstance(record, bytes):
        record = operator.index(record).to_bytes(8, "little")
    key = operator.index(seed).to_bytes(8, "little")
    return int.from_bytes(blake2b(record, digest_size=8, key=key).digest(), "little")
