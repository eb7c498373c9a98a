"""Prefix reuse: record which tokens' keys and values a slot holds, and find common prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpt2block.engine.generation.sequences import TokenSequence
from gpt2block.engine.model import Ids

MIN_COPIED = 64  # minimum tokens for which a copy of a slot's keys and values is faster
MIN_SHARED = 200  # minimum tokens to wait for: fewer take the time of reading all weights once
# Times with 16-bit weights on an NVIDIA H100: seconds per layer of a pass with few tokens, and
# seconds per token and byte of weights.
LAYER_S, BYTE_S = 60e-6, 2.5e-15
MAX_COMPARED = 4  # maximum number of slots to compare with a prompt, latest first
Key = tuple[str, bool, int, bytes]


def min_shared(n_layer: int, nbytes: int) -> int:
    """Return the minimum length of a common prefix that a sequence waits for another to compute.

    Computing this many tokens takes about as long as one more pass of a model with n_layer layers
    and nbytes bytes of weights.
    """
    return max(MIN_SHARED, int(n_layer * LAYER_S / (nbytes * BYTE_S + 1e-12)))


class _Held(NamedTuple):
    """Tokens of a slot. done: number of first tokens whose keys and values are computed."""

    ids: Ids
    done: int
    keys: tuple[Key, ...]


class HeldPrefix(NamedTuple):
    """A slot, and the number of first tokens of a prompt whose keys and values it holds."""

    slot: int
    tokens: int


NOTHING = HeldPrefix(-1, 0)


class Prefixes:
    """Index of the tokens that each slot holds, by client and adapter.

    Slots are indexed by their first `least` tokens, their first 2 · `least` tokens, 4 · `least`, …

    least: number of first tokens that a prompt must share with a slot. short: short_context of
    ModelConfig. Sequences that may exceed it and other sequences do not find each other's tokens.
    """

    def __init__(self, least: int, short: int = 0) -> None:
        self._least, self._short = least, short
        self._of_slot: dict[int, _Held] = {}
        self._alike: dict[Key, dict[int, None]] = {}  # by hash of first tokens: slots, latest last

    def hold(self, slot: int, sequence: TokenSequence, ids: Ids, done: int) -> None:
        """Record the tokens that a slot now holds; forget its earlier tokens."""
        if (held := self._of_slot.get(slot)) and held.ids is ids:
            self._of_slot[slot] = held._replace(done=done)
            return
        self.drop(slot)
        keys = tuple(self._key(sequence, ids[:n]) for n in self._sizes(len(ids)))
        self._of_slot[slot] = _Held(ids, done, keys)
        for key in keys:
            self._alike.setdefault(key, {})[slot] = None

    def drop(self, slot: int) -> None:
        """Record that a slot holds no tokens."""
        held = self._of_slot.pop(slot, None)
        for key in held.keys if held else ():
            del self._alike[key][slot]
            if not self._alike[key]:
                del self._alike[key]

    def clear(self) -> None:
        self._of_slot.clear()
        self._alike.clear()

    def longest(self, sequence: TokenSequence, ids: Ids) -> tuple[HeldPrefix, HeldPrefix]:
        """Return a prompt's longest computed prefix, and its longest one computed or in progress.

        Of slots with equally long prefixes, the latest is returned.

        The first result counts tokens whose keys and values have been computed, the second also
        tokens that are being computed. The last token of the prompt never counts. If more than
        MAX_COMPARED slots have equal first tokens, the result may be a slot with fewer tokens, but
        more than half as many.
        """
        done = coming = NOTHING
        sizes = self._sizes(len(ids) - 1) if self._alike else []
        if sizes and self._key(sequence, ids[: sizes[0]]) not in self._alike:
            return done, coming  # without the shortest prefix, no slot has a longer prefix
        for n in reversed(sizes):
            slots = self._alike.get(self._key(sequence, ids[:n]), {})
            for slot, _ in zip(reversed(slots), range(MAX_COMPARED), strict=False):
                held = self._of_slot[slot]
                tokens = _common(held.ids, ids)
                if tokens > coming.tokens:
                    coming = HeldPrefix(slot, tokens)
                if self._least <= min(tokens, held.done) > done.tokens:
                    done = HeldPrefix(slot, min(tokens, held.done))
            if done.tokens >= n:
                break
        return done, coming

    def slot_for(self, sequence: TokenSequence, free: Sequence[int]) -> int:
        """Return the free slot with the longest prefix of a sequence's prompt, else the first one.

        A slot that would lose most of its tokens is avoided: the sequence gets a copy of its
        prefix.
        """
        (slot, tokens), _ = self.longest(sequence, sequence.start(free[0]).ids)
        if slot in free and 2 * tokens >= len(self._of_slot[slot].ids):
            return slot
        return next((each for each in free if each != slot), slot)

    def _key(self, sequence: TokenSequence, ids: Ids) -> Key:
        return sequence.client, sequence.most > self._short, sequence.adapter.number, ids.tobytes()

    def _sizes(self, most: int) -> list[int]:
        """Return the prefix lengths by which slots are indexed: the least one times 1, 2, 4, …"""
        return [self._least << n for n in range((most // self._least).bit_length())]


def _common(before: Ids, ids: Ids) -> int:
    """Return the length of the common prefix of `before` and `ids[:-1]`."""
    most = min(len(before), len(ids) - 1)
    different = (before[:most] != ids[:most]).nonzero()[0]
    return int(different[0]) if len(different) else most
