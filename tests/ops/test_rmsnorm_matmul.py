"""RMSNorm followed by a product: more axes, long rows, plain matrices, wrong input.

test_product_laws.py has the requirements of every kernel of it.
"""

from __future__ import annotations

import numpy as np
import pytest

from gpt2block import ops
from gpt2block.cuda import cupy
from tests import devices
from tests.products import EPS, KERNELS, Case, summed

device = devices.device


@pytest.mark.gpu
def test_a_row_too_long_for_matvec_takes_tiles() -> None:
    x, gamma = cupy.ones((1, 65_536), "float16"), cupy.ones(65_536, "float16")
    w = cupy.full((65_536, 16), 2.0**-16, "float16")
    np.testing.assert_allclose(ops.rmsnorm_matmul(x, gamma, w).get(), 1, rtol=1e-3)


@pytest.mark.gpu
def test_the_functions_take_plain_matrices_and_give_pairs() -> None:
    ffn, case = KERNELS["rmsnorm_ffn-matvec-own-float32-KN"], Case(2, 64, 32, residual=True)
    given = ffn.made(case)
    x, gamma, residual = (cupy.asarray(given[name]) for name in ("x", "gamma", "residual"))
    w1, w3 = (cupy.asarray(given[name].data) for name in ("w", "up"))
    alone = ops.rmsnorm_ffn(x, gamma, w1, w3, EPS)
    ffn.assert_right(alone.get(), given | {"residual": None}, case._replace(residual=False))
    out, h = ops.rmsnorm_ffn(x, gamma, w1, w3, EPS, residual=residual)
    ffn.assert_right(out.get(), given, case)
    np.testing.assert_array_equal(h.get(), summed(given))
