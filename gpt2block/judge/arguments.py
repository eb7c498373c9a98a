"""List the arguments that a user's kernel for an operation may take, by parameter name.

A user's kernel takes any of these arguments, in any order. Names, shapes and dtypes follow from the
operation's contract; `Operation.arrays` and `Operation.aliases` add names of built-in kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import is_dataclass
from typing import Any, NamedTuple

from gpt2block.contract import MATRICES, Entry, size_of
from gpt2block.cuda.arrays import Shape
from gpt2block.errors import InputError
from gpt2block.judge.templates import names
from gpt2block.ops.call import FIXED
from gpt2block.ops.operation import Attrs, Operation, Sizes


class Output(NamedTuple):
    shape: Shape
    dtype: str


class Values(NamedTuple):
    """The arguments of one launch. An output with the name of an input is computed in place."""

    inputs: Mapping[str, Any]  # name → array
    outputs: Mapping[str, Output]  # name → shape and dtype; the result comes first
    numbers: Mapping[str, int | float]
    aliases: Mapping[str, str]  # alternative name of an array → name of the array

    @property
    def sizes(self) -> dict[str, int]:
        """The integers that expressions for grid, block and shared memory can use, by name."""
        return {name: n for name, n in self.numbers.items() if isinstance(n, int)}


def check_known(operation: Operation) -> None:
    """Raise InputError if the operation does not support users' kernels."""
    known = names()
    if operation.name not in known:
        raise InputError(
            f"{operation.name} supports no user's kernel: expected one of {', '.join(known)}"
        )


def values(operation: Operation, inputs: tuple[Any, ...], attrs: Attrs) -> Values:
    """Return the kernel arguments for inputs of an operation that supports users' kernels.

    inputs: as `Operation.make` returns them.
    """
    contract = operation.contract
    pairs = tuple(zip(contract.inputs, inputs, strict=False))
    outputs = [each for each in contract.outputs if operation.workload.further or not each.optional]
    called = {each.name: each.name for each in (*contract.inputs, *outputs)}
    called.update(operation.workload.arrays)
    sizes = _sizes(operation, pairs, attrs)
    stored = str(inputs[0].dtype.name)
    aliases = {
        name: called[text] for name, text in operation.workload.aliases.items() if text in called
    }
    return Values(
        {called[e.name]: value.data if e.kind in MATRICES else value for e, value in pairs},
        {called[e.name]: Output(e.shape(sizes), FIXED.get(e.kind, stored)) for e in outputs},
        _numbers(operation, sizes, attrs, called),
        {**operation.workload.arrays, **aliases},
    )


def sizes_at(operation: Operation, sizes: Sizes) -> dict[str, int]:
    """Return the integers of `Values.sizes` for documented sizes, without input arrays."""
    known = {**operation.workload.attrs, **sizes}
    operation.set_axes(known)
    entries = (*operation.contract.inputs, *operation.contract.outputs)
    arrays = {*operation.workload.arrays, *(entry.name for entry in entries)}
    found = _numbers(operation, known, operation.workload.attrs, arrays)
    return {name: n for name, n in found.items() if isinstance(n, int)}


def _numbers(
    operation: Operation, sizes: Sizes, attrs: Attrs, arrays: Collection[str]
) -> dict[str, int | float]:
    """Return {name: number} of the numbers kernels may take. arrays: names of array arguments."""
    numbers: dict[str, int | float] = {
        name: value if isinstance(value, float) else int(value)
        for name, value in scalars(attrs).items()
        if isinstance(value, (int, float))
    }
    further = {n: t for n, t in operation.workload.aliases.items() if t not in arrays}
    return {
        **numbers,
        **_documented(operation, sizes),
        **{name: size_of(text, sizes) for name, text in further.items()},
    }


def scalars(attrs: Attrs) -> Attrs:
    """Return the attributes; an object, such as a Sampling, is replaced by its fields."""
    values: dict[str, object] = {}
    for name, value in attrs.items():
        values |= vars(value) if is_dataclass(value) else {name: value}
    return values


def _sizes(operation: Operation, given: Iterable[tuple[Entry, Any]], attrs: Attrs) -> Sizes:
    """Return {name: value} of the contract's axes, the attributes and the workload's other axes."""
    sizes: dict[str, Any] = {}
    for entry, value in given:
        entry.fits((value.K, value.N) if entry.kind in MATRICES else value.shape, sizes)
    sizes |= zip(operation.leading, sizes.get("...", ()), strict=False)
    sizes |= attrs
    operation.set_axes(sizes)
    return sizes


def _documented(operation: Operation, sizes: Sizes) -> Sizes:
    """Return {name: documented size}; {} for elementwise kernels, which take only a count."""
    required = (entry for entry in operation.contract.inputs if not entry.optional)
    if all(entry.axes == ("...",) for entry in required):
        return {}
    return {name: sizes[name] for name in operation.workload.sizes if name in sizes}
