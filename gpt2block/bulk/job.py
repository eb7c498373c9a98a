"""A job, and what a worker does of it: a shard read, computed and written."""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpt2block import doctor
from gpt2block.block import resolve_device
from gpt2block.bulk import identity, paths, records, shards, tasks
from gpt2block.bulk.predictor import Predictor, record_seed
from gpt2block.bulk.problems import Problem, problem_of
from gpt2block.bulk.records import Record, Shard, Unreadable
from gpt2block.checkpoints import ON_BOARD, Checkpoint
from gpt2block.config import check_count, model_shapes
from gpt2block.errors import CheckpointError, DeviceError, InputError, printable
from gpt2block.text import tokenizer

FORMAT = 2  # of the manifest
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
    revision: str | None = None  # of a hub id
    model_sha256: str = ""
    tokenizer_sha256: str | None = None
    typed: bool = False  # whether kept fields have their Arrow types in the results

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
            raise InputError(
                f"format: expected one of {', '.join(shards.FORMATS)}, got {self.form!r}"
            )
        if self.form == "parquet":
            records.require_pyarrow()
        output = paths.absolute("output", self.output)
        checkpoint = Checkpoint.open(self.model, self.revision)
        encoding = None
        with suppress(CheckpointError) if self.tokenizer is None else nullcontext():
            encoding = read_tokenizer(checkpoint, self.tokenizer)  # token ids need none
        task = tasks.make(self.task, checkpoint.config, encoding, self.batch_tokens, self.options)
        clash = ({*task.columns} | _ALREADY_NAMED) & {*self.keep}
        if clash:
            raise InputError(f"keep: {min(clash)!r} is the name of a result")
        found = {
            "model": absolute(self.model),
            "tokenizer": None if self.tokenizer is None else absolute(self.tokenizer),
            "output": str(output),
            "keep": tuple(dict.fromkeys(self.keep)),
            "model_sha256": identity.of_model(self.model, self.revision),
            "tokenizer_sha256": identity.of_tokenizer(encoding),
        }
        return Job(**{**self._fields(), **found})

    def require_tokenizer(self) -> None:
        """Raise CheckpointError, with the reason, where there is none."""
        read_tokenizer(Checkpoint.open(self.model, self.revision), self.tokenizer)

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def memory_bytes(self) -> int:
        """Of the model's weights in float32. Raises CheckpointError."""
        shapes = model_shapes(Checkpoint.open(self.model, self.revision).config).values()
        return 4 * sum(math.prod(shape) for shape in shapes)

    def described(
        self, inputs: dict[str, Any], input_sha256: str, lines: int, engine: str | None
    ) -> dict[str, Any]:
        """What the manifest says of it: the same for two runs whose output has the same bytes.

        inputs: what `records.described` says of the files.
        """
        said = json.loads(json.dumps(asdict(self)))
        for place in ("output", "model", "revision", "tokenizer", "device"):
            del said[place]
        return {
            "gpt2block map": FORMAT,
            **said,
            "engine": engine,
            "inputs": inputs,
            "lines": lines,
            "input_sha256": input_sha256,
            "gpt2block": identity.of_program(),
        }


def read_tokenizer(checkpoint: Checkpoint, path: str | None) -> Any:
    """The one at `path`, or the checkpoint's. Raises CheckpointError."""
    vocab_size = checkpoint.config.vocab_size
    if path is not None:
        return tokenizer.from_path(path, vocab_size)
    return tokenizer.load(checkpoint.tokenizer_directory(), vocab_size)


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
            if identity.of_model(job.model, job.revision) != job.model_sha256:
                raise InputError(f"{job.model} is another model on {socket.gethostname()}")
            while len(_predictors) >= _KEPT:
                del _predictors[next(iter(_predictors))]
            found = Predictor(
                job.task,
                job.model,
                device=job.device,
                dtype=job.dtype,
                tokenizer=job.tokenizer,
                revision=job.revision,
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


def prepare(job: Job, files: Sequence[tuple[str, int]], token: str) -> str:
    """Load the model; the device in words. Raises InputError where the job cannot be done here."""
    host = socket.gethostname()
    if job.form == "parquet" or any(records.kind_of(Path(path)) == "parquet" for path, _ in files):
        records.require_pyarrow()
    for path, size in files:
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


@dataclass(frozen=True)
class Failed:
    """Why a shard cannot be computed, however often it is tried."""

    reason: str


def run_shard(
    job: Job, shard: Shard, token: str, progress: Callable[[int], None] = lambda records: None
) -> shards.Done | Failed | str:
    """Compute and write a shard; what the manifest says of it, or why nothing can be written.

    A shard is always computed whole, so its bytes depend on no restart. Raises only what another
    try can change: OSError, MemoryError, DeviceError. progress: called with the number of records
    that have been computed since the last call.
    """
    try:
        return _run_shard(job, shard, token, progress)
    except (OSError, MemoryError, DeviceError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return Failed(printable(f"{type(error).__name__}: {error}"))


def _run_shard(
    job: Job, shard: Shard, token: str, progress: Callable[[int], None]
) -> shards.Done | str:
    given: list[Record] = []
    wrong: list[Unreadable] = []
    for entry in records.read(shard, job.column, job.keep):
        if isinstance(entry, Record):
            given.append(entry)
        else:
            wrong.append(entry)
    ready = predictor(job)
    seed = job.options.get("seed", 0)
    seeds = [record_seed(seed, record.index) for record in given]
    part = _part(job, shard, ready)
    done = tokens = without_memory = 0
    values = [record.value for record in given]
    for record, row in zip(given, _computed(ready, values, seeds, progress), strict=True):
        count = row if isinstance(row, Problem) else _write(part, record, row)
        if isinstance(count, Problem):
            wrong.append(Unreadable(record.index, record.file, record.line, count.reason))
            without_memory += count.no_memory
        else:
            done, tokens = done + 1, tokens + count
    if without_memory and not done:
        raise MemoryError(f"not enough memory for any record of shard {shard.number}")
    wrong.sort(key=lambda entry: entry.index)
    folder = Path(job.output)
    try:
        if (folder / shards.LOCK).read_text() != token:
            return "another run has taken over"
        errors = None
        if wrong:
            lines = shards.json_lines(_error(entry) for entry in wrong)
            errors = shards.replace_file(folder / shards.errors_name(shard.number), lines)
        sha256 = shards.replace_file(folder / shards.part_name(shard.number, job.form), part.data())
    except OSError as error:
        return f"{folder} cannot be written on {socket.gethostname()}: {error.strerror or error}"
    return shards.Done(shard.number, done, len(wrong), tokens, sha256, errors)


def _write(part: shards.Part, record: Record, row: tasks.Row) -> int | Problem:
    """Add a record to the results: its tokens, or why its fields cannot be written."""
    try:
        part.add(record.index, record.kept, row)
    except BaseException as error:
        reason, no_memory = problem_of(error)
        return Problem(f"its fields cannot be written: {reason}", no_memory)
    return int(row["n_tokens"])


def _computed(
    ready: Predictor, values: Sequence[Any], seeds: Sequence[int], progress: Callable[[int], None]
) -> list[tasks.Row | Problem]:
    """The rows. After a CUDA error the process ends: nothing it computed later could be trusted.

    Dask then starts another one, and gives the shard to whoever is free.
    """
    try:
        return ready.rows(values, seeds, progress)
    except Exception as error:
        if "CUDA" in type(error).__name__:
            print(f"{socket.gethostname()}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        raise


def _part(job: Job, shard: Shard, ready: Predictor) -> shards.Part:
    if job.form == "jsonl":
        return shards.JsonPart(ready.columns)
    types = records.arrow_types(Path(shard.spans[0].path), job.keep) if job.typed else {}
    single = job.options.get("samples", 1) == 1
    return shards.ParquetPart(ready.columns, job.keep, types, single)


def _error(entry: Unreadable) -> dict[str, Any]:
    """Lines are counted from 1."""
    return {
        "index": entry.index,
        "file": entry.file,
        "line": entry.line + 1,
        "reason": entry.reason,
    }
