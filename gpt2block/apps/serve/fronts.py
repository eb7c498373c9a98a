"""The front processes of a server, as the process of its engine sees them."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpt2block.apps.serve.channel import Channel
from gpt2block.apps.serve.connections import Connections
from gpt2block.apps.serve.front import FrontStart
from gpt2block.apps.serve.host import Host
from gpt2block.apps.serve.listening import BACKLOG, SetKeys, exit_in_time
from gpt2block.apps.serve.log import log, traceback_of
from gpt2block.apps.serve.protocol import ApiError
from gpt2block.apps.serve.service import EngineFailed, Key, Outlet, Piece, QueueFull, Service
from gpt2block.engine.generation.sequences import Sequences
from gpt2block.errors import PrintableError

PAUSE = 1.0  # seconds before a process that was never ready is started again
LAST_SECONDS = 3.0  # seconds after the grace time in which processes have to end


class RemoteError(Exception):
    """An unexpected exception in the engine's process. Its message is the traceback."""


class Fronts:
    """Runs the engine of a server in this process, and HTTP in several front processes.

    start: settings of the processes, including their number. started: called as soon as all
    processes accept connections. reload: as for Listening. Front processes that end are started
    again. On SIGTERM or SIGINT, and if the engine fails, all processes end.
    """

    def __init__(
        self,
        host: Host,
        start: FrontStart,
        started: Callable[[], None],
        reload: Callable[[SetKeys], None],
    ) -> None:
        self.host, self._start, self._started, self._reload = host, start, started, reload
        self.fronts: list[Front] = []  # processes that run
        self.failed = self._ending = self._told = False

    def set_keys(self, keys: Mapping[str, str]) -> None:
        """Replace the API keys in all processes."""
        self._start = replace(self._start, settings=replace(self._start.settings, keys=keys))
        for front in self.fronts:
            front.send("keys", keys)

    def run(self, sockets: Sequence[socket.socket]) -> None:
        """Run the server until it ends. sockets: one bound socket."""
        asyncio.run(self._serve(*sockets))

    def end(self) -> None:
        """End all processes after running requests; a second call ends them immediately."""
        if self._ending:
            self._kill()
            return
        self._ending = True
        self._listening.close()
        for front in self.fronts:
            front.send("end")
        self._loop.call_later(self._start.grace + LAST_SECONDS, self._kill)

    def _fail(self) -> None:
        self.failed = True
        if not self._ending:
            self.end()

    def _kill(self) -> None:
        for front in self.fronts:
            front.process.kill()

    async def _serve(self, listening: socket.socket) -> None:
        self._loop, self._listening = asyncio.get_running_loop(), listening
        self._end_on_signals()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setblocking(False)
        listening.listen(BACKLOG)
        count = self._start.processes
        with tempfile.TemporaryFile() as shared:
            counts = Connections(shared.fileno(), count)
            files = listening.fileno(), shared.fileno()
            async with self.host.running(self._fail) as service:
                await asyncio.gather(
                    *(self._keep(service, index, files, counts) for index in range(count))
                )

    def _end_on_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._loop.add_signal_handler(signal.SIGTERM, self._end_in_time)
            self._loop.add_signal_handler(signal.SIGHUP, self._reload, self.set_keys)
            # SIGINT arrives as SIGUSR1; cli/interrupts.py then calls Python's handler of SIGINT.
            # The handler that add_signal_handler sets does nothing, because asyncio reads the
            # signal's number from a file descriptor. This number would be SIGUSR1.
            signal.signal(signal.SIGINT, self._end_soon)

    def _end_soon(self, *_: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end_in_time)

    def _end_in_time(self) -> None:
        exit_in_time()
        self.end()

    async def _keep(
        self, service: Service, index: int, files: tuple[int, int], counts: Connections
    ) -> None:
        """Run a front process; start it again each time that it ends, until the server ends."""
        while not self._ending:
            front = Front(self.host, service, files, self._tell)
            self.fronts.append(front)
            code = await front.run(lambda: replace(self._start, index=index), lambda: self._ending)
            self.fronts.remove(front)
            counts.of_process(index)(0)
            if self._ending:
                return
            log.error("a process for HTTP has ended with code %d", code)
            if not self._told:
                self._fail()
            elif not front.ready:
                await asyncio.sleep(PAUSE)

    def _tell(self) -> None:
        """Call `started` when all processes are ready for the first time."""
        if not self._told and sum(front.ready for front in self.fronts) == self._start.processes:
            self._told = True
            self._started()


class Front:
    """A front process, as the process of the engine sees it. files: descriptors that it gets.

    on_ready: called when the process accepts connections.
    """

    def __init__(
        self, host: Host, service: Service, files: tuple[int, int], on_ready: Callable[[], None]
    ) -> None:
        self._host, self._on_ready, self.ready = host, on_ready, False
        self._outlet = Outlet(service, self._deliver)
        self._calls: dict[int, asyncio.Task[None]] = {}  # running calls by number
        self._lost = asyncio.Event()
        self._channel: Channel | None = None
        self._receivers: dict[str, Callable[..., None]] = {
            "ready": self._is_ready,
            "submit": self._submit,
            "received": self._outlet.received,
            "stop": self._outlet.stop,
            "end": self._outlet.end,
            "call": self._call,
            "drop": self._drop,
            "note": self._note,
        }
        self._socket, theirs = socket.socketpair()
        with theirs:
            inherited = theirs.fileno(), *files
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gpt2block.apps.serve.front", *map(str, inherited)],
                pass_fds=inherited,
            )

    async def run(self, start: Callable[[], FrontStart], ending: Callable[[], bool]) -> int:
        """Serve the process until it ends, and return its exit code.

        start, ending: return the settings of the server, and whether it ends, at the time when the
        process gets them.
        """
        self._channel = await Channel.over(self._socket, self._receive, self._lost.set)
        self.send("start", start())
        if ending():
            self.send("end")
        await self._lost.wait()
        self._outlet.close()
        for task in [*self._calls.values()]:
            task.cancel()
        return await asyncio.to_thread(self._code)

    def send(self, name: str, *arguments: object) -> None:
        """Send an item to the process, unless it has ended."""
        if self._channel is not None:
            self._channel.send(name, *arguments)

    def _deliver(self, pieces: list[tuple[Key, Piece]]) -> None:
        self.send("pieces", [(key, tuple(piece)) for key, piece in pieces])  # pickled faster

    def _code(self) -> int:
        try:
            return self.process.wait(LAST_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def _receive(self, name: str, *arguments: object) -> None:
        self._receivers[name](*arguments)

    def _is_ready(self) -> None:
        self.ready = True
        self._on_ready()

    def _submit(
        self, number: int, sequences: Sequences, client: str, deadline: float | None
    ) -> None:
        error: Exception | None = None
        try:
            self._outlet.submit(number, sequences, client, deadline)
        except (QueueFull, EngineFailed) as refusal:
            error = refusal
        self.send("result", number, None, error)

    def _call(self, number: int, name: str, client: str, arguments: Sequence[object]) -> None:
        task = asyncio.create_task(self._called(number, name, client, arguments))
        self._calls[number] = task
        task.add_done_callback(lambda _: self._calls.pop(number))

    async def _called(self, number: int, name: str, client: str, arguments: Sequence[Any]) -> None:
        result: object = None
        failure: Exception | None = None
        try:
            result = await self._host.call(name, client, *arguments)
        except (ApiError, PrintableError) as error:
            failure = error
        except Exception as error:
            failure = RemoteError(traceback_of(error))
        self.send("result", number, result, failure)

    def _drop(self, number: int) -> None:
        if task := self._calls.get(number):
            task.cancel()

    def _note(self, name: str, arguments: Sequence[object]) -> None:
        getattr(self._host.metrics, name)(*arguments)
