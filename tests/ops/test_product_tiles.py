"""Tiles and layouts of matrix products: the choice, the limits of GPUs, and register spills."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import cycle, islice, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2block.cuda.formats import GGUF
from gpt2block.cuda.kernels import FP8, HI_LO, Geometry, stored_as
from gpt2block.models.weights.gguf import TYPES, GgufMatrix
from gpt2block.ops.engines import gemm_mma as _gemm_mma
from gpt2block.ops.engines import gemm_wgmma as _gemm_wgmma
from gpt2block.ops.engines import linear_gguf as _linear_gguf
from gpt2block.ops.engines import linear_matvec as matvec
from gpt2block.ops.engines import linear_mma as mma
from gpt2block.ops.engines import linear_mma_tiles as _linear_mma_tiles
from gpt2block.ops.engines import linear_tiles as _linear_tiles
from gpt2block.ops.engines import linear_wgmma as _linear_wgmma
from gpt2block.ops.engines import rmsnorm_mma as _rmsnorm_mma
from gpt2block.ops.engines import rmsnorm_wgmma as _rmsnorm_wgmma
from gpt2block.ops.engines.gemm_wgmma import WgmmaGemmTile, choose_tile
from gpt2block.ops.engines.rmsnorm_matvec import geometry as rmsnorm_matvec
from gpt2block.ops.gguf import range_defines
from gpt2block.ops.products import fastest, room
from tests.compiling import Job, assert_clean
from tests.gpus import A100, GPUS, H200, RTX, T4, TURING, Gpu
from tests.products import DTYPES, FP8_E4M3, GPT2, GROUPED, MATMUL, WEIGHTS

SMS, MAX_SHARED = H200["sms"], H200["max_shared"]
SHARED = 64 << 10  # bytes of shared memory that a block can have from sm_75 on
QKV, OUT, FC, PROJ = GPT2
SHAPES = [  # (K, N) of the four GPT-2 models and of the bundled model, and odd sizes
    *[(C, n * C) for C in (256, 768, 1024, 1280, 1600) for n in (1, 3, 4)],
    *[(4 * C, C) for C in (256, 768, 1024, 1280, 1600)],
    *[(C, 50257) for C in (768, 1600)],
    (1, 1),
    (1601, 333),
]
# Epilogues: with GELU, with a residual, with a result of another dtype.
ENDS = [
    {"gelu": False, "residual": True, "other_out": False},
    {"gelu": False, "residual": True, "other_out": True},
    {"gelu": True, "residual": True, "other_out": False},
]
SPLIT_ENDS = [
    {"hi_lo": True, "gelu": True, "residual": False, "other_out": True},
    {"hi_lo": True, "gelu": False, "residual": True, "other_out": False},
]


# --- the tile that is chosen on an H200 -----------------------------------------------------------


def of_linear(M: int, N: int) -> tuple[int, ...]:
    tile = fastest(_linear_tiles.TILES, M, N, SMS)
    return tile.rows, tile.columns


def of_matmul(M: int, N: int) -> tuple[int, ...]:
    tile, groups = MATMUL.choose_tile(M, N, SMS)
    how = MATMUL.registers_geometry(tile, groups, M, N, 4)
    assert groups == tile.groups * (2 if how.grid[0] <= SMS else 1)
    return tile.rows, tile.columns


def of_gemm(M: int, N: int, K: int) -> tuple[int, ...]:
    """Return rows and columns of the tile, and the grid."""
    how = _gemm_mma.geometry(M, N, K, **H200)
    chosen = dict(how.defines)
    return int(chosen["GEMM_M"]), int(chosen["GEMM_N"]), *how.grid


def of_gemm_wgmma(M: int, N: int, K: int) -> tuple[int, ...]:
    """Return rows and columns of the tile, and splits of K if K may be split.

    The chosen tile was the fastest on an H200, or within 2 % of it.
    """
    assert choose_tile(_gemm_wgmma.TILES, M, N, K, False, SMS).split_k == 1
    chosen = choose_tile(_gemm_wgmma.TILES, M, N, K, True, SMS)
    return chosen.rows, chosen.columns, chosen.split_k


def of_hi_lo(M: int, N: int, K: int) -> tuple[int, ...]:
    chosen = choose_tile(_gemm_wgmma.HI_LO_TILES, M, N, K, False, SMS)
    return chosen.rows, chosen.columns


def of_llama(matrices: int, M: int, N: int) -> tuple[int, ...]:
    """Return rows and columns of the tile, and the grid, for K 4096."""
    how = _rmsnorm_mma.geometry(matrices, M, N, 4096, weight=2, layout="KN", **H200)
    chosen = dict(how.defines)
    return int(chosen["MMA_ROWS"]), int(chosen["MMA_COLUMNS"]), *how.grid


def of_llama_hopper(matrices: int, M: int, N: int) -> tuple[int, ...]:
    """Return rows and columns of the tile, and splits of K, for K 4096."""
    layout = ("KN", "NK")[matrices - 1]
    _, chosen = _rmsnorm_wgmma.geometry(matrices, M, N, 4096, layout=layout, sms=SMS)
    return chosen.rows, chosen.columns, chosen.split_k


CHOSEN: dict[Callable[..., tuple[int, ...]], dict[tuple[int, ...], tuple[int, ...]]] = {
    of_linear: {
        (8192, 2304): (128, 128), (8192, 768): (128, 128), (128, 50257): (128, 128),
        (1024, 3072): (64, 96), (1024, 768): (64, 96), (128, 3072): (32, 96),
        (128, 768): (32, 32), (1, 1): (32, 32),
    },
    of_matmul: {
        (8192, 2304): (128, 128), (8192, 768): (128, 128), (1024, 3072): (64, 128),
        (1024, 2304): (32, 96), (1024, 768): (32, 96), (128, 2304): (32, 96),
        (128, 768): (32, 32), (1, 1): (32, 32),
    },
    of_gemm: {
        (128, 768, 768): (32, 32, 96), (128, 3072, 768): (64, 48, 128),
        (1024, 2304, 768): (128, 144, 128), (1024, 3072, 768): (128, 192, 128),
        (1024, 768, 3072): (64, 96, 128), (8192, 768, 3072): (128, 192, 132),
        (65536, 3072, 768): (128, 256, 132),
    },
    of_gemm_wgmma: {
        (128, *QKV): (64, 64, 1), (128, *OUT): (64, 64, 2),
        (128, *FC): (64, 64, 1), (128, *PROJ): (128, 64, 4),
        (1024, *QKV): (128, 144, 1), (1024, *OUT): (64, 96, 1),
        (1024, *FC): (128, 192, 1), (1024, *PROJ): (128, 96, 2),
        **{(M, *sizes): (128, 192, 1) for M in (8192, 65536) for sizes in GPT2},
    },
    of_hi_lo: {
        **{(128, *sizes): (64, 48) for sizes in GPT2},
        (1024, *QKV): (64, 96), (1024, *OUT): (64, 96),
        (1024, *FC): (64, 128), (1024, *PROJ): (64, 96),
        **{(M, *sizes): (64, 128) for M in (8192, 65536) for sizes in GPT2},
    },
    of_llama: {
        (1, 16, 4096): (16, 32, 128),  # a block on nearly every SM of 132
        (1, 500, 4096): (128, 128, 128),
        (2, 16, 11008): (16, 192, 115),
        (2, 500, 11008): (128, 224, 396),  # three blocks on every SM
        (1, 4096, 4096): (128, 256, 512),
    },
    of_llama_hopper: {
        (1, 16, 4096): (64, 64, 2), (1, 500, 4096): (128, 128, 1), (1, 2000, 4096): (256, 128, 1),
        (2, 16, 11008): (64, 192, 1), (2, 500, 11008): (128, 224, 1),
    },
}  # fmt: skip


@pytest.mark.parametrize("tile_of", CHOSEN)
def test_the_tile_fits_the_gpu(tile_of: Callable[..., tuple[int, ...]]) -> None:
    """The chosen tiles are those that were the fastest when timed on an H200."""
    assert {sizes: tile_of(*sizes) for sizes in CHOSEN[tile_of]} == CHOSEN[tile_of]


def test_blocks_of_decoding_on_an_h200() -> None:
    for N in (768, 2304, 3072):
        where = matvec.geometry(1, N, 768, 2, norm=True)
        assert where is not None
        assert where.grid == (128, 1)

    def grids(dtype: str) -> list[tuple[int, ...]]:
        shapes = (*GPT2, (50257, 768))
        found = [mma.geometry(1, N, K, dtype) for N, K in shapes]
        return [where.grid for where in found if where]

    assert grids("bfloat16") == [(72, 1), (96, 1), (96, 1), (48, 1), (132, 1)]
    assert grids("float32") == [(144, 1), (48, 1), (192, 1), (96, 1), (132, 1)]


def test_splits_have_whole_units() -> None:
    found = {K: mma.splits(K) for K in (16, 768, 3072, 6400, 1152)}
    assert found == {16: (1, 1), 768: (6, 1), 3072: (8, 3), 6400: (8, 7), 1152: (5, 2)}
    for K in (8, 64, 72, 128, 192):  # no split of a short K is empty
        assert choose_tile(_gemm_wgmma.TILES, 128, 768, K, True, SMS).split_k <= -(-K // 64)


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
            assert where.grid[1] * int(dict(where.defines)["DECODE_ROWS"]) >= M
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
    constants = {name: int(value) for name, value in where.defines}
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
        constants = {name: int(value) for name, value in where.defines}
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
            tile = _linear_mma_tiles.choose(M, N, K, dtype, **has, **limits)
            assert _linear_mma_tiles.shared_bytes(tile, K, dtype) <= limits["max_shared"]
            assert tile.cluster == 1 or clusters
            found = _linear_mma_tiles.geometry(M, N, K, dtype, tile)
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
    of = _linear_wgmma.WgmmaProduct(M, (N,), K, dtype, gated, rounded)
    tile = _linear_wgmma.choose(of, sms, MAX_SHARED)
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
    sizes = product((1, 5, 9, 17, 33, 200), (64, 576, 4096, 12288), range(128, 16640, 512))
    for (M, N, K), sms, summed in product(sizes, (132, 8), (False, True)):
        of = _linear_wgmma.WgmmaProduct(M, (N,), K, GGUF, summed, True, w.tile, w.units, summed)
        tile = _linear_wgmma.choose(of, sms, MAX_SHARED)
        assert of.block_bytes(tile) <= room(MAX_SHARED, tile.blocks)


@pytest.mark.parametrize("gpu", [A100, H200, RTX], ids=["A100", "H200", "RTX"])
def test_a_tile_of_gemm_or_after_rmsnorm_has_room(gpu: Gpu) -> None:
    for M in (1, 16, 17, 64, 128, 500, 5000):
        for N, K in GPT2:
            how = _gemm_mma.geometry(M, N, K, **gpu)
            blocks = int(dict(how.defines)["GEMM_BLOCKS"])
            assert_room(how, blocks, gpu)
            assert how.grid[0] <= blocks * gpu["sms"]
        for n, N, weight, layout in product((1, 2), (4096, 11008), (1, 2), ("KN", "NK")):
            options: dict[str, Any] = {"layout": layout, "residual": n == 2, **gpu}
            how = _rmsnorm_mma.geometry(n, M, N, 4096, weight=weight, **options)
            chosen = {name: int(value) for name, value in how.defines}
            assert_room(how, chosen["MMA_BLOCKS"], gpu)
            assert chosen["MMA_STAGES"] >= 2
            per_warp = chosen["MMA_COLUMNS"] // chosen["MMA_WARPS_N"]
            assert per_warp % (16 if weight == 1 else 8) == 0
            assert how.grid[0] * chosen["MMA_ROWS"] * chosen["MMA_COLUMNS"] >= M * N * n


def assert_room(how: Geometry, blocks: int, gpu: Gpu) -> None:
    assert (how.shared + 1024) * blocks <= gpu["max_shared"] + 1024
    assert how.block[0] in (128, 256)


@pytest.mark.parametrize("tile", _gemm_wgmma.TILES, ids=str)
def test_a_tile_of_gemm_by_wgmma_has_room(tile: WgmmaGemmTile) -> None:
    for M, float_out in product((1, 130, 100_000), (False, True)):
        how, _ = _gemm_wgmma.geometry(M, 768, 3072, other_out=float_out, sms=SMS, tile=tile)
        assert how.shared <= MAX_SHARED
        assert how.grid[0] % tile.cluster == 0
        assert how.grid[0] <= SMS or tile.split_k > 1


def test_sizes_that_do_not_lie_on_16_bytes_are_told() -> None:
    """The arguments of `fits` are N, K, stride of x, bytes per weight, and layout."""
    for fit in ((8, 8, 8, 2, "KN"), (16, 8, 16, 1, "KN"), (8, 16, 16, 1, "NK")):
        assert _rmsnorm_mma.fits(*fit)
    for odd in ((4, 8, 8, 2, "KN"), (8, 4, 8, 2, "NK"), (8, 8, 12, 2, "KN")):
        assert not _rmsnorm_mma.fits(*odd)
    for odd in ((8, 16, 16, 1, "KN"), (16, 8, 8, 1, "NK")):
        assert not _rmsnorm_mma.fits(*odd)


# --- kernels compile without spills ---------------------------------------------------------------


def decoding_tiles() -> Iterator[Job]:
    """Yield tiles of GPT-2's decoding products on large GPUs, in alternating dtypes."""
    stored = {name: stored_as("bfloat16", name) for name in FP8}
    stored |= {name: stored_as(name) for name in DTYPES}
    stored[HI_LO] = stored_as("float32", HI_LO)
    jobs: list[Job] = []
    for arch, gpu in (*GPUS[:2], TURING):
        has = {"clusters": arch == "sm_90", "copies": arch != "sm_75"}
        limits = {**has, "sms": gpu["sms"], "max_shared": gpu["max_shared"] - 1024}
        for M, (N, K) in product((17, 64, 256, 512), (QKV, PROJ, (50257, 768))):
            for dtype, constants in stored.items():
                tile = _linear_mma_tiles.choose(M, N, K, dtype, **limits)
                # ends: whether x and the result are terms
                for ends in (False, True) if dtype != "float32" else (False,):
                    found = _linear_mma_tiles.geometry(M, N, K, dtype, tile, ends, ends)
                    jobs.append((_linear_mma_tiles.FILE, arch, (*constants, *found.defines)))
    yield from list(dict.fromkeys(jobs))[::11]


def matvec_tiles() -> Iterator[Job]:
    """Yield tiles of matmul/decode/cores.cu for steps of 64 rows on a T4."""
    head = 50257, 768
    for (N, K), dtype in (*product((*GPT2, head), ("bfloat16", "float16")), (head, "float32")):
        size = 4 if dtype == "float32" else 2
        how = matvec.geometry(64, N, K, size, tiled=True, sms=40, max_shared=SHARED - 1024)
        assert how is not None
        yield matvec.FILE, "sm_75", (*stored_as(dtype), *how.defines)


def gemm_tiles() -> Iterator[Job]:
    """Yield each tile with one of the epilogues that need most registers."""
    plain = *_gemm_mma.TILES, *_gemm_mma.SMALL_TILES
    tiles = [(tile, ENDS[i % 3]) for i, tile in enumerate(plain)]
    tiles += [(tile, {"gated": True, "gelu": True}) for tile in _gemm_mma.GATED_TILES]
    tiles += [(tile, SPLIT_ENDS[i % 2]) for i, tile in enumerate(_gemm_mma.HI_LO_TILES)]
    gpus = list(islice(cycle(GPUS), len(tiles)))
    tiles += [(tile, ENDS[i % 3]) for i, tile in enumerate(_gemm_mma.WITHOUT_COPIES)]
    tiles += [(tile, {"gated": True, "gelu": True}) for tile in _gemm_mma.GATED_WITHOUT_COPIES]
    tiles += [(tile, SPLIT_ENDS[i % 2]) for i, tile in enumerate(_gemm_mma.HI_LO_WITHOUT_COPIES)]
    gpus += [TURING] * (len(tiles) - len(gpus))
    for (tile, ends), (arch, gpu) in zip(tiles, gpus, strict=True):
        options: Any = {**ends, "tile": tile}
        try:
            found = arch, _gemm_mma.geometry(500, 768, 768, **options, **gpu)
        except ValueError:  # no room for this tile, and none is left to choose from
            found = "sm_90", _gemm_mma.geometry(500, 768, 768, **options, **H200)
        split = "hi_lo" in ends
        file = _gemm_mma.HI_LO_FILE if split else _gemm_mma.FILE
        stored = stored_as("float16" if split else "bfloat16")
        yield file, found[0], (*stored, *found[1].defines)


def gemm_wgmma_tiles() -> Iterator[Job]:
    """Yield each tile with GELU, with a residual or without both, and some further epilogues."""
    of_a_block = [{}, {"gelu": True}, {"residual": True}]
    tiles = [(tile, "bfloat16", of_a_block[i % 3]) for i, tile in enumerate(_gemm_wgmma.TILES)]
    others = [("float16", {"other_out": True}), ("float16", {"gelu": True})]
    others += [("bfloat16", ends) for ends in ENDS[1:]]
    tiles += [(tile, *each) for tile, each in zip(_gemm_wgmma.TILES, others, strict=False)]
    tiles += [(t, "", SPLIT_ENDS[i % 2]) for i, t in enumerate(_gemm_wgmma.HI_LO_TILES)]
    for tile, dtype, ends in tiles:
        options: Any = {**ends, "tile": tile}
        how, _ = _gemm_wgmma.geometry(500, 768, 768, sms=SMS, **options)
        assert how.shared <= MAX_SHARED
        file = _gemm_wgmma.FILE if dtype else _gemm_wgmma.HI_LO_FILE
        yield file, "sm_90a", (*(stored_as(dtype) if dtype else ()), *how.defines)


def gemm_fp8_tiles() -> Iterator[Job]:
    """Yield tiles that alternate between both FP8 formats, with scales or without."""
    two_ends = ((False, False), (True, False), (False, True))
    for other_out in (False, True):
        tiles = _gemm_wgmma.OF_REGISTERS + _gemm_wgmma.STREAMED
        turns = zip(tiles, cycle(FP8), cycle((True, True, False)))
        for (tile, format, scaled), (gelu, residual) in product(turns, two_ends):
            ends = {"gelu": gelu, "residual": residual, "scaled": scaled, "other_out": other_out}
            options: Any = {**ends, "fp8": True, "sms": SMS, "tile": tile}
            how, _ = _gemm_wgmma.geometry(500, 768, 768, **options)
            assert how.shared <= MAX_SHARED
            yield _gemm_wgmma.FP8_FILE, "sm_90a", (*stored_as("float16", format), *how.defines)


@pytest.mark.parametrize(
    ("M", "N", "K", "divided"),
    [
        (512, 12288, 4096, True),  # 192 tiles of 128 x 256 for 132 multiprocessors
        (512, 11008, 4096, True),
        (512, 4096, 11008, False),  # fewer tiles than multiprocessors
        (1, 12288, 4096, False),
    ],
)
def test_products_of_prompts_that_are_divided(M: int, N: int, K: int, divided: bool) -> None:
    """Tiles are divided if memory for partial sums is given and whole tiles leave SMs idle."""
    for streams in (False, True):
        options: Any = {"fp8": True, "streams": streams, "sms": SMS}
        how, tile = _gemm_wgmma.geometry(M, N, K, **options)
        assert tile.stream == (streams and divided)
        assert how.shared <= MAX_SHARED


def gguf_tiles() -> Iterator[Job]:
    """Yield tiles for decoding 1, 8 and 9 rows, on GPUs with and without clusters."""
    for i, (M, (arch, gpu)) in enumerate(product((1, 8, 9), (*GPUS[::2], TURING))):
        name = ("Q4_K", "Q6_K")[(i + i // 2) % 2]
        w = GgufMatrix.random([(name, 64)], 256)
        options: Any = {"terms": 2, "clusters": arch == "sm_120", **gpu}
        how = _linear_gguf.geometry(M, 4096, ((name, 4096),), **options)
        assert how is not None
        assert how.shared <= gpu["max_shared"]
        stored = stored_as("float16", GGUF)
        yield _linear_gguf.FILE, arch, (*stored, *how.defines, *range_defines(w))


@pytest.mark.parametrize(
    ("M", "N", "K", "rows", "together"),
    [
        (8, 4096, 4096, 8, 1),
        (16, 576, 576, 8, 1),  # two blocks of rows: SMs would be idle otherwise
        (32, 576, 1536, 8, 1),
        (64, 1536, 576, 64, 0),
        (64, 4096, 4096, 64, 0),
    ],
)
def test_rows_of_blocks_of_gguf(M: int, N: int, K: int, rows: int, together: int) -> None:
    gpu = {"sms": SMS, "max_shared": MAX_SHARED, "clusters": True}
    how = _linear_gguf.geometry(M, K, (("Q4_1", N),), terms=1, **gpu)
    assert how is not None
    found = dict(how.defines)
    assert (found["DECODE_ROWS"], how.grid[1]) == (rows, M // rows)
    assert found["GGUF_TOGETHER"] == together


def gguf_wgmma_tiles() -> Iterator[Job]:
    """Yield tiles for prompts with alternating types and epilogues, and for decoding."""
    names = cycle(TYPES)
    tiles = _gemm_wgmma.OF_REGISTERS + _gemm_wgmma.STREAMED
    for other_out, tile in product((False, True), tiles):
        w = GgufMatrix.random([(next(names), 128), (next(names), 128)], 256)
        ends = {"residual": other_out, "scaled": not other_out, "other_out": other_out}
        size = max(TYPES[name].tile for name, _ in w.ranges)
        how, _ = _gemm_wgmma.geometry(500, 768, 768, row_group=size, sms=SMS, tile=tile, **ends)
        assert how.shared <= MAX_SHARED
        defines = (*stored_as("float16", GGUF), *how.defines, *range_defines(w))
        yield _gemm_wgmma.GGUF_FILE, "sm_90a", defines
    kinds = cycle(((0, 0, 0), (1, 1, 1), (0, 1, 0), (1, 1, 1), (1, 0, 0)))
    for rows, (N, K) in product((1, 8, 16, 32, 64), ((4096, 4096), (12288, 4096), (384, 1024))):
        gated, stores, summed = map(bool, next(kinds))
        w = GgufMatrix.random([(next(names), 64)], 256)
        of = _linear_wgmma.WgmmaProduct(rows, (N,), K, GGUF, gated, True, w.tile, w.units, summed)
        chosen = _linear_wgmma.choose(of, SMS, MAX_SHARED)
        how = _linear_wgmma.geometry(of, chosen, gated=gated, to_operand=stores)
        assert how.shared + of.static_bytes(chosen) <= MAX_SHARED
        defines = (*stored_as("float16", GGUF), *how.defines, *range_defines(w))
        yield _linear_wgmma.GGUF_FILE, "sm_90a", defines


def matmul_tiles() -> Iterator[Job]:
    """Yield tiles that alternate between widths of loads and between architectures."""
    for i, (tile, groups) in enumerate(GROUPED):
        how = MATMUL.registers_geometry(tile, groups, 1000, 1000, (1, 4)[(i + i // 2) % 2])
        assert how.block[0] <= 512
        assert how.shared <= SHARED
        yield MATMUL.REGISTERS, ("sm_75", "sm_80", "sm_90")[i % 3], how.defines


def rmsnorm_wgmma_tiles() -> Iterator[Job]:
    """Yield tiles that alternate between dtypes, and between RoPE and no RoPE."""
    tiles = [
        (matrices, layout, tile)
        for matrices, layout in product((1, 2), ("KN", "NK"))
        for tile in _rmsnorm_wgmma.tiles(matrices, layout)
    ]
    for i, (matrices, layout, tile) in enumerate(tiles):
        options: dict[str, Any] = {"layout": layout, "turns": i % 2 == 0, "tile": tile}
        how, _ = _rmsnorm_wgmma.geometry(matrices, 500, 4096, 4096, sms=SMS, **options)
        assert how.shared <= MAX_SHARED
        assert how.grid[0] % tile.cluster == 0
        defines = (*stored_as(("float16", "bfloat16")[i % 2]), *how.defines)
        yield _rmsnorm_wgmma.FILE, "sm_90a", defines


def rmsnorm_mma_tiles() -> Iterator[Job]:
    """Yield each tile for one of the GPUs with room for it.

    The tile for many rows, which has most registers, comes in each dtype. Tiles with many
    registers have a residual.
    """
    cases: list[tuple[int, str, str | None, dict[str, Any]]] = [
        (i, "float16", None, {"M": 500, "tile": tile, "residual": tile.rows >= 64})
        for i, tile in enumerate(_rmsnorm_mma.TILES)
    ]
    narrow = [*product(("float16", "bfloat16"), FP8), ("bfloat16", None)]
    cases += [(i, *each, {"M": 4096}) for i, each in enumerate(narrow)]
    for i, dtype, weights, options in cases:
        options |= {"weight": 1 if weights else 2, "layout": ("KN", "NK")[i % 2]}
        found = []
        for arch, gpu in (*GPUS, TURING):
            try:
                how = _rmsnorm_mma.geometry(2, N=4096, K=4096, **options, **gpu)
            except ValueError:  # no room for this tile, and none is left to choose from
                continue
            found.append((arch, how))
        arch, how = found[i % len(found)]
        yield _rmsnorm_mma.FILE, arch, (*stored_as(dtype, weights), *how.defines)


@pytest.mark.slow
@pytest.mark.parametrize(
    "jobs",
    [
        *(decoding_tiles, matvec_tiles, gemm_tiles, gemm_wgmma_tiles, gemm_fp8_tiles),
        *(gguf_tiles, gguf_wgmma_tiles),
        *(matmul_tiles, rmsnorm_wgmma_tiles, rmsnorm_mma_tiles),
    ],
)
def test_no_tile_spills(jobs: Callable[[], Iterator[Job]]) -> None:
    assert_clean(list(jobs()))


def test_tiles_of_many_rows_compile_and_fit() -> None:
    stored = {1: stored_as("float32", FP8_E4M3), 2: stored_as("bfloat16"), 4: ()}
    jobs: list[Job] = []
    for i, tile in enumerate(_linear_tiles.TILES):
        for arch, size in (("sm_75", 4), ("sm_90", 1 + i % 2)):
            how = _linear_tiles.geometry(1000, 1000, size, 8, 4, size == 2, SMS, SHARED, tile)
            assert how.block[0] <= 256
            assert how.shared <= SHARED
            jobs.append((_linear_tiles.FILE, arch, (*stored[size], *how.defines)))
    assert_clean(jobs, max_registers=128)


@pytest.mark.slow
def test_the_chosen_kernels_of_wgmma_compile_without_spills() -> None:
    jobs: list[Job] = []
    of_q_k_v = (("EPILOGUE", "EPILOGUE_APPEND"),)
    large = ((4096, 11008, False, 0), (11008, 4096, True, 0), (6144, 4096, False, 128))
    small = ((1536, 576, True, 0), (480, 576, False, 64))
    for (i, M), (N, K, gated, head) in product(enumerate((1, 16, 64)), (*large, *small)):
        stored = (("bfloat16",), ("float16", "float8_e4m3fn"))[(i + gated) % 2]
        of = _linear_wgmma.WgmmaProduct(M, (N,), K, stored[-1], gated or head > 0)
        tile = _linear_wgmma.choose(of, SMS, MAX_SHARED)
        assert tile.teams == (2 if M == 64 and K == 576 else 1)
        options: dict[str, Any] = {"gated": gated, "to_operand": gated, "head": head}
        made = _linear_wgmma.geometry(of, tile, **options)
        ends = (("EPILOGUE", "EPILOGUE_APPEND_ROPE"),) if head else ()
        jobs.append((_linear_wgmma.FILE, "sm_90a", (*stored_as(*stored), *made.defines, *ends)))
    for M, (N, K) in product((64, 256, 512), (QKV, FC, PROJ)):
        of = _linear_wgmma.WgmmaProduct(M, (N,), K, "bfloat16")
        tile = _linear_wgmma.choose(of, SMS, MAX_SHARED)
        made = _linear_wgmma.geometry(of, tile, to_operand=N == 3072)
        rounded = (("OPERAND_TERMS", 1),)
        for constants in (stored_as("bfloat16"), (*stored_as("float16"), *rounded)):
            ends = of_q_k_v if N == 2304 else ()
            jobs.append((_linear_wgmma.FILE, "sm_90a", (*constants, *made.defines, *ends)))
    assert_clean(jobs)
