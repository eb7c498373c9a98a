"""The tokens whose keys and values slots hold, for prompts that begin with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpt2block.generation.rows import Row
from gpt2block.run.model import Ids

LEAST_COPIED = 64  # tokens: of fewer, another slot's keys and values are not worth a copy
LEAST_SHARED = 200  # tokens: fewer take no longer than one, as a pass has to read all weights
# On an NVIDIA H100, of 16-bit weights: what a pass takes for each layer, however few its tokens,
# and a token for each byte of weights.
LAYER_S, BYTE_S = 60e-6, 2.5e-15
MOST_COMPARED = 4  # slots that begin like a prompt; others are older
Key = tuple[str, bool, bytes]


def least_shared(n_layer: int, nbytes: int) -> int:
    """Tokens not computed again for which rows wait until another one has computed them.

    They take about as long as a further pass of a model with so many bytes of weights.
    """
    return max(LEAST_SHARED, int(n_layer * LAYER_S / (nbytes * BYTE_S + 1e-12)))


class _Held(NamedTuple):
    """done: how many of the tokens have their keys and values; the others will."""

    ids: Ids
    done: int
    keys: tuple[Key, ...]


class Found(NamedTuple):
    """A slot, and how many first tokens of a prompt it has."""

    slot: int
    tokens: int


NOTHING = Found(-1, 0)


class Prefixes:
    """What each slot holds, and for whom: a client finds its own tokens only.

    Slots are found by their first `least` tokens, twice as many, four times as many, and so on.

    least: tokens that a prompt must have in common with a slot. short: as short_context of
    ModelConfig: rows that may have more tokens find none of the others, nor they theirs.
    """

    def __init__(self, least: int, short: int = 0) -> None:
        self._least, self._short = least, short
        self._of_slot: dict[int, _Held] = {}
        self._alike: dict[Key, dict[int, None]] = {}  # slots that begin alike, the latest last

    def hold(self, slot: int, row: Row, ids: Ids, done: int) -> None:
        """Note what a slot holds in the place of what it held."""
        self.drop(slot)
        keys = tuple(self._key(row, ids[:n]) for n in self._sizes(len(ids)))
        self._of_slot[slot] = _Held(ids, done, keys)
        for key in keys:
            self._alike.setdefault(key, {})[slot] = None

    def drop(self, slot: int) -> None:
        """Note that a slot holds nothing."""
        held = self._of_slot.pop(slot, None)
        for key in held.keys if held else ():
            del self._alike[key][slot]
            if not self._alike[key]:
                del self._alike[key]

    def clear(self) -> None:
        self._of_slot.clear()
        self._alike.clear()

    def longest(self, row: Row, ids: Ids) -> tuple[Found, Found]:
        """The slots that hold most first tokens of a prompt; of equal ones the latest.

        First of those whose keys and values are there, then of all. Never all of the prompt, whose
        last token is computed. Where more than MOST_COMPARED slots begin alike, it may be one with
        more than half as many tokens.
        """
        done = coming = NOTHING
        for n in reversed(self._sizes(len(ids) - 1)):
            slots = self._alike.get(self._key(row, ids[:n]), {})
            for slot, _ in zip(reversed(slots), range(MOST_COMPARED), strict=False):
                held = self._of_slot[slot]
                tokens = _common(held.ids, ids)
                if tokens > coming.tokens:
                    coming = Found(slot, tokens)
                if self._least <= min(tokens, held.done) > done.tokens:
                    done = Found(slot, min(tokens, held.done))
            if done.tokens >= n:
                break
        return done, coming

    def slot_for(self, row: Row, free: Sequence[int]) -> int:
        """Of free slots that which holds most of a row's first tokens; else the first one.

        Not one most of whose tokens would be lost: the row gets a copy of the others.
        """
        (slot, tokens), _ = self.longest(row, row.start(free[0]).ids)
        if slot in free and 2 * tokens >= len(self._of_slot[slot].ids):
            return slot
        return next((each for each in free if each != slot), slot)

    def _key(self, row: Row, ids: Ids) -> Key:
        return row.client, row.most > self._short, ids.tobytes()

    def _sizes(self, most: int) -> list[int]:
        """The numbers of first tokens by which slots are found, up to `most`."""
        return [self._least << n for n in range((most // self._least).bit_length())]


def _common(before: Ids, ids: Ids) -> int:
    """How many tokens of `ids`, without the last one, `before` begins with as well."""
    most = min(len(before), len(ids) - 1)
    different = before[:most] != ids[:most]
    first = int(different.argmax()) if most else 0
    return first if most and different[first] else most
