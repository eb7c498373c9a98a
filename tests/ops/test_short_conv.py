"""Short convolutions: a row has the same bits in a prompt, in its pieces, in steps and in drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpt2block import InputError, reference
from gpt2block.cuda.formats import FLOATS
from gpt2block.ops import registry
from gpt2block.ops.terms import Terms
from tests import devices
from tests.ops.test_every_operation import on_devices
from tests.plain import normal

device = devices.device
SLOTS, N_CTX = 4, 12
# Rows of launches as (slot, position): a prompt of each sequence at once; in pieces next to other
# sequences; steps with draft tokens, of which the first are wrong; and single steps.
LONG, SHORT = [(2, n) for n in range(11)], [(0, n) for n in range(5)]
PIECES = [LONG[:2], [*SHORT[:1], *LONG[2:7]], [*SHORT[1:], (-1, 0), *LONG[7:]]]
DRAFTS = [LONG[:4], [*LONG[4:8], *SHORT[:4]], [*LONG[5:9], (0, 4), (-1, 0)], LONG[9:]]
STEPS = [[row, (-1, 0), *SHORT[n : n + 1]] for n, row in enumerate(LONG)]


@on_devices
@pytest.mark.parametrize(
    ("dtype", "C", "L"), [("float32", 6, 3), ("bfloat16", 160, 3), ("float16", 36, 5)]
)
def test_a_row_has_the_same_bits_in_prompts_and_steps(
    dtype: str, C: int, L: int, device: Any
) -> None:
    """Positions after a row's own are garbage; wrong draft tokens have left their u in them."""
    rng = np.random.default_rng(0)
    bcx = {row: normal(rng, 3 * C) for row in (*LONG, *SHORT, (-1, 0))}
    taps, bias = normal(rng, C, 1, L), normal(rng, C)
    fixed = [device.asarray(each) for each in (taps, bias)]
    found = []
    for launches in ([LONG, SHORT], PIECES, DRAFTS, STEPS):
        k, made = device.asarray(np.full((SLOTS, N_CTX, C), 9, FLOATS[dtype])), {}
        for n, rows in enumerate(launches):
            given = np.stack([bcx[row] for row in rows])
            if launches is DRAFTS and n == 1:
                given[1:4] += (
                    1  # wrong draft tokens, whose positions the next launch computes again
                )
            at = [device.asarray(np.array(each, np.int32)) for each in zip(*rows, strict=True)]
            inputs = device.asarray(given), *fixed, k, *at
            made |= zip(rows, registry.bind("short_conv", inputs).run().get(), strict=True)
        found.append(np.stack([made[row] for row in (*LONG, *SHORT)]))
        u = k.get().astype(np.float32)
        found[-1] = np.vstack([found[-1], u[2, :11], u[0, :5]])
        assert (u[[1, 3]] == 9).all()
    for each in found[1:]:
        np.testing.assert_array_equal(each, found[0])
    at = np.array([*LONG, *SHORT]).T
    k = np.zeros((SLOTS, N_CTX, C), FLOATS[dtype])
    rows = np.stack([bcx[row] for row in (*LONG, *SHORT)])
    exact = reference.short_conv(rows.astype(float), taps, bias, k, *at)
    np.testing.assert_allclose(found[0][:16], exact, rtol=1e-5, atol=1e-5)
    without = reference.short_conv(rows, taps, None, None, *at)
    np.testing.assert_allclose(without, exact - rows[:, C : 2 * C] * bias, rtol=0.1, atol=0.1)


@on_devices
def test_formats_of_a_result(device: Any) -> None:
    """Results of 16 bits and terms are the rounded float results."""
    rng, N, C = np.random.default_rng(1), 5, 128
    bcx, taps = (device.asarray(each) for each in (normal(rng, N, 3 * C), normal(rng, C, 1, 3)))
    at = [device.asarray(np.array(each, np.int32)) for each in ([0] * N, range(N))]

    def run(k: Any = None, **options: Any) -> Any:
        return registry.bind("short_conv", (bcx, taps, None, k, *at), **options).run()

    k = device.asarray(np.zeros((1, N, C), np.float16))
    floats, narrow = run(k), run(k, dtype="float16").get()
    np.testing.assert_array_equal(narrow, floats.get().astype(np.float16))
    np.testing.assert_array_equal(run(dtype="float16").get(), narrow)  # u is rounded without k, too
    for terms in (Terms("float16"), Terms("float16", 2, rounded=True, summed=True)):
        expected = registry.bind("operand", (floats,), dtype="float32", to_terms=terms).run()
        words = [each.get().view(np.uint32) for each in (run(k, to_terms=terms), expected)]
        used = words[0].size if terms.width == 0 else N * C // 2 + 4 * N
        np.testing.assert_array_equal(*(each.ravel()[:used] for each in words))
    for wrong, message in (
        ({"dtype": "bfloat16"}, "expected float32 or k's float16, got bfloat16"),
        ({"dtype": "float16", "to_terms": terms}, "expected out in float32"),
    ):
        with pytest.raises(InputError, match=message):
            run(k, **wrong)
    with pytest.raises(InputError, match=r"bcx: expected \(M, 384\) for 128 channels, got \(5, 38"):
        registry.bind("short_conv", (bcx[:, :381].copy(), taps, None, k, *at))
