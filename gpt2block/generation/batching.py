"""Continuous batching: rows that come and go in the slots of a decoding."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import count
from time import monotonic
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gpt2block.generation.prefixes import LEAST_COPIED, NOTHING, Prefixes, least_shared
from gpt2block.generation.rows import Ends, Row, Tops
from gpt2block.generation.scheduling import PIECE, PieceScheduler, RowScheduler
from gpt2block.run.model import Alternatives, Ids, ModelEngine, Sampled, Start
from gpt2block.sampling import Sampling
from gpt2block.tokenizers.encoding import bytes_of_ids

NO_SLOTS = np.empty(0, np.int32)
FIRST_TOKENS = 4  # of rows that run before any is submitted
TURN = 16  # steps in which each slot gives its tokens once, where nobody reads each


class Batch:
    """Generates the tokens of rows, each with its own prompt, sampling and end.

    `step` computes the next tokens of all rows that run; `submit` adds rows at any time, and
    `cancel` ends them. The tokens of a row do not depend on the others. An exception in the engine
    leaves a batch that must not be used again.

    A row does not compute the tokens at its beginning again that a slot has computed as those of a
    prompt of the same client, where that changes no bit (`ModelEngine.continues_exactly`): it gets
    the slot that has them, or a copy of their keys and values.

    slots, n_ctx, fewer, speculate: as for ModelEngine.decode; no prompt and its new tokens, without
    the last one, may be longer than n_ctx. reuse: also tokens that a slot's last row drew, and with
    every engine. Other kernels may have computed their keys and values, so that last bits depend on
    that row. tokens_at_once: of prompts before a step, as for PieceScheduler, in pieces of PIECE if
    the engine divides prompts.
    """

    def __init__(
        self,
        engine: ModelEngine,
        slots: int,
        n_ctx: int,
        fewer: bool = False,
        reuse: bool = False,
        tokens_at_once: int | None = None,
        speculate: bool = False,
    ) -> None:
        self.n_ctx, self.speculate = n_ctx, speculate
        piece = PIECE if engine.divides_prompts else 0
        self._reuse = reuse
        self._prefixes: Prefixes | None = None
        if reuse or engine.continues_exactly:
            self._prefixes = Prefixes(1 if reuse else LEAST_COPIED, engine.config.short_context)
        self._least_shared = least_shared(engine.config.n_layer, engine.nbytes)
        self._continues = self._prefixes is not None or 0 < piece < n_ctx
        self._pieces: PieceScheduler[Row] = PieceScheduler(tokens_at_once, piece)
        self._starts: dict[int, Start] = {}  # by slot, of rows whose prompts are not complete
        self._decoding = engine.decode(slots, n_ctx, fewer, speculate)
        self.slots = slots = self._decoding.slots
        choose = self._prefixes.slot_for if self._prefixes is not None else None
        self._scheduler: RowScheduler[Row] = RowScheduler(slots, choose)
        self._vocab_size = engine.config.vocab_size
        self._following: dict[int, Row] = {}  # by slot: that wait for what another one computes
        self._copies: list[tuple[int, int, int]] = []  # of keys and values, before the next prompts
        self._started: dict[int, Start] = {}  # by slot, where what it draws is reused
        self.begun: list[Row] = []  # that had their first token in the last step
        self._deadlines: list[tuple[float, int, Row]] = []  # a heap; the number is unique
        self._numbers, self._steps = count(), count()

    @cached_property
    def _new(self) -> _NewTokens:
        """Made while the engine computes the first prompts."""
        return _NewTokens(self.slots, self.n_ctx, self._vocab_size)

    @property
    def busy(self) -> bool:
        """Whether any row runs or waits."""
        return self._scheduler.busy

    @property
    def reuses(self) -> bool:
        """Whether rows may begin with tokens that others have computed."""
        return self._prefixes is not None

    @property
    def waiting(self) -> int:
        """The number of rows whose prompts have not been computed yet."""
        return self._scheduler.waiting + len(self._pieces) + len(self._following)

    @property
    def latest(self) -> Ids:
        """The slots of the tokens that the last step computed."""
        return self._new.latest

    @property
    def firsts(self) -> NDArray[np.bool_]:
        """Whether each token of the last step that computed any is the first one of its slot."""
        return self._new.firsts

    def start_up(self) -> Iterator[tuple[int, int]]:
        """As `Decoding.start_up`, before the first row is submitted; then a few rows run."""
        total = 0
        for done, total in self._decoding.start_up(self._continues):
            yield done, total
        if total:
            ends = Ends(FIRST_TOKENS, self.n_ctx, False, (), frozenset(), None)
            usual = (
                Sampling(),
                Sampling(logit_bias={0: 1}, repetition_penalty=1.1),
                Sampling(presence_penalty=1),
            )
            prompt = np.zeros(1, np.int32)
            self.submit([Row(prompt, each, None, ends, n) for n, each in enumerate(usual)])
            while self.busy:
                self.step()
            if self._prefixes is not None:
                self._prefixes.clear()

    def submit(self, rows: Sequence[Row], deadline: float | None = None, client: str = "") -> None:
        """Add rows, which start when slots are free, in this order, in turn with other clients'.

        deadline: a time of `time.monotonic`; the first step after it ends those that still run or
        wait.
        """
        self._scheduler.add(rows, client)
        if deadline is not None:
            for row in rows:
                heapq.heappush(self._deadlines, (deadline, next(self._numbers), row))

    def step(self, each_token: bool = True) -> list[Row]:
        """Compute a token of all rows that run, after parts of prompts for which there are slots.

        Returns rows that took new tokens, each with all that it has in the batch: those that may
        have ended and, with each_token, those that are not `held`; without it, those whose turn it
        is, one in TURN, so that few tokens are left to take when all rows end. Rows whose deadline
        has passed are returned alone. Raises RuntimeError when no row runs or waits.
        """
        self.begun = []
        if late := self._late():
            self._new.latest = NO_SLOTS
            self.cancel(late, "deadline")
            return late
        self._place()
        self._compute_prompts()
        self._new.latest = NO_SLOTS
        if self._pieces and not self._new.left.any():
            return []  # no prompt is complete
        self._new.add(self._decoding.next())
        rows_of, taken = self._scheduler.rows_of, self._new.ending
        self.begun = rows_of(self.latest[self.firsts].tolist())
        if each_token:
            taken = taken | [not row.held for row in rows_of(self.latest.tolist())]
        else:
            taken = taken | ((self.latest + next(self._steps)) % TURN == 0)
        found, stopped = [], []
        for slot in self.latest[taken].tolist():
            row = self._scheduler.row_of(slot)
            row.add(*self._new.take(slot))
            found.append(row)
            if row.finish_reason:
                if self._new.left[slot]:
                    stopped.append(slot)
                self._release(slot, row)
            elif not self._new.left[slot]:
                self._release(slot, row, again=True)
        if stopped:
            self._decoding.stop(np.array(stopped, np.int32))
        return found

    def _late(self) -> list[Row]:
        """Rows that run or wait after their deadline.

        Forgets rows that have ended, up to the first one that has not.
        """
        late, now = [], monotonic()
        while self._deadlines:
            deadline, _, row = self._deadlines[0]
            if row.finish_reason is None:
                if deadline > now:
                    break
                late.append(row)
            heapq.heappop(self._deadlines)
        return late

    def cancel(
        self, rows: Sequence[Row], reason: Literal["cancelled", "deadline"] = "cancelled"
    ) -> None:
        """End rows that run or wait; those that have ended stay as they are."""
        for row in rows:
            if row.finish_reason:
                continue
            slot = self._scheduler.slot_of(row)
            if slot is None:
                self._scheduler.remove(row)
            elif self._following.pop(slot, None) is not None:
                self._scheduler.release(slot)
            elif self._pieces.remove(row):
                del self._starts[slot]
                self._scheduler.release(slot)
                if self._prefixes is not None:
                    self._prefixes.drop(slot)
            else:
                taken = self._new.take(slot)
                if taken[0]:
                    row.add(*taken)
                self._new.left[slot] = 0
                self._decoding.stop(np.array([slot], np.int32))
                self._release(slot, row)
            if not row.finish_reason:
                row.cancel(reason)

    def _compute_prompts(self) -> None:
        """Compute the next pieces of prompts, and start the rows whose prompts are complete."""
        more, complete = [], []
        for slot, _, first, end, last in self._pieces.take():
            start = self._starts[slot]._replace(cached=first)
            if last:
                complete.append(start)
                del self._starts[slot]
            else:
                more.append(start._replace(ids=start.ids[:end]))
        if more:
            self._decoding.extend(more)
        if complete:
            self._decoding.start(complete)
        for start in complete:  # while the engine computes
            row = self._scheduler.row_of(start.slot)
            self._new.begin(start, row)
            if self._prefixes is not None:
                self._prefixes.hold(start.slot, row, start.ids, len(start.ids))
            if self._reuse:
                self._started[start.slot] = start

    def _place(self) -> None:
        """Give slots to rows, and add their prompts to those that are to be computed.

        Rows wait while another one computes what they begin with, if that is much in all.
        """
        gains: dict[int, int] = {}  # by the slot that computes for others
        following: list[tuple[int, int, Row]] = []
        for slot, row in (*self._following.items(), *self._scheduler.place()):
            leader, gain = self._leader(slot, row)
            if gain < LEAST_COPIED:
                self._start(slot, row)
            else:
                gains[leader] = gains.get(leader, 0) + gain
                following.append((leader, slot, row))
        self._following.clear()
        for leader, slot, row in following:
            if gains[leader] < self._least_shared:
                self._start(slot, row)
            else:
                self._following[slot] = row
        if self._copies:
            self._decoding.copy(self._copies)
            self._copies.clear()

    def _leader(self, slot: int, row: Row) -> tuple[int, int]:
        """The slot that will have most of a prompt's tokens, and how many it does not have yet."""
        if self._prefixes is None:
            return NOTHING
        done, coming = self._prefixes.longest(row, row.start(slot).ids)
        return coming.slot, coming.tokens - done.tokens

    def _start(self, slot: int, row: Row) -> None:
        """Let a row compute its prompt, without the tokens that slots have computed."""
        start = row.start(slot)
        if self._prefixes is not None:
            (source, row.reused), _ = self._prefixes.longest(row, start.ids)
            if source != slot and row.reused < LEAST_COPIED:
                row.reused = 0
            elif source != slot:
                self._copies.append((source, slot, row.reused))
            self._prefixes.hold(slot, row, start.ids, row.reused)
        self._starts[slot] = start._replace(cached=row.reused)
        self._pieces.add(slot, row, row.reused, len(start.ids))

    def _release(self, slot: int, row: Row, again: bool = False) -> None:
        self._scheduler.release(slot, again)
        if self._prefixes is not None and self._reuse:
            start = self._started.pop(slot)
            drawn = np.array(row.tokens[start.drawn : -1], np.int32)  # not the last one
            ids = np.concatenate([start.ids, drawn])
            self._prefixes.hold(slot, row, ids, len(ids))


class _Endings:
    """Tokens that may end a row: stop ids, and those with the last byte of a stop string.

    The bytes of a token are looked up when it is sampled for the first time.
    """

    def __init__(self, ends: Ends, vocab_size: int) -> None:
        self._encoding = ends.encoding
        self._bytes = {string.encode()[-1] for string in ends.stop}
        if any(string[-1] == "\ufffd" for string in ends.stop):  # the end of any invalid bytes
            self._bytes = set(range(256))
        self._may_end = np.zeros(vocab_size, bool)
        self._known = np.full(vocab_size, not ends.stop)
        stop_ids = list(ends.stop_ids)
        self._may_end[stop_ids] = self._known[stop_ids] = True

    def of(self, tokens: Ids) -> NDArray[np.bool_]:
        """Whether each of these tokens may end its row."""
        for token in set(tokens[~self._known[tokens]].tolist()) - {-1}:
            data = bytes_of_ids(self._encoding, [token]) if self._encoding is not None else b""
            self._may_end[token] = not self._bytes.isdisjoint(data)
            self._known[token] = True
        return self._may_end[tokens]


class _NewTokens:
    """The tokens of the slots that rows have not taken yet, in arrays."""

    def __init__(self, slots: int, n_ctx: int, vocab_size: int) -> None:
        self.left = np.zeros(slots, np.int64)  # tokens that each slot may still sample
        self._vocab_size = vocab_size
        self._alternatives = np.zeros(slots, np.int64)  # that each slot reports
        self._top: dict[int, list[Tops]] = {}  # of slots that report any
        self._endings: dict[Any, _Endings] = {}  # of the rows in slots, by what determines them
        self._of_slot: list[Any] = [None] * slots  # its key there
        self._begun = np.zeros(slots, bool)
        self._count = np.zeros(slots, np.int64)  # tokens in the arrays
        self._tokens = np.empty((slots, n_ctx), np.int32)
        self._logprobs = np.empty((slots, n_ctx), np.float32)
        self._guessed = np.zeros((slots, n_ctx), bool)
        self._guesses = False  # whether the engine does
        self.latest, self.firsts = NO_SLOTS, np.empty(0, bool)
        self.ending = np.empty(0, bool)  # whether each of the latest tokens may end its row

    def begin(self, start: Start, row: Row) -> None:
        """Expect tokens of a slot."""
        ends = row.ends
        self.left[start.slot] = start.steps
        self._begun[start.slot] = False
        self._alternatives[start.slot] = start.alternatives
        key = ends.stop, ends.stop_ids, id(ends.encoding)
        self._of_slot[start.slot] = key
        if key not in self._endings:
            used = set(self._of_slot)
            self._endings = {each: found for each, found in self._endings.items() if each in used}
            self._endings[key] = _Endings(ends, self._vocab_size)

    def add(self, sampled: Sampled) -> None:
        """Store a token of each of some slots."""
        slots, tokens, logprobs, top, guessed = sampled
        if top is not None:
            self._add_top(slots, top)
        at = self._count[slots]
        self._tokens[slots, at] = tokens
        self._logprobs[slots, at] = logprobs
        if guessed is not None:
            self._guessed[slots, at], self._guesses = guessed, True
        self._count[slots] = at + 1
        self.left[slots] -= 1
        wrong = (tokens < 0) | np.isnan(logprobs)
        self.latest, self.firsts = slots, ~self._begun[slots]
        self._begun[slots] = True
        self.ending = (self.left[slots] == 0) | wrong | self._may_end(slots, tokens)

    def _add_top(self, slots: Ids, top: Alternatives) -> None:
        for n in np.flatnonzero(self._alternatives[slots]).tolist():
            slot, K = int(slots[n]), int(self._alternatives[slots[n]])
            pairs = zip(top.ids[n, :K].tolist(), top.logprobs[n, :K].tolist(), strict=True)
            self._top.setdefault(slot, []).append(tuple((id, p) for id, p in pairs if id >= 0))

    def _may_end(self, slots: Ids, tokens: Ids) -> NDArray[np.bool_]:
        if len(self._endings) == 1:
            (endings,) = self._endings.values()
            return endings.of(tokens)
        found = np.zeros(len(slots), bool)
        keys = [self._of_slot[slot] for slot in slots.tolist()]
        for key in set(keys):
            same = np.array([each == key for each in keys])
            found[same] = self._endings[key].of(tokens[same])
        return found

    def take(self, slot: int) -> tuple[list[int], list[float], list[Tops], list[bool]]:
        """Remove and return what `Row.add` takes of a slot."""
        count, self._count[slot] = self._count[slot], 0
        both = self._tokens[slot, :count].tolist(), self._logprobs[slot, :count].tolist()
        guessed = self._guessed[slot, :count].tolist() if self._guesses else [False] * len(both[0])
        return (*both, self._top.pop(slot, []), guessed)
