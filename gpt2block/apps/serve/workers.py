"""Thread pools that run calls for requests; clients whose calls wait take turns."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from gpt2block.engine.generation.scheduling import Turns

Value = TypeVar("Value")


class Places:
    """A semaphore for asyncio: a limited number of places, granted to waiting clients in turn.

    Clients take turns, and a client takes a place only while more places are free than the client
    has. One client therefore leaves half of the places to others, whose small requests do not wait
    for its large requests.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._taken: Counter[str] = Counter()  # client: number of occupied places
        self._waiting: Turns[tuple[str, asyncio.Future[None]]] = Turns()

    @asynccontextmanager
    async def taken(self, client: str) -> AsyncIterator[None]:
        """Wait for one of the places, and occupy it until the with block ends."""
        await self.take(client)
        try:
            yield
        finally:
            self.give_back(client)

    async def take(self, client: str) -> None:
        """Wait for one of the places; a request that is cancelled meanwhile occupies none."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.add([(client, turn)], client)
        self._assign()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # a place was assigned before the cancellation
                self.give_back(client)
            raise

    def give_back(self, client: str) -> None:
        self._free += 1
        self._taken -= Counter([client])  # also removes a client without places
        self._assign()

    def _assign(self) -> None:
        while self._free and self._waiting.take(self._begin, self._may):
            pass

    def _may(self, client: str) -> bool:
        return self._free > self._taken[client]

    def _begin(self, waiting: tuple[str, asyncio.Future[None]]) -> bool:
        """Assign a place to a waiting request. Return False if the request was cancelled."""
        client, turn = waiting
        if turn.done():
            return False
        self._free -= 1
        self._taken[client] += 1
        turn.set_result(None)
        return True


class Workers(Places):
    """A thread pool that runs calls for requests; clients whose calls wait take turns."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self._threads = ThreadPoolExecutor(threads)

    async def run(self, client: str, call: Callable[..., Value], *arguments: object) -> Value:
        """Return call(*arguments), computed in a thread; clients whose calls wait take turns.

        A request that is cancelled does not wait for its call, which keeps its thread to the end.
        """
        loop = asyncio.get_running_loop()

        def ended(future: Future[Value]) -> None:
            with suppress(RuntimeError):  # if the event loop was closed meanwhile
                loop.call_soon_threadsafe(self.give_back, client)

        await self.take(client)
        future = self._threads.submit(call, *arguments)
        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Start no further calls. Running calls continue."""
        self._threads.shutdown(wait=False, cancel_futures=True)
