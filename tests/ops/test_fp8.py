"""FP8: the rounding against ml_dtypes and exact arithmetic, the kernels, and `WeightMatrix`."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import WeightMatrix, reference
from gpt2block.cuda import cupy as cp
from gpt2block.models.weights.matrix import SMALLEST, _absmax
from gpt2block.ops.registry import OPERATIONS
from gpt2block.ops.to_fp8 import OPERATION
from tests.caches import DTYPES, LARGEST
from tests.caches import FORMATS as PEERS
from tests.devices import GPU, on_every_backend, on_one_of_each, outputs, running_on

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
E5M2, E4M3 = FORMATS = tuple(PEERS)
VARIANTS = [variant.name for variant in OPERATION.variants]
LAYOUTS = ("KN", "NK")
on_every_format = pytest.mark.parametrize("format", FORMATS)
in_every_layout = pytest.mark.parametrize("layout", LAYOUTS)
few = settings(max_examples=4)
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NaN


def sixteen_bits(dtype: str) -> Array:
    """Return all numbers of a 16-bit dtype, including NaN and infinities."""
    return np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype])


def floats(format: str) -> Array:
    """Return float32 of both signs: all FP8 numbers, ties, their neighbours, every exponent."""
    numbers = reference.from_fp8(np.arange(128, dtype=np.uint8), format)
    numbers = numbers[np.isfinite(numbers)]
    beyond = np.float32(2) * numbers[-1] - numbers[-2]  # a next larger number
    ties = (numbers + np.append(numbers[1:], beyond)) / 2
    powers = np.exp2(np.arange(-149, 128, dtype=np.float64)).astype(np.float32)
    points = np.concatenate([numbers, ties, powers, powers * np.float32(1.3), [beyond]])
    around = [points, np.nextafter(points, np.inf, dtype=np.float32), np.nextafter(points, -np.inf)]
    words = np.array([0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x7F7FFFFF], np.uint32)
    values = np.concatenate([*around, words.view(np.float32)]).astype(np.float32)
    return np.concatenate([values, -values])


def inputs(format: str, dtype: str) -> Array:
    return floats(format) if dtype == "float32" else sixteen_bits(dtype)


def by_hand(value: float, format: str) -> int:
    """Find the byte of a finite number by a search in exact arithmetic, saturating."""
    magnitude = abs(Fraction(value))
    numbers = reference.from_fp8(np.arange(128, dtype=np.uint8), format)
    distance = {
        code: abs(Fraction(float(number)) - magnitude)
        for code, number in enumerate(numbers)
        if np.isfinite(number)
    }
    nearest = min(distance, key=lambda code: (distance[code], code % 2))
    return nearest | (0x80 if np.signbit(value) else 0)


def evaluate(
    where: str,
    x: Array,
    format: str,
    saturate: bool = True,
    scale: Array | None = None,
    layout: str = "KN",
    *,
    variant: str = "vectors",
    block: int | None = None,
    offset: int = 0,
) -> Bytes:
    """Convert x with NumPy, on the emulator, or on a GPU, twice with the same bits.

    offset: elements before x in the device's memory, which change its alignment.
    """
    if where == "numpy":
        return reference.to_fp8(x, format, saturate, scale, layout)
    memory = np.concatenate([np.zeros(offset, x.dtype), x.ravel()])

    def bind(inputs: tuple[Any, ...], out: Any, **options: Any) -> Any:
        return OPERATIONS["to_fp8"].bind((inputs[0][offset:].reshape(x.shape),), out, **options)

    options: dict[str, Any] = {"format": format, "saturate": saturate, "scale": scale}
    options |= {"layout": layout, "variant": variant, "block": block}
    return outputs(where, bind, (memory,), np.full(x.shape, 0xCD, np.uint8), **options)[0]


# --- the NumPy reference --------------------------------------------------------------------------


@on_every_format
def test_every_byte_is_the_number_it_is_in_ml_dtypes(format: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    got = reference.from_fp8(codes, format)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, codes.view(PEERS[format]).astype(np.float32))
    finite = np.isfinite(got)
    assert (np.signbit(got[finite]) == (codes[finite] >= 128)).all()
    np.testing.assert_array_equal(reference.to_fp8(got[finite], format), codes[finite])
    assert got[finite].max() == LARGEST[format]


@on_every_format
@given(value=st.floats(allow_nan=False, allow_infinity=False), power=st.integers(-20, 20))
@example(value=1 + 2**-3 + 2**-40, power=0)
@example(value=1 + 2**-4 + 2**-40, power=0)
@example(value=-(2.0**-17), power=0)
@example(value=5e-324, power=0)
def test_float64_is_rounded_once(format: str, value: float, power: int) -> None:
    """ml_dtypes rounds to float32 first, so a number just above a tie becomes the tie."""
    near = np.ldexp(np.frexp(value)[0], power)
    got = reference.to_fp8(np.array([value, near]), format)
    assert got.tolist() == [by_hand(value, format), by_hand(near, format)]


# --- every backend --------------------------------------------------------------------------------


@on_one_of_each
@on_every_format
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("saturate", [False, True])
def test_bit_for_bit_as_ml_dtypes(where: str, format: str, dtype: str, saturate: bool) -> None:
    """Inputs are all 16-bit numbers, and difficult float32 numbers.

    If saturated, infinity and numbers beyond the range become the largest number; NaN stays NaN.
    """
    x = inputs(format, dtype)
    limit = LARGEST[format] if saturate else np.inf
    expected = np.clip(x.astype(np.float32), -limit, limit).astype(PEERS[format]).view(np.uint8)
    got = evaluate(where, x, format, saturate)
    np.testing.assert_array_equal(got, expected)
    assert not saturate or not np.isinf(reference.from_fp8(got, format)).any()


@on_one_of_each
@pytest.mark.parametrize("variant", VARIANTS)
@few
@given(size=st.integers(1, 300), dtype=st.sampled_from(list(DTYPES)))
@example(size=16 * 256 + 3, dtype="float16")
@example(size=7, dtype="bfloat16")
def test_any_size(where: str, variant: str, size: int, dtype: str) -> None:
    x = np.random.default_rng(size).standard_normal(size).astype(DTYPES[dtype])
    expected = x.astype(PEERS[E4M3]).view(np.uint8)
    np.testing.assert_array_equal(evaluate(where, x, E4M3, variant=variant), expected)


@on_one_of_each
@in_every_layout
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("dtype", "shape", "offset"),
    [
        ("float16", (9, 48), 0),
        ("float32", (5, 21), 0),
        ("float16", (9, 80), 1),
        ("float16", (9, 80), 8),
    ],
)
def test_scales(
    where: str, layout: str, variant: str, dtype: str, shape: tuple[int, int], offset: int
) -> None:
    """With an offset, loads are narrow."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(DTYPES[dtype])
    N = shape[layout.index("N")]
    scale = rng.uniform(1e-3, 1e-2, N).astype(np.float32)
    quotient = x.astype(np.float32) / (scale if layout == "KN" else scale[:, None])
    clipped = np.clip(quotient, -448, 448)  # some exceed the range
    assert (clipped != quotient).any()
    expected = clipped.astype(PEERS[E4M3]).view(np.uint8)
    options: Any = {"scale": scale, "layout": layout, "variant": variant, "block": 64}
    got = evaluate(where, x, E4M3, offset=offset, **options)
    np.testing.assert_array_equal(got, expected)


def absmax(where: str, w: Array, layout: str) -> Array:
    if where == "numpy":
        most = _absmax(w, layout)
        most[~np.isfinite(most)] = np.inf
        return most
    with running_on(where):
        results = [_absmax(cp.asarray(w), layout) for _ in range(1 + (where == "gpu"))]
    np.testing.assert_array_equal(results[0], results[-1])
    return results[0]


@on_every_backend
@in_every_layout
@pytest.mark.parametrize(
    ("dtype", "shape"), [("float16", (261, 72)), ("bfloat16", (7, 4104)), ("float32", (3, 37))]
)
def test_largest_magnitudes(where: str, layout: str, dtype: str, shape: tuple[int, int]) -> None:
    w = np.random.default_rng(0).standard_normal(shape).astype(DTYPES[dtype])
    axis = layout.index("K")
    expected = [max(abs(float(v)) for v in channel) for channel in np.moveaxis(w, axis, 1)]
    got = absmax(where, w, layout)
    np.testing.assert_array_equal(got, np.array(expected, np.float32))
    assert got.dtype == np.float32

    w[1, 5], w[2, 3] = -np.inf, np.nan
    bad = np.zeros(shape, bool)
    bad[1, 5] = bad[2, 3] = True
    got = absmax(where, w, layout)
    np.testing.assert_array_equal(np.isinf(got), bad.any(axis=axis))
    rest = ~bad.any(axis=axis)
    np.testing.assert_array_equal(got[rest], np.array(expected, np.float32)[rest])


# --- WeightMatrix ---------------------------------------------------------------------------------

on_numpy_and_gpu = pytest.mark.parametrize("where", ["numpy", GPU])


def matrix(where: str, w: Array) -> Any:
    return w if where == "numpy" else cp.asarray(w)


def host(array: Any) -> Array:
    return array if isinstance(array, np.ndarray) else np.asarray(array.get())


def weights(dtype: str = "float32", K: int = 40, N: int = 24) -> Array:
    w = 0.02 * np.random.default_rng(0).standard_normal((K, N))
    return w.astype(DTYPES[dtype])


@on_numpy_and_gpu
@in_every_layout
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("dtype", [*DTYPES, *FORMATS])
def test_quantize(where: str, layout: str, source: str, dtype: str) -> None:
    """Every byte and scale equals the one computed by hand."""
    w = weights(source, 12, 8)
    w[:, 3] = 0
    w[7, 5] = 40000  # gives its channel a large scale; E5M2 has no scales
    stored = w if layout == "KN" else np.ascontiguousarray(w.T)
    got = WeightMatrix.quantize(matrix(where, stored), dtype, layout, "wq")
    assert (got.K, got.N, got.dtype, got.layout) == (12, 8, dtype, layout)
    data, wide, scale = host(got.data), w.astype(np.float32), np.ones(8, np.float32)
    data = data if layout == "KN" else data.T
    if dtype == E4M3:
        scale = np.abs(wide).max(axis=0) / np.float32(448)
        assert scale[3] == 0
        scale[3] = 1
        np.testing.assert_array_equal(host(got.scale), scale)
    else:
        assert got.scale is None
    if dtype in DTYPES:
        assert data.dtype == DTYPES[dtype]
        np.testing.assert_array_equal(data, wide.astype(DTYPES[dtype]))
        expected = data.astype(np.float32)
    else:
        codes = [[by_hand(float(value), dtype) for value in row] for row in wide / scale]
        np.testing.assert_array_equal(data, codes)
        expected = reference.from_fp8(np.array(codes, np.uint8), dtype) * scale
    assert got.nbytes == host(got.data).nbytes + (32 if dtype == E4M3 else 0)
    dequantized = got.dequantized()
    assert dequantized.shape == (12, 8)
    assert dequantized.dtype == np.float32
    np.testing.assert_array_equal(dequantized, expected)


@in_every_layout
def test_parts_of_a_matrix_on_the_host(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantizing in parts gives the same scales of rows or columns."""
    w = weights() * np.arange(1, 25, dtype=np.float32)
    stored = w if layout == "KN" else np.ascontiguousarray(w.T)
    whole = WeightMatrix.quantize(stored, E4M3, layout)
    monkeypatch.setattr("gpt2block.models.weights.matrix.AT_ONCE", 100)
    parts = WeightMatrix.quantize(stored, E4M3, layout)
    np.testing.assert_array_equal(parts.scale, whole.scale)
    np.testing.assert_array_equal(parts.data, whole.data)


@on_numpy_and_gpu
def test_channels_of_almost_nothing(where: str) -> None:
    """Such channels have scale 1, whether the GPU flushes subnormal float32 numbers or not."""
    w = weights()
    for n, value in enumerate([1e-40, -1e-37, SMALLEST * 0.99, -SMALLEST]):
        w[:, n] = 0
        w[3, n] = value
    got = WeightMatrix.quantize(matrix(where, w), E4M3)
    assert host(got.scale)[:4].tolist() == [1, 1, 1, float(np.float32(SMALLEST) / 448)]
    assert host(got.data)[3, :4].tolist() == [0x00, 0x80, 0x00, 0xFE]


@on_numpy_and_gpu
def test_the_largest_numbers_of_a_dtype(where: str) -> None:
    w = weights()
    w[2, 4] = 65519
    assert WeightMatrix.quantize(matrix(where, w), "float16").dequantized()[2, 4] == 65504
    assert WeightMatrix.quantize(matrix(where, w), E5M2).dequantized()[2, 4] == 57344
    w[2, 4] = 3.4e38
    assert WeightMatrix.quantize(matrix(where, w), "float32").dequantized()[2, 4] == w[2, 4]
    largest = WeightMatrix.quantize(matrix(where, w), E4M3)
    assert np.isfinite(largest.dequantized()).all()


@on_numpy_and_gpu
def test_strided_weights_become_contiguous(where: str) -> None:
    w = weights(K=40, N=24)
    for dtype in ("float32", "bfloat16", E5M2, E4M3):
        got = WeightMatrix.quantize(matrix(where, w).T, dtype, "NK")
        assert got.data.flags.c_contiguous
        expected = WeightMatrix.quantize(matrix(where, w), dtype, "KN")
        np.testing.assert_array_equal(got.dequantized(), expected.dequantized())


@on_numpy_and_gpu
def test_times_a_power_of_two_changes_the_scales_only(where: str) -> None:
    for dtype in (E5M2, E4M3):
        w = WeightMatrix.quantize(matrix(where, weights()), dtype)
        half = w.times(0.5)
        assert half.data is w.data
        np.testing.assert_array_equal(half.dequantized(), w.dequantized() / 2)
        np.testing.assert_array_equal(half.times(8).dequantized(), w.dequantized() * 4)


# --- on the GPU alone -----------------------------------------------------------------------------


@pytest.mark.gpu
@on_every_format
def test_every_float32_of_a_range_on_the_gpu(format: str) -> None:
    """2^24 bit patterns spread over all of float32 are converted, at every block size."""
    x = (np.arange(1 << 24, dtype=np.uint32) * np.uint32(257) + np.uint32(1)).view(np.float32)
    expected = x.astype(PEERS[format]).view(np.uint8)
    for variant in OPERATION.variants:
        for block in variant.blocks:
            got = evaluate("gpu", x, format, False, variant=variant.name, block=block)
            np.testing.assert_array_equal(got, expected)
