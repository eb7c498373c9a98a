"""Attention over a kv_cache, the cache, and rows' embeddings: on the CPU and on a GPU."""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import InputError, ops, reference
from gpt2block.cuda import kernels, replaced
from gpt2block.cuda.arrays import compute_capability
from gpt2block.cuda.kernels import FP8, Geometry
from gpt2block.emulator import loader
from gpt2block.ops.attention_cached import (
    ATTENTION_PACKED,
    ATTENTION_SPLIT,
    append_geometry,
    split_geometry,
    tiles_geometry,
)
from gpt2block.weights.matrix import WeightMatrix
from tests import plain
from tests.devices import every_device, on_gpu, one_order, running_on, set_attributes
from tests.plain import normal

Array = NDArray[Any]
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
H200 = 232448  # bytes of shared memory that a block can have
MODULE = sys.modules[split_geometry.__module__]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
few = settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture])


def cache(seed: int, lengths: list[int], n_ctx: int, C: int, dtype: str) -> tuple[Array, Array]:
    """Keys and values; NaN where no sequence has any."""
    k, v = normal(seed, 2, len(lengths), n_ctx, C).astype(DTYPES[dtype])
    for b, length in enumerate(lengths):
        k[b, length:] = v[b, length:] = np.nan
    return k, v


def exact(q: Array, k: Array, v: Array, start: int, n_head: int) -> Array:
    """(T, C), in float64."""
    q, k, v = (a[: start + len(q)].astype(np.float64) for a in (q, k, v))
    return np.asarray(reference.attention_cached(q, k, v, start, n_head))


def plainly(q: Array, k: Array, v: Array, start: int, n_head: int) -> Array:
    """As plain.attention, with queries that begin at a position."""
    T, C = q.shape
    n = start + T
    heads = [a.astype(np.float32).reshape(-1, n_head, C // n_head) for a in (q, k[:n], v[:n])]
    q, k, v = (head.swapaxes(0, 1) for head in heads)
    scores = plain.product(q, k.swapaxes(1, 2)) / np.float32(math.sqrt(C // n_head))
    scores = np.where(np.tri(T, n, start, dtype=bool), scores, np.float32(-np.inf))
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = plain.product(p, v) / plain.running_sum(p)
    return np.ascontiguousarray(out.swapaxes(0, 1)).reshape(T, C)


def assert_right(got: Array, q: Array, k: Array, v: Array, start: int, n_head: int) -> None:
    expected = exact(q, k, v, start, n_head), plainly(q, k, v, start, n_head)
    plain.assert_as_accurate(got, *expected)


# --- NumPy


@given(T=st.integers(1, 5), start=st.integers(0, 5), n_head=st.integers(1, 3))
def test_attention_cached_is_the_end_of_attention(T: int, start: int, n_head: int) -> None:
    qkv = np.random.default_rng(T).standard_normal((start + T, 3 * n_head * 4))
    q, k, v = np.split(qkv, 3, axis=1)
    got = reference.attention_cached(q[start:], k, v, start, n_head)
    np.testing.assert_allclose(got, reference.attention(qkv, n_head, True)[start:], rtol=1e-12)
    v[-1] = np.nan
    wrong = reference.attention_cached(q[start:], k, v, start, n_head)
    np.testing.assert_allclose(wrong[:-1], got[:-1], rtol=1e-12)
    assert np.isnan(wrong[-1]).all()


def test_attention_cached_by_hand() -> None:
    q, k, v = normal(0, 2, 6), normal(1, 5, 6), normal(2, 5, 6)
    got = exact(q, k, v, 3, 2)
    for t in range(2):
        for h in range(2):
            part = slice(3 * h, 3 * h + 3)
            weights = [
                math.exp(sum(map(float, q[t, part] * k[j, part])) / math.sqrt(3))
                for j in range(4 + t)
            ]
            expected = sum(w * v[j, part].astype(float) for j, w in enumerate(weights))
            np.testing.assert_allclose(got[t, part], expected / sum(weights), rtol=1e-5)


def test_encoder_rows_by_hand() -> None:
    ids, positions = np.array([4, 0, 4]), np.array([0, 6, 2])
    wte, wpe = normal(0, 5, 3), normal(1, 7, 3)
    got = reference.encoder_rows(ids, positions, wte, wpe)
    for n in range(3):
        for c in range(3):
            assert got[n, c] == wte[ids[n], c] + wpe[positions[n], c]
    stored = WeightMatrix.quantize(wte, "float8_e4m3fn", "NK")
    got = reference.encoder_rows(ids, positions, stored, wpe)
    np.testing.assert_array_equal(got, stored.dequantized().T[ids] + wpe[positions])


# --- split: one query a sequence


def split(
    device: Any, q: Array, k: Array, v: Array, position: Array, n_head: int, **forced: int
) -> Array:
    """Every run, of three on a GPU, gives the same bits. The cache has the sequences backwards.

    forced: constants of the kernel other than the chosen ones, as `forced_geometry` takes them.
    """
    row = np.arange(len(q), dtype=np.int32)[::-1]
    backwards = (np.ascontiguousarray(array) for array in (q, k[::-1], v[::-1], row, position))
    inputs = tuple(map(device.asarray, backwards))
    results = []
    with pytest.MonkeyPatch.context() as patch:
        if forced:
            chosen = partial(forced_geometry, forced)
            patch.setattr(MODULE, "split_geometry", chosen)
        bound = ATTENTION_SPLIT.bind(inputs, n_head=n_head)
    for _ in range(1 if replaced() else 3):
        bound.out.fill(np.nan)
        results.append(bound.run().get())
        np.testing.assert_array_equal(results[0], results[-1])
    result: Array = results[0]
    return result


def forced_geometry(forced: dict[str, int], *sizes: Any) -> Geometry:
    """forced: AS_HEADS of a block, AS_WARPS of each, AS_CLUSTER, or AS_VECTORS."""
    geometry = split_geometry(*sizes)
    sizes_of = dict(geometry.defines) | forced
    cluster, heads = forced.get("AS_CLUSTER", 1), forced.get("AS_HEADS", 1)
    warps = heads * int(sizes_of["AS_WARPS"])
    sizes_of["AS_CLUSTER"] = cluster
    grid = (cluster, geometry.grid[1] // heads, geometry.grid[2])
    return geometry._replace(grid=grid, block=(32 * warps,), defines=tuple(sizes_of.items()))


def edited_split(
    source: loader.Source, order: loader.Order, q: Array, k: Array, v: Array, position: Array
) -> Array:
    """Of three heads, by an edited kernel."""
    (B, n_ctx, C), n_head = k.shape, 3
    out = np.full((B, C), np.nan, np.float32)
    geometry = split_geometry(B, n_ctx, n_head, n_head, C // n_head, k.itemsize, 4, H200, False)
    args = [q, k, v, np.arange(B, dtype=np.int32), position, B, n_ctx, out]
    launch_edited(source, order, geometry, args, k.dtype.name)
    return out


def launch_edited(
    source: loader.Source, order: loader.Order, geometry: Geometry, args: list[Any], dtype: str
) -> None:
    options: dict[str, Any] = {"storage": dtype, "order": order}
    options |= {"shared": geometry.shared, "defines": geometry.defines}
    loader.run(source, geometry.kernel, geometry.grid, geometry.block, args, **options)


def assert_split_right(
    device: Any, positions: list[int], n_ctx: int, n_head: int, size: int, dtype: str
) -> None:
    lengths = [min(at, n_ctx - 1) + 1 for at in positions]
    k, v = cache(size, lengths, n_ctx, n_head * size, dtype)
    q, position = normal(1, len(positions), n_head * size), np.array(positions, np.int32)
    got = split(device, q, k, v, position, n_head)
    for b, length in enumerate(lengths):
        if length:
            assert_right(got[b, None], q[b, None], k[b], v[b], length - 1, n_head)
        else:
            assert np.isnan(got[b]).all(), "a query without keys was written"


@every_device
@every_dtype
def test_split_over_positions(device: Any, dtype: str) -> None:
    assert_split_right(device, [0, 1, 31, 32, 63, 127, 149, 150, -1], 150, 1, 64, dtype)


@every_device
@few
@given(
    position=st.integers(0, 140),
    heads=st.sampled_from([(3, 16), (2, 7), (5, 2), (3, 20), (2, 48)]),
    dtype=st.sampled_from(list(DTYPES)),
)
@example(position=0, heads=(2, 1), dtype="float16")
@example(position=139, heads=(2, 25), dtype="bfloat16")
def test_split_of_any_head(device: Any, position: int, heads: tuple[int, int], dtype: str) -> None:
    assert_split_right(device, [position, 5], 139, *heads, dtype)


@one_order
@pytest.mark.parametrize(("size", "dtype"), [(256, "float32"), (250, "bfloat16"), (255, "float16")])
def test_split_of_large_heads(device: Any, size: int, dtype: str) -> None:
    """Each split in several rounds."""
    assert_split_right(device, [129, 40], 131, 1, size, dtype)


@one_order
@every_dtype
def test_split_alone_and_in_a_batch(device: Any, dtype: str) -> None:
    k, v = cache(0, [140, 3, 128], 141, 48, dtype)
    q, position = normal(1, 3, 48), np.array([139, 2, 127], np.int32)
    together = split(device, q, k, v, position, 3)
    for b in (0, 2):
        one = slice(b, b + 1)
        alone = split(device, q[one], k[one], v[one], position[one], 3)
        np.testing.assert_array_equal(alone, together[one])
    # and in a longer cache
    wide_k, wide_v = (np.concatenate([a] + [np.full_like(a, np.nan)] * 7, axis=1) for a in (k, v))
    np.testing.assert_array_equal(split(device, q, wide_k, wide_v, position, 3), together)


@one_order
@pytest.mark.parametrize(("heads", "dtype"), [((4, 8), "bfloat16"), ((2, 40), "float32")])
def test_split_is_the_same_however_the_work_is_shared(
    device: Any, heads: tuple[int, int], dtype: str
) -> None:
    """Over two spans of 1,024 keys."""
    n_head, C = heads[0], heads[0] * heads[1]
    k, v = cache(0, [1100, 1024, 70], 1100, C, dtype)
    q, position = normal(1, 3, C), np.array([1099, 1023, 69], np.int32)
    right = split(device, q, k, v, position, n_head)
    for b in range(3):
        assert_right(right[b, None], q[b, None], k[b], v[b], int(position[b]), n_head)
    choices = [{"AS_WARPS": 1}, {"AS_WARPS": 16}, {"AS_WARPS": 2, "AS_HEADS": 2}]
    if not replaced() and compute_capability() >= 90:
        choices += [{"AS_WARPS": 4, "AS_CLUSTER": cluster} for cluster in (2, 5, 8)]
        choices += [{"AS_WARPS": 1, "AS_HEADS": 2, "AS_CLUSTER": 8}]
    for forced in choices:
        got = split(device, q, k, v, position, n_head, **forced)
        np.testing.assert_array_equal(got, right)


@one_order
def test_split_leaves_out_rows_and_positions_outside(device: Any) -> None:
    k, v = cache(0, [40, 40], 40, 24, "float32")
    q = normal(1, 6, 24)
    row = device.asarray(np.array([1, -1, 2, 0, 1, -7], np.int32))
    position = device.asarray(np.array([39, 5, 5, -1, 40, -1], np.int32))
    out = device.asarray(np.full((6, 24), np.nan, np.float32))
    kept = tuple(map(device.asarray, (q, k, v)))
    got = ATTENTION_SPLIT.bind((*kept, row, position), out, n_head=3).run().get()
    for m in (0, 4):  # 40 counts as the last position
        assert_right(got[m, None], q[m, None], k[1], v[1], 39, 3)
    assert np.isnan(got[[1, 2, 3, 5]]).all()


@one_order
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_split_of_values_that_are_not_finite(device: Any, value: float) -> None:
    """In V they reach the one channel they stand in; a key of -inf weighs nothing."""
    k, v = cache(0, [140], 141, 48, "float32")
    q, position = np.abs(normal(1, 1, 48)) + np.float32(0.1), np.array([139], np.int32)
    clean = split(device, q, k, v, position, 3)
    v[0, 77, 19] = value
    got = split(device, q, k, v, position, 3)
    assert not np.isfinite(got[0, 19])
    np.testing.assert_array_equal(np.delete(got, 19, 1), np.delete(clean, 19, 1))
    v[0, 77, 19] = 0
    k[0, :130, 3] = -np.inf  # the first splits, whole
    q[0, 3] = 1
    got = split(device, q, k, v, position, 3)
    rest = exact(q[:, :16], k[0, 130:140, :16], v[0, 130:140, :16], 9, 1)
    np.testing.assert_allclose(got[0, :16], rest[0], rtol=1e-5)


def test_split_loads_again_when_the_hint_was_wrong() -> None:
    """As if the position had been another one before the kernel in front ended."""
    shipped = loader.Source.shipped("attention/decode.cu")
    text = shipped.edited("load_racing(position + query)", "position[1]").text  # after the row's
    instructions = tuple(pair for pair in shipped.headers if pair[0] == "lib/sm80.cuh")
    source = loader.Source(shipped.name, text, instructions)  # without reports of early reads
    for hint in (-1, 0, 127, 128, 139):
        k, v = cache(0, [130 if hint < 139 else 140], 140, 48, "bfloat16")
        q, position = normal(1, 1, 48), np.array([129, hint], np.int32)
        with running_on("shuffled") as device:
            right = split(device, q, k, v, position[:1], 3)
        again = edited_split(source, "shuffled", q, k, v, position)
        np.testing.assert_array_equal(again, right)


def test_split_without_its_barrier_shows() -> None:
    shipped = loader.Source.shipped("attention/decode.cu")
    racing = shipped.edited("    } else {\n        __syncthreads();\n", "    } else {\n")
    k, v = cache(0, [128], 128, 48, "float32")
    q, position = normal(1, 1, 48), np.array([127], np.int32)
    with running_on("forward") as device:
        right = split(device, q, k, v, position, 3)
    racing_outs = (edited_split(racing, order, q, k, v, position) for order in loader.ORDERS)
    assert not all(np.array_equal(out, right) for out in racing_outs)


# --- tiles: packed rows


def packed(
    device: Any, qkv: Array, k: Array, v: Array, lengths: list[int], start: list[int], n_head: int
) -> Array:
    """On a GPU twice, with the same bits."""
    seams, starts = np.array([0, *np.cumsum(lengths)], np.int32), np.array(start, np.int32)
    results = []
    for _ in range(1 if replaced() else 2):
        inputs = tuple(map(device.asarray, (qkv, k, v, seams, starts)))
        out = device.asarray(np.full((len(qkv), k.shape[-1]), np.nan, qkv.dtype))
        bound = ATTENTION_PACKED.bind(inputs, out, n_head=n_head, longest=max(lengths))
        results.append(bound.run().get())
    np.testing.assert_array_equal(results[0], results[-1])
    result: Array = results[0]
    return result


def assert_packed_right(
    device: Any, lengths: list[int], start: list[int], n_head: int, size: int, dtype: str
) -> None:
    C, ends = n_head * size, [s + n for s, n in zip(start, lengths, strict=True)]
    k, v = cache(size, ends, max(ends) + 2, C, dtype)
    qkv = normal(3, sum(lengths), 3 * C)
    qkv[:, C:] = np.nan  # K and V come from the cache
    got, row = packed(device, qkv, k, v, lengths, start, n_head), 0
    for b, length in enumerate(lengths):
        if length:
            rows = slice(row, row + length)
            assert_right(got[rows], qkv[rows, :C].copy(), k[b], v[b], start[b], n_head)
        row += length


@every_device
@every_dtype
def test_packed_rows(device: Any, dtype: str) -> None:
    assert_packed_right(device, [3, 0, 70, 1], [0, 9, 5, 66], 2, 16, dtype)


@every_device
@few
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=3).filter(any),
    start=st.integers(0, 70),
    heads=st.sampled_from([(3, 16), (2, 7), (1, 64), (2, 12), (1, 80)]),
    dtype=st.sampled_from(list(DTYPES)),
)
@example(lengths=[135], start=0, heads=(1, 64), dtype="bfloat16")
@example(lengths=[5], start=64, heads=(2, 12), dtype="float16")
def test_packed_rows_of_any_length(
    device: Any, lengths: list[int], start: int, heads: tuple[int, int], dtype: str
) -> None:
    assert_packed_right(device, lengths, [start + b for b in range(len(lengths))], *heads, dtype)


@one_order
@pytest.mark.parametrize(("size", "dtype"), [(256, "float32"), (250, "float16")])
def test_packed_rows_of_large_heads(
    device: Any, size: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_attributes(monkeypatch, MaxSharedMemoryPerBlockOptin=H200)
    assert_packed_right(device, [40, 3], [3, 70], 1, size, dtype)


@one_order
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [((2, 64), "bfloat16"), ((3, 16), "float16"), ((2, 12), "bfloat16"), ((1, 7), "float16")],
)
def test_packed_rows_of_16_bits(device: Any, heads: tuple[int, int], dtype: str) -> None:
    """What the same numbers give as float32, rounded once."""
    C, lengths, start = heads[0] * heads[1], [3, 0, 70, 1], [0, 9, 5, 66]
    k, v = cache(1, [s + n for s, n in zip(start, lengths, strict=True)], 80, C, dtype)
    qkv = normal(3, sum(lengths), 3 * C).astype(DTYPES[dtype])
    qkv[:, C:] = np.nan
    got = packed(device, qkv, k, v, lengths, start, heads[0])
    wide = packed(device, qkv.astype(np.float32), k, v, lengths, start, heads[0])
    assert got.dtype == DTYPES[dtype]
    np.testing.assert_array_equal(got, wide.astype(DTYPES[dtype]))


@one_order
@every_dtype
def test_a_sequence_gets_its_bits_alone_in_a_batch_and_in_pieces(device: Any, dtype: str) -> None:
    C, lengths, start = 32, [75, 0, 40, 133], [0, 7, 90, 0]
    k, v = cache(0, [s + n for s, n in zip(start, lengths, strict=True)], 140, C, dtype)
    qkv = normal(1, sum(lengths), 3 * C)
    together = np.split(packed(device, qkv, k, v, lengths, start, 2), np.cumsum(lengths)[:-1])
    own = np.split(qkv, np.cumsum(lengths)[:-1])
    for b in (0, 2, 3):
        one = slice(b, b + 1)
        alone = packed(device, own[b], k[one], v[one], lengths[one], start[one], 2)
        np.testing.assert_array_equal(alone, together[b])
    one, pieces, at = slice(3, 4), [1, 62, 5, 65], 0
    for n in pieces:
        rows = own[3][at : at + n].copy()
        got = packed(device, rows, k[one], v[one], [n], [at], 2)
        np.testing.assert_array_equal(got, together[3][at : at + n])
        at += n


def test_queries_of_a_thread_leave_the_bits_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    k, v = cache(0, [90], 90, 64, "bfloat16")
    qkv = normal(1, 90, 3 * 64)
    geometry = tiles_geometry(1, 90, 1, 1, 64, 2, H200)
    geometry = geometry._replace(grid=(1, 2), defines=(*geometry.defines, ("AO_ROWS", 4)))
    with running_on("forward") as device:
        right = packed(device, qkv, k, v, [90], [0], 1)
        monkeypatch.setattr(MODULE, "tiles_geometry", lambda *_: geometry)
        np.testing.assert_array_equal(packed(device, qkv, k, v, [90], [0], 1), right)


def test_what_lies_outside_is_left_out() -> None:
    """Sequences beyond N, positions beyond n_ctx, a start below 0: no access out of bounds."""
    C, n_ctx = 32, 20
    k, v = cache(0, [n_ctx] * 3, n_ctx, C, "float32")
    qkv = normal(1, 30, 3 * C)
    seams, starts = np.array([-5, 12, 40, 7], np.int32), np.array([-3, 15, 2], np.int32)
    with running_on("forward") as device:
        inputs = tuple(map(device.asarray, (qkv, k, v, seams, starts)))
        out = ATTENTION_PACKED.bind(inputs, n_head=2, longest=30).run().get()
    assert_right(out[:12], qkv[:12, :C].copy(), k[0], v[0], 0, 2)
    assert_right(out[12:17], qkv[12:17, :C].copy(), k[1], v[1], 15, 2)
    assert np.isnan(out[17:]).all()


def test_widening_before_the_barrier_is_needed() -> None:
    """The pieces that others widen are there behind the block's barriers alone."""
    shipped = loader.Source.shipped("attention/cached.cu")
    k, v = cache(0, [130], 130, 32, "bfloat16")
    qkv, starts = normal(1, 130, 96), np.zeros(1, np.int32)
    with running_on("forward") as device:
        right = packed(device, qkv, k, v, [130], [0], 2)
    geometry = tiles_geometry(1, 130, 2, 2, 16, 2, H200)
    for barrier in ("  // K is there, and", "  // V is there, and"):
        edit = f"        __syncthreads();{barrier}"
        racing = shipped.edited(edit, f"        {barrier}", header="attention/online.cuh")
        different = False
        for order in loader.ORDERS:
            out = np.full((130, 32), np.nan, np.float32)
            seams = np.array([0, 130], np.int32)
            args = [qkv, k, v, seams, starts, out, 96, 130, 130, 1, 0]
            launch_edited(racing, order, geometry, args, "bfloat16")
            different |= not np.array_equal(out, right)
        assert different


# --- append


@one_order
@every_dtype
@pytest.mark.parametrize("C", [24, 14, 9])
@pytest.mark.parametrize("narrow", [False, True])
def test_append(device: Any, narrow: bool, C: int, dtype: str) -> None:
    B, n_ctx = 3, 5
    row = np.array([2, 0, 2, -1, 3, 1, 1], np.int32)
    position = np.array([4, 0, 3, 1, 1, 5, -1], np.int32)  # the last four are outside
    qkv = normal(0, 7, 3 * C).astype(DTYPES[dtype] if narrow else np.float32)
    k, v = normal(1, 2, B, n_ctx, C).astype(DTYPES[dtype])
    truth_k, truth_v = k.copy(), v.copy()
    for n in range(3):
        truth_k[row[n], position[n]] = qkv[n, C : 2 * C].astype(DTYPES[dtype])
        truth_v[row[n], position[n]] = qkv[n, 2 * C :].astype(DTYPES[dtype])
    arrays = [device.asarray(a) for a in (qkv, k, v, row, position)]
    ops.kv_append(*arrays)
    k, v = arrays[1].get(), arrays[2].get()
    np.testing.assert_array_equal(k, truth_k)
    np.testing.assert_array_equal(v, truth_v)


# --- encoder_rows


@one_order
@pytest.mark.parametrize("dtype", [*DTYPES, *FP8])
@pytest.mark.parametrize("C", [24, 10, 7])
def test_encoder_rows(device: Any, C: int, dtype: str) -> None:
    V, n_ctx = 6, 9
    ids = np.array([5, 0, 5, -1, 6, 1, 1], np.int32)
    positions = np.array([8, 0, 3, 1, 1, 9, -1], np.int32)  # the last four are outside
    wte = WeightMatrix.quantize(normal(0, V, C), dtype, "NK")
    wpe = normal(1, n_ctx, C)
    scale = None if wte.scale is None else device.asarray(wte.scale)
    moved = WeightMatrix(device.asarray(wte.data), dtype, scale, "NK")
    rows = device.asarray(ids), device.asarray(positions)
    out = ops.encoder_rows(*rows, moved, device.asarray(wpe)).get()
    assert np.isnan(out[3:]).all()
    table = wte.dequantized().T
    truth = table.astype(np.float64)[ids[:3]] + wpe[positions[:3]]
    plain.assert_as_accurate(out[:3], truth, table[ids[:3]] + wpe[positions[:3]])


# --- launches


def test_launches() -> None:
    geometry = split_geometry(1, 1024, 12, 12, 64, 2, 132, H200, True)
    assert (geometry.grid, geometry.block) == ((8, 12, 1), (128,))
    assert dict(geometry.defines)["AS_WIDTH"] == 8
    for M, cluster in ((4, 8), (8, 4), (16, 2), (64, 1), (512, 1)):
        geometry = split_geometry(M, 1024, 12, 12, 64, 2, 132, H200, True)
        assert (geometry.grid, geometry.block) == ((cluster, 12, M), (128,))
    assert split_geometry(1, 100, 12, 12, 64, 2, 132, H200, True).grid == (1, 12, 1)
    for M, threads in ((1, 384), (64, 128)):
        geometry = split_geometry(M, 1024, 12, 12, 64, 4, 108, H200, False)
        assert (geometry.grid, geometry.block) == ((1, 12, M), (threads,))
    geometry = tiles_geometry(8, 1024, 12, 12, 64, 2, H200)
    assert (geometry.grid, geometry.block) == ((96, 8), (128,))
    assert 2 * (geometry.shared + 1024) <= 233472  # two blocks on an H200's multiprocessor
    for longest in (1, 5000):  # the keys of a tile follow from the head alone
        assert tiles_geometry(1, longest, 12, 12, 64, 2, H200).defines == geometry.defines
    with pytest.raises(InputError, match=r"head size 257: .* at most 256"):
        split_geometry(1, 10, 1, 1, 257, 4, 132, H200, True)
    with pytest.raises(InputError, match="head size 256: the smallest tiles take"):
        tiles_geometry(1, 10, 1, 1, 256, 4, 49152)
    with pytest.raises(InputError, match="too many for a grid"):
        tiles_geometry(1, 2**24, 1, 1, 64, 4, H200)
    assert dict(append_geometry(5, 768, 2304, 2, 16, 16).defines)["KV_WIDTH"] == 8
    assert dict(append_geometry(5, 768, 2304, 2, 4, 4).defines)["KV_WIDTH"] == 1
    assert dict(append_geometry(5, 768, 2304, 2, 4, 4, narrow=True).defines)["KV_WIDTH"] == 2
    assert dict(append_geometry(5, 768, 2304, 2, 4, 2).defines)["KV_WIDTH"] == 1


@pytest.mark.parametrize(
    ("arch", "size", "itemsize"),
    [("sm_75", 64, 2), ("sm_90", 64, 2), ("sm_90", 250, 2), ("sm_90", 256, 4), ("sm_120", 128, 4)],
)
def test_every_head_stays_in_registers(arch: str, size: int, itemsize: int) -> None:
    pytest.importorskip("cupy", reason="compiling needs CuPy and NVRTC")
    stored = kernels.stored_as("float32" if itemsize == 4 else "bfloat16")
    tiles, split = (
        tiles_geometry(1, 100, 2, 2, size, itemsize, H200),
        split_geometry(1, 1024, 2, 2, size, itemsize, 132, H200, arch != "sm_75"),
    )
    for file, geometry in (("attention/cached.cu", tiles), ("attention/decode.cu", split)):
        log = kernels.compile_for(file, arch, (*stored, *geometry.defines)).log
        spills = [line for line in log.splitlines() if "spill" in line]
        assert len(spills) == len(kernels.signatures(file))
        assert all("0 bytes spill stores, 0 bytes spill loads" in line for line in spills)


# --- calls, and sizes for a GPU


@on_gpu
@every_dtype
def test_split_at_gpt2_sizes(device: Any, dtype: str) -> None:
    assert_split_right(device, [0, 1, 63, 127, 128, 511, 1022, 1023], 1024, 12, 64, dtype)
    assert_split_right(device, [5000, 700], 1024, 25, 64, dtype)
    assert_split_right(device, [2047, 4099, -1], 4100, 8, 128, dtype)


@on_gpu
@every_dtype
def test_split_gives_a_row_its_bits_in_any_batch(device: Any, dtype: str) -> None:
    """Ragged, with rows that have no key, and NaN after the last one."""
    lengths = [0 if m % 17 == 5 else 1 + 37 * m % 1024 for m in range(200)]
    k, v = cache(0, lengths, 1024, 768, dtype)
    q, position = normal(1, 200, 768), np.array(lengths, np.int32) - 1
    right = split(device, q, k, v, position, 12)
    assert np.isnan(right).any(axis=1).tolist() == [length == 0 for length in lengths]
    for M in (1, 2, 7, 8, 9, 64):
        part = slice(3, 3 + M)
        got = split(device, q[part], k[part], v[part], position[part], 12)
        np.testing.assert_array_equal(got, right[part])


@on_gpu
@every_dtype
def test_packed_rows_at_gpt2_sizes(device: Any, dtype: str) -> None:
    lengths, start = [1024, 0, 300, 1, 128, 64, 63, 200], [0, 1, 511, 1023, 127, 128, 1, 824]
    assert_packed_right(device, lengths, start, 12, 64, dtype)


@one_order
def test_the_ops(device: Any) -> None:
    put = device.asarray
    k, v = cache(0, [75], 80, 48, "bfloat16")
    q = normal(1, 70, 48)
    for _ in range(2):  # the second call is a warm one
        got = ops.attention_cached(put(q), put(k[0]), put(v[0]), 5, 3)
        assert_right(got.get(), q, k[0], v[0], 5, 3)
    qkv = put(np.repeat(q, 3, axis=1).reshape(70, 48, 3).swapaxes(1, 2).reshape(70, 144))
    seams, start = put([0, 70], "int32"), put([5], "int32")
    for _ in range(2):
        same = ops.attention_packed(qkv, put(k), put(v), seams, start, 3, 70)
        assert bool((same == got).all())
    one, zero, position = put(q[-1:]), put([0], "int32"), put([74], "int32")
    for _ in range(2):
        out = ops.attention_split(one, put(k), put(v), zero, position, 3)
        assert_right(out.get(), q[-1:], k[0], v[0], 74, 3)


@one_order
def test_bad_input(device: Any) -> None:
    """What test_contracts.py does not try: numbers, and sizes that depend on each other."""
    q, k = device.zeros((5, 48), "float32"), device.zeros((2, 9, 48), "float16")
    qkv, at = device.zeros((5, 144), "float32"), device.zeros(2, "int32")
    rows, seams = device.zeros(5, "int32"), device.zeros(3, "int32")
    wide, floats, flat = (device.zeros(n, "float32") for n in ((2, 9, 48), 2, 191))
    cases: list[tuple[Any, tuple[Any, ...], str]] = [
        (ops.attention_cached, (q, k[0], k[1], 5, 3), "start: expected 0 to 4 for 5 queries"),
        (ops.attention_cached, (q, k[0], k[1], 0, 5), "n_head: expected a divisor of the 48"),
        (ops.attention_packed, (q, k, k, seams, at, 3, 5), r"qkv: expected \(N, 144\)"),
        (ops.attention_packed, (qkv, k, k, seams, at, 3, 0), "longest: expected a number"),
        (ops.attention_split, (qkv, k, k, rows, rows, 4), "q: 4 heads of 36 channels: expected k"),
        # as many bytes, and as many elements
        (ops.attention_split, (q[:2], k, k, at, floats, 3), "position: expected int32, got float"),
        (ops.attention_split, (q[:2], k, k, at[None], at, 3), r"row: expected shape \(2,\), got"),
        (  # in one element
            partial(ATTENTION_SPLIT.bind, out=flat[95:191].reshape(2, 48), n_head=3),
            ((flat[:96].reshape(2, 48), k, k, at, at),),
            "out: overlaps q:",
        ),
        (
            ops.attention_split,
            (device.zeros((2, 72), "float32"), k, k, at, at, 3),
            "q: 3 heads of 24 channels: expected k of as many heads or of a divisor",
        ),
        (ops.kv_append, (qkv, k, k, rows, rows), "k: overlaps v"),
        (
            ops.kv_append,
            (q, k, device.zeros((2, 9, 48), "float16"), rows, rows),
            r"qkv: expected \(N, 144\), or more queries of k's 48",
        ),
        (
            ops.attention_packed,
            (qkv.astype("float16"), wide, wide, seams, at, 3, 5),
            "qkv: expected float32, got float16",
        ),
        (ops.encoder_rows, (rows, at, q, q), r"positions: expected shape \(5,\)"),
        (
            ops.encoder_rows,
            (rows, rows, q, device.zeros((5, 40), "float32")),
            r"wpe: expected shape \(\d+, 48\), got \(5, 40\)",
        ),
    ]
    for op, args, message in cases:
        with pytest.raises(InputError, match=message):
            op(*args)
