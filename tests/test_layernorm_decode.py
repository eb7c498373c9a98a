"""LayerNorm of decoding, layernorm/decode.cu: one warp per row.

That it has the bits of the LayerNorm in `linear` is tested with the products of many rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import InputError, reference
from gpt2block.cuda import cupy
from gpt2block.ops.layernorm import bind
from tests import devices, plain
from tests.devices import assert_same_bits, every_device, moved, one_order

Array = NDArray[Any]
device = devices.device
EPS = 1e-5


def normalized(x: Array, gamma: Array, beta: Array) -> Array:
    """The kernel's result, from poisoned memory."""
    arrays = tuple(cupy.asarray(a) for a in (x, gamma, beta))
    out = cupy.full(x.shape, np.nan, "float32")
    result: Array = bind(arrays, out, eps=EPS, variant="decode").run().get()
    return result


@pytest.mark.parametrize("C", [1, 5, 6, 70, 128, 768, 1100])
@every_device
def test_is_as_accurate_as_a_loop(device: Any, C: int) -> None:
    """Of rows that fill blocks and of those that do not, with loads of 1, 2 and 4 values."""
    gamma, beta = plain.normal(1, C), plain.normal(2, C)
    for x in (plain.normal(0, 13, C), plain.normal(0, 2, C) + np.float32(1000)):
        wide, g, b = (a.astype(np.float64) for a in (x, gamma, beta))
        exact = reference.layernorm(wide, g, b, EPS)
        by_loop = plain.layernorm(x, gamma, beta, EPS)
        plain.assert_as_accurate(normalized(x, gamma, beta), exact, by_loop)


@one_order
def test_a_row_depends_on_no_other_one(device: Any) -> None:
    x, gamma, beta = plain.normal(0, 40, 132), plain.normal(1, 132), plain.normal(2, 132)
    whole = normalized(x, gamma, beta)
    assert_same_bits(normalized(x[7:8], gamma, beta), whole[7:8])
    x[::2] = np.nan
    assert_same_bits(normalized(x, gamma, beta)[1::2], whole[1::2])
    assert np.isnan(normalized(x, gamma, beta)[::2]).all()


@one_order
def test_refuses_what_it_does_not_have(device: Any) -> None:
    gamma, beta = (cupy.asarray(plain.normal(seed, 8)) for seed in (1, 2))
    x = cupy.asarray(plain.normal(0, 3, 8))
    with pytest.raises(InputError, match="no block, mean and rstd: use variant 6"):
        bind((x, gamma, beta), eps=EPS, variant="decode", block=64)
    with pytest.raises(InputError, match="x: expected data aligned to 16 bytes"):
        bind((moved(plain.normal(0, 3, 8), 1), gamma, beta), eps=EPS, variant="decode")
