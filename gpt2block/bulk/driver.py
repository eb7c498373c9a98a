"""Run a job on Dask: check its arguments, divide its input into shards, compute and write them."""

from __future__ import annotations

import hashlib
import json
import queue
import reprlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol
from uuid import uuid4

from distributed import CancelledError, Client, Future, KilledWorker, TimeoutError
from distributed.system import MEMORY_LIMIT

from gpt2block.bulk import cluster, paths, records, shards
from gpt2block.bulk.job import Failed, Job, engine_of, gpus_of, threads_of
from gpt2block.bulk.records import Shard
from gpt2block.cuda.devices import reads_blocks
from gpt2block.cuda.formats import USUAL
from gpt2block.engine.model import weight_bytes
from gpt2block.errors import Argument, CheckpointError, InputError, PrintableError
from gpt2block.files.checkpoints import Checkpoint

RETRIES = 2  # maximum number of retries of a shard after an error that a retry may avoid
ANSWER_SECONDS = 60  # time limit for the scheduler to transfer a finished result
AHEAD = 4  # shards submitted per thread: keeps workers busy and the scheduler's queue short
RECOUNT_SECONDS = 5.0  # interval between two counts of the workers' threads
LOST = "the connection to the scheduler is lost"


class JobError(PrintableError, RuntimeError):
    """Raised when a job stops. Running the same command again continues the job."""


@dataclass
class Outcome:
    """Counts of records, errors and tokens in the whole output and in this run."""

    records: int = 0  # records with a result in the whole output
    errors: int = 0  # records with an error in the whole output
    failed: dict[int, str] = field(default_factory=dict)  # number of a failed shard → reason
    done_now: int = 0  # records processed by this run, including records with an error
    tokens_now: int = 0  # tokens computed by this run
    seconds: float = 0.0  # computing time of this run in seconds
    start_up: float = 0.0  # seconds until the workers had loaded the model
    first_error: str = ""  # file, line and message of the first record with an error
    lines: int = 0  # lines of the input
    lines_done: int = 0  # lines in finished shards, including shards of earlier runs


class Watcher(Protocol):
    """Interface of an object that receives the progress of a job."""

    def say(self, line: str) -> None:
        """Report a message of one line."""

    def show(self, outcome: Outcome, inside: int) -> None:
        """Show the counts. Called when computing begins, after each shard and once a second.

        inside: the number of records computed in unfinished shards.
        """


def run(
    job: Job,
    inputs: Sequence[str],
    watcher: Watcher,
    workers: int | None = None,
    scheduler: str | None = None,
) -> Outcome:
    """Compute the shards (ranges of input lines) of a job that its output does not have yet.

    Raises InputError, CheckpointError, DeviceError before anything is computed, and JobError if
    the job cannot continue because the disk is full or the scheduler is lost.
    """
    begun = perf_counter()
    paths.require_working_directory()
    job = job.checked()
    if scheduler is not None and workers is not None:
        raise InputError(
            "--workers is for a local cluster: a cluster given by --scheduler has its own workers"
        )
    engine = engine_of(job.device) if scheduler is None else None
    if engine is not None:
        job = replace(job, formats=job.formats.resolved(reads_blocks(engine)))
    folder, token = Path(job.output), uuid4().hex
    with shards.folder_lock(folder, token):
        job, sizes, cut = _read_input(job, inputs, watcher)
        lines = sum(shard.lines for shard in cut)
        input_sha256 = hashlib.sha256("".join(shard.sha256 for shard in cut).encode()).hexdigest()
        described = job.described(records.described(sizes), input_sha256, lines, engine)
        manifest = _open_manifest(folder, described, cut, watcher)
        work = _Work(job, token, manifest, watcher)
        todo = [shard for shard in cut if shard.number not in manifest.done]
        work.outcome.lines = lines
        work.outcome.lines_done = finished = lines - sum(shard.lines for shard in todo)
        if todo:
            gpus = gpus_of(job.device)
            connection = (
                cluster.local(workers, engine, threads_of(job.task, engine), _most(job, todo), gpus)
                if engine
                else cluster.running(str(scheduler))
            )
            lost = _job_errors(f"{folder}: {LOST}", OSError, TimeoutError, CancelledError)
            with lost, connection as client:
                engine, read = cluster.check(client, job.device)
                formats = job.formats.resolved(read)
                described |= {"engine": engine, "dtype": formats.dtype}
                # Make every worker use the same engine and formats.
                device = engine if gpus == 1 else job.device
                work.job = job = replace(job, device=device, formats=formats)
                _compare(manifest, described)
                watcher.say(f"dashboard {client.dashboard_link}")
                devices = cluster.prepare(client, job, [(str(p), size) for p, size in sizes], token)
                work.outcome.start_up = perf_counter() - begun
                ready = f"ready after {work.outcome.start_up:.1f} s"
                watcher.say(f"{len(devices)} x {devices[0]}, {ready}")
                with _job_errors(f"{folder} cannot be written", OSError):
                    manifest.write(described)
                if finished:
                    watcher.say(f"{finished:,} of {lines:,} lines are done already")
                work.compute(client, todo)
        with _job_errors(f"{folder} cannot be written", OSError):
            # Sort the manifest's entries by shard, or write the first manifest of an empty input.
            manifest.write(manifest.job or described)
        return work.finished()


def _read_input(
    job: Job, inputs: Sequence[str], watcher: Watcher
) -> tuple[Job, list[tuple[Path, int]], list[Shard]]:
    """Return the job, a list of (input file, size in bytes), and the list of shards.

    The job is completed by what the input requires: column types and the tokenizer. Raises
    InputError, CheckpointError.
    """
    files = records.find_files(inputs, watcher.say)
    records.check_kept(files, job.column, job.keep)
    if job.form == "parquet":
        job = replace(job, typed=records.are_typed(files, job.keep))
    sizes = records.sizes(files)
    cut = records.cut(files, job.shard_size, [job.column, *job.keep])
    of_text = any(records.kind_of(path) == "text" for path in files)
    if job.tokenizer_sha256 is None and (of_text or records.begins_with_text(cut, job.column)):
        try:
            job = job.checked(has_text=True)
        except CheckpointError:
            if of_text:  # in JSONL or Parquet, each record with a text reports this error
                raise
    return job, sizes, cut


def _open_manifest(
    folder: Path, described: dict[str, Any], cut: Sequence[Shard], watcher: Watcher
) -> shards.Manifest:
    """Return the manifest without damaged shards. Raises InputError if another job wrote it."""
    manifest, form = shards.Manifest(folder), described["form"]
    _compare(manifest, described)
    manifest.check([shard.lines for shard in cut])
    for name in manifest.forget_damaged(form):
        watcher.say(f"{name} was changed or removed after it was written: its shard is recomputed")
    unknown = manifest.unknown_parts(form, len(cut))
    if unknown:
        many = f"{folder} has {len(unknown):,} part files that are not of this job"
        watcher.say(f"{many}: {paths.listed(unknown)}")
    with shards.output_errors(folder):
        shards.remove_leftovers(folder)
    return manifest


def _most(job: Job, todo: Sequence[Shard]) -> int:
    """Return the maximum number of CPU workers: as many as shards, or fewer if memory is small."""
    weights = weight_bytes(Checkpoint.open(job.model, job.revision).config, USUAL)
    return max(1, min(len(todo), int(MEMORY_LIMIT) // (2 * weights)))


class _Work:
    """Submit shards to the Dask workers, and collect the results."""

    def __init__(self, job: Job, token: str, manifest: shards.Manifest, watcher: Watcher) -> None:
        self.job, self._token, self._manifest, self._watcher = job, token, manifest, watcher
        self.outcome = Outcome()
        self._ended: queue.SimpleQueue[Future] = queue.SimpleQueue()
        self._submitted: dict[Future, Shard] = {}
        # Shards to compute again, one at a time, because a worker died: Dask reports all shards
        # assigned to the worker, not only the shard that the worker was computing.
        self._suspects: deque[Shard] = deque()
        self._tried_alone: set[int] = set()
        self._threads, self._counted = 1, -RECOUNT_SECONDS

    def compute(self, client: Client, todo: Sequence[Shard]) -> None:
        """Compute the shards of `todo`. Raises JobError if the job cannot continue."""
        begun = perf_counter()
        waiting = deque(todo)
        self._watcher.show(self.outcome, inside=0)
        try:
            while waiting or self._submitted or self._suspects:
                while waiting and len(self._submitted) < self._capacity(client):
                    self._submit(client, waiting.popleft())
                # Compute a suspected shard alone: if a worker dies now, this shard is the cause.
                if not self._submitted:
                    self._submit(client, self._suspects.popleft())
                self._collect(client)
        except BaseException:
            cluster.silence()
            if client.status == "running":
                client.cancel(list(self._submitted), force=True)
            raise
        self.outcome.seconds = perf_counter() - begun

    def _capacity(self, client: Client) -> int:
        """Return how many shards may be submitted at once: AHEAD per thread of current workers."""
        if perf_counter() > self._counted + RECOUNT_SECONDS:
            self._counted = perf_counter()
            self._threads = max(1, sum(client.nthreads().values()))
        return AHEAD * self._threads

    def _submit(self, client: Client, shard: Shard) -> None:
        future = client.submit(
            cluster.run_shard,
            self.job,
            shard,
            self._token,
            # This key differs from the keys of other clients and of earlier attempts.
            key=f"gpt2block-{self._token}-{shard.number}-{shard.number in self._tried_alone:d}",
            retries=RETRIES,
            priority=-shard.number,
            pure=False,
        )
        self._submitted[future] = shard
        future.add_done_callback(self._ended.put)

    def _collect(self, client: Client) -> None:
        """Wait at most one second until a worker finishes or fails a shard; process the result."""
        try:
            future = self._ended.get(timeout=1)
        except queue.Empty:
            counts = cluster.progress(client, self._token)
            inside = sum(counts.get(shard.number, 0) for shard in self._submitted.values())
            self._watcher.show(self.outcome, inside)
            if client.status != "running":
                raise self._stop_error(LOST) from None
            return
        shard = self._submitted.pop(future)
        if future.status == "error":  # every retry failed, or workers died
            error = future.exception()
            if isinstance(error, KilledWorker):
                if shard.number not in self._tried_alone:
                    self._tried_alone.add(shard.number)
                    self._suspects.append(shard)
                    return
                error = JobError("every worker that computed it died, perhaps because of a record")
            self._take(shard, Failed(f"{type(error).__name__}: {error}"))
            return
        try:
            result = future.result(timeout=ANSWER_SECONDS)
        except (OSError, TimeoutError, CancelledError) as error:
            raise self._stop_error(LOST) from error
        self._take(shard, result)

    def _take(self, shard: Shard, result: shards.ShardEntry | Failed | str) -> None:
        """Process a shard's result: its manifest entry, a failure or a reason to stop the job."""
        if isinstance(result, str):
            raise self._stop_error(result)
        if isinstance(result, Failed):
            self.outcome.failed[shard.number] = result.reason
            self._watcher.say(f"shard {shard.number} failed: {result.reason}")
            return
        try:
            self._manifest.add(result)
        except OSError as error:
            raise self._stop_error(f"{self._manifest.path}: {paths.reason(error)}") from error
        self.outcome.done_now += result.records + result.errors
        self.outcome.tokens_now += result.tokens
        self.outcome.lines_done += shard.lines
        self._watcher.show(self.outcome, inside=0)

    def _stop_error(self, reason: str) -> JobError:
        done = len(self._manifest.done)
        return JobError(f"{reason}; {done:,} shards are done: the same command continues the job")

    def finished(self) -> Outcome:
        """Add the counts of the whole output to the outcome, and return the outcome."""
        done = self._manifest.done
        self.outcome.records = sum(entry.records for entry in done.values())
        self.outcome.errors = sum(entry.errors for entry in done.values())
        shard = min((number for number, entry in done.items() if entry.errors), default=None)
        if shard is not None:
            path = Path(self.job.output) / shards.errors_name(shard)
            with path.open(encoding="utf-8") as file:
                error = json.loads(file.readline())
            self.outcome.first_error = f"{error['file']}, line {error['line']}: {error['reason']}"
        return self.outcome


@contextmanager
def _job_errors(problem: str, *errors: type[Exception]) -> Iterator[None]:
    """Convert exceptions of the types `errors` to JobErrors that begin with `problem`."""
    try:
        yield
    except errors as error:
        message = f"{problem}: {paths.reason(error)}: the same command continues the job"
        raise JobError(message) from error


def _compare(manifest: shards.Manifest, ours: dict[str, object]) -> None:
    """Raise InputError if the manifest belongs to another job.

    An engine or dtype of None, not yet known from the workers, matches any value.
    """
    if manifest.job is None:
        return
    now, was = _flat(ours), _flat(manifest.job)
    for name in ("engine", "dtype"):
        if ours[name] is None:
            del now[name]
            was.pop(name, None)
    # Compare the version first: another version of gpt2block may have other arguments.
    for name in {"gpt2block": None, **now, **was}:
        if (name in now) != (name in was) or now[name] != was[name]:
            before, after = (
                f"{reprlib.repr(entries[name]):.40}" if name in entries else "absent"
                for entries in (was, now)
            )
            raise InputError(
                f"{manifest.path} is of another job: ",
                Argument(name),
                f" was {before}, now it is {after}: choose another --output",
            )


def _flat(job: dict[str, object]) -> dict[str, object]:
    """Return a flat copy of a nested mapping: key `inner` in `outer` becomes `outer.inner`."""
    flat: dict[str, object] = {}
    for name, value in job.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": entry for key, entry in value.items()}
        else:
            flat[name] = value
    return flat
