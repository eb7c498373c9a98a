"""The interface between the HTTP side of a server, its front, and its engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, NamedTuple

from gpt2block.apps.serve.service import Key, Piece
from gpt2block.engine.generation.sequences import Sequences

MANY_NOTES = 1024  # number of noted intervals at which they are passed on

Put = Callable[[int, Piece], None]  # receives the index of a sequence and its new tokens


class State(NamedTuple):
    """The state of a service: failure, starting, open and waiting as in Service."""

    failure: str | None
    starting: tuple[int, int] | None
    open: int
    waiting: int


class EngineSide(ABC):
    """The engine as a front uses it, in the front's process or in another one.

    Sequences cross to the engine without text, and token ids come back: the front encodes, decodes
    and searches stop strings.
    """

    def __init__(self) -> None:
        # number of a request: receiver of its tokens, and number of its sequences
        self._puts: dict[int, tuple[Put, int]] = {}
        self._numbers = count()
        self._between: list[float] = []  # seconds between events of streams

    @asynccontextmanager
    async def running(self, on_failure: Callable[[], None]) -> AsyncIterator[None]:
        """Run the engine until the context ends. on_failure: called after the engine has failed."""
        yield

    def new_number(self) -> int:
        """Return a number for a new request of this front."""
        return next(self._numbers)

    async def submit(
        self, number: int, sequences: Sequences, put: Put, client: str, deadline: float | None
    ) -> None:
        """Queue the sequences of a request. Raises QueueFull or EngineFailed.

        put: called in the event loop with new tokens, until `end`. deadline: a time of
        `time.monotonic`, which all processes share.
        """
        self._puts[number] = put, len(sequences)
        try:
            without = [each.without_text() for each in sequences]
            await self._submit(number, without, client, deadline)
        except BaseException:
            self.end(number)
            raise

    def end(self, number: int) -> None:
        """End the sequences of a request, and deliver no more of their tokens."""
        if self._puts.pop(number, None) is not None:
            self.pass_notes()
            self._end(number)

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

    def _deliver(self, pieces: Iterable[tuple[Key, Piece]]) -> None:
        for (number, index), piece in pieces:
            if number in self._puts:
                self._puts[number][0](index, piece)

    def fail(self, problem: str) -> None:
        """End all requests with an error."""
        piece = Piece([], [], [], [], 0, "error", problem)
        for put, sequences in [*self._puts.values()]:
            for index in range(sequences):
                put(index, piece)

    @abstractmethod
    async def _submit(
        self, number: int, sequences: Sequences, client: str, deadline: float | None
    ) -> None: ...

    @abstractmethod
    def _end(self, number: int) -> None: ...

    @abstractmethod
    def stop(self, number: int, index: int, needed: int) -> None:
        """End a sequence whose text has a stop string that ends with its token `needed` - 1."""

    @abstractmethod
    async def call(self, name: str, client: str = "", *arguments: object) -> Any:
        """Return the result of one of the calls of Host, for a client."""

    @abstractmethod
    def note(self, name: str, *arguments: object) -> None:
        """Call a method of Metrics."""
