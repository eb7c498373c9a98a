"""Operations and their kernels, as plans, the command line, tests, bench and docs use them.

A module of `gpt2block.ops` describes one operation, with the same name and signature as its
function in `gpt2block.reference`. Other modules find it in `gpt2block.ops.registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.checks import meant
from gpt2block.contract import Contract, size_of
from gpt2block.cuda import replaced
from gpt2block.cuda.arrays import Bound, arrays_of, mapped
from gpt2block.cuda.kernels import idea_of
from gpt2block.errors import Argument, InputError, KernelError
from gpt2block.ops.call import Asked, Call

Sizes = Mapping[str, int]  # "B", "T", "C", "NH", "HS", "N" … of one run
Attrs = Mapping[str, Any]
Case = tuple[Sizes, Attrs]  # sizes, and attributes that differ from the documented ones
Inputs = tuple[NDArray[Any], ...]
Count = Callable[[Sizes], int]
Names = tuple[str, ...]
REQUIRED: Any = object()  # in the place of an option's default: there is none


class Unfit(Exception):  # noqa: N818  (a reason to take another variant)
    """Why a variant cannot compute a call: dtypes, sizes, alignment or compute capability."""


@dataclass(frozen=True)
class Variant:
    """One implementation of an operation: its kernels, in launch order.

    `launch` returns the launches of a checked call, or raises Unfit; that of a user's kernel is its
    `bind`.
    """

    name: str
    file: str  # in kernels_cu
    kernels: tuple[str, ...]
    launch: Callable[..., Any]
    blocks: tuple[int, ...] = ()  # supported block sizes; () for a fixed one
    block: int = 256  # the default block size
    source: str = ""  # of the kernels, if not the operation's document
    dtypes: tuple[str, ...] = ()  # those of the operation that it supports; () for all
    own: bool = False  # a user's kernel, which no public function calls

    @property
    def idea(self) -> str:
        """The ideas of its kernels in one line, from the head of its file. Raises KernelError."""
        if self.own:
            return "your kernel"
        found = [idea_of(self.file, kernel, self.name) for kernel in self.kernels]
        return "; ".join(dict.fromkeys(found))

    def described(self) -> dict[str, Any]:
        """Everything but the functions, for a report on built-in variants."""
        names = ("name", "file", "kernels", "idea", "blocks", "block", "source", "dtypes")
        return {name: getattr(self, name) for name in names}


def variant(
    name: str, file: str, *kernels: str, **fields: Any
) -> Callable[[Callable[[Call], Any]], Variant]:
    """Decorator: the variant whose launches a function returns."""

    def made(launch: Callable[[Call], Any]) -> Variant:
        return Variant(name, file, kernels, launch, **fields)

    return made


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation by its name in `gpt2block.ops` and `gpt2block.reference`.

    `bind` checks arguments and chooses one of `variants`. `options` are its keyword arguments with
    their defaults, or `REQUIRED`. `prepare` checks a call, by default by the contract alone: it may
    choose another contract, refuses what contracts cannot state, and adds what launches need and
    which variants are preferred. Where another operation binds the call, it returns a `Bound`.
    `parts` are kernels that `prepare` or a variant chooses, and that have no variant's name.
    `steps` are operations with other arguments, whose variants are in this one's table.

    An operation that can be measured alone has `sizes`, the documented ones: `make(sizes, rng)`
    gives float32 inputs, by `draw` or by the contract; `attrs` are keyword arguments of both
    functions; `traffic` counts the bytes that must be transferred from and to device memory,
    `flops` the floating-point operations. The sizes passed to `traffic` include "itemsize" and
    "weight", the bytes of an element of an activation and of a weight. `axes` states axes of the
    contract by documented sizes and attributes, where their letters differ; "..." are by default
    the documented sizes that are no letters of the required inputs. `small` are sizes to check
    with, each with attributes that differ: odd ones, which no block and no vector divides.

    A kernel of the user's (`gpt2block.mine`) has the arguments of the contract. `arrays` are those
    with other names in the kernels; both names are known. `aliases` are further names: of an array,
    or of a number that follows from sizes and attributes. `further` gives the exact values of
    optional outputs, from the inputs in float64 and the attributes.
    """

    name: str
    variants: tuple[Variant, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Asked], Call | Bound] = Asked.checked
    parts: tuple[Variant, ...] = ()
    steps: tuple[Operation, ...] = ()
    document: str = "gpt2block"  # the source of the operation and its kernels
    idea: str = ""  # the formula in one line
    sizes: Sizes = field(default_factory=dict)
    draw: Callable[[Sizes, np.random.Generator], Inputs] | None = None
    traffic: Count = lambda sizes: 0
    flops: Count = lambda sizes: 0
    bound: str = "memory"  # by "memory" or "compute", the ceiling of figures; "either" by the sizes
    attrs: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("float32",)  # that the arrays can have; the first by default
    matrices: tuple[int, ...] = ()  # inputs that are weights (K, N), which alone can be FP8
    layout: str = "KN"  # default layout of the weights
    series: tuple[str, int] | None = None  # a size that is run from 1 to this power of two
    axes: Mapping[str, str] = field(default_factory=dict)
    small: tuple[Mapping[str, int], ...] = ()
    arrays: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    further: Callable[..., tuple[Any, ...]] | None = None
    line: str = ""  # the contract, where the reference has no function of this name

    def bind(self, inputs: tuple[Any, ...], out: Any = None, **options: Any) -> Bound:
        """Check the arrays and options once; the result can `run` many times.

        inputs, out: CuPy arrays, or NumPy arrays, for which the kernels run on the CPU (see
        `gpt2block.emulator`); matrices as WeightMatrix or TwoPartMatrix where the operation accepts
        them. Raises InputError.
        """
        arrays = (array for value in inputs for array in arrays_of("", value).values())
        if replaced() or not any(isinstance(array, np.ndarray) for array in arrays):
            return self.bind_on_device(inputs, out, **options)
        from gpt2block import emulator  # noqa: PLC0415  (needed for host arrays alone)

        def adopted(value: Any) -> Any:
            return emulator.adopted(value) if isinstance(value, np.ndarray) else value

        with emulator.emulated():
            given = tuple(mapped(adopted, value) for value in inputs)
            options = {name: adopted(value) for name, value in options.items()}
            return self.bind_on_device(given, mapped(adopted, out), **options)

    def bind_on_device(self, inputs: tuple[Any, ...], out: Any = None, **options: Any) -> Bound:
        """`bind` of CuPy arrays only, as public functions take them."""
        for name in options.keys() - self.options.keys():
            raise TypeError(f"{self.name}: unexpected keyword argument {name!r}")
        options = {**self.options, **options}
        for name, value in options.items():
            if value is REQUIRED:
                raise TypeError(f"{self.name}: missing keyword argument {name!r}")
        made = self.prepare(Asked(self.contract, inputs, out, options, self.options))
        return self.bound_to(made) if isinstance(made, Call) else made

    def make(self, sizes: Sizes, rng: np.random.Generator) -> Inputs:
        """Random inputs of these sizes, by default standard normal numbers plus 0.5."""
        if not self.sizes:
            raise KernelError("an operation without documented sizes is not run alone")
        if self.draw is not None:
            return self.draw(sizes, rng)
        known: dict[str, Any] = {**self.attrs, **sizes}
        for axis, text in self.axes.items():
            if axis != "...":
                known[axis] = size_of(text, known)
        known["..."] = tuple(sizes[name] for name in self.leading)
        shapes = (entry.shape(known) for entry in self.contract.inputs if not entry.optional)
        return tuple(rng.standard_normal(s, dtype=np.float32) + np.float32(0.5) for s in shapes)

    @property
    def leading(self) -> Names:
        """The documented sizes that are the axes `...` of the contract."""
        if "..." in self.axes:
            return tuple(self.axes["..."].split())
        required = (entry for entry in self.contract.inputs if not entry.optional)
        letters = {axis for entry in required for axis in entry.axes}
        return tuple(name for name in self.sizes if name not in letters)

    @property
    def cases(self) -> tuple[Case, ...]:
        """`small`, with the attributes apart from the sizes."""
        return tuple(
            (
                {name: size for name, size in each.items() if name in self.sizes},
                {name: value for name, value in each.items() if name not in self.sizes},
            )
            for each in self.small
        )

    @property
    def table(self) -> tuple[Variant, ...]:
        """The variants, and all other kernels that belong to the operation."""
        of_steps = (variant for step in self.steps for variant in step.variants)
        return tuple(dict.fromkeys((*self.variants, *self.parts, *of_steps)))

    @property
    def auxiliary(self) -> tuple[Variant, ...]:
        """The table without the variants: what does not run by itself."""
        return self.table[len(self.variants) :]

    @cached_property
    def contract(self) -> Contract:
        """That of the function of the same name in the reference, or of `line`."""
        if self.line:
            return Contract.parse(self.line)
        return reference.CONTRACTS[self.name]

    def variant(self, name: str | int) -> Variant:
        """A variant by name; InputError lists the known ones."""
        for variant in self.variants:
            if variant.name == str(name):
                return variant
        known = ", ".join(variant.name for variant in self.variants)
        problem: tuple[object, ...] = "unknown ", Argument("variant"), f" {name!r}"
        if any(kernel.name == name for kernel in self.auxiliary):
            problem = Argument("variant"), f" {name!r} does not run by itself"
        hint = meant(name, (variant.name for variant in self.variants))
        raise InputError(f"{self.name}: ", *problem, f": expected one of {known}{hint}")

    def bound_to(self, call: Call) -> Bound:
        """The launches of a call by its option `variant`, or else by the first one that fits.

        A call with the option `block` gets the block size of the variant in its place, and whether
        it was `requested`. Raises InputError with the reason if no variant fits.
        """
        given = vars(call)
        name = given.get("variant")
        candidates = call.order or tuple(reversed(self.variants))
        if name is not None:
            candidates = (self.variant(name),)
        requested, why = given.get("block"), ""
        for candidate in candidates:
            chosen = self.variant(candidate) if isinstance(candidate, str) else candidate
            if "block" in given:
                wanted = requested if chosen.blocks else None
                call.block = check_block(self.name, chosen, wanted)
                call.requested = requested is not None
            try:
                launches = chosen.launch(call)
            except Unfit as problem:
                why = f" variant {chosen.name}: {problem}" if name is not None else f": {problem}"
                continue
            if requested is not None:
                check_block(self.name, chosen, requested)
            launches = launches if isinstance(launches, tuple) else (launches,)
            launches = (*call.before, *launches, *call.after)
            out, *further = (getattr(call, entry.name) for entry in call.contract.outputs)
            others = (array for array in further if array is not None)
            return Bound(out, launches, (*others, *call.kept))
        raise InputError(self.name + why)


def check_block(operation: str, variant: Variant, block: int | None) -> int:
    """The block size to launch with; InputError lists those that the variant supports."""
    if block is None:
        return variant.block
    if block not in (variant.blocks or (variant.block,)):
        known = ", ".join(map(str, variant.blocks or (variant.block,)))
        raise InputError(
            f"{operation} variant {variant.name}: block size {block}: expected one of {known}"
        )
    return block
