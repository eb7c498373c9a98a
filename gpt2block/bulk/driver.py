"""`run`: execute a job on Dask, from its input to its output. Arguments are checked first."""

from __future__ import annotations

import hashlib
import json
import queue
import reprlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol
from uuid import uuid4

from distributed import CancelledError, Client, Future, KilledWorker, TimeoutError

from gpt2block.bulk import cluster, paths, records, shards
from gpt2block.bulk.job import Failed, Job, engine_of, threads_of
from gpt2block.bulk.records import Shard
from gpt2block.errors import CheckpointError, InputError, PrintableError

RETRIES = 2  # of a shard that raised an error that a retry may avoid
ANSWER_SECONDS = 60  # for the scheduler to transfer a finished result
AHEAD = 4  # shards submitted for each thread: no worker is idle, and the scheduler holds few
RECOUNT_SECONDS = 5.0  # between two counts of the workers' threads
NAMED = 3  # files listed in a message at most
LOST = "the connection to the scheduler is lost"


class JobError(PrintableError, RuntimeError):
    """The job has stopped. The same command continues it."""


@dataclass(frozen=True)
class Outcome:
    """The counts of the whole output, and of what this run computed."""

    records: int
    errors: int
    failed: dict[int, str]  # shard → reason, for shards that could not be computed
    done_now: int  # records of this run, including errors
    tokens_now: int  # of this run
    seconds: float  # computing time of this run
    start_up: float  # seconds until the workers had loaded the model
    first_error: str  # of the first record with an error; "" without errors


class Watcher(Protocol):
    """Receives the progress of a job."""

    def say(self, line: str) -> None:
        """Report a message of one line."""

    def begin(self, lines: int, finished: int) -> None:
        """Computing begins: the number of all lines, and of those that earlier runs finished."""

    def advance(self, lines: int, records: int, tokens: int) -> None:
        """A shard is finished, with these numbers of lines, records and tokens."""

    def wait(self, records: int) -> None:
        """Called once a second; records: those computed in unfinished shards."""


def run(
    job: Job,
    inputs: Sequence[str],
    watcher: Watcher,
    workers: int | None = None,
    scheduler: str | None = None,
) -> Outcome:
    """Compute the shards of a job that its output does not hold yet.

    Raises InputError, CheckpointError, DeviceError before anything is computed, and JobError when
    the job cannot continue: the disk is full, or the scheduler is lost.
    """
    begun = perf_counter()
    paths.require_working_directory()
    job = job.checked()
    if scheduler is not None and workers is not None:
        raise InputError(
            "--workers is for a local cluster: a cluster given by --scheduler has its own workers"
        )
    engine = engine_of(job.device) if scheduler is None else None
    folder = Path(job.output)
    with shards.output_errors(folder):
        _check_output(folder)
    token = uuid4().hex
    with shards.locked(folder, token):
        files = records.find_files(inputs, watcher.say)
        records.check_kept(files, job.column, job.keep)
        if job.tokenizer_sha256 is None and records.any_text(files):
            job = job.checked(has_text=True)
        if job.form == "parquet":
            job = replace(job, typed=records.are_typed(files, job.keep))
        sizes = records.sizes(files)
        cut = records.cut(files, job.shard_size, [job.column, *job.keep])
        if job.tokenizer_sha256 is None and records.begins_with_text(cut, job.column):
            with suppress(CheckpointError):  # a record of text then has this error
                job = job.checked(has_text=True)
        task = _Input(records.described(sizes), cut)
        manifest = _open_manifest(folder, job, task, engine, watcher)
        work = _Work(job, token, manifest, watcher)
        todo = [shard for shard in cut if shard.number not in manifest.done]
        if todo:
            connection = (
                cluster.local(workers, engine, threads_of(job.task, engine), _most(job, todo))
                if engine
                else cluster.running(str(scheduler))
            )
            lost = _job_errors(f"{folder}: {LOST}", OSError, TimeoutError, CancelledError)
            with lost, connection as client:
                engine = cluster.check(client, job.device)
                work.job = job = replace(job, device=engine)  # every worker uses this engine
                _compare(manifest, task.job(job, engine))
                watcher.say(f"dashboard {client.dashboard_link}")
                expected = [(str(path), size) for path, size in sizes]
                devices = cluster.prepare(client, job, expected, token)
                start_up = perf_counter() - begun
                watcher.say(f"{len(devices)} x {devices[0]}, ready after {start_up:.1f} s")
                with _job_errors(f"{folder} cannot be written", OSError):
                    manifest.begin(task.job(job, engine))
                work.start_up = start_up
                watcher.begin(task.lines, task.lines - sum(shard.lines for shard in todo))
                work.compute(client, todo)
        with _job_errors(f"{folder} cannot be written", OSError):
            if manifest.job is None:  # an input without lines
                manifest.begin(task.job(job, engine))
            manifest.finish()
        return work.outcome()


class _Input:
    """The input of a job, cut into shards."""

    def __init__(self, described: dict[str, Any], cut: Sequence[Shard]) -> None:
        self._described = described
        self._sha256 = hashlib.sha256("".join(shard.sha256 for shard in cut).encode()).hexdigest()
        self.shard_lines = [shard.lines for shard in cut]
        self.lines = sum(self.shard_lines)

    def job(self, job: Job, engine: str | None) -> dict[str, Any]:
        """Return the manifest's description of a job on this input."""
        return job.described(self._described, self._sha256, self.lines, engine)


def _open_manifest(
    folder: Path, job: Job, task: _Input, engine: str | None, watcher: Watcher
) -> shards.Manifest:
    """Return the folder's manifest without damaged shards. InputError if it is of another job."""
    manifest = shards.Manifest(folder)
    _compare(manifest, task.job(job, engine))
    manifest.check(task.shard_lines)
    for name in manifest.forget_damaged(job.form):
        watcher.say(f"{name} was changed or removed after it was written: it is computed again")
    unknown = manifest.unknown_parts(job.form, len(task.shard_lines))
    if unknown:
        names = ", ".join(unknown[:NAMED]) + ", …" * (len(unknown) > NAMED)
        watcher.say(f"{folder} has {len(unknown):,} part files that are not of this job: {names}")
    with shards.output_errors(folder):
        shards.remove_leftovers(folder)
    return manifest


def _most(job: Job, todo: Sequence[Shard]) -> int:
    """Return the useful number of CPU workers: one per shard, and models that fit in memory."""
    return max(1, min(len(todo), cluster.memory_bytes() // (2 * job.memory_bytes())))


class _Work:
    """Submits shards to the workers and collects the results."""

    def __init__(self, job: Job, token: str, manifest: shards.Manifest, watcher: Watcher) -> None:
        self.job, self._token, self._manifest, self._watcher = job, token, manifest, watcher
        self._failed: dict[int, str] = {}
        self._ended: queue.SimpleQueue[Future] = queue.SimpleQueue()
        self._submitted: dict[Future, Shard] = {}
        self._records = self._tokens = 0
        self._seconds = 0.0
        # Dask reports every shard that was assigned to a dead worker, not only the one it computed.
        self._suspects: deque[Shard] = deque()
        self._tried_alone: set[int] = set()
        self._threads, self._counted = 1, -RECOUNT_SECONDS
        self.start_up = 0.0

    def compute(self, client: Client, todo: Sequence[Shard]) -> None:
        """Compute all of these shards. Raises JobError when the job cannot continue."""
        begun = perf_counter()
        waiting = deque(todo)
        try:
            while waiting or self._submitted or self._suspects:
                while waiting and len(self._submitted) < self._capacity(client):
                    self._submit(client, waiting.popleft())
                if not self._submitted:  # one at a time: a worker that dies now died of this shard
                    self._submit(client, self._suspects.popleft())
                self._collect(client)
        except BaseException:
            cluster.silence()
            if client.status == "running":
                client.cancel(list(self._submitted), force=True)
            raise
        finally:
            self._seconds = perf_counter() - begun

    def _capacity(self, client: Client) -> int:
        """Return how many shards may be submitted at once; workers may join or leave."""
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
            # A key that no other client and no earlier attempt uses.
            key=f"gpt2block-{self._token}-{shard.number}-{shard.number in self._tried_alone:d}",
            retries=RETRIES,
            priority=-shard.number,
            pure=False,
        )
        self._submitted[future] = shard
        future.add_done_callback(self._ended.put)

    def _collect(self, client: Client) -> None:
        """Wait at most one second for a shard to end, and process its result."""
        try:
            future = self._ended.get(timeout=1)
        except queue.Empty:
            self._watcher.wait(self._records_in_progress(client))
            if client.status != "running":
                raise self._stopped(LOST) from None
            return
        shard = self._submitted.pop(future)
        if future.status == "error":  # raised by a worker, after all retries
            error = future.exception()
            if isinstance(error, KilledWorker):
                if shard.number not in self._tried_alone:
                    self._tried_alone.add(shard.number)
                    self._suspects.append(shard)
                    return
                error = JobError("every worker that computed it died, perhaps because of a record")
            self._fail(shard, f"{type(error).__name__}: {error}")
            return
        try:
            result = future.result(timeout=ANSWER_SECONDS)
        except (OSError, TimeoutError, CancelledError) as error:
            raise self._stopped(LOST) from error
        self._finished(shard, result)

    def _records_in_progress(self, client: Client) -> int:
        """Return how many records of unfinished shards are computed."""
        counts = cluster.progress(client, self._token)
        return sum(counts.get(shard.number, 0) for shard in self._submitted.values())

    def _fail(self, shard: Shard, reason: str) -> None:
        self._failed[shard.number] = reason
        self._watcher.say(f"shard {shard.number} failed: {reason}")

    def _finished(self, shard: Shard, result: shards.Done | Failed | str) -> None:
        if isinstance(result, str):
            raise self._stopped(result)
        if isinstance(result, Failed):
            self._fail(shard, result.reason)
            return
        try:
            self._manifest.add(result)
        except OSError as error:
            raise self._stopped(f"{self._manifest.path}: {paths.reason(error)}") from error
        self._records += result.records + result.errors
        self._tokens += result.tokens
        self._watcher.advance(shard.lines, result.records + result.errors, result.tokens)

    def _stopped(self, reason: str) -> JobError:
        done = len(self._manifest.done)
        return JobError(f"{reason}; {done:,} shards are done: the same command continues the job")

    def outcome(self) -> Outcome:
        done = self._manifest.done.values()
        return Outcome(
            sum(entry.records for entry in done),
            sum(entry.errors for entry in done),
            self._failed,
            self._records,
            self._tokens,
            self._seconds,
            self.start_up,
            self._first_error(),
        )

    def _first_error(self) -> str:
        done = self._manifest.done
        shard = min((number for number, entry in done.items() if entry.errors), default=None)
        if shard is None:
            return ""
        path = Path(self.job.output) / shards.errors_name(shard)
        with path.open(encoding="utf-8") as file:
            error = json.loads(file.readline())
        return f"{error['file']}, line {error['line']}: {error['reason']}"


@contextmanager
def _job_errors(problem: str, *errors: type[Exception]) -> Iterator[None]:
    """Convert these errors to JobErrors."""
    try:
        yield
    except errors as error:
        message = f"{problem}: {paths.reason(error)}: the same command continues the job"
        raise JobError(message) from error


def _check_output(folder: Path) -> None:
    """Raise InputError unless the folder is new, empty or holds a job."""
    if folder.is_symlink() and not folder.exists():
        raise InputError(f"--output {folder}: a broken link, expected a folder")
    if not folder.exists() or (folder / shards.MANIFEST).exists():
        return
    if not folder.is_dir():
        raise InputError(f"--output {folder}: not a folder")
    if any(path.name != shards.LOCK for path in folder.iterdir()):
        raise InputError(
            f"--output {folder}: not empty, and not written by gpt2block map: choose another folder"
        )


def _compare(manifest: shards.Manifest, ours: dict[str, Any]) -> None:
    """Raise InputError where the manifest is of another job. An engine of None matches any."""
    theirs = manifest.job
    if theirs is None:
        return
    flat, other = _flat(ours), _flat(theirs)
    for name in {**flat, **other}:
        if name == "engine" and flat[name] is None:
            continue
        was, now = (
            f"{reprlib.repr(entries[name]):.40}" if name in entries else "absent"
            for entries in (other, flat)
        )
        if (name in flat) != (name in other) or flat[name] != other[name]:
            raise InputError(
                f"{manifest.path} is of another job: {name} was {was}, now it is {now}: "
                "choose another --output"
            )


def _flat(job: dict[str, Any]) -> dict[str, Any]:
    """Flatten nested objects: their entries are named `outer.inner`."""
    found: dict[str, Any] = {}
    for name, value in job.items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": entry for key, entry in value.items()}
        else:
            found[name] = value
    return found
