"""The product of the tensor-core tier: its meaning, matmul/mma.cu and its launches.

On the CPU the PTX instructions are imitated (emulator/mma_ptx.h): layouts in shared memory
and registers, the ring's waits and every address are tried there; `mma.sync` itself on the GPU.
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

from gpt2block import InputError, ops, reference
from gpt2block.cuda import cupy, kernels
from gpt2block.cuda.kernels import Geometry
from gpt2block.emulator import ORDERS
from gpt2block.ops import _gemm_mma
from gpt2block.ops._gemm_mma import FILE, TILES, Tile, geometry
from gpt2block.ops._tensor_cores import HOPPER_CAPABILITY, MMA_CAPABILITY
from gpt2block.ops.gemm import OPERATION as GEMM
from gpt2block.weights.matrix import WeightMatrix
from tests import plain
from tests.compiling import assert_clean
from tests.devices import one_order, running_on
from tests.gpus import A100, GPUS, H200, RTX, Gpu, cupy_with

Array = NDArray[Any]
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
GPT2 = ((2304, 768), (768, 768), (3072, 768), (768, 3072))  # N, K
# Odd numbers of fragments side by side: groups of four, two and one; rows and columns of warps.
NARROW = Tile(16, 72, (1, 1), 64, 3, 2)
SQUARE = Tile(64, 48, (2, 2), 64, 3, 1)
LONG = Tile(32, 128, (1, 2), 128, 3, 1)


@dataclass(frozen=True)
class Case:
    """A product, its epilogue, and how it is stored."""

    M: int
    N: int
    K: int
    storage: str = "bfloat16"
    bias: bool = True
    gelu: bool = False
    residual: bool = False
    float_out: bool = False

    @property
    def out_dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float32) if self.float_out else DTYPES[self.storage]

    def geometry(self, gpu: Gpu, tile: Tile | None = None) -> Geometry:
        return geometry(
            self.M,
            self.N,
            self.K,
            gelu=self.gelu,
            residual=self.residual,
            other_out=self.float_out,
            tile=tile,
            **gpu,
        )


EPILOGUES = (
    Case(0, 0, 0, bias=False),
    Case(0, 0, 0, "float16", float_out=True),
    Case(0, 0, 0, "float16", gelu=True),
    Case(0, 0, 0, residual=True),
    Case(0, 0, 0, bias=False, residual=True, float_out=True),
    Case(0, 0, 0, gelu=True, residual=True),
)


class Problem:
    """Inputs of a case, and its results by the formula."""

    def __init__(self, case: Case) -> None:
        self.case = case
        rng = np.random.default_rng([case.M, case.N, case.K])
        T = DTYPES[case.storage]
        a = rng.standard_normal((case.M, case.K), np.float32)
        self.a: Array = (a + np.float32(0.25)).astype(T)
        w = rng.standard_normal((case.N, case.K), np.float32)
        self.w: Array = (w / np.float32(math.sqrt(case.K))).astype(T)
        self.bias = rng.standard_normal(case.N, np.float32) if case.bias else None
        residual = rng.standard_normal((case.M, case.N), np.float32) + np.float32(0.5)
        self.residual = residual.astype(case.out_dtype) if case.residual else None

    def poisoned(self) -> Array:
        return np.full((self.case.M, self.case.N), np.nan, self.case.out_dtype)

    def run(
        self,
        where: str,
        variant: str | None = None,
        tile: Tile | None = None,
        in_place: bool = False,
        multiprocessors: int = 4,
    ) -> Array:
        """On a GPU twice, and both must give the same bits. A tile is for the variant mma."""
        c = self.case
        results: list[Array] = []
        with running_on(where, multiprocessors), pytest.MonkeyPatch.context() as patch:
            if tile:
                patch.setattr(_gemm_mma, "geometry", partial(geometry, tile=tile))
            for _ in range(1 + (where == "gpu")):
                a, w, bias, residual = (
                    x if x is None else cupy.asarray(x)
                    for x in (self.a, self.w, self.bias, self.residual)
                )
                out = residual if in_place else cupy.asarray(self.poisoned())
                inputs = (a, WeightMatrix(w, c.storage, None, "NK"), bias, residual)
                results.append(GEMM.bind(inputs, out, gelu=c.gelu, variant=variant).run().get())
        np.testing.assert_array_equal(results[0], results[-1])
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
        return on_host.astype(self.case.out_dtype).astype(np.float32)

    def assert_right(self, out: Array, xp: Any = np) -> None:
        """As accurate as sequential sums in float32.

        Where no rounding to 16 bits is larger than the difference, and K is long, such sums as
        tensor cores have may be less accurate: then as accurate as those.
        """
        truth = self.truth()
        meaning = self.by_hand(plain.product, xp)
        if self.case.float_out and xp is not np:
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


# --- on the CPU ----------------------------------------------------------------------------------


def run_on_cpu(case: Case, tile: Tile, order: str, blocks: int = 4) -> Array:
    """With so few blocks, each has several tiles."""
    given = Problem(case)
    out = given.run(order, "mma", tile, multiprocessors=blocks)
    given.assert_right(out)
    return out


@pytest.mark.parametrize("i", range(len(EPILOGUES)))
def test_epilogues_on_the_cpu(i: int) -> None:
    tile = (NARROW, SQUARE, LONG)[i % 3]
    case = replace(EPILOGUES[i], M=17, N=136, K=72)
    first = run_on_cpu(case, tile, "forward")
    np.testing.assert_array_equal(run_on_cpu(case, tile, "reverse"), first)
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
    for case in (EPILOGUES[3], EPILOGUES[4]):
        given = Problem(replace(case, M=33, N=80, K=64))
        given.assert_right(given.run("forward", "mma", SQUARE, in_place=True, multiprocessors=132))


def test_all_tiles_give_the_same_bits_on_the_cpu() -> None:
    case = replace(EPILOGUES[0], M=40, N=80, K=136)
    first, *others = (run_on_cpu(case, tile, "forward") for tile in (NARROW, SQUARE, LONG))
    for other in others:
        np.testing.assert_array_equal(first, other)


@settings(max_examples=5)
@given(M=st.integers(1, 100), N=st.integers(1, 12), K=st.integers(1, 30))
def test_any_size_on_the_cpu(M: int, N: int, K: int) -> None:
    run_on_cpu(replace(EPILOGUES[0], M=M, N=8 * N, K=8 * K), SQUARE, "reverse", blocks=1)


# --- with NVRTC, without a GPU -------------------------------------------------------------------


def test_no_tile_spills() -> None:
    jobs = []
    for i, tile in enumerate(TILES):
        for j, epilogue in enumerate(EPILOGUES[3:]):
            arch, gpu = GPUS[(i + j) % len(GPUS)]
            try:
                how = replace(epilogue, M=500, N=768, K=768).geometry(gpu, tile)
            except ValueError:  # no room for this tile, and none is left to choose from
                continue
            jobs.append((FILE, arch, (*kernels.stored_as(epilogue.storage), *how.defines)))
    assert_clean(jobs)


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
@variants
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
def test_epilogues_on_the_gpu(epilogue: Case, variant: str) -> None:
    for storage in DTYPES:
        for M, N, K in ((1, 8, 8), (130, 72, 200), (300, 1032, 520)):
            given = Problem(replace(epilogue, storage=storage, M=M, N=N, K=K))
            given.assert_right(given.run("gpu", variant), cupy)


@pytest.mark.gpu
@on_the_gpu
@pytest.mark.parametrize("float_out", [False, True])
def test_every_tile_gives_the_same_bits_on_the_gpu(float_out: bool) -> None:
    for M, N, K in ((1, 8, 8), (129, 264, 184), (260, 520, 1032), (3000, 776, 768)):
        given = Problem(Case(M, N, K, residual=True, float_out=float_out))
        expected = given.run("gpu", "mma")
        given.assert_right(expected, cupy)
        for tile in TILES:
            try:
                got = given.run("gpu", tile=tile)
            except ValueError:  # no room for this tile, and none is left to choose from
                continue
            np.testing.assert_array_equal(got, expected)


@pytest.mark.gpu
@on_the_gpu
@variants
def test_a_row_has_the_same_bits_alone_and_among_others(variant: str) -> None:
    for N, K in GPT2:
        many = Problem(Case(1000, N, K, gelu=True, float_out=True))
        among = many.run("gpu", variant)
        for rows in (slice(0, 1), slice(700, 717), slice(300, 600)):
            few = Problem(many.case)
            few.a = np.ascontiguousarray(many.a[rows])
            few.case = replace(many.case, M=len(few.a))
            np.testing.assert_array_equal(few.run("gpu", variant), among[rows])


@pytest.mark.gpu
@on_the_gpu
@variants
def test_the_residual_may_be_the_output_on_the_gpu(variant: str) -> None:
    for float_out in (False, True):
        given = Problem(Case(1000, 768, 768, residual=True, float_out=float_out))
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
    w = WeightMatrix(cupy.asarray(given.w), "bfloat16", None, "NK")
    a = cupy.asarray(np.asfortranarray(given.a)).reshape(2, 3, 24)
    bias, residual = cupy.asarray(given.bias), cupy.asarray(given.residual).reshape(2, 3, 16)
    out = ops.gemm(a, w, bias, residual)
    assert out.shape == (2, 3, 16)
    given.assert_right(out.get().reshape(6, 16))
    wide = ops.gemm(a, w, bias, dtype="float32")
    assert wide.dtype == np.float32
    assert ops.gemm(a, w).dtype == a.dtype


@one_order
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variant": "wgmma"}, "unknown variant 'wgmma': expected one of mma, hopper"),
        ({"dtype": "float16"}, "dtype 'float16': expected bfloat16, as a has, or float32"),
        ({"a": ((4, 64), "float32")}, "a: expected bfloat16 or float16, got float32"),
        ({"a": ((4, 64), "float16")}, "w: expected float16, as a has, got bfloat16"),
        ({"w": ((64, 48), "bfloat16", "KN")}, "w: expected layout 'NK', .* got 'KN'"),
        ({"w": ((44, 64), "bfloat16", "NK")}, "K and N in multiples of 8, got K 64, N 44"),
    ],
)
def test_wrong_input_is_refused(device: Any, change: dict[str, Any], message: str) -> None:
    shape, dtype, layout = change.pop("w", ((48, 64), "bfloat16", "NK"))
    w = WeightMatrix(cupy.zeros(shape, dtype), dtype, None, layout)
    a = cupy.zeros(*change.pop("a", ((4, 64), "bfloat16")))
    with pytest.raises(InputError, match=message):
        ops.gemm(a, w, **change)


@one_order
def test_an_output_at_an_odd_address_is_refused(device: Any) -> None:
    a = cupy.zeros((64, 64), "bfloat16")
    w = WeightMatrix(cupy.zeros((64, 64), "bfloat16"), "bfloat16", None, "NK")
    odd = cupy.zeros(64 * 64 + 4, "bfloat16")[4:].reshape(64, 64)
    with pytest.raises(InputError, match="out: expected data aligned to 16 bytes"):
        GEMM.bind((a, w), odd)
