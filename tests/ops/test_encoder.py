"""The positional encoder: every variant, with NumPy, on the emulator and on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import ops, reference
from gpt2block.cuda import cupy as cp
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops.encoder import OPERATION
from tests import plain
from tests.devices import combinations, on_every_backend, on_every_device, outputs
from tests.plain import normal

Array = NDArray[Any]
VARIANTS = [variant.name for variant in OPERATION.variants]
on_every_variant = pytest.mark.parametrize("variant", VARIANTS)
few = settings(max_examples=6)


def tables(V: int, n_ctx: int, C: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(V)
    wte, wpe = (rng.standard_normal((n, C)) + 0.5 for n in (V, n_ctx))
    return wte.astype(np.float32), wpe.astype(np.float32)


def random_ids(V: int, *shape: int) -> Array:
    return np.random.default_rng(sum(shape)).integers(V, size=shape, dtype=np.int32)


def evaluate(
    where: str, variant: str, ids: Array, wte: Array, wpe: Array, block: int | None = None
) -> Array:
    """Run with NumPy, on the emulator, or on a GPU, twice with the same bits."""
    if where == "numpy":
        return np.asarray(reference.encoder(ids, wte, wpe))
    out = np.full((*ids.shape, wte.shape[1]), np.nan, np.float32)
    return outputs(where, OPERATION.bind, (ids, wte, wpe), out, variant=variant, block=block)[0]


@on_every_backend
@on_every_variant
@few
@given(
    B=st.integers(1, 5),
    T=st.integers(1, 17),
    C=st.sampled_from([4, 48, 124, 132]),
    V=st.integers(1, 40),
)
@example(B=2, T=3, C=768, V=7)
@example(B=1, T=2, C=1600, V=7)
def test_every_variant(where: str, variant: str, B: int, T: int, C: int, V: int) -> None:
    """Results have NumPy's bits, as each element is one addition."""
    wte, wpe = tables(V, T + 2, C)
    ids = random_ids(V, B, T)
    got = evaluate(where, variant, ids, wte, wpe)
    np.testing.assert_array_equal(got, wte[ids] + wpe[:T])


@on_every_backend
@pytest.mark.parametrize("C", [1, 3, 50])
def test_any_number_of_channels(where: str, C: int) -> None:
    wte, wpe = tables(20, 6, C)
    ids = random_ids(20, 3, 6)
    np.testing.assert_array_equal(evaluate(where, "1", ids, wte, wpe), wte[ids] + wpe)


@on_every_device
@on_every_variant
@pytest.mark.parametrize("wrong", [-1, 20, 2**31 - 1, -(2**31)])
def test_an_id_without_a_row_becomes_nan(where: str, variant: str, wrong: int) -> None:
    wte, wpe = tables(20, 6, 48)
    ids = random_ids(20, 3, 6)
    expected = wte[ids] + wpe
    expected[1, 4] = np.nan
    ids[1, 4] = wrong
    np.testing.assert_array_equal(evaluate(where, variant, ids, wte, wpe), expected)


# --- encoder_rows --------------------------------------------------------------------------------


def test_encoder_rows_by_hand() -> None:
    ids, positions = np.array([4, 0, 4]), np.array([0, 6, 2])
    wte, wpe = normal(0, 5, 3), normal(1, 7, 3)
    got = reference.encoder_rows(ids, positions, wte, wpe)
    for n in range(3):
        for c in range(3):
            assert got[n, c] == wte[ids[n], c] + wpe[positions[n], c]
    stored = WeightMatrix.quantize(wte, "float8_e4m3fn", "NK")
    got = reference.encoder_rows(ids, positions, stored, wpe)
    np.testing.assert_array_equal(got, stored.dequantized().T[ids] + wpe[positions])


@combinations(
    times=1, C=[24, 10, 7], dtype=["float8_e4m3fn", "float32", "bfloat16", "float16", "float8_e5m2"]
)
def test_encoder_rows(device: Any, C: int, dtype: str) -> None:
    V, n_ctx = 6, 9
    ids = np.array([5, 0, 5, -1, 6, 1, 1], np.int32)
    positions = np.array([8, 0, 3, 1, 1, 9, -1], np.int32)  # the last four are out of range
    wte = WeightMatrix.quantize(normal(0, V, C), dtype, "NK")
    wpe = normal(1, n_ctx, C)
    scale = None if wte.scale is None else device.asarray(wte.scale)
    moved = WeightMatrix(device.asarray(wte.data), dtype, scale, "NK")
    rows = device.asarray(ids), device.asarray(positions)
    out = ops.encoder_rows(*rows, moved, device.asarray(wpe)).get()
    assert np.isnan(out[3:]).all()
    table = wte.dequantized().T
    truth = table.astype(np.float64)[ids[:3]] + wpe[positions[:3]]
    plain.assert_as_accurate(out[:3], truth, table[ids[:3]] + wpe[positions[:3]])
    scaled = ops.encoder_rows(*rows, moved, factor=0.3).get()
    expected = reference.encoder_rows(ids[:3], positions[:3], table, factor=0.3)
    np.testing.assert_allclose(scaled[:3], expected, rtol=2.0**-22, atol=0)


# --- on the GPU alone ----------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_op() -> None:
    wte, wpe = tables(20, 6, 48)
    ids = random_ids(20, 2, 5)
    expected = wte[ids] + wpe[:5]
    on_device = cp.asarray(wte), cp.asarray(wpe)
    for given_ids in (ids, ids.astype(np.int64), ids.tolist(), cp.asarray(ids)):
        np.testing.assert_array_equal(ops.encoder(given_ids, *on_device).get(), expected)
    for variant in VARIANTS:
        got = ops.encoder(ids[0], *on_device, variant=variant, block=64)
        np.testing.assert_array_equal(got.get(), expected[0])
    for turned in (ids.T, cp.asarray(ids).T):
        np.testing.assert_array_equal(ops.encoder(turned, *on_device).get(), wte[ids.T] + wpe[:2])
