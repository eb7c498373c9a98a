"""Messages between the process of a server's engine and its front processes."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

HEAD = 8  # bytes of a message's length
MAX_ITEMS = 8  # maximum items per message, so that a long turn of the event loop sends some early


class Channel(asyncio.Protocol):
    """One end of a connection of two processes, which send each other items in messages.

    An item is a name with arguments. A message has up to MAX_ITEMS items of a turn of the
    event loop, as a pickle after its length; the processes belong to one server, and trust each
    other.

    held: a connected Unix socket. receive: called with each item. lost: called when the connection
    has ended.
    """

    def __init__(
        self, held: socket.socket, receive: Callable[..., None], lost: Callable[[], None]
    ) -> None:
        self._held, self._receive, self._lost = held, receive, lost
        self._loop = asyncio.get_running_loop()
        self._items: list[object] = []
        self._data = bytearray()
        self._transport: Any = None

    @classmethod
    async def over(
        cls, held: socket.socket, receive: Callable[..., None], lost: Callable[[], None]
    ) -> Channel:
        """Return a channel over a connected Unix socket."""
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: cls(held, receive, lost), sock=held)
        return channel

    @property
    def closed(self) -> bool:
        """Whether the other end can get no more items."""
        return self._transport is None or bool(self._transport.is_closing())

    def send(self, name: str, *arguments: object) -> None:
        """Send an item at the end of this turn or with MAX_ITEMS, unless the channel is closed."""
        if not self._items:
            self._loop.call_soon(self._flush)
        self._items.append((name, *arguments))
        if len(self._items) >= MAX_ITEMS:
            self._flush()

    def _flush(self) -> None:
        """Send the items now; a transport of uvloop would write them at the end of the turn."""
        items, self._items = self._items, []
        if not items or self.closed:
            return
        data = message(items)
        if not self._transport.get_write_buffer_size():
            with suppress(OSError):  # BlockingIOError: the transport waits until it can write
                data = data[self._held.send(data) :]
        if data:
            self._transport.write(data)

    def close(self) -> None:
        """Send the remaining items, and close this end."""
        if not self.closed:
            self._flush()
            self._transport.close()

    def connection_made(self, transport: object) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := HEAD + int.from_bytes(self._data[:HEAD], "little")) <= len(self._data):
            items = pickle.loads(self._data[HEAD:end])
            del self._data[:end]
            for name, *arguments in items:
                self._receive(name, *arguments)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost()


def message(items: list[object]) -> bytes:
    """Return the bytes of a message."""
    data = pickle.dumps(items, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(HEAD, "little") + data


def first_item(held: socket.socket) -> Any:
    """Wait for the first message of a connected socket, and return its only item's argument.

    Raises EOFError if the other process ends before.
    """
    size = int.from_bytes(_received(held, HEAD), "little")
    ((_, found),) = pickle.loads(_received(held, size))
    return found


def _received(held: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = held.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
