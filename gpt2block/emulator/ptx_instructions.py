"""Translate single PTX instructions to calls of the functions in ptx.h."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

_N = "ptx_on_cpu::"
_F16, _BF16 = f"{_N}F16", f"{_N}BF16"
_TYPES = {
    **{f"{kind}{n}": f"std::{'' if kind == 's' else 'u'}int{n}_t" for kind in "bus" for n in (8, 16, 32, 64)},
    "f32": "float", "f64": "double", "f16": _F16, "bf16": _BF16, "pred": "bool",
    "f16x2": f"{_N}Pair<{_F16}>", "bf16x2": f"{_N}Pair<{_BF16}>",
}  # fmt: skip
_BITS = {"f16": 16, "bf16": 16, "f16x2": 32, "bf16x2": 32, "f32": 32, "f64": 64}
_OF_CONSTRAINT = {"h": 16, "r": 32, "f": 32, "l": 64, "d": 64, "n": 64}
_SPECIAL = {
    "%laneid": "cuda_on_cpu::lane()",
    "%warpid": f"{_N}thread() / 32",
    "%nwarpid": "(blockDim.x * blockDim.y * blockDim.z + 31) / 32",
    **{f"%{ptx}.{axis}": f"{cpp}.{axis}" for axis in "xyz" for ptx, cpp in {
        "tid": "threadIdx", "ntid": "blockDim", "ctaid": "blockIdx", "nctaid": "gridDim"}.items()},
    "%smid": "0", "%nsmid": "1", "%gridid": "0",
    "%clock": "clock()", "%clock_hi": "0", "%clock64": "clock64()", "%globaltimer": "clock64()",
    "%globaltimer_lo": "clock()",
    "%lanemask_eq": f"{_N}lane_bit()",
    "%lanemask_lt": f"{_N}lanes_below()",
    "%lanemask_le": f"({_N}lanes_below() | {_N}lane_bit())",
    "%lanemask_ge": f"~{_N}lanes_below()",
    "%lanemask_gt": f"~({_N}lanes_below() | {_N}lane_bit())",
    "WARP_SZ": "32",
}  # fmt: skip
_MODES = {"rn": "FE_TONEAREST", "rz": "FE_TOWARDZERO", "rm": "FE_DOWNWARD", "rp": "FE_UPWARD"}
_HINT = re.compile(r"L1::(no_allocate|evict_\w+)|L2::(evict_\w+|64B|128B|256B|cache_hint)")
_CACHE = {"ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc"}
_SCOPES = {"cta", "gpu", "sys"}
_ORDERS = {"relaxed", "acquire", "release", "acq_rel", "sc", "weak"}
# Instruction → types of the result and of the operands: T: type of the instruction, U: 32 bits, P: predicate.
_SIMPLE = {
    **dict.fromkeys(("add", "sub", "min", "max", "and", "or", "xor", "rem", "copysign"), "TTT"),
    **dict.fromkeys(("mul", "div"), "TTT"), **dict.fromkeys(("fma", "mad"), "TTTT"),
    **dict.fromkeys(("neg", "abs", "not", "brev", "ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh"), "TT"),
    "shl": "TTU", "shr": "TTU", "popc": "UT", "clz": "UT", "bfe": "TTUU", "bfi": "TTTUU", "prmt": "TTTT",
    "lop3": "TTTTU", "selp": "TTTP",
}  # fmt: skip
_CPP_NAMES = {name: f"{name}_" for name in ("and", "or", "xor", "not")}
_APPROXIMATE = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh", "div")
_OUT_OF_REACH = re.compile(
    r"wgmma|tcgen05|cp\.async\.bulk|cp\.reduce|tensormap|mapa|setmaxnreg|clusterlaunchcontrol|multimem"
    r"|\w[\w.]*\.(?:shared::)?cluster\b|barrier\.cluster|elect"
)


class Unknown(Exception):
    """An instruction or operand that the emulator does not support."""


class Operand(NamedTuple):
    """A register, as the C++ variable `name`; constraint: letter of asm, or a size in bits."""

    name: str
    constraint: str

    @property
    def register(self) -> str:
        if self.constraint == "n":
            return "long long"
        if self.constraint == "pred":
            return "bool"
        return f"std::uint{_OF_CONSTRAINT.get(self.constraint) or self.constraint}_t"


def declared(name: str, kind: str) -> Operand:
    """Return the register that `.reg .kind name` declares."""
    if kind not in _TYPES or not re.fullmatch(r"[\w$%]+", name):
        raise Unknown(f"the emulator does not support the register .reg .{kind} {name}")
    plain = re.sub(r"\W", "_", name)
    if kind == "pred":
        return Operand(f"ptx_reg_{plain}", "pred")
    return Operand(f"ptx_reg_{plain}", str(_BITS.get(kind) or max(16, int(kind[1:]))))


class _Instruction(NamedTuple):
    code: str  # such as add.rn.f32
    base: str  # such as add
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    names: Mapping[str, Operand]

    @property
    def types(self) -> list[str]:
        return [each for each in self.modifiers if each in _TYPES]

    @property
    def type(self) -> str:
        if not self.types:
            raise self.unknown()
        return self.types[-1]

    def unknown(self) -> Unknown:
        if _OUT_OF_REACH.match(self.code):
            return Unknown(f"the PTX instruction {self.code} is out of the emulator's reach")
        return Unknown(f"the emulator lacks the PTX instruction {self.code}")

    def allow(self, *allowed: str | Collection[str]) -> None:
        """Raise Unknown if the instruction has other modifiers, apart from types."""
        known = {
            each for group in allowed for each in ((group,) if isinstance(group, str) else group)
        }
        if not known.issuperset(each for each in self.modifiers if each not in _TYPES):
            raise self.unknown()

    def expect(self, *numbers: int) -> None:
        if len(self.operands) not in numbers:
            raise Unknown(f"the PTX instruction {self.code} with {len(self.operands)} operands")

    def has(self, *modifiers: str) -> bool:
        return any(each in self.modifiers for each in modifiers)

    def raw(self, text: str) -> str:
        """Return a C++ expression for an operand: a register, a special register or a number."""
        text = text.strip()
        if text.startswith("!"):
            return f"!{self.raw(text[1:])}"
        if text in self.names:
            return self.names[text].name
        if text in _SPECIAL:
            return f"({_SPECIAL[text]})"
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            return f"0x{text[2:]}u"
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
            return f"0x{text[2:]}ull"
        if number := re.fullmatch(r"(-?)(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?", text):
            return f"({number[1]}{number[2]}ll)" if len(number[2]) < 18 else f"{number[2]}ull"
        if re.fullmatch(r"-?\d+\.\d*(?:[eE][-+]?\d+)?|-?\d+[eE][-+]?\d+", text):
            return f"({text})"
        raise Unknown(
            f"the emulator does not know the operand {text or '(nothing)'} of {self.code}"
        )

    def value(self, text: str, type_: str) -> str:
        """Return a C++ expression for an operand as a number of a PTX type."""
        return f"{_N}as<{_TYPES[type_]}>({self.raw(text)})"

    def assigned(self, text: str, expression: str) -> str:
        """Return a C++ statement that sets a register; the register `_` drops the value."""
        if text.strip() == "_":
            return f"(void)({expression});"
        return f"{_N}set({self.raw(text)}, {expression});"

    def address(self, text: str) -> str:
        found = re.fullmatch(r"\[\s*([^\s+\]]+)\s*(?:\+\s*(-?\w+|%\w+)\s*)?\]", text)
        if not found:
            raise Unknown(f"the emulator does not understand the address {text} of {self.code}")
        offset = f" + {self.value(found[2], 's64')}" if found[2] else ""
        return f"{self.value(found[1], 'u64')}{offset}"

    def pointer(self, text: str, type_: str) -> str:
        """Return a C++ pointer for an address in the instruction's state space."""
        if self.has("shared", "shared::cta"):
            return f"{_N}shared<{type_}>({self.address(text)})"
        return f"{_N}global<{type_}>({self.address(text)})"

    def fence(self) -> str:
        """Return a C++ statement for the fence of an access with release semantics."""
        if not self.has("release", "acq_rel", "sc"):
            return ""
        return f"cuda_on_cpu::fence({'false' if self.has('cta') else 'true'}); "

    def without_hints(self) -> _Instruction:
        """Return the instruction without cache hints, which have no effect here."""
        operands = self.operands[: -1 if self.has("L2::cache_hint") else None]
        kept = [each for each in self.modifiers if not _HINT.fullmatch(each)]
        return self._replace(modifiers=tuple(kept), operands=operands)


def _vector(text: str) -> list[str]:
    text = text.strip()
    return [each.strip() for each in (text[1:-1].split(",") if text.startswith("{") else [text])]


def _separated(text: str) -> list[str]:
    """Split operands at commas outside of braces and brackets."""
    return [each.strip() for each in re.split(r",(?![^{]*\})(?![^\[]*\])", text)] if text else []


def called(code: str, operands: str, names: Mapping[str, Operand]) -> str:
    """Return C++ statements for an instruction. names: registers by their names in PTX.

    Raises Unknown.
    """
    base, *modifiers = code.split(".")
    own = _Instruction(code, base, tuple(modifiers), tuple(_separated(operands)), names)
    handler = _HANDLERS.get(base) or (_simple if base in _SIMPLE else None)
    if handler is None or _OUT_OF_REACH.match(code):
        raise own.unknown()
    return handler(own)


def _simple(i: _Instruction) -> str:
    i.allow(
        "rn",
        "rz",
        "rm",
        "rp",
        "ftz",
        "sat",
        "approx",
        "full",
        "lo",
        "hi",
        "wide",
        "NaN",
        "relu",
        "b32",
    )
    signature, type_ = _SIMPLE[i.base], i.type
    i.expect(len(signature))
    whole = type_[0] in "bus" or type_ == "pred"
    name = _CPP_NAMES.get(i.base, i.base)
    if i.base in ("mul", "mad") and whole:
        name = "mul_" + next((each for each in ("lo", "hi", "wide") if i.has(each)), "")
    elif i.base == "mad":
        name = "fma"
    if i.has("approx", "full"):
        if i.base not in _APPROXIMATE or type_ == "f64":
            raise i.unknown()
        name += "_approx" if i.has("approx") else "_full"
    elif i.base in _APPROXIMATE and not whole and not i.has(*_MODES):
        raise i.unknown()
    if i.has("NaN"):
        name += "_nan"
    types = {"T": type_, "U": "u32", "P": "pred"}
    values = [i.value(o, types[t]) for o, t in zip(i.operands[1:], signature[1:], strict=True)]
    if i.has("ftz"):
        values = [f"{_N}ftz({each})" for each in values]
    third = values.pop() if i.base == "mad" and whole else ""
    mode = next((each for each in ("rz", "rm", "rp") if i.has(each)), None)
    function = f"{_N}{name}"
    if mode:
        if type_ not in ("f32", "f64"):
            raise i.unknown()
        parameters = ", ".join("auto v%d" % k for k in range(len(values)))
        passed = ", ".join(f"v{k}" for k in range(len(values)))
        op = f"[]({parameters}) {{ return {function}({passed}); }}"
        result = f"cuda_on_cpu::rounded({_MODES[mode]}, {op}, {', '.join(values)})"
    else:
        result = f"{function}({', '.join(values)})"
    if third:
        wide = f"{type_[0]}{2 * int(type_[1:])}" if i.has("wide") else type_
        result = f"{_N}add<{_TYPES[wide]}>({result}, {i.value(i.operands[3], wide)})"
    for each in ("sat", "relu", "ftz"):
        if i.has(each):
            if whole:
                raise i.unknown()
            result = f"{_N}{each}({result})"
    return i.assigned(i.operands[0], result)


def _mov(i: _Instruction) -> str:
    i.allow()
    i.expect(2)
    to, from_ = map(_vector, i.operands)
    if len(to) == len(from_) == 1:
        return i.assigned(to[0], i.value(from_[0], i.type))
    width = int(i.type[1:])
    part = width // max(len(to), len(from_))
    if len(to) == 1:
        parts = [
            f"(std::uint64_t){i.value(o, f'u{part}')} << {part * k}" for k, o in enumerate(from_)
        ]
        return i.assigned(to[0], " | ".join(parts))
    whole = i.value(from_[0], f"u{width}")
    lines = [
        i.assigned(o, f"(std::uint{part}_t)(ptx_whole >> {part * k})") for k, o in enumerate(to)
    ]
    return f"{{ const std::uint64_t ptx_whole = {whole}; {' '.join(lines)} }}"


def _access(i: _Instruction) -> tuple[_Instruction, int, bool]:
    """Check the modifiers of ld, st or red; return (instruction without hints, elements, strong)."""
    i = i.without_hints()
    i.allow(
        _CACHE, _SCOPES, _ORDERS, "volatile", "global", "shared", "shared::cta", "const", "v2", "v4"
    )
    strong = i.has("volatile", "cv") or (i.has(*_ORDERS) and not i.has("weak"))
    return i, 4 if i.has("v4") else 2 if i.has("v2") else 1, strong


def _element(type_: str) -> str:
    """Return the integer that holds a number in memory."""
    if type_[0] == "s":
        return _TYPES[type_]
    return f"std::uint{_BITS.get(type_) or int(type_[1:])}_t"


def _ld(i: _Instruction) -> str:
    i, n, strong = _access(i)
    i.expect(2)
    to = _vector(i.operands[0])
    kind = f"{_N}Vector<{_element(i.type)}, {n}>"
    pointer = i.pointer(i.operands[1], kind)
    loaded = f"{_N}load_strong({pointer})" if strong else f"*{pointer}"
    lines = [i.assigned(o, f"ptx_loaded.v[{k}]") for k, o in enumerate(to)]
    return f"{{ const {kind} ptx_loaded = {loaded}; {' '.join(lines)} }}"


def _st(i: _Instruction) -> str:
    i, n, strong = _access(i)
    i.expect(2)
    kind = f"{_N}Vector<{_element(i.type)}, {n}>"
    type_ = f"u{_BITS.get(i.type) or i.type[1:]}"
    values = ", ".join(f"({_element(i.type)}){i.value(o, type_)}" for o in _vector(i.operands[1]))
    pointer = i.pointer(i.operands[0], kind)
    stored = f"{_N}store_strong({pointer}, ptx_stored);" if strong else f"*{pointer} = ptx_stored;"
    return f"{{ const {kind} ptx_stored = {{{{{values}}}}}; {i.fence()}{stored} }}"


def _atom(i: _Instruction) -> str:
    i = i.without_hints()
    operations = {"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"}
    i.allow(
        operations, _SCOPES, _ORDERS, "global", "shared", "shared::cta", "noftz", "ftz", "v2", "v4"
    )
    operation = next((each for each in operations if i.has(each)), None)
    target, operands = (i.operands[0], i.operands[1:]) if i.base == "atom" else ("_", i.operands)
    if operation is None or len(operands) != (3 if operation == "cas" else 2):
        raise i.unknown()
    kind = _TYPES[i.type]
    if i.has("v2", "v4"):
        return _atom_of_vector(i, target, operands, operation)
    pointer = i.pointer(operands[0], kind)
    values = [i.value(each, i.type) for each in operands[1:]]
    if operation == "cas":
        return i.fence() + i.assigned(
            target, f"{_N}atom_cas<{kind}>({pointer}, {', '.join(values)})"
        )
    return i.fence() + i.assigned(target, _changed(pointer, kind, operation, values[0]))


def _changed(pointer: str, kind: str, operation: str, value: str) -> str:
    result = {
        "exch": "ptx_value",
        "inc": "old >= ptx_value ? 0 : old + 1",
        "dec": "old == 0 || old > ptx_value ? ptx_value : old - 1",
    }.get(operation, f"{_N}{_CPP_NAMES.get(operation, operation)}<{kind}>(old, ptx_value)")
    return (
        f"{_N}atom({pointer}, [ptx_value = {value}]({kind} old) -> {kind} {{ return {result}; }})"
    )


def _atom_of_vector(i: _Instruction, target: str, operands: Sequence[str], operation: str) -> str:
    kind, values = _TYPES[i.type], _vector(operands[1])
    targets = _vector(target) if target != "_" else ["_"] * len(values)
    code = []
    for k, (each, value) in enumerate(zip(targets, values, strict=True)):
        pointer = f"{i.pointer(operands[0], kind)} + {k}"
        code.append(i.assigned(each, _changed(pointer, kind, operation, i.value(value, i.type))))
    return i.fence() + " ".join(code)


def _cvt(i: _Instruction) -> str:
    whole = {f"{mode}i" for mode in _MODES}
    special = {"rna", "tf32", "e4m3x2", "e5m2x2"}
    i.allow(_MODES.keys(), whole, special, {"ftz", "sat", "satfinite", "relu"})
    kinds = [each for each in i.modifiers if each in _TYPES or each in special - {"rna"}]
    if len(kinds) != 2:
        raise i.unknown()
    to, from_ = kinds
    target, *operands = i.operands
    values = [i.value(o, "u16" if from_ in special else from_) for o in operands]
    if i.has("ftz") and from_ not in special:
        values = [f"{_N}ftz({each})" for each in values]
    if to == "tf32" and from_ == "f32" and i.has("rna"):
        return i.assigned(target, f"{_N}tf32({values[0]})")
    if to in special or from_ in special:
        fraction = 3 if "e4m3x2" in (to, from_) else 2
        if from_ in special and to == "f16x2" and i.has("rn"):
            return i.assigned(target, f"{_N}from_fp8<{fraction}>({values[0]})")
        if from_ not in ("f32", "f16x2") or i.has("relu") or not i.has("satfinite"):
            raise i.unknown()
        return i.assigned(target, f"{_N}to_fp8<{fraction}>({', '.join(values)})")
    mode = next((m for m in _MODES if i.has(m, f"{m}i")), "rn")
    is_whole = "true" if i.has(*whole) else "false"
    if to in ("f16", "bf16", "f16x2", "bf16x2") and mode in ("rm", "rp"):
        raise i.unknown()
    kind = _TYPES[to.removesuffix("x2")]
    parts = [f"{_N}convert<{kind}>({_MODES[mode]}, {is_whole}, {each})" for each in values]
    if to.endswith("x2"):
        if len(parts) != 2 or from_ != "f32":
            raise i.unknown()
        result = f"{_TYPES[to]}{{{parts[1]}, {parts[0]}}}"
    elif i.has("sat") and to[0] in "us" and from_[0] in "us":
        result = f"{_N}limited<{kind}>({values[0]})"
    else:
        result = parts[0]
    for each in ("satfinite", "relu"):
        if i.has(each):
            if to not in ("f16", "bf16", "f16x2", "bf16x2"):
                raise i.unknown()
            result = f"{_N}{each}({result})"
    if i.has("sat") and to[0] not in "us":
        result = f"{_N}sat({result})"
    if i.has("ftz") and to[0] not in "us":
        result = f"{_N}ftz({result})"
    return i.assigned(target, result)


_COMPARISONS = {
    "lo": "lt", "ls": "le", "hi": "gt", "hs": "ge",
    **{each: each for each in ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")},
}  # fmt: skip


def _compared(i: _Instruction) -> str:
    """Return the C++ condition that setp or set computes."""
    i.allow(_COMPARISONS.keys(), {"and", "or", "xor", "ftz"})
    comparison = next((_COMPARISONS[each] for each in i.modifiers if each in _COMPARISONS), None)
    combined = next((each for each in ("and", "or", "xor") if i.has(each)), None)
    i.expect(4 if combined else 3)
    if comparison is None or i.type.endswith("x2"):
        raise i.unknown()
    values = [i.value(each, i.type) for each in i.operands[1:3]]
    if i.has("ftz"):
        values = [f"{_N}ftz({each})" for each in values]
    result = f"{_N}compare_{comparison}({', '.join(values)})"
    if combined:
        result = f"({result} {dict(zip(('and', 'or', 'xor'), '&|^', strict=True))[combined]} {i.raw(i.operands[3])})"
    return result


def _setp(i: _Instruction) -> str:
    first, _, second = i.operands[0].partition("|") if i.operands else ("", "", "")
    if not second:
        return i.assigned(first, _compared(i))
    if i.has("and", "or", "xor"):
        raise i.unknown()
    code = f"const bool ptx_test = {_compared(i)};"
    return f"{{ {code} {i.assigned(first, 'ptx_test')} {i.assigned(second, '!ptx_test')} }}"


def _set(i: _Instruction) -> str:
    if len(i.types) != 2 or i.types[0] not in ("u32", "s32", "f32"):
        raise i.unknown()
    true = "1.0f" if i.types[0] == "f32" else "0xffffffffu"
    return i.assigned(i.operands[0], f"({_TYPES[i.types[0]]})({_compared(i)} ? {true} : 0)")


def _cvta(i: _Instruction) -> str:
    i.allow("to", "shared", "shared::cta", "global", "const", "local")
    i.expect(2)
    value = i.value(i.operands[1], "u64")
    if i.has("shared", "shared::cta"):
        to = f"cuda_on_cpu::to_shared({_N}global<void>({value}))"
        value = (
            to
            if i.has("to")
            else f"(std::uint64_t)(std::uintptr_t)cuda_on_cpu::from_shared({value})"
        )
    return i.assigned(i.operands[0], value)


def _bar(i: _Instruction) -> str:
    i.allow("sync", "arrive", "warp", "aligned", "cta")
    if i.has("warp"):
        i.expect(1)
        return f"__syncwarp({i.value(i.operands[0], 'u32')});"
    if i.has("sync") == i.has("arrive"):
        raise i.unknown()
    i.expect(*((1, 2) if i.has("sync") else (2,)))
    numbers = [i.value(each, "s32") for each in i.operands] + ["-1"]
    return f"{_N}bar({numbers[0]}, {numbers[1]}, {'true' if i.has('sync') else 'false'});"


def _shfl(i: _Instruction) -> str:
    i.allow("sync", "up", "down", "bfly", "idx")
    i.expect(5)
    kind = next(each for each in ("up", "down", "bfly", "idx") if i.has(each))
    first, _, second = i.operands[0].partition("|")
    values = ", ".join(i.value(each, "u32") for each in i.operands[1:])
    code = [
        f"const auto ptx_got = {_N}shfl('{kind[0]}', {values});",
        i.assigned(first, "ptx_got.value"),
    ]
    if second:
        code.append(i.assigned(second, "ptx_got.inside"))
    return f"{{ {' '.join(code)} }}"


def _vote(i: _Instruction) -> str:
    i.allow("sync", "any", "all", "ballot")
    i.expect(3)
    kind = next((each for each in ("any", "all", "ballot") if i.has(each)), None)
    if kind is None:
        raise i.unknown()
    arguments = f"{i.value(i.operands[2], 'u32')}, {i.raw(i.operands[1])}"
    result = (
        f"(std::uint32_t)__ballot_sync({arguments})"
        if kind == "ballot"
        else f"(bool)__{kind}_sync({arguments})"
    )
    return i.assigned(i.operands[0], result)


def _match(i: _Instruction) -> str:
    i.allow("sync", "any")
    i.expect(3)
    value, mask = i.value(i.operands[1], f"u{i.type[1:]}"), i.value(i.operands[2], "u32")
    return i.assigned(i.operands[0], f"__match_any_sync({mask}, {value})")


def _redux(i: _Instruction) -> str:
    operations = ("add", "min", "max", "and", "or", "xor")
    i.allow("sync", set(operations))
    i.expect(3)
    operation = next(each for each in operations if i.has(each))
    if i.type not in ("s32", "u32", "b32"):
        raise i.unknown()
    value, mask = i.value(i.operands[1], i.type), i.value(i.operands[2], "u32")
    return i.assigned(i.operands[0], f"__reduce_{operation}_sync({mask}, {value})")


def _activemask(i: _Instruction) -> str:
    return i.assigned(i.operands[0], "__activemask()")


def _mbarrier(i: _Instruction) -> str:
    kinds = ("init", "inval", "arrive", "expect_tx", "complete_tx", "test_wait", "try_wait")
    scopes = _SCOPES | {"relaxed", "acquire", "release"}
    i.allow({*kinds, "parity", "shared", "shared::cta"}, scopes)
    kind = next((each for each in kinds if i.has(each)), None)
    has_target = kind in ("test_wait", "try_wait") or (
        kind == "arrive" and not i.operands[0].startswith("[")
    )
    target, operands = (i.operands[0], i.operands[1:]) if has_target else ("_", i.operands)
    barrier = i.pointer(operands[0], f"{_N}Mbarrier")
    numbers = [i.value(each, "u32") for each in operands[1:]]
    if kind == "init" and len(numbers) == 1:
        return f"{_N}mbarrier_init({barrier}, {numbers[0]});"
    if kind == "inval":
        return f"*{barrier} = {{}};"
    if kind == "arrive":
        number = numbers[0] if numbers else "1"
        arguments = f"1, {number}" if i.has("expect_tx") else f"{number}, 0"
        return i.assigned(target, f"{_N}mbarrier_arrive({barrier}, {arguments})")
    if kind in ("expect_tx", "complete_tx") and len(numbers) == 1:
        sign = "-" if kind == "complete_tx" else ""
        return f"{_N}mbarrier_arrive({barrier}, 0, {sign}(int){numbers[0]});"
    if kind in ("test_wait", "try_wait") and numbers:
        return i.assigned(target, f"{_N}mbarrier_test({barrier}, {numbers[0]})")
    raise i.unknown()


def _cp(i: _Instruction) -> str:
    i = i.without_hints()
    if i.has("commit_group"):
        return "__pipeline_commit();"
    if i.has("wait_group"):
        i.expect(1)
        return f"__pipeline_wait_prior({i.value(i.operands[0], 'u32')});"
    if i.has("wait_all"):
        return f"{_N}wait_for_copies();"
    if i.has("mbarrier"):
        # The copies arrive now. With .noinc, the object's count includes this arrival; otherwise it does not.
        i.allow("async", "mbarrier", "arrive", "noinc", "shared", "shared::cta")
        barrier = i.pointer(i.operands[0], f"{_N}Mbarrier")
        arrival = f" (void){_N}mbarrier_arrive({barrier}, 1, 0);" if i.has("noinc") else ""
        return f"{_N}wait_for_copies();{arrival}"
    i.allow("async", "ca", "cg", "shared", "shared::cta", "global")
    i.expect(3, 4)
    to = f"{_N}shared<void>({i.address(i.operands[0])})"
    from_ = f"{_N}global<void>({i.address(i.operands[1])})"
    numbers = [i.value(each, "u32") for each in i.operands[2:]]
    return f"{_N}copy_async({to}, {from_}, {numbers[0]}, {numbers[-1]});"


def _ldmatrix(i: _Instruction) -> str:
    i.allow("sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta")
    i.expect(2)
    to = _vector(i.operands[0])
    n = next((int(each[1]) for each in ("x1", "x2", "x4") if i.has(each)), 0)
    if len(to) != n or i.type != "b16" or not i.has("m8n8"):
        raise i.unknown()
    row = f"{_N}shared<const std::uint16_t>({i.address(i.operands[1])})"
    loaded = f"{_N}ldmatrix<{n}, {'true' if i.has('trans') else 'false'}>({row})"
    lines = [i.assigned(o, f"ptx_rows.v[{k}]") for k, o in enumerate(to)]
    return f"{{ const auto ptx_rows = {loaded}; {' '.join(lines)} }}"


_MMA_TYPES = {
    "f16": _F16, "bf16": _BF16, "tf32": f"{_N}TF32", "e4m3": f"{_N}FP8<3>", "e5m2": f"{_N}FP8<2>",
    "s8": "std::int8_t", "u8": "std::uint8_t",
}  # fmt: skip


def _mma(i: _Instruction) -> str:
    found = re.fullmatch(
        r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col(?:\.kind::f8f6f4)?\.(f32|f16|s32)\.(\w+)\.(\w+)\.\2",
        i.code,
    )
    if not found or not {found[3], found[4]} <= _MMA_TYPES.keys():
        raise i.unknown()
    i.expect(4)
    size = 4 if found[3] == "tf32" else 1 if found[3][-1] in "238" else 2
    registers = int(found[1]) * size // 8
    sums = {"f32": "float", "f16": "float", "s32": "std::int32_t"}[found[2]]
    d, a, b, c = map(_vector, i.operands)
    fits = (found[2] == "s32") == (found[3] in ("s8", "u8")) and registers in (2, 4)
    if (
        not fits
        or (len(a), len(b)) != (registers, registers // 2)
        or len(c) != (2 if found[2] == "f16" else 4)
    ):
        raise i.unknown()

    def given(operands: list[str]) -> str:
        values = ", ".join(i.value(each, "u32") for each in operands)
        return f"{_N}Registers<{len(operands)}>{{{{{values}}}}}"

    call = f"{_N}mma_sync<{_MMA_TYPES[found[3]]}, {_MMA_TYPES[found[4]]}, {sums}, {registers}>"
    lines = [i.assigned(o, f"ptx_sums.v[{k}]") for k, o in enumerate(d)]
    return (
        f"{{ const auto ptx_sums = {call}({given(a)}, {given(b)}, {given(c)}); {' '.join(lines)} }}"
    )


def _fence(i: _Instruction) -> str:
    if i.has("proxy"):
        return ";"
    i.allow("sc", "acq_rel", "cta", "gpu", "sys", "gl", "mbarrier_init", "release")
    return f"cuda_on_cpu::fence({'false' if i.has('cta') else 'true'});"


def _nothing(i: _Instruction) -> str:
    return ";"


def _createpolicy(i: _Instruction) -> str:
    return i.assigned(i.operands[0], "std::uint64_t(0)")


def _griddepcontrol(i: _Instruction) -> str:
    i.allow("wait", "launch_dependents")
    return "cuda_on_cpu::wait_for_previous();" if i.has("wait") else ";"


def _dp4a(i: _Instruction) -> str:
    i.expect(4)
    if i.types not in (["s32", "s32"], ["u32", "u32"]):
        raise i.unknown()
    return i.assigned(
        i.operands[0], f"__dp4a({', '.join(i.value(each, i.type) for each in i.operands[1:])})"
    )


def _shf(i: _Instruction) -> str:
    i.allow("l", "r", "wrap", "clamp")
    i.expect(4)
    suffix = ("l" if i.has("l") else "r") + ("c" if i.has("clamp") else "")
    values = ", ".join(i.value(each, "u32") for each in i.operands[1:])
    return i.assigned(i.operands[0], f"__funnelshift_{suffix}({values})")


_HANDLERS: dict[str, Callable[[_Instruction], str]] = {
    "mov": _mov, "ld": _ld, "ldu": _ld, "st": _st, "atom": _atom, "red": _atom, "cvt": _cvt, "setp": _setp,
    "set": _set, "cvta": _cvta, "bar": _bar, "barrier": _bar, "shfl": _shfl, "vote": _vote, "match": _match,
    "redux": _redux, "activemask": _activemask, "mbarrier": _mbarrier, "cp": _cp, "ldmatrix": _ldmatrix,
    "mma": _mma, "fence": _fence, "membar": _fence, "prefetch": _nothing, "prefetchu": _nothing,
    "applypriority": _nothing, "discard": _nothing, "createpolicy": _createpolicy, "dp4a": _dp4a, "shf": _shf,
    "griddepcontrol": _griddepcontrol, "nanosleep": lambda i: "__nanosleep(0);", "trap": lambda i: "__trap();",
}  # fmt: skip
