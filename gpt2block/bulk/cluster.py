"""The workers: processes of this machine, one a GPU, or those of a Dask cluster that is running."""

from __future__ import annotations

import asyncio
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import dask
from distributed import Client, Nanny, Scheduler, SpecCluster

from gpt2block import doctor
from gpt2block.bulk import identity, job
from gpt2block.bulk.job import Job
from gpt2block.errors import DeviceError, InputError

ALLOWED_FAILURES = 10  # workers that die with a shard before it is blamed
CONNECT_SECONDS = 10
# A thread would look at the others' stacks every 10 ms, for the dashboard's profile; Python runs
# one thread at a time, and the GPU waits for it.
UNOBSERVED = {"distributed.worker.profile.enabled": False}


@contextmanager
def local(workers: int | None, engine: str, threads: int = 1) -> Iterator[Client]:
    """A cluster of processes that end with this one: `workers`, or one a GPU, or one on the CPU.

    threads: shards that each has in hand.
    """
    gpus = visible_gpus() if engine == "cuda" else []
    count = workers or max(1, len(gpus))
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
    with warnings.catch_warnings(), dask.config.set(UNOBSERVED):
        warnings.filterwarnings("ignore", "Port 8787 is already in use")  # another one is taken
        cluster = _started(
            workers=specs, scheduler=scheduler, name="gpt2block", silence_logs=logging.WARNING
        )
    with cluster, Client(cluster) as client:
        yield client


def _started(**options: Any) -> SpecCluster:
    try:
        return SpecCluster(**options)
    except RuntimeError as error:
        raise DeviceError(f"the workers cannot be started: {error.__cause__ or error}") from error


def hush() -> None:
    """What is cut off in the middle has much to say about it."""
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


def prepare(client: Client, given: Job, paths: Sequence[tuple[str, int]], token: str) -> list[str]:
    """Let every worker load the model; their devices in words. Raises InputError."""
    found = client.run(_prepare, given, paths, token, on_error="return")
    for address, answer in found.items():
        if isinstance(answer, BaseException):
            kind = DeviceError if isinstance(answer, DeviceError) else InputError
            raise kind(f"worker {address}: {_said(answer)}") from answer
    return [str(answer) for answer in found.values()]


async def _prepare(given: Job, paths: Sequence[tuple[str, int]], token: str) -> str:
    """Beside the worker's event loop, which has to answer meanwhile."""
    return await asyncio.to_thread(job.prepare, given, paths, token)


def _said(error: BaseException) -> str:
    named = isinstance(error, (InputError, DeviceError))
    return str(error) if named else f"{type(error).__name__}: {error}"


__all__ = ["Client", "check", "hush", "local", "prepare", "running", "visible_gpus"]
