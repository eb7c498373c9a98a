"""The most likely tokens of rows of logits: with NumPy, on the emulator and on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import ops, reference
from gpt2block.cuda import cupy as cp
from gpt2block.ops.top_logprobs import THREADS, TOP_LOGPROBS, choose_geometry
from tests.devices import on_every_backend, on_every_device, running_on
from tests.plain import normal

Array = NDArray[Any]


def evaluate(where: str, x: Array, K: int, threads: int = 64) -> tuple[Array, Array]:
    """Run with NumPy, on the emulator, or on a GPU. threads: threads per block when emulated."""
    if where == "numpy":
        return reference.top_logprobs(x, K)
    with pytest.MonkeyPatch.context() as patch, running_on(where) as cupy:
        geometry = partial(choose_geometry, threads=THREADS if where == "gpu" else threads)
        patch.setitem(choose_geometry.__globals__, "choose_geometry", geometry)
        out = cupy.full((len(x), K), -9, "int32"), cupy.full((len(x), K), 9.0, "float32")
        logits = cupy.asarray(x)
        bound = TOP_LOGPROBS.bind((logits,), out, K=K)
        return bound.run().get(), bound.extra[0].get()


def assert_right(got: tuple[Array, Array], x: Array, K: int) -> None:
    ids, logprobs = reference.top_logprobs(x.astype(np.float64), K)
    np.testing.assert_array_equal(got[0], ids)
    np.testing.assert_allclose(got[1], logprobs, rtol=2e-6, atol=2e-6)


def test_reference_against_a_row_by_hand() -> None:
    x = np.log(np.array([[0.125, 0.5, 0.125, 0.25]]))
    ids, logprobs = reference.top_logprobs(x, 5)
    assert ids.tolist() == [[1, 3, 0, 2, -1]]
    np.testing.assert_allclose(np.exp(logprobs), [[0.5, 0.25, 0.125, 0.125, 0]], rtol=1e-12)


@on_every_backend
@pytest.mark.parametrize(
    ("M", "V", "K", "threads"),
    [(1, 1, 1, 64), (2, 7, 20, 64), (2, 513, 5, 64), (2, 1031, 20, 64), (1, 5000, 20, THREADS)],
)
def test_top_logprobs(where: str, M: int, V: int, K: int, threads: int) -> None:
    x = 3 * normal(V, M, V)
    assert_right(evaluate(where, x, K, threads), x, K)


@on_every_backend
def test_the_best_in_one_thread_or_one_warp(where: str) -> None:
    """A thread with more of the best values than it keeps reads its columns again."""
    x = normal(1, 3, 2000)
    x[0, 5::64] += 100  # all in one thread
    x[1, 64:96] += 100  # all in one warp
    x[1, 128:160] += 90
    x[2, 1999] += 100
    assert_right(evaluate(where, x, 20), x, 20)


@on_every_backend
def test_equal_logits_and_infinity(where: str) -> None:
    x = np.zeros((4, 300), np.float32)
    x[1] = np.arange(300) % 7
    x[2] = -np.inf
    x[2, 250], x[2, 10] = 1, 0
    x[3] = 3e38 * np.cos(np.arange(300))
    got = evaluate(where, x, 20)
    assert_right(got, x, 20)
    assert got[0][2, :4].tolist() == [250, 10, 0, 1]


@on_every_backend
def test_nan(where: str) -> None:
    x = normal(5, 3, 200)
    clean = evaluate(where, x, 4)
    x[1, 77] = np.nan
    ids, logprobs = evaluate(where, x, 4)
    assert np.isnan(logprobs[1]).all()
    np.testing.assert_array_equal(logprobs[[0, 2]], clean[1][[0, 2]])
    np.testing.assert_array_equal(ids[[0, 2]], clean[0][[0, 2]])


@on_every_device
def test_a_row_has_the_same_bits_alone(where: str) -> None:
    x = normal(6, 4, 333)
    together = evaluate(where, x, 20)
    for row in range(4):
        alone = evaluate(where, x[row : row + 1], 20)
        for one, all_rows in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one[0], all_rows[row])


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "V"), [(1, 50257), (300, 50257), (3, 1_000_003)])
def test_vocabularies(M: int, V: int) -> None:
    x = 3 * normal(7, M, V)
    got = evaluate("gpu", x, 20)
    assert_right(got, x, 20)
    shown = [array.get() for array in ops.top_logprobs(cp.asarray(x[-1:]))]
    for one, all_rows in zip(shown, got, strict=True):
        np.testing.assert_array_equal(one[0], all_rows[-1])
