"""RMSNorm with the product behind it: every variant, on the CPU and on a GPU.

On the CPU the PTX instructions are imitated (emulator/mma_ptx.h): layouts in shared memory
and registers, the pipeline's waits and every address are tried there; `mma.sync` itself on the GPU.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import InputError, ops, reference
from gpt2block.cuda import cupy, kernels
from gpt2block.cuda.kernels import FP8
from gpt2block.emulator import ORDERS
from gpt2block.ops import _rmsnorm_hopper, _rmsnorm_mma
from gpt2block.ops._products import HOPPER_CAPABILITY, MMA_CAPABILITY
from gpt2block.ops._rmsnorm_matvec import geometry as matvec
from gpt2block.ops.rmsnorm_matmul import RMSNORM_FFN, RMSNORM_MATMUL
from gpt2block.weights.matrix import WeightMatrix
from tests import devices, plain
from tests.compiling import assert_clean
from tests.devices import assert_same_bits, in_every_order, one_order, running_on
from tests.gpus import A100, GPUS, H200, RTX, Gpu, cupy_with

Array = NDArray[Any]
device = devices.device
DTYPES: dict[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
}
FP8_E5M2, FP8_E4M3 = FP8
EPS = 1e-6
SHARED = 200_000  # bytes that a block may have
START, THETA = 3, 500.0
Tile = _rmsnorm_mma.RmsnormTile
# Two warps share K and a row's squares; four warps share rows and columns, each has an odd number
# of fragments side by side, and threads are left over when weights are copied.
TINY = Tile(16, 32, (1, 1, 2), 32, 3, 1)
ODD = Tile(32, 48, (2, 2, 1), 64, 2, 1)
both_layouts = pytest.mark.parametrize("layout", ["KN", "NK"])


class Case(NamedTuple):
    """Sizes, dtype of the activations, dtype of the weights, and RoPE for a product."""

    M: int
    K: int
    N: int
    dtype: str = "float32"
    weights: str | None = None
    head_dim: int | None = None
    half_split: bool = False
    apart: int = 0  # elements between the rows of x, which are NaN
    residual: bool = False  # of a feed-forward
    sequences: int = 1  # that share the rows


class Arrays(NamedTuple):
    x: Array  # (sequences, T, K), a view when the rows lie apart
    residual: Array
    gamma: Array
    first: WeightMatrix
    second: WeightMatrix


def arrays(case: Case, layout: str) -> Arrays:
    rng = np.random.default_rng(case.M + case.K)
    dtype = DTYPES[case.dtype]

    def normal(*shape: int) -> Array:
        values: Array = (rng.standard_normal(shape) + 0.5).astype(np.float32)
        return values

    def matrix() -> WeightMatrix:
        shape = (case.K, case.N) if layout == "KN" else (case.N, case.K)
        values = normal(*shape) / np.float32(math.sqrt(case.K))
        return WeightMatrix.quantize(values, case.weights or case.dtype, layout)

    shape = case.sequences, case.M // case.sequences, case.K
    base = np.full((*shape[:2], case.K + case.apart), np.nan, dtype)
    x = base[..., : case.K]
    x[...] = normal(*shape)
    residual = normal(*shape).astype(dtype)
    return Arrays(x, residual, normal(case.K).astype(dtype), matrix(), matrix())


def on_device(given: Arrays) -> Arrays:
    """The same arrays on the GPU, rows as far apart."""
    base = given.x.base if given.x.base is not None else given.x
    x = cupy.asarray(base)[..., : given.x.shape[-1]]
    first, second = (w.mapped(cupy.asarray) for w in (given.first, given.second))
    return Arrays(x, cupy.asarray(given.residual), cupy.asarray(given.gamma), first, second)


def wide(array: Array) -> Array:
    return array.astype(np.float64)


def plain_norm(h: Array, gamma: Array) -> Array:
    """In float32 one sum after the other, then rounded to what is stored."""
    w = h.astype(np.float32)
    mean = plain.running_sum(w * w) / np.float32(h.shape[-1])
    normed: Array = (w / np.sqrt(mean + np.float32(EPS)) * gamma.astype(np.float32)).astype(h.dtype)
    return normed.astype(np.float32)


def assert_product(got: Array, given: Arrays, case: Case, xp: Any = np) -> None:
    x, gamma = given.x, given.gamma
    options = (case.head_dim, START, THETA, case.half_split)
    truth = reference.rmsnorm_matmul(wide(x), wide(gamma), given.first, EPS, *options)
    sums = plain_product(plain_norm(x, gamma), given.first, xp)
    if case.head_dim:
        heads = sums.reshape(*x.shape[:-1], -1, case.head_dim)
        sums = plain.rope(heads, START, THETA, case.half_split).reshape(sums.shape)
    assert_stored(got, truth, sums, x.dtype)


def assert_ffn(got: Array, given: Arrays, case: Case, xp: Any = np) -> None:
    h = summed(given) if case.residual else given.x
    truth = reference.rmsnorm_ffn(wide(h), wide(given.gamma), given.first, given.second, EPS)
    assert isinstance(truth, np.ndarray)
    normed = plain_norm(h, given.gamma)
    a, b = (plain_product(normed, w, xp) for w in (given.first, given.second))
    assert_stored(got, truth, a / (np.float32(1) + np.exp(-a)) * b, h.dtype)


def plain_product(a: Array, w: WeightMatrix, xp: Any) -> Array:
    """By sequential sums; xp: CuPy for large sizes."""
    found = plain.product(xp.asarray(a), xp.asarray(w.dequantized()), xp)
    product: Array = found if xp is np else found.get()
    return product


def assert_stored(got: Array, truth: Array, expected: Array, dtype: Any) -> None:
    """expected: in float32, before it is rounded to what is stored."""
    assert got.dtype == dtype
    stored = expected.astype(dtype).astype(np.float32)
    plain.assert_as_accurate(got.astype(np.float32), truth, stored)


def summed(given: Arrays) -> Array:
    """x + residual as it is stored."""
    both = given.x.astype(np.float32) + given.residual.astype(np.float32)
    return both.astype(given.x.dtype)


def check(
    where: str,
    matrices: int,
    case: Case,
    layout: str,
    variant: str | None = "matvec",
    tile: Any = None,
) -> None:
    """A product with one matrix, or the feed-forward with two, from poisoned memory.

    On a GPU it runs twice, with the same bits. tile: of variant hopper, or of the others.
    """
    given = arrays(case, layout)
    results: list[list[Array]] = []
    inputs: tuple[Any, ...]
    with running_on(where), pytest.MonkeyPatch.context() as patch:
        if tile and variant == "hopper":
            patch.setattr(_rmsnorm_hopper, "choose_tile", lambda *_: tile)
            _rmsnorm_hopper.geometry.cache_clear()
        elif tile:
            patch.setattr(_rmsnorm_mma, "geometry", partial(_rmsnorm_mma.geometry, tile=tile))
        x, residual, gamma, *weights = on_device(given)
        options: dict[str, Any] = {"eps": EPS, "variant": variant}
        if matrices == 1:
            operation, inputs = RMSNORM_MATMUL, (x, gamma, weights[0])
            options |= {"head_dim": case.head_dim, "half_split": case.half_split}
            options |= {"start": START, "theta": THETA}
        else:
            operation = RMSNORM_FFN
            inputs = (x, gamma, *weights, residual if case.residual else None)
        for _ in range(1 + (where == "gpu")):
            out = cupy.full((*x.shape[:-1], case.N), np.nan, x.dtype)
            bound = operation.bind(inputs, out, **options)
            bound.run()
            results.append([out.get(), *(array.get() for array in bound.extra)])
    _rmsnorm_hopper.geometry.cache_clear()
    for one, other in zip(results[0], results[-1], strict=True):
        assert_same_bits(one, other)
    right = assert_product if matrices == 1 else assert_ffn
    right(results[0][0], given, case, cupy if where == "gpu" else np)
    if case.residual and matrices == 2:
        np.testing.assert_array_equal(results[0][1], summed(given))


# --- the NumPy meaning ----------------------------------------------------------------------------


def test_the_product_against_a_loop() -> None:
    given = arrays(Case(3, 6, 8), "KN")
    x, gamma = wide(given.x[0]), wide(given.gamma)
    w = given.first.dequantized()
    for half_split in (False, True):
        got = reference.rmsnorm_matmul(x, gamma, given.first, EPS, 4, 5, 100.0, half_split)
        for t in range(3):
            rms = math.sqrt(sum(v * v for v in x[t]) / 6 + EPS)
            y = [sum(x[t, k] / rms * gamma[k] * float(w[k, n]) for k in range(6)) for n in range(8)]
            for head in (0, 4):
                for k in range(2):
                    i, j = (
                        (head + k, head + k + 2) if half_split else (head + 2 * k, head + 2 * k + 1)
                    )
                    turn = complex(y[i], y[j]) * np.exp(1j * (5 + t) / 100.0 ** (2 * k / 4))
                    assert got[t, i] == pytest.approx(turn.real, rel=1e-12)
                    assert got[t, j] == pytest.approx(turn.imag, rel=1e-12)


def test_the_feed_forward_against_a_loop() -> None:
    given = arrays(Case(2, 5, 3), "NK")
    x, residual, gamma = wide(given.x[0]), wide(given.residual[0]), wide(given.gamma)
    got, h = reference.rmsnorm_ffn(x, gamma, given.first, given.second, EPS, residual)
    w1, w3 = given.first.dequantized(), given.second.dequantized()
    np.testing.assert_array_equal(h, x + residual)
    for m in range(2):
        rms = math.sqrt(sum(v * v for v in h[m]) / 5 + EPS)
        n = [h[m, k] / rms * gamma[k] for k in range(5)]
        for c in range(3):
            a = sum(n[k] * float(w1[k, c]) for k in range(5))
            b = sum(n[k] * float(w3[k, c]) for k in range(5))
            assert got[m, c] == pytest.approx(a / (1 + math.exp(-a)) * b, rel=1e-12)


# --- the launch -----------------------------------------------------------------------------------


@given(
    M=st.integers(1, 600),
    N=st.integers(1, 700),
    K=st.integers(1, 9000),
    weight=st.sampled_from([1, 2, 4]),
    layout=st.sampled_from(["KN", "NK"]),
    two=st.booleans(),
)
def test_every_column_and_row_has_a_block(
    M: int, N: int, K: int, weight: int, layout: str, two: bool
) -> None:
    pairing: Any = "two matrices" if two else "neighbours"
    where = matvec(M, N, K, 1, weight, layout, pairing, 0, 16, SHARED)
    assert where is not None
    constants = {name: int(value) for name, value in where.defines}
    width, lanes, strips = (constants[f"MV_{name}"] for name in ("WIDTH", "LANES", "STRIPS"))
    strip = lanes * width
    pairs = where.block[0] // 32 if layout == "NK" else strip if strips == 2 else strip // 2
    assert where.grid[0] * pairs * (1 if two else 2) >= N
    assert where.grid[1] * constants["MV_ROWS"] >= M
    assert (K if layout == "NK" else N) % width == 0
    assert where.shared <= SHARED
    assert lanes <= 32


def test_rows_that_no_block_can_hold() -> None:
    assert matvec(4, 8, 49_000, 1, 2, "NK", "neighbours", 0, 16, SHARED) is not None
    assert matvec(1, 8, 50_000, 1, 2, "NK", "neighbours", 0, 16, SHARED) is None


HOPPER_TILES = [
    (matrices, layout, tile)
    for matrices in (1, 2)
    for layout in ("KN", "NK")
    for tile in _rmsnorm_hopper.tiles(matrices, layout)
]


@pytest.mark.parametrize(
    ("matrices", "N", "layout", "M", "tile"),
    [
        (1, 4096, "KN", 16, (64, 64, 2)),
        (1, 4096, "KN", 500, (128, 128, 1)),
        (1, 4096, "KN", 2000, (256, 128, 1)),
        (2, 11008, "NK", 16, (64, 192, 1)),
        (2, 11008, "NK", 500, (128, 224, 1)),
    ],
)
def test_the_hopper_tile_for_llama(
    matrices: int, N: int, layout: str, M: int, tile: tuple[int, int, int]
) -> None:
    """Those that were the fastest of the ones timed on an H200."""
    _, chosen = _rmsnorm_hopper.geometry(matrices, M, N, 4096, layout=layout, sms=132)
    assert (chosen.rows, chosen.columns, chosen.split_k) == tile


@pytest.mark.parametrize(
    ("M", "N", "matrices", "rows", "columns", "blocks"),
    [
        (16, 4096, 1, 16, 32, 128),  # a block on nearly every SM of 132
        (500, 4096, 1, 128, 128, 128),
        (16, 11008, 2, 16, 192, 115),
        (500, 11008, 2, 128, 224, 396),  # 3 on every SM
        (4096, 4096, 1, 128, 256, 512),
    ],
)
def test_the_tile_fits_the_gpu(
    M: int, N: int, matrices: int, rows: int, columns: int, blocks: int
) -> None:
    how = _rmsnorm_mma.geometry(matrices, M, N, 4096, weight=2, layout="KN", **H200)
    chosen = dict(how.defines)
    assert (chosen["MMA_ROWS"], chosen["MMA_COLUMNS"]) == (rows, columns)
    assert how.grid == (blocks,)


@pytest.mark.parametrize("gpu", [A100, H200, RTX], ids=["A100", "H200", "RTX"])
@pytest.mark.parametrize("weight", [1, 2])
@both_layouts
def test_a_tile_has_room_on_every_gpu(gpu: Gpu, weight: int, layout: str) -> None:
    for M in (1, 16, 17, 64, 128, 500, 5000):
        for matrices, N in ((1, 4096), (2, 11008)):
            options: dict[str, Any] = {"layout": layout, "residual": matrices == 2}
            how = _rmsnorm_mma.geometry(matrices, M, N, 4096, weight=weight, **options, **gpu)
            chosen = {name: int(value) for name, value in how.defines}
            blocks, threads = chosen["MMA_BLOCKS"], how.block[0]
            assert (how.shared + 1024) * blocks <= gpu["most_shared"] + 1024
            assert chosen["MMA_STAGES"] >= 2
            assert threads in (128, 256)
            per_warp = chosen["MMA_COLUMNS"] // chosen["MMA_WARPS_N"]
            assert per_warp % (16 if weight == 1 else 8) == 0
            assert how.grid[0] * chosen["MMA_ROWS"] * chosen["MMA_COLUMNS"] >= M * N * matrices


@pytest.mark.parametrize(
    ("N", "K", "stride", "weight", "layout", "fit"),
    [
        (8, 8, 8, 2, "KN", True),
        (16, 8, 16, 1, "KN", True),
        (8, 16, 16, 1, "NK", True),
        (4, 8, 8, 2, "KN", False),
        (8, 4, 8, 2, "NK", False),
        (8, 8, 12, 2, "KN", False),
        (8, 16, 16, 1, "KN", False),
        (16, 8, 8, 1, "NK", False),
    ],
)
def test_sizes_that_do_not_lie_on_16_bytes_are_told(
    N: int, K: int, stride: int, weight: int, layout: str, fit: bool
) -> None:
    assert _rmsnorm_mma.fits(N, K, stride, weight, layout) == fit


def test_no_tile_of_hopper_spills() -> None:
    """In one dtype, and with RoPE or without it, by turns."""
    jobs = []
    for i, (matrices, layout, tile) in enumerate(HOPPER_TILES):
        options: dict[str, Any] = {"layout": layout, "turns": i % 2 == 0, "tile": tile}
        how, _ = _rmsnorm_hopper.geometry(matrices, 500, 4096, 4096, sms=H200["sms"], **options)
        assert how.shared <= H200["most_shared"]
        assert how.grid[0] % tile.cluster == 0
        defines = (*kernels.stored_as(("float16", "bfloat16")[i % 2]), *how.defines)
        jobs.append((_rmsnorm_hopper.FILE, "sm_90a", defines))
    assert_clean(jobs)


def test_no_tile_of_mma_spills() -> None:
    """Each by turns on a GPU with room; the one for many rows, with most registers, in each dtype.

    With a residual where a tile has many registers.
    """
    jobs = []

    def add(i: int, M: int, dtype: str, weights: str | None, **options: Any) -> None:
        options |= {"weight": 1 if weights else 2, "layout": ("KN", "NK")[i % 2]}
        found = []
        for arch, gpu in GPUS:
            try:
                found.append((arch, _rmsnorm_mma.geometry(2, M, 4096, 4096, **options, **gpu)))
            except ValueError:  # no room for this tile, and none is left to choose from
                continue
        arch, how = found[i % len(found)]
        defines = (*kernels.stored_as(dtype, weights), *how.defines)
        jobs.append((_rmsnorm_mma.FILE, arch, defines))

    for i, tile in enumerate(_rmsnorm_mma.TILES):
        add(i, 500, "float16", None, tile=tile, residual=tile.rows >= 64)
    narrow = [(dtype, weights) for dtype in ("float16", "bfloat16") for weights in FP8]
    for i, (dtype, weights) in enumerate((*narrow, ("bfloat16", None))):
        add(i, 4096, dtype, weights)
    assert_clean(jobs)


# --- on the CPU -----------------------------------------------------------------------------------


@in_every_order
@pytest.mark.parametrize(
    ("matrices", "layout", "case"),
    [
        (1, "KN", Case(1, 40, 24)),
        (1, "KN", Case(3, 300, 16, "float16", head_dim=8, half_split=True, apart=3)),
        (1, "NK", Case(5, 33, 17, "float16")),
        (1, "KN", Case(1, 544, 32, "float16", FP8_E4M3, head_dim=8)),
        (1, "NK", Case(1, 64, 64, "float32", FP8_E5M2, head_dim=32, half_split=True)),
        (1, "NK", Case(9, 8, 40, "bfloat16", head_dim=10, sequences=3)),
        (2, "KN", Case(2, 520, 33, "bfloat16", residual=True)),
        (2, "NK", Case(2, 520, 33, "bfloat16", residual=True)),
        (2, "KN", Case(7, 36, 12, apart=4, residual=True)),
        (2, "NK", Case(1, 2056, 6, "float16")),
        (2, "NK", Case(3, 48, 80, "float16", FP8_E4M3, residual=True)),
    ],
)
def test_matvec(matrices: int, layout: str, case: Case, where: str) -> None:
    check(where, matrices, case, layout)


@pytest.mark.parametrize(
    ("matrices", "dtype", "weights", "layout"),
    [
        (1, "float16", None, "NK"),
        (2, "float16", FP8_E5M2, "KN"),
        (1, "float16", FP8_E4M3, "NK"),
        (2, "bfloat16", FP8_E5M2, "NK"),
        (1, "bfloat16", FP8_E4M3, "KN"),
    ],
)
def test_mma(matrices: int, dtype: str, weights: str | None, layout: str) -> None:
    head_dim = 16 if matrices == 1 else None
    case = Case(21, 144, 80, dtype, weights, head_dim, apart=16, sequences=3)
    check("shuffled", matrices, case, layout, "mma", TINY)


@pytest.mark.parametrize("at_once", [False, True])
def test_the_pipeline_waits_for_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    if at_once:  # copies by cp.async arrive immediately, not when a thread waits for them
        monkeypatch.setenv("COPIES_AT_ONCE", "1")
    for order in ORDERS:
        for K in (64, 64 * 5 + 8):
            check(order, 2, Case(40, K, 40, "float16", residual=True), "KN", "mma", ODD)


@settings(max_examples=6)
@given(M=st.integers(1, 100), N=st.integers(1, 9), K=st.integers(1, 40), matrices=st.integers(1, 2))
def test_any_size_on_the_cpu(M: int, N: int, K: int, matrices: int) -> None:
    """The product without a norm."""
    check("reverse", matrices, Case(M, 8 * K, 8 * N, "float16"), "KN", "unfused", ODD)


# --- on the GPU -----------------------------------------------------------------------------------


VARIANTS = [variant.name for variant in RMSNORM_MATMUL.variants]
every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_dtype = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
every_weight = pytest.mark.parametrize("weights", [None, *FP8])


def skip_what_tiles_cannot(variant: str, dtype: str, weights: str | None) -> None:
    if variant in ("mma", "hopper") and dtype == "float32":
        pytest.skip("tensor cores take float16 and bfloat16")
    if variant == "hopper" and weights:
        pytest.skip("wgmma is for weights of the same dtype")
    if variant in ("mma", "hopper"):
        cupy_with(HOPPER_CAPABILITY if variant == "hopper" else MMA_CAPABILITY)


@pytest.mark.gpu
@every_variant
@every_dtype
@every_weight
@both_layouts
@pytest.mark.parametrize("M", [1, 3, 16, 70, 200])
def test_products_on_the_gpu(
    variant: str, dtype: str, weights: str | None, layout: str, M: int
) -> None:
    skip_what_tiles_cannot(variant, dtype, weights)
    half_split = M in (3, 70)
    case = Case(M, 272, 384, dtype, weights, 64 if M > 1 else None, half_split, 8 if M > 3 else 0)
    check("gpu", 1, case, layout, variant)


@pytest.mark.gpu
@every_variant
@every_dtype
@every_weight
@both_layouts
@pytest.mark.parametrize("M", [1, 5, 33, 130, 300])
def test_feed_forward_on_the_gpu(
    variant: str, dtype: str, weights: str | None, layout: str, M: int
) -> None:
    skip_what_tiles_cannot(variant, dtype, weights)
    case = Case(M, 272, 192, dtype, weights, apart=8 if M > 5 else 0, residual=M > 1)
    check("gpu", 2, case, layout, variant)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("variant", "matrices", "layout", "tile"),
    [
        *(("hopper", *each) for each in HOPPER_TILES),
        *(("mma", n, "KN", tile) for n in (1, 2) for tile in _rmsnorm_mma.TILES),
    ],
    ids=str,
)
def test_every_tile(variant: str, matrices: int, layout: str, tile: Any) -> None:
    """One tile a block, and many; the last ones beyond the matrix; many slices of K and few."""
    skip_what_tiles_cannot(variant, "float16", None)
    for case in (
        Case(1, 264, 40, "float16", apart=10 if variant == "hopper" else 8),
        Case(129, 72, 520, "bfloat16", apart=8),
        Case(333, 1032, 1448, "float16"),
        Case(1000, 136, 3032, "float16", apart=8),
    ):
        check("gpu", matrices, case, layout, variant, tile)


@pytest.mark.gpu
@settings(max_examples=25)
@given(M=st.integers(1, 600), N=st.integers(1, 60), K=st.integers(1, 60), mma=st.booleans())
def test_any_size_on_the_gpu(M: int, N: int, K: int, mma: bool) -> None:
    cupy_with()
    for matrices in (1, 2):
        case = Case(M, 8 * K, 8 * N, "float16")
        check("gpu", matrices, case, "KN", "mma" if mma else "unfused")


@pytest.mark.gpu
@both_layouts
@pytest.mark.parametrize(
    ("variant", "case"),
    [
        ("matvec", Case(1, 4096, 512, "float16", None, 128)),
        ("matvec", Case(1, 4096, 512, "bfloat16", FP8_E4M3, 128, True)),
        ("matvec", Case(3, 333, 77, "float16")),
        ("matvec", Case(2, 12_000, 8, "float16")),
        ("mma", Case(16, 4096, 4096, "float16", None, 128)),
        ("mma", Case(500, 4096, 4096, "float16", None, 128)),
    ],
    ids=str,
)
def test_odd_and_long_rows_on_the_gpu(variant: str, case: Case, layout: str) -> None:
    skip_what_tiles_cannot(variant, case.dtype, case.weights)
    check("gpu", 1, case, layout, variant)
    if case.head_dim is None or variant == "mma":
        check("gpu", 2, case, layout, None if variant == "matvec" else variant)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [None, "unfused"])
@pytest.mark.parametrize("half_split", [False, True])
def test_more_axes_in_front(variant: str | None, half_split: bool) -> None:
    """Each of the sequences has positions of its own."""
    given: Any = on_device(arrays(Case(24, 64, 32, "float16"), "KN"))
    x = cupy.ascontiguousarray(given.x).reshape(2, 3, 4, 64)
    gamma, w = given.gamma, given.first.data
    options: dict[str, Any] = {"head_dim": 16, "start": 5, "half_split": half_split}
    options["variant"] = variant
    deep = ops.rmsnorm_matmul(x, gamma, w, **options)
    flat = ops.rmsnorm_matmul(x.reshape(6, 4, 64), gamma, w, **options)
    cupy.testing.assert_array_equal(deep.reshape(6, 4, 32), flat)
    alone = reference.rmsnorm_matmul(
        wide(x[1, 2].get()), wide(gamma.get()), wide(w.get()), 1e-6, 16, 5, 1e4, half_split
    )
    np.testing.assert_allclose(deep[1, 2].get(), alone, atol=0.01)


@pytest.mark.gpu
def test_a_row_too_long_for_matvec_takes_tiles() -> None:
    x, gamma = cupy.ones((1, 65_536), "float16"), cupy.ones(65_536, "float16")
    w = cupy.full((65_536, 16), 2.0**-16, "float16")
    np.testing.assert_allclose(ops.rmsnorm_matmul(x, gamma, w).get(), 1, rtol=1e-3)


@pytest.mark.gpu
def test_the_functions_take_plain_matrices_and_give_pairs() -> None:
    case = Case(2, 64, 32)
    given = arrays(case, "KN")
    device = on_device(given)
    w1, w3 = device.first.data, device.second.data
    alone = ops.rmsnorm_ffn(device.x, device.gamma, w1, w3)
    assert_ffn(alone.get(), given, case)
    out, h = ops.rmsnorm_ffn(device.x, device.gamma, w1, w3, residual=device.residual)
    assert_ffn(out.get(), given, case._replace(residual=True))
    np.testing.assert_array_equal(h.get(), summed(given))
    turned = ops.rmsnorm_matmul(cupy.asfortranarray(device.x), device.gamma, w1, head_dim=8)
    same = ops.rmsnorm_matmul(device.x, device.gamma, w1, head_dim=8)
    cupy.testing.assert_array_equal(turned, same)


@one_order
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"variant": "wgmma"},
            "unknown variant 'wgmma': expected one of matvec, mma, unfused, hopper",
        ),
        ({"head_dim": 9}, "head_dim 9: expected an even number that divides N 48"),
        ({"head_dim": 16.0}, "head_dim 16.0: expected an even number that divides N 48"),
        ({"head_dim": True}, "head_dim True: expected an even number that divides N 48"),
        ({"head_dim": 36}, "head_dim 36: expected an even number that divides N 48"),
        ({"head_dim": 8, "start": -1}, "start: expected a whole number from 0 to 1,048,575"),
        ({"variant": "mma"}, "variant mma: takes float16 and bfloat16: use variant matvec"),
        ({"variant": "hopper"}, "variant hopper: (takes float16 and bfloat16|needs a GPU of)"),
        ({"w": (64, 48, "float16")}, "w: expected float32, got float16"),
        ({"x": (64,)}, r"x: expected \(\.\.\., T, K\)"),
    ],
)
def test_wrong_input_is_refused(device: Any, change: dict[str, Any], message: str) -> None:
    x = cupy.zeros(change.pop("x", (1, 64)), "float32")
    gamma = cupy.zeros(64, "float32")
    *shape, dtype = change.pop("w", (64, 48, "float32"))
    with pytest.raises(InputError, match=message):
        ops.rmsnorm_matmul(x, gamma, cupy.zeros(shape, dtype), **change)


@pytest.mark.gpu
def test_feed_forward_matrices_must_be_alike() -> None:
    x, gamma = cupy.zeros((1, 64), "float32"), cupy.ones(64, "float32")
    w = cupy.zeros((64, 48), "float32")
    other = WeightMatrix(cupy.zeros((48, 64), "float32"), "float32", None, "NK")
    with pytest.raises(
        InputError, match="w3: expected float32, layout KN as w1, got float32, layout NK"
    ):
        ops.rmsnorm_ffn(x, gamma, w, other)
    x, gamma, w = (cupy.ones(shape, "float32") for shape in ((1, 60_000), 60_000, (60_000, 1)))
    with pytest.raises(InputError, match="K 60,000: a row of 240,000 bytes does not fit"):
        ops.rmsnorm_ffn(x, gamma, w, w)


def test_the_registry_names_both() -> None:
    assert [variant.name for variant in RMSNORM_FFN.variants] == VARIANTS
