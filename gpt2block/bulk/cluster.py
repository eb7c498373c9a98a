"""Start Dask workers on this machine, one for each GPU, or connect to a running Dask cluster."""

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

from gpt2block.bulk import identity, job, shards
from gpt2block.bulk.job import Failed, Job
from gpt2block.bulk.records import Shard
from gpt2block.cuda import doctor
from gpt2block.errors import DeviceError, InputError

ALLOWED_FAILURES = 10  # workers that may die while they compute a shard before the shard fails
CONNECT_SECONDS = 10
# Dask's profiler samples the stacks of all threads every 10 ms. Python runs one thread at a time,
# so the thread that launches kernels would wait for the profiler.
NO_PROFILING = {"distributed.worker.profile.enabled": False}

# Dask by default makes malloc return freed blocks of 64 KiB or more to the system at once. A model
# allocates and frees arrays of some MB all the time, and mapping their pages again takes longer
# than computing the arrays. Environment variables that the user has set take precedence.
KEEP_MEMORY = {
    f"distributed.nanny.pre-spawn-environ.{name}": 10**9
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
}
_METRIC = "gpt2block"  # name of the worker metric that reports the counter `_computed`


@contextmanager
def local(
    workers: int | None, engine: str, threads: int = 1, most: int | None = None, of_each: int = 1
) -> Iterator[Client]:
    """Start a local Dask cluster, which ends with this process, and yield its client.

    workers: the number of processes. Default: one for each `of_each` visible GPUs or, without a
    GPU, one for each CPU core. threads: the number of shards that each process works on at once.
    most: the maximum number of processes on the CPU; ignored if `workers` is set. of_each: the
    number of GPUs of a process.
    """
    gpus = gpus_of_workers(workers, of_each) if engine == "cuda" else []
    count = workers or len(gpus) or min(dask.system.CPU_COUNT, most or dask.system.CPU_COUNT)
    options = {
        "nthreads": threads, "memory_limit": 0, "dashboard_address": None,
        "silence_logs": logging.WARNING, "preload": ["gpt2block.bulk.worker_setup"],
    }  # fmt: skip
    specs = {}
    for number in range(count):
        env = {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if gpus else {}
        specs[number] = {"cls": Nanny, "options": {**options, "env": env}}
    scheduler_options = {
        "protocol": "tcp://", "interface": None, "host": "127.0.0.1", "dashboard": True,
        "dashboard_address": "127.0.0.1:8787", "allowed_failures": ALLOWED_FAILURES,
    }  # fmt: skip
    scheduler = {"cls": Scheduler, "options": scheduler_options}
    stack = ExitStack()
    try:
        # On a busy machine a worker starts again slowly: wait for it, and do not close its nanny.
        stack.enter_context(dask.config.set({"distributed.deploy.lost-worker-timeout": "1 day"}))
        with _delay_interrupts():
            with warnings.catch_warnings(), dask.config.set({**NO_PROFILING, **KEEP_MEMORY}):
                # If the dashboard's port is in use, Dask chooses another port.
                warnings.filterwarnings("ignore", "Port 8787 is already in use")
                cluster = stack.enter_context(_start_cluster(
                    workers=specs, scheduler=scheduler, name="gpt2block",
                    silence_logs=logging.WARNING,
                ))  # fmt: skip
            client = stack.enter_context(Client(cluster))
        yield client
    except BaseException:
        silence()
        raise
    finally:
        with _delay_interrupts():
            stack.close()


def _start_cluster(**options: object) -> SpecCluster:
    try:
        return SpecCluster(**options)
    except RuntimeError as error:
        raise DeviceError(f"the workers cannot be started: {error.__cause__ or error}") from error


@contextmanager
def _delay_interrupts() -> Iterator[None]:
    """Delay Ctrl-C until the end of the with block: a partly started cluster cannot be closed.

    Processes started in the with block inherit a blocked SIGINT. A terminal sends Ctrl-C to all of
    its processes, but only the client may end the workers.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    # Starting multiprocessing's resource tracker later would unblock SIGINT in this thread.
    resource_tracker.ensure_running()
    held: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # A thread of a BLAS library, for example, may still receive SIGINT and trigger this handler.
    signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
    if held:
        # os.kill sends SIGINT to the process, so that a thread in sigwait can receive it;
        # signal.raise_signal would send it to this thread only.
        os.kill(os.getpid(), signal.SIGINT)


def silence() -> None:
    """Silence Dask's logs, which would report an interrupted connection many times.

    Also silence Python's warnings about coroutines that an interrupt left without an await.
    """
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    for name in ("distributed", "distributed.client", "tornado.application", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def visible_gpus() -> list[str]:
    """Return identifiers of the visible GPUs, for CUDA_VISIBLE_DEVICES. Raises DeviceError."""
    doctor.require_cuda("a GPU")
    count = len(doctor.probe_driver().devices)
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(n) for n in range(count)] if named is None else named.split(",")
    if not count:
        raise DeviceError("there is no CUDA device")
    return [name.strip() for name in names][:count]


def gpus_of_workers(workers: int | None, of_each: int) -> list[str]:
    """Return values of CUDA_VISIBLE_DEVICES, each with `of_each` visible GPUs.

    Raises InputError if several GPUs of a worker would also be another worker's, or absent.
    """
    gpus = visible_gpus()
    needed = (workers or 1) * of_each
    if of_each > 1 and len(gpus) < needed:
        given = f"--gpus {of_each}" + (f" with --workers {workers}" if workers else "")
        raise InputError(
            f"{given}: expected at least {needed} visible GPUs, got {len(gpus)}: use fewer GPUs "
            "in a worker, or make more of them visible with CUDA_VISIBLE_DEVICES"
        )
    ends = range(of_each, len(gpus) + 1, of_each)
    return [",".join(gpus[end - of_each : end]) for end in ends]


@contextmanager
def running(address: str) -> Iterator[Client]:
    """Yield a client of the scheduler at an address such as tcp://host:8786. Raises InputError."""
    try:
        with dask.config.set({"distributed.comm.timeouts.connect": CONNECT_SECONDS}):
            client = Client(address, timeout=CONNECT_SECONDS)
    except (OSError, ValueError, TimeoutError, asyncio.TimeoutError) as error:
        raise InputError(f"--scheduler {address}: no Dask scheduler answers: {error}") from error
    # Silence Dask's report of a lost connection: gpt2block's `driver` reports the loss.
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)
    with client:
        try:
            client.wait_for_workers(1, timeout=CONNECT_SECONDS)
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise InputError(f"--scheduler {address}: it has no workers") from error
        yield client


def check(client: Client, device: str | None) -> tuple[str, bool]:
    """Return the workers' engine ("cuda" or "cpu"), and whether all can multiply GGUF weights.

    Raises InputError if the engines of workers differ, or if the version of gpt2block, Python or a
    library on a worker differs from this process; DeviceError if device names GPUs and a worker has
    no GPU.
    """
    try:
        _compare_versions("the scheduler", client.run_on_scheduler(identity.versions))
    except ImportError as error:
        raise InputError(
            f"the scheduler: {_message(error)}: install gpt2block on its machine, too"
        ) from error
    engines, read = set(), True
    for address, answer in _answers(client, job.worker_properties, device):
        _compare_versions(f"worker {address}", answer["versions"])
        if device not in (None, "cpu") and answer["engine"] != "cuda":
            raise DeviceError(f"worker {address}: {answer['no_cuda']}")
        engines.add(answer["engine"])
        read &= answer["reads_blocks"]
    if len(engines) > 1:
        raise InputError("some workers have a GPU and some have none: set --device to cuda or cpu")
    return str(engines.pop()), read


def _answers(client: Client, call: object, *arguments: object) -> Iterator[tuple[str, Any]]:
    """Call a function on every worker; yield (address, result). Raises InputError, DeviceError."""
    for address, answer in client.run(call, *arguments, on_error="return").items():
        if isinstance(answer, BaseException):
            kind = DeviceError if isinstance(answer, DeviceError) else InputError
            raise kind(f"worker {address}: {_message(answer)}") from answer
        yield address, answer


def _compare_versions(process: str, theirs: dict[str, str]) -> None:
    """Raise InputError if a version in `theirs` differs from the version in this process."""
    for name, version in identity.versions().items():
        if theirs.get(name) != version:
            raise InputError(
                f"{process} has {name} {theirs.get(name)}, this process has {version}: install the "
                "same version"
            )


def prepare(client: Client, given: Job, files: Sequence[tuple[str, int]], token: str) -> list[str]:
    """Load the model on every worker; return a description of each device.

    Raises InputError, DeviceError.
    """
    return [device for _, device in _answers(client, _prepare, given, files, token)]


async def _prepare(given: Job, files: Sequence[tuple[str, int]], token: str) -> str:
    """Call `job.prepare` in a thread, so that the worker's event loop still answers messages."""
    return await asyncio.to_thread(job.prepare, given, files, token)


_computed: Counter[str] = Counter()  # "TOKEN-SHARD" → number of records computed by this worker


def run_shard(given: Job, shard: Shard, token: str) -> shards.ShardEntry | Failed | str:
    """Call `job.run_shard`; this Dask worker's heartbeats report how many records are computed."""
    get_worker().metrics.setdefault(_METRIC, lambda worker: dict(_computed))
    key = f"{token}-{shard.number}"

    def progress(records: int) -> None:
        _computed[key] += records

    try:
        return job.run_shard(given, shard, token, progress)
    finally:
        del _computed[key]


def progress(client: Client, token: str) -> dict[int, int]:
    """Return {shard number: count of computed records} of unfinished shards, as last reported."""
    counts: dict[int, int] = {}
    # Ignore a lost connection: the caller checks whether the scheduler still runs.
    with suppress(OSError, TimeoutError, asyncio.TimeoutError, CancelledError):
        counts = client.run_on_scheduler(_reported, token)
    return counts


def _reported(token: str, dask_scheduler: Any) -> dict[int, int]:
    counts: dict[int, int] = {}
    for worker in dask_scheduler.workers.values():
        for key, records in worker.metrics.get(_METRIC, {}).items():
            name, _, shard = key.rpartition("-")
            if name == token:
                counts[int(shard)] = records
    return counts


def _message(error: BaseException) -> str:
    ours = isinstance(error, (InputError, DeviceError))
    return str(error) if ours else f"{type(error).__name__}: {error}"
