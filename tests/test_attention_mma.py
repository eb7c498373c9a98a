"""Attention on tensor cores: mma.cu on the CPU, in three orders, and on a GPU; hopper.cu on a GPU.

On the CPU the PTX instructions are imitated (gpt2block/emulator/mma_ptx.h).

The error rule is `plain.assert_as_accurate`. The plain evaluation rounds where this one must: the
softmax's weights, exp(s - max), become numbers of the storage dtype before they are multiplied, as
tensor cores take no others, and so does the result. Scores, sums and the quotient are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import InputError, ops, reference
from gpt2block.cuda import kernels, replaced
from gpt2block.cuda.arrays import Bound
from gpt2block.emulator import loader
from gpt2block.ops._attention_tiles import (
    HOPPER_SHARED,
    HOPPER_THREADS,
    MMA_TILES,
    AttentionTile,
    alternate_geometry,
    alternates,
    hopper_geometry,
    mma_geometry,
    mma_stage,
    together,
)
from gpt2block.ops._products import HOPPER_CAPABILITY, MMA_CAPABILITY
from gpt2block.ops.attention import HOPPER, HOPPER_ALTERNATE, MMA, VARLEN
from gpt2block.ops.attention import OPERATION as ATTENTION
from tests import plain
from tests.caches import Heads, repeated, row_width
from tests.compiling import Job, assert_clean
from tests.devices import GPU, one_order, running_on
from tests.gpus import A100, H200, RTX, Gpu, cupy_with, large_memory

Array = NDArray[Any]
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
MODULE = import_module("gpt2block.ops.attention")
# One warp, and two with two fragments each: the shim's time goes with the warps. Both, and the
# tiles that GPUs get, must give the same bits.
SMALL, PAIR = AttentionTile(1, 1, 3, 1, 1), AttentionTile(2, 2, 2, 1, 1)
TWO_STAGES = AttentionTile(2, 1, 6, 1, 1)  # so many blocks on an SM: no room for three
both_masks = pytest.mark.parametrize("causal", [False, True])
both_dtypes = pytest.mark.parametrize("dtype", DTYPES)
every_order = pytest.mark.parametrize("order", loader.ORDERS)
# hopper with all keys of a query in one warpgroup, or alternate keys in two; "hopper" chooses.
WAYS = {"whole": False, "alternate": True}
both_variants = pytest.mark.parametrize("variant", ["mma", "hopper"])
every_variant = pytest.mark.parametrize("variant", ["mma", *WAYS])


def stored(causal: bool) -> str:
    """A dtype for each mask, where any will do: every other program is one more to compile."""
    return "bfloat16" if causal else "float16"


def made(dtype: str, rows: int, n_head: int) -> Array:
    array: Array = plain.normal(rows, rows, 3 * 64 * n_head).astype(DTYPES[dtype])
    return array


def parts(lengths: Sequence[int]) -> list[slice]:
    """Of the packed rows, those of each sequence."""
    return [slice(int(a), int(b)) for a, b in pairwise(np.cumsum([0, *lengths]))]


def truth_of(qkv: Array, lengths: Sequence[int], n_head: int, causal: bool) -> Array:
    wide = qkv.astype(np.float64)
    return np.concatenate([reference.attention(wide[p], n_head, causal) for p in parts(lengths)])


def plain_of(qkv: Array, lengths: Sequence[int], n_head: int, causal: bool, xp: Any = np) -> Array:
    """In float32, with the two roundings to the dtype of qkv."""
    done = []
    for part in parts(lengths):
        T = part.stop - part.start
        heads = xp.asarray(qkv[part].astype(np.float32)).reshape(T, 3, n_head, -1)
        q, k, v = (xp.ascontiguousarray(heads[:, i].transpose(1, 0, 2)) for i in range(3))
        scores = plain.product(q, xp.swapaxes(k, -1, -2), xp) / xp.float32(q.shape[-1] ** 0.5)
        if causal:
            scores = xp.where(xp.tri(T, dtype=bool), scores, xp.float32(-np.inf))
        p = xp.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = p if xp is np else p.get()  # rounded on the host, whatever CuPy knows of bfloat16
        rounded = xp.asarray(weights.astype(qkv.dtype).astype(np.float32))
        out = plain.product(rounded, v, xp) / plain.running_sum(p, xp)
        out = out.transpose(1, 0, 2).reshape(T, -1)
        done.append(out if xp is np else out.get())
    return np.concatenate(done).astype(qkv.dtype).astype(np.float32)


def assert_right(
    got: Array, qkv: Array, lengths: Sequence[int], n_head: int, causal: bool, xp: Any = np
) -> None:
    assert got.dtype == qkv.dtype
    lengths = [n for n in lengths if n]
    truth = truth_of(qkv, lengths, n_head, causal)
    by_hand = plain_of(qkv, lengths, n_head, causal, xp)
    plain.assert_as_accurate(got.astype(np.float32), truth, by_hand)


def evaluate(
    cp: Any,
    qkv: Any,
    n_head: int,
    causal: bool,
    lengths: Sequence[int] = (),
    variant: str | None = "mma",
    n_kv_head: int = 0,
) -> Array:
    """With lengths as a ragged batch; on a GPU twice, and both must give the same bits."""
    heads = {"n_head": n_head, "n_kv_head": n_kv_head or n_head}
    width = qkv.shape[-1] // (n_head + 2 * heads["n_kv_head"]) * n_head
    qkv = cp.asarray(qkv)
    if variant in WAYS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MODULE, "alternates", lambda *_: WAYS[variant])
            return evaluate(cp, qkv, n_head, causal, lengths, "hopper", n_kv_head)
    bind: Callable[..., Bound] = partial(ATTENTION.bind, (qkv,))
    if lengths:
        starts = cp.asarray(np.cumsum([0, *lengths], dtype=np.int32))
        bind = partial(VARLEN.bind, (qkv, starts), max_seqlen=max(lengths))
    results: list[Array] = []
    for _ in range(1 if replaced() else 2):
        out = cp.empty((*qkv.shape[:-1], width), qkv.dtype)
        out.data.memset(0xFF, out.nbytes)
        results.append(bind(out, **heads, causal=causal, variant=variant).run().get())
    same_bits(results[0], results[-1])
    return results[0]


def on_cpu(
    qkv: Array,
    lengths: Sequence[int],
    n_head: int,
    causal: bool,
    *,
    tile: AttentionTile = SMALL,
    packed: bool = True,
    order: loader.Order = "shuffled",
) -> Array:
    """qkv (N, 3C): sequences of these lengths. packed: told by cu_seqlens; else all are alike."""

    def geometry(*sizes: Any, **_: int) -> Any:
        return mma_geometry(*sizes, **H200, tile=tile)

    with running_on(order) as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, "mma_geometry", geometry)
        if packed:
            return evaluate(device, qkv, n_head, causal, lengths)
        batch = qkv.reshape(len(lengths), max(lengths), -1)
        return evaluate(device, batch, n_head, causal).reshape(len(qkv), -1)


def launched(
    source: loader.Source | str,
    qkv: Array,
    causal: bool,
    tile: AttentionTile,
    order: loader.Order,
    at_once: bool = False,
) -> Array:
    """One sequence with one head. at_once: when copies to shared memory arrive."""
    if problem := loader.missing():
        pytest.skip(problem)
    T = len(qkv)
    geometry, together = mma_geometry(1, T, 1, causal, **H200, tile=tile)
    out = np.full((T, 64), np.nan, qkv.dtype)
    args = [qkv, np.array([0, T], np.int32), out, 1, T, 1, together]
    options: dict[str, Any] = {"shared": geometry.shared, "defines": geometry.defines}
    options |= {"storage": qkv.dtype.name, "order": order, "copies_at_once": at_once}
    loader.run(source, geometry.kernel, geometry.grid, geometry.block, args, **options)
    return out


def same_bits(a: Array, b: Array) -> None:
    np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))


# --- on the CPU ----------------------------------------------------------------------------------


@every_order
@both_masks
def test_lengths(order: loader.Order, causal: bool) -> None:
    """Also: packed or not, and whatever the tile, the bits are the same."""
    dtype = stored(causal)
    for T, B, n_head in ((1, 2, 1), (15, 1, 2), (16, 1, 1), (17, 2, 1), (65, 1, 2), (130, 1, 1)):
        qkv, lengths = made(dtype, B * T, n_head), [T] * B
        got = on_cpu(qkv, lengths, n_head, causal, packed=False, order=order)
        assert_right(got, qkv, lengths, n_head, causal)
        if order != "shuffled":
            continue
        other = on_cpu(qkv, lengths, n_head, causal, tile=PAIR, order=order)
        same_bits(other, got)


@both_masks
def test_ragged_batches(causal: bool) -> None:
    """A row's bits are those of its sequence alone."""
    lengths, n_head = [5, 0, 70, 1, 33], 2
    qkv = made(stored(causal), sum(lengths), n_head)
    got = on_cpu(qkv, lengths, n_head, causal, tile=PAIR)
    assert_right(got, qkv, lengths, n_head, causal)
    for part, length in zip(parts(lengths), lengths, strict=True):
        if length in (70, 1):
            alone = on_cpu(qkv[part].copy(), [length], n_head, causal, packed=False)
            same_bits(alone, got[part])


@both_masks
def test_the_tiles_of_gpus(causal: bool) -> None:
    """More than one block of queries, more tiles of keys than the ring has stages."""
    qkv = made(stored(causal), 200, 1)
    got = on_cpu(qkv, [200], 1, causal, tile=MMA_TILES[64][not causal])
    assert_right(got, qkv, [200], 1, causal)


@pytest.mark.parametrize(
    ("tile", "causal", "at_once"),
    [(TWO_STAGES, True, False), (TWO_STAGES, True, True), (PAIR, False, True)],
)
def test_the_ring_waits_for_what_it_needs(tile: AttentionTile, causal: bool, at_once: bool) -> None:
    """Copies that arrive late, and at once; two stages, and three."""
    T = 200
    qkv = made(stored(causal), T, 1)
    results = [launched(MMA, qkv, causal, tile, order, at_once) for order in loader.ORDERS]
    same_bits(results[1], results[0])
    same_bits(results[2], results[0])
    assert_right(results[0], qkv, [T], 1, causal)


@both_dtypes
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_a_row_does_not_see_leaves_no_trace(dtype: str, value: float) -> None:
    """Later keys, and other sequences: no bit changes, whatever stands there."""
    lengths = [30, 75]
    tile = PAIR if dtype == "bfloat16" else SMALL
    qkv = made(dtype, 105, 1)
    first, key = 30, 37  # of the second sequence; a key in the middle of a step of 16
    clean = on_cpu(qkv, lengths, 1, True, tile=tile)
    wrong = qkv.copy()
    wrong[:first] = value
    wrong[first + key :, 64:] = value  # K and V
    got = on_cpu(wrong, lengths, 1, True, tile=tile)
    same_bits(got[first : first + key], clean[first : first + key])
    assert not np.isfinite(got[first + key :].astype(np.float32)).any()
    wrong = qkv.copy()
    wrong[first + key, 128 + 3] = value  # V: one channel of the rows that see it
    got = on_cpu(wrong, lengths, 1, True, tile=tile)
    reached = np.zeros(got.shape, bool)
    reached[first + key :, 3] = True
    same_bits(got[~reached], clean[~reached])
    np.testing.assert_array_equal(got[reached].astype(np.float32), np.float32(value))


@both_masks
def test_scores_that_are_not_finite(causal: bool) -> None:
    """NaN in Q is its query's alone; a key with a score of -inf weighs nothing."""
    qkv = np.abs(made(stored(causal), 80, 1))
    qkv[3, 2] = np.nan
    got = on_cpu(qkv, [80], 1, causal).astype(np.float32)
    assert np.isnan(got[3]).all()
    assert np.isfinite(np.delete(got, 3, axis=0)).all()
    qkv = np.abs(made(stored(causal), 80, 1)) + DTYPES[stored(causal)].type(1)
    qkv[:64, 64 + 2] = -np.inf  # all of the first tile's keys
    got = on_cpu(qkv, [80], 1, causal)
    if causal:
        assert np.isnan(got[:64].astype(np.float32)).all()  # they see nothing else
    same_bits(got[64:], on_cpu(qkv[64:].copy(), [16], 1, causal))


@both_masks
def test_maxima_that_grow(causal: bool) -> None:
    """Scores in the hundreds, that rise or fall from tile to tile: sums are scaled, or not."""
    T = 200
    qkv = made(stored(causal), T, 1)
    qkv[:, 64:128] *= np.linspace(0.1, 30, T).astype(qkv.dtype)[:, None]
    for one in (qkv, np.ascontiguousarray(qkv[::-1])):
        assert_right(on_cpu(one, [T], 1, causal, tile=PAIR), one, [T], 1, causal)


def test_small_weights_count_in_fp16() -> None:
    """Many keys that weigh 2^-20 of the largest together weigh as much: none may become zero."""
    T = 192
    qkv = np.zeros((T, 192), np.float16)
    qkv[:, 0] = 8
    qkv[0, 64] = 22 * np.log(2)  # the first key's score; all others have 0
    qkv[:, 128] = 1
    qkv[0, 128] = 0
    got = on_cpu(qkv, [T], 1, False)[:, 0].astype(np.float64)
    weight = (T - 1) * np.exp(-float(qkv[0, 64]))
    np.testing.assert_allclose(got, weight / (1 + weight), rtol=2e-3)


@settings(max_examples=4)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=3),
    n_head=st.integers(1, 2),
    causal=st.booleans(),
)
def test_any_batch(lengths: list[int], n_head: int, causal: bool) -> None:
    lengths = [*lengths, 3]
    qkv = made(stored(causal), sum(lengths), n_head)
    got = on_cpu(qkv, lengths, n_head, causal, tile=PAIR, order="reverse")
    assert_right(got, qkv, lengths, n_head, causal)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "        wait_for_groups<ATT_STAGES - 2>();\n        __syncthreads();",
            "__syncthreads();",
        ),
        ("        __syncthreads();  // the tile", "  // the tile"),
        ("in_part && any_not_finite(b)", "in_part && lane > 31"),
    ],
)
def test_what_is_left_out_shows(old: str, new: str) -> None:
    """A wait, a barrier, and the care for values that are not finite."""
    source = loader.Source.shipped(MMA).edited(old, new)
    qkv = made(stored(True), 150, 1)
    qkv[149, 128:] = np.inf
    tile = TWO_STAGES
    right = on_cpu(qkv, [150], 1, True, tile=tile)
    assert not all(same(right, qkv, tile, order, source) for order in loader.ORDERS)


def same(
    right: Array, qkv: Array, tile: AttentionTile, order: loader.Order, source: loader.Source
) -> bool:
    try:
        got = launched(source, qkv, True, tile, order)
    except loader.ShimError:  # a copy that arrives when its block has ended
        return False
    return np.array_equal(got, right, equal_nan=True)


# --- launches ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("B", "T", "causal", "grid", "queries", "side_by_side"),
    [
        (8, 1024, True, 768, 128, 96),
        (8, 1024, False, 768, 128, 1),
        (1, 1024, True, 192, 64, 12),
        (1, 128, False, 24, 64, 1),
        (64, 1024, True, 6144, 128, 128),  # of 768 heads: 32 MB of K and V
        (4, 4096, True, 1536, 128, 24),
        (1, 1, True, 12, 64, 12),
    ],
)
def test_the_tile_fits_the_gpu(
    B: int, T: int, causal: bool, grid: int, queries: int, side_by_side: int
) -> None:
    geometry, heads = mma_geometry(B, T, 12, causal, **H200)
    chosen: dict[str, Any] = dict(geometry.defines)
    assert geometry.grid == (grid,)
    assert 16 * chosen["ATT_WARPS"] * chosen["ATT_FRAGS"] == queries
    assert heads == side_by_side


@pytest.mark.parametrize("gpu", [H200, RTX], ids=["H200", "RTX"])
def test_shared_memory_holds_two_tiles_at_least(gpu: Gpu) -> None:
    for tile in MMA_TILES[64]:
        geometry, _ = mma_geometry(8, 1024, 12, True, **gpu, tile=tile)
        assert 2 * mma_stage(64) <= geometry.shared <= gpu["most_shared"]
        assert geometry.shared == dict(geometry.defines)["ATT_STAGES"] * mma_stage(64)


def test_what_a_grid_cannot_take_is_refused() -> None:
    assert mma_geometry(1, 65536, 12, True, **H200)[0].grid == (512 * 12,)
    assert together(1, 65536, 12, True) == 2
    with pytest.raises(InputError, match=r"make a grid of 3,000,000,000 blocks, CUDA takes 2,147"):
        mma_geometry(250_000_000, 1, 12, True, **H200)


def test_the_grid_of_hopper() -> None:
    """A block for every tile, and no more than multiprocessors; all other numbers are fixed."""
    for B, T, NH, blocks in ((1, 1, 1, 1), (1, 1024, 12, 96), (8, 1024, 12, 132), (3, 129, 2, 12)):
        for causal in (False, True):
            geometry, band = hopper_geometry(B, T, NH, causal, sms=132)
            assert geometry.grid == (blocks,)
            assert (geometry.block, geometry.shared) == ((HOPPER_THREADS,), HOPPER_SHARED[64])
            heads = (("ATT_SIZE", 64), ("ATT_SERVES", 1))
            assert geometry.defines == (("ATT_CAUSAL", int(causal)), *heads)
            assert 1 <= band <= B * NH
    with pytest.raises(InputError, match="use smaller batches"):
        hopper_geometry(2**20, 2**20, 12, True, sms=132)


@pytest.mark.parametrize(
    ("B", "T", "causal", "few"),
    [
        (1, 1, True, True),
        (1, 1024, True, True),
        (1, 1024, False, False),
        (1, 2048, False, True),
        (1, 2048, True, False),
        (2, 512, True, True),
        (4, 256, True, False),
        (8, 1024, True, False),
        (64, 512, True, False),
    ],
)
def test_alternate_keys_are_for_few_sequences(B: int, T: int, causal: bool, few: bool) -> None:
    """As measured with 12 heads: each of these is 1 to 40 % slower by the other kernel."""
    assert alternates(B, T, 12, causal, H200["sms"], B * T) == few
    geometry, band = alternate_geometry(B, T, 12, causal, sms=132)
    assert geometry.grid == (min(132, 12 * B * -(-T // 64)),)
    assert 1 <= band <= 12 * B


def test_packed_rows_count_once() -> None:
    """Of two sequences as long as 1,024 tokens, and of two of 520, where 1,024 is a bound."""
    for rows, few in ((2048, False), (1088, True)):
        assert alternates(2, 1024, 12, True, H200["sms"], rows) == few


def test_gpus_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "launch_at", lambda file, *_: file)
    monkeypatch.setattr(MODULE, "tensor_map", lambda *_: None)
    for capability, few, many in ((80, MMA, MMA), (90, HOPPER_ALTERNATE, HOPPER), (120, MMA, MMA)):
        monkeypatch.setattr(MODULE, "compute_capability", lambda now=capability: now)
        with running_on("forward") as device:
            for B, T, best in ((1, 5, few), (200, 500, many)):
                qkv = device.zeros((B, T, 192), "float16")
                launches: tuple[Any, ...] = ATTENTION.bind((qkv,), n_head=1, causal=False).launches
                assert launches == (best,)


def test_no_tile_spills() -> None:
    """Also four heads of Q for each load of K, of 128 channels, which take most registers."""
    jobs: list[Job] = []
    grouped: Any = {"HS": 128, "serves": 4}
    large, small = MMA_TILES[64]
    for arch, gpu, dtype, causal, options in (
        ("sm_80", H200, "float16", True, {"tile": large}),
        ("sm_80", A100, "bfloat16", True, grouped),
        ("sm_90", H200, "float16", False, {"tile": large}),
        ("sm_90", H200, "bfloat16", True, {"tile": small}),
        ("sm_120", RTX, "float16", True, {"tile": large}),
        ("sm_120", RTX, "bfloat16", True, {"tile": small}),
    ):
        geometry, _ = mma_geometry(8, 1024, 12, causal, **gpu, **options)
        constants = (*kernels.stored_as(dtype), *geometry.defines)
        jobs.append((MMA, arch, constants))
        if causal and arch != "sm_120":  # CUDA 12 spills 8 bytes of the large tile there, 13 none
            jobs.append((MMA, arch, (*constants, ("ATT_CACHED", 1))))
    for causal in (True, False):
        geometry, _ = hopper_geometry(8, 1024, 32, causal, sms=H200["sms"], **grouped)
        jobs.append((HOPPER, "sm_90a", (*kernels.stored_as("bfloat16"), *geometry.defines)))
        for file, made_for in ((HOPPER, hopper_geometry), (HOPPER_ALTERNATE, alternate_geometry)):
            constants = made_for(1, 1024, 12, causal, sms=H200["sms"], serves=3)[0].defines
            jobs.append((file, "sm_90a", (*kernels.stored_as("bfloat16"), *constants)))
    assert_clean(jobs)


# --- on the GPU ----------------------------------------------------------------------------------


@pytest.fixture
def cp(variant: str) -> ModuleType:
    return cupy_with(MMA_CAPABILITY if variant == "mma" else HOPPER_CAPABILITY)


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Each variant with each dtype, and with a mask and without."""
    for mark in (pytest.mark.gpu, both_dtypes, both_masks, every_variant):
        test = mark(test)
    return test


@on_gpu
@pytest.mark.parametrize("T", [1, 17, 64, 100, 128, 129, 256, 300, 1000, 1024, 4096])
def test_lengths_on_the_gpu(cp: ModuleType, variant: str, T: int, causal: bool, dtype: str) -> None:
    """Also: alone, in a batch, or one of packed rows, the bits are the same."""
    B, n_head = (1, 2) if T > 1024 else (3, 12)
    qkv = made(dtype, B * T, n_head)
    got = evaluate(cp, qkv.reshape(B, T, -1), n_head, causal, variant=variant)
    for b in (0, B - 1):
        alone = evaluate(cp, qkv[b * T : (b + 1) * T], n_head, causal, variant=variant)
        same_bits(alone, got[b])
    assert_right(got[0], qkv[:T], [T], n_head, causal, cp)
    packed = evaluate(cp, qkv, n_head, causal, [T] * B, variant)
    same_bits(packed, got.reshape(B * T, -1))


@pytest.mark.gpu
@both_masks
@both_variants
def test_tiles_give_the_same_bits_on_the_gpu(cp: ModuleType, variant: str, causal: bool) -> None:
    """A sequence in batches with other tiles, or so large that blocks take several of them."""
    T, B = 1000, 70
    one = made("float16", T, 12)
    alone = evaluate(cp, one, 12, causal, variant=variant)
    grids = [mma_geometry(n, T, 12, causal, **H200) for n in (1, B)]
    assert dict(grids[0][0].defines) != dict(grids[1][0].defines)
    many = cp.asarray(np.broadcast_to(one, (B, *one.shape)))
    for got in evaluate(cp, many, 12, causal, variant=variant):
        same_bits(got, alone)


def hostile(qkv: Array, lengths: Sequence[int], first_value: int) -> list[Array]:
    """Rows whose scores grow or fall, are -inf for whole steps of keys, and values of all kinds."""
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
    """Two warpgroups that share a query's keys, and one that has all; blocks with many tiles."""
    cp, (NH, NKV, _) = cupy_with(HOPPER_CAPABILITY), heads
    ragged = [300, 0, 1, 128, 129, 1000, 65, 64, 640, 257]
    for B, T in ((1, 1), (2, 64), (1, 65), (3, 128), (1, 129), (1, 385), (2, 1000), (20, 320)):
        lengths = [T] * B if B < 20 else ragged
        x = plain.normal(T, sum(lengths), row_width(heads)).astype(DTYPES[dtype])
        cases = [x] if T not in (385, 320) else [x, *hostile(x, lengths, (NH + NKV) * 64)]
        for qkv in cases:
            ways = [evaluate(cp, qkv, NH, causal, lengths, way, NKV) for way in WAYS]
            same_bits(*ways)
        if B < 20:
            batch = cases[-1].reshape(B, T, -1)
            ways = [evaluate(cp, batch, NH, causal, (), way, NKV) for way in WAYS]
            same_bits(*ways)


@pytest.mark.gpu
@both_dtypes
@pytest.mark.parametrize("heads", [(12, 12, 64), (9, 3, 64), (8, 2, 128)], ids=str)
def test_keys_and_values_go_to_the_cache_too(
    dtype: str, heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As kv_append writes them, with the bits of attention alone; other places stay as they are."""
    cp, (NH, NKV, HS) = cupy_with(HOPPER_CAPABILITY), heads
    lengths, n_ctx = [300, 1, 128, 95], 310
    rows = sum(lengths) + 20  # the last ones are of no sequence
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
        monkeypatch.setattr(MODULE, "alternates", lambda *_, way=few: way)
        for array in kept[2:]:
            array.fill(7)
        out = VARLEN.bind((x, starts, *kept[2:], *places), **sizes).run()
        same_bits(out.get()[:-20], alone.get()[:-20])
        for by_append, by_attention in zip(kept[:2], kept[2:], strict=True):
            same_bits(by_append.get(), by_attention.get())


@pytest.mark.gpu
def test_arrays_of_a_cache_that_do_not_fit() -> None:
    cp = cupy_with(HOPPER_CAPABILITY)
    x, starts = cp.zeros((5, 384), "float16"), cp.asarray([0, 5], "int32")
    k, v = cp.zeros((2, 1, 8, 128), "float16")
    at = cp.zeros(5, "int32")
    bind = partial(VARLEN.bind, n_head=2, causal=True, max_seqlen=5)
    wide = cp.zeros((1, 8, 256), "float16")
    for inputs, options, problem in (
        ((x, starts, k), {}, "v: expected an array, as there is another of a kv_cache"),
        ((x, starts, k, v, at), {}, "position: expected an array"),
        ((x, starts, k, k, at, at), {}, "k: overlaps v"),
        ((x, starts, wide, wide + 1, at, at), {}, r"k: expected shape \(1, 8, 128\)"),
        ((x, starts, k.astype("float32"), v.astype("float32"), at, at), {}, "k: .*float16"),
        ((x, starts, k, v, at, at), {"variant": "mma"}, "k: only variant hopper"),
    ):
        with pytest.raises(InputError, match=problem):
            bind(inputs, **options)


@on_gpu
def test_a_ragged_batch_on_the_gpu(cp: ModuleType, variant: str, causal: bool, dtype: str) -> None:
    lengths, n_head = [300, 0, 1, 128, 1000, 65, 640], 3
    qkv = made(dtype, sum(lengths), n_head)
    got = evaluate(cp, qkv, n_head, causal, lengths, variant)
    assert_right(got, qkv, lengths, n_head, causal, cp)
    for part in parts(lengths):
        if part.stop > part.start:
            alone = evaluate(cp, qkv[part], n_head, causal, variant=variant)
            same_bits(alone, got[part])


@on_gpu
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_a_row_does_not_see_on_the_gpu(
    cp: ModuleType, variant: str, causal: bool, dtype: str, value: float
) -> None:
    """Later keys, and other sequences: no bit changes, whatever stands there."""
    lengths, n_head = [130, 475, 300], 2
    qkv = made(dtype, sum(lengths), n_head)
    clean = evaluate(cp, qkv, n_head, causal, lengths, variant)
    wrong = qkv.copy()
    middle = parts(lengths)[1]
    wrong[: middle.start] = wrong[middle.stop :] = value
    seen = middle
    for key in (0, 1, 63, 64, 100, 128, 300, 474) if causal else (0,):
        if causal:
            seen = slice(middle.start, middle.start + key + 1)
            wrong[seen] = qkv[seen]
            wrong[seen.stop :, 128:] = value  # K and V
        same_bits(evaluate(cp, wrong, n_head, causal, lengths, variant)[seen], clean[seen])
    if causal:
        dense = evaluate(cp, wrong[middle], n_head, causal, variant=variant)
        same_bits(dense, clean[middle])


@on_gpu
@pytest.mark.parametrize("key", [0, 141, 256, 299])
def test_values_that_are_not_finite_on_the_gpu(
    cp: ModuleType, variant: str, key: int, causal: bool, dtype: str
) -> None:
    """They come to all rows that see them, and to no other; in the first keys taken, and later."""
    T = 300
    qkv = made(dtype, T, 2)
    clean = evaluate(cp, qkv, 2, causal, variant=variant)
    for value in (np.nan, np.inf, -np.inf):
        wrong = qkv.copy()
        wrong[key, 256 + 64 + 3] = value
        got = evaluate(cp, wrong, 2, causal, variant=variant)
        reached = np.zeros(got.shape, bool)
        reached[key if causal else 0 :, 64 + 3] = True
        same_bits(got[~reached], clean[~reached])
        np.testing.assert_array_equal(got[reached].astype(np.float32), np.float32(value))
    wrong = qkv.copy()
    wrong[key, 128 + 5] = np.nan  # K, of the first head
    got = evaluate(cp, wrong, 2, causal, variant=variant)
    reached = np.zeros(got.shape, bool)
    reached[key if causal else 0 :, :64] = True
    same_bits(got[~reached], clean[~reached])
    assert np.isnan(got[reached].astype(np.float32)).all()


@on_gpu
def test_scores_of_any_size(cp: ModuleType, variant: str, causal: bool, dtype: str) -> None:
    """Rows whose largest score grows from tile to tile, or is far below the others' zero."""
    T = 600
    qkv = made(dtype, T, 2)
    ramp = np.linspace(-6, 6, T)[:, None]
    qkv[:, 128:256] = (qkv[:, 128:256].astype(np.float32) * ramp).astype(qkv.dtype)
    qkv[:, :64] = (qkv[:, :64].astype(np.float32) * 4).astype(qkv.dtype)
    got = evaluate(cp, qkv, 2, causal, variant=variant)
    assert_right(got, qkv, [T], 2, causal, cp)


@on_gpu
def test_a_long_sequence(cp: ModuleType, variant: str, causal: bool, dtype: str) -> None:
    """Some of 65,536 queries; the scores of all would take 17 GB."""
    T = 65536
    qkv = made(dtype, T, 1)
    got = evaluate(cp, qkv, 1, causal, variant=variant).astype(np.float32)
    assert np.isfinite(got).all()
    rows = np.array([0, 1, 127, 128, 30000, T - 2, T - 1])
    mask = np.where(np.arange(T) <= (rows[:, None] if causal else T), 0, -np.inf)
    q, k, v = (qkv[:, i : i + 64].astype(np.float64) for i in (0, 64, 128))
    truth = reference.softmax(q[rows] @ k.T / 8 + mask) @ v
    single = [a.astype(np.float32) for a in (q[rows], k, v)]
    scores = plain.product(single[0], single[1].T) / np.float32(8) + mask.astype(np.float32)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    rounded = weights.astype(qkv.dtype).astype(np.float32)
    expected = plain.product(rounded, single[2]) / plain.running_sum(weights)
    plain.assert_as_accurate(got[rows], truth, expected.astype(qkv.dtype).astype(np.float32))


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    """2.4 billion values of qkv: the last sequence's result is that of the sequence alone."""
    cp = cupy_with()
    B, T, width = 1025, 1024, 2304
    with large_memory(2 * B * T * width * 4 // 3):
        qkv = cp.full((B, T, width), cp.nan, "float16")
        qkv[-1] = cp.asarray(made("float16", T, 12))
        got = ops.attention(qkv, 12, True)[-1]
        assert bool((got == ops.attention(qkv[-1], 12, True)).all())
        del qkv, got


@pytest.mark.parametrize(
    ("device", "variant"),
    [("shuffled", "mma"), *(pytest.param("gpu", v, marks=GPU.marks) for v in ("mma", "hopper"))],
    indirect=["device"],
)
def test_the_op(device: Any, cp: ModuleType, variant: str) -> None:
    for dtype in DTYPES:
        x = made(dtype, 60, 3).reshape(2, 30, -1)
        qkv = device.asarray(x)
        strided = device.asarray(np.repeat(x, 2, axis=1))[:, ::2]
        starts = device.asarray(np.array([0, 30, 60], np.int32))
        ragged = {"cu_seqlens": starts, "max_seqlen": 30}
        for causal in (False, True):
            got = ops.attention(qkv, 3, causal, variant)
            assert_right(got.get().reshape(60, -1), x.reshape(60, -1), [30, 30], 3, causal)
            assert bool((ops.attention(strided, 3, causal, variant) == got).all())
            kept = []
            for _ in range(2):  # the second time warm, with other arrays
                kept.append(device.asarray(x).reshape(60, -1))
                packed = ops.attention(kept[-1], 3, causal, variant, **ragged)
                assert bool((packed.reshape(got.shape) == got).all())
            assert ops.attention(qkv, 3, causal).dtype == qkv.dtype


def expanded(qkv: Array, heads: Heads) -> Array:
    """Rows [Q | K | V] (..., 3Q) of the same attention without groups."""
    NH, NKV, HS = heads
    q, k, v = np.split(qkv, [NH * HS, (NH + NKV) * HS], axis=-1)
    return np.concatenate([q, repeated(k, heads), repeated(v, heads)], axis=-1)


GROUPED = [
    ((4, 2, 128), "bfloat16", False),
    ((8, 2, 64), "float16", True),
    ((2, 1, 64), "bfloat16", True),
    ((3, 1, 128), "float16", True),
]


@pytest.mark.parametrize(
    ("device", "variant", "heads", "dtype", "causal"),
    [("shuffled", "mma", *case) for case in GROUPED[:2]]
    + [pytest.param("gpu", v, *c, marks=GPU.marks) for v in ("mma", "hopper") for c in GROUPED],
    indirect=["device"],
    ids=str,
)
def test_grouped_queries(
    device: Any, cp: ModuleType, variant: str, heads: Heads, dtype: str, causal: bool
) -> None:
    """A ragged batch: the bits of repeated heads of K and V, and of a sequence alone."""
    NH, NKV, _ = heads
    lengths = [37, 0, 70, 1] if variant == "mma" else [37, 0, 400, 1, 129]
    qkv = plain.normal(NH, sum(lengths), row_width(heads)).astype(DTYPES[dtype])
    got = evaluate(device, qkv, NH, causal, lengths, variant, NKV)
    wide = expanded(qkv, heads)
    same_bits(evaluate(device, wide, NH, causal, lengths, variant), got)
    assert_right(got, wide, lengths, NH, causal)
    one = slice(37, 37 + lengths[2])
    same_bits(evaluate(device, qkv[one], NH, causal, lengths[2:3], variant, NKV), got[one])


@pytest.mark.gpu
@pytest.mark.parametrize("variant", WAYS)
@pytest.mark.parametrize("heads", [(2, 2, 128), (4, 1, 128), (4, 2, 64)], ids=str)
@pytest.mark.parametrize("T", [1, 127, 128, 129, 640, 2048])
def test_grouped_queries_on_hopper(cp: ModuleType, variant: str, T: int, heads: Heads) -> None:
    """Whole and partial tiles, and values that are not finite, which later rows alone see."""
    NH, NKV, HS = heads
    qkv = plain.normal(T, 2, T, row_width(heads)).astype(np.float16)
    for causal in (False, True):
        truth = reference.attention(qkv.astype(np.float64), NH, causal, NKV)
        got = evaluate(cp, qkv, NH, causal, (), variant, NKV)
        assert np.abs(got.astype(np.float64) - truth).max() <= 2.0**-8 * np.abs(truth).max()
    if T < 129:
        return
    spoiled = qkv.copy()
    spoiled[:, -1, -NKV * HS :] = np.inf
    after = evaluate(cp, spoiled, NH, True, (), variant, NKV)
    same_bits(after[:, :-1], got[:, :-1])
    assert not np.isfinite(after[:, -1].astype(np.float32)).any()


@one_order
def test_bad_input(device: Any) -> None:
    cupy_with()
    x = device.zeros((5, 384), "float16")
    starts = device.asarray(np.array([0, 2, 5], np.int32))
    ragged = {"cu_seqlens": starts, "max_seqlen": 3}
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((x.get(), 2), {"variant": "mma"}, "qkv: expected a CuPy array, got ndarray"),
        *(
            (
                (x.astype("float32"), 2),
                {"variant": variant},
                f"variant {variant}: qkv: expected float16 or bfloat16, got float32",
            )
            for variant in ("mma", "hopper")
        ),
        ((x, 2), {"variant": "online"}, "qkv: expected float32, got float16"),
        ((x, 4), {"variant": "mma"}, "mma: head size 32: tensor cores take 64 and 128"),
        ((x, 4), {"variant": "hopper"}, "hopper: head size 32: tensor cores take 64 and 128"),
        ((x, 5), {}, "C a multiple of n_head 5, got"),
        ((x, 6), {"n_kv_head": 4}, "n_kv_head: expected a divisor of n_head 6, got 4"),
        ((x, 6), {"n_kv_head": 0}, "n_kv_head: expected a divisor of n_head 6, got 0"),
        ((x, 5), {"n_kv_head": 1}, r"W a multiple of 5 \+ 2 · 1 heads, got \(5, 384"),
        ((x, 2), {"max_seqlen": 3}, "max_seqlen: belongs to cu_seqlens"),
        ((x, 2), {"cu_seqlens": starts}, "max_seqlen: expected the length of the longest"),
        ((x, 2), {**ragged, "max_seqlen": 6}, "max_seqlen: expected .*, 1 to the 5 rows"),
        ((x, 2), {**ragged, "cu_seqlens": starts.astype("int64")}, "cu_seqlens: expected int32"),
        ((x, 2), {**ragged, "cu_seqlens": starts[:1]}, r"cu_seqlens: expected shape \(B \+ 1,\)"),
        ((x[None], 2), ragged, r"qkv: expected shape \(N, W\), got \(1, 5, 384\)"),
        ((x.astype("float32"), 2), ragged, "float32 takes sequences of one length"),
    ]
    if replaced():
        cases += [((x, 2), {"variant": "hopper"}, "variant hopper: .*use variant mma")]
    for args, options, message in cases:
        with pytest.raises(InputError, match=message):
            ops.attention(*args, **options)
