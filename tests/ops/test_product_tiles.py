"""Tiles and layouts of matrix products: limits of launches and of GPUs, and register spills.

tests/engine/test_launch_lists.py compares the choice of tiles on seven GPUs with golden files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_lists import lists

from gpt2block.cuda.formats import GGUF
from gpt2block.cuda.kernels import FP8, Defines, Geometry, stored_as
from gpt2block.models.weights.gguf import TYPES, GgufMatrix
from gpt2block.ops.engines import (
    gemm_mma,
    gemm_wgmma,
    linear_mma_tiles,
    linear_tiles,
    linear_wgmma,
    rmsnorm_mma,
    rmsnorm_wgmma,
)
from gpt2block.ops.engines import linear_matvec as matvec
from gpt2block.ops.engines import linear_mma as mma
from gpt2block.ops.engines.rmsnorm_matvec import geometry as rmsnorm_matvec
from gpt2block.ops.gguf import range_defines
from gpt2block.ops.products import room
from tests.compiling import Job, assert_clean
from tests.gpus import A100, GPUS, H200, RTX, T4, TURING, Gpu
from tests.products import FP8_E4M3, GPT2, GROUPED, MATMUL, WEIGHTS

SMS, MAX_SHARED = H200["sms"], H200["max_shared"]
SHARED = 64 << 10  # bytes of shared memory that a block can have from sm_75 on
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


@pytest.mark.parametrize("sms", [132, 40])
@pytest.mark.parametrize(("K", "N"), [*SHAPES, (4096, 12_288), (11_008, 4096), (30_000, 4096)])
def test_a_tile_of_a_gpu_without_tensor_cores_has_room(K: int, N: int, sms: int) -> None:
    """Each weight of a matrix that exceeds the L2 cache is read once for up to 64 rows."""
    limits = {"sms": sms, "max_shared": SHARED - 1024}
    for M, weight in product((1, 8, 9, 16, 17, 64, 200), (1, 2, 4)):
        where = matvec.geometry(M, N, K, weight, tiled=True, **limits)
        if where is None:
            assert matvec.order(N, K, weight)[0] < matvec.TILE_WIDTH
            continue
        constants = constants_of(where)
        assert where.shared <= limits["max_shared"]
        assert where.block[0] <= 1024
        rows, columns = constants["DECODE_ROWS"], constants["DECODE_COLUMNS"]
        if "DECODE_SIDE" in constants:
            assert where.grid[0] * rows * columns >= M * N
            assert where.grid == (math.ceil(M / rows) * math.ceil(N / columns), 1)
        elif N * K * weight >= matvec.LARGE:
            assert where.grid[1] == 1


@pytest.mark.parametrize("gpu", [T4, *(gpu for _, gpu in GPUS)])
@pytest.mark.parametrize("clusters", [False, True])
@pytest.mark.parametrize("dtype", WEIGHTS)
def test_a_tile_of_decoding_has_room(gpu: Gpu, clusters: bool, dtype: str) -> None:
    limits = {"sms": gpu["sms"], "max_shared": gpu["max_shared"] - 1024}
    for M in (1, 17, 64, 200, 512, 4096):
        for N, K in ((2304, 768), (768, 3072), (50257, 768), (4800, 1600), (1600, 6400), (1, 16)):
            has: Any = {"clusters": clusters, "copies": gpu is not T4}
            tile = linear_mma_tiles.choose(M, N, K, dtype, **has, **limits)
            assert linear_mma_tiles.shared_bytes(tile, K, dtype) <= limits["max_shared"]
            assert tile.cluster == 1 or clusters
            found = linear_mma_tiles.geometry(M, N, K, dtype, tile)
            assert found.grid[0] % tile.cluster == 0
            assert found.grid[0] >= tile.cluster * math.ceil(M / tile.rows)


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


@pytest.mark.parametrize("name", TYPES)
def test_a_tile_of_decoding_with_blocks_has_room(name: str) -> None:
    w = GgufMatrix.random([(name, 64)], 256)
    sizes = product((1, 5, 9, 17, 33, 200), (64, 576, 4096, 12288), range(128, 16640, 2048))
    for (M, N, K), sms, summed in product(sizes, (132, 8), (False, True)):
        of = linear_wgmma.WgmmaProduct(M, (N,), K, GGUF, summed, True, w.tile, w.units, summed)
        tile = linear_wgmma.choose(of, sms, MAX_SHARED)
        assert of.block_bytes(tile) <= room(MAX_SHARED, tile.blocks)


@pytest.mark.parametrize("gpu", [A100, H200, RTX], ids=["A100", "H200", "RTX"])
def test_a_tile_of_gemm_or_after_rmsnorm_has_room(gpu: Gpu) -> None:
    for M in (1, 16, 17, 64, 128, 500, 5000):
        for N, K in GPT2:
            how = gemm_mma.geometry(M, N, K, **gpu)
            blocks = constants_of(how)["GEMM_BLOCKS"]
            assert_room(how, blocks, gpu)
            assert how.grid[0] <= blocks * gpu["sms"]
        for n, N, weight, layout in product((1, 2), (4096, 11008), (1, 2), ("KN", "NK")):
            options: dict[str, Any] = {"layout": layout, "residual": n == 2, **gpu}
            how = rmsnorm_mma.geometry(n, M, N, 4096, weight=weight, **options)
            chosen = constants_of(how)
            assert_room(how, chosen["MMA_BLOCKS"], gpu)
            assert chosen["MMA_STAGES"] >= 2
            per_warp = chosen["MMA_COLUMNS"] // chosen["MMA_WARPS_N"]
            assert per_warp % (16 if weight == 1 else 8) == 0
            assert how.grid[0] * chosen["MMA_ROWS"] * chosen["MMA_COLUMNS"] >= M * N * n


def assert_room(how: Geometry, blocks: int, gpu: Gpu) -> None:
    assert (how.shared + 1024) * blocks <= gpu["max_shared"] + 1024
    assert how.block[0] in (128, 256)


@pytest.mark.parametrize("tile", gemm_wgmma.TILES, ids=str)
def test_a_tile_of_gemm_by_wgmma_has_room(tile: gemm_wgmma.WgmmaGemmTile) -> None:
    for M, float_out in product((1, 130, 100_000), (False, True)):
        how, _ = gemm_wgmma.geometry(M, 768, 3072, other_out=float_out, sms=SMS, tile=tile)
        assert how.shared <= MAX_SHARED
        assert how.grid[0] % tile.cluster == 0
        assert how.grid[0] <= SMS or tile.split_k > 1


def test_sizes_that_do_not_lie_on_16_bytes_are_told() -> None:
    """The arguments of `fits` are N, K, stride of x, bytes per weight, and layout."""
    for fit in ((8, 8, 8, 2, "KN"), (16, 8, 16, 1, "KN"), (8, 16, 16, 1, "NK")):
        assert rmsnorm_mma.fits(*fit)
    for odd in ((4, 8, 8, 2, "KN"), (8, 4, 8, 2, "NK"), (8, 8, 12, 2, "KN")):
        assert not rmsnorm_mma.fits(*odd)
    for odd in ((8, 16, 16, 1, "KN"), (16, 8, 8, 1, "NK")):
        assert not rmsnorm_mma.fits(*odd)


# --- kernels compile without spills ---------------------------------------------------------------

# Epilogues: with GELU, with a residual, with a result of another dtype.
ENDS: list[dict[str, Any]] = [
    {"residual": True}, {"residual": True, "other_out": True}, {"gelu": True, "residual": True},
]  # fmt: skip
HI_LO_ENDS: list[dict[str, Any]] = [
    {"hi_lo": True, "gelu": True, "other_out": True}, {"hi_lo": True, "residual": True},
]  # fmt: skip
GATED: list[dict[str, Any]] = [{"gated": True, "gelu": True}]


def gemm_tiles() -> Iterator[Job]:
    """Yield each tile with one of the epilogues that need most registers."""
    g, old = gemm_mma, [TURING]
    for tiles, ends, gpus in (
        (g.TILES + g.SMALL_TILES, ENDS, GPUS),
        (g.GATED_TILES, GATED, GPUS),
        (g.HI_LO_TILES, HI_LO_ENDS, GPUS),
        (g.WITHOUT_COPIES, ENDS, old),
        (g.GATED_WITHOUT_COPIES, GATED, old),
        (g.HI_LO_WITHOUT_COPIES, HI_LO_ENDS, old),
    ):
        for tile, end, (arch, gpu) in zip(tiles, cycle(ends), cycle(gpus), strict=False):
            options: Any = {**end, "tile": tile}
            try:
                found = arch, g.geometry(500, 768, 768, **options, **gpu)
            except ValueError:  # no room for this tile, and none is left to choose from
                found = "sm_90", g.geometry(500, 768, 768, **options, **H200)
            file, dtype = (g.HI_LO_FILE, "float16") if "hi_lo" in end else (g.FILE, "bfloat16")
            yield file, found[0], (*stored_as(dtype), *found[1].defines)


def gemm_wgmma_job(file: str, stored: Defines, tile: Any, **options: Any) -> Job:
    how, _ = gemm_wgmma.geometry(500, 768, 768, sms=SMS, tile=tile, **options)
    assert how.shared <= MAX_SHARED
    return file, "sm_90a", (*stored, *how.defines)


def gemm_wgmma_tiles() -> Iterator[Job]:
    """Yield each tile with GELU, with a residual or without both, and some further epilogues.

    FP8 weights alternate between both formats, with scales or without.
    """
    g, fp8_tiles = gemm_wgmma, gemm_wgmma.OF_REGISTERS + gemm_wgmma.STREAMED
    one_end: list[dict[str, Any]] = [{}, {"gelu": True}, {"residual": True}]
    further = (("float16", {"other_out": True}), ("float16", {"gelu": True}))
    fp8 = [
        (
            ("float16", [*FP8][i % 2]),
            {**end, "fp8": True, "scaled": i % 3 < 2, "other_out": i % 4 > 1},
        )
        for i, end in product(range(12), one_end)
    ]
    for file, tiles, ends in (
        (g.FILE, g.TILES, [("bfloat16", end) for end in one_end]),
        (g.FILE, g.TILES[:4], [*further, *(("bfloat16", end) for end in ENDS[1:])]),
        (g.HI_LO_FILE, g.HI_LO_TILES, [("", end) for end in HI_LO_ENDS]),
        (g.FP8_FILE, 6 * fp8_tiles, fp8),
    ):
        each: Any
        for tile, (dtypes, each) in zip(tiles, cycle(ends), strict=False):
            names = (dtypes,) if isinstance(dtypes, str) else dtypes
            yield gemm_wgmma_job(file, stored_as(*names) if dtypes else (), tile, **each)


def gguf_wgmma_tiles() -> Iterator[Job]:
    """Yield tiles for prompts with alternating types and epilogues."""
    names = cycle(TYPES)
    tiles = gemm_wgmma.OF_REGISTERS + gemm_wgmma.STREAMED
    for other_out, tile in product((False, True), tiles):
        w = GgufMatrix.random([(next(names), 128), (next(names), 128)], 256)
        size = max(TYPES[name].tile for name, _ in w.ranges)
        ends = {"residual": other_out, "scaled": not other_out, "other_out": other_out}
        stored = *stored_as("float16", GGUF), *range_defines(w)
        yield gemm_wgmma_job(gemm_wgmma.GGUF_FILE, stored, tile, row_group=size, **ends)


def matmul_tiles() -> Iterator[Job]:
    """Yield tiles that alternate between widths of loads and between architectures."""
    for i, (tile, groups) in enumerate(GROUPED):
        how = MATMUL.registers_geometry(tile, groups, 1000, 1000, (1, 4)[(i + i // 2) % 2])
        assert how.block[0] <= 512
        assert how.shared <= SHARED
        yield MATMUL.REGISTERS, ("sm_75", "sm_80", "sm_90")[i % 3], how.defines


def rmsnorm_wgmma_tiles() -> Iterator[Job]:
    """Yield tiles that alternate between dtypes, and between RoPE and no RoPE."""
    turns = cycle((("float16", True), ("bfloat16", False)))
    for matrices, layout in product((1, 2), ("KN", "NK")):
        for tile in rmsnorm_wgmma.tiles(matrices, layout):
            dtype, rope = next(turns)
            options: Any = {"layout": layout, "turns": rope, "tile": tile}
            how, _ = rmsnorm_wgmma.geometry(matrices, 500, 4096, 4096, sms=SMS, **options)
            assert how.shared <= MAX_SHARED
            assert how.grid[0] % tile.cluster == 0
            yield rmsnorm_wgmma.FILE, "sm_90a", (*stored_as(dtype), *how.defines)


def rmsnorm_mma_tiles() -> Iterator[Job]:
    """Yield each tile for one of the GPUs with room for it.

    The tile for many rows, which has most registers, comes in each dtype. Tiles with many
    registers have a residual.
    """
    cases: list[tuple[str, str | None, dict[str, Any]]] = [
        ("float16", None, {"M": 500, "tile": tile, "residual": tile.rows >= 64})
        for tile in rmsnorm_mma.TILES
    ]
    narrow = [*product(("float16", "bfloat16"), FP8), ("bfloat16", None)]
    cases += [(*each, {"M": 4096}) for each in narrow]
    for i, (dtype, weights, options) in enumerate(cases):
        options |= {"weight": 1 if weights else 2, "layout": ("KN", "NK")[i % 2]}
        found = []
        for arch, gpu in (*GPUS, TURING):
            with suppress(ValueError):  # no room for this tile, and none is left to choose from
                found.append((arch, rmsnorm_mma.geometry(2, N=4096, K=4096, **options, **gpu)))
        arch, how = found[i % len(found)]
        yield rmsnorm_mma.FILE, arch, (*stored_as(dtype, weights), *how.defines)


def linear_tiles_jobs() -> Iterator[Job]:
    """Yield tiles of matmul/prompt/cores.cu, whose blocks need at most 128 registers per thread."""
    stored = {1: stored_as("float32", FP8_E4M3), 2: stored_as("bfloat16"), 4: ()}
    for i, tile in enumerate(linear_tiles.TILES):
        for arch, size in (("sm_75", 4), ("sm_90", 1 + i % 2)):
            how = linear_tiles.geometry(1000, 1000, size, 8, 4, size == 2, SMS, SHARED, tile)
            assert how.block[0] <= 256
            assert how.shared <= SHARED
            yield linear_tiles.FILE, arch, (*stored[size], *how.defines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("jobs", "max_registers"),
    [
        *((jobs, 255) for jobs in (gemm_tiles, gemm_wgmma_tiles, gguf_wgmma_tiles, matmul_tiles)),
        *((jobs, 255) for jobs in (rmsnorm_wgmma_tiles, rmsnorm_mma_tiles)),
        (linear_tiles_jobs, 128),
    ],
)
def test_no_tile_spills(jobs: Callable[[], Iterator[Job]], max_registers: int) -> None:
    assert_clean(list(jobs()), max_registers=max_registers)


@pytest.mark.slow
@pytest.mark.parametrize("card", ["7.5", "9.0", "12.0"])
def test_no_chosen_kernel_of_decoding_spills(card: str) -> None:
    """Compile some of the programs of the listed products and generations on a GPU."""
    arch = f"sm_{card.replace('.', '')}{'a' * (card == '9.0')}"
    wanted = re.compile(rf"{card} (products linear .*|generation (llama|gpt2)(-\d+)? .*)").fullmatch
    builds: dict[tuple[str, str, str], None] = {}
    for _, lines in lists(card, lambda name: wanted(name) is not None):
        for line in lines:
            if " matmul/decode/" in line:
                launch, constants = line.split(" | ")[2:4]
                assert "beyond its limit" not in launch
                kernel, file, _ = launch.split(maxsplit=2)
                builds[file, constants, kernel] = None
    some = list(builds)[::9]
    assert len(some) > 50
    jobs: list[Any] = [
        (file, arch, tuple(tuple(each.split("=")) for each in constants.split()))
        for file, constants, _ in some
    ]
    assert_clean(jobs, [kernel for *_, kernel in some])
