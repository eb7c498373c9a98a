"""Items that the engine's side of a server and an HTTP side send each other."""

from __future__ import annotations

import asyncio
import pickle
import socket
from typing import Any

HEAD = 8  # bytes of a message's length


class Local:
    """One end of a connection of the two sides of a server in one process.

    An item is the name of a method of the other end's owner, with its arguments. `send` calls the
    method, and `close` calls `lost`. With sockets, the event loop would wait for the GIL, which the
    engine's thread has, once more for each item.
    """

    def __init__(self, other: Any) -> None:
        self._other, self.closed = other, False

    def send(self, name: str, *arguments: object) -> None:
        getattr(self._other, name)(*arguments)

    def close(self) -> None:
        self.closed = True
        self.send("lost")


class Channel(asyncio.Protocol):
    """One end of a connection of the two sides of a server, in two processes, as for Local.

    A message is an item as a pickle after its length; the sides belong to one server, and trust
    each other.
    """

    def __init__(self, owner: Any) -> None:
        self._owner, self._data = owner, bytearray()
        self._transport: Any = None

    @classmethod
    async def over(cls, held: socket.socket, owner: Any) -> Channel:
        """Return a channel over one of a pair of connected sockets."""
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_connection(lambda: cls(owner), sock=held)
        return channel

    @property
    def closed(self) -> bool:
        """Whether the other end can get no more items."""
        return bool(self._transport.is_closing())

    def send(self, name: str, *arguments: object) -> None:
        """Send an item, unless the channel is closed."""
        if not self.closed:
            data = pickle.dumps((name, arguments), pickle.HIGHEST_PROTOCOL)
            self._transport.write(len(data).to_bytes(HEAD, "little") + data)

    def close(self) -> None:
        """Send the remaining items, and close this end."""
        self._transport.close()

    def connection_made(self, transport: object) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := HEAD + int.from_bytes(self._data[:HEAD], "little")) <= len(self._data):
            name, arguments = pickle.loads(self._data[HEAD:end])
            del self._data[:end]
            getattr(self._owner, name)(*arguments)

    def connection_lost(self, error: Exception | None) -> None:
        self._owner.lost()
