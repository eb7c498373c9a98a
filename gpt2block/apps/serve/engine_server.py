"""The engine's side of a server: its process, its signals, and the HTTP sides that it starts."""

from __future__ import annotations

import asyncio
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

from gpt2block.apps.serve.app import Server
from gpt2block.apps.serve.channel import Local
from gpt2block.apps.serve.engine_end import EngineEnd
from gpt2block.apps.serve.engine_host import EngineHost
from gpt2block.apps.serve.http_server import HttpServer
from gpt2block.apps.serve.listening import BACKLOG, counter, exit_in_time, run
from gpt2block.apps.serve.log import log
from gpt2block.apps.serve.protocol import overloaded

PAUSE = 1.0  # seconds before a process that was never ready is started again
LAST_SECONDS = 3.0  # seconds after the grace time in which HTTP sides have to end
WAITS = "the server ends after %d %s, at most %d s: a second Ctrl-C ends it at once"

NewKeys = Callable[[], Mapping[str, str] | None]


class EngineServer:
    """Runs the engine of a server in this process, and HTTP here or in several other processes.

    Processes for HTTP that end are started again. On SIGTERM or SIGINT, and if the engine fails,
    all HTTP sides end.

    started: called as soon as all HTTP sides accept connections. reload: called on SIGHUP; returns
    new API keys, or None. http: the HTTP side in this process, if there is one.
    """

    def __init__(self, host: EngineHost, started: Callable[[], None], reload: NewKeys) -> None:
        self.host, self._started, self._reload = host, started, reload
        self._settings, self._count = host.settings, host.settings.processes or 1
        self.ends: dict[EngineEnd, asyncio.Task[int]] = {}  # running HTTP sides
        self.failed = self._ending = self._told = False
        self.http: HttpServer | None = None
        if not host.settings.processes:
            self.http = HttpServer(Server(host.served, host.encoding, host.settings))

    def run(self, listening: socket.socket) -> None:
        """Run the server until it ends. listening: a bound socket."""
        run(self._serve(listening))

    def end(self) -> None:
        """End all HTTP sides after running requests; a second call fails these requests."""
        if self._ending:
            self._send("fail", overloaded("the server ends before the answer is complete"))
            self._loop.call_later(LAST_SECONDS, self._kill)
            return
        self._ending = True
        self._listening.close()
        if not self.failed and (count := sum(len(end.sequences) for end in self.ends)):
            log.warning(WAITS, count, "answer" + "s" * (count > 1), self._settings.grace)
        self._send("end")
        self._loop.call_later(self._settings.grace, self.end)

    def _kill(self) -> None:
        for task in self.ends.values():
            task.cancel()

    def _send(self, name: str, *arguments: object) -> None:
        for end in self.ends:
            end.channel.send(name, *arguments)

    def _fail(self) -> None:
        self.failed = True
        if not self._ending:
            self.end()

    async def _serve(self, listening: socket.socket) -> None:
        self._loop, self._listening = asyncio.get_running_loop(), listening
        self._end_on_signals()
        # Lets a new server bind the port immediately
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, sys.platform != "win32")
        listening.setblocking(False)
        listening.listen(BACKLOG)
        with tempfile.TemporaryFile() as counts:
            counts.truncate(4 * self._count)
            async with self.host.running(self._fail):
                sides = (self._keep(index, counts.fileno()) for index in range(self._count))
                await asyncio.gather(*sides)

    def _end_on_signals(self) -> None:
        end = self._end_in_time
        for name, call in ("SIGTERM", end), ("SIGINT", end), ("SIGHUP", self._set_keys):
            with suppress(ValueError, AttributeError):  # in another thread; Windows lacks SIGHUP
                signal.signal(getattr(signal, name), partial(self._soon, call))

    def _soon(self, call: Callable[[], None], *_: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)

    def _end_in_time(self) -> None:
        exit_in_time()
        self.end()

    def _set_keys(self) -> None:
        """Replace the API keys in all HTTP sides."""
        if keys := self._reload():
            self._settings = replace(self._settings, keys=keys)
            self._send("keys", keys)

    async def _keep(self, index: int, counts: int) -> None:
        """Run an HTTP side; start it again each time that it ends, until the server ends."""
        while not self._ending:
            end = EngineEnd(self.host, self._tell)
            if self.http is None:
                work = self._process(end, await end.open(), index, counts)
            else:
                end.channel, self.http.engine.channel = Local(self.http.engine), Local(end)
                work = self.http.run_at(self._listening.dup())
            task = self.ends[end] = self._loop.create_task(work)
            await asyncio.wait([task])
            del self.ends[end]
            end.close()
            if self._ending:
                return
            log.error("a process for HTTP has ended with code %d", task.result())
            counter(counts, self._count, index)(0)
            if not self._told:
                self._fail()
            elif not end.is_ready:
                await asyncio.sleep(PAUSE)

    async def _process(self, end: EngineEnd, theirs: socket.socket, index: int, counts: int) -> int:
        """Run a process for HTTP until it ends, and return its exit code."""
        with theirs, tempfile.TemporaryFile() as given:
            if self._ending:
                return 0
            pickle.dump((self.host.served, self.host.encoding, self._settings), given)
            given.seek(0)
            files = theirs.fileno(), self._listening.fileno(), counts
            command = [sys.executable, "-m", HttpServer.__module__, *map(str, (*files, index))]
            end.process = subprocess.Popen(command, stdin=given, pass_fds=files)
        try:
            await end.gone.wait()
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(end.process.wait, LAST_SECONDS)
        finally:
            end.process.kill()
        return end.process.wait()

    def _tell(self) -> None:
        """Call `started` when all HTTP sides are ready for the first time."""
        if not self._told and sum(end.is_ready for end in self.ends) == self._count:
            self._told = True
            self._started()
