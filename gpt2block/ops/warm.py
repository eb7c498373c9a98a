"""Warm calls: reuse a bound operation for repeated calls that differ only in addresses.

Checks, grids and typed arguments depend on the arrays' shapes, dtypes, strides, devices and
alignment, and on the options. If all of these are known from an earlier call, a call allocates its
outputs, puts the new addresses into the earlier launches and runs them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import Bound, CudaArray, arrays_of
from gpt2block.cuda.kernels import Launch
from gpt2block.weights.matrix import WeightMatrix
from gpt2block.weights.two_part import TwoPartMatrix

MOST = 4096  # recipes cached; the oldest is dropped first
ALIGNED = 16  # bytes: no op looks at a larger alignment


class Recipe(NamedTuple):
    """A bound op without its arrays."""

    outputs: tuple[tuple[tuple[int, ...], Any], ...]  # shape and dtype of out, and of each extra
    launches: tuple[tuple[Launch, tuple[tuple[int, int], ...]], ...]  # (argument, array) pairs

    def run(self, arrays: list[CudaArray]) -> Bound:
        made = [cupy.empty(shape, dtype) for shape, dtype in self.outputs]
        pointers = [array.data.ptr for array in (*arrays, *made)]
        for launch, places in self.launches:
            args = list(launch.args)
            for argument, array in places:
                args[argument] = np.uintp(pointers[array])
            launch.function(launch.grid, launch.block, args, shared_mem=launch.shared)
        return Bound(made[0], (), tuple(made[1:]))


_PLAIN = (type(None), bool, int, float, str)  # types of options that are compared by value
_recipes: dict[Hashable, Recipe] = {}
_inserting = threading.Lock()


def call(
    bind: Callable[..., Bound],
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    **options: Any,
) -> Bound:
    """`bind(inputs, out, **options)`, and run. The launches are not part of the result."""
    arrays = [array for value in inputs for array in arrays_of("", value).values()]
    plain = all(type(option) in _PLAIN for option in options.values())
    known = plain and all(isinstance(array, cupy.ndarray) for array in arrays)
    if out is not None or not known:  # may overlap an input; bind says what is wrong with others
        return _bound_and_run(bind, inputs, out, options)
    key = (
        bind,
        cupy.cuda.runtime.getDevice(),
        *map(_described, inputs),
        *map(_exactly, options.values()),  # of one bind, always the same names
    )
    recipe = _recipes.get(key)
    if recipe is not None:
        try:
            return recipe.run(arrays)
        except cupy.cuda.memory.OutOfMemoryError:  # bind can say more about it
            return _bound_and_run(bind, inputs, out, options)
    bound = _bound_and_run(bind, inputs, out, options)
    recipe = _recipe(arrays, bound)
    if recipe is not None:
        with _inserting:  # no other thread may change the dict while it finds the oldest
            if len(_recipes) >= MOST:
                _recipes.pop(next(iter(_recipes)))
            _recipes[key] = recipe
    return bound


def _exactly(option: Any) -> Hashable:
    """A key that is equal only for identical options: 1 and True differ, as do 0.0 and -0.0."""
    return type(option), option.hex() if type(option) is float else option


def _bound_and_run(
    bind: Callable[..., Bound],
    inputs: tuple[Any, ...],
    out: CudaArray | None,
    options: dict[str, Any],
) -> Bound:
    bound = bind(inputs, out, **options)
    bound.run()
    return bound


def _described(value: Any) -> Hashable:
    """All properties of an input that a launch can depend on, except its address."""
    if value is None:
        return None
    if isinstance(value, WeightMatrix):
        return value.dtype, value.layout, _described(value.data), _described(value.scale)
    if isinstance(value, TwoPartMatrix):
        return value.shape, _described(value.parts), _described(value.scale)
    memory = value.data
    return value.shape, value.dtype, value.strides, memory.device_id, memory.ptr % ALIGNED


def _recipe(arrays: list[CudaArray], bound: Bound) -> Recipe | None:
    """None where addresses do not identify the arrays, as in in-place operations.

    Also for two-part results, whose scale may be written when they are allocated.
    """
    if isinstance(bound.out, TwoPartMatrix):
        return None
    made = [bound.out, *bound.extra]
    place = {array.data.ptr: i for i, array in enumerate([*arrays, *made])}
    if len(place) < len(arrays) + len(made):
        return None
    launches = []
    for launch in bound.launches:
        if any(isinstance(arg, np.void) for arg in launch.args):  # tensor maps hold addresses, too
            return None
        pointers = [i for i, arg in enumerate(launch.args) if isinstance(arg, np.uintp) and arg]
        if any(int(launch.args[i]) not in place for i in pointers):
            return None
        launches.append((launch, tuple((i, place[int(launch.args[i])]) for i in pointers)))
    return Recipe(tuple((array.shape, array.dtype) for array in made), tuple(launches))
