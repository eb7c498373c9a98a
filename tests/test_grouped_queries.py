"""Attention whose heads of K and V serve several heads of Q, and RoPE of their rows.

On the CPU emulator and on a GPU. Results are compared with float64, with the same attention over
repeated heads of K and V, and with those of a sequence alone.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import InputError, ops, reference
from gpt2block.cuda import kernels, replaced
from gpt2block.ops import registry
from gpt2block.ops._attention_tiles import hopper_geometry, mma_geometry, two_part_geometry
from gpt2block.ops._tensor_cores import HOPPER_CAPABILITY, MMA_CAPABILITY
from gpt2block.ops.attention import HOPPER, MMA, MMA_TWO_PART, VARLEN
from gpt2block.ops.attention import bind as bind_attention
from gpt2block.ops.attention_cached import (
    ATTENTION_PACKED,
    ATTENTION_SPLIT,
    KV_APPEND,
    SPLIT,
    split_geometry,
)
from gpt2block.weights.two_part import TwoPartMatrix
from tests.compiling import assert_clean
from tests.devices import combinations, on_gpu, one_order, set_attributes
from tests.gpus import A100, H200, cupy_with
from tests.plain import normal
from tests.test_attention_mma import assert_right as assert_as_accurate_in_16_bits

Array = NDArray[Any]
Heads = tuple[int, int, int]  # of Q, of K and V, and their channels
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
MOST_SHARED = H200["most_shared"]
RATIOS = [(2, 2, 8), (4, 2, 16), (3, 1, 8), (8, 1, 8)]
ratios = pytest.mark.parametrize("heads", RATIOS, ids=str)
ROTATED = [(4, 2, 8), (3, 1, 6), (2, 2, 34), (4, 1, 128)]


def repeated(rows: Array, heads: Heads) -> Array:
    """K or V (..., KV) with each head as often as it serves heads of Q: (..., Q)."""
    NH, NKV, HS = heads
    each = rows.reshape(*rows.shape[:-1], NKV, HS)
    return np.repeat(each, NH // NKV, axis=-2).reshape(*rows.shape[:-1], NH * HS)


def expanded(qkv: Array, heads: Heads) -> Array:
    """Rows [Q | K | V] (..., 3Q) of the same attention without groups."""
    NH, NKV, HS = heads
    q, k, v = np.split(qkv, [NH * HS, (NH + NKV) * HS], axis=-1)
    return np.concatenate([q, repeated(k, heads), repeated(v, heads)], axis=-1)


def width(heads: Heads) -> int:
    return (heads[0] + 2 * heads[1]) * heads[2]


def assert_close(got: Array, truth: Array, dtype: str = "float32") -> None:
    eps = {"float32": 1e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    assert np.isfinite(got.astype(np.float32)).all(), "an element was not written"
    assert np.abs(got.astype(np.float64) - truth).max() <= eps * 4 * np.abs(truth).max()


# --- over the rows themselves


@one_order
@ratios
@pytest.mark.parametrize("variant", ["mha", "naive", "online"])
def test_attention(device: Any, variant: str, heads: Heads) -> None:
    """The bits of the same attention with repeated heads of K and V."""
    NH, NKV, _ = heads
    qkv = normal(NH, 2, 37, width(heads))
    for causal in (True, False):
        options: dict[str, Any] = {"causal": causal, "variant": variant, "n_head": NH}
        out = device.full((2, 37, NH * heads[2]), np.nan, "float32")
        rows, wide = device.asarray(qkv), device.asarray(expanded(qkv, heads))
        got = bind_attention((rows,), out, n_kv_head=NKV, **options).run().get()
        np.testing.assert_array_equal(got, bind_attention((wide,), **options).run().get())
        assert_close(got, reference.attention(qkv.astype(np.float64), NH, causal, NKV))


@one_order
@pytest.mark.parametrize("heads", [(4, 2, 64), (2, 1, 128)], ids=str)
def test_attention_of_whole_heads(
    device: Any, heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_attributes(monkeypatch, MaxSharedMemoryPerBlockOptin=MOST_SHARED)
    NH, NKV, _ = heads
    qkv = normal(NH, 41, width(heads))
    truth = reference.attention(qkv.astype(np.float64), NH, True, NKV)
    for variant in ("mha", "online"):
        got = ops.attention(device.asarray(qkv), NH, True, variant, n_kv_head=NKV).get()
        assert_close(got, truth)


@one_order
@pytest.mark.parametrize(
    ("heads", "dtype", "causal"),
    [
        ((2, 1, 64), "bfloat16", True),
        ((4, 2, 128), "bfloat16", False),
        ((3, 1, 128), "float16", True),
        ((8, 2, 64), "float16", False),
    ],
    ids=str,
)
@pytest.mark.parametrize("variant", ["mma", "hopper"])
def test_attention_on_tensor_cores(
    device: Any, variant: str, heads: Heads, dtype: str, causal: bool
) -> None:
    """A ragged batch: the bits of repeated heads of K and V, and of a sequence alone."""
    cupy_with(HOPPER_CAPABILITY if variant == "hopper" else MMA_CAPABILITY)
    NH, NKV, _ = heads
    lengths = [37, 0, 70, 1] if variant == "mma" else [37, 0, 400, 1, 129]
    qkv = normal(NH, sum(lengths), width(heads)).astype(DTYPES[dtype])

    def evaluate(rows: Array, lengths: list[int], **options: Any) -> Array:
        array = device.asarray(rows)
        seams = device.asarray(np.cumsum([0, *lengths], dtype=np.int32))
        out = device.asarray(np.full((len(rows), NH * heads[2]), np.nan, rows.dtype))
        options |= {"n_head": NH, "causal": causal, "variant": variant}
        bound = VARLEN.bind((array, seams), out, max_seqlen=max(lengths), **options)
        result: Array = bound.run().get()
        return result

    got = evaluate(qkv, lengths, n_kv_head=NKV)
    wide = expanded(qkv, heads)
    same = evaluate(wide, lengths)
    np.testing.assert_array_equal(got.view(np.uint16), same.view(np.uint16))
    assert_as_accurate_in_16_bits(got, wide, lengths, NH, causal)
    one = slice(37, 37 + lengths[2])
    alone = evaluate(qkv[one], lengths[2:3], n_kv_head=NKV)
    np.testing.assert_array_equal(alone.view(np.uint16), got[one].view(np.uint16))


@on_gpu
@pytest.mark.parametrize("heads", [(2, 2, 128), (4, 1, 128), (4, 2, 64)], ids=str)
@pytest.mark.parametrize("T", [1, 127, 128, 129, 640, 2048])
def test_attention_on_hopper(device: Any, T: int, heads: Heads) -> None:
    """Whole and partial tiles, and values that are not finite, which later rows alone see."""
    cupy_with(HOPPER_CAPABILITY)
    NH, NKV, HS = heads
    qkv = normal(T, 2, T, width(heads)).astype(np.float16)
    for causal in (True, False):
        truth = reference.attention(qkv.astype(np.float64), NH, causal, NKV)
        options: dict[str, Any] = {"n_head": NH, "n_kv_head": NKV, "causal": causal}
        got = bind_attention((device.asarray(qkv),), variant="hopper", **options).run().get()
        assert_close(got, truth, "float16")
    if T < 129:
        return
    spoiled = qkv.copy()
    spoiled[:, -1, -NKV * HS :] = np.inf
    options = {"n_head": NH, "n_kv_head": NKV, "causal": True, "variant": "hopper"}
    whole = bind_attention((device.asarray(qkv),), **options).run().get()
    got = bind_attention((device.asarray(spoiled),), **options).run().get()
    np.testing.assert_array_equal(got[:, :-1].view(np.uint16), whole[:, :-1].view(np.uint16))
    assert not np.isfinite(got[:, -1].astype(np.float32)).any()


@one_order
@pytest.mark.parametrize(("heads", "causal"), [((2, 1, 64), True), ((2, 1, 128), False)], ids=str)
def test_two_part_attention(
    device: Any, heads: Heads, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy_with()
    set_attributes(monkeypatch, MaxSharedMemoryPerBlockOptin=MOST_SHARED)
    NH, NKV, _ = heads
    qkv = normal(NH, 70, width(heads))
    grouped, wide = (
        TwoPartMatrix.from_float32(device.asarray(rows)) for rows in (qkv, expanded(qkv, heads))
    )
    got = bind_attention((grouped,), n_head=NH, causal=causal, n_kv_head=NKV).run().joined().get()
    same = bind_attention((wide,), n_head=NH, causal=causal).run().joined().get()
    np.testing.assert_array_equal(got, same)
    assert_close(got, reference.attention(qkv.astype(np.float64), NH, causal, NKV))


@one_order
def test_what_tensor_cores_refuse(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy_with()
    if replaced():
        x = device.zeros((5, 4 * 64), "float16")
        with pytest.raises(InputError, match=r"variant hopper: .*use variant mma"):
            ops.attention(x, 2, variant="hopper", n_kv_head=1)
    set_attributes(monkeypatch, MaxSharedMemoryPerBlockOptin=101376)
    if replaced():
        large = TwoPartMatrix.from_float32(device.zeros((5, 4 * 128), "float32"))
        with pytest.raises(InputError, match="head size 128: two-part matrices take 174,080 bytes"):
            ops.attention(large, 2, n_kv_head=1)


def test_nothing_spills() -> None:
    """The kernels that take most registers: four heads of Q for each load, heads of 128."""
    jobs: list[Any] = []
    for arch, gpu in (("sm_80", A100), ("sm_90", H200)):
        sizes = (4, 8192, 32, 8, 128, 2, gpu["sms"], gpu["most_shared"], arch == "sm_90")
        defines = split_geometry(*sizes).defines
        jobs.append((SPLIT, arch, (*kernels.stored_as("bfloat16"), *defines)))
        mma, _ = mma_geometry(8, 1024, 32, True, **gpu, HS=128, serves=4)
        jobs.append((MMA, arch, (*kernels.stored_as("bfloat16"), *mma.defines)))
    for causal in (True, False):
        hopper, _ = hopper_geometry(8, 1024, 32, causal, sms=H200["sms"], HS=128, serves=4)
        jobs.append((HOPPER, "sm_90a", (*kernels.stored_as("bfloat16"), *hopper.defines)))
    most: dict[str, int] = {"most_shared": MOST_SHARED, "HS": 128, "serves": 4}
    parts, _ = two_part_geometry(8, 1024, 32, False, True, **most)
    jobs.append((MMA_TWO_PART, "sm_90", parts.defines))
    assert_clean(jobs)


# --- over a kv_cache


def cached(heads: Heads, lengths: list[int], dtype: str) -> tuple[Array, Array]:
    """Keys and values; NaN where no sequence has any."""
    _, NKV, HS = heads
    k, v = normal(7, 2, len(lengths), max(lengths) + 2, NKV * HS).astype(DTYPES[dtype])
    for b, length in enumerate(lengths):
        k[b, length:] = v[b, length:] = np.nan
    return k, v


def packed(
    device: Any, qkv: Array, k: Array, v: Array, lengths: list[int], start: list[int], n_head: int
) -> Array:
    seams, starts = np.array([0, *np.cumsum(lengths)], np.int32), np.array(start, np.int32)
    inputs = tuple(map(device.asarray, (qkv, k, v, seams, starts)))
    out = device.asarray(np.full((len(qkv), qkv.shape[1] - 2 * k.shape[-1]), np.nan, qkv.dtype))
    result: Array = (
        ATTENTION_PACKED.bind(inputs, out, n_head=n_head, longest=max(lengths)).run().get()
    )
    return result


@combinations(heads=[(2, 2, 8), (3, 1, 8), (2, 1, 128)], dtype=list(DTYPES))
def test_packed_rows(
    device: Any, heads: Heads, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, and in the dtype of the cache; alone as in the batch."""
    set_attributes(monkeypatch, MaxSharedMemoryPerBlockOptin=MOST_SHARED)
    NH, lengths, start = heads[0], [3, 0, 35, 1], [0, 9, 5, 66]
    ends = [n + s for n, s in zip(lengths, start, strict=True)]
    k, v = cached(heads, ends, dtype)
    Q = NH * heads[2]
    for kind in {"float32", dtype}:
        qkv = normal(3, sum(lengths), width(heads)).astype(DTYPES[kind])
        qkv[:, Q:] = np.nan  # K and V come from the cache
        got, row = packed(device, qkv, k, v, lengths, start, NH), 0
        for b, n in enumerate(lengths):
            own, one = qkv[row : row + n], slice(b, b + 1)
            if n:
                q64, k64, v64 = (a.astype(np.float64) for a in (own[:, :Q], k[b], v[b]))
                truth = reference.attention_cached(q64, k64, v64, start[b], NH)
                assert_close(got[row : row + n], truth, kind)
                alone = packed(device, own, k[one], v[one], [n], start[one], NH)
                np.testing.assert_array_equal(alone, got[row : row + n])
            row += n


@one_order
def test_one_sequence(device: Any) -> None:
    heads = (6, 2, 8)
    q = normal(0, 5, 48)
    k, v = (a[0, :20] for a in cached(heads, [20], "bfloat16"))
    q_, k_, v_ = (device.asarray(a) for a in (q, k, v))
    got = ops.attention_cached(q_, k_, v_, 15, 6).get()
    assert_close(got, reference.attention_cached(q.astype(np.float64), k, v, 15, 6))


def split(device: Any, q: Array, k: Array, v: Array, position: Array, n_head: int) -> Array:
    row = np.arange(len(q), dtype=np.int32)
    inputs = tuple(map(device.asarray, (q, k, v, row, position)))
    out = device.asarray(np.full(q.shape, np.nan, np.float32))
    result: Array = ATTENTION_SPLIT.bind(inputs, out, n_head=n_head).run().get()
    return result


@combinations(heads=[(8, 1, 8), (4, 1, 128), (3, 1, 256)], dtype=list(DTYPES))
def test_decoding_in_a_dtype(
    device: Any, heads: Heads, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_attributes(monkeypatch, MaxSharedMemoryPerBlockOptin=MOST_SHARED)
    assert_decoding_right(device, heads, dtype)


@one_order
@pytest.mark.parametrize("heads", [*RATIOS[:3], (14, 2, 8), (4, 2, 64)], ids=str)
def test_decoding(device: Any, heads: Heads) -> None:
    assert_decoding_right(device, heads, "bfloat16")


def assert_decoding_right(device: Any, heads: Heads, dtype: str) -> None:
    """The bits of the row alone, and those with repeated heads of K and V."""
    NH, lengths = heads[0], [131, 1, 33]
    k, v = cached(heads, lengths, dtype)
    q, position = normal(1, 3, NH * heads[2]), np.array(lengths, np.int32) - 1
    got = split(device, q, k, v, position, NH)
    wide = repeated(k, heads), repeated(v, heads)
    np.testing.assert_array_equal(got, split(device, q, *wide, position, NH))
    for b in (0, 2):
        one = slice(b, b + 1)
        alone = split(device, q[one], k[one], v[one], position[one], NH)
        np.testing.assert_array_equal(alone, got[one])
        q64, k64, v64 = (a.astype(np.float64) for a in (q[one], k[b], v[b]))
        truth = reference.attention_cached(q64, k64, v64, int(position[b]), NH)
        assert_close(got[one], truth)


@one_order
def test_decoding_over_several_spans(device: Any) -> None:
    """More than 1,024 keys, in teams of unequal size."""
    heads = (5, 1, 8)
    k, v = cached(heads, [1100], "bfloat16")
    q, position = normal(1, 1, 40), np.array([1099], np.int32)
    got = split(device, q, k, v, position, 5)
    truth = reference.attention_cached(q.astype(np.float64), k[0].astype(float), v[0], 1099, 5)
    assert_close(got, truth)


@pytest.mark.parametrize(
    ("serves", "size", "limit", "queries"),
    [
        (1, 128, MOST_SHARED, 1),
        (4, 128, MOST_SHARED, 4),
        (8, 128, MOST_SHARED, 4),
        (7, 64, MOST_SHARED, 4),
        (5, 64, MOST_SHARED, 3),
        (4, 128, 65536, 2),  # three would be teams of two as well
        (4, 64, 49152, 4),
    ],
)
def test_heads_of_q_that_share_keys(serves: int, size: int, limit: int, queries: int) -> None:
    geometry = split_geometry(1, 4096, 2 * serves, 2, size, 2, H200["sms"], limit, True)
    assert dict(geometry.defines)["AS_QUERIES"] == queries
    assert geometry.grid[1] == 2 * -(-serves // queries)
    assert geometry.shared <= limit


@combinations(heads=[(4, 2, 8), (3, 1, 7), (8, 1, 128)], dtype=list(DTYPES))
def test_kv_append(device: Any, heads: Heads, dtype: str) -> None:
    _, NKV, HS = heads
    row, position = np.array([1, 0, 1, -1], np.int32), np.array([0, 4, 3, 2], np.int32)
    for kind in {"float32", dtype}:
        qkv = normal(0, 4, width(heads)).astype(DTYPES[kind])
        k, v = (device.asarray(np.zeros((2, 5, NKV * HS), DTYPES[dtype])) for _ in range(2))
        rows, *places = map(device.asarray, (qkv, row, position))
        KV_APPEND.bind((rows, k, v, *places)).run()
        want = np.zeros((2, 2, 5, NKV * HS), DTYPES[dtype])
        reference.kv_append(qkv[:3], want[0], want[1], row[:3], position[:3])
        np.testing.assert_array_equal(k.get(), want[0])
        np.testing.assert_array_equal(v.get(), want[1])


@one_order
def test_kv_append_of_two_part_rows(device: Any) -> None:
    qkv = normal(0, 3, 64)
    row, position = np.array([1, 0, 1], np.int32), np.array([0, 4, 3], np.int32)
    k, v = (device.asarray(np.zeros((2, 5, 16), np.float32)) for _ in range(2))
    matrix = TwoPartMatrix.from_float32(device.asarray(qkv))
    places = device.asarray(row), device.asarray(position)
    KV_APPEND.bind((matrix, k, v, *places)).run()
    joined = matrix.joined().get()
    np.testing.assert_array_equal(k.get()[row, position], joined[:, 32:48])
    np.testing.assert_array_equal(v.get()[row, position], joined[:, 48:])


# --- RoPE


def frequencies(D: int) -> Array:
    return np.asarray(500000.0 ** (-np.arange(0, D, 2) / D))


@combinations(heads=ROTATED, dtype=list(DTYPES), half_split=[False, True])
def test_rope_qkv(device: Any, heads: Heads, dtype: str, half_split: bool) -> None:
    """Also in place, for a batch, and at positions that float32 does not represent."""
    NH, NKV, HS = heads
    positions = np.array([0, 1, 77, 8191, 2**24 + 1, 2**31 - 1, 5], np.int32)
    qkv = normal(2, 2, 7, width(heads)).astype(DTYPES[dtype])
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


@combinations(heads=ROTATED, dtype=list(DTYPES), half_split=[False, True])
def test_rope_append(device: Any, heads: Heads, dtype: str, half_split: bool) -> None:
    """The bits of rope_qkv and kv_append, one after the other."""
    NH, NKV, HS = heads
    qkv = device.asarray(normal(2, 4, width(heads)))
    row = device.asarray(np.array([2, 0, -1, 1], np.int32))
    position = device.asarray(np.array([3, 0, 4, 6], np.int32))
    turns = device.asarray(frequencies(HS))
    k, v, k2, v2 = (device.asarray(np.zeros((3, 7, NKV * HS), DTYPES[dtype])) for _ in range(4))
    inputs = (qkv, turns, k, v, row, position)
    q = registry.bind("rope_append", inputs, n_head=NH, half_split=half_split).run().get()
    turned = ops.rope_qkv(qkv, position, turns, NH, NKV, half_split)
    ops.kv_append(turned, k2, v2, row, position)
    np.testing.assert_array_equal(q, turned.get()[:, : NH * HS])
    np.testing.assert_array_equal(k.get(), k2.get())
    np.testing.assert_array_equal(v.get(), v2.get())
    assert k.get()[1, 6].astype(np.float32).any()
    again = ops.rope_append(*inputs, NH, half_split).get()
    np.testing.assert_array_equal(again, q)


def test_rope_append_on_numpy() -> None:
    qkv = normal(0, 2, 4 * 8).astype(np.float64)
    k, v = np.zeros((2, 2, 3, 8))
    row, position = np.array([1, 0]), np.array([2, 1])
    q = reference.rope_append(qkv, frequencies(8), k, v, row, position, 2)
    turned = reference.rope_qkv(qkv, position, frequencies(8), 2, 1)
    np.testing.assert_array_equal(q, turned[:, :16])
    np.testing.assert_array_equal(k[row, position], turned[:, 16:24])
    np.testing.assert_array_equal(v[row, position], qkv[:, 24:])
    np.testing.assert_array_equal(v[row, position], turned[:, 24:])


@combinations(shape=[(1, 8), (3, 64), (64, 128)])
def test_rotations(device: Any, shape: tuple[int, int]) -> None:
    N, D = shape
    position = (np.arange(N, dtype=np.int32) * 977) % 131_072
    given = device.asarray(position), device.asarray(frequencies(D))
    got = registry.bind("rotations", given).run().get()
    assert np.abs(got - reference.rotations(position, frequencies(D))).max() <= 2.0**-23


def test_rotations_and_linear_rope_on_numpy() -> None:
    """The product and rope_append in one, from rotations of all positions."""
    x, w = normal(0, 2, 5).astype(np.float64), normal(1, 5, 4 * 8).astype(np.float64)
    row, position = np.array([1, 0]), np.array([2, 1])
    k, v, k2, v2 = np.zeros((4, 2, 3, 8))
    by = reference.rotations(position, frequencies(8))
    q = reference.linear_rope(x, w, None, by, k, v, row, position, 2)
    expected = reference.rope_append(x @ w, frequencies(8), k2, v2, row, position, 2, True)
    for ours, theirs in ((q, expected), (k, k2), (v, v2)):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    assert k.any()


# --- inputs that do not fit


@one_order
def test_what_is_refused(device: Any) -> None:
    x, i32 = device.zeros((5, 64), "float32"), device.zeros(5, "int32")
    k = device.zeros((2, 6, 16), "float32")
    seams, start = device.zeros(3, "int32"), device.zeros(2, "int32")
    q, f64 = device.zeros((5, 32), "float32"), device.zeros(4, "float64")
    turn: Any = {"n_head": 6, "n_kv_head": 1}
    for call, message in (
        (lambda: ops.attention(x, 6, n_kv_head=4), "n_kv_head: expected a divisor of n_head 6, go"),
        (lambda: ops.attention(x, 6, n_kv_head=0), "n_kv_head: expected a divisor of n_head 6, go"),
        (lambda: ops.attention(x, 5, n_kv_head=1), r"W a multiple of 5 \+ 2 · 1 heads, got \(5, 6"),
        (
            lambda: ops.attention_packed(x, k, k.copy(), seams, start, 3, 5),
            "n_head: expected a div",
        ),
        (lambda: ops.attention_packed(x, k, k.copy(), seams, start, 1, 5), "qkv: 1 heads of 32 ch"),
        (lambda: ops.attention_split(q, k, k.copy(), i32, i32, 1), "q: 1 heads of 32 channels: ex"),
        (lambda: ops.attention_cached(q, k[0], k[0].copy(), 1, 1), "q: 1 heads of 32 channels: ex"),
        (lambda: ops.kv_append(q, k, k.copy(), i32, i32), r"qkv: expected \(N, 48\), or more que"),
        (lambda: ops.rope_qkv(x, i32, f64, 4, 3), "n_kv_head: expected a divisor of n_head 4, got"),
        (lambda: ops.rope_qkv(x, i32, f64, 4, 1), r"qkv: expected \(T, 48\) or \(B, T, 48\), 6 h"),
        (lambda: ops.rope_qkv(x, i32[:4], f64, **turn), r"positions: expected shape \(5,\), got"),
        (lambda: ops.rope_qkv(x, i32, x[0], **turn), "frequencies: expected float64, got float32"),
        (
            lambda: ops.rope_qkv(x, i32, f64, **turn, half_split=x),
            "half_split: expected True or F",
        ),
        (lambda: ops.rope_append(x, f64, k, k, i32, i32, 4), "k: overlaps v: expected another arr"),
        (lambda: ops.rope_append(x, f64, k, k.copy(), i32, i32, 6), r"qkv: expected \(N, 80\), 6"),
    ):
        with pytest.raises(InputError, match=message):
            call()
