"""Attention on tensor cores: tiles, copies, grids, and storing K and V in a cache.

mma.cu runs on a GPU and on the CPU, where gpt2block/emulator/mma_ptx.h imitates the PTX
instructions; wgmma.cu runs on a GPU only. tests/ops/test_attention_laws.py has the requirements of
every attention kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import ops
from gpt2block.emulator import Order
from gpt2block.ops.attention import MMA, VARLEN
from gpt2block.ops.engines.attention_tiles import (
    MMA_TILES,
    AttentionSizes,
    AttentionTile,
    alternate_geometry,
    alternates,
)
from tests import plain
from tests.attentions import (
    DTYPES,
    KERNELS,
    MODULE,
    PAIR,
    SMALL,
    WAYS,
    Kernel,
    assert_right,
    both_dtypes,
    both_masks,
    mma,
    parts,
)
from tests.caches import Heads, row_width
from tests.devices import (
    IN_TESTS,
    assert_same_bits,
    checked,
    edited,
    finding,
    running_on,
    slow,
    with_source,
)
from tests.gpus import H200, HOPPER_CAPABILITY, cupy_with

Array = NDArray[Any]
ONE: Heads = (1, 1, 64)
TWO_STAGES = AttentionTile(2, 1, 6, 1, 1)  # 6 blocks per SM leave no room for a third stage


def stored(causal: bool) -> str:
    """Return a dtype for each mask, if any dtype is enough: fewer programs to compile."""
    return "bfloat16" if causal else "float16"


def made(dtype: str, rows: int, n_head: int) -> Array:
    array: Array = plain.normal(rows, rows, 3 * 64 * n_head).astype(DTYPES[dtype])
    return array


def on_cpu(
    qkv: Array,
    lengths: Sequence[int],
    causal: bool,
    tile: AttentionTile = SMALL,
    order: Order = "shuffled",
) -> Array:
    with running_on(order) as device:
        kernel = Kernel(partial(mma, tile), qkv.dtype)
        return kernel(device, qkv, lengths, (qkv.shape[1] // 192, qkv.shape[1] // 192, 64), causal)


# --- on the CPU ----------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [slow(False), True])
def test_tiles_give_the_same_bits(causal: bool) -> None:
    """Tiles have one warp, two, or the sizes for GPUs.

    There are several blocks of queries, and more tiles of keys than stages of the ring.
    """
    lengths = [1, 15, 16, 17, 65, 130]
    qkv = made(stored(causal), sum(lengths), 2)
    right = on_cpu(qkv, lengths, causal)
    assert_same_bits(on_cpu(qkv, lengths, causal, PAIR), right)
    qkv = made(stored(causal), 200, 1)
    got = on_cpu(qkv, [200], causal, MMA_TILES[64][not causal])
    assert_right(got, qkv, [200], ONE, causal)
    assert_same_bits(on_cpu(qkv, [200], causal, PAIR), got)


@pytest.mark.parametrize(("tile", "causal"), [(TWO_STAGES, True), slow(PAIR, False)])
def test_the_ring_waits_for_what_it_needs(tile: AttentionTile, causal: bool) -> None:
    """Copies arrive as late as possible, in a ring of two or three stages."""
    T = 200
    qkv = made(stored(causal), T, 1)
    with checked():
        results = [on_cpu(qkv, [T], causal, tile, order) for order in IN_TESTS]
    for result in results[1:]:
        assert_same_bits(result, results[0])
    assert_right(results[0], qkv, [T], ONE, causal)


def test_small_weights_count_in_fp16() -> None:
    """Many keys with small softmax weights (about 2^-22 of the largest) must not become zero."""
    T = 192
    qkv = np.zeros((T, 192), np.float16)
    qkv[:, 0] = 8
    qkv[0, 64] = 22 * np.log(2)  # the first key's score; all others have 0
    qkv[:, 128] = 1
    qkv[0, 128] = 0
    got = on_cpu(qkv, [T], False)[:, 0].astype(np.float64)
    weight = (T - 1) * np.exp(-float(qkv[0, 64]))
    np.testing.assert_allclose(got, weight / (1 + weight), rtol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        (
            "        wait_for_groups<ATT_STAGES - 2>();\n        __syncthreads();",
            "__syncthreads();",
            "",  # copies arrive late
        ),
        ("        __syncthreads();  // the tile", "  // the tile", "race"),
        ("in_part && any_not_finite(b)", "in_part && lane > 31", ""),
    ],
)
def test_what_is_left_out_shows(old: str, new: str, kind: str) -> None:
    """Omitting a wait, a barrier, or the handling of values that are not finite has an effect."""
    qkv = made(stored(True), 150, 1)
    qkv[149, 128:] = np.inf
    right = on_cpu(qkv, [150], True, TWO_STAGES)
    run = partial(on_cpu, qkv, [150], True, TWO_STAGES)
    with with_source(MMA, edited(MMA, old, new)):
        assert finding(run, "forward") == kind
        assert kind or not np.array_equal(run("forward"), right, equal_nan=True)


# --- launches ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("B", "T", "causal", "few"),
    [
        (1, 1024, True, True),
        (1, 1024, False, False),
        (2, 512, True, True),
        (4, 256, True, False),
    ],
)
def test_alternate_keys_are_for_few_sequences(B: int, T: int, causal: bool, few: bool) -> None:
    """Measured with 12 heads, the other kernel is 1 to 40 % slower in each of these cases."""
    sizes = AttentionSizes(B, T, 12, causal)
    assert alternates(sizes, H200["sms"], B * T) == few
    geometry, band = alternate_geometry(sizes, sms=H200["sms"])
    assert geometry.grid == (min(132, 12 * B * -(-T // 64)),)
    assert 1 <= band <= 12 * B


@pytest.mark.parametrize("HS", [64, slow(128), slow(256)])
def test_a_value_beyond_float16_changes_no_row_before_it(HS: int) -> None:
    """Tensor cores of 7.5 read it as infinity, which products with 0 would turn into NaN."""
    qkv = np.random.default_rng(0).standard_normal((40, 3 * HS)).astype(DTYPES["bfloat16"])
    found = []
    with running_on("turing") as cp:
        for large in (1.0, 1e5):
            qkv[30, 2 * HS :] = large
            out = ops.attention(cp.asarray(qkv), 1, causal=True, variant="mma").get()
            found.append(out[:30].astype(np.float32))
    assert np.isfinite(found[1]).all()
    np.testing.assert_array_equal(*found)


# --- on the GPU ----------------------------------------------------------------------------------


def hostile(qkv: Array, lengths: Sequence[int], first_value: int) -> list[Array]:
    """Return rows whose scores grow, fall, or are -inf for whole tiles, and extreme values."""
    T, K = len(qkv), slice(first_value - (qkv.shape[1] - first_value), first_value)
    ramp = np.linspace(-30, 30, T, dtype=np.float32)[:, None]
    found = [qkv.copy() for _ in range(6)]
    for each, by in zip(found, (ramp, -ramp), strict=False):
        each[:, K] = (each[:, K].astype(np.float32) * by).astype(qkv.dtype)
    for each, end in zip(found[2:], (128, 256), strict=False):
        each[:] = np.abs(each) + 1
        each[:end, K.start + 2] = -np.inf
    for n, part in enumerate(parts(lengths)):
        if part.stop > part.start:
            value = (np.nan, np.inf, -np.inf)[n % 3]
            found[4][max(part.start, part.stop - 100), first_value + 3] = value
            found[5][(part.start + part.stop) // 2, first_value + 5] = value
    return found


@pytest.mark.gpu
@both_dtypes
@both_masks
@pytest.mark.parametrize("heads", [(12, 12, 64), (9, 3, 64)], ids=str)
def test_alternate_keys_give_the_same_bits(causal: bool, dtype: str, heads: Heads) -> None:
    """Two warpgroups share a query's keys, or one has all; blocks may have many tiles."""
    cp, (NH, NKV, _) = cupy_with(HOPPER_CAPABILITY), heads
    whole, alternate = (KERNELS[f"wgmma-{way}-{dtype}"] for way in WAYS)
    ragged = [300, 0, 1, 128, 129, 1000, 65, 64, 640, 257]
    for B, T in ((1, 1), (2, 64), (1, 65), (3, 128), (1, 129), (1, 385), (2, 1000), (20, 320)):
        lengths = [T] * B if B < 20 else ragged
        x = plain.normal(T, sum(lengths), row_width(heads)).astype(DTYPES[dtype])
        for qkv in [x] if T not in (385, 320) else [x, *hostile(x, lengths, (NH + NKV) * 64)]:
            for batch in (lengths, [*lengths, 0]):  # the empty sequence makes the batch packed
                got = alternate(cp, qkv, batch, heads, causal)
                assert_same_bits(got, whole(cp, qkv, batch, heads, causal))


@pytest.mark.gpu
@both_dtypes
@pytest.mark.parametrize("heads", [(12, 12, 64), (9, 3, 64), (8, 2, 128)], ids=str)
def test_keys_and_values_go_to_the_cache_too(
    dtype: str, heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K and V equal kv_append's, attention has the same bits, other positions do not change."""
    cp, (NH, NKV, HS) = cupy_with(HOPPER_CAPABILITY), heads
    lengths, n_ctx = [300, 1, 128, 95], 310
    rows = sum(lengths) + 20  # the last 20 belong to no sequence
    x = cp.asarray(plain.normal(rows, rows, row_width(heads)).astype(DTYPES[dtype]))
    starts = cp.asarray(np.cumsum([0, *lengths]), "int32")
    row = np.concatenate([np.repeat([0, 2, 3, 5], lengths), np.full(20, -1)]).astype(np.int32)
    at = np.concatenate([np.arange(n) for n in (*lengths, 20)]).astype(np.int32)
    row[7], row[310], at[20], at[299] = -1, 6, -3, n_ctx  # outside the cache
    of_none = slice(sum(lengths), None)
    row[of_none], at[of_none] = 1, np.arange(20)  # nothing is written there
    places = cp.asarray(row), cp.asarray(at)
    sizes: Any = {"n_head": NH, "n_kv_head": NKV, "causal": True, "max_seqlen": 300}
    alone = VARLEN.bind((x, starts), **sizes).run()
    kept = [cp.full((6, n_ctx, NKV * HS), 7, x.dtype) for _ in range(4)]
    ops.kv_append(x[:-20], kept[0], kept[1], *(each[:-20] for each in places))
    for few in (False, True) if HS == 64 else (False,):
        monkeypatch.setattr(MODULE.tiles, "alternates", lambda *_, way=few: way)
        for array in kept[2:]:
            array.fill(7)
        out = VARLEN.bind((x, starts, *kept[2:], *places), **sizes).run()
        assert_same_bits(out.get()[:-20], alone.get()[:-20])
        for by_append, by_attention in zip(kept[:2], kept[2:], strict=True):
            assert_same_bits(by_append.get(), by_attention.get())
