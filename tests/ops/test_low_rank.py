"""Low-rank terms of products (LoRA): compared with float64, and with the bits of a row alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpt2block import InputError, reference
from gpt2block.checks import FLOATS
from gpt2block.ops import registry
from gpt2block.ops.low_rank import COLUMNS
from gpt2block.ops.operands import Operand
from tests.ops.test_every_operation import DEVICES
from tests.plain import normal

every = pytest.mark.parametrize("device", [*DEVICES, "hopper"], indirect=True)
RANKS = 3, 8, 35, 1  # ranks of adapters; the first adapter has another rank for later columns
DTYPES = (
    ("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"),
    ("float32", "bfloat16"),
)  # fmt: skip


def factors(K: int, N: int) -> list[np.ndarray]:
    """Return a, b and spans of four adapters, of which the last one has the first tile alone."""
    ends, tiles = np.cumsum(RANKS), -(-N // COLUMNS)
    spans = np.array([[(end - r, end)] * tiles for end, r in zip(ends, RANKS, strict=True)], "i4")
    a, b = normal(1, int(ends[-1]), K), normal(2, int(ends[-1]), N)
    spans[0, 1:, 0] += 1
    b[0, COLUMNS:] = 0
    spans[3, 1:] = b[-1, COLUMNS:] = 0
    return [a, b, spans]


@every
@pytest.mark.parametrize(("dtypes", "K", "N"), [
    *((each, 1032, 1100) for each in DTYPES), (DTYPES[0], 39, 7), (DTYPES[1], 70, 129),
    (DTYPES[0], 4136, 7),
])  # fmt: skip
def test_rows_have_the_bits_that_they_have_alone(
    dtypes: tuple[str, str], K: int, N: int, device: Any
) -> None:
    M, rng = 70, np.random.default_rng(0)
    y, x = (
        (normal(n, M, size) / 8).astype(FLOATS[dtype])
        for n, size, dtype in zip((3, 4), (N, K), dtypes, strict=True)
    )
    fixed, adapter = factors(K, N), np.array([2, -1, 0, 1, 3, 0, 9], "i4")
    row = rng.integers(-1, 7, M).astype("i4")
    row[:10] = 2
    on_device = [device.asarray(each) for each in fixed]

    def added(rows: list[int]) -> np.ndarray:
        given = [device.asarray(each[rows]) for each in (y, x, row)]
        inputs = (*given[:2], *on_device, given[2], device.asarray(adapter))
        registry.bind("add_low_rank", inputs).run()
        return np.asarray(given[0].get())

    found = added([*range(M)])
    wide: Any = [each.astype(float) for each in (y, x, *fixed[:2])]
    add: Any = reference.add_low_rank
    exact = add(*wide, fixed[2], row, np.where(adapter > 3, -1, adapter))
    most = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtypes[0]]
    assert np.abs(found - exact).max() < most * np.abs(exact).max()
    without = (row < 0) | (adapter[row] < 0) | (adapter[row] > 3)
    assert np.array_equal(found[without], y[without])
    for m in (0, 9, int(np.flatnonzero(row == 0)[-1]), M - 1):
        assert np.array_equal(added([m]), found[m : m + 1])


@every
def test_further_columns(device: Any) -> None:
    """Two arrays y have the bits of their columns in one array."""
    a, b, spans = factors(70, 260)
    x, y = normal(3, 9, 70), normal(4, 9, 260)
    row = np.arange(9, dtype="i4") - 2
    parts = [[y], [y[:, :130].copy(), y[:, 130:].copy()]]
    for of_y in parts:
        given = x, a, b, spans, row, np.arange(7, dtype="i4") % 4
        fixed = [device.asarray(each) for each in given]
        first, *up = (device.asarray(each) for each in of_y)
        registry.bind("add_low_rank", (first, *fixed, *up)).run()
        of_y[:] = [each.get() for each in (first, *up)]
    assert np.array_equal(np.hstack(parts[1]), parts[0][0])
    assert not np.array_equal(parts[0][0], y)


@every
@pytest.mark.parametrize("operand", [
    Operand("bfloat16"), Operand("bfloat16", 16), Operand("float16", 8, rounded=True),
    Operand("float16", 2, rounded=True),
])  # fmt: skip
def test_terms_of_x(operand: Operand, device: Any) -> None:
    """A row has the same bits if x is stored as terms, and if it is stored as floats."""
    a, b, spans = factors(192, 130)
    x, y = normal(3, 70, 192), normal(4, 70, 130)
    row, adapter = np.arange(70, dtype="i4") % 5 - 1, np.arange(4, dtype="i4")
    fixed = [device.asarray(each) for each in (a, b, spans, row, adapter)]
    floats, found = device.asarray(x), []
    terms = registry.bind("operand", (floats,), to_operand=operand).run()
    for own, options in ((terms, {"stored": True}), (floats, {})):
        added = device.asarray(y)
        registry.bind("add_low_rank", (added, own, *fixed), operand=operand, **options).run()
        found.append(added.get())
    assert np.array_equal(*found)
    exact = reference.add_low_rank(y.copy(), x, a, b, spans, row, adapter)
    assert np.abs(found[0] - exact).max() < 3e-3 * np.abs(exact).max()


def test_wrong_tiles() -> None:
    a, b, spans = factors(8, 1100)
    arrays = normal(0, 2, 1100), normal(0, 2, 8), a, b, spans[:, :1].copy()
    numbers = np.zeros(2, "i4"), np.zeros(1, "i4")
    with pytest.raises(InputError, match="b: expected 1100 columns in 2 tiles, got 1100 in 1"):
        registry.bind("add_low_rank", (*arrays, *numbers))
    given = normal(0, 2, 1100).astype(np.float16), arrays[1], a, b, spans, *numbers
    with pytest.raises(InputError, match="y: expected float32, or the dtype of x, float32, "):
        registry.bind("add_low_rank", given)
