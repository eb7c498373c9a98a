"""Translate PTX instructions that compute numbers, such as add, cvt and setp, to C++."""

from __future__ import annotations

from collections.abc import Callable

from gpt2block.emulator.ptx_operands import (
    CPP_NAMES,
    MODES,
    TYPES,
    Instruction,
    N,
    vector,
)

# Instruction → types of the result and of the operands. T: the type that the instruction names,
# U: 32 bits, P: predicate.
SIMPLE = {
    **dict.fromkeys(["add", "sub", "mul", "div", "rem", "min", "max", "and", "or", "xor"], "TTT"),
    **dict.fromkeys(("neg", "abs", "not", "brev", "ex2", "lg2", "rcp", "rsqrt"), "TT"),
    **dict.fromkeys(("sqrt", "sin", "cos", "tanh"), "TT"),
    **dict.fromkeys(("fma", "mad", "prmt"), "TTTT"),
    "shl": "TTU", "shr": "TTU", "popc": "UT", "clz": "UT", "selp": "TTTP",
    "bfe": "TTUU", "bfi": "TTTUU", "lop3": "TTTTU",
}  # fmt: skip
_APPROXIMATE = ["ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh", "div"]
_HALVES = ("f16", "bf16", "f16x2", "bf16x2")


def _is_whole(type_: str) -> bool:
    return type_[0] in "us" or type_ in ("b8", "b16", "b32", "b64", "pred")


def _simple(i: Instruction) -> str:
    i.allow(MODES, "ftz", "sat", "approx", "full", "lo", "hi", "wide", "NaN", "relu")
    signature, type_ = SIMPLE[i.base], i.type
    i.expect(len(signature))
    whole = _is_whole(type_)
    types = {"T": type_, "U": "u32", "P": "pred"}
    values = [i.value(o, types[t]) for o, t in zip(i.operands[1:], signature[1:], strict=True)]
    if i.has("ftz"):
        values = [f"{N}ftz({each})" for each in values]
    third = values.pop() if i.base == "mad" and whole else ""
    result = _called(i, _function(i, whole), values)
    if third:
        wide = f"{type_[0]}{2 * int(type_[1:])}" if i.has("wide") else type_
        result = f"{N}add<{TYPES[wide]}>({result}, {i.value(i.operands[3], wide)})"
    if whole and i.has("sat", "relu", "ftz"):
        raise i.unknown()
    return i.assigned(i.operands[0], _modified(i, result, "sat", "relu", "ftz"))


def _function(i: Instruction, whole: bool) -> str:
    """Return the name of the C++ function for an instruction."""
    name = CPP_NAMES.get(i.base, i.base)
    if i.base in ("mul", "mad"):
        kind = next((each for each in ("lo", "hi", "wide") if i.has(each)), "lo")
        name = f"mul_{kind}" if whole else {"mad": "fma"}.get(i.base, i.base)
    if i.has("approx", "full"):
        if i.base not in _APPROXIMATE or i.type == "f64":
            raise i.unknown()
        name += "_approx" if i.has("approx") else "_full"
    elif i.base in _APPROXIMATE and not whole and not i.has(*MODES):
        raise i.unknown()
    return f"{N}{name}_nan" if i.has("NaN") else f"{N}{name}"


def _called(i: Instruction, function: str, values: list[str]) -> str:
    """Return a C++ call, with the rounding mode of the instruction."""
    mode = next((each for each in ("rz", "rm", "rp") if i.has(each)), None)
    if mode is None:
        return f"{function}({', '.join(values)})"
    if i.type not in ("f32", "f64"):
        raise i.unknown()
    op = f"[](auto... v) {{ return {function}(v...); }}"
    return f"cuda_on_cpu::rounded({MODES[mode]}, {op}, {', '.join(values)})"


def _modified(i: Instruction, result: str, *modifiers: str) -> str:
    """Return a C++ expression with a call for each of the modifiers that the instruction has."""
    for each in modifiers:
        if i.has(each):
            result = f"{N}{each}({result})"
    return result


def _mov(i: Instruction) -> str:
    i.allow()
    i.expect(2)
    to, from_ = map(vector, i.operands)
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


def _cvt(i: Instruction) -> str:
    i.allow(MODES, _TO_WHOLE, _SPECIAL, "rna", "ftz", "sat", "satfinite", "relu")
    kinds = [each for each in i.modifiers if each in TYPES or each in _SPECIAL]
    if len(kinds) != 2:
        raise i.unknown()
    to, from_ = kinds
    target, *operands = i.operands
    values = [i.value(o, "u16" if from_ in _SPECIAL else from_) for o in operands]
    if to in _SPECIAL or from_ in _SPECIAL:
        return i.assigned(target, _special(i, to, from_, values))
    if i.has("ftz"):
        values = [f"{N}ftz({each})" for each in values]
    mode = next((m for m in MODES if i.has(m, f"{m}i")), "rn")
    if to in _HALVES and mode in ("rm", "rp"):
        raise i.unknown()
    kind, whole = TYPES[to.removesuffix("x2")], "true" if i.has(*_TO_WHOLE) else "false"
    parts = [f"{N}convert<{kind}>({MODES[mode]}, {whole}, {each})" for each in values]
    if len(parts) != 1 + to.endswith("x2"):
        raise i.unknown()
    if i.has("satfinite", "relu") and to not in _HALVES:
        raise i.unknown()
    if _is_whole(to):  # a conversion from a floating-point number limits the result anyway
        limited = i.has("sat") and _is_whole(from_)
        return i.assigned(target, f"{N}limited<{kind}>({values[0]})" if limited else parts[0])
    result = parts[0] if len(parts) == 1 else f"{TYPES[to]}{{{parts[1]}, {parts[0]}}}"
    return i.assigned(target, _modified(i, result, "satfinite", "relu", "sat", "ftz"))


_TO_WHOLE = [f"{mode}i" for mode in MODES]
_SPECIAL = ("tf32", "e4m3x2", "e5m2x2")


def _special(i: Instruction, to: str, from_: str, values: list[str]) -> str:
    """Return the C++ for a conversion to TF32, or from or to a pair of 8-bit numbers."""
    fraction = 3 if "e4m3x2" in (to, from_) else 2
    if to == "tf32" and from_ == "f32" and i.has("rna"):
        return f"{N}tf32({values[0]})"
    if from_ != "tf32" and to == "f16x2" and i.has("rn"):
        return _modified(i, f"{N}from_fp8<{fraction}>({values[0]})", "relu")
    if to != "tf32" and from_ in ("f32", "f16x2") and i.has("satfinite") and not i.has("relu"):
        return f"{N}to_fp8<{fraction}>({', '.join(values)})"
    raise i.unknown()


_COMPARISONS = {
    "lo": "lt", "ls": "le", "hi": "gt", "hs": "ge",
    **{each: each for each in ("eq", "ne", "lt", "le", "gt", "ge", "num", "nan")},
    **{each: each for each in ("equ", "neu", "ltu", "leu", "gtu", "geu")},
}  # fmt: skip


def _compared(i: Instruction) -> str:
    """Return the C++ condition that setp or set computes."""
    i.allow(_COMPARISONS.keys(), {"and", "or", "xor", "ftz"})
    comparison = next((_COMPARISONS[each] for each in i.modifiers if each in _COMPARISONS), None)
    combined = next((each for each in ("and", "or", "xor") if i.has(each)), None)
    i.expect(4 if combined else 3)
    if comparison is None or i.type.endswith("x2"):
        raise i.unknown()
    values = [i.value(each, i.type) for each in i.operands[1:3]]
    if i.has("ftz"):
        values = [f"{N}ftz({each})" for each in values]
    result = f"{N}compare_{comparison}({', '.join(values)})"
    if combined:
        sign = {"and": "&", "or": "|", "xor": "^"}[combined]
        result = f"({result} {sign} {i.raw(i.operands[3])})"
    return result


def _setp(i: Instruction) -> str:
    first, _, second = i.operands[0].partition("|") if i.operands else ("", "", "")
    if not second:
        return i.assigned(first, _compared(i))
    if i.has("and", "or", "xor"):
        raise i.unknown()
    code = f"const bool ptx_test = {_compared(i)};"
    return f"{{ {code} {i.assigned(first, 'ptx_test')} {i.assigned(second, '!ptx_test')} }}"


def _set(i: Instruction) -> str:
    if len(i.types) != 2 or i.types[0] not in ("u32", "s32", "f32"):
        raise i.unknown()
    true = "1.0f" if i.types[0] == "f32" else "0xffffffffu"
    return i.assigned(i.operands[0], f"({TYPES[i.types[0]]})({_compared(i)} ? {true} : 0)")


def _dp4a(i: Instruction) -> str:
    i.expect(4)
    if i.types not in (["s32", "s32"], ["u32", "u32"]):
        raise i.unknown()
    return i.assigned(
        i.operands[0], f"__dp4a({', '.join(i.value(each, i.type) for each in i.operands[1:])})"
    )


def _shf(i: Instruction) -> str:
    i.allow("l", "r", "wrap", "clamp")
    i.expect(4)
    suffix = ("l" if i.has("l") else "r") + ("c" if i.has("clamp") else "")
    values = ", ".join(i.value(each, "u32") for each in i.operands[1:])
    return i.assigned(i.operands[0], f"__funnelshift_{suffix}({values})")


HANDLERS: dict[str, Callable[[Instruction], str]] = {
    **dict.fromkeys(SIMPLE, _simple),
    "mov": _mov, "cvt": _cvt, "setp": _setp, "set": _set, "dp4a": _dp4a, "shf": _shf,
}  # fmt: skip
