"""Products with Q4_K blocks: dequantized values, and sums without rounding."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from numpy.typing import NDArray

from gpt2block import ops, reference
from gpt2block.models.weights.gguf import random_blocks
from gpt2block.ops.blocks_matmul import OPERATION
from tests.devices import EVERYWHERE, assert_same_bits, one_order
from tests.gpus import cupy_with

VARIANTS = [variant.name for variant in OPERATION.variants]


def blocks(N: int, B: int) -> NDArray[np.uint8]:
    return random_blocks("Q4_K", N, 256 * B).reshape(N, B, 144)


def test_weights_are_those_that_the_package_decodes() -> None:
    w = blocks(13, 3)
    expected = dequantize(w.reshape(13, -1), gguf.GGMLQuantizationType.Q4_K)
    found = reference.blocks_matmul(np.eye(768, dtype=np.float32), w)
    np.testing.assert_array_equal(found, expected.T)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize(("M", "B", "N"), [(1, 1, 1), (9, 2, 65), (17, 6, 15)])
def test_no_weight_is_rounded(device: Any, variant: str, M: int, B: int, N: int) -> None:
    """With integers x and powers of two d, all sums are exact in float32, in any order."""
    cupy_with()
    rng = np.random.default_rng(M)
    w = blocks(N, B)
    scales = rng.choice(np.array([2**-9, -(2**-10), 2**-10], np.float16), (N, B, 2))
    w[..., :4] = scales.view(np.uint8).reshape(N, B, 4)
    x = rng.integers(-4, 5, (M, 256 * B)).astype(np.float16)
    truth = reference.blocks_matmul(x.astype(np.float64), w)
    got = ops.blocks_matmul(device.asarray(x), device.asarray(w), variant)
    assert_same_bits(got.get(), truth.astype(np.float32))


@one_order
def test_a_value_that_is_not_finite_is_of_its_row_alone(device: Any) -> None:
    """Tiles are filled up with other rows and outputs, which must not affect results."""
    cupy_with()
    x = np.ones((9, 512), np.float16)
    x[8, 100] = np.inf
    w = blocks(18, 2)
    w[17, 1, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    for variant in VARIANTS:
        found = ops.blocks_matmul(device.asarray(x), device.asarray(w), variant).get()
        assert np.isfinite(found[:8, :17]).all()
        assert not np.isfinite(found[8]).any()
        assert np.isnan(found[:, 17]).all()
