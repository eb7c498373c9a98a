"""Attention of continued prompts on tensor cores: attention_cached_mma of attention/mma.cu.

Its queries have the bits that they have in attention_mma over the whole sequence, whose errors
tests/test_attention_mma.py bounds. The cache holds NaN after each sequence.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import InputError
from gpt2block.cuda import replaced
from gpt2block.ops.attention import VARLEN
from gpt2block.ops.attention_cached import ATTENTION_PACKED, tiles_geometry
from tests.caches import DTYPES, Heads, row_width
from tests.devices import combinations, every_device, on_gpu, one_order, running_on
from tests.plain import normal

Array = NDArray[Any]
SIXTEEN_BITS = ["float16", "bfloat16"]
HEADS: list[Heads] = [(2, 2, 64), (4, 2, 64), (2, 1, 128)]


def whole(device: Any, qkv: Array, lengths: list[int], heads: Heads) -> Array:
    """Each sequence at once, by attention_mma."""
    inputs = tuple(map(device.asarray, (qkv, np.array([0, *np.cumsum(lengths)], np.int32))))
    NH, NKV, _ = heads
    options: Any = {"n_head": NH, "n_kv_head": NKV, "max_seqlen": max(lengths), "causal": True}
    out: Array = VARLEN.bind(inputs, variant="mma", **options).run().get()
    return out


def continued(
    device: Any, qkv: Array, lengths: list[int], start: list[int], heads: Heads, n_ctx: int = 0
) -> Array:
    """The rows from `start` on of each sequence, over a cache; on a GPU twice, with equal bits."""
    NH, NKV, HS = heads
    Q, C = NH * HS, NKV * HS
    n_ctx = n_ctx or max(lengths) + 3
    held = np.full((2, len(lengths), n_ctx, C), np.nan, qkv.dtype)
    rows = []
    for b, (first, end) in enumerate(pairwise(np.cumsum([0, *lengths]).tolist())):
        held[0, b, : lengths[b]] = qkv[first:end, Q : Q + C]
        held[1, b, : lengths[b]] = qkv[first:end, Q + C :]
        rows.append(qkv[first + start[b] : end].copy())
        rows[-1][:, Q:] = np.nan  # K and V come from the cache
    new = [len(each) for each in rows]
    seams = np.array([0, *np.cumsum(new)], np.int32)
    given = (np.concatenate(rows), *held, seams, np.array(start, np.int32))
    inputs = tuple(map(device.asarray, given))
    options: Any = {"n_head": NH, "longest": max(new), "variant": "mma"}
    results = []
    for _ in range(1 if replaced() else 2):
        out = device.asarray(np.full((sum(new), Q), np.nan, qkv.dtype))
        results.append(ATTENTION_PACKED.bind(inputs, out, **options).run().get())
    same_bits(results[0], results[-1])
    found: Array = results[0]
    return found


def same_bits(a: Array, b: Array) -> None:
    """NaN equals NaN of any bits."""
    np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32))


def tails(whole: Array, lengths: list[int], start: list[int]) -> Array:
    ends = pairwise(np.cumsum([0, *lengths]).tolist())
    return np.concatenate([whole[a + s : b] for (a, b), s in zip(ends, start, strict=True)])


def rows_of(heads: Heads, lengths: list[int], dtype: str) -> Array:
    x: Array = normal(sum(lengths), sum(lengths), row_width(heads)).astype(DTYPES[dtype])
    return x


@every_device
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_a_continued_prompt(device: Any, dtype: str) -> None:
    """Starts before, at and after the borders of tiles of keys; a sequence without new rows."""
    heads, lengths, start = (2, 2, 64), [70, 9, 64, 130, 81], [5, 9, 63, 64, 17]
    qkv = rows_of(heads, lengths, dtype)
    right = tails(whole(device, qkv, lengths, heads), lengths, start)
    same_bits(continued(device, qkv, lengths, start, heads), right)


@combinations(times=1, heads=HEADS[1:], dtype=SIXTEEN_BITS)
def test_of_any_head(device: Any, heads: Heads, dtype: str) -> None:
    lengths, start = [40, 67], [0, 33]
    qkv = rows_of(heads, lengths, dtype)
    right = tails(whole(device, qkv, lengths, heads), lengths, start)
    same_bits(continued(device, qkv, lengths, start, heads), right)


@one_order
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("start", [0, 1, 15, 16, 30, 63, 66])
def test_values_that_are_not_finite(device: Any, start: int, value: float) -> None:
    """A query is as if the keys after its own did not exist, whatever their values are."""
    heads, lengths = (1, 1, 64), [90]
    qkv = rows_of(heads, lengths, "bfloat16")
    for at in (start + 3, start + 17):
        qkv[at, -40:] = value
    right = whole(device, qkv, lengths, heads)[start:]
    assert np.isfinite(right[:3].astype(np.float32)).all()
    assert not np.isfinite(right[3:].astype(np.float32)).all(axis=1).any()
    same_bits(continued(device, qkv, lengths, [start], heads), right)


@one_order
def test_a_sequence_gets_its_bits_in_pieces(device: Any) -> None:
    heads, lengths = (2, 1, 64), [150]
    qkv = rows_of(heads, lengths, "float16")
    right = whole(device, qkv, lengths, heads)
    for first, end in pairwise((0, 1, 50, 64, 131, 150)):
        got = continued(device, qkv[:end], [end], [first], heads)
        same_bits(got, right[first:end])


def test_what_lies_outside_is_left_out() -> None:
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


@one_order
def test_what_it_refuses(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seams, start = device.zeros(2, "int32"), device.zeros(1, "int32")

    def refused(dtype: str, C: int, said: str) -> None:
        k, v = (device.zeros((1, 9, C), dtype) for _ in range(2))
        inputs = device.zeros((5, 3 * C), dtype), k, v, seams, start
        options: Any = {"n_head": 1, "longest": 5}
        assert ATTENTION_PACKED.bind(inputs, **options).launches[0].name.startswith("attention_c")
        with pytest.raises(InputError, match=said):
            ATTENTION_PACKED.bind(inputs, **options, variant="mma")

    refused("float32", 64, "takes qkv, k and v of float16 or bfloat16: use variant tiles")
    refused("float16", 80, "head size 80: tensor cores take 64 and 128: use variant tiles")
    monkeypatch.setattr(sys.modules[tiles_geometry.__module__], "compute_capability", lambda: 75)
    refused("float16", 64, "needs a GPU of compute capability 8.0 or newer")


@on_gpu
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_at_gpt2_sizes(device: Any, dtype: str) -> None:
    heads, lengths = (12, 12, 64), [1024, 300, 700, 1000]
    start = [512, 299, 0, 333]
    qkv = rows_of(heads, lengths, dtype)
    right = tails(whole(device, qkv, lengths, heads), lengths, start)
    same_bits(continued(device, qkv, lengths, start, heads), right)
