"""Norms of each head of q and k or of all heads together: alone, with RoPE, with the kv_cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpt2block import InputError, ops, reference
from gpt2block.emulator import Order
from gpt2block.ops import registry
from gpt2block.ops.call import HI_LO
from gpt2block.ops.operands import Operand
from tests import plain
from tests.caches import DTYPES, FORMATS, KINDS, Heads, row_width, stored
from tests.devices import (
    assert_barriers_show,
    assert_same_bits,
    combinations,
    running_on,
)
from tests.ops.test_rope import assert_close, frequencies

# Heads with odd halves, of one vector, of several vectors per lane, and with sizes of models.
NORMED = [(4, 2, 8), (3, 1, 6), (1, 1, 2), (2, 2, 34), (4, 1, 128), (2, 1, 256), (2, 1, 254)]
EPS = 1e-5


def gammas(heads: Heads, together: bool = False) -> list[Any]:
    """Return norm weights for q and for k. together: one norm over all heads."""
    NH, NKV, D = heads
    counts = (NH, NKV) if together else (1, 1)
    return [plain.normal(5 + i, n * D) + np.float32(1) for i, n in enumerate(counts)]


@combinations(times=1, along="dtype", heads=NORMED, dtype=list(DTYPES), together=(False, True))
def test_right_and_the_same_bits_alone(
    device: Any, heads: Heads, dtype: str, together: bool
) -> None:
    """The norm runs in place too; rows that are not finite do not affect others."""
    NH, NKV, D = heads
    options: Any = {"n_head": NH, "n_kv_head": NKV, "eps": EPS}
    qkv = (3 * plain.normal(2, 2, 7, row_width(heads))).astype(DTYPES[dtype])
    qkv[1, 3, 0] = np.nan
    gamma = [each.astype(DTYPES[dtype]) for each in gammas(heads, together)]
    x, of_q, of_k = (device.asarray(array) for array in (qkv, *gamma))
    out = device.asarray(np.full_like(qkv, np.nan))
    got = registry.bind("qk_norm", (x, of_q, of_k), out, **options).run().get()
    rows = np.delete(got.reshape(14, -1), 10, 0)
    wide = (each.astype(np.float64) for each in (qkv, *gamma))
    truth = reference.qk_norm(*wide, **options)
    assert_close(rows, np.delete(truth.reshape(14, -1), 10, 0), dtype)
    assert np.isnan(got[1, 3].astype(np.float32)).sum() == (NH * D if together else D)
    assert_same_bits(got[..., -NKV * D :], qkv[..., -NKV * D :])
    assert_same_bits(ops.qk_norm(x[1, 4], of_q, of_k, **options).get(), got[1, 4])
    assert ops.qk_norm(x, of_q, of_k, **options, out=x) is x
    assert_same_bits(x.get(), got)


@combinations(times=1, heads=NORMED, dtype=list(DTYPES), together=(False, True))
def test_with_rope(device: Any, heads: Heads, dtype: str, together: bool) -> None:
    """In float32 it has the bits of norm, then RoPE; few rows have the same bits alone."""
    NH, NKV, D = heads
    options: Any = {"n_head": NH, "n_kv_head": NKV}
    positions = np.array([0, 1, 8191, 2**24 + 1, 2**31 - 1], np.int32)
    qkv = plain.normal(2, 2, 5, row_width(heads)).astype(DTYPES[dtype])
    gamma = gammas(heads, together)
    x, of_q, of_k = (device.asarray(array) for array in (qkv, *gamma))
    turn = device.asarray(positions), device.asarray(frequencies(D))
    run = registry.bind("qk_norm_rope", (x, *turn, of_q, of_k), eps=EPS, **options).run
    got = run().get()
    wide, wide_q, wide_k = (array.astype(np.float64) for array in (qkv, *gamma))
    truth = reference.qk_norm_rope(
        wide, positions, frequencies(D), wide_q, wide_k, **options, eps=EPS
    )
    assert_close(got, truth, dtype)
    if dtype == "float32":
        normed = ops.qk_norm(x, of_q, of_k, eps=EPS, **options)
        assert_same_bits(got, ops.rope_qkv(normed, *turn, **options, half_split=True).get())
    many = device.asarray(np.tile(qkv, (1, 50, 1)))
    turn = device.asarray(np.tile(positions, 50)), turn[1]
    bound = registry.bind("qk_norm_rope", (many, *turn, of_q, of_k), many, eps=EPS, **options)
    assert_same_bits(bound.run().get(), np.tile(got, (1, 50, 1)))


@combinations(times=1, along="kind", heads=NORMED, kind=KINDS, together=(False, True))
def test_with_the_kv_cache(device: Any, heads: Heads, kind: str, together: bool) -> None:
    """Results have the bits of qk_norm_rope, then kv_append; a row is outside the cache."""
    NH, NKV, D = heads
    fp8 = kind if kind in FORMATS else None
    qkv, row, position, turns, *gamma = (
        device.asarray(array)
        for array in (
            200 * plain.normal(2, 4, row_width(heads)),
            np.array([2, 0, -1, 1], np.int32),
            np.array([3, 0, 4, 6], np.int32),
            frequencies(D),
            *(100 * each for each in gammas(heads, together)),
        )
    )
    dtype = DTYPES.get(kind, np.uint8)
    k, v, k2, v2 = (device.asarray(np.zeros((3, 7, NKV * D), dtype)) for _ in range(4))
    inputs = (qkv, turns, k, v, row, position, *gamma)
    q = registry.bind("qk_norm_append", inputs, n_head=NH, eps=EPS, kv_dtype=fp8).run().get()
    given = (qkv, position, turns, *gamma)
    turned = registry.bind("qk_norm_rope", given, n_head=NH, n_kv_head=NKV, eps=EPS).run()
    ops.kv_append(turned, k2, v2, row, position, fp8)
    assert_same_bits(q, turned.get()[:, : NH * D])
    for ours, theirs in ((k, k2), (v, v2)):
        assert_same_bits(ours.get(), theirs.get())
    assert k.get()[1, 6].astype(np.float32).any()


IN_ATTENTION = [(4, 2, 64), (5, 1, 64), (6, 2, 128), (2, 1, 256), (1, 1, 64)]
MANY = [0, 31, 32, 33, 511, 512, 1023, 1024, 1099, 1100, 7, -1]  # the last two have no sequence


@combinations(
    times=1,
    along="alone",
    heads=IN_ATTENTION,
    kind=KINDS,
    alone=(False, True),
    window=(None, 40),
    terms=(False, True),
)
def test_in_attention(
    device: Any, heads: Heads, kind: str, alone: bool, window: int | None, terms: bool
) -> None:
    """Attention with norms, RoPE and the append has the bits of these kernels one by one.

    New tokens are at the ends of splits, of what warps process together and of the cache. Others
    are beyond the cache, or of no sequence. If a row is alone, several teams share a head of k.
    """
    NH, NKV, D = heads
    fp8 = kind if kind in FORMATS else None
    places, n_ctx = ([39], 40) if alone else (MANY, 1100)
    rows = np.arange(len(places), dtype=np.int32)
    rows[10:11] = -1
    qkv, turns, row, position = (
        device.asarray(array)
        for array in (
            3 * plain.normal(2, len(rows), row_width(heads)),
            frequencies(D),
            rows,
            np.array(places, np.int32),
        )
    )
    by = registry.bind("rotations", (position, turns)).run()
    norms = [device.asarray(each) for each in gammas(heads)]
    options: Any = {"n_head": NH, "kv_dtype": fp8}
    scores: Any = {"window": window, "softmax_scale": 0.11}
    if terms:
        dtype = {"float32": HI_LO, **dict.fromkeys(FORMATS, "float16")}.get(kind, kind)
        scores["to_operand"] = Operand(dtype, scale=2.0**6 if dtype == HI_LO else 1.0)
    caches = []
    for _ in range(2):
        old = (stored(plain.normal(n, len(rows), n_ctx, NKV * D), kind) for n in (8, 9))
        caches.append([device.asarray(each) for each in old])
    inputs = (qkv, turns, *caches[0], row, position, *norms)
    q = registry.bind("qk_norm_append", inputs, **options, eps=EPS).run()
    inputs = (q, *caches[0], row, position)
    expected = registry.bind("attention_split", inputs, **options, **scores).run().get()
    inputs = (qkv, by, *norms, *caches[1], row, position)
    got = registry.bind("attention_append", inputs, **options, **scores, eps=EPS).run().get()
    assert_same_bits(got[:10], expected[:10])
    for ours, theirs in zip(caches[1], caches[0], strict=True):
        assert_same_bits(ours.get(), theirs.get())
    refused = {**options, "n_head": 2 * NH}
    with pytest.raises(InputError, match=f"expected {2 * NH} heads of {D} channels"):
        registry.bind("attention_append", inputs, **refused)


@pytest.mark.slow
def test_attention_without_the_barrier_before_its_queries_shows() -> None:
    def run(order: Order) -> None:
        with running_on(order) as device:
            qkv, gamma = (device.asarray(plain.normal(0, *shape)) for shape in ((1, 192), (64,)))
            by, k, v = (
                device.zeros(shape, "float32") for shape in ((1, 32, 2), *[(1, 40, 64)] * 2)
            )
            zero = device.zeros(1, "int32")
            inputs = (qkv, by.reshape(1, 32, 2), gamma, gamma, k, v, zero, zero)
            registry.bind("attention_append", inputs, n_head=1).run()

    assert_barriers_show("attention/decode/append.cu", run)


@combinations(
    times=1,
    along="kind",
    heads=[(3, 1, 6), (2, 1, 512), (2, 2, 8)],
    kind=("float16", "float8_e5m2"),
)
def test_norms_of_values_and_of_queries_alone(device: Any, heads: Heads, kind: str) -> None:
    """Values have norms without weights, in every operation; rows of queries have no K and V."""
    NH, NKV, D = heads
    dtype, fp8 = DTYPES.get(kind, np.uint8), kind if kind in FORMATS else None
    qkv, gamma = 3 * plain.normal(2, 3, row_width(heads)), gammas(heads)
    place = np.array([0, 2, 6], np.int32)
    x, at, turns, *norms = map(device.asarray, (qkv, place, frequencies(D), *gamma))
    options: Any = {"eps": EPS, "n_head": NH}
    both = {**options, "values": True}
    got = registry.bind("qk_norm_rope", (x, at, turns, *norms), n_kv_head=NKV, **both).run()
    wide = qkv.astype(np.float64), place, frequencies(D), *gamma
    assert_close(got.get(), reference.qk_norm_rope(*wide, **{**both, "n_kv_head": NKV}), "float32")
    k, v, k2, v2 = (device.asarray(np.zeros((1, 7, NKV * D), dtype)) for _ in range(4))
    row = device.zeros(3, "int32")
    inputs = (x, turns, k, v, row, at, *norms)
    q = registry.bind("qk_norm_append", inputs, kv_dtype=fp8, **both).run().get()
    ops.kv_append(got, k2, v2, row, at, fp8)
    assert_same_bits(v.get(), v2.get())
    alone = device.asarray(np.ascontiguousarray(qkv[:, : NH * D]))
    turned = (alone, at, turns, norms[0], norms[0])
    bound = registry.bind("qk_norm_rope", turned, alone, n_kv_head=NKV, queries=True, **options)
    assert_same_bits(bound.run().get(), q)
    bound = registry.bind("qk_norm_rope", (x, at, turns, *norms), x, n_kv_head=NKV, **both)
    assert bound.run() is x
    assert_same_bits(x.get(), got.get())


def test_on_numpy() -> None:
    """A decoding step equals the last row of a prompt."""
    qkv = plain.normal(0, 3, 4 * 8).astype(np.float64)
    gamma = [each.astype(np.float64) for each in gammas((2, 1, 8))]
    k, v = np.zeros((2, 1, 3, 8))
    last = qkv[2:], frequencies(8), k, v, np.array([0]), np.array([2])
    of_q, of_k = gamma
    q = reference.qk_norm_append(*last, of_q, of_k, 2, EPS)
    whole = reference.qk_norm_rope(qkv, np.arange(3), frequencies(8), of_q, of_k, 2, 1, EPS)[2]
    np.testing.assert_array_equal(np.concatenate([q[0], k[0, 2], v[0, 2]]), whole)
    heads = reference.qk_norm(qkv, of_q, of_k, 2, 1, EPS).reshape(3, 4, 8)
    for h, weight in ((0, of_q), (1, of_q), (2, of_k)):
        expected = reference.rmsnorm(qkv[:, 8 * h : 8 * h + 8], weight, EPS)
        np.testing.assert_array_equal(heads[:, h], expected)
