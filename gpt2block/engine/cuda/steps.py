"""Decoding steps on a GPU: compute the next token of slots (sequences) of a kv_cache.

Steps exist for a few numbers of rows, such as 48 or 64, each with a CUDA graph. A device array maps
rows to slots, so that empty slots cost nothing. A step reads its tokens and positions from device
memory, where the sampler has written them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import Bound, CudaArray, on_device, pinned
from gpt2block.engine.cuda.caches import CudaCache
from gpt2block.engine.cuda.grammars import ANY_NUMBER, HostMasks
from gpt2block.engine.cuda.passes import CudaPasses
from gpt2block.engine.grammars import Matcher
from gpt2block.engine.model import (
    Alternatives,
    Drafts,
    Floats,
    Ids,
    Sampled,
    Start,
    cache_tensors,
    without_slots,
)
from gpt2block.engine.passes import STREAM, check_read
from gpt2block.engine.passes.rewriting import run
from gpt2block.engine.recorder import rounded_up
from gpt2block.engine.recording import Recording
from gpt2block.engine.speculation import ROWS, StepTimes
from gpt2block.ops.drafts import MAX_DRAFTS, MAX_KNOWN, TAKEN, TAKEN_ROWS, DraftTokens, bind_take
from gpt2block.ops.sample_token import (
    SampleState,
    Slots,
    bind_place,
    bind_sampled,
    bind_state,
    mark_occurred,
)
from gpt2block.ops.top_logprobs import TOP_LOGPROBS
from gpt2block.sampling import CHANGES, MAX_ALTERNATIVES, changes

CHANGED, COUNTED = 1, 2  # kinds of logit changes; COUNTED: penalties need counts of sampled tokens
MAX_DRAFT_ROWS = 64  # maximum rows (tokens) of a step that also computes draft tokens


def can_draft(slots: Ids) -> bool:
    """Return whether a step of these slots can have rows for draft tokens."""
    return len(slots) * ROWS[0] <= MAX_DRAFT_ROWS


class DecodingSteps:
    """The buffers that a cache's decoding steps share, and a DecodingStep per number of rows."""

    def __init__(
        self, model: CudaPasses, cache: CudaCache, floats: bool = False, speculate: Drafts = False
    ) -> None:
        """floats: whether activations are readable floats, not an `Operand`. The results are equal.

        speculate: all steps can compute draft tokens; otherwise only steps with grammars can.
        """
        B, config = cache.batch, model.config
        self.floats, self.speculate = floats, speculate
        self.n_ctx, self.batch = cache.n_ctx, B
        self.state = SampleState.allocate(B, config.vocab_size)
        self._begun: dict[int, Bound] = {}  # launches of `state.begin`
        known = speculate in ("known", "forced") and config.delta_nets is None
        most = MAX_KNOWN if known else MAX_DRAFTS  # states can be computed again for MAX_DRAFTS
        self.most_together = 1 + most
        self.drafts = DraftTokens.allocate(B, cache.n_ctx, most) if speculate else None
        self.rows = rows = max(B, min(B * (1 + most), MAX_DRAFT_ROWS))
        self.logits = cupy.zeros((rows, config.vocab_size), "float32")
        self.row, self.tokens, self.positions = (cupy.zeros(rows, "int32") for _ in range(3))
        self.cache_tensors, self.stream_rows = cache_tensors(cache), cache.stream_rows
        self.adapters = cache.adapters
        # Key: number of slots, kind of logit changes (0, CHANGED or COUNTED), rows per slot, masks,
        # adapters.
        self._steps: dict[tuple[int, int, int, bool, bool], DecodingStep] = {}
        # Created on first use: logit changes (slots, CHANGES), counts of sampled tokens (slots, V)
        self.changes: CudaArray | None = None
        self.counts: CudaArray | None = None
        self._changed = np.zeros(B, np.int8)  # 0, CHANGED or COUNTED for each slot
        # Arguments of the last assignment by `place`: number of rows, rows per slot, slots.
        self._placed: tuple[int, int, Ids] | None = None
        self.times = StepTimes()  # measured times of steps that compute draft tokens

    @cached_property
    def masks(self) -> HostMasks:
        """Masks for steps with grammars."""
        return HostMasks(self.rows, self.logits.shape[1])

    def allow_drafts(self) -> None:
        """Allocate memory for draft tokens before the first step that has grammars."""
        if self.drafts is None:
            self.drafts = DraftTokens.allocate(self.batch, self.n_ctx)
            self.drafts.left.fill(ANY_NUMBER)

    def restart(self) -> None:
        """Reset all steps for a new decoding, and drop results of the previous decoding."""
        self._placed = None
        for step in self._steps.values():
            step.restart()

    def of(
        self, model: CudaPasses, slots: Ids, together: int = 1, masked: bool = False
    ) -> DecodingStep:
        """Return the DecodingStep for at least len(slots) slots. together: rows per slot.

        masked: whether rows may have masks of allowed tokens.
        """
        changed = max(self._changed[slots].tolist(), default=0)
        # With draft tokens, the number of slots is a power of two, which limits the recorded steps.
        most = 2 if together == 1 and self.stream_rows is None else 1
        count = min(rounded_up(len(slots), most), self.batch)
        adapted = bool(self.adapters.tensors) and self.adapters.used(slots)
        kind = count, changed, together, masked, adapted
        if kind not in self._steps:
            model.recordings.meet()  # before memory is allocated
            self._steps[kind] = DecodingStep(model, self, *kind)
        return self._steps[kind]

    def place(self, slots: Ids, step: DecodingStep, again: bool = False) -> None:
        """Assign the first rows of `step` to `slots`, and mark its other rows as unused.

        again: copy tokens even if the rows are assigned already, because draft tokens have changed.
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

    def skip(self, slots: Ids, step: DecodingStep, late: Sequence[int]) -> list[CudaArray]:
        """Let the sampler of `step` leave out some of its slots; return copies of their logits.

        late: indices into `slots`.
        """
        left = slots.copy()
        left[late] = -1
        self._set_rows(np.repeat(left, step.together), step.rows)
        return [self.logits[n * step.together].copy() for n in late]

    def resample(self, model: CudaPasses, slots: Ids, logits: Sequence[CudaArray]) -> DecodingStep:
        """Return a step whose sampler draws tokens of slots from their copied logits."""
        step = self.of(model, slots, masked=True)
        for n, each in enumerate(logits):
            cupy.copyto(self.logits[n], each)
        self.place(slots, step)
        return step

    def _set_rows(self, slots: Ids, rows: int) -> None:
        row = np.full(rows, -1, np.int32)
        row[: len(slots)] = slots
        self.row[:rows].set(row)
        self._placed = None

    def next_token(
        self, model: CudaPasses, slots: Ids, tokens: Ids, positions: Ids
    ) -> DecodingStep:
        """Return a step that processes one token per slot, after setting its ids and positions."""
        step = self.of(model, slots)
        self._set_rows(slots, step.rows)
        self.tokens[: len(slots)].set(tokens)
        self.positions[: len(slots)].set(positions)
        return step

    def logits_of(self, model: CudaPasses, slots: Ids, tokens: Ids, positions: Ids) -> Floats:
        """Process one token in each of N slots, and return the logits (N, V) after these tokens."""
        self.next_token(model, slots, tokens, positions).recording(model).run_steps()
        return self.logits[: len(slots)].get()

    def begin(
        self, model: CudaPasses, starts: Sequence[Start], slots: Ids, logits: CudaArray
    ) -> DecodingStep:
        """Start sequences from the logits of their last prompt tokens; return the sampling step."""
        ids = [start.ids if start.occurred is None else start.occurred for start in starts]
        positions = np.array([len(start.ids) - 1 for start in starts], np.int32)
        sampled = np.array([start.sampled for start in starts], np.int32)
        self.state.begin(slots, [s.sampling for s in starts], positions, sampled, self._begun)
        if any(start.sampling.repetition_penalty != 1 for start in starts):
            self.state.occurred[cupy.asarray(slots)] = 0
            of_token = np.repeat(slots, [len(each) for each in ids])
            mark_occurred(np.concatenate(ids), of_token, self.state.occurred)
        if self.drafts is not None:
            left, prompts = zip(*((start.steps, len(start.ids)) for start in starts), strict=True)
            known = [start.ids[:0] if start.known is None else start.known for start in starts]
            texts = [np.concatenate([s.ids, text]) for s, text in zip(starts, known, strict=True)]
            self.drafts.begin(slots.tolist(), texts, left, prompts)
            self._placed = None  # positions of rows must be copied again
        self._set_changes(starts, ids)
        step = self.of(model, slots, masked=any(start.matcher for start in starts))
        cupy.copyto(self.logits[: len(slots)], logits[: len(slots)])
        self.place(slots, step)
        return step

    def _set_changes(self, starts: Sequence[Start], occurred: Sequence[Ids]) -> None:
        """Store the logit changes (bias and penalties) of new sequences in the slots' arrays."""
        V = self.logits.shape[1]
        for start, ids in zip(starts, occurred, strict=True):
            of = start.sampling
            changed = COUNTED if of.counts else CHANGED if of.changes else 0
            if changed or self._changed[start.slot]:
                if self.changes is None:
                    self.changes = cupy.zeros((self.batch, CHANGES), "float32")
                values, places = changes(start.sampling, V)
                places[ids] |= 1
                self.changes[start.slot].set(values)
                self.state.occurred[start.slot].set(places)
            if changed == COUNTED:
                if self.counts is None:
                    self.counts = cupy.zeros((self.batch, V), "int32")
                self.counts[start.slot].set(start.counts(V))
            self._changed[start.slot] = changed


def steps_of(model: CudaPasses, cache: CudaCache, speculate: Drafts = False) -> DecodingSteps:
    """Return the DecodingSteps of a cache; create them on first use."""
    if speculate not in cache.steps:
        cache.steps[speculate] = DecodingSteps(model, cache, speculate=speculate)
    found: DecodingSteps = cache.steps[speculate]
    return found


class DecodingStep:
    """Launches, CUDA graph and host results of a decoding step with a fixed number of rows."""

    def __init__(
        self,
        model: CudaPasses,
        of: DecodingSteps,
        count: int,
        changed: int,
        together: int,
        masked: bool,
        adapted: bool,
    ) -> None:
        """count: slots. changed: as `_changed` of DecodingSteps. together: rows per slot.

        masked: whether rows may have masks, so that the graph ends before the sampler. adapted:
        whether rows may have adapters; other rows have the same bits in both kinds of steps.
        """
        self.rows = rows = count * together
        self.together, self._stream = together, model.stream
        self._meet = model.recordings.meet
        self._done = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]
        self.turn = cupy.zeros(rows, "int32")
        row, tokens, positions = (a[:rows] for a in (of.row, of.tokens, of.positions))
        slots = Slots(row, tokens, positions, self.turn)
        self._logits = logits = of.logits[:rows]
        tables = of.changes if changed else None
        counts = of.counts if changed == COUNTED else None
        masks = of.masks.on_device if masked else None
        if masks is not None:
            masks = masks._replace(index=masks.index[:rows])
        after: tuple[Bound, ...]
        self.drafts = of.drafts if of.speculate or masked else None
        if self.drafts is None:
            # Axes: even or odd launch; token or logprob; row.
            self._sampled, report = _on_host((2, 2, rows))
            self.placing = bind_place(of.state, slots)
            after = (bind_state(logits, of.state, of.n_ctx, report, slots, tables, counts),)
        else:
            # Axes: even or odd launch; token, logprob or flags; row.
            self._sampled, report = _on_host((2, 3, rows))
            draft, left = self.drafts.draft, self.drafts.left
            self.placing = bind_place(of.state, slots, draft, left, together)
            forced = self.drafts.history if of.speculate == "forced" else None
            self.by_row = cupy.zeros(rows, "int32"), cupy.zeros(rows, "float32")
            state = of.state._replace(token=self.by_row[0], logprob=self.by_row[1])
            sampled = bind_sampled(logits, state, slots, together, tables, counts, masks, forced)
            self.followed = cupy.zeros((2, rows), "int32")
            inputs = (self.by_row[0], row, positions, draft)
            taken = TAKEN_ROWS.bind_on_device(inputs, self.followed, together=together)
            take = bind_take(self.by_row, slots, self.drafts, of.state, together, counts, report)
            after = (sampled, take) if of.stream_rows is None else (sampled, taken, take)
        self._given = {**of.cache_tensors, "tokens": tokens, "row": row, "positions": positions}
        self._given |= of.adapters.tensors if adapted else {}
        self._outs = {"logits": logits, "logits_base": logits}  # an adapter changes them in place
        if of.stream_rows is not None:
            self._given["stream_index"] = cupy.asarray(np.arange(rows, dtype=np.int32))
            self._given[STREAM] = self._outs["stream_rows"] = of.stream_rows[:rows]
        self.sampler, self._masked, self._floats = after, masked, of.floats
        self.follower: Recording | None = None  # the draft tokens after the tokens that are taken
        self._recording: Recording | None = None
        self.captured = False  # whether the next launch only replays a CUDA graph
        self.restart()

    def recording(self, model: CudaPasses) -> Recording:
        """Return the recorded launches. The first call records them: some steps only `sample`."""
        if self._recording is None:
            operands = None if self._floats else model.decoding.operands(self.rows)
            tensors = {**model.given(), **self._given}
            steps = model.decoding.steps(tensors, self.rows, operands, self.together)
            made = model.recordings.make(
                lambda do: run(steps, do, "logits"),
                tensors,
                self._outs,
                overlapping=True,
                fuses=not self._floats,
            )
            check_read(model.config, (each.step for each in made.steps.values()))
            made.after = () if self._masked else self.sampler
            self._recording = made
        return self._recording

    def restart(self) -> None:
        """Reset the count of launches to 0, and drop the results of earlier launches."""
        self._first = True
        self._launched = 0
        self._results: list[InFlight | None] = [None, None]  # last results of even and odd launches

    def run(self, model: CudaPasses, slots: Ids, alternatives: bool) -> InFlight:
        """Compute the step and sample tokens for `slots`; from the second run on as a CUDA graph.

        alternatives: whether the result includes the most likely tokens.
        """
        half = self._free_half(alternatives)
        (recording := self._recording or self.recording(model)).repeat(self._stream)
        self.captured = recording.captured
        return self._result(half, slots, alternatives)

    def sample(self, slots: Ids, alternatives: bool) -> InFlight:
        """Sample tokens for `slots` from the stored logits, without a forward pass."""
        half = self._free_half(alternatives)
        for bound in self.sampler:
            bound.run()
        return self._result(half, slots, alternatives)

    def forward(self, model: CudaPasses) -> None:
        """Compute the logits of a step with masks, whose sampler `sample` launches later."""
        (recording := self._recording or self.recording(model)).repeat(self._stream)
        self.captured = recording.captured

    def _free_half(self, alternatives: bool) -> int:
        """Read earlier results; return the half (0 or 1) of their memory for the next launch.

        The first call after `restart` also queues a reset of the device's launch count to 0. The
        first call with `alternatives` allocates memory for the most likely tokens.
        """
        if alternatives and "_top" not in vars(self):
            self._prepare_likely()
        if self._first:
            self.turn.fill(0)
            self._first = False
        half = self._launched % 2
        earlier = self._results[half]
        if earlier:
            earlier.read()
        return half

    def _prepare_likely(self) -> None:
        """Allocate memory for the most likely tokens before launches (see `Recordings.meet`)."""
        self._meet()
        for top in self._top:
            _ = top.launch.launches[0].function.local_size_bytes  # loads the kernel
        self._meet()

    def _result(self, half: int, slots: Ids, alternatives: bool) -> InFlight:
        if alternatives:
            self._top[half].launch.run()
        self._done[half].record(self._stream)
        self._launched += 1
        top = self._top[half].found if alternatives else None
        found, done = self._sampled[half], self._done[half]
        result = InFlight(slots, done, found, top, self.together, self.drafts is not None)
        self._results[half] = result
        return result

    @cached_property
    def _top(self) -> tuple[_Top, _Top]:
        """Two launches that copy the most likely tokens to the host, for even and for odd steps."""
        return _Top(self._logits), _Top(self._logits)


class _Top:
    """Host arrays, and the launch that writes the most likely tokens of each row to them."""

    def __init__(self, logits: CudaArray) -> None:
        shape = len(logits), MAX_ALTERNATIVES
        ids, to_ids = _on_host(shape)
        bits, to_bits = _on_host(shape)
        self.launch = TOP_LOGPROBS.bind_on_device((logits,), (to_ids, to_bits.view("float32")))
        self.found = Alternatives(ids, bits.view(np.float32))


class InFlight:
    """The tokens of a launched step, which are copied from pinned memory on first use.

    together: rows per slot. drafts: whether a slot can have several tokens.
    """

    def __init__(
        self,
        slots: Ids,
        done: Any,
        sampled: Ids,
        top: Alternatives | None,
        together: int = 1,
        drafts: bool = False,
    ) -> None:
        self.slots, self.together, self.drafts = slots, together, drafts
        self.expected: Ids | int = 1  # number of tokens that each slot was expected to sample
        self.masked = False  # whether the sampler read masks
        self._matchers: Sequence[Matcher | None] = ()
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

    def with_masks(self, matchers: Sequence[Matcher | None]) -> InFlight:
        """Set the slots' matchers, to which `accept` passes the tokens; return this object."""
        self._matchers, self.masked = matchers, True
        return self

    def accept(self) -> None:
        """Pass the tokens to the slots' matchers, on the first call only."""
        if not self._matchers:
            return
        self.read()
        tokens, flags = (self._sampled[n].reshape(-1, self.together).tolist() for n in (0, 2))
        for matcher, row, of_row in zip(self._matchers, tokens, flags, strict=True):
            if matcher is not None:
                matcher.accept([t for t, flag in zip(row, of_row, strict=True) if flag & TAKEN])
        self._matchers = ()

    def leave_out(self, slots: Ids) -> None:
        self._stopped.append(slots)

    @property
    def flags(self) -> Ids:
        """Flags (N, together) of tokens of a speculative step: `together` rows per slot."""
        self.read()
        flags: Ids = self._sampled[2].reshape(-1, self.together)
        return flags

    def get(self) -> Sampled:
        """Return the tokens of a step with one row per slot, without tokens of stopped slots."""
        self.read()
        tokens, logprobs = self._sampled
        found = Sampled(self.slots, tokens, logprobs.view(np.float32), self._top)
        return without_slots(found, np.concatenate(self._stopped)) if self._stopped else found

    def accepted(self) -> Sampled:
        """Return the accepted tokens of a speculative step, without tokens of stopped slots."""
        self.read()
        tokens, logprobs, flags = (a.reshape(-1, self.together).T for a in self._sampled)
        taken = flags & TAKEN > 0
        drafted = np.zeros_like(taken)
        drafted[:-1] = taken[1:]  # row n + 1 is taken if its draft token is row n's token
        place = nth, at = np.nonzero(taken)
        top = self._top
        if top:
            rows = at * self.together + nth
            top = Alternatives(top.ids[rows], top.logprobs[rows])
        likely = logprobs[place].view(np.float32)
        found = Sampled(
            self.slots[at], tokens[place], likely, top, drafted[place], nth.astype(np.int32)
        )
        return without_slots(found, np.concatenate(self._stopped)) if self._stopped else found


def _on_host(shape: tuple[int, ...]) -> tuple[Ids, CudaArray]:
    """Return zeros, int32, in pinned host memory: a NumPy and a CuPy array of the same memory."""
    seen = pinned(shape)
    seen[...] = 0
    return seen, on_device(seen)
