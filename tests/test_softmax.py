"""Softmax over rows: every variant, on NumPy, on the CPU and on the GPU."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import InputError, ops, reference
from gpt2block.cuda import cupy as cp
from gpt2block.ops._rows import LONGEST_IN_REGISTERS
from gpt2block.ops.call import Call
from gpt2block.ops.softmax import FILE, OPERATION
from tests import plain
from tests.compiling import Job, assert_clean
from tests.devices import (
    H200,
    in_every_order,
    moved,
    on_every_backend,
    on_one_of_each,
    outputs,
    running_on,
)
from tests.launches import geometry_of, stub
from tests.plain import normal

Array = NDArray[Any]
exact = partial(plain.exact, "softmax")
VARIANTS = [variant.name for variant in OPERATION.variants]
on_every_variant = pytest.mark.parametrize("variant", VARIANTS)


def sequential(x: Array, causal: bool = False) -> Array:
    """The plain float32 evaluation: one sum after the other."""
    seen = np.tri(x.shape[-1], dtype=bool) if causal else np.ones(x.shape[-1], dtype=bool)
    x = np.where(seen, x, np.float32(-np.inf))
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(weights / plain.running_sum(weights))


def assert_right(got: Array, x: Array, causal: bool = False) -> None:
    plain.assert_as_accurate(got, exact(x, causal), sequential(x, causal))
    if causal:
        assert (got[..., ~np.tri(x.shape[-1], dtype=bool)] == 0).all()


def evaluate(
    where: str,
    variant: str | None,
    x: Array,
    causal: bool = False,
    *,
    block: int | None = None,
    sms: int = H200,
    in_place: bool = False,
) -> Array:
    """On NumPy, on the CPU in a thread order, or on the GPU, twice, with the same bits."""
    if where == "numpy":
        with np.errstate(invalid="ignore"):
            return np.asarray(reference.softmax(x, causal))
    out = None if in_place else np.full_like(x, np.nan)
    options = {"causal": causal, "variant": variant, "block": block}
    return outputs(where, OPERATION.bind, (x,), out, multiprocessors=sms, **options)[0]


def test_reference_against_a_loop_by_hand() -> None:
    x = normal(0, 2, 5, 5).astype(np.float64)
    for causal in (False, True):
        got = reference.softmax(x, causal)
        for b in range(2):
            for t in range(5):
                seen = [math.exp(value) for value in x[b, t, : t + 1 if causal else 5]]
                expected = [value / sum(seen) for value in seen] + [0.0] * (5 - len(seen))
                np.testing.assert_allclose(got[b, t], expected, rtol=1e-14)


@on_every_backend
@on_every_variant
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (33, 7), (4, 63), (17, 258), (2, 1024), (3, 1001)])
def test_every_variant(where: str, variant: str, rows: int, n: int) -> None:
    x = 3 * normal(rows, rows, n)
    assert_right(evaluate(where, variant, x), x)


@on_every_backend
@on_every_variant
@pytest.mark.parametrize("T", [1, 7, 60, 132])
def test_causal(where: str, variant: str, T: int) -> None:
    x = 3 * normal(T, 2, T, T)[: 1 if T > 60 else 2]
    assert_right(evaluate(where, variant, x, causal=True), x, causal=True)


@on_one_of_each
@on_every_variant
@pytest.mark.parametrize("T", [7, 48])
def test_a_masked_score_is_never_read(where: str, variant: str, T: int) -> None:
    x = normal(T, 2, T, T)
    clean = evaluate(where, variant, x, causal=True)
    x[:, ~np.tri(T, dtype=bool)] = np.nan
    np.testing.assert_array_equal(evaluate(where, variant, x, causal=True), clean)


@on_one_of_each
@on_every_variant
@pytest.mark.parametrize("causal", [False, True])
def test_in_place(where: str, variant: str, causal: bool) -> None:
    x = normal(0, 2, 44, 44)
    got = evaluate(where, variant, x, causal, in_place=True)
    np.testing.assert_array_equal(got, evaluate(where, variant, x, causal))


@in_every_order
@pytest.mark.parametrize(("rows", "n"), [(7, 1024), (5, 200), (9, 12), (3, 41), (2, 1100)])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_a_large_batch(where: str, rows: int, n: int, causal: bool) -> None:
    """As on a GPU that is filled by few rows: a warp a row, many loads a thread."""
    if causal:
        rows, n = n // 10, n // 10
    x = normal(rows, rows, n)
    got = evaluate(where, "rows", x, causal, sms=0)
    plain.assert_as_accurate(got, exact(x, causal), sequential(x, causal))


@on_one_of_each
@on_every_variant
@pytest.mark.parametrize("block", [32, 512])
def test_block_sizes(where: str, variant: str, block: int) -> None:
    x = normal(block, 3, 500)
    assert_right(evaluate(where, variant, x, block=block), x)


@on_one_of_each
@on_every_variant
def test_large_scores_and_minus_infinity(where: str, variant: str) -> None:
    """exp of anything but x - max would overflow; -inf weighs nothing, wherever it stands."""
    x = 1000 * normal(0, 5, 300)
    x[1, :290] = -np.inf
    x[2, 1:] = -np.inf
    x[3, ::2] = -np.inf
    x[4] = -3e38
    got = evaluate(where, variant, x)
    assert_right(got, x)
    assert (got[np.isneginf(x)] == 0).all()
    assert got[2, 0] == 1


@on_one_of_each
@on_every_variant
@pytest.mark.parametrize("n", [5, 700])
def test_rows_that_have_no_softmax(where: str, variant: str, n: int) -> None:
    x = normal(0, 5, n)
    clean = evaluate(where, variant, x)
    x[1] = -np.inf
    x[2, 3] = np.nan
    x[3, 4] = np.inf
    got = evaluate(where, variant, x)
    assert np.isnan(got[1:4]).all()
    np.testing.assert_array_equal(got[[0, 4]], clean[[0, 4]])


@on_one_of_each
@on_every_variant
def test_a_causal_row_of_minus_infinity(where: str, variant: str) -> None:
    x = normal(0, 70, 70)
    x[40, :41] = -np.inf
    x[50, 7] = np.nan
    got = evaluate(where, variant, x, causal=True)
    assert np.isnan(got[40, :41]).all()
    assert np.isnan(got[50, :51]).all()
    assert (got[~np.tri(70, dtype=bool)] == 0).all()
    assert np.isfinite(np.delete(got, [40, 50], axis=0)).all()


def test_the_largest_rows_stay_in_registers() -> None:
    jobs: list[Job] = []
    for arch, rows, n, causal in (
        ("sm_75", 1, 16383, False),
        ("sm_90", 1, 16384, False),
        ("sm_90", 1, 16383, True),
        ("sm_90", 10**6, 1024, False),
        ("sm_90", 10**6, 1, True),
    ):
        arrays: dict[str, Any] = {"scores": stub(), "out": stub(), "rows": rows, "T": n}
        options = {"causal": causal, "block": 256, "requested": False}
        with running_on("forward", H200):
            c = Call(contract=OPERATION.contract, **arrays, **options)
            jobs.append((FILE, arch, geometry_of(OPERATION.variant("rows"), c).defines))
    assert_clean(jobs)


# --- on the GPU alone ----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("n", [64, 1000, 1021, 5120, 16384])
def test_every_block_size(n: int) -> None:
    x = 3 * normal(n, 77, n)
    for variant in OPERATION.variants:
        for block in variant.blocks:
            if variant.name != "rows" or 32 * block >= n:
                assert_right(evaluate("gpu", variant.name, x, block=block), x)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [100, 1023, 1024])
def test_causal_on_the_gpu(T: int) -> None:
    x = 3 * normal(T, 3, T, T)
    for variant in (None, *VARIANTS):
        for in_place in (False, True):
            assert_right(evaluate("gpu", variant, x, True, in_place=in_place), x, causal=True)


@pytest.mark.gpu
def test_long_rows() -> None:
    """A vocabulary: too long for registers, so that the op takes another variant."""
    x = 3 * normal(0, 9, 50257)
    for variant in (None, "three_pass", "online_warp", "online_block"):
        assert_right(evaluate("gpu", variant, x), x)


@pytest.mark.gpu
def test_the_op() -> None:
    x = normal(0, 2, 30, 30)
    scores = cp.asarray(x)
    for causal in (False, True):
        assert_right(ops.softmax(scores, causal).get(), x, causal)
        assert_right(ops.softmax(moved(x, 1), causal).get(), x, causal)
    np.testing.assert_array_equal(scores.get(), x)  # a new array each time
    strided = ops.softmax(scores.transpose(0, 2, 1)).get()
    np.testing.assert_array_equal(strided, ops.softmax(cp.asarray(x.swapaxes(1, 2).copy())).get())
    assert ops.softmax(scores, out=scores) is scores
    assert_right(scores.get(), x)


@pytest.mark.gpu
def test_bad_input() -> None:
    x = cp.zeros((3, 48), "float32")
    long = cp.zeros((1, LONGEST_IN_REGISTERS + 4), "float32")
    for args, options, message in (
        ((x, True), {}, r"expected \(\.\.\., T, T\) with causal, got \(3, 48\)"),
        ((x[0], True), {}, "with causal, got"),
        ((x,), {"out": x[:2]}, r"out: expected shape \(3, 48\)"),
        ((x.T,), {"out": x.T}, "out: expected a C-contiguous array"),
        ((x,), {"variant": 4}, "unknown variant 4: expected one of three_pass, online_warp"),
        ((x,), {"block": 48}, "variant rows: block size 48: expected one of 32, 64"),
        ((long,), {"variant": "rows"}, "rows of 16,388 values: .* use another variant"),
    ):
        with pytest.raises(InputError, match=message):
            ops.softmax(*args, **options)
    assert ops.softmax(long).shape == long.shape
