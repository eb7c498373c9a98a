"""Warm calls: calls that differ from an earlier call of an operation only in array addresses.

A warm call allocates its outputs, inserts the addresses into the launches of the earlier call, and
runs these launches (`gpt2block.ops.recipe`).
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any, NamedTuple

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import ArrayArgs, Bound, CudaArray, arrays_of
from gpt2block.models.weights.hi_lo import HiLoMatrix
from gpt2block.ops.operation import Operation
from gpt2block.ops.recipe import Recipe, addresses_of, signature_of

MAX_CALLS = 4096  # maximum number of cached calls; the oldest is dropped first


class CachedCall(NamedTuple):
    """An earlier call without its arrays. outputs: (shape, dtype) of out and of extra outputs."""

    outputs: tuple[tuple[tuple[int, ...], Any], ...]
    recipe: Recipe

    def run(self, addresses: tuple[int, ...]) -> Bound:
        outputs = [cupy.empty(shape, dtype) for shape, dtype in self.outputs]
        for launch in self.recipe.at((*addresses, *addresses_of(outputs))):
            launch.run()
        return Bound(outputs[0], (), tuple(outputs[1:]))


_PLAIN = (type(None), bool, int, float, str)  # types of options that are compared by value
_cached_calls: dict[Hashable, CachedCall] = {}
_inserting = threading.Lock()


def call(
    operation: Operation, inputs: ArrayArgs, out: CudaArray | None = None, **options: object
) -> Bound:
    """Bind and run the operation. Callers use only `out` and `extra` of the returned Bound."""
    arrays = [array for value in inputs for array in arrays_of("", value).values()]
    plain = all(type(option) in _PLAIN for option in options.values())
    usual = plain and arrays and all(isinstance(array, cupy.ndarray) for array in arrays)
    if out is not None or not usual:  # out may overlap an input; bind reports wrong arguments
        return _bound_and_run(operation, inputs, out, options)
    # names of options follow from the operation
    addresses, kind = signature_of(inputs, options.values())
    key = operation, cupy.cuda.runtime.getDevice(), kind
    known = _cached_calls.get(key)
    if known is not None:
        try:
            return known.run(addresses)
        except cupy.cuda.memory.OutOfMemoryError:  # bind reports the error in more detail
            return _bound_and_run(operation, inputs, out, options)
    bound = _bound_and_run(operation, inputs, out, options)
    known = _cacheable(addresses, bound)
    if known is not None:
        with _inserting:  # no other thread may change the dict while the oldest call is looked up
            if len(_cached_calls) >= MAX_CALLS:
                _cached_calls.pop(next(iter(_cached_calls)))
            _cached_calls[key] = known
    return bound


def _bound_and_run(
    operation: Operation, inputs: ArrayArgs, out: CudaArray | None, options: dict[str, object]
) -> Bound:
    bound = operation.bind_on_device(inputs, out, **options)
    bound.run()
    return bound


def _cacheable(addresses: tuple[int, ...], bound: Bound) -> CachedCall | None:
    """Return a call to cache. None if the operation is in place or returns a HiLoMatrix.

    bind may write the scale of a HiLoMatrix result, which a repeated launch would not.
    """
    if isinstance(bound.out, HiLoMatrix):
        return None
    outputs = (bound.out, *bound.extra)
    written = addresses_of(outputs)
    recipe = Recipe.of(bound.launches, (*addresses, *written))
    if recipe is None or len({*addresses, *written}) < len({*addresses}) + len(written):
        return None
    return CachedCall(tuple((array.shape, array.dtype) for array in outputs), recipe)
