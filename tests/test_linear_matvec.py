"""The linear layer for few rows: alone, into the KV cache, and behind attention over split keys."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import InputError, ops, reference
from gpt2block.cuda import cupy
from gpt2block.ops._linear_matvec import Layout, geometry, layout, order
from gpt2block.ops.linear import OPERATION
from gpt2block.ops.linear import bind as bind_linear
from gpt2block.ops.registry import STEPS
from gpt2block.weights.matrix import WeightMatrix
from tests import plain
from tests.devices import H200, in_every_order, one_order
from tests.linears import (
    EPS,
    Case,
    arrays,
    assert_linear,
    assert_qkv,
    every_weight,
    exact_linear,
    plain_linear,
    run_linear,
    upload,
    wide,
)

Array = NDArray[Any]
SHAPES = [  # (K, N) of the four GPT-2 models, of the model on board, and odd ones
    *[(C, n * C) for C in (256, 768, 1024, 1280, 1600) for n in (1, 3, 4)],
    *[(4 * C, C) for C in (256, 768, 1024, 1280, 1600)],
    *[(C, 50257) for C in (768, 1600)],
    (1, 1),
    (1601, 333),
]


# --- NumPy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("gelu", [False, True])
def test_against_a_loop(norm: bool, gelu: bool) -> None:
    given = arrays(2, 5, 3, "float8_e4m3fn")
    got = exact_linear(given.x, given, norm, residual=True, gelu=gelu)
    w = given.w.dequantized()
    bias, gamma, beta, residual = (wide(array) for array in given[2:])
    for m in range(2):
        x = [float(v) for v in given.x[m]]
        mean = sum(x) / 5
        std = math.sqrt(sum((v - mean) ** 2 for v in x) / 5 + EPS)
        if norm:
            x = [(x[k] - mean) / std * gamma[k] + beta[k] for k in range(5)]
        for n in range(3):
            y = sum(x[k] * float(w[k, n]) for k in range(5)) + bias[n]
            if gelu:
                y *= 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
            assert got[m, n] == pytest.approx(residual[m, n] + y, rel=1e-12)
    alone = reference.linear(wide(given.x), given.w)
    np.testing.assert_allclose(alone, wide(given.x) @ w)


@pytest.mark.parametrize("sms", [132, 40, 1])
@pytest.mark.parametrize("weight", [1, 2, 4])
@pytest.mark.parametrize(("K", "N"), SHAPES)
def test_every_column_and_row_has_a_block(K: int, N: int, weight: int, sms: int) -> None:
    for M in (1, 2, 7, 8, 16, 17, 64):
        how = layout(M, N, K, weight, sms)
        assert how[:3] == order(N, K, weight)
        assert K % how.width == 0
        assert how.width * weight <= 16
        where = geometry("linear_matvec", M, N, K, weight, norm=True, sms=sms)
        assert where is not None
        assert where.block[0] == 32 * how.split * how.groups <= 576
        assert where.grid[1] * how.rows >= M
        columns = how.groups * how.columns
        assert (where.grid[0] * columns >= N) or how.loop
        assert (where.grid[0] - 1) * columns < N
        assert 4 * how.width * weight * how.columns * how.steps <= 16 * 4 * 16


def test_the_shapes_of_gpt2_fill_an_h200_once() -> None:
    for N in (768, 2304, 3072):
        where = geometry("linear_matvec", 1, N, 768, 2, norm=True)
        assert where is not None
        assert where.grid == (128, 1)


def test_rows_that_no_block_can_hold() -> None:
    assert geometry("linear_matvec", 1, 8, 50_000, 2) is not None
    assert geometry("linear_matvec", 9, 8, 50_000, 2) is not None
    assert geometry("linear_matvec", 1, 8, 60_000, 2) is None


# --- on the CPU -----------------------------------------------------------------------------------


# width, split, steps, columns, groups, loop, blocks, rows
ROUNDS = Layout(8, 2, 1, 3, 2, True, 1, 2)  # two trips along K, several groups of columns a block
SMALL = Layout(4, 3, 1, 2, 2, False, 1, 1)
LONG = Layout(4, 1, 1, 2, 2, True, 1, 1)  # more of a row than registers hold
CASES = [
    Case(3, 48, 21, "float32", residual=True, gelu=True),
    Case(3, 784, 31, "bfloat16", cut=ROUNDS),
    Case(1, 33, 5, "float16", norm=False, gelu=True),
    Case(1, 528, 10, "float8_e4m3fn", residual=True),
    Case(1, 1100, 9, "float32", cut=LONG),
    Case(2, 400, 9, "float32", norm=False, cut=SMALL),
    Case(9, 264, 7, "float8_e5m2", norm=False, residual=True, cut=SMALL._replace(width=8, rows=4)),
]


@in_every_order
@pytest.mark.parametrize("case", CASES, ids=str)
def test_linear(case: Case, where: str) -> None:
    assert_linear(where, "matvec", case, 2 if case.cut in (ROUNDS, LONG) else H200)


@settings(max_examples=4)
@given(M=st.integers(1, 6), N=st.integers(1, 40), blocks=st.integers(1, 3))
def test_any_rows_and_columns(M: int, N: int, blocks: int) -> None:
    """With so many blocks of columns, which loop."""
    assert_linear("forward", "matvec", Case(M, 784, N, "bfloat16", cut=ROUNDS), blocks)


def test_a_row_is_the_same_bits_alone_and_in_any_batch() -> None:
    K, N = 264, 14
    given = arrays(17, K, N, "float32")
    case = Case(1, K, N, "float32", residual=True, gelu=True)
    small = case._replace(cut=SMALL)
    alone = np.concatenate(
        [
            run_linear("forward", "matvec", given._replace(x=x[None], residual=r[None]), small)
            for x, r in zip(given.x, given.residual, strict=True)
        ]
    )
    for rows in (2, 4, 8, 16):
        columns = 2 if rows > 2 else 5
        cut = SMALL._replace(rows=rows, columns=columns, groups=1 + (rows < 16))
        for M in {rows - 1, rows, 17}:
            some = given._replace(x=given.x[:M], residual=given.residual[:M])
            got = run_linear("forward", "matvec", some, case._replace(cut=cut))
            np.testing.assert_array_equal(got, alone[:M])


@in_every_order
@pytest.mark.parametrize(("M", "dtype"), [(3, "float32"), (1, "float8_e4m3fn"), (2, "bfloat16")])
def test_qkv(M: int, dtype: str, where: str) -> None:
    K, C, n_ctx = {"float32": (48, 7, 4), "bfloat16": (784, 9, 3)}.get(dtype, (528, 10, 3))
    position = np.array([2, -1, n_ctx], np.int32)[:M]  # of which two are nowhere
    cut = ROUNDS if dtype == "bfloat16" else None
    assert_qkv(where, "matvec", Case(M, K, 3 * C, dtype, cut=cut), n_ctx, position)


# --- on the GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@every_weight
@pytest.mark.parametrize(
    ("M", "K", "N", "norm", "gelu"),
    [
        (1, 768, 768, False, False),
        (3, 768, 3072, True, True),
        (8, 3072, 768, False, False),
        (17, 1600, 300, True, False),
        (1, 256, 50257, True, False),
        (2, 333, 77, True, True),
    ],
)
def test_linear_on_the_gpu(dtype: str, M: int, K: int, N: int, norm: bool, gelu: bool) -> None:
    assert_linear("gpu", "matvec", Case(M, K, N, dtype, norm, True, gelu))


@pytest.mark.gpu
@every_weight
@pytest.mark.parametrize(("K", "N"), [(768, 2304), (3072, 768), (768, 20_000), (1601, 333)])
def test_same_bits_in_any_batch_on_the_gpu(dtype: str, K: int, N: int) -> None:
    device = upload(arrays(17, K, N, dtype))

    def rows(first: int, last: int) -> Array:
        x, residual = device.x[first:last].copy(), device.residual[first:last].copy()
        inputs = (x, device.w, device.bias, device.gamma, device.beta, residual)
        host: Array = bind_linear(inputs, gelu=True, variant="matvec").run().get()
        return host

    alone = np.concatenate([rows(m, m + 1) for m in range(17)])
    for M in range(2, 18):
        np.testing.assert_array_equal(rows(0, M), alone[:M])
        np.testing.assert_array_equal(rows(17 - M, 17), alone[17 - M :])


@pytest.mark.gpu
@every_weight
@pytest.mark.parametrize("M", [1, 3, 8])
def test_qkv_on_the_gpu(dtype: str, M: int) -> None:
    position = np.array([4, -1, 5, 0, 1, 2, 3, 2], np.int32)[:M]
    assert_qkv("gpu", "matvec", Case(M, 768, 3 * 768, dtype), 5, position)


@pytest.mark.gpu
def test_the_function() -> None:
    given = arrays(3, 64, 48, "bfloat16")
    device = upload(given)
    got = ops.linear(*device[:3], device.gamma, device.beta, device.residual, gelu=True)
    what = (given.x, given, True, True, True)
    x = plain.layernorm(given.x, given.gamma, given.beta, EPS)
    terms = plain.rounding_of_bfloat16_terms(x, given.w.dequantized())
    plain.assert_as_accurate(got.get(), exact_linear(*what), plain_linear(*what), terms)
    deep = ops.linear(device.x.reshape(3, 1, 64), device.w, variant="matvec")
    assert deep.shape == (3, 1, 48)
    np.testing.assert_allclose(deep.get()[:, 0], given.x @ given.w.dequantized(), rtol=1e-3)


@one_order
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variant": "wgmma"}, "linear: unknown variant 'wgmma': expected one of matvec"),
        ({"x": (2, 63)}, r"w: expected shape \(63, N\), got \(64, 48\)"),
        ({"x": ()}, "x: expected at least one element"),
        ({"bias": (47,)}, r"bias: expected shape \(48,\), got \(47,\)"),
        ({"gamma": None}, "gamma and beta: expected both, or neither"),
        ({"beta": (63,)}, r"beta: expected shape \(64,\), got \(63,\)"),
        ({"residual": (1, 48)}, r"residual: expected shape \(2, 48\), got \(1, 48\)"),
        ({"w": "array"}, "w: expected a WeightMatrix, got ndarray: use WeightMatrix"),
        ({"w": "KN"}, r"w: expected layout 'NK', \(N, K\) in memory, got 'KN'"),
        ({"w": "NumPy"}, "w: expected a CuPy array, got ndarray"),
        ({"w": "unaligned"}, "w: expected data aligned to 16 bytes: pass a copy"),
    ],
)
def test_wrong_input_is_refused(device: Any, change: dict[str, Any], message: str) -> None:
    shapes = {"x": (2, 64), "bias": (48,), "gamma": (64,), "beta": (64,), "residual": (2, 48)}
    given: dict[str, Any] = {
        name: None if shape is None else cupy.zeros(shape, "float32")
        for name, shape in {**shapes, **{k: v for k, v in change.items() if k in shapes}}.items()
    }
    data = cupy.zeros((48, 64), "float32")
    shifted = cupy.zeros(48 * 64 + 1, "float32")[1:].reshape(48, 64)
    weights = {
        "array": data,
        "KN": WeightMatrix(data.T.copy(), "float32", None, "KN"),
        "NumPy": WeightMatrix(data.get(), "float32", None, "NK"),
        "unaligned": WeightMatrix(shifted, "float32", None, "NK"),
    }
    w = weights.get(change.get("w", ""), WeightMatrix(data, "float32", None, "NK"))
    with pytest.raises(InputError, match=message):
        ops.linear(w=w, variant=change.get("variant", "matvec"), **given)


@one_order
def test_wrong_caches_are_refused(device: Any) -> None:
    def matrix(N: int, dtype: str = "float32") -> WeightMatrix:
        return WeightMatrix.quantize(cupy.full((N, 64), 1, "float32"), dtype, "NK")

    x, at = cupy.zeros((2, 64), "float32"), cupy.zeros(2, "int32")
    cache = cupy.zeros((2, 5, 16), "float32")
    apart, wide_at = cache.copy(), at.astype("int64")
    for w, v, position, message in (
        (matrix(47), apart, at, "w: expected 48 outputs, 3C as k has C channels, got 47"),
        (matrix(51), apart, at, "w: expected 48 outputs, 3C as k has C channels, got 51"),
        (matrix(48, "float8_e5m2"), apart, at, "k: expected float16, got float32"),
        (matrix(48), cache, at, "k: overlaps v: expected another array"),
        (matrix(48), apart, wide_at, "position: expected int32, got int64"),
    ):
        with pytest.raises(InputError, match=message):
            STEPS["linear_qkv"].bind((x, w, None, None, None, cache, v, at, position))


def test_the_registry_names_the_kernels() -> None:
    assert OPERATION.variant("matvec").kernels == ("linear_matvec",)
    assert OPERATION.variant("mma").kernels == ("linear_decode_mma",)
    auxiliary = [kernel for v in OPERATION.auxiliary for kernel in v.kernels]
    assert auxiliary == [
        "qkv_matvec",
        "qkv_decode_mma",
        "qkv_decode_tiles",
        "qkv_decode_hopper",
        "rope_decode_hopper",
    ]
