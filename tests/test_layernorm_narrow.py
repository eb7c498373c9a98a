"""LayerNorm in front of a tensor-core product: x float or 16 bits, gamma and beta float."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import InputError, ops, reference
from gpt2block.cuda import cupy as cp
from gpt2block.cuda import kernels
from gpt2block.cuda.kernels import Geometry
from gpt2block.emulator import loader
from gpt2block.ops.layernorm import HELD, NARROW, OPERATION, narrow_geometry
from gpt2block.ops.layernorm import bind as bind_layernorm
from tests import plain
from tests.compiling import assert_clean
from tests.devices import H200, moved, on_every_device, outputs

Array = NDArray[Any]
FILE = OPERATION.variant(NARROW).file
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
PAIRS = [(x, out) for out in DTYPES for x in dict.fromkeys((out, "float32"))]  # x, out
HALVES = [pair for pair in PAIRS if pair[1] != "float32"]
EPS = 1e-5
few = settings(max_examples=4)


def inputs(seed: int, rows: int, C: int, dtype: str) -> tuple[Array, Array, Array]:
    x, gamma, beta = plain.normal(seed, rows, C), plain.normal(1, C), plain.normal(2, C)
    return x.astype(DTYPES[dtype]), gamma, beta


def assert_right(got: Array, arrays: tuple[Array, Array, Array], eps: float = EPS) -> None:
    """Against the sequential float32 evaluation, stored in the dtype of the result."""
    x, gamma, beta = (a.astype(np.float32) for a in arrays)
    truth = reference.layernorm(x.astype(np.float64), gamma, beta, eps)
    stored = plain.layernorm(x, gamma, beta, eps).astype(got.dtype).astype(np.float32)
    plain.assert_as_accurate(got.astype(np.float32), truth, stored)


def widest(C: int, dtype: str) -> int:
    return next(w for w in (16 // np.dtype(DTYPES[dtype]).itemsize, 4, 2, 1) if C % w == 0)


def evaluate(
    where: str,
    arrays: tuple[Array, Array, Array],
    out_dtype: str,
    *,
    sms: int = H200,
    eps: float = EPS,
) -> Array:
    out = np.full(arrays[0].shape, np.nan, DTYPES[out_dtype])
    options = {"eps": eps, "variant": NARROW}
    return outputs(where, bind_layernorm, arrays, out, multiprocessors=sms, **options)[0]


def constants(how: Geometry) -> dict[str, int]:
    return {name: int(value) for name, value in how.defines}


# --- how rows are shared out ----------------------------------------------------------------------


@given(
    float_x=st.booleans(),
    rows=st.integers(1, 10**6),
    C=st.integers(1, 16384),
    width=st.sampled_from([1, 2, 4, 8]),
    sms=st.sampled_from([1, 20, H200]),
)
@example(float_x=False, rows=8192, C=768, width=8, sms=H200)
@example(float_x=True, rows=1, C=16384, width=8, sms=H200)
def test_rows_are_shared_out_whole(float_x: bool, rows: int, C: int, width: int, sms: int) -> None:
    width = next(w for w in (width, 4, 2, 1) if w <= width and C % w == 0)
    how = narrow_geometry(float_x, rows, C, width, sms)
    at = constants(how)
    threads, vectors, side = at["LN_THREADS"], at["LN_VECTORS"], at["LN_ROWS"]
    assert how.block == (threads * side,)
    assert how.block[0] % 32 == 0
    assert (vectors - 1) * threads * width < C <= vectors * threads * width
    together = side * at["LN_EACH"]
    assert (how.grid[0] - 1) * together < rows <= how.grid[0] * together
    one = constants(narrow_geometry(float_x, 1, C, width, sms))
    assert {**at, "LN_EACH": 1} == one  # a row's bits are the same among any number of rows
    held = vectors * width * (2 + at["LN_EACH"] * (1 if float_x else 0.5))
    assert at["LN_EACH"] == 1 or held <= HELD


def test_few_rows_are_spread_and_many_share_gamma_and_beta() -> None:
    each = [constants(narrow_geometry(False, n, 768, 8, H200))["LN_EACH"] for n in (1024, 8192)]
    assert each == [1, 2]


def test_a_row_too_long_for_registers_is_refused() -> None:
    with pytest.raises(InputError, match=r"rows of 16,392 values: .* use another variant"):
        narrow_geometry(False, 5, 16392, 8, H200)


# --- on the CPU and on the GPU --------------------------------------------------------------------


@on_every_device
@pytest.mark.parametrize(("x", "out"), PAIRS)
def test_the_width_of_gpt2(where: str, x: str, out: str) -> None:
    arrays = inputs(0, 5, 768, x)
    assert_right(evaluate(where, arrays, out), arrays)


@on_every_device
@pytest.mark.parametrize(
    ("C", "x", "out", "sms"),
    [
        (48, "bfloat16", "bfloat16", H200),  # 8 threads a row, two of them idle
        (300, "float16", "float16", 0),  # 4 elements a load, rows in turn, the last vector short
        (300, "float32", "bfloat16", 0),
        (520, "bfloat16", "bfloat16", 0),
        (1111, "float32", "float16", H200),  # one element a load, two warps a row
    ],
)
@few
@given(rows=st.integers(1, 40))
@example(rows=1)
@example(rows=33)
def test_rows(where: str, C: int, x: str, out: str, sms: int, rows: int) -> None:
    arrays = inputs(rows, rows, C, x)
    assert_right(evaluate(where, arrays, out, sms=sms), arrays)


@on_every_device
@pytest.mark.parametrize(("x", "out"), HALVES)
def test_several_warps_a_row_and_several_rows_a_team(where: str, x: str, out: str) -> None:
    arrays = inputs(0, 5, 1600, x)
    assert_right(evaluate(where, arrays, out, sms=0), arrays)


@on_every_device
def test_a_row_has_the_same_bits_alone_and_in_turn(where: str) -> None:
    x, gamma, beta = inputs(0, 37, 768, "bfloat16")
    alone = [evaluate(where, (x[i : i + 1], gamma, beta), "bfloat16") for i in (0, 20, 36)]
    together = evaluate(where, (x, gamma, beta), "bfloat16", sms=0)
    np.testing.assert_array_equal(np.concatenate(alone), together[[0, 20, 36]])


@on_every_device
def test_a_large_mean_eps_and_what_is_not_finite(where: str) -> None:
    x, gamma, beta = inputs(0, 9, 96, "float32")
    x = (1000 + 0.1 * x).astype(np.float32)
    x[8] = 7
    clean = evaluate(where, (x, gamma, beta), "float16", eps=1e-3)
    assert_right(clean, (x, gamma, beta), eps=1e-3)
    x[2, 5], x[4, 5] = np.nan, np.inf
    got = evaluate(where, (x, gamma, beta), "float16", eps=1e-3)
    assert np.isnan(got[[2, 4]]).all()
    others = [0, 1, 3, 5, 6, 7, 8]
    np.testing.assert_array_equal(got[others], clean[others])


def test_a_missing_barrier_shows() -> None:
    if problem := loader.missing():
        pytest.skip(problem)
    arrays = inputs(0, 2, 1600, "bfloat16")
    source = loader.Source.shipped(FILE).edited("__syncthreads();", "", header="lib/rows.cuh")
    right = evaluate("forward", arrays, "bfloat16")
    how = narrow_geometry(False, 2, 1600, 8, H200)

    def differs(order: loader.Order) -> bool:
        out = np.full_like(right, np.nan)
        args: list[Any] = [*arrays, out, EPS, 2, 1600]
        options: dict[str, Any] = {"defines": how.defines, "storage": "bfloat16", "order": order}
        loader.run(source, how.kernel, how.grid, how.block, args, **options)
        return bool((out != right).any())

    assert any(map(differs, loader.ORDERS))


def test_compiles_without_spills() -> None:
    """Alone, before 16 bits and before two-part products."""
    jobs, own = [], []
    many = 10**6
    for rows, C in ((1, 768), (many, 768), (many, 1600), (many, 4096), (1, 16384), (1, 16383)):
        for float_x, two_part in ((False, False), (True, False), (True, True)):
            how = narrow_geometry(float_x, rows, C, widest(C, "bfloat16"), H200, two_part)
            defines = (*kernels.stored_as("float16" if two_part else "bfloat16"), *how.defines)
            jobs += [(FILE, arch, defines) for arch in ("sm_80", "sm_90")]
            own += [how.kernel] * 2
    assert_clean(jobs, own)


# --- on the GPU alone -----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("x", "out"), PAIRS)
@pytest.mark.parametrize("C", [1, 2, 7, 48, 100, 768, 769, 1024, 1280, 1600, 4096, 8191, 16384])
def test_widths(x: str, out: str, C: int) -> None:
    for rows in (1, 17, 1000) if C < 5000 else (5,):
        arrays = inputs(rows, rows, C, x)
        assert_right(evaluate("gpu", arrays, out), arrays)


@pytest.mark.gpu
@pytest.mark.parametrize(("x", "out"), HALVES)
def test_many_rows(x: str, out: str) -> None:
    row, gamma, beta = inputs(0, 1, 768, x)
    many = cp.asarray(np.repeat(row, 65537, axis=0))
    to = cp.empty(many.shape, out)
    vectors = cp.asarray(gamma), cp.asarray(beta)
    bind_layernorm((many, *vectors), to, eps=EPS, variant=NARROW).run()
    assert bool((to == to[0]).all())
    np.testing.assert_array_equal(to[:1].get(), evaluate("gpu", (row, gamma, beta), out))


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [1, 2, 4, 8])
@pytest.mark.parametrize("which", range(4))
def test_arrays_that_start_anywhere(which: int, offset: int) -> None:
    arrays = inputs(0, 5, 768, "bfloat16")
    hosts = [*arrays, np.full_like(arrays[0], np.nan)]
    every = [moved(array, offset if i == which else 0) for i, array in enumerate(hosts)]
    bind_layernorm(tuple(every[:3]), every[3], eps=EPS, variant=NARROW).run()
    assert_right(every[3].get(), arrays)


@pytest.mark.gpu
def test_the_public_function_and_bad_input() -> None:
    arrays = inputs(0, 6, 768, "bfloat16")
    x, gamma, beta = map(cp.asarray, arrays)
    got = ops.layernorm(x, gamma, beta)  # its variant follows from the dtypes
    assert got.dtype.name == "bfloat16"
    np.testing.assert_array_equal(got.get(), evaluate("gpu", arrays, "bfloat16"))
    assert ops.layernorm(x, gamma.astype("bfloat16"), beta.astype("bfloat16")).dtype == x.dtype
    for args, options, message in (
        ((x, gamma, beta), {"variant": NARROW, "stats": True}, "it gives no mean and rstd"),
        ((x, gamma, beta), {"variant": NARROW, "block": 64}, "narrow has no block, mean and rstd"),
        ((x, gamma.astype("bfloat16"), beta), {"variant": NARROW}, "gamma: expected float32, got"),
        ((x, gamma, beta[1:]), {}, r"beta: expected shape \(768,\)"),
        ((x[:0], gamma, beta), {}, "at least one element"),
        ((x.get(), gamma, beta), {"variant": NARROW}, "x: expected a CuPy array"),
    ):
        with pytest.raises(InputError, match=message):
            ops.layernorm(*args, **options)
    bind = bind_layernorm
    with pytest.raises(InputError, match="out: expected bfloat16, got float16"):
        bind((x, gamma, beta), cp.empty(x.shape, "float16"), eps=EPS)
    with pytest.raises(InputError, match="out: overlaps x"):
        bind((x, gamma, beta), x, eps=EPS)
    with pytest.raises(InputError, match="out: expected float32, got float64"):
        bind(
            (cp.zeros((2, 768), "float32"), gamma, beta),
            cp.empty((2, 768)),
            eps=EPS,
            variant="narrow",
        )
