"""HTTP connections, and settings of the processes of a server."""

from __future__ import annotations

import asyncio
import gc
import math
import mmap
import os
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, ClassVar, TypeVar

import h11
import numpy as np
from uvicorn.protocols.http.h11_impl import H11Protocol

from gpt2block.apps.serve.access import error_response, request_id
from gpt2block.apps.serve.log import log
from gpt2block.apps.serve.protocol import ApiError
from gpt2block.errors import printable

EXIT_SECONDS = 29.0  # seconds after SIGTERM or SIGINT in which a server has to end
OTHER_FILES = 64  # number of open files that are not connections
BACKLOG = 2048  # most connections that wait until the server accepts them
MAX_BEHIND = 2**16  # most bytes that a client may send before the previous response is complete
PROBE_SECONDS = 0.001  # between the first two interim responses to a client that sends no more
HEAD_SECONDS = 20  # time limit for the headers of a connection's next request
# Longest wait of the thread that runs decoding steps for the GIL (sys.setswitchinterval). Python's
# default of 5 ms is longer than a step.
SWITCH_SECONDS = 5e-4
# Number of new objects before a garbage collection; a few requests exceed Python's default.
YOUNG_OBJECTS = 20_000

Value = TypeVar("Value")


class Protocol(H11Protocol):
    """An HTTP connection that is closed if no request arrives within HEAD_SECONDS.

    The connection is also read while a request is answered, to detect a disconnect. uvicorn stops
    reading as soon as the next request has begun to arrive. A client that has ended only its own
    side of the connection (HTTP/1.1) gets the answer. TCP does not tell it from a client that is
    gone, but only the latter resets a connection on which it receives something: interim responses,
    until the answer begins.

    open_connections: gets the number of connections of this process, and returns the number of
    all processes of the server.
    """

    open_connections: ClassVar[Callable[[int], int]] = int

    def connection_made(self, transport: Any) -> None:
        self._behind, self._half_closed = b"", False
        super().connection_made(transport)
        self._counted()
        self._most, self.limit_concurrency = self.limit_concurrency, None  # see data_received
        # asyncio sets TCP_NODELAY only for sockets that name their protocol; accepted sockets do
        # not. Without it, a piece of a stream waits up to 40 ms until the client acknowledges the
        # previous piece.
        with suppress(OSError):  # Unix sockets lack the option
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.DONE:
            self._behind += data
        else:
            # Each request gets a copy of app_state. Access, not uvicorn, refuses requests.
            self.app_state["overloaded"] = self._counted() >= (self._most or math.inf)
            super().data_received(data)
        self._read_on()

    def _read_on(self) -> None:
        if self.conn.their_state is h11.DONE:
            self.flow.resume_reading()
            if len(self._behind) > MAX_BEHIND:
                self.transport.abort()

    @property
    def _answers(self) -> bool:
        """Whether a request has arrived as a whole, and its response is not complete."""
        return self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to keep the connection open, because a client waits for an answer."""
        keeps = self._answers and self.scope["http_version"] != "1.0"
        if keeps and not self._half_closed:
            self._half_closed = True
            self._probe(PROBE_SECONDS)
        return keeps

    def _probe(self, seconds: float) -> None:
        """Send an interim response; send the next one after `seconds`, until the answer begins."""
        if not (self.transport.is_closing() or self.cycle.response_started):
            event = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
            self.transport.write(self.conn.send(event))
            self.loop.call_later(seconds, self._probe, 2 * seconds)

    def send_400_response(self, msg: str) -> None:
        """Send an error in OpenAI's format for the h11 exception that is being handled."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        problem = f"the request: expected HTTP/1.1: {printable(str(error or msg))}"
        headers = {"connection": "close", "x-request-id": (id := request_id())}
        told = error_response(ApiError(status, problem), **headers)
        head = h11.Response(status_code=status, headers=told.raw_headers)
        for event in (head, h11.Data(data=bytes(told.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()
        log.info("%s: %d, %s", problem, status, id)

    def on_response_complete(self) -> None:
        behind, self._behind = self._behind, b""
        if behind:  # not b"", which h11 takes for the end of the connection
            self.conn.receive_data(behind)
        super().on_response_complete()
        if self._half_closed and not self._answers:
            self.transport.close()
        self._read_on()
        self._waiting.cancel()
        self._expect_request()

    def _expect_request(self) -> None:
        """Limit the time for a request's complete headers; uvicorn limits only the first byte."""
        self._waiting = self.loop.call_later(HEAD_SECONDS, self._close_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.cancel()
        super().connection_lost(exc)
        self._counted()

    def _counted(self) -> int:
        return type(self).open_connections(len(self.connections))

    def _close_if_silent(self) -> None:
        idle = self.cycle is None or self.cycle.response_complete
        if idle and not self.transport.is_closing():
            self.transport.close()


def exit_in_time() -> None:
    """End this process with code 1 if it still runs after EXIT_SECONDS.

    Otherwise a thread that cannot be interrupted, such as one that compiles a rule, could keep it.
    """
    timer = threading.Timer(EXIT_SECONDS, os._exit, [1])
    timer.daemon = True
    timer.start()


def allow_files(connections: int) -> None:
    """Raise the limit of open files to `connections` and more; warn if the hard limit is lower."""
    if sys.platform == "win32":
        return
    import resource  # noqa: PLC0415  (the module is missing on Windows)

    needed, unlimited = connections + OTHER_FILES, resource.RLIM_INFINITY
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed if hard == unlimited else min(needed, hard)
    if soft != unlimited and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if most < needed:
            problem = "ulimit -n is %d: expected %d or more, or fewer --connections than %d"
            log.warning(problem, most, needed, connections)


def settle() -> None:
    """Set Python's switch interval and garbage collection after a server has loaded its model.

    Later garbage collections skip all objects that exist now.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def counter(file: int, processes: int, index: int) -> Callable[[int], int]:
    """Return a function that sets a process's number of open connections; it returns their sum.

    file: descriptor of a shared file with a number for each process. index: number of the process.
    """
    counts = np.frombuffer(mmap.mmap(file, 4 * processes), np.uint32)

    def total(own: int) -> int:
        counts[index] = own
        return int(counts.sum())

    return total


def run(main: Coroutine[Any, Any, Value]) -> Value:
    """Return the result of a coroutine, run in an event loop of uvloop if it is installed."""
    if not find_spec("uvloop"):
        return asyncio.run(main)
    import uvloop  # noqa: PLC0415

    return uvloop.run(main)
