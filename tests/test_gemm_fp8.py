"""Products of float16 activations and FP8 weights, and the rows and caches of two-part matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import InputError, reference
from gpt2block.ops import gemm, kv_append, two_part
from gpt2block.ops.gemm import OPERATION as GEMM
from gpt2block.ops.registry import STEPS
from gpt2block.weights.matrix import WeightMatrix
from tests.devices import one_order
from tests.gpus import cupy_with

Array = NDArray[Any]
FORMATS = ("float8_e5m2", "float8_e4m3fn")


def on(device: Any, w: WeightMatrix) -> WeightMatrix:
    scale = None if w.scale is None else device.asarray(w.scale)
    return WeightMatrix(device.asarray(w.data), w.dtype, scale, w.layout)


def problem(format: str, M: int, N: int, K: int) -> tuple[Array, WeightMatrix, Array, Array]:
    rng = np.random.default_rng((M, N, K))
    a = rng.standard_normal((M, K)).astype(np.float16)
    w = (
        rng.standard_normal((N, K), np.float32)
        * np.geomspace(1e-4, 1, N, dtype=np.float32)[:, None]
    )
    w[0, :5] = 0, 1e-9, -1e-9, 3e-6, -3e-6  # zeros and subnormal numbers of the formats
    bias, residual = rng.standard_normal(N, np.float32), rng.standard_normal((M, N), np.float32)
    return a, WeightMatrix.quantize(w, format, "NK"), bias, residual


@one_order
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("gelu", [False, True])
def test_a_product_with_fp8_weights(device: Any, format: str, gelu: bool) -> None:
    """As accurate as float32 sums of exact weights, with scales applied to the sums."""
    cupy_with()
    for M, N, K in ((1, 8, 8), (37, 136, 72)):
        a, w, bias, residual = problem(format, M, N, K)
        wide, arrays = w.dequantized(), [device.asarray(x) for x in (a, bias, residual)]
        truth = reference.gemm(
            a.astype(np.float64), wide.astype(np.float64), bias, residual, gelu=gelu
        )
        memory = device.full(N * K + 16, np.nan, "float16")
        given = (arrays[0], on(device, w), arrays[1], arrays[2])
        found = [gemm(*given, gelu=gelu, dtype="float32").get()]
        for _ in range(2):  # the memory of the first one is used again
            found.append(GEMM.bind((*given, None, memory), gelu=gelu, dtype="float32").run().get())
        for got in found:
            limit = 4 * np.finfo(np.float32).eps * (np.abs(a) @ np.abs(wide) + np.abs(truth) + 1)
            assert (np.abs(got - truth) <= limit).all()
            np.testing.assert_array_equal(got, found[0])
        np.testing.assert_array_equal(
            memory.get()[: N * K].reshape(N, K), reference.from_fp8(w.data, format)
        )


@one_order
def test_weights_and_memory_that_do_not_fit(device: Any) -> None:
    cupy_with()
    a, w, _, _ = problem("float8_e4m3fn", 3, 8, 8)
    x, fp8 = device.asarray(a), on(device, w)
    with pytest.raises(InputError, match="w: expected bfloat16, as a has, got float8_e4m3fn"):
        gemm(x.astype("bfloat16"), fp8)
    with pytest.raises(InputError, match="memory: expected at least 64 elements, got 63"):
        GEMM.bind((x, fp8, None, None, None, device.zeros(63, "float16")))


@one_order
@pytest.mark.parametrize("K", [1, 6, 192])
def test_rows_of_a_two_part_matrix(device: Any, K: int) -> None:
    x = np.random.default_rng(K).standard_normal((9, K), np.float32) * np.float32(1e3)
    indices = np.array([8, 0, 3, 3], np.int32)
    inputs = two_part(device.asarray(x)), device.asarray(indices)
    got = STEPS["take"].bind(inputs).run().get()
    np.testing.assert_array_equal(got, reference.joined(*reference.two_part(x))[indices])


@one_order
@pytest.mark.parametrize("C", [2, 64, 130])
def test_two_part_rows_into_a_cache(device: Any, C: int) -> None:
    """Rows and positions outside the cache are skipped."""
    qkv = np.random.default_rng(C).standard_normal((5, 3 * C), np.float32)
    row, position = np.array([1, 0, -1, 1, 2], np.int32), np.array([3, 0, 1, 4, 0], np.int32)
    k, v = (device.zeros((2, 4, C), "float32") for _ in "kv")
    kv_append(two_part(device.asarray(qkv)), k, v, device.asarray(row), device.asarray(position))
    joined = reference.joined(*reference.two_part(qkv))
    for got, part in ((k, joined[:, C : 2 * C]), (v, joined[:, 2 * C :])):
        expected = np.zeros((2, 4, C), np.float32)
        expected[1, 3], expected[0, 0] = part[0], part[1]
        np.testing.assert_array_equal(got.get(), expected)
