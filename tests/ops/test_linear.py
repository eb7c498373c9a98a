"""The linear layer: choice of variants, results in the kv_cache, hi/lo weights, wrong input.

test_product_laws.py has the requirements of every kernel of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from launch_recorder import recording
from numpy.typing import NDArray

from gpt2block import InputError
from gpt2block.cuda import cupy
from gpt2block.cuda.kernels import FP8, HI_LO, cache_dtype
from gpt2block.ops.elementwise import SILU_MUL
from gpt2block.ops.engines.linear_matvec import TILES
from gpt2block.ops.layernorm import OPERATION as LAYERNORM
from gpt2block.ops.registry import STEPS
from gpt2block.ops.rmsnorm import OPERATION as RMSNORM
from tests import caches, devices
from tests.devices import GPU, assert_same_bits, on_one_order, one_order, slow
from tests.products import (
    EPS,
    FP8_E5M2,
    KERNELS,
    LINEAR,
    ODD,
    QKV_KERNELS,
    ROUNDS,
    SMALL,
    WEIGHTS,
    Case,
    use_variant,
)

Array = NDArray[Any]
OPERATION = LINEAR.OPERATION
TILE = TILES[-1]  # tile of matmul/decode/cores.cu with the fewest rows


class Arguments:
    """Arguments of a product: on the host by name, and on the device."""

    def __init__(self, M: int, K: int, N: int, dtype: str) -> None:
        self.kernel = KERNELS[f"linear-mma-{dtype}"]
        self.given = self.kernel.made(Case(M, K, N, norm=True, residual=True))
        names = "x", "w", "bias", "gamma", "beta", "residual"
        arrays = (self.kernel.uploaded(cupy, name, self.given[name]) for name in names)
        self.x, self.w, self.bias, self.gamma, self.beta, self.residual = arrays


# --- hi/lo weights, and LayerNorm --------------------------------------------------------------


@on_one_order
@pytest.mark.parametrize("variant", ["mma", "mma_tiles"])
def test_the_bound_of_x_gives_the_scale_of_its_terms(where: str, variant: str) -> None:
    """Bounds that are powers of two are exact; without a bound, x may have float16's range."""
    kernel, case = KERNELS[f"linear-{variant}-hi_lo"], Case(5, 176, 21, bias=False)
    given = kernel.made(case)

    def product(x: Array, bound: float | None = None) -> Array:
        there = cupy.asarray(x), kernel.uploaded(cupy, "w", given["w"])
        result: Array = OPERATION.bind(there, variant=variant, x_bound=bound).run().get()
        return result

    with devices.running_on(where):
        known = product(given["x"], 8.0)
        for power in (-100, -20, 40, 120):
            factor = np.float32(2.0**power)
            assert_same_bits(product(given["x"] * factor, 8.0 * 2.0**power), known * factor)
        for bound in (None, 6.0, 2.0**20):
            kernel.assert_right(product(given["x"], bound), given, case)
        assert np.isfinite(product(given["x"] * np.float32(2.0**12))).all()


@pytest.mark.parametrize("C", [104, slow(768)])
@one_order
def test_layernorm_apart_has_the_bits_of_the_fused_one(device: Any, C: int) -> None:
    given = Arguments(18, C, 24, "float16")
    vectors = given.gamma, given.beta
    norm = LAYERNORM.bind((given.x, *vectors), eps=EPS, variant="decode").run()
    apart = OPERATION.bind((norm, given.w), variant="mma_tiles").run().get()
    fused = OPERATION.bind((given.x, given.w, None, *vectors), eps=EPS, variant="mma").run().get()
    assert_same_bits(apart, fused)


GATED = ("bfloat16", False), ("float8_e4m3fn", True)


@pytest.mark.parametrize(
    ("dtype", "gelu"),
    [case if case in GATED else slow(*case) for case in product(WEIGHTS, (False, True))],
)
@one_order
def test_gate_and_rmsnorm_have_the_bits_of_their_own_kernels(
    device: Any, dtype: str, gelu: bool
) -> None:
    given = Arguments(7, 272, 80, dtype)
    halves = given.w.columns(0, 40), given.w.columns(40, 80)
    normed = RMSNORM.bind((given.x, given.gamma), eps=EPS, variant="stream").run()
    gate, up = (OPERATION.bind((normed, w), variant="mma").run().copy() for w in halves)
    apart = SILU_MUL.bind((gate, up), gelu=gelu).run().get()
    inputs = (given.x, halves[0], None, given.gamma, None, None, halves[1])
    fused = OPERATION.bind(inputs, eps=EPS, gelu=gelu, variant="mma").run().get()
    assert_same_bits(apart, fused)


# --- results in the kv_cache ----------------------------------------------------------------------


QKV = {
    "linear-matvec-float32": Case(3, 48, 21, norm=True),
    "linear-mma-bfloat16": Case(10, 784, 27, norm=True),
    "linear-mma_tiles-float8_e4m3fn": Case(7, 48, 144, tile=ODD),
    "linear-terms-bfloat16": Case(7, 48, 144, tile=ODD),
    "linear-wgmma-bfloat16": Case(10, 128, 111),
}


def of_qkv() -> Iterator[Any]:
    """Yield cases of every variant; only those of QKV, and one with a tile, are not slow."""
    for name, case in QKV.items():
        kind, where = name.rpartition("-")[0], "hopper" if "wgmma" in name else "shuffled"
        for other in KERNELS:
            if other.startswith(f"{kind}-"):
                marks = () if other == name else pytest.mark.slow
                yield pytest.param(where, other, case, None, marks=marks)
                sizes: dict[str, Any] = {} if case.tile else {"K": 768, "N": 3 * 768}
                for M in (1, 3, 10):
                    one = case._replace(M=M, **sizes)
                    yield pytest.param("gpu", other, one, None, marks=GPU.marks)
    few = Case(10, 528, 27, tile=SMALL._replace(tile=TILE))
    yield "shuffled", f"linear-matvec-{FP8_E5M2}", few, None
    yield slow("shuffled", "linear-matvec-bfloat16", Case(2, 784, 27, norm=True, tile=ROUNDS), None)
    # Weights and cache have one FP8 format or two.
    for n, variant in enumerate(("matvec", "mma", "mma_tiles")):
        for weights, kv in product((FP8_E5M2, "bfloat16", "float8_e4m3fn"), FP8):
            given = f"linear-{variant}-{weights}", Case(5, 272, 30), kv
            if (weights, kv) == ((FP8_E5M2, "bfloat16", "float8_e4m3fn")[n], [*FP8][n % 2]):
                yield pytest.param("shuffled", *given, marks=[pytest.mark.slow] * (n != 1))
            yield pytest.param("gpu", *given, marks=GPU.marks)


@pytest.mark.parametrize(("where", "name", "case", "kv_dtype"), list(of_qkv()))
def test_qkv(where: str, name: str, case: Case, kv_dtype: str | None) -> None:
    """Assert that q and the caches have the bits of the product.

    Tokens outside the cache are not stored. The cache has the sequences in reverse order, after
    another sequence.
    """
    kernel, M, C, n_ctx = KERNELS[name], case.M, case.N // 3, 4
    position = np.array([2, -1, n_ctx, 0, 1, 3, 0, 1, 2, 0], np.int32)[:M]
    given = kernel.made(case)
    rows = np.arange(M, 0, -1, dtype=np.int32)
    rows[2:3], rows[4:5] = M + 1, -1  # outside the cache
    kind = kv_dtype or cache_dtype(kernel.weights)
    expected, empty = kernel(where, given, case), np.full((M + 1, n_ctx, C), 77, np.float32)
    n = [variant.name for variant in OPERATION.variants].index(kernel.variant)
    options = {"operand": kernel.operand} if kernel.operand else {}
    patches = pytest.MonkeyPatch.context()
    with devices.running_on(where, case.sms), kernel.forced(case), patches as patch:
        if kernel.variant != "wgmma":
            use_variant(patch, n)
        k, v = (cupy.asarray(caches.stored(empty, kind)) for _ in range(2))
        there = {name: kernel.uploaded(cupy, name, each) for name, each in given.items()}
        q = cupy.full((M, C), np.nan, "float32")
        at = cupy.asarray(rows), cupy.asarray(position)
        inputs = (*kernel.inputs(there)[:5], k, v, *at)
        bound = STEPS["linear_qkv"].bind(inputs, q, eps=EPS, kv_dtype=kv_dtype, **options)
        assert [launch.name for launch in bound.launches] == [(*QKV_KERNELS, "decode_wgmma")[n]]
        bound.run()
        results = [q.get(), k.get(), v.get()]
    np.testing.assert_array_equal(results[0], expected[:, :C])
    for i, got in enumerate(results[1:]):
        stored = empty.copy()
        for m, p in enumerate(position):
            if 0 <= p < n_ctx and 0 <= rows[m] <= M:
                stored[rows[m], p] = expected[m, (i + 1) * C : (i + 2) * C]
        assert_same_bits(got, caches.stored(stored, kind))


# --- the function, and the choice between variants ------------------------------------------------


def test_where_tensor_cores_do_not_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = "mma: needs a GPU of compute capability {} or newer"
    for capability, K, dtype, message in (
        (80, 60, "bfloat16", "mma: K 60: expected a multiple of 8 for bfloat16"),
        (75, 64, "float32", needed.format(r"8\.0")),
        (70, 64, "float16", needed.format(r"7\.5")),
    ):
        monkeypatch.setattr("gpt2block.cuda.cards.capability_of", lambda *_, n=capability: n)
        with recording("8.0"):
            given = Arguments(1, K, 24, dtype)
            assert OPERATION.bind((given.x, given.w)).launches[0].name == "decode_cores"
            with pytest.raises(InputError, match=message):
                OPERATION.bind((given.x, given.w), variant="mma")


@one_order
def test_without_tensor_cores_more_rows_are_tiles(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of decode_cores keeps 8 rows; tiles of many rows read the weights once."""
    given = Arguments(33, 1024, 24, "float16")
    cores = OPERATION.bind((given.x, given.w), variant="matvec")
    monkeypatch.setattr("gpt2block.cuda.cards.capability_of", lambda *_: 70)
    few, more = (OPERATION.bind((given.x[:M], given.w), decoding=True) for M in (8, 33))
    assert [bound.launches[0].grid[1] for bound in (cores, few, more)] == [5, 1, 1]
    assert_same_bits(more.run().get(), cores.run().get())
    assert_same_bits(few.run().get(), cores.out.get()[:8])


@pytest.mark.parametrize("device", ["turing"], indirect=True)
@pytest.mark.parametrize("dtype", ["bfloat16", slow("float8_e4m3fn"), slow(HI_LO)])
def test_few_and_many_rows_have_the_same_bits_on_turing(device: Any, dtype: str) -> None:
    kernel, case = KERNELS[f"linear-mma-{dtype}"], Case(66, 272, 80, bias=False)
    given = kernel.made(case)
    x, w = cupy.asarray(given["x"]), kernel.uploaded(cupy, "w", given["w"])
    few = OPERATION.bind((x[:3], w), variant="mma").run().get()
    many = OPERATION.bind((x, w), variant="mma_tiles").run().get()
    assert_same_bits(few, many[:3])
    kernel.assert_right(many, given, case)
