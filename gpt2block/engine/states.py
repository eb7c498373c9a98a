"""States of gated delta nets at the ends of prefixes, from which other texts can continue.

Keys and values of a text's first tokens can be reused for any number of tokens. A gated delta net
has no keys: a text can only continue from a state that has been kept. States are kept after every
SAVED tokens of prompts and after their last tokens, in entries of a pool. If no entry is free, the
state that was kept first is given up.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

import numpy as np

from gpt2block.models.config import SAVED, ModelConfig

ENTRIES = 4  # entries of the pool per slot


def pool_shapes(config: ModelConfig, slots: int, n_ctx: int) -> dict[str, tuple[int, ...]]:
    """Return {tensor name: shape} of each layer's pool, and of the entries to write."""
    of = config.delta_nets
    if of is None:
        return {}
    layers = (n for n, delta in enumerate(of.layers) if delta)
    pools = {f"h.{n}.pool": (ENTRIES * slots, of.state_size) for n in layers}
    return {"saved": (slots, ceil(n_ctx / SAVED) + 1), **pools}


def pool_bytes(config: ModelConfig) -> int:
    """Return the bytes of a slot's entries in the pool of all layers."""
    shapes = pool_shapes(config, 1, 1)
    return 4 * sum(int(np.prod(shape)) for name, shape in shapes.items() if name != "saved")


class KeptStates:
    """The entries of the pool: which prefixes of slots they hold. tensors: arrays of a cache.

    An entry may hold the state of the same tokens of several slots.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors, self._saved = tensors, tensors["saved"]
        self._pools = {n: each for n, each in tensors.items() if n.endswith(".pool")}
        self._count = len(next(iter(self._pools.values())))
        self.clear()

    def clear(self) -> None:
        """Forget all states."""
        self._entries: dict[tuple[int, int], int] = {}  # (slot, number of tokens): entry
        self._shared: dict[int, int] = {}  # {slot: tokens that its next text shares}

    def longest(self, source: int, target: int, tokens: int) -> int:
        """Return the most tokens, up to `tokens`, whose state slot `source` has; 0 for none.

        tokens: the number that the next text in slot `target` shares. The pass of this text keeps
        the state after these tokens, as more texts may share them.
        """
        self._shared[target] = tokens // SAVED * SAVED
        return max((n for slot, n in self._entries if slot == source and n <= tokens), default=0)

    def begin(self, slot: int, first: int, end: int) -> None:
        """Choose entries for the states that the next pass over a slot's tokens keeps.

        first, end: the pass computes tokens `first` to `end` - 1. Later tokens are forgotten. A
        pass keeps at most ENTRIES states of a slot, so that a pass over all slots has enough.
        """
        self._forget(slot, first)
        between = range(first // SAVED * SAVED + SAVED, end, SAVED)
        spread = between[:: -max(1, len(between) // (ENTRIES - 2))]
        shared = [n for n in (self._shared.pop(slot, 0),) if n in between]
        row = np.full(self._saved.shape[1], -1, np.int32)
        for n in sorted([*dict.fromkeys((end, *shared, *spread))][:ENTRIES]):
            entry = self._entries[slot, n] = self._free()
            row[-1 if n == end else n // SAVED - 1] = entry
        self._saved[slot].set(row)

    def _forget(self, slot: int, least: int) -> None:
        """Forget the states of a slot after more than `least` tokens."""
        for key in [key for key in self._entries if key[0] == slot and key[1] > least]:
            del self._entries[key]

    def _free(self) -> int:
        """Return an entry that holds no state, or give up the state that was kept first."""
        used = set(self._entries.values())
        if len(used) < self._count:
            return next(entry for entry in range(self._count) if entry not in used)
        oldest = next(iter(self._entries.values()))
        self._entries = {key: each for key, each in self._entries.items() if each != oldest}
        return oldest

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Let a slot continue from the state of another slot's, or of its own, first tokens."""
        entry = self._entries[source, tokens]
        self._forget(target, tokens if source == target else 0)
        for (slot, n), each in [*self._entries.items()]:
            if slot == source and n <= tokens:
                self._entries[target, n] = each
        for name, pool in self._pools.items():
            self._tensors[name.replace("pool", "state")][target, 0] = pool[entry]
        self._tensors["held"][target].set(np.array([tokens, -1], np.int32))
