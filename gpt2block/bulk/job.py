"""A job, and what a worker does of it: a shard read, computed and written."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpt2block import doctor, tokenizer
from gpt2block.block import resolve_device
from gpt2block.bulk import identity, shards, tasks
from gpt2block.bulk.predictor import Predictor, Problem, record_seed
from gpt2block.bulk.records import Record, Shard, Unreadable, read
from gpt2block.checkpoints import ON_BOARD, Checkpoint
from gpt2block.config import check_count
from gpt2block.errors import CheckpointError, InputError

FORMAT = 1  # of the manifest
SWITCH_SECONDS = 1e-4  # the GPU waits for its thread, which waits so long for Python; 5 ms else
_ALREADY_NAMED = {"index"}


def threads_of(task: str, engine: str) -> int:
    """How many shards a worker has in hand.

    With two, one is read or written while the GPU computes the other. But two that generate would
    have a kv_cache each, and NumPy's products have the CPU's cores already.
    """
    return 2 if engine == "cuda" and task != "generate" else 1


@dataclass(frozen=True)
class Job:
    """What is asked for. Everything in it travels to the workers."""

    task: tasks.TaskName
    output: str
    model: str = ON_BOARD
    device: str | None = None
    dtype: str = "float32"
    tokenizer: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    column: str = "text"
    keep: tuple[str, ...] = ()
    form: str = "jsonl"
    shard_size: int = 1000
    batch_tokens: int = 16384
    model_sha256: str = ""
    tokenizer_sha256: str | None = None

    def checked(self) -> Job:
        """With what identifies its model and tokenizer; no weights are loaded.

        Raises InputError, CheckpointError for what would fail on every worker.
        """
        check_count("shard_size", self.shard_size)
        if self.device not in (None, "cuda", "cpu"):
            raise InputError(
                f"device: expected cuda or cpu, got {self.device!r}: CUDA_VISIBLE_DEVICES says "
                "which GPUs"
            )
        if self.form not in shards.FORMATS:
            raise InputError(f"format: expected one of {', '.join(shards.FORMATS)}")
        checkpoint = Checkpoint.open(self.model)
        encoding = load_tokenizer(checkpoint, self.tokenizer)
        task = tasks.make(self.task, checkpoint.config, encoding, self.batch_tokens, self.options)
        clash = ({*task.columns} | _ALREADY_NAMED) & {*self.keep}
        if clash:
            raise InputError(f"keep: {min(clash)!r} is the name of a result")
        found = {
            "model": absolute(self.model),
            "tokenizer": None if self.tokenizer is None else absolute(self.tokenizer),
            "output": str(Path(self.output).expanduser().absolute()),
            "model_sha256": identity.of_model(self.model),
            "tokenizer_sha256": identity.of_tokenizer(encoding),
        }
        return Job(**{**self._fields(), **found})

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def described(self, input_sha256: str, lines: int, engine: str | None) -> dict[str, Any]:
        """What the manifest says of it: the same for two runs whose output has the same bytes."""
        said = json.loads(json.dumps(asdict(self)))
        for place in ("output", "model", "tokenizer", "device"):
            del said[place]
        return {
            "gpt2block map": FORMAT,
            **said,
            "engine": engine,
            "lines": lines,
            "input_sha256": input_sha256,
            "gpt2block": identity.of_program(),
        }


def load_tokenizer(checkpoint: Checkpoint, path: str | None) -> Any:
    """The one at `path`, or the checkpoint's; None where it has none."""
    vocab_size = checkpoint.config.vocab_size
    if path is not None:
        return tokenizer.from_path(path, vocab_size)
    try:
        return tokenizer.load(checkpoint.directory, vocab_size)
    except CheckpointError:
        return None


def absolute(name: str) -> str:
    """A path for workers that run elsewhere in the file system; other names as they are."""
    path = Path(name).expanduser()
    return str(path.absolute()) if name != ON_BOARD and path.exists() else name


def engine_of(device: str | None) -> str:
    """ "cuda" or "cpu": where a model would run here. Raises DeviceError."""
    return "cpu" if resolve_device(device) is None else "cuda"


_predictors: dict[str, Predictor] = {}
_loading = threading.Lock()
_KEPT = 2  # models of two clients that take turns


def predictor(job: Job) -> Predictor:
    """The job's, loaded once in this process. Raises InputError for another model than its own."""
    key = repr(job)
    with _loading:
        if key not in _predictors:
            if identity.of_model(job.model) != job.model_sha256:
                raise InputError(f"{job.model} is another model on {socket.gethostname()}")
            while len(_predictors) >= _KEPT:
                del _predictors[next(iter(_predictors))]
            found = Predictor(
                job.task,
                job.model,
                device=job.device,
                dtype=job.dtype,
                tokenizer=job.tokenizer,
                batch_tokens=job.batch_tokens,
                **job.options,
            )
            if identity.of_tokenizer(found.encoding) != job.tokenizer_sha256:
                raise InputError(f"{job.model} has another tokenizer on {socket.gethostname()}")
            if job.device == "cuda":
                sys.setswitchinterval(SWITCH_SECONDS)
            _predictors[key] = found
        return _predictors[key]


def where(device: str | None) -> dict[str, Any]:
    """What a worker is: asked of each before any work is done."""
    problem = doctor.cuda_problem() if device != "cpu" else "asked for the CPU"
    engine = "cpu" if problem else "cuda"
    return {"versions": identity.versions(), "engine": engine, "no_cuda": problem}


def prepare(job: Job, paths: Sequence[tuple[str, int]], token: str) -> str:
    """Load the model; the device in words. Raises InputError where the job cannot be done here."""
    host = socket.gethostname()
    for path, size in paths:
        there = Path(path).stat().st_size if Path(path).is_file() else None
        if there != size:
            found = "not there" if there is None else f"{there:,} bytes"
            raise InputError(f"{path}: expected {size:,} bytes, on {host} it is {found}")
    lock = Path(job.output) / shards.LOCK
    if not lock.is_file() or lock.read_text() != token:
        raise InputError(f"{job.output}: on {host} not the client's folder: it has to be shared")
    if not os.access(job.output, os.W_OK | os.X_OK):
        raise InputError(f"{job.output}: cannot be written on {host}")
    return predictor(job).model.device


def run_shard(job: Job, shard: Shard, token: str) -> shards.Done | str:
    """Compute and write a shard; what the manifest says of it, or why nothing can be written.

    A shard is always computed whole, so its bytes depend on no restart. Raises ChangedError.
    """
    records: list[Record] = []
    wrong: list[Unreadable] = []
    for entry in read(shard, job.column, job.keep):
        if isinstance(entry, Record):
            records.append(entry)
        else:
            wrong.append(entry)
    ready = predictor(job)
    seed = job.options.get("seed", 0)
    seeds = [record_seed(seed, record.index) for record in records]
    rows: list[dict[str, Any]] = []
    values = [record.value for record in records]
    for record, row in zip(records, _computed(ready, values, seeds), strict=True):
        if isinstance(row, Problem):
            wrong.append(Unreadable(record.index, record.file, record.line, row.reason))
        else:
            rows.append({"index": record.index, **record.kept, **row})
    wrong.sort(key=lambda entry: entry.index)
    folder = Path(job.output)
    try:
        if (folder / shards.LOCK).read_text() != token:
            return "another run has taken over"
        errors = None
        if wrong:
            lines = shards.json_lines(_error(entry) for entry in wrong)
            errors = shards.replace_file(folder / shards.errors_name(shard.number), lines)
        data = _part(job, ready, rows)
        sha256 = shards.replace_file(folder / shards.part_name(shard.number, job.form), data)
    except OSError as error:
        return f"{folder} cannot be written on {socket.gethostname()}: {error.strerror or error}"
    tokens = sum(row["n_tokens"] for row in rows)
    return shards.Done(shard.number, len(rows), len(wrong), tokens, sha256, errors)


def _computed(
    ready: Predictor, values: Sequence[Any], seeds: Sequence[int]
) -> list[tasks.Row | Problem]:
    """The rows. After a CUDA error the process ends: nothing it computed later could be trusted.

    Dask then starts another one, and gives the shard to whoever is free.
    """
    try:
        return ready.rows(values, seeds)
    except Exception as error:
        if "CUDA" in type(error).__name__:
            print(f"{socket.gethostname()}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        raise


def _part(job: Job, ready: Predictor, rows: Sequence[Mapping[str, Any]]) -> bytes:
    if job.form == "parquet":
        single = job.options.get("samples", 1) == 1
        return shards.parquet(rows, ready.columns, job.keep, single)
    columns = ("index", *job.keep, *ready.columns)
    return shards.json_lines({name: row[name] for name in columns} for row in rows)


def _error(entry: Unreadable) -> dict[str, Any]:
    """Lines are counted from 1."""
    return {
        "index": entry.index,
        "file": entry.file,
        "line": entry.line + 1,
        "reason": entry.reason,
    }
