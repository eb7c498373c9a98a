"""Arithmetic of CUDA on the emulator: directed rounding, parts of words, special functions.

Rounded results are compared with exact fractions, all others with Python's and NumPy's results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block.cuda import kernels
from gpt2block.emulator import Source, missing, run
from gpt2block.errors import DeviceError, KernelError

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no CUDA on the CPU: {missing()}")

MODES = ("rn", "rz", "rd", "ru")
EXACT_BITS = 1200  # bits of the root of a fraction: more than any result of doubles needs


def root(x: Fraction) -> Fraction:
    """Return the square root if it has few enough bits, else a fraction just below it."""
    return Fraction(math.isqrt((x.numerator << 2 * EXACT_BITS) // x.denominator), 1 << EXACT_BITS)


FLOATS: dict[str, Callable[..., Fraction]] = {
    "__fadd_{}(x, y)": lambda x, y, z: x + y, "__fsub_{}(x, y)": lambda x, y, z: x - y,
    "__fmul_{}(x, y)": lambda x, y, z: x * y, "__fdiv_{}(x, y)": lambda x, y, z: x / y,
    "__fmaf_{}(x, y, z)": lambda x, y, z: x * y + z, "__frcp_{}(x)": lambda x, y, z: 1 / x,
    "__fsqrt_{}(fabsf(x))": lambda x, y, z: root(abs(x)),
    "__double2float_{}((double)x * y)": lambda x, y, z: x * y,
    "__int2float_{}(__float_as_int(x))": lambda x, y, z: Fraction(whole(x, np.int32)),
    "__uint2float_{}(__float_as_uint(x))": lambda x, y, z: Fraction(whole(x, np.uint32)),
}  # fmt: skip
DOUBLES: dict[str, Callable[..., Fraction]] = {
    "__dadd_{}(x, y)": lambda x, y, z: x + y, "__dsub_{}(x, y)": lambda x, y, z: x - y,
    "__dmul_{}(x, y)": lambda x, y, z: x * y, "__ddiv_{}(x, y)": lambda x, y, z: x / y,
    "__fma_{}(x, y, z)": lambda x, y, z: x * y + z, "__drcp_{}(x)": lambda x, y, z: 1 / x,
    "__dsqrt_{}(fabs(x))": lambda x, y, z: root(abs(x)),
    "__ll2double_{}(__double_as_longlong(x))": lambda x, y, z: Fraction(whole(x, np.int64)),
    "__ull2double_{}(__double_as_longlong(x))": lambda x, y, z: Fraction(whole(x, np.uint64)),
}  # fmt: skip
TYPES = {"float": (FLOATS, np.float32), "double": (DOUBLES, np.float64)}


def whole(x: Fraction, kind: Any) -> int:
    """Return the bits of a number as an integer."""
    return int(np.array(float(x), f"f{np.dtype(kind).itemsize}").view(kind))


@cache
def evaluating(type_: str, expressions: tuple[str, ...]) -> Source:
    cases = "".join(f"    case {i}: return {each};\n" for i, each in enumerate(expressions))
    stored = "int" if type_ == "unsigned" else type_
    return Source(
        "/numbers.cu",
        f"""__device__ {type_} result(int which, {type_} x, {type_} y, {type_} z) {{
    switch (which) {{
{cases}    default: return 0;
    }}
}}
extern "C" __global__ void evaluate(const {stored}* x, const {stored}* y, const {stored}* z,
                                    {stored}* out, int which, int n) {{
    for (int i = threadIdx.x; i < n; i += 32) out[i] = result(which, x[i], y[i], z[i]);
}}
""",
    )


def evaluated(
    type_: str, expressions: tuple[str, ...], which: str, *operands: NDArray[Any]
) -> NDArray[Any]:
    x, y, z = (operands[i] if i < len(operands) else operands[0] for i in range(3))
    out = np.zeros_like(x)
    source = evaluating(type_, expressions)
    run(source, "evaluate", (1,), (32,), [x, y, z, out, expressions.index(which), x.size])
    return out


def operands(dtype: Any, count: int = 200) -> list[NDArray[Any]]:
    """Return x and y of similar sizes and a small z, so that sums are hard to round."""
    rng = np.random.default_rng(0)
    x, y, z = (rng.standard_normal(count).astype(dtype) for _ in range(3))
    x[::7], y[::9] = 3.0, 0.5
    z[: count // 2] *= dtype(1e-12)
    return [x, y, z]


DIRECTED = {
    type_: tuple(name.format(mode) for name in table for mode in MODES)
    for type_, (table, _) in TYPES.items()
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("type_", "name"), [(type_, name) for type_, (table, _) in TYPES.items() for name in table]
)
def test_a_rounding(type_: str, name: str, mode: str) -> None:
    table, dtype = TYPES[type_]
    given = operands(dtype)
    found = evaluated(type_, DIRECTED[type_], name.format(mode), *given)
    for got, *each in zip(found, *given, strict=True):
        exact = table[name](*map(Fraction, map(float, each)))
        down, up = (np.nextafter(got, dtype(end)) for end in (-np.inf, np.inf))
        below, at, above = (Fraction(float(v)) for v in (down, got, up))
        if mode == "rn":
            assert abs(exact - at) <= min(exact - below, above - exact)
        elif mode == "rd" or (mode == "rz" and exact >= 0):
            assert at <= exact < above
        else:
            assert below < exact <= at


INTEGERS: dict[str, Any] = {"int": np.int32, "uint": np.uint32, "ll": np.int64, "ull": np.uint64}
ROUNDED = {"rn": np.rint, "rz": np.trunc, "rd": np.floor, "ru": np.ceil}
TO_INTEGER = tuple(f"__double2{to}_{mode}(x)" for to in INTEGERS for mode in MODES)


@pytest.mark.parametrize("name", TO_INTEGER)
def test_a_conversion_to_an_integer_stays_in_its_range(name: str) -> None:
    to, mode = name.removeprefix("__double2").removesuffix("(x)").split("_")
    x = np.array([0.5, 1.5, -0.5, -2.5, 7.0, 1e6 + 0.25, 1e300, -1e300, np.nan])
    limits = np.iinfo(INTEGERS[to])
    expected = np.nan_to_num(ROUNDED[mode](x)).clip(limits.min, limits.max)
    np.testing.assert_array_equal(evaluated("double", TO_INTEGER, name, x), expected)


# Parts of words


def saturated(v: NDArray[Any], part: Any) -> NDArray[Any]:
    return v.clip(np.iinfo(part).min, np.iinfo(part).max)


# function and u (unsigned) or s (signed) -> its result for parts a, b of their type t
PARTS: dict[str, Callable[..., Any]] = {
    "__vadd{}:u": lambda a, b, t: a + b, "__vaddss{}:s": lambda a, b, t: saturated(a + b, t),
    "__vaddus{}:u": lambda a, b, t: saturated(a + b, t), "__vsub{}:u": lambda a, b, t: a - b,
    "__vsubss{}:s": lambda a, b, t: saturated(a - b, t),
    "__vsubus{}:u": lambda a, b, t: saturated(a - b, t),
    "__vhaddu{}:u": lambda a, b, t: (a + b) // 2, "__vavgu{}:u": lambda a, b, t: (a + b + 1) // 2,
    "__vabsdiffs{}:s": lambda a, b, t: abs(a - b), "__vabsdiffu{}:u": lambda a, b, t: abs(a - b),
    "__vmaxs{}:s": lambda a, b, t: np.maximum(a, b),
    "__vmaxu{}:u": lambda a, b, t: np.maximum(a, b),
    "__vmins{}:s": lambda a, b, t: np.minimum(a, b),
    "__vminu{}:u": lambda a, b, t: np.minimum(a, b),
    "__vcmpeq{}:u": lambda a, b, t: -(a == b).astype(int),
    "__vcmpne{}:u": lambda a, b, t: -(a != b).astype(int),
    "__vcmpges{}:s": lambda a, b, t: -(a >= b).astype(int),
    "__vcmpgtu{}:u": lambda a, b, t: -(a > b).astype(int),
    "__vcmpleu{}:u": lambda a, b, t: -(a <= b).astype(int),
    "__vcmplts{}:s": lambda a, b, t: -(a < b).astype(int),
}  # fmt: skip
ALONE: dict[str, Callable[..., Any]] = {
    "__vneg{}:s": lambda a, t: -a, "__vnegss{}:s": lambda a, t: saturated(-a, t),
    "__vabs{}:s": lambda a, t: abs(a), "__vabsss{}:s": lambda a, t: saturated(abs(a), t),
}  # fmt: skip
THREE: dict[str, Callable[..., Any]] = {
    "__viaddmax_{}": lambda a, b, c, t: np.maximum((a + b).astype(t), c),
    "__viaddmin_{}": lambda a, b, c, t: np.minimum((a + b).astype(t), c),
    "__vimax3_{}": lambda a, b, c, t: np.maximum(np.maximum(a, b), c),
    "__vimin3_{}": lambda a, b, c, t: np.minimum(np.minimum(a, b), c),
}
OF_HALVES = {
    "s32": np.int32, "u32": np.uint32, "s16x2": np.int16, "u16x2": np.uint16,
    "s32_relu": np.int32, "s16x2_relu": np.int16,
}  # fmt: skip
DOTS = {"__dp4a": slice(0, 4), "__dp2a_lo": slice(0, 2), "__dp2a_hi": slice(2, 4)}
WORDS = (
    *(f"{name.split(':')[0].format(n)}(x, y)" for name in PARTS for n in "24"),
    *(f"{name.split(':')[0].format(n)}(x)" for name in ALONE for n in "24"),
    *(f"{name.format(kind)}(x, y, z)" for name in THREE for kind in OF_HALVES),
    *(f"{kind}(x, y, z)" for kind in DOTS),
    *(f"{kind}((int)x, (int)y, (int)z)" for kind in DOTS),
    *(f"__vsad{sign}{n}(x, y)" for sign in "su" for n in "24"),
    "__funnelshift_lc(x, y, z % 64)", "__funnelshift_rc(x, y, z % 64)",
)  # fmt: skip
PART = {"u2": np.uint16, "s2": np.int16, "u4": np.uint8, "s4": np.int8}


def words(expression: str) -> tuple[list[NDArray[np.uint32]], NDArray[np.uint32]]:
    rng = np.random.default_rng(0)
    x, y, z = (rng.integers(0, 1 << 32, 500, np.uint32) for _ in range(3))
    y[::5] = x[::5]
    x[:50] = 0x80008080
    found = evaluated("unsigned", WORDS, expression, *(each.view(np.int32) for each in (x, y, z)))
    return [x, y, z], found.view(np.uint32)


@pytest.mark.parametrize("n", "24")
@pytest.mark.parametrize("name", [*PARTS, *ALONE])
def test_parts_of_words(name: str, n: str) -> None:
    function, _, sign = name.partition(":")
    part = PART[sign + n]
    table, given = (PARTS, "x, y") if name in PARTS else (ALONE, "x")
    (x, y, _), found = words(f"{function.format(n)}({given})")
    parts = [each.view(part).astype(np.int64) for each in (x, y)][: len(given.split())]
    np.testing.assert_array_equal(found.view(part), table[name](*parts, part).astype(part))


@pytest.mark.parametrize("kind", OF_HALVES)
@pytest.mark.parametrize("name", THREE)
def test_extremes_of_three(name: str, kind: str) -> None:
    part = OF_HALVES[kind]
    operands, found = words(f"{name.format(kind)}(x, y, z)")
    expected = THREE[name](*(each.view(part).astype(np.int64) for each in operands), part)
    if kind.endswith("relu"):
        expected = np.maximum(expected, 0)
    np.testing.assert_array_equal(found.view(part), expected.astype(part))


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("name", DOTS)
def test_products_of_parts(name: str, signed: bool) -> None:
    given = "(int)x, (int)y, (int)z" if signed else "x, y, z"
    (x, y, z), found = words(f"{name}({given})")
    sign = "s" if signed else "u"
    left = x.view(PART[sign + ("4" if name == "__dp4a" else "2")]).reshape(x.size, -1)
    right = y.view(PART[sign + "4"]).reshape(y.size, 4)[:, DOTS[name]]
    total = (left.astype(np.int64) * right).sum(1) + z
    np.testing.assert_array_equal(found, (total & 0xFFFFFFFF).astype(np.uint32))


@pytest.mark.parametrize("kind", PART)
def test_sums_of_distances(kind: str) -> None:
    (x, y, _), found = words(f"__vsad{kind}(x, y)")
    parts = [each.view(PART[kind]).astype(np.int64).reshape(x.size, -1) for each in (x, y)]
    np.testing.assert_array_equal(found, abs(parts[0] - parts[1]).sum(1))


@pytest.mark.parametrize("side", "lr")
def test_a_clamped_funnel_shift(side: str) -> None:
    (x, y, z), found = words(f"__funnelshift_{side}c(x, y, z % 64)")
    for low, high, n, got in zip(*(each.tolist() for each in (x, y, z, found)), strict=True):
        both, bits = high << 32 | low, min(n % 64, 32)
        assert got == (both << bits >> 32 if side == "l" else both >> bits) & 0xFFFFFFFF


# Special functions

NORMAL = NormalDist()


def bessel(order: int, x: float) -> float:
    """Integrate by the trapezoidal rule, exact for periodic functions of few frequencies."""
    angles = np.arange(400) * (2 * np.pi / 400)
    return float((np.exp(x * np.cos(angles)) * np.cos(order * angles)).mean())


def scaled_erfc(x: float) -> float:
    """Return erfc(x) exp(x^2); for large x, integrate by the Gauss-Laguerre rule."""
    if x < 4:
        return math.exp(x * x) * math.erfc(x)
    nodes, weights = np.polynomial.laguerre.laggauss(40)
    return float((weights * np.exp(-((nodes / (2 * x)) ** 2))).sum() / (x * math.sqrt(math.pi)))


SPECIAL: dict[str, tuple[Callable[[float], float], tuple[float, ...]]] = {
    "erfinv": (
        lambda x: math.copysign(-NORMAL.inv_cdf(0.5 - abs(x) / 2) / math.sqrt(2), x),
        (-0.9, -0.5, -0.3, 0.125, 0.5, 0.75, 0.999),
    ),
    "erfcinv": (
        lambda x: -NORMAL.inv_cdf(x / 2) / math.sqrt(2), (1e-44, 1e-7, 0.3, 0.5, 1.25, 1.75),
    ),
    "erfcx": (scaled_erfc, (-5.0, -1.0, 0.0, 1.0, 3.0, 9.0, 24.0, 26.0, 1e4)),
    "normcdf": (NORMAL.cdf, (-3.0, -1.0, 0.0, 0.5, 2.0, 6.0)),
    "normcdfinv": (NORMAL.inv_cdf, (1e-44, 1e-9, 0.03, 0.4, 0.625, 0.99)),
    "cyl_bessel_i0": (lambda x: bessel(0, x), (-7.0, 0.0, 0.5, 3.0, 20.0)),
    "cyl_bessel_i1": (lambda x: bessel(1, x), (-7.0, 0.5, 3.0, 20.0)),
    "sinpi": (lambda x: math.sin(math.pi * x), (-1.25, 0.25, 0.5, 1.75)),
    "cospi": (lambda x: math.cos(math.pi * x), (-1.25, 0.25, 1.0, 1.75)),
    "rcbrt": (lambda x: x ** (-1 / 3), (0.001, 1.0, 27.0)),
}  # fmt: skip
POINTS = [(name, x) for name, (_, points) in SPECIAL.items() for x in points]


@pytest.mark.parametrize(("type_", "suffix"), [("double", ""), ("float", "f")])
@pytest.mark.parametrize("name", SPECIAL)
def test_a_special_function(name: str, type_: str, suffix: str) -> None:
    function, points = SPECIAL[name]
    expressions = tuple(f"{each}{suffix}(x)" for each in SPECIAL)
    x = np.array(points).astype(np.float32 if suffix else np.float64)
    found = evaluated(type_, expressions, f"{name}{suffix}(x)", x)
    expected = [function(float(v)) for v in x]
    np.testing.assert_allclose(found, expected, rtol=2e-7 if suffix else 3e-13, atol=1e-44)


EDGES = {
    "erfinv(x)": [(1.0, np.inf), (-1.0, -np.inf), (1.5, np.nan), (np.nan, np.nan), (0.0, 0.0)],
    "erfcinv(x)": [(0.0, np.inf), (2.0, -np.inf), (-0.5, np.nan), (1.0, 0.0)],
    "normcdfinv(x)": [(0.0, -np.inf), (1.0, np.inf), (2.0, np.nan), (0.5, 0.0)],
    "erfcx(x)": [(-30.0, np.inf), (np.inf, 0.0), (np.nan, np.nan)],
    "__frsqrt_rn((float)x)": [(0.25, 2.0), (np.inf, 0.0)],
    "norm3d(x, 2.0, 2.0)": [(1.0, 3.0)], "norm4d(x, 1.0, 1.0, 1.0)": [(1.0, 2.0)],
    "rnorm3df((float)x, 2.0f, 2.0f)": [(0.0, np.float32(8**-0.5))], "rhypot(x, 4.0)": [(3.0, 0.2)],
    "rnorm4d(x, 1.0, 1.0, 1.0)": [(1.0, 0.5)], "norm(1, &x)": [(-3.0, 3.0)],
    "rnorm(1, &x)": [(-4.0, 0.25)],
    "__hiloint2double(__double2hiint(x), __double2loint(x))": [(0.1, 0.1), (-7e77, -7e77)],
}  # fmt: skip


@pytest.mark.parametrize("expression", EDGES)
def test_edges(expression: str) -> None:
    x, expected = np.array(EDGES[expression]).T
    found = evaluated("double", tuple(EDGES), expression, np.ascontiguousarray(x))
    np.testing.assert_array_equal(found, expected)


def test_the_compiler_of_cuda_has_all_of_it(tmp_path: Any) -> None:
    of_float = tuple(f"{each}f(x)" for each in SPECIAL)
    for type_, expressions in (
        ("float", (*DIRECTED["float"], *of_float)),
        ("double", (*DIRECTED["double"], *TO_INTEGER, *(f"{each}(x)" for each in SPECIAL), *EDGES)),
        ("unsigned", WORDS),
    ):
        file = tmp_path / f"{type_}.cu"
        file.write_text(evaluating(type_, expressions).text, encoding="ascii")
        try:
            kernels.compile_for(str(file), "sm_80")
        except (DeviceError, ImportError, OSError, RuntimeError) as error:
            if isinstance(error, KernelError):
                raise
            pytest.skip(f"no NVRTC: {error}")
