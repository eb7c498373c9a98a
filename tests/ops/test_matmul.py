"""Matrix product with bias: strided arrays, and wrong input.

test_product_laws.py has the requirements of every kernel of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpt2block import InputError, ops
from gpt2block.cuda import cupy
from tests import devices
from tests.devices import one_order
from tests.products import KERNELS, MATMUL, Case

device = devices.device


@pytest.mark.parametrize("variant", [variant.name for variant in MATMUL.OPERATION.variants])
@pytest.mark.gpu
def test_the_op(variant: str) -> None:
    """The function takes a batch, and rows with strided elements."""
    kernel, case = KERNELS[f"matmul-{variant}"], Case(42, 48, 52)
    given = kernel.made(case)
    a, w, bias = (kernel.uploaded(cupy, name, given[name]) for name in ("x", "w", "bias"))
    got = ops.matmul_bias(a.reshape(2, 21, 48), w, bias, variant)
    assert got.shape == (2, 21, 52)
    flat = got.get().reshape(42, 52)
    kernel.assert_right(flat, given, case)
    apart = cupy.asarray(np.repeat(given["x"], 2, axis=1))[:, ::2]
    np.testing.assert_array_equal(ops.matmul_bias(apart, w, bias, variant).get(), flat)


@one_order
def test_bad_input(device: Any) -> None:
    """Errors beyond those that follow from the contract."""
    tall, w = cupy.zeros((1_048_561, 1), "float32"), cupy.zeros((1, 4), "float32")
    with pytest.raises(InputError, match=r"1,048,561 rows .* takes at most 1,048,560"):
        ops.matmul_bias(tall, w, variant="tiled")
    with pytest.raises(InputError, match="'mma': expected one of naive, tiled, coarsened, regis"):
        ops.matmul_bias(tall, w, variant="mma")
