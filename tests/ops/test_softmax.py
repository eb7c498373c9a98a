"""Softmax with a mask, and of -inf. test_norm_laws.py tests requirements shared with norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block import ops
from gpt2block.cuda import cupy
from tests.devices import IN_TESTS, assert_same_bits, on_one_order, running_on
from tests.norms import KERNELS, Kernel, Shape, every_kernel
from tests.plain import normal

Array = NDArray[Any]


def assert_masked(kernel: Kernel, got: Array, x: Array) -> None:
    kernel.assert_right([got], x, causal=True)
    assert (got[..., ~np.tri(x.shape[-1], dtype=bool)] == 0).all()


def squares(kernel: Kernel) -> Sequence[Shape]:
    """Return square shapes; for `rows` also as on a GPU that few rows fill."""
    of_many = (4, 20, 102, 110) if kernel.variant == "rows" else ()
    return [*map(Shape, (1, 7, 60, 132)), *(Shape(T, sms=0) for T in of_many)]


@every_kernel("softmax", orders=IN_TESTS, shapes_of=squares)
def test_causal(where: str, kernel: Kernel, shape: Shape) -> None:
    x = 3 * normal(shape.C, 2 if shape.C <= 60 else 1, shape.C, shape.C)
    assert_masked(kernel, kernel(where, [x], shape, causal=True)[0], x)


@every_kernel("softmax", shapes_of=lambda _: [Shape(60)])
def test_a_masked_score_is_never_read(where: str, kernel: Kernel, shape: Shape) -> None:
    """Softmax runs in place too. A row that sees NaN or only -inf is NaN where it sees."""
    x = normal(0, 2, 60, 60)
    clean = kernel(where, [x], causal=True)[0]
    x[:, ~np.tri(60, dtype=bool)] = np.nan
    for in_place in (False, True):
        assert_same_bits(kernel(where, [x], in_place=in_place, causal=True)[0], clean)
    x[0, 40, :41] = -np.inf
    x[0, 50, 7] = np.nan
    got = kernel(where, [x], causal=True)[0]
    assert np.isnan(got[0, 40, :41]).all()
    assert np.isnan(got[0, 50, :51]).all()
    got[0, 40, :41], got[0, 50, :51] = clean[0, 40, :41], clean[0, 50, :51]
    assert_same_bits(got, clean)


@every_kernel("softmax")
def test_scores_of_any_size(where: str, kernel: Kernel, shape: Shape) -> None:
    """Only exp(x - max) does not overflow; scores of -inf get weight 0.

    The softmax of a row of only -inf, or with inf or NaN, is undefined.
    """
    x = 1000 * normal(0, 8, shape.C)
    x[1, : shape.C - 10] = -np.inf
    x[2, 1:] = -np.inf
    x[3, ::2] = -np.inf
    x[4] = -3e38
    got = kernel(where, [x], shape)[0]
    kernel.assert_right([got], x)
    assert (got[np.isneginf(x)] == 0).all()
    assert got[2, 0] == 1
    x[5] = -np.inf
    x[6, 3] = np.nan
    x[7, 4] = np.inf
    undefined = kernel(where, [x], shape)[0]
    assert np.isnan(undefined[5:]).all()
    assert_same_bits(undefined[:5], got[:5])


@on_one_order
def test_rows_that_do_not_fit_in_registers(where: str) -> None:
    """Rows as long as a vocabulary use another variant."""
    x = 3 * normal(0, 9 if where == "gpu" else 1, 50257)
    kernel = KERNELS["softmax-rows"]
    kernel.assert_right(kernel(where, [x], variant=None), x)


@on_one_order
def test_the_public_function_in_place(where: str) -> None:
    x = normal(0, 2, 7, 7)
    with running_on(where):
        scores = cupy.asarray(x)
        assert ops.softmax(scores, causal=True, out=scores) is scores
        assert_masked(KERNELS["softmax-rows"], scores.get(), x)
