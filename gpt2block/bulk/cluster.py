"""The workers: processes of this machine, one a GPU, or those of a Dask cluster that is running."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import resource_tracker
from typing import Any

import dask
import dask.system
from distributed import CancelledError, Client, Nanny, Scheduler, SpecCluster, get_worker
from distributed.system import MEMORY_LIMIT

from gpt2block import doctor
from gpt2block.bulk import identity, job, shards
from gpt2block.bulk.job import Failed, Job
from gpt2block.bulk.records import Shard
from gpt2block.errors import DeviceError, InputError

ALLOWED_FAILURES = 10  # workers that die with a shard before it is blamed
CONNECT_SECONDS = 10
# A thread would look at the others' stacks every 10 ms, for the dashboard's profile; Python runs
# one thread at a time, and the GPU waits for it.
UNOBSERVED = {"distributed.worker.profile.enabled": False}


# Dask makes malloc give freed memory back to the system at once (a threshold of 64 KiB). A model
# computes with arrays of some MB that come and go: mapping them anew takes longer than computing.
# What the environment says goes before this.
KEEP_MEMORY = {
    f"distributed.nanny.pre-spawn-environ.{name}": 10**9
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
}
_METRIC = "gpt2block"  # of a worker: what `_computed` counts there


@contextmanager
def local(
    workers: int | None, engine: str, threads: int = 1, most: int | None = None
) -> Iterator[Client]:
    """A cluster of processes that end with this one: `workers`, or one a GPU, or one a CPU core.

    threads: shards that each has in hand. most: processes on the CPU, unless `workers` says how
    many.
    """
    gpus = visible_gpus() if engine == "cuda" else []
    count = workers or len(gpus) or min(dask.system.CPU_COUNT, most or dask.system.CPU_COUNT)
    pinned = [{"CUDA_VISIBLE_DEVICES": gpus[n % len(gpus)]} if gpus else {} for n in range(count)]
    specs = {
        number: {
            "cls": Nanny,
            "options": {
                "nthreads": threads,
                "env": env,
                "memory_limit": 0,
                "dashboard_address": None,
                "silence_logs": logging.WARNING,
                "preload": ["gpt2block.bulk.worker_setup"],
            },
        }
        for number, env in enumerate(pinned)
    }
    scheduler = {
        "cls": Scheduler,
        "options": {
            "protocol": "tcp://",
            "interface": None,
            "host": "127.0.0.1",
            "dashboard": True,
            "dashboard_address": "127.0.0.1:8787",
            "allowed_failures": ALLOWED_FAILURES,
        },
    }
    stack = ExitStack()
    try:
        with _uninterrupted():
            with warnings.catch_warnings(), dask.config.set({**UNOBSERVED, **KEEP_MEMORY}):
                # Another port is taken then.
                warnings.filterwarnings("ignore", "Port 8787 is already in use")
                cluster = stack.enter_context(_started(
                    workers=specs, scheduler=scheduler, name="gpt2block",
                    silence_logs=logging.WARNING,
                ))  # fmt: skip
            client = stack.enter_context(Client(cluster))
        yield client
    except BaseException:
        silence()
        raise
    finally:
        with _uninterrupted():
            stack.close()


def _started(**options: Any) -> SpecCluster:
    try:
        return SpecCluster(**options)
    except RuntimeError as error:
        raise DeviceError(f"the workers cannot be started: {error.__cause__ or error}") from error


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the end, as half a cluster cannot be closed.

    Processes that are started meanwhile inherit a blocked SIGINT: Ctrl-C reaches every process of
    a terminal, and it is the client's to end its workers.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    resource_tracker.ensure_running()  # which unblocks SIGINT in the thread that starts it
    held: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # Other threads, a BLAS's for example, may still take the signal: Python calls this then.
    signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
    if held:
        signal.raise_signal(signal.SIGINT)


def memory_bytes() -> int:
    """Of this machine, or of what this process may use."""
    return int(MEMORY_LIMIT)


def silence() -> None:
    """Silence Dask's logs: what is cut off in the middle reports it many times."""
    for name in ("distributed", "distributed.client", "tornado.application", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES can say of each GPU that this process sees. Raises DeviceError."""
    doctor.require_cuda("a GPU")
    count = len(doctor.probe_driver().devices)
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(n) for n in range(count)] if named is None else named.split(",")
    if not count:
        raise DeviceError("there is no CUDA device")
    return [name.strip() for name in names][:count]


@contextmanager
def running(address: str) -> Iterator[Client]:
    """The cluster at an address such as tcp://host:8786. Raises InputError."""
    try:
        with dask.config.set({"distributed.comm.timeouts.connect": CONNECT_SECONDS}):
            client = Client(address, timeout=CONNECT_SECONDS)
    except (OSError, ValueError, TimeoutError, asyncio.TimeoutError) as error:
        raise InputError(f"--scheduler {address}: no Dask scheduler answers: {error}") from error
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)  # the driver says it too
    with client:
        try:
            client.wait_for_workers(1, timeout=CONNECT_SECONDS)
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise InputError(f"--scheduler {address}: it has no workers") from error
        yield client


def check(client: Client, device: str | None) -> str:
    """The engine of all workers, "cuda" or "cpu". InputError where they, or versions, differ."""
    try:
        _compare("the scheduler", client.run_on_scheduler(identity.versions))
    except ImportError as error:
        raise InputError(f"the scheduler: {_said(error)}: it needs gpt2block, too") from error
    found = client.run(job.where, device, on_error="return")
    for address, answer in found.items():
        if isinstance(answer, BaseException):
            raise InputError(f"worker {address}: {_said(answer)}") from answer
        _compare(f"worker {address}", answer["versions"])
        if device == "cuda" and answer["engine"] != "cuda":
            raise DeviceError(f"worker {address}: {answer['no_cuda']}")
    engines = sorted({answer["engine"] for answer in found.values()})
    if len(engines) > 1:
        raise InputError("some workers have a GPU and some have none: say --device cuda or cpu")
    return str(engines[0])


def _compare(who: str, theirs: dict[str, str]) -> None:
    """InputError where a version is not ours."""
    for name, version in identity.versions().items():
        if theirs.get(name) != version:
            raise InputError(
                f"{who} has {name} {theirs.get(name)}, here it is {version}: they have to be the "
                "same"
            )


def prepare(client: Client, given: Job, files: Sequence[tuple[str, int]], token: str) -> list[str]:
    """Let every worker load the model; their devices in words. Raises InputError."""
    found = client.run(_prepare, given, files, token, on_error="return")
    for address, answer in found.items():
        if isinstance(answer, BaseException):
            kind = DeviceError if isinstance(answer, DeviceError) else InputError
            raise kind(f"worker {address}: {_said(answer)}") from answer
    return [str(answer) for answer in found.values()]


async def _prepare(given: Job, files: Sequence[tuple[str, int]], token: str) -> str:
    """In a thread, as the worker's event loop has to answer meanwhile."""
    return await asyncio.to_thread(job.prepare, given, files, token)


_computed: Counter[str] = Counter()  # in a worker: records so far, by job and shard


def run_shard(given: Job, shard: Shard, token: str) -> shards.Done | Failed | str:
    """`job.run_shard` in a worker, whose heartbeats say how many records are computed."""
    get_worker().metrics.setdefault(_METRIC, lambda worker: dict(_computed))
    key = f"{token}-{shard.number}"

    def progress(records: int) -> None:
        _computed[key] += records

    try:
        return job.run_shard(given, shard, token, progress)
    finally:
        del _computed[key]


def progress(client: Client, token: str) -> dict[int, int]:
    """Records computed of the job's unfinished shards, as the workers last reported."""
    # The caller looks after the scheduler.
    with suppress(OSError, TimeoutError, asyncio.TimeoutError, CancelledError):
        found: dict[int, int] = client.run_on_scheduler(_reported, token)
        return found
    return {}


def _reported(token: str, dask_scheduler: Any) -> dict[int, int]:
    found: dict[int, int] = {}
    for worker in dask_scheduler.workers.values():
        for key, records in worker.metrics.get(_METRIC, {}).items():
            name, _, shard = key.rpartition("-")
            if name == token:
                found[int(shard)] = records
    return found


def _said(error: BaseException) -> str:
    named = isinstance(error, (InputError, DeviceError))
    return str(error) if named else f"{type(error).__name__}: {error}"


__all__ = [
    "Client", "check", "local", "memory_bytes", "prepare", "progress", "run_shard", "running",
    "silence", "visible_gpus",
]  # fmt: skip
