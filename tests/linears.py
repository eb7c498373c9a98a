"""The linear layer for tests of its variants: inputs, results, and what is exact."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import Bound
from gpt2block.cuda.kernels import FP8, TWO_PART, cache_dtype
from gpt2block.ops import _linear_matvec, _linear_mma, _linear_mma_tiles, _linear_tiles
from gpt2block.ops.registry import STEPS
from gpt2block.weights.matrix import WeightMatrix
from gpt2block.weights.two_part import TwoPartMatrix
from tests import plain
from tests.devices import H200, assert_same_bits, running_on

Array = NDArray[Any]
DTYPES: dict[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
}
WEIGHTS = (*DTYPES, *FP8)
EPS = 1e-5
LINEAR = importlib.import_module("gpt2block.ops.linear")
MODULES: dict[str, Any] = {
    "matvec": _linear_matvec,
    "mma": _linear_mma,
    "mma_tiles": _linear_mma_tiles,
    "tiles": _linear_tiles,
}
KERNELS = ("qkv_matvec", "qkv_decode_mma", "qkv_decode_tiles")  # in the order of the variants
every_weight = pytest.mark.parametrize("dtype", WEIGHTS)


@dataclass(frozen=True, eq=False)
class Joined(WeightMatrix):
    """float32 weights that kernels get as a TwoPartMatrix."""


class Arrays(NamedTuple):
    x: Array  # (M, K)
    w: WeightMatrix
    bias: Array
    gamma: Array
    beta: Array
    residual: Array  # (M, N)

    def rows(self, rows: slice) -> Arrays:
        """The same for some rows of x."""
        return self._replace(x=self.x[rows], residual=self.residual[rows])


class Case(NamedTuple):
    """Sizes, dtype of the weights, what is done; cut: another layout, or tile, than the chosen."""

    M: int
    K: int
    N: int
    dtype: str
    norm: bool = True
    residual: bool = False
    gelu: bool = False
    cut: Any = None
    bias: bool = True
    in_place: bool = True  # out is the residual, if there is one


def arrays(M: int, K: int, N: int, dtype: str) -> Arrays:
    matrix = plain.normal(1, N, K) / np.float32(math.sqrt(K))
    joined = dtype == TWO_PART
    kind, stored = (Joined, "float32") if joined else (WeightMatrix, dtype)
    return Arrays(
        plain.normal(0, M, K),
        kind.quantize(matrix, stored, "NK"),
        plain.normal(2, N),
        plain.normal(3, K),
        plain.normal(4, K),
        plain.normal(5, M, N),
    )


def wide(array: Array) -> Array:
    return array.astype(np.float64)


def plain_linear(given: Arrays, case: Case, xp: Any = np) -> Array:
    """By sequential sums in float32; xp: NumPy, or CuPy for large sizes."""
    x, bias, gamma, beta, residual = (xp.asarray(array) for array in (given.x, *given[2:]))
    n = plain.layernorm(x, gamma, beta, EPS, xp) if case.norm else x
    w = xp.asarray(given.w.dequantized())
    product = plain.matmul_bias(n, w, bias if case.bias else None, xp)
    product = plain.gelu(product, xp) if case.gelu else product
    result = residual + product if case.residual else product
    on_host: Array = result if xp is np else result.get()
    return on_host


def exact_linear(given: Arrays, case: Case) -> Array:
    gamma, beta = (wide(given.gamma), wide(given.beta)) if case.norm else (None, None)
    bias = wide(given.bias) if case.bias else None
    before = wide(given.residual) if case.residual else None
    arrays = (wide(given.x), given.w, bias, gamma, beta, before)
    exact: Array = reference.linear(*arrays, gelu=case.gelu, eps=EPS)
    return exact


def upload_matrix(w: WeightMatrix) -> Any:
    if isinstance(w, Joined):
        return TwoPartMatrix.from_float32(w.data).mapped(cupy.asarray)
    scale = None if w.scale is None else cupy.asarray(w.scale)
    return WeightMatrix(cupy.asarray(w.data), w.dtype, scale, w.layout)


def upload(given: Arrays) -> Arrays:
    x, *others = (cupy.asarray(array) for array in (given.x, *given[2:]))
    return Arrays(x, upload_matrix(given.w), *others)


def force(patch: pytest.MonkeyPatch, variant: str, cut: Any, K: int) -> None:
    """Let a variant take this layout, or tile, unless it is None."""
    module = MODULES[variant]
    if cut and variant == "mma" and not cut.loop:
        cut = cut._replace(warps=_linear_mma.splits(K)[0])
    if cut and variant == "mma_tiles":
        patch.setattr(module, "choose", lambda *_, **limits: cut)
    elif cut:
        name = "tile" if variant == "tiles" else "cut"
        patch.setattr(module, "geometry", partial(module.geometry, **{name: cut}))


def run_linear(
    where: str, variant: str, given: Arrays, case: Case, multiprocessors: int = H200
) -> Array:
    """The result of a variant; on a GPU twice, with the same bits."""
    results: list[Array] = []
    with running_on(where, multiprocessors), pytest.MonkeyPatch.context() as patch:
        force(patch, variant, case.cut, case.K)
        for _ in range(1 + (where == "gpu")):
            x, w, bias, gamma, beta, residual = upload(given)
            norm = (gamma, beta) if case.norm else (None, None)
            in_place = case.residual and case.in_place
            out = residual if in_place else cupy.full(residual.shape, np.nan, "float32")
            before = residual if case.residual else None
            inputs = (x, w, bias if case.bias else None, *norm, before)
            bound: Bound = LINEAR.OPERATION.bind(
                inputs, out, gelu=case.gelu, eps=EPS, variant=variant
            )
            results.append(bound.run().get())
    assert_same_bits(results[0], results[-1])
    return results[0]


def assert_accurate(got: Array, variant: str, given: Arrays, case: Case, xp: Any = np) -> None:
    """As accurate as a loop's, or as the terms of x permit: those of float16 have 22 bits."""
    terms = 0.0
    if variant.startswith("mma") and given.w.dtype == "bfloat16":
        x = plain.layernorm(given.x, given.gamma, given.beta, EPS) if case.norm else given.x
        terms = plain.rounding_of_bfloat16_terms(x, given.w.dequantized())
    plain.assert_as_accurate(got, exact_linear(given, case), plain_linear(given, case, xp), terms)


def assert_linear(where: str, variant: str, case: Case, multiprocessors: int = H200) -> None:
    given = arrays(*case[:4])
    got = run_linear(where, variant, given, case, multiprocessors)
    assert_accurate(got, variant, given, case)


def use_variant(patch: pytest.MonkeyPatch, n: int) -> None:
    """Let decoding steps take variant n of `linear` and `linear_qkv`."""
    patch.setattr(LINEAR, "_decoding", lambda c, operation: (operation.variants[n],))


def assert_qkv(where: str, variant: str, case: Case, n_ctx: int, position: Array) -> None:
    """q and the caches have the bits of the product; tokens outside the cache are not stored.

    The cache has the sequences backwards, after another.
    """
    given, M, C = arrays(*case[:4]), case.M, case.N // 3
    rows = np.arange(M, 0, -1, dtype=np.int32)
    rows[2:3], rows[4:5] = M + 1, -1  # nowhere
    cache = DTYPES[cache_dtype(case.dtype)]
    expected = run_linear(where, variant, given, case)
    n = list(MODULES).index(variant)
    with running_on(where, H200), pytest.MonkeyPatch.context() as patch:
        force(patch, variant, case.cut, case.K)
        use_variant(patch, n)
        k, v = (cupy.full((M + 1, n_ctx, C), np.nan, cache) for _ in range(2))
        x, w, bias, gamma, beta, _ = upload(given)
        norm = (gamma, beta) if case.norm else (None, None)
        q = cupy.full((M, C), np.nan, "float32")
        at = cupy.asarray(rows), cupy.asarray(position)
        bound = STEPS["linear_qkv"].bind((x, w, bias, *norm, k, v, *at), q, eps=EPS)
        assert [launch.name for launch in bound.launches] == [KERNELS[n]]
        bound.run()
        results = [q.get(), k.get().astype(np.float32), v.get().astype(np.float32)]
    np.testing.assert_array_equal(results[0], expected[:, :C])
    for i, got in enumerate(results[1:]):
        there = np.full((M + 1, n_ctx, C), np.nan, np.float32)
        for m, p in enumerate(position):
            if 0 <= p < n_ctx and 0 <= rows[m] <= M:
                stored = expected[m, (i + 1) * C : (i + 2) * C].astype(cache)
                there[rows[m], p] = stored.astype(np.float32)
        np.testing.assert_array_equal(got, there)
