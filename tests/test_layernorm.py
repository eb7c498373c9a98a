"""LayerNorm: every variant on the CPU and on the GPU, each held to its own variance formula.

That `decode` has the bits of the LayerNorm in `linear` is tested in test_linear.py.
"""

from __future__ import annotations

import math
import sys
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
from gpt2block.cuda.kernels import STORAGE, Geometry, Parameter, Signature
from gpt2block.emulator import ORDERS, ShimError, Source, loader, missing, run
from gpt2block.ops.layernorm import (
    BLOCKS,
    DECODE,
    HELD,
    KEPT,
    KEPT_BY_MOST,
    NARROW,
    OPERATION,
    LayerNormRow,
    narrow_geometry,
    row_shape,
)
from gpt2block.ops.layernorm import OPERATION as LAYERNORM
from gpt2block.ops.registry import OPERATIONS
from tests import devices, plain
from tests.compiling import Job, assert_clean
from tests.devices import (
    GPU,
    H200,
    assert_barriers_show,
    assert_same_bits,
    moved,
    on_every_device,
    one_order,
    outputs,
    with_source,
)

Array = NDArray[Any]
exact = partial(plain.exact, "layernorm")
Arrays = tuple[Array, Array, Array]  # x, gamma, beta
device = devices.device
EVERY = tuple(variant.name for variant in OPERATION.variants)
VARIANTS = EVERY[:6]  # those with statistics
ONE_PASS = ("4", "5")  # var = E[x²] - E[x]²
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
PAIRS = [(x, out) for out in DTYPES for x in dict.fromkeys((out, "float32"))]  # of narrow: x, out
EPS = 1e-5
NARROW_FILE = OPERATION.variant(NARROW).file
on_the_cpu = pytest.mark.skipif(missing() is not None, reason=f"no CUDA on the CPU: {missing()}")


def normal(seed: int, *shape: int, dtype: str = "float32") -> Array:
    return np.asarray(plain.normal(seed, *shape).astype(DTYPES[dtype]))


def inputs(rows: int, C: int, dtype: str = "float32", vectors: str = "") -> Arrays:
    """vectors: the dtype of gamma and beta, if it is not that of x."""
    x = normal(0, rows, C, dtype=dtype)
    return x, *(normal(seed, C, dtype=vectors or dtype) for seed in (1, 2))  # type: ignore[return-value]


# --- the NumPy meaning, and the rule --------------------------------------------------------------


def test_the_reference_against_a_loop() -> None:
    x = normal(0, 2, 3, 5).astype(np.float64)
    mean, rstd = reference.layernorm_stats(x, 1e-3)
    for i in np.ndindex(2, 3):
        m = math.fsum(x[i]) / 5
        var = math.fsum((v - m) ** 2 for v in x[i]) / 5
        assert mean[i] == pytest.approx(m, rel=1e-14)
        assert rstd[i] == pytest.approx(1 / math.sqrt(var + 1e-3), rel=1e-14)


def test_the_reference_agrees_with_layernorm() -> None:
    x, gamma, beta = (a.astype(np.float64) for a in inputs(7, 48))
    mean, rstd = reference.layernorm_stats(x)
    expected = (x - mean[:, None]) * rstd[:, None] * gamma + beta
    np.testing.assert_allclose(reference.layernorm(x, gamma, beta), expected, rtol=1e-13)


def plain_stats(x: Array, eps: float, one_pass: bool) -> tuple[Array, Array]:
    """mean and rstd by sequential float32 sums, with one of the variance formulas."""
    x, C = x.astype(np.float32), np.float32(x.shape[-1])
    mean = plain.running_sum(x) / C
    if one_pass:
        var = np.maximum(plain.running_sum(x * x) / C - mean * mean, np.float32(0))
    else:
        var = plain.running_sum((x - mean) * (x - mean)) / C
    return mean[..., 0], (1 / np.sqrt(var + np.float32(eps)))[..., 0]


def assert_right(got: list[Array], arrays: Arrays, variant: str = "", eps: float = EPS) -> None:
    """Each output errs at most twice as much as the plain evaluation in the same storage dtype.

    got: the result, and mean and rstd of a variant with statistics.
    """
    mean, rstd = plain_stats(arrays[0], eps, variant in ONE_PASS)
    x, gamma, beta = (a.astype(np.float32) for a in arrays)
    expected = (x - mean[..., None]) * rstd[..., None] * gamma + beta
    stored = expected.astype(got[0].dtype).astype(np.float32)
    plain.assert_as_accurate(got[0].astype(np.float32), exact(*arrays, eps), stored)
    if len(got) == 1:
        return
    true_mean, true_rstd = reference.layernorm_stats(x.astype(np.float64), eps)
    plain.assert_as_accurate(got[1], true_mean, mean)
    # rsqrtf may err by 2 units in the last place (CUDA's manual), a square root by half a unit.
    limit = 2 * np.abs(rstd - true_rstd).max() + 2 * np.spacing(np.float32(true_rstd.max()))
    assert np.abs(got[2] - true_rstd).max() <= limit


# --- how rows are shared out ----------------------------------------------------------------------


@given(C=st.integers(1, 70000), itemsize=st.sampled_from([2, 4]), power=st.integers(1, 8))
@example(C=768, itemsize=4, power=4)
@example(C=16384, itemsize=2, power=4)
@example(C=16385, itemsize=2, power=4)
def test_a_row_is_shared_out_whole(C: int, itemsize: int, power: int) -> None:
    alignment = max(itemsize, 2**power)
    width, threads, vectors = row_shape(C, itemsize, alignment)
    assert C % width == 0
    assert width * itemsize <= min(16, alignment)
    assert threads in (1, 2, 4, 8, 16) or (threads % 32 == 0 and threads <= 1024)
    if vectors:
        step = threads * width
        assert (vectors - 1) * step < C <= vectors * step  # only the last vector can be outside
        assert vectors * width * itemsize <= KEPT
    else:
        assert threads * KEPT_BY_MOST < C * itemsize
        assert threads == 1024


@pytest.mark.parametrize(
    ("C", "itemsize", "alignment", "shape"),
    [
        (768, 4, 16, (4, 64, 3)),
        (768, 2, 16, (8, 32, 3)),
        (768, 4, 8, (2, 64, 6)),
        (769, 4, 16, (1, 64, 13)),
        (48, 4, 16, (4, 16, 1)),
        (1600, 4, 16, (4, 128, 4)),
        (8192, 4, 16, (4, 512, 4)),
        (16384, 2, 16, (8, 512, 4)),
        (8196, 4, 16, (4, 1024, 0)),
        (50257, 4, 16, (1, 1024, 0)),
    ],
)
def test_the_shape_of_a_row(
    C: int, itemsize: int, alignment: int, shape: tuple[int, int, int]
) -> None:
    assert row_shape(C, itemsize, alignment) == shape


def constants(how: Geometry) -> dict[str, int]:
    return {name: int(value) for name, value in how.defines}


@given(
    float_x=st.booleans(),
    rows=st.integers(1, 10**6),
    C=st.integers(1, 16384),
    width=st.sampled_from([1, 2, 4, 8]),
    sms=st.sampled_from([1, 20, H200]),
)
@example(float_x=False, rows=8192, C=768, width=8, sms=H200)
@example(float_x=True, rows=1, C=16384, width=8, sms=H200)
def test_rows_of_narrow_are_shared_out_whole(
    float_x: bool, rows: int, C: int, width: int, sms: int
) -> None:
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


def poisoned(*shape: int, dtype: str = "float32") -> Array:
    return np.full(shape, np.nan, DTYPES[dtype])


def evaluate(
    where: str,
    variant: str,
    arrays: Arrays,
    out_dtype: str = "",
    *,
    block: int | None = None,
    eps: float = EPS,
    shape: LayerNormRow | None = None,
    sms: int = H200,
) -> list[Array]:
    """The outputs of a variant on a device, with 64 threads where it has a choice on the CPU.

    out_dtype: by default that of x. shape: how kernel 6 shares out a row; None: as the operation
    does it.
    """
    x = arrays[0]
    out = poisoned(*x.shape, dtype=out_dtype or x.dtype.name)
    options: dict[str, Any] = {"eps": eps, "variant": variant, "multiprocessors": sms}
    if variant in VARIANTS:
        options |= {name: poisoned(*x.shape[:-1]) for name in ("mean", "rstd")}
        options["block"] = block or (None if where == "gpu" else 64)
    with pytest.MonkeyPatch.context() as patch:
        if shape:
            patch.setattr(sys.modules["gpt2block.ops.layernorm"], "row_shape", lambda *_: shape)
        return outputs(where, LAYERNORM.bind, arrays, out, **options)


@on_every_device
@pytest.mark.parametrize(
    ("variant", "C", "x", "out", "sms"),
    [
        *((variant, None, "float32", "float32", H200) for variant in VARIANTS[:5]),
        (NARROW, 48, "bfloat16", "bfloat16", H200),  # 8 threads a row, two of them idle
        (NARROW, 300, "float16", "float16", 0),  # 4 elements a load, rows in turn
        (NARROW, 300, "float32", "bfloat16", 0),
        (NARROW, 1111, "float32", "float16", H200),  # one element a load, two warps a row
    ],
)
@settings(max_examples=4)
@given(rows=st.integers(1, 40), own=st.sampled_from([1, 3, 31, 48, 64, 65, 95, 130]))
@example(rows=1, own=768)
@example(rows=33, own=65)
def test_any_rows(
    where: str, variant: str, C: int | None, x: str, out: str, sms: int, rows: int, own: int
) -> None:
    """C: what the program is compiled for, in place of any."""
    arrays = inputs(rows if C else rows % 9 + 1, C or own, x, "float32")
    assert_right(evaluate(where, variant, arrays, out, sms=sms), arrays, variant)


# variant, dtypes of x and of the result, rows, C, how a row is shared out (None: as the op does it)
ROWS: list[tuple[str, str, str, int, int, LayerNormRow | None]] = [
    ("6", "float32", "", 5, 768, None),
    ("6", "float32", "", 9, 48, None),  # 16 threads a row, four of them idle
    ("6", "float32", "", 3, 37, None),  # one element a load
    ("6", "float32", "", 5, 300, LayerNormRow(4, 64, 2)),  # two warps, the second vector not full
    ("6", "float16", "", 3, 300, LayerNormRow(4, 32, 0)),  # read again
    ("6", "bfloat16", "", 3, 768, None),
    *((NARROW, x, out, 5, 768, None) for x, out in PAIRS),
    # Rows that fill blocks, and those that do not, with loads of 1, 2 and 4 values.
    *((DECODE, "float32", "", 13, C, None) for C in (1, 6, 128, 1100)),
]


@on_every_device
@pytest.mark.parametrize(("variant", "x", "out", "rows", "C", "shape"), ROWS)
def test_rows_in_registers(
    where: str, variant: str, x: str, out: str, rows: int, C: int, shape: LayerNormRow | None
) -> None:
    arrays = inputs(rows, C, x, "" if variant == "6" else "float32")
    got = evaluate(where, variant, arrays, out, block=128, shape=shape)
    assert_right(got, arrays, variant)


@on_every_device
@pytest.mark.parametrize(("x", "out"), [("bfloat16", "bfloat16"), ("float32", "float16")])
def test_several_warps_a_row_and_several_rows_a_team(where: str, x: str, out: str) -> None:
    arrays = inputs(5, 1600, x, "float32")
    assert_right(evaluate(where, NARROW, arrays, out, sms=0), arrays)


@on_the_cpu
@pytest.mark.parametrize("variant", VARIANTS[:5])
def test_another_block_size(variant: str) -> None:
    arrays = inputs(5, 300)
    assert_right(evaluate("shuffled", variant, arrays, block=256), arrays, variant)


@on_the_cpu
def test_null_pointers_skip_the_statistics() -> None:
    arrays = inputs(5, 768)
    options: dict[str, Any] = {"eps": EPS, "variant": 6, "block": 128}
    got = outputs("forward", LAYERNORM.bind, arrays, poisoned(5, 768), stats=False, **options)
    assert len(got) == 1
    assert_same_bits(got[0], evaluate("forward", "6", arrays, block=128)[0])


on_both = pytest.mark.parametrize(
    "where", [pytest.param("forward", id="cpu", marks=on_the_cpu), GPU]
)


@on_both
@pytest.mark.parametrize(
    ("variant", "dtype", "rows", "C"), [(NARROW, "bfloat16", 37, 768), (DECODE, "float32", 40, 132)]
)
def test_a_row_has_the_same_bits_alone_and_in_turn(
    where: str, variant: str, dtype: str, rows: int, C: int
) -> None:
    x, gamma, beta = inputs(rows, C, dtype, "float32")
    together = evaluate(where, variant, (x, gamma, beta), sms=int(variant == DECODE))[0]
    for i in (0, 20, 36):
        alone = evaluate(where, variant, (x[i : i + 1], gamma, beta))[0]
        assert_same_bits(alone, together[i : i + 1])


@on_both
@pytest.mark.parametrize("variant", EVERY)
def test_a_large_mean(where: str, variant: str) -> None:
    """E[x²] - E[x]² has lost its digits where the variance around the mean has not."""
    x, gamma, beta = inputs(16, 48)
    x = (1000 + 0.1 * x).astype(np.float32)
    got = evaluate(where, variant, (x, gamma, beta))
    if variant not in ONE_PASS:
        assert_right(got, (x, gamma, beta), variant)
        return
    truth = exact(x, gamma, beta)
    error = np.abs(got[0] - truth).max()
    two_pass = np.abs(plain.layernorm(x, gamma, beta) - truth).max()
    assert np.isfinite(got[0]).all()
    assert error > 20 * (2 * two_pass + plain.rounding(truth))


@on_both
@pytest.mark.parametrize("variant", EVERY)
def test_constant_rows(where: str, variant: str) -> None:
    """Rounding makes some of these variances negative in one pass; none may become NaN."""
    constants = 1e4 + 0.37 * np.arange(20)
    x = np.repeat(constants[:, None], 48, axis=1).astype(np.float32)
    out, *stats = evaluate(where, variant, (x, normal(1, 48), normal(2, 48)))
    assert np.isfinite(out).all()
    if stats:
        mean, rstd = stats
        np.testing.assert_allclose(mean, x[:, 0], rtol=1e-6)
        assert (rstd > 0).all()
        assert (rstd <= 1.000001 / math.sqrt(EPS)).all()


@on_both
@pytest.mark.parametrize("variant", EVERY)
def test_nan_stays_in_its_row_and_eps_counts(where: str, variant: str) -> None:
    x, gamma, beta = inputs(5, 48)
    clean = evaluate(where, variant, (x, gamma, beta), eps=0.5)
    assert_right(clean, (x, gamma, beta), variant, eps=0.5)
    x[1, 7], x[3, 5] = np.nan, np.inf
    got = evaluate(where, variant, (x, gamma, beta), eps=0.5)
    assert np.isnan(got[0][[1, 3]]).all()
    for result, before in zip(got, clean, strict=True):
        assert not np.isfinite(result[1]).any()
        assert_same_bits(result[::2], before[::2])


# --- planted mistakes, on the CPU -----------------------------------------------------------------


@pytest.mark.parametrize(("variant", "barriers"), [("5", 2), ("6", 1), (NARROW, 1)])
def test_a_missing_barrier_shows(variant: str, barriers: int) -> None:
    narrow = variant == NARROW
    arrays = inputs(2, 1600, "bfloat16", "float32") if narrow else inputs(2, 300)
    header = "" if variant == "5" else "lib/rows.cuh"  # where its barrier stands
    assert_barriers_show(
        OPERATION.variant(variant).file,
        lambda order: evaluate(order, variant, arrays, shape=LayerNormRow(4, 64, 2)),
        barriers,
        header,
    )


@on_the_cpu
@pytest.mark.parametrize("variant", ONE_PASS)
def test_constant_rows_need_the_clamp(variant: str) -> None:
    source = Source.shipped(OPERATION.variant(variant).file)
    source = source.edited("if (var < 0.0f) var = 0.0f;", "")
    x = np.repeat((1e4 + 0.37 * np.arange(20))[:, None], 48, axis=1).astype(np.float32)
    with with_source(source):
        rstd = evaluate("forward", variant, (x, normal(1, 48), normal(2, 48)))[2]
    assert np.isnan(rstd).any()


# --- the CPU's stand-ins for CUDA's headers -------------------------------------------------------

PROBES = Source(
    "layernorm_probes.cu",
    """
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;

extern "C" __global__ void ranks(int* x) {  // (blockDim, 5)
    const cg::thread_block block = cg::this_thread_block();
    const cg::thread_block_tile<8> tile = cg::tiled_partition<8>(block);
    int* row = x + 5 * block.thread_rank();
    row[0] = tile.thread_rank();
    row[1] = tile.meta_group_rank();
    row[2] = tile.meta_group_size();
    row[3] = tile.size();
    row[4] = block.size();
}

extern "C" __global__ void sums(float* x) {
    const cg::thread_block_tile<8> tile = cg::tiled_partition<8>(cg::this_thread_block());
    x[threadIdx.x] = cg::reduce(tile, x[threadIdx.x], cg::plus<float>());
}

extern "C" __global__ void some_reduce(float* x) {
    const cg::thread_block_tile<8> tile = cg::tiled_partition<8>(cg::this_thread_block());
    if (tile.thread_rank() < 3) return;
    if (tile.thread_rank() < 5) x[0] = cg::reduce(tile, 1.0f, cg::plus<float>());
    __syncthreads();
}

extern "C" __global__ void hints(const float* from, float* to) { __stcs(to, __ldcs(from)); }
""",
)


@on_the_cpu
def test_groups_know_their_threads() -> None:
    ranks = np.zeros((24, 5), np.int32)
    run(PROBES, "ranks", (1,), (6, 4), [ranks])
    i = np.arange(24)
    expected = np.stack([i % 8, i // 8, *(np.full(24, n) for n in (3, 8, 24))], axis=1)
    np.testing.assert_array_equal(ranks, expected)


@on_the_cpu
@pytest.mark.parametrize("order", ORDERS)
def test_a_reduction_over_a_group(order: loader.Order) -> None:
    x = np.arange(32, dtype=np.float32)
    run(PROBES, "sums", (1,), (32,), [x], order=order)
    np.testing.assert_array_equal(x, np.arange(32).reshape(4, 8).sum(1).repeat(8))


@on_the_cpu
def test_a_group_that_diverges_is_named() -> None:
    with pytest.raises(ShimError, match=r"divergent barrier in some_reduce.*layernorm_probes\.cu"):
        run(PROBES, "some_reduce", (1,), (32,), [poisoned(1)])
    to = poisoned(1)
    run(PROBES, "hints", (1,), (1,), [normal(0, 1), to])
    assert to == normal(0, 1)


HALVES = Source(
    "layernorm_halves.cu",
    """
#if defined(STORAGE_BF16)
#include <cuda_bf16.h>
typedef __nv_bfloat16 T;
#define WIDEN __bfloat162float
#define NARROW __float2bfloat16_rn
#else
#include <cuda_fp16.h>
typedef __half T;
#define WIDEN __half2float
#define NARROW __float2half_rn
#endif

extern "C" __global__ void widen(const T* from, float* to, int n) {
    for (int i = 0; i < n; ++i) to[i] = WIDEN(from[i]);
}

extern "C" __global__ void narrow(const float* from, T* to, int n) {
    for (int i = 0; i < n; ++i) to[i] = NARROW(from[i]);
}
""",
)


@on_the_cpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_converts_as_numpy_does(dtype: str) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(DTYPES[dtype])
    wide = poisoned(2**16)
    run(HALVES, "widen", (1,), (1,), [every, wide, wide.size], storage=dtype)
    np.testing.assert_array_equal(wide, every.astype(np.float32))

    finite = every.astype(np.float32)[np.isfinite(every.astype(np.float32))]
    between = (finite[:-1] / 2 + finite[1:] / 2).astype(np.float32)  # half way: to even
    bits = np.random.default_rng(0).integers(0, 2**32, 10000, dtype=np.uint32)
    floats = np.concatenate(
        [wide, between, np.nextafter(between, np.float32(9)), bits.view(np.float32)]
    )
    narrow = poisoned(floats.size, dtype=dtype)
    run(HALVES, "narrow", (1,), (1,), [floats, narrow, floats.size], storage=dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = floats.astype(DTYPES[dtype])
    same = (narrow.view(np.uint16) == expected.view(np.uint16)) | (
        np.isnan(narrow) & np.isnan(expected)
    )
    assert same.all()


# --- the launch -----------------------------------------------------------------------------------


class DeviceArray:
    """As much of a CuPy array as a launch looks at."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self.data = type("Memory", (), {"ptr": 4096})()


def test_storage_types_are_checked() -> None:
    signature = Signature("f.cu", "f", (Parameter("T*", "x"), Parameter("float*", "mean")))
    single, half = DeviceArray(np.float32), DeviceArray(ml_dtypes.bfloat16)
    assert kernels.typed_arguments(signature, (half, single), "bfloat16") == (4096, 4096)
    assert kernels.typed_arguments(signature, (single, None)) == (4096, 0)
    for args, storage, message in (
        ((single, single), "bfloat16", r"T\* x, where T is bfloat16: got float32"),
        ((half, single), "float16", r"T\* x, where T is float16: got bfloat16"),
        ((half, half), "bfloat16", r"float\* mean: got bfloat16"),
    ):
        with pytest.raises(KernelError, match=message):
            kernels.typed_arguments(signature, args, storage)


@on_the_cpu
def test_the_cpu_checks_storage_types_too() -> None:
    with pytest.raises(ShimError, match=r"T\* from, where T is float16: expected .* of float16"):
        run(HALVES, "widen", (1,), (1,), [normal(0, 4), poisoned(4), 4], storage="float16")


def test_the_operation_describes_its_kernels() -> None:
    for variant in OPERATION.variants:
        assert set(variant.kernels) <= set(kernels.signatures(variant.file))
        assert variant.block in (variant.blocks or (variant.block,))
    sizes = {"B": 2, "T": 3, "C": 5}
    x, gamma, beta = OPERATION.make(sizes, np.random.default_rng(0))
    assert (x.shape, gamma.shape, beta.shape) == ((2, 3, 5), (5,), (5,))
    assert {a.dtype.name for a in (x, gamma, beta)} == {"float32"}
    assert OPERATION.traffic({**sizes, "itemsize": 4}) == 240
    with pytest.raises(InputError, match="unknown variant 7: expected one of 1, 2, 3, 4, 5, 6"):
        OPERATION.variant(7)


def test_rows_compile_without_spills() -> None:
    """By turns in each dtype; narrow alone, before 16 bits and before two-part products."""
    jobs: list[Job] = []
    own = []
    for i, C in enumerate((3, 768, 1024, 8191, 8192, 16384, 50000)):
        dtype = list(DTYPES)[i % 3]
        width, threads, vectors = row_shape(C, np.dtype(DTYPES[dtype]).itemsize)
        sizes = {"WIDTH": width, "THREADS": threads, "VECTORS": vectors}
        sizes["ROWS"] = max(1, 128 // threads)
        defines = (*STORAGE[dtype], *((f"LN_{name}", size) for name, size in sizes.items()))
        jobs.append(("layernorm/rows.cu", ("sm_75", "sm_90")[i % 2], defines))
        own.append("")
    many = 10**6
    for i, (rows, C) in enumerate(((1, 768), (many, 768), (many, 4096), (1, 16384), (1, 16383))):
        for j, (float_x, two_part) in enumerate(((False, False), (True, False), (True, True))):
            how = narrow_geometry(float_x, rows, C, math.gcd(C, 8), H200, two_part)
            stored = kernels.stored_as("float16" if two_part else "bfloat16")
            arch = ("sm_80", "sm_90")[(i + j) % 2]
            jobs.append((NARROW_FILE, arch, (*stored, *how.defines)))
            own.append(how.kernel)
    assert_clean(jobs, own)


@pytest.mark.parametrize(
    ("constants", "message"),
    [
        ((("LN_WIDTH", 8),), "16 bytes"),
        ((("LN_WIDTH", 3),), "16 bytes"),
        ((("LN_THREADS", 24),), "or a multiple of 32"),
        ((("LN_THREADS", 8), ("LN_ROWS", 3)), "whole warps"),
    ],
)
def test_constants_that_make_no_sense_do_not_compile(
    constants: kernels.Defines, message: str
) -> None:
    pytest.importorskip("cupy", reason="compiling needs CuPy and NVRTC")
    with pytest.raises(KernelError, match=message):
        kernels.compile_for("layernorm/rows.cu", "sm_80", constants)


# --- on the GPU -----------------------------------------------------------------------------------


WIDTHS = [1, 2, 3, 7, 48, 64, 100, 768, 769, 1024, 1600, 4096, 8191, 8192, 16384, 16392, 50257]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("variant", "x", "out"),
    [
        *((variant, "float32", "") for variant in VARIANTS),
        *(("6", dtype, "") for dtype in ("float16", "bfloat16")),
        *((NARROW, *pair) for pair in PAIRS),
    ],
)
@pytest.mark.parametrize("C", WIDTHS)
def test_widths(variant: str, x: str, out: str, C: int) -> None:
    if variant == NARROW and C > 16384:
        pytest.skip("does not fit in registers")
    few = (1, 17) if variant == NARROW else ()  # one mean alone may be exact by chance
    for rows in (*few, 33) if C < 5000 else (5,):
        arrays = inputs(rows, C, x, "float32" if variant == NARROW else x)
        assert_right(evaluate("gpu", variant, arrays, out), arrays, variant)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_block_size(variant: str) -> None:
    arrays = inputs(1030, 768)
    for block in BLOCKS[1:] if variant == "6" else BLOCKS:  # a row of kernel 6 takes 64 threads
        assert_right(evaluate("gpu", variant, arrays, block=block), arrays, variant)


@pytest.mark.gpu
def test_many_rows() -> None:
    """More than 2³¹ elements: equal rows must give equal results to the last one."""
    row, gamma, beta = inputs(1, 768)
    x = cp.empty((2_800_000, 768), "float32")
    x[:] = cp.asarray(row)
    for variant in VARIANTS:
        out = ops.layernorm(x, cp.asarray(gamma), cp.asarray(beta), variant=variant)
        assert bool((out == out[0]).all()), variant
        assert bool(cp.isfinite(out[0]).all()), variant


@pytest.mark.gpu
@pytest.mark.parametrize(("x", "out"), [pair for pair in PAIRS if pair[1] != "float32"])
def test_many_rows_of_narrow(x: str, out: str) -> None:
    row, gamma, beta = inputs(1, 768, x, "float32")
    many = cp.asarray(np.repeat(row, 65537, axis=0))
    to = cp.empty(many.shape, out)
    vectors = cp.asarray(gamma), cp.asarray(beta)
    LAYERNORM.bind((many, *vectors), to, eps=EPS, variant=NARROW).run()
    assert bool((to == to[0]).all())
    assert_same_bits(to[:1].get(), evaluate("gpu", NARROW, (row, gamma, beta), out)[0])


@pytest.mark.gpu
def test_the_public_function() -> None:
    arrays = tuple(cp.asarray(a) for a in inputs(6, 96))
    x, gamma, beta = arrays
    ten_step = OPERATIONS["layernorm"].bind(arrays, eps=EPS).run()
    np.testing.assert_array_equal(ops.layernorm(x, gamma, beta).get(), ten_step.get())
    for variant in (None, *VARIANTS):
        out, mean, rstd = ops.layernorm(
            x.reshape(2, 3, 96), gamma, beta, variant=variant, stats=True
        )
        assert (out.shape, mean.shape, rstd.shape) == ((2, 3, 96), (2, 3), (2, 3))
        alone = ops.layernorm(x, gamma, beta, variant=variant or 6)
        np.testing.assert_array_equal(alone.get(), out.get().reshape(6, 96))
    half = tuple(a.astype("float16") for a in arrays)
    assert ops.layernorm(*half).dtype == cp.float16
    every_second = ops.layernorm(x[::2], gamma, beta, variant=6)
    np.testing.assert_array_equal(
        every_second.get(), ops.layernorm(x, gamma, beta, variant=6).get()[::2]
    )
    single = ops.layernorm(x[0], gamma, beta, variant=3)
    assert single.shape == (96,)
    narrow = ops.layernorm(half[0], gamma, beta)  # its variant follows from the dtypes
    expected = LAYERNORM.bind((half[0], gamma, beta), eps=EPS, variant=NARROW).run()
    np.testing.assert_array_equal(narrow.get(), expected.get())


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_that_start_anywhere(dtype: str, offset: int) -> None:
    """Narrower loads where arrays are not aligned to 16 bytes: all, and each of those of narrow."""
    arrays = inputs(5, 768, dtype)
    on_device = tuple(moved(a, offset) for a in arrays)
    bound = LAYERNORM.bind(on_device, eps=EPS, variant=6)
    assert_right([bound.run().get(), *(array.get() for array in bound.extra)], arrays)
    arrays = inputs(5, 768, dtype, "float32")
    hosts = [*arrays, np.full_like(arrays[0], np.nan)]
    for which in range(4):
        *given, out = (moved(array, offset * (i == which)) for i, array in enumerate(hosts))
        got = LAYERNORM.bind(tuple(given), out, eps=EPS, variant=NARROW).run()
        assert_right([got.get()], arrays)


@one_order
def test_wrong_arguments_are_refused(device: Any) -> None:
    """What the contract alone does not say."""
    x, gamma, beta = (cp.asarray(a) for a in inputs(4, 4096))
    half = x.astype("bfloat16")
    stats = cp.zeros(5, "float32")
    one_off = moved(normal(0, 4, 4096), 1)
    six = "a row of 4,096 channels takes 256 threads"
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((x, gamma, beta), {"variant": 7}, "unknown variant 7: expected one of 1, 2, 3, 4, 5, 6"),
        ((x, gamma, beta), {"variant": 1, "block": 96}, "block size 96: expected one of 32, 64"),
        ((x, gamma, beta), {"block": 64}, "block, mean and rstd need a variant"),
        ((x, gamma, beta), {"variant": 6, "block": 64}, six),
        ((half, gamma, beta), {"variant": 6}, "gamma: expected bfloat16, got float32"),
        ((half, gamma, beta), {"variant": 5}, "x: expected float32, got bfloat16"),
        ((x, gamma, beta), {"variant": 3, "mean": stats}, r"mean: expected shape \(4,\), got \(5,"),
        ((half, gamma, beta), {"variant": NARROW, "block": 64}, "narrow has no block, mean and"),
        ((half, half[0], beta), {"variant": NARROW}, "gamma: expected float32, got bfloat16"),
        ((half, gamma, beta), {"out": half.astype("float16")}, "out: expected bfloat16, got float"),
        (
            (x, gamma, beta),
            {"variant": DECODE, "block": 64},
            "no block, mean and rstd: use variant",
        ),
        ((one_off, gamma, beta), {"variant": DECODE}, "x: expected data aligned to 16 bytes"),
    ]
    for arguments, options, message in cases:
        with pytest.raises(InputError, match=message):
            LAYERNORM.bind(arguments, options.pop("out", None), **{"eps": EPS, **options})
    for variant in (NARROW, DECODE):
        with pytest.raises(InputError, match="it gives no mean and rstd"):
            ops.layernorm(x, gamma, beta, variant=variant, stats=True)
