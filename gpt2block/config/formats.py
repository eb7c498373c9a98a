"""How the numbers of a model are stored."""

from __future__ import annotations

from collections.abc import Iterable

from gpt2block.errors import UnknownOption

REMOVED = {  # name of an option that there was → why there is none
    "activations": "activations is no option any more: decoding rounds what it multiplies to "
    "float16 where the weights are float16 or FP8 and the GPU is a Hopper, and keeps 22 bits "
    "elsewhere: leave it out"
}


def refuse_removed(names: Iterable[str], callee: str = "") -> None:
    """Raise UnknownOption where an option that there was is among these names."""
    for name in names:
        if name in REMOVED:
            raise UnknownOption(f"{callee}{REMOVED[name]}")
