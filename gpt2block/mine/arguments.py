"""The arguments that each operation's kernels are given, by the names in their prototypes.

A kernel of the user's takes any of them, in any order. Names, shapes and dtypes follow from the
operation's contract; other names of the built-in kernels are known, too (`Operation.arrays` and
`Operation.aliases`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from gpt2block.contract import MATRICES, Entry, size_of
from gpt2block.cuda.arrays import Shape
from gpt2block.errors import InputError
from gpt2block.mine.templates import names
from gpt2block.ops.call import FIXED
from gpt2block.ops.operation import Attrs, Operation, Sizes


class Output(NamedTuple):
    shape: Shape
    dtype: str


class Values(NamedTuple):
    """The arguments of one call. An output that is an input, too, is computed in place."""

    inputs: Mapping[str, Any]  # name → array
    outputs: Mapping[str, Output]  # the result first
    numbers: Mapping[str, int | float]
    aliases: Mapping[str, str]  # another name of an array → name

    @property
    def sizes(self) -> dict[str, int]:
        """What the expressions of a launch line may use."""
        return {name: n for name, n in self.numbers.items() if isinstance(n, int)}


def check_known(operation: Operation) -> None:
    """InputError for an operation whose kernels need more than arrays and numbers."""
    known = names()
    if operation.name not in known:
        raise InputError(
            f"{operation.name} takes no kernel of your own: expected one of {', '.join(known)}"
        )


def values(operation: Operation, inputs: tuple[Any, ...], attrs: Attrs) -> Values:
    """The arguments for inputs as `Operation.make` gives them; raises InputError."""
    check_known(operation)
    contract = operation.contract
    given = tuple(zip(contract.inputs, inputs, strict=False))
    outputs = [each for each in contract.outputs if operation.further or not each.optional]
    called = {each.name: each.name for each in (*contract.inputs, *outputs)}
    called.update(operation.arrays)
    sizes = _sizes(operation, given, attrs)
    stored = str(inputs[0].dtype.name)
    aliases = dict(operation.arrays)
    aliases |= {name: called[text] for name, text in operation.aliases.items() if text in called}
    return Values(
        {called[e.name]: value.data if e.kind in MATRICES else value for e, value in given},
        {called[e.name]: Output(e.shape(sizes), FIXED.get(e.kind, stored)) for e in outputs},
        _numbers(operation, sizes, attrs, called),
        aliases,
    )


def sizes_at(operation: Operation, sizes: Sizes) -> dict[str, int]:
    """`Values.sizes` of inputs of these documented sizes, which need not exist."""
    known = {**operation.attrs, **sizes}
    for axis, text in operation.axes.items():
        if axis != "...":
            known.setdefault(axis, size_of(text, known))
    entries = (*operation.contract.inputs, *operation.contract.outputs)
    arrays = {*operation.arrays, *(entry.name for entry in entries)}
    found = _numbers(operation, known, operation.attrs, arrays)
    return {name: n for name, n in found.items() if isinstance(n, int)}


def _numbers(
    operation: Operation, sizes: Sizes, attrs: Attrs, arrays: Collection[str]
) -> dict[str, int | float]:
    """The numbers that kernels take, from all sizes by name. arrays: the names of the arrays."""
    numbers: dict[str, int | float] = {
        name: value if isinstance(value, float) else int(value)
        for name, value in attrs.items()
        if isinstance(value, (int, float))
    }
    further = {n: t for n, t in operation.aliases.items() if t not in arrays}
    return {
        **numbers,
        **_documented(operation, sizes),
        **{name: size_of(text, sizes) for name, text in further.items()},
    }


def _sizes(operation: Operation, given: Iterable[tuple[Entry, Any]], attrs: Attrs) -> Sizes:
    """Letters of the contract, documented sizes and attributes, by name."""
    sizes: dict[str, Any] = {}
    for entry, value in given:
        entry.fits((value.K, value.N) if entry.kind in MATRICES else value.shape, sizes)
    sizes |= zip(operation.leading, sizes.get("...", ()), strict=False)
    sizes |= attrs
    for axis, text in operation.axes.items():
        if axis not in sizes:
            sizes[axis] = size_of(text, sizes)
    return sizes


def _documented(operation: Operation, sizes: Sizes) -> Sizes:
    """The documented sizes, but not those of elementwise kernels, which know a number alone."""
    required = (entry for entry in operation.contract.inputs if not entry.optional)
    if all(entry.axes == ("...",) for entry in required):
        return {}
    return {name: sizes[name] for name in operation.sizes if name in sizes}
