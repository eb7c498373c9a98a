"""gemm on tensor cores: hi/lo matrices, FP8 weights, two matrices at once, wrong input.

test_product_laws.py has the requirements of every kernel of gemm.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from gpt2block import ops, reference
from gpt2block.cuda.kernels import FP8
from gpt2block.models.weights.gguf import TYPES, GgufMatrix
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops.engines import gemm_wgmma as _gemm_wgmma
from gpt2block.ops.engines.gemm_wgmma import FLAGS, MAX_ROWS, OF_REGISTERS, STREAMED
from gpt2block.ops.gemm import OPERATION as GEMM
from gpt2block.ops.gemm import WIDEN, allocate_stream_k_workspace
from tests.devices import assert_same_bits, one_order
from tests.gpus import HOPPER_CAPABILITY, cupy_with
from tests.products import KERNELS, PARTS, Case

SPLIT = KERNELS["gemm-mma-hi_lo-to-float32"]


@pytest.fixture
def cp() -> Any:
    return cupy_with(HOPPER_CAPABILITY)


# --- hi/lo matrices: only a GPU can test how a tensor core adds --------------------------------


def test_infinity_and_nan_are_what_they_are_in_float() -> None:
    case = Case(37, 136, 40, tile=PARTS)
    given, clean = SPLIT.made(case), SPLIT.made(case)
    x, w = given["x"], given["w"].data
    x[2, 5], x[3, 7], x[4, 9] = np.inf, -np.inf, np.nan
    x[5, [11, 13]] = np.inf, -np.inf
    w[6, 8], w[7], clean["w"].data[7] = np.nan, 0, 0
    with np.errstate(invalid="ignore"):
        truth = SPLIT.exact(given, case)
        out = SPLIT("forward", given, case)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(truth))
    wild = np.isinf(truth)
    assert wild[2:4].sum() == 2 * 38
    np.testing.assert_array_equal(out[wild], truth[wild])
    same = np.isfinite(truth)
    np.testing.assert_array_equal(out[same], SPLIT("forward", clean, case)[same])


def test_what_is_infinite_beside_next_to_nothing_is_nan() -> None:
    """float32 gives infinity here: a value 1e-12 of its row's largest has a high part of 0."""
    case = Case(16, 8, 8, bias=False, tile=PARTS)
    given = SPLIT.made(case)
    given["x"][1, 3] = np.inf
    given["w"].data[:, 0], given["w"].data[:, 3] = 1.0, 1e-13
    assert np.isnan(SPLIT("forward", given, case)[1]).all()


def test_scales_far_apart() -> None:
    """Multiplied by the scale of x alone, many sums of the first case would exceed float32."""
    case = Case(16, 136, 8, bias=False, tile=PARTS)
    for of_x, of_w in ((1e33, 1e-30), (1e-3, 1e6)):
        given = SPLIT.made(case)
        given["x"] *= np.float32(of_x)
        given["w"].data[...] *= np.float32(of_w)
        SPLIT.assert_right(SPLIT("forward", given, case), given, case)


# --- FP8 weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FP8)
@one_order
def test_memory_for_widened_weights(device: Any, format: str) -> None:
    """The memory holds the exact weights; a call may reuse the memory of an earlier one."""
    cupy_with()
    rng = np.random.default_rng(0)
    values = rng.standard_normal((136, 72), np.float32) * np.geomspace(1e-4, 1, 136)[:, None]
    values[0, :5] = 0, 1e-9, -1e-9, 3e-6, -3e-6  # zeros and subnormal numbers of the formats
    w = WeightMatrix.quantize(values.astype(np.float32), format, "NK")
    a = device.asarray(rng.standard_normal((5, 72)).astype(np.float16))
    there = w.mapped(device.asarray)
    memory, expected = device.full(w.data.size + 16, np.nan, "float16"), ops.gemm(a, there).get()
    for _ in range(2):
        got = GEMM.bind((a, there, None, None, None, memory)).run()
        assert_same_bits(got.get(), expected)
    widened = WIDEN.bind((there, memory)).run().get()
    np.testing.assert_array_equal(widened, reference.from_fp8(w.data, format))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("format", "shape"),
    [
        *product(FP8, [(1, 8, 16), (130, 264, 528), (1000, 776, 3072), (5000, 2312, 80)]),
        *product(FP8, [(2000, 2312, 1296)]),  # two clusters share a tile
        *product(TYPES, [(1, 8, 256), (130, 264, 768), (1000, 776, 3072), (5000, 2312, 256)]),
        *product(["Q4_K", "Q5_1", "Q6_K", "Q4_K Q6_K"], [(2000, 2312, 1280)]),
        *product(["Q4_1", "Q8_0"], [(3, 72, 32), (300, 136, 416)]),
        *product(["Q4_K Q6_K", "Q8_0 Q5_K Q4_0"], [(130, 264, 768), (1000, 776, 3072)]),
    ],
)
def test_weights_are_widened_in_every_tile(
    cp: Any, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], format: str
) -> None:
    """Bits equal a product with float16 weights of the same values; a row has them alone too."""
    M, N, K = shape
    rng = np.random.default_rng(shape)
    a = cp.asarray((0.01 * rng.standard_normal((M, K))).astype(np.float16))
    if format in FP8:
        w = WeightMatrix.quantize(rng.standard_normal((N, K), np.float32), format, "NK")
    else:
        *first, last = format.split()
        ranges = [(name, MAX_ROWS) for name in first]
        w = GgufMatrix.random([*ranges, (last, N - MAX_ROWS * len(first))], K)
    narrow = replace(w, data=cp.asarray(w.data), scale=None)
    wide = WeightMatrix(WIDEN.bind((narrow, None)).run(), "float16", None, "NK")
    bias = cp.asarray(rng.standard_normal(N, np.float32))
    residual = cp.asarray(rng.standard_normal((M, N)).astype(np.float16))
    alone, workspace = M // 2, allocate_stream_k_workspace()
    for float_out in (False, True):
        added = residual.astype(np.float32) if float_out else residual
        options: dict[str, Any] = {"gelu": True, "dtype": "float32" if float_out else "float16"}
        expected = ops.gemm(a, wide, bias, added, **options).get()
        for tile in OF_REGISTERS + STREAMED:
            monkeypatch.setattr(_gemm_wgmma, "choose_tile", lambda *_, tile=tile: tile)
            _gemm_wgmma.geometry.cache_clear()
            inputs = a, narrow, bias, added, None, None, workspace
            got = GEMM.bind(inputs, **options).run().get()
            assert_same_bits(got, expected)
            row = slice(alone, alone + 1)
            inputs = a[row], narrow, bias, added[row], None, None, workspace
            got = GEMM.bind(inputs, **options).run().get()
            assert_same_bits(got, expected[row])
            assert not workspace[:FLAGS].get().any()
        monkeypatch.undo()
        _gemm_wgmma.geometry.cache_clear()
