"""Attention in float32: blocks, tiles, barriers, launches and calls.

tests/ops/test_attention_laws.py has the requirements of every attention kernel.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from gpt2block import ops, reference
from gpt2block.emulator import Order
from gpt2block.ops.engines.attention_tiles import online_geometry
from tests import plain
from tests.attentions import Kernel, assert_right, by_length
from tests.caches import Heads, row_width
from tests.devices import (
    assert_barriers_show,
    on_gpu,
    one_order,
    running_on,
    set_attributes,
)
from tests.gpus import cupy_with
from tests.plain import normal

ONLINE_KERNEL = Kernel(partial(by_length, "online"))
T4 = 65536


def assert_computed(device: Any, kernel: Kernel, T: int, heads: Heads, causal: bool) -> None:
    qkv = normal(T, T, row_width(heads))
    assert_right(kernel(device, qkv, [T], heads, causal), qkv, [T], heads, causal)


@pytest.mark.parametrize("device", ["shuffled"], indirect=True)
def test_tiles_for_little_shared_memory(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with 64 KB of shared memory per block gets smaller tiles."""
    set_attributes(monkeypatch, MaxSharedMemoryPerBlockOptin=T4)
    geometry = online_geometry(1, 150, 1, 128, NKV=1, block=None, max_shared=T4)
    assert geometry.shared <= T4
    assert_computed(device, ONLINE_KERNEL, 150, (1, 1, 128), True)


@pytest.mark.slow
def test_missing_warp_barriers_show() -> None:
    """test_attention_cached.py tests the barriers of blocks in the same file."""
    qkv = normal(0, 150, 48)

    def run(order: Order) -> None:
        with running_on(order) as device:
            ONLINE_KERNEL(device, qkv, [150], (1, 1, 16), False)

    assert_barriers_show("lib/attention/online.cuh", run, 2, "__syncwarp();")


# --- launches


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
