"""Instructions of PTX and their operands, as C++ expressions for the functions in ptx.h."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

N = "ptx_on_cpu::"
F16, BF16 = f"{N}F16", f"{N}BF16"
TYPES = {
    **{f"{kind}{n}": f"std::uint{n}_t" for kind in "bu" for n in (8, 16, 32, 64)},
    **{f"s{n}": f"std::int{n}_t" for n in (8, 16, 32, 64)},
    "f32": "float", "f64": "double", "f16": F16, "bf16": BF16, "pred": "bool",
    "f16x2": f"{N}Pair<{F16}>", "bf16x2": f"{N}Pair<{BF16}>",
}  # fmt: skip
BITS = {"f16": 16, "bf16": 16, "f16x2": 32, "bf16x2": 32, "f32": 32, "f64": 64}
_OF_CONSTRAINT = {"h": 16, "r": 32, "f": 32, "l": 64, "d": 64, "n": 64}
_SPECIAL = {
    "%laneid": "cuda_on_cpu::lane()",
    "%warpid": f"{N}thread() / 32",
    "%nwarpid": "(blockDim.x * blockDim.y * blockDim.z + 31) / 32",
    **{f"%{ptx}.{axis}": f"{cpp}.{axis}" for axis in "xyz" for ptx, cpp in {
        "tid": "threadIdx", "ntid": "blockDim", "ctaid": "blockIdx", "nctaid": "gridDim"}.items()},
    "%smid": "0", "%nsmid": "1", "%gridid": "0",
    "%clock": "clock()", "%clock_hi": "0", "%clock64": "clock64()", "%globaltimer": "clock64()",
    "%globaltimer_lo": "clock()",
    "%lanemask_eq": f"{N}lane_bit()",
    "%lanemask_lt": f"{N}lanes_below()",
    "%lanemask_le": f"({N}lanes_below() | {N}lane_bit())",
    "%lanemask_ge": f"~{N}lanes_below()",
    "%lanemask_gt": f"~({N}lanes_below() | {N}lane_bit())",
    "WARP_SZ": "32",
}  # fmt: skip
MODES = {"rn": "FE_TONEAREST", "rz": "FE_TOWARDZERO", "rm": "FE_DOWNWARD", "rp": "FE_UPWARD"}
_HINT = re.compile(r"L1::(no_allocate|evict_\w+)|L2::(evict_\w+|64B|128B|256B|cache_hint)")
SCOPES = {"cta", "gpu", "sys"}
CPP_NAMES = {name: f"{name}_" for name in ("and", "or", "xor", "not")}
OUT_OF_REACH = re.compile(
    r"wgmma|tcgen05|cp\.async\.bulk|cp\.reduce|tensormap|mapa|setmaxnreg|clusterlaunchcontrol|multimem"
    r"|\w[\w.]*\.(?:shared::)?cluster\b|barrier\.cluster|elect"
)


class UnknownPtxError(Exception):
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
    if kind not in TYPES or not re.fullmatch(r"[\w$%]+", name):
        raise UnknownPtxError(f"the emulator does not support the register .reg .{kind} {name}")
    plain = re.sub(r"\W", "_", name)
    if kind == "pred":
        return Operand(f"ptx_reg_{plain}", "pred")
    return Operand(f"ptx_reg_{plain}", str(BITS.get(kind) or max(16, int(kind[1:]))))


class Instruction(NamedTuple):
    code: str  # such as add.rn.f32
    base: str  # such as add
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    names: Mapping[str, Operand]

    @property
    def types(self) -> list[str]:
        return [each for each in self.modifiers if each in TYPES]

    @property
    def type(self) -> str:
        if not self.types:
            raise self.unknown()
        return self.types[-1]

    def unknown(self) -> UnknownPtxError:
        if OUT_OF_REACH.match(self.code):
            return UnknownPtxError(
                f"the PTX instruction {self.code} is out of the emulator's reach"
            )
        return UnknownPtxError(f"the emulator lacks the PTX instruction {self.code}")

    def allow(self, *allowed: str | Collection[str]) -> None:
        """Raise UnknownPtxError if the instruction has other modifiers, apart from types."""
        known = {
            each for group in allowed for each in ((group,) if isinstance(group, str) else group)
        }
        if not known.issuperset(each for each in self.modifiers if each not in TYPES):
            raise self.unknown()

    def expect(self, *numbers: int) -> None:
        if len(self.operands) not in numbers:
            raise UnknownPtxError(
                f"the PTX instruction {self.code} with {len(self.operands)} operands"
            )

    def has(self, *modifiers: str) -> bool:
        return any(each in self.modifiers for each in modifiers)

    def raw(self, text: str) -> str:
        """Return a C++ expression for an operand: a register, a special register or a number."""
        text = text.strip()
        if text.startswith("!"):
            return f"!{self.raw(text[1:])}"
        if text in self.names:
            return self.names[text].name
        if number := _number(text):
            return number
        if text in _SPECIAL:
            return f"({_SPECIAL[text]})"
        raise UnknownPtxError(
            f"the emulator does not know the operand {text or '(nothing)'} of {self.code}"
        )

    def value(self, text: str, type_: str) -> str:
        """Return a C++ expression for an operand as a number of a PTX type."""
        return f"{N}as<{TYPES[type_]}>({self.raw(text)})"

    def assigned(self, text: str, expression: str) -> str:
        """Return a C++ statement that sets a register; the register `_` drops the value."""
        if text.strip() == "_":
            return f"(void)({expression});"
        return f"{N}set({self.raw(text)}, {expression});"

    def address(self, text: str) -> str:
        found = re.fullmatch(r"\[\s*([^\s+\]]+)\s*(?:\+\s*(-?\w+|%\w+)\s*)?\]", text)
        if not found:
            raise UnknownPtxError(
                f"the emulator does not understand the address {text} of {self.code}"
            )
        offset = f" + {self.value(found[2], 's64')}" if found[2] else ""
        return f"{self.value(found[1], 'u64')}{offset}"

    def pointer(self, text: str, type_: str) -> str:
        """Return a C++ pointer for an address in the instruction's state space."""
        if self.has("shared", "shared::cta"):
            return f"{N}shared<{type_}>({self.address(text)})"
        return f"{N}global<{type_}>({self.address(text)})"

    def fence(self) -> str:
        """Return a C++ statement for the fence of an access with release semantics."""
        if not self.has("release", "acq_rel", "sc"):
            return ""
        return f"cuda_on_cpu::fence({'false' if self.has('cta') else 'true'}); "

    def without_hints(self) -> Instruction:
        """Return the instruction without cache hints, which have no effect here."""
        operands = self.operands[: -1 if self.has("L2::cache_hint") else None]
        kept = [each for each in self.modifiers if not _HINT.fullmatch(each)]
        return self._replace(modifiers=tuple(kept), operands=operands)


def _number(text: str) -> str:
    """Return a PTX literal in C++, or "" for another text; for 0f… and 0d…, the float's bits."""
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}", text):
        return f"0x{text[2:]}{'u' if len(text) == 10 else 'ull'}"
    if found := re.fullmatch(r"(-?)(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?", text):
        return f"({found[1]}{found[2]}{'ll' if len(found[2]) < 18 else 'ull'})"
    if re.fullmatch(r"-?\d+\.\d*(?:[eE][-+]?\d+)?|-?\d+[eE][-+]?\d+", text):
        return f"({text})"
    return ""


def vector(text: str) -> list[str]:
    text = text.strip()
    return [each.strip() for each in (text[1:-1].split(",") if text.startswith("{") else [text])]
