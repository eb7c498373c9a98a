"""Requirements of every kernel of LayerNorm, RMSNorm and softmax, and features of some.

Tests run the kernels of tests/norms.py with NumPy, on the emulator and on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import InputError, ops, reference
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import row_stride
from gpt2block.ops.layernorm import NARROW
from gpt2block.ops.layernorm import OPERATION as LAYERNORM
from gpt2block.ops.layernorm_gelu import OPERATION as LAYERNORM_GELU
from gpt2block.ops.rmsnorm import OPERATION as RMSNORM
from tests import plain
from tests.devices import (
    H200,
    IN_TESTS,
    assert_barriers_show,
    assert_same_bits,
    on_every_device,
    on_one_of_each,
    on_one_order,
    outputs,
    running_on,
)
from tests.gpus import large_memory
from tests.norms import EPS, KERNELS, NUMPY, PAIRS, Kernel, Shape, every_kernel
from tests.plain import normal

Array = NDArray[Any]
Arrays = tuple[Array, Array, Array]  # x, gamma, beta


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


# --- statistics, views, a residual, a mask -------------------------------------------------------


def inputs(rows: int, C: int) -> Arrays:
    return plain.normal(0, rows, C), plain.normal(1, C), plain.normal(2, C)


def assert_right(got: Sequence[Array], arrays: Arrays) -> None:
    """Check the result, and mean and rstd if given, as for a variance around the mean."""
    KERNELS["layernorm-6-float32"].assert_right(got, *arrays)


@on_one_order
def test_null_pointers_skip_the_statistics(where: str) -> None:
    arrays, out = inputs(5, 768), np.full((5, 768), np.nan, np.float32)
    options: dict[str, Any] = {"eps": EPS, "variant": 6, "block": 128}
    alone = outputs(where, LAYERNORM.bind, arrays, out, stats=False, **options)
    with_statistics = outputs(where, LAYERNORM.bind, arrays, out, **options)
    assert (len(alone), len(with_statistics)) == (1, 3)
    assert_same_bits(alone[0], with_statistics[0])


@on_one_order
def test_the_public_function_gives_statistics(where: str) -> None:
    """By default the dtypes determine its variant."""
    arrays = inputs(6, 48)
    with running_on(where, H200):
        x, gamma, beta = map(cupy.asarray, arrays)
        for variant in (None, *("123456" if where == "gpu" else "6")):
            outs = ops.layernorm(x.reshape(2, 3, 48), gamma, beta, variant=variant, stats=True)
            assert [each.shape for each in outs] == [(2, 3, 48), (2, 3), (2, 3)]
            alone = ops.layernorm(x, gamma, beta, variant=variant or 6)
            assert_same_bits(alone.get(), outs[0].get())
        half = [each.astype("float16") for each in (x, gamma, beta)]
        assert ops.layernorm(half[0], half[1], half[2]).dtype == np.float16
        narrow = ops.layernorm(half[0], gamma, beta, variant=NARROW)
        assert_same_bits(ops.layernorm(half[0], gamma, beta).get(), narrow.get())


# --- with GELU ------------------------------------------------------------------------------------


@on_one_of_each
@pytest.mark.parametrize(("given", "C"), [((True, False), 48), ((False, True), 257)])
def test_gamma_or_beta_alone(where: str, given: tuple[bool, bool], C: int) -> None:
    kernel = KERNELS[f"gelu-{NUMPY if where == NUMPY else 'affine'}"]
    x, *vectors = kernel.inputs(6, C)
    arrays: list[Any] = [
        x,
        *(v if there else None for v, there in zip(vectors, given, strict=True)),
    ]
    kernel.assert_right(kernel(where, arrays), *arrays)


@on_one_of_each
def test_gelu_far_from_zero(where: str) -> None:
    """With gamma 0, beta is GELU's argument; its exp may overflow, but the result must not."""
    kernel = KERNELS[f"gelu-{NUMPY if where == NUMPY else 'affine'}"]
    beta = np.array([-1e20, -1e4, -20, -5, -0.0, 1e-30, 5, 20, 1e4, 1e20, 0.5, -0.5], np.float32)
    arrays = [plain.normal(0, 1, beta.size), np.zeros_like(beta), beta]
    got = kernel(where, arrays)[0]
    np.testing.assert_allclose(got, kernel.exact(*arrays), rtol=1e-6, atol=1e-6)


@on_every_device
@pytest.mark.parametrize(
    ("dtype", "M", "shape"),
    [
        ("float32", 5, Shape(300, 0, apart=4)),
        ("float16", 17, Shape(48, 0, apart=16)),
        ("bfloat16", 2, Shape(70)),
        ("float16", 2, Shape(32_776)),  # too long for registers
    ],
    ids=str,
)
def test_a_residual_is_added_first(where: str, dtype: str, M: int, shape: Shape) -> None:
    """Results have the bits of the norm of the sum, and the sum is stored too."""
    kernel, C = KERNELS[f"rmsnorm-{dtype}"], shape.C
    x, weight = kernel.inputs(M, C)
    residual = normal(1, M, C).astype(x.dtype)
    added = (x.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype)
    got, total = kernel(where, [x, weight, residual], shape)
    np.testing.assert_array_equal(total, added)
    np.testing.assert_array_equal(got, kernel(where, [added, weight], shape)[0])


@on_one_order
def test_views_are_read_where_they_are_or_copied(where: str) -> None:
    kernel = KERNELS["rmsnorm-float16"]
    host, (_, weight) = kernel.inputs(4, 6, 96)[0], kernel.inputs(1, 32)
    with running_on(where, H200):
        x, w = cupy.asarray(host), cupy.asarray(weight)
        for view, expected, stride in (
            (x[..., 32:64], host[..., 32:64], 96),
            (x[..., 1:33], host[..., 1:33], 96),
            (x[1, 2, :32], host[1, 2, :32], 32),
            (x[:, 2, :32], host[:, 2, :32], 576),
            (x[::2, :, :32], host[::2, :, :32], None),
            (x[:, ::-1, :32], host[:, ::-1, :32], None),
            (x[0, ::-1, :32], host[0, ::-1, :32], -96),
            (x[:1, :, None, :32], host[:1, :, None, :32], 96),
            (x.reshape(4, 192, 3)[:, :32, 0], host.reshape(4, 192, 3)[:, :32, 0], None),
        ):
            assert row_stride("x", view) == stride
            got = ops.rmsnorm(view, w)
            assert got.flags.c_contiguous
            kernel.assert_right([got.get()], expected, weight)
        if where == "gpu":  # the emulator's arrays cannot be broadcast
            row, rows = host[0, 0, :32], (5, 32)
            assert row_stride("x", cupy.broadcast_to(x[0, 0, :32], rows)) == 0
            got = ops.rmsnorm(cupy.broadcast_to(x[0, 0, :32], rows), w)
            kernel.assert_right([got.get()], np.broadcast_to(row, rows), weight)
        two = ops.rmsnorm(x[..., :32], cupy.asarray(np.repeat(weight, 2))[::2])
        np.testing.assert_array_equal(two.get(), ops.rmsnorm(x[..., :32], w).get())
        out = cupy.empty((4, 6, 32), "float16")
        assert ops.rmsnorm(x[..., :32], w, out=out) is out
        np.testing.assert_array_equal(two.get(), out.get())


def assert_masked(kernel: Kernel, got: Array, x: Array) -> None:
    kernel.assert_right([got], x, causal=True)
    assert (got[..., ~np.tri(x.shape[-1], dtype=bool)] == 0).all()


def squares(kernel: Kernel) -> Sequence[Shape]:
    """Return square shapes; for `rows` also as on a GPU that few rows fill."""
    of_many = (4, 20, 102, 110) if kernel.variant == "rows" else ()
    return [*map(Shape, (1, 7, 60, 132)), *(Shape(T, sms=0) for T in of_many)]


@every_kernel("softmax", orders=IN_TESTS, shapes_of=squares)
def test_causal(where: str, kernel: Kernel, shape: Shape) -> None:
    x = 3 * normal(shape.C, 2 if shape.C <= 60 else 1, shape.C, shape.C)
    assert_masked(kernel, kernel(where, [x], shape, causal=True)[0], x)


@every_kernel("softmax", shapes_of=lambda _: [Shape(60)])
def test_a_masked_score_is_never_read(where: str, kernel: Kernel, shape: Shape) -> None:
    """Softmax runs in place too. A row that sees NaN or only -inf is NaN where it sees."""
    x = normal(0, 2, 60, 60)
    clean = kernel(where, [x], causal=True)[0]
    x[:, ~np.tri(60, dtype=bool)] = np.nan
    for in_place in (False, True):
        assert_same_bits(kernel(where, [x], in_place=in_place, causal=True)[0], clean)
    x[0, 40, :41] = -np.inf
    x[0, 50, 7] = np.nan
    got = kernel(where, [x], causal=True)[0]
    assert np.isnan(got[0, 40, :41]).all()
    assert np.isnan(got[0, 50, :51]).all()
    got[0, 40, :41], got[0, 50, :51] = clean[0, 40, :41], clean[0, 50, :51]
    assert_same_bits(got, clean)


@every_kernel("softmax")
def test_scores_of_any_size(where: str, kernel: Kernel, shape: Shape) -> None:
    """Only exp(x - max) does not overflow; scores of -inf get weight 0.

    The softmax of a row of only -inf, or with inf or NaN, is undefined.
    """
    x = 1000 * normal(0, 8, shape.C)
    x[1, : shape.C - 10] = -np.inf
    x[2, 1:] = -np.inf
    x[3, ::2] = -np.inf
    x[4] = -3e38
    got = kernel(where, [x], shape)[0]
    kernel.assert_right([got], x)
    assert (got[np.isneginf(x)] == 0).all()
    assert got[2, 0] == 1
    x[5] = -np.inf
    x[6, 3] = np.nan
    x[7, 4] = np.inf
    undefined = kernel(where, [x], shape)[0]
    assert np.isnan(undefined[5:]).all()
    assert_same_bits(undefined[:5], got[:5])


@on_one_order
def test_rows_that_do_not_fit_in_registers(where: str) -> None:
    """Rows as long as a vocabulary use another variant."""
    x = 3 * normal(0, 9 if where == "gpu" else 1, 50257)
    kernel = KERNELS["softmax-rows"]
    kernel.assert_right(kernel(where, [x], variant=None), x)


@on_one_order
def test_the_public_function_in_place(where: str) -> None:
    x = normal(0, 2, 7, 7)
    with running_on(where):
        scores = cupy.asarray(x)
        assert ops.softmax(scores, causal=True, out=scores) is scores
        assert_masked(KERNELS["softmax-rows"], scores.get(), x)
