"""RMSNorm over rows, contiguous or apart: on NumPy, on the CPU and on the GPU."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import InputError, KernelError, ops, reference
from gpt2block.cuda import cupy as cp
from gpt2block.cuda import kernels
from gpt2block.cuda.arrays import row_stride
from gpt2block.ops._rows import LONGEST_IN_REGISTERS, VALUES
from gpt2block.ops.rmsnorm import BLOCKS, FILE, OPERATION, choose_geometry
from tests import plain
from tests.compiling import Job, assert_clean
from tests.devices import (
    H200,
    assert_barriers_show,
    moved,
    on_every_device,
    on_one_order,
    outputs,
    running_on,
)
from tests.gpus import large_memory

Array = NDArray[Any]
exact = partial(plain.exact, "rmsnorm")

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
EPS = 1e-6
few = settings(max_examples=4)


def normal(seed: int, *shape: int, dtype: str = "float32") -> Array:
    return np.asarray(plain.normal(seed, *shape).astype(DTYPES[dtype]))


def sequential(x: Array, weight: Array, eps: float = EPS) -> Array:
    """The plain float32 evaluation, stored in the dtype of x."""
    wide = x.astype(np.float32)
    mean = plain.running_sum(wide * wide) / np.float32(x.shape[-1])
    out = wide / np.sqrt(mean + np.float32(eps)) * weight.astype(np.float32)
    return np.asarray(out.astype(x.dtype).astype(np.float32))


def assert_right(got: Array, x: Array, weight: Array, eps: float = EPS) -> None:
    assert got.dtype == x.dtype
    plain.assert_as_accurate(
        got.astype(np.float32), exact(x, weight, eps), sequential(x, weight, eps)
    )


def widest(dtype: str, *distances: int) -> int:
    """Elements a load, where all of these are multiples of it."""
    width = 16 // np.dtype(DTYPES[dtype]).itemsize
    return next(w for w in (width, 4, 2, 1) if all(d % w == 0 for d in distances))


def evaluate(
    where: str,
    x: Array,
    weight: Array,
    *,
    apart: int = 0,
    sms: int = H200,
    block: int | None = None,
    eps: float = EPS,
    residual: Array | None = None,
) -> Array:
    """x (M, C) as the first columns of rows `apart` wider, with NaN in the others.

    With a residual, x + residual is checked here.
    """
    M, C = x.shape
    wide = np.full((M, C + apart), np.nan, x.dtype)
    wide[:, :C] = x
    out = np.full_like(x, np.nan)
    inputs = (wide, weight) if residual is None else (wide, weight, residual)

    def bind(inputs: tuple[Any, ...], out: Any, **options: Any) -> Any:
        rows, *others = inputs
        return OPERATION.bind((rows[:, :C], *others), out, **options)

    got = outputs(where, bind, inputs, out, multiprocessors=sms, eps=eps, block=block)
    if residual is not None:
        np.testing.assert_array_equal(got[1], added(x, residual))
    return got[0]


def added(x: Array, residual: Array) -> Array:
    """Their sum as it is stored."""
    return (x.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype)


# --- what it means, and how rows are shared out ---------------------------------------------------


def test_the_reference_against_a_loop_by_hand() -> None:
    x, weight = normal(0, 2, 3, 5).astype(np.float64), normal(1, 5).astype(np.float64)
    got = reference.rmsnorm(x, weight, 1e-3)
    for i in np.ndindex(2, 3):
        rms = math.sqrt(math.fsum(v * v for v in x[i]) / 5 + 1e-3)
        np.testing.assert_allclose(got[i], x[i] / rms * weight, rtol=1e-14)
    assert reference.rmsnorm(x.astype(np.float32), weight.astype(np.float32)).dtype == np.float32


@given(
    M=st.integers(1, 70000),
    C=st.integers(1, 40000),
    width=st.sampled_from([1, 2, 4, 8]),
    sms=st.sampled_from([1, 20, H200]),
    block=st.sampled_from([None, *BLOCKS]),
)
@example(M=1, C=4096, width=8, sms=H200, block=None)
@example(M=65536, C=4096, width=8, sms=H200, block=None)
def test_a_row_is_shared_out_whole(M: int, C: int, width: int, sms: int, block: int | None) -> None:
    width = math.gcd(width, C)
    if block is not None and block * VALUES < C <= LONGEST_IN_REGISTERS:
        with pytest.raises(
            InputError, match=r"registers of .* threads hold .*: use a larger block"
        ):
            choose_geometry(M, C, width, sms, block)
        return
    geometry = choose_geometry(M, C, width, sms, block)
    at = dict(geometry.defines)
    threads, vectors, rows = (int(at[f"RMS_{x}"]) for x in ("THREADS", "VECTORS", "ROWS"))
    assert (vectors - 1) * threads * width < C
    assert vectors * threads * width >= C or (vectors == 0 and C > LONGEST_IN_REGISTERS)
    assert vectors * width <= VALUES
    assert geometry.block == (threads * rows,)
    assert geometry.block[0] % 32 == 0
    assert (geometry.grid[0] - 1) * rows < M <= geometry.grid[0] * rows


def test_the_operation_describes_itself() -> None:
    sizes = {"M": 3, "C": 5}
    x, weight = OPERATION.make(sizes, np.random.default_rng(0))
    assert (x.shape, weight.shape) == ((3, 5), (5,))
    assert {a.dtype.name for a in (x, weight)} == {"float32"}
    assert OPERATION.traffic({**sizes, "itemsize": 2, "weight": 2}) == 2 * (15 + 15 + 5)


# --- on the CPU and on the GPU --------------------------------------------------------------------


@on_every_device
@pytest.mark.parametrize(
    ("dtype", "M", "C", "apart", "sms"),
    [
        ("float32", 5, 300, 4, 0),
        ("float16", 17, 48, 16, 0),
        ("bfloat16", 2, 70, 0, H200),
        ("float16", 2, 32_776, 0, H200),  # too long for registers
    ],
)
def test_a_residual_is_added_first(
    where: str, dtype: str, M: int, C: int, apart: int, sms: int
) -> None:
    """The same bits as for the sum alone."""
    x, residual = (normal(i, M, C, dtype=dtype) for i in range(2))
    weight = normal(2, C, dtype=dtype)
    got = evaluate(where, x, weight, apart=apart, sms=sms, residual=residual)
    alone = evaluate(where, added(x, residual), weight, apart=apart, sms=sms)
    np.testing.assert_array_equal(got, alone)


# dtype, C, columns between rows, multiprocessors (0: rows get a warp each, as in a large batch)
SHAPES = [
    ("float32", 768, 0, H200),  # a load a thread
    ("float32", 300, 4, 0),  # three loads a lane, the last one not full
    ("float32", 37, 0, H200),  # one element a load, two warps of which one is mostly idle
    ("float16", 48, 16, 0),  # 8 threads a row, two of them idle, 16 rows a block
    ("float16", 70, 3, H200),  # rows that do not start on a vector
    ("bfloat16", 768, 8, 0),
    ("bfloat16", 1, 0, H200),
]


@on_every_device
@pytest.mark.parametrize(("dtype", "C", "apart", "sms"), SHAPES)
@few
@given(M=st.integers(1, 19))
@example(M=1)
@example(M=5)
def test_rows(where: str, dtype: str, C: int, apart: int, sms: int, M: int) -> None:
    x, weight = normal(M, M, C, dtype=dtype), normal(1, C, dtype=dtype)
    assert_right(evaluate(where, x, weight, apart=apart, sms=sms), x, weight)


@on_one_order
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_too_long_for_registers_are_read_twice(where: str, dtype: str) -> None:
    C = LONGEST_IN_REGISTERS + 8
    x, weight = normal(0, 2, C, dtype=dtype), normal(1, C, dtype=dtype)
    assert_right(evaluate(where, x, weight, apart=8, block=256), x, weight)


@on_one_order
def test_nan_and_infinity_stay_in_their_row_and_column_and_eps_counts(where: str) -> None:
    x, weight = normal(0, 5, 300), normal(1, 300)
    clean = evaluate(where, x, weight, eps=0.5)
    assert_right(clean, x, weight, eps=0.5)
    x[1, 7] = np.nan
    x[3, 7] = np.inf
    weight[5], weight[6] = np.nan, np.inf
    got = evaluate(where, x, weight, eps=0.5)
    assert np.isnan(got[1]).all()
    assert np.isnan(got[3, 7])
    assert np.isnan(got[:, 5]).all()
    assert np.isinf(got[[0, 2, 4], 6]).all()
    others = np.delete(np.arange(300), [5, 6])
    np.testing.assert_array_equal(got[[0, 2, 4]][:, others], clean[[0, 2, 4]][:, others])


@on_one_order
def test_a_row_of_zeros_and_one_of_large_values(where: str) -> None:
    x, weight = normal(0, 3, 300), normal(1, 300)
    x[0] = 0
    x[1] *= 1e15
    x[2] *= 1e-15
    assert_right(evaluate(where, x, weight), x, weight)


def test_a_missing_barrier_shows() -> None:
    x, weight = normal(0, 2, 768), normal(1, 768)
    header = "lib/rows.cuh"
    assert_barriers_show(FILE, lambda order: [evaluate(order, x, weight)], header=header)


# --- with NVRTC -----------------------------------------------------------------------------------


def test_rows_compile_without_spills() -> None:
    """By turns in each dtype and for an old and a new GPU."""
    sizes = (1, 16384), (10**6, 16384), (1, 16383), (10**6, 1023), (10**6, 7), (1, 16386)
    jobs: list[Job] = []
    for i, (M, C) in enumerate((*sizes, *sizes[:3])):
        dtype = list(DTYPES)[(i + i // 6) % 3]
        geometry = choose_geometry(M, C, widest(dtype, C), H200)
        arch = ("sm_75", "sm_90")[(i + i // 6) % 2]
        jobs.append((FILE, arch, (*kernels.STORAGE[dtype], *geometry.defines)))
    assert_clean(jobs)


@pytest.mark.parametrize(
    ("constants", "message"),
    [
        ((("RMS_WIDTH", 8),), "16 bytes"),
        ((("RMS_C", 4098),), "whole vectors"),
        ((("RMS_THREADS", 24),), "or a multiple of 32"),
        ((("RMS_THREADS", 8), ("RMS_C", 8)), "whole warps"),
        ((("RMS_VECTORS", 3),), "fits in its threads' vectors"),
        ((("RMS_VECTORS", 5),), "needs all of them"),
    ],
)
def test_constants_that_make_no_sense_do_not_compile(
    constants: kernels.Defines, message: str
) -> None:
    pytest.importorskip("cupy", reason="compiling needs CuPy and NVRTC")
    with pytest.raises(KernelError, match=message):
        kernels.compile_for(FILE, "sm_80", constants)


# --- on the GPU alone -----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "C", [1, 2, 7, 64, 100, 768, 769, 4096, 5120, 8192, 11008, 16384, 16386, 50257]
)
def test_widths(dtype: str, C: int) -> None:
    weight = normal(1, C, dtype=dtype)
    for M in (1, 16) if C > 5000 else (1, 16, 500):
        x = normal(M, M, C, dtype=dtype)
        truth, expected = exact(x, weight, EPS), sequential(x, weight)
        for apart in (0, 3):
            got = evaluate("gpu", x, weight, apart=apart).astype(np.float32)
            plain.assert_as_accurate(got, truth, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("block", BLOCKS)
def test_block_sizes(block: int) -> None:
    x, weight = normal(0, 37, 1000, dtype="float16"), normal(1, 1000, dtype="float16")
    assert_right(evaluate("gpu", x, weight, block=block), x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_many_rows(dtype: str) -> None:
    """More than 2³¹ elements, read from rows twice as wide: equal rows must give equal results."""
    rows = 2_200_000
    row, weight = normal(0, 1, 1024, dtype=dtype), cp.asarray(normal(1, 1024, dtype=dtype))
    with large_memory(rows * (3072 * row.itemsize + 1024)):  # x, out, and what == gives
        x = cp.empty((rows, 2048), dtype)[:, :1024]
        x[:] = cp.asarray(row)
        out = ops.rmsnorm(x, weight)
        assert bool((out == out[0]).all())
        assert_right(out[:1].get(), row, weight.get())
        del x, out


@pytest.mark.gpu
def test_views_are_read_where_they_are_or_copied() -> None:
    host = normal(0, 4, 6, 96, dtype="float16")
    weight = normal(1, 32, dtype="float16")
    x, w = cp.asarray(host), cp.asarray(weight)
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
        (cp.broadcast_to(x[0, 0, :32], (5, 32)), np.broadcast_to(host[0, 0, :32], (5, 32)), 0),
    ):
        assert row_stride("x", view) == stride
        got = ops.rmsnorm(view, w)
        assert got.flags.c_contiguous
        assert_right(got.get(), expected, weight)
    two = ops.rmsnorm(x[..., :32], cp.asarray(np.repeat(weight, 2))[::2])
    np.testing.assert_array_equal(two.get(), ops.rmsnorm(x[..., :32], w).get())
    out = cp.empty((4, 6, 32), "float16")
    assert ops.rmsnorm(x[..., :32], w, out=out) is out
    np.testing.assert_array_equal(two.get(), out.get())


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ["x", "weight", "out"])
def test_arrays_that_start_anywhere(dtype: str, offset: int, which: str) -> None:
    x, weight = normal(0, 5, 768, dtype=dtype), normal(1, 768, dtype=dtype)
    hosts = {"x": x, "weight": weight, "out": np.full_like(x, np.nan)}
    arrays = {name: moved(a, offset if name == which else 0) for name, a in hosts.items()}
    assert_right(ops.rmsnorm(**arrays).get(), x, weight)


@on_one_order
def test_bad_input(where: str) -> None:
    with running_on(where):
        x, weight = cp.zeros((3, 4096), "float16"), cp.zeros(4096, "float16")
        for options, message in (
            ({"out": x[:2]}, r"out: expected shape \(3, 4096\)"),
            ({"block": 48}, "block size 48: expected one of 32, 64"),
            ({"block": 64}, "registers of 64 threads hold 2,048: use a larger block"),
        ):
            with pytest.raises(InputError, match=message):
                ops.rmsnorm(x, weight, **options)
        with pytest.raises(InputError, match="x: expected contiguous rows at one distance"):
            OPERATION.bind((x.T, cp.zeros(3, "float16")))
