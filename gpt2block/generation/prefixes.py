"""The tokens whose keys and values slots hold, for prompts that begin with them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpt2block.run.model import Ids

LEAST_COPIED = 64  # tokens: of fewer, another slot's keys and values are not worth a copy
LEAST_SHARED = 512  # tokens not computed again for which rows wait until another one has its prompt
MOST_COMPARED = 16  # slots that begin like a prompt; others are older
Key = tuple[str, bytes]


class _Held(NamedTuple):
    """done: how many of the tokens have their keys and values; the others will."""

    client: str
    ids: Ids
    done: int


class Found(NamedTuple):
    """A slot, and how many first tokens of a prompt it has."""

    slot: int
    tokens: int


NOTHING = Found(-1, 0)


class Prefixes:
    """What each slot holds, and for whom: a client finds its own tokens only.

    least: tokens that a prompt must have in common with a slot.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._of_slot: dict[int, _Held] = {}
        self._alike: dict[Key, dict[int, None]] = {}  # slots that begin alike, the latest last

    def hold(self, slot: int, client: str, ids: Ids, done: int) -> None:
        """Note what a slot holds in the place of what it held."""
        self.drop(slot)
        self._of_slot[slot] = _Held(client, ids, done)
        self._alike.setdefault(self._key(client, ids), {})[slot] = None

    def drop(self, slot: int) -> None:
        """Note that a slot holds nothing."""
        held = self._of_slot.pop(slot, None)
        if held is not None:
            key = self._key(held.client, held.ids)
            del self._alike[key][slot]
            if not self._alike[key]:
                del self._alike[key]

    def clear(self) -> None:
        self._of_slot.clear()
        self._alike.clear()

    def length(self, slot: int) -> int:
        """How many tokens a slot holds."""
        held = self._of_slot.get(slot)
        return 0 if held is None else len(held.ids)

    def longest(self, client: str, ids: Ids, coming: bool = False) -> Found:
        """The slot that holds most first tokens of a prompt; of equal ones the latest.

        Never all of the prompt, whose last token is computed. coming: count also tokens whose keys
        and values will be there.
        """
        most = NOTHING
        if len(ids) > self._least:
            slots = self._alike.get(self._key(client, ids), {})
            for slot, _ in zip(reversed(slots), range(MOST_COMPARED), strict=False):
                held = self._of_slot[slot]
                count = _common(held.ids if coming else held.ids[: held.done], ids)
                if count > most.tokens:
                    most = Found(slot, count)
        return most if most.tokens >= self._least else NOTHING

    def _key(self, client: str, ids: Ids) -> Key:
        return client, ids[: self._least].tobytes()


def _common(before: Ids, ids: Ids) -> int:
    """How many tokens of `ids`, without the last one, `before` begins with as well."""
    most = min(len(before), len(ids) - 1)
    different = np.flatnonzero(before[:most] != ids[:most])
    return int(different[0]) if len(different) else most
