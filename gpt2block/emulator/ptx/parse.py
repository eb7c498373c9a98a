"""Read PTX text: the functions of a module with their instructions, and its variables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import takewhile
from math import prod
from threading import Lock
from typing import Any, NamedTuple

BITS = re.compile(r"\d+")
_VARIABLE = re.compile(
    r"\.(?P<space>global|const|shared|local|param)\s+(?:\.align\s+(?P<align>\d+)\s+)?"
    r"\.(?P<type>\w+)\s+(?:\.ptr\s+(?:\.\w+\s+(?:\d+\s+)?)*)?(?P<name>[\w$%]+)"
    r"(?P<size>(?:\[\d*\])*)(?:\s*=\s*(?P<value>[^;]*))?"
)
_OF_MODULE = re.compile(rf"^(?:\.extern\s+)?(?:\.\w+\s+)??{_VARIABLE.pattern};", re.M)
_FUNCTION = re.compile(r"^(?:\.visible\s+|\.weak\s+)?\.(entry|func)\b", re.M)
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.M)
_HEADER = re.compile(r"(?:\((?P<results>[^)]*)\)\s*)?(?P<name>[\w$]+)\s*(?:\((?P<params>[^)]*)\))?")
_DIRECTIVE = re.compile(r"\.(\w+)\b([^.]*)")
_BRACE = re.compile(r"[{}]")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_TOKEN = re.compile(
    r"\s*(?:(?P<scope>[{}])|\.loc\s+(?P<loc>[^\n]*)|(?P<label>[\w$]+)\s*:(?!:)(?!\s*\.(?:callprototype|branchtargets))"
    r"|(?:@(?P<guard>!?%?[\w$]+)\s+)?(?P<word>[\w$.:]+)\s*(?P<rest>(?:[^;])*);)"
)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|\((?:[^)]*)\)|[^,\s{}\[\]()]+")
_LOCAL = re.compile(
    r"\.b64 (__local_depot\d+)\s+\.b8 35\s+((?:\.b8 [\d,]+\s+)+)"
)  # DWARF: address + offset
_LOC = re.compile(r"(\d+)\s+(\d+)\s+(\d+)(?:.*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")


class PtxError(ValueError):
    """PTX text that has another form than this module knows."""


class Place(NamedTuple):
    """A line of a source. file: the number in the module's table."""

    file: int
    line: int


class Instruction(NamedTuple):
    """One instruction as text. scope: of the labels that it names."""

    opcode: str
    operands: tuple[str, ...]
    guard: str
    place: Place
    scope: int


@dataclass
class Variable:
    """A variable. value: its initialiser as text."""

    name: str
    space: str
    align: int
    bytes: int
    element: int
    type: str = "b8"
    value: str = ""


@dataclass
class Function:
    """A kernel (entry) or a function."""

    name: str
    entry: bool
    parameters: list[Variable]
    results: list[Variable]
    directives: dict[str, tuple[int, ...]]
    registers: dict[str, str] = field(default_factory=dict)  # name, or name before a number → type
    variables: dict[str, Variable] = field(default_factory=dict)
    code: list[Instruction] = field(default_factory=list)
    labels: dict[tuple[int, str], int] = field(default_factory=dict)
    scopes: list[int] = field(default_factory=lambda: [0])  # number of the scope around each scope
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)  # .branchtargets

    def target(self, label: str, scope: int) -> int:
        """Return the index of the instruction after a label, as seen from a scope."""
        while (scope, label) not in self.labels:
            if not scope:
                raise PtxError(f"no label {label} in {self.name}")
            scope = self.scopes[scope]
        return self.labels[scope, label]


@dataclass
class Module:
    """PTX text of one compilation. Functions are read when they are asked for."""

    text: str
    # Bytes of variables, as launches left them
    memory: dict[str, bytearray] = field(default_factory=dict)
    loaded: dict[str, Any] = field(default_factory=dict)  # kernels, as engine.py keeps them
    lock: Lock = field(default_factory=Lock, repr=False)  # guards memory and loaded

    @cached_property
    def files(self) -> dict[int, str]:
        """Return the paths of the sources by their numbers."""
        return {int(number): path for number, path in _FILE.findall(self.text)}

    @cached_property
    def variables(self) -> dict[str, Variable]:
        """Return the variables outside of functions."""
        return {each.name: each for each in map(_variable, _OF_MODULE.finditer(self.text))}

    @cached_property
    def locals(self) -> dict[str, list[tuple[int, str]]]:
        """Return the local variables that the debug information places in arrays of functions.

        By name of the array: offsets and names.
        """
        entries: dict[str, list[tuple[int, str]]] = {}
        for array, text in _LOCAL.findall(self.text):
            numbers = map(int, re.findall(r"(?<=[ ,])\d+", text))
            offset = 0
            for shift, each in zip(range(0, 64, 7), numbers, strict=False):
                offset |= (each & 127) << shift
                if each < 128:
                    break
            name = bytes(takewhile(bool, numbers)).decode()
            entries.setdefault(array, []).extend([(offset, name)] if name else [])
        return entries

    @cached_property
    def functions(self) -> dict[str, tuple[bool, re.Match[str]]]:
        """Return, by name, whether a function is a kernel, and its header."""
        functions = {}
        for match in _FUNCTION.finditer(self.text):
            header = _HEADER.search(self.text, match.end())
            assert header
            functions[header["name"]] = (match[1] == "entry", header)
        return functions

    def function(self, name: str) -> Function:
        """Return a kernel or a function. Raises KeyError if the module has none of this name."""
        entry, header = self.functions[name]
        start, end = self._body(header.end())
        function = Function(
            name,
            entry,
            _variables(header["params"] or ""),
            _variables(header["results"] or ""),
            {
                name: tuple(map(int, BITS.findall(values)))  # such as .maxntid 128, 1, 1
                for name, values in _DIRECTIVE.findall(self.text, header.end(), start)
            },
        )
        headers = {number for number, path in self.files.items() if "/include/" in path}
        _Reader(function, headers).read(_COMMENT.sub("", self.text[start + 1 : end]))
        return function

    def _body(self, at: int) -> tuple[int, int]:
        start = self.text.find("{", at)
        semicolon = self.text.find(";", at)
        if start < 0 or 0 <= semicolon < start:
            return at, at  # a prototype
        depth = 0
        for brace in _BRACE.finditer(self.text, start):
            depth += 1 if brace[0] == "{" else -1
            if not depth:
                return start, brace.start()
        raise PtxError("a brace is not closed")


def _variables(text: str) -> list[Variable]:
    return [_variable(match) for match in _VARIABLE.finditer(text)]


def _variable(match: re.Match[str]) -> Variable:
    element = type_bytes(match["type"])
    count = prod(map(int, BITS.findall(match["size"])))
    return Variable(
        match["name"],
        match["space"],
        int(match["align"] or element),
        0 if "[]" in match["size"] else count * element,
        element,
        match["type"],
        (match["value"] or "").strip(),
    )


def type_bytes(name: str) -> int:
    """Return the bytes of a value of a type such as "u32"; 1 for "pred"."""
    bits = BITS.search(name)
    return max(1, int(bits[0]) // 8) if bits else 1


class _Reader:
    """Reads the body of a function."""

    def __init__(self, function: Function, headers: set[int]) -> None:
        self.function = function
        self.headers = headers  # numbers of files whose lines mean nothing to a user
        self.scope = 0
        self.renamed: list[dict[str, str]] = [{}]  # names of the open nested scopes
        self.place = Place(0, 0)
        self.outer: dict[tuple[int, ...], tuple[int, ...]] = {}  # position → where it was inlined

    def read(self, body: str) -> None:
        for token in _TOKEN.finditer(body):
            if token["word"]:
                self._statement(token["word"], token["rest"], token["guard"] or "")
            elif token["loc"]:
                self._line(token["loc"])
            elif token["label"]:
                label = self.scope, token["label"]
                self.function.labels[label] = len(self.function.code)
            elif token["scope"] == "{":
                self.function.scopes.append(self.scope)
                self.scope = len(self.function.scopes) - 1
                self.renamed.append(dict(self.renamed[-1]))
            else:
                self.scope = self.function.scopes[self.scope]
                self.renamed.pop()

    def _statement(self, word: str, rest: str, guard: str) -> None:
        if rest.startswith(":"):  # a table or a prototype: its name stands before it
            if ".branchtargets" in rest:
                self.function.tables[word] = tuple(_OPERAND.findall(rest.split("targets")[1]))
        elif not word.startswith("."):
            if self.renamed[-1]:
                rest = re.sub(r"[\w$%]+", self._current, rest)
                guard = re.sub(r"[\w$%]+", self._current, guard)
            operands = tuple(_OPERAND.findall(rest))
            self.function.code.append(Instruction(word, operands, guard, self.place, self.scope))
        elif word.startswith(".reg"):
            kind, _, names = f"{word[4:]} {rest}".strip(" .").partition(" ")
            self._registers(kind, names)
        elif word in (".param", ".local", ".shared"):
            match = _VARIABLE.match(f"{word} {rest}")
            if not match:
                raise PtxError(f"{word} {rest}")
            variable = _variable(match)
            variable.name = self._declare(variable.name)
            self.function.variables[variable.name] = variable

    def _current(self, name: re.Match[str]) -> str:
        return self.renamed[-1].get(name[0], name[0])

    def _declare(self, name: str) -> str:
        """Return the unique name of a variable or register that the current scope declares."""
        if self.scope:
            self.renamed[-1][name] = f"{name}${self.scope}"
        return self.renamed[-1].get(name, name)

    def _registers(self, kind: str, names: str) -> None:
        for name in names.replace(" ", "").replace("\t", "").replace("\n", "").split(","):
            stem, ranged, count = name.partition("<")
            if ranged and self.scope:
                for number in range(int(count.rstrip(">"))):
                    self.function.registers[self._declare(f"{stem}{number}")] = kind
            else:
                self.function.registers[self._declare(stem)] = kind

    def _line(self, text: str) -> None:
        numbers = _numbers(text)
        if not numbers:
            return
        here = numbers[:3]
        self.outer[here] = numbers[3:]
        for _ in range(32):  # positions may name each other in a circle
            if here[0] not in self.headers or not any(self.outer.get(here, ())):
                break
            here = self.outer[here]
        if here[1] and here[0] not in self.headers:
            self.place = Place(here[0], here[1])


@lru_cache(maxsize=4096)
def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a .loc: file, line and column, and those of where it was inlined."""
    match = _LOC.match(text)
    return tuple(int(each or 0) for each in match.groups()) if match else ()


def calls(function: Function) -> Iterator[tuple[tuple[str, ...], str, tuple[str, ...]]]:
    """Yield the `call_target` of each call instruction."""
    for instruction in function.code:
        if instruction.opcode.startswith("call"):
            yield call_target(instruction)


def call_target(instruction: Instruction) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Return the results, the function and the arguments of a call."""
    operands = (*instruction.operands, "")
    lists = [tuple(_OPERAND.findall(each.strip("()"))) * (each[:1] == "(") for each in operands]
    name = int(operands[0].startswith("("))  # results come before it
    return lists[0], operands[name], lists[name + 1]
