"""Log-likelihoods of tokens: with NumPy, on the emulator and on a GPU."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.ops.log_likelihood import OPERATION, THREADS, choose_geometry
from tests import plain
from tests.devices import on_every_backend, on_every_device, outputs
from tests.plain import normal

Array = NDArray[Any]
exact = partial(plain.exact, "log_likelihood")


def case(N: int, V: int) -> tuple[Array, Array]:
    targets = np.random.default_rng(N).integers(V, size=N, dtype=np.int32)
    return 3 * normal(V, N, V), targets


def sequential(x: Array, targets: Array) -> Array:
    """Compute log-likelihoods in float32 with sequential sums."""
    shifted = x - x.max(axis=-1, keepdims=True)
    total = plain.running_sum(np.exp(shifted))
    chosen = np.take_along_axis(shifted, targets[..., None], axis=-1)
    return np.asarray((chosen - np.log(total))[..., 0])


def assert_right(got: Array, x: Array, targets: Array) -> None:
    plain.assert_as_accurate(got, exact(x, targets), sequential(x, targets))


def evaluate(where: str, x: Array, targets: Array, threads: int = 64) -> Array:
    """Run with NumPy, on the emulator, or on a GPU, twice with the same bits.

    threads: threads per block on the emulator.
    """
    if where == "numpy":
        return np.asarray(reference.log_likelihood(x, targets))
    out = np.full(targets.shape, np.inf, np.float32)
    with pytest.MonkeyPatch.context() as patch:
        geometry = partial(choose_geometry, threads=THREADS if where == "gpu" else threads)
        patch.setitem(choose_geometry.__globals__, "choose_geometry", geometry)
        return outputs(where, OPERATION.bind, (x, targets), out)[0]


def test_reference_against_a_loop_by_hand() -> None:
    x, targets = case(6, 5)
    got = reference.log_likelihood(x.astype(np.float64).reshape(2, 3, 5), targets.reshape(2, 3))
    for i, (row, target) in enumerate(zip(x, targets, strict=True)):
        weights = [math.exp(value) for value in row]
        expected = math.log(weights[target] / sum(weights))
        assert got[i // 3, i % 3] == pytest.approx(expected, rel=1e-12)


@on_every_backend
@pytest.mark.parametrize(
    ("N", "V", "threads"),
    [(3, 1, 64), (9, 70, 64), (3, 512, 64), (2, 513, 64), (4, 1300, 64), (2, 5000, THREADS)],
)
def test_log_likelihood(where: str, N: int, V: int, threads: int) -> None:
    x, targets = case(N, V)
    assert_right(evaluate(where, x, targets, threads), x, targets)


@on_every_backend
def test_large_logits_and_minus_infinity(where: str) -> None:
    """Only exp(x - max) does not overflow; logits of -inf have probability 0."""
    x, targets = case(4, 700)
    x *= 1000
    x[1, :690] = -np.inf
    x[2, ::2] = -np.inf
    x[3] = -3e38
    targets[:] = [x[0].argmax(), 695, 5, 7]
    got = evaluate(where, x, targets)
    assert_right(got, x, targets)
    targets[:3] = 8, 8, 8
    assert np.isneginf(evaluate(where, x, targets)[1:3]).all()


@on_every_backend
def test_rows_and_targets_that_have_none(where: str) -> None:
    x, targets = case(8, 300)
    clean = evaluate(where, x, targets)
    x[1, 7], x[2, 299], x[3] = np.nan, np.inf, -np.inf
    targets[4:7] = -1, 300, -(2**31)
    got = evaluate(where, x, targets)
    assert np.isnan(got[1:7]).all()
    np.testing.assert_array_equal(got[[0, 7]], clean[[0, 7]])


@on_every_device
@pytest.mark.parametrize("V", [33, 1001])
def test_a_row_has_the_same_bits_alone(where: str, V: int) -> None:
    """A row has the same bits at another alignment: rows have an odd length."""
    x, targets = case(5, V)
    together = evaluate(where, x, targets)
    alone = [evaluate(where, x[i : i + 1], targets[i : i + 1])[0] for i in range(5)]
    np.testing.assert_array_equal(together, alone)


# --- on the GPU alone ----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "V"), [(1, 50257), (300, 50257), (3, 1_000_003)])
def test_vocabularies(N: int, V: int) -> None:
    x, targets = case(N, V)
    got = evaluate("gpu", x, targets)
    assert_right(got, x, targets)
    np.testing.assert_array_equal(evaluate("gpu", x[-1:], targets[-1:]), got[-1:])
