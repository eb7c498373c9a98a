"""RMSNorm with products on tensor cores: llama/rmsnorm_matmul_mma.cu and its launches.

On the CPU the PTX instructions are imitated (emulator/mma_ptx.h): layouts in shared memory
and registers, the pipeline's waits and every address are tried there; `mma.sync` itself on the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.cuda import cupy, kernels
from gpt2block.cuda.arrays import launch_at
from gpt2block.cuda.kernels import Geometry
from gpt2block.emulator import ORDERS
from gpt2block.ops._rmsnorm_mma import FILE, TILES, Tile, fits, geometry
from gpt2block.ops.rope import exponent_step
from tests import plain
from tests.compiling import Job, assert_clean
from tests.devices import running_on
from tests.gpus import A100, GPUS, H200, RTX, Gpu, cupy_with, this_gpu

Array = NDArray[Any]
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
STORED = [(s, w) for s in DTYPES for w in (None, *kernels.FP8)]
EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """A problem, and how it is stored."""

    matrices: int
    M: int
    N: int
    K: int
    storage: str = "float16"
    weights: str | None = None
    layout: str = "KN"
    norm: bool = True
    residual: bool = False
    head_dim: int = 0
    seq_len: int = 7  # shorter than M: several sequences
    start: int = 3
    theta: float = 10000.0
    stride: int = 8  # beyond K, from a row of x to the next
    scaled: bool = True

    @property
    def weight(self) -> int:
        return 1 if self.weights else 2

    def geometry(self, gpu: Gpu, tile: Tile | None = None) -> Geometry:
        return geometry(
            self.matrices,
            self.M,
            self.N,
            self.K,
            weight=self.weight,
            layout=self.layout,
            norm=self.norm,
            residual=self.residual,
            tile=tile,
            **gpu,
        )


class Problem:
    """Inputs of a case, and its results by the formula."""

    def __init__(self, case: Case) -> None:
        self.case = case
        rng = np.random.default_rng([case.matrices, case.M, case.N, case.K])
        T = DTYPES[case.storage]
        self.x = np.full((case.M, case.K + case.stride), np.nan, T)
        self.x[:, : case.K] = rng.standard_normal((case.M, case.K)) + 0.5
        self.residual = (rng.standard_normal((case.M, case.K)) - 0.2).astype(T)
        self.gamma = rng.uniform(0.5, 1.5, case.K).astype(T) if case.norm else None
        self.scales = [
            rng.uniform(0.5, 2, case.N).astype(np.float32) if case.scaled else None
            for _ in range(case.matrices)
        ]
        self.stored, self.wide = [], []  # as the kernel gets them; (K, N), float64
        for _ in range(case.matrices):
            w = rng.standard_normal((case.K, case.N)).astype(np.float32) / np.float32(4)
            if case.weights:
                bits = reference.to_fp8(w, case.weights)
                value: Array = reference.from_fp8(bits, case.weights)
            else:
                bits = w.astype(T)
                value = bits
            self.stored.append(np.ascontiguousarray(bits if case.layout == "KN" else bits.T))
            self.wide.append(value.astype(np.float64))

    def launched(self, how: Geometry) -> tuple[Array, Array | None]:
        """`out` and `sum`, from poisoned memory."""
        c, T = self.case, DTYPES[self.case.storage]

        def there(array: Array | None) -> Any:
            return None if array is None else cupy.asarray(array)

        out = cupy.full((c.M, c.N), np.nan, T)
        sum = cupy.full((c.M, c.K), np.nan, T) if c.residual else None
        x, gamma = there(self.x), there(self.gamma)
        residual = there(self.residual if c.residual else None)
        pairs = zip(self.stored, self.scales, strict=True)
        weights = [there(array) for pair in pairs for array in pair]
        sizes = (EPS, c.K + c.stride, c.M, c.N, c.K)
        if c.matrices == 1:
            rope = (c.seq_len, c.head_dim, c.start, *exponent_step(c.theta, c.head_dim or 2))
            args = (x, gamma, *weights, out, *sizes, *rope)
        else:
            args = (x, residual, sum, gamma, *weights, out, *sizes)
        launch_at(FILE, how, args, c.storage, c.weights).run()
        return out.get(), None if sum is None else sum.get()

    def hidden(self) -> Array:
        """x, or x + residual as it is stored."""
        x = self.x[:, : self.case.K]
        if not self.case.residual:
            return x
        wide = x.astype(np.float32) + self.residual.astype(np.float32)
        return wide.astype(x.dtype)

    def formula(self, dtype: Any, xp: Any = np) -> Array:
        """In float64 the truth; in float32 the plain evaluation, rounded where the kernel rounds.

        The row's factor comes after the product. The plain product is evaluated by `xp`.
        """
        c, T = self.case, DTYPES[self.case.storage]
        exact = dtype == np.float64
        h = self.hidden().astype(dtype)
        n, factor = h, dtype(1)
        if self.gamma is not None:
            square = (h * h).sum(-1, keepdims=True) if exact else plain.running_sum(h * h)
            factor = 1 / np.sqrt(square / dtype(c.K) + dtype(EPS))
            n = h * self.gamma.astype(dtype)
        n = n if exact else n.astype(T).astype(dtype)
        y = []
        for w, scale in zip(self.wide, self.scales, strict=True):
            product = n @ w
            if not exact:
                product = plain.product(xp.asarray(n), xp.asarray(w.astype(dtype)), xp)
                product = product if xp is np else product.get()
            y.append(product * factor * (dtype(1) if scale is None else scale.astype(dtype)))
        out = y[0] / (1 + np.exp(-y[0])) * y[1] if c.matrices == 2 else y[0]
        if c.head_dim:
            out = self.turned(out, dtype)
        rounded: Array = out if exact else out.astype(T).astype(np.float32)
        return rounded

    def turned(self, y: Array, dtype: Any) -> Array:
        c = self.case
        pair = np.arange(0, c.N, 2)
        frequency = dtype(c.theta) ** (-(pair % c.head_dim).astype(dtype) / dtype(c.head_dim))
        position = (c.start + np.arange(c.M) % c.seq_len).astype(dtype)
        angle = position[:, None] * frequency
        r, i = y[:, ::2], y[:, 1::2]
        both = r * np.cos(angle) - i * np.sin(angle), r * np.sin(angle) + i * np.cos(angle)
        return np.stack(both, -1).reshape(c.M, c.N)

    def assert_right(self, out: Array, sum: Array | None, xp: Any = np) -> None:
        truth, by_hand = self.formula(np.float64), self.formula(np.float32, xp)
        plain.assert_as_accurate(out.astype(np.float32), truth, by_hand)
        if sum is not None:
            np.testing.assert_array_equal(sum, self.hidden())


def run(where: str, case: Case, tile: Tile | None = None) -> None:
    """On a GPU twice, and both must give the same bits."""
    given = Problem(case)
    with running_on(where):
        how = case.geometry(this_gpu() if where == "gpu" else H200, tile)
        results = [given.launched(how) for _ in range(1 + (where == "gpu"))]
    (out, sum), (again, sum_again) = results[0], results[-1]
    np.testing.assert_array_equal(out, again)
    if sum is not None:
        np.testing.assert_array_equal(sum, sum_again)
    given.assert_right(out, sum, cupy if where == "gpu" else np)


# --- which tile ----------------------------------------------------------------------------------


def names(how: Geometry) -> dict[str, Any]:
    return dict(how.defines)


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
    how = Case(matrices, M, N, 4096).geometry(H200)
    chosen = names(how)
    assert (chosen["MMA_ROWS"], chosen["MMA_COLUMNS"]) == (rows, columns)
    assert how.grid == (blocks,)


@pytest.mark.parametrize("gpu", [A100, H200, RTX], ids=["A100", "H200", "RTX"])
@pytest.mark.parametrize("weights", [None, "float8_e4m3fn"])
def test_a_tile_has_room_on_every_gpu(gpu: Gpu, weights: str | None) -> None:
    for M in (1, 16, 17, 64, 128, 500, 5000):
        for matrices, N, residual in ((1, 4096, False), (2, 11008, True)):
            for layout in ("KN", "NK"):
                case = Case(matrices, M, N, 4096, weights=weights, layout=layout)
                how = replace(case, residual=residual).geometry(gpu)
                chosen = names(how)
                blocks, threads = chosen["MMA_BLOCKS"], how.block[0]
                assert (how.shared + 1024) * blocks <= gpu["most_shared"] + 1024
                assert chosen["MMA_STAGES"] >= 2
                assert threads in (128, 256)
                per_warp = chosen["MMA_COLUMNS"] // chosen["MMA_WARPS_N"]
                assert per_warp % (16 if weights else 8) == 0
                assert how.grid[0] * chosen["MMA_ROWS"] * chosen["MMA_COLUMNS"] >= M * N * matrices


def test_sizes_that_do_not_lie_on_16_bytes_are_told() -> None:
    assert fits(8, 8, 8, 2, "KN")
    assert fits(16, 8, 16, 1, "KN")
    assert fits(8, 16, 16, 1, "NK")
    for N, K, stride, weight, layout in (
        (4, 8, 8, 2, "KN"),
        (8, 4, 8, 2, "NK"),
        (8, 8, 12, 2, "KN"),
        (8, 16, 16, 1, "KN"),
        (16, 8, 8, 1, "NK"),
    ):
        assert not fits(N, K, stride, weight, layout)


# --- on the CPU ----------------------------------------------------------------------------------

stored = pytest.mark.parametrize(("storage", "weights"), STORED)
either_layout = pytest.mark.parametrize("layout", ["KN", "NK"])
# Two warps share K and a row's squares; four warps share rows and columns, each has an odd number
# of fragments side by side, and threads are left over when weights are copied.
TINY = Tile(16, 32, (1, 1, 2), 32, 3, 1)
ODD = Tile(32, 48, (2, 2, 1), 64, 2, 1)


@pytest.mark.parametrize(
    ("storage", "weights", "layout"),
    [
        ("float16", None, "NK"),
        ("float16", "float8_e5m2", "KN"),
        ("float16", "float8_e4m3fn", "NK"),
        ("bfloat16", "float8_e5m2", "NK"),
        ("bfloat16", "float8_e4m3fn", "KN"),
    ],
)
def test_dtypes_and_layouts_on_the_cpu(storage: str, weights: str | None, layout: str) -> None:
    for case in (Case(1, 21, 80, 144, head_dim=16), Case(2, 21, 80, 144)):
        stored = replace(case, storage=storage, weights=weights, layout=layout)
        run("shuffled", stored, TINY)


@pytest.mark.parametrize("at_once", [False, True])
def test_the_pipeline_waits_for_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    if at_once:  # copies by cp.async arrive immediately, not when a thread waits for them
        monkeypatch.setenv("COPIES_AT_ONCE", "1")
    for order in ORDERS:
        for K in (64, 64 * 5 + 8):
            run(order, Case(2, 40, 40, K, residual=True), ODD)


@settings(max_examples=6)
@given(M=st.integers(1, 100), N=st.integers(1, 9), K=st.integers(1, 40), matrices=st.integers(1, 2))
def test_any_size_on_the_cpu(M: int, N: int, K: int, matrices: int) -> None:
    """Without a norm, scales and space between the rows, too."""
    run("reverse", Case(matrices, M, 8 * N, 8 * K, norm=False, scaled=False, stride=0), ODD)


# --- with NVRTC, without a GPU -------------------------------------------------------------------


def test_no_tile_spills() -> None:
    jobs = []
    for i, tile in enumerate(TILES):
        for residual in (False, True):
            layout = "NK" if (i + residual) % 2 else "KN"
            case = Case(2, 500, 4096, 4096, layout=layout, residual=residual)
            if tile.rows < 64 and residual:
                continue  # few registers, compiled once
            room = [(arch, gpu) for arch, gpu in GPUS if has_room(case, gpu, tile)]
            arch, gpu = room[(i + residual) % len(room)]
            jobs.append(job(arch, gpu, case, tile))
    assert_clean(jobs)


def has_room(case: Case, gpu: Gpu, tile: Tile) -> bool:
    try:
        case.geometry(gpu, tile)
    except ValueError:  # no tile is left to choose from
        return False
    return True


def test_no_dtype_spills() -> None:
    """With the tile that many rows get: the one with most registers."""
    jobs = []
    for storage, weights in STORED:
        for layout in ("KN", "NK"):
            turn = (layout == "KN") + (storage == "float16") + [None, *kernels.FP8].index(weights)
            case = Case(2, 4096, 4096, 4096, storage, weights, layout)
            jobs.append(job(*GPUS[turn % len(GPUS)], case))
    assert_clean(jobs)


def job(arch: str, gpu: Gpu, case: Case, tile: Tile | None = None) -> Job:
    stored = kernels.stored_as(case.storage, case.weights)
    return FILE, arch, (*stored, *case.geometry(gpu, tile).defines)


# --- on the GPU ----------------------------------------------------------------------------------


@pytest.fixture
def _tensor_cores() -> None:
    cupy_with()


on_the_gpu = pytest.mark.usefixtures("_tensor_cores")


@pytest.mark.gpu
@on_the_gpu
@stored
@either_layout
@pytest.mark.parametrize("matrices", [1, 2])
def test_every_dtype_and_layout_on_the_gpu(
    storage: str, weights: str | None, layout: str, matrices: int
) -> None:
    for M, N, K in ((1, 16, 16), (21, 80, 144), (300, 1040, 528)):
        case = Case(matrices, M, N, K, storage, weights, layout)
        run("gpu", replace(case, head_dim=16) if matrices == 1 else replace(case, residual=True))


@pytest.mark.gpu
@on_the_gpu
@pytest.mark.parametrize("matrices", [1, 2])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_on_the_gpu(tile: Tile, matrices: int) -> None:
    for M, N, K in ((1, 8, 8), (129, 264, 3 * tile.slice - 8), (260, 520, 1024)):
        run("gpu", Case(matrices, M, N, K), tile)


@pytest.mark.gpu
@on_the_gpu
@settings(max_examples=25)
@given(
    M=st.integers(1, 600),
    N=st.integers(1, 60),
    K=st.integers(1, 60),
    matrices=st.integers(1, 2),
    norm=st.booleans(),
)
def test_any_size_on_the_gpu(M: int, N: int, K: int, matrices: int, norm: bool) -> None:
    run("gpu", Case(matrices, M, 8 * N, 8 * K, norm=norm))


@pytest.mark.gpu
@on_the_gpu
@pytest.mark.parametrize("M", [16, 500])
def test_llama_sizes_on_the_gpu(M: int) -> None:
    run("gpu", Case(1, M, 4096, 4096, head_dim=128, seq_len=M, start=100))
    run("gpu", Case(2, M, 11008, 4096))
