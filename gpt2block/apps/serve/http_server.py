"""An HTTP side of a server: HTTP, JSON, chat templates and text, without weights and GPU.

It runs in the engine's process, or in one of several processes, which `EngineServer` starts.
"""

from __future__ import annotations

import asyncio
import pickle
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn

from gpt2block.apps.serve.app import Server
from gpt2block.apps.serve.channel import Channel
from gpt2block.apps.serve.listening import HEAD_SECONDS, Protocol, counter, run, settle
from gpt2block.apps.serve.log import set_up_log

FULL_SECONDS = 1.0  # pause of accepting connections if no file can be opened


class HttpServer(uvicorn.Server):
    """A uvicorn server that may share its listening socket with other processes.

    In this case it accepts one connection in each turn of the event loop, so that other processes
    get connections, too. The engine's side, not a signal, ends it. api: its endpoints.
    """

    def __init__(self, api: Server) -> None:
        self.api, self.engine, settings = api, api.engine, api.settings
        self.engine.end = self._end
        given = uvicorn.Config(
            api.app(), http=Protocol, access_log=False, server_header=False,
            limit_concurrency=settings.connections + 1,  # + 1: it also counts the new connection
            # Longer than clients keep a connection: if the server closes first, a request may be
            # lost.
            timeout_keep_alive=HEAD_SECONDS, timeout_graceful_shutdown=settings.grace + 1,
            log_level="critical",  # the server has its own log; disconnects need no entry
            proxy_headers=bool(settings.proxies), forwarded_allow_ips=list(settings.proxies),
        )  # fmt: skip
        super().__init__(given)

    async def run_at(self, listening: socket.socket, held: socket.socket | None = None) -> int:
        """Answer requests until the server ends, and return the exit code.

        held: socket that is connected to the engine's process, if it is another one.
        """
        if held is not None:
            self.engine.channel = await Channel.over(held, self.engine)
        try:
            await self.serve([listening])
        finally:
            self.engine.close()
            self.api.threads.close()
        return int(self.engine.failed)

    def _end(self) -> None:
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([] if self.api.settings.processes else sockets)
        self._accepting = asyncio.create_task(self._accept(*sockets or ()))
        self.engine.channel.send("ready")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._accepting.cancel()
        await super().shutdown(sockets)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while self.api.settings.processes:
            try:
                connection, _ = await loop.sock_accept(listening)
                made = partial(Protocol, self.config, self.server_state, self.lifespan.state)
                await loop.connect_accepted_socket(made, connection)
            except ConnectionError:
                pass  # the client has gone
            except OSError:  # too many open files
                await asyncio.sleep(FULL_SECONDS)


def main() -> None:
    """Run a process for HTTP until the server ends, with code 1 if the engine has ended before."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the engine's process says when to end
    held, listening = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    api, (file, index) = Server(*pickle.load(sys.stdin.buffer)), map(int, sys.argv[3:])
    set_up_log(api.settings.log_level)
    Protocol.open_connections = counter(file, api.settings.processes or 1, index)
    server = HttpServer(api)
    settle()
    sys.exit(run(server.run_at(listening, held)))


if __name__ == "__main__":
    main()
