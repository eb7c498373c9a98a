"""Continuous batching: sequences start and end independently in slots."""

from __future__ import annotations

import gc
import heapq
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain, count, pairwise
from time import monotonic
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gpt2block.engine.generation.prefixes import MIN_COPIED, NOTHING, Prefixes, min_shared
from gpt2block.engine.generation.scheduling import PIECE, PieceScheduler, SequenceScheduler
from gpt2block.engine.generation.sequences import Ends, NewTokens, Sequences, TokenSequence, Tops
from gpt2block.engine.grammars import Matcher
from gpt2block.engine.model import Alternatives, Drafts, Ids, ModelEngine, Sampled, Start
from gpt2block.files.tokenizers.encoding import bytes_of_ids
from gpt2block.sampling import Sampling

NO_SLOTS: NDArray[Any] = np.empty(0, np.int32)
FIRST_TOKENS = 4  # number of tokens that `start_up` generates per sequence
TURN = 16  # number of steps after which a sequence receives its slot's buffered tokens


class Batch:
    """Generates sequences, each with its own prompt, sampling and end conditions.

    `step` computes the next tokens of all running sequences; `submit` adds sequences at any time,
    and `cancel` ends them. The tokens of a sequence do not depend on other sequences. After an
    exception in `step` or `cancel`, the batch must not be used again before `restart`.

    A sequence reuses the keys and values of the first tokens that its prompt shares with an earlier
    prompt of the same client, if this changes no bit of the result
    (`ModelEngine.continues_exactly`): it gets the slot that holds them, or a copy of them. With
    gated delta nets, it reuses the tokens whose states are kept (`KeptStates`).

    slots, n_ctx, fewer, speculate: as in ModelEngine.decode; a prompt plus its new tokens, except
    the last one, must fit in n_ctx. reuse: whether sequences, with any engine, also reuse keys and
    values of tokens that an earlier sequence sampled. Other kernels may have computed these keys
    and values, so the last bits of a result can depend on the earlier sequence. tokens_at_once:
    `most` of PieceScheduler; the engine divides prompts into pieces of PIECE tokens if it can.
    """

    def __init__(
        self,
        engine: ModelEngine,
        slots: int,
        n_ctx: int,
        fewer: bool = False,
        reuse: bool = False,
        tokens_at_once: int | None = None,
        speculate: Drafts = False,
    ) -> None:
        self.n_ctx, self.speculate = n_ctx, speculate
        self._engine, self._reuse, self._tokens_at_once = engine, reuse, tokens_at_once
        self._piece = PIECE if engine.divides_prompts else 0
        self._states = engine.config.delta_nets is not None
        # whether a continuation may reuse keys and values that another one has computed
        self.reuses = engine.continues_exactly or (reuse and not self._states)
        self._prefixes = Prefixes(1 if reuse else MIN_COPIED, engine.config.short_context)
        self._continues = self.reuses or 0 < self._piece < n_ctx
        self._begin(slots, fewer)
        choose = self._prefixes.slot_for if self.reuses else None
        self._scheduler: SequenceScheduler[TokenSequence] = SequenceScheduler(self.slots, choose)
        self._vocab_size = engine.config.vocab_size
        # heap: (deadline, unique number, sequence)
        self._deadlines: list[tuple[float, int, TokenSequence]] = []
        self._numbers, self._steps = count(), count()

    def _begin(self, slots: int, fewer: bool) -> None:
        """Create a Decoding, whose slots are free, and the state of its slots."""
        self._decoding = self._engine.decode(slots, self.n_ctx, fewer, self.speculate)
        self.slots = self._decoding.slots
        self._pieces = PieceScheduler[TokenSequence](self._tokens_at_once, self._piece)
        self._starts: dict[int, Start] = {}  # {slot: Start of a sequence with incomplete prompt}
        # {slot: sequence that waits until another sequence has computed the prefix of both prompts}
        self._following: dict[int, TokenSequence] = {}
        self._copies: list[tuple[int, int, int]] = []  # (source slot, target slot, tokens)
        self._started: dict[int, Start] = {}  # {slot: Start of its sequence} if reuse is on
        # sequences whose first token was computed in the last step
        self.begun: list[TokenSequence] = []

    @cached_property
    def _new(self) -> _NewTokens:
        """Buffers of sampled tokens, allocated while the engine computes the first prompts."""
        return _NewTokens(self.slots, self.n_ctx, self._vocab_size)

    @cached_property
    def _min_shared(self) -> int:
        """The least number of tokens for which sequences wait; few calls have such sequences."""
        return min_shared(self._engine.config.n_layer, self._engine.nbytes)

    @property
    def busy(self) -> bool:
        """Whether any sequence runs or waits for a slot."""
        return self._scheduler.busy

    @property
    def waiting(self) -> int:
        """The number of sequences whose prompts are not fully computed yet."""
        return self._scheduler.waiting + len(self._pieces) + len(self._following)

    @property
    def latest(self) -> Ids:
        """The slots for which the last step returned tokens."""
        return self._new.latest

    @property
    def firsts(self) -> NDArray[np.bool_]:
        """Boolean array: whether a slot in `latest` received its continuation's first token."""
        return self._new.firsts

    def start_up(self) -> Iterator[tuple[int, int]]:
        """Run `Decoding.start_up`, then generate a few short texts. Call this before `submit`."""
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
            self.submit([TokenSequence(prompt, one, None, ends, n) for n, one in enumerate(usual)])
            while self.busy:
                self.step()
            self._prefixes.clear()

    def submit(self, sequences: Sequences, deadline: float | None = None, client: str = "") -> None:
        """Queue a client's sequences, which start in this order. Clients take turns.

        deadline: a time of `time.monotonic`. The first step after the deadline ends sequences that
        still run or wait.
        """
        self._scheduler.add(sequences, client)
        if deadline is not None:
            for sequence in sequences:
                heapq.heappush(self._deadlines, (deadline, next(self._numbers), sequence))

    def step(self, each_token: bool = True) -> list[TokenSequence]:
        """Compute parts of waiting prompts, then a token of each running sequence.

        Returns the sequences that received tokens. A sequence receives all its buffered tokens
        together: in a step in which it may have ended, and with each_token in every step unless it
        is `held`. Without each_token, sequences receive tokens in turn, every TURN steps, so that
        few tokens remain when all sequences end. If deadlines have passed, only their sequences are
        returned. Raises RuntimeError if no sequence runs or waits.
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
            return []  # no sequence is ready to decode
        self._new.add(self._decoding.next())
        sequences_of, taken = self._scheduler.sequences_of, self._new.ending
        self.begun = sequences_of(self.latest[self.firsts].tolist())
        if each_token:
            held = np.array([each.held for each in sequences_of(self.latest.tolist())], bool)
            taken = taken | ~held
        else:
            taken = taken | ((self.latest + next(self._steps)) % TURN == 0)
        updated, ended = [], []
        for slot, parts in self._new.take(self.latest[taken]):
            sequence = self._scheduler.sequence_of(slot)
            for part in parts:
                sequence.add(*part)
                if sequence.finish_reason:
                    break
            updated.append(sequence)
            if sequence.finish_reason or not self._new.left[slot]:
                ended.append(slot)
        if ended:
            self._release(ended)
        return updated

    def restart(self, error: Exception) -> None:
        """Free all slots after an exception in the engine. Sequences that wait for a slot go on.

        Sequences in slots end with `error`. Their tokens that they have not received are lost. Call
        this after the exception is handled: its traceback keeps the memory of the earlier Decoding.
        Raises an exception if the engine cannot begin again.
        """
        for slot, sequence in enumerate(self._scheduler.sequences_of(range(self.slots))):
            if sequence is None:
                continue
            follows = slot in self._following  # no part of its prompt has been computed
            if not follows and sequence.finish_reason is None:
                sequence.error, sequence.finish_reason = error, "error"
            self._scheduler.release(slot, again=follows)
        self._prefixes.clear()
        vars(self).pop("_new", None)
        del self._decoding
        gc.collect()  # frees tracebacks in cycles of references
        self._begin(self.slots, fewer=False)

    def rest(self) -> None:
        """Give the memory of keys and values back if no sequence runs or waits, on the CPU."""
        release = getattr(self._decoding, "release", None)
        if release is not None and not self.busy:
            release()
            self._prefixes.clear()

    def _late(self) -> list[TokenSequence]:
        """Remove and return the unfinished sequences whose deadlines have passed.

        Sequences at the front of the heap that have already ended are removed from it, too.
        """
        late, now = [], monotonic()
        while self._deadlines:
            deadline, _, sequence = self._deadlines[0]
            if sequence.finish_reason is None:
                if deadline > now:
                    break
                late.append(sequence)
            heapq.heappop(self._deadlines)
        return late

    def cancel(
        self, sequences: Sequences, reason: Literal["cancelled", "deadline"] = "cancelled"
    ) -> None:
        """End these sequences. Sequences that have already ended are unchanged."""
        slots = []
        for sequence in sequences:
            if sequence.finish_reason:
                continue
            slot = self._scheduler.slot_of(sequence)
            if slot is None:
                self._scheduler.remove(sequence)
            else:
                slots.append(slot)
                for part in chain(*(parts for _, parts in self._new.take(np.array([slot])))):
                    sequence.add(*part)
            if not sequence.finish_reason:
                sequence.cancel(reason)
        if slots:
            self._release(slots)

    def _compute_prompts(self) -> None:
        """Compute parts of prompts; start the continuations whose prompts are then complete."""
        more, complete = [], []
        for slot, _, first, end, last in self._pieces.take():
            start = self._starts[slot]._replace(cached=first) if first else self._starts[slot]
            if last:
                complete.append(start)
                del self._starts[slot]
            else:
                more.append(start._replace(ids=start.ids[:end]))
        if more:
            self._decoding.extend(more)
        if complete:
            self._decoding.start(complete)
        for start in complete:  # runs while the GPU computes the prompts
            sequence = self._scheduler.sequence_of(start.slot)
            self._new.begin(start, sequence)
            if self.reuses:
                self._prefixes.hold(start.slot, sequence, start.ids, len(start.ids))
            if self._reuse:
                self._started[start.slot] = start

    def _place(self) -> None:
        """Assign waiting sequences to free slots, and queue their prompts.

        Sequences wait while another sequence computes a prefix that they can reuse, if it is long
        enough.
        """
        gains: dict[int, int] = {}  # {slot: prompt tokens that sequences save by waiting for it}
        following: list[tuple[int, int, TokenSequence]] = []
        for slot, sequence in (*self._following.items(), *self._scheduler.place()):
            leader, gain = self._leader(slot, sequence)
            if gain < MIN_COPIED:
                self._start(slot, sequence)
            else:
                gains[leader] = gains.get(leader, 0) + gain
                following.append((leader, slot, sequence))
        self._following.clear()
        for leader, slot, sequence in following:
            if gains[leader] < self._min_shared:
                self._start(slot, sequence)
            else:
                self._following[slot] = sequence
        if self._copies:
            self._copy()

    def _copy(self) -> None:
        """Copy the prefixes of sequences that reuse tokens of other slots."""
        self._decoding.copy(self._copies)
        self._copies.clear()

    def _leader(self, slot: int, sequence: TokenSequence) -> tuple[int, int]:
        """Return the slot that will hold a prompt's longest prefix, and the gain of waiting for it.

        The gain is the number of tokens of the prefix that no slot has computed yet.
        """
        if not self.reuses or (self._reuse and sequence.exact):
            return NOTHING
        done, coming = self._prefixes.longest(sequence, sequence.start(slot).ids)
        return coming.slot, coming.tokens - done.tokens

    def _start(self, slot: int, sequence: TokenSequence) -> None:
        """Queue a sequence's prompt, without first tokens whose keys and values a slot holds."""
        start = sequence.start(slot)
        if self.reuses:
            (source, shared), _ = self._prefixes.longest(sequence, start.ids)
            if self._states and self._copies:
                self._copy()  # `source` may wait for a copy; until then it has its earlier states
            sequence.reused = self._decoding.reusable(source, slot, shared)
            if self._reuse and sequence.exact:
                sequence.reused = 0
            if source != slot and sequence.reused < MIN_COPIED:
                sequence.reused = 0
            elif source != slot or (self._states and sequence.reused):
                self._copies.append((source, slot, sequence.reused))
            self._prefixes.hold(slot, sequence, start.ids, sequence.reused)
        self._starts[slot] = start
        self._pieces.add(slot, sequence, sequence.reused, len(start.ids))

    def _release(self, slots: Sequence[int]) -> None:
        """Free the slots of sequences that leave them. Sequences that have not ended wait again."""
        if len(stopped := self._new.end(slots)):
            self._decoding.stop(stopped)
        for slot in slots:
            sequence = self._scheduler.sequence_of(slot)
            self._scheduler.release(slot, again=sequence.finish_reason is None)
            self._following.pop(slot, None)
            started = self._started.pop(slot, None)
            if self._starts.pop(slot, None):  # the sequence's prompt is incomplete
                self._pieces.remove(sequence)
                self._prefixes.drop(slot)
            elif self.reuses and started:
                # The last token is left out: its keys and values have not been computed.
                sampled = np.array(sequence.tokens[started.sampled : -1], np.int32)
                ids = np.concatenate([started.ids, sampled])
                self._prefixes.hold(slot, sequence, ids, len(ids))


class _Endings:
    """Tokens that may end a continuation: stop ids, and tokens with the last byte of a stop string.

    The bytes of a token are looked up when it is sampled for the first time.
    """

    def __init__(self, ends: Ends, vocab_size: int) -> None:
        self._encoding = ends.encoding
        self._bytes = {string.encode()[-1] for string in ends.stop}
        if any(string[-1] == "\ufffd" for string in ends.stop):  # any byte may decode to U+FFFD
            self._bytes = set(range(256))
        self._may_end = np.zeros(vocab_size, bool)
        self._known = np.zeros(vocab_size, bool)  # not read without stop strings
        stop_ids = list(ends.stop_ids)
        self._may_end[stop_ids] = self._known[stop_ids] = True

    def of(self, tokens: Ids) -> NDArray[np.bool_]:
        """Return a boolean mask: whether each token may end its continuation."""
        if self._bytes:
            for token in set(tokens[~self._known[tokens]].tolist()) - {-1}:
                data = bytes_of_ids(self._encoding, [token]) if self._encoding is not None else b""
                self._may_end[token] = not self._bytes.isdisjoint(data)
                self._known[token] = True
        return self._may_end[tokens]


class _NewTokens:
    """Buffers for sampled tokens of each slot, which its sequence receives later."""

    def __init__(self, slots: int, n_ctx: int, vocab_size: int) -> None:
        self.left = np.zeros(slots, np.int64)  # number of tokens that each slot may still sample
        self._vocab_size = vocab_size
        self._alternatives = np.zeros(slots, np.int64)  # per slot: alternatives to report
        self._top: dict[int, list[Tops]] = {}  # slot: most likely tokens at each position
        self._endings: dict[object, _Endings] = {}  # tokens that may end sequences, by conditions
        self._of_slot: list[object] = [None] * slots  # key of each slot in _endings
        self._begun = np.zeros(slots, bool)
        # {slot: matcher of its sequence} while the sequence runs
        self.matchers: dict[int, Matcher] = {}
        # number of tokens that each sequence has sampled; counted while any sequence has a matcher
        self._sampled = np.zeros(slots, np.int64)
        self._count = np.zeros(slots, np.int64)  # number of buffered tokens per slot
        self._cuts: dict[int, list[int]] = {}  # slot: buffered tokens up to each that may end it
        self._tokens = np.empty((slots, n_ctx), np.int32)
        self._logprobs = np.empty((slots, n_ctx), np.float32)
        self._drafted = np.zeros((slots, n_ctx), bool)
        self._drafts = False  # whether the engine reports draft tokens
        # ending: whether each of the latest tokens may end its sequence
        self.latest, self.firsts, self.ending = NO_SLOTS, np.empty(0, bool), np.empty(0, bool)

    def begin(self, start: Start, sequence: TokenSequence) -> None:
        """Prepare the buffers of a slot for the tokens of a new sequence."""
        ends = sequence.ends
        self.left[start.slot] = start.steps
        self._begun[start.slot] = False
        self._alternatives[start.slot] = start.alternatives
        self._sampled[start.slot] = start.sampled
        if start.matcher is not None:
            self.matchers[start.slot] = start.matcher
        key = ends.stop, ends.stop_ids, id(ends.encoding)
        self._of_slot[start.slot] = key
        if key not in self._endings:
            used = set(self._of_slot)
            self._endings = {key: value for key, value in self._endings.items() if key in used}
            self._endings[key] = _Endings(ends, self._vocab_size)

    def add(self, sampled: Sampled) -> None:
        """Store the sampled tokens of slots."""
        _, tokens, logprobs, top, drafted, nth = sampled
        slots: NDArray[Any] = sampled.slots.astype(np.intp)  # other integers are slower as an index
        if top is not None:
            self._add_top(slots, top)
        place = slots, self._count[slots] if nth is None else self._count[slots] + nth
        self._tokens[place], self._logprobs[place] = tokens, logprobs
        if drafted is not None:
            self._drafted[place], self._drafts = drafted, True
        new = np.bincount(slots, minlength=len(self.left))
        if self.matchers:
            number = self._sampled[slots] + place[1] - self._count[slots] + 1  # up to each token
            self._sampled += new
        self._count += new
        self.left -= new
        self.latest = slots if nth is None else slots[nth == 0]
        self.firsts = ~self._begun[self.latest]
        self._begun[self.latest] = True
        may_end = (tokens < 0) | np.isnan(logprobs) | self._may_end(slots, tokens)
        for at, slot in enumerate(slots.tolist() if self.matchers else ()):
            matcher = self.matchers.get(slot)
            if matcher is not None and matcher.complete_at == number[at]:
                may_end[at] = True
        self.ending = self.left[self.latest] == 0
        if may_end.any():
            self.ending |= np.isin(self.latest, slots[may_end])
            for slot, at in zip(*(a[may_end].tolist() for a in place), strict=True):
                self._cuts.setdefault(slot, []).append(at + 1)

    def _add_top(self, slots: Ids, top: Alternatives) -> None:
        for n in np.flatnonzero(self._alternatives[slots]).tolist():
            slot, K = int(slots[n]), int(self._alternatives[slots[n]])
            pairs = zip(top.ids[n, :K].tolist(), top.logprobs[n, :K].tolist(), strict=True)
            self._top.setdefault(slot, []).append(tuple((id, p) for id, p in pairs if id >= 0))

    def _may_end(self, slots: Ids, tokens: Ids) -> NDArray[np.bool_]:
        if len(self._endings) == 1:
            (endings,) = self._endings.values()
            return endings.of(tokens)
        may_end = np.zeros(len(slots), bool)
        keys = [self._of_slot[slot] for slot in slots.tolist()]
        for key in set(keys):
            same = np.array([each == key for each in keys])
            may_end[same] = self._endings[key].of(tokens[same])
        return may_end

    def end(self, slots: Sequence[int]) -> Ids:
        """Expect no more tokens for these slots; return the slots with tokens left to sample."""
        ended = np.array(slots, np.int32)
        stopped = ended[self.left[ended] > 0]
        self.left[ended] = 0
        for slot in slots:
            self.matchers.pop(slot, None)
        return stopped

    def take(self, slots: Ids) -> Iterator[tuple[int, list[NewTokens]]]:
        """Remove buffered tokens; yield each slot with parts, as arguments of `TokenSequence.add`.

        Only the last token of a part may end its sequence. The arrays are converted together, which
        is faster if there are many slots.
        """
        counts = self._count[slots].tolist()
        self._count[slots] = 0
        both = [a[slots, : max(counts, default=0)].tolist() for a in (self._tokens, self._logprobs)]
        each = zip(slots.tolist(), counts, *both, strict=True)
        for slot, n, tokens, logprobs in each:
            drafted = self._drafted[slot, :n].tolist() if self._drafts else [False] * n
            top, ends = self._top.pop(slot, []), sorted({n, *self._cuts.pop(slot, ())} - {0})
            spans = (slice(*pair) for pair in pairwise([0, *ends]))
            yield slot, [(tokens[s], logprobs[s], top[s], drafted[s]) for s in spans]
