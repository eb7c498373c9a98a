"""Interpreter for the pickles of `torch.save`, which never executes code from a pickle.

A pickle is a program for a stack machine. Python's own `pickle.Unpickler` imports and calls the
functions that the program names, and allocates the sizes that it declares. This interpreter knows
the opcodes that Python 3 writes in protocol 2, the protocol of `torch.save`. It imports nothing: a
name refers to an entry of the caller's allow-list, and a call runs the caller's function of that
name. `MAX_BYTES` and `MAX_OPCODES` bound memory and time.

Source: the opcodes' descriptions in Python's `pickletools`.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from gpt2block.errors import CheckpointError

MAX_BYTES = 1 << 24  # limit of a pickle's size; gpt2-xl with its optimizer takes about 0.3 MB
MAX_OPCODES = 500_000  # limit of opcodes; gpt2-xl with its optimizer takes about 80,000
_MAX_NAME = 256  # bytes of a module's or a class's name
_MAX_INTEGER = 8  # bytes of an integer
_OPCODE_NAMES = {code.code.encode("latin-1"): code.name for code in pickletools.opcodes}

Function = Callable[[tuple[Any, ...]], object]  # receives the arguments of a pickle's REDUCE opcode


@dataclass(frozen=True)
class GlobalName:
    """The full name of a global (a class or function) in a pickle; it is not imported."""

    text: str


class OrderedDict(dict[object, object]):
    """Replacement of `collections.OrderedDict`; attributes that a pickle sets on it are dropped."""


def describe(value: object) -> str:
    """Return a text, number or name from a pickle as a short string; for other values, the type."""
    if isinstance(value, GlobalName):
        return value.text
    return repr(value)[:80] if isinstance(value, (str, int, float)) else type(value).__name__


class Unpickler:
    """Reader of one pickle of at most `limit` bytes from a stream.

    functions: the names that a pickle may contain, each with a function that is called with the
    pickle's arguments, or None where calling is not allowed. persistent: converts a persistent id
    to a value.
    """

    def __init__(
        self,
        stream: BinaryIO,
        limit: int,
        functions: Mapping[str, Function | None],
        persistent: Function,
    ) -> None:
        self._stream = stream
        self._left = min(limit, MAX_BYTES)
        self._complete = limit <= MAX_BYTES  # whether the data ends at `limit`, not at MAX_BYTES
        self._functions = functions
        self._persistent = persistent
        self._stack: list[Any] = []
        self._outer: list[list[object]] = []  # saved stacks: one for each open MARK opcode
        self._memo: dict[int, object] = {}

    def load(self) -> Any:
        """Read the pickle to its end, and return the pickled value. Raises CheckpointError."""
        try:
            for _ in range(MAX_OPCODES):
                opcode = self._read(1)
                if opcode == b".":  # STOP
                    return self._stack.pop()
                action = _ACTIONS.get(opcode)
                if action is None:
                    name = _OPCODE_NAMES.get(opcode, f"{opcode[0]:#04x}")
                    raise CheckpointError(
                        f"opcode {name} of the pickle is refused: torch.save does not write it"
                    )
                action(self)
        except (IndexError, KeyError, UnicodeDecodeError) as error:
            raise CheckpointError(f"damaged pickle: {error!r:.100}") from error
        raise CheckpointError(f"expected a pickle of at most {MAX_OPCODES:,} opcodes, got more")

    def _read(self, length: int) -> bytes:
        """Read exactly `length` bytes. If they exceed the limit, raise before any allocation."""
        if length > self._left:
            if self._complete:
                raise CheckpointError("truncated: its pickle goes beyond the end")
            raise CheckpointError(f"expected a pickle of at most {MAX_BYTES:,} bytes, got more")
        self._left -= length
        data = self._stream.read(length)
        if len(data) < length:
            raise CheckpointError("truncated: its pickle goes beyond the end")
        return data

    def _unsigned(self, width: int) -> int:
        return int.from_bytes(self._read(width), "little")

    def _signed(self, width: int) -> int:
        return int.from_bytes(self._read(width), "little", signed=True)

    def _push(self, value: object) -> None:
        self._stack.append(value)

    def _mark(self) -> None:
        self._outer.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[object]:
        values, self._stack = self._stack, self._outer.pop()
        return values

    def _tuple(self, length: int) -> None:
        values = [self._stack.pop() for _ in range(length)]
        self._push(tuple(reversed(values)))

    def _protocol(self) -> None:
        version = self._unsigned(1)
        if version != 2:
            raise CheckpointError(f"expected a pickle of protocol 2, got protocol {version}")

    def _long(self) -> None:
        length = self._unsigned(1)
        if length > _MAX_INTEGER:
            raise CheckpointError(f"an integer of {length} bytes in the pickle is refused")
        self._push(self._signed(length))

    def _float(self) -> None:
        self._push(struct.unpack(">d", self._read(8))[0])

    def _text(self) -> None:
        self._push(self._read(self._unsigned(4)).decode("utf-8", "surrogatepass"))

    def _line(self) -> str:
        line = self._stream.readline(min(_MAX_NAME, self._left))
        self._left -= len(line)
        if not line.endswith(b"\n"):
            raise CheckpointError(
                f"damaged pickle: a name that does not end within {len(line)} bytes: {line[:40]!r}"
            )
        return line[:-1].decode("utf-8")

    def _global(self) -> None:
        name = f"{self._line()}.{self._line()}"
        if name not in self._functions:
            raise CheckpointError(
                f"its pickle refers to {name}, which is refused: expected tensors and plain values "
                "only; save a state dict, or model and model_args as nanoGPT does"
            )
        self._push(GlobalName(name))

    def _call(self) -> None:
        arguments, name = self._stack.pop(), self._stack.pop()
        function = self._functions[name.text] if isinstance(name, GlobalName) else None
        if function is None or type(arguments) is not tuple:
            raise CheckpointError(f"its pickle calls {describe(name)}, which is refused")
        self._push(function(arguments))

    def _build(self) -> None:
        """Run opcode BUILD: drop an OrderedDict's attributes, refuse other objects' attributes."""
        state, target = self._stack.pop(), self._stack[-1]
        if not isinstance(target, OrderedDict) or not isinstance(state, dict):
            raise CheckpointError(f"its pickle sets attributes of {describe(target)}: refused")

    def _extend(self, values: list[object]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise CheckpointError(f"its pickle appends to {describe(target)}: refused")
        target.extend(values)

    def _set(self, values: list[object]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict):
            raise CheckpointError(f"its pickle sets items of {describe(target)}: refused")
        keys = values[::2]
        if len(values) % 2:
            raise CheckpointError("damaged pickle: a key of a dictionary has no value")
        for key in keys:  # no tuples: hashing a nested tuple can take exponential time
            if not isinstance(key, (str, int)):
                raise CheckpointError(
                    f"expected text and integers as keys of dictionaries, got {describe(key)}"
                )
        target.update(zip(keys, values[1::2], strict=True))

    def _put(self, width: int) -> None:
        self._memo[self._unsigned(width)] = self._stack[-1]

    def _get(self, width: int) -> None:
        self._push(self._memo[self._unsigned(width)])


_ACTIONS: Mapping[bytes, Callable[[Unpickler], None]] = {
    b"\x80": Unpickler._protocol,
    b"N": lambda machine: machine._push(None),
    b"\x88": lambda machine: machine._push(True),
    b"\x89": lambda machine: machine._push(False),
    b"K": lambda machine: machine._push(machine._unsigned(1)),
    b"M": lambda machine: machine._push(machine._unsigned(2)),
    b"J": lambda machine: machine._push(machine._signed(4)),
    b"\x8a": Unpickler._long,
    b"G": Unpickler._float,
    b"X": Unpickler._text,
    b"(": Unpickler._mark,
    b")": lambda machine: machine._tuple(0),
    b"\x85": lambda machine: machine._tuple(1),
    b"\x86": lambda machine: machine._tuple(2),
    b"\x87": lambda machine: machine._tuple(3),
    b"t": lambda machine: machine._push(tuple(machine._since_mark())),
    b"]": lambda machine: machine._push([]),
    b"a": lambda machine: machine._extend([machine._stack.pop()]),
    b"e": lambda machine: machine._extend(machine._since_mark()),
    b"}": lambda machine: machine._push({}),
    b"s": lambda machine: machine._set([machine._stack.pop(-2), machine._stack.pop()]),
    b"u": lambda machine: machine._set(machine._since_mark()),
    b"c": Unpickler._global,
    b"R": Unpickler._call,
    b"b": Unpickler._build,
    b"Q": lambda machine: machine._push(machine._persistent(machine._stack.pop())),
    b"q": lambda machine: machine._put(1),
    b"r": lambda machine: machine._put(4),
    b"h": lambda machine: machine._get(1),
    b"j": lambda machine: machine._get(4),
}
