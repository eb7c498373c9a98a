"""Calls that a contract refuses: an array of a wrong type, dtype, shape, order or place in memory.

An `Example` gives the sizes and options of a valid call; each case changes one of its arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from gpt2block.contract import MATRICES, Contract, Entry
from gpt2block.cuda import cupy
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops.call import FIXED


class Example(NamedTuple):
    """Sizes and options of a valid call. sizes: size of each letter of the contract; "..." is (2,).

    dtype: dtype of arrays for which the contract allows several.
    """

    sizes: Mapping[str, int]
    options: Mapping[str, Any] = {}
    dtype: str = "float32"


class Case(NamedTuple):
    """A call to be refused. names: arrays of which the message must name one."""

    label: str
    inputs: tuple[Any, ...]
    names: tuple[str, ...]
    out: Any = None
    words: str = ""


def shape_of(entry: Entry, example: Example) -> tuple[int, ...]:
    return entry.shape({**example.options, **example.sizes, "...": (2,)})


def dtype_of(entry: Entry, example: Example) -> str:
    return FIXED.get(entry.kind, example.dtype)


def zeros(entry: Entry, example: Example, shape: tuple[int, ...]) -> Any:
    """Return an array of zeros; for a matrix (K, N), a WeightMatrix with layout "NK"."""
    dtype = dtype_of(entry, example)
    if entry.kind in MATRICES:
        return WeightMatrix(cupy.zeros(shape[::-1], dtype), dtype, None, "NK")
    return cupy.zeros(shape, dtype)


def cases(contract: Contract, example: Example) -> Iterator[Case]:
    entries = contract.inputs
    arrays = [zeros(entry, example, shape_of(entry, example)) for entry in entries]
    every = tuple(entry.name for entry in (*entries, *contract.outputs))

    def changed(label: str, i: int, value: Any, names: tuple[str, ...] = ()) -> Case:
        inputs = (*arrays[:i], value, *arrays[i + 1 :])
        return Case(f"{entries[i].name} {label}", inputs, names or (entries[i].name,))

    for i, entry in enumerate(entries):
        array, shape = arrays[i], shape_of(entry, example)
        yield changed("that is a list", i, [1.0])
        if not entry.optional:
            yield changed("that is missing", i, None)
        letters = entry.axes[1:] if "..." in entry.axes else entry.axes
        for axis, letter in enumerate(letters, len(shape) - len(letters)):
            if letter.isalpha() and sum(letter in other.axes for other in entries) == 1:
                continue  # any size fits
            longer = tuple(n + (k == axis) for k, n in enumerate(shape))
            value = zeros(entry, example, longer)
            yield changed(f"with a longer axis {letter}", i, value, every)
        if entry.kind in MATRICES:
            continue
        of_its_size = {1: "int8", 2: "int16", 4: "uint32", 8: "uint64"}[array.itemsize]
        for dtype in ("int64", of_its_size):
            yield changed(f"of dtype {dtype}", i, array.astype(dtype))
        yield changed("that is empty", i, array[:0])
        yield changed("with strides", i, cupy.zeros((*shape, 2), array.dtype)[..., 0])
        if "..." not in entry.axes:
            yield changed("with one axis more", i, array[None])
        elif sum("..." in other.axes for other in entries) > 1:
            yield changed("with another leading axis", i, array[:1], every)
    yield from _overlaps(contract, example, arrays)


def _overlaps(contract: Contract, example: Example, arrays: list[Any]) -> Iterator[Case]:
    """Yield calls whose first output overlaps an input of its dtype: all or one of its elements."""
    written = contract.outputs[0]
    if written.name in {entry.name for entry in contract.inputs} or written.kind == "hi_lo":
        return
    dtype = dtype_of(written, example)
    shape = shape_of(written, example)
    for i, entry in enumerate(contract.inputs):
        array = arrays[i]
        if entry.kind in MATRICES or array.dtype != dtype:
            continue
        size = int(np.prod(shape))
        for start in (1, array.size - 1):
            memory = cupy.zeros(array.size + size, dtype)
            out = memory[start : start + size].reshape(shape)
            inputs = (*arrays[:i], memory[: array.size].reshape(array.shape), *arrays[i + 1 :])
            label = f"{written.name} over {entry.name} from element {start}"
            yield Case(label, inputs, (written.name,), out, f"overlaps {entry.name}")
