"""Attention's ladder: every variant, on the CPU in three orders and on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import InputError, ops, reference
from gpt2block.cuda import cupy, kernels, replaced
from gpt2block.emulator import emulated, loader
from gpt2block.ops._attention_tiles import online_geometry
from gpt2block.ops.attention import ONLINE, OPERATION, naive_geometry
from tests import plain
from tests.caches import Heads, row_width
from tests.compiling import assert_clean
from tests.devices import (
    combinations,
    every_device,
    on_gpu,
    one_order,
    running_on,
    set_attributes,
)
from tests.gpus import large_memory
from tests.plain import normal
from tests.test_attention_mma import expanded

Array = NDArray[Any]
VARIANTS = [variant.name for variant in OPERATION.variants if "float32" in variant.dtypes]
on_every_variant = pytest.mark.parametrize("variant", VARIANTS)
on_the_new_variants = pytest.mark.parametrize("variant", ["naive", "online"])  # mha: test_ops.py
both_masks = pytest.mark.parametrize("causal", [False, True])
few = settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
H200 = 232448  # bytes of shared memory that a block can have
T4 = 65536


def exact(qkv: Array, n_head: int, causal: bool) -> Array:
    return np.asarray(reference.attention(qkv.astype(np.float64), n_head, causal))


def assert_right(got: Array, qkv: Array, n_head: int, causal: bool) -> None:
    truth = exact(qkv, n_head, causal)
    plain.assert_as_accurate(got, truth, plain.attention(qkv, n_head, causal))


def evaluate(
    device: Any,
    variant: str,
    qkv: Array,
    n_head: int,
    causal: bool,
    block: int | None = None,
    n_kv_head: int = 0,
) -> Array:
    """On a GPU twice, with the same bits."""
    heads = {"n_head": n_head, "n_kv_head": n_kv_head or n_head}
    width = qkv.shape[-1] // (n_head + 2 * heads["n_kv_head"]) * n_head
    results: list[Array] = []
    for _ in range(1 if replaced() else 2):
        array = device.asarray(qkv)
        out = device.full((*qkv.shape[:-1], width), np.nan, "float32")
        options: dict[str, Any] = {**heads, "variant": variant, "block": block}
        bound = OPERATION.bind((array,), out, causal=causal, **options)
        for scores in bound.extra:
            scores.fill(np.nan)
        results.append(bound.run().get())
    np.testing.assert_array_equal(results[0], results[-1])
    return results[0]


# --- every variant


@every_device
@on_the_new_variants
@few
@given(
    B=st.integers(1, 2),
    T=st.integers(1, 80),
    heads=st.sampled_from([(3, 16), (2, 7), (1, 64)]),
    causal=st.booleans(),
)
@example(B=2, T=1, heads=(3, 16), causal=True)
@example(B=2, T=11, heads=(3, 16), causal=True)
@example(B=1, T=65, heads=(2, 7), causal=False)
def test_any_length(
    device: Any, variant: str, B: int, T: int, heads: tuple[int, int], causal: bool
) -> None:
    n_head, size = heads
    qkv = normal(T, B, T, 3 * n_head * size)
    assert_right(evaluate(device, variant, qkv, n_head, causal), qkv, n_head, causal)


@every_device
@both_masks
@pytest.mark.parametrize("T", [128, 135, 259])
def test_more_than_one_block_of_queries(device: Any, causal: bool, T: int) -> None:
    qkv = normal(T, T, 3 * 2 * 64)
    assert_right(evaluate(device, "online", qkv, 2, causal), qkv, 2, causal)


@one_order
@both_masks
@pytest.mark.parametrize("size", [80, 256])
def test_large_heads(device: Any, causal: bool, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_attributes(monkeypatch, MaxSharedMemoryPerBlockOptin=H200)
    qkv = normal(size, 70, 3 * size)
    assert_right(evaluate(device, "online", qkv, 1, causal), qkv, 1, causal)


@one_order
@on_the_new_variants
@pytest.mark.parametrize("block", [32, 64, 128, 256])
def test_block_sizes(device: Any, variant: str, block: int) -> None:
    for T, causal in ((40, False), (150, True)):
        qkv = normal(T, 1, T, 3 * 3 * 16)
        assert_right(evaluate(device, variant, qkv, 3, causal, block=block), qkv, 3, causal)


@pytest.mark.parametrize("device", ["shuffled"], indirect=True)
@pytest.mark.parametrize("size", [64, 128])
def test_tiles_for_little_shared_memory(
    device: Any, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU with 64 KB a block."""
    set_attributes(monkeypatch, MaxSharedMemoryPerBlockOptin=T4)
    geometry = online_geometry(1, 150, 1, size, NKV=1, block=None, most_shared=T4)
    assert geometry.shared <= T4
    qkv = normal(size, 150, 3 * size)
    assert_right(evaluate(device, "online", qkv, 1, True), qkv, 1, True)


@one_order
@on_the_new_variants
@pytest.mark.parametrize("T", [9, 75])
def test_what_the_mask_hides_leaves_no_trace(device: Any, variant: str, T: int) -> None:
    """NaN in K or V of a key changes the queries that see it, and no other bit."""
    qkv = normal(0, 1, T, 144)
    clean = evaluate(device, variant, qkv, 3, True)
    for part in (48, 96):  # the first channel of K, of V
        wrong = qkv.copy()
        wrong[0, 5:, part : part + 48] = np.nan
        got = evaluate(device, variant, wrong, 3, True)
        np.testing.assert_array_equal(got[0, :5], clean[0, :5])
        assert np.isnan(got[0, 5:]).all()


@combinations(
    times=1,
    heads=[(4, 2, 64), (3, 1, 8), (2, 1, 128), (8, 1, 8), (4, 2, 16), (3, 1, 16)],
    variant=VARIANTS,
)
def test_grouped_queries(
    device: Any, heads: Heads, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of the same attention with repeated heads of K and V."""
    set_attributes(monkeypatch, MaxSharedMemoryPerBlockOptin=H200)
    NH, NKV, _ = heads
    qkv = normal(NH, 2, 37, row_width(heads))
    for causal in (True, False):
        wide = expanded(qkv, heads)
        same = evaluate(device, variant, wide, NH, causal)
        got = evaluate(device, variant, qkv, NH, causal, n_kv_head=NKV)
        np.testing.assert_array_equal(got, same)
        assert_right(got, wide, NH, causal)


@one_order
@on_every_variant
@both_masks
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(device: Any, variant: str, causal: bool, value: float) -> None:
    """In V they reach the one channel they stand in, of the queries that see them."""
    T = 70
    qkv = normal(0, T, 96)
    clean = evaluate(device, variant, qkv, 2, causal)
    qkv[40, 64 + 16 + 3] = value
    got = evaluate(device, variant, qkv, 2, causal)
    reached = np.zeros((T, 32), bool)
    reached[40 if causal else 0 :, 16 + 3] = True
    assert not np.isfinite(got[reached]).any()
    np.testing.assert_array_equal(got[~reached], clean[~reached])
    np.testing.assert_array_equal(np.isnan(got[reached]), np.isnan(np.float32(value)))


@one_order
@on_the_new_variants
def test_a_score_that_is_not_finite(device: Any, variant: str) -> None:
    """NaN in Q is its query's alone; a key with a score of -inf weighs nothing."""
    qkv = np.abs(normal(0, 70, 48))
    qkv[3, 2] = np.nan
    got = evaluate(device, variant, qkv, 1, True)
    assert np.isnan(got[3]).all()
    assert np.isfinite(np.delete(got, 3, axis=0)).all()
    qkv = np.abs(normal(0, 70, 48)) + np.float32(0.1)
    qkv[:64, 16 + 2] = -np.inf  # all of the first tile's keys
    got = evaluate(device, variant, qkv, 1, True)
    assert np.isnan(got[:64]).all()  # they see nothing else
    assert_right(got[64:], qkv[64:], 1, True)


@one_order
@on_the_new_variants
@both_masks
def test_large_scores(device: Any, variant: str, causal: bool) -> None:
    """Scores in the thousands: exp of anything but score - max is inf."""
    qkv = 30 * normal(0, 1, 70, 144)
    assert_right(evaluate(device, variant, qkv, 3, causal), qkv, 3, causal)


@one_order
@both_masks
def test_a_maximum_that_grows_from_tile_to_tile(device: Any, causal: bool) -> None:
    qkv = normal(0, 200, 48)
    qkv[:, 16:32] *= np.linspace(0.1, 40, 200, dtype=np.float32)[:, None]
    assert_right(evaluate(device, "online", qkv, 1, causal), qkv, 1, causal)
    assert_right(evaluate(device, "online", qkv[::-1].copy(), 1, causal), qkv[::-1], 1, causal)


@pytest.mark.parametrize("n", range(4))
def test_a_missing_barrier_shows(n: int) -> None:
    """Two of the block, two of the warp: without any of them some thread order gives other bits."""
    shipped = loader.Source.shipped(OPERATION.variant("online").file)
    header = "attention/online.cuh"
    parts = [(kernels.SOURCE_DIR / header).read_text("ascii")]
    for barrier in ("__syncthreads();", "__syncwarp();"):
        parts = [piece for part in parts for piece in part.split(barrier)]
    assert len(parts) == 5
    names = ["__syncthreads();", "__syncthreads();", "__syncwarp();", "__syncwarp();"]
    names[n] = ""
    text = "".join(a + b for a, b in zip(parts, [*names, ""], strict=True))
    racing = loader.Source(shipped.name, shipped.text, ((header, text),))
    qkv = normal(0, 150, 48)
    with running_on("forward") as device:
        right = evaluate(device, "online", qkv, 1, False)
    geometry = online_geometry(1, 150, 1, 16, NKV=1, block=None, most_shared=H200)
    options: dict[str, Any] = {"shared": geometry.shared, "defines": geometry.defines}
    results = []
    for order in loader.ORDERS:
        results.append(np.full((150, 16), np.nan, np.float32))
        args, launch = [qkv, results[-1], 150, 0], (geometry.kernel, geometry.grid, geometry.block)
        loader.run(racing, *launch, args, **options, order=order)
    assert any(not np.array_equal(result, right) for result in results)


# --- launches


def test_tiles_fit_the_shared_memory() -> None:
    geometry = online_geometry(8, 1024, 12, 64, NKV=12, block=None, most_shared=H200)
    assert (geometry.grid, geometry.block) == ((96, 8), (128,))
    assert 2 * (geometry.shared + 1024) <= 233472  # two blocks on an H200's multiprocessor
    for size in (4, 64, 128, 256):
        for limit in (99 * 1024, H200):
            geometry = online_geometry(1, 4096, 1, size, NKV=1, block=None, most_shared=limit)
            assert geometry.shared <= limit
    short = online_geometry(1, 5, 1, 64, NKV=1, block=None, most_shared=H200)
    assert short.block == (32,)
    with pytest.raises(InputError, match=r"head size 256: the smallest tiles .* use variant mha"):
        online_geometry(1, 4096, 1, 256, NKV=1, block=None, most_shared=T4)
    with pytest.raises(InputError, match=r"take 85,760 .* 65,536 for them: use a smaller block"):
        online_geometry(1, 4096, 1, 256, NKV=1, block=64, most_shared=T4)


def test_what_a_grid_cannot_take_is_refused() -> None:
    online = partial(online_geometry, block=None, most_shared=H200)
    with pytest.raises(
        InputError, match=r"make a grid of 12,096,000,000 blocks, .* variant online"
    ):
        naive_geometry(1000, 64000, 3, 4, 1024, 3)
    assert online(2**25, 1, 12, 64, NKV=12).grid == (12 * 2**25, 1)
    assert online(1, 8_388_480, 1, 64, NKV=1).grid == (1, 65535)
    with pytest.raises(InputError, match="T 8,388,481: variant online takes at most 8,388,480"):
        online(1, 8_388_481, 1, 64, NKV=1)
    options: dict[str, Any] = {"n_head": 1, "causal": True}
    with emulated():
        qkv = cupy.empty((5, 3 * 257), "float32")
        with pytest.raises(InputError, match="variant online: head size 257: expected at most 256"):
            OPERATION.bind((qkv,), **options, variant="online")
        assert len(OPERATION.bind((qkv,), **options, variant="naive").launches) == 3


def test_every_head_stays_in_registers() -> None:
    jobs = []
    for arch, size in (("sm_75", 33), ("sm_90", 80), ("sm_90", 128), ("sm_90", 256)):
        geometry = online_geometry(8, 1024, 3, size, NKV=3, block=None, most_shared=H200)
        jobs.append((ONLINE, arch, geometry.defines))
    assert_clean(jobs)


# --- calls, and sizes for a GPU


@on_gpu
@both_masks
@on_every_variant
@pytest.mark.parametrize("shape", [(2, 1024, 12, 64), (1, 1023, 3, 80), (1, 777, 2, 256)])
def test_gpt2_sizes(
    device: Any, shape: tuple[int, int, int, int], variant: str, causal: bool
) -> None:
    B, T, NH, HS = shape
    qkv = normal(T, B, T, 3 * NH * HS)
    got = evaluate(device, variant, qkv, NH, causal)
    expected = plain.attention(device.asarray(qkv), NH, causal, device).get()
    plain.assert_as_accurate(got, exact(qkv, NH, causal), expected)


@on_gpu
@on_the_new_variants
def test_every_block_size(device: Any, variant: str) -> None:
    qkv = normal(0, 1, 300, 3 * 2 * 64)
    for block in OPERATION.variant(variant).blocks:
        assert_right(evaluate(device, variant, qkv, 2, True, block=block), qkv, 2, True)


@on_gpu
@both_masks
@pytest.mark.parametrize("size", [20, 64])
def test_a_long_sequence(device: Any, size: int, causal: bool) -> None:
    """Some of 65,541 queries; the scores of all would take 17 GB."""
    T = 65541
    qkv = normal(T, T, 3 * size)
    got = evaluate(device, "online", qkv, 1, causal)
    assert np.isfinite(got).all()
    rows = np.array([0, 1, 127, 128, 30000, T - 6, T - 5, T - 1])
    mask = np.where(np.arange(T) <= (rows[:, None] if causal else T), 0, -np.inf)
    q, k, v = qkv[rows, :size], qkv[:, size : 2 * size], qkv[:, 2 * size :]
    wide = [a.astype(np.float64) for a in (q, k, v)]
    truth = reference.softmax(wide[0] @ wide[1].T / np.sqrt(size) + mask) @ wide[2]
    scores = plain.product(q, k.T) / np.float32(np.sqrt(size)) + mask.astype(np.float32)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    expected = plain.product(weights, v) / plain.running_sum(weights)
    plain.assert_as_accurate(got[rows], truth, expected)


@on_gpu
def test_more_sequences_than_a_grid_has_rows(device: Any) -> None:
    qkv = device.asarray(normal(0, 70000, 2, 12))
    for variant in ("naive", "online"):
        got = ops.attention(qkv, 1, True, variant).get()
        assert_right(got, qkv.get(), 1, True)


@on_gpu
def test_offsets_beyond_32_bits(device: Any) -> None:
    """2.4 billion values of qkv: the last sequence's result is that of the sequence alone."""
    B, T, width = 1025, 1024, 2304
    with large_memory(4 * B * T * width * 4 // 3):
        qkv = device.full((B, T, width), device.nan, "float32")
        qkv[-1] = device.asarray(normal(0, T, width))
        got = ops.attention(qkv, 12, True, "online")[-1]
        assert bool((got == ops.attention(qkv[-1], 12, True, "online")).all())
        del qkv, got


@one_order
def test_the_op(device: Any) -> None:
    x = normal(0, 2, 30, 144)
    qkv = device.asarray(x)
    moved = device.asarray(np.append(np.float32(0), x))[1:].reshape(x.shape)
    assert moved.data.ptr % 16
    strided = device.asarray(np.repeat(x, 2, axis=1))[:, ::2]
    for variant in VARIANTS:
        for causal in (False, True):
            got = ops.attention(qkv, 3, causal, variant)
            assert_right(got.get(), x, 3, causal)
            for other in (moved, strided):
                assert bool((ops.attention(other, 3, causal, variant) == got).all())
            assert bool((ops.attention(qkv[1], 3, causal, variant) == got[1]).all())
    np.testing.assert_array_equal(qkv.get(), x)


@on_gpu
def test_bad_input(device: Any) -> None:
    x = device.zeros((5, 48), "float32")
    long = device.zeros((400_000, 12), "float32")  # 640 GB of scores
    wide = device.zeros((5, 900), "float32")
    for args, options, message in (
        ((x, 0), {}, "n_head: expected a number of heads, got 0"),
        ((x, 2), {"variant": "flash"}, "unknown variant 'flash': expected one of mha, naive, onl"),
        ((x, 2), {"variant": "online", "block": 48}, "block size 48: expected one of 32, 64, 128"),
        ((x, 2), {"variant": "mha", "block": 128}, "block size 128: expected one of 256"),
        ((wide, 1), {"variant": "online"}, r"head size 300: .* at most 256 \(naive takes any\)"),
        ((long, 1), {"variant": "naive"}, "its scores take 640.0 GB, .* use variant online"),
    ):
        with pytest.raises(InputError, match=message):
            ops.attention(*args, **options)
    assert ops.attention(wide, 1, variant="naive").shape == (5, 300)
    flat = device.zeros(5 * 16 + 1, "float32")
    with pytest.raises(InputError, match="out: expected data aligned to 16 bytes"):
        OPERATION.bind((x,), flat[1:].reshape(5, 16), n_head=2, causal=False, variant="online")
    with pytest.raises(InputError, match=r"out: expected shape \(5, 16\)"):
        OPERATION.bind((x,), x, n_head=2, causal=False, variant="online")
