"""Row operations of a Llama: RMSNorm of the residual stream, the gate, embedding without wpe."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.checks import FLOATS
from gpt2block.cuda import cupy
from gpt2block.ops.elementwise import CAP, GATED_COLUMNS, RELU_SQUARED, SILU_MUL
from gpt2block.ops.rmsnorm import OPERATION as RMSNORM
from gpt2block.ops.rmsnorm import RMSNORM_ADD, RMSNORM_GROUPS
from tests import devices, plain
from tests.devices import assert_same_bits, every_device, moved, one_order

Array = NDArray[Any]
device = devices.device
EPS = 1e-5
NARROW = ("float32", "float16", "bfloat16")


def normalized(x: Array, weight: Array, dtype: str = "float32") -> Array:
    """Run RMSNorm's variant `stream` with an output of NaN."""
    out = cupy.full(x.shape, np.nan, FLOATS[dtype])
    arrays = cupy.asarray(x), cupy.asarray(weight)
    result: Array = RMSNORM.bind(arrays, out, eps=EPS, variant="stream").run().get()
    return result


@pytest.mark.parametrize("C", [1, 6, 36, 130, 1028, 4096, 8196])
@every_device
def test_the_stream_is_normalized(device: Any, C: int) -> None:
    """Rows are held in registers or read again, with loads of 1, 2 and 4 values."""
    x, weight = plain.normal(0, 3, C), plain.normal(1, C)
    exact = reference.rmsnorm(x.astype(np.float64), weight.astype(np.float64), EPS)
    largest = np.abs(exact).max()
    for dtype in NARROW if C < 1000 else ("float32",):
        unit = 2.0**-24 + {"float32": 0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
        got = normalized(x, weight, dtype)
        assert np.abs(got.astype(np.float64) - exact).max() <= 8 * unit * largest


@pytest.mark.parametrize("C", [1, 130, 1028, 8196])
@every_device
def test_a_norm_is_added_to_the_stream(device: Any, C: int) -> None:
    """Results have the same bits in place, for a row alone, and next to rows with NaN."""
    x, weight, residual = plain.normal(0, 3, C), plain.normal(1, C), plain.normal(2, 3, C)
    x[1] = np.nan
    y, gamma, stream = (cupy.asarray(array) for array in (x, weight, residual))
    got = RMSNORM_ADD.bind((y, gamma, stream), eps=EPS).run().get()
    wide = [array.astype(np.float64) for array in (x, weight, residual)]
    exact = reference.rmsnorm_add(wide[0], wide[1], wide[2], eps=EPS)[::2]
    assert np.abs(got[::2] - exact).max() <= 8 * 2.0**-24 * np.abs(exact).max()
    assert np.isnan(got[1]).all()
    assert RMSNORM_ADD.bind((y, gamma, stream), stream, eps=EPS).run() is stream
    assert_same_bits(stream.get(), got)
    last = cupy.asarray(x[2:]), gamma, cupy.asarray(residual[2:])
    assert_same_bits(RMSNORM_ADD.bind(last, eps=EPS).run().get(), got[2:])


@every_device
def test_groups_of_channels_are_normalized_and_columns_gated(device: Any) -> None:
    """A group has the bits of a row; a scale multiplies the sum; NaN stays in its group."""
    x, weight, stream = plain.normal(0, 5, 3 * 36), plain.normal(1, 36), plain.normal(2, 5, 3 * 36)
    x[1, 40] = np.nan
    one = np.array([0.37], np.float32)
    y, gamma, residual, by = (cupy.asarray(array) for array in (x, weight, stream, one))
    got = RMSNORM_GROUPS.bind((y, gamma, residual), eps=EPS).run().get()
    rows = y.reshape(15, 36), gamma, residual.reshape(15, 36)
    assert_same_bits(got.reshape(15, 36), RMSNORM_ADD.bind(rows, eps=EPS).run().get())
    assert np.isnan(got).sum() == 36
    scaled = RMSNORM_ADD.bind((*rows, by), eps=EPS).run().get()
    assert_same_bits(scaled, got.reshape(15, 36) * one)
    x64, weight64, stream64 = (array.astype(np.float64) for array in (x, weight, stream))
    exact = np.delete(reference.rmsnorm_groups(x64, weight64, stream64, EPS), 1, 0)
    assert np.abs(np.delete(got, 1, 0) - exact).max() <= 8 * 2.0**-24 * np.abs(exact).max()
    for gate, first in ((plain.normal(3, 5, 36), 36), (plain.normal(4, 5, 6), 73)):
        columns = np.ascontiguousarray(stream[:, first : first + gate.shape[1]])
        own, up = cupy.asarray(gate), cupy.asarray(columns)
        gated = GATED_COLUMNS.bind((own, residual), first=first, gelu=True).run()
        assert_same_bits(gated.get(), SILU_MUL.bind((own, up), gelu=True).run().get())
        truth = reference.gated_columns(gate, stream, first, gelu=True)
        np.testing.assert_allclose(gated.get(), truth, rtol=1e-5, atol=1e-6)


@every_device
def test_relu_squared_and_the_cap_of_logits(device: Any) -> None:
    """Both operations run in place too, on more than a block; NaN and logits of -inf stay."""
    ends = np.array([np.nan, -np.inf, np.inf, -0.0], np.float32)
    x = np.concatenate([30 * plain.normal(0, 700), ends])
    with np.errstate(invalid="ignore"):
        wide = x.astype(np.float64)
        cases: Any = (
            (RELU_SQUARED, {}, reference.relu_squared(wide)),
            (CAP, {"limit": 15.0}, reference.cap(wide, 15.0)),
        )
    assert list(cases[0][2][-3:]) == [0, np.inf, 0]
    assert list(cases[1][2][-3:]) == [-np.inf, 15, 0]
    for operation, options, exact in cases:
        values = cupy.asarray(x)
        got = operation.bind((values,), **options).run().get()
        np.testing.assert_allclose(got, exact, rtol=4e-7)
        assert operation.bind((values,), values, **options).run() is values
        assert_same_bits(values.get(), got)


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("dtype", NARROW)
@one_order
def test_the_gate(device: Any, dtype: str, gelu: bool) -> None:
    """silu_mul runs in place, at sizes and addresses without vector loads, and for large inputs."""
    unit = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    for shape, offset in (((3, 40), 0), ((2, 7), 0), ((2, 8), 1)):
        gate, up = (plain.normal(seed, *shape).astype(FLOATS[dtype]) for seed in (0, 1))
        gate[0, :3] = -1000, 1000, 0
        exact = reference.silu_mul(gate.astype(np.float64), up.astype(np.float64), gelu)
        arrays = moved(gate, offset), moved(up, offset)
        got = SILU_MUL.bind(arrays, gelu=gelu).run().get()
        assert np.abs(got.astype(np.float64) - exact).max() <= 8 * unit * np.abs(exact).max()
        assert SILU_MUL.bind(arrays, arrays[0], gelu=gelu).run() is arrays[0]
        assert_same_bits(arrays[0].get(), got)
