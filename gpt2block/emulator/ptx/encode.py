"""Turn a kernel's instructions into records for the engine's C++ (cpp/machine.h)."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from gpt2block.emulator.ptx import parse, table

# Kinds of operands, as in machine.h.
ROW, PREDICATE, NOT_PREDICATE, ADDRESS, LABEL, NONE = range(6)
FIRST_ARRAY, ARRAY_SHIFT = 4, 36  # machine.h has the same numbers
ARRAY_START = 1 << 35  # offset of an array in its range of addresses
GAP = 128  # least bytes after a variable of shared memory, in which any access is out of bounds
CODE = 1 << 60  # + the index of an instruction: the address of a function
# Number of results and arguments of each function of a GPU's driver that calls.h executes
BUILT_IN = {"vprintf": 3, "__assertfail": 5}
REFUSED = {  # pattern of another function's name → why the emulator does not execute a call
    "malloc|free": "it has no heap for malloc, free, new and delete",
    "_*cuda.*": "it launches no kernel from a kernel",
    ".*": "it knows no such function with these arguments",
}
_ADDRESS = re.compile(r"^([\w$%.]+)\s*(?:\+\s*(-?\w+)|(-\w+))?$")
_PARTS = re.compile(r"\{[^}]*\}|[^,\s{}]+")
_REGISTER = re.compile(r"%\w+")
_WORD = re.compile(r"[A-Za-z_$][\w$]*")
_VARYING = frozenset(("%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo"))
_MEMORY = frozenset(("ld", "ldu", "st", "atom", "red"))


class UnsupportedError(ValueError):
    """An instruction that the engine does not execute. place: its line."""

    def __init__(self, text: str, place: parse.Place | None = None) -> None:
        super().__init__(text)
        self.place = place


@dataclass
class Encoded:
    """A kernel as flat tables."""

    kernel: str
    forms: dict[str, int] = field(default_factory=dict)
    code: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    operands: list[tuple[int, int, int, int]] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)  # rows of vectors
    constants: list[int] = field(default_factory=list)  # row -1 - n has 32 times value n
    rows: int = 1  # row 0 is written by the destination "_"
    predicates: int = 0
    specials: dict[str, int] = field(default_factory=dict)
    places: dict[parse.Place, int] = field(default_factory=lambda: {parse.Place(0, 0): 0})
    entry: int = 0
    granule: int = 4  # bytes of the smallest access
    shared: list[tuple[int, parse.Variable]] = field(default_factory=list)  # with their offsets
    shared_bytes: int = 0
    dynamic: parse.Variable | None = None  # the extern array
    local: list[tuple[int, parse.Variable]] = field(default_factory=list)
    local_bytes: int = 0
    parameters: list[tuple[int, parse.Variable]] = field(default_factory=list)
    parameter_bytes: int = 0
    variables: list[parse.Variable] = field(default_factory=list)  # global and constant variables
    functions: dict[str, int] = field(default_factory=dict)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Return the ranges of bytes between variables in shared memory."""
        ends = [*(offset for offset, _ in self.shared[1:]), self.shared_bytes]
        each = zip(self.shared, ends, strict=False)
        return [(at + variable.bytes, end) for (at, variable), end in each]


def encode(module: parse.Module, kernel: str) -> Encoded:
    """Encode a kernel with the functions that it calls. Raises UnsupportedError."""
    return _Encoder(module, kernel).encode()


def address_of(number: int) -> int:
    """Return the address of an array of a launch: first come variables, then arguments."""
    return (FIRST_ARRAY + number << ARRAY_SHIFT) + ARRAY_START


@lru_cache(maxsize=4096)
def _number(text: str) -> int | None:
    """Return the bits of a literal, or None for a name."""
    if text[:2] in ("0f", "0F", "0d", "0D") and len(text) in (10, 18):
        return int(text[2:], 16)
    if text[0].isdigit() or text[0] == "-":
        plain = text.rstrip("U")
        if re.fullmatch(r"-?\d+\.\d*(?:[eE][-+]?\d+)?", plain):
            return int.from_bytes(struct.pack("<d", float(plain)), "little")
        sign, plain = (-1, plain[1:]) if plain[0] == "-" else (1, plain)
        octal = len(plain) > 1 and plain[0] == "0" and plain.isdigit()
        return sign * (int(plain, 8) if octal else int(plain, 0)) & 2**64 - 1
    return 32 if text == "WARP_SZ" else None


class _Encoder:
    def __init__(self, module: parse.Module, kernel: str) -> None:
        self.module = module
        self.made = Encoded(kernel)
        self.function = module.function(kernel)
        self.rows: dict[str, int] = {}
        self.predicates: dict[str, int] = {}
        self.operands: dict[str, tuple[int, int, int, int]] = {}  # the function's operands, by text
        self.functions: dict[str, parse.Function] = {}
        # function → parameters' offsets in local memory
        self.frames: dict[str, dict[str, int]] = {}
        self.returns: dict[str, int] = {}  # function → row of the return address
        self.aliases: dict[str, int] = {}  # variables in local memory → their offsets
        self.constants: dict[int, int] = {}
        self.shared_frames: dict[tuple[tuple[int, int], ...], tuple[int, list[int]]] = {}
        self.later: dict[str, list[int]] = {}  # function → operands that wait for its place

    def encode(self) -> Encoded:
        code = self.made
        entry = self.function
        code.directives = entry.directives
        code.parameter_bytes, offsets = _layout(entry.parameters)
        code.parameters = list(zip(offsets, entry.parameters, strict=True))
        for name in self._order(code.kernel, []):
            self._function(self.functions[name])
        code.entry = code.functions[code.kernel]
        self._place_shared()
        return code

    def _order(self, name: str, open_: list[str]) -> list[str]:
        """Return a function's name after the names of the functions that it calls."""
        if name in open_:
            for other in open_[open_.index(name) :]:
                if any(v.space == "local" for v in self.functions[other].variables.values()):
                    raise UnsupportedError(
                        f"the recursive function {other}, which has local arrays"
                    )
        if name in self.functions:
            return []
        known = name == self.function.name  # the kernel
        self.functions[name] = function = self.function if known else self.module.function(name)
        if not function.entry:
            formal = (*function.results, *function.parameters)
            row, offsets = self._frame(formal, name not in self._targets)
            self.returns[name] = row
            self.frames[name] = dict(zip((each.name for each in formal), offsets, strict=True))
        called = [name for _, name, _ in parse.calls(function)]
        names = [each for each in called if each in self.module.functions]
        names += self._targets if any(each[0] == "%" for each in called) else ()
        below = [each for other in names for each in self._order(other, [*open_, name])]
        return [*below, name]

    @cached_property
    def _targets(self) -> list[str]:
        """Return the functions to which a variable or an instruction points."""
        names = [name for name, (entry, _) in self.module.functions.items() if not entry]
        values = " ".join(each.value for each in self.module.variables.values())
        words = {
            *_WORD.findall(values),
            *re.findall(r"\smov\.u64\s+%\w+, ([\w$]+);", self.module.text),
        }
        return [name for name in names if name in words]

    def _frame(self, formal: Sequence[parse.Variable], own: bool) -> tuple[int, list[int]]:
        """Return the row of a function's return address, and the offsets of its parameters.

        Functions that are called through pointers share them if their parameters are alike.
        """
        alike = tuple((each.bytes, each.align) for each in formal)
        if own or alike not in self.shared_frames:
            made = self._new_row(), [self._local(each) for each in formal]
            if own:
                return made
            self.shared_frames[alike] = made
        return self.shared_frames[alike]

    def _function(self, function: parse.Function) -> None:
        self.function = function
        self.rows, self.predicates, self.operands = {}, {}, {}
        self.aliases = dict(self._arguments(function))
        start = len(self.made.code)
        self.made.functions[function.name] = start
        for operand in self.later.pop(function.name, ()):
            self.made.operands[operand] = LABEL, start, 0, 0
        for instruction in _remove_unused(function.code):
            try:
                self._instruction(instruction, start)
            except parse.PtxError as error:
                raise UnsupportedError(str(error), instruction.place) from error
        last = function.code[-1].place if function.code else parse.Place(0, 0)
        self._instruction(parse.Instruction("ret", (), "", last, 0), start)

    def _arguments(self, function: parse.Function) -> list[tuple[str, int]]:
        """Return the offsets of the variables that hold arguments and results of calls."""
        places: list[tuple[str, int]] = []
        for results, name, arguments in parse.calls(function):
            actual = (*results, *arguments)
            if name in self.frames:
                places += zip(actual, self.frames[name].values(), strict=True)
            elif name.startswith("%"):
                formal = [function.variables[each] for each in actual]
                places += zip(actual, self._frame(formal, own=False)[1], strict=True)
        return places

    def _local(self, variable: parse.Variable) -> int:
        """Return the offset of a new variable in the local memory of a thread."""
        code = self.made
        at = -(-code.local_bytes // variable.align) * variable.align
        code.local.append((at, variable))
        code.local_bytes = at + variable.bytes
        return at

    def _new_row(self, count: int = 1) -> int:
        self.made.rows += count
        return self.made.rows - count

    def _instruction(self, each: parse.Instruction, start: int) -> None:
        name, _, rest = each.opcode.partition(".")
        opcode, operands = each.opcode, list(each.operands)
        if name == "call":
            opcode, operands = self._call(each)
        elif name in ("ret", "exit"):
            entry = self.function.entry or name == "exit"
            opcode = "exit" if entry else "ret"
            operands = [] if entry else [f"@back {self.returns[self.function.name]}"]
        elif name == "mov" and operands[1] in _VARYING:
            opcode, operands = f"clock.{rest}", operands[:1]
        elif name in ("ld", "st") and ".param" in opcode and not self._reads_kernel(operands):
            opcode = re.sub(r"\.param(::\w+)?", ".local.param::func", opcode)
        if table.find(opcode) is None:
            raise UnsupportedError(f"{each.opcode} {', '.join(each.operands)}", each.place)
        if name in _MEMORY and ".param" not in opcode and ".local" not in opcode:
            width = min(
                parse.type_bytes(word) for word in rest.split(".") if re.match(r"b?[busf]\d", word)
            )
            self.made.granule = min(self.made.granule, width)
        self._record(opcode, operands, each, start)

    def _reads_kernel(self, operands: list[str]) -> bool:
        """Return whether a load from .param reads a parameter of the kernel."""
        base = re.match(r"\[\s*([\w$%]+)", operands[-1])
        return self.function.entry and bool(base) and base[1] not in self.function.variables  # type: ignore[index]

    def _record(
        self, opcode: str, operands: list[str], each: parse.Instruction, start: int
    ) -> None:
        code = self.made
        first = len(code.operands)
        for text in operands:
            if text in self.operands:
                code.operands.append(self.operands[text])
                continue
            before = len(code.operands)
            self._operand(text.strip(), each, start)
            if len(code.operands) == before + 1 and code.operands[-1][0] != LABEL:
                self.operands[text] = code.operands[-1]
        guard = 0
        if each.guard:
            plain = each.guard.lstrip("!")
            guard = self._predicate(plain) + 1
            guard = -guard if plain != each.guard else guard
        form = code.forms.setdefault(opcode, len(code.forms))
        place = code.places.setdefault(each.place, len(code.places))
        code.code.append((form, guard, first, len(code.operands) - first, place))

    def _call(self, each: parse.Instruction) -> tuple[str, list[str]]:
        results, name, arguments = parse.call_target(each)
        if name in self.functions:
            running = name not in self.made.functions or name == self.function.name
            saved = [f"@saved {name}"] if running else []
            return "call", [f"@code {name}", f"@back {self.returns[name]}", *saved]
        if BUILT_IN.get(name) == len((*results, *arguments)):
            return name.strip("_"), [f"[{argument}]" for argument in (*results, *arguments)]
        if name.startswith("%"):
            formal = [self.function.variables[each] for each in (*results, *arguments)]
            return "call", [name, f"@back {self._frame(formal, own=False)[0]}"]
        why = next(why for pattern, why in REFUSED.items() if re.fullmatch(pattern, name))
        raise UnsupportedError(f"a call of {name}: {why}", each.place)

    def _operand(self, text: str, each: parse.Instruction, start: int) -> None:
        add = self.made.operands.append
        if text.startswith("@"):
            add(self._call_operand(*text[1:].split()))
        elif text == "_":
            add((NONE, 0, 1, 0))
        elif text.startswith("["):
            self._address(text[1:-1].strip(), each, start)
        elif text.startswith("{"):
            self._vector([self._row(part.strip()) for part in _PARTS.findall(text[1:-1])])
        elif "|" in text:
            for part in text.split("|"):
                self._operand(part.strip(), each, start)
        elif text.startswith("!") or (of := self._type(text)) == "pred":
            kind = NOT_PREDICATE if text[0] == "!" else PREDICATE
            add((kind, self._predicate(text.lstrip("!")), 0, 0))
        elif not of and each.opcode.startswith("br"):
            for label in self.function.tables.get(text, (text,)):
                add((LABEL, start + self.function.target(label, each.scope), 0, 0))
        else:
            row = self._row(text)
            self._vector([row, row + 1] if of == "b128" else [row])

    def _call_operand(self, what: str, name: str) -> tuple[int, int, int, int]:
        """Return an operand of a call or a return, which PTX does not have."""
        if what == "back":  # the row of the return address
            return ROW, int(name), 1, 0
        if what == "saved":  # the result in local memory of a function that may be running
            results = self.functions[name].results
            offset = self.frames[name][results[0].name] if results else 0
            return NONE, offset, results[0].bytes if results else 0, 0
        if name not in self.made.functions:
            self.later.setdefault(name, []).append(len(self.made.operands))
        return LABEL, self.made.functions.get(name, 0), 0, 0

    def _vector(self, rows: list[int]) -> None:
        if len(rows) == 1:
            self.made.operands.append((ROW, rows[0], 1, 0))
            return
        self.made.operands.append((ROW, len(self.made.parts), len(rows), 0))
        self.made.parts += rows

    def _address(self, text: str, each: parse.Instruction, start: int) -> None:
        base, comma, more = text.partition(",")
        match = _ADDRESS.match(base.strip())
        if not match:
            raise parse.PtxError(f"the address [{text}]")
        offset = _number(match[2] or match[3] or "0") or 0
        offset -= 2**64 if offset >= 2**63 else 0
        self.made.operands.append((ADDRESS, self._row(match[1]), 1, offset))
        if comma:  # the coordinates of a tensor map
            self._operand(more.strip(), each, start)

    def _type(self, name: str) -> str:
        registers = self.function.registers
        return registers.get(name) or registers.get(name.rstrip("0123456789"), "")

    def _predicate(self, name: str) -> int:
        if self._type(name) != "pred":
            raise parse.PtxError(f"{name} is no predicate")
        if name not in self.predicates:
            self.predicates[name] = self.made.predicates
            self.made.predicates += 1
        return self.predicates[name]

    def _row(self, name: str) -> int:
        """Return the row of a register or a constant, which has a negative number."""
        if name in self.rows:
            return self.rows[name]
        number = _number(name)
        kind = self._type(name)
        if number is not None:
            return self._constant(number)
        if name == "_":
            return 0
        if kind:
            self.rows[name] = self._new_row(2 if kind == "b128" else 1)
        elif name.startswith("%"):
            if name not in self.made.specials:
                self.made.specials[name] = self._new_row()
            return self.made.specials[name]
        else:
            self.rows[name] = self._constant(self._symbol(name))
        return self.rows[name]

    def _constant(self, value: int) -> int:
        return -1 - self.constants.setdefault(value, len(self.constants))

    def _symbol(self, name: str) -> int:
        """Return the address of a variable in its space, of a parameter, or of a function."""
        code = self.made
        of_kernel = code.parameters if self.function.entry else ()
        known = {each.name: offset for offset, each in of_kernel}
        known |= self.frames.get(self.function.name, {}) | self.aliases
        known |= {each: CODE + start for each, start in code.functions.items()}
        if name in known:
            return known[name]
        variable = self.function.variables.get(name) or self.module.variables.get(name)
        if variable is None:
            raise parse.PtxError(f"the name {name}")
        if variable.space in ("local", "param"):
            self.aliases[name] = self._local(variable)
            return self.aliases[name]
        return self._shared(variable) if variable.space == "shared" else self._global(variable)

    def _global(self, variable: parse.Variable) -> int:
        if variable not in self.made.variables:
            self.made.variables.append(variable)
            for name in _WORD.findall(variable.value):
                if name in self.module.variables:
                    self._global(self.module.variables[name])
        return address_of(self.made.variables.index(variable))

    def _shared(self, variable: parse.Variable) -> int:
        code = self.made
        for offset, known in code.shared:
            if known is variable:
                return offset
        if not variable.bytes:
            code.dynamic = variable
            return DYNAMIC
        gap = GAP if code.shared else 0
        at = -(-(code.shared_bytes + gap) // variable.align) * variable.align
        code.shared.append((at, variable))
        code.shared_bytes = at + variable.bytes
        return at

    def _place_shared(self) -> None:
        """Put dynamic shared memory after the variables whose size the kernel declares."""
        code = self.made
        align = max(16, code.dynamic.align if code.dynamic else 16)
        gap = GAP if code.shared else 0
        code.shared_bytes = -(-(code.shared_bytes + gap) // align) * align
        code.constants = [code.shared_bytes if n == DYNAMIC else n for n in self.constants]


DYNAMIC = (1 << 63) + 1  # stands for the offset of dynamic shared memory until all others are known


def _remove_unused(code: Sequence[parse.Instruction]) -> Sequence[parse.Instruction]:
    """Return the code with "_" for each result of an atomic operation that no instruction uses.

    ptxas removes such results, too.
    """
    if not (atomic := [each for each in code if each.opcode.startswith("atom")]):
        return code
    used = Counter(word for each in code for word in _REGISTER.findall(str(each)))
    unused = {each: ("_", *each.operands[1:]) for each in atomic if used[each.operands[0]] == 1}
    return [each._replace(operands=unused.get(each, each.operands)) for each in code]


def _layout(variables: list[parse.Variable]) -> tuple[int, list[int]]:
    """Return the bytes of variables one after the other, and their offsets."""
    offsets, size = [], 0
    for each in variables:
        at = -(-size // each.align) * each.align
        offsets.append(at)
        size = at + each.bytes
    return size, offsets
