"""Launches of a bound operation for other arrays that differ from its own only in addresses.

Checks, grids and typed arguments depend on the arrays' shapes, dtypes, strides, devices and
alignment, on which of them are the same, and on the options. Where all of these are equal, the
launches are, except for the addresses.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpt2block.cuda.arrays import arrays_of
from gpt2block.cuda.requests import Launch
from gpt2block.cuda.tensor_maps import TensorMap
from gpt2block.weights.gguf import GgufMatrix
from gpt2block.weights.matrix import WeightMatrix
from gpt2block.weights.two_part import TwoPartMatrix

ALIGNED = 16  # bytes: no operation looks at a larger alignment


class Recipe(NamedTuple):
    """Launches, each with (argument, array) for those of its arguments that are addresses."""

    launches: tuple[tuple[Launch, tuple[tuple[int, int], ...]], ...]

    @classmethod
    def of(cls, launches: Iterable[Any], addresses: Sequence[int]) -> Recipe | None:
        """addresses: of all arrays of the launches; None if these have further ones.

        Of equal addresses the first one counts: an output can be an input that is changed.
        """
        place = {address: i for i, address in reversed(list(enumerate(addresses)))}
        found = []
        for launch in launches:
            if not isinstance(launch, Launch):
                return None
            used = [(i, _address(arg)) for i, arg in enumerate(launch.args) if _address(arg)]
            if any(address not in place for _, address in used):
                return None
            found.append((launch, tuple((i, place[address]) for i, address in used)))
        return cls(tuple(found))

    def at(self, addresses: Sequence[int]) -> tuple[Launch, ...]:
        """The launches for arrays at other addresses, in the same order."""
        made = []
        for launch, places in self.launches:
            args = list(launch.args)
            for argument, array in places:
                args[argument] = _moved(args[argument], addresses[array])
            same = launch.name, launch.function, launch.grid, launch.block
            made.append(type(launch)(*same, tuple(args), launch.shared))
        return tuple(made)


def _address(arg: Any) -> int:
    """The address in an argument of a launch; 0 if it has none."""
    if type(arg) is TensorMap:
        return arg.address
    return int(arg) if type(arg) is np.uintp else 0


def _moved(arg: Any, address: int) -> Any:
    return TensorMap(address, *arg[1:]) if type(arg) is TensorMap else np.uintp(address)


def addresses_of(values: Iterable[Any]) -> tuple[int, ...]:
    """The addresses of the arrays of all arguments."""
    return tuple([a.data.ptr for value in values for a in arrays_of("", value).values()])


def seen(values: Iterable[Any], options: Iterable[Any]) -> tuple[tuple[int, ...], Hashable]:
    """The addresses of the arrays of all arguments, and all else that launches can depend on."""
    addresses: list[int] = []
    kinds = tuple([_described(value, addresses) for value in values])
    places = tuple(map(addresses.index, addresses))
    return tuple(addresses), (kinds, places, tuple(map(exactly, options)))


def _described(value: Any, addresses: list[int]) -> Hashable:
    """What launches can depend on, except addresses, to which those of its arrays are added."""
    if value is None:
        return None
    if isinstance(value, WeightMatrix):
        parts = _described(value.data, addresses), _described(value.scale, addresses)
        types = value.ranges if isinstance(value, GgufMatrix) else value.layout
        return value.dtype, types, parts
    if isinstance(value, TwoPartMatrix):
        parts = _described(value.parts, addresses), _described(value.scale, addresses)
        return value.shape, value.one_scale, parts
    memory = value.data
    addresses.append(memory.ptr)
    return value.shape, value.dtype, value.strides, memory.device_id, memory.ptr % ALIGNED


def exactly(option: Any) -> Hashable:
    """A key that is equal only for identical options: 1 and True differ, as do 0.0 and -0.0."""
    return type(option), option.hex() if type(option) is float else option
