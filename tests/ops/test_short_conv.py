"""Short convolutions: a row has the same bits in prompts, in their pieces, in steps, in drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpt2block import reference
from gpt2block.checks import FLOATS
from gpt2block.ops import registry
from gpt2block.ops.operands import Operand
from tests.ops.test_every_operation import on_devices
from tests.plain import normal

SLOTS, N_CTX, ABSENT = 4, 12, (-1, 0)
# Rows of launches as (slot, position): a prompt of each sequence at once; in pieces next to other
# sequences; steps with draft tokens, of which the first are wrong; and single steps.
LONG, SHORT = [(2, n) for n in range(11)], [(0, n) for n in range(5)]
PIECES = [LONG[:2], [*SHORT[:1], *LONG[2:7]], [*SHORT[1:], ABSENT, *LONG[7:]]]
DRAFTS = [LONG[:4], [*LONG[4:8], *SHORT[:4]], [*LONG[5:9], (0, 4), ABSENT], LONG[9:]]
STEPS = [[row, ABSENT, *SHORT[n : n + 1]] for n, row in enumerate(LONG)]
EVERY = [*LONG, *SHORT]


@on_devices
@pytest.mark.parametrize(
    ("dtype", "C", "L"), [("float32", 5, 3), ("bfloat16", 160, 3), ("float16", 36, 5)]
)
def test_a_row_has_the_same_bits_in_prompts_and_steps(
    dtype: str, C: int, L: int, device: Any
) -> None:
    """Positions after a row's own are garbage; wrong draft tokens have left their u in them."""
    rows, taps, bias = normal(0, len(EVERY) + 1, 3 * C), normal(1, C, 1, L), normal(2, C)
    bcx = dict(zip((*EVERY, ABSENT), rows, strict=True))
    fixed = [device.asarray(each) for each in (taps, bias)]
    found = []
    for launches in ([LONG, SHORT], PIECES, DRAFTS, STEPS):
        k, made = device.asarray(np.full((SLOTS, N_CTX, C), 9, FLOATS[dtype])), dict[Any, Any]()
        for n, each in enumerate(launches):
            given = np.stack([bcx[row] for row in each])
            given[1:4] += launches is DRAFTS and n == 1  # the next launch computes these rows again
            at = [device.asarray(np.array(one, np.int32)) for one in zip(*each, strict=True)]
            inputs = device.asarray(given), *fixed, k, *at
            made |= zip(each, registry.bind("short_conv", inputs).run().get(), strict=True)
        u = k.get().astype(np.float32)
        found.append(np.vstack([np.stack([made[row] for row in EVERY]), u[2, :11], u[0, :5]]))
        assert (u[[1, 3]] == 9).all()
    for own in found[1:]:
        np.testing.assert_array_equal(own, found[0])
    places = np.array(EVERY).T
    k = np.zeros((SLOTS, N_CTX, C), FLOATS[dtype])
    exact: Any = reference.short_conv(rows[:-1].astype(float), taps, bias, k, *places)
    np.testing.assert_allclose(found[0][: len(EVERY)], exact, rtol=1e-5, atol=1e-5)
    without = reference.short_conv(rows[:-1], taps, None, None, *places)
    expected = exact - rows[:-1, C : 2 * C] * bias
    np.testing.assert_allclose(without, expected, rtol=0.1, atol=0.1)  # u is not rounded


@on_devices
def test_formats_of_a_result(device: Any) -> None:
    """Results of 16 bits and terms are the rounded float results."""
    N, C = 5, 128
    bcx, taps = (device.asarray(each) for each in (normal(0, N, 3 * C), normal(1, C, 1, 3)))
    at = [device.asarray(np.array(each, np.int32)) for each in ([0] * N, range(N))]

    def run(k: Any, x: Any = bcx, **options: Any) -> Any:
        return registry.bind("short_conv", (x, taps, None, k, *at), **options).run()

    k = device.asarray(np.zeros((1, N, C), np.float16))
    floats, narrow = run(k), run(k, dtype="float16").get()
    np.testing.assert_array_equal(narrow, floats.get().astype(np.float16))
    np.testing.assert_array_equal(run(None, dtype="float16").get(), narrow)  # u is rounded, too
    for terms in (Operand("float16"), Operand("float16", 2, rounded=True, summed=True)):
        expected = registry.bind("operand", (floats,), dtype="float32", to_operand=terms).run()
        words = [each.get().view(np.uint32) for each in (run(k, to_operand=terms), expected)]
        used = N * C // 2 + 4 * N if terms.width else N * C
        first, second = (each.ravel()[:used] for each in words)
        np.testing.assert_array_equal(first, second)
