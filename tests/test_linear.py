"""The linear layer: every variant but hopper, alone and into the kv_cache, and its launches.

On the CPU the PTX instructions are imitated (emulator/mma_ptx.h), without clusters; what a cluster
adds up is compared bit by bit with a single block's sums on the GPU.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import InputError, cuda, ops, reference
from gpt2block.cuda import cupy, kernels
from gpt2block.cuda.arrays import compute_capability
from gpt2block.cuda.kernels import FP8, TWO_PART
from gpt2block.ops import _linear_matvec as matvec
from gpt2block.ops import _linear_mma as mma
from gpt2block.ops import _linear_mma_tiles as mma_tiles
from gpt2block.ops import _linear_tiles as tiles
from gpt2block.ops._products import fastest
from gpt2block.ops.layernorm import OPERATION as LAYERNORM
from gpt2block.ops.linear import OPERATION
from gpt2block.ops.registry import STEPS
from gpt2block.weights.matrix import WeightMatrix
from tests import devices, plain
from tests.compiling import Job, assert_clean
from tests.devices import (
    H200,
    assert_barriers_show,
    assert_same_bits,
    in_every_order,
    moved,
    on_gpu,
    on_one_order,
    one_order,
)
from tests.gpus import GPUS, large_memory
from tests.gpus import H200 as H200_LIMITS
from tests.linears import (
    DTYPES,
    EPS,
    LINEAR,
    WEIGHTS,
    Arrays,
    Case,
    arrays,
    assert_accurate,
    assert_linear,
    assert_qkv,
    every_weight,
    exact_linear,
    plain_linear,
    run_linear,
    upload,
    upload_matrix,
    wide,
)

Array = NDArray[Any]
device = devices.device
SHAPES = [  # (K, N) of the four GPT-2 models, of the bundled model, and odd ones
    *[(C, n * C) for C in (256, 768, 1024, 1280, 1600) for n in (1, 3, 4)],
    *[(4 * C, C) for C in (256, 768, 1024, 1280, 1600)],
    *[(C, 50257) for C in (768, 1600)],
    (1, 1),
    (1601, 333),
]
FP8_E5M2, FP8_E4M3 = FP8
SHARED = 64 << 10  # bytes that a block can have from sm_75 on
PLAIN = {"norm": False, "residual": True, "in_place": False, "gelu": True}  # of variants for tiles

# width, split, steps, columns, groups, loop, blocks, rows
ROUNDS = matvec.MatvecLayout(
    8, 2, 1, 3, 2, True, 1, 2
)  # two trips along K, several groups of columns
SMALL = matvec.MatvecLayout(4, 3, 1, 2, 2, False, 1, 1)
LONG = matvec.MatvecLayout(4, 1, 1, 2, 2, True, 1, 1)  # more of a row than registers hold
# columns, flight, loop, warps, blocks, rows
LOOP = mma.MmaLayout(16, 1, True, 2, 1, 2)
ODD_LOOP = mma.MmaLayout(5, 1, True, 1, 1, 8)
WIDE = mma.MmaLayout(19, 1, False, 1, 1, 4)
TALL = WIDE._replace(rows=16)
# They end within and after the matrices.
ODD, EVEN = mma_tiles.MmaLinearTile(48, 64, (1, 4), 2), mma_tiles.MmaLinearTile(32, 64, (2, 2), 3)


# --- the reference, and the launch ----------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("gelu", [False, True])
def test_against_a_loop(norm: bool, gelu: bool) -> None:
    given = arrays(2, 5, 3, "float8_e4m3fn")
    got = exact_linear(given, Case(2, 5, 3, "float8_e4m3fn", norm, residual=True, gelu=gelu))
    w = given.w.dequantized()
    bias, gamma, beta, residual = (wide(array) for array in given[2:])
    for m in range(2):
        x = [float(v) for v in given.x[m]]
        mean = sum(x) / 5
        std = math.sqrt(sum((v - mean) ** 2 for v in x) / 5 + EPS)
        if norm:
            x = [(x[k] - mean) / std * gamma[k] + beta[k] for k in range(5)]
        for n in range(3):
            y = sum(x[k] * float(w[k, n]) for k in range(5)) + bias[n]
            if gelu:
                y *= 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
            assert got[m, n] == pytest.approx(residual[m, n] + y, rel=1e-12)
    alone = reference.linear(wide(given.x), given.w)
    np.testing.assert_allclose(alone, wide(given.x) @ w)


@pytest.mark.parametrize("sms", [132, 40, 1])
@pytest.mark.parametrize(("K", "N"), SHAPES)
def test_every_column_and_row_has_a_block(K: int, N: int, sms: int) -> None:
    for M in (1, 2, 7, 8, 16, 17, 64):
        for weight in (1, 2, 4):
            how = matvec.layout(M, N, K, weight, sms)
            assert how[:3] == matvec.order(N, K, weight)
            assert K % how.width == 0
            assert how.width * weight <= 16
            where = matvec.geometry("linear_matvec", M, N, K, weight, norm=True, sms=sms)
            assert where is not None
            assert where.block[0] == 32 * how.split * how.groups <= 576
            assert where.grid[1] * how.rows >= M
            columns = how.groups * how.columns
            assert (where.grid[0] * columns >= N) or how.loop
            assert (where.grid[0] - 1) * columns < N
            assert 4 * how.width * weight * how.columns * how.steps <= 16 * 4 * 16
        for dtype in WEIGHTS:
            cut = mma.layout(M, N, K, dtype, sms)
            where = mma.geometry("linear_decode_mma", M, N, K, dtype, norm=True, sms=sms)
            assert where is not None
            assert where.block[0] == 32 * cut.warps <= 512
            assert cut.loop or cut.warps == mma.splits(K)[0] <= 8
            assert where.grid[1] * int(dict(where.defines)["LM_ROWS"]) >= M
            assert where.grid[0] * cut.columns >= N or cut.loop
            assert (where.grid[0] - 1) * cut.columns < N


def test_blocks_of_gpt2_on_an_h200() -> None:
    for N in (768, 2304, 3072):
        where = matvec.geometry("linear_matvec", 1, N, 768, 2, norm=True)
        assert where is not None
        assert where.grid == (128, 1)

    def grids(dtype: str) -> list[tuple[int, ...]]:
        shapes = ((2304, 768), (768, 768), (3072, 768), (768, 3072), (50257, 768))
        found = [mma.geometry("linear_decode_mma", 1, N, K, dtype) for N, K in shapes]
        return [where.grid for where in found if where]

    assert grids("bfloat16") == [(72, 1), (96, 1), (96, 1), (48, 1), (132, 1)]
    assert grids("float32") == [(144, 1), (48, 1), (192, 1), (96, 1), (132, 1)]


def test_splits_have_whole_units() -> None:
    found = {K: mma.splits(K) for K in (16, 768, 3072, 6400, 1152)}
    assert found == {16: (1, 1), 768: (6, 1), 3072: (8, 3), 6400: (8, 7), 1152: (5, 2)}


def test_rows_that_no_block_can_hold() -> None:
    for M, K, fits in ((1, 50_000, True), (9, 50_000, True), (1, 60_000, False)):
        assert (matvec.geometry("linear_matvec", M, 8, K, 2) is not None) == fits
    for M, K, fits in ((16, 16_384, True), (1, 60_000, False)):
        assert (mma.geometry("linear_decode_mma", M, 8, K, "bfloat16") is not None) == fits


@pytest.mark.parametrize("gpu", [gpu for _, gpu in GPUS])
@pytest.mark.parametrize("capability", [80, 90])
@every_weight
def test_a_tile_is_chosen_that_fits(gpu: Any, capability: int, dtype: str) -> None:
    limits = {"sms": gpu["sms"], "most_shared": gpu["most_shared"] - 1024}
    for M in (1, 17, 64, 200, 512, 4096):
        for N, K in ((2304, 768), (768, 3072), (50257, 768), (4800, 1600), (1600, 6400), (1, 16)):
            tile = mma_tiles.choose(M, N, K, dtype, capability=capability, **limits)
            assert mma_tiles.shared_bytes(tile, K, dtype) <= limits["most_shared"]
            assert tile.cluster == 1 or capability >= 90
            found = mma_tiles.geometry("linear_decode_tiles", M, N, K, dtype, tile)
            assert found.grid[0] % tile.cluster == 0
            assert found.grid[0] >= tile.cluster * math.ceil(M / tile.rows)


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
    tile = fastest(tiles.TILES, M, N, H200)
    assert (tile.rows, tile.columns) == sides


STORED = {name: kernels.stored_as(name) for name in DTYPES}


def test_tiles_of_decoding_compile_without_spills() -> None:
    """By turns in each dtype, with the constants that GPT-2's products get on GPUs with room."""
    stored = {name: kernels.stored_as("bfloat16", name) for name in FP8} | STORED
    stored[TWO_PART] = kernels.stored_as("float32", TWO_PART)
    jobs: list[Job] = []
    for arch, gpu in GPUS[:2]:
        most_shared, capability = gpu["most_shared"] - 1024, int(arch.removeprefix("sm_"))
        for M in (17, 64, 256, 512):
            for N, K in ((2304, 768), (768, 3072), (50257, 768)):
                for dtype, constants in stored.items():
                    limits = {"capability": capability, "sms": gpu["sms"]}
                    tile = mma_tiles.choose(M, N, K, dtype, most_shared=most_shared, **limits)
                    for ends in (False, True) if dtype != "float32" else (False,):  # as terms
                        found = mma_tiles.geometry("", M, N, K, dtype, tile, ends, ends)
                        jobs.append((mma_tiles.FILE, arch, (*constants, *found.defines)))
    assert_clean(list(dict.fromkeys(jobs))[::11])


def test_tiles_of_many_rows_compile_and_fit() -> None:
    stored = {1: kernels.stored_as("float32", FP8_E4M3), 2: STORED["bfloat16"], 4: ()}
    jobs: list[Job] = []
    for i, tile in enumerate(tiles.TILES):
        for arch, size in (("sm_75", 4), ("sm_90", 1 + i % 2)):
            where = tiles.geometry(1000, 1000, size, 8, 4, size == 2, H200, SHARED, tile)
            assert where.block[0] <= 256
            assert where.shared <= SHARED
            jobs.append((tiles.FILE, arch, (*stored[size], *where.defines)))
    assert_clean(jobs, most_registers=128)


# --- accuracy -------------------------------------------------------------------------------------


CASES = {
    "matvec": [
        Case(3, 48, 21, "float32", residual=True, gelu=True),
        Case(3, 784, 31, "bfloat16", cut=ROUNDS),
        Case(1, 33, 5, "float16", norm=False, gelu=True),
        Case(1, 528, 30, FP8_E4M3, residual=True),
        Case(1, 1100, 9, "float32", cut=LONG),
        Case(9, 264, 7, FP8_E5M2, norm=False, residual=True, cut=SMALL._replace(width=8, rows=4)),
    ],
    "mma": [
        Case(3, 48, 21, "float32", residual=True, gelu=True),
        Case(3, 784, 31, "bfloat16", cut=LOOP),
        Case(1, 528, 30, FP8_E4M3, residual=True),
        Case(9, 264, 21, "float32", cut=TALL),
        Case(3, 1104, 37, "float32", cut=ODD_LOOP),
        Case(2, 1168, 19, FP8_E5M2, norm=False, residual=True),
        Case(17, 1160, 20, "bfloat16", cut=TALL._replace(flight=2)),
        Case(1, 2064, 9, "float16", norm=False, gelu=True, cut=WIDE),
        Case(3, 48, 21, TWO_PART, residual=True, gelu=True),
        Case(9, 264, 21, TWO_PART, cut=TALL),
        Case(3, 1104, 37, TWO_PART, norm=False, cut=ODD_LOOP),
    ],
    "mma_tiles": [
        *(Case(25, 176, 37, d, **PLAIN, cut=ODD) for d in ("float32", "bfloat16", FP8_E4M3)),
        *(Case(25, 176, 37, TWO_PART, **PLAIN, cut=cut) for cut in (ODD, EVEN)),
        Case(33, 1168, 32, "float16", **PLAIN, cut=EVEN),
        Case(33, 176, 32, FP8_E5M2, **PLAIN, cut=EVEN),
    ],
    "tiles": [
        Case(33, 1, 70, "float16", norm=False),
        Case(37, 24, 41, "float16", norm=False, residual=True),
    ],
}
LARGE = [  # M, K, N, norm, gelu
    (1, 768, 768, False, False),
    (3, 768, 3072, True, True),
    (8, 3072, 768, False, False),
    (16, 3072, 768, False, False),
    (64, 768, 2304, True, False),
    (17, 1600, 300, True, False),
    (2, 6400, 1600, False, False),
    (1, 256, 50257, True, False),
    (2, 336, 77, True, True),
    (3, 16_384, 40, False, False),
]


@pytest.mark.parametrize(
    ("variant", "case"),
    [
        pytest.param(variant, case, id=f"{variant}-{'x'.join(map(str, case[:3]))}-{case.dtype}")
        for variant, listed in CASES.items()
        for case in listed
    ],
)
@in_every_order
def test_is_as_accurate_as_a_loop(variant: str, case: Case, where: str) -> None:
    assert_linear(where, variant, case, 2 if case.cut in (ROUNDS, LONG, LOOP, ODD_LOOP) else H200)


@settings(max_examples=4)
@given(M=st.integers(1, 6), N=st.integers(1, 40), blocks=st.integers(1, 3))
def test_any_rows_and_columns(M: int, N: int, blocks: int) -> None:
    """With so many blocks of columns, which loop."""
    assert_linear("forward", "matvec", Case(M, 784, N, "bfloat16", cut=ROUNDS), blocks)


@pytest.mark.gpu
@every_weight
@pytest.mark.parametrize("variant", ["matvec", "mma"])
@pytest.mark.parametrize(("M", "K", "N", "norm", "gelu"), LARGE)
def test_few_rows_on_the_gpu(
    variant: str, dtype: str, M: int, K: int, N: int, norm: bool, gelu: bool
) -> None:
    assert_linear("gpu", variant, Case(M, K, N, dtype, norm, True, gelu))
    if variant == "matvec":
        assert_linear("gpu", variant, Case(M, K // 2 - 1, N, dtype, norm, True, gelu))


@pytest.mark.parametrize("dtype", WEIGHTS)
@devices.on_every_device
@settings(max_examples=3)
@given(M=st.integers(1, 70), K=st.integers(0, 34), N=st.integers(1, 100))
@example(M=33, K=33, N=35)
@example(M=34, K=9, N=36)
def test_many_rows(where: str, dtype: str, M: int, K: int, N: int) -> None:
    """K odd, or a multiple of 8: everything between is a matter of test_every_length."""
    K = 2 * K + 1 if N % 4 else 8 * (K // 4 + 1)
    more = (M + N) % 3 != 0
    options: dict[str, Any] = {"residual": more, "bias": more, "in_place": False}
    assert_linear(where, "tiles", Case(M, K, N, dtype, False, gelu=N % 4 == 0, **options))


@on_one_order
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_length_of_the_first_slice(where: str, dtype: str) -> None:
    for K in (1, 2, 4, 8, 31, 32, 64, 76):
        assert_linear(where, "tiles", Case(5, K, 8, dtype, norm=False))


@on_one_order
def test_more_than_a_band_of_tiles(where: str) -> None:
    assert_linear(where, "tiles", Case(32 * 17 + 1, 3, 70, "float32", norm=False))


@on_one_order
@pytest.mark.parametrize("N", [40, 41])
def test_a_residual_that_is_the_output(where: str, N: int) -> None:
    given, case = arrays(37, 24, N, "float16"), Case(37, 24, N, "float16", False, True)
    apart = run_linear(where, "tiles", given, case._replace(in_place=False))
    assert_same_bits(run_linear(where, "tiles", given, case), apart)


def test_one_product_after_the_other() -> None:
    """The bits of the plain sum: the CPU multiplies and adds in two steps, as this does."""
    given, case = arrays(9, 75, 7, "float32"), Case(9, 75, 7, "float32", False, bias=False)
    assert_same_bits(run_linear("forward", "tiles", given, case), plain_linear(given, case))


@pytest.mark.gpu
@every_weight
@pytest.mark.parametrize(
    ("M", "K", "N"),
    [(17, 768, 768), (128, 3072, 768), (1000, 768, 2304), (1024, 767, 771), (8192, 64, 768)],
)
def test_many_rows_on_the_gpu(dtype: str, M: int, K: int, N: int) -> None:
    given = arrays(M, K, N, dtype)
    case = Case(M, K, N, dtype, False, True, gelu=N == 2304, in_place=False)
    assert_accurate(run_linear("gpu", "tiles", given, case), "tiles", given, case, cupy)


# --- bits -----------------------------------------------------------------------------------------


def assert_same_in_any_batch(
    where: str, variant: str, given: Arrays, counts: tuple[int, ...], cuts: tuple[Any, ...]
) -> None:
    """The first and the last rows of x together have their bits in all of x, in any layout."""
    case = Case(1, given.w.K, given.w.N, given.w.dtype, residual=True, gelu=True, cut=cuts[0])
    everything = run_linear(where, variant, given, case)
    for cut in cuts:
        for count in counts:
            for rows in (slice(count), slice(len(given.x) - count, None)):
                got = run_linear(where, variant, given.rows(rows), case._replace(cut=cut))
                assert_same_bits(got, everything[rows])


@pytest.mark.parametrize(
    ("variant", "dtype", "cuts"),
    [
        ("mma", "float32", (None, TALL, ODD_LOOP)),
        ("mma", TWO_PART, (None, TALL, ODD_LOOP)),
        ("mma", "bfloat16", (None, ODD_LOOP)),
        ("matvec", "float32", (SMALL, SMALL._replace(rows=4), SMALL._replace(rows=16, groups=1))),
    ],
)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    variant: str, dtype: str, cuts: tuple[Any, ...]
) -> None:
    assert_same_in_any_batch("forward", variant, arrays(17, 264, 14, dtype), (1, 9), cuts)


@pytest.mark.gpu
@every_weight
@pytest.mark.parametrize(("K", "N"), [(768, 2304), (3072, 768), (768, 20_000), (1616, 333)])
def test_same_bits_in_any_batch_on_the_gpu(dtype: str, K: int, N: int) -> None:
    counts = (1, 2, 7, 8, 9, 16, 17, 33, 64)
    assert_same_in_any_batch("gpu", "mma", arrays(200, K, N, dtype), counts, (None,))
    given = arrays(17, K - (K == 1616), N, dtype)
    assert_same_in_any_batch("gpu", "matvec", given, tuple(range(1, 17)), (None,))


@on_one_order
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tile_of_many_rows(where: str, dtype: str) -> None:
    """Whatever tile a row falls into, its products are added in the order of k."""
    given, case = arrays(131, 136, 104, dtype), Case(131, 136, 104, dtype, **PLAIN)
    whole = run_linear(where, "tiles", given, case._replace(cut=tiles.TILES[0]))
    assert_accurate(whole, "tiles", given, case)
    for tile in (*tiles.TILES[1:], None):
        assert_same_bits(run_linear(where, "tiles", given, case._replace(cut=tile)), whole)
    for rows in (slice(130, 131), slice(3, 5), slice(30, 47)):
        assert_same_bits(run_linear(where, "tiles", given.rows(rows), case), whole[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("gelu", [False, True])
@every_weight
def test_every_tile_of_many_rows_on_the_gpu(dtype: str, gelu: bool) -> None:
    for sizes in ((517, 1000, 516), (300, 77, 333)):
        given, case = arrays(*sizes, dtype), Case(*sizes, dtype, False, True, gelu)
        first = run_linear("gpu", "tiles", given, case)
        assert_accurate(first, "tiles", given, case)
        for tile in tiles.TILES:
            assert_same_bits(run_linear("gpu", "tiles", given, case._replace(cut=tile)), first)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_number_of_many_rows_gives_the_same_bits_on_the_gpu(dtype: str) -> None:
    given, case = arrays(2000, 768, 768, dtype), Case(2000, 768, 768, dtype, False, True)
    whole = run_linear("gpu", "tiles", given, case)
    for rows in (slice(0, 1), slice(7, 24), slice(100, 228), slice(500, 1524), slice(1999, None)):
        assert_same_bits(run_linear("gpu", "tiles", given.rows(rows), case), whole[rows])


@pytest.mark.gpu
def test_one_product_after_the_other_on_the_gpu() -> None:
    """The bits of the kernels that say so of themselves."""
    given, case = arrays(300, 77, 333, "float32"), Case(300, 77, 333, "float32", norm=False)
    a, w, bias = (cupy.asarray(v) for v in (given.x, given.w.dequantized(), given.bias))
    expected = ops.matmul_bias(a, w, bias, variant="tiled").get()
    assert_same_bits(run_linear("gpu", "tiles", given, case), expected)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        *(("shuffled", dtype) for dtype in ("float32", "bfloat16", FP8_E4M3, TWO_PART)),
        *(pytest.param("gpu", dtype, marks=pytest.mark.gpu) for dtype in (*WEIGHTS, TWO_PART)),
    ],
    indirect=["device"],
)
def test_tiles_of_decoding_have_the_bits_of_the_kernel_for_few_rows(
    device: Any, dtype: str
) -> None:
    """Also of one row: M only chooses the kernel."""
    shapes = [(20, 1168, 37)]
    if not cuda.replaced():
        shapes += [(64, 768, 2304), (200, 3072, 768), (65, 768, 50257)]
    for M, K, N in shapes:
        given = arrays(M, K, N, dtype)
        x, w, bias = cupy.asarray(given.x), upload_matrix(given.w), cupy.asarray(given.bias)
        results = {}
        for variant in ("mma", "mma_tiles"):
            out = cupy.full((M, N), np.nan, "float32")
            OPERATION.bind((x, w, bias), out, gelu=True, variant=variant).run()
            results[variant] = out.get()
        assert_same_bits(results["mma_tiles"], results["mma"])
        alone = OPERATION.bind((x[-1:], w, bias), gelu=True, decoding=True).run().get()
        assert_same_bits(alone, results["mma"][-1:])


@on_one_order
@pytest.mark.parametrize("variant", ["mma", "mma_tiles"])
def test_the_bound_of_x_gives_the_scale_of_its_terms(where: str, variant: str) -> None:
    """Powers of two are exact; without a bound, x may be as large as float16 permits."""
    given = arrays(5, 176, 21, TWO_PART)

    def product(x: Array, bound: float | None = None) -> Array:
        there = cupy.asarray(x), upload_matrix(given.w)
        result: Array = OPERATION.bind(there, variant=variant, x_bound=bound).run().get()
        return result

    with devices.running_on(where):
        known = product(given.x, 8.0)
        for power in (-100, -20, 40, 120):
            factor = np.float32(2.0**power)
            assert_same_bits(product(given.x * factor, 8.0 * 2.0**power), known * factor)
        case = Case(5, 176, 21, TWO_PART, norm=False, bias=False)
        for bound in (None, 6.0, 2.0**20):
            assert_accurate(product(given.x, bound), variant, given, case)
        assert np.isfinite(product(given.x * np.float32(2.0**12))).all()


@one_order
def test_what_two_part_weights_do_not_permit(device: Any) -> None:
    given = upload(arrays(3, 60, 24, TWO_PART))
    plain_weights = upload(arrays(3, 60, 24, "float32"))
    with pytest.raises(InputError, match="mma: K 60: expected a multiple of 8 for two_part"):
        OPERATION.bind((given.x, given.w), variant="mma")
    for variant in ("matvec", "tiles"):
        with pytest.raises(InputError, match="takes no TwoPartMatrix: use variant mma"):
            OPERATION.bind((given.x, given.w), variant=variant)
    with pytest.raises(InputError, match="x_bound: expected a TwoPartMatrix"):
        OPERATION.bind((plain_weights.x, plain_weights.w), x_bound=1.0)
    with pytest.raises(InputError, match="bound: expected a magnitude"):
        OPERATION.bind((given.x, given.w), x_bound=-1.0)


@pytest.mark.parametrize("dtype", [*WEIGHTS, TWO_PART])
@on_gpu
def test_every_tile_of_decoding_has_the_same_bits(device: Any, dtype: str) -> None:
    for M, K, N in ((200, 768, 2304), (65, 3072, 768), (64, 768, 5001), (18, 1600, 96)):
        given, case = arrays(M, K, N, dtype), Case(M, K, N, dtype, **PLAIN)
        first = run_linear("gpu", "mma_tiles", given, case._replace(cut=ODD))
        assert_accurate(first, "mma_tiles", given, case, cupy)
        for tile in mma_tiles.TILES:
            for cluster in (1, 2, 3, 6, 8) if compute_capability() >= 90 else (1,):
                pairs = math.prod(tile.warps) % 4 == 0  # the threads copy whole groups of rows
                if dtype == TWO_PART and not pairs:
                    continue
                chunks = 2 if cluster > 1 and dtype in DTYPES and pairs else 1
                one = case._replace(cut=tile._replace(cluster=cluster, chunks=chunks))
                if mma_tiles.shared_bytes(one.cut, K, dtype) <= H200_LIMITS["most_shared"] - 1024:
                    assert_same_bits(run_linear("gpu", "mma_tiles", given, one), first)
        for rows in (slice(0, 1), slice(1, 18)):
            cut = case._replace(cut=mma_tiles.TILES[0])
            assert_same_bits(run_linear("gpu", "mma_tiles", given.rows(rows), cut), first[rows])


@pytest.mark.parametrize("C", [104, 768])
@one_order
def test_layernorm_apart_has_the_bits_of_the_fused_one(device: Any, C: int) -> None:
    given = upload(arrays(18, C, 24, "float16"))
    vectors = given.gamma, given.beta
    norm = LAYERNORM.bind((given.x, *vectors), eps=EPS, variant="decode").run()
    apart = OPERATION.bind((norm, given.w), variant="mma_tiles").run().get()
    fused = OPERATION.bind((given.x, given.w, None, *vectors), eps=EPS, variant="mma").run().get()
    assert_same_bits(apart, fused)


@on_one_order
@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        *(("mma", dtype) for dtype in ("float32", "bfloat16", FP8_E4M3, TWO_PART)),
        *(("mma_tiles", dtype) for dtype in (*WEIGHTS, TWO_PART)),
        *(("tiles", dtype) for dtype in ("float32", "float16")),
    ],
)
def test_an_output_depends_on_its_row_and_column_alone(
    where: str, variant: str, dtype: str
) -> None:
    """Also at the edges, where rows and columns that do not exist are read as others or as zero."""
    M, K, N = 37, 32, 44
    given, case = arrays(M, K, N, dtype), Case(M, K, N, dtype, **PLAIN)
    case = case._replace(cut=ODD if variant == "mma_tiles" else None)
    clean = run_linear(where, variant, given, case)
    given.x[36, 31] = given.x[5] = np.nan
    given.x[4, 0] = np.inf
    given.bias[9] = given.residual[2, 3] = np.nan
    finite = np.ones((M, N), bool)
    finite[[36, 5, 4]] = finite[:, 9] = finite[2, 3] = False
    if dtype not in FP8:
        given.w.data[43, 31] = given.w.data[7, 0] = np.inf
        finite[:, [43, 7]] = False
    got = run_linear(where, variant, given, case)
    np.testing.assert_array_equal(np.isfinite(got), finite)
    np.testing.assert_array_equal(got[finite], clean[finite])


# --- into the kv_cache ----------------------------------------------------------------------------


@in_every_order
@pytest.mark.parametrize(
    ("variant", "case", "n_ctx"),
    [
        ("matvec", Case(3, 48, 21, "float32"), 4),
        ("matvec", Case(1, 528, 30, FP8_E4M3), 3),
        ("matvec", Case(2, 784, 27, "bfloat16", cut=ROUNDS), 3),
        ("mma", Case(3, 48, 21, "float32"), 4),
        ("mma", Case(1, 528, 30, FP8_E4M3), 3),
        ("mma", Case(10, 784, 27, "bfloat16"), 3),
        ("mma", Case(3, 48, 21, TWO_PART), 4),
        *(
            ("mma_tiles", Case(7, 48, 144, dtype, norm=False, cut=ODD), 5)
            for dtype in (*WEIGHTS, TWO_PART)
        ),
    ],
    ids=str,
)
def test_qkv(variant: str, case: Case, n_ctx: int, where: str) -> None:
    position = np.array([2, -1, n_ctx, 0, 1, 2, 0, 1, 2, 0], np.int32)[: case.M]
    assert_qkv(where, variant, case, n_ctx, position)


@pytest.mark.gpu
@every_weight
@pytest.mark.parametrize("M", [1, 3, 10])
def test_qkv_on_the_gpu(dtype: str, M: int) -> None:
    position = np.array([4, -1, 5, 0, 1, 2, 3, 2, 1, 0], np.int32)[:M]
    for variant in ("matvec", "mma"):
        assert_qkv("gpu", variant, Case(M, 768, 3 * 768, dtype), 5, position)
    assert_qkv("gpu", "mma_tiles", Case(M, 48, 144, dtype, norm=False, cut=ODD), 5, position)


# --- the function, and what decides between the variants ------------------------------------------


@on_one_order
def test_what_decides_between_the_variants(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(M: int, K: int, dtype: str, **options: Any) -> str:
        with devices.running_on(where):
            x, w, *_ = upload(arrays(M, K, 24, dtype))
            return OPERATION.bind((x, w), **options).launches[0].name

    for M in (1, 16):
        assert kernel(M, 64, "float16") == "linear_decode_mma"
        assert kernel(M, 60, "float16") == "linear_matvec"
        assert kernel(M, 60, "float32") == "linear_decode_mma"
    assert kernel(17, 64, "float16") == "linear_tiles"
    assert kernel(17, 64, "float16", decoding=True) == "linear_decode_mma"
    monkeypatch.setattr(LINEAR, "FEW_PRODUCTS", 17 * 24 * 64 - 1)
    assert kernel(17, 64, "float16", decoding=True) == "linear_decode_tiles"
    assert kernel(17, 60, "float16", decoding=True) == "linear_matvec"
    with pytest.raises(InputError, match="mma: K 60: expected a multiple of 8 for bfloat16"):
        kernel(1, 60, "bfloat16", variant="mma")
    monkeypatch.setattr(LINEAR, "compute_capability", lambda: 75)
    assert kernel(1, 64, "float16") == "linear_matvec"
    with pytest.raises(InputError, match=r"mma: needs a GPU of compute capability 8\.0 or newer"):
        kernel(1, 64, "float16", variant="mma")


def test_the_registry_names_the_kernels() -> None:
    assert OPERATION.variant("matvec").kernels == ("linear_matvec",)
    assert OPERATION.variant("mma").kernels == ("linear_decode_mma",)
    auxiliary = [kernel for v in OPERATION.auxiliary for kernel in v.kernels]
    assert auxiliary == [
        "qkv_matvec",
        "qkv_decode_mma",
        "qkv_decode_tiles",
        "qkv_decode_hopper",
        "rope_decode_hopper",
        "linear_decode_sums",
        "rope_decode_sums",
        "ffn_decode",
    ]


@pytest.mark.gpu
def test_the_function() -> None:
    given = arrays(3, 64, 48, "bfloat16")
    there = upload(given)
    got = ops.linear(*there[:3], there.gamma, there.beta, there.residual, gelu=True)
    case = Case(3, 64, 48, "bfloat16", residual=True, gelu=True)
    assert_accurate(got.get(), "mma", given, case)
    deep = ops.linear(there.x.reshape(3, 1, 64), there.w, variant="matvec")
    assert deep.shape == (3, 1, 48)
    np.testing.assert_allclose(deep.get()[:, 0], given.x @ given.w.dequantized(), rtol=1e-3)
    with pytest.raises(InputError, match="variant tiles: takes no gamma and beta"):
        ops.linear(there.x, there.w, None, there.gamma, there.beta, variant="tiles")


def bind_tiles(given: Arrays, out: Any = None, gelu: bool = False) -> Any:
    """The variant tiles, without LayerNorm."""
    inputs = (*given[:3], None, None, given.residual)
    return OPERATION.bind(inputs, out, gelu=gelu, variant="tiles").run()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", FP8_E5M2])
def test_arrays_that_lie_anywhere(dtype: str) -> None:
    host = arrays(42, 48, 52, dtype)
    given, w = upload(host), upload_matrix(host.w)
    batch = given._replace(x=given.x.reshape(2, 21, 48), residual=given.residual.reshape(2, 21, 52))
    got = bind_tiles(batch)
    assert got.shape == (2, 21, 52)
    expected = got.get().reshape(42, 52)
    case = Case(42, 48, 52, dtype, norm=False, residual=True)
    assert_accurate(expected, "tiles", host, case)
    alone = ops.linear(*given[:3], None, None, given.residual)
    np.testing.assert_array_equal(alone.get(), expected)
    away = {
        "x": moved(host.x, 1),
        "w": WeightMatrix(moved(host.w.data, 1), dtype, w.scale, "NK"),
        "bias": moved(host.bias, 1),
        "residual": moved(host.residual, 1),
    }
    for names in (tuple(away), ("w",), ("residual",)):
        some = given._replace(**{name: away[name] for name in names})
        for out in (None, moved(host.residual, 1)):
            np.testing.assert_array_equal(bind_tiles(some, out).get(), expected)


@pytest.mark.gpu
def test_more_outputs_than_an_int_counts() -> None:
    M, N = 70_001, 32_003
    given = arrays(1, 2, N, "float32")._replace(x=plain.normal(0, M, 2))
    case = Case(M, 2, N, "float32", norm=False)
    with large_memory(4 * M * N):
        there = upload(given)
        got = OPERATION.bind((there.x, there.w, there.bias), variant="tiles").run()
        for rows in (slice(0, 3), slice(M // 2, M // 2 + 3), slice(M - 3, M)):
            some = given._replace(x=given.x[rows])
            assert_accurate(got[rows].get(), "tiles", some, case)
        del got


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_missing_barrier_shows(dtype: str) -> None:
    given, case = arrays(20, 270, 20, dtype), Case(20, 270, 20, dtype, norm=False)
    assert_barriers_show(tiles.FILE, lambda order: [run_linear(order, "tiles", given, case)])


# --- wrong input ----------------------------------------------------------------------------------


@one_order
@pytest.mark.parametrize("variant", ["matvec", "tiles"])
def test_wrong_input_is_refused(device: Any, variant: str) -> None:
    """What the contract alone does not say, and its messages."""
    x, data = cupy.zeros((3, 8), "float32"), cupy.zeros((4, 8), "float32")
    w = WeightMatrix(data, "float32", None, "NK")
    both, shifted = cupy.zeros(24, "float32"), cupy.zeros(33, "float32")[1:].reshape(4, 8)
    parts = {"residual": both[4:16].reshape(3, 4), "out": both[:12].reshape(3, 4)}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"w": data}, "w: expected a WeightMatrix, got ndarray: use WeightMatrix"),
        ({"w": WeightMatrix(data.get(), "float32", None, "NK")}, "w: expected a CuPy array, got"),
        (
            {"w": WeightMatrix(data.T.copy(), "float32")},
            r"w: expected layout 'NK', \(N, K\) in memory, got 'KN'",
        ),
        ({"gamma": x[0]}, "gamma and beta: expected both, or neither"),
        ({"out": x}, r"out: expected shape \(3, 4\), got \(3, 8\)"),
        (parts, "out: overlaps residual in part"),
        ({"variant": "wgmma"}, "linear: unknown variant 'wgmma': expected one of matvec"),
    ]
    if variant == "matvec":
        unaligned = WeightMatrix(shifted, "float32", None, "NK")
        cases.append(({"w": unaligned}, "w: expected data aligned to 16 bytes: pass a copy"))
    for change, message in cases:
        given = {"x": x, "w": w, "bias": None, "gamma": None, "beta": None, "residual": None}
        given |= {name: value for name, value in change.items() if name in given}
        named = change.get("variant", variant)
        with pytest.raises(InputError, match=message):
            OPERATION.bind_on_device(tuple(given.values()), change.get("out"), variant=named)


@one_order
def test_wrong_caches_are_refused(device: Any) -> None:
    def matrix(N: int, dtype: str = "float32") -> WeightMatrix:
        return WeightMatrix.quantize(cupy.full((N, 64), 1, "float32"), dtype, "NK")

    x, at = cupy.zeros((2, 64), "float32"), cupy.zeros(2, "int32")
    cache = cupy.zeros((2, 5, 16), "float32")
    apart, wide_at = cache.copy(), at.astype("int64")
    for w, v, position, message in (
        (matrix(47), apart, at, "w: expected 48 outputs, 3C as k has C channels, got 47"),
        (matrix(51), apart, at, "w: expected 48 outputs, 3C as k has C channels, got 51"),
        (matrix(48, FP8_E5M2), apart, at, "k: expected float16, got float32"),
        (matrix(48), cache, at, "k: overlaps v: expected another array"),
        (matrix(48), apart, wide_at, "position: expected int32, got int64"),
    ):
        with pytest.raises(InputError, match=message):
            STEPS["linear_qkv"].bind((x, w, None, None, None, cache, v, at, position))
