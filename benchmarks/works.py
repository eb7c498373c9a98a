"""A benchmark's work: a computation to time, and the check of its results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt2block.cuda import timing
from gpt2block.engine.model import Ids
from gpt2block.ops import workload
from gpt2block.ops.bench import race
from gpt2block.ops.workload import Host

STEPS_OF_A_BLOCK = 7  # steps of a block whose results are rounded to the block's dtype

Sets = Sequence[Host]  # copies of the inputs in device memory
Errors = tuple[float, float]  # absolute and relative, as `workload.errors` returns them


@dataclass(frozen=True)
class Work:
    """A computation to time.

    name: its sizes in words, such as "8x1024 causal"; the same for all dtypes. flops: minimum
    operations; a multiplication and an addition count as two, masked scores as none. traffic:
    minimum bytes; every input and weight is read once, and the output is written once.

    truth: returns the exact output (n, columns), whose row i mod n is compared with row i of an
    output; for a whole model, the exact logits after a sequence. ours: returns gpt2block's
    contenders for copies of the inputs and a device, the default one first; a capture shows whether
    a contender can run.

    roundings: number of consecutive results that are rounded to the dtype. rounding: dtype whose
    rounding errors are tolerated; None: the dtype of the arithmetic. rounds: rounds over all copies
    in one turn; None: as many as take some milliseconds. turns: number of timed calls that return
    when their results are in host memory; None: times of CUDA graphs. tokens: number of tokens that
    a call generates; None without generation.
    """

    what: str
    name: str
    dtype: str
    sizes: Mapping[str, int]
    flops: int
    traffic: int
    truth: Callable[..., np.ndarray]
    ours: Callable[[Sets, int], Iterable[race.Contender]]
    inputs: Callable[[], Host] = dict
    roundings: int = 1
    rounding: str | None = None
    rounds: int | None = None
    turns: int | None = None
    tokens: int | None = None

    def sets(self) -> Sets:
        """Return copies of the inputs in device memory, which successive calls use in turn."""
        inputs = self.inputs()
        return race.input_copies(inputs, self.traffic) if inputs else [inputs]

    def check(self, replay: race.Replay, outs: tuple[object, ...]) -> Errors:
        """Replay a graph, and return the (absolute, relative) error of its least accurate output.

        outs: arrays, which are filled with NaN before the replay, or functions, which return an
        output after the replay.
        """
        for out in outs:
            if not callable(out):
                workload.poison(out)
        replay()
        found = [self._errors(out() if callable(out) else out) for out in outs]
        return max(found, key=lambda errors: errors[1] if isfinite(errors[1]) else inf)

    def _errors(self, out: object) -> Errors:
        if isinstance(out, GeneratedSequences):
            return out.errors(self.truth)
        return workload.errors(out, self.truth())

    def times(self, replays: Mapping[str, race.Replay]) -> dict[str, float]:
        """Return {name: median ms of a replay}; the replays are interleaved."""
        if self.turns is None:
            return timing.interleaved_ms(replays)
        return timing.interleaved_host_ms(replays, self.turns)


class GeneratedSequences(NamedTuple):
    """Sequences that an implementation has generated, to be checked.

    logprobs: the log-probability of each sequence's last token, if the contender returns it.
    greedy: whether the last token was the most likely token.
    """

    sequences: Sequence[Ids]
    logprobs: Sequence[float] | None = None
    greedy: bool = True

    def errors(self, last_logits: Callable[[Ids], NDArray[np.float64]]) -> Errors:
        """Return the largest error at a last token: absolute, and relative to the largest |logit|.

        The errors are differences of log-probabilities and, for greedy sequences, of a token's
        logit from the largest logit.
        """
        worst_of_each = []
        for i, ids in enumerate(self.sequences):
            logits = last_logits(ids[:-1])
            top, chosen = logits.max(), logits[ids[-1]]
            off = [top - chosen] if self.greedy else []
            if self.logprobs is not None:
                exact = chosen - top - np.log(np.exp(logits - top).sum())
                off.append(abs(self.logprobs[i] - exact))
            worst_of_each.append((np.max(off), np.max(off) / np.abs(logits).max()))
        worst, relative = np.max(worst_of_each, axis=0)  # NaN if any error is NaN
        return float(worst), float(relative)
