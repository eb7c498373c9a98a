"""LayerNorm with statistics, or with GELU. test_norm_laws.py has the requirements of all norms.

test_linear.py tests that `decode` has the bits of the LayerNorm in `linear`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import ops
from gpt2block.cuda import cupy
from gpt2block.ops.layernorm import NARROW
from gpt2block.ops.layernorm import OPERATION as LAYERNORM
from tests import plain
from tests.devices import H200, assert_same_bits, on_one_of_each, on_one_order, outputs, running_on
from tests.norms import KERNELS, NUMPY

Array = NDArray[Any]
Arrays = tuple[Array, Array, Array]  # x, gamma, beta
EPS = 1e-5


def inputs(rows: int, C: int) -> Arrays:
    return plain.normal(0, rows, C), plain.normal(1, C), plain.normal(2, C)


def assert_right(got: Sequence[Array], arrays: Arrays) -> None:
    """Check the result, and mean and rstd if given, as for a variance around the mean."""
    KERNELS["layernorm-6-float32"].assert_right(got, *arrays)


@on_one_order
def test_null_pointers_skip_the_statistics(where: str) -> None:
    arrays, out = inputs(5, 768), np.full((5, 768), np.nan, np.float32)
    options: dict[str, Any] = {"eps": EPS, "variant": 6, "block": 128}
    alone = outputs(where, LAYERNORM.bind, arrays, out, stats=False, **options)
    with_statistics = outputs(where, LAYERNORM.bind, arrays, out, **options)
    assert (len(alone), len(with_statistics)) == (1, 3)
    assert_same_bits(alone[0], with_statistics[0])


@on_one_order
def test_the_public_function_gives_statistics(where: str) -> None:
    """By default the dtypes determine its variant."""
    arrays = inputs(6, 48)
    with running_on(where, H200):
        x, gamma, beta = map(cupy.asarray, arrays)
        for variant in (None, *("123456" if where == "gpu" else "6")):
            outs = ops.layernorm(x.reshape(2, 3, 48), gamma, beta, variant=variant, stats=True)
            assert [each.shape for each in outs] == [(2, 3, 48), (2, 3), (2, 3)]
            alone = ops.layernorm(x, gamma, beta, variant=variant or 6)
            assert_same_bits(alone.get(), outs[0].get())
        half = [each.astype("float16") for each in (x, gamma, beta)]
        assert ops.layernorm(half[0], half[1], half[2]).dtype == np.float16
        narrow = ops.layernorm(half[0], gamma, beta, variant=NARROW)
        assert_same_bits(ops.layernorm(half[0], gamma, beta).get(), narrow.get())


# --- with GELU ------------------------------------------------------------------------------------


@on_one_of_each
@pytest.mark.parametrize(("given", "C"), [((True, False), 48), ((False, True), 257)])
def test_gamma_or_beta_alone(where: str, given: tuple[bool, bool], C: int) -> None:
    kernel = KERNELS[f"gelu-{NUMPY if where == NUMPY else 'affine'}"]
    x, *vectors = kernel.inputs(6, C)
    arrays: list[Any] = [
        x,
        *(v if there else None for v, there in zip(vectors, given, strict=True)),
    ]
    kernel.assert_right(kernel(where, arrays), *arrays)


@on_one_of_each
def test_gelu_far_from_zero(where: str) -> None:
    """With gamma 0, beta is GELU's argument; its exp may overflow, but the result must not."""
    kernel = KERNELS[f"gelu-{NUMPY if where == NUMPY else 'affine'}"]
    beta = np.array([-1e20, -1e4, -20, -5, -0.0, 1e-30, 5, 20, 1e4, 1e20, 0.5, -0.5], np.float32)
    arrays = [plain.normal(0, 1, beta.size), np.zeros_like(beta), beta]
    got = kernel(where, arrays)[0]
    np.testing.assert_allclose(got, kernel.exact(*arrays), rtol=1e-6, atol=1e-6)
