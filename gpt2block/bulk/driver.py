"""`run`: a job from its input to its output, on Dask. What is refused is refused before work."""

from __future__ import annotations

import hashlib
import json
import queue
import reprlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol
from uuid import uuid4

from distributed import CancelledError, Client, Future, KilledWorker, TimeoutError

from gpt2block.bulk import cluster, paths, records, shards
from gpt2block.bulk.job import Failed, Job, engine_of, threads_of
from gpt2block.bulk.records import Shard
from gpt2block.errors import InputError, PrintableError

RETRIES = 2  # of a shard that raised what another try can change
ANSWER_SECONDS = 60  # for the scheduler to hand over a result that is there
AHEAD = 4  # shards a worker has or gets next: it never waits, and the scheduler holds few
RECOUNT_SECONDS = 5.0
NAMED = 3  # files in a message


class JobError(PrintableError, RuntimeError):
    """The job has stopped. The same command goes on from where it was."""


@dataclass(frozen=True)
class Outcome:
    """What the output now holds, and what this run did of it."""

    records: int
    errors: int
    failed: dict[int, str]  # shard → why, for those that could not be computed
    done_now: int  # records of this run, errors included
    tokens_now: int
    seconds: float  # computing
    start_up: float  # seconds until the workers had loaded the model
    first_error: str  # of the first record that has one; "" where none has


class Watcher(Protocol):
    """Hears how the job goes."""

    def say(self, line: str) -> None:
        """Something that is worth a line."""

    def begin(self, lines: int, finished: int) -> None:
        """Work begins: so many lines in all, so many done by earlier runs."""

    def advance(self, lines: int, records: int, tokens: int) -> None:
        """A shard is done."""

    def wait(self, records: int) -> None:
        """A second has passed; so many records of unfinished shards are computed."""


def run(
    given: Job,
    inputs: Sequence[str],
    watcher: Watcher,
    workers: int | None = None,
    scheduler: str | None = None,
) -> Outcome:
    """Do what is not done of a job.

    Raises InputError, CheckpointError, DeviceError before any work, and JobError when it cannot
    go on: a full disk, a scheduler that is gone.
    """
    begun = perf_counter()
    paths.require_working_directory()
    job = given.checked()
    if scheduler is not None and workers is not None:
        raise InputError("--workers is for a local cluster: --scheduler names one that has its own")
    engine = engine_of(job.device) if scheduler is None else None
    folder = Path(job.output)
    with shards.refusing(folder):
        _refuse_strange(folder)
    token = uuid4().hex
    with shards.locked(folder, token):
        files = records.find_files(inputs, watcher.say)
        records.check_kept(files, job.column, job.keep)
        if job.tokenizer_sha256 is None and records.any_text(files):
            job.require_tokenizer()
        if job.form == "parquet":
            job = replace(job, typed=records.are_typed(files, job.keep))
        sizes = records.sizes(files)
        cut = records.cut(files, job.shard_size, [job.column, *job.keep])
        task = _Input(records.described(sizes), cut)
        manifest = _manifest(folder, job, task, engine, watcher)
        work = _Work(job, token, manifest, watcher)
        todo = [shard for shard in cut if shard.number not in manifest.done]
        if todo:
            place = (
                cluster.local(workers, engine, threads_of(job.task, engine), _most(job, todo))
                if engine
                else cluster.running(str(scheduler))
            )
            with _connected(folder), place as client:
                engine = cluster.check(client, job.device)
                work.job = job = replace(job, device=engine)  # a worker never takes another
                _compare(manifest, task.job(job, engine))
                watcher.say(f"dashboard {client.dashboard_link}")
                there = [(str(path), size) for path, size in sizes]
                devices = cluster.prepare(client, job, there, token)
                start_up = perf_counter() - begun
                watcher.say(f"{len(devices)} x {devices[0]}, ready after {start_up:.1f} s")
                with _storing(folder):
                    manifest.begin(task.job(job, engine))
                work.start_up = start_up
                watcher.begin(task.lines, task.lines - sum(shard.lines for shard in todo))
                work.do(client, todo)
        with _storing(folder):
            if manifest.job is None:  # an input without a line
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
        """What the manifest says of a job on this input."""
        return job.described(self._described, self._sha256, self.lines, engine)


def _manifest(
    folder: Path, job: Job, task: _Input, engine: str | None, watcher: Watcher
) -> shards.Manifest:
    """The manifest in the folder, without what is damaged. InputError if it is of another job."""
    manifest = shards.Manifest(folder)
    _compare(manifest, task.job(job, engine))
    manifest.check(task.shard_lines)
    for name in manifest.forget_damaged(job.form):
        watcher.say(f"{name} is not as it was written: it is done again")
    strange = manifest.strange_parts(job.form, len(task.shard_lines))
    if strange:
        names = ", ".join(strange[:NAMED]) + ", …" * (len(strange) > NAMED)
        watcher.say(f"{folder} has {len(strange):,} part files that are not of this job: {names}")
    with shards.refusing(folder):
        shards.remove_leftovers(folder)
    return manifest


def _most(job: Job, todo: Sequence[Shard]) -> int:
    """How many workers on the CPU can be of use: one a shard, and as many as the memory holds."""
    return max(1, min(len(todo), cluster.memory_bytes() // (2 * job.memory_bytes())))


class _Work:
    """Shards in the hands of workers."""

    def __init__(self, job: Job, token: str, manifest: shards.Manifest, watcher: Watcher) -> None:
        self.job, self._token, self._manifest, self._watcher = job, token, manifest, watcher
        self._failed: dict[int, str] = {}
        self._ended: queue.SimpleQueue[Future] = queue.SimpleQueue()
        self._given: dict[Future, Shard] = {}
        self._records = self._tokens = 0
        self._seconds = 0.0
        self._suspects: deque[Shard] = deque()  # Dask blames all that a dead worker was to do
        self._tried_alone: set[int] = set()
        self._threads, self._counted = 1, -RECOUNT_SECONDS
        self.start_up = 0.0

    def do(self, client: Client, todo: Sequence[Shard]) -> None:
        """All of them; raises JobError when that cannot be."""
        begun = perf_counter()
        waiting = deque(todo)
        try:
            while waiting or self._given or self._suspects:
                while waiting and len(self._given) < self._room(client):
                    self._give(client, waiting.popleft())
                if not self._given:  # one by one: who dies now dies of this very shard
                    self._give(client, self._suspects.popleft())
                self._take(client)
        except BaseException:
            cluster.silence()
            if client.status == "running":
                client.cancel(list(self._given), force=True)
            raise
        finally:
            self._seconds = perf_counter() - begun

    def _room(self, client: Client) -> int:
        """How many shards may be on their way; workers come and go."""
        if perf_counter() > self._counted + RECOUNT_SECONDS:
            self._counted = perf_counter()
            self._threads = max(1, sum(client.nthreads().values()))
        return AHEAD * self._threads

    def _give(self, client: Client, shard: Shard) -> None:
        future = client.submit(
            cluster.run_shard,
            self.job,
            shard,
            self._token,
            # No other client, and no earlier try, has this name.
            key=f"gpt2block-{self._token}-{shard.number}-{shard.number in self._tried_alone:d}",
            retries=RETRIES,
            priority=-shard.number,
            pure=False,
        )
        self._given[future] = shard
        future.add_done_callback(self._ended.put)

    def _take(self, client: Client) -> None:
        """Wait for a shard to end, a second at most."""
        try:
            future = self._ended.get(timeout=1)
        except queue.Empty:
            self._watcher.wait(self._inside(client))
            if client.status != "running":
                raise self._stopped("the scheduler is gone") from None
            return
        shard = self._given.pop(future)
        if future.status == "error":  # whatever a worker raised, after its retries
            error = future.exception()
            if isinstance(error, KilledWorker):
                if shard.number not in self._tried_alone:
                    self._tried_alone.add(shard.number)
                    self._suspects.append(shard)
                    return
                error = JobError("every worker that computed it died, of its records perhaps")
            self._fail(shard, f"{type(error).__name__}: {error}")
            return
        try:
            result = future.result(timeout=ANSWER_SECONDS)
        except (OSError, TimeoutError, CancelledError) as error:
            raise self._stopped("the scheduler is gone") from error
        self._finished(shard, result)

    def _inside(self, client: Client) -> int:
        """Records computed in shards that have not ended."""
        counts = cluster.progress(client, self._token)
        return sum(counts.get(shard.number, 0) for shard in self._given.values())

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
            raise self._stopped(f"{self._manifest.path}: {paths.why(error)}") from error
        self._records += result.records + result.errors
        self._tokens += result.tokens
        self._watcher.advance(shard.lines, result.records + result.errors, result.tokens)

    def _stopped(self, why: str) -> JobError:
        done = len(self._manifest.done)
        return JobError(f"{why}; {done:,} shards are done: the same command goes on from there")

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
def _storing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JobError(
            f"{folder} cannot be written: {paths.why(error)}: the same command goes on"
        ) from error


@contextmanager
def _connected(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, TimeoutError, CancelledError) as error:
        raise JobError(f"{folder}: the scheduler is gone: the same command goes on") from error


def _refuse_strange(folder: Path) -> None:
    """InputError for a folder that holds something, but no job."""
    if folder.is_symlink() and not folder.exists():
        raise InputError(f"--output {folder}: a link that leads to no folder")
    if not folder.exists() or (folder / shards.MANIFEST).exists():
        return
    if not folder.is_dir():
        raise InputError(f"--output {folder}: not a folder")
    if any(path.name != shards.LOCK for path in folder.iterdir()):
        raise InputError(f"--output {folder}: not empty, and not of gpt2block map: choose another")


def _compare(manifest: shards.Manifest, ours: dict[str, Any]) -> None:
    """InputError where the manifest is of another job; an engine that is not known yet is any."""
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
    """The entries, those of an object inside by two names."""
    found: dict[str, Any] = {}
    for name, value in job.items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": entry for key, entry in value.items()}
        else:
            found[name] = value
    return found
