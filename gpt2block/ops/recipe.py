"""Repeat the launches of a bound operation for other arrays with equal shapes and dtypes.

Checks, grids and typed arguments depend on the arrays' shapes, dtypes, strides, devices and
alignment, on which arrays are identical, and on the options. If all of these are equal, the
launches differ only in addresses.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpt2block.cuda.arrays import arrays_of
from gpt2block.cuda.requests import Launch
from gpt2block.cuda.tensor_maps import TensorMap
from gpt2block.models.weights.gguf import GgufMatrix
from gpt2block.models.weights.hi_lo import HiLoMatrix
from gpt2block.models.weights.matrix import WeightMatrix

ALIGNED = 16  # bytes: the largest alignment that an operation distinguishes


class Recipe(NamedTuple):
    """Launches, each with pairs (index of an argument that is an address, index of an array)."""

    launches: tuple[tuple[Launch, tuple[tuple[int, int], ...]], ...]

    @classmethod
    def of(cls, launches: Iterable[object], addresses: Sequence[int]) -> Recipe | None:
        """Return a Recipe of launches, or None if they use an address that is not in `addresses`.

        addresses: addresses of all arrays. The first of equal addresses is used: an output can be
        an input that the operation changes in place.
        """
        place = {address: i for i, address in reversed(list(enumerate(addresses)))}
        recorded = []
        for launch in launches:
            if not isinstance(launch, Launch):
                return None
            used = [(i, _address(arg)) for i, arg in enumerate(launch.args) if _address(arg)]
            if any(address not in place for _, address in used):
                return None
            recorded.append((launch, tuple((i, place[address]) for i, address in used)))
        return cls(tuple(recorded))

    def at(self, addresses: Sequence[int]) -> tuple[Launch, ...]:
        """Return the launches for arrays at `addresses`, in the order that `Recipe.of` received."""
        moved = []
        for launch, places in self.launches:
            args = list(launch.args)
            for argument, array in places:
                args[argument] = _at_address(args[argument], addresses[array])
            same = launch.name, launch.function, launch.grid, launch.block
            moved.append(type(launch)(*same, tuple(args), launch.shared))
        return tuple(moved)


def _address(arg: object) -> int:
    """Return the address in an argument of a launch, or 0 if the argument has none."""
    if type(arg) is TensorMap:
        return arg.address
    return int(arg) if type(arg) is np.uintp else 0


def _at_address(arg: object, address: int) -> object:
    return TensorMap(address, *arg[1:]) if type(arg) is TensorMap else np.uintp(address)


def addresses_of(values: Iterable[object]) -> tuple[int, ...]:
    """Return the addresses of the arrays of all arguments."""
    return tuple([a.data.ptr for value in values for a in arrays_of("", value).values()])


def signature_of(values: Iterable[Any], options: Iterable[Any]) -> tuple[tuple[int, ...], Hashable]:
    """Return all arrays' addresses, and a key of all other properties that launches depend on.

    Launches of calls with equal keys differ only in addresses.
    """
    addresses: list[int] = []
    kinds = tuple([_described(value, addresses) for value in values])
    places = tuple(map(addresses.index, addresses))
    return tuple(addresses), (kinds, places, tuple(map(exactly, options)))


def _described(value: Any, addresses: list[int]) -> Hashable:
    """Return a key of all properties of a value that launches depend on, except addresses.

    The addresses of its arrays are appended to `addresses`.
    """
    if value is None:
        return None
    if isinstance(value, WeightMatrix):
        parts = _described(value.data, addresses), _described(value.scale, addresses)
        types = value.ranges if isinstance(value, GgufMatrix) else value.layout
        return value.dtype, types, value.share_of, parts
    if isinstance(value, HiLoMatrix):
        parts = _described(value.parts, addresses), _described(value.scale, addresses)
        return value.shape, value.one_scale, parts
    memory = value.data
    addresses.append(memory.ptr)
    return value.shape, value.dtype, value.strides, memory.device_id, memory.ptr % ALIGNED


def exactly(option: object) -> Hashable:
    """Return a key that is equal only for identical options: 1 and True have different keys."""
    return type(option), option.hex() if type(option) is float else option
