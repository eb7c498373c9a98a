"""Interpreter for the pickles of `torch.save`, which never executes code from a pickle.

A pickle is a program for a stack machine. Python's own `pickle.Unpickler` imports and calls the
functions that the program names, and allocates the sizes that it declares. This interpreter knows
the opcodes that Python 3 writes in protocol 2, the protocol of `torch.save`. The interpreter
imports nothing: a name refers to an entry of the caller's allow-list, and a call runs the caller's
function of that name. `MAX_BYTES` and `MAX_OPCODES` bound memory and time.

`pickletools` of Python describes the opcodes, and reads their arguments.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from gpt2block.errors import CheckpointError

MAX_BYTES = 1 << 24  # limit of a pickle's size; gpt2-xl with its optimizer takes about 0.3 MB
MAX_OPCODES = 500_000  # limit of opcodes; gpt2-xl with its optimizer takes about 80,000
_MAX_NAME = 256  # bytes of a module's or a class's name
_MAX_INTEGER = 8  # bytes of an integer
_OPCODES = {each.code.encode("latin-1"): each for each in pickletools.opcodes}

Function = Callable[[tuple[Any, ...]], object]  # receives the arguments of a pickle's REDUCE opcode


@dataclass(frozen=True)
class GlobalName:
    """The full name of a global (a class or function) in a pickle; the global is not imported."""

    text: str


class OrderedDict(dict[object, object]):
    """Replacement of `collections.OrderedDict`; attributes that a pickle sets on it are dropped."""


def describe(value: object) -> str:
    """Return a text, number or name from a pickle as a short string; for other values, the type."""
    if isinstance(value, GlobalName):
        return value.text
    return repr(value)[:80] if isinstance(value, (str, int, float)) else type(value).__name__


class _BoundedStream:
    """The next `limit` bytes of a stream, of which at most MAX_BYTES can be read."""

    def __init__(self, stream: BinaryIO, limit: int) -> None:
        self._stream, self._left = stream, min(limit, MAX_BYTES)
        self._complete = limit <= MAX_BYTES  # whether the data ends at `limit`, not at MAX_BYTES

    def read(self, length: int) -> bytes:
        """Read exactly `length` bytes. If they exceed the limit, raise before any allocation."""
        if length > self._left and not self._complete:
            raise CheckpointError(f"expected a pickle of at most {MAX_BYTES:,} bytes, got more")
        data = self._stream.read(length) if length <= self._left else b""
        if len(data) < length:
            raise CheckpointError("truncated: its pickle goes beyond the end")
        self._left -= length
        return data

    def readline(self) -> bytes:
        """Read a line, such as the name of a module. Raises CheckpointError if it is too long."""
        line = self._stream.readline(min(_MAX_NAME, self._left))
        self._left -= len(line)
        if not line.endswith(b"\n"):
            raise CheckpointError(
                f"damaged pickle: a name that does not end within {len(line)} bytes: {line[:40]!r}"
            )
        return line


def _read_name(stream: _BoundedStream) -> str:
    """Read a module's and a class's name. `pickletools` would replace escapes in them, too."""
    return b".".join(stream.readline()[:-1] for _ in range(2)).decode("utf-8")


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
        self._stream: Any = _BoundedStream(stream, limit)
        self._functions = functions
        self._persistent = persistent
        self._stack: list[Any] = []
        self._outer: list[list[object]] = []  # saved stacks: one for each open MARK opcode
        self._memo: dict[int, object] = {}

    def load(self) -> Any:
        """Read the pickle to its end, and return the pickled value. Raises CheckpointError."""
        try:
            for _ in range(MAX_OPCODES):
                code = self._stream.read(1)
                opcode = _OPCODES.get(code)
                name = opcode.name if opcode else f"{code[0]:#04x}"
                if name == "STOP":
                    return self._stack.pop()
                if opcode is None or name not in _ACTIONS:
                    raise CheckpointError(
                        f"opcode {name} of the pickle is refused: torch.save does not write it"
                    )
                reader = _read_name if name == "GLOBAL" else opcode.arg and opcode.arg.reader
                _ACTIONS[name](self, reader(self._stream) if reader else None)
        except (IndexError, KeyError, UnicodeDecodeError) as error:
            raise CheckpointError(f"damaged pickle: {error!r:.100}") from error
        raise CheckpointError(f"expected a pickle of at most {MAX_OPCODES:,} opcodes, got more")

    def _push(self, value: object) -> None:
        self._stack.append(value)

    def _mark(self, _: None) -> None:
        self._outer.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[object]:
        values, self._stack = self._stack, self._outer.pop()
        return values

    def _tuple(self, length: int) -> None:
        values = [self._stack.pop() for _ in range(length)]
        self._push(tuple(reversed(values)))

    def _protocol(self, version: int) -> None:
        if version != 2:
            raise CheckpointError(f"expected a pickle of protocol 2, got protocol {version}")

    def _long(self, value: int) -> None:
        length = value.bit_length() // 8 + 1
        if length > _MAX_INTEGER:
            raise CheckpointError(f"an integer of {length} bytes in the pickle is refused")
        self._push(value)

    def _global(self, name: str) -> None:
        if name not in self._functions:
            raise CheckpointError(
                f"its pickle refers to {name}, which is refused: expected tensors and plain values "
                "only; save a state dict, or model and model_args as nanoGPT does"
            )
        self._push(GlobalName(name))

    def _call(self, _: None) -> None:
        arguments, name = self._stack.pop(), self._stack.pop()
        function = self._functions[name.text] if isinstance(name, GlobalName) else None
        if function is None or type(arguments) is not tuple:
            raise CheckpointError(f"its pickle calls {describe(name)}, which is refused")
        self._push(function(arguments))

    def _build(self, _: None) -> None:
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

    def _put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _get(self, index: int) -> None:
        self._push(self._memo[index])


# Name of an opcode → function of the machine and the opcode's argument, None without one
_ACTIONS: Mapping[str, Callable[[Unpickler, Any], None]] = {
    "PROTO": Unpickler._protocol,
    "NONE": Unpickler._push,
    "NEWTRUE": lambda machine, _: machine._push(True),
    "NEWFALSE": lambda machine, _: machine._push(False),
    **dict.fromkeys(("BININT1", "BININT2", "BININT", "BINFLOAT", "BINUNICODE"), Unpickler._push),
    "LONG1": Unpickler._long,
    "MARK": Unpickler._mark,
    "EMPTY_TUPLE": lambda machine, _: machine._tuple(0),
    "TUPLE1": lambda machine, _: machine._tuple(1),
    "TUPLE2": lambda machine, _: machine._tuple(2),
    "TUPLE3": lambda machine, _: machine._tuple(3),
    "TUPLE": lambda machine, _: machine._push(tuple(machine._since_mark())),
    "EMPTY_LIST": lambda machine, _: machine._push([]),
    "APPEND": lambda machine, _: machine._extend([machine._stack.pop()]),
    "APPENDS": lambda machine, _: machine._extend(machine._since_mark()),
    "EMPTY_DICT": lambda machine, _: machine._push({}),
    "SETITEM": lambda machine, _: machine._set([machine._stack.pop(-2), machine._stack.pop()]),
    "SETITEMS": lambda machine, _: machine._set(machine._since_mark()),
    "GLOBAL": Unpickler._global,
    "REDUCE": Unpickler._call,
    "BUILD": Unpickler._build,
    "BINPERSID": lambda machine, _: machine._push(machine._persistent(machine._stack.pop())),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), Unpickler._put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), Unpickler._get),
}
