"""Tiles and layouts of matrix products: limits of launches and of GPUs, and register spills.

tests/engine/test_launch_lists.py compares the choice of tiles on seven GPUs with golden files.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2block.cuda.kernels import FP8, Geometry
from gpt2block.ops.engines import linear_matvec as matvec
from gpt2block.ops.engines import linear_mma as mma
from gpt2block.ops.engines import (
    linear_wgmma,
    rmsnorm_mma,
)
from gpt2block.ops.engines.rmsnorm_matvec import geometry as rmsnorm_matvec
from gpt2block.ops.products import room
from tests.gpus import H200
from tests.products import WEIGHTS

SMS, MAX_SHARED = H200["sms"], H200["max_shared"]
SHAPES = [  # (K, N) of the four GPT-2 models and of the bundled model, and odd sizes
    *[(C, n * C) for C in (256, 768, 1024, 1280, 1600) for n in (1, 3, 4)],
    *[(4 * C, C) for C in (256, 768, 1024, 1280, 1600)],
    *((768, 50257), (1600, 50257), (1, 1), (1601, 333)),
]


def constants_of(how: Geometry) -> dict[str, int]:
    return {name: int(value) for name, value in how.defines}


# --- limits of launches ---------------------------------------------------------------------------


@pytest.mark.parametrize("sms", [132, 40, 1])
@pytest.mark.parametrize(("K", "N"), SHAPES)
def test_every_column_and_row_of_decoding_has_a_block(K: int, N: int, sms: int) -> None:
    for M in (1, 2, 7, 8, 16, 17, 64):
        for weight in (1, 2, 4):
            how = matvec.layout(M, N, K, weight, sms)
            assert how[:3] == matvec.order(N, K, weight)
            assert K % how.width == 0
            assert how.width * weight <= 16
            where = matvec.geometry(M, N, K, weight, norm=True, sms=sms)
            assert where is not None
            assert where.block[0] == 32 * how.split * how.groups <= 576
            assert where.grid[1] * how.rows >= M
            columns = how.groups * how.columns
            assert (where.grid[0] * columns >= N) or how.loop
            assert (where.grid[0] - 1) * columns < N
            assert 4 * how.width * weight * how.columns * how.steps <= 16 * 4 * 16
        for dtype in WEIGHTS:
            cut = mma.layout(M, N, K, dtype, sms)
            where = mma.geometry(M, N, K, dtype, norm=True, sms=sms)
            assert where is not None
            assert where.block[0] == 32 * cut.warps <= 512
            assert cut.loop or cut.warps == mma.splits(K)[0] <= 8
            assert where.grid[1] * constants_of(where)["DECODE_ROWS"] >= M
            assert where.grid[0] * cut.columns >= N or cut.loop
            assert (where.grid[0] - 1) * cut.columns < N


@given(
    M=st.integers(1, 600),
    N=st.integers(1, 700),
    K=st.integers(1, 9000),
    weight=st.sampled_from([1, 2, 4]),
    layout=st.sampled_from(["KN", "NK"]),
    two=st.booleans(),
)
def test_every_column_and_row_after_rmsnorm_has_a_block(
    M: int, N: int, K: int, weight: int, layout: str, two: bool
) -> None:
    pairing: Any = "two matrices" if two else "neighbours"
    where = rmsnorm_matvec(M, N, K, 1, weight, layout, pairing, 0, 16, 200_000)
    assert where is not None
    constants = constants_of(where)
    width, lanes, strips = (constants[f"MV_{name}"] for name in ("WIDTH", "LANES", "STRIPS"))
    strip = lanes * width
    pairs = where.block[0] // 32 if layout == "NK" else strip if strips == 2 else strip // 2
    assert where.grid[0] * pairs * (1 if two else 2) >= N
    assert where.grid[1] * constants["MV_ROWS"] >= M
    assert (K if layout == "NK" else N) % width == 0
    assert where.shared <= 200_000
    assert lanes <= 32


def test_rows_that_no_block_can_hold() -> None:
    for M, K, fits in ((1, 50_000, True), (9, 50_000, True), (1, 60_000, False)):
        assert (matvec.geometry(M, 8, K, 2) is not None) == fits
    for M, K, fits in ((16, 16_384, True), (1, 60_000, False)):
        assert (mma.geometry(M, 8, K, "bfloat16") is not None) == fits
    for M, K, fits in ((4, 49_000, True), (1, 50_000, False)):
        sizes: Any = (M, 8, K, 1, 2, "NK", "neighbours", 0, 16, 200_000)
        assert (rmsnorm_matvec(*sizes) is not None) == fits


@settings(max_examples=200)
@given(
    st.integers(1, 600),
    st.integers(1, 9000) | st.integers(1, 300_000),
    st.integers(1, 512).map(lambda boxes: 64 * boxes),
    st.sampled_from(("float16", "bfloat16", *FP8)),
    st.booleans(),
    st.sampled_from([132, 114, 8]),
    st.booleans(),
)
def test_a_tile_of_decoding_by_wgmma_can_run(
    M: int, N: int, K: int, dtype: str, gated: bool, sms: int, rounded: bool
) -> None:
    """A tile fits in shared memory, a cluster has at most 8 blocks, and each block has work."""
    of = linear_wgmma.WgmmaProduct(M, (N,), K, dtype, gated, rounded)
    tile = linear_wgmma.choose(of, sms, MAX_SHARED)
    assert of.block_bytes(tile) <= room(MAX_SHARED, tile.blocks)
    assert tile.rows >= 4
    assert tile.splits * tile.shares <= 8
    of_block = -(-mma.splits(K)[0] // tile.splits)
    assert (tile.splits - 1) * of_block < mma.splits(K)[0]
    assert tile.splits <= tile.groups * tile.rows
    assert tile.teams == 1 or tile.splits > 1
    assert min(M, 64) <= tile.rows <= 64
    assert tile.stages >= 2
    columns = of.grid(tile) // (tile.splits * -(-M // 64)) * tile.columns(gated)
    assert columns >= N


def test_sizes_that_do_not_lie_on_16_bytes_are_told() -> None:
    """The arguments of `fits` are N, K, stride of x, bytes per weight, and layout."""
    for fit in ((8, 8, 8, 2, "KN"), (16, 8, 16, 1, "KN"), (8, 16, 16, 1, "NK")):
        assert rmsnorm_mma.fits(*fit)
    for odd in ((4, 8, 8, 2, "KN"), (8, 4, 8, 2, "NK"), (8, 8, 12, 2, "KN")):
        assert not rmsnorm_mma.fits(*odd)
    for odd in ((8, 16, 16, 1, "KN"), (16, 8, 8, 1, "NK")):
        assert not rmsnorm_mma.fits(*odd)
