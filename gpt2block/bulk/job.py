"""Define a job (a Predictor's arguments and an output), and compute one shard of a job."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path

from gpt2block.bulk import identity, paths, records, shards
from gpt2block.bulk.predictor import Arguments, Predictor, record_seed
from gpt2block.bulk.records import Record, Shard
from gpt2block.bulk.tasks import Embedding, Problem, Row, problem_of
from gpt2block.checks import check_choice, check_count
from gpt2block.cuda import doctor, first_gpus
from gpt2block.cuda.devices import reads_blocks, resolve_device
from gpt2block.engine.adapters import Adapters
from gpt2block.engine.receipts import of_checkpoint, of_tokenizer
from gpt2block.errors import DeviceError, InputError, printable
from gpt2block.files.checkpoints import BUNDLED_NAMES, Checkpoint
from gpt2block.files.checkpoints.embedding_files import embedding_defaults
from gpt2block.files.tokenizers.lookup import Lookup

FORMAT = 2  # version of the manifest's format
# Seconds after which Python switches threads, so that the thread that launches kernels waits at
# most this long for the interpreter lock; Python's default is 5 ms.
SWITCH_SECONDS = 1e-4
# Fields that the manifest's job description omits or replaces: hashes identify the model and the
# tokenizer independently of their paths, and `formats.identity()` describes the formats.
_APART = ("output", "model", "revision", "tokenizer", "device", "formats", "adapters")


def threads_of(task: str, engine: str) -> int:
    """Return the number of shards that a worker processes at once, each in its own thread.

    With two shards, the worker reads or writes one while the GPU computes the other. Generation
    uses one shard, as each shard needs its own KV cache. NumPy uses one shard, as its matrix
    products use all CPU cores.
    """
    return 2 if engine == "cuda" and task != "generate" else 1


@dataclass(frozen=True, kw_only=True)
class Job(Arguments):
    """The arguments of a Predictor and the job's output; the client sends a Job to every worker."""

    output: str
    column: str = "text"
    keep: tuple[str, ...] = ()
    form: str = "jsonl"
    shard_size: int = 1000
    model_sha256: str = ""
    tokenizer_sha256: str | None = None
    adapters_sha256: tuple[str, ...] = ()
    typed: bool = False  # whether kept fields have their Arrow types in the results

    def checked(self, has_text: bool = False) -> Job:
        """Return a copy of the job with absolute paths and hashes of the model and the tokenizer.

        The copy also has the dtype of the weights, unless the dtype depends on the workers' GPUs.
        No weights are loaded.

        has_text: whether the input has texts, for which the tokenizer may be downloaded. Raises
        InputError, CheckpointError for arguments that would fail on every worker.
        """
        check_count("shard_size", self.shard_size)
        several = map(first_gpus, range(1, doctor.MAX_GPUS + 1))
        if self.device not in (None, "cuda", "cpu", *several):
            raise InputError(
                "device: expected cuda, cpu or the first GPUs of a worker, such as cuda:0,1, got "
                f"{self.device!r}: set CUDA_VISIBLE_DEVICES to choose GPUs"
            )
        check_choice("format", self.form, shards.FORMATS)
        if self.form == "parquet":
            records.require_pyarrow()
        output = paths.absolute("output", self.output)
        checkpoint = Checkpoint.open(self.model, self.revision)
        lookup = Lookup(checkpoint, checkpoint.config.vocab_size, self.tokenizer)
        encoding = lookup.encoding if has_text else lookup.local_encoding
        defaults = partial(embedding_defaults, checkpoint)
        task = self.checked_task(checkpoint.config, encoding, defaults)
        options = self.options | (task.own._asdict() if isinstance(task, Embedding) else {})
        folders = {name: absolute(folder) for name, folder in self.adapters}
        read = Adapters.read(folders, checkpoint.config, checkpoint, self.adapters_memory)
        of_blocks = checkpoint.nbytes_in_blocks > 0 and self.device != "cpu"
        clash = {*task.columns, "index"} & {*self.keep}
        if clash:
            raise InputError(f"keep: {min(clash)!r} is the name of a result")
        return replace(
            self, options=options, model=absolute(self.model), output=str(output),
            formats=self.formats if of_blocks else self.formats.resolved(in_blocks=False),
            tokenizer=None if self.tokenizer is None else absolute(self.tokenizer),
            keep=tuple(dict.fromkeys(self.keep)), model_sha256=of_checkpoint(checkpoint),
            tokenizer_sha256=of_tokenizer(encoding), adapters=tuple(folders.items()),
            adapters_sha256=read.digests,
        )  # fmt: skip

    def described(
        self, inputs: dict[str, object], input_sha256: str, lines: int, engine: str | None
    ) -> dict[str, object]:
        """Return the job's description for the manifest; equal descriptions mean equal outputs.

        inputs: the description of the input files that `records.described` returns.
        """
        arguments = {name: each for name, each in asdict(self).items() if name not in _APART}
        return {
            "gpt2block map": FORMAT,
            **json.loads(json.dumps(arguments | self.formats.identity())),
            "engine": engine,
            "inputs": inputs,
            "lines": lines,
            "input_sha256": input_sha256,
            "gpt2block": identity.of_program(),
        }


def absolute(name: str | Path) -> str:
    """Return the absolute path of `name` if it exists, as workers run in other directories.

    Otherwise return `name` unchanged.
    """
    path = Path(name).expanduser()
    return str(path.absolute()) if name not in BUNDLED_NAMES and path.exists() else str(name)


def engine_of(device: str | None) -> str:
    """Return the engine ("cuda" or "cpu") that option `device` selects here. Raises DeviceError."""
    return "cpu" if resolve_device(device and device.partition(":")[0]) is None else "cuda"


def gpus_of(device: str | None) -> int:
    """Return the number of GPUs of a worker: more than 1 for a device such as "cuda:0,1"."""
    return 1 if device is None else 1 + device.count(",")


_predictors: dict[str, Predictor] = {}
_loading = threading.Lock()
_KEPT = 2  # number of models kept in memory: two clients can alternate without reloading


def predictor(job: Job) -> Predictor:
    """Return the job's Predictor, loaded once per process for all jobs with the same arguments.

    Raises InputError if the hash of the model or of the tokenizer differs from the job's.
    """
    arguments = [getattr(job, each.name) for each in fields(Arguments)]
    key = repr((arguments, job.model_sha256, job.tokenizer_sha256))
    with _loading:
        if key not in _predictors:
            here = f"{job.model} on {socket.gethostname()}"
            if of_checkpoint(Checkpoint.open(job.model, job.revision)) != job.model_sha256:
                raise InputError(f"{here} is not the client's model: copy the client's files there")
            while len(_predictors) >= _KEPT:
                del _predictors[next(iter(_predictors))]
            loaded = Predictor.later(job)
            if job.tokenizer_sha256 is not None:
                loaded.load_tokenizer()
            if of_tokenizer(loaded.encoding) != job.tokenizer_sha256:
                raise InputError(
                    f"{here} does not have the client's tokenizer: copy the client's files there"
                )
            if job.device != "cpu":
                sys.setswitchinterval(SWITCH_SECONDS)
            _predictors[key] = loaded
        return _predictors[key]


def worker_properties(device: str | None) -> dict[str, object]:
    """Return a dict that describes this worker: `versions`, `engine`, `reads_blocks`, `no_cuda`.

    reads_blocks: whether it multiplies GGUF blocks directly. no_cuda: the reason why it does not
    use a GPU; None if it uses one.
    """
    problem = doctor.cuda_problem() if device != "cpu" else "the CPU was requested"
    engine = "cpu" if problem else "cuda"
    return {
        "versions": identity.versions(),
        "engine": engine,
        "no_cuda": problem,
        "reads_blocks": reads_blocks(engine),
    }


def prepare(job: Job, files: Sequence[tuple[str, int]], token: str) -> str:
    """Load the model on this worker and return a description of its device.

    files: the input's paths and sizes in bytes. token: the content of the client's lock file.
    Raises InputError if this worker cannot compute the job.
    """
    host = socket.gethostname()
    if job.form == "parquet" or any(records.kind_of(Path(path)) == "parquet" for path, _ in files):
        records.require_pyarrow()
    for path, size in files:
        actual = Path(path).stat().st_size if Path(path).is_file() else None
        if actual != size:
            got = "no file" if actual is None else f"{actual:,} bytes"
            raise InputError(f"{path}: expected {size:,} bytes, {host} has {got}")
    lock = Path(job.output) / shards.LOCK
    if not lock.is_file() or lock.read_text() != token:
        raise InputError(
            f"{job.output}: {host} does not see the client's folder: use a shared file system"
        )
    if not os.access(job.output, os.W_OK | os.X_OK):
        raise InputError(f"{job.output}: cannot be written on {host}")
    return predictor(job).model.device


@dataclass(frozen=True)
class Failed:
    """The result of a shard that cannot be computed, with the reason."""

    reason: str


def run_shard(
    job: Job, shard: Shard, token: str, progress: Callable[[int], None] = lambda records: None
) -> shards.ShardEntry | Failed | str:
    """Compute a shard and write its files.

    Returns the shard's manifest entry, or Failed if it cannot be computed, or a message that stops
    the job because nothing can be written. A shard is always computed as a whole, so its bytes do
    not depend on restarts. Raises only errors that a retry may avoid: OSError, MemoryError,
    DeviceError. progress: called with the number of records computed since the last call.
    """
    try:
        return _run_shard(job, shard, token, progress)
    except (OSError, MemoryError, DeviceError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return Failed(printable(f"{type(error).__name__}: {error}"))


def _run_shard(
    job: Job, shard: Shard, token: str, progress: Callable[[int], None]
) -> shards.ShardEntry | str:
    inputs = list(records.read(shard, job.column, job.keep))
    loaded = predictor(job)
    part: shards.Part = shards.JsonPart(loaded.columns)
    if job.form == "parquet":
        types = records.arrow_types(Path(shard.spans[0].path), job.keep) if job.typed else {}
        part = shards.ParquetPart(loaded.columns, job.keep, types)
    rows = _compute(loaded, inputs, job.options.get("seed", 0), progress)
    done = tokens = without_memory = 0
    errors: list[dict[str, object]] = []
    for record, row in zip(inputs, rows, strict=True):
        count = row if isinstance(row, Problem) else _add(part, record, row)
        if isinstance(count, Problem):
            place = {"index": record.index, "file": record.file, "line": record.line + 1}
            errors.append({**place, "reason": count.reason})
            without_memory += count.no_memory
        else:
            done, tokens = done + 1, tokens + count
    if without_memory and not done:
        raise MemoryError(f"not enough memory for any record of shard {shard.number}")
    folder = Path(job.output)
    try:
        if (folder / shards.LOCK).read_text() != token:
            return "another run writes to this output now"
        digest = None
        if errors:
            path = folder / shards.errors_name(shard.number)
            digest = shards.replace_file(path, shards.json_lines(errors))
        sha256 = shards.replace_file(folder / shards.part_name(shard.number, job.form), part.data())
    except OSError as error:
        return f"{folder} cannot be written on {socket.gethostname()}: {error.strerror or error}"
    return shards.ShardEntry(shard.number, done, len(errors), tokens, sha256, digest)


def _compute(
    loaded: Predictor, inputs: Sequence[Record], seed: int, progress: Callable[[int], None]
) -> list[Row | Problem]:
    """Compute the result row of each record; end this process after a CUDA error.

    A CUDA error makes the process's CUDA context unusable. Dask then starts another process and
    assigns the shard to a free worker.
    """
    try:
        seeds = [record_seed(seed, record.index) for record in inputs]
        return loaded.rows([record.value for record in inputs], seeds, progress)
    except Exception as error:
        if "CUDA" in type(error).__name__:
            print(f"{socket.gethostname()}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        raise


def _add(part: shards.Part, record: Record, row: Row) -> int | Problem:
    """Add a record to a part file; return its number of tokens, or a Problem if adding fails."""
    try:
        part.add(record.index, record.kept, row)
    except BaseException as error:
        reason, no_memory = problem_of(error)
        return Problem(f"its fields cannot be written: {reason}", no_memory)
    return int(row["n_tokens"])
