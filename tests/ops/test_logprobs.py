"""Log-likelihoods of tokens and the most likely tokens: with NumPy, emulated and on a GPU."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import ops, reference
from gpt2block.cuda import cupy as cp
from gpt2block.ops.log_likelihood import OPERATION, THREADS, choose_geometry
from gpt2block.ops.top_logprobs import THREADS as TOP_THREADS
from gpt2block.ops.top_logprobs import TOP_LOGPROBS
from gpt2block.ops.top_logprobs import choose_geometry as top_geometry
from tests import plain
from tests.devices import on_every_backend, on_every_device, outputs, running_on
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


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "V"), [(1, 50257), (300, 50257), (3, 1_000_003)])
def test_vocabularies(N: int, V: int) -> None:
    x, targets = case(N, V)
    got = evaluate("gpu", x, targets)
    assert_right(got, x, targets)
    np.testing.assert_array_equal(evaluate("gpu", x[-1:], targets[-1:]), got[-1:])


# --- the most likely tokens ----------------------------------------------------------------------


def top_of(where: str, x: Array, K: int, threads: int = 64) -> tuple[Array, Array]:
    """Run with NumPy, on the emulator, or on a GPU. threads: threads per block when emulated."""
    if where == "numpy":
        return reference.top_logprobs(x, K)
    with pytest.MonkeyPatch.context() as patch, running_on(where) as cupy:
        geometry = partial(top_geometry, threads=TOP_THREADS if where == "gpu" else threads)
        patch.setitem(top_geometry.__globals__, "choose_geometry", geometry)
        out = cupy.full((len(x), K), -9, "int32"), cupy.full((len(x), K), 9.0, "float32")
        logits = cupy.asarray(x)
        bound = TOP_LOGPROBS.bind((logits,), out, K=K)
        return bound.run().get(), bound.extra[0].get()


def assert_top(got: tuple[Array, Array], x: Array, K: int) -> None:
    ids, logprobs = reference.top_logprobs(x.astype(np.float64), K)
    np.testing.assert_array_equal(got[0], ids)
    np.testing.assert_allclose(got[1], logprobs, rtol=2e-6, atol=2e-6)


def test_the_reference_of_the_top_by_hand() -> None:
    x = np.log(np.array([[0.125, 0.5, 0.125, 0.25]]))
    ids, logprobs = reference.top_logprobs(x, 5)
    assert ids.tolist() == [[1, 3, 0, 2, -1]]
    np.testing.assert_allclose(np.exp(logprobs), [[0.5, 0.25, 0.125, 0.125, 0]], rtol=1e-12)


@on_every_backend
@pytest.mark.parametrize(
    ("M", "V", "K", "threads"),
    [(1, 1, 1, 64), (2, 7, 20, 64), (2, 513, 5, 64), (2, 1031, 20, 64), (1, 5000, 20, TOP_THREADS)],
)
def test_top_logprobs(where: str, M: int, V: int, K: int, threads: int) -> None:
    x = 3 * normal(V, M, V)
    assert_top(top_of(where, x, K, threads), x, K)


@on_every_backend
def test_the_best_in_one_thread_or_one_warp(where: str) -> None:
    """A thread with more of the best values than it keeps reads its columns again."""
    x = normal(1, 3, 2000)
    x[0, 5::64] += 100  # all in one thread
    x[1, 64:96] += 100  # all in one warp
    x[1, 128:160] += 90
    x[2, 1999] += 100
    assert_top(top_of(where, x, 20), x, 20)


@on_every_backend
def test_equal_logits_and_infinity(where: str) -> None:
    x = np.zeros((4, 300), np.float32)
    x[1] = np.arange(300) % 7
    x[2] = -np.inf
    x[2, 250], x[2, 10] = 1, 0
    x[3] = 3e38 * np.cos(np.arange(300))
    got = top_of(where, x, 20)
    assert_top(got, x, 20)
    assert got[0][2, :4].tolist() == [250, 10, 0, 1]


@on_every_backend
def test_the_top_of_nan(where: str) -> None:
    x = normal(5, 3, 200)
    clean = top_of(where, x, 4)
    x[1, 77] = np.nan
    ids, logprobs = top_of(where, x, 4)
    assert np.isnan(logprobs[1]).all()
    np.testing.assert_array_equal(logprobs[[0, 2]], clean[1][[0, 2]])
    np.testing.assert_array_equal(ids[[0, 2]], clean[0][[0, 2]])


@on_every_device
def test_the_top_of_a_row_has_the_same_bits_alone(where: str) -> None:
    x = normal(6, 4, 333)
    together = top_of(where, x, 20)
    for row in range(4):
        alone = top_of(where, x[row : row + 1], 20)
        for one, all_rows in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one[0], all_rows[row])


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "V"), [(1, 50257), (300, 50257), (3, 1_000_003)])
def test_the_top_of_vocabularies(M: int, V: int) -> None:
    x = 3 * normal(7, M, V)
    got = top_of("gpu", x, 20)
    assert_top(got, x, 20)
    shown = [array.get() for array in ops.top_logprobs(cp.asarray(x[-1:]))]
    for one, all_rows in zip(shown, got, strict=True):
        np.testing.assert_array_equal(one[0], all_rows[-1])
