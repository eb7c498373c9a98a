"""Find the source line or variable at an address of a compiled program, with GNU binutils."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
_ENTRY = re.compile(r"^ <(\d+)><([0-9a-f]+)>: Abbrev Number: \d+ \((DW_TAG_\w+)\)", re.MULTILINE)
_NUMBERS = ("__half", "__nv_bfloat16")  # classes whose objects reports treat as plain numbers
_FIELD = re.compile(r"^ +<[0-9a-f]+> +(DW_AT_\w+) *: (.*)$", re.MULTILINE)


def line(program: Path, address: int) -> str:
    """Return "file:line", such as my.cu:12, of the call that returns to an address.

    If a function of the emulator's headers is inlined there, return the line that calls it.
    """
    return lines(program, [address])[address]


def lines(program: Path, addresses: Sequence[int]) -> dict[int, str]:
    """Return `line` of each address."""
    if not addresses:
        return {}
    texts = [f"{address - 1:#x}" for address in addresses]
    found = _output("addr2line", "-a", "-i", "-e", str(program), *texts)
    parts = re.split(r"^0x[0-9a-f]+\n", found, flags=re.MULTILINE)[1:]
    return dict(zip(addresses, map(_outer, parts), strict=True))


def _outer(found: str) -> str:
    each = [re.sub(r" \(discriminator \d+\)", "", line) for line in found.splitlines()]
    return next((line for line in each if str(HERE) not in line), each[0])


def variable(program: Path, address: int) -> str | None:
    """Return the array element or variable at an address, such as tile[3][4]; None if unknown.

    program: compiled with the locations of variables (-g).
    """
    found = located(program, address)
    return found.name if found else None


class Located(NamedTuple):
    """An array element or a variable. start: address of the whole array."""

    name: str
    ctype: str
    size: int
    start: int


@cache
def located(program: Path, address: int) -> Located | None:
    """Return the array element or variable at an address; None if unknown."""
    for start, size, entry, kind in _variables(program):
        if 0 <= address - start < size:
            name, element = _element(kind, address - start)
            ctype = element.name if "DW_AT_name" in element.fields else ""
            return Located(entry.name + name, ctype, _size(element), start)
    return None


@cache
def _variables(program: Path) -> list[tuple[int, int, _Entry, _Entry]]:
    """Return address, bytes, entry and type of each variable with a fixed address."""
    found = []
    for entry in _entries(program).values():
        place = re.search(r"DW_OP_addr: ([0-9a-f]+)\)", entry.fields.get("DW_AT_location", ""))
        kind = entry.reference("DW_AT_type")
        if place and kind is not None and "DW_AT_name" in entry.fields:
            found.append((int(place[1], 16), _size(kind), entry, kind))
    return found


@dataclass
class _Entry:
    """An entry (DIE) of a program's DWARF debugging information, with its nested entries."""

    tag: str
    fields: dict[str, str]
    all: dict[int, _Entry] = field(repr=False)
    children: list[_Entry] = field(default_factory=list, repr=False)

    @property
    def name(self) -> str:
        return self.fields["DW_AT_name"].rpartition("): ")[2].strip()

    def reference(self, name: str) -> _Entry | None:
        found = re.match(r"<0x([0-9a-f]+)>", self.fields.get(name, ""))
        return self.all.get(int(found[1], 16)) if found else None


class _Array(NamedTuple):
    extents: tuple[int, ...]
    element: _Entry


@cache
def _entries(program: Path) -> dict[int, _Entry]:
    """Return DWARF entries by offset. A definition's entry also gets its declaration's fields."""
    text = _output("readelf", "--debug-dump=info", str(program))
    found: dict[int, _Entry] = {}
    parents: list[_Entry] = []
    for depth, place, tag, body in _parts(text):
        entry = _Entry(tag, dict(_FIELD.findall(body)), found)
        del parents[depth:]
        if parents:
            parents[-1].children.append(entry)
        parents.append(entry)
        found[place] = entry
    for entry in found.values():
        for name in ("DW_AT_specification", "DW_AT_abstract_origin"):
            if declared := entry.reference(name):
                entry.fields = declared.fields | entry.fields
    return found


def _parts(text: str) -> Iterator[tuple[int, int, str, str]]:
    headers = list(_ENTRY.finditer(text))
    for header, following in zip(headers, [*headers[1:], None], strict=True):
        body = text[header.end() : following.start() if following else len(text)]
        yield int(header[1]), int(header[2], 16), header[3], body


def _plain(kind: _Entry) -> _Entry:
    """Return a type's entry after removing typedef, const and volatile."""
    while kind.tag in ("DW_TAG_typedef", "DW_TAG_const_type", "DW_TAG_volatile_type"):
        inner = kind.reference("DW_AT_type")
        if inner is None:
            break
        kind = inner
    return kind


def _array(kind: _Entry) -> _Array | None:
    element = kind.reference("DW_AT_type")
    if kind.tag != "DW_TAG_array_type" or element is None:
        return None
    bounds = [e.fields.get("DW_AT_upper_bound") for e in kind.children]
    return _Array(tuple(int(bound, 0) + 1 for bound in bounds if bound), element)


def _size(kind: _Entry) -> int:
    kind = _plain(kind)
    if array := _array(kind):
        size = _size(array.element)
        for extent in array.extents:
            size *= extent
        return size
    return int(kind.fields.get("DW_AT_byte_size", "1"), 0)


def _element(kind: _Entry, offset: int) -> tuple[str, _Entry]:
    """Return indices and members, such as "[3].x", and the type at an offset in a variable."""
    kind = _plain(kind)
    if array := _array(kind):
        index, inside = divmod(offset, max(1, _size(array.element)))
        indices = []
        for extent in reversed(array.extents):
            index, last = divmod(index, extent)
            indices.append(f"[{last}]")
        name, element = _element(array.element, inside)
        return "".join(reversed(indices)) + name, element
    if "DW_AT_name" in kind.fields and kind.name in _NUMBERS:
        return "", kind
    for member in (
        kind.children if kind.tag in ("DW_TAG_structure_type", "DW_TAG_class_type") else ()
    ):
        inner = member.reference("DW_AT_type")
        start = int(member.fields.get("DW_AT_data_member_location", "-1").split()[0], 0)
        if inner and "DW_AT_name" in member.fields and 0 <= offset - start < _size(inner):
            name, element = _element(inner, offset - start)
            return f".{member.name}{name}", element
    return "", kind


@cache
def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
