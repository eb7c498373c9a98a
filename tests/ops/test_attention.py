"""Attention in float32: blocks, tiles, barriers, launches and calls.

tests/ops/test_attention_laws.py has the requirements of every attention kernel.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import InputError, ops, reference
from gpt2block.cuda import cupy, replaced
from gpt2block.emulator import Order, emulated
from gpt2block.ops.attention import ONLINE, OPERATION, naive_geometry
from gpt2block.ops.engines.attention_tiles import online_geometry
from tests import plain
from tests.attentions import DTYPES, Kernel, assert_right, by_length
from tests.caches import Heads, row_width
from tests.compiling import assert_clean
from tests.devices import (
    GPU,
    assert_barriers_show,
    moved,
    on_gpu,
    one_order,
    running_on,
    set_attributes,
    slow,
)
from tests.gpus import HOPPER_CAPABILITY, MMA_CAPABILITY, cupy_with
from tests.plain import normal

Array = NDArray[Any]
VARIANTS = [variant.name for variant in OPERATION.variants if "float32" in variant.dtypes]
ONLINE_KERNEL = Kernel(partial(by_length, "online"))
H200 = 232448  # bytes of shared memory that a block can have
T4 = 65536


def assert_computed(device: Any, kernel: Kernel, T: int, heads: Heads, causal: bool) -> None:
    qkv = normal(T, T, row_width(heads))
    assert_right(kernel(device, qkv, [T], heads, causal), qkv, [T], heads, causal)


@pytest.mark.parametrize(
    ("device", "variant", "block"),
    [
        ("shuffled", "naive", 32),
        ("shuffled", "online", 64),
        slow("shuffled", "naive", 128),
        slow("shuffled", "online", 256),
        *(
            pytest.param("gpu", name, block, marks=GPU.marks)
            for name in ("naive", "online")
            for block in OPERATION.variant(name).blocks
        ),
    ],
    indirect=["device"],
)
def test_block_sizes(device: Any, variant: str, block: int) -> None:
    kernel = Kernel(partial(by_length, variant, block=block))
    for T, causal in ((40, False), (300, True)):
        assert_computed(device, kernel, T, (3, 3, 16), causal)


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


def test_tiles_fit_the_shared_memory() -> None:
    geometry = online_geometry(8, 1024, 12, 64, NKV=12, block=None, max_shared=H200)
    assert 2 * (geometry.shared + 1024) <= 233472  # two blocks on an H200's multiprocessor
    for size in (4, 64, 128, 256):
        for limit in (99 * 1024, H200):
            geometry = online_geometry(1, 4096, 1, size, NKV=1, block=None, max_shared=limit)
            assert geometry.shared <= limit
    one = online_geometry(1, 4096, 1, 256, NKV=1, block=None, max_shared=T4)
    assert (one.shared <= T4, dict(one.defines)["AO_ONE_TILE"]) == (True, 1)
    with pytest.raises(InputError, match=r"head size 512: the smallest tiles .* use variant mha"):
        online_geometry(1, 4096, 1, 512, NKV=1, block=None, max_shared=T4)
    with pytest.raises(InputError, match=r"take 84,096 .* 65,536 for them: use a smaller block"):
        online_geometry(1, 4096, 1, 512, NKV=1, block=64, max_shared=T4)


def test_what_a_grid_cannot_take_is_refused() -> None:
    online = partial(online_geometry, block=None, max_shared=H200)
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


@pytest.mark.slow
def test_every_head_stays_in_registers() -> None:
    jobs = []
    for arch, size in (("sm_75", 33), ("sm_90", 80), ("sm_90", 128), ("sm_90", 256)):
        geometry = online_geometry(8, 1024, 3, size, NKV=3, block=None, max_shared=H200)
        jobs.append((ONLINE, arch, geometry.defines))
    assert_clean(jobs)


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
            for variant in ("mma", "wgmma")
        ),
        ((x, 2), {"variant": "online"}, "qkv: expected float32, got float16"),
        ((x, 4), {"variant": "mma"}, "mma: head size 32: tensor cores take 64, 128, 256"),
        ((x, 4), {"variant": "wgmma"}, "wgmma: head size 32: tensor cores take 64, 128, 256"),
        ((x, 5), {}, "C a multiple of n_head 5, got"),
        ((x, 6), {"n_kv_head": 4}, "n_kv_head: expected a divisor of n_head 6, got 4"),
        ((x, 6), {"n_kv_head": 0}, "n_kv_head: expected a divisor of n_head 6, got 0"),
        ((x, 5), {"n_kv_head": 1}, r"W a multiple of 5 \+ 2 · 1 heads, got \(5, 384"),
        ((x, 2), {"max_seqlen": 3}, "max_seqlen: expected none without cu_seqlens"),
        ((x, 2), {"cu_seqlens": starts}, "max_seqlen: expected the length of the longest"),
        ((x, 2), {**ragged, "max_seqlen": 6}, "max_seqlen: expected .*, 1 to the 5 rows"),
        ((x, 2), {**ragged, "cu_seqlens": starts.astype("int64")}, "cu_seqlens: expected int32"),
        ((x, 2), {**ragged, "cu_seqlens": starts[:1]}, r"cu_seqlens: expected shape \(B \+ 1,\)"),
        ((x[None], 2), ragged, r"qkv: expected shape \(N, W\), got \(1, 5, 384\)"),
        ((x.astype("float32"), 2), ragged, "float32 takes sequences of one length"),
    ]
    if replaced():
        cases += [((x, 2), {"variant": "wgmma"}, "variant wgmma: .*use variant mma")]
    else:  # the emulator would allocate the scores first
        long = device.zeros((400_000, 12), "float32"), 1
        cases += [(long, {"variant": "naive"}, "its scores take 640.0 GB, .* use variant online")]
    x, wide = device.zeros((5, 48), "float32"), device.zeros((5, 900), "float32")
    cases += [
        ((x, 0), {}, "n_head: expected a number of heads, got 0"),
        ((x, 2), {"variant": "flash"}, "unknown variant 'flash': expected one of mha, naive, onl"),
        ((x, 2), {"variant": "online", "block": 48}, "block size 48: expected one of 32, 64, 128"),
        ((x, 2), {"variant": "mha", "block": 128}, "block size 128: expected one of 256"),
        ((wide, 1), {"variant": "online"}, r"head size 300: .* at most 256 \(naive takes any\)"),
    ]
    for args, options, message in cases:
        with pytest.raises(InputError, match=message):
            ops.attention(*args, **options)
    assert ops.attention(wide, 1, variant="naive").shape == (5, 300)
    flat = device.zeros(5 * 16 + 1, "float32")
    with pytest.raises(InputError, match="out: expected data aligned to 16 bytes"):
        OPERATION.bind((x,), flat[1:].reshape(5, 16), n_head=2, causal=False, variant="online")
    with pytest.raises(InputError, match=r"out: expected shape \(5, 16\)"):
        OPERATION.bind((x,), x, n_head=2, causal=False, variant="online")
