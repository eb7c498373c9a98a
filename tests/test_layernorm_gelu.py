"""LayerNorm and GELU in one kernel: every variant, on NumPy, on the CPU and on the GPU."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import InputError, ops, reference
from gpt2block.cuda import cupy as cp
from gpt2block.ops._rows import THREADS, VALUES, share
from gpt2block.ops.call import Call
from gpt2block.ops.layernorm_gelu import FILE, OPERATION
from tests import devices, plain
from tests.compiling import Job, assert_clean
from tests.devices import (
    H200,
    in_every_order,
    moved,
    on_every_backend,
    on_one_of_each,
    on_one_order,
    outputs,
    running_on,
)
from tests.launches import geometry_of, stub
from tests.plain import normal

Array = NDArray[Any]
exact = partial(plain.exact, "layernorm_gelu")
VARIANTS = [variant.name for variant in OPERATION.variants]
on_every_variant = pytest.mark.parametrize("variant", VARIANTS)
few = settings(max_examples=5)


def evaluate(
    where: str,
    variant: str,
    x: Array,
    gamma: Array | None = None,
    beta: Array | None = None,
    *,
    eps: float = 1e-5,
    block: int | None = None,
    sms: int = H200,
    in_place: bool = False,
) -> Array:
    """On NumPy, on the CPU in a thread order, or on the GPU, twice, with the same bits."""
    if where == "numpy":
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(reference.layernorm_gelu(x, gamma, beta, eps))
    out = None if in_place else np.full_like(x, np.nan)
    options = {"eps": eps, "variant": variant, "block": block}
    arrays = (x, gamma, beta)
    return outputs(where, OPERATION.bind, arrays, out, multiprocessors=sms, **options)[0]


def sequential(variant: str, x: Array, *affine: Array | None, eps: float = 1e-5) -> Array:
    """The plain float32 evaluation, with the variance formula of the variant."""
    C = x.shape[-1]
    gamma, beta = (
        np.full(C, default, np.float32) if array is None else array
        for array, default in zip((*affine, None, None), (1, 0), strict=False)
    )
    if variant != "optimized":
        return np.asarray(plain.gelu(plain.layernorm(x, gamma, beta, eps)))
    mean = plain.running_sum(x) / np.float32(C)
    var = np.maximum(plain.running_sum(x * x) / np.float32(C) - mean * mean, np.float32(0))
    return np.asarray(plain.gelu((x - mean) / np.sqrt(var + np.float32(eps))))


def test_reference_against_a_loop_by_hand() -> None:
    x, gamma, beta = (a.astype(np.float64) for a in (normal(0, 3, 7), normal(1, 7), normal(2, 7)))
    expected = np.empty_like(x)
    for row, out in zip(x, expected, strict=True):
        mean = sum(row) / 7
        var = sum((value - mean) ** 2 for value in row) / 7
        for c, value in enumerate(row):
            v = (value - mean) / math.sqrt(var + 1e-3) * gamma[c] + beta[c]
            out[c] = 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
    got = reference.layernorm_gelu(x, gamma, beta, 1e-3)
    np.testing.assert_allclose(got, expected, rtol=1e-13)
    without = reference.layernorm_gelu(x, eps=1e-3)
    ones, zeros = np.ones(7), np.zeros(7)
    np.testing.assert_array_equal(without, reference.layernorm_gelu(x, ones, zeros, 1e-3))


@on_every_backend
@on_every_variant
@few
@given(rows=st.integers(1, 33), C=st.sampled_from([1, 4, 33, 48, 250]))
@example(rows=3, C=768)
@example(rows=2, C=1600)  # the last of its warps have fewer values than the others
def test_every_variant(where: str, variant: str, rows: int, C: int) -> None:
    x = normal(rows, rows, C)
    got = evaluate(where, variant, x)
    plain.assert_as_accurate(got, exact(x), sequential(variant, x))


@in_every_order
@pytest.mark.parametrize(
    ("rows", "C"),
    [(5, 1024), (5, 768), (7, 48), (3, 1000), (2, 2052), (3, 41), (2, 1026)],
)
def test_rows_of_a_large_batch(where: str, rows: int, C: int) -> None:
    """As on a GPU that is filled by few rows: a warp a row, many loads a thread."""
    x, gamma, beta = normal(rows, rows, C), normal(1, C), normal(2, C)
    got = evaluate(where, "rows", x, gamma, beta, sms=0)
    plain.assert_as_accurate(got, exact(x, gamma, beta), sequential("rows", x, gamma, beta))


@on_one_of_each
@pytest.mark.parametrize(
    ("variant", "C", "options"),
    [
        *((variant, 500, {"block": block}) for variant in VARIANTS for block in (32, 64, 512)),
        *((variant, 48, {"eps": 1e-2, "size": 1e-3}) for variant in VARIANTS),
        *(("rows", C, {"vectors": (True, True)}) for C in (48, 257, 1536)),
        ("rows", 48, {"vectors": (True, False)}),
        ("rows", 257, {"vectors": (False, True)}),
    ],
    ids=str,
)
def test_options(where: str, variant: str, C: int, options: dict[str, Any]) -> None:
    """Block sizes, eps where it counts, and gamma and beta."""
    eps, vectors = options.get("eps", 1e-5), options.get("vectors", (False, False))
    x = np.float32(options.get("size", 1)) * normal(C, 2, 3, C)
    gamma, beta = (normal(n, C) if given else None for n, given in enumerate(vectors, 1))
    got = evaluate(where, variant, x, gamma, beta, eps=eps, block=options.get("block"))
    expected = sequential(variant, x, gamma, beta, eps=eps)
    plain.assert_as_accurate(got, exact(x, gamma, beta, eps), expected)


@on_one_of_each
@pytest.mark.parametrize("C", [48, 768, 1600])
def test_a_large_mean(where: str, C: int) -> None:
    x = 1e4 + normal(0, 3, C)
    x = x.astype(np.float32)
    for variant in ("baseline", "rows"):
        got = evaluate(where, variant, x)
        plain.assert_as_accurate(got, exact(x), sequential(variant, x))
    if where != "numpy":  # E[x^2] - E[x]^2 has lost every digit of a variance of 1
        assert np.abs(evaluate(where, "optimized", x) - exact(x)).max() > 0.05


@on_one_of_each
@on_every_variant
@pytest.mark.parametrize("value", [0.0, 1e4, 12345.678])
def test_a_constant_row(where: str, variant: str, value: float) -> None:
    """The variance of E[x^2] - E[x]^2 may come out negative: never NaN."""
    x = np.full((2, 100), value, np.float32)
    got = evaluate(where, variant, x)
    assert np.isfinite(got).all()
    if variant == "rows":
        assert np.abs(got).max() <= 4 * np.spacing(np.float32(value)) / math.sqrt(1e-5)


@on_one_of_each
@on_every_variant
def test_nan_and_infinity_stay_in_their_row(where: str, variant: str) -> None:
    x = normal(0, 4, 768)
    clean = evaluate(where, variant, x)
    x[1, 700] = np.nan
    x[2, 5] = np.inf
    got = evaluate(where, variant, x)
    assert np.isnan(got[1:3]).all()
    np.testing.assert_array_equal(got[[0, 3]], clean[[0, 3]])


@on_one_of_each
def test_gelu_far_from_zero(where: str) -> None:
    """gamma 0 makes beta the argument of GELU; exp of it may overflow, the result must not."""
    beta = np.array([-1e20, -1e4, -20, -5, -0.0, 1e-30, 5, 20, 1e4, 1e20, 0.5, -0.5], np.float32)
    x = normal(0, 1, beta.size)
    got = evaluate(where, "rows", x, np.zeros_like(beta), beta)
    with np.errstate(over="ignore"):
        truth = exact(x, np.zeros_like(beta), beta)
    np.testing.assert_allclose(got, truth, rtol=1e-6, atol=1e-6)


def test_the_error_of_gelu_by_exp2() -> None:
    """In float32, with two units of the last place of exp2 and of the division against it."""
    v = np.linspace(-32, 32, 200_001).astype(np.float32)
    truth = reference.gelu(v.astype(np.float64))
    f = np.float32
    t = v * (f(-2.3022082) + f(-0.10294324) * (v * v))
    with np.errstate(over="ignore"):
        for wrong in (1 - 2**-22, 1, 1 + 2**-22):
            power = (np.exp2(t.astype(np.float64)) * wrong).astype(np.float32)
            quotient = v / (f(1) + power) * f(wrong)
            assert np.abs(quotient - truth).max() < 1e-5
            assert np.abs(quotient - truth)[np.abs(v) < 6].max() < 2e-6


@devices.on_every_device
@pytest.mark.parametrize(("rows", "C"), [(9, 48), (9, 768)])
def test_rows_in_place(where: str, rows: int, C: int) -> None:
    x = normal(0, rows, C)
    expected = evaluate(where, "rows", x)
    np.testing.assert_array_equal(evaluate(where, "rows", x, in_place=True), expected)
    with pytest.raises(InputError, match="out: overlaps x: expected another array"):
        evaluate(where, "baseline", x, in_place=True)


@given(
    rows=st.integers(1, 10**6),
    n=st.integers(1, VALUES * THREADS),
    sms=st.integers(1, 200),
)
@settings(max_examples=200)
def test_how_a_row_is_shared(rows: int, n: int, sms: int) -> None:
    width = 1 if n % 4 else 4
    shape = share(rows, n, width, sms)
    assert shape.threads * shape.held * width >= n
    assert (shape.threads - 1) * shape.held * width < n + 32 * VALUES
    assert shape.held * width <= VALUES
    assert shape.threads % 32 == 0 or 32 % shape.threads == 0
    assert shape.rows == 1 or shape.threads <= 32
    assert (shape.grid - 1) * shape.rows < rows <= shape.grid * shape.rows


def test_the_shapes_of_the_documented_sizes() -> None:
    def shape(rows: int, n: int) -> tuple[int, int]:
        return share(rows, n, 4, H200)[:2]

    assert shape(128, 768) == (192, 1)
    assert shape(256, 1024) == (256, 1)
    assert shape(256, 2048) == (256, 2)
    assert shape(1024, 768) == (96, 2)
    assert shape(1024, 1024) == (128, 2)
    assert shape(65536, 1024) == (32, 8)


def test_a_row_that_does_not_fit() -> None:
    with pytest.raises(InputError, match=r"rows of 20,000 values: .* use another variant"):
        share(3, 20_000, 4, H200)
    with pytest.raises(InputError, match="32 threads hold 1,024: use a larger block"):
        share(3, 1028, 4, H200, block=32)


def test_the_largest_rows_stay_in_registers() -> None:
    sizes = (1, 16384), (1, 16383), (10**6, 1024), (10**6, 1023), (1, 1)
    arrays: dict[str, Any] = {name: stub() for name in ("x", "gamma", "beta", "out")}
    jobs: list[Job] = []
    for arch, (rows, n) in zip(("sm_75", "sm_90", "sm_120", "sm_75", "sm_90"), sizes, strict=True):
        options = {"rows": rows, "C": n, "eps": 1e-5, "requested": False}
        with running_on("forward", H200):
            c = Call(contract=OPERATION.contract, **arrays, **options)
            jobs.append((FILE, arch, geometry_of(OPERATION.variant("rows"), c).defines))
    assert_clean(jobs)


# --- on the GPU alone ----------------------------------------------------------------------------


DOCUMENTED = [(128, 768), (256, 768), (1024, 768), (128, 1024), (256, 1024), (1024, 1024)]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["optimized", "rows"])
@pytest.mark.parametrize(("rows", "C"), [*DOCUMENTED, (256, 2048), (8192, 1024)])
def test_the_documented_sizes(variant: str, rows: int, C: int) -> None:
    x = normal(rows, rows, C)
    got = evaluate("gpu", variant, x)
    assert np.abs(got - exact(x)).max() <= 1e-5
    plain.assert_as_accurate(got, exact(x), sequential(variant, x))


@pytest.mark.gpu
@pytest.mark.parametrize("C", [768, 1021, 1024, 5120, 16384])
def test_every_block_size(C: int) -> None:
    x = normal(C, 77, C)
    truth = exact(x)
    for variant in OPERATION.variants:
        expected = sequential(variant.name, x)
        for block in variant.blocks:
            if variant.name == "rows" and VALUES * block < C:
                continue
            got = evaluate("gpu", variant.name, x, block=block)
            plain.assert_as_accurate(got, truth, expected)


@pytest.mark.gpu
def test_the_op() -> None:
    x, gamma, beta = normal(0, 2, 30, 96), normal(1, 96), normal(2, 96)
    on_device = cp.asarray(x)
    for variant in VARIANTS:
        got = ops.layernorm_gelu(on_device, variant=variant).get()
        plain.assert_as_accurate(got, exact(x), sequential(variant, x))
    got = ops.layernorm_gelu(on_device, cp.asarray(gamma), cp.asarray(beta), 1e-3).get()
    expected = sequential("rows", x, gamma, beta, eps=1e-3)
    plain.assert_as_accurate(got, exact(x, gamma, beta, eps=1e-3), expected)
    np.testing.assert_array_equal(on_device.get(), x)  # a new array each time


@pytest.mark.gpu
def test_rows_that_do_not_start_on_16_bytes() -> None:
    x = normal(0, 30, 96)
    got = ops.layernorm_gelu(moved(x, 1)).get()
    plain.assert_as_accurate(got, exact(x), sequential("rows", x))
    transposed = cp.asarray(np.asfortranarray(x))
    plain.assert_as_accurate(ops.layernorm_gelu(transposed).get(), exact(x), sequential("rows", x))


@on_one_order
def test_bad_input(where: str) -> None:
    with running_on(where):
        x, gamma = cp.zeros((3, 48), "float32"), cp.zeros(48, "float32")
        wide = cp.zeros((1, 16388), "float32")
        for args, options, message in (
            ((x, gamma), {"variant": "optimized"}, "optimized: has no gamma and beta"),
            ((x,), {"variant": "fastest"}, "unknown variant .* baseline, optimized, rows"),
            ((x,), {"block": 100}, "block size 100: expected one of 32, 64, 128, 256, 512"),
            ((x,), {"block": 1024}, "block size 1024: expected one of 32"),
            ((wide,), {}, "rows of 16,388 values: .* use another variant"),
            ((wide,), {"block": 64}, "64 threads hold 2,048: use a larger block"),
        ):
            with pytest.raises(InputError, match=message):
                ops.layernorm_gelu(*args, **options)
        assert ops.layernorm_gelu(wide, variant="optimized").shape == wide.shape
