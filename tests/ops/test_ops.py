"""Elementwise operations on every backend, compared with a plain float32 evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.ops.registry import OPERATIONS
from tests import plain
from tests.devices import on_every_backend, outputs
from tests.plain import normal

Array = NDArray[Any]


def computed(where: str, name: str, *inputs: Array) -> Array:
    """Run an operation with NumPy, on the emulator or on a GPU; GELU in place."""
    if where == "numpy":
        return np.asarray(getattr(reference, name)(*inputs))
    out = None if name == "gelu" else np.full_like(inputs[0], np.nan)
    return outputs(where, OPERATIONS[name].bind, inputs, out)[0]


@on_every_backend
@settings(max_examples=6)
@given(n=st.integers(1, 1000))
@example(n=256)
@example(n=257)
def test_add_and_gelu(where: str, n: int) -> None:
    a, b = 3 * normal(0, n), normal(1, n)
    np.testing.assert_array_equal(computed(where, "add", a, b), a + b)
    got = computed(where, "gelu", a)
    plain.assert_as_accurate(got, plain.exact("gelu", a), plain.gelu(a))


@on_every_backend
def test_numbers_far_from_zero_and_nan(where: str) -> None:
    x = np.array([-1e4, -20, -5, -0.0, 0.0, 1e-30, 5, 20, 1e4, np.nan], np.float32)
    got = computed(where, "gelu", x)
    np.testing.assert_allclose(got, plain.exact("gelu", x), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[-3:], [20, 1e4, np.nan])
    np.testing.assert_array_equal(computed(where, "add", x, x), x + x)
