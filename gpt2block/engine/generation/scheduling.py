"""Choose which rows (continuations) start next, and which parts of prompts run before a step.

Turns holds waiting items by client; RowScheduler assigns rows to slots; PieceScheduler selects the
pieces of prompts before each step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

Item = TypeVar("Item")

PIECE = 4096  # most tokens of a part of a prompt; parts end at multiples of PIECE
START_COST = 2  # starting rows takes about 1 / START_COST of the time of a decoding step
MAX_REMOVED = 64  # number of removed rows above which the queues may be cleaned


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


class RowScheduler(Generic[Item]):
    """Assigns rows (continuations) to slots in order. A free slot gets the next waiting row.

    Clients with waiting rows take turns, one row each.

    Starting any number of rows interrupts the running rows. Therefore rows wait, although slots are
    free, until the steps that they have missed cost as much as the interruption: with one running
    row they start immediately, with many running rows they start together. A row waits for at most
    as many steps as there are running rows.

    choose: function that selects a free slot for a row; its list begins with the slot that has been
    free the longest. None: the lowest free slots.
    """

    def __init__(
        self, slots: int, choose: Callable[[Item, Sequence[int]], int] | None = None
    ) -> None:
        self._new: Turns[Item] = Turns()
        self._again: deque[Item] = deque()
        self._removed: dict[int, Item] = {}  # removed rows by id()
        self.waiting = 0  # number of waiting rows
        self._free, self._choose = list(range(slots)), choose
        self._row_of: list[Item | None] = [None] * slots
        self._running = 0
        self._missed = 0  # sum, over the steps since rows last started, of rows that could start

    @property
    def busy(self) -> bool:
        """Whether any row (continuation) runs or waits for a slot."""
        return self._running + self.waiting > 0

    def add(self, rows: Sequence[Item], client: str = "") -> None:
        """Queue rows (continuations) after the client's others; each is read when it starts."""
        self._new.add(rows, client)
        self.waiting += len(rows)

    def remove(self, row: Item) -> None:
        """Remove a waiting row (continuation), so that it never starts."""
        self._removed[id(row)] = row
        self.waiting -= 1
        if len(self._removed) > max(MAX_REMOVED, self.waiting):
            self._forget_removed()

    def _forget_removed(self) -> None:
        """Delete removed rows from the queues; otherwise they stay there until they are next."""
        self._new.keep(lambda row: id(row) not in self._removed)
        self._again = deque(row for row in self._again if id(row) not in self._removed)
        self._removed.clear()

    def place(self) -> list[tuple[int, Item]]:
        """Assign waiting continuations to free slots; return pairs (slot, row) to start."""
        count = min(len(self._free), self.waiting)
        self._missed += count
        if not count or START_COST * self._missed < self._running:
            return []
        self._missed = 0
        if self._choose is None:
            self._free.sort()
        placed = []
        for _ in range(count):
            row = self._take()
            slot = self._free[0] if self._choose is None else self._choose(row, self._free)
            self._free.remove(slot)
            self._row_of[slot] = row
            self._running += 1
            placed.append((slot, row))
        return placed

    def _take(self) -> Item:
        """Remove and return the next waiting row (continuation). At least one must be waiting."""
        self.waiting -= 1
        while self._again:
            if self._wanted(row := self._again.popleft()):
                return row
        found = self._new.take(self._wanted)
        assert found is not None
        return found

    def _wanted(self, row: Item) -> bool:
        """Return False for a row that was removed, after forgetting its removal; else True."""
        return self._removed.pop(id(row), None) is None

    def slot_of(self, row: Item) -> int | None:
        """Return the slot in which a row (continuation) runs, or None if it does not run."""
        return next((slot for slot, each in enumerate(self._row_of) if each is row), None)

    def row_of(self, slot: int) -> Item:
        """Return the row (continuation) that runs in this slot."""
        row = self._row_of[slot]
        assert row is not None
        return row

    def rows_of(self, slots: Sequence[int]) -> list[Item]:
        """Return the rows (continuations) that these slots compute."""
        rows: list[Any] = [self._row_of[slot] for slot in slots]
        return rows

    def release(self, slot: int, again: bool = False) -> None:
        """Free a slot. again: whether its continuation restarts, before any new one starts."""
        if again:
            self._again.append(self.row_of(slot))
            self.waiting += 1
        self._row_of[slot] = None
        self._free.append(slot)
        self._running -= 1


class PromptPiece(NamedTuple):
    """A part of a row's prompt: tokens `first` to `end` - 1. last: whether the prompt ends here."""

    slot: int
    row: Any
    first: int
    end: int
    last: bool


class PieceScheduler(Generic[Item]):
    """Selects parts of prompts to compute before each step, limited so that steps are not late.

    Waiting rows take turns, with one piece each. Pieces end at multiples of `piece` tokens of the
    prompt, so that a prompt is divided in the same way whatever else runs; with piece 0, prompts
    are not divided. most: number of tokens from which a step gets no further piece; a step
    therefore gets fewer than most + piece tokens. None: a step gets a piece of every row.
    """

    def __init__(self, most: int | None = None, piece: int = PIECE) -> None:
        self._most, self._piece = most, piece
        self._waiting: deque[PromptPiece] = deque()  # the rest of each prompt

    def __len__(self) -> int:
        """Return the number of prompts that are not fully computed."""
        return len(self._waiting)

    def add(self, slot: int, row: Item, first: int, end: int) -> None:
        """Queue a prompt of `end` tokens, of which the first `first` have been computed."""
        self._waiting.append(PromptPiece(slot, row, first, end, True))

    def take(self) -> list[PromptPiece]:
        """Return the parts of prompts to compute before the next step, at most one per row."""
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

    def remove(self, row: Item) -> bool:
        """Remove a row's prompt from the queue; return whether it was in the queue."""
        pieces = [left for left in self._waiting if left.row is row]
        for piece in pieces:
            self._waiting.remove(piece)
        return bool(pieces)
