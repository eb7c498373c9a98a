"""Which rows of a generation are computed in which slots of a decoding, and when they start.

Turns keeps what waits, by client; RowScheduler gives rows to slots; PieceScheduler decides how much
of their prompts a step computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

Item = TypeVar("Item")

PIECE = 4096  # tokens of a prompt after which a piece ends, counted from its beginning
START_COST = 2  # starting rows takes about 1 / START_COST of the time of a step of all slots
MOST_REMOVED = 64  # rows that are kept after they were removed, where fewer wait


class Turns(Generic[Item]):
    """Items that wait. Clients take turns; the items of each are taken in order."""

    def __init__(self) -> None:
        self._of: dict[str, deque[Iterator[Item]]] = {}  # by client, in the order of their turns

    def add(self, items: Iterable[Item], client: str) -> None:
        """Let items wait, after those of the client that do. Each is looked up at its turn."""
        self._of.setdefault(client, deque()).append(iter(items))

    def take(
        self, wanted: Callable[[Item], bool], may: Callable[[str], bool] = lambda client: True
    ) -> Item | None:
        """Return the next item of the first client that may have a turn; None if there is none.

        wanted: called once for each item that is reached; others are dropped, and are no turn.
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
        """Drop all items that are not wanted."""
        for client, waiting in self._of.items():
            left = [item for items in waiting for item in items if wanted(item)]
            self._of[client] = deque([iter(left)])


class RowScheduler(Generic[Item]):
    """Assigns rows, in order, to slots; a slot takes another row when its row has left it.

    Clients take turns: a row of each that has any waiting.

    Starting rows stops the others for a while, however few start. Rows therefore wait in free slots
    until the steps that they have missed together cost as much as that: with one running row they
    start at once, with many they start together. A row waits for at most as many steps as rows run.

    choose: which of the free slots a row gets, of which the first has been free longest; None: the
    lowest ones.
    """

    def __init__(
        self, slots: int, choose: Callable[[Item, Sequence[int]], int] | None = None
    ) -> None:
        self._new: Turns[Item] = Turns()
        self._again: deque[Item] = deque()
        self._removed: dict[int, Item] = {}  # by id
        self.waiting = 0  # rows
        self._free, self._choose = list(range(slots)), choose
        self._row_of: list[Item | None] = [None] * slots
        self._running = 0
        self._missed = 0  # steps by waiting rows since the last start

    @property
    def busy(self) -> bool:
        """Whether any row runs or waits."""
        return self._running + self.waiting > 0

    def add(self, rows: Sequence[Item], client: str = "") -> None:
        """Let rows wait, after those of the client that do. Each is looked up when it starts."""
        self._new.add(rows, client)
        self.waiting += len(rows)

    def remove(self, row: Item) -> None:
        """Let a waiting row not start."""
        self._removed[id(row)] = row
        self.waiting -= 1
        if len(self._removed) > max(MOST_REMOVED, self.waiting):
            self._forget_removed()

    def _forget_removed(self) -> None:
        """Keep none of the removed rows, which otherwise stay until their turn comes."""
        self._new.keep(lambda row: id(row) not in self._removed)
        self._again = deque(row for row in self._again if id(row) not in self._removed)
        self._removed.clear()

    def place(self) -> list[tuple[int, Item]]:
        """The slots and rows that start now, before the next step."""
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
            placed.append((slot, row))
        self._running += count
        return placed

    def _take(self) -> Item:
        """The next row that waits; there is one."""
        self.waiting -= 1
        while self._again:
            if self._wanted(row := self._again.popleft()):
                return row
        found = self._new.take(self._wanted)
        assert found is not None
        return found

    def _wanted(self, row: Item) -> bool:
        """Whether a row was not removed. One that was is forgotten."""
        return self._removed.pop(id(row), None) is None

    def slot_of(self, row: Item) -> int | None:
        """The slot in which a row runs, or None."""
        return next((slot for slot, each in enumerate(self._row_of) if each is row), None)

    def row_of(self, slot: int) -> Item:
        """The row that runs in this slot."""
        row = self._row_of[slot]
        assert row is not None
        return row

    def rows_of(self, slots: Sequence[int]) -> list[Item]:
        """The rows that run in these slots."""
        found: list[Any] = [self._row_of[slot] for slot in slots]
        return found

    def release(self, slot: int, again: bool = False) -> None:
        """Free a slot. again: its row has not ended and starts another time, before new rows."""
        if again:
            self._again.append(self.row_of(slot))
            self.waiting += 1
        self._row_of[slot] = None
        self._free.append(slot)
        self._running -= 1


class PromptPiece(NamedTuple):
    """Tokens `first` to `end` of the prompt of a row in a slot. last: whether they end it."""

    slot: int
    row: Any
    first: int
    end: int
    last: bool


class PieceScheduler(Generic[Item]):
    """Decides which parts of prompts are computed before a step, so that others wait for few.

    Rows that wait take turns, with a piece each. Pieces end where a multiple of `piece` tokens of
    the prompt does, whatever else runs, so that a prompt is always computed in the same pieces.
    most: a step that has taken so many tokens takes no further piece. Together it therefore takes
    fewer than `most` and `piece` tokens. None: it takes a piece of every row. piece 0: prompts are
    not divided.
    """

    def __init__(self, most: int | None = None, piece: int = PIECE) -> None:
        self._most, self._piece = most, piece
        self._waiting: deque[PromptPiece] = deque()  # all that is left of each prompt

    def __len__(self) -> int:
        """The number of rows with a part of their prompt left."""
        return len(self._waiting)

    def add(self, slot: int, row: Item, first: int, end: int) -> None:
        """Let a prompt wait, of which `first` tokens have been computed, and end - first not."""
        self._waiting.append(PromptPiece(slot, row, first, end, True))

    def take(self) -> list[PromptPiece]:
        """The pieces before the next step: at most one of each row."""
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
        """Forget a row that waits; False if it does not."""
        found = [left for left in self._waiting if left.row is row]
        for left in found:
            self._waiting.remove(left)
        return bool(found)
