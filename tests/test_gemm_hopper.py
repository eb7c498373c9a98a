"""The product of the Hopper tier: which tile, no spills, and every tile on the GPU.

What both tiers have in common is in test_gemm.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from gpt2block import ops, reference
from gpt2block.cuda import kernels
from gpt2block.cuda.kernels import FP8
from gpt2block.ops import _gemm_hopper
from gpt2block.ops._gemm_hopper import (
    FILE,
    FP8_FILE,
    FP8_TILES,
    TILES,
    TWO_PART_FILE,
    TWO_PART_TILES,
    HopperGemmTile,
    choose_tile,
    geometry,
)
from gpt2block.ops._products import HOPPER_CAPABILITY
from gpt2block.ops.gemm import OPERATION as GEMM
from gpt2block.ops.gemm import WIDEN
from gpt2block.weights.matrix import WeightMatrix
from tests.compiling import assert_clean
from tests.devices import assert_same_bits
from tests.gpus import H200, cupy_with
from tests.test_gemm import EPILOGUES, GPT2, TWO_PART_EPILOGUES, Case, Problem

SMS, MOST_SHARED = H200["sms"], H200["most_shared"]
QKV, OUT, FC, PROJ = GPT2
TWO_ENDS = ((False, False), (True, False), (False, True))  # whether with GELU, with a residual


@pytest.mark.parametrize(
    ("M", "product", "tile", "splits"),
    [
        (128, QKV, (64, 64), 1),
        (128, OUT, (64, 64), 2),
        (128, FC, (64, 64), 1),
        (128, PROJ, (128, 64), 4),
        (1024, QKV, (128, 144), 1),
        (1024, OUT, (64, 96), 1),
        (1024, FC, (128, 192), 1),
        (1024, PROJ, (128, 96), 2),
        *((M, product, (128, 192), 1) for M in (8192, 65536) for product in GPT2),
    ],
)
def test_the_fastest_tile_on_an_h200(
    M: int, product: tuple[int, int], tile: tuple[int, int], splits: int
) -> None:
    """Those that were the fastest, or within 2 % of it, when all were timed."""
    chosen = choose_tile(TILES, M, *product, True, SMS)
    assert (chosen.rows, chosen.columns) == tile
    assert chosen.split_k == splits
    assert choose_tile(TILES, M, *product, False, SMS).split_k == 1


@pytest.mark.parametrize(
    ("M", "product", "tile"),
    [
        *((128, product, (64, 48)) for product in GPT2),
        (1024, QKV, (64, 96)),
        (1024, OUT, (64, 96)),
        (1024, FC, (64, 128)),
        (1024, PROJ, (64, 96)),
        *((M, product, (64, 128)) for M in (8192, 65536) for product in GPT2),
    ],
)
def test_the_fastest_tile_of_split_numbers(
    M: int, product: tuple[int, int], tile: tuple[int, int]
) -> None:
    chosen = choose_tile(TWO_PART_TILES, M, *product, False, SMS)
    assert (chosen.rows, chosen.columns) == tile


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_tile_has_room(tile: HopperGemmTile) -> None:
    for M in (1, 130, 100_000):
        for float_out in (False, True):
            how, _ = geometry(M, 768, 3072, other_out=float_out, sms=SMS, tile=tile)
            assert how.shared <= MOST_SHARED
            assert how.grid[0] % tile.cluster == 0
            assert how.grid[0] <= SMS or tile.split_k > 1


def test_a_short_k_is_not_split_into_nothing() -> None:
    for K in (8, 64, 72, 128, 192):
        assert choose_tile(TILES, 128, 768, K, True, SMS).split_k <= -(-K // 64)


def test_no_tile_spills() -> None:
    """By turns with GELU and a residual, as a block needs them, and with the other epilogues."""
    plain, *others, gelu_and_residual = EPILOGUES
    of_a_block = plain, replace(plain, gelu=True), replace(plain, residual=True)
    cases = [(tile, of_a_block[i % 3]) for i, tile in enumerate(TILES)]
    cases += zip(TILES, (*others[:2], others[3], gelu_and_residual), strict=False)
    cases += [(tile, TWO_PART_EPILOGUES[1 + i % 2]) for i, tile in enumerate(TWO_PART_TILES)]
    jobs = []
    for tile, case in cases:
        how, _ = geometry(500, 768, 768, **case.ends, sms=SMS, tile=tile)
        assert how.shared <= MOST_SHARED
        file = TWO_PART_FILE if case.two_part else FILE
        stored = () if case.two_part else kernels.stored_as(case.storage)
        jobs.append((file, "sm_90a", (*stored, *how.defines)))
    assert_clean(jobs)


@pytest.mark.parametrize("other_out", [False, True])
def test_no_tile_for_fp8_weights_spills(other_out: bool) -> None:
    """Either format, with scales or without them, by turns; registers of w are loaded in time."""
    jobs = []
    turns = zip(FP8_TILES, cycle(FP8), cycle((True, True, False)), strict=False)
    for tile, format, scaled in turns:
        for gelu, residual in TWO_ENDS:
            ends = {"gelu": gelu, "residual": residual, "scaled": scaled, "other_out": other_out}
            how, _ = geometry(500, 768, 768, **ends, fp8=True, sms=SMS, tile=tile)
            assert how.shared <= MOST_SHARED
            jobs.append((FP8_FILE, "sm_90a", (*kernels.stored_as("float16", format), *how.defines)))
    assert_clean(jobs)


# --- on the GPU -----------------------------------------------------------------------------------


@pytest.fixture
def cp() -> Any:
    return cupy_with(HOPPER_CAPABILITY)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        *(
            replace(epilogue, M=M, N=N, K=K)
            for epilogue in EPILOGUES
            for M, N, K in ((1, 8, 264), (129, 264, 520), (1000, 776, 768), (5000, 2312, 264))
        ),
        *(
            replace(epilogue, M=M, N=N, K=K)
            for epilogue in TWO_PART_EPILOGUES
            for M, N, K in ((1, 8, 264), (129, 264, 520), (1500, 2312, 72), (900, 768, 8))
        ),
        *(Case(5000, 2312, K) for K in (8, 64, 128, 192)),
    ],
    ids=str,
)
def test_every_tile(cp: Any, case: Case) -> None:
    """Right for one row and many, for one tile a block and many; the same bits but for splits.

    With a short K the ring does not hold warpgroups back.
    """
    given = Problem(case)
    first, *others = TWO_PART_TILES if case.two_part else TILES
    expected = given.run("gpu", "hopper", first)
    given.assert_right(expected, cp)
    for tile in others:
        if tile.split_k == 1:
            assert_same_bits(given.run("gpu", "hopper", tile), expected)
        elif case.K > 192:
            given.assert_right(given.run("gpu", "hopper", tile), cp)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FP8)
@pytest.mark.parametrize(
    "shape", [(1, 8, 16), (130, 264, 528), (1000, 776, 3072), (5000, 2312, 80)]
)
def test_fp8_weights_are_widened_in_every_tile(
    cp: Any, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], format: str
) -> None:
    """The bits are those of the same numbers as float16 weights; a row has the same ones alone."""
    M, N, K = shape
    rng = np.random.default_rng(shape)
    a = cp.asarray((0.01 * rng.standard_normal((M, K))).astype(np.float16))
    w = WeightMatrix.quantize(rng.standard_normal((N, K), np.float32), format, "NK")
    numbers = cp.asarray(w.data)
    narrow = WeightMatrix(numbers, format, None, "NK")
    wide = WeightMatrix(WIDEN.bind((narrow, None)).run(), "float16", None, "NK")
    bias = cp.asarray(rng.standard_normal(N, np.float32))
    residual = cp.asarray(rng.standard_normal((M, N)).astype(np.float16))
    alone = M // 2
    for float_out in (False, True):
        added = residual.astype(np.float32) if float_out else residual
        options: dict[str, Any] = {"gelu": True, "dtype": "float32" if float_out else "float16"}
        expected = ops.gemm(a, wide, bias, added, **options).get()
        for tile in FP8_TILES:
            monkeypatch.setattr(_gemm_hopper, "choose_tile", lambda *_, tile=tile: tile)
            _gemm_hopper.geometry.cache_clear()
            got = GEMM.bind((a, narrow, bias, added), **options).run().get()
            assert_same_bits(got, expected)
            row = slice(alone, alone + 1)
            got = GEMM.bind((a[row], narrow, bias, added[row]), **options).run().get()
            assert_same_bits(got, expected[row])
        monkeypatch.undo()
        _gemm_hopper.geometry.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 100, 128, 1000, 1024])
def test_k_in_parts(cp: Any, M: int) -> None:
    """As the Block asks for it."""
    for N, K in (OUT, PROJ):
        given = Problem(Case(M, N, K, residual=True))
        inputs = given.uploaded()
        out = GEMM.bind(inputs, inputs[3], split_k=True, variant="hopper").run()
        given.assert_right(out.get(), cp)


def gate_and_up(cp: Any, M: int, N: int, K: int, dtype: str) -> tuple[Any, ...]:
    """a, two matrices on the GPU, and silu(a w) (a up) in float64."""
    rng = np.random.default_rng(M)
    host = [rng.standard_normal(shape, dtype=np.float32) for shape in ((M, K), (N, K), (N, K))]
    host[0] *= 2 / K**0.5
    a, *both = (cp.asarray(each.astype(np.dtype(dtype))) for each in host)
    exact, w, up = (each.get().astype(np.float64) for each in (a, *both))
    matrices = [WeightMatrix(each, dtype, None, "NK") for each in both]
    return a, *matrices, reference.gemm(exact, w.T, up=up.T)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("M", "N", "K"), [(1, 8, 264), (70, 144, 72), (500, 2312, 768)])
def test_gate_and_up_are_one_product(cp: Any, M: int, N: int, K: int, dtype: str) -> None:
    """As exact as one rounding; a row has the same bits alone; the variant is chosen by itself."""
    a, w, up, truth = gate_and_up(cp, M, N, K, dtype)
    memory = cp.full((M + 8, N), 7, dtype)
    GEMM.bind((a, w, None, None, up), memory[:M]).run()
    got = memory.get().astype(np.float64)
    assert (got[M:] == 7).all()
    step = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    off = np.abs(got[:M] - truth) - step * np.abs(truth)
    assert off.max() < 1e-5 * np.abs(truth).max()
    alone = ops.gemm(a[M // 2 : M // 2 + 1], w, up=up).get()
    np.testing.assert_array_equal(alone[0].astype(np.float64), got[M // 2])


@pytest.mark.gpu
def test_other_rows_do_not_matter(cp: Any) -> None:
    """NaN and infinity stay in their rows; beyond the last one nothing is read or written."""
    given = Problem(Case(200, 2304, 768))
    w = WeightMatrix(cp.asarray(given.w), "bfloat16", None, "NK")
    memory = cp.full((208, 768), np.nan, "bfloat16")
    memory[:200] = cp.asarray(given.a)
    out = cp.full((208, 2304), 7, "bfloat16")
    for row, value in ((3, np.nan), (77, np.inf)):
        memory[row] = value
    GEMM.bind((memory[:200], w, cp.asarray(given.bias)), out[:200], variant="hopper").run()
    got = out.get().astype(np.float32)
    assert (got[200:] == 7).all()
    assert not np.isfinite(got[[3, 77]]).any()
    rest = np.delete(got[:200], [3, 77], axis=0)
    expected = np.delete(given.truth(), [3, 77], axis=0)
    assert np.abs(rest - expected).max() < 0.01 * np.abs(expected).max()
