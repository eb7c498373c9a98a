"""The causal half of attention's scores: every variant, emulated in three orders and on a GPU."""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import ops, reference
from gpt2block.cuda import replaced
from gpt2block.cuda.kernels import Geometry
from gpt2block.emulator import Order
from gpt2block.ops.trimat import OPERATION, mma_geometry
from gpt2block.ops.trimat import OPERATION as TRIMAT
from tests import plain
from tests.devices import assert_barriers_show, every_device, on_gpu, one_order, running_on
from tests.gpus import H200, cupy_with

Array = NDArray[Any]
MODULE = sys.modules["gpt2block.ops.trimat"]
UNTOUCHED = 1e30  # initial values of the output
VARIANTS = [variant.name for variant in OPERATION.variants]
FEW_SMS = {"sms": 1, "max_shared": H200["max_shared"]}  # a block then has several tiles
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def few_blocks(*sizes: int, **given: int) -> tuple[Geometry, tuple[int, ...]]:
    """Return tri6's geometry for one multiprocessor, with small tiles if T is below 128."""
    tile = {"tile": 64} if sizes[1] < 128 else {}
    return mma_geometry(*sizes, **tile | given | FEW_SMS)


@pytest.fixture
def device(device: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    if replaced():
        monkeypatch.setattr(MODULE, "mma_geometry", few_blocks)
    return device


def evaluate(
    device: Any, variant: str, qkv: Array, fill: float | None = None, block: int | None = None
) -> Array:
    """Run a variant with an output of UNTOUCHED; a GPU runs it twice with the same bits."""
    if variant == "tri6":
        cupy_with()  # tensor cores
    B, T, _, NH, _ = qkv.shape
    results: list[Array] = []
    for _ in range(1 if replaced() else 2):
        array, out = device.asarray(qkv), device.full((B, NH, T, T), UNTOUCHED, "float32")
        bound = TRIMAT.bind((array,), out, fill=fill, variant=variant, block=block)
        results.append(bound.run().get())
    np.testing.assert_array_equal(results[0], results[-1])
    return results[0]


def random(B: int, T: int, NH: int, HS: int) -> Array:
    rng = np.random.default_rng([B, T, NH, HS])
    return (rng.standard_normal((B, T, 3, NH, HS)) + 0.5).astype(np.float32)


def below(scores: Array) -> Array:
    """Return the elements on and below the diagonal."""
    half: Array = scores[..., np.tri(scores.shape[-1], dtype=bool)]
    return half


def above(scores: Array) -> Array:
    half: Array = scores[..., ~np.tri(scores.shape[-1], dtype=bool)]
    return half


def one_after_the_other(qkv: Array) -> Array:
    """Compute the scores with sequential float32 sums."""
    q, k = (np.ascontiguousarray(qkv[:, :, i].swapaxes(1, 2)) for i in range(2))
    total: Array = plain.product(q, k.swapaxes(-1, -2)) / np.float32(math.sqrt(qkv.shape[-1]))
    return total


def assert_right(got: Array, qkv: Array, variant: str = "") -> None:
    truth = reference.trimat(qkv.astype(np.float64))
    if variant == "tri6" and float(np.abs(below(got) - below(truth)).max()) <= hi_lo_error(qkv):
        return
    plain.assert_as_accurate(below(got), below(truth), below(one_after_the_other(qkv)))


def hi_lo_error(qkv: Array) -> float:
    """Return an error bound of tri6 with hi/lo numbers (lib/hi_lo.cuh).

    Two factors are rounded to 22 bits, and the product of their low parts is left out. Each of
    these three errors is at most 2^-22 of |q| |k|.
    """
    positive = reference.trimat(np.abs(qkv.astype(np.float64)))
    return float(3 * 2.0**-22 * below(positive).max())


# --- the definition


@pytest.mark.parametrize("fill", [None, math.nan, -math.inf, 0.0])
def test_the_reference_is_the_formula(fill: float | None) -> None:
    B, T, NH, HS = 2, 5, 3, 4
    qkv = random(B, T, NH, HS).astype(np.float64)
    got = reference.trimat(qkv, fill)
    assert got.shape == (B, NH, T, T)
    for b, h, i, j in np.ndindex(got.shape):
        expected = math.nan if fill is None else fill
        if j <= i:
            expected = sum(qkv[b, i, 0, h, s] * qkv[b, j, 1, h, s] for s in range(HS)) / 2
        np.testing.assert_allclose(got[b, h, i, j], expected, rtol=1e-14, atol=1e-14)
    for dtype in (np.float32, np.float64):
        assert reference.trimat(qkv.astype(dtype), fill).dtype == dtype


# --- every variant


@every_variant
@every_device
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(B=st.integers(1, 2), T=st.integers(1, 40))
@example(B=1, T=1)
@example(B=2, T=7)
@example(B=1, T=36)
def test_any_length(device: Any, variant: str, B: int, T: int) -> None:
    qkv = random(B, T, 3, 20)
    assert_right(evaluate(device, variant, qkv), qkv, variant)


def crossed(variant: str, T: int) -> int:
    """Return the side of the tiles on the diagonal, which are computed completely."""
    if variant in ("tri5", "tri6"):
        return 4 if T % 4 == 0 else 1
    return 128 if variant == "tri4" else 8


@pytest.mark.parametrize(
    ("T", "fill"),
    [(1, 0.0), (7, -math.inf), (12, 0.0), (128, math.nan), (259, -math.inf)],
)
@every_variant
@one_order
def test_above_the_diagonal(device: Any, variant: str, T: int, fill: float) -> None:
    """Without `fill`, tiles above the diagonal are not written; with it, all elements are."""
    qkv = random(1, T, 3, 20)
    got = evaluate(device, variant, qkv)
    assert_right(got, qkv, variant if T < 128 else "")
    i, j = np.indices((T, T)) // crossed(variant, T)
    assert (got[..., j > i] == UNTOUCHED).all()
    filled = evaluate(device, variant, qkv, fill)
    np.testing.assert_array_equal(above(filled), np.float32(fill))
    np.testing.assert_array_equal(below(filled), below(got))


@every_variant
@one_order
def test_an_output_depends_on_its_two_rows_alone(device: Any, variant: str) -> None:
    T, i, j = 13, 6, 3
    qkv = random(2, T, 3, 20)
    qkv[1, i, 0, 2] = np.nan  # a row of Q, then a row of K, of one head
    qkv[1, j, 1, 2] = np.nan
    qkv[:, :, 2] = np.nan  # V is not read
    wrong = np.zeros((2, 3, T, T), bool)
    wrong[1, 2, i, :] = wrong[1, 2, :, j] = True
    np.testing.assert_array_equal(below(np.isnan(evaluate(device, variant, qkv))), below(wrong))


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "barriers"), [("tri4", 2), ("tri5", 1), ("tri6", 2)])
def test_missing_barriers_show(
    variant: str, barriers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "mma_geometry", few_blocks)

    def run(order: Order) -> None:
        with running_on(order) as device:
            evaluate(device, variant, random(1, 40, 1, 64))

    assert_barriers_show(OPERATION.variant(variant).file, run, barriers)


# --- tensor cores


@pytest.mark.parametrize("shape", [(1, 64), (2, 76)])
@one_order
def test_rows_of_any_size(device: Any, shape: tuple[int, int]) -> None:
    """Scaling by powers of two changes only exponents, unless float32 cannot hold a product."""
    T, (NH, HS) = 45, shape
    qkv = random(1, T, NH, HS)
    qkv[..., HS // 3] *= 100  # a column of outliers
    qkv[0, 40] = 0
    whole = evaluate(device, "tri6", qkv)
    assert_right(whole, qkv)
    exponent = np.rint(np.linspace(-90, 90, T)).astype(int)
    for of_q, of_k in ((20, 20), (-20, -20), (exponent, -15), (-20, exponent)):
        scaled = qkv.copy()
        for i, e in enumerate((of_q, of_k)):
            scaled[:, :, i] = np.ldexp(qkv[:, :, i], np.broadcast_to(e, T)[:, None, None])
        both = np.broadcast_to(of_q, T)[:, None] + np.broadcast_to(of_k, T)
        got = np.ldexp(evaluate(device, "tri6", scaled).astype(np.float64), -both)
        np.testing.assert_array_equal(below(got), below(whole))


@one_order
def test_products_at_the_end_of_the_range(device: Any) -> None:
    """Some numbers near float32's largest are multiplied by very small numbers."""
    T = 40
    qkv = random(1, T, 1, 64)
    qkv[..., 5] = 0
    qkv[0, :, 0] *= np.float32(2.0**122)
    qkv[0, :20, 1] *= np.float32(2.0**-120)
    qkv[0, 20:, 1] *= np.float32(2.0**-9)
    assert_right(evaluate(device, "tri6", qkv), qkv)
    qkv[..., :5] = qkv[..., 6:] = 0
    qkv[0, :, 0, 0, 4] = qkv[0, :, 1, 0, 6] = 3e38  # each is multiplied by zero
    np.testing.assert_array_equal(below(evaluate(device, "tri6", qkv)), 0)


@pytest.mark.parametrize("variant", ["tri5", "tri6"])
@one_order
def test_values_that_are_not_finite(device: Any, variant: str) -> None:
    """Infinities have the right sign, and inf * 0 and inf - inf give NaN, as in float32."""
    T = 75
    qkv = np.rint(8 * random(1, T, 2, 64))  # integers, including zeros
    q, k = (np.moveaxis(qkv[0, :, i], 0, 1) for i in range(2))  # (heads, rows, channels)
    q[0, 33, 7], q[0, 50, 9], q[0, 60, 3] = np.inf, -np.inf, np.nan
    k[0, 20, 7], k[0, 21, 8], k[0, 30, 4] = np.inf, -np.inf, np.nan
    k[0, 10, 7] = q[0, 22, 7] = 0
    q[1, 70, :] = np.inf
    with np.errstate(invalid="ignore"):
        expected = one_after_the_other(qkv)
    got = evaluate(device, variant, qkv)
    special = ~np.isfinite(below(expected))
    assert {"inf", "-inf", "nan"} <= set(map(str, below(expected)[special]))
    np.testing.assert_array_equal(below(got)[special], below(expected)[special])
    np.testing.assert_allclose(below(got)[~special], below(expected)[~special], rtol=1e-6)


@pytest.mark.slow
def test_how_tiles_are_dealt_changes_no_bit() -> None:
    qkv = random(2, 150, 1, 20)
    results = []
    for order, cut in (
        ("forward", {}),
        ("shuffled", {"span": 1, "together": 2}),
        ("shuffled", {"tile": 64, "span": 2, "together": 1}),
    ):
        with running_on(order) as device, pytest.MonkeyPatch.context() as patch:
            patch.setattr(MODULE, "mma_geometry", partial(few_blocks, **cut))
            results.append(evaluate(device, "tri6", qkv))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


# --- calls, and sizes for a GPU


@on_gpu
@pytest.mark.parametrize("shape", [(8, 1024, 12, 64), (2, 1023, 3, 64), (1, 2052, 1, 80)])
@every_variant
def test_large_sizes(device: Any, variant: str, shape: tuple[int, ...]) -> None:
    if variant == "tri6":
        cupy_with()
    qkv = device.asarray(random(*shape))
    got = ops.trimat(qkv, variant=variant)
    for b, h in ((0, 0), (shape[0] - 1, shape[2] - 1)):
        one = qkv[b : b + 1, :, :, h : h + 1].get()
        assert_right(got[b : b + 1, h : h + 1].get(), one)
    filled = ops.trimat(qkv, fill=-math.inf, variant=variant)
    here = device.tri(shape[1], dtype=bool)
    assert bool((filled == device.where(here, got, np.float32(-math.inf))).all())


@one_order
def test_the_default_takes_any_head(device: Any) -> None:
    for HS in (128, 132):
        qkv = random(1, 70, 1, HS)
        assert_right(ops.trimat(device.asarray(qkv)).get(), qkv)
