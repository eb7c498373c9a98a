"""`run`: a job from its input to its output, on Dask. What is refused is refused before work."""

from __future__ import annotations

import hashlib
import queue
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol
from uuid import uuid4

from distributed import CancelledError, Client, Future, KilledWorker, TimeoutError

from gpt2block.bulk import cluster, records, shards
from gpt2block.bulk.job import Job, engine_of, run_shard, threads_of
from gpt2block.bulk.records import Shard
from gpt2block.errors import InputError

RETRIES = 2  # of a shard that raised
ANSWER_SECONDS = 60  # for the scheduler to hand over a result that is there
AHEAD = 4  # shards a worker has or gets next: it never waits, and the scheduler holds few
RECOUNT_SECONDS = 5.0


class JobError(RuntimeError):
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


class Watcher(Protocol):
    """Hears how the job goes."""

    def say(self, line: str) -> None:
        """Something that is worth a line."""

    def begin(self, lines: int, finished: int) -> None:
        """Work begins: so many lines in all, so many done by earlier runs."""

    def advance(self, lines: int, records: int, tokens: int) -> None:
        """A shard is done."""

    def wait(self) -> None:
        """A second has passed."""


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
    job = given.checked()
    if scheduler is not None and workers is not None:
        raise InputError("--workers is for a local cluster: --scheduler names one that has its own")
    engine = engine_of(job.device) if scheduler is None else None
    folder = Path(job.output)
    _refuse_strange(folder)
    files = records.find_files(inputs)
    cut = records.cut(files, job.shard_size, [job.column, *job.keep])
    digest = hashlib.sha256("".join(shard.sha256 for shard in cut).encode()).hexdigest()
    lines = sum(shard.lines for shard in cut)
    token = uuid4().hex
    with shards.locked(folder, token):
        manifest = shards.Manifest(folder)
        _compare(manifest, job.described(digest, lines, engine))
        for name in manifest.forget_damaged(job.form):
            watcher.say(f"{name} is not as it was written: it is done again")
        shards.remove_leftovers(folder)
        work = _Work(job, token, manifest, watcher)
        todo = [shard for shard in cut if shard.number not in manifest.done]
        if todo:
            place = (
                cluster.local(workers, engine, threads_of(job.task, engine))
                if engine
                else cluster.running(str(scheduler))
            )
            with _connected(folder), place as client:
                engine = cluster.check(client, job.device)
                work.job = job = replace(job, device=engine)  # a worker never takes another
                described = job.described(digest, lines, engine)
                _compare(manifest, described)
                watcher.say(f"dashboard {client.dashboard_link}")
                sizes = [(str(path), path.stat().st_size) for path in files]
                devices = cluster.prepare(client, job, sizes, token)
                start_up = perf_counter() - begun
                watcher.say(f"{len(devices)} x {devices[0]}, ready after {start_up:.1f} s")
                with _storing(folder):
                    manifest.begin(described)
                work.start_up = start_up
                watcher.begin(lines, lines - sum(shard.lines for shard in todo))
                work.do(client, todo)
        elif manifest.job is None:  # an input without a line
            manifest.begin(job.described(digest, lines, engine))
        with _storing(folder):
            manifest.finish()
        return work.outcome()


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
            cluster.hush()
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
            run_shard,
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
            self._watcher.wait()
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
            self._failed[shard.number] = f"{type(error).__name__}: {error}"
            self._watcher.say(f"shard {shard.number} failed: {self._failed[shard.number]}")
            return
        try:
            result = future.result(timeout=ANSWER_SECONDS)
        except (OSError, TimeoutError, CancelledError) as error:
            raise self._stopped("the scheduler is gone") from error
        self._finished(shard, result)

    def _finished(self, shard: Shard, result: shards.Done | str) -> None:
        if isinstance(result, str):
            raise self._stopped(result)
        try:
            self._manifest.add(result)
        except OSError as error:
            raise self._stopped(f"{self._manifest.path}: {error.strerror}") from error
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
        )


@contextmanager
def _storing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JobError(
            f"{folder} cannot be written: {error.strerror or error}: the same command goes on"
        ) from error


@contextmanager
def _connected(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, TimeoutError, CancelledError) as error:
        raise JobError(f"{folder}: the scheduler is gone: the same command goes on") from error


def _refuse_strange(folder: Path) -> None:
    """InputError for a folder that holds something, but no job."""
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
        if flat.get(name) != other.get(name):
            raise InputError(
                f"{manifest.path} is of another job: {name} was {other.get(name)!r:.40}, now it is "
                f"{flat.get(name)!r:.40}: choose another --output"
            )


def _flat(job: dict[str, Any]) -> dict[str, Any]:
    options = job.get("options")
    named = {f"options.{key}": value for key, value in options.items()} if options else {}
    return {**{key: value for key, value in job.items() if key != "options"}, **named}
