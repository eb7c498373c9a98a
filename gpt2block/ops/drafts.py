"""Draft a sequence's next tokens, and compare earlier draft tokens with the sampled tokens.

`reference.draft_tokens` defines the draft tokens, unless the text of the sequence is known.
Kernels: tokens/drafts.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import Bound, CudaArray
from gpt2block.cuda.kernels import Geometry, Launch, launch_at
from gpt2block.errors import InputError
from gpt2block.ops.call import Call
from gpt2block.ops.operation import Operation, variant

FILE = "tokens/drafts.cu"
THREADS = 512
COPYING = 256  # threads per block of begin_drafts and taken_rows
MAX_DRAFTS = 7  # maximum draft tokens per sequence in a step
MAX_KNOWN = 63  # maximum draft tokens per sequence if its text is known, so that drafts are right
# flags of a sampled token: accepted; had a draft token; it was right
TAKEN, DRAFTED, RIGHT = 1, 2, 4


class DraftTokens(NamedTuple):
    """State of B slots (sequences) on the device, from which a kernel drafts their next tokens."""

    history: CudaArray  # (B, H): tokens of each slot; the last token is at index `position`
    draft: CudaArray  # (B, K): draft tokens of the tokens after the last one; -1 for no draft token
    left: CudaArray  # (B,): number of tokens that each slot may still draw
    known: CudaArray  # (B,): number of tokens in history if the slot's text is known, else 0

    @classmethod
    def allocate(cls, B: int, n_ctx: int, most: int = MAX_DRAFTS) -> DraftTokens:
        """Allocate arrays of B empty slots, for sequences whose last position is at most n_ctx.

        most: maximum draft tokens per slot.
        """
        shapes = (B, n_ctx + 1), (B, most), (B,), (B,)
        return cls(*(cupy.zeros(shape, "int32") for shape in shapes))

    def begin(
        self,
        slots: Sequence[int],
        ids: Sequence[NDArray[np.int32]],
        left: Sequence[int],
        prompts: Sequence[int] | None = None,
    ) -> None:
        """Copy tokens `ids` of new sequences to `slots`. `left`: tokens that a slot may draw.

        prompts: number of tokens of each prompt, which the known text follows in `ids`; None: `ids`
        are prompts.
        """
        lengths = [len(each) for each in ids]
        firsts = np.cumsum([0, *lengths[:-1]])
        numbered = slots, firsts, lengths, left, prompts or lengths
        heads = (np.asarray(each, np.int32) for each in numbered)
        numbers = cupy.asarray(np.concatenate([*heads, *ids]))
        (B, H), K = self.history.shape, self.draft.shape[1]
        launch_at(
            FILE, Geometry("begin_drafts", (len(slots),), (COPYING,)), (numbers, *self, B, H, K)
        ).run()


@variant("drafts", FILE, "begin_drafts", "take_drafts", block=THREADS)
def _take(c: Call) -> Launch:
    """Launch take_drafts; `DraftTokens.begin` launches begin_drafts."""
    most = 1 + min(c.K, MAX_KNOWN)
    if not 0 < c.together <= most or c.M % c.together:
        raise InputError(
            f"together: expected 1 to {most}, a divisor of {c.M} rows, got {c.together}"
        )
    rows = (c.sampled, c.likely, c.slot_row, c.slot_token, c.slot_position, c.slot_turn)
    slots = (c.history, c.draft, c.left, c.known)
    kept = (*slots, c.position, c.step, c.token, c.logprob, c.occurred)
    geometry = Geometry("take_drafts", (c.M // c.together,), (THREADS,))
    args = (*rows, *kept, c.counts, c.report, c.together, c.B, c.H, c.K, c.V)
    return launch_at(FILE, geometry, args)


TAKE_DRAFTS = Operation(
    name="take_drafts",
    variants=(_take,),
    options={"together": 1},
    line="sampled i32 M; likely f32 M; slot_row slot_token slot_position slot_turn i32 M; "
    "history i32 B H; draft i32 B K; left known position step token i32 B; logprob f32 B; "
    "occurred u8 B V; counts? i32 B V; report i32 2 3 M -> draft i32 B K",
)


@variant("rows", FILE, "taken_rows", block=COPYING)
def _rows(c: Call) -> Launch:
    slots, rows = c.M // c.together, (c.sampled, c.slot_row, c.slot_position, c.draft, c.followed)
    geometry = Geometry("taken_rows", (ceil(slots / COPYING),), (COPYING,))
    return launch_at(FILE, geometry, (*rows, c.together, c.M, c.B, c.K))


# For the rows of a step, before `take_drafts`: followed[0] gets their positions, followed[1] for
# each slot the row of the last token that is taken.
TAKEN_ROWS = Operation(
    name="taken_rows",
    variants=(_rows,),
    options={"together": 1},
    line="sampled slot_row slot_position i32 M; draft i32 B K -> followed i32 2 M",
)


def bind_take(
    sampled: tuple[CudaArray, CudaArray],
    slots: Any,
    drafts: DraftTokens,
    state: Any,
    together: int,
    counts: CudaArray | None,
    report: CudaArray,
) -> Bound:
    """Bind a launch that accepts sampled tokens up to the first wrong draft, then drafts tokens.

    sampled: tokens and log-probabilities of M rows, `together` rows per slot. The tokens that are
    taken update draft tokens, state and counts of their sequences, and `slots` gets the rows of the
    next step. report (2, 3, M) int32 gets tokens, bits of the log-probabilities, and flags:
    report[0] if the slot's `turn` (number of launches) is even, else report[1].
    """
    arrays = (*sampled, *slots, *drafts, state.position, state.step, state.token, state.logprob)
    arrays += (state.occurred, counts, report)
    return TAKE_DRAFTS.bind_on_device(arrays, together=together)
