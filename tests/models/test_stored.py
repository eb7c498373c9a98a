"""Weights in the dtype and the layout of products: kernels_cu/elementwise/store_weights.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpt2block.checks import FLOATS
from gpt2block.ops.stored import stored
from tests.devices import combinations, one_order

SHAPES = ((1, 1), (5, 70), (70, 5), (64, 96), (33, 31))


@combinations(dtype=list(FLOATS), given=list(FLOATS), transposed=(False, True), shape=SHAPES)
def test_the_numbers_are_those_of_numpy(
    device: Any, dtype: str, given: str, transposed: bool, shape: tuple[int, int]
) -> None:
    """Numbers are rounded to nearest even, including subnormals, both zeros and infinities."""
    rng = np.random.default_rng(0)
    special = [0.0, -0.0, np.inf, -np.inf, 2.0**-130, 2.0**-20, 65520.0]
    special += [1 + 2.0**-8, 1 + 3 * 2.0**-8]  # half way between numbers of bfloat16
    with np.errstate(over="ignore"):
        numbers = rng.standard_normal(shape[0] * shape[1]).astype(np.float32)
        numbers[: len(special)] = special[: numbers.size]
        w = numbers.reshape(shape).astype(FLOATS[given])
        expected = (w.T if transposed else w).astype(np.float32).astype(FLOATS[dtype])
    found = stored(device.asarray(w), dtype, transposed)
    assert found.dtype == FLOATS[dtype]
    assert found.flags.c_contiguous
    bits = np.uint32 if dtype == "float32" else np.uint16
    kept = np.ascontiguousarray(expected)
    np.testing.assert_array_equal(found.get().view(bits), kept.view(bits))


@one_order
def test_nothing_is_copied_without_a_change(device: Any) -> None:
    w = device.asarray(np.ones((3, 4), np.float32))
    assert stored(w, "float32") is w
    assert stored(w, "float32", transposed=True).shape == (4, 3)


@one_order
def test_a_transposed_view(device: Any) -> None:
    """Transposing it needs no kernel and no memory."""
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    w = device.asarray(rows).T
    turned = stored(w, "float32", transposed=True)
    assert turned.data.ptr == w.data.ptr
    np.testing.assert_array_equal(turned.get(), rows)
    for found, expected in (
        (stored(w, "float32"), rows.T),
        (stored(w, "float16"), rows.T),
        (stored(w, "float16", transposed=True), rows),
    ):
        assert found.flags.c_contiguous
        np.testing.assert_array_equal(found.get(), expected)


@one_order
def test_nan_stays_nan(device: Any) -> None:
    w = device.asarray(np.array([[np.nan, 1.0], [2.0, -np.nan]], np.float32))
    for dtype in FLOATS:
        found = stored(w, dtype, transposed=True).get().astype(np.float32)
        np.testing.assert_array_equal(np.isnan(found), [[True, False], [False, True]])
