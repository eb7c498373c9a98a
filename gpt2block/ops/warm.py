"""Warm calls: a repeated call of an operation that differs from an earlier one only in addresses.

It allocates its outputs, puts the addresses into the earlier launches and runs them
(`gpt2block.ops.recipe`).
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any, NamedTuple

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import Bound, CudaArray, arrays_of
from gpt2block.ops.operation import Operation
from gpt2block.ops.recipe import Recipe, addresses_of, seen
from gpt2block.weights.two_part import TwoPartMatrix

MOST = 4096  # calls cached; the oldest is dropped first


class Known(NamedTuple):
    """An earlier call without its arrays. outputs: shape and dtype of out, and of each extra."""

    outputs: tuple[tuple[tuple[int, ...], Any], ...]
    recipe: Recipe

    def run(self, addresses: tuple[int, ...]) -> Bound:
        made = [cupy.empty(shape, dtype) for shape, dtype in self.outputs]
        for launch in self.recipe.at((*addresses, *addresses_of(made))):
            launch.run()
        return Bound(made[0], (), tuple(made[1:]))


_PLAIN = (type(None), bool, int, float, str)  # types of options that are compared by value
_known: dict[Hashable, Known] = {}
_inserting = threading.Lock()


def call(
    operation: Operation, inputs: tuple[Any, ...], out: CudaArray | None = None, **options: Any
) -> Bound:
    """Bind the operation and run it. The launches are not part of the result."""
    arrays = [array for value in inputs for array in arrays_of("", value).values()]
    plain = all(type(option) in _PLAIN for option in options.values())
    usual = plain and all(isinstance(array, cupy.ndarray) for array in arrays)
    if out is not None or not usual:  # may overlap an input; bind says what is wrong with others
        return _bound_and_run(operation, inputs, out, options)
    addresses, kind = seen(inputs, options.values())  # always the same names
    key = operation, cupy.cuda.runtime.getDevice(), kind
    known = _known.get(key)
    if known is not None:
        try:
            return known.run(addresses)
        except cupy.cuda.memory.OutOfMemoryError:  # bind can say more about it
            return _bound_and_run(operation, inputs, out, options)
    bound = _bound_and_run(operation, inputs, out, options)
    known = _kept(addresses, bound)
    if known is not None:
        with _inserting:  # no other thread may change the dict while it finds the oldest
            if len(_known) >= MOST:
                _known.pop(next(iter(_known)))
            _known[key] = known
    return bound


def _bound_and_run(
    operation: Operation, inputs: tuple[Any, ...], out: CudaArray | None, options: dict[str, Any]
) -> Bound:
    bound = operation.bind_on_device(inputs, out, **options)
    bound.run()
    return bound


def _kept(addresses: tuple[int, ...], bound: Bound) -> Known | None:
    """None for operations in place, and for two-part results, whose scale bind may write."""
    if isinstance(bound.out, TwoPartMatrix):
        return None
    made = (bound.out, *bound.extra)
    written = addresses_of(made)
    recipe = Recipe.of(bound.launches, (*addresses, *written))
    if recipe is None or len({*addresses, *written}) < len({*addresses}) + len(written):
        return None
    return Known(tuple((array.shape, array.dtype) for array in made), recipe)
