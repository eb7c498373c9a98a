"""The GELU of LayerNorm with GELU. What all norms must do is tested in test_norm_laws.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpt2block import reference
from tests.devices import on_one_of_each
from tests.norms import KERNELS, NUMPY
from tests.plain import normal


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
    """gamma 0 makes beta the argument of GELU; exp of it may overflow, the result must not."""
    kernel = KERNELS[f"gelu-{NUMPY if where == NUMPY else 'affine'}"]
    beta = np.array([-1e20, -1e4, -20, -5, -0.0, 1e-30, 5, 20, 1e4, 1e20, 0.5, -0.5], np.float32)
    arrays = [normal(0, 1, beta.size), np.zeros_like(beta), beta]
    got = kernel(where, arrays)[0]
    np.testing.assert_allclose(got, kernel.exact(*arrays), rtol=1e-6, atol=1e-6)


def test_the_error_of_gelu_by_exp2() -> None:
    """In float32, with two units of the last place of exp2 and of the division against it."""
    v = np.linspace(-32, 32, 200_001).astype(np.float32)
    truth = reference.gelu(v.astype(np.float64))
    f = np.float32
    t = v * (f(-2.3022082) + f(-0.10294324) * (v * v))
    with np.errstate(over="ignore"):
        for wrong in (1 - 2**-22, 1, 1 + 2**-22):
            power = (np.exp2(t.astype(np.float64)) * wrong).astype(np.float32)
            quotient = v / (f(1) + power) * f(wrong)
            assert np.abs(quotient - truth).max() < 1e-5
            assert np.abs(quotient - truth)[np.abs(v) < 6].max() < 2e-6


DOCUMENTED = [(128, 768), (256, 768), (1024, 768), (128, 1024), (256, 1024), (1024, 1024)]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["optimized", "rows"])
@pytest.mark.parametrize(("rows", "C"), [*DOCUMENTED, (256, 2048), (8192, 1024)])
def test_the_documented_sizes(variant: str, rows: int, C: int) -> None:
    kernel = KERNELS[f"gelu-{variant}"]
    (x,) = kernel.inputs(rows, C)
    got = kernel("gpu", [x])
    assert np.abs(got[0] - kernel.exact(x)).max() <= 1e-5
    kernel.assert_right(got, x)
