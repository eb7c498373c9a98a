"""Requirements of every kernel of matrix products, whatever instructions it uses.

Tests run the kernels of tests/products.py on the emulator and on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import Any

import numpy as np
import pytest
from hypothesis import given as with_any
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import ops, reference
from gpt2block.cuda import cupy
from gpt2block.models.weights.matrix import WeightMatrix
from tests import plain, products
from tests.devices import GPU, IN_TESTS, assert_barriers_show, assert_same_bits
from tests.gpus import HOPPER_CAPABILITY, large_memory
from tests.products import EPS, KERNELS, MATMUL, START, THETA, Case, Kernel, Table, summed

Array = NDArray[Any]

FEW = 8  # results


def fits(kernel: Kernel, case: Case) -> bool:
    """Return whether a kernel can also run a case that its line states for another dtype.

    With few results, NumPy's rounding error, which limits the error, can be 0 by chance.
    """
    of_16 = kernel.variant == "mma" and "float8" in kernel.name  # loads 16 weights at a time
    by_tiles = kernel.variant == "mma_tiles" and "hi_lo" in kernel.name  # has tiles of its own
    return case.M * case.N >= FEW and not (of_16 and case.K % 16) and not by_tiles


def every_case(
    on_cpu: Table, on_gpu: Table, orders: Sequence[str] = ("shuffled",), in_turn: bool = False
) -> pytest.MarkDecorator:
    """Parametrize `where`, `kernel` and `case`: one table for the emulator, one for a GPU.

    On the emulator, the first kernel of each variant in a line of the table runs all cases of the
    line, the others only with --slow. in_turn: kernels of a variant take the cases in turn; with
    --slow, all of them run the cases that leave the tile to them. The first case of a line runs in
    all thread orders, the others in the last one.
    """
    cases = []
    for kernel, case, place, nth, alike in products.found_in(on_cpu):
        default = nth == (place % alike if in_turn else 0)
        if default or (fits(kernel, case) and not (in_turn and case.tile)):
            some = orders if default and place == 0 else orders[-1:]
            some = ["hopper"] if kernel.capability == HOPPER_CAPABILITY else some
            marks = [] if default else [pytest.mark.slow]
            cases += [(where, kernel, case, marks) for where in some]
    cases += [("gpu", *found[:2], [pytest.mark.gpu]) for found in products.found_in(on_gpu)]
    return pytest.mark.parametrize(
        ("where", "kernel", "case"),
        [
            pytest.param(
                *(where, kernel, case),
                id=f"{where}-{kernel.name}-{'x'.join(map(str, case[:3]))}",
                marks=marks,
            )
            for where, kernel, case, marks in cases
        ],
    )


@every_case(products.ON_CPU, {**products.ON_GPU, **products.RESULTS_ON_GPU}, IN_TESTS, in_turn=True)
def test_right(where: str, kernel: Kernel, case: Case) -> None:
    """The residual may be the output."""
    given = kernel.made(case)
    places = [False]
    if kernel.may_be_in_place(given):  # on the emulator in some thread orders only
        places = {"forward": [False], "gpu": [False, True]}.get(where, [True])
    for in_place in places:
        got = kernel(where, given, case, in_place)
        kernel.assert_right(got, given, case, where)


@every_case(products.SLICES, products.SLICES)
def test_every_length_of_the_first_slice(where: str, kernel: Kernel, case: Case) -> None:
    given = kernel.made(case)
    kernel.assert_right(kernel(where, given, case), given, case, where)


@every_case(products.UP_TO, products.UP_TO_ON_GPU, ["reverse"])
@settings(max_examples=4)
@with_any(data=st.data())
def test_any_size_up_to(where: str, kernel: Kernel, case: Case, data: st.DataObject) -> None:
    """K is odd, or a multiple of 8; `test_right` has other lengths."""
    for _ in range(6 if where == "gpu" else 1):
        M, K, N = (data.draw(st.integers(1, most)) for most in case[:3])
        K = K // 8 * 8 + 8 if N % 4 == 0 else K | 1
        if kernel.multiple > 1:
            K, N = (-(-size // 8) * 8 for size in (K, N))
        one = case._replace(M=M, K=K, N=N)
        if case.tile == products.ROUNDS:  # blocks loop over columns, on few multiprocessors
            one = one._replace(K=case.K, sms=data.draw(st.integers(1, 3)))
        if kernel.variant == "tiles":
            more = (M + N) % 3 > 0
            one = one._replace(gelu=N % 4 == 0, residual=more, bias=more)
        given = kernel.made(one)
        kernel.assert_right(kernel(where, given, one), given, one, where)


# --- the same bits --------------------------------------------------------------------------------


@every_case(products.TILED, products.ON_GPU)
def test_tiles_and_other_rows_change_no_bit(where: str, kernel: Kernel, case: Case) -> None:
    """First and last rows alone have the same bits as among all rows, with any tile.

    All rows have the bits of the kernel named by `alike`. If tiles differ in their order of
    additions, each result is only checked for accuracy.
    """
    given = kernel.made(case)
    whole = KERNELS[kernel.alike](where, given, case) if kernel.alike else None
    for tile in products.tiles_of(where, kernel, case):
        one, parts = case._replace(tile=tile), getattr(tile, "split_k", 1)
        if parts > 1 and case.K <= 192:
            continue
        try:
            got = kernel(where, given, one)
        except ValueError:  # no room for this tile on this GPU, and none is left to choose from
            assert where == "gpu"
            assert tile is not None
            continue
        alone = kernel.alone and parts == 1
        if whole is None or not alone:
            kernel.assert_right(got, given, one, where)
        if not alone:
            continue
        whole = got if whole is None else whole
        assert_same_bits(got, whole)
        few: tuple[int, ...] = ()
        if where == "gpu" and tile is None:
            few = (1, 2, 7, 8, 9, 16, 17, 33, 64, 300, 1024)
        elif where != "gpu" and not kernel.asynchronous and (tile is None or case.M < 64):
            few = (1, 9)
        for count in few:
            for rows in (slice(count), slice(case.M - count, None)):
                if count < case.M:
                    some = kernel(where, products.rows_of(given, rows), one._replace(M=count))
                    assert_same_bits(some, whole[rows])


@pytest.mark.parametrize("where", ["forward", GPU])
@pytest.mark.parametrize(
    ("name", "tile"),
    [
        *((f"matmul-{name}", None) for name in ("naive", "tiled", "coarsened")),
        ("matmul-registers", (MATMUL.TILES[0], 1)),
        ("linear-tiles-float32", None),
    ],
)
def test_products_are_added_in_the_order_of_k(where: str, name: str, tile: Any) -> None:
    """On the emulator, products have the bits of a sum of fused multiply-adds.

    On a GPU they have the bits of the simplest kernel.
    """
    kernel, simplest = KERNELS[name], KERNELS["matmul-tiled"]
    for sizes in ((300, 77, 333), (100, 768, 128)) if where == "gpu" else ((9, 75, 7),):
        case = Case(*sizes, tile=tile)
        given = kernel.made(case)
        expected = kernel.plainly(given, case, multiply=plain.fused_product)
        if where == "gpu":
            expected = simplest(where, simplest.made(case), case._replace(tile=None))
        assert_same_bits(kernel(where, given, case), expected)


# --- values that are not finite, addresses, barriers ----------------------------------------------


@every_case(products.EDGES, products.EDGES)
def test_an_output_depends_on_its_row_and_column_alone(
    where: str, kernel: Kernel, case: Case
) -> None:
    """Rows and columns are at the edges, where kernels read other values or zeros beyond them."""
    given = kernel.made(case)
    clean = kernel(where, given, case)
    given["x"][36, case.K - 1] = given["x"][5] = np.nan
    given["x"][4, 0] = np.inf
    given["bias"][9] = np.nan
    finite = np.ones(clean.shape, bool)
    finite[[36, 5, 4]] = finite[:, 9] = False
    if "residual" in given:
        given["residual"][2, 3] = np.nan
        finite[2, 3] = False
    w = given["w"].data.T if kernel.layout == "NK" else given["w"].data
    if w.dtype != np.uint8:
        w[case.K - 1, 43] = w[0, 7] = np.inf
        finite[:, [43, 7]] = False
    got = kernel(where, given, case)
    np.testing.assert_array_equal(np.isfinite(got.astype(np.float32)), finite)
    assert_same_bits(got[finite], clean[finite])


@pytest.mark.parametrize(
    ("name", "barriers"),
    [
        ("matmul-coarsened", 2),
        ("matmul-registers", 3),
        ("linear-tiles-float32", 1),
        ("linear-tiles-float16", 1),
    ],
)
def test_a_missing_barrier_shows(name: str, barriers: int) -> None:
    kernel, case = KERNELS[name], Case(20, 270, 20)
    file, given = kernel.operation.variant(kernel.variant).file, kernel.made(case)
    assert_barriers_show(file, lambda order: [kernel(order, given, case)], barriers)


LARGE = ("matmul-naive", "matmul-coarsened", "matmul-registers", "linear-tiles-float32")


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
def test_more_outputs_than_an_int_counts(name: str) -> None:
    M, N, kernel = 70_001, 32_003, KERNELS[name]
    given = kernel.made(Case(1, 2, N)) | {"x": plain.normal(0, M, 2)}
    with large_memory(4 * M * N):
        there = {name: kernel.uploaded(cupy, name, each) for name, each in given.items()}
        got = kernel.operation.bind(kernel.inputs(there), variant=kernel.variant).run()
        for rows in (slice(0, 3), slice(M // 2, M // 2 + 3), slice(M - 3, M)):
            kernel.assert_right(got[rows].get(), products.rows_of(given, rows), Case(3, 2, N))
        del got


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
def test_more_rows_than_a_grid_is_high(name: str) -> None:
    kernel, case = KERNELS[name], Case(65535 * 32 + 1, 3, 5)
    given = kernel.made(case)
    kernel.assert_right(kernel("gpu", given, case), given, case)


# --- the reference --------------------------------------------------------------------------------


@every_case(products.REFERENCES, {}, ["numpy"], in_turn=True)
def test_the_reference_against_the_formula(where: str, kernel: Kernel, case: Case) -> None:
    given = {name: in_float64(each) for name, each in kernel.made(case).items()}
    x, gamma, beta = given["x"], given.get("gamma"), given.get("beta")
    if gamma is not None:  # LayerNorm, or RMSNorm without a beta
        x = x if beta is None else x - x.sum(axis=-1, keepdims=True) / case.K
        x = x / np.sqrt((x * x).sum(axis=-1, keepdims=True) / case.K + EPS) * gamma
        x = x if beta is None else x + beta
    y = product_by_loops(x, given["w"])
    y = y if given.get("bias") is None else y + given["bias"]
    if given.get("up") is not None:
        y = y / (1 + np.exp(-y)) * product_by_loops(x, given["up"])
    if case.gelu:
        y *= 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    if case.residual:
        y += given["residual"]
    if case.head_dim:
        heads = y.reshape(*y.shape[:-1], -1, case.head_dim)
        y = reference.rope(heads, START, THETA, case.half_split).reshape(y.shape)
    np.testing.assert_allclose(kernel.exact(kernel.made(case), case), y, rtol=1e-12)


def in_float64(value: Any) -> Any:
    array = value.dequantized() if isinstance(value, WeightMatrix) else value
    return array if array is None else array.astype(np.float64)


def product_by_loops(x: Array, w: Array) -> Array:
    rows = [[sum(map(mul, row, column)) for column in w.T] for row in x.reshape(-1, len(w))]
    return np.array(rows).reshape(*x.shape[:-1], w.shape[1])


def test_the_reference_of_gated_products() -> None:
    x, w, up = (plain.normal(n, 3, 3).astype(np.float64) for n in range(3))
    gated = x @ w / (1 + np.exp(-x @ w)) * (x @ up)
    np.testing.assert_allclose(reference.gemm(x, w, up=up), gated, rtol=1e-12)
    gelu = reference.gelu(x @ w) * (x @ up)
    np.testing.assert_allclose(reference.gemm(x, w, up=up, gelu=True), gelu, rtol=1e-12)


def test_the_reference_of_a_residual_before_the_norm() -> None:
    x, residual, w, up = (plain.normal(n, 3, 3).astype(np.float64) for n in range(4))
    got, h = reference.rmsnorm_ffn(x, x[0], w, up, EPS, residual)
    np.testing.assert_array_equal(h, x + residual)
    np.testing.assert_array_equal(got, reference.rmsnorm_ffn(h, x[0], w, up, EPS))


@pytest.mark.gpu
def test_a_row_too_long_for_matvec_takes_tiles() -> None:
    x, gamma = cupy.ones((1, 65_536), "float16"), cupy.ones(65_536, "float16")
    w = cupy.full((65_536, 16), 2.0**-16, "float16")
    np.testing.assert_allclose(ops.rmsnorm_matmul(x, gamma, w).get(), 1, rtol=1e-3)


@pytest.mark.gpu
def test_the_functions_take_plain_matrices_and_give_pairs() -> None:
    ffn, case = KERNELS["rmsnorm_ffn-matvec-own-float32-KN"], Case(2, 64, 32, residual=True)
    given = ffn.made(case)
    x, gamma, residual = (cupy.asarray(given[name]) for name in ("x", "gamma", "residual"))
    w1, w3 = (cupy.asarray(given[name].data) for name in ("w", "up"))
    alone = ops.rmsnorm_ffn(x, gamma, w1, w3, EPS)
    ffn.assert_right(alone.get(), given | {"residual": None}, case._replace(residual=False))
    out, h = ops.rmsnorm_ffn(x, gamma, w1, w3, EPS, residual=residual)
    ffn.assert_right(out.get(), given, case)
    np.testing.assert_array_equal(h.get(), summed(given))
