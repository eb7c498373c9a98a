"""Values that a server keeps for a client, such as pages and logits."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, TypeVar

KEPT_CLIENTS = 16  # number of latest clients whose values are kept

Value = TypeVar("Value")
Kept = OrderedDict[Any, Value]  # values by key, the latest one last


def kept_of(kept: Kept[Kept[Value]], client: str) -> Kept[Value]:
    """Return the dict of a client's stored values; mark the client as the latest."""
    if client not in kept:
        keep(kept, client, OrderedDict(), KEPT_CLIENTS)
    kept.move_to_end(client)
    return kept[client]


def keep(kept: Kept[Value], key: object, value: Value, most: int) -> None:
    """Store `value` under `key`; remove the oldest value if there are more than `most`."""
    kept[key] = value
    if len(kept) > most:
        kept.popitem(last=False)
