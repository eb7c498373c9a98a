"""Attention by kernels_cu/attention/hopper.cu, on a GPU of compute capability 9.0.

The error rule and the plain evaluation are those of the kernel for older tensor cores.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from gpt2block import InputError
from gpt2block.cuda import kernels
from gpt2block.ops._attention_tiles import HOPPER_SHARED, HOPPER_THREADS, hopper_geometry
from gpt2block.ops._tensor_cores import HOPPER_CAPABILITY
from gpt2block.ops.attention import HOPPER, MMA, bind
from tests import test_attention_mma
from tests.devices import running_on
from tests.gpus import cupy_with
from tests.test_attention_mma import (
    DTYPES,
    assert_a_long_sequence,
    assert_right,
    both_dtypes,
    both_masks,
    made,
    parts,
)
from tests.test_attention_mma import same_bits as same


def test_the_grid() -> None:
    """A block for every tile, and no more than multiprocessors; all other numbers are fixed."""
    for B, T, NH, blocks in ((1, 1, 1, 1), (1, 1024, 12, 96), (8, 1024, 12, 132), (3, 129, 2, 12)):
        for causal in (False, True):
            geometry, band = hopper_geometry(B, T, NH, causal, sms=132)
            assert geometry.grid == (blocks,)
            assert (geometry.block, geometry.shared) == ((HOPPER_THREADS[64],), HOPPER_SHARED[64])
            heads = (("ATT_SIZE", 64), ("ATT_SERVES", 1))
            assert geometry.defines == (("ATT_CAUSAL", int(causal)), *heads)
            assert 1 <= band <= B * NH
    with pytest.raises(InputError, match="use smaller batches"):
        hopper_geometry(2**20, 2**20, 12, True, sms=132)


def test_the_arguments_of_the_kernel() -> None:
    (signature,) = kernels.signatures(HOPPER).values()
    assert [p.name for p in signature.parameters] == [
        *("map", "qkv", "cu_seqlens", "out", "B", "seq_len", "n_head", "together")
    ]


@pytest.fixture
def cp() -> ModuleType:
    return cupy_with(HOPPER_CAPABILITY)


on_gpu = partial(test_attention_mma.evaluate, variant="hopper")


@pytest.mark.gpu
@both_dtypes
@both_masks
@pytest.mark.parametrize("T", [1, 17, 64, 100, 128, 129, 256, 300, 1000, 1024, 4096])
def test_lengths(cp: ModuleType, T: int, causal: bool, dtype: str) -> None:
    """Also: alone, in a batch, or one of packed rows, the bits are the same."""
    B, n_head = (1, 2) if T > 1024 else (3, 12)
    qkv = made(dtype, B * T, n_head)
    got = on_gpu(cp, qkv.reshape(B, T, -1), n_head, causal)
    for b in (0, B - 1):
        same(on_gpu(cp, qkv[b * T : (b + 1) * T], n_head, causal), got[b])
    assert_right(got[0], qkv[:T], [T], n_head, causal, cp)
    same(on_gpu(cp, qkv, n_head, causal, [T] * B), got.reshape(B * T, -1))


@pytest.mark.gpu
@both_dtypes
@both_masks
def test_ragged_batches(cp: ModuleType, causal: bool, dtype: str) -> None:
    lengths, n_head = [300, 0, 1, 128, 1000, 65, 640], 3
    qkv = made(dtype, sum(lengths), n_head)
    got = on_gpu(cp, qkv, n_head, causal, lengths)
    assert_right(got, qkv, lengths, n_head, causal, cp)
    for part in parts(lengths):
        if part.stop > part.start:
            same(on_gpu(cp, qkv[part], n_head, causal), got[part])


@pytest.mark.gpu
@both_masks
def test_more_tiles_than_blocks(cp: ModuleType, causal: bool) -> None:
    """A sequence among so many that blocks take several tiles, in bands of heads."""
    T, B = 700, 70
    one = made("bfloat16", T, 12)
    many = cp.asarray(np.broadcast_to(one, (B, *one.shape)))
    got = on_gpu(cp, many, 12, causal)
    alone = on_gpu(cp, one, 12, causal)
    for b in range(B):
        same(got[b], alone)


@pytest.mark.gpu
@both_dtypes
@both_masks
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_a_row_does_not_see_leaves_no_trace(
    cp: ModuleType, causal: bool, dtype: str, value: float
) -> None:
    """Later keys, and other sequences: no bit changes, whatever stands there."""
    lengths, n_head = [130, 475, 300], 2
    qkv = made(dtype, sum(lengths), n_head)
    clean = on_gpu(cp, qkv, n_head, causal, lengths)
    wrong = qkv.copy()
    middle = parts(lengths)[1]
    wrong[: middle.start] = wrong[middle.stop :] = value
    seen = middle
    for key in (0, 1, 63, 64, 100, 128, 300, 474) if causal else (0,):
        if causal:
            seen = slice(middle.start, middle.start + key + 1)
            wrong[seen] = qkv[seen]
            wrong[seen.stop :, 128:] = value  # K and V
        same(on_gpu(cp, wrong, n_head, causal, lengths)[seen], clean[seen])
    if causal:
        dense = on_gpu(cp, wrong[middle], n_head, causal)
        same(dense, clean[middle])


@pytest.mark.gpu
@both_dtypes
@both_masks
@pytest.mark.parametrize("key", [0, 141, 256, 299])
def test_values_that_are_not_finite(cp: ModuleType, key: int, causal: bool, dtype: str) -> None:
    """They come to all rows that see them, and to no other; in the first keys taken, and later."""
    T = 300
    qkv = made(dtype, T, 2)
    clean = on_gpu(cp, qkv, 2, causal)
    for value in (np.nan, np.inf, -np.inf):
        wrong = qkv.copy()
        wrong[key, 256 + 64 + 3] = value
        got = on_gpu(cp, wrong, 2, causal)
        reached = np.zeros(got.shape, bool)
        reached[key if causal else 0 :, 64 + 3] = True
        same(got[~reached], clean[~reached])
        np.testing.assert_array_equal(got[reached].astype(np.float32), np.float32(value))
    wrong = qkv.copy()
    wrong[key, 128 + 5] = np.nan  # K, of the first head
    got = on_gpu(cp, wrong, 2, causal)
    reached = np.zeros(got.shape, bool)
    reached[key if causal else 0 :, :64] = True
    same(got[~reached], clean[~reached])
    assert np.isnan(got[reached].astype(np.float32)).all()


@pytest.mark.gpu
@both_dtypes
def test_scores_of_any_size(cp: ModuleType, dtype: str) -> None:
    """Rows whose largest score grows from tile to tile, or is far below the others' zero."""
    T = 600
    qkv = made(dtype, T, 2)
    ramp = np.linspace(-6, 6, T)[:, None]
    qkv[:, 128:256] = (qkv[:, 128:256].astype(np.float32) * ramp).astype(qkv.dtype)
    qkv[:, :64] = (qkv[:, :64].astype(np.float32) * 4).astype(qkv.dtype)
    for causal in (False, True):
        assert_right(on_gpu(cp, qkv, 2, causal), qkv, [T], 2, causal, cp)


@pytest.mark.gpu
@both_dtypes
@both_masks
def test_a_long_sequence(cp: ModuleType, causal: bool, dtype: str) -> None:
    assert_a_long_sequence(cp, causal, dtype, "hopper")


@pytest.mark.gpu
def test_the_op(cp: ModuleType) -> None:
    """By default, with strides, and called again with other arrays of the same shape."""
    from gpt2block import ops  # noqa: PLC0415

    for dtype in DTYPES:
        x = made(dtype, 400, 3).reshape(2, 200, -1)
        starts = cp.asarray(np.array([0, 200, 400], np.int32))
        for causal in (False, True):
            expected = on_gpu(cp, x, 3, causal)
            kept = []
            for _ in range(3):
                qkv = cp.asarray(x)
                kept.append(qkv)
                same(ops.attention(qkv, 3, causal).get(), expected)
                packed = qkv.reshape(400, -1)
                options = {"cu_seqlens": starts, "max_seqlen": 200}
                ragged = ops.attention(packed, 3, causal, "hopper", **options)
                same(ragged.get(), expected.reshape(400, -1))
            strided = cp.asarray(np.repeat(x, 2, axis=1))[:, ::2]
            same(ops.attention(strided, 3, causal, "hopper").get(), expected)


@pytest.mark.gpu
def test_bad_input(cp: ModuleType) -> None:
    from gpt2block import ops  # noqa: PLC0415

    x = cp.zeros((5, 384), "float16")
    for args, message in (
        (
            (x.astype("float32"), 2),
            "variant hopper: qkv: expected float16 or bfloat16, got float32",
        ),
        ((cp.zeros((5, 96), "float16"), 1), "variant hopper: head size 32: tensor cores take 64"),
    ):
        with pytest.raises(InputError, match=message):
            ops.attention(*args, variant="hopper")


def test_other_gpus_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("gpt2block.ops.attention")
    monkeypatch.setattr(module, "launch_at", lambda file, *_: file)
    monkeypatch.setattr(module, "tensor_map", lambda *_: None)
    for capability, best in ((80, MMA), (90, HOPPER), (120, MMA)):
        monkeypatch.setattr(module, "compute_capability", lambda now=capability: now)
        with running_on("forward") as device:
            qkv = device.zeros((5, 192), "float16")
            launches: tuple[Any, ...] = bind((qkv,), n_head=1, causal=False).launches
            assert launches == (best,)
