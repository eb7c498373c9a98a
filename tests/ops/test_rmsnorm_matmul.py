"""RMSNorm followed by a product: more axes, long rows, plain matrices, wrong input.

test_product_laws.py has the requirements of every kernel of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpt2block import InputError, ops
from gpt2block.cuda import cupy
from gpt2block.models.weights.matrix import WeightMatrix
from tests import devices
from tests.devices import one_order
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


@one_order
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"variant": "cores"},
            "unknown variant 'cores': expected one of matvec, mma, unfused, wgmma",
        ),
        ({"head_dim": 9}, "head_dim 9: expected an even number that divides N 48"),
        ({"head_dim": 16.0}, "head_dim 16.0: expected an even number that divides N 48"),
        ({"head_dim": True}, "head_dim True: expected an even number that divides N 48"),
        ({"head_dim": 36}, "head_dim 36: expected an even number that divides N 48"),
        ({"head_dim": 8, "start": -1}, "start: expected a whole number from 0 to 1,048,575"),
        ({"variant": "mma"}, "variant mma: takes float16 and bfloat16: use variant matvec"),
        ({"variant": "wgmma"}, "variant wgmma: (takes float16 and bfloat16|needs a GPU of)"),
        ({"w": (64, 48, "float16")}, "w: expected float32, got float16"),
        ({"x": (64,)}, r"x: expected \(\.\.\., T, K\)"),
    ],
)
def test_wrong_input_is_refused(device: Any, change: dict[str, Any], message: str) -> None:
    x = cupy.zeros(change.pop("x", (1, 64)), "float32")
    gamma = cupy.zeros(64, "float32")
    *shape, dtype = change.pop("w", (64, 48, "float32"))
    with pytest.raises(InputError, match=message):
        ops.rmsnorm_matmul(x, gamma, cupy.zeros(shape, dtype), **change)


@pytest.mark.gpu
def test_feed_forward_matrices_must_be_alike() -> None:
    x, gamma = cupy.zeros((1, 64), "float32"), cupy.ones(64, "float32")
    w = cupy.zeros((64, 48), "float32")
    other = WeightMatrix(cupy.zeros((48, 64), "float32"), "float32", None, "NK")
    with pytest.raises(
        InputError, match="w3: expected float32, layout KN as w1, got float32, layout NK"
    ):
        ops.rmsnorm_ffn(x, gamma, w, other)
    x, gamma, w = (cupy.ones(shape, "float32") for shape in ((1, 60_000), 60_000, (60_000, 1)))
    with pytest.raises(InputError, match="K 60,000: a row of 240,000 bytes does not fit"):
        ops.rmsnorm_ffn(x, gamma, w, w)
