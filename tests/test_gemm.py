"""The product on tensor cores: its meaning, matmul/mma.cu, mma_two_part.cu and their launches.

On the CPU the PTX instructions are imitated (emulator/mma_ptx.h): layouts in shared memory
and registers, the ring's waits and every address are tried there; `mma.sync` itself on the GPU.
What is special to Hopper is in test_gemm_hopper.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import InputError, TwoPartMatrix, ops, reference
from gpt2block.cuda import cupy, kernels
from gpt2block.cuda.kernels import FP8, Geometry
from gpt2block.emulator import ORDERS
from gpt2block.ops import _gemm_hopper, _gemm_mma
from gpt2block.ops._gemm_mma import (
    FILE,
    TILES,
    TWO_PART_FILE,
    TWO_PART_TILES,
    MmaGemmTile,
    geometry,
)
from gpt2block.ops._products import HOPPER_CAPABILITY, MMA_CAPABILITY
from gpt2block.ops.gemm import OPERATION as GEMM
from gpt2block.ops.gemm import WIDEN
from gpt2block.weights.matrix import WeightMatrix
from tests import devices, plain
from tests.compiling import Job, assert_clean
from tests.devices import assert_same_bits, one_order, running_on
from tests.gpus import A100, GPUS, H200, RTX, Gpu, cupy_with

Array = NDArray[Any]
device = devices.device
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
TWO_PART = "two_part"
GPT2 = ((2304, 768), (768, 768), (3072, 768), (768, 3072))  # N, K
# Odd numbers of fragments side by side: groups of four, two and one; rows and columns of warps.
NARROW = MmaGemmTile(16, 72, (1, 1), 64, 3, 2)
SQUARE = MmaGemmTile(64, 48, (2, 2), 64, 3, 1)
LONG = MmaGemmTile(32, 128, (1, 2), 128, 3, 1)
ODD = MmaGemmTile(32, 40, (2, 1), 64, 3, 2)  # of two-part matrices
PAIRS = MmaGemmTile(32, 64, (1, 2), 128, 3, 1)


@dataclass(frozen=True)
class Case:
    """A product, its epilogue, and how it is stored."""

    M: int
    N: int
    K: int
    storage: str = "bfloat16"  # or "two_part"
    bias: bool = True
    gelu: bool = False
    residual: bool = False
    other_out: bool = False  # float32, or two-part
    size: float = 1.0  # of a two-part a

    @property
    def two_part(self) -> bool:
        return self.storage == TWO_PART

    @property
    def ends(self) -> dict[str, Any]:
        """The options of a geometry."""
        names = ("two_part", "gelu", "residual", "other_out")
        return {name: getattr(self, name) for name in names}

    def geometry(self, gpu: Gpu, tile: MmaGemmTile | None = None) -> Geometry:
        return geometry(self.M, self.N, self.K, **self.ends, tile=tile, **gpu)

    def job(self, arch: str, gpu: Gpu, tile: MmaGemmTile) -> Job:
        stored = kernels.stored_as("float16" if self.two_part else self.storage)
        file = TWO_PART_FILE if self.two_part else FILE
        return file, arch, (*stored, *self.geometry(gpu, tile).defines)


EPILOGUES = (
    Case(0, 0, 0, bias=False),
    Case(0, 0, 0, "float16", other_out=True),
    Case(0, 0, 0, "float16", gelu=True),
    Case(0, 0, 0, residual=True),
    Case(0, 0, 0, bias=False, residual=True, other_out=True),
    Case(0, 0, 0, gelu=True, residual=True),
)
TWO_PART_EPILOGUES = (
    Case(0, 0, 0, TWO_PART, bias=False),
    Case(0, 0, 0, TWO_PART, gelu=True, other_out=True),
    Case(0, 0, 0, TWO_PART, residual=True),
)
every_epilogue = pytest.mark.parametrize("epilogue", [*EPILOGUES, *TWO_PART_EPILOGUES], ids=str)


class Problem:
    """Inputs of a case, and its results by the formula."""

    def __init__(self, case: Case) -> None:
        self.case = case
        rng = np.random.default_rng([case.M, case.N, case.K])
        T = np.dtype(np.float32) if case.two_part else DTYPES[case.storage]
        a = rng.standard_normal((case.M, case.K), np.float32)
        if case.two_part:
            a *= np.float32(case.size)
            a[case.M // 2] = 0  # a row of zeros
            a[:, case.K // 2] *= 100  # a column that sticks out
        else:
            a += np.float32(0.25)
        self.a: Array = a.astype(T)
        w = rng.standard_normal((case.N, case.K), np.float32)
        self.w: Array = (w / np.float32(math.sqrt(case.K))).astype(T)
        self.bias = rng.standard_normal(case.N, np.float32) if case.bias else None
        residual = rng.standard_normal((case.M, case.N), np.float32) + np.float32(0.5)
        self.out_dtype = np.dtype(np.float32) if case.other_out else T
        self.residual = residual.astype(self.out_dtype) if case.residual else None
        self.bound = 2.0**11  # of a two-part result

    def poisoned(self) -> Any:
        """On the device."""
        c = self.case
        if not (c.two_part and c.other_out):
            return cupy.full((c.M, c.N), np.nan, self.out_dtype)
        parts = cupy.full((2, c.M, c.N), np.nan, "float16")
        return TwoPartMatrix.empty((c.M, c.N), self.bound, parts)

    def uploaded(self) -> tuple[Any, ...]:
        """a, w, bias and residual."""

        def matrix(x: Array) -> Any:
            if self.case.two_part:
                parts, scale = map(cupy.asarray, reference.two_part(x))
                return TwoPartMatrix(parts, scale, x.shape)
            return cupy.asarray(x)

        a, w = matrix(self.a), matrix(self.w)
        w = w if self.case.two_part else WeightMatrix(w, self.case.storage, None, "NK")
        ends = (x if x is None else cupy.asarray(x) for x in (self.bias, self.residual))
        return a, w, *ends

    def run(
        self,
        where: str,
        variant: str | None = None,
        tile: Any = None,
        in_place: bool = False,
        multiprocessors: int = 4,
    ) -> Array:
        """On a GPU twice, and both must give the same bits. A tile is one of the variant."""
        results: list[Array] = []
        with running_on(where, multiprocessors), pytest.MonkeyPatch.context() as patch:
            if tile and variant == "hopper":
                patch.setattr(_gemm_hopper, "choose_tile", lambda *_: tile)
                _gemm_hopper.geometry.cache_clear()
            elif tile:
                patch.setattr(_gemm_mma, "geometry", partial(geometry, tile=tile))
            for _ in range(1 + (where == "gpu")):
                inputs = self.uploaded()
                out = inputs[3] if in_place else self.poisoned()
                bound = GEMM.bind(inputs, out, gelu=self.case.gelu, variant=variant)
                results.append(bound.run().get())
        _gemm_hopper.geometry.cache_clear()
        assert_same_bits(results[0], results[-1])
        return results[0]

    def truth(self) -> Array:
        bias, residual = (
            x if x is None else x.astype(np.float64) for x in (self.bias, self.residual)
        )
        a, w = self.a.astype(np.float64), self.w.T.astype(np.float64)
        return reference.gemm(a, w, bias, residual, gelu=self.case.gelu)

    def by_hand(self, product: Any, xp: Any) -> Array:
        """The plain evaluation with a way to add, by `xp`, rounded to the output's dtype."""
        a, w = (xp.asarray(x.astype(np.float32)) for x in (self.a, self.w.T))
        y = product(a, w, xp)
        if self.bias is not None:
            y = y + xp.asarray(self.bias)
        if self.case.gelu:
            y = plain.gelu(y, xp)
        if self.residual is not None:
            y = xp.asarray(self.residual.astype(np.float32)) + y
        on_host: Array = y if xp is np else y.get()
        return on_host.astype(self.out_dtype).astype(np.float32)

    def assert_right(self, out: Array, xp: Any = np) -> None:
        """As accurate as sequential sums in float32.

        Where no rounding to 16 bits is larger than the difference, and K is long, such sums as
        tensor cores have may be less accurate: then as accurate as those.
        """
        truth = self.truth()
        meaning = self.by_hand(plain.product, xp)
        if self.case.other_out and not self.case.two_part and xp is not np:
            cut = self.by_hand(plain.tensor_core_product, xp)
            meaning = max(meaning, cut, key=lambda y: float(np.abs(y - truth).max()))
        plain.assert_as_accurate(out.astype(np.float32), truth, meaning)


# --- what it means -------------------------------------------------------------------------------


def test_the_formula_against_a_loop() -> None:
    rng = np.random.default_rng(0)
    a, w, bias, residual = (rng.standard_normal(s) for s in ((2, 3, 4), (4, 5), 5, (2, 3, 5)))
    expected = np.empty((2, 3, 5))
    for b in range(2):
        for m in range(3):
            for n in range(5):
                v = bias[n] + sum(a[b, m, k] * w[k, n] for k in range(4))
                tanh = math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))
                expected[b, m, n] = residual[b, m, n] + 0.5 * v * (1 + tanh)
    np.testing.assert_allclose(reference.gemm(a, w, bias, residual, gelu=True), expected)
    np.testing.assert_allclose(reference.gemm(a, w), a @ w)
    matrix = WeightMatrix(np.ascontiguousarray(w.T.astype(np.float32)), "float32", None, "NK")
    np.testing.assert_allclose(reference.gemm(a, matrix, bias), a @ w + bias, rtol=1e-5)
    up = rng.standard_normal((4, 5))
    gate = a @ w
    expected = gate / (1 + np.exp(-gate)) * (a @ up)
    np.testing.assert_allclose(reference.gemm(a, w, up=up), expected)


# --- which tile ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("M", "N", "K", "tile", "blocks"),
    [
        (128, 768, 768, (32, 32), 96),
        (128, 3072, 768, (64, 48), 128),
        (1024, 2304, 768, (128, 144), 128),
        (1024, 3072, 768, (128, 192), 128),
        (1024, 768, 3072, (64, 96), 128),
        (8192, 768, 3072, (128, 192), 132),
        (65536, 3072, 768, (128, 256), 132),
    ],
)
def test_the_tile_fits_the_gpu(M: int, N: int, K: int, tile: tuple[int, int], blocks: int) -> None:
    how = Case(M, N, K).geometry(H200)
    chosen = dict(how.defines)
    assert (chosen["GEMM_M"], chosen["GEMM_N"]) == tile
    assert how.grid == (blocks,)


@pytest.mark.parametrize("gpu", [A100, H200, RTX], ids=["A100", "H200", "RTX"])
def test_a_tile_has_room_on_every_gpu(gpu: Gpu) -> None:
    for M in (1, 16, 17, 64, 128, 500, 5000):
        for N, K in GPT2:
            how = Case(M, N, K).geometry(gpu)
            blocks = int(dict(how.defines)["GEMM_BLOCKS"])
            assert (how.shared + 1024) * blocks <= gpu["most_shared"] + 1024
            assert how.grid[0] <= blocks * gpu["sms"]
            assert how.block[0] in (128, 256)


def test_no_tile_spills() -> None:
    """By turns with the epilogues of most registers."""
    cases = [(tile, EPILOGUES[3 + i % 3]) for i, tile in enumerate(TILES)]
    cases += [(tile, TWO_PART_EPILOGUES[1 + i % 2]) for i, tile in enumerate(TWO_PART_TILES)]
    jobs = []
    for i, (tile, epilogue) in enumerate(cases):
        arch, gpu = GPUS[i % len(GPUS)]
        case = replace(epilogue, M=500, N=768, K=768)
        try:
            jobs.append(case.job(arch, gpu, tile))
        except ValueError:  # no room for this tile, and none is left to choose from
            jobs.append(case.job("sm_90", H200, tile))
    assert_clean(jobs)


# --- on the CPU ----------------------------------------------------------------------------------


def run_on_cpu(case: Case, tile: MmaGemmTile, order: str, blocks: int = 4) -> Array:
    """With so few blocks, each has several tiles."""
    given = Problem(case)
    out = given.run(order, "mma", tile, multiprocessors=blocks)
    given.assert_right(out)
    return out


@pytest.mark.parametrize(
    ("epilogue", "tile"),
    [
        *zip(EPILOGUES, (NARROW, SQUARE, LONG) * 2, strict=True),
        *((epilogue, ODD) for epilogue in TWO_PART_EPILOGUES),
    ],
    ids=str,
)
def test_epilogues_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, epilogue: Case, tile: MmaGemmTile
) -> None:
    case = replace(epilogue, M=37, N=88, K=264) if epilogue.two_part else epilogue
    case = case if case.two_part else replace(case, M=17, N=136, K=72)
    first = run_on_cpu(case, tile, "forward", blocks=2)
    with monkeypatch.context() as patch:
        patch.setenv("COPIES_AT_ONCE", "1")  # by cp.async
        assert_same_bits(run_on_cpu(case, tile, "reverse"), first)
    run_on_cpu(replace(case, M=1, N=8, K=8), tile, "shuffled")


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_the_ring_waits_for_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, order: str, at_once: bool
) -> None:
    if at_once:  # copies by cp.async arrive immediately, not when a thread waits for them
        monkeypatch.setenv("COPIES_AT_ONCE", "1")
    for K in (24, 200):
        run_on_cpu(replace(EPILOGUES[0], M=130, N=72, K=K), SQUARE, order, blocks=2)


def test_the_residual_may_be_the_output() -> None:
    for case, tile in ((EPILOGUES[3], NARROW), (EPILOGUES[4], SQUARE)):
        given = Problem(replace(case, M=33, N=80, K=64))
        given.assert_right(given.run("forward", "mma", tile, in_place=True, multiprocessors=132))


@pytest.mark.parametrize(
    ("epilogue", "tiles"),
    [(EPILOGUES[0], (NARROW, SQUARE, LONG)), (TWO_PART_EPILOGUES[0], (ODD, PAIRS))],
    ids=str,
)
def test_all_tiles_give_the_same_bits_on_the_cpu(
    epilogue: Case, tiles: tuple[MmaGemmTile, ...]
) -> None:
    case = replace(epilogue, M=40, N=80, K=136)
    first, *others = (run_on_cpu(case, tile, "shuffled") for tile in tiles)
    for other in others:
        assert_same_bits(other, first)


@settings(max_examples=5)
@given(M=st.integers(1, 100), N=st.integers(1, 12), K=st.integers(1, 30))
def test_any_size_on_the_cpu(M: int, N: int, K: int) -> None:
    run_on_cpu(replace(EPILOGUES[0], M=M, N=8 * N, K=8 * K), SQUARE, "reverse", blocks=1)


# --- two-part matrices: how a tensor core itself adds up is to be seen on a GPU alone -------------


def test_infinity_and_nan_are_what_they_are_in_float() -> None:
    given = Problem(Case(37, 40, 136, TWO_PART))
    given.a[2, 5], given.a[3, 7], given.a[4, 9] = np.inf, -np.inf, np.nan
    given.a[5, [11, 13]] = np.inf, -np.inf
    given.w[6, 8], given.w[7] = np.nan, 0
    with np.errstate(invalid="ignore"):
        truth = given.truth()
        out = given.run("forward", "mma", ODD)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(truth))
    wild = np.isinf(truth)
    assert wild[2:4].sum() == 2 * 38
    np.testing.assert_array_equal(out[wild], truth[wild])
    clean = Problem(given.case)
    clean.w[7] = 0
    same = np.isfinite(truth)
    np.testing.assert_array_equal(out[same], clean.run("forward", "mma", ODD)[same])


def test_what_is_infinite_beside_next_to_nothing_is_nan() -> None:
    """Where float has infinity: 1e-12 of the largest of its row has a high part of 0."""
    given = Problem(Case(16, 8, 8, TWO_PART, bias=False))
    given.a[1, 3] = np.inf
    given.w[:, 0], given.w[:, 3] = 1.0, 1e-13
    assert np.isnan(given.run("forward", "mma", ODD)[1]).all()


def test_scales_far_apart() -> None:
    """Each of the sums, before it has met both scales, would be beyond float."""
    given = Problem(Case(16, 8, 136, TWO_PART, bias=False, size=1e33))
    given.w *= np.float32(1e-30)
    given.assert_right(given.run("forward", "mma", ODD))
    given.a, given.w = given.a * np.float32(1e-36), given.w * np.float32(1e36)
    given.assert_right(given.run("forward", "mma", ODD))


# --- FP8 weights ----------------------------------------------------------------------------------


def with_fp8(
    xp: Any, format: str, M: int, N: int, K: int
) -> tuple[Array, WeightMatrix, WeightMatrix]:
    """a, w, and w on the device."""
    rng = np.random.default_rng((M, N, K))
    a = rng.standard_normal((M, K)).astype(np.float16)
    sizes = np.geomspace(1e-4, 1, N, dtype=np.float32)
    values = rng.standard_normal((N, K), np.float32) * sizes[:, None]
    values[0, :5] = 0, 1e-9, -1e-9, 3e-6, -3e-6  # zeros and subnormal numbers of the formats
    w = WeightMatrix.quantize(values, format, "NK")
    return a, w, w.mapped(xp.asarray)


@pytest.mark.parametrize(
    ("device", "format", "gelu"),
    [
        *(("shuffled", format, i > 0) for i, format in enumerate(FP8)),
        *(
            pytest.param("gpu", format, gelu, marks=pytest.mark.gpu)
            for format in FP8
            for gelu in (False, True)
        ),
    ],
    indirect=["device"],
)
def test_a_product_with_fp8_weights(device: Any, format: str, gelu: bool) -> None:
    """As accurate as float32 sums of exact weights, with scales applied to the sums."""
    cupy_with()
    for M, N, K in ((1, 8, 8), (37, 136, 72), (5, 264, 784)):
        a, w, there = with_fp8(device, format, M, N, K)
        bias, residual = plain.normal(1, N), plain.normal(2, M, N)
        exact, wide = w.dequantized().astype(np.float64), a.astype(np.float64)
        truth = reference.gemm(wide, exact, bias, residual, gelu=gelu)
        memory = device.full(N * K + 16, np.nan, "float16")
        given = (device.asarray(a), there, *map(device.asarray, (bias, residual)))
        options: dict[str, Any] = {"gelu": gelu, "dtype": "float32"}
        found = [ops.gemm(*given, **options).get()]
        for _ in range(2):  # the memory of the first one is used again
            found.append(GEMM.bind((*given, None, memory), **options).run().get())
        for got in found:
            limit = (
                4 * np.finfo(np.float32).eps * (np.abs(wide) @ np.abs(exact) + np.abs(truth) + 1)
            )
            assert (np.abs(got - truth) <= limit).all()
            assert_same_bits(got, found[0])
        widened = WIDEN.bind((there, memory)).run().get()
        np.testing.assert_array_equal(widened, reference.from_fp8(w.data, format))


# --- on the GPU ----------------------------------------------------------------------------------


@pytest.fixture
def _tensor_cores(request: pytest.FixtureRequest) -> None:
    callspec = getattr(request.node, "callspec", None)
    hopper = callspec and callspec.params.get("variant") == "hopper"
    cupy_with(HOPPER_CAPABILITY if hopper else MMA_CAPABILITY)


on_the_gpu = pytest.mark.usefixtures("_tensor_cores")
variants = pytest.mark.parametrize("variant", ["mma", "hopper"])


@pytest.mark.gpu
@on_the_gpu
@variants
@pytest.mark.parametrize("M", [1, 17, 100, 128, 1000, 1024, 8192])
def test_gpt2_sizes_on_the_gpu(M: int, variant: str) -> None:
    for i, (N, K) in enumerate(GPT2):
        epilogue = EPILOGUES[(i + M) % len(EPILOGUES)]
        given = Problem(replace(epilogue, M=M, N=N, K=K))
        given.assert_right(given.run("gpu", variant), cupy)


@pytest.mark.gpu
@on_the_gpu
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_two_parts_are_as_accurate_as_float32(size: float) -> None:
    for M in (17, 1024):
        for N, K in GPT2:
            given = Problem(Case(M, N, K, TWO_PART, size=size))
            given.assert_right(given.run("gpu", "mma"), cupy)


@pytest.mark.gpu
@on_the_gpu
@variants
@every_epilogue
def test_epilogues_on_the_gpu(epilogue: Case, variant: str) -> None:
    for storage in (TWO_PART,) if epilogue.two_part else DTYPES:
        for M, N, K in ((1, 8, 8), (130, 72, 200), (300, 1032, 520)):
            given = Problem(replace(epilogue, storage=storage, M=M, N=N, K=K))
            given.assert_right(given.run("gpu", variant), cupy)


@pytest.mark.gpu
@on_the_gpu
@pytest.mark.parametrize("other_out", [False, True])
def test_every_tile_gives_the_same_bits_on_the_gpu(other_out: bool) -> None:
    cases = [
        Case(*sizes, residual=True, other_out=other_out)
        for sizes in ((1, 8, 8), (129, 264, 184), (260, 520, 1032), (3000, 776, 768))
    ]
    for case in (*cases, Case(260, 520, 1032, TWO_PART, other_out=other_out)):
        given = Problem(case)
        expected = given.run("gpu", "mma")
        given.assert_right(expected, cupy)
        for tile in TWO_PART_TILES if case.two_part else TILES:
            try:
                got = given.run("gpu", "mma", tile)
            except ValueError:  # no room for this tile, and none is left to choose from
                continue
            assert_same_bits(got, expected)


@pytest.mark.gpu
@on_the_gpu
@variants
def test_a_row_has_the_same_bits_alone_and_among_others(variant: str) -> None:
    for N, K in GPT2:
        many = Problem(Case(1000, N, K, gelu=True, other_out=True))
        among = many.run("gpu", variant)
        for rows in (slice(0, 1), slice(700, 717), slice(300, 600)):
            few = Problem(many.case)
            few.a = np.ascontiguousarray(many.a[rows])
            few.case = replace(many.case, M=len(few.a))
            assert_same_bits(few.run("gpu", variant), among[rows])


@pytest.mark.gpu
@on_the_gpu
@variants
def test_the_residual_may_be_the_output_on_the_gpu(variant: str) -> None:
    for other_out in (False, True):
        given = Problem(Case(1000, 768, 768, residual=True, other_out=other_out))
        given.assert_right(given.run("gpu", variant, in_place=True), cupy)


@pytest.mark.gpu
@on_the_gpu
@settings(max_examples=25)
@given(
    M=st.integers(1, 600),
    N=st.integers(1, 60),
    K=st.integers(1, 60),
    epilogue=st.sampled_from(EPILOGUES),
)
def test_any_size_on_the_gpu(M: int, N: int, K: int, epilogue: Case) -> None:
    given = Problem(replace(epilogue, M=M, N=8 * N, K=8 * K))
    given.assert_right(given.run("gpu"), cupy)


@pytest.mark.gpu
@on_the_gpu
def test_the_function() -> None:
    given = Problem(Case(6, 16, 24, residual=True))
    _, w, bias, residual = given.uploaded()
    a = cupy.asarray(np.asfortranarray(given.a)).reshape(2, 3, 24)
    out = ops.gemm(a, w, bias, residual.reshape(2, 3, 16))
    assert out.shape == (2, 3, 16)
    given.assert_right(out.get().reshape(6, 16))
    assert ops.gemm(a, w, bias, dtype="float32").dtype == np.float32
    assert ops.gemm(a, w).dtype == a.dtype


# --- wrong input ----------------------------------------------------------------------------------


@one_order
def test_wrong_input_is_refused(device: Any) -> None:
    """What the contract alone does not say."""
    cupy_with()

    def matrix(N: int = 48, K: int = 64, dtype: str = "bfloat16", layout: str = "NK") -> Any:
        shape = (N, K) if layout == "NK" else (K, N)
        return WeightMatrix(device.zeros(shape, dtype), dtype, None, layout)

    a, w, half = device.zeros((4, 64), "bfloat16"), matrix(), device.zeros((4, 64), "float16")
    float32 = device.zeros((4, 64), "float32")
    parts = TwoPartMatrix.from_float32(device.full((8, 64), 1, "float32"))
    ones = device.full((8, 64), 1, "float32")
    fp8 = WeightMatrix.quantize(ones, "float8_e5m2", "NK")
    odd = device.zeros(4 * 48 + 4, "bfloat16")[4:].reshape(4, 48)
    memory = device.zeros(511, "float16")
    up = {"up": matrix(8, dtype="float16")}
    a_dtype = "dtype 'float16': expected float32 or 'two_part' with a Two"
    whole = r"bound: expected the largest magnitude that the result can have"
    cases: tuple[tuple[tuple[Any, ...], dict[str, Any], str], ...] = (
        ((a, w), {"variant": "wgmma"}, "unknown variant 'wgmma': expected one of mma, hopper"),
        ((a, w), {"dtype": "float16"}, "'float16': expected bfloat16, as a has, or float32"),
        ((float32, w), {}, "a: expected bfloat16 or float16, got float32"),
        ((half, w), {}, "w: expected float16, as a has, got bfloat16"),
        ((a, matrix(layout="KN")), {}, "w: expected layout 'NK', .* got 'KN'"),
        ((a, matrix(44)), {}, "K and N in multiples of 8, got K 64, N 44"),
        ((a, w), {"out": odd}, "out: expected data aligned to 16 bytes"),
        ((a, fp8), {}, "w: expected bfloat16, as a has, got float8_e5m2"),
        ((half, fp8, *[None] * 3, memory), {}, "memory: expected at least 512 elements, got 511"),
        ((half, matrix(16, dtype="float16"), *[None] * 2, up["up"]), {}, "up: expected"),
        ((half, up["up"], ones[0, :8], None, up["up"]), {}, "up: expected"),
        ((half, up["up"], None, half[:, :8].copy(), up["up"]), {}, "up: expected"),
        ((half, up["up"], None, None, up["up"]), {"gelu": True}, "up: expected"),
        ((half, up["up"], None, None, up["up"]), {"dtype": "float32"}, "up: expected"),
        ((half, fp8, None, None, up["up"]), {}, "up: expected"),
        ((float32, parts, None, None, up["up"]), {}, "up: expected"),
        ((half, up["up"], None, None, up["up"]), {"variant": "mma"}, "multiplies by one matrix"),
        ((parts, ones), {}, "w: expected a TwoPartMatrix, got ndarray: use TwoPartMatrix.from"),
        ((ones[:, :56].copy(), parts), {}, r"w: expected shape \(8, 56\), got \(8, 64\)"),
        ((ones.astype("float16"), parts), {}, "a: expected float32, got float16"),
        ((parts, parts), {"dtype": "float16"}, a_dtype),
        ((parts, parts), {"dtype": "two_part"}, whole),
        ((parts, parts), {"bound": 1.0}, "bound: expected dtype 'two_part', of a two-part result"),
        ((parts, parts), {"dtype": "two_part", "bound": math.inf}, "bound: expected a magnitude"),
        ((parts, parts), {"variant": "split"}, "'split' does not run by itself: expected one of"),
    )
    for inputs, options, message in cases:
        with pytest.raises(InputError, match=message):
            GEMM.bind(inputs, **options)
