"""A front process of a server: HTTP, JSON, chat templates and text, without weights and GPU.

`Fronts` starts it with the file descriptors of its channel, of the listening socket and of the
numbers of connections.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from gpt2block.apps.serve.app import GRACE, Server
from gpt2block.apps.serve.channel import Channel, first_item
from gpt2block.apps.serve.connections import Connections
from gpt2block.apps.serve.engine import EngineSide
from gpt2block.apps.serve.listening import Protocol, config, settle
from gpt2block.apps.serve.log import set_up_log
from gpt2block.apps.serve.service import EngineFailed, Key, Piece
from gpt2block.apps.serve.settings import ServedModel, ServerSettings
from gpt2block.engine.generation.sequences import Sequences
from gpt2block.files.tokenizers.encoding import Encoding

ENDED = "the engine's process has ended"
FULL_SECONDS = 1.0  # pause of accepting connections if no file can be opened


@dataclass(frozen=True)
class FrontStart:
    """Settings that a front process gets at its start. index: number of the process, from 0.

    connections: most open connections of all `processes`. proxies, grace: as for `config`.
    log_level: as for `set_up_log`.
    """

    model: ServedModel
    encoding: Encoding
    settings: ServerSettings
    processes: int
    connections: int
    proxies: Sequence[str] = ()
    log_level: str = "warning"
    grace: int = GRACE
    index: int = 0


class RemoteEngine(EngineSide):
    """The engine in another process. held: socket that is connected to this process.

    set_keys: called with new API keys. end_server: called when the server ends.
    """

    def __init__(self, held: socket.socket) -> None:
        super().__init__()
        self._held = held
        self._ending = False  # whether this process, not the other one, ends the channel
        self._results: dict[int, asyncio.Future[Any]] = {}  # number of a request or call: result
        self.set_keys: Callable[[dict[str, str]], None] = lambda keys: None
        self.end_server: Callable[[], None] = lambda: None

    @asynccontextmanager
    async def running(self, on_failure: Callable[[], None]) -> AsyncIterator[None]:
        self._on_failure = on_failure
        self._channel = await Channel.over(self._held, self._receive, self._lost)
        try:
            yield
        finally:
            self._ending = True
            self.pass_notes()
            self._channel.close()

    def ready(self) -> None:
        """Tell the engine's process that this process accepts connections."""
        self._channel.send("ready")

    async def _submit(
        self, number: int, sequences: Sequences, client: str, deadline: float | None
    ) -> None:
        await self._result("submit", number, sequences, client, deadline)

    def _end(self, number: int) -> None:
        self._channel.send("end", number)

    def stop(self, number: int, index: int, needed: int) -> None:
        self._channel.send("stop", number, index, needed)

    async def call(self, name: str, client: str = "", *arguments: object) -> Any:
        self.pass_notes()
        number = self.new_number()
        try:
            return await self._result("call", number, name, client, arguments)
        except asyncio.CancelledError:
            self._channel.send("drop", number)
            raise

    def note(self, name: str, *arguments: object) -> None:
        self._channel.send("note", name, arguments)

    async def _result(self, name: str, number: int, *arguments: object) -> object:
        if self._channel.closed:
            raise EngineFailed(ENDED)
        self._results[number] = asyncio.get_running_loop().create_future()
        self._channel.send(name, number, *arguments)
        try:
            return await self._results[number]
        finally:
            del self._results[number]

    def _receive(self, name: str, *arguments: object) -> None:
        receivers: dict[str, Callable[..., None]] = {
            "pieces": self._pieces,
            "result": self._finished,
            "keys": self.set_keys,
            "end": self.end_server,
        }
        receivers[name](*arguments)

    def _pieces(self, pieces: list[tuple[Key, tuple[Any, ...]]]) -> None:
        self._channel.send("received")  # first, so that the next pieces are computed meanwhile
        self._deliver((key, Piece(*piece)) for key, piece in pieces)

    def _finished(self, number: int, result: object, error: Exception | None) -> None:
        future = self._results.get(number)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def _lost(self) -> None:
        """Fail all requests, and end the process, because the other process has ended."""
        if self._ending:
            return
        for number in [*self._results]:
            self._finished(number, None, EngineFailed(ENDED))
        self.fail(ENDED)
        self._on_failure()


class FrontServer(uvicorn.Server):
    """A uvicorn server that shares its listening socket with other processes.

    It accepts one connection in each turn of the event loop, so that other processes get
    connections, too. The engine's process, not a signal, ends it.
    """

    def __init__(self, server: Server, engine: RemoteEngine, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._engine = engine
        self.failed = False  # whether the engine has failed, or its process has ended
        server.on_failure = self._fail
        engine.end_server = self._exit

    def _exit(self) -> None:
        self.should_exit = True

    def _fail(self) -> None:
        self.failed = self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        assert sockets
        (self._listening,) = sockets
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[tuple[asyncio.Transport, asyncio.Protocol]]] = set()
        self._loop.add_reader(self._listening, self._accept)
        self._engine.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop.remove_reader(self._listening)
        await super().shutdown(sockets)

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another process was faster, or the client has gone
        except OSError:  # too many open files
            self._loop.remove_reader(self._listening)
            self._loop.call_later(FULL_SECONDS, self._accept_again)
            return
        connection.setblocking(False)
        opening = self._loop.connect_accepted_socket(self._protocol, connection)
        task = self._loop.create_task(opening)
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _accept_again(self) -> None:
        if not self.should_exit:
            self._loop.add_reader(self._listening, self._accept)

    def _protocol(self) -> Protocol:
        return Protocol(self.config, self.server_state, self.lifespan.state, self._loop)


def main() -> None:
    """Run a front process until the server ends, with code 1 if the engine has ended before."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the engine's process says when to end
    held, listening = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    try:
        start: FrontStart = first_item(held)
    except EOFError:
        sys.exit(1)
    set_up_log(start.log_level)
    engine = RemoteEngine(held)
    server = Server(start.model, start.encoding, start.settings, engine)
    engine.set_keys = server.set_keys
    connections = Connections(int(sys.argv[3]), start.processes)
    Protocol.open_connections = connections.of_process(start.index)
    given = config(server, start.connections, start.grace, start.proxies)
    runner = FrontServer(server, engine, given)
    settle()
    runner.run([listening])
    if runner.failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
