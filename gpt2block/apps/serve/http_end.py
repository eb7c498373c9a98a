"""The engine as an HTTP side of a server sees it: the HTTP side's end of a channel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, Protocol

from gpt2block.apps.serve.channel import Channel, Local
from gpt2block.apps.serve.protocol import ApiError
from gpt2block.apps.serve.service import Key, Piece
from gpt2block.engine.generation.sequences import Sequences

ENDED = "the engine's process has ended"
MANY_NOTES = 1024  # number of noted intervals at which they are passed on


class Receiver(Protocol):
    """Receives the tokens of sequences: an Answer."""

    sequences: Sequences

    def put(self, index: int, piece: Piece) -> None: ...
    def fail(self, error: Exception) -> None: ...


class HttpEnd:
    """Sends requests to the engine's side, and receives its results.

    Sequences cross to the engine without text, and token ids come back: the HTTP side encodes,
    decodes and searches stop strings.

    channel: the open channel. keys, end: called with new API keys, and when the server ends.
    failed: whether the engine's side has ended before. numbers: numbers for new requests.
    """

    def __init__(self) -> None:
        self.channel: Channel | Local
        self.keys: Callable[[Mapping[str, str]], None]
        self.end: Callable[[], None]
        self.failed, self.numbers = False, count()
        self._answers: dict[int, Receiver] = {}  # number of a request: receiver of its tokens
        self._results: dict[int, asyncio.Future[Any]] = {}  # number of a request or call: result
        self._between: list[float] = []  # seconds between events of streams
        self._closed = False  # whether this side, not the other one, ends the channel

    def close(self) -> None:
        self._closed = True
        self.pass_notes()
        self.channel.close()

    async def submit(
        self, number: int, answer: Receiver, client: str, deadline: float | None
    ) -> None:
        """Queue the sequences of a request. Raises ApiError.

        answer: gets new tokens in the event loop, until `drop`. deadline: a time of
        `time.monotonic`, which all processes share.
        """
        self._answers[number] = answer
        try:
            without = [each.without_text() for each in answer.sequences]
            await self._result("submit", number, client, without, deadline)
        except BaseException:
            self.drop(number)
            raise

    def drop(self, number: int) -> None:
        """End the sequences of a request, and deliver no more of their tokens."""
        if self._answers.pop(number, None) is not None:
            self.pass_notes()
            self.channel.send("drop", number)

    def stop(self, number: int, index: int, needed: int) -> None:
        """End a sequence whose text has a stop string that ends with its token `needed` - 1."""
        self.channel.send("stop", number, index, needed)

    async def call(self, name: str, client: str = "", *arguments: object) -> Any:
        """Return the result of a method of EngineHost, for a client."""
        self.pass_notes()
        return await self._result("call", next(self.numbers), name, client, *arguments)

    async def _result(self, item: str, number: int, *arguments: object) -> Any:
        if self.channel.closed:
            raise ApiError(500, ENDED)
        self._results[number] = asyncio.get_running_loop().create_future()
        self.channel.send(item, number, *arguments)
        try:
            return await self._results[number]
        except asyncio.CancelledError:
            self.channel.send("drop", number)
            raise
        finally:
            del self._results[number]

    def note(self, name: str, *arguments: object) -> None:
        """Call a method of Metrics."""
        self.channel.send("note", name, *arguments)

    def note_between(self, seconds: float) -> None:
        """Note the time between two events of a stream."""
        self._between.append(seconds)
        if len(self._between) >= MANY_NOTES:
            self.pass_notes()

    def pass_notes(self) -> None:
        """Pass the noted times to the metrics."""
        if self._between:
            noted, self._between = self._between, []
            self.note("between", noted)

    # --- items from the engine's side, besides `keys` and `end` ----------------------------------

    def pieces(self, pieces: list[tuple[Key, tuple[Any, ...]]]) -> None:
        for (number, index), piece in pieces:
            if number in self._answers:
                self._answers[number].put(index, Piece(*piece))
        self.channel.send("received")

    def result(self, number: int, result: object, error: Exception | None) -> None:
        future = self._results.get(number)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def fail(self, error: Exception) -> None:
        """Fail all requests."""
        for number in [*self._results]:
            self.result(number, None, error)
        for answer in self._answers.values():
            answer.fail(error)

    def lost(self) -> None:
        """Fail all requests, and end this side, because the engine's side has ended."""
        if self._closed:
            return
        self.fail(ApiError(500, ENDED))
        self.failed = True
        self.end()
