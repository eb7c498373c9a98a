"""The linear layer for few rows, for tests of its variants: inputs, results and what is exact."""

from __future__ import annotations

import importlib
import math
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.cuda import cupy
from gpt2block.cuda.kernels import FP8, cache_dtype
from gpt2block.ops import _linear_matvec, _linear_mma
from gpt2block.ops.linear import bind as bind_linear
from gpt2block.ops.registry import STEPS
from gpt2block.weights.matrix import WeightMatrix
from tests import plain
from tests.devices import H200, running_on

Array = NDArray[Any]
DTYPES: dict[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
}
WEIGHTS = (*DTYPES, *FP8)
EPS = 1e-5
LINEAR = importlib.import_module("gpt2block.ops.linear")
MODULES: dict[str, Any] = {"matvec": _linear_matvec, "mma": _linear_mma}
KERNELS = ("qkv_matvec", "qkv_decode_mma", "qkv_decode_tiles")  # in the order of the variants
every_weight = pytest.mark.parametrize("dtype", WEIGHTS)


class Arrays(NamedTuple):
    x: Array  # (M, K)
    w: WeightMatrix
    bias: Array
    gamma: Array
    beta: Array
    residual: Array  # (M, N)


def arrays(M: int, K: int, N: int, dtype: str) -> Arrays:
    matrix = plain.normal(1, N, K) / np.float32(math.sqrt(K))
    return Arrays(
        plain.normal(0, M, K),
        WeightMatrix.quantize(matrix, dtype, "NK"),
        plain.normal(2, N),
        plain.normal(3, K),
        plain.normal(4, K),
        plain.normal(5, M, N),
    )


def wide(array: Array) -> Array:
    return array.astype(np.float64)


def plain_linear(
    x: Array, given: Arrays, norm: bool, residual: bool = False, gelu: bool = False
) -> Array:
    n = plain.layernorm(x, given.gamma, given.beta, EPS) if norm else x
    product = plain.matmul_bias(n, given.w.dequantized(), given.bias)
    product = plain.gelu(product) if gelu else product
    result: Array = given.residual + product if residual else product
    return result


def exact_linear(
    x: Array, given: Arrays, norm: bool, residual: bool = False, gelu: bool = False
) -> Array:
    gamma, beta = (wide(given.gamma), wide(given.beta)) if norm else (None, None)
    before = wide(given.residual) if residual else None
    bias = wide(given.bias)
    exact: Array = reference.linear(wide(x), given.w, bias, gamma, beta, before, gelu=gelu, eps=EPS)
    return exact


class Case(NamedTuple):
    """Sizes, dtype of the weights, what is done; cut: another layout than the chosen one."""

    M: int
    K: int
    N: int
    dtype: str
    norm: bool = True
    residual: bool = False  # in place
    gelu: bool = False
    cut: Any = None


def upload(given: Arrays) -> Arrays:
    scale = None if given.w.scale is None else cupy.asarray(given.w.scale)
    w = WeightMatrix(cupy.asarray(given.w.data), given.w.dtype, scale, "NK")
    x, *others = (cupy.asarray(array) for array in (given.x, *given[2:]))
    return Arrays(x, w, *others)


def run_linear(
    where: str, variant: str, given: Arrays, case: Case, multiprocessors: int = H200
) -> Array:
    """The result of variant matvec or mma; on a GPU twice, with the same bits."""
    results: list[Array] = []
    module, cut = MODULES[variant], case.cut
    if cut and variant == "mma" and not cut.loop:
        cut = cut._replace(warps=_linear_mma.splits(case.K)[0])
    with running_on(where, multiprocessors), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "geometry", partial(module.geometry, cut=cut))
        for _ in range(1 + (where == "gpu")):
            x, w, bias, gamma, beta, residual = upload(given)
            norm = (gamma, beta) if case.norm else (None, None)
            out = residual if case.residual else cupy.full(residual.shape, np.nan, "float32")
            inputs = (x, w, bias, *norm, residual if case.residual else None)
            bound = bind_linear(inputs, out, gelu=case.gelu, eps=EPS, variant=variant)
            results.append(bound.run().get())
    np.testing.assert_array_equal(results[0], results[-1])
    return results[0]


def assert_linear(where: str, variant: str, case: Case, multiprocessors: int = H200) -> None:
    """The result is as accurate as a loop's, or as the terms of x permit."""
    given = arrays(*case[:4])
    got = run_linear(where, variant, given, case, multiprocessors)
    what = (given.x, given, case.norm, case.residual, case.gelu)
    terms = 0.0
    if variant == "mma" and given.w.dtype == "bfloat16":
        x = plain.layernorm(given.x, given.gamma, given.beta, EPS) if case.norm else given.x
        terms = plain.rounding_of_bfloat16_terms(x, given.w.dequantized())
    plain.assert_as_accurate(got, exact_linear(*what), plain_linear(*what), terms)


def use_variant(patch: pytest.MonkeyPatch, n: int) -> None:
    """Let decoding steps take variant n of `linear` and `linear_qkv`."""
    patch.setattr(LINEAR, "_decoding", lambda c, operation: (operation.variants[n],))


def assert_qkv(where: str, variant: str, case: Case, n_ctx: int, position: Array) -> None:
    """q and the caches have the bits of the product; tokens outside the cache are not stored.

    The cache has the sequences backwards, after another.
    """
    given, M, C = arrays(*case[:4]), case.M, case.N // 3
    rows = np.arange(M, 0, -1, dtype=np.int32)
    rows[2:3] = M + 1  # nowhere
    cache = DTYPES[cache_dtype(case.dtype)]
    expected = run_linear(where, variant, given, case)
    module, n = MODULES[variant], list(MODULES).index(variant)
    with running_on(where, H200), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "geometry", partial(module.geometry, cut=case.cut))
        use_variant(patch, n)
        k, v = (cupy.full((M + 1, n_ctx, C), np.nan, cache) for _ in range(2))
        x, w, bias, gamma, beta, _ = upload(given)
        q = cupy.full((M, C), np.nan, "float32")
        at = cupy.asarray(rows), cupy.asarray(position)
        bound = STEPS["linear_qkv"].bind((x, w, bias, gamma, beta, k, v, *at), q, eps=EPS)
        assert [launch.name for launch in bound.launches] == [KERNELS[n]]
        bound.run()
        results = [q.get(), k.get().astype(np.float32), v.get().astype(np.float32)]
    np.testing.assert_array_equal(results[0], expected[:, :C])
    for i, got in enumerate(results[1:]):
        there = np.full((M + 1, n_ctx, C), np.nan, np.float32)
        for m, p in enumerate(position):
            if 0 <= p < n_ctx and rows[m] <= M:
                stored = expected[m, (i + 1) * C : (i + 2) * C].astype(cache)
                there[rows[m], p] = stored.astype(np.float32)
        np.testing.assert_array_equal(got, there)
