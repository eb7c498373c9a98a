"""Attention of hi/lo matrices: rows of any magnitude, one scale, launches.

A hi/lo matrix is (hi + lo 2^-11) scale, with a scale for each row.
tests/ops/test_attention_laws.py has the requirements of every attention kernel.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import InputError, ops
from gpt2block.cuda import replaced
from gpt2block.models.weights.hi_lo import HiLoMatrix, scale_for
from tests import plain
from tests.attentions import KERNELS, Kernel, as_hi_lo, assert_right
from tests.caches import row_width
from tests.devices import GPU, one_order, set_attributes, slow
from tests.gpus import H200, HOPPER_CAPABILITY, MMA_CAPABILITY, RTX, cupy_with

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
