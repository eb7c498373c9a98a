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

from gpt2block import reference
from gpt2block.cuda import cupy
from gpt2block.cuda.kernels import HI_LO
from gpt2block.models.weights.matrix import WeightMatrix
from tests import plain
from tests.devices import GPU, IN_TESTS, assert_barriers_show, assert_same_bits
from tests.gpus import HOPPER_CAPABILITY, large_memory
from tests.products import (
    ALL_ENDS,
    ENDS,
    EPS,
    FLOAT_ENDS,
    FP8_E4M3,
    FULL,
    GPT2,
    KERNELS,
    MATMUL,
    NARROW,
    ODD,
    ON_CPU,
    ON_GPU,
    ROUNDS,
    SQUARE,
    START,
    THETA,
    UNEVEN,
    Case,
    Kernel,
    Table,
    found_in,
    rows_of,
    tiles_of,
    with_ends,
)

Array = NDArray[Any]


def every_case(
    on_cpu: Table, on_gpu: Table, orders: Sequence[str] = ("shuffled",)
) -> pytest.MarkDecorator:
    """Parametrize `where`, `kernel` and `case`: one table for the emulator, one for a GPU.

    A kernel's first case runs in all thread orders, the others in the last one.
    """
    found: list[tuple[str, Kernel, Case]] = []
    for kernel, case in found_in(on_cpu):
        of_hopper = kernel.capability == HOPPER_CAPABILITY
        some = orders[-1:] if any(kernel is each for _, each, _ in found) else orders
        found += [(where, kernel, case) for where in (["hopper"] if of_hopper else some)]
    found += [("gpu", *each) for each in found_in(on_gpu)]
    cases = [
        pytest.param(
            *(where, kernel, case),
            id=f"{where}-{kernel.name}-{'x'.join(map(str, case[:3]))}",
            marks=GPU.marks if where == "gpu" else (),
        )
        for where, kernel, case in found
    ]
    return pytest.mark.parametrize(("where", "kernel", "case"), cases)


@every_case(ON_CPU, ON_GPU, IN_TESTS)
def test_right(where: str, kernel: Kernel, case: Case) -> None:
    """The residual may be the output."""
    given = kernel.made(case)
    places = [False]
    if kernel.may_be_in_place(given):  # on the emulator in some thread orders only
        places = {"forward": [False], "gpu": [False, True]}.get(where, [True])
    for in_place in places:
        got = kernel(where, given, case, in_place)
        kernel.assert_right(got, given, case, where)


BAND = Case(32 * 17 + 1, 3, 70)
LENGTHS = [Case(5, K, 8) for K in (1, 2, 4, 7, 8, 31, 32, 63, 64, 76, 128, 130)]
SLICES: Table = {
    "linear-tiles-float32": [*LENGTHS, BAND],
    "linear-tiles-bfloat16": LENGTHS,
    "matmul-registers": [*LENGTHS, BAND],
}


@every_case(SLICES, SLICES)
def test_every_length_of_the_first_slice(where: str, kernel: Kernel, case: Case) -> None:
    """The slice is full or not; BAND has more rows than a band of tiles."""
    given = kernel.made(case)
    kernel.assert_right(kernel(where, given, case), given, case, where)


SQUARES = Case(100, 240, 96, bias=False, tile=SQUARE, sms=1)
UP_TO_ON_CPU: Table = {
    "linear-matvec-bfloat16": [Case(6, 784, 40, norm=True, tile=ROUNDS)],
    "linear-tiles-*": [Case(70, 72, 100)],
    "gemm-mma-bfloat16-to-bfloat16": [SQUARES],
    "matmul-*": [Case(70, 70, 70)],
    "rmsnorm_*-unfused-own-float16-KN": [Case(100, 320, 72, tile=UNEVEN)],
}
UP_TO_ON_GPU: Table = {
    "linear-tiles-*": [Case(70, 72, 100)],
    "matmul-*": [Case(70, 70, 70)],
    "gemm-*-*16-to-*": [Case(600, 480, 480, residual=True)],
    "rmsnorm_*-mma-own-float16-KN": [Case(600, 480, 480)],
    "rmsnorm_*-unfused-own-float16-KN": [Case(600, 480, 480)],
}


@every_case(UP_TO_ON_CPU, UP_TO_ON_GPU, ["reverse"])
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
        if case.tile == ROUNDS:  # blocks loop over columns, on few multiprocessors
            one = one._replace(K=case.K, sms=data.draw(st.integers(1, 3)))
        if kernel.variant == "tiles":
            more = (M + N) % 3 > 0
            one = one._replace(gelu=N % 4 == 0, residual=more, bias=more)
        given = kernel.made(one)
        kernel.assert_right(kernel(where, given, one), given, one, where)


# --- the same bits --------------------------------------------------------------------------------


BITS_ON_CPU: Table = {
    "linear-mma-float32": [Case(17, 264, 14, **FULL)],
    "linear-mma-hi_lo": [Case(17, 264, 14, **FULL)],
    "linear-mma-bfloat16": [Case(17, 264, 14, **FULL)],
    "linear-matvec-float32": [Case(17, 264, 14, **FULL)],
    "linear-matvec-*": [Case(20, 1168, 37, **ENDS)],
    **{f"linear-mma_tiles-{name}": [Case(20, 1168, 37, gelu=True)]
       for name in ("float32", "bfloat16", FP8_E4M3, HI_LO)},
    "linear-tiles-float32": [Case(131, 136, 104, **ENDS)],
    "linear-tiles-bfloat16": [Case(131, 136, 104, **ENDS)],
    "gemm-mma-bfloat16-to-bfloat16": [Case(40, 136, 80, bias=False)],
    "gemm-mma-hi_lo-to-float32": [Case(40, 136, 80, bias=False)],
}  # fmt: skip
BY_MMA = (1, 8, 8), (129, 184, 264), (260, 1032, 520), (3000, 768, 776)
BY_WGMMA = (1, 264, 8), (129, 520, 264), (1000, 768, 776), (5000, 264, 2312)
BITS_ON_GPU: Table = {
    "linear-wgmma-*": with_ends([ENDS], (1, 768, 768), (3, 896, 200), (17, 384, 130),
                                 (64, 128, 768), (65, 4096, 100), (200, 768, 64),
                                 (3, 64, 40), (70, 576, 136), (200, 1600, 64)),
    "linear-mma_tiles-*": with_ends([ENDS], (200, 768, 2304), (65, 3072, 768), (64, 768, 5001),
                                    (18, 1600, 96), (64, 768, 2304), (65, 768, 20_001)),
    "linear-mma-[bf]*": with_ends([FULL], (200, 768, 2304), (200, 3072, 768), (200, 768, 20_000),
                                  (200, 1616, 333)),
    "linear-matvec-*": [
        *with_ends([FULL], (17, 768, 2304), (17, 3072, 768), (17, 768, 20_000), (17, 1615, 333)),
        *with_ends([ENDS], (65, 768, 2304), (64, 3072, 768), (33, 772, 20_000), (17, 1616, 333),
                   (9, 11_008, 200)),
    ],
    "linear-tiles-*": with_ends([{"residual": True}, ENDS], (517, 1000, 516), (300, 77, 333),
                                (2000, 768, 768), (131, 136, 104)),
    "gemm-mma-*16-to-*16": with_ends([{"bias": False}, {"residual": True}], *BY_MMA),
    "gemm-mma-*-to-float32": with_ends([{"residual": True}], *BY_MMA),
    "gemm-mma-hi_lo-to-hi_lo": with_ends([{"gelu": True}], *BY_MMA),
    # With a short K warpgroups do not wait for the ring.
    "gemm-wgmma-bfloat16-to-bfloat16": [Case(5000, K, 2312) for K in (8, 64, 128, 192)],
    "gemm-wgmma-*16-to-*16": with_ends(ALL_ENDS, *BY_WGMMA),
    "gemm-wgmma-*-to-float32": with_ends(FLOAT_ENDS, *BY_WGMMA),
    "gemm-wgmma-hi_lo-to-hi_lo": with_ends([{"gelu": True}], *BY_WGMMA),
    "gemm-*-bfloat16-to-float32": [Case(1000, K, N) for N, K in GPT2],
    "gemm-*-bfloat16-to-bfloat16": [Case(1000, K, N, gelu=True) for N, K in GPT2],
    "matmul-registers": with_ends([{}], (131, 70, 132), (70, 19, 101), (517, 1000, 516),
                                  (300, 77, 333)),
    "rmsnorm_*-mma-own-float16-KN": [Case(1, 264, 40, apart=8), Case(333, 1032, 1448),
                                     Case(1000, 136, 3032, apart=8)],
    "rmsnorm_*-mma-own-bfloat16-KN": [Case(129, 72, 520, apart=8)],
    "rmsnorm_*-wgmma-own-float16-*": [Case(1, 264, 40, apart=10), Case(333, 1032, 1448),
                                       Case(1000, 136, 3032, apart=8)],
    "rmsnorm_*-wgmma-own-bfloat16-*": [Case(129, 72, 520, apart=8)],
}  # fmt: skip


@every_case(BITS_ON_CPU, BITS_ON_GPU)
def test_tiles_and_other_rows_change_no_bit(where: str, kernel: Kernel, case: Case) -> None:
    """First and last rows alone have the same bits as among all rows, with any tile.

    All rows have the bits of the kernel named by `alike`. If tiles differ in their order of
    additions, each result is only checked for accuracy.
    """
    given = kernel.made(case)
    whole = KERNELS[kernel.alike](where, given, case) if kernel.alike else None
    for tile in tiles_of(where, kernel, case):
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
                    some = kernel(where, rows_of(given, rows), one._replace(M=count))
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

EDGES: Table = {
    **{f"linear-mma-{name}": [Case(37, 32, 44, **ENDS)]
       for name in ("float32", "bfloat16", FP8_E4M3, HI_LO)},
    "linear-mma_tiles-*": [Case(37, 32, 44, **ENDS, tile=ODD)],
    "linear-tiles-float32": [Case(37, 32, 44, **ENDS)],
    "linear-tiles-float16": [Case(37, 32, 44, **ENDS)],
    "matmul-*": [Case(37, 21, 44)],
    "gemm-mma-bfloat16-to-bfloat16": [Case(37, 32, 48, residual=True, tile=NARROW)],
}  # fmt: skip
EDGES_OF_WGMMA: Table = {"gemm-wgmma-bfloat16-to-bfloat16": [Case(37, 32, 48, residual=True)]}


@every_case(EDGES, {**EDGES, **EDGES_OF_WGMMA})
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


OF_WGMMA = [Case(M, 256, N, bias=False, residual=True) for M, N in ((5, 130), (70, 130), (70, 131))]
ANYWHERE_ON_CPU: Table = {"matmul-*": [Case(42, 48, 52)]}
ANYWHERE_ON_GPU: Table = {
    **ANYWHERE_ON_CPU,
    "linear-tiles-*": [Case(42, 48, 52, residual=True)],
    "linear-wgmma-*": OF_WGMMA,
}


@every_case(ANYWHERE_ON_CPU, ANYWHERE_ON_GPU)
def test_arrays_at_any_address(where: str, kernel: Kernel, case: Case) -> None:
    """Results have the same bits as at multiples of 512 bytes, which terms and weights need."""
    given = kernel.made(case)
    expected = kernel(where, given, case)
    for names in (("residual",),) if kernel.operand else (tuple(given), ("w",), ("residual",), ()):
        for away in (names, (*names, "out")):
            assert_same_bits(kernel(where, given, case, away=away), expected)


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
            kernel.assert_right(got[rows].get(), rows_of(given, rows), Case(3, 2, N))
        del got


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
def test_more_rows_than_a_grid_is_high(name: str) -> None:
    kernel, case = KERNELS[name], Case(65535 * 32 + 1, 3, 5)
    given = kernel.made(case)
    kernel.assert_right(kernel("gpu", given, case), given, case)


# --- the reference --------------------------------------------------------------------------------


REFERENCES: Table = {
    "linear-matvec-float8_e4m3fn": with_ends([{}, ENDS, {"norm": True}, FULL], (2, 5, 3)),
    "gemm-mma-hi_lo-to-float32": [Case(6, 4, 5, **ENDS, sequences=2), Case(2, 4, 5, bias=False)],
    "matmul-naive": with_ends([{}, {"bias": False}], (3, 5, 4)),
    "rmsnorm_matmul-matvec-own-float32-*": [
        Case(3, 6, 8, head_dim=4), Case(6, 6, 8, head_dim=4, half_split=True, sequences=2)],
    "rmsnorm_ffn-matvec-own-float32-*": [Case(2, 5, 3), Case(4, 5, 3, sequences=2)],
}  # fmt: skip


@every_case(REFERENCES, {}, ["numpy"])
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
