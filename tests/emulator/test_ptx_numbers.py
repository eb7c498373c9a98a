"""Floating-point instructions and conversions of the PTX engine against exact arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import ceil, floor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.ptx_instructions import FORMATS, LANES, Format, execute, random_codes, root

WARPS = 5
Exact = Callable[..., Any]
Array = npt.NDArray[np.uint64]


def _split(opcode: str) -> tuple[str, list[str], list[str]]:
    """Return the name, the modifiers and the types of an opcode."""
    name, *words = opcode.split(".")
    types = [word for word in words if word.removesuffix("x2") in (*FORMATS, *INTEGERS)]
    return name, [word for word in words if word not in types], types


INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
OPERATIONS: dict[str, tuple[int, Exact]] = {
    "add": (2, lambda a, b: a + b),
    "sub": (2, lambda a, b: a - b),
    "mul": (2, lambda a, b: a * b),
    "fma": (3, lambda a, b, c: a * b + c),
    "div": (2, lambda a, b: a / b),
    "rcp": (1, lambda a: 1 / a),
    "sqrt": (1, root),
}


def _special(name: str, known: Format, codes: list[int]) -> int | None:
    """Return the result for operands that are not finite, or for a division by zero."""
    kinds = [_kind(known, code) for code in codes]
    with np.errstate(all="ignore"):
        result = np.sqrt(kinds[0]) if name == "sqrt" else OPERATIONS[name][1](*kinds)
    if np.isnan(result):
        return known.nan
    sign = known.sign if np.signbit(result) else 0
    if np.isinf(result):
        return known.top | sign
    return sign if np.isinf(kinds).any() else None


def _kind(known: Format, code: int) -> Any:
    """Return NaN, infinity, zero or 1, with the sign of a number."""
    if known.is_nan(code):
        return np.float64("nan")
    size = np.inf if known.is_infinite(code) else float(code & known.nan != 0)
    return np.float64(-size if code & known.sign else size)


def _negative_zero(name: str, known: Format, codes: list[int], mode: str) -> bool:
    """Return whether a result that is zero is -0."""
    signs = [bool(code & known.sign) for code in codes]
    if name in ("mul", "div"):
        return signs[0] != signs[1]
    if name in ("rcp", "sqrt"):
        return signs[0]
    first = signs[0] != signs[1] if name == "fma" else signs[0]
    second = signs[-1] != (name == "sub")
    return first if first == second else mode == "rm"


def _expected(opcode: str, codes: list[int]) -> int:
    name, modifiers, types = _split(opcode)
    known = FORMATS[types[0].removesuffix("x2")]
    if "ftz" in modifiers:
        codes = list(map(known.flushed, codes))
    mode = next((word for word in modifiers if word in ("rz", "rm", "rp")), "rn")
    result = _special(name, known, codes)
    if result is None:
        exact = OPERATIONS[name][1](*map(known.value, codes))
        result = known.rounded(exact, mode, _negative_zero(name, known, codes, mode))
    if "sat" in modifiers:
        one = known.bias << known.fraction
        result = 0 if known.is_nan(result) or result & known.sign else min(result, one)
    if "relu" in modifiers and result & known.sign and not known.is_nan(result):
        result = 0
    return known.flushed(result) if "ftz" in modifiers else result


@pytest.mark.parametrize(
    "opcode",
    [
        *[f"{name}{mode}{ftz}.f32" for name in ("add", "sub", "mul", "fma.rn")
          for mode in ("", ".sat") for ftz in ("", ".ftz")],
        *[f"{name}.{mode}{ftz}.f32" for name in ("add", "sub", "mul", "fma", "div")
          for mode in ("rz", "rm", "rp") for ftz in ("", ".ftz")],
        *[f"{name}.{mode}{ftz}.f32" for name in ("rcp", "sqrt")
          for mode in ("rn", "rz", "rm", "rp") for ftz in ("", ".ftz")],
        *[f"{name}.{mode}.f64" for name in ("add", "sub", "mul", "fma", "div", "rcp", "sqrt")
          for mode in ("rn", "rz", "rm", "rp")],
        "div.rn.f32", "div.rn.ftz.f32", "fma.rn.relu.f16", "fma.rn.relu.bf16x2",
        *[f"{name}{ftz}.{kind}" for name in ("add", "sub", "mul", "fma.rn")
          for ftz in ("", ".ftz", ".sat") for kind in ("f16", "f16x2")],
        *[f"{name}.rn.{kind}" for name in ("add", "sub", "mul", "fma")
          for kind in ("bf16", "bf16x2")],
    ],
)  # fmt: skip
def test_arithmetic_is_rounded_once(opcode: str) -> None:
    name, _, types = _split(opcode)
    kind, pair = types[0].removesuffix("x2"), types[0].endswith("x2")
    operands = OPERATIONS[name][0]
    codes = _codes(opcode, kind, (1 + pair) * operands)
    registers = np.zeros((WARPS, operands + 1, LANES), np.uint64)
    for k in range(operands):
        registers[:, k + 1] = codes[k]
        if pair:
            registers[:, k + 1] |= codes[operands + k] << np.uint64(16)
    found = execute(opcode, "1" * (operands + 1), registers)[:, 0]
    wanted = _vectorised(opcode, codes[:operands])
    if pair:
        wanted |= _vectorised(opcode, codes[operands:]) << np.uint64(16)
    if kind == "f64":  # the sign and the payload of a NaN are not compared
        found[np.isnan(found.view(np.float64))] = FORMATS["f64"].nan
    _assert_equal(found, wanted, registers)


def _codes(opcode: str, kind: str, operands: int) -> Array:
    rng = np.random.default_rng(sum(map(ord, opcode)))
    count = WARPS * LANES
    drawn = [random_codes(rng, kind, count) for _ in range(operands)]
    return np.array(drawn, np.uint64).reshape(operands, WARPS, LANES)


def _vectorised(opcode: str, codes: Array) -> Array:
    rows = codes.reshape(len(codes), -1).T.tolist()
    return np.array([_expected(opcode, row) for row in rows], np.uint64).reshape(codes.shape[1:])


def _assert_equal(found: Array, wanted: Array, registers: Array) -> None:
    wrong = np.argwhere(found != wanted)
    if len(wrong):
        warp, lane = wrong[0]
        operands = [hex(each) for each in registers[warp, 1:, lane].tolist()]
        values = f"{int(found[warp, lane]):#x}, expected {int(wanted[warp, lane]):#x}"
        pytest.fail(f"{operands}: {values}; {len(wrong)} of {found.size} differ")


def _round_integral(x: Fraction, mode: str) -> int:
    ways: dict[str, Callable[[Fraction], int]] = {"rni": round, "rzi": int, "rmi": floor}
    return ways.get(mode, ceil)(x)


def _integer_of(value: int, kind: str) -> int:
    """Return the low bits of a register as an integer of a type."""
    width = int(kind[1:])
    value &= 2**width - 1
    return value - 2**width if kind[0] == "s" and value >= 2 ** (width - 1) else value


def _clamped(value: int, kind: str) -> int:
    width, signed = int(kind[1:]), kind[0] == "s"
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if signed else (0, (1 << width) - 1)
    return max(low, min(high, value))


def _converted(opcode: str, code: int) -> int:
    """Return the bits of the result of cvt with one operand."""
    _, modifiers, (to, source) = _split(opcode)
    mode = next((word for word in modifiers if word[0] == "r" and len(word) <= 3), "rn")
    if source in INTEGERS:
        integer = _integer_of(code, source)
        if to in INTEGERS:
            integer = _clamped(integer, to) if "sat" in modifiers else _integer_of(integer, to)
            return integer & 2**64 - 1 if to[0] == "s" else integer
        return FORMATS[to].rounded(Fraction(integer), mode)
    known = FORMATS[source]
    if "ftz" in modifiers and source == "f32":
        code = known.flushed(code)
    if to in INTEGERS:
        width = int(to[1:])
        if known.is_nan(code):
            return 1 << (width - 1) if width == 64 or source == "f64" else 0
        if known.is_infinite(code):
            integer = -(2**80) if code & known.sign else 2**80
        else:
            integer = _round_integral(known.value(code), mode)
        return _clamped(integer, to) & 2**64 - 1
    return _float_converted(FORMATS[to], known, code, modifiers, mode)


def _float_converted(to: Format, known: Format, code: int, modifiers: list[str], mode: str) -> int:
    negative = bool(code & known.sign)
    if known.is_nan(code):
        return 0 if "sat" in modifiers else to.nan
    if "relu" in modifiers and negative:
        return 0
    if known.is_infinite(code):
        result = (to.top if to.infinity else to.top - 1) | (to.sign if negative else 0)
    elif len(mode) == 3 and mode != "rna":
        result = to.rounded(Fraction(_round_integral(known.value(code), mode)), "rn", negative)
    else:
        result = to.rounded(known.value(code), mode, negative)
    if "satfinite" in modifiers and result & to.nan == to.top:
        result -= 1
    if "sat" in modifiers:
        result = 0 if negative else min(result, to.bias << to.fraction)
    return to.flushed(result) if "ftz" in modifiers and to == FORMATS["f32"] else result


@pytest.mark.parametrize(
    "opcode",
    [
        *[f"cvt.{mode}{ftz}.{to}.f32" for mode in ("rni", "rzi", "rmi", "rpi")
          for ftz in ("", ".ftz") for to in ("s32", "u32", "s64", "u64", "u8", "s16", "f32")],
        *[f"cvt.{mode}.{to}.f64" for mode in ("rni", "rzi") for to in ("s32", "u64", "s64", "f64")],
        *[f"cvt.rzi.{to}.{kind}" for to in ("s32", "u16") for kind in ("f16", "bf16")],
        *[f"cvt.{mode}.{to}.{kind}" for mode in ("rn", "rz", "rm", "rp")
          for to in ("f32", "f64") for kind in ("s32", "u32", "s64", "u64")],
        "cvt.rn.f16.s32", "cvt.rn.f32.u16", "cvt.rn.f32.s8", "cvt.rn.bf16.u64", "cvt.rz.f16.u16",
        *[f"cvt{sat}.{to}.{kind}" for sat in ("", ".sat") for to in ("s8", "u16", "s32", "u64")
          for kind in ("u8", "s16", "u32", "s64")],
        *[f"cvt.{mode}{ftz}.f32.f64" for mode in ("rn", "rz", "rm", "rp") for ftz in ("", ".ftz")],
        *[f"cvt.{mode}.{to}.f32" for mode in ("rn", "rz") for to in ("f16", "bf16")],
        "cvt.rn.relu.f16.f32", "cvt.rn.relu.bf16.f32", "cvt.rna.tf32.f32", "cvt.rn.f16.f64",
        "cvt.f32.f16", "cvt.f64.f16", "cvt.f32.bf16", "cvt.f64.f32", "cvt.ftz.f64.f32",
        "cvt.sat.f32.f32", "cvt.ftz.sat.f32.f32", "cvt.rmi.f16.f16", "cvt.rn.satfinite.f16.f32",
    ],
)  # fmt: skip
def test_conversions_are_exact(opcode: str) -> None:
    source = _split(opcode)[2][1]
    if source in INTEGERS:
        rng = np.random.default_rng(len(opcode))
        shifts = rng.integers(64, size=(WARPS, LANES), dtype=np.uint64)
        codes = rng.integers(2**64, size=(WARPS, LANES), dtype=np.uint64) >> shifts
        codes[::2] = ~codes[::2]
        codes &= np.uint64(2 ** int(source[1:]) - 1)
    else:
        codes = _codes(opcode, source, 1)[0]
    registers = np.stack([np.zeros_like(codes), codes], 1)
    found = execute(opcode, "11", registers)[:, 0]
    wanted = [_converted(opcode, code) for code in codes.ravel().tolist()]
    if _split(opcode)[2][0] == "f64":
        found[np.isnan(found.view(np.float64))] = FORMATS["f64"].nan
    if "tf32" in opcode:
        found = found >> np.uint64(13)
    _assert_equal(found, np.array(wanted, np.uint64).reshape(codes.shape), registers)


@pytest.mark.parametrize(
    ("opcode", "to", "source"),
    [
        ("cvt.rn.f16x2.f32", "f16", "f32"),
        ("cvt.rz.bf16x2.f32", "bf16", "f32"),
        ("cvt.rn.relu.f16x2.f32", "f16", "f32"),
        ("cvt.rn.satfinite.e4m3x2.f32", "e4m3", "f32"),
        ("cvt.rn.satfinite.e5m2x2.f32", "e5m2", "f32"),
        ("cvt.rn.satfinite.relu.e4m3x2.f32", "e4m3", "f32"),
    ],
)
def test_a_pair_of_floats_is_packed(opcode: str, to: str, source: str) -> None:
    codes = _codes(opcode, source, 2)
    registers = np.stack([np.zeros_like(codes[0]), *codes], 1)
    found = execute(opcode, "111", registers)[:, 0]
    _assert_equal(found, _pairs(opcode, to, source, codes), registers)


@pytest.mark.parametrize(
    ("opcode", "to", "source"),
    [
        ("cvt.rn.satfinite.e4m3x2.f16x2", "e4m3", "f16"),
        ("cvt.rn.satfinite.e5m2x2.f16x2", "e5m2", "f16"),
        ("cvt.rn.f16x2.e4m3x2", "f16", "e4m3"),
        ("cvt.rn.relu.f16x2.e5m2x2", "f16", "e5m2"),
    ],
)
def test_a_pair_is_converted(opcode: str, to: str, source: str) -> None:
    codes = _codes(opcode, source, 2)
    width = np.uint64(1 + sum(FORMATS[source][:2]))
    registers = np.stack([np.zeros_like(codes[0]), codes[0] << width | codes[1]], 1)
    found = execute(opcode, "11", registers)[:, 0]
    _assert_equal(found, _pairs(opcode, to, source, codes), registers)


def _pairs(opcode: str, to: str, source: str, codes: Array) -> Array:
    modifiers = _split(opcode)[1]
    mode = "rz" if "rz" in modifiers else "rn"
    high, low = (
        [
            _float_converted(FORMATS[to], FORMATS[source], code, modifiers, mode)
            for code in each.ravel().tolist()
        ]
        for each in codes
    )
    width = np.uint64(1 + sum(FORMATS[to][:2]))
    pairs: Array = np.array(high, np.uint64) << width | np.array(low, np.uint64)
    return pairs.reshape(codes.shape[1:])


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("name", ["min", "max", "min.NaN", "max.NaN", "min.ftz", "max.ftz.NaN"])
def test_the_smaller_and_the_larger_number(name: str, kind: str) -> None:
    known, opcode = FORMATS[kind], f"{name}.{kind}"
    codes = _codes(opcode, kind, 2)
    registers = np.stack([np.zeros_like(codes[0]), *codes], 1)
    found = execute(opcode, "111", registers)[:, 0]

    def wanted(pair: list[int]) -> int:
        if "ftz" in name:
            pair = list(map(known.flushed, pair))
        numbers = [code for code in pair if not known.is_nan(code)]
        if len(numbers) < ("NaN" in name) + 1:
            return known.nan
        key = lambda code: -(code & known.nan) - 1 if code & known.sign else code  # noqa: E731
        return (max if "max" in name else min)(numbers, key=key)

    rows = [wanted(pair) for pair in codes.reshape(2, -1).T.tolist()]
    _assert_equal(found, np.array(rows, np.uint64).reshape(codes[0].shape), registers)


RELATIONS = {
    "eq": "=", "ne": "<>", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "num": "<=>",
    "equ": "=?", "neu": "<>?", "ltu": "<?", "leu": "<=?", "gtu": ">?", "geu": ">=?", "nan": "?",
}  # fmt: skip


@pytest.mark.parametrize("joined", ["", ".and", ".or", ".xor"])
@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16", "ftz.f32"])
def test_comparisons(kind: str, joined: str) -> None:
    known = FORMATS[kind.removeprefix("ftz.")]
    for comparison, relations in RELATIONS.items():
        opcode = f"setp.{comparison}{joined}.{kind}"
        codes = _codes(opcode, kind.removeprefix("ftz."), 2)
        codes[1, ::3] = codes[0, ::3]
        other = (codes[0] >> np.uint64(1)) & np.uint64(1)
        rows = [np.zeros_like(other), np.zeros_like(other), *codes, *([other] if joined else [])]
        after = execute(opcode, "pp11p"[: len(rows)], np.stack(rows, 1))

        def relation(a: int, b: int) -> str:
            if known.is_nan(a) or known.is_nan(b):
                return "?"
            x, y = map(_ordered, ((known, a, kind), (known, b, kind)))
            return "<" if x < y else "=" if x == y else ">"

        holds = [relation(a, b) in relations for a, b in codes.reshape(2, -1).T.tolist()]
        p = np.array(holds).reshape(codes[0].shape)
        change = {".and": np.logical_and, ".or": np.logical_or, ".xor": np.logical_xor}.get(joined)
        q = ~p
        if change:
            p, q = change(p, other != 0), change(q, other != 0)
        np.testing.assert_array_equal(after[:, 0], p, opcode)
        np.testing.assert_array_equal(after[:, 1], q, opcode)


def _ordered(operand: tuple[Format, int, str]) -> Fraction:
    known, code, kind = operand
    if kind.startswith("ftz"):
        code = known.flushed(code)
    if known.is_infinite(code):
        return Fraction(-(10**400) if code & known.sign else 10**400)
    return known.value(code)


def test_set_writes_a_number_of_its_type() -> None:
    codes = np.zeros((1, 3, LANES), np.uint64)
    codes[0, 1], codes[0, 2] = 0x3C003C00, 0x3C004000  # (1, 1) and (2, 1) as float16
    for opcode, wanted in (
        ("set.eq.f16.f16", 0),
        ("set.lt.f16.f16", 0x3C00),
        ("set.eq.f16x2.f16x2", 0x3C000000),
        ("set.le.f16x2.f16x2", 0x3C003C00),
        ("set.gt.f32.f32", 0),
        ("set.le.f32.f32", 0x3F800000),
        ("set.lt.u32.f32", 0xFFFFFFFF),
    ):
        assert set(execute(opcode, "111", codes)[0, 0].tolist()) == {wanted}, opcode


@pytest.mark.parametrize(
    ("opcode", "wanted"),
    [
        ("neg.f32", [0x80000000, 1, 0xBF800000, 0x7F800000]),
        ("neg.ftz.f32", [0x80000000, 0, 0xBF800000, 0x7F800000]),
        ("abs.f32", [0, 1, 0x3F800000, 0x7F800000]),
        ("abs.ftz.f32", [0, 0, 0x3F800000, 0x7F800000]),
        ("testp.normal.f32", [0, 0, 1, 0]),
        ("testp.finite.f32", [1, 1, 1, 0]),
    ],
)
def test_signs_and_kinds_of_numbers(opcode: str, wanted: list[int]) -> None:
    codes = np.zeros((1, 2, LANES), np.uint64)
    codes[0, 1, :4] = [0, 0x80000001, 0x3F800000, 0xFF800000]
    kinds = "p1" if opcode.startswith("testp") else "11"
    assert execute(opcode, kinds, codes)[0, 0, :4].tolist() == wanted


APPROXIMATE: dict[str, Callable[[Any], Any]] = {
    "ex2.approx.ftz.f32": np.exp2,
    "lg2.approx.f32": np.log2,
    "sin.approx.ftz.f32": np.sin,
    "cos.approx.f32": np.cos,
    "tanh.approx.f32": lambda x: _rounded(np.tanh(x), 11),
    "rsqrt.approx.f32": lambda x: 1 / np.sqrt(x),
    "rcp.approx.ftz.f32": lambda x: 1 / x,
    "sqrt.approx.f32": np.sqrt,
    "ex2.approx.f16": np.exp2,
    "tanh.approx.bf16": np.tanh,
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("opcode", APPROXIMATE)
def test_approximate_instructions_return_the_nearest_number(opcode: str) -> None:
    """tanh.approx.f32 returns the nearest number of 11 significant bits."""
    _, modifiers, (kind,) = _split(opcode)
    known = FORMATS[kind]
    codes = _codes(opcode, kind, 1)[0]
    found = execute(opcode, "11", np.stack([np.zeros_like(codes), codes], 1))[:, 0]
    operands = codes.ravel().tolist()
    if "ftz" in modifiers:
        operands = list(map(known.flushed, operands))
    exact = APPROXIMATE[opcode](np.array([_long(known, code) for code in operands]))
    wanted = [_code(known, each, "ftz" in modifiers) for each in exact]
    registers = np.stack([np.zeros_like(codes), codes], 1)
    _assert_equal(found, np.array(wanted, np.uint64).reshape(codes.shape), registers)


def _rounded(x: Any, bits: int) -> Any:
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(fraction, bits)), exponent - bits)


def _long(known: Format, code: int) -> Any:
    kind = np.longdouble(_kind(known, code))
    return kind * np.longdouble(abs(known.value(code))) if kind and np.isfinite(kind) else kind


def _code(known: Format, x: np.longdouble, ftz: bool) -> int:
    if np.isnan(x):
        return known.nan
    if np.isinf(x):
        return known.top | (known.sign if x < 0 else 0)
    negative = bool(np.signbit(x))
    numerator, denominator = abs(x).as_integer_ratio()
    size = Fraction(int(numerator), int(denominator))
    code = known.rounded(-size if negative else size, "rn", negative)
    return known.flushed(code) if ftz else code


def test_quotients_of_division_by_large_numbers() -> None:
    registers = np.zeros((1, 3, LANES), np.uint64)
    registers[0, 1, :4] = [0x3F800000, 0x3F800000, 0x7F800000, 0xC0000000]  # 1, 1, infinity, -2
    registers[0, 2, :4] = [0x40400000, 0x7F000000, 0x7F000000, 0x7F800000]  # 3, 2^127, infinity
    full = execute("div.full.f32", "111", registers)[0, 0, :4].tolist()
    approximate = execute("div.approx.f32", "111", registers)[0, 0, :4].tolist()
    assert full == [0x3EAAAAAB, 0x00400000, 0x7F800000, 0x80000000]
    assert approximate == [0x3EAAAAAB, 0, 0x7FFFFFFF, 0x80000000]
