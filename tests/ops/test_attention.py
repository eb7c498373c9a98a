"""Attention in float32 and of hi/lo matrices: tiles, barriers, magnitudes of rows, calls.

A hi/lo matrix is (hi + lo 2^-11) scale, with a scale for each row.
tests/ops/test_attention_laws.py has the requirements of every attention kernel.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import InputError, ops, reference
from gpt2block.cuda import replaced
from gpt2block.emulator import Order
from gpt2block.models.weights.hi_lo import HiLoMatrix, scale_for
from gpt2block.ops.engines.attention_tiles import online_geometry
from tests import plain
from tests.attentions import KERNELS, Kernel, as_hi_lo, assert_right, by_length
from tests.caches import row_width
from tests.devices import (
    GPU,
    assert_barriers_show,
    on_gpu,
    one_order,
    running_on,
    set_attributes,
    slow,
)
from tests.gpus import H200, HOPPER_CAPABILITY, MMA_CAPABILITY, RTX, cupy_with
from tests.plain import normal

ONLINE_KERNEL = Kernel(partial(by_length, "online"))
T4 = 65536


@pytest.mark.parametrize("device", ["shuffled"], indirect=True)
def test_tiles_for_little_shared_memory(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with 64 KB of shared memory per block gets smaller tiles."""
    set_attributes(monkeypatch, MaxSharedMemoryPerBlockOptin=T4)
    geometry = online_geometry(1, 150, 1, 128, NKV=1, block=None, max_shared=T4)
    assert geometry.shared <= T4
    qkv, sizes = normal(150, 150, 384), ([150], (1, 1, 128), True)
    assert_right(ONLINE_KERNEL(device, qkv, *sizes), qkv, *sizes)


@pytest.mark.slow
def test_missing_warp_barriers_show() -> None:
    """test_attention_cached.py tests the barriers of blocks in the same file."""
    qkv = normal(0, 150, 48)

    def run(order: Order) -> None:
        with running_on(order) as device:
            ONLINE_KERNEL(device, qkv, [150], (1, 1, 16), False)

    assert_barriers_show("lib/attention/online.cuh", run, 2, "__syncwarp();")


# --- calls


@on_gpu
def test_more_sequences_than_a_grid_has_rows(device: Any) -> None:
    qkv = device.asarray(normal(0, 70000, 2, 12))
    for variant in ("naive", "online"):
        got = ops.attention(qkv, 1, True, variant).get()
        x = qkv.get()
        plain.assert_as_accurate(
            got, reference.attention(x.astype(np.float64), 1, True), plain.attention(x, 1, True)
        )


@one_order
def test_the_op_takes_packed_rows(device: Any) -> None:
    """Sequences of one length have the same bits packed; the second call repeats the first one."""
    cupy_with()
    x = device.asarray(normal(0, 2, 30, 9 * 64).astype(np.float16))
    starts = device.asarray(np.array([0, 30, 60], np.int32))
    batch = ops.attention(x, 3)
    for _ in range(2):
        packed = ops.attention(x.reshape(60, -1), 3, cu_seqlens=starts, max_seqlen=30)
        np.testing.assert_array_equal(packed.get(), batch.get().reshape(60, -1))


# --- hi/lo matrices


Array = NDArray[Any]
MAX_SHARED = H200["max_shared"]
each_mask = pytest.mark.parametrize("causal", [slow(False), True])
every_variant = pytest.mark.parametrize(
    ("device", "variant"),
    [("shuffled", "mma"), *(pytest.param("gpu", v, marks=GPU.marks) for v in ("mma", "wgmma"))],
    indirect=["device"],
)


@pytest.fixture
def device(device: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    set_attributes(monkeypatch, MaxSharedMemoryPerBlockOptin=MAX_SHARED)
    cupy_with()  # tensor cores
    return device


@pytest.fixture
def cp(device: Any, variant: str) -> Any:
    cupy_with(MMA_CAPABILITY if variant == "mma" else HOPPER_CAPABILITY)
    return device


@every_variant
@each_mask
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_rows_of_any_size(cp: Any, variant: str, causal: bool, size: float) -> None:
    """V shares scales with Q and K but has other magnitudes; there are outliers and a zero row."""
    T, heads = 100 if replaced() else 300, (1, 1, 64)
    qkv = plain.normal(1, T, 192)
    qkv[:, 128:] *= np.float32(size) * 10 ** np.linspace(-2, 2, T, dtype=np.float32)[::-1, None]
    qkv[:, 128 + 7] *= 100
    qkv[40] = 0
    got = KERNELS[f"{variant}-hi-lo"](cp, qkv, [T], heads, causal)
    assert_right(got, qkv, [T], heads, causal, np if replaced() else cp)


@every_variant
@each_mask
def test_one_scale_for_all_rows(cp: Any, variant: str, causal: bool) -> None:
    """The kernel for one scale gives the bits of the kernel for a scale per row."""
    heads, lengths = (1, 1, 64), [1, 70, 0, 33]
    if not replaced():
        heads, lengths = (4, 4, 64), [1024, 1, 500, 64, 65, 127]
    qkv = plain.normal(5, sum(lengths), row_width(heads))
    scale = scale_for(3 * float(np.abs(qkv).max()))

    def with_one_scale(x: Array) -> tuple[Array, Array]:
        high = (x / np.float32(scale)).astype(np.float16)
        low = ((x / np.float32(scale) - high) * 2048).astype(np.float16)
        return np.stack([high, low]), np.full(len(x), scale, np.float32)

    one, several = (
        Kernel(partial(as_hi_lo, variant, convert=with_one_scale, one_scale=known))(
            cp, qkv, lengths, heads, causal
        )
        for known in (scale, None)
    )
    np.testing.assert_array_equal(one, several)
    assert_right(one, qkv, lengths, heads, causal, np if replaced() else cp)


@one_order
def test_too_little_shared_memory_is_refused(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    set_attributes(monkeypatch, MaxSharedMemoryPerBlockOptin=RTX["max_shared"])
    if replaced():
        large = HiLoMatrix.from_float32(device.zeros((5, 4 * 128), "float32"))
        with pytest.raises(InputError, match="head size 128: hi/lo matrices take 104,448 bytes"):
            ops.attention(large, 2, n_kv_head=1)
