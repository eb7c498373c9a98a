"""Hi/lo matrices: HiLoMatrix, and the ops that return or take one.

test_product_laws.py and test_attention_laws.py test the accuracy of products and attention.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import HiLoMatrix, ops, reference
from gpt2block.checks import FLOATS
from gpt2block.cuda import cupy
from gpt2block.cuda.kernels import HI_LO
from gpt2block.models.weights.hi_lo import scale_for
from gpt2block.ops.layernorm import OPERATION as LAYERNORM
from gpt2block.ops.layernorm import layernorm_bound
from gpt2block.ops.registry import STEPS
from tests import plain
from tests.devices import H200, IN_TESTS, every_device, on_every_device, one_order, running_on
from tests.norms import EPS
from tests.ops.test_norm_laws import assert_right as assert_normalized
from tests.ops.test_norm_laws import inputs

Array = NDArray[Any]
every_order = pytest.mark.parametrize("order", IN_TESTS)
few = settings(max_examples=4)


def wild(seed: int, rows: int, K: int) -> Array:
    """Return rows of all magnitudes, including zeros, subnormal numbers, infinity and NaN."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, K)) * 10.0 ** rng.uniform(-8, 8, (rows, K))
    x = (x * 10.0 ** rng.uniform(-30, 28, (rows, 1))).astype(np.float32)
    x[rng.random((rows, K)) < 0.1] = 0
    x[rng.random((rows, K)) < 0.1] = 1e-40
    x[rng.random((rows, 1))[:, 0] < 0.1] = 0
    for value in (np.inf, -np.inf, np.nan):
        x[rng.random((rows, K)) < 0.5 / K] = value
    return x


# --- the parts ------------------------------------------------------------------------------------


@given(seed=st.integers(0, 999), rows=st.integers(1, 9), K=st.integers(1, 40))
def test_the_parts_of_every_number(seed: int, rows: int, K: int) -> None:
    x = wild(seed, rows, K)
    with np.errstate(over="ignore"):
        parts, scale = reference.hi_lo(x)
    assert (parts.shape, parts.dtype.name) == ((2, rows, K), "float16")
    assert (scale.shape, scale.dtype.name) == ((rows,), "float32")
    for r in range(rows):
        unit, finite = float(scale[r]), [abs(float(v)) for v in x[r] if np.isfinite(v)]
        largest = max(finite, default=0.0)
        assert math.frexp(unit)[0] == 0.5
        if largest < 2.0**-126:
            assert unit == 1
        elif unit > 2.0**-126:
            assert 2**14 <= largest / unit < 2**15
        for value, hi, lo in zip(x[r], *parts[:, r], strict=True):
            if not np.isfinite(value):
                np.testing.assert_array_equal(hi, np.float16(value))
                assert lo == 0
            else:
                kept = (float(hi) + float(lo) / 2048) * unit
                assert abs(kept - float(value)) <= max(
                    abs(float(value)) * 2.0**-22, unit * 2.0**-36, 2.0**-126
                )


def test_hi_lo_and_joined() -> None:
    x = plain.normal(0, 2, 3, 40)
    matrix = HiLoMatrix.from_float32(x)
    assert (matrix.shape, matrix.ndim, matrix.size) == ((2, 3, 40), 3, 240)
    assert matrix.nbytes == 2 * 2 * 240 + 4 * 6
    assert matrix.one_scale is None
    joined = matrix.joined()
    assert joined.dtype == np.float32
    assert np.abs(joined - x).max() <= np.abs(x).max() * 2.0**-22
    np.testing.assert_array_equal(HiLoMatrix.from_float32(joined).joined(), joined)
    np.testing.assert_array_equal(
        HiLoMatrix.from_float32(x[:, ::2]).joined(), matrix.joined()[:, ::2]
    )
    assert HiLoMatrix.from_float32(x[0, 0]).parts.shape == (2, 1, 40)


@pytest.mark.parametrize(
    ("bound", "scale"),
    [(0.0, 1.0), (1.0, 2.0**-15), (1.5, 2.0**-14), (2.0**127, 2.0**112), (1e-40, 2.0**-126)],
)
def test_the_scale_of_a_bound(bound: float, scale: float) -> None:
    assert scale_for(bound) == scale
    assert bound / scale <= 2**15


# --- the kernels on the CPU -----------------------------------------------------------------------


def host(matrix: HiLoMatrix) -> HiLoMatrix:
    return HiLoMatrix(matrix.parts.get(), matrix.scale.get(), matrix.shape)


def assert_same(got: HiLoMatrix, x: Array) -> None:
    """Assert that parts and scales have the bits of the reference, except for bits of NaN."""
    parts, scale = reference.hi_lo(x)
    np.testing.assert_array_equal(got.scale.view(np.uint32), scale.view(np.uint32))
    np.testing.assert_array_equal(got.parts, parts)
    there = ~np.isnan(parts)
    np.testing.assert_array_equal(np.signbit(got.parts[there]), np.signbit(parts[there]))


def without_subnormals(x: Array) -> Array:
    """Replace subnormal numbers by 0, as GPU kernels do; the CPU would keep them."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, 0, x)


@on_every_device
@few
@given(rows=st.integers(1, 9), K=st.integers(1, 300))
@example(rows=9, K=256)
@example(rows=5, K=130)
def test_rows_of_all_magnitudes(where: str, rows: int, K: int) -> None:
    x = without_subnormals(wild(K, rows, K))
    with running_on(where):
        assert_same(host(HiLoMatrix.from_float32(cupy.asarray(x))), x)
        if where == "gpu":
            x = without_subnormals(wild(K, 1000, 3 * K))
            assert_same(host(HiLoMatrix.from_float32(cupy.asarray(x))), x)


@one_order
def test_rows_that_are_not_contiguous(device: Any) -> None:
    x = without_subnormals(wild(0, 5, 64))
    assert_same(host(ops.hi_lo(device.asarray(x)[:, ::2])), x[:, ::2])


@every_device
@pytest.mark.parametrize(
    ("C", "dtype"),
    [*((C, HI_LO) for C in (1, 6, 192)), (1, "float32"), (66, "bfloat16"), (192, "float16"),
     (3000, "float32")],
)  # fmt: skip
def test_rows_of_a_matrix(device: Any, C: int, dtype: str) -> None:
    x, indices = plain.normal(C, 9, C), np.array([8, 0, 3, 3], np.int32)
    x = reference.joined(*reference.hi_lo(x)) if dtype == HI_LO else x.astype(FLOATS[dtype])
    there = ops.hi_lo(device.asarray(x)) if dtype == HI_LO else device.asarray(x)
    inputs, out = (there, device.asarray(indices)), device.full((4, C), np.nan, x.dtype)
    STEPS["take"].bind(inputs, out).run()
    np.testing.assert_array_equal(out.get(), x[indices])


@every_order
@pytest.mark.parametrize(("rows", "C"), [(5, 768), (3, 300)])
def test_hi_lo_layernorm(order: str, rows: int, C: int) -> None:
    x, gamma, beta = inputs(rows, C)
    x[rows - 1] = 0
    x[1, 7] = np.nan
    with running_on(order, H200):
        out = HiLoMatrix.empty((rows, C), layernorm_bound(gamma, beta))
        arrays = tuple(map(cupy.asarray, (x, gamma, beta)))
        LAYERNORM.bind(arrays, out, eps=EPS).run()
        got = host(out).joined()
    assert np.isnan(got[1]).all()
    finite = np.arange(rows) != 1
    assert_normalized([got[finite]], (x[finite], gamma, beta))
