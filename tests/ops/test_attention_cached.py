"""Attention over a kv_cache of any dtype: division of the work, and functions that fill the cache.

Tests run on the CPU emulator and on a GPU. tests/ops/test_attention_laws.py tests the requirements
of every attention kernel.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import ops, reference
from gpt2block.cuda import replaced
from gpt2block.cuda.arrays import compute_capability
from gpt2block.cuda.kernels import Geometry
from gpt2block.emulator import Order
from gpt2block.models.weights.hi_lo import HiLoMatrix
from gpt2block.ops.attention_cached import (
    ATTENTION_PACKED,
    ATTENTION_SPLIT,
    KV_APPEND,
    SPLIT,
    split_geometry,
    tiles_geometry,
)
from tests import gpus
from tests.attentions import KERNELS
from tests.caches import (
    DTYPES,
    FORMATS,
    KINDS,
    Cache,
    Heads,
    assert_right,
    random_cache,
    row_width,
    stored,
    widened,
)
from tests.devices import (
    assert_barriers_show,
    assert_same_bits,
    combinations,
    edited,
    one_order,
    running_on,
    set_attributes,
    slow,
    with_source,
)
from tests.plain import normal

Array = NDArray[Any]
H200 = gpus.H200["max_shared"]
MODULE = sys.modules[split_geometry.__module__]


@pytest.fixture
def device(device: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    set_attributes(monkeypatch, MaxSharedMemoryPerBlockOptin=H200)
    return device


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


# --- split: one query per sequence


def split(device: Any, q: Array, held: Cache, position: Array, **forced: int) -> Array:
    """Run variant `split` with the cache in reverse order of sequences.

    A GPU runs it three times and must give the same bits. forced: constants of the kernel for
    `forced_geometry` instead of the chosen ones.
    """
    row = np.arange(len(q), dtype=np.int32)[::-1]
    backwards = held.of(slice(None, None, -1))
    arrays = q, backwards.k, backwards.v, np.ascontiguousarray(row), position
    inputs, results = tuple(map(device.asarray, arrays)), []
    with pytest.MonkeyPatch.context() as patch:
        if forced:
            chosen = partial(forced_geometry, forced)
            patch.setattr(MODULE, "split_geometry", chosen)
        options: Any = {"n_head": held.heads[0], "kv_dtype": held.kv_dtype}
        bound = ATTENTION_SPLIT.bind(inputs, **options)
    for _ in range(1 if replaced() else 3):
        bound.out.fill(np.nan)
        results.append(bound.run().get())
        np.testing.assert_array_equal(results[0], results[-1])
    result: Array = results[0]
    return result


def forced_geometry(forced: dict[str, int], *sizes: Any) -> Geometry:
    """Return the geometry of `split` with other constants.

    forced: AS_HEADS (heads per block), AS_WARPS (warps per head), AS_CLUSTER, or AS_VECTORS.
    """
    geometry = split_geometry(*sizes)
    sizes_of = dict(geometry.defines) | forced
    cluster, heads = forced.get("AS_CLUSTER", 1), forced.get("AS_HEADS", 1)
    warps = heads * int(sizes_of["AS_WARPS"])
    sizes_of["AS_CLUSTER"] = cluster
    grid = (cluster, geometry.grid[1] // heads, geometry.grid[2])
    return geometry._replace(grid=grid, block=(32 * warps,), defines=tuple(sizes_of.items()))


def decoding(
    heads: Heads, positions: list[int], n_ctx: int, kind: str
) -> tuple[Array, Cache, Array]:
    """Return queries, a cache with the keys that they see, and their positions."""
    held = random_cache(heads, [min(at, n_ctx - 1) + 1 for at in positions], n_ctx, kind)
    q = normal(1, len(positions), heads[0] * heads[2])
    return q, held, np.array(positions, np.int32)


@combinations(times=1, along="heads", heads=[(8, 1, 8), (2, 1, 512)], kind=KINDS)
def test_split_in_a_longer_cache(device: Any, heads: Heads, kind: str) -> None:
    q, held, position = decoding(heads, [139, 2, 127], 141, kind)
    longer = split(device, q, held.longer(7 * 141), position)
    np.testing.assert_array_equal(longer, split(device, q, held, position))


@one_order
@pytest.mark.parametrize(
    ("heads", "kind"),
    [
        slow((4, 4, 8), "bfloat16"),
        slow((2, 2, 40), "float32"),
        ((5, 1, 8), "bfloat16"),  # teams of unequal size
        slow((2, 2, 16), "float8_e5m2"),
        slow((4, 1, 16), "float8_e4m3fn"),
        *(
            pytest.param(heads, kind, marks=pytest.mark.gpu)
            for heads, kind in product(((12, 12, 64), (16, 4, 128)), FORMATS)
        ),
    ],
    ids=str,
)
def test_split_is_the_same_however_the_work_is_shared(device: Any, heads: Heads, kind: str) -> None:
    """The keys fill two spans of 1,024; the largest scores are in the second span."""
    q, held, position = decoding(heads, [1099, 1023, 69], 1100, kind)
    held.k[0, 1024:] = stored(4 * normal(2, 76, heads[1] * heads[2]), kind)
    right = split(device, q, held, position)
    for b in range(3):
        assert_right(right[b, None], q[b, None], held, b, int(position[b]))
    choices = [{"AS_WARPS": 1}, {"AS_WARPS": 8 if held.kv_dtype else 16}]
    if kind == "bfloat16" and heads[0] == heads[1]:
        choices += [{"AS_WARPS": 2, "AS_HEADS": 2}]
    if not replaced() and compute_capability() >= 90:
        choices += [{"AS_WARPS": 4, "AS_CLUSTER": cluster} for cluster in (2, 5, 8)]
        if heads[0] == heads[1]:
            choices += [{"AS_WARPS": 1, "AS_HEADS": 2, "AS_CLUSTER": 8}]
    for forced in choices:
        np.testing.assert_array_equal(split(device, q, held, position, **forced), right)


@combinations(times=1, along="heads", kind=KINDS, heads=[(3, 3, 8), (1, 1, 64)])
def test_split_leaves_out_rows_and_positions_outside(device: Any, kind: str, heads: Heads) -> None:
    held = random_cache(heads, [40, 40], 40, kind)
    q = normal(1, 6, heads[0] * heads[2])
    row = device.asarray(np.array([1, -1, 2, 0, 1, -7], np.int32))
    position = device.asarray(np.array([39, 5, 5, -1, 40, -1], np.int32))
    out = device.asarray(np.full(q.shape, np.nan, np.float32))
    kept = tuple(map(device.asarray, (q, held.k, held.v)))
    options: Any = {"n_head": heads[0], "kv_dtype": held.kv_dtype}
    got = ATTENTION_SPLIT.bind((*kept, row, position), out, **options).run().get()
    for m in (0, 4):  # position 40 is limited to the last position, 39
        assert_right(got[m, None], q[m, None], held, 1, 39)
    assert np.isnan(got[[1, 2, 3, 5]]).all()


@combinations(times=1, HS=[16, 3], kv_dtype=list(FORMATS))
def test_every_code_is_read_as_its_number(device: Any, HS: int, kv_dtype: str) -> None:
    """With one key, attention returns its value in each channel, even infinity and NaN."""
    NH = -(-256 // HS)
    C = NH * HS
    codes = np.resize(np.arange(256, dtype=np.uint8), (1, 1, C))
    k, v = device.asarray(np.zeros_like(codes)), device.asarray(codes)
    q, zero = device.asarray(normal(0, 1, C)), device.asarray(np.zeros(1, np.int32))
    expected = widened(codes, kv_dtype)[0]
    one = ops.attention_split(q, k, v, zero, zero, NH, kv_dtype).get()
    np.testing.assert_array_equal(one, expected)
    tiles = ops.attention_cached(q, k[0], v[0], 0, NH, kv_dtype).get()
    np.testing.assert_array_equal(tiles, expected)
    code_of_key = np.zeros((1, 2, C), np.uint8)
    code_of_key[:, 1] = codes[:, 0]  # a key of NaN or infinity makes its own head NaN
    two = device.asarray(np.repeat(codes, 2, axis=1) & 0x30)
    position = device.asarray(np.ones(1, np.int32))
    got = ops.attention_split(q, device.asarray(code_of_key), two, zero, position, NH, kv_dtype)
    own = np.isfinite(widened(codes, kv_dtype)).reshape(NH, HS).all(axis=1)
    finite = np.isfinite(got.get()).reshape(NH, HS).all(axis=1)
    assert finite[own].all()
    if kv_dtype == "float8_e4m3fn":
        assert not finite[~own].any()


def test_split_loads_again_when_the_hint_was_wrong() -> None:
    """The hint is the position that `split` reads early; the previous kernel may change it."""
    text = edited(SPLIT, "load_racing(position + query - mine)", "position[1]")  # not the row's
    for hint in (-1, 0, 127, 128, 139):
        held = random_cache((3, 3, 16), [130 if hint < 139 else 140], 140, "bfloat16")
        q, position = normal(1, 1, 48), np.array([129, hint], np.int32)
        with running_on("shuffled") as device:
            right = split(device, q, held, position[:1])
            with with_source(SPLIT, text):
                again = split(device, q, held, device.asarray(position)[:1])
        np.testing.assert_array_equal(again, right)


@pytest.mark.slow
def test_split_without_its_barrier_shows() -> None:
    barrier = "    } else {\n        __syncthreads();\n"
    q, held, position = decoding((3, 3, 16), [127], 128, "float32")

    def run(order: Order) -> None:
        with running_on(order) as device:
            split(device, q, held, position)

    assert_barriers_show("lib/attention/split.cuh", run, 1, barrier)


# --- tiles: packed rows


@combinations(
    times=1,
    along="dtype",
    heads=[(3, 1, 8), (2, 2, 12), (2, 1, 128), (3, 3, 7), (1, 1, 256), (2, 1, 512)],
    kind=["float8_e5m2", "bfloat16", "float8_e4m3fn", "float16"],
    dtype=["float16", "bfloat16"],
)
def test_rows_of_16_bits_give_those_of_float32_rounded_once(
    device: Any, heads: Heads, kind: str, dtype: str
) -> None:
    """Rows have the dtype of the cache, or either 16-bit dtype if the cache is FP8."""
    narrow = dtype if kind in FORMATS else kind
    lengths, starts = [3, 0, 42, 67], [0, 0, 5, 66]
    qkv = normal(3, sum(lengths), row_width(heads)).astype(DTYPES[narrow])
    kernel = KERNELS[f"tiles-{kind}"]
    wide = kernel(device, qkv.astype(np.float32), lengths, heads, True, starts)
    got = kernel(device, qkv, lengths, heads, True, starts)
    assert_same_bits(got, wide.astype(DTYPES[narrow]))


@pytest.mark.slow
def test_queries_of_a_thread_leave_the_bits_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, heads = KERNELS["tiles-bfloat16"], (1, 1, 64)
    qkv = kernel.made(90, heads)
    geometry = tiles_geometry(1, 90, (1, 1, 64), 2, H200)
    geometry = geometry._replace(grid=(1, 2), defines=(*geometry.defines, ("AO_ROWS", 4)))
    with running_on("forward") as device:
        right = kernel(device, qkv, [90], heads, True)
        monkeypatch.setattr(MODULE, "tiles_geometry", lambda *_: geometry)
        assert_same_bits(kernel(device, qkv, [90], heads, True), right)


def test_what_lies_outside_is_left_out() -> None:
    """Sequences beyond N, positions beyond n_ctx, a start below 0: no access out of bounds."""
    C, n_ctx = 32, 20
    held = random_cache((2, 2, 16), [n_ctx] * 3, n_ctx, "float32")
    qkv = normal(1, 30, 3 * C)
    seams, starts = np.array([-5, 12, 40, 7], np.int32), np.array([-3, 15, 2], np.int32)
    with running_on("forward") as device:
        inputs = tuple(map(device.asarray, (qkv, held.k, held.v, seams, starts)))
        out = ATTENTION_PACKED.bind(inputs, n_head=2, longest=30).run().get()
    assert_right(out[:12], qkv[:12, :C].copy(), held, 0, 0)
    assert_right(out[12:17], qkv[12:17, :C].copy(), held, 1, 15)
    assert np.isnan(out[17:]).all()


def test_what_lies_outside_is_left_out_on_tensor_cores() -> None:
    """Rows beyond N, positions beyond n_ctx, a start below 0: no access out of bounds."""
    n_ctx, C = 20, 64
    k, v = (normal(n, 3, n_ctx, C).astype(np.float16) for n in (1, 2))
    qkv = normal(3, 30, 3 * C).astype(np.float16)
    seams, starts = np.array([0, 12, 25, 70], np.int32), np.array([-3, 15, 2], np.int32)
    with running_on("forward") as device:
        inputs = tuple(map(device.asarray, (qkv, k, v, seams, starts)))
        out = device.asarray(np.full((30, C), 7, np.float16))
        ATTENTION_PACKED.bind(inputs, out, n_head=1, longest=45, variant="mma").run()
        got = out.get().astype(np.float32)
    assert np.isfinite(got).all()
    assert (got[17:25] == 7).all()  # positions 20 and on of the second sequence
    assert (got[:17] != 7).any(axis=1).all()
    assert (got[25:] != 7).any(axis=1).all()


@pytest.mark.slow
def test_barriers_after_widening_are_needed() -> None:
    """Pieces of K and V that other threads widen are complete only after the block's barriers."""
    kernel, heads = KERNELS["tiles-bfloat16"], (1, 1, 264)  # large heads reach all barriers
    qkv = kernel.made(130, heads)

    def run(order: Order) -> None:
        with running_on(order) as device:
            kernel(device, qkv, [130], heads, True)

    assert_barriers_show("lib/attention/online.cuh", run, 4)


# --- append


@combinations(
    times=1, heads=[(1, 1, 24), (2, 2, 7), (1, 1, 9), (4, 2, 8), (8, 1, 128)], dtype=list(DTYPES)
)
def test_append(device: Any, heads: Heads, dtype: str) -> None:
    """Rows are float32 or have the cache's dtype; the last four positions are out of range."""
    row = np.array([2, 0, 2, -1, 3, 1, 1], np.int32)
    position = np.array([4, 0, 3, 1, 1, 5, -1], np.int32)
    for kind in {"float32", dtype}:
        qkv = normal(0, 7, row_width(heads)).astype(DTYPES[kind])
        k, v = normal(1, 2, 3, 5, heads[1] * heads[2]).astype(DTYPES[dtype])
        arrays = [device.asarray(a) for a in (qkv, k, v, row, position)]
        ops.kv_append(*arrays)
        reference.kv_append(qkv[:3], k, v, row[:3], position[:3])
        np.testing.assert_array_equal(arrays[1].get(), k)
        np.testing.assert_array_equal(arrays[2].get(), v)


@one_order
def test_append_of_hi_lo_rows(device: Any) -> None:
    row, position = np.array([1, 0, 1], np.int32), np.array([0, 4, 3], np.int32)
    k, v = (device.asarray(np.zeros((2, 5, 16), np.float32)) for _ in range(2))
    matrix = HiLoMatrix.from_float32(device.asarray(normal(0, 3, 64)))
    places = device.asarray(row), device.asarray(position)
    KV_APPEND.bind((matrix, k, v, *places)).run()
    joined = matrix.joined().get()
    np.testing.assert_array_equal(k.get()[row, position], joined[:, 32:48])
    np.testing.assert_array_equal(v.get()[row, position], joined[:, 48:])


# --- launches


# --- calls, and sizes for a GPU


@one_order
@pytest.mark.parametrize("heads", [(6, 2, 8)], ids=str)
def test_the_ops(device: Any, heads: Heads) -> None:
    put, NH = device.asarray, heads[0]
    held = random_cache(heads, [75], 80, "bfloat16")
    k, v, q = held.k, held.v, normal(1, 70, 48)
    for _ in range(2):  # the second call takes the path of repeated calls
        got = ops.attention_cached(put(q), put(k[0]), put(v[0]), 5, NH)
        assert_right(got.get(), q, held, 0, 5)
    qkv = put(np.concatenate([q, np.full((70, 2 * k.shape[2]), np.nan, np.float32)], axis=1))
    seams, start = put([0, 70], "int32"), put([5], "int32")
    for _ in range(2):
        same = ops.attention_packed(qkv, put(k), put(v), seams, start, NH, 70)
        assert bool((same == got).all())
    one, zero, position = put(q[-1:]), put([0], "int32"), put([74], "int32")
    for _ in range(2):
        out = ops.attention_split(one, put(k), put(v), zero, position, NH)
        assert_right(out.get(), q[-1:], held, 0, 74)
