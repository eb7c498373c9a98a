"""The linear layer for many rows: every tile and dtype of weights, on the CPU and on the GPU."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import InputError, ops, reference
from gpt2block.cuda import cupy, kernels
from gpt2block.cuda.arrays import Bound
from gpt2block.cuda.kernels import FP8, STORAGE, Geometry
from gpt2block.emulator import loader
from gpt2block.ops._linear_tiles import FILE, TILES, Tile, geometry
from gpt2block.ops._matrix import fastest
from gpt2block.ops.linear import bind as bind_linear
from gpt2block.weights.matrix import WeightMatrix
from tests import plain
from tests.devices import H200, on_every_device, on_one_order, one_order, running_on
from tests.gpus import large_memory
from tests.plain import normal

Array = NDArray[Any]
MODULE = import_module("gpt2block.ops._linear_tiles")
DTYPES = [*STORAGE, *FP8]
SHARED = 64 << 10  # bytes that a block can have from sm_75 on
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_tile = pytest.mark.parametrize(
    "tile", [pytest.param(tile, id=f"{tile.rows}x{tile.columns}") for tile in TILES]
)


class Given(NamedTuple):
    """What goes in, in host memory."""

    x: Array  # (M, K)
    w: WeightMatrix  # (N, K)
    bias: Array | None
    residual: Array | None
    gelu: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, K, N."""
        return (*self.x.shape, self.w.N)


def inputs(
    M: int, K: int, N: int, dtype: str = "float32", gelu: bool = False, extra: bool = True
) -> Given:
    """`extra`: with a bias and a residual."""
    w = WeightMatrix.quantize(normal(K, N, K), dtype, "NK")
    bias, residual = (normal(N, N), normal(M + N, M, N)) if extra else (None, None)
    return Given(normal(M, M, K), w, bias, residual, gelu)


def evaluated(given: Given, wide: bool) -> Array:
    """In float64, or with plain sums in float32."""
    x, w = given.x, given.w.dequantized()
    if not wide:
        y = plain.matmul_bias(x, w, given.bias)
        y = plain.gelu(y) if given.gelu else y
    else:
        bias = None if given.bias is None else given.bias.astype(np.float64)
        y = reference.matmul_bias(x.astype(np.float64), w.astype(np.float64), bias)
        y = reference.gelu(y) if given.gelu else y
    result: Array = y if given.residual is None else given.residual + y
    return result


def assert_right(got: Array, given: Given) -> None:
    plain.assert_as_accurate(got, evaluated(given, True), evaluated(given, False))


def how(given: Given, tile: Tile | None = None) -> Geometry:
    M, K, N = given.sizes
    size, load = given.w.data.itemsize, 8
    while K % load:
        load //= 2
    return geometry(M, N, size, load, 1 if N % 4 else 4, given.gelu, H200, SHARED, tile)


def on_device(given: Given) -> tuple[Any, ...]:
    """x, w, bias and residual."""
    x, bias, residual, scale = (
        None if array is None else cupy.asarray(array)
        for array in (given.x, given.bias, given.residual, given.w.scale)
    )
    w = WeightMatrix(cupy.asarray(given.w.data), given.w.dtype, scale, "NK")
    return x, w, bias, residual


def bind_tiles(inputs: tuple[Any, ...], out: Any = None, gelu: bool = False) -> Bound:
    """The variant tiles for x, w, bias and residual."""
    x, w, bias, residual = inputs
    return bind_linear((x, w, bias, None, None, residual), out, gelu=gelu, variant="tiles")


def evaluate(where: str, given: Given, in_place: bool = False, tile: Tile | None = None) -> Array:
    """On the CPU in a thread order, or on the GPU, twice, with the same bits."""
    results: list[Array] = []
    with running_on(where, H200), pytest.MonkeyPatch.context() as patch:
        if tile:
            patch.setattr(MODULE, "geometry", lambda *_: how(given, tile))
        for _ in range(1 + (where == "gpu")):
            arrays = on_device(given)
            shape = len(given.x), given.w.N
            out = arrays[3] if in_place else cupy.full(shape, np.nan, np.float32)
            results.append(bind_tiles(arrays, out, gelu=given.gelu).run().get())
    np.testing.assert_array_equal(results[0], results[-1])
    return results[0]


# --- what is launched -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("M", "N", "sides"),
    [
        (8192, 2304, (128, 128)),
        (8192, 768, (128, 128)),
        (128, 50257, (128, 128)),
        (1024, 3072, (64, 96)),
        (1024, 768, (64, 96)),
        (128, 3072, (32, 96)),
        (128, 768, (32, 32)),
        (1, 1, (32, 32)),
    ],
)
def test_the_tile_fits_the_gpu(M: int, N: int, sides: tuple[int, int]) -> None:
    tile = fastest(TILES, M, N, H200)
    assert (tile.rows, tile.columns) == sides


@every_tile
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_every_tile_compiles_and_fits(arch: str, dtype: str, tile: Tile) -> None:
    pytest.importorskip("cupy", reason="compiling needs CuPy and NVRTC")
    size, narrow = {"float32": 4, "bfloat16": 2}.get(dtype, 1), dtype in FP8
    stored = kernels.stored_as("float32" if narrow else dtype, dtype if narrow else None)
    where = geometry(1000, 1000, size, 8, 4, dtype == "bfloat16", H200, SHARED, tile)
    assert where.block[0] <= 256
    assert where.shared <= SHARED
    log = kernels.compile_for(FILE, arch, (*stored, *where.defines)).log
    assert "0 bytes spill stores, 0 bytes spill loads" in log
    (registers,) = re.findall(r"Used (\d+) registers", log)
    assert int(registers) <= 128


# --- every dtype and tile -------------------------------------------------------------------------


@on_every_device
@every_dtype
@settings(max_examples=3)
@given(M=st.integers(1, 70), K=st.integers(0, 34), N=st.integers(1, 100))
@example(M=33, K=33, N=35)
@example(M=34, K=9, N=36)
def test_every_dtype(where: str, dtype: str, M: int, K: int, N: int) -> None:
    """K odd, or a multiple of 8: everything between is a matter of test_every_length."""
    K = 2 * K + 1 if N % 4 else 8 * (K // 4 + 1)
    given = inputs(M, K, N, dtype, gelu=N % 4 == 0, extra=(M + N) % 3 != 0)
    assert_right(evaluate(where, given), given)


@every_tile
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_every_tile(dtype: str, tile: Tile) -> None:
    given = inputs(131, 136, 104, dtype, gelu=True)
    for order in ("shuffled", "reverse"):
        assert_right(evaluate(order, given, tile=tile), given)


@on_one_order
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_same_bits_alone_and_in_any_batch(where: str, dtype: str) -> None:
    """Whatever tile a row falls into, its products are added in the order of k."""
    given = inputs(131, 88, 40, dtype, gelu=True)
    assert given.residual is not None
    tiles = [None] if where == "gpu" else TILES
    whole, *others = (evaluate(where, given, tile=tile) for tile in tiles)
    for other in others:
        np.testing.assert_array_equal(other, whole)
    for rows in (slice(130, 131), slice(3, 5), slice(30, 47)):
        part = given._replace(x=given.x[rows], residual=given.residual[rows])
        part = part._replace(x=part.x.copy(), residual=given.residual[rows].copy())
        np.testing.assert_array_equal(evaluate(where, part), whole[rows])


def test_one_product_after_the_other() -> None:
    """The bits of the plain sum: the CPU multiplies and adds in two steps, as this does."""
    given = inputs(9, 75, 7, extra=False)
    got = evaluate("forward", given)
    np.testing.assert_array_equal(got, evaluated(given, False))


@on_one_order
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_every_length_of_the_first_slice(where: str, dtype: str) -> None:
    for K in (1, 2, 4, 8, 31, 32, 64, 76):
        given = inputs(5, K, 8, dtype)
        assert_right(evaluate(where, given), given)


@on_one_order
def test_more_than_a_band_of_tiles(where: str) -> None:
    given = inputs(32 * 17 + 1, 3, 70)
    assert_right(evaluate(where, given), given)


@on_one_order
@pytest.mark.parametrize("N", [40, 41])
def test_a_residual_that_is_the_output(where: str, N: int) -> None:
    given = inputs(37, 24, N, "float16")
    np.testing.assert_array_equal(evaluate(where, given, True), evaluate(where, given))


@on_one_order
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_output_depends_on_its_row_and_column_alone(where: str, dtype: str) -> None:
    """Also at the edges, where rows and columns that do not exist are read as others or as zero."""
    given = inputs(37, 24, 44, dtype)
    assert given.bias is not None
    assert given.residual is not None
    given.x[36, 23] = given.x[4, 0] = np.nan
    given.w.data[43, 23] = given.w.data[7, 0] = np.inf
    given.bias[9] = given.residual[2, 3] = np.nan
    got = evaluate(where, given)
    finite = np.ones((37, 44), bool)
    finite[[36, 4]] = finite[:, [43, 7, 9]] = finite[2, 3] = False
    np.testing.assert_array_equal(np.isfinite(got), finite)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_missing_barrier_shows(dtype: str) -> None:
    if problem := loader.missing():
        pytest.skip(problem)
    given = inputs(20, 270, 20, dtype)
    where, w = how(given), given.w
    racing = loader.Source.shipped(FILE).edited("__syncthreads();", "")
    right = evaluate("forward", given)

    def shows(order: loader.Order) -> bool:
        out = np.full((20, 20), np.nan, np.float32)
        try:
            loader.run(
                racing,
                where.kernel,
                where.grid,
                where.block,
                [given.x, w.data, w.scale, given.bias, given.residual, out, 20, 270, 20],
                shared=where.shared,
                defines=where.defines,
                storage=dtype,
                order=order,
            )
        except loader.ShimError:  # went out of bounds
            return True
        return not np.array_equal(out, right)

    assert any(map(shows, loader.ORDERS))


# --- on the GPU alone -----------------------------------------------------------------------------


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize(
    ("M", "K", "N"),
    [(17, 768, 768), (128, 3072, 768), (1000, 768, 2304), (1024, 767, 771), (8192, 64, 768)],
)
def test_large_sizes(dtype: str, M: int, K: int, N: int) -> None:
    given = inputs(M, K, N, dtype, gelu=N == 2304)
    w = given.w.dequantized()
    y = plain.matmul_bias(cupy.asarray(given.x), cupy.asarray(w), cupy.asarray(given.bias), cupy)
    y = plain.gelu(y, cupy) if given.gelu else y
    expected = (cupy.asarray(given.residual) + y).get()
    plain.assert_as_accurate(evaluate("gpu", given), evaluated(given, True), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("gelu", [False, True])
@every_dtype
def test_every_tile_gives_the_same_bits_on_the_gpu(dtype: str, gelu: bool) -> None:
    for sizes in ((517, 1000, 516), (300, 77, 333)):
        given = inputs(*sizes, dtype, gelu)
        first, *others = (evaluate("gpu", given, tile=tile) for tile in TILES)
        assert_right(first, given)
        for other in others:
            np.testing.assert_array_equal(other, first)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_number_of_rows_gives_the_same_bits_on_the_gpu(dtype: str) -> None:
    given = inputs(2000, 768, 768, dtype)
    assert given.residual is not None
    whole = evaluate("gpu", given)
    for first, last in ((0, 1), (7, 24), (100, 228), (500, 1524), (1999, 2000)):
        x, residual = given.x[first:last].copy(), given.residual[first:last].copy()
        part = given._replace(x=x, residual=residual)
        np.testing.assert_array_equal(evaluate("gpu", part), whole[first:last])


@pytest.mark.gpu
def test_one_product_after_the_other_on_the_gpu() -> None:
    """The bits of the kernels that say so of themselves."""
    given = inputs(300, 77, 333)._replace(residual=None)
    a, w, bias = (cupy.asarray(v) for v in (given.x, given.w.dequantized(), given.bias))
    expected = ops.matmul_bias(a, w, bias, variant="tiled").get()
    np.testing.assert_array_equal(evaluate("gpu", given), expected)


@pytest.mark.gpu
def test_more_outputs_than_an_int_counts() -> None:
    M, N = 70_001, 32_003
    given = inputs(M, 2, N, extra=False)
    with large_memory(4 * M * N):
        got = bind_tiles(on_device(given)).run()
        for rows in (slice(0, 3), slice(M // 2, M // 2 + 3), slice(M - 3, M)):
            assert_right(got[rows].get(), given._replace(x=given.x[rows]))
        del got


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "float8_e5m2"])
def test_arrays_that_lie_anywhere(dtype: str) -> None:
    given = inputs(42, 48, 52, dtype)
    x, w, bias, residual = on_device(given)
    batch = x.reshape(2, 21, 48), w, bias, residual.reshape(2, 21, 52)
    got = bind_tiles(batch).run()
    assert got.shape == (2, 21, 52)
    assert_right(got.get().reshape(42, 52), given)

    def moved(array: Any) -> Any:
        """By one element."""
        longer = cupy.empty(array.size + 1, array.dtype)[1:].reshape(array.shape)
        longer[...] = array
        assert longer.data.ptr % 16
        return longer

    away = WeightMatrix(moved(w.data), dtype, w.scale, "NK")
    every = (moved(x), away, moved(bias), moved(residual))
    for arrays in (every, (x, away, bias, residual), (x, w, bias, moved(residual))):
        for out in (None, moved(residual)):
            np.testing.assert_array_equal(
                bind_tiles(arrays, out).run().get(), got.get().reshape(42, 52)
            )


@pytest.mark.gpu
def test_the_variant_of_the_op() -> None:
    given = inputs(20, 40, 24, "bfloat16", gelu=True)
    x, w, bias, residual = on_device(given)
    options = {"residual": residual, "gelu": True}
    for variant in (None, "tiles"):  # the one by itself for more than 16 rows
        got = ops.linear(x, w, bias, variant=variant, **options)
        np.testing.assert_array_equal(got.get(), evaluate("gpu", given))
    with pytest.raises(InputError, match="variant tiles: takes no gamma and beta"):
        ops.linear(x, w, bias, x[0], x[0], variant="tiles")


@one_order
def test_bad_input(device: Any) -> None:
    x, data = cupy.zeros((3, 8), "float32"), cupy.zeros((4, 8), "float32")
    w, out = WeightMatrix(data, "float32", None, "NK"), cupy.zeros((3, 4), "float32")
    host = WeightMatrix(data.get(), "float32", None, "NK")
    both = cupy.zeros(24, "float32")
    for arrays, given_out, message in (
        ((x.get(), w, None, None), None, "x: expected a CuPy array, got ndarray"),
        ((x.astype("float16"), w, None, None), None, "x: expected float32, got float16"),
        ((x, data, None, None), None, "w: expected a WeightMatrix, got ndarray: use WeightMatrix"),
        ((x, host, None, None), None, "w: expected a CuPy array, got ndarray"),
        ((x, WeightMatrix(data.T.copy(), "float32"), None, None), None, "expected layout 'NK'"),
        ((x[:, :7].copy(), w, None, None), None, r"w: expected shape \(7, N\)"),
        ((x, w, x[0], None), None, r"bias: expected shape \(4,\), got \(8,\)"),
        ((x, w, None, x), None, r"residual: expected shape \(3, 4\), got \(3, 8\)"),
        ((x, w, None, None), x, r"out: expected shape \(3, 4\), got \(3, 8\)"),
        ((x, w, None, None), x.reshape(-1)[:12].reshape(3, 4), "out: overlaps x:"),
        ((x, w, out[0], None), out, "out: overlaps bias:"),
        (
            (x, w, None, both[4:16].reshape(3, 4)),
            both[:12].reshape(3, 4),
            "out: overlaps residual in part",
        ),
        ((cupy.zeros((1, 0), "float32"), w, None, None), None, "x: expected at least one element"),
    ):
        with pytest.raises(InputError, match=message):
            bind_tiles(arrays, given_out)
