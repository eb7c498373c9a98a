"""The thread that generates the sequences of all requests in one batch.

Requests come from an event loop, and their tokens go back to the event loop. The sequences of the
batch have no text, and are changed only in the thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt2block.apps.serve.log import log, traceback_of
from gpt2block.apps.serve.protocol import ApiError, overloaded
from gpt2block.engine.generation.batching import Batch
from gpt2block.engine.generation.sequences import EndReason, Sequences, TokenSequence, Tops
from gpt2block.engine.grammars import Grammar, Matcher
from gpt2block.engine.model import ModelEngine

# seconds per open sequence between deliveries; twice the time of delivering its tokens
PAUSE = 4e-5
MIN_PAUSE = 5e-4  # seconds; shorter pauses are left out
# open sequences up to which a piece is sent before the HTTP side has received the previous one
MAX_EARLY = 4
FULL = "the server has as many requests as it takes"
MAX_FAILED = 3  # failed steps in a row after which the engine is not used any more
REST_S = 60.0  # seconds without a request after which the batch gives memory back
TOKENS_AT_ONCE = 4096  # prompt tokens in a step after which the step computes no further prompt


class Piece(NamedTuple):
    """The new tokens of a sequence since its last Piece, from one or more steps.

    reused: as TokenSequence.reused. finish_reason: finish_reason of the TokenSequence once the
    sequence has ended, else None. error: the message of TokenSequence.error.
    """

    tokens: list[int]
    logprobs: list[float]
    tops: list[Tops]
    drafted: list[bool]
    reused: int = 0
    finish_reason: EndReason | None = None
    error: str | None = None


Key = tuple[int, int]  # (number of a request, index of a sequence of the request)
# Receives a batch of pieces in the event loop. The sequence is None if the engine has failed.
Put = Callable[[Sequence[tuple[TokenSequence | None, Key, Piece]]], None]
Place = tuple[Put, Key]  # destination of the pieces of a sequence


def batch_of(
    engine: ModelEngine, slots: int, reuse: bool = False, speculate: bool = False
) -> Batch:
    """Return a Batch with up to `slots` slots, fewer if memory is short. Raises MemoryError.

    reuse, speculate: as for Batch.
    """
    n_ctx, most = engine.config.n_ctx, TOKENS_AT_ONCE
    return Batch(engine, slots, n_ctx, True, reuse, tokens_at_once=most, speculate=speculate)


class Service:
    """A thread that generates the sequences of all requests in one batch.

    Pieces of a sequence are delivered to the function with which the sequence was submitted.

    Clients take turns. If all slots and places in the queue are taken, a client with at most its
    equal share of them may still submit sequences, until there are twice as many sequences.

    If the engine raises an exception, the sequences in slots end with an error, and the batch
    restarts with the waiting sequences. The service fails if the batch cannot restart, or after
    MAX_FAILED failed steps in a row.

    batch: an empty result of `batch_of`. max_waiting: most sequences that wait for a slot. loop:
    event loop in which pieces are delivered. on_failure: called in the loop after the last pieces
    if the service has failed. observe_first: called in the thread with the seconds to a sequence's
    first token. observe_between: called after a step with an array, for each sequence that got a
    further token the seconds since its previous token. tokens: number of tokens generated so far.
    overdrawn: number of these tokens that were generated after the stop string of their text.
    failed: number of failed steps.
    matcher_of: returns the Matcher of a sequence's rule; None if the compiled rule is no longer
    kept.
    """

    def __init__(
        self,
        batch: Batch,
        max_waiting: int,
        loop: asyncio.AbstractEventLoop,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._batch, self._on_failure = batch, on_failure
        self._loop, self._max_waiting = loop, max_waiting
        self._changed = threading.Condition()
        # (submitted sequence, its place, its deadline or None for no deadline)
        self._new: deque[tuple[TokenSequence, Place, float | None]] = deque()
        # (cancelled sequence, number of its tokens that are needed, None if this is not known)
        self._cancelled: deque[tuple[TokenSequence, int | None]] = deque()
        self._open_of: Counter[str] = Counter()  # client: number of sequences that run or wait
        self._places: dict[TokenSequence, Place] = {}
        # sequence: time of submission, until its first token
        self._since: dict[TokenSequence, float] = {}
        self._last = np.zeros(batch.slots)  # time of each slot's last token
        # not delivered yet
        self._pieces: deque[tuple[Place, TokenSequence | None, Piece]] = deque()
        self._called = False  # whether a delivery is scheduled in the event loop
        self.observe_first: Callable[[float], None] = lambda seconds: None
        self.observe_between: Callable[[NDArray[np.float64]], None] = lambda seconds: None
        self.matcher_of: Callable[[Grammar], Matcher | None] = lambda rule: None
        self.tokens = self.overdrawn = self.failed = 0
        self._failed_in_a_row = 0
        self._ends = False
        self.failure: str | None = None
        self.starting: tuple[int, int] | None = (0, 1)  # (tasks done, all tasks); None: ready
        self.slots = self._batch.slots
        self._thread = threading.Thread(target=self._run, name="service", daemon=True)
        self._thread.start()

    @property
    def open(self) -> int:
        """The number of sequences that run or wait for a slot."""
        return len(self._places) + len(self._new)

    @property
    def waiting(self) -> int:
        """The number of sequences that wait for a slot."""
        return max(0, self.open - self.slots)

    @property
    def running(self) -> int:
        """The number of sequences in slots."""
        return self.open - self.waiting

    def submit(
        self,
        sequences: Sequences,
        put: Put,
        number: int = 0,
        client: str = "",
        deadline: float | None = None,
    ) -> None:
        """Queue the sequences of a client's request, or raise ApiError if it is full.

        Also raises ApiError if the engine has failed, or the compiled rule of a sequence is no
        longer kept. put: gets the pieces. number: identifies the request. deadline: as for Batch.
        """
        with self._changed:
            if self.failure is not None:
                raise ApiError(500, self.failure)
            most, count = self.slots + self._max_waiting, self.open + len(sequences)
            own = self._open_of[client] + len(sequences)
            share = most // len(self._open_of.keys() | {client})
            if self._ends or (count > most and (own > share or count > 2 * most)):
                raise overloaded(FULL)
            for sequence in sequences:
                sequence.client = client
                if sequence.rule is not None:
                    sequence.matcher = self.matcher_of(sequence.rule)
                    if sequence.matcher is None:
                        raise overloaded(FULL)
            self._open_of[client] = own
            for index, sequence in enumerate(sequences):
                self._new.append((sequence, (put, (number, index)), deadline))
            self._changed.notify()

    def cancel(self, sequences: Iterable[TokenSequence], needed: int | None = None) -> None:
        """End sequences, and deliver no more of their tokens.

        needed: number of tokens up to the end of a stop string; further tokens are `overdrawn`.
        """
        with self._changed:
            self._cancelled.extend((sequence, needed) for sequence in sequences)
            self._changed.notify()

    def release(self, sequences: Sequences) -> None:
        """Let sequences deliver new tokens after a pause, which is longer if more are open."""

        def go_on() -> None:
            for sequence in sequences:
                sequence.held = False

        if (pause := PAUSE * self.open) < MIN_PAUSE:
            go_on()
        else:
            self._loop.call_later(pause, go_on)

    def close(self) -> None:
        """End the thread without finishing the running sequences."""
        with self._changed:
            self._ends = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._start_up()
            while not self._ends:
                if problem := self._turn():
                    self._batch.restart(RuntimeError(problem))
                    self._deliver([each for each in self._places if each.finish_reason])
        except BaseException as error:
            self._fail(error)

    def _start_up(self) -> None:
        """Compile kernels and record launches. Requests that are submitted meanwhile wait."""
        for done in self._batch.start_up():
            self.starting = done
            if self._ends:
                return
        self.starting = None

    def _turn(self) -> str | None:
        """Take changes and run a step. If the engine fails, log the reason, and return a message.

        Raises the exception of the last of MAX_FAILED failed steps in a row.
        """
        try:
            self._take_changes()
            if self._batch.busy and not self._ends:
                self._step()
        except BaseException as error:
            self.failed += 1
            self._failed_in_a_row += 1
            if self._failed_in_a_row == MAX_FAILED:
                raise
            log.error("a step of the engine failed\n%s", traceback_of(error))
            return f"the engine failed: {error!r}"
        return None

    def _step(self) -> None:
        sequences = self._batch.step()
        self._failed_in_a_row = 0
        self._note()
        self._deliver(sequences)

    def _deliver(self, sequences: Sequences) -> None:
        """Deliver the new tokens of sequences, and forget the sequences that have ended."""
        for sequence in sequences:
            sequence.held = True
        self._send([(self._places[each], each, piece_of(each)) for each in sequences])
        for sequence in sequences:
            if sequence.finish_reason:
                self._forget(sequence)

    def _take_changes(self) -> None:
        """Add submitted sequences, end cancelled sequences; wait if idle."""
        with self._changed:
            while not (self._ends or self._new or self._cancelled or self._batch.busy):
                if not self._changed.wait(REST_S):
                    self._batch.rest()
            new, self._new = self._new, deque()
            cancelled, self._cancelled = self._cancelled, deque()
            self._places |= {sequence: place for sequence, place, _ in new}
        now = perf_counter()
        self._since |= {sequence: now for sequence, *_ in new}
        for (client, deadline), each in groupby(new, lambda each: (each[0].client, each[2])):
            self._batch.submit([sequence for sequence, *_ in each], deadline, client)
        gone = [sequence for sequence, _ in cancelled if sequence in self._places]
        for sequence in gone:
            self._forget(sequence)
        self._batch.cancel(gone)
        self.overdrawn += sum(
            len(sequence.tokens) - needed for sequence, needed in cancelled if needed is not None
        )

    def _forget(self, sequence: TokenSequence) -> None:
        if self._places.pop(sequence, None) is None:
            return
        self._since.pop(sequence, None)
        with self._changed:
            self._open_of[sequence.client] -= 1
            if not self._open_of[sequence.client]:
                del self._open_of[sequence.client]

    def _note(self) -> None:
        now, slots = perf_counter(), self._batch.latest
        if not len(slots):
            return
        self.tokens += len(slots)
        self.observe_between(now - self._last[slots[~self._batch.firsts]])
        self._last[slots] = now
        for sequence in self._batch.begun:
            if since := self._since.pop(sequence, None):
                self.observe_first(now - since)

    def _send(self, pieces: Iterable[tuple[Place, TokenSequence | None, Piece]]) -> None:
        """Schedule delivery of `pieces` in the event loop, together with undelivered pieces."""
        self._pieces.extend(pieces)
        if self._pieces and not self._called:
            self._called = True
            self._loop.call_soon_threadsafe(self._deliver_all)

    def _deliver_all(self) -> None:
        self._called = False  # first: for later pieces, `_send` schedules a new call
        batches: dict[Put, list[tuple[TokenSequence | None, Key, Piece]]] = {}
        while self._pieces:
            (put, key), sequence, piece = self._pieces.popleft()
            batches.setdefault(put, []).append((sequence, key, piece))
        for put, pieces in batches.items():
            put(pieces)

    def _fail(self, error: BaseException) -> None:
        """Log the error, and end all running and waiting sequences with it."""
        log.critical("the engine failed\n%s", traceback_of(error))
        with self._changed:
            self.failure = f"the engine failed: {error!r}"
            left = [*self._places.values(), *(place for _, place, _ in self._new)]
            self._places, self._new = {}, deque()
        piece = Piece([], [], [], [], 0, "error", self.failure)
        self._send([(place, None, piece) for place in left])
        self._loop.call_soon_threadsafe(self._on_failure)


def piece_of(sequence: TokenSequence) -> Piece:
    """Return a Piece with the tokens that a continuation has received since its last Piece."""
    error = str(sequence.error) if sequence.error is not None else None
    return Piece(*sequence.take_tokens(), sequence.reused, sequence.finish_reason, error)
