"""RMSNorm with the product behind it: the matvec kernels on the CPU, every variant on a GPU."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import InputError, ops, reference
from gpt2block.cuda import cupy, kernels
from gpt2block.cuda.kernels import FP8
from gpt2block.emulator import ORDERS
from gpt2block.ops import _rmsnorm_hopper
from gpt2block.ops._rmsnorm_hopper import tiles
from gpt2block.ops._rmsnorm_matvec import geometry as matvec
from gpt2block.ops._tensor_cores import HOPPER_CAPABILITY
from gpt2block.ops.rmsnorm_matmul import RMSNORM_FFN, RMSNORM_MATMUL
from gpt2block.weights.matrix import WeightMatrix
from tests import plain
from tests.compiling import assert_clean
from tests.devices import one_order, running_on
from tests.gpus import H200, cupy_with

Array = NDArray[Any]
DTYPES: dict[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
}
EPS = 1e-6
SHARED = 200_000  # bytes that a block may have
in_every_order = pytest.mark.parametrize("where", ORDERS)
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
    apart: int = 0  # elements between the rows of x


class Arrays(NamedTuple):
    x: Array  # (M, K), a view when the rows lie apart
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

    x = normal(case.M, case.K + case.apart).astype(dtype)[:, : case.K]
    residual = normal(case.M, case.K).astype(dtype)
    return Arrays(x, residual, normal(case.K).astype(dtype), matrix(), matrix())


def wide(array: Array) -> Array:
    return array.astype(np.float64)


def plain_norm(h: Array, gamma: Array) -> Array:
    """In float32 one sum after the other, then rounded to what is stored."""
    w = h.astype(np.float32)
    mean = plain.running_sum(w * w) / np.float32(h.shape[-1])
    normed: Array = (w / np.sqrt(mean + np.float32(EPS)) * gamma.astype(np.float32)).astype(h.dtype)
    return normed.astype(np.float32)


def assert_product(got: Array, given: Arrays, case: Case, start: int, theta: float) -> None:
    x, gamma = given.x, given.gamma
    options = (case.head_dim, start, theta, case.half_split)
    truth = reference.rmsnorm_matmul(wide(x), wide(gamma), given.first, EPS, *options)
    normed = plain_norm(x, gamma)
    sums = plain.product(normed, given.first.dequantized())
    if case.head_dim:
        heads = sums.reshape(case.M, -1, case.head_dim)
        sums = plain.rope(heads, start, theta, case.half_split).reshape(sums.shape)
    assert got.dtype == x.dtype
    stored = sums.astype(x.dtype).astype(np.float32)
    plain.assert_as_accurate(got.astype(np.float32), truth, stored)


def assert_ffn(got: Array, given: Arrays, residual: bool) -> None:
    x, gamma = given.x, given.gamma
    h = (x.astype(np.float32) + given.residual.astype(np.float32)).astype(x.dtype)
    h = h if residual else x
    truth = reference.rmsnorm_ffn(wide(h), wide(gamma), given.first, given.second, EPS)
    assert isinstance(truth, np.ndarray)
    normed = plain_norm(h, gamma)
    a, b = (plain.product(normed, w.dequantized()) for w in (given.first, given.second))
    stored = (a / (np.float32(1) + np.exp(-a)) * b).astype(x.dtype).astype(np.float32)
    assert got.dtype == x.dtype
    plain.assert_as_accurate(got.astype(np.float32), truth, stored)


def summed(given: Arrays) -> Array:
    """x + residual as it is stored."""
    both = given.x.astype(np.float32) + given.residual.astype(np.float32)
    return both.astype(given.x.dtype)


# --- the NumPy meaning ----------------------------------------------------------------------------


def test_the_product_against_a_loop() -> None:
    given = arrays(Case(3, 6, 8), "KN")
    x, gamma = wide(given.x), wide(given.gamma)
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
    x, residual, gamma = wide(given.x), wide(given.residual), wide(given.gamma)
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
    for tile in tiles(matrices, layout)
]
every_hopper_tile = pytest.mark.parametrize(("matrices", "layout", "tile"), HOPPER_TILES, ids=str)


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


def test_a_hopper_tile_has_room_and_does_not_spill() -> None:
    jobs = []
    for matrices, layout, tile in HOPPER_TILES:
        for dtype, turns in (("float16", True), ("bfloat16", False)):
            how, _ = _rmsnorm_hopper.geometry(
                matrices, 500, 4096, 4096, layout=layout, turns=turns, sms=H200["sms"], tile=tile
            )
            assert how.shared <= H200["most_shared"]
            assert how.grid[0] % tile.cluster == 0
            defines = (*kernels.stored_as(dtype), *how.defines)
            jobs.append((_rmsnorm_hopper.FILE, "sm_90a", defines))
    assert_clean(jobs)


# --- the matvec kernels on the CPU ----------------------------------------------------------------

PRODUCTS = [
    Case(1, 40, 24),
    Case(3, 300, 16, "float16", head_dim=8, half_split=True, apart=3),
    Case(5, 33, 17, "float16"),
    Case(1, 544, 32, "float16", "float8_e4m3fn", head_dim=8),
    Case(1, 64, 64, "float32", "float8_e5m2", head_dim=32, half_split=True),
    Case(2, 8, 40, "bfloat16", head_dim=10, half_split=True),
    Case(9, 20, 2, "bfloat16", head_dim=2),
]
FFNS = [
    Case(2, 520, 33, "bfloat16"),
    Case(2, 64, 32, "bfloat16", "float8_e5m2"),
    Case(7, 36, 12, apart=4),
    Case(1, 2056, 6, "float16"),
    Case(3, 48, 80, "float16", "float8_e4m3fn"),
]
START, THETA = 3, 500.0


def on_device(given: Arrays) -> Arrays:
    """The same arrays on the GPU, rows as far apart."""
    base = given.x.base if given.x.base is not None else given.x
    x = cupy.asarray(base)[:, : given.x.shape[1]]

    def upload(w: WeightMatrix) -> WeightMatrix:
        scale = None if w.scale is None else cupy.asarray(w.scale)
        return WeightMatrix(cupy.asarray(w.data), w.dtype, scale, w.layout)

    first, second = upload(given.first), upload(given.second)
    return Arrays(x, cupy.asarray(given.residual), cupy.asarray(given.gamma), first, second)


def run(where: str, bind: Any, inputs: tuple[Any, ...], **options: Any) -> list[Array]:
    """Outputs, from poisoned memory; on a GPU of two runs, which must be the same bits."""
    x, weights = inputs[0], inputs[2]
    results = []
    for _ in range(1 + (where == "gpu")):
        out = cupy.full((*x.shape[:-1], weights.N), np.nan, x.dtype)
        bound = bind(inputs, out, eps=EPS, **options)
        bound.run()
        results.append([out.get(), *(array.get() for array in bound.extra)])
    for one, other in zip(results[0], results[-1], strict=True):
        np.testing.assert_array_equal(one, other)
    return results[0]


def check_product(where: str, case: Case, layout: str, variant: str | None = "matvec") -> None:
    given = arrays(case, layout)
    turn = {"head_dim": case.head_dim, "start": START, "theta": THETA}
    with running_on(where):
        x, _, gamma, w, _ = on_device(given)
        options = {"half_split": case.half_split, "variant": variant}
        got = run(where, RMSNORM_MATMUL.bind, (x, gamma, w), **turn, **options)
    assert_product(got[0], given, case, START, THETA)


def check_ffn(
    where: str, case: Case, layout: str, variant: str | None = "matvec", residual: bool = False
) -> None:
    given = arrays(case, layout)
    with running_on(where):
        x, other, gamma, *weights = on_device(given)
        inputs = (x, gamma, *weights, other if residual else None)
        got = run(where, RMSNORM_FFN.bind, inputs, variant=variant)
    assert_ffn(got[0], given, residual)
    if residual:
        np.testing.assert_array_equal(got[1], summed(given))


@in_every_order
@both_layouts
@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_matvec(case: Case, layout: str, where: str) -> None:
    check_product(where, case, layout)


@in_every_order
@both_layouts
@pytest.mark.parametrize("case", FFNS, ids=str)
def test_ffn_matvec(case: Case, layout: str, where: str) -> None:
    check_ffn(where, case, layout, residual=case.M > 1)


# --- on the GPU -----------------------------------------------------------------------------------


VARIANTS = [variant.name for variant in RMSNORM_MATMUL.variants]
SMALL = Case(1, 64, 48)
every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_dtype = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
every_weight = pytest.mark.parametrize("weights", [None, *FP8])


def skip_what_tiles_cannot(variant: str, dtype: str, weights: str | None) -> None:
    if variant in ("mma", "hopper") and dtype == "float32":
        pytest.skip("tensor cores take float16 and bfloat16")
    if variant == "hopper":
        if weights:
            pytest.skip("wgmma is for weights of the same dtype")
        cupy_with(HOPPER_CAPABILITY)


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
    check_product("gpu", case, layout, variant)


@pytest.mark.gpu
@every_variant
@every_dtype
@every_weight
@both_layouts
@pytest.mark.parametrize("M", [1, 5, 33, 130])
def test_feed_forward_on_the_gpu(
    variant: str, dtype: str, weights: str | None, layout: str, M: int
) -> None:
    skip_what_tiles_cannot(variant, dtype, weights)
    case = Case(M, 272, 192, dtype, weights, apart=8 if M > 5 else 0)
    check_ffn("gpu", case, layout, variant, residual=M > 1)


@pytest.mark.gpu
@every_hopper_tile
def test_every_hopper_tile(
    matrices: int, layout: str, tile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tile a block, and many; the last ones beyond the matrix."""

    cupy_with(HOPPER_CAPABILITY)
    monkeypatch.setattr(_rmsnorm_hopper, "choose_tile", lambda *_: tile)
    _rmsnorm_hopper.geometry.cache_clear()
    for case in (
        Case(1, 264, 40, "float16", None, 10),
        Case(129, 72, 520, "bfloat16", None, 8),
        Case(333, 1032, 1448, "float16"),
        Case(1000, 136, 3032, "float16", None, 8),
    ):
        (check_ffn if matrices == 2 else check_product)("gpu", case, layout, "hopper")
    _rmsnorm_hopper.geometry.cache_clear()


@pytest.mark.gpu
@both_layouts
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 4096, 512, "float16", None, 128),
        Case(1, 4096, 512, "bfloat16", "float8_e4m3fn", 128, True),
        Case(3, 333, 77, "float16"),
        Case(2, 12_000, 8, "float16"),
    ],
    ids=str,
)
def test_odd_and_long_rows_on_the_gpu(case: Case, layout: str) -> None:
    check_product("gpu", case, layout)
    if case.head_dim is None:
        check_ffn("gpu", case, layout, None)


@pytest.mark.gpu
def test_a_batch_has_positions_of_its_own() -> None:
    given = arrays(Case(6, 64, 32, "float16"), "KN")
    x = cupy.asarray(np.ascontiguousarray(given.x)).reshape(2, 3, 64)
    gamma, w = cupy.asarray(given.gamma), cupy.asarray(given.first.data)
    both = ops.rmsnorm_matmul(x, gamma, w, head_dim=16, start=7)
    assert both.shape == (2, 3, 32)
    for b in range(2):
        rows, weights = wide(x[b].get()), given.first
        alone = reference.rmsnorm_matmul(rows, wide(given.gamma), weights, head_dim=16, start=7)
        np.testing.assert_allclose(both[b].get(), alone, atol=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [None, "unfused"])
@pytest.mark.parametrize("half_split", [False, True])
def test_more_axes_in_front(variant: str | None, half_split: bool) -> None:
    given = arrays(Case(24, 64, 32, "float16"), "KN")
    x = cupy.asarray(np.ascontiguousarray(given.x)).reshape(2, 3, 4, 64)
    gamma, w = cupy.asarray(given.gamma), cupy.asarray(given.first.data)
    options: dict[str, Any] = {"head_dim": 16, "start": 5, "half_split": half_split}
    options["variant"] = variant
    deep = ops.rmsnorm_matmul(x, gamma, w, **options)
    flat = ops.rmsnorm_matmul(x.reshape(6, 4, 64), gamma, w, **options)
    cupy.testing.assert_array_equal(deep.reshape(6, 4, 32), flat)


@pytest.mark.gpu
def test_a_row_too_long_for_matvec_takes_tiles() -> None:
    x, gamma = cupy.ones((1, 65_536), "float16"), cupy.ones(65_536, "float16")
    w = cupy.full((65_536, 16), 2.0**-16, "float16")
    np.testing.assert_allclose(ops.rmsnorm_matmul(x, gamma, w).get(), 1, rtol=1e-3)


@pytest.mark.gpu
def test_the_functions_take_plain_matrices_and_give_pairs() -> None:
    given = arrays(Case(2, 64, 32, "float32"), "KN")
    device = on_device(given)
    w1, w3 = device.first.data, device.second.data
    alone = ops.rmsnorm_ffn(device.x, device.gamma, w1, w3)
    assert_ffn(alone.get(), given, False)
    out, h = ops.rmsnorm_ffn(device.x, device.gamma, w1, w3, residual=device.residual)
    assert_ffn(out.get(), given, True)
    np.testing.assert_array_equal(h.get(), summed(given))
    turned = ops.rmsnorm_matmul(cupy.ascontiguousarray(device.x.T).T, device.gamma, w1, head_dim=8)
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
