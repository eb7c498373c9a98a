"""Guesses of a sequence's next tokens, and which of the drawn tokens agree with them.

`reference.guess_tokens` says what is guessed. Kernels: tokens/guesses.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import Bound, CudaArray
from gpt2block.cuda.kernels import Geometry, launch_at
from gpt2block.cuda.requests import Launch
from gpt2block.errors import InputError
from gpt2block.ops.call import Call
from gpt2block.ops.operation import Operation, variant

FILE = "tokens/guesses.cu"
THREADS = 512
COPYING = 256  # threads that copy a prompt
MOST_GUESSES = 7  # of a slot: the kernel has a lane of a warp for each row
TAKEN, GUESSED, RIGHT = 1, 2, 4  # flags of a row in a report


class Guesses(NamedTuple):
    """What is kept of B slots, on the device, to guess their next tokens."""

    history: CudaArray  # (B, H): the tokens of each one, up to the last at its position
    guess: CudaArray  # (B, K): of the tokens after it; -1 where there is none
    left: CudaArray  # (B,): tokens that may still be drawn

    @classmethod
    def allocate(cls, B: int, n_ctx: int) -> Guesses:
        """Those of B empty slots, for sequences whose last token is at n_ctx at most."""
        shapes = (B, n_ctx + 1), (B, MOST_GUESSES), (B,)
        return cls(*(cupy.zeros(shape, "int32") for shape in shapes))

    def begin(
        self, slots: Sequence[int], ids: Sequence[NDArray[np.int32]], left: Sequence[int]
    ) -> None:
        """Let sequences with these tokens begin in these slots, and draw so many tokens."""
        lengths = [len(each) for each in ids]
        firsts = np.cumsum([0, *lengths[:-1]])
        heads = (np.asarray(each, np.int32) for each in (slots, firsts, lengths, left))
        numbers = cupy.asarray(np.concatenate([*heads, *ids]))
        (B, H), K = self.history.shape, self.guess.shape[1]
        launch_at(
            FILE,
            Geometry("begin_guesses", (len(slots),), (COPYING,)),
            (numbers, *self, B, H, K),
        ).run()


@variant("guesses", FILE, "begin_guesses", "take_guesses", block=THREADS)
def _take(c: Call) -> Launch:
    """Of take_guesses; `Guesses.begin` launches begin_guesses."""
    if not 0 < c.together <= c.K + 1 or c.M % c.together:
        raise InputError(
            f"together: expected 1 to {c.K + 1}, a divisor of {c.M} rows, got {c.together}"
        )
    rows = (c.drawn, c.likely, c.slot_row, c.slot_token, c.slot_position, c.slot_turn)
    kept = (c.history, c.guess, c.left, c.position, c.step, c.token, c.logprob, c.seen, c.counts)
    geometry = Geometry("take_guesses", (c.M // c.together,), (THREADS,))
    args = (*rows, *kept, c.report, c.together, c.B, c.H, c.K, c.V)
    return launch_at(FILE, geometry, args)


TAKE_GUESSES = Operation(
    name="take_guesses",
    variants=(_take,),
    options={"together": 1},
    line="drawn i32 M; likely f32 M; slot_row slot_token slot_position slot_turn i32 M; "
    "history i32 B H; guess i32 B K; left position step token i32 B; logprob f32 B; "
    "seen u8 B V; counts? i32 B V; report i32 2 3 M -> guess i32 B K",
)


def bind_take(
    drawn: tuple[CudaArray, CudaArray],
    slots: Any,
    guesses: Guesses,
    state: Any,
    together: int,
    counts: CudaArray | None,
    report: CudaArray,
) -> Bound:
    """Take the drawn tokens of rows that agree with the guesses before them; guess the next ones.

    drawn: tokens and log-probabilities of M rows, `together` of each slot; guesses, state and
    counts of its sequences change by the tokens that are taken, and the rows of `slots` become
    those of the next step. report (2, 3, M) int32, by turns of slots, gets tokens, bits of the
    log-probabilities, and flags.
    """
    given = (*drawn, *slots, *guesses, state.position, state.step, state.token, state.logprob)
    given += (state.seen, counts, report)
    return TAKE_GUESSES.bind_on_device(given, together=together)
