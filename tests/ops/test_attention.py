"""Attention in float32: blocks, tiles, barriers, launches and calls.

tests/ops/test_attention_laws.py has the requirements of every attention kernel.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from gpt2block import ops, reference
from gpt2block.emulator import Order
from gpt2block.ops.attention import OPERATION
from gpt2block.ops.engines.attention_tiles import online_geometry
from tests import plain
from tests.attentions import DTYPES, Kernel, assert_right, by_length
from tests.caches import Heads, row_width
from tests.devices import (
    GPU,
    assert_barriers_show,
    moved,
    on_gpu,
    running_on,
    set_attributes,
    slow,
)
from tests.gpus import HOPPER_CAPABILITY, MMA_CAPABILITY, cupy_with
from tests.plain import normal

VARIANTS = [variant.name for variant in OPERATION.variants if "float32" in variant.dtypes]
ONLINE_KERNEL = Kernel(partial(by_length, "online"))
H200 = 232448  # bytes of shared memory that a block can have
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


@pytest.mark.parametrize(
    ("device", "variant", "dtype"),
    [
        *(("shuffled", name, "float32") for name in VARIANTS),
        ("shuffled", "mma", "float16"),
        slow("shuffled", "mma", "bfloat16"),
        *(pytest.param("gpu", name, "float32", marks=GPU.marks) for name in VARIANTS),
        *(
            pytest.param("gpu", name, dtype, marks=GPU.marks)
            for name, dtype in product(("mma", "wgmma"), DTYPES)
        ),
    ],
    indirect=["device"],
)
def test_the_op(device: Any, variant: str, dtype: str) -> None:
    """It takes views, and sequences of one length as packed rows."""
    cupy_with({"mma": MMA_CAPABILITY, "wgmma": HOPPER_CAPABILITY}.get(variant, 0))
    narrow = dtype in DTYPES
    size = 64 if narrow else 16
    x = normal(0, 2, 30, 9 * size).astype(DTYPES.get(dtype, np.float32))
    qkv, others = device.asarray(x), [device.asarray(np.repeat(x, 2, axis=1))[:, ::2]]
    starts = device.asarray(np.array([0, 30, 60], np.int32))
    if not narrow:
        others.append(moved(x, 1))
        assert others[1].data.ptr % 16
    for causal in (False, True):
        got = ops.attention(qkv, 3, causal, variant)
        rows = got.get().reshape(60, -1), x.reshape(60, -1)
        assert_right(*rows, [30, 30], (3, 3, size), causal)
        for other in others:
            assert bool((ops.attention(other, 3, causal, variant) == got).all())
        assert bool((ops.attention(qkv[1], 3, causal, variant) == got[1]).all())
        kept = [device.asarray(x).reshape(60, -1) for _ in range(2 * narrow)]
        for again in kept:  # the second call is a repeated one, with another array
            given: Any = {"cu_seqlens": starts, "max_seqlen": 30}
            packed = ops.attention(again, 3, causal, variant, **given)
            assert bool((packed.reshape(got.shape) == got).all())
    assert ops.attention(qkv, 3).dtype == qkv.dtype
    np.testing.assert_array_equal(qkv.get(), x)
