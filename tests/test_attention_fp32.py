"""Attention with the accuracy of float32 on tensor cores: mma_two_part.cu, hopper_two_part.cu.

The second one runs on a GPU only. Inputs and the result are two-part matrices: (hi + lo 2^-11)
scale, with a scale for each row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import InputError, ops, reference
from gpt2block.cuda import replaced
from gpt2block.ops._attention_tiles import (
    HOPPER_TWO_PART_SHARED,
    hopper_two_part_geometry,
    two_part_geometry,
)
from gpt2block.ops._products import HOPPER_CAPABILITY
from gpt2block.ops.attention import HOPPER_TWO_PART, MMA_TWO_PART, VARLEN
from gpt2block.ops.attention import OPERATION as ATTENTION
from gpt2block.reference import joined, two_part
from gpt2block.weights.two_part import TwoPartMatrix, scale_for
from tests import plain
from tests.caches import Heads, row_width
from tests.compiling import assert_clean
from tests.devices import ON_CPU, combinations, on_gpu, one_order, set_attributes
from tests.gpus import H200, RTX, cupy_with
from tests.test_attention_mma import both_masks, both_variants, expanded
from tests.test_attention_mma import parts as rows_of

Array = NDArray[Any]
MOST_SHARED = H200["most_shared"]


shuffled = pytest.mark.parametrize("device", ["shuffled"], indirect=True)


@pytest.fixture
def device(device: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    set_attributes(monkeypatch, MaxSharedMemoryPerBlockOptin=MOST_SHARED)
    cupy_with()  # tensor cores
    return device


def evaluate(
    device: Any,
    qkv: Array,
    lengths: Sequence[int],
    n_head: int,
    causal: bool,
    packed: bool = True,
    convert: Callable[[Array], tuple[Array, Array]] = two_part,
    one_scale: float | None = None,
    variant: str = "mma",
) -> Array:
    """On a GPU twice, with the same bits. convert: to parts and scales; one_scale: of all rows."""
    if variant == "hopper":
        cupy_with(HOPPER_CAPABILITY)
    parts, scale = map(device.asarray, convert(qkv))
    shape, nan = (len(qkv), 64 * n_head), np.nan
    heads: dict[str, Any] = {"n_head": n_head, "causal": causal, "variant": variant}
    results = []
    for _ in range(1 if replaced() else 2):
        out = device.full((2, *shape), nan, "float16"), device.full(len(qkv), nan, "float32")
        matrix, to = TwoPartMatrix(parts, scale, qkv.shape, one_scale), TwoPartMatrix(*out, shape)
        if packed:
            starts = device.asarray(np.cumsum([0, *lengths], dtype=np.int32))
            bound = VARLEN.bind((matrix, starts), to, **heads, max_seqlen=max(lengths))
        else:
            bound = ATTENTION.bind((matrix,), to, **heads)
        bound.run()
        results.append(joined(out[0].get(), out[1].get()))
    np.testing.assert_array_equal(results[0], results[-1])
    return results[0]


def assert_right(
    got: Array, qkv: Array, lengths: Sequence[int], n_head: int, causal: bool, xp: Any = np
) -> None:
    """As accurate as a sequential evaluation in float32."""
    parts = [p for p in rows_of(lengths) if p.stop > p.start]
    truth = [reference.attention(qkv[p].astype(np.float64), n_head, causal) for p in parts]
    by_hand = [plain.attention(xp.asarray(qkv[p]), n_head, causal, xp) for p in parts]
    if xp is not np:
        by_hand = [a.get() for a in by_hand]
    plain.assert_as_accurate(got, np.concatenate(truth), np.concatenate(by_hand))


# --- on the CPU ----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ON_CPU, indirect=True)
@both_masks
def test_lengths(device: Any, causal: bool) -> None:
    for T, n_head in ((1, 1), (16, 1), (17, 2), (65, 1), (130, 1)):
        qkv = plain.normal(T, T, 192 * n_head)
        got = evaluate(device, qkv, [T], n_head, causal, packed=False)
        assert_right(got, qkv, [T], n_head, causal)


@shuffled
@both_masks
def test_ragged_batches(device: Any, causal: bool) -> None:
    """A row's bits are those of its sequence alone."""
    lengths, n_head = [5, 0, 70, 1], 2
    qkv = plain.normal(3, sum(lengths), 384)
    got = evaluate(device, qkv, lengths, n_head, causal)
    assert_right(got, qkv, lengths, n_head, causal)
    np.testing.assert_array_equal(evaluate(device, qkv[5:75], [70], n_head, causal), got[5:75])


@shuffled
@both_masks
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_rows_of_any_size(device: Any, causal: bool, size: float) -> None:
    """V of other magnitudes than Q and K, which share its scales; outliers, a row of zeros."""
    T = 100
    qkv = plain.normal(1, T, 192)
    qkv[:, 128:] *= np.float32(size) * 10 ** np.linspace(-2, 2, T, dtype=np.float32)[::-1, None]
    qkv[:, 128 + 7] *= 100
    qkv[40] = 0
    assert_right(evaluate(device, qkv, [T], 1, causal), qkv, [T], 1, causal)


def assert_same_with_one_scale(
    device: Any, qkv: Array, lengths: list[int], causal: bool, variant: str = "mma"
) -> None:
    """The kernel for one scale has the bits of the one for any scales."""
    scale = scale_for(3 * float(np.abs(qkv).max()))

    def with_one_scale(x: Array) -> tuple[Array, Array]:
        high = (x / np.float32(scale)).astype(np.float16)
        low = ((x / np.float32(scale) - high) * 2048).astype(np.float16)
        return np.stack([high, low]), np.full(len(x), scale, np.float32)

    n_head = qkv.shape[1] // 192
    one, several = (
        evaluate(
            device, qkv, lengths, n_head, causal,
            convert=with_one_scale, one_scale=known, variant=variant,
        )
        for known in (scale, None)
    )  # fmt: skip
    np.testing.assert_array_equal(one, several)
    xp = np if replaced() else device
    assert_right(one, qkv, lengths, n_head, causal, xp)


@shuffled
@both_masks
def test_one_scale_for_all_rows(device: Any, causal: bool) -> None:
    lengths = [1, 70, 0, 33]
    assert_same_with_one_scale(device, plain.normal(5, sum(lengths), 192), lengths, causal)


@shuffled
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_a_row_does_not_see_leaves_no_trace(device: Any, value: float) -> None:
    T, key = 75, 37
    qkv = plain.normal(0, T, 192)
    clean = evaluate(device, qkv, [T], 1, True)
    wrong = qkv.copy()
    wrong[key, 128 + 3] = value
    got = evaluate(device, wrong, [T], 1, True)
    reached = np.zeros(got.shape, bool)
    reached[key:, 3] = True
    np.testing.assert_array_equal(got[:key], clean[:key])
    assert np.isfinite(got[~reached]).all()
    assert not np.isfinite(got[reached]).any()


@combinations(times=1, heads=[(2, 1, 128)], causal=[False, True])
def test_grouped_queries(device: Any, heads: Heads, causal: bool) -> None:
    """The bits of the same attention with repeated heads of K and V."""
    NH, NKV, _ = heads
    qkv = plain.normal(NH, 70, row_width(heads))
    wide = expanded(qkv, heads)
    parts = [TwoPartMatrix.from_float32(device.asarray(rows)) for rows in (qkv, wide)]
    got = ops.attention(parts[0], NH, causal, n_kv_head=NKV).joined().get()
    same = ops.attention(parts[1], NH, causal).joined().get()
    np.testing.assert_array_equal(got, same)
    truth = reference.attention(wide.astype(np.float64), NH, causal)
    plain.assert_as_accurate(got, truth, plain.attention(wide, NH, causal))


@one_order
def test_too_little_shared_memory_is_refused(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    set_attributes(monkeypatch, MaxSharedMemoryPerBlockOptin=RTX["most_shared"])
    if replaced():
        large = TwoPartMatrix.from_float32(device.zeros((5, 4 * 128), "float32"))
        with pytest.raises(InputError, match="head size 128: two-part matrices take 174,080 bytes"):
            ops.attention(large, 2, n_kv_head=1)


# --- launches, and the GPU -----------------------------------------------------------------------


def test_no_spills() -> None:
    """All on one architecture, on others the kernel of most blocks; the largest heads."""
    jobs = []
    for causal, one_scale in itertools.product((False, True), repeat=2):
        for gpu in (H200, RTX):
            most = gpu["most_shared"]
            geometry, _ = two_part_geometry(8, 1024, 12, causal, one_scale, most_shared=most)
            blocks = int(dict(geometry.defines)["ATT_BLOCKS"])
            assert blocks == (2 if causal and one_scale and gpu is H200 else 1)
            assert blocks * (geometry.shared + 1024) <= most + 1024
            others = ("sm_80",) if gpu is H200 else ("sm_120",)
            archs = ("sm_90",) * (gpu is H200) + others * (causal and one_scale)
            jobs += [(MMA_TWO_PART, arch, geometry.defines) for arch in archs]
    large, _ = two_part_geometry(
        8, 1024, 32, False, True, most_shared=MOST_SHARED, HS=128, serves=4
    )
    assert_clean([*jobs, (MMA_TWO_PART, "sm_90", large.defines)])


def test_no_spills_on_hopper() -> None:
    """Also where three heads of Q share one of K: a division by 3 takes registers of the loader."""
    jobs = []
    for causal, one_scale in itertools.product((False, True), repeat=2):
        for serves in (1, 3):
            geometry, _ = hopper_two_part_geometry(
                8, 1024, 12, causal, one_scale, sms=H200["sms"], serves=serves
            )
            jobs.append((HOPPER_TWO_PART, "sm_90a", geometry.defines))
    assert_clean(jobs)


def test_the_grid_of_hopper() -> None:
    """A block for every 64 queries, and no more than multiprocessors."""
    for B, T, NH, blocks in ((1, 1, 1, 1), (1, 512, 12, 96), (8, 1024, 12, 132), (3, 129, 2, 18)):
        geometry, band = hopper_two_part_geometry(B, T, NH, True, True, sms=H200["sms"])
        assert geometry.grid == (blocks,)
        assert geometry.shared == HOPPER_TWO_PART_SHARED <= MOST_SHARED
        assert 1 <= band <= B * NH
    with pytest.raises(InputError, match="use smaller batches"):
        hopper_two_part_geometry(2**20, 2**20, 12, True, True, sms=132)


@on_gpu
@both_variants
@both_masks
def test_one_scale_on_the_gpu(device: Any, variant: str, causal: bool) -> None:
    lengths = [1024, 1, 500, 64, 65, 127]
    qkv = plain.normal(5, sum(lengths), 768)
    assert_same_with_one_scale(device, qkv, lengths, causal, variant)


@on_gpu
@both_variants
@both_masks
@pytest.mark.parametrize("T", [1, 17, 64, 65, 100, 128, 129, 1000, 1024, 4096])
def test_lengths_on_the_gpu(device: Any, variant: str, T: int, causal: bool) -> None:
    n_head = 2 if T > 1024 else 12
    qkv = plain.normal(T, T, 192 * n_head)
    got = evaluate(device, qkv, [T], n_head, causal, packed=False, variant=variant)
    assert_right(got, qkv, [T], n_head, causal, device)
    packed = evaluate(device, qkv, [T], n_head, causal, variant=variant)
    np.testing.assert_array_equal(packed, got)


@on_gpu
@both_variants
@both_masks
def test_bits_do_not_depend_on_the_batch(device: Any, variant: str, causal: bool) -> None:
    """Blocks take several tiles; each sequence alone; with a mask, also its first rows alone."""
    lengths, n_head = [300, 0, 1, 128, 1000, 65, 640, 1024, 63], 12
    qkv = plain.normal(6, sum(lengths), 192 * n_head)
    got = evaluate(device, qkv, lengths, n_head, causal, variant=variant)
    assert_right(got, qkv, lengths, n_head, causal, device)
    for part in rows_of(lengths):
        for T in (part.stop - part.start, *((1, 64, 100, 190, 576) if causal else ())):
            if 0 < T <= part.stop - part.start:
                rows = slice(part.start, part.start + T)
                alone = evaluate(device, qkv[rows], [T], n_head, causal, False, variant=variant)
                np.testing.assert_array_equal(alone, got[rows])


@on_gpu
@both_variants
@both_masks
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_rows_of_any_size_on_the_gpu(device: Any, variant: str, causal: bool, size: float) -> None:
    T = 300
    qkv = plain.normal(1, T, 192)
    qkv[:, 128:] *= np.float32(size) * 10 ** np.linspace(-2, 2, T, dtype=np.float32)[::-1, None]
    qkv[:, 128 + 7] *= 100
    qkv[40] = 0
    got = evaluate(device, qkv, [T], 1, causal, variant=variant)
    assert_right(got, qkv, [T], 1, causal, device)


@on_gpu
@both_variants
@both_masks
@pytest.mark.parametrize("key", [0, 63, 64, 141, 192, 256, 299])
def test_values_that_are_not_finite_on_the_gpu(
    device: Any, variant: str, causal: bool, key: int
) -> None:
    """They come to all rows that see them, and to no other."""
    T = 300
    qkv = plain.normal(0, T, 192)
    clean = evaluate(device, qkv, [T], 1, causal, variant=variant)
    for value in (np.nan, np.inf, -np.inf):
        wrong = qkv.copy()
        wrong[key, 128 + 3] = value
        got = evaluate(device, wrong, [T], 1, causal, variant=variant)
        reached = np.zeros(got.shape, bool)
        reached[key if causal else 0 :, 3] = True
        assert np.isfinite(got[~reached]).all()
        assert not np.isfinite(got[reached]).any()
        if causal:
            np.testing.assert_array_equal(got[:key], clean[:key])


@on_gpu
@both_variants
@both_masks
def test_grouped_queries_of_64_channels(device: Any, variant: str, causal: bool) -> None:
    """The bits of the same attention with repeated heads of K and V."""
    cupy_with(HOPPER_CAPABILITY)
    for heads in ((6, 2, 64), (4, 2, 64)):
        NH, NKV, _ = heads
        qkv = plain.normal(NH, 400, row_width(heads))
        wide = expanded(qkv, heads)
        parts = [TwoPartMatrix.from_float32(device.asarray(rows)) for rows in (qkv, wide)]
        got = ops.attention(parts[0], NH, causal, variant, n_kv_head=NKV).joined().get()
        same = ops.attention(parts[1], NH, causal, variant).joined().get()
        np.testing.assert_array_equal(got, same)
