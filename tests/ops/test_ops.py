"""Operations on every backend err at most twice as much as a plain float32 evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests import plain
from tests.backends import BACKENDS, Backend
from tests.plain import normal

Array = NDArray[Any]
on_every_backend = pytest.mark.parametrize("backend", BACKENDS)
few = settings(max_examples=6)


@on_every_backend
@few
@given(rows=st.integers(1, 33), C=st.sampled_from([1, 95, 96]))
@example(rows=2, C=768)
@example(rows=3, C=769)
def test_layernorm(backend: Backend, rows: int, C: int) -> None:
    x, gamma, beta = normal(0, rows, C), normal(1, C), normal(2, C)
    got = backend.layernorm(x, gamma, beta, 1e-5)
    expected = plain.layernorm(x, gamma, beta)
    plain.assert_as_accurate(got, plain.exact("layernorm", x, gamma, beta), expected)


@on_every_backend
def test_layernorm_takes_eps_and_a_large_mean(backend: Backend) -> None:
    x, gamma, beta = 1e-3 * normal(0, 2, 3, 48) + 100, normal(1, 48), normal(2, 48)
    x = x.astype(np.float32)
    got = backend.layernorm(x, gamma, beta, 1e-2)
    expected = plain.layernorm(x, gamma, beta, 1e-2)
    plain.assert_as_accurate(got, plain.exact("layernorm", x, gamma, beta, eps=1e-2), expected)


@on_every_backend
@few
@given(M=st.integers(1, 33), K=st.integers(1, 96), N=st.integers(1, 48), with_bias=st.booleans())
@example(M=16, K=16, N=16, with_bias=True)
@example(M=17, K=33, N=31, with_bias=False)
def test_matmul_bias(backend: Backend, M: int, K: int, N: int, with_bias: bool) -> None:
    a, w = normal(0, M, K), normal(1, K, N)
    bias = normal(2, N) if with_bias else None
    got = backend.matmul_bias(a, w, bias)
    plain.assert_as_accurate(
        got, plain.exact("matmul_bias", a, w, bias), plain.matmul_bias(a, w, bias)
    )


@on_every_backend
@few
@given(
    B=st.integers(1, 2),
    T=st.integers(1, 33),
    heads=st.sampled_from([(3, 16), (2, 7)]),
    causal=st.booleans(),
    scale=st.sampled_from([1, 30]),
)
@example(B=2, T=11, heads=(3, 16), causal=True, scale=1)
@example(B=1, T=5, heads=(1, 64), causal=False, scale=1)
@example(B=1, T=9, heads=(3, 16), causal=False, scale=30)
def test_attention(
    backend: Backend, B: int, T: int, heads: tuple[int, int], causal: bool, scale: int
) -> None:
    """Some scores are in the thousands, where only exp(s - max) is finite.

    The rounding of such scores, and with it the error, depends on the order in which the channels
    of a head are added. The result is compared with the worst of several orders.
    """
    n_head, size = heads
    qkv = scale * normal(T, B, T, 3 * n_head * size)
    got = backend.attention(qkv, n_head, causal)
    truth = plain.exact("attention", qkv, n_head=n_head, causal=causal)
    q, k, v = (a.reshape(B, T, n_head, size) for a in np.split(qkv, 3, axis=-1))
    orders = [np.roll(np.arange(size), n) for n in range(0, size, -(-size // 7))]
    in_orders = [
        np.concatenate([a.reshape(B, T, -1) for a in (q[..., order], k[..., order], v)], axis=-1)
        for order in orders
    ]
    results = [plain.attention(each, n_head, causal) for each in in_orders]
    worst = max(results, key=lambda result: np.abs(result - truth).max())
    plain.assert_as_accurate(got, truth, worst)


@on_every_backend
@few
@given(n=st.integers(1, 1000))
@example(n=256)
@example(n=257)
def test_add_and_gelu(backend: Backend, n: int) -> None:
    a, b = 3 * normal(0, n), normal(1, n)
    np.testing.assert_array_equal(backend.add(a, b), a + b)
    plain.assert_as_accurate(backend.gelu(a), plain.exact("gelu", a), plain.gelu(a))


@on_every_backend
def test_gelu_far_from_zero(backend: Backend) -> None:
    x = np.array([-1e4, -20, -5, -0.0, 0.0, 1e-30, 5, 20, 1e4, np.nan], np.float32)
    got = backend.gelu(x)
    np.testing.assert_allclose(got, plain.exact("gelu", x), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[-3:], [20, 1e4, np.nan])


@on_every_backend
def test_nan_passes_through_as_nan(backend: Backend) -> None:
    x = normal(0, 3, 48)
    x[1, 7] = np.nan
    w = normal(1, 48, 20)
    rows_with_nan = [
        np.isnan(result).any(axis=-1).tolist()
        for result in (
            backend.layernorm(x, normal(2, 48), normal(3, 48), 1e-5),
            backend.matmul_bias(x, w, None),
            backend.add(x, x),
            backend.gelu(x),
        )
    ]
    assert rows_with_nan == [[False, True, False]] * 4
