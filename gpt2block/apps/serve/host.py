"""The engine's side of a server: the batch, other forward passes, and the metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any

from anyio import to_thread
from prometheus_client import generate_latest

from gpt2block.apps.serve.engine import EngineSide, State
from gpt2block.apps.serve.metrics import Metrics
from gpt2block.apps.serve.passes import Passes
from gpt2block.apps.serve.service import Key, Outlet, Piece, Service, batch_of
from gpt2block.apps.serve.settings import ServedModel, ServerSettings
from gpt2block.engine.generation.sequences import Sequences
from gpt2block.files.tokenizers.encoding import Encoding

PASSES = (  # calls of Passes
    "embed", "judge", "score", "logits", "identity", "compile", "explain", "explained"
)  # fmt: skip
CALLS = ("state", "show_metrics")


class Host:
    """Runs the engine for all fronts of a server. encoding: tokenizer that fits the model's ids."""

    def __init__(self, model: Any, encoding: Encoding, settings: ServerSettings) -> None:
        self._batch = batch_of(
            model.engine, settings.rows, settings.reuse_prefixes, settings.speculate
        )
        self._queue = settings.queue
        slots, reuses = self._batch.slots, self._batch.reuses
        self.served = ServedModel.of(model, slots, reuses, settings.receipts)
        self._passes = Passes(model, encoding, settings)
        self.metrics = Metrics()
        self.service: Service | None = None

    @asynccontextmanager
    async def running(self, on_failure: Callable[[], None]) -> AsyncIterator[Service]:
        """Run the service in this event loop until the context ends."""
        loop = asyncio.get_running_loop()
        if find_spec("llguidance"):  # create it now: later, this would interrupt the generation
            _ = self._passes.vocabulary
        self.service = service = Service(self._batch, self._queue, loop, on_failure)
        service.matcher_of = self._passes.matcher
        self.metrics.watch(service)
        try:
            yield service
        finally:
            self._passes.close()
            self.service = None
            await to_thread.run_sync(service.close)

    async def call(self, name: str, client: str, *arguments: object) -> Any:
        """Return the result of a call of CALLS or PASSES for a client."""
        assert name in CALLS + PASSES
        owner = self if name in CALLS else self._passes
        return await getattr(owner, name)(client, *arguments)

    async def state(self, client: str) -> State:
        """Return the service's state."""
        service = self.service
        if service is None:
            return State("the server ends", None, 0, 0)
        return State(service.failure, service.starting, service.open, service.waiting)

    async def show_metrics(self, client: str) -> bytes:
        """Return the metrics of all fronts as text for Prometheus."""
        return generate_latest(self.metrics.registry)


class LocalEngine(EngineSide):
    """The engine of a server that has one process. host: a Host that is not running yet."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self.host = host

    @asynccontextmanager
    async def running(self, on_failure: Callable[[], None]) -> AsyncIterator[None]:
        async with self.host.running(on_failure) as service:
            self._loop = asyncio.get_running_loop()
            self._outlet = Outlet(service, self._deliver_local)
            yield

    def _deliver_local(self, pieces: list[tuple[Key, Piece]]) -> None:
        self._deliver(pieces)
        self._loop.call_soon(self._outlet.received)  # after the tasks that send the pieces

    async def _submit(
        self, number: int, sequences: Sequences, client: str, deadline: float | None
    ) -> None:
        self._outlet.submit(number, sequences, client, deadline)

    def _end(self, number: int) -> None:
        self._outlet.end(number)

    def stop(self, number: int, index: int, needed: int) -> None:
        self._outlet.stop(number, index, needed)

    async def call(self, name: str, client: str = "", *arguments: object) -> Any:
        self.pass_notes()
        return await self.host.call(name, client, *arguments)

    def note(self, name: str, *arguments: object) -> None:
        getattr(self.host.metrics, name)(*arguments)
