"""Rotary position embedding, also of rows [Q | K | V]: with NumPy, emulated and on the GPU."""

from __future__ import annotations

import cmath
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import InputError, ops, reference
from gpt2block.cuda import cupy as cp
from gpt2block.ops import registry
from gpt2block.ops.rope import (
    MAX_POSITIONS,
    OPERATION,
    exponent_step,
)
from tests import plain
from tests.caches import DTYPES, FORMATS, KINDS, Heads, row_width
from tests.devices import H200, combinations, moved, on_every_device, one_order, running_on
from tests.gpus import large_memory

Array = NDArray[Any]
exact = partial(plain.exact, "rope")

both_layouts = pytest.mark.parametrize("half_split", [False, True])
few = settings(max_examples=4)


def normal(seed: int, *shape: int, dtype: str = "float32") -> Array:
    return np.asarray(plain.normal(seed, *shape).astype(DTYPES[dtype]))


def assert_right(got: Array, x: Array, *options: Any) -> None:
    assert got.dtype == x.dtype
    plain.assert_as_accurate(got.astype(np.float32), exact(x, *options), plain.rope(x, *options))


def evaluate(
    where: str,
    x: Array,
    start: int = 0,
    theta: float = 1e4,
    half_split: bool = False,
    *,
    width: int | None = None,
    sms: int = H200,
    block: int | None = None,
    parts: int = 1,
    in_place: bool = False,
) -> Array:
    """Run RoPE on x (B, T, H, D), the first of `parts` parts of each row; the others are NaN.

    width: most elements per load; arrays are not aligned to more than `width` elements.
    """
    B, T, H, D = x.shape
    rows = np.full((B, T, parts, H, D), np.nan, x.dtype)
    rows[:, :, 0] = x
    results: list[Array] = []
    with running_on(where, sms):
        for _ in range(2 if where == "gpu" else 1):
            on_device = moved(rows, width or 0)
            view = on_device[:, :, 0]
            out = view if in_place else moved(np.full_like(x, np.nan), width or 0)
            options: dict[str, Any] = {"start": start, "theta": theta, "half_split": half_split}
            results.append(OPERATION.bind((view,), out, block=block, **options).run().get())
            after = on_device.get()
            assert np.isnan(after[:, :, 1:].astype(np.float32)).all()
            np.testing.assert_array_equal(after[:, :, 0], results[0] if in_place else x)
    np.testing.assert_array_equal(results[0], results[-1])
    return results[0]


# --- the definition -------------------------------------------------------------------------------


@both_layouts
def test_the_reference_against_a_loop_by_hand(half_split: bool) -> None:
    """A pair is a complex number, and its rotation a multiplication."""
    T, H, D = 4, 2, 6
    x = normal(0, 2, T, H, D).astype(np.float64)
    got = reference.rope(x, 3, 100.0, half_split)
    for b, t, h, k in np.ndindex(2, T, H, D // 2):
        first, second = (k, k + D // 2) if half_split else (2 * k, 2 * k + 1)
        turn = cmath.exp(1j * (3 + t) / 100.0 ** (2 * k / D))
        expected = complex(x[b, t, h, first], x[b, t, h, second]) * turn
        pair = got[b, t, h, first], got[b, t, h, second]
        np.testing.assert_allclose(pair, (expected.real, expected.imag), rtol=1e-13)
    for dtype in (np.float32, np.float64):
        assert reference.rope(x.astype(dtype), 3, 100.0, half_split).dtype == dtype


def test_start_continues_a_sequence_and_distances_are_what_counts() -> None:
    x = normal(0, 9, 2, 8).astype(np.float64)
    whole = reference.rope(x)
    np.testing.assert_array_equal(reference.rope(x[5:], start=5), whole[5:])
    q, k = np.broadcast_to(normal(1, 8), (40, 1, 8)), np.broadcast_to(normal(2, 8), (40, 1, 8))
    q, k = (reference.rope(a.astype(np.float64))[:, 0] for a in (q, k))
    np.testing.assert_allclose(q[7] @ k[3], q[36] @ k[32], rtol=1e-12)


def test_the_step_of_the_exponent() -> None:
    for theta, D in ((1e4, 128), (5e5, 128), (2.0, 2), (1.0, 8)):
        high, low = exponent_step(theta, D)
        assert abs(low) <= np.spacing(np.float32(high)) / 2
        assert high + low == pytest.approx(2 * math.log2(theta) / D, rel=2**-47, abs=0)


# --- on the CPU and on the GPU --------------------------------------------------------------------

# For the emulated kernel: dtype, heads, head size, elements per load (None: the most),
# multiprocessors (few: many heads per thread, wide loads), and the layout
SHAPES = [
    ("float32", 3, 4, None, H200, False),
    ("float32", 5, 20, None, 0, True),
    ("float32", 2, 6, 1, 0, False),  # one element per load
    ("float16", 9, 16, None, 0, False),
    ("float16", 1, 2, None, H200, True),
    ("bfloat16", 3, 24, 2, 0, True),
]


@on_every_device
@pytest.mark.parametrize(("dtype", "H", "D", "width", "sms", "half_split"), SHAPES)
@few
@given(
    B=st.integers(1, 2), T=st.integers(1, 40), start=st.integers(0, 3000), parts=st.integers(1, 2)
)
@example(B=1, T=1, start=0, parts=1)
@example(B=2, T=35, start=7, parts=3)
def test_any_shape(
    where: str,
    dtype: str,
    H: int,
    D: int,
    width: int | None,
    sms: int,
    half_split: bool,
    B: int,
    T: int,
    start: int,
    parts: int,
) -> None:
    x = normal(T, B, T, H, D, dtype=dtype)
    got = evaluate(where, x, start, 1e4, half_split, width=width, sms=sms, parts=parts)
    assert_right(got, x, start, 1e4, half_split)


@on_every_device
@both_layouts
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_in_place_among_others(where: str, dtype: str, half_split: bool) -> None:
    x = normal(0, 2, 7, 3, 16, dtype=dtype)
    got = evaluate(where, x, 5, 1e4, half_split, parts=3, in_place=True)
    np.testing.assert_array_equal(got, evaluate(where, x, 5, 1e4, half_split))


@on_every_device
@pytest.mark.parametrize(("theta", "D"), [(1e4, 64), (5e5, 128), (1.0, 6), (16.0, 4), (1e4, 2)])
def test_far_positions(where: str, theta: float, D: int) -> None:
    """Angles have a relative error of about 2^-27, as the source states; pair 0 is exact."""
    x = np.zeros((1, 8, 1, D), np.float32)
    x[..., 0::2] = 1  # the result is cosines and sines
    for start in (0, 4095, 131064, MAX_POSITIONS - 8):
        got = evaluate(where, x, start, theta)
        if start == 0:
            np.testing.assert_array_equal(got[:, 0], x[:, 0])
        assert_right(got, x, start, theta)
        error = np.abs(got - exact(x, start, theta))
        rounding = 2.0**-23
        assert error[..., :2].max() <= rounding
        assert error.max() <= (start + 8) * 2.0**-26 + rounding


@on_every_device
def test_an_output_depends_on_its_pair_alone(where: str) -> None:
    x = normal(0, 2, 5, 3, 16)
    x[1, 2, 1, 6] = np.nan
    x[0, 3, 0, 9] = np.inf
    wrong = np.zeros(x.shape, bool)
    wrong[1, 2, 1, 6:8] = wrong[0, 3, 0, 8:10] = True
    np.testing.assert_array_equal(~np.isfinite(evaluate(where, x)), wrong)


# --- rows [Q | K | V], and the kv_cache -----------------------------------------------------------


ROTATED = [(4, 2, 8), (3, 1, 6), (2, 2, 34), (4, 1, 128)]


def assert_close(got: Array, truth: Array, dtype: str) -> None:
    eps = {"float32": 1e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    assert np.isfinite(got.astype(np.float32)).all(), "an element was not written"
    assert np.abs(got.astype(np.float64) - truth).max() <= eps * 4 * np.abs(truth).max()


def frequencies(D: int) -> Array:
    return np.asarray(500000.0 ** (-np.arange(0, D, 2) / D))


@combinations(times=1, heads=ROTATED, dtype=list(DTYPES), half_split=[False, True])
def test_rope_qkv(device: Any, heads: Heads, dtype: str, half_split: bool) -> None:
    """rope_qkv runs in place, on a batch, and at positions that float32 cannot represent."""
    NH, NKV, HS = heads
    positions = np.array([0, 1, 77, 8191, 2**24 + 1, 2**31 - 1, 5], np.int32)
    qkv = plain.normal(2, 2, 7, row_width(heads)).astype(DTYPES[dtype])
    at, turns = device.asarray(positions), device.asarray(frequencies(HS))
    options: Any = {"n_head": NH, "n_kv_head": NKV, "half_split": half_split}
    x = device.asarray(qkv)
    out = device.asarray(np.full_like(qkv, np.nan))
    got = registry.bind("rope_qkv", (x, at, turns), out, **options).run().get()
    wide = qkv.astype(np.float64)
    truth = reference.rope_qkv(wide, positions, frequencies(HS), NH, NKV, half_split)
    assert_close(got, truth, dtype)
    np.testing.assert_array_equal(got[..., -NKV * HS :], qkv[..., -NKV * HS :])
    rows = ops.rope_qkv(device.asarray(qkv[1]), at, turns, NH, NKV, half_split)
    np.testing.assert_array_equal(rows.get(), got[1])
    np.testing.assert_array_equal(x.get(), qkv)
    assert ops.rope_qkv(x, at, turns, NH, NKV, half_split, x) is x
    np.testing.assert_array_equal(x.get(), got)


@combinations(times=1, along="heads", heads=ROTATED, kind=KINDS, half_split=[False, True])
def test_rope_append(device: Any, heads: Heads, kind: str, half_split: bool) -> None:
    """Results have the bits of rope_qkv, then kv_append, even for values beyond FP8's range."""
    NH, NKV, HS = heads
    fp8 = kind if kind in FORMATS else None
    qkv = device.asarray(200 * plain.normal(2, 4, row_width(heads)))
    row = device.asarray(np.array([2, 0, -1, 1], np.int32))
    position = device.asarray(np.array([3, 0, 4, 6], np.int32))
    turns = device.asarray(frequencies(HS))
    dtype = DTYPES.get(kind, np.uint8)
    k, v, k2, v2 = (device.asarray(np.zeros((3, 7, NKV * HS), dtype)) for _ in range(4))
    inputs = (qkv, turns, k, v, row, position)
    options: Any = {"n_head": NH, "half_split": half_split, "kv_dtype": fp8}
    q = registry.bind("rope_append", inputs, **options).run().get()
    turned = ops.rope_qkv(qkv, position, turns, NH, NKV, half_split)
    ops.kv_append(turned, k2, v2, row, position, fp8)
    np.testing.assert_array_equal(q, turned.get()[:, : NH * HS])
    np.testing.assert_array_equal(k.get(), k2.get())
    np.testing.assert_array_equal(v.get(), v2.get())
    assert k.get()[1, 6].astype(np.float32).any()
    np.testing.assert_array_equal(ops.rope_append(*inputs, **options).get(), q)


@one_order
@pytest.mark.parametrize(("half_split", "growth"), [(False, None), (True, None), (True, (0.7, 3))])
def test_pairs_that_turn_have_a_factor(
    device: Any, half_split: bool, growth: tuple[float, int] | None
) -> None:
    """Three kernels apply it equally; 2 of a head's 17 pairs have frequency 0 and do not change.

    Queries also grow with their position.
    """
    turns = frequencies(34) * (np.arange(17) < 15)
    rows, position = np.arange(3, dtype=np.int32), np.array([0, 3, 6], np.int32)
    heads, cache = plain.normal(3, 3, 4, 34), np.zeros((3, 7, 34), np.float32)
    qkv, at, by, row = map(device.asarray, (heads.reshape(3, -1), position, turns, rows))
    options: Any = {"n_head": 2, "half_split": half_split, "factor": 1.3, "growth": growth}
    got = registry.bind("rope_qkv", (qkv, at, by), n_kv_head=1, **options).run().get()
    truth = reference.rope_qkv(heads.reshape(3, -1), position, turns, n_kv_head=1, **options)
    assert_close(got, truth, "float32")
    still = (np.r_[15:17, 32:34], np.r_[30:34])[not half_split]
    grown = np.ones(3) if growth is None else 1 + 0.7 * np.log([1, 2, 3])
    heads[:, :2] *= grown.astype(np.float32)[:, None, None]
    np.testing.assert_array_max_ulp(got.reshape(heads.shape)[..., still], heads[..., still], 1)
    k, v = device.asarray(cache), device.asarray(cache)
    q = ops.rope_append(qkv, by, k, v, row, at, **options).get()
    np.testing.assert_array_equal(q, got[:, :68])
    np.testing.assert_array_equal(k.get()[rows, position], got[:, 68:102])
    turned = ops.rope_qkv(qkv, at, by, n_kv_head=1, **options)
    np.testing.assert_array_equal(turned.get(), got)
    both = registry.bind("rotations", (at, by), factor=1.3).run().get()
    np.testing.assert_allclose(
        both, reference.rotations(position, turns, None, 1.3), rtol=0, atol=3e-7
    )
    assert both[0].tolist() == [[np.float32(1.3), 0]] * 15 + [[1, 0]] * 2


@one_order
@pytest.mark.parametrize(("heads", "half_split"), [((4, 2, 8), True), ((3, 1, 34), False)])
def test_sequences_with_frequencies_of_their_own(
    device: Any, heads: Heads, half_split: bool
) -> None:
    """In three kernels a row has the same bits as if all rows had its sequence's frequencies."""
    NH, NKV, HS = heads
    row, position = np.array([2, 0, -1, 1, 2], np.int32), np.array([3, 0, 4, 6, 5], np.int32)
    own = np.stack([frequencies(HS), 1 - frequencies(HS), np.zeros(HS // 2)])
    qkv, table = device.asarray(plain.normal(2, 5, row_width(heads))), device.asarray(own)
    sequence, at = map(device.asarray, (row, position))
    turn: Any = {"half_split": half_split, "factor": 1.3}
    options = {"n_head": NH, "n_kv_head": NKV, **turn}
    got = registry.bind("rope_packed", (qkv, at, table, sequence), **options).run().get()
    k, v = (device.asarray(np.zeros((3, 7, NKV * HS), np.float32)) for _ in range(2))
    inputs = (qkv, table, k, v, sequence, at)
    q = registry.bind("rope_append", inputs, n_head=NH, **turn).run().get()
    by = registry.bind("rotations", (at, table, sequence), factor=1.3).run().get()
    for n, b in enumerate(row):
        if b >= 0:  # otherwise the row is padding
            of_row, its = at[n : n + 1], device.asarray(own[b])
            one = registry.bind("rope_qkv", (qkv[n : n + 1], of_row, its), **options).run().get()
            np.testing.assert_array_equal(got[n], one[0])
            np.testing.assert_array_equal(q[n], one[0, : NH * HS])
            np.testing.assert_array_equal(k.get()[b, position[n]], one[0, NH * HS :][: NKV * HS])
            angles = registry.bind("rotations", (of_row, its), factor=1.3).run().get()
            np.testing.assert_array_equal(by[n], angles[0])
    inner = row >= 0
    host = qkv.get(), position, own, row
    assert_close(got[inner], reference.rope_packed(*host, **options)[inner], "float32")
    assert_close(by[inner], reference.rotations(*host[1:3], row, 1.3)[inner], "float32")
    with pytest.raises(InputError, match=r"frequencies: expected shape \(3, \d+\), got \(2, "):
        registry.bind("rope_append", (qkv, table[:2], *inputs[2:]), n_head=NH, **turn)
    with pytest.raises(InputError, match=r"frequencies: expected shape \(\d+,\), got \(3, "):
        registry.bind("rotations", (at, table))


@combinations(shape=[(1, 8), (3, 64), (64, 128)])
def test_rotations(device: Any, shape: tuple[int, int]) -> None:
    N, D = shape
    position = (np.arange(N, dtype=np.int32) * 977) % 131_072
    given = device.asarray(position), device.asarray(frequencies(D))
    got = registry.bind("rotations", given).run().get()
    assert np.abs(got - reference.rotations(position, frequencies(D))).max() <= 2.0**-23


def test_rotations_and_linear_rope_on_numpy() -> None:
    """linear_rope computes the product and rope_append, from rotations of all positions."""
    x, w = plain.normal(0, 2, 5).astype(np.float64), plain.normal(1, 5, 4 * 8).astype(np.float64)
    row, position = np.array([1, 0]), np.array([2, 1])
    k, v, k2, v2 = np.zeros((4, 2, 3, 8))
    by = reference.rotations(position, frequencies(8))
    q = reference.linear_rope(x, w, None, by, k, v, row, position, 2)
    expected = reference.rope_append(x @ w, frequencies(8), k2, v2, row, position, 2, True)
    for ours, theirs in ((q, expected), (k, k2), (v, v2)):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    assert k.any()


# --- on the GPU alone -----------------------------------------------------------------------------


@pytest.mark.gpu
def test_more_elements_than_an_int_counts() -> None:
    T = 600_000
    row = normal(0, 32, 128, dtype="float16")
    with large_memory(T * row.nbytes):
        x = cp.empty((T, 32, 128), "float16")
        x[:] = cp.asarray(row)
        ops.rope(x, out=x)
        for t in (0, 1, T // 2, T - 1):
            assert_right(x[t : t + 1].get(), row[None], t)
        del x
