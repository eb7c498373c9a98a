"""Decoding on a GPU: a step is launched before the host reads the previous step's tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from gpt2block.engine.cuda.caches import CudaCache, copy_slots
from gpt2block.engine.cuda.draft import Draft
from gpt2block.engine.cuda.grammars import Drafted, Pending, SlotMatchers
from gpt2block.engine.cuda.passes import CudaPasses
from gpt2block.engine.cuda.prefill import prefill_starts
from gpt2block.engine.cuda.start_up import start_up
from gpt2block.engine.cuda.steps import MAX_DRAFT_ROWS, InFlight, can_draft, steps_of
from gpt2block.engine.grammars import MaskJob
from gpt2block.engine.model import NOTHING, Drafts, Ids, Sampled, Start, in_groups, without_slots
from gpt2block.engine.recorder import rounded_up
from gpt2block.engine.speculation import MIN_SHARE, SpeculationPolicy

PREFILL_TOKENS = 8192  # maximum prompt tokens of one prefill
IN_FLIGHT = 2  # maximum launched steps whose results the host has not read
MAX_KNOWN_TEXTS = 8  # slots of known texts: more slots would only have fewer rows each


class CudaDecoding:
    """Decoding on a GPU: a step is launched before the host reads the previous step's tokens.

    A stopped sequence is computed for at most one more step. speculate: if it is True, a step also
    verifies draft tokens if that is expected to be faster. Steps of known texts verify as many
    tokens as they have rows. draft: the draft model, or the block of the model, which drafts tokens
    in every step; None: draft tokens are copied from the sequence's earlier tokens.
    """

    def __init__(
        self,
        model: CudaPasses,
        cache: CudaCache,
        slots: int,
        speculate: Drafts = False,
        draft: Draft | None = None,
    ) -> None:
        self.slots, self.n_ctx = slots, cache.n_ctx
        self._model, self._cache, self._draft = model, cache, draft
        self._steps = steps_of(model, cache, speculate)
        drafts = speculate is True
        least = draft.least_share if draft else MIN_SHARE
        self._pace = SpeculationPolicy(cache.batch, self._steps.times, least) if drafts else None
        # Per slot: known text, if the steps verify known texts.
        self._texts: list[Ids] | None = None
        if speculate in ("known", "forced"):
            self._texts = [np.empty(0, np.int32)] * slots
        self._steps.restart()
        if (states := cache.kept_states) is not None:
            states.clear()
        # Per slot: maximum tokens still to sample. A launched step counts as one sampled token, or
        # as all tokens of a known text that it verifies.
        self._left = np.zeros(slots, np.int32)
        self._alternatives = np.zeros(slots, np.int32)
        self._matchers: SlotMatchers | None = None  # created for the first sequence with a grammar
        self._pending: Pending | None = None  # the step whose sampler waits for masks
        self._stopped: list[Ids] = []  # slots stopped since the pending step's forward pass
        self._in_flight: deque[InFlight] = deque()
        self._found: deque[Sampled] = deque()  # results that are read but not yet returned

    def start_up(self, continued: bool) -> Iterator[tuple[int, int]]:
        drafts = self._pace is not None  # known texts need no start-up
        return start_up(self._model, self._cache, self.slots, PREFILL_TOKENS, continued, drafts)

    def start(self, starts: Sequence[Start]) -> None:
        with self._model.running():
            adapters = self._cache.adapters
            for start in starts if adapters.tensors else ():  # they decide the kind of the steps
                adapters.begin(start.slot, start.adapter)
            groups = list(_groups(starts)) if len(starts) > 1 else [starts]
            for group in groups:
                self._start(group, last=group is groups[-1])
                self._model.recordings.meet()  # all GPUs allocate before the next prompts' gathers

    def extend(self, starts: Sequence[Start]) -> None:
        with self._model.running():
            for group in _groups(starts):
                prefill_starts(self._model, self._cache, group, last=False)
                if self._draft:
                    self._draft.extend(group)
                    self._model.recordings.meet()

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        with self._model.running():
            copy_slots(self._cache, copies)
            if self._draft:
                self._draft.copy(copies)

    def reusable(self, source: int, target: int, tokens: int) -> int:
        states = self._cache.kept_states
        return tokens if states is None else states.longest(source, target, tokens)

    def _start(self, group: Sequence[Start], last: bool) -> None:
        self._sample_pending()
        slots = np.array([start.slot for start in group], np.int32)
        masked = any(start.matcher for start in group)
        if masked:
            self._steps.allow_drafts()
        self._steps.of(self._model, slots, masked=masked)  # allocates memory for first tokens
        grammars = self._with_grammars() or any(each.matcher and each.steps > 1 for each in group)
        self._left[slots] = [start.steps - 1 for start in group]
        if self._texts is not None:
            for start in group:
                assert start.known is not None
                self._texts[start.slot] = start.known
        if last:
            self._record_next(grammars)
        self._model.recordings.meet()  # all GPUs have allocated before the prompts' gathers
        logits = prefill_starts(self._model, self._cache, group, last=True)
        if self._draft:
            self._model.recordings.meet()  # the draft may allocate memory
            self._draft.start(group, self._running() if last else slots[:0])
        step = self._steps.begin(self._model, group, slots, logits)
        self._alternatives[slots] = [start.alternatives for start in group]
        if masked and self._matchers is None:
            assert self._steps.drafts is not None
            self._matchers = SlotMatchers(self.slots, self._steps.drafts.draft.shape[1])
        if self._matchers is not None:
            for start in group:
                self._matchers.begin(start.slot, start.matcher)
        if masked:
            self._sample(Pending(step, slots, [()] * len(group)))
        else:
            self._in_flight.append(step.sample(slots, bool(self._alternatives[slots].any())))
            if self._draft:
                self._draft.follow(step, slots, self._steps)
        if self._pace:
            self._pace.begin(slots)

    def _record_next(self, grammars: bool) -> None:
        """Record the step after the prompts, whose kernels are compiled while the prompts run.

        This step has one row per slot, or the least rows of the draft. grammars: whether a slot
        with tokens left to sample has a grammar.
        """
        slots = self._running()
        together = self._draft.least_rows if self._draft and not grammars else 1
        if self._texts is not None and len(slots):
            together = self._rows_of_texts(slots)
        if len(slots):
            self._steps.of(self._model, slots, together, grammars).recording(self._model)

    def stop(self, slots: Ids) -> None:
        self._left[slots] = 0
        if self._matchers is not None:
            self._matchers.stop(slots)
        if self._pending is not None:
            self._stopped.append(slots)
        for result in self._in_flight:
            result.leave_out(slots)
        self._found = deque(without_slots(each, slots) for each in self._found)

    def next(self) -> Sampled:
        with self._model.running():
            while True:
                self._launch_more()
                if not self._found:
                    if not self._in_flight and self._matchers and self._matchers.late:
                        self._matchers.wait()
                        return NOTHING
                    if not self._in_flight:
                        raise RuntimeError("next: expected a sequence in at least one slot")
                    result = self._in_flight.popleft()
                    if result.drafts:
                        self._take(result)
                    else:
                        self._found.append(result.get())
                while self._found:
                    found = self._found.popleft()
                    if len(found.slots):  # skip results whose sequences were all stopped
                        return found

    def _take(self, result: InFlight) -> None:
        """Wait for a speculative step; append the accepted tokens of its slots to `_found`."""
        found = result.accepted()
        result.accept()  # the last token of a sequence may complete its text
        self._found.append(found)
        sampled = np.bincount(found.slots, minlength=self.slots)
        fewer = np.zeros(self.slots, np.int64)  # tokens that were expected, and not sampled
        fewer[result.slots] = result.expected
        fewer = np.where(sampled > 0, fewer - sampled, 0)  # nothing is known of stopped sequences
        self._left[:] = np.maximum(self._left + fewer, 0)
        pace = self._pace
        if result.masked and self._matchers is not None:
            pace = self._matchers.pace
        if pace is not None:
            pace.result(len(result.slots), result.together)
            if not result.masked:
                drafted = max(result.together - 1, 1) if self._draft else None
                pace.add(result.slots, result.flags, drafted)

    def _running(self) -> Ids:
        """Return the slots with tokens left to sample that are not late."""
        running = self._left > 0
        if self._matchers is not None and self._matchers.late:
            running[[*self._matchers.late]] = False
        return running.nonzero()[0].astype(np.int32)

    def _with_grammars(self) -> bool:
        """Whether any of the running slots has a grammar."""
        return self._matchers is not None and bool(self._left[self._matchers.masked].any())

    def _launch_more(self) -> None:
        """Launch steps until enough are in flight. Steps with grammars are launched in two parts.

        The forward pass of a step with grammars is launched before the results of the previous
        step are read, its sampler after them.
        """
        if self._matchers is not None and self._matchers.late:
            self._resume(self._matchers)
        if self._pending is None and not self._with_grammars():
            draft = self._draft and self._draft_of(self._running())
            most = draft.in_flight if draft else IN_FLIGHT
            while len(self._in_flight) < most and self._launch():
                pass
        elif not self._found:
            if self._pending is None:
                self._launch_forward(self._plan())
            self._sample_pending(go_on=True)

    def _resume(self, matchers: SlotMatchers) -> None:
        """Sample tokens of sequences whose masks have taken long, and are ready."""
        ready = self._model.recordings.agree(matchers.ready())
        if ready:
            self._sample_pending()
            slots = np.array(ready, np.int32)
            step = self._steps.resample(self._model, slots, [matchers.late[n][1] for n in ready])
            self._model.recordings.meet()  # the step may have allocated memory
            matchers.masked[slots] = True
            self._sample(Pending(step, slots, [()] * len(ready)))

    def _set_aside(self, pending: Pending, jobs: list[MaskJob | None], late: Sequence[int]) -> None:
        """Leave sequences out of a pending sampler, and out of further steps until `_resume`.

        late: indices of the sequences in the pending step. jobs: their entries become None.
        """
        assert self._matchers is not None
        self._model.recordings.meet()  # the copies need memory
        copies = self._steps.skip(pending.slots, pending.step, late)
        self._model.recordings.meet()
        self._left[pending.slots[late]] += np.broadcast_to(pending.expected, len(jobs))[late] - 1
        for n, slot, logits in zip(late, pending.slots[late].tolist(), copies, strict=True):
            job, jobs[n] = jobs[n], None
            assert job is not None
            self._matchers.late[slot] = job, logits
            self._matchers.masked[slot] = False

    def _draft_of(self, slots: Ids) -> Draft | None:
        """Return the draft, or None if a step of these slots has no rows for its tokens."""
        return self._draft if can_draft(slots) else None

    def _rows_of_texts(self, slots: Ids) -> int:
        """Return the rows per slot of a step that verifies known texts: a power of two."""
        most = int(self._left[slots].max())
        fits = min(max(1, MAX_DRAFT_ROWS // rounded_up(len(slots), 1)), self._steps.most_together)
        return min(1 << (fits.bit_length() - 1), 1 << (most - 1).bit_length())

    def _plan(self) -> Pending:
        """Choose the next step, in which at least one slot has a grammar, and its draft tokens."""
        slots, matchers = self._running(), self._matchers
        assert matchers is not None
        expected, together = matchers.expected(slots), 1
        drafts: Drafted = [()] * len(slots)
        if self._texts is not None:
            together = self._rows_of_texts(slots) if matchers.masked[slots].all() else 1
            expected = [
                self._texts[slot][-left:].tolist()
                for slot, left in zip(slots.tolist(), self._left[slots].tolist(), strict=True)
            ]
        # Draft tokens would delay slots without grammars.
        elif any(expected) and matchers.masked[slots].all():
            counts = np.array([len(each) for each in expected])
            together = matchers.pace.for_forced(counts, MAX_DRAFT_ROWS)
            together = self._model.recordings.agree(together)
        if together > 1:
            most = np.minimum(self._left[slots] - 1, together - 1).tolist()
            drafts = [each[:n] for each, n in zip(expected, most, strict=True)]
        step = self._steps.of(self._model, slots, together, masked=True)
        if not step.captured:
            matchers.pace.skip()
        counted = 1 if self._texts is None else np.minimum(self._left[slots], together)
        self._left[slots] -= counted
        return Pending(step, slots, drafts, counted)

    def _launch_forward(self, planned: Pending) -> None:
        """Launch the forward pass of a step in which at least one slot has a grammar."""
        step, slots, drafts, _ = planned
        several = step.together > 1
        if several:
            assert self._matchers is not None
            assert self._steps.drafts is not None
            self._matchers.write(slots, drafts, self._steps.drafts)
        self._steps.place(slots, step, again=several)
        step.forward(self._model)
        self._pending, self._stopped = planned, []

    def _sample_pending(self, go_on: bool = False) -> None:
        """Launch the sampler of the step whose forward pass is launched, if there is one.

        go_on: whether the forward pass of the next step with grammars follows it at once.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            self._sample(pending, self._stopped, go_on)

    def _sample(self, pending: Pending, stopped: Sequence[Ids] = (), go_on: bool = False) -> None:
        """Wait for all earlier samplers, compute the masks of a step, and launch its sampler.

        The next step is chosen before the launch, so that the GPU does not wait for this choice.
        """
        step, slots, drafts, expected = pending
        assert self._matchers is not None
        for result in self._in_flight:
            result.accept()
        # Determined tokens are computed as draft tokens, if rows for them fit into the next step.
        find = can_draft(slots) and bool(self._matchers.masked[slots].all())
        find = find and self._texts is None
        jobs, late = self._matchers.compute(slots, drafts, find)
        late = self._model.recordings.agree(late)  # other GPUs wait for masks that the first has
        if late:
            self._set_aside(pending, jobs, late)
            for each in stopped:  # a stopped sequence must not wait for its mask
                self._matchers.stop(each)
            stopped = [*stopped, slots[late]]
        self._steps.masks.write(jobs, step.together)
        self._matchers.expect(slots, jobs, step.together)
        planned = self._plan() if go_on and self._with_grammars() else None
        result = step.sample(slots, bool(self._alternatives[slots].any()))
        if self._draft:
            self._draft.follow(step, slots, self._steps)
        if planned:
            self._launch_forward(planned)
        result.expected = expected
        self._in_flight.append(result.with_masks([job and job.matcher for job in jobs]))
        for each in stopped:
            result.leave_out(each)

    def _launch(self) -> bool:
        """Launch a step for slots with tokens left to sample; return False if no slot has any."""
        slots = self._running()
        if not len(slots):
            return False
        together = 1 if self._texts is None else self._rows_of_texts(slots)
        if self._pace:
            together = self._pace.together(slots, MAX_DRAFT_ROWS)
            together = self._model.recordings.agree(together)
        if self._draft and (draft := self._draft_of(slots)):
            together = max(together, draft.least_rows)
            self._model.recordings.meet()  # the draft may allocate memory, so gathers wait
            count = max(together - 1, 1)
            draft.propose(slots, count, self._steps, self._model.stream)
            self._model.recordings.meet()
        step = self._steps.of(self._model, slots, together)
        if self._pace and not step.captured:
            self._pace.skip()
        self._steps.place(slots, step, again=self._draft is not None)
        result = step.run(self._model, slots, bool(self._alternatives[slots].any()))
        if self._draft:
            self._draft.follow(step, slots, self._steps)
        if self._texts is not None:
            result.expected = np.minimum(self._left[slots], together)
        self._left[slots] -= result.expected
        self._in_flight.append(result)
        return True


def _groups(starts: Sequence[Start]) -> Iterator[list[Start]]:
    """Split Starts into a list per prefill. All or none of a list have cached tokens."""
    for continued in (False, True):
        chosen = sorted(start for start in starts if (start.cached > 0) == continued)
        # A prefill computes the tokens that are not cached.
        yield from in_groups(chosen, PREFILL_TOKENS, lambda start: len(start.ids) - start.cached)
