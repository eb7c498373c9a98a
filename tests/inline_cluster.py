"""A replacement for a Dask client that computes in this process, when `submit` is called."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpt2block.bulk.shards import LOCK


class Done(Future[Any]):
    """The future of a finished call."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        try:
            self.set_result(call())
            self.status = "finished"
        except Exception as error:
            self.set_exception(error)
            self.status = "error"


class InlineClient:
    """A client with one worker of one thread. tries: the number of the shard of each attempt."""

    status, dashboard_link = "running", "nowhere"

    def __init__(self) -> None:
        self.tries: list[int] = []

    def nthreads(self) -> dict[str, int]:
        return {"inline": 1}

    def run(self, call: Callable[..., Any], *arguments: Any, on_error: str) -> dict[str, Any]:
        try:
            found = call(*arguments)
            return {"inline": asyncio.run(found) if asyncio.iscoroutine(found) else found}
        except Exception as error:
            return {"inline": error}

    def run_on_scheduler(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return call(*arguments)

    def submit(
        self, call: Callable[..., Any], job: Any, shard: Any, token: str, **options: Any
    ) -> Done:
        for _ in range(options["retries"] + 1):
            self.tries.append(shard.number)
            ended = Done(lambda: call(job, shard, token))
            if ended.status == "finished":
                break
        return ended

    def cancel(self, futures: Any, force: bool) -> None:
        """Do nothing: every call has already finished."""


def use(patch: pytest.MonkeyPatch) -> InlineClient:
    """Make `driver.run` compute in this process."""
    from gpt2block.bulk import cluster, job  # noqa: PLC0415

    client = InlineClient()

    @contextmanager
    def local(*_: Any) -> Iterator[InlineClient]:
        yield client

    patch.setattr(cluster, "local", local)
    patch.setattr(cluster, "run_shard", job.run_shard)
    return client


def contents(folder: Path, pattern: str = "*") -> dict[str, bytes]:
    """Return the content of every file of an output by name, without the lock."""
    files = [path for path in folder.rglob(pattern) if path.is_file() and path.name != LOCK]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
