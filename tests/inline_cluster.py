"""A replacement for a Dask client that computes in this process, when `submit` is called."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class Done:
    """The future of a finished call."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.status, self._result, self._error = "finished", None, None
        try:
            self._result = call()
        except Exception as error:
            self.status, self._error = "error", error

    def result(self, timeout: float) -> Any:
        return self._result

    def exception(self) -> Any:
        return self._error

    def add_done_callback(self, call: Callable[[Any], None]) -> None:
        call(self)


class InlineClient:
    """One worker with one thread. tries: the shards' numbers, one for each attempt."""

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
        """Nothing is in flight."""


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
