"""The linear layer for many rows of decoding: matmul/decode_tiles.cu and its launches.

On the CPU the PTX instructions are imitated (emulator/mma_ptx.h), without clusters; what a cluster
adds up is compared bit by bit with a single block's sums on the GPU.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import cuda, reference
from gpt2block.cuda import cupy, kernels
from gpt2block.cuda.arrays import compute_capability, launch_at
from gpt2block.cuda.kernels import FP8
from gpt2block.ops import _linear_mma_tiles as mma_tiles
from gpt2block.ops._linear_mma_tiles import TILES, Tile, choose, geometry, shared_bytes
from gpt2block.ops._matrix import storage_of
from gpt2block.ops.layernorm import bind as bind_layernorm
from gpt2block.ops.linear import bind as bind_linear
from gpt2block.weights.matrix import WeightMatrix
from tests import devices, plain
from tests.compiling import Job, assert_clean
from tests.devices import assert_same_bits, every_device, on_gpu, one_order
from tests.gpus import GPUS, H200

Array = NDArray[Any]
WEIGHTS = ("float16", "bfloat16", "float32", *FP8)
DTYPES: dict[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
}
ODD, EVEN = Tile(48, 64, (1, 4), 2), Tile(32, 64, (2, 2), 3)  # end within and after the matrices
device = devices.device
every_weight = pytest.mark.parametrize("dtype", WEIGHTS)


class Product:
    """Inputs of a product, and its results by the formula and by the kernel."""

    def __init__(self, M: int, K: int, N: int, dtype: str) -> None:
        self.x = plain.normal(0, M, K)
        matrix = plain.normal(1, N, K) / np.float32(math.sqrt(K))
        self.w = WeightMatrix.quantize(matrix, dtype, "NK")
        self.bias = plain.normal(2, N)
        self.residual = plain.normal(3, M, N)

    def launched(self, tile: Tile, rows: slice = slice(None), gelu: bool = True) -> Array:
        """The kernel's result for some of the rows, from poisoned memory."""
        there = [cupy.asarray(a) for a in (self.bias, self.residual[rows])]
        x, w = cupy.asarray(self.x[rows]), uploaded(self.w)
        out = cupy.full((len(x), w.N), np.nan, "float32")
        args = (x, w.data, w.scale, *there, out, len(x), w.N, w.K, int(gelu))
        launched("linear_decode_tiles", args, len(x), w, "float32", tile)
        result: Array = out.get()
        return result

    def exact(self) -> Array:
        bias, residual = (a.astype(np.float64) for a in (self.bias, self.residual))
        x = self.x.astype(np.float64)
        result: Array = reference.linear(x, self.w, bias, residual=residual, gelu=True)
        return result

    def rounding_of_terms(self) -> float:
        """How much the terms of x can change a result: those of float16 and tf32 have 22 bits."""
        if self.w.dtype != "bfloat16":
            return 0.0
        return plain.rounding_of_bfloat16_terms(self.x, self.w.dequantized())

    def by_loop(self) -> Array:
        product = plain.matmul_bias(self.x, self.w.dequantized(), self.bias)
        result: Array = self.residual + plain.gelu(product)
        return result


def launched(
    kernel: str, args: tuple[Any, ...], M: int, w: WeightMatrix, T: str, tile: Tile
) -> None:
    where = geometry(kernel, M, w.N, w.K, w.dtype, tile)
    launch_at(mma_tiles.FILE, where, args, *storage_of(w, T)).run()


def uploaded(w: WeightMatrix) -> WeightMatrix:
    scale = None if w.scale is None else cupy.asarray(w.scale)
    return WeightMatrix(cupy.asarray(w.data), w.dtype, scale, w.layout)


@pytest.mark.parametrize(
    ("tile", "shape"),
    [(ODD, (25, 176, 37)), (EVEN, (33, 1168, 32))],
    ids=("48x64", "32x64"),
)
@every_weight
@every_device
def test_is_as_accurate_as_a_loop(
    device: Any, dtype: str, tile: Tile, shape: tuple[int, int, int]
) -> None:
    given = Product(*shape, dtype)
    plain.assert_as_accurate(
        given.launched(tile), given.exact(), given.by_loop(), given.rounding_of_terms()
    )


@every_weight
@one_order
def test_bits_depend_on_no_other_row(device: Any, dtype: str) -> None:
    given = Product(65, 272, 40, dtype)
    whole = given.launched(EVEN)
    for rows in (slice(0, 1), slice(0, 17), slice(1, 64), slice(64, 65)):
        assert_same_bits(given.launched(ODD, rows), whole[rows])
    given.x[1::2] = np.nan
    given.x[2::4] = np.inf
    assert_same_bits(given.launched(ODD)[::4], whole[::4])


@every_weight
@on_gpu
def test_every_tile_has_the_same_bits(device: Any, dtype: str) -> None:
    for M, K, N in ((200, 768, 2304), (65, 3072, 768), (64, 768, 5001), (18, 1600, 96)):
        given = Product(M, K, N, dtype)
        first = given.launched(ODD)
        for tile in TILES:
            for cluster in (1, 2, 3, 6, 8) if compute_capability() >= 90 else (1,):
                pairs = math.prod(tile.warps) % 4 == 0  # the threads copy whole groups of rows
                chunks = 2 if cluster > 1 and dtype in DTYPES and pairs else 1
                one = tile._replace(cluster=cluster, chunks=chunks)
                if shared_bytes(one, K, dtype) <= H200["most_shared"] - 1024:
                    assert_same_bits(given.launched(one), first)
        for rows in (slice(0, 1), slice(1, 18)):
            assert_same_bits(given.launched(TILES[0], rows), first[rows])


@every_weight
@every_device
def test_appends_k_and_v(device: Any, dtype: str) -> None:
    M, C, n_ctx, B = 7, 48, 5, 3
    given = Product(M, C, 3 * C, dtype)
    w = uploaded(given.w)
    T = "bfloat16" if dtype in FP8 else dtype
    where = [(0, 4), (1, 0), (2, 5), (3, 1), (-1, 2), (2, -1), (2, 3)]  # some are outside
    row, position = (
        cupy.asarray(np.array(column, np.int32)) for column in zip(*where, strict=True)
    )
    q = cupy.full((M, C), np.nan, "float32")
    caches = [cupy.asarray(np.full((B, n_ctx, C), 9, DTYPES[T])) for _ in range(2)]
    arrays = (cupy.asarray(given.x), w.data, w.scale, cupy.asarray(given.bias), row, position)
    args = (*arrays, q, *caches, M, C, C, B, n_ctx)
    launched("qkv_decode_tiles", args, M, w, T, ODD)
    given.residual = np.full((M, 3 * C), -0.0, np.float32)
    expected = given.launched(ODD, gelu=False)
    assert_same_bits(q.get(), expected[:, :C])
    for i, cache in enumerate(caches):
        after = np.full((B, n_ctx, C), 9, DTYPES[T])
        for m, (b, at) in enumerate(where):
            if 0 <= b < B and 0 <= at < n_ctx:
                after[b, at] = expected[m, (i + 1) * C : (i + 2) * C].astype(DTYPES[T])
        assert_same_bits(cache.get(), after)


@every_weight
@one_order
def test_has_the_bits_of_the_kernel_for_few_rows(device: Any, dtype: str) -> None:
    """Also of one row: M only chooses the kernel."""
    shapes = [(20, 1168, 37)]
    if not cuda.replaced():
        shapes += [(64, 768, 2304), (200, 3072, 768), (65, 768, 50257)]
    for M, K, N in shapes:
        given = Product(M, K, N, dtype)
        x, w, bias = cupy.asarray(given.x), uploaded(given.w), cupy.asarray(given.bias)
        results = {}
        for variant in ("mma", "mma_tiles"):
            out = cupy.full((M, N), np.nan, "float32")
            bind_linear((x, w, bias), out, gelu=True, variant=variant).run()
            results[variant] = out.get()
        assert_same_bits(results["mma_tiles"], results["mma"])
        one = cupy.asarray(given.x[-1:])
        alone = bind_linear((one, w, bias), gelu=True, decoding=True).run().get()
        assert_same_bits(alone, results["mma"][-1:])


@pytest.mark.parametrize("C", [64, 104, 768])
@one_order
def test_layernorm_apart_has_the_bits_of_the_fused_one(device: Any, C: int) -> None:
    given = Product(18, C, 24, "float16")
    x, w = cupy.asarray(given.x), uploaded(given.w)
    gamma, beta = (cupy.asarray(plain.normal(seed, C)) for seed in (4, 5))
    norm = bind_layernorm((x, gamma, beta), eps=1e-5, variant="decode").run()
    apart = bind_linear((norm, w), variant="mma_tiles").run().get()
    fused = bind_linear((x, w, None, gamma, beta), variant="mma").run().get()
    assert_same_bits(apart, fused)


@pytest.mark.parametrize("gpu", [gpu for _, gpu in GPUS])
@pytest.mark.parametrize("capability", [80, 90])
@every_weight
def test_a_tile_is_chosen_that_fits(gpu: Any, capability: int, dtype: str) -> None:
    for M in (1, 17, 64, 200, 512, 4096):
        for N, K in ((2304, 768), (768, 3072), (50257, 768), (4800, 1600), (1600, 6400), (1, 16)):
            most_shared = gpu["most_shared"] - 1024
            sms = gpu["sms"]
            tile = choose(M, N, K, dtype, capability=capability, sms=sms, most_shared=most_shared)
            assert shared_bytes(tile, K, dtype) <= most_shared
            assert tile.cluster == 1 or capability >= 90
            found = geometry("linear_decode_tiles", M, N, K, dtype, tile)
            assert found.grid[0] % tile.cluster == 0
            assert found.grid[0] >= tile.cluster * math.ceil(M / tile.rows)


def test_every_launch_compiles_without_spills() -> None:
    """In each dtype, with the constants that GPT-2's products get on GPUs with room for them."""
    stored = {name: kernels.stored_as("bfloat16", name) for name in FP8}
    stored |= {name: kernels.stored_as(name) for name in DTYPES}
    jobs: list[Job] = []
    for arch, gpu in GPUS[:2]:
        most_shared, capability = gpu["most_shared"] - 1024, int(arch.removeprefix("sm_"))
        for M in (17, 64, 256, 512):
            for N, K in ((2304, 768), (768, 3072), (50257, 768)):
                for dtype, constants in stored.items():
                    sizes = (M, N, K, dtype)
                    limits = {"capability": capability, "sms": gpu["sms"]}
                    tile = choose(*sizes, most_shared=most_shared, **limits)
                    defines = geometry("", *sizes, tile).defines
                    jobs.append((mma_tiles.FILE, arch, (*constants, *defines)))
    assert_clean(list(dict.fromkeys(jobs))[::4])
