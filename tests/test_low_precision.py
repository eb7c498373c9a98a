"""Arithmetic of float16 and bfloat16 on the emulator: every result is the nearest number.

Results are compared with NumPy, ml_dtypes and exact fractions, for all numbers or for random pairs
of bit patterns, which include subnormal numbers, infinities and NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block.emulator import ShimError, Source, missing, run

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no CUDA on the CPU: {missing()}")

Bits = NDArray[np.uint16]
ALL = np.arange(1 << 16).astype(np.uint16)
UNARY: dict[str, Callable[..., Any]] = {
    "hsqrt(a)": np.sqrt, "hrsqrt(a)": lambda v: 1 / np.sqrt(v), "hrcp(a)": lambda v: 1 / v,
    "hexp(a)": np.exp, "hexp2(a)": np.exp2, "hlog(a)": np.log, "hlog2(a)": np.log2,
    "htanh(a)": np.tanh, "hsin(a)": np.sin, "hceil(a)": np.ceil, "hfloor(a)": np.floor,
    "htrunc(a)": np.trunc, "hrint(a)": np.rint, "-a": np.negative, "__habs(a)": np.abs,
    "__hadd_sat(a, 0)": lambda v: np.where(v > 0, np.minimum(v, 1), 0),
}  # fmt: skip
BINARY: dict[str, Callable[..., Any]] = {
    "a + b": np.add, "__hsub(a, b)": np.subtract, "a * b": np.multiply, "__hdiv(a, b)": np.divide,
    "__hmax(a, b)": np.fmax, "__hmin(a, b)": np.fmin,
    "__hmax_nan(a, b)": np.maximum, "__hmin_nan(a, b)": np.minimum,
}  # fmt: skip
COMPARED: dict[str, Callable[..., Any]] = {
    "a == b": np.equal, "a != b": np.not_equal, "a < b": np.less, "__hle(a, b)": np.less_equal,
    "__hgt(a, b)": np.greater, "a >= b": np.greater_equal,
    "__hltu(a, b)": lambda a, b: ~(a >= b), "__hne(a, b)": lambda a, b: (a < b) | (a > b),
}  # fmt: skip
FMA = "__hfma(a, b, c)"
EXPRESSIONS = (*UNARY, *BINARY, *COMPARED, FMA)


class Format(NamedTuple):
    dtype: Any
    cuda: str
    above: float  # the next number after the largest finite one, with an unlimited exponent
    from_float: str
    to_float: str

    def values(self, bits: Bits) -> NDArray[np.float64]:
        return np.asarray(bits.view(self.dtype), np.float64)


FORMATS = (
    Format(np.float16, "__half", 2.0**16, "__float2half", "__half2float"),
    Format(ml_dtypes.bfloat16, "__nv_bfloat16", 2.0**128, "__float2bfloat16", "__bfloat162float"),
)
formats = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.cuda)


@cache
def source(form: Format) -> Source:
    cases = "".join(f"    case {i}: return {each};\n" for i, each in enumerate(EXPRESSIONS))
    modes = "".join(
        f"    if (mode == {i}) return {form.from_float}{mode}(f);\n"
        for i, mode in enumerate(("", "_rz", "_rd", "_ru", "_rn"))
    )
    return Source(
        "/low_precision.cu",
        f"""#include <cuda_fp16.h>
#include <cuda_bf16.h>
typedef {form.cuda} T;
__device__ T result(int which, T a, T b, T c) {{
    switch (which) {{
{cases}    default: return T(0);
    }}
}}
__device__ T rounded(int mode, float f) {{
{modes}    return T((double)f);
}}
extern "C" __global__ void apply(const T* a, const T* b, const T* c, T* out, int which, int n) {{
    for (int i = threadIdx.x; i < n; i += 32) out[i] = result(which, a[i], b[i], c[i]);
}}
extern "C" __global__ void convert(const float* x, T* out, int mode, int n) {{
    for (int i = threadIdx.x; i < n; i += 32) out[i] = rounded(mode, x[i]);
}}
extern "C" __global__ void widen(const T* x, float* out, int n) {{
    for (int i = threadIdx.x; i < n; i += 32) out[i] = {form.to_float}(x[i]);
}}
""",
    )


def apply(form: Format, expression: str, a: Bits, b: Bits, c: Bits | None = None) -> Bits:
    out = np.zeros(a.shape, form.dtype)
    arrays = [each.copy().view(form.dtype) for each in (a, b, b if c is None else c)]
    args = [*arrays, out, EXPRESSIONS.index(expression), a.size]
    run(source(form), "apply", (1,), (32,), args, storage=out.dtype.name)
    return out.view(np.uint16)


def convert(form: Format, mode: int, x: NDArray[np.float32]) -> Bits:
    out = np.zeros(x.shape, form.dtype)
    args = [x, out, mode, x.size]
    run(source(form), "convert", (1,), (32,), args, storage=out.dtype.name)
    return out.view(np.uint16)


def pairs(count: int = 50_000) -> tuple[Bits, Bits]:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 1 << 16, count).astype(np.uint16) for _ in range(2))
    # A quarter of the sums nearly cancel.
    b[: count // 4] = (a[: count // 4] ^ 0x8000) + rng.integers(-999, 999, count // 4)
    return a, b


def assert_nearest(form: Format, found: Bits, exact: NDArray[np.float64]) -> None:
    """Assert that no neighbor is nearer, or as near and even.

    exact: the results in float64, which is precise enough to decide this.
    """
    nan = np.isnan(exact)
    assert (found[nan] == 0x7FFF).all()
    found, exact = found[~nan], exact[~nan]
    assert (np.signbit(exact) == (found >= 0x8000)).all()
    magnitude, exact = (found & 0x7FFF).astype(int), np.abs(exact)
    steps = form.values(ALL[:0x8000])
    infinite = int(np.argmax(np.isinf(steps)))
    assert (magnitude <= infinite).all()
    steps[infinite] = form.above
    exact = np.minimum(exact, form.above)
    off = np.abs(steps[magnitude] - exact)
    for other in (np.maximum(magnitude - 1, 0), np.minimum(magnitude + 1, infinite)):
        theirs = np.abs(steps[other] - exact)
        assert (
            (off < theirs) | (off == theirs) & ((magnitude % 2 == 0) | (other == magnitude))
        ).all()


@formats
@pytest.mark.parametrize("expression", UNARY)
@np.errstate(all="ignore")
def test_functions_of_all_numbers(form: Format, expression: str) -> None:
    found = apply(form, expression, ALL, ALL)
    assert_nearest(form, found, UNARY[expression](form.values(ALL)))


@formats
@pytest.mark.parametrize("expression", BINARY)
@np.errstate(all="ignore")
def test_operators(form: Format, expression: str) -> None:
    a, b = pairs()
    found, exact = apply(form, expression, a, b), BINARY[expression](form.values(a), form.values(b))
    assert_nearest(form, found, exact)
    own = BINARY[expression](a.view(form.dtype), b.view(form.dtype)).astype(np.float64)
    normal = ~(np.abs(exact) < 2.0**-126)  # below, ml_dtypes rounds twice
    np.testing.assert_array_equal(form.values(found)[normal], own[normal])


@formats
@np.errstate(all="ignore")
def test_comparisons(form: Format) -> None:
    a, b = pairs(5000)
    b[::5] = a[::5]
    for expression, expected in COMPARED.items():
        found = form.values(apply(form, expression, a, b))
        np.testing.assert_array_equal(found, expected(form.values(a), form.values(b)), expression)


@formats
def test_zeros_and_nan(form: Format) -> None:
    """max and min treat +0 as larger than -0."""
    a, b = np.array([[0, 0x8000, 0x7FFF, 0xFFFF], [0x8000, 0, 0x3C00, 0x7FFF]], np.uint16)
    assert apply(form, "__hmax(a, b)", a, b).tolist() == [0, 0, 0x3C00, 0x7FFF]
    assert apply(form, "__hmin(a, b)", a, b).tolist() == [0x8000, 0x8000, 0x3C00, 0x7FFF]


@formats
@np.errstate(all="ignore")
def test_a_fused_multiply_add_rounds_once(form: Format) -> None:
    """Sums are nearly halfway between two numbers: a product halfway between, and a small c."""
    rng = np.random.default_rng(1)
    values = form.values(ALL)
    a, b, c = (rng.integers(0, 1 << 16, 6000).astype(np.uint16) for _ in range(3))
    a[:3000] = rng.integers(0x3C00, 0x4200, 3000)
    b[:3000] = rng.integers(0x3C00, 0x4200, 3000)
    c[:3000] = rng.integers(0, 0x600, 3000) | rng.integers(0, 2, 3000) << 15
    finite = np.isfinite(values[a]) & np.isfinite(values[b]) & np.isfinite(values[c])
    a, b, c = a[finite], b[finite], c[finite]
    found = apply(form, FMA, a, b, c)
    steps = values[:0x8000]
    infinite = int(np.argmax(np.isinf(steps)))
    near = [Fraction(v) for v in (*steps[:infinite].tolist(), form.above)]
    for bits, factors in zip(found.tolist(), zip(a, b, c, strict=True), strict=True):
        x, y, z = (Fraction(values[each]) for each in factors)
        exact, magnitude = x * y + z, bits & 0x7FFF
        if exact:
            assert (exact < 0) == (bits >= 0x8000)
        exact = min(abs(exact), near[-1])
        off = abs(near[magnitude] - exact)
        for other in (max(magnitude - 1, 0), min(magnitude + 1, infinite)):
            theirs = abs(near[other] - exact)
            assert off < theirs or (off == theirs and (magnitude % 2 == 0 or other == magnitude))


@formats
@np.errstate(all="ignore")
def test_conversions_of_float(form: Format) -> None:
    rng = np.random.default_rng(2)
    halfway = (form.values(ALL[:0x7800]) + form.values(ALL[1:0x7801])) / 2
    x = np.concatenate([
        rng.integers(0, 1 << 32, 20_000, np.uint32).view(np.float32),
        rng.standard_normal(20_000).astype(np.float32),
        *(np.nextafter(np.float32(halfway), np.float32(to)) for to in (0, 1e38)),
        np.array([0, -0.0, np.inf, -np.inf, np.nan, 65519.996, 65520, 3.4e38, 1e-45], np.float32),
    ])  # fmt: skip
    x = np.concatenate([x, np.float32(halfway)])
    nearest = x.astype(form.dtype).astype(np.float64)
    for mode in (0, 4, 5):  # from float in two ways, and from double
        np.testing.assert_array_equal(form.values(convert(form, mode, x)), nearest)
    number = ~np.isnan(x)
    v = x[number].astype(np.float64)
    zero, down, up = (form.values(convert(form, mode, x))[number] for mode in (1, 2, 3))
    assert (down <= v).all()
    assert (v <= up).all()
    np.testing.assert_array_equal(zero, np.where(v < 0, up, down))
    assert ((nearest[number] == down) | (nearest[number] == up)).all()
    exact = nearest[number] == v
    np.testing.assert_array_equal(up[exact], down[exact])


@formats
def test_conversions_to_float(form: Format) -> None:
    every, wide = ALL.view(form.dtype), np.zeros(ALL.shape, np.float32)
    run(source(form), "widen", (1,), (32,), [every, wide, wide.size], storage=every.dtype.name)
    np.testing.assert_array_equal(wide, every.astype(np.float32))


def test_another_storage_type_is_refused() -> None:
    wide = np.zeros(4, np.float32)
    with pytest.raises(ShimError, match=r"T\* x, where T is float16: expected .* of float16"):
        run(source(FORMATS[0]), "widen", (1,), (32,), [wide, wide, 4], storage="float16")
