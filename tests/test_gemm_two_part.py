"""The product of float accuracy on half-precision tensor cores: matmul/mma_two_part.cu.

On the CPU as in tests/test_gemm.py; how a tensor core itself adds up is to be seen on a GPU alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.cuda import cupy, kernels
from gpt2block.cuda.arrays import launch_at
from gpt2block.cuda.kernels import Geometry
from gpt2block.ops._gemm_mma import TWO_PART_FILE, TWO_PART_TILES, Tile, geometry
from gpt2block.reference import two_part
from tests import plain
from tests.compiling import assert_clean
from tests.devices import running_on
from tests.gpus import GPUS, H200, Gpu, this_gpu
from tests.test_gemm import GPT2, on_the_gpu
from tests.test_gemm import _tensor_cores as _tensor_cores  # noqa: PLC0414  # a fixture

Array = NDArray[Any]
LOW = 2048  # of lo's unit in one of hi
ODD = Tile(32, 40, (2, 1), 64, 3, 2)
PAIRS = Tile(32, 64, (1, 2), 128, 3, 1)


def joined(parts: Array, scale: Any) -> Array:
    wide = parts.astype(np.float64)
    value: Array = (wide[0] + wide[1] / LOW) * scale
    return value


@dataclass(frozen=True)
class Case:
    """A product, its epilogue, and the magnitude of a."""

    M: int
    N: int
    K: int
    bias: bool = True
    gelu: bool = False
    residual: bool = False
    two_part_out: bool = False
    size: float = 1.0

    def geometry(self, gpu: Gpu, tile: Tile | None = None) -> Geometry:
        return geometry(
            self.M,
            self.N,
            self.K,
            two_part=True,
            gelu=self.gelu,
            residual=self.residual,
            other_out=self.two_part_out,
            tile=tile,
            **gpu,
        )


EPILOGUES = (
    Case(0, 0, 0, bias=False),
    Case(0, 0, 0, gelu=True, two_part_out=True),
    Case(0, 0, 0, residual=True),
)


class Problem:
    """Inputs of a case, whole and two-part, and its results."""

    def __init__(self, case: Case) -> None:
        self.case = case
        rng = np.random.default_rng([case.M, case.N, case.K])
        self.a = rng.standard_normal((case.M, case.K), np.float32) * np.float32(case.size)
        self.a[case.M // 2] = 0  # a row of zeros
        self.a[:, case.K // 2] *= 100  # a column that sticks out
        w = rng.standard_normal((case.N, case.K), np.float32)
        self.w = w / np.float32(math.sqrt(case.K))
        self.bias = rng.standard_normal(case.N, np.float32) if case.bias else None
        residual = rng.standard_normal((case.M, case.N), np.float32)
        self.residual = residual if case.residual else None
        self.scale = 2.0**-4  # of a two-part result

    def poisoned(self) -> Array:
        c = self.case
        if c.two_part_out:
            return np.full((2, c.M, c.N), np.nan, np.float16)
        return np.full((c.M, c.N), np.nan, np.float32)

    def run(self, where: str, tile: Tile | None = None) -> Array:
        """On a GPU twice, with the same bits; on the CPU, blocks have several tiles."""
        c = self.case
        host = (*two_part(self.a), *two_part(self.w), self.bias, self.residual)
        results: list[Array] = []
        with running_on(where):
            few: Gpu = {"sms": 2, "most_shared": H200["most_shared"]}
            how = c.geometry(this_gpu() if where == "gpu" else few, tile)
            for _ in range(1 + (where == "gpu")):
                arrays = [None if x is None else cupy.asarray(x) for x in host]
                out = cupy.asarray(self.poisoned())
                outputs = (None, out) if c.two_part_out else (out, None)
                args = (*arrays, *outputs, 1 / self.scale, c.M, c.N, c.K)
                launch_at(TWO_PART_FILE, how, args, "float16").run()
                results.append(out.get())
        np.testing.assert_array_equal(results[0], results[-1])
        return results[0]

    def truth(self) -> Array:
        """In float64."""
        bias, residual = (
            x if x is None else x.astype(np.float64) for x in (self.bias, self.residual)
        )
        a, w = self.a.astype(np.float64), self.w.T.astype(np.float64)
        return reference.gemm(a, w, bias, residual, gelu=self.case.gelu)

    def assert_right(self, out: Array, xp: Any = np) -> None:
        c = self.case
        truth = self.truth()
        by_hand = plain.product(xp.asarray(self.a), xp.asarray(self.w.T), xp)
        by_hand = by_hand if self.bias is None else by_hand + xp.asarray(self.bias)
        by_hand = plain.gelu(by_hand, xp) if c.gelu else by_hand
        by_hand = by_hand if self.residual is None else by_hand + xp.asarray(self.residual)
        by_hand = by_hand if xp is np else by_hand.get()
        got = joined(out, self.scale).astype(np.float32) if c.two_part_out else out
        plain.assert_as_accurate(got, truth, by_hand)


# --- on the CPU ----------------------------------------------------------------------------------


def run_on_cpu(case: Case, tile: Tile, order: str) -> Array:
    given = Problem(case)
    out = given.run(order, tile)
    given.assert_right(out)
    return out


def test_infinity_and_nan_are_what_they_are_in_float() -> None:
    given = Problem(Case(37, 40, 136))
    given.a[2, 5], given.a[3, 7], given.a[4, 9] = np.inf, -np.inf, np.nan
    given.a[5, [11, 13]] = np.inf, -np.inf
    given.w[6, 8], given.w[7] = np.nan, 0
    with np.errstate(invalid="ignore"):
        truth = given.truth()
        out = given.run("forward", ODD)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(truth))
    wild = np.isinf(truth)
    assert wild[2:4].sum() == 2 * 38
    np.testing.assert_array_equal(out[wild], truth[wild])
    clean = Problem(given.case)
    clean.w[7] = 0
    same = np.isfinite(truth)
    np.testing.assert_array_equal(out[same], clean.run("forward", ODD)[same])


def test_what_is_infinite_beside_next_to_nothing_is_nan() -> None:
    """Where float has infinity: 1e-12 of the largest of its row has a high part of 0."""
    given = Problem(Case(16, 8, 8, bias=False))
    given.a[1, 3] = np.inf
    given.w[:, 0], given.w[:, 3] = 1.0, 1e-13
    assert np.isnan(given.run("forward", ODD)[1]).all()


def test_scales_far_apart() -> None:
    """Each of the sums, before it has met both scales, would be beyond float."""
    given = Problem(Case(16, 8, 136, bias=False, size=1e33))
    given.w *= np.float32(1e-30)
    given.assert_right(given.run("forward", ODD))
    given.a, given.w = given.a * np.float32(1e-36), given.w * np.float32(1e36)
    given.assert_right(given.run("forward", ODD))


@pytest.mark.parametrize("i", range(len(EPILOGUES)))
def test_epilogues_on_the_cpu(monkeypatch: pytest.MonkeyPatch, i: int) -> None:
    case = replace(EPILOGUES[i], M=37, N=88, K=264)
    first = run_on_cpu(case, ODD, "forward")
    with monkeypatch.context() as patch:
        patch.setenv("COPIES_AT_ONCE", "1")  # by cp.async
        np.testing.assert_array_equal(run_on_cpu(case, ODD, "reverse"), first)
    if i == 0:  # whatever the tile
        np.testing.assert_array_equal(run_on_cpu(case, PAIRS, "shuffled"), first)
    run_on_cpu(replace(case, M=1, N=8, K=8), ODD, "shuffled")


# --- with NVRTC, without a GPU -------------------------------------------------------------------


def test_no_tile_spills() -> None:
    jobs = []
    for i, tile in enumerate(TWO_PART_TILES):
        for j, epilogue in enumerate(EPILOGUES[1:]):
            arch, gpu = GPUS[(i + j) % len(GPUS)]
            try:
                how = replace(epilogue, M=500, N=768, K=768).geometry(gpu, tile)
            except ValueError:  # no room for this tile, and none is left to choose from
                continue
            jobs.append((TWO_PART_FILE, arch, (*kernels.stored_as("float16"), *how.defines)))
    assert_clean(jobs)


# --- on the GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu
@on_the_gpu
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_as_accurate_as_float32(size: float) -> None:
    for M in (17, 1024):
        for N, K in GPT2:
            given = Problem(Case(M, N, K, size=size))
            given.assert_right(given.run("gpu"), cupy)


@pytest.mark.gpu
@on_the_gpu
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
def test_epilogues_on_the_gpu(epilogue: Case) -> None:
    for M, N, K in ((1, 8, 8), (130, 72, 200), (300, 1032, 520)):
        given = Problem(replace(epilogue, M=M, N=N, K=K))
        given.assert_right(given.run("gpu"), cupy)


@pytest.mark.gpu
@on_the_gpu
def test_every_tile_gives_the_same_bits_on_the_gpu() -> None:
    given = Problem(Case(260, 520, 1032))
    expected = given.run("gpu")
    given.assert_right(expected, cupy)
    for tile in TWO_PART_TILES:
        try:
            got = given.run("gpu", tile)
        except ValueError:  # no room for this tile, and none is left to choose from
            continue
        np.testing.assert_array_equal(got, expected)
