"""LayerNorm with its statistics. What all norms must do is tested in test_norm_laws.py.

That `decode` has the bits of the LayerNorm in `linear` is tested in test_linear.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import ops, reference
from gpt2block.cuda import cupy
from gpt2block.ops.layernorm import NARROW
from gpt2block.ops.layernorm import OPERATION as LAYERNORM
from tests import plain
from tests.devices import H200, assert_same_bits, on_one_order, outputs, running_on
from tests.norms import KERNELS

Array = NDArray[Any]
Arrays = tuple[Array, Array, Array]  # x, gamma, beta
EPS = 1e-5
VARIANTS = "123456"  # those with statistics


def inputs(rows: int, C: int) -> Arrays:
    return plain.normal(0, rows, C), plain.normal(1, C), plain.normal(2, C)


def assert_right(got: Sequence[Array], arrays: Arrays) -> None:
    """The result, and mean and rstd if they are there, with the variance around the mean."""
    KERNELS["layernorm-6-float32"].assert_right(got, *arrays)


def test_the_reference_of_statistics_against_a_loop() -> None:
    x = plain.normal(0, 2, 3, 5).astype(np.float64)
    mean, rstd = reference.layernorm_stats(x, 1e-3)
    for i in np.ndindex(2, 3):
        m = math.fsum(x[i]) / 5
        var = math.fsum((v - m) ** 2 for v in x[i]) / 5
        assert mean[i] == pytest.approx(m, rel=1e-14)
        assert rstd[i] == pytest.approx(1 / math.sqrt(var + 1e-3), rel=1e-14)


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
    arrays = inputs(6, 48)
    with running_on(where, H200):
        x, gamma, beta = map(cupy.asarray, arrays)
        for variant in (None, *VARIANTS):
            outs = ops.layernorm(x.reshape(2, 3, 48), gamma, beta, variant=variant, stats=True)
            assert [each.shape for each in outs] == [(2, 3, 48), (2, 3), (2, 3)]
            alone = ops.layernorm(x, gamma, beta, variant=variant or 6)
            assert_same_bits(alone.get(), outs[0].get())
        assert_right([each.get().reshape(6, *each.shape[2:]) for each in outs], arrays)
        half = [each.astype("float16") for each in (x, gamma, beta)]
        assert ops.layernorm(*half).dtype == np.float16
        narrow = ops.layernorm(half[0], gamma, beta)  # its variant follows from the dtypes
        expected = ops.layernorm(half[0], gamma, beta, variant=NARROW)
        assert_same_bits(narrow.get(), expected.get())
        assert_same_bits(
            ops.layernorm(x, gamma, beta).get(),
            LAYERNORM.bind((x, gamma, beta), eps=EPS).run().get(),
        )
