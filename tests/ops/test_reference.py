"""The NumPy reference against independent, element-by-element evaluations of the formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2block import BlockWeights, GPT2Config, reference

rng = np.random.default_rng(0)


def test_gelu_by_hand() -> None:
    for v in (-30.0, -1.5, -0.0, 0.3, 2.0, 40.0):
        tanh = math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))
        assert reference.gelu(np.array([v]))[0] == pytest.approx(0.5 * v * (1 + tanh), rel=1e-14)


def attention_by_hand(qkv: np.ndarray, n_head: int, causal: bool) -> np.ndarray:
    T, C = qkv.shape[0], qkv.shape[1] // 3
    size = C // n_head
    out = np.zeros((T, C))
    for h in range(n_head):
        for i in range(T):
            q = qkv[i, h * size : (h + 1) * size]
            keys = range(i + 1) if causal else range(T)
            scores = [q @ qkv[j, C + h * size : C + (h + 1) * size] / math.sqrt(size) for j in keys]
            weights = [math.exp(s - max(scores)) for s in scores]
            for j, weight in zip(keys, weights, strict=True):
                value = qkv[j, 2 * C + h * size : 2 * C + (h + 1) * size]
                out[i, h * size : (h + 1) * size] += weight / sum(weights) * value
    return out


@given(T=st.integers(1, 9), n_head=st.integers(1, 4), size=st.integers(1, 8), causal=st.booleans())
def test_attention_by_hand(T: int, n_head: int, size: int, causal: bool) -> None:
    qkv = np.random.default_rng(T).standard_normal((T, 3 * n_head * size))
    got = reference.attention(qkv, n_head, causal)
    np.testing.assert_allclose(got, attention_by_hand(qkv, n_head, causal), rtol=1e-12, atol=1e-13)


def test_attention_batch_is_its_rows() -> None:
    qkv = rng.standard_normal((3, 5, 24))
    for causal in (False, True):
        got = reference.attention(qkv, 2, causal)
        for b in range(3):
            np.testing.assert_allclose(got[b], reference.attention(qkv[b], 2, causal), rtol=1e-13)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_attention_skips_masked_rows_that_are_not_finite(bad: float) -> None:
    qkv = rng.standard_normal((2, 6, 24))
    clean = reference.attention(qkv, 2, causal=True)
    qkv[1, 3] = bad
    with np.errstate(invalid="ignore"):
        got = reference.attention(qkv, 2, causal=True)
        full = reference.attention(qkv, 2, causal=False)
    np.testing.assert_array_equal(got[0], clean[0])
    np.testing.assert_allclose(got[1, :3], clean[1, :3], rtol=1e-13)
    assert not np.isfinite(got[1, 3:]).any()
    assert not np.isfinite(full[1]).any()


def test_attention_passes_a_nan_of_v_on_to_its_own_channel_only() -> None:
    qkv = rng.standard_normal((6, 24))
    clean = reference.attention(qkv, 2, causal=True)
    qkv[3, 16 + 5] = np.nan
    got = reference.attention(qkv, 2, causal=True)
    assert np.isnan(got[3:, 5]).all()
    got[3:, 5] = clean[3:, 5]
    np.testing.assert_allclose(got, clean, rtol=1e-13)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_block_forward_keeps_the_dtype_of_x(dtype: type) -> None:
    w = BlockWeights.random(3, GPT2Config(n_head=3, n_embd=48))
    x: Any = rng.uniform(-1, 1, (5, 48)).astype(dtype)
    assert reference.block_forward(x, w, causal=True).dtype == dtype


def test_block_forward_is_the_ten_steps() -> None:
    w = BlockWeights.random(3, GPT2Config(n_head=3, n_embd=48)).astype(np.float64)
    x = rng.uniform(-1, 1, (5, 48))
    ln1 = reference.layernorm(x, w.gamma1, w.beta1)
    attn = attention_by_hand(ln1 @ w.w_qkv + w.b_qkv, 3, True)
    x1 = x + attn @ w.w_attn + w.b_attn
    ff1 = reference.layernorm(x1, w.gamma2, w.beta2) @ w.w_fc + w.b_fc
    expected = x1 + reference.gelu(ff1) @ w.w_proj + w.b_proj
    np.testing.assert_allclose(reference.block_forward(x, w, True), expected, rtol=1e-12)


@pytest.mark.parametrize("n_kv_head", [1, 2, 6])
def test_grouped_queries_are_attention_with_repeated_keys_and_values(n_kv_head: int) -> None:
    n_head, D, T = 6, 4, 21
    q, k, v = (rng.standard_normal((2, T, n, D)) for n in (n_head, n_kv_head, n_kv_head))
    v[1, -1] = np.nan  # last key of the second sequence
    repeated = [np.repeat(a, n_head // n_kv_head, axis=2) for a in (k, v)]

    def row(*parts: Any) -> Any:
        return np.concatenate([a.reshape(2, T, -1) for a in parts], axis=-1)

    few, many = row(q, k, v), row(q, *repeated)
    expected = reference.attention(many, n_head, causal=True)
    found = reference.attention(few, n_head, causal=True, n_kv_head=n_kv_head)
    np.testing.assert_array_equal(found, expected)
    keys, values = (np.zeros((2, T, n_kv_head * D)) for _ in "kv")
    rows, positions = np.repeat([0, 1], T), np.tile(np.arange(T), 2)
    packed = few.reshape(2 * T, -1)
    reference.kv_append(packed, keys, values, rows, positions)
    ends, start = np.array([0, T, 2 * T]), np.array([0, 0])
    attended = reference.attention_packed(packed, keys, values, ends, start, n_head)
    np.testing.assert_allclose(attended.reshape(expected.shape), expected, rtol=1e-12, atol=1e-14)
    queries = packed[:, : n_head * D]
    single = reference.attention_split(queries, keys, values, rows, positions, n_head)
    np.testing.assert_allclose(single, attended, rtol=1e-12, atol=1e-14)
