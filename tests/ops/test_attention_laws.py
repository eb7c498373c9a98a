"""Requirements of every kernel of attention, whatever its instructions and its source of K and V.

Tests run the kernels of tests/attentions.py on the emulator and on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import InputError, ops, reference
from tests import plain
from tests.attentions import FAMILIES, KERNELS, Kernel, assert_right, both_masks, expanded, parts
from tests.caches import Heads
from tests.devices import GPU, IN_TESTS, assert_same_bits, running_on, set_attributes
from tests.gpus import H200, HOPPER_CAPABILITY, cupy_with, large_memory

Array = NDArray[Any]
NOT_FINITE = (np.nan, np.inf, -np.inf)


@pytest.fixture
def cp(
    where: str, kernel: Kernel, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Any]:
    with running_on(where, races=request.function is test_right) as cupy:
        set_attributes(monkeypatch, MaxSharedMemoryPerBlockOptin=H200["max_shared"])
        cupy_with(kernel.capability)
        yield cupy


def engine(name: str) -> str:
    """Return which of the kernels' ways to compute a name of KERNELS stands for."""
    return next((way for way in ("wgmma", "mma", "split", "tiles") if way in name), "float32")


def every_kernel(
    turn: int | None = None,
    all_heads: bool = False,
    orders: Sequence[str] = ("shuffled",),
    names: Sequence[str] = ("",),
    wide: bool = True,
) -> pytest.MarkDecorator:
    """Parametrize `where`, `kernel`, `heads` and `causal`.

    The emulator runs laws with the first heads of a family and a mask, without twins. By default it
    runs one kernel of each engine, the one whose `turn` it is, and all with --slow. Without a turn,
    it runs all kernels, twins too. Kernels that refuse some of the laws always run; a law's further
    heads run with --slow.
    all_heads: use all heads of a family, the further ones with and without a mask alternately.
    orders: thread orders of the emulator for the first heads; other heads run in the last order.
    names: beginnings of names of kernels. wide: run the wide heads on a GPU, too.
    """
    found = []
    takes_turns: dict[str, list[Kernel]] = {}
    for name, kernel in KERNELS.items():
        if kernel.scaled and not kernel.twin and name.startswith(tuple(names)):
            takes_turns.setdefault(engine(name), []).append(kernel)
    for family in FAMILIES:
        for n, (name, kernel, heads, tier) in enumerate(family.cases()):
            first = heads == family.heads[0]
            places: list[str] = []
            if tier and (all_heads if kernel.twin or not first else True):
                of_hopper = kernel.capability == HOPPER_CAPABILITY
                places += ["hopper"] if of_hopper else orders if first else orders[-1:]
            if first or all_heads or (wide and heads in family.wide):
                places += ["gpu"]
            one = kernel.masks[-1 if first else n % len(kernel.masks)]
            own = takes_turns.get(engine(name), [kernel])
            usual = not kernel.scaled or turn is None or kernel is own[turn % len(own)]
            usual &= tier == "default" and (first or turn is None)
            for where, causal in product(places, kernel.masks):
                both = where == "gpu" or all_heads
                if name.startswith(tuple(names)) and (both or causal == one):
                    text = "-".join((where, name, str(heads), "mask" if causal else "all"))
                    late = [pytest.mark.slow] * (not usual or causal != one)
                    marks = GPU.marks if where == "gpu" else late
                    case = where, kernel, heads, causal
                    found.append(pytest.param(*case, id=text, marks=marks))
    return pytest.mark.parametrize(("where", "kernel", "heads", "causal"), found)


def values_of(qkv: Array, heads: Heads) -> Array:
    """Return a view of V."""
    return qkv[:, (heads[0] + heads[1]) * heads[2] :]


def keys_of(qkv: Array, heads: Heads) -> Array:
    """Return a view of K."""
    NH, NKV, HS = heads
    return qkv[:, NH * HS : (NH + NKV) * HS]


def lengths_of(where: str, heads: Heads) -> list[int]:
    """Return lengths that fill tiles of 16 to 128 rows or not; some have several blocks."""
    if where == "gpu":
        common = heads[2] in (64, 128)
        long = [777, 1000, 1023, 1024, 2048, 4096][: 6 if heads == (2, 2, 64) else 5 * common]
        return [300, 0, 1, 127, 128, 129, 640, 65, 64, 17, 100, 256, 257, *long]
    if where == "hopper":  # blocks have hundreds of threads
        return [0, 70, 17]
    # Other heads, and a second order of threads, take the emulator long.
    few = where == IN_TESTS[-1] and heads[0] <= 3 and heads[0] * heads[2] <= 128
    return [1, 70, 16, 0, 15, 17, 5, 33] if few else [0, 70 if heads[2] < 512 else 34, 1, 17]


@every_kernel(all_heads=True, orders=IN_TESTS)
def test_right(cp: Any, where: str, kernel: Kernel, heads: Heads, causal: bool) -> None:
    """Results are accurate, with the same bits in other calls.

    These calls have each sequence alone, a sequence twice, K and V with repeated heads, and, if
    causal, the first rows alone. The emulator compares bits only in its last thread order, for
    sequences of less than a tile, of one and of several.
    """
    lengths = lengths_of(where, heads)
    qkv = kernel.made(sum(lengths), heads)
    got = kernel(cp, qkv, lengths, heads, causal)
    assert_right(got, qkv, lengths, heads, causal, cp if where == "gpu" else np)
    if where in IN_TESTS[:-1] or (where == "hopper" and kernel.twin):
        return
    for part in filter(lambda part: part.stop > part.start, parts(lengths)):
        T = part.stop - part.start
        if where != "gpu" and T not in (1, 16, 17, 70):
            continue
        alone = kernel(cp, qkv[part], [T], heads, causal)
        assert_same_bits(alone, got[part])
        if T in (17, 1000):
            two = kernel(cp, np.tile(qkv[part], (2, 1)), [T, T], heads, causal)
            assert_same_bits(two, np.tile(alone, (2, 1)))
        if T in (70, 640) and causal:
            for n in (1, T // 10, 64):
                assert_same_bits(kernel(cp, qkv[part][:n], [n], heads, True), alone[:n])
    if heads[1] < heads[0] and not kernel.narrow:  # with FP8, teams add in another order
        wide = expanded(qkv, heads)
        same = kernel(cp, wide, lengths, (heads[0], heads[0], heads[2]), causal)
        assert_same_bits(same, got)


@pytest.mark.slow
@every_kernel(2, wide=False)
def test_scores_of_another_scale(
    cp: Any, where: str, kernel: Kernel, heads: Heads, causal: bool
) -> None:
    """A doubled scale gives the bits of doubled queries if sqrt(HS) is a power of two."""
    lengths, scale = [17, 1, 70], 2 / heads[2] ** 0.5
    qkv = kernel.made(sum(lengths), heads)
    if not kernel.scaled:
        with pytest.raises(InputError, match="softmax_scale: divides by the square root"):
            kernel(cp, qkv, lengths, heads, causal, scale=scale)
        return
    got, doubled = kernel(cp, qkv, lengths, heads, causal, scale=scale), qkv.copy()
    doubled[:, : heads[0] * heads[2]] *= 2
    assert_right(got, doubled, lengths, heads, causal)
    if not kernel.one_scale:  # otherwise a row's largest value sets its scale
        assert_same_bits(got, kernel(cp, doubled, lengths, heads, causal))


@every_kernel(1)
def test_what_a_row_does_not_see_leaves_no_trace(
    cp: Any, where: str, kernel: Kernel, heads: Heads, causal: bool
) -> None:
    """NaN or infinity in later keys or other sequences changes no bit of a row.

    Rows that see such a value are not finite. The emulator tries each infinity at one key only.
    """
    lengths, keys = [30, 75], [5, 37]
    places = dict(zip(NOT_FINITE, (keys, [5], [37]), strict=True))
    if where == "gpu":
        lengths, keys = [130, 475, 300], [0, 1, 63, 64, 100, 128, 300, 473]
        places = dict.fromkeys(NOT_FINITE, keys)
    qkv = kernel.made(sum(lengths), heads)
    clean = kernel(cp, qkv, lengths, heads, causal)
    own = parts(lengths)[1]
    for value in NOT_FINITE[: kernel.values]:
        others = np.full_like(qkv, value)
        others[own] = qkv[own]
        got = kernel(cp, others, lengths, heads, causal)
        assert_same_bits(got[own], clean[own])
        for key in places[value] if causal else ():
            first = own.start + key + 1
            for columns in (keys_of, values_of):
                wrong = others.copy()
                columns(wrong, heads)[first:] = value
                got = kernel(cp, wrong, lengths, heads, causal)
                assert_same_bits(got[own.start : first], clean[own.start : first])
                if np.isnan(value) or columns is values_of:
                    assert not np.isfinite(got[first : own.stop].astype(np.float32)).any()


@every_kernel(0, wide=False)
def test_windows(cp: Any, where: str, kernel: Kernel, heads: Heads, causal: bool) -> None:
    """A row sees the last keys up to its own; NaN or infinity in others changes no bit."""
    lengths, windows, keys = [17, 1, 75], [20], [0, 37]
    if where == "gpu":
        lengths, windows, keys = [130, 1, 475], [65, 200], [0, 128, 250]
    qkv, own = kernel.made(sum(lengths), heads), parts(lengths)[2]
    for window in windows:
        if not (kernel.scaled and causal):
            with pytest.raises(InputError, match=r"window: (attends to all|needs causal=True)"):
                kernel(cp, qkv, lengths, heads, causal, window=window)
            continue
        clean = kernel(cp, qkv, lengths, heads, causal, window=window)
        xp = cp if where == "gpu" else np
        assert_right(clean, qkv, lengths, heads, causal, xp, window=window)
        for key, value in product(keys, NOT_FINITE[: kernel.values]):
            for columns in (keys_of, values_of) if np.isnan(value) else (values_of,):
                wrong, first = qkv.copy(), own.start + key
                columns(wrong, heads)[first, -1] = value
                got = kernel(cp, wrong, lengths, heads, causal, window=window)
                reached = slice(first, min(first + window, own.stop))
                assert not np.isfinite(got[reached, -1].astype(np.float32)).any()
                got[reached] = clean[reached]
                assert_same_bits(got, clean)
    if kernel.scaled and causal and where == "gpu":  # each window is a program to compile
        all_seen = kernel(cp, qkv, lengths, heads, causal, window=max(lengths))
        assert_same_bits(all_seen, kernel(cp, qkv, lengths, heads, causal))


@every_kernel(3)
def test_values_that_are_not_finite(
    cp: Any, where: str, kernel: Kernel, heads: Heads, causal: bool
) -> None:
    """A value in V affects only its channel, of the heads and queries that see it."""
    T, HS = 75 if where != "gpu" else 300, heads[2]
    qkv = kernel.made(T, heads)
    clean = kernel(cp, qkv, [T], heads, causal)
    for key in (37, 70) if where != "gpu" else (0, 63, 64, 141, 192, 256, 299):
        for value in NOT_FINITE[: kernel.values]:
            wrong = qkv.copy()
            values_of(wrong, heads)[key, -HS + 3] = value
            got = kernel(cp, wrong, [T], heads, causal).astype(np.float32)
            reached = np.zeros(got.shape, bool)
            serves = range(1, heads[0] // heads[1] + 1)  # heads of Q that the last one of V serves
            reached[key if causal else 0 :, [3 - HS * n for n in serves]] = True
            assert np.isfinite(got[~reached]).all()
            assert not np.isfinite(got[reached]).any()
            if kernel.infinity:
                np.testing.assert_array_equal(got[reached], np.float32(value))
            if kernel.one_scale:
                reached[key if causal else 0 :] = True
            np.testing.assert_array_equal(got[~reached], clean.astype(np.float32)[~reached])
        wrong = qkv.copy()
        keys_of(wrong, heads)[key, 5] = np.nan  # K's first head, which serves several of Q
        got = kernel(cp, wrong, [T], heads, causal).astype(np.float32)
        reached = np.zeros(got.shape, bool)
        reached[key if causal else 0 :, : heads[0] // heads[1] * HS] = True
        assert np.isnan(got[reached]).all()
        assert np.isfinite(got[~reached]).all()
        if not kernel.one_scale:
            np.testing.assert_array_equal(got[~reached], clean.astype(np.float32)[~reached])


@every_kernel(4)
def test_scores_that_are_not_finite(
    cp: Any, where: str, kernel: Kernel, heads: Heads, causal: bool
) -> None:
    """NaN in Q affects only its query; a key with a score of -inf has weight 0."""
    T, alone = 150, (1, 1, heads[2])
    qkv = np.abs(kernel.made(T, alone))
    qkv[3, 2] = np.nan
    got = kernel(cp, qkv, [T], alone, causal).astype(np.float32)
    assert np.isnan(got[3]).all()
    assert np.isfinite(np.delete(got, 3, axis=0)).all()
    if kernel.narrow or kernel.one_scale:
        return
    qkv = kernel.held(np.abs(kernel.made(T, alone)) + qkv.dtype.type(1), alone)
    keys_of(qkv, alone)[:130, 2] = -np.inf  # fills the first tiles of any size
    got = kernel(cp, qkv, [T], alone, causal)
    if causal:
        assert np.isnan(got[:130].astype(np.float32)).all()  # they see only such keys
    assert_right(got[130:], qkv[130:], [T - 130], alone, causal)


@every_kernel(5, wide=False)
def test_scores_of_any_size(
    cp: Any, where: str, kernel: Kernel, heads: Heads, causal: bool
) -> None:
    """Scores are in the hundreds and thousands, where only exp(score - max) is finite.

    The maximum grows or falls from tile to tile, or is far below zero in some tiles.
    """
    T = (600 if kernel.dtype == np.float32 else 200) if where == "gpu" else 140
    alone = (1, 1, heads[2])
    for ramp in (np.linspace(0.1, 40, T), np.linspace(40, 0.1, T), np.linspace(-24, 24, T), 30):
        qkv = kernel.made(T, alone)
        keys = keys_of(qkv, alone)
        keys[:] = keys.astype(np.float32) * np.reshape(ramp, (-1, 1))
        qkv = kernel.held(qkv, alone)
        got = kernel(cp, qkv, [T], alone, causal)
        assert_right(got, qkv, [T], alone, causal, cp if where == "gpu" else np)


@every_kernel(6, all_heads=True, orders=IN_TESTS, names=["tiles", "cached"])
def test_prompts_that_are_continued(
    cp: Any, where: str, kernel: Kernel, heads: Heads, causal: bool
) -> None:
    """New rows have the bits of all rows at once, and of the equal kernel without a cache.

    Starts are before, at and after bounds of tiles of keys; a sequence has no new rows. One
    sequence is also computed in pieces, with values that are not finite, on the emulator in the
    last thread order.
    """
    lengths, starts = [70, 9, 64, 130, 81], [5, 9, 63, 64, 17]
    if where == "gpu":
        lengths, starts = [1024, 300, 700, 1000, 9], [512, 299, 0, 333, 9]
    qkv = kernel.made(sum(lengths), heads)
    whole = kernel(cp, qkv, lengths, heads, causal)
    if kernel.alike:
        assert_same_bits(KERNELS[kernel.alike](cp, qkv, lengths, heads, causal), whole)
    got = kernel(cp, qkv, lengths, heads, causal, starts)
    tails = zip(parts(lengths), starts, strict=True)
    assert_same_bits(got, np.concatenate([whole[p][start:] for p, start in tails]))
    if where in (*IN_TESTS[:-1], "hopper"):
        return
    own = qkv[parts(lengths)[3]][:130]
    for value, keys in ((1, []), *((value, [18, 80]) for value in NOT_FINITE[: kernel.values])):
        values_of(own, heads)[keys, -heads[2] // 2 :] = value
        right = kernel(cp, own, [130], heads, causal).astype(np.float32)
        for first, end in pairwise((0, 1, 15, 16, 30, 63, 66, 129, 130)):
            piece = kernel(cp, own[:end], [end], heads, causal, [first])
            np.testing.assert_array_equal(piece.astype(np.float32), right[first:end])


@pytest.mark.gpu
@both_masks
@pytest.mark.parametrize(
    ("name", "size"),
    [("online", 20), ("online", 64), *((name, 64) for name in KERNELS if name.endswith("16")
                                       and name.startswith(("mma", "wgmma")))],
)  # fmt: skip
def test_a_long_sequence(name: str, size: int, causal: bool) -> None:
    """Some of 65,541 queries are checked; the scores of all would take 17 GB."""
    T, kernel = 65541, KERNELS[name]
    cp, qkv = cupy_with(kernel.capability), kernel.made(T, (1, 1, size))
    got = kernel(cp, qkv, [T], (1, 1, size), causal).astype(np.float32)
    assert np.isfinite(got).all()
    rows = np.array([0, 1, 127, 128, 30000, T - 6, T - 5, T - 1])
    mask = np.where(np.arange(T) <= (rows[:, None] if causal else T), 0, -np.inf)
    q, k, v = (qkv[:, i * size : (i + 1) * size] for i in range(3))
    wide = [a.astype(np.float64) for a in (q[rows], k, v)]
    truth = reference.softmax(wide[0] @ wide[1].T / np.sqrt(size) + mask) @ wide[2]
    narrow = [a.astype(np.float32) for a in (q[rows], k, v)]
    scores = plain.product(narrow[0], narrow[1].T) / np.float32(np.sqrt(size))
    scores = scores + mask.astype(np.float32)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    rounded = weights.astype(qkv.dtype).astype(np.float32)
    expected = plain.product(rounded, narrow[2]) / plain.running_sum(weights)
    plain.assert_as_accurate(got[rows], truth, expected.astype(qkv.dtype).astype(np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "variant"), [("float32", "online"), ("float16", None)])
def test_offsets_beyond_32_bits(dtype: str, variant: str | None) -> None:
    """qkv has 2.4 billion values; the last sequence's result equals the sequence alone."""
    cp, (B, T, width) = cupy_with(), (1025, 1024, 2304)
    with large_memory(np.dtype(dtype).itemsize * B * T * width * 4 // 3):
        qkv = cp.full((B, T, width), cp.nan, dtype)
        qkv[-1] = cp.asarray(plain.normal(0, T, width).astype(dtype))
        got = ops.attention(qkv, 12, True, variant)[-1]
        assert bool((got == ops.attention(qkv[-1], 12, True, variant)).all())
        del qkv, got
