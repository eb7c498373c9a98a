"""The engine of a server: the batch, other forward passes, and the metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any

from anyio import to_thread
from prometheus_client import generate_latest

from gpt2block.apps.serve.metrics import Metrics
from gpt2block.apps.serve.passes import Passes
from gpt2block.apps.serve.protocol import JsonObject
from gpt2block.apps.serve.service import Service, batch_of
from gpt2block.apps.serve.settings import ServedModel, ServerSettings
from gpt2block.files.tokenizers.encoding import Encoding


class EngineHost(Passes):
    """Runs the engine for all HTTP sides of a server. They call its methods that have a client.

    served: facts about the model for HTTP sides. service, metrics: exist while it runs.
    """

    service: Service
    metrics: Metrics

    def __init__(self, model: Any, encoding: Encoding, settings: ServerSettings) -> None:
        super().__init__(model, encoding, settings)
        self._batch = batch_of(
            model.engine, settings.rows, settings.reuse_prefixes, settings.speculate
        )
        slots, reuses = self._batch.slots, self._batch.reuses
        self.served = ServedModel.of(model, slots, reuses, not settings.no_receipts)

    @asynccontextmanager
    async def running(self, on_failure: Callable[[], None]) -> AsyncIterator[None]:
        """Run the service in this event loop until the context ends."""
        if find_spec("llguidance"):  # create it now: later, this would interrupt the generation
            _ = self.vocabulary
        loop, queue = asyncio.get_running_loop(), self.settings.queue
        self.service = Service(self._batch, queue, loop, on_failure)
        self.service.matcher_of = self.matcher
        self.metrics = Metrics(self.service)
        try:
            yield
        finally:
            self.close()
            await to_thread.run_sync(self.service.close)

    async def health(self, client: str) -> JsonObject:
        """Return the service's state as /health shows it."""
        service = self.service
        if service.failure is not None:
            return {"status": "failed", "problem": service.failure}
        if service.starting is not None:
            done, total = service.starting
            return {"status": "starting", "done": done, "total": total}
        return {"status": "ready", "running": service.running, "waiting": service.waiting}

    async def show_metrics(self, client: str) -> bytes:
        """Return the metrics of all HTTP sides as text for Prometheus."""
        return generate_latest(self.metrics.registry)
