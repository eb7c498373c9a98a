"""An HTTP side of a server as the engine's side sees it: the engine's end of a channel."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Sequence

from gpt2block.apps.serve.channel import Channel, Local
from gpt2block.apps.serve.engine_host import EngineHost
from gpt2block.apps.serve.log import traceback_of
from gpt2block.apps.serve.protocol import ApiError
from gpt2block.apps.serve.service import MAX_EARLY, Key, Piece
from gpt2block.engine.generation.sequences import Sequences, TokenSequence
from gpt2block.errors import PrintableError


class RemoteError(Exception):
    """An unexpected exception on the engine's side. Its message is the traceback."""


class EngineEnd:
    """Runs the requests of an HTTP side, and delivers the pieces of their sequences in batches.

    A sequence is held from the delivery of a piece until the HTTP side has received it. The
    sequence's next piece has all tokens sampled meanwhile: one token if the HTTP side is fast,
    several if it is slow.

    on_ready: called when the HTTP side accepts connections. channel: the open channel. process: the
    process of the HTTP side, if it has one. gone: set when the channel has ended.
    """

    channel: Channel | Local
    process: subprocess.Popen[bytes]

    def __init__(self, host: EngineHost, on_ready: Callable[[], None]) -> None:
        self._host, self._service, self._on_ready = host, host.service, on_ready
        self.is_ready, self.gone = False, asyncio.Event()
        self.lost = self.gone.set
        self._calls: dict[int, asyncio.Task[None]] = {}  # running calls by number
        self.sequences: dict[int, Sequences] = {}  # number of a request: its sequences
        # sequences of delivered, not yet received batches
        self._on_the_way: deque[list[TokenSequence]] = deque()

    async def open(self) -> socket.socket:
        """Open the channel to another process; return a socket for its other end."""
        ours, theirs = socket.socketpair()
        self.channel = await Channel.over(ours, self)
        return theirs

    def close(self) -> None:
        """End all requests and the channel."""
        for number in [*self._calls, *self.sequences]:
            self.drop(number)
        self.channel.close()

    def put(self, pieces: Sequence[tuple[TokenSequence | None, Key, Piece]]) -> None:
        """Deliver a batch of pieces. The sequence is None if the engine has failed."""
        sequences = [sequence for sequence, _, _ in pieces if sequence is not None]
        self._on_the_way.append(sequences)
        told = [(key, tuple(piece)) for _, key, piece in pieces]  # tuples are pickled faster
        self.channel.send("pieces", told)
        if len(self._on_the_way) == 1 and self._service.open <= MAX_EARLY:
            self._service.release(sequences)

    # --- items from the HTTP side -----------------------------------------------------------------

    def ready(self) -> None:
        self.is_ready = True
        self._on_ready()

    def received(self) -> None:
        """Let the sequences of the received batch deliver new tokens, after a pause.

        Batches are received in the order of their delivery. The pause limits the share of time that
        is spent on delivering tokens. It begins in the next turn of the event loop: an HTTP side in
        this process sends the tokens in this turn.
        """
        sequences = self._on_the_way.popleft()
        asyncio.get_running_loop().call_soon(self._service.release, sequences)

    def call(self, number: int, name: str, *arguments: object) -> None:
        """Call a method of the host, and send its result."""
        task = asyncio.create_task(self._called(number, name, *arguments))
        self._calls[number] = task
        task.add_done_callback(lambda _: self._calls.pop(number))

    async def _called(self, number: int, name: str, *arguments: object) -> None:
        result: object = None
        failure: Exception | None = None
        try:
            result = await getattr(self._host, name)(*arguments)
        except (ApiError, PrintableError) as error:
            failure = error
        except Exception as error:
            failure = RemoteError(traceback_of(error))
        self.channel.send("result", number, result, failure)

    def submit(
        self, number: int, client: str, sequences: Sequences, deadline: float | None
    ) -> None:
        """Queue the sequences of a request as `Service.submit` does, and send the result."""
        failure = None
        try:
            self._service.submit(sequences, self.put, number, client, deadline)
            self.sequences[number] = sequences
        except ApiError as error:
            failure = error
        self.channel.send("result", number, None, failure)

    def stop(self, number: int, index: int, needed: int) -> None:
        """End a sequence whose text has a stop string that ends with its token `needed` - 1."""
        self._service.cancel(self.sequences[number][index : index + 1], needed)

    def drop(self, number: int) -> None:
        """End a call, or the sequences of a request, which get no more tokens."""
        if task := self._calls.get(number):
            task.cancel()
        self._service.cancel(self.sequences.pop(number, ()))

    def note(self, name: str, *arguments: object) -> None:
        getattr(self._host.metrics, name)(*arguments)
