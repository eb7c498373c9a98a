"""Choose which sequences start next, and which parts of prompts run before a step.

Turns holds waiting items by client; SequenceScheduler assigns sequences to slots; PieceScheduler
selects the pieces of prompts before each step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

Item = TypeVar("Item")

PIECE = 4096  # most tokens of a part of a prompt; parts end at multiples of PIECE
START_COST = 2  # starting sequences takes about 1 / START_COST of the time of a decoding step
MAX_REMOVED = 64  # number of removed sequences above which the queues may be cleaned


class Turns(Generic[Item]):
    """A queue of items. Clients take turns; items of the same client are taken in order."""

    def __init__(self) -> None:
        self._of: dict[str, deque[Iterator[Item]]] = {}  # {client: its items}, next client first

    def add(self, items: Iterable[Item], client: str) -> None:
        """Queue items after the client's other items; the iterator is advanced only when needed."""
        self._of.setdefault(client, deque()).append(iter(items))

    def take(
        self, wanted: Callable[[Item], bool], may: Callable[[str], bool] = lambda client: True
    ) -> Item | None:
        """Return the next item of the first client for which may(client) is true; None: no item.

        wanted: called once for each item that is reached. Unwanted items are dropped and use no
        turn.
        """
        for client in list(filter(may, self._of)):
            waiting = self._of[client]
            while waiting:
                if (item := next(filter(wanted, waiting[0]), None)) is not None:
                    self._of[client] = self._of.pop(client)
                    return item
                waiting.popleft()
            del self._of[client]
        return None

    def keep(self, wanted: Callable[[Item], bool]) -> None:
        """Remove all items for which wanted(item) is false."""
        for client, waiting in self._of.items():
            left = [item for items in waiting for item in items if wanted(item)]
            self._of[client] = deque([iter(left)])


class SequenceScheduler(Generic[Item]):
    """Assigns sequences to slots in order. A free slot gets the next waiting sequence.

    Clients with waiting sequences take turns, one sequence each.

    Starting any number of sequences interrupts the running sequences. Therefore sequences wait,
    although slots are free, until the steps that they have missed cost as much as the interruption:
    with one running sequence they start immediately, with many running sequences they start
    together. A sequence waits for at most as many steps as there are running sequences.

    choose: function that selects a free slot for a sequence; the list of slots begins with the slot
    that has been free the longest. None: the lowest free slots.
    """

    def __init__(
        self, slots: int, choose: Callable[[Item, Sequence[int]], int] | None = None
    ) -> None:
        self._new: Turns[Item] = Turns()
        self._again: deque[Item] = deque()
        self._removed: dict[int, Item] = {}  # removed sequences by id()
        self.waiting = 0  # number of waiting sequences
        self._free, self._choose = list(range(slots)), choose
        self._sequence_of: list[Item | None] = [None] * slots
        self._running = 0
        # sum, over the steps since sequences last started, of sequences that could start
        self._missed = 0

    @property
    def busy(self) -> bool:
        """Whether any sequence runs or waits for a slot."""
        return self._running + self.waiting > 0

    def add(self, sequences: Sequence[Item], client: str = "") -> None:
        """Queue sequences after the client's others; each is read when it starts."""
        self._new.add(sequences, client)
        self.waiting += len(sequences)

    def remove(self, sequence: Item) -> None:
        """Remove a waiting sequence, so that it never starts."""
        self._removed[id(sequence)] = sequence
        self.waiting -= 1
        # Removed sequences stay in the queues until they are next, or become many.
        if len(self._removed) > max(MAX_REMOVED, self.waiting):
            self._new.keep(lambda sequence: id(sequence) not in self._removed)
            self._again = deque(each for each in self._again if id(each) not in self._removed)
            self._removed.clear()

    def place(self) -> list[tuple[int, Item]]:
        """Assign waiting continuations to free slots; return pairs (slot, sequence) to start."""
        count = min(len(self._free), self.waiting)
        self._missed += count
        if not count or START_COST * self._missed < self._running:
            return []
        self._missed = 0
        if self._choose is None:
            self._free.sort()
        placed = []
        for _ in range(count):
            sequence, choose = self._take(), self._choose if len(self._free) > 1 else None
            slot = self._free[0] if choose is None else choose(sequence, self._free)
            self._free.remove(slot)
            self._sequence_of[slot] = sequence
            self._running += 1
            placed.append((slot, sequence))
        return placed

    def _take(self) -> Item:
        """Remove and return the next waiting sequence. At least one must be waiting."""
        self.waiting -= 1
        while self._again:
            if self._not_removed(sequence := self._again.popleft()):
                return sequence
        found = self._new.take(self._not_removed)
        assert found is not None
        return found

    def _not_removed(self, sequence: Item) -> bool:
        """Return False for a sequence that was removed, after forgetting its removal; else True."""
        return self._removed.pop(id(sequence), None) is None

    def slot_of(self, sequence: Item) -> int | None:
        """Return the slot in which a sequence runs, or None if it does not run."""
        return next((slot for slot, each in enumerate(self._sequence_of) if each is sequence), None)

    def sequence_of(self, slot: int) -> Item:
        """Return the sequence that runs in this slot."""
        sequence = self._sequence_of[slot]
        assert sequence is not None
        return sequence

    def sequences_of(self, slots: Sequence[int]) -> list[Item]:
        """Return the sequences that these slots compute."""
        sequences: list[Any] = [self._sequence_of[slot] for slot in slots]
        return sequences

    def release(self, slot: int, again: bool = False) -> None:
        """Free a slot. again: whether its continuation restarts, before any new one starts."""
        if again:
            self._again.append(self.sequence_of(slot))
            self.waiting += 1
        self._sequence_of[slot] = None
        self._free.append(slot)
        self._running -= 1


class PromptPiece(NamedTuple):
    """A part of a sequence's prompt: tokens `first` to `end` - 1. last: whether it ends here."""

    slot: int
    sequence: Any
    first: int
    end: int
    last: bool


class PieceScheduler(Generic[Item]):
    """Selects parts of prompts to compute before each step, limited so that steps are not late.

    Waiting sequences take turns, with one piece each. Pieces end at multiples of `piece` tokens of
    the prompt, so that a prompt is divided in the same way whatever else runs; with piece 0,
    prompts are not divided. most: number of tokens from which a step gets no further piece; a step
    therefore gets fewer than most + piece tokens. None: a step gets a piece of every sequence.
    """

    def __init__(self, most: int | None = None, piece: int = PIECE) -> None:
        self._most, self._piece = most, piece
        self._waiting: deque[PromptPiece] = deque()  # the rest of each prompt

    def __len__(self) -> int:
        """Return the number of prompts that are not fully computed."""
        return len(self._waiting)

    def add(self, slot: int, sequence: Item, first: int, end: int) -> None:
        """Queue a prompt of `end` tokens, of which the first `first` have been computed."""
        self._waiting.append(PromptPiece(slot, sequence, first, end, True))

    def take(self) -> list[PromptPiece]:
        """Return the parts of prompts to compute before the next step, at most one per sequence."""
        taken: list[PromptPiece] = []
        tokens = 0
        for _ in range(len(self._waiting)):
            left = self._waiting.popleft()
            end = left.end
            if self._piece:
                end = min(end, (left.first // self._piece + 1) * self._piece)
            tokens += end - left.first
            if end < left.end:
                self._waiting.append(left._replace(first=end))
                left = left._replace(end=end, last=False)
            taken.append(left)
            if self._most is not None and tokens >= self._most:
                break
        return taken

    def remove(self, sequence: Item) -> None:
        """Remove a sequence's prompt from the queue if it is in the queue."""
        self._waiting = deque(left for left in self._waiting if left.sequence is not sequence)
