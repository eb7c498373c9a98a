"""Requirements of every kernel of LayerNorm, RMSNorm and softmax.

Tests run the kernels of tests/norms.py with NumPy, on the emulator and on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gpt2block import InputError, reference
from gpt2block.cuda import cupy
from gpt2block.ops.layernorm_gelu import OPERATION as LAYERNORM_GELU
from gpt2block.ops.rmsnorm import OPERATION as RMSNORM
from tests import devices, plain
from tests.devices import (
    IN_TESTS,
    assert_barriers_show,
    assert_same_bits,
)
from tests.gpus import large_memory
from tests.norms import EPS, KERNELS, PAIRS, Kernel, Shape, every_kernel

device = devices.device


# --- the NumPy reference, and bytes moved ---------------------------------------------------------


def test_the_reference_against_a_loop() -> None:
    """test_reference.py tests the reference of gelu."""
    x, gamma = plain.normal(0, 2, 3, 7).astype(float), plain.normal(1, 7).astype(float)
    beta = gamma[::-1]
    mean, rstd = reference.layernorm_stats(x, 1e-3)
    rms, normed = reference.rmsnorm(x, gamma, 1e-3), reference.layernorm(x, gamma, beta, 1e-3)
    for i in np.ndindex(2, 3):
        m = math.fsum(x[i]) / 7
        assert mean[i] == pytest.approx(m, rel=1e-14)
        var = math.fsum((v - m) ** 2 for v in x[i]) / 7
        assert rstd[i] == pytest.approx(1 / math.sqrt(var + 1e-3), rel=1e-14)
        by_hand = (x[i] - m) / math.sqrt(var + 1e-3) * gamma + beta
        np.testing.assert_allclose(normed[i], by_hand, rtol=1e-12, atol=1e-13)
        root = math.sqrt(math.fsum(v * v for v in x[i]) / 7 + 1e-3)
        np.testing.assert_allclose(rms[i], x[i] / root * gamma, rtol=1e-14)
    expected = reference.gelu(normed)
    np.testing.assert_array_equal(reference.layernorm_gelu(x, gamma, beta, 1e-3), expected)
    without = reference.layernorm_gelu(x, np.ones(7), np.zeros(7), 1e-3)
    np.testing.assert_array_equal(reference.layernorm_gelu(x, eps=1e-3), without)


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_of_softmax_against_a_loop(causal: bool) -> None:
    x = plain.normal(0, 2, 5, 5).astype(float)
    got = reference.softmax(x, causal)
    for b, t in np.ndindex(2, 5):
        seen = [math.exp(value) for value in x[b, t, : t + 1 if causal else 5]]
        expected = [value / sum(seen) for value in seen] + [0.0] * (5 - len(seen))
        np.testing.assert_allclose(got[b, t], expected, rtol=1e-14)


# --- requirements of every kernel -----------------------------------------------------------------


def one(kernel: Kernel) -> Sequence[Shape]:
    return kernel.shapes[:1]


def row_counts(where: str, C: int) -> Sequence[int]:
    """Return numbers of rows, which fill blocks or not. One row's mean may be exact by chance."""
    if where == "gpu":
        return (3, 9, 40)
    return (3, 33) if where == "shuffled" and C < 300 else (5,) if C < 8000 else (3,)


@every_kernel(orders=IN_TESTS, shapes_of=lambda kernel: [*kernel.shapes, *kernel.more])
def test_right(where: str, kernel: Kernel, shape: Shape) -> None:
    for rows in row_counts(where, shape.C):
        arrays = kernel.inputs(rows, shape.C)
        kernel.assert_right(kernel(where, arrays, shape), *arrays)


@every_kernel()
def test_a_row_has_the_same_bits_alone_and_among_others(
    where: str, kernel: Kernel, shape: Shape
) -> None:
    x, *vectors = kernel.inputs(40 if where == "gpu" else 19, shape.C)
    together = kernel(where, [x, *vectors], shape)
    for i in (len(x) // 2, len(x) - 3):
        alone = kernel(where, [x[i : i + 1], *vectors], Shape(shape.C) if kernel.alone else shape)
        for its, every in zip(alone, together, strict=True):
            assert_same_bits(its, every[i : i + 1])


@every_kernel()
def test_what_is_not_finite_stays_in_its_row_and_channel(
    where: str, kernel: Kernel, shape: Shape
) -> None:
    """eps is large enough to affect results."""
    x, *vectors = kernel.inputs(5, shape.C)
    attrs: Any = {"eps": 0.5} if kernel.attrs else {}
    clean = kernel(where, [x, *vectors], shape, **attrs)
    kernel.assert_right(clean, x, *vectors, **attrs)
    x[1, 7], x[3, -1] = np.nan, np.inf
    result, *statistics = kernel(where, [x, *vectors], shape, **attrs)
    assert np.isnan(result[1]).all()
    assert np.isnan(result[3, -1 if kernel.operation is RMSNORM else slice(None)]).all()
    for got, before in zip([result, *statistics], clean, strict=True):
        assert not np.isfinite(got[1]).any()
        assert_same_bits(got[::2], before[::2])
    if not vectors:
        return
    vectors[0][5], vectors[0][6] = np.nan, np.inf
    result = kernel(where, [x, *vectors], shape, **attrs)[0][::2]
    assert np.isnan(result[:, 5]).all()
    assert not np.isfinite(result[:, 6]).any()
    others = np.delete(np.arange(shape.C), [5, 6])
    assert_same_bits(result[:, others], clean[0][::2][:, others])


@every_kernel("layernorm", "rmsnorm", "gelu", shapes_of=one, only=lambda kernel: kernel.float32)
def test_numbers_of_any_size(where: str, kernel: Kernel, shape: Shape) -> None:
    x, *vectors = kernel.inputs(5, shape.C)
    for size in (0, 1e-15, 1e15):
        arrays = [np.float32(size) * x, *vectors]
        kernel.assert_right(kernel(where, arrays, shape), *arrays)


@every_kernel("layernorm", "gelu", only=lambda kernel: kernel.float32)
def test_a_large_mean(where: str, kernel: Kernel, shape: Shape) -> None:
    """E[x²] - E[x]² loses all digits, but the variance around the mean does not."""
    x, *vectors = kernel.inputs(16, shape.C)
    offset, spread = (1e4, 1) if kernel.operation is LAYERNORM_GELU else (1000, 0.1)
    x = (offset + spread * x).astype(np.float32)
    got = kernel(where, [x, *vectors], shape)
    if not kernel.one_pass:
        kernel.assert_right(got, x, *vectors)
        return
    assert np.isfinite(got[0]).all()
    assert np.abs(got[0] - kernel.exact(x, *vectors)).max() > 1


@every_kernel("layernorm", "gelu", shapes_of=one, only=lambda kernel: kernel.float32)
def test_constant_rows(where: str, kernel: Kernel, shape: Shape) -> None:
    """In one-pass kernels rounding makes some variances negative; no result may be NaN."""
    constants = np.array([0, 12345.678, *(1e4 + 0.37 * np.arange(20))], np.float32)
    vectors = kernel.inputs(1, shape.C)[1:]
    result, *statistics = kernel(where, [constants[:, None].repeat(shape.C, 1), *vectors], shape)
    assert np.isfinite(result).all()
    if statistics:
        mean, rstd = statistics
        np.testing.assert_allclose(mean, constants, rtol=1e-6)
        assert (rstd > 0).all()
        assert (rstd <= 1.000001 / math.sqrt(EPS)).all()
    if kernel.in_place and not vectors:
        assert (np.abs(result.T) <= 4 * np.spacing(constants) / math.sqrt(EPS)).all()


@every_kernel(numpy=False)
def test_in_place(where: str, kernel: Kernel, shape: Shape) -> None:
    arrays = kernel.inputs(9, shape.C)
    if kernel.in_place:
        expected = kernel(where, arrays, shape)[0]
        assert_same_bits(kernel(where, arrays, shape, in_place=True)[0], expected)
    elif kernel.dtype == kernel.out:
        with pytest.raises(InputError, match="out: overlaps x"):
            kernel(where, arrays, shape._replace(apart=0), in_place=True)


# --- calls ----------------------------------------------------------------------------------------


# --- planted mistakes, on the emulator ------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "C", "barriers", "header"),  # header: the file with the barriers
    [
        ("layernorm-5", 300, 2, ""),
        ("layernorm-6-float32", 772, 1, "lib/rows.cuh"),
        ("layernorm-narrow-bfloat16-bfloat16", 1600, 1, "lib/rows.cuh"),
        ("rmsnorm-float32", 768, 1, "lib/rows.cuh"),
    ],
)
def test_a_missing_barrier_shows(name: str, C: int, barriers: int, header: str) -> None:
    kernel = KERNELS[name]
    arrays, file = kernel.inputs(2, C), kernel.operation.variant(kernel.variant).file
    assert_barriers_show(header or file, lambda order: kernel(order, arrays), barriers)


# --- on the GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "C"),
    [pytest.param(k, C, id=f"{name}-{C}") for name, k in KERNELS.items() for C in k.widths],
)
def test_widths(kernel: Kernel, C: int) -> None:
    for rows in kernel.widths[C]:
        for apart in (0, 3) if kernel.operation is RMSNORM else (0,):
            arrays = kernel.inputs(rows, C)
            kernel.assert_right(kernel("gpu", arrays, Shape(C, apart=apart)), *arrays)


# Kernel, rows, C, and distance between rows in values.
MANY = [
    *((f"layernorm-{n}", 2_800_000, 768, 768) for n in (*"12345", "6-float32")),
    *((f"layernorm-narrow-{x}-{out}", 65537, 768, 768) for x, out in PAIRS if out != "float32"),
    *((f"rmsnorm-{dtype}", 2_200_000, 1024, 2048) for dtype in ("float16", "float32")),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "rows", "C", "stride"), MANY)
def test_many_rows(name: str, rows: int, C: int, stride: int) -> None:
    """There are over 2³¹ elements, or many blocks; equal rows must give equal results."""
    kernel = KERNELS[name]
    row, *vectors = kernel.inputs(1, C)
    with large_memory(rows * ((stride + C) * row.itemsize + C)):  # x, out, and the result of ==
        x = cupy.empty((rows, stride), kernel.dtype)[:, :C]
        bits = f"uint{8 * row.itemsize}"
        x.view(bits)[:] = cupy.asarray(row.view(bits))
        out = cupy.empty((rows, C), kernel.out)
        arrays = (x, *map(cupy.asarray, vectors))
        kernel.operation.bind(arrays, out, **kernel.options).run()
        assert bool((out == out[0]).all())
        if kernel.alone:
            assert_same_bits(out[:1].get(), kernel("gpu", [row, *vectors])[0])
        kernel.assert_right([out[:1].get()], row, *vectors)
        del x, out, arrays
