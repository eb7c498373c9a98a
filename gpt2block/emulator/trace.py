"""Read the steps of threads that a launch with the search for races prints (trace.h)."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np

from gpt2block.emulator import places

Thread = tuple[int, int]  # (number of the block, number of the thread in the block)
Value = tuple[str, str]  # (element, value), such as ("x[12]", "0.5")
_FORMATS = {  # C++ type → letter of struct
    "float": "f", "double": "d", "__half": "e", "half": "e", "bool": "?",
    "char": "b", "signed char": "b", "int8_t": "b", "unsigned char": "B", "uint8_t": "B",
    "short": "h", "short int": "h", "unsigned short": "H", "short unsigned int": "H",
    "int": "i", "int32_t": "i", "unsigned": "I", "unsigned int": "I", "uint": "I", "uint32_t": "I",
    "long": "q", "long int": "q", "long long": "q", "long long int": "q", "int64_t": "q",
    "unsigned long long": "Q", "long unsigned int": "Q", "long long unsigned int": "Q",
    "size_t": "Q", "uint64_t": "Q",
}  # fmt: skip
_VECTOR = re.compile(r"(float|double|int|uint)([1234])")
_TEXTS = {
    "waits for the block": "waits at the barrier",
    "passes": "passes the barrier",
    "fence": "__threadfence()",
    "fence of the block": "__threadfence_block()",
}


@dataclass(frozen=True)
class TraceStep:
    """A step of a thread. place: "file:line", or "" if it is not known.

    values: accessed elements with their values, "" if a value is not known. site, variable:
    addresses of an access's code, and of the shared array that it accesses. outside: whether an
    access is outside of all arrays.
    """

    of: Thread
    event: str
    place: str = ""
    values: tuple[Value, ...] = ()
    site: int = 0
    variable: int = 0
    outside: bool = False


@dataclass
class Trace:
    """A traced launch: its settings, then its results.

    until: the problem at which the launch ends, as in trace.h. types: C++ types of the elements of
    arguments and of dynamic shared memory. threads: threads to trace; without them, the launch
    stores the threads of the problem in `met`. long: whether the threads have too many steps.
    """

    until: str
    types: Mapping[str, str]
    threads: Sequence[Thread] = ()
    met: tuple[Thread, ...] = ()
    steps: list[TraceStep] = field(default_factory=list)
    long: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the launch."""
        threads = " ".join(f"{block}:{thread}" for block, thread in self.threads)
        return {"TRACE": self.until} | ({"TRACED": threads} if threads else {})

    def read(self, report: str, program: Path, detailed: Callable[[], Path]) -> str:
        """Store the steps in a launch's report, and return the rest of the report.

        detailed: returns the program with debug information on variables.
        """
        rest: list[str] = []
        steps: list[list[str]] = []
        for line in report.splitlines(keepends=True):
            kind, _, text = line.rstrip("\n").partition("\t")
            if kind == "step":
                steps.append(text.split("\t"))
            elif kind.startswith("met "):
                pairs = (pair.split(":") for pair in kind.split()[1:])
                self.met = tuple((int(block), int(thread)) for block, thread in pairs)
            elif kind == "long":
                self.long = True
            else:
                rest.append(line)
        sites = {int(words[3], 16) for words in steps if words[3].startswith("0x")}
        lines = places.lines(program, sorted(sites))
        last: dict[Thread, str] = {}  # place of a thread's last barrier or exchange
        for words in steps:
            of, kind = (int(words[0]), int(words[1])), words[2]
            if words[3].startswith("0x"):
                step = self._access(of, kind, words[3:], lines, detailed)
            else:
                step = _event(of, kind, words[3:], last.get(of, ""))
                last[of] = step.place
            self.steps.append(step)
        return "".join(rest)

    def _access(
        self,
        of: Thread,
        kind: str,
        words: Sequence[str],
        lines: Mapping[int, str],
        detailed: Callable[[], Path],
    ) -> TraceStep:
        site, name, *numbers, address, now, before = words
        byte, size, whole, element = map(int, numbers)
        place = int(site, 16)
        if now == "outside":
            index, count = byte // element, whole // element
            event = f"{kind} {name}[{index}], outside: {name} has {count:,} elements"
            if name == "?":
                event = f"{kind} address {address}, outside of all arrays"
            return TraceStep(
                of, event, lines[place], ((f"{name}[{index}]", ""),), place, outside=True
            )
        ctype, start, first = self.types.get(name, ""), 0, int(address, 16)
        if not name:
            variable = places.located(detailed(), first)
            ctype, element, start = variable[1:] if variable else ("", size, 0)
        count = max(1, size // element)
        names = [f"{name}[{byte // element + i}]" for i in range(count)]
        if name == "?":  # omit the value: it is out of date if the variable's thread has returned
            names, now = ["a local variable of another thread"], ""
        if not name:
            found = [places.variable(detailed(), first + i * element) for i in range(count)]
            names = [each or "a shared variable" for each in found]
        values = shown(now, ctype, size // count)
        pairs = tuple(zip(names, [*values, *[""] * count][:count], strict=True))
        label = names[0] if count == 1 else f"{names[0]} to {names[-1]}"
        event = f"{kind} {label}"
        if before:
            old = ", ".join(shown(before, ctype, size // count))
            event += f": {old} → {', '.join(values)}" if now else f", which holds {old}"
        elif now:
            event += f" = {', '.join(values)}{', …' if len(values) < count else ''}"
        return TraceStep(of, event, lines[place], pairs, place, start)


def _event(of: Thread, kind: str, words: Sequence[str], last: str) -> TraceStep:
    """Return the step of a barrier, an exchange, a fence or a return."""
    if kind == "waits for the warp":
        place, mask, value, letter = words
        sent = f", sends {_scalar(value, letter)}" if letter != "?" else ""
        return TraceStep(of, f"waits for the lanes {mask}{sent}", place)
    if kind == "receives":
        source, takes_part, value, letter = words
        if takes_part == "0":
            return TraceStep(of, f"receives no value: lane {source} does not take part", last)
        received = _scalar(value, letter) if letter != "?" else "the value"
        return TraceStep(of, f"receives {received} from lane {source}", last)
    place = words[0] if words and words[0] else last if kind == "passes" else ""
    return TraceStep(of, _TEXTS.get(kind, kind), place)


def _scalar(hexadecimal: str, letter: str) -> str:
    """Return the value of the low bytes of a 64-bit number. letter: its type for struct."""
    data = int(hexadecimal, 16).to_bytes(8, "little")
    return _number(struct.unpack_from(f"<{letter}", data)[0])


def shown(hexadecimal: str, ctype: str, size: int) -> list[str]:
    """Return the values of elements of `size` bytes and a C++ type; hexadecimal if it is unknown.

    hexadecimal: the bytes, of which only the first may be known.
    """
    data = bytes.fromhex(hexadecimal)
    parts = [data[i : i + size] for i in range(0, len(data) // size * size, size)]
    return [_element(part, ctype) for part in parts]


def _element(data: bytes, ctype: str) -> str:
    vector = _VECTOR.fullmatch(ctype)
    if vector and len(data) % int(vector[2]) == 0:
        size = len(data) // int(vector[2])
        found = [_element(data[i : i + size], vector[1]) for i in range(0, len(data), size)]
        return f"({', '.join(found)})"
    if ctype == "__nv_bfloat16" and len(data) == 2:
        return _number(float(np.frombuffer(data, ml_dtypes.bfloat16)[0]))
    letter = _FORMATS.get(ctype, "")
    if not letter or struct.calcsize(f"<{letter}") != len(data):
        return f"0x{data[::-1].hex()}"
    return _number(struct.unpack(f"<{letter}", data)[0])


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(int(value))
