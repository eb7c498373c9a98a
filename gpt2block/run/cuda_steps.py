"""The steps of a decoding on a GPU: rows of a kv_cache's slots, sampled on the device.

A step computes the rows of a few numbers, such as 48 or 64, each with a CUDA graph of its own; a
device array maps them to slots, so that empty slots cost nothing. A step reads its tokens and
positions from device memory, where the sampler has written them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import Bound, CudaArray, pinned
from gpt2block.ops.guesses import MOST_GUESSES, TAKEN, Guesses, bind_take
from gpt2block.ops.sample_token import (
    SampleState,
    Slots,
    bind_drawn,
    bind_place,
    bind_state,
    mark_seen,
)
from gpt2block.ops.top_logprobs import TOP_LOGPROBS
from gpt2block.passes import check_read
from gpt2block.run.cuda_caches import CudaCache
from gpt2block.run.cuda_passes import CudaPasses
from gpt2block.run.model import (
    Alternatives,
    Floats,
    Ids,
    Sampled,
    Start,
    cache_tensors,
    chosen,
    without,
)
from gpt2block.run.recorder import rounded_up
from gpt2block.sampling import CHANGES, MOST_ALTERNATIVES, Sampling, changes

CHANGED, COUNTED = 1, 2  # logits change otherwise than by repetition_penalty; by drawn tokens
MOST_GUESSING = 64  # rows of a step that computes guesses


class DecodingSteps:
    """The buffers of a cache's decoding steps, and a step for each number of rows in use."""

    def __init__(
        self, model: CudaPasses, cache: CudaCache, floats: bool = False, speculate: bool = False
    ) -> None:
        """floats: no step has terms in their place, so that all can be read; with the same bits.

        speculate: steps can compute guesses, too.
        """
        B, config = cache.batch, model.config
        self.floats = floats
        self.n_ctx, self.batch = cache.n_ctx, B
        self.state = SampleState.allocate(B, config.vocab_size)
        self.guesses = Guesses.allocate(B, cache.n_ctx) if speculate else None
        rows = max(B, min(B * (1 + MOST_GUESSES), MOST_GUESSING)) if speculate else B
        self.logits = cupy.zeros((rows, config.vocab_size), "float32")
        self.row, self.tokens, self.positions = (cupy.zeros(rows, "int32") for _ in range(3))
        self.cache_tensors = cache_tensors(cache, config.n_layer)
        # By slots, the most any changes, and rows of each.
        self._steps: dict[tuple[int, int, int], DecodingStep] = {}
        self.changes: CudaArray = None  # of logits in the slots, once one has any
        self.counts: CudaArray = None  # of drawn tokens, once they matter for a slot
        self._changed = np.zeros(B, np.int8)  # by slot, as `_kind_of` says
        self._placed: tuple[int, int, Ids] | None = None  # rows of the step, and of a slot; slots

    def restart(self) -> None:
        """Begin another decoding, whatever the previous one has left in flight or unfinished."""
        self._placed = None
        for step in self._steps.values():
            step.restart()

    def of(self, model: CudaPasses, slots: Ids, together: int = 1) -> DecodingStep:
        """The step of these slots, or of a few more, with so many rows of each."""
        changed = int(self._changed[slots].max(initial=0))
        # With guesses a power of two of slots, so that few steps are recorded.
        count = min(rounded_up(len(slots), 2 if together == 1 else 1), self.batch)
        kind = count, changed, together
        if kind not in self._steps:
            self._steps[kind] = DecodingStep(model, self, *kind)
        return self._steps[kind]

    def place(self, slots: Ids, step: DecodingStep, again: bool = False) -> None:
        """Let the first rows of a step be those of these slots, the others of none.

        again: also if they are, as guesses have changed.
        """
        rows, together = step.rows, step.together
        placed = self._placed
        if placed and placed[:2] == (rows, together) and np.array_equal(placed[2], slots):
            if again:
                step.placing.run()
            return
        self._set_rows(np.repeat(slots, together), rows)
        step.placing.run()
        self._placed = rows, together, slots

    def _set_rows(self, slots: Ids, rows: int) -> None:
        row = np.full(rows, -1, np.int32)
        row[: len(slots)] = slots
        self.row[:rows].set(row)
        self._placed = None

    def next_token(
        self, model: CudaPasses, slots: Ids, tokens: Ids, positions: Ids
    ) -> DecodingStep:
        """A step that computes a given token of each of these slots at this position."""
        step = self.of(model, slots)
        self._set_rows(slots, step.rows)
        self.tokens[: len(slots)].set(tokens)
        self.positions[: len(slots)].set(positions)
        return step

    def logits_of(self, model: CudaPasses, slots: Ids, tokens: Ids, positions: Ids) -> Floats:
        """The logits (N, V) after a token for each of these slots."""
        self.next_token(model, slots, tokens, positions).recording.run_steps()
        logits: Floats = self.logits[: len(slots)].get()
        return logits

    def begin(
        self, model: CudaPasses, starts: Sequence[Start], slots: Ids, logits: CudaArray
    ) -> DecodingStep:
        """Place sequences with these logits after their last token; the step then samples."""
        ids = [start.ids if start.seen is None else start.seen for start in starts]
        positions = np.array([len(start.ids) - 1 for start in starts], np.int32)
        drawn = np.array([start.drawn for start in starts], np.int32)
        self.state.begin(slots, [start.sampling for start in starts], positions, drawn)
        if any(start.sampling.repetition_penalty != 1 for start in starts):
            self.state.seen[cupy.asarray(slots)] = 0
            of_token = np.repeat(slots, [len(each) for each in ids])
            mark_seen(np.concatenate(ids), of_token, self.state.seen)
        if self.guesses is not None:
            left = [start.steps for start in starts]
            self.guesses.begin(slots.tolist(), [start.ids for start in starts], left)
            self._placed = None  # rows of these slots may have ended
        self._set_changes(starts, ids)
        step = self.of(model, slots)
        cupy.copyto(self.logits[: len(slots)], logits[: len(slots)])
        self.place(slots, step)
        return step

    def _set_changes(self, starts: Sequence[Start], seen: Sequence[Ids]) -> None:
        """The changes of sequences that begin, and none where the last one in a slot had some."""
        V = self.logits.shape[1]
        for start, ids in zip(starts, seen, strict=True):
            changed = _kind_of(start.sampling)
            if changed or self._changed[start.slot]:
                if self.changes is None:
                    self.changes = cupy.zeros((self.batch, CHANGES), "float32")
                values, places = changes(start.sampling, V)
                places[ids] |= 1
                self.changes[start.slot].set(values)
                self.state.seen[start.slot].set(places)
            if changed == COUNTED:
                if self.counts is None:
                    self.counts = cupy.zeros((self.batch, V), "int32")
                self.counts[start.slot].set(start.counts(V))
            self._changed[start.slot] = changed


def steps_of(model: CudaPasses, cache: CudaCache, speculate: bool = False) -> DecodingSteps:
    """Return the DecodingSteps of a cache, which are created on first use."""
    if speculate not in cache.steps:
        cache.steps[speculate] = DecodingSteps(model, cache, speculate=speculate)
    found: DecodingSteps = cache.steps[speculate]
    return found


def _kind_of(sampling: Sampling) -> int:
    """0, CHANGED or COUNTED."""
    return COUNTED if sampling.counts else CHANGED if sampling.changes else 0


class DecodingStep:
    """A decoding step of a number of rows: launches, their graph, and the results on the host."""

    def __init__(
        self, model: CudaPasses, of: DecodingSteps, count: int, changed: int, together: int
    ) -> None:
        """count: of slots. changed: what changes their logits. together: rows of each."""
        self.rows = rows = count * together
        self.together, self._stream = together, model.stream
        self._done = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]
        self.turn = cupy.zeros(rows, "int32")
        row, tokens, positions = (a[:rows] for a in (of.row, of.tokens, of.positions))
        slots = Slots(row, tokens, positions, self.turn)
        self._logits = logits = of.logits[:rows]
        tables = of.changes if changed else None
        counts = of.counts if changed == COUNTED else None
        after: tuple[Bound, ...]
        if of.guesses is None:
            self._sampled, report = _on_host((2, 2, rows))  # token, logprob of even, odd launches
            self.placing = bind_place(of.state, slots)
            after = (bind_state(logits, of.state, of.n_ctx, report, slots, tables, counts),)
        else:
            self._sampled, report = _on_host((2, 3, rows))  # and flags
            self.placing = bind_place(of.state, slots, *of.guesses[1:], together)
            self._drawn = cupy.zeros(rows, "int32"), cupy.zeros(rows, "float32")
            state = of.state._replace(token=self._drawn[0], logprob=self._drawn[1])
            after = (
                bind_drawn(logits, state, slots, together, tables, counts),
                bind_take(self._drawn, slots, of.guesses, of.state, together, counts, report),
            )
        given = {"tokens": tokens, "row": row, "positions": positions}
        terms = None if of.floats else model.decoding.terms(rows)
        self.recording = model.recordings.make(
            lambda do: model.decode_pass(do, rows, terms, together),
            {**model.given(), **of.cache_tensors, **given},
            {"logits": logits},
            overlapping=True,
        )
        check_read(model.config, (each.step for each in self.recording.steps.values()))
        self.recording.after = after
        self.restart()

    def restart(self) -> None:
        """Let the next launch be the first one."""
        self._first = True
        self._launched = 0
        self._results: list[InFlight | None] = [None, None]  # that may not have been read yet

    def run(self, slots: Ids, alternatives: bool) -> InFlight:
        """Compute the placed rows, of these slots, and sample; a graph from the second run on.

        alternatives: whether the result has the most likely tokens, too.
        """
        half = self._free_half()
        self.recording.repeat(self._stream)
        return self._result(half, slots, alternatives)

    def sample(self, slots: Ids, alternatives: bool) -> InFlight:
        """Sample from `logits` alone."""
        half = self._free_half()
        for bound in self.recording.after:
            bound.run()
        return self._result(half, slots, alternatives)

    def _free_half(self) -> int:
        """The half of the results' memory that the next launch writes, once it has been read.

        The launches before the first one have ended when the device counts from 0 again.
        """
        if self._first:
            self.turn.fill(0)
            self._first = False
        half = self._launched % 2
        earlier = self._results[half]
        if earlier:
            earlier.read()
        return half

    def _result(self, half: int, slots: Ids, alternatives: bool) -> InFlight:
        if alternatives:
            self._top[half].launch.run()
        self._done[half].record(self._stream)
        self._launched += 1
        top = self._top[half].found if alternatives else None
        result = InFlight(slots, self._done[half], self._sampled[half], top, self.together)
        self._results[half] = result
        return result

    @cached_property
    def _top(self) -> tuple[_Top, _Top]:
        """For even and odd launches."""
        return _Top(self._logits), _Top(self._logits)


class _Top:
    """The launch that writes the most likely tokens of rows to the host, and where it does."""

    def __init__(self, logits: CudaArray) -> None:
        shape = len(logits), MOST_ALTERNATIVES
        ids, to_ids = _on_host(shape)
        bits, to_bits = _on_host(shape)
        self.launch = TOP_LOGPROBS.bind_on_device((logits,), (to_ids, to_bits.view("float32")))
        self.found = Alternatives(ids, bits.view(np.float32))


class InFlight:
    """The tokens of a launch, read when they are needed or their memory is.

    together: rows of each slot.
    """

    def __init__(
        self, slots: Ids, done: Any, sampled: Ids, top: Alternatives | None, together: int = 1
    ) -> None:
        self.slots, self.together = slots, together
        self._done, self._sampled, self._top = done, sampled, top
        self._stopped: list[Ids] = []
        self._read = False

    def read(self) -> None:
        if not self._read:
            self._done.synchronize()
            rows = len(self.slots) * self.together
            self._sampled = self._sampled[:, :rows].copy()
            if self._top:
                self._top = Alternatives(*(a[:rows].copy() for a in self._top))
            self._read = True

    def leave_out(self, slots: Ids) -> None:
        self._stopped.append(slots)

    @property
    def flags(self) -> Ids:
        """Flags of each row of each slot, (N, together), for a step with guesses."""
        self.read()
        flags: Ids = self._sampled[2].reshape(-1, self.together)
        return flags

    def get(self) -> Sampled:
        """The result, of a row a slot, without slots that were stopped."""
        self.read()
        tokens, logprobs = self._sampled
        found = Sampled(self.slots, tokens, logprobs.view(np.float32), self._top)
        return without(found, np.concatenate(self._stopped)) if self._stopped else found

    def taken(self) -> list[Sampled]:
        """Return the accepted tokens: the first token of every slot, then the second, and so on.

        Tokens of stopped slots are left out.
        """
        self.read()
        tokens, logprobs, flags = (a.reshape(-1, self.together).T for a in self._sampled)
        taken = flags & TAKEN > 0
        guessed = np.zeros_like(taken)
        guessed[:-1] = taken[1:]  # a row is taken if the token before it was guessed
        stopped = np.concatenate([self.slots[:0], *self._stopped])
        found = []
        for n in range(self.together):
            top, every = self._top, slice(n, None, self.together)
            top = top and Alternatives(top.ids[every], top.logprobs[every])
            rows = Sampled(self.slots, tokens[n], logprobs[n].view(np.float32), top, guessed[n])
            found.append(without(chosen(rows, taken[n]), stopped))
        return found


def _on_host(shape: tuple[int, ...]) -> tuple[Ids, CudaArray]:
    """int32 zeros in pinned host memory that kernels can write, as a NumPy and a CuPy array."""
    seen = pinned(shape)
    seen[...] = 0
    owner = cupy.cuda.UnownedMemory(seen.ctypes.data, seen.nbytes, seen, cupy.cuda.Device().id)
    return seen, cupy.ndarray(shape, "int32", cupy.cuda.MemoryPointer(owner, 0))
