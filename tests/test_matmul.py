"""Matrix product with bias: every variant, on NumPy, on the CPU and on the GPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import InputError, ops, reference
from gpt2block.cuda import cupy
from gpt2block.emulator import loader
from gpt2block.ops.matmul_bias import (
    OPERATION,
    REGISTERS,
    TILES,
    MatmulTile,
    choose_tile,
    registers_geometry,
)
from tests import plain
from tests.compiling import Job, assert_clean
from tests.devices import (
    H200,
    assert_barriers_show,
    on_every_device,
    on_one_order,
    one_order,
    outputs,
)
from tests.gpus import large_memory
from tests.plain import normal

Array = NDArray[Any]
MODULE = import_module("gpt2block.ops.matmul_bias")
VARIANTS = [variant.name for variant in OPERATION.variants]
on_every_variant = pytest.mark.parametrize("variant", VARIANTS)
GROUPED = [(tile, tile.groups * n) for tile in TILES for n in (1, 2)]


def inputs(M: int, K: int, N: int) -> tuple[Array, Array, Array]:
    return normal(M, M, K), normal(K, K, N), normal(N, N)


def assert_right(got: Array, a: Array, w: Array, bias: Array | None = None) -> None:
    truth = plain.exact("matmul_bias", a, w, bias)
    plain.assert_as_accurate(got, truth, plain.matmul_bias(a, w, bias))


def evaluate(where: str, variant: str, a: Array, w: Array, bias: Array | None = None) -> Array:
    """On the CPU in a thread order, or on the GPU, twice, with the same bits."""
    out = np.full((*a.shape[:-1], w.shape[1]), np.nan, np.float32)
    return outputs(where, OPERATION.bind, (a, w, bias), out, variant=variant)[0]


# --- what it means, and what is launched ---------------------------------------------------------


def test_reference_against_a_loop_by_hand() -> None:
    a, w, bias = (x.astype(np.float64) for x in inputs(3, 5, 4))
    expected = np.empty((3, 4))
    for m, n in np.ndindex(3, 4):
        expected[m, n] = sum(a[m, k] * w[k, n] for k in range(5))
    np.testing.assert_allclose(reference.matmul_bias(a, w), expected, rtol=1e-14)
    np.testing.assert_allclose(reference.matmul_bias(a, w, bias), expected + bias, rtol=1e-14)


@pytest.mark.parametrize(
    ("M", "N", "sides"),
    [
        (8192, 2304, (128, 128)),
        (8192, 768, (128, 128)),
        (1024, 3072, (64, 128)),
        (1024, 2304, (32, 96)),
        (1024, 768, (32, 96)),
        (128, 2304, (32, 96)),
        (128, 768, (32, 32)),
        (1, 1, (32, 32)),
    ],
)
def test_the_tile_fits_the_gpu(M: int, N: int, sides: tuple[int, int]) -> None:
    tile, groups = choose_tile(M, N, H200)
    assert (tile.rows, tile.columns) == sides
    how = registers_geometry(tile, groups, M, N, 4)
    assert groups == tile.groups * (2 if how.grid[0] <= H200 else 1)


def test_every_tile_compiles_and_fits() -> None:
    """By turns with each width of loads, for each architecture."""
    jobs: list[Job] = []
    for i, (tile, groups) in enumerate(GROUPED):
        how = registers_geometry(tile, groups, 1000, 1000, (1, 4)[(i + i // 2) % 2])
        assert how.block[0] <= 512
        assert how.shared <= 64 << 10  # what a block can have from sm_75 on
        jobs.append((REGISTERS, ("sm_75", "sm_80", "sm_90")[i % 3], how.defines))
    assert_clean(jobs)


# --- every variant -------------------------------------------------------------------------------


@on_every_device
@on_every_variant
@settings(max_examples=4)
@given(M=st.integers(1, 70), K=st.integers(1, 70), N=st.integers(1, 70), with_bias=st.booleans())
@example(M=1, K=1, N=1, with_bias=True)
@example(M=65, K=65, N=36, with_bias=False)
@example(M=33, K=67, N=35, with_bias=True)
def test_every_variant(where: str, variant: str, M: int, K: int, N: int, with_bias: bool) -> None:
    a, w, bias = inputs(M, K, N)
    given_bias = bias if with_bias else None
    assert_right(evaluate(where, variant, a, w, given_bias), a, w, given_bias)


def forced(where: str, tile: MatmulTile, groups: int, M: int, K: int, N: int) -> None:
    """With this tile in the place of the best one."""
    a, w, bias = inputs(M, K, N)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, "choose_tile", lambda *_: (tile, groups))
        assert_right(evaluate(where, "registers", a, w, bias), a, w, bias)


@pytest.mark.parametrize("i", range(len(GROUPED)))
def test_every_tile(i: int) -> None:
    """By turns with loads of 16 bytes and of one float."""
    sizes = ((131, 70, 132), (70, 19, 101))[(i + i // 2) % 2]
    for where in loader.ORDERS:
        forced(where, *GROUPED[i], *sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("grouped", GROUPED, ids=str)
def test_every_tile_on_the_gpu(grouped: tuple[MatmulTile, int]) -> None:
    for sizes in ((131, 70, 132), (70, 19, 101), (517, 1000, 516), (300, 77, 333)):
        forced("gpu", *grouped, *sizes)


@on_one_order
def test_every_length_of_the_first_slice(where: str) -> None:
    for K in (1, 2, 7, 8, 63, 64, 128, 130):
        a, w, bias = inputs(5, K, 8)
        assert_right(evaluate(where, "registers", a, w, bias), a, w, bias)


@on_one_order
def test_more_than_a_band_of_tiles(where: str) -> None:
    a, w, bias = inputs(32 * 17 + 1, 3, 70)
    assert_right(evaluate(where, "registers", a, w, bias), a, w, bias)


@on_every_variant
@on_one_order
def test_an_output_depends_on_its_row_and_column_alone(where: str, variant: str) -> None:
    """Also at the edges, where rows and columns that do not exist are read as others or as zero."""
    a, w, bias = inputs(37, 21, 44)
    a[36, 20] = a[4, 0] = np.nan
    w[20, 43] = w[0, 7] = np.inf
    bias[9] = np.nan
    got = evaluate(where, variant, a, w, bias)
    finite = np.ones((37, 44), bool)
    finite[[36, 4]] = finite[:, [43, 7, 9]] = False
    np.testing.assert_array_equal(np.isfinite(got), finite)


@pytest.mark.parametrize(("variant", "barriers"), [("coarsened", 2), ("registers", 3)])
def test_a_missing_barrier_shows(variant: str, barriers: int) -> None:
    arrays = inputs(20, 270, 20)
    file = OPERATION.variant(variant).file
    assert_barriers_show(file, lambda order: [evaluate(order, variant, *arrays)], barriers)


# --- on the GPU alone ----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("M", "K", "N"),
    [(1, 768, 3072), (128, 3072, 768), (1000, 768, 2304), (1024, 767, 771), (8192, 64, 768)],
)
@on_every_variant
def test_large_sizes(variant: str, M: int, K: int, N: int) -> None:
    a, w, bias = inputs(M, K, N)
    expected = plain.matmul_bias(cupy.asarray(a), cupy.asarray(w), cupy.asarray(bias), cupy).get()
    truth = reference.matmul_bias(*(x.astype(np.float64) for x in (a, w, bias)))
    plain.assert_as_accurate(evaluate("gpu", variant, a, w, bias), truth, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "K", "N"), [(300, 77, 333), (100, 768, 128)])
def test_one_group_gives_the_same_bits_as_the_other_variants(
    monkeypatch: pytest.MonkeyPatch, M: int, K: int, N: int
) -> None:
    """Each adds the products in the order of k: what differs is how they come to the registers."""
    a, w, bias = inputs(M, K, N)
    expected = evaluate("gpu", "tiled", a, w, bias)
    for variant in ("naive", "coarsened"):
        np.testing.assert_array_equal(evaluate("gpu", variant, a, w, bias), expected)
    monkeypatch.setattr(MODULE, "choose_tile", lambda *_: (TILES[0], 1))
    np.testing.assert_array_equal(evaluate("gpu", "registers", a, w, bias), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["naive", "coarsened", "registers"])
def test_more_rows_than_a_grid_is_high(variant: str) -> None:
    a, w, bias = inputs(65535 * 32 + 1, 3, 5)
    assert_right(evaluate("gpu", variant, a, w, bias), a, w, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["naive", "coarsened", "registers"])
def test_more_outputs_than_an_int_counts(variant: str) -> None:
    M, N = 70_001, 32_003
    with large_memory(4 * M * N):
        a, w, bias = (cupy.asarray(x) for x in inputs(M, 2, N))
        got = ops.matmul_bias(a, w, bias, variant=variant)
        for rows in (slice(0, 3), slice(M // 2, M // 2 + 3), slice(M - 3, M)):
            assert_right(got[rows].get(), a[rows].get(), w.get(), bias.get())
        del got


@pytest.mark.gpu
@on_every_variant
def test_the_op(variant: str) -> None:
    a, w, bias = inputs(42, 48, 52)
    on_device = [cupy.asarray(x) for x in (a, w, bias)]
    batch = on_device[0].reshape(2, 21, 48)
    got = ops.matmul_bias(batch, on_device[1], on_device[2], variant)
    assert got.shape == (2, 21, 52)
    assert_right(got.get().reshape(42, 52), a, w, bias)
    wide = cupy.asarray(np.repeat(a, 2, axis=1))[:, ::2]
    np.testing.assert_array_equal(
        ops.matmul_bias(wide, on_device[1], on_device[2], variant).get(), got.get().reshape(42, 52)
    )
    moved = cupy.asarray(np.append(np.float32(0), w))[1:].reshape(w.shape)
    assert moved.data.ptr % 16
    assert_right(ops.matmul_bias(on_device[0], moved, variant=variant).get(), a, w)
    out = cupy.full(42 * 52 + 1, np.nan, np.float32)[1:].reshape(42, 52)
    assert_right(OPERATION.bind(tuple(on_device), out, variant=variant).run().get(), a, w, bias)


@one_order
def test_bad_input(device: Any) -> None:
    """What the contract alone does not say."""
    tall, w = cupy.zeros((1_048_561, 1), "float32"), cupy.zeros((1, 4), "float32")
    with pytest.raises(InputError, match=r"1,048,561 rows .* takes at most 1,048,560"):
        ops.matmul_bias(tall, w, variant="tiled")
    with pytest.raises(InputError, match="'mma': expected one of naive, tiled, coarsened, regis"):
        ops.matmul_bias(tall, w, variant="mma")
