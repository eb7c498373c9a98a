"""Operations and variants (implementations), as the command line and tests read them.

A module of `gpt2block.ops` describes one operation, with the same name and signature as its
function in `gpt2block.reference`. Other modules find operations in `gpt2block.ops.registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from gpt2block import reference
from gpt2block.checks import nearest
from gpt2block.contract import MATRICES, Contract, Entry, size_of
from gpt2block.cuda import kernels, replaced
from gpt2block.cuda.arrays import ArrayArgs, Bound, arrays_of, mapped
from gpt2block.cuda.launch_lines import default_block, stated_launch
from gpt2block.cuda.requests import Launch
from gpt2block.errors import Argument, InputError, KernelError
from gpt2block.ops.call import Call, UncheckedCall, UnsupportedCall

Sizes = Mapping[str, int]  # sizes of one run by name: "B", "T", "C", "NH", "HS", "N" …
Attrs = Mapping[str, Any]
Case = tuple[Sizes, Attrs]  # sizes, and the attributes that differ from the documented attributes
Inputs = tuple[np.ndarray, ...]
Launches = Launch | tuple[Launch, ...]
Count = Callable[[Sizes], int]
Names = tuple[str, ...]
REQUIRED = object()  # marks an option without a default


@dataclass(frozen=True)
class Variant:
    """One implementation of an operation, by one or more kernels in launch order.

    `launch` returns the launches of a checked call, or raises UnsupportedCall. For a user's kernel,
    `launch` is its `bind`.
    """

    name: str
    file: str  # path in kernels_cu
    kernels: tuple[str, ...]
    launch: Callable[..., Any]
    blocks: tuple[int, ...] = ()  # supported block sizes; () if the block size is fixed
    block: int = 256  # default block size
    source: str = ""  # where the kernels come from, if not from Operation.document
    dtypes: tuple[str, ...] = ()  # supported dtypes; () if the variant supports all of them
    own: bool = False  # whether it is a user's kernel, which no public function calls

    @property
    def idea(self) -> str:
        """The kernels' summaries in one line, from the file's head comment. Raises KernelError."""
        if self.own:
            return "your kernel"
        ideas = [kernels.idea_of(self.file, kernel, self.name) for kernel in self.kernels]
        return "; ".join(dict.fromkeys(ideas))

    def described(self) -> dict[str, object]:
        """Return a dict of the fields without functions, to describe a built-in variant."""
        names = ("name", "file", "kernels", "idea", "blocks", "block", "source", "dtypes")
        return {name: getattr(self, name) for name in names}


def variant(
    name: str, file: str, *kernels: str, **fields: Any
) -> Callable[[Callable[[Call], Launches]], Variant]:
    """Decorator that turns a function that returns launches into a Variant."""

    def decorate(launch: Callable[[Call], Launches]) -> Variant:
        return Variant(name, file, kernels, launch, **fields)

    return decorate


Arguments = Callable[[Call], tuple[object, ...]]


def as_stated(
    name: str,
    file: str,
    kernel: str,
    args: Arguments,
    defines: Callable[[Call], kernels.Defines] = lambda c: (),
    **fields: Any,
) -> Variant:
    """Return a variant of a kernel whose file states the launch in a `// launch:` comment.

    args, defines: functions that return the kernel's arguments and macros for a call.
    """

    def launch(c: Call) -> Launch:
        threads = c.block if "blocks" in fields else None
        return stated_launch(file, kernel, args(c), vars(c), threads, defines(c))

    return Variant(name, file, (kernel,), launch, block=default_block(file, kernel), **fields)


@dataclass(frozen=True, eq=False)
class Workload:
    """How an operation's inputs are generated, and how the operation is measured and checked.

    An operation that can be measured alone has documented sizes, `sizes`. `draw` returns float32
    inputs of given sizes and attributes; by default they follow from the contract. `attrs` are
    keyword arguments of the operation and of its reference function. `traffic` counts the bytes
    that must be transferred from and to device memory, `flops` the floating-point operations. The
    sizes passed to `traffic` include "itemsize" and "weight", the bytes of an activation and of a
    weight. `axes` expresses axes of the contract by documented sizes and attributes if their
    letters differ; by default, "..." stands for the documented sizes that are no axes of the
    required inputs. `small` lists sizes for checks that are not multiples of blocks and vectors,
    each with the attributes that differ from `attrs`.

    A user's kernel (`gpt2block.judge`) has the arguments of the contract. `arrays` maps names in
    the contract to other names in the kernels; users may use both. `aliases` are additional names
    of an array, or of a number computed from sizes and attributes. `further` computes the exact
    values of optional outputs from the inputs in float64 and the attributes.
    """

    document: str = "gpt2block"  # project or document that the operation and its kernels come from
    idea: str = ""  # formula in one line
    sizes: Sizes = field(default_factory=dict)
    draw: Callable[[Sizes, np.random.Generator], Inputs] | None = None
    mean: float = 0.5  # mean of the default inputs that are no matrices
    below: Mapping[str, str] = field(default_factory=dict)  # integer inputs → size of their range
    optional: Names = ()  # optional inputs that are drawn by default, too
    traffic: Count = lambda sizes: 0
    flops: Count = lambda sizes: 0
    bound: str = "memory"  # hardware limit of the speed: "memory", "compute", or "either"
    attrs: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("float32",)  # supported dtypes of the arrays; the first by default
    matrices: tuple[int, ...] = ()  # indices of inputs that are weights (K, N), and can be FP8
    layout: str = "KN"  # default layout of the weights
    series: tuple[str, int] | None = None  # (size to measure at powers of two, its maximum)
    axes: Mapping[str, str] = field(default_factory=dict)
    small: tuple[Mapping[str, Any], ...] = ()
    arrays: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    further: Callable[..., Inputs] | None = None


@dataclass(frozen=True, eq=False)
class Operation:
    """Description of an operation of `gpt2block.ops` and `gpt2block.reference`.

    `bind` checks arguments and chooses one of `variants`. `options` maps its keyword arguments to
    their defaults, or to `REQUIRED`. `prepare` checks a call, by default with the contract alone.
    `prepare` may choose another contract, raise errors that contracts cannot express, add values
    that launches need, and name the preferred variants. If another operation binds the call,
    `prepare` returns a `Bound`. `parts` are kernels that `prepare` or a variant selects and that
    are not variants. `steps` are operations with other arguments that are listed in this
    operation's table.
    """

    name: str
    variants: tuple[Variant, ...]
    options: Mapping[str, object] = field(default_factory=dict)
    prepare: Callable[[UncheckedCall], Call | Bound] = UncheckedCall.checked
    parts: tuple[Variant, ...] = ()
    steps: tuple[Operation, ...] = ()
    line: str = ""  # text of the contract, for an operation without function in the reference
    workload: Workload = field(default_factory=Workload)

    def bind(self, inputs: ArrayArgs, out: object = None, **options: object) -> Bound:
        """Check the arrays and options of a call. Return a Bound, which can `run` many times.

        inputs, out: CuPy arrays, or NumPy arrays, for which the kernels run on the CPU (see
        `gpt2block.emulator`); WeightMatrix or HiLoMatrix if the operation accepts them. Raises
        InputError.
        """
        arrays = (array for value in inputs for array in arrays_of("", value).values())
        if replaced() or not any(isinstance(array, np.ndarray) for array in arrays):
            return self.bind_on_device(inputs, out, **options)
        from gpt2block import emulator  # noqa: PLC0415  (needed for host arrays alone)

        with emulator.emulated():
            inputs = tuple(mapped(emulator.adopted, value) for value in inputs)
            options = {name: emulator.adopted(value) for name, value in options.items()}
            return self.bind_on_device(inputs, mapped(emulator.adopted, out), **options)

    def bind_on_device(self, inputs: ArrayArgs, out: object = None, **options: object) -> Bound:
        """Do the same as `bind`, but accept CuPy arrays only."""
        for name in options.keys() - self.options.keys():
            raise TypeError(f"{self.name}: unexpected keyword argument {name!r}")
        options = {**self.options, **options}
        for name, value in options.items():
            if value is REQUIRED:
                raise TypeError(f"{self.name}: missing keyword argument {name!r}")
        call = self.prepare(UncheckedCall(self.contract, inputs, out, options, self.options))
        return self.bound_to(call) if isinstance(call, Call) else call

    def make(self, sizes: Sizes, rng: np.random.Generator) -> Inputs:
        """Return random inputs of these sizes, by default normal numbers with `Workload.mean`.

        The entries of a matrix have mean 0, and standard deviation 1 / sqrt(K).
        """
        if not self.workload.sizes:
            raise KernelError("an operation without documented sizes is not run alone")
        if self.workload.draw is not None:
            return self.workload.draw({**self.workload.attrs, **sizes}, rng)
        known: dict[str, object] = {**self.workload.attrs, **sizes}
        self.set_axes(known)
        known["..."] = tuple(sizes[name] for name in self.leading)

        def drawn(entry: Entry) -> Any:
            shape = entry.shape(known)
            if entry.name in self.workload.below:
                return rng.integers(sizes[self.workload.below[entry.name]], size=shape, dtype="i4")
            normal = rng.standard_normal(shape, dtype=np.float32)
            if entry.kind in MATRICES:
                return normal / np.float32(shape[0] ** 0.5)
            return normal + np.float32(self.workload.mean)

        of = self.workload.optional
        given = (each for each in self.contract.inputs if not each.optional or each.name in of)
        return tuple(map(drawn, given))

    def set_axes(self, known: dict[str, object]) -> None:
        """Add the axes of the contract that sizes and attributes in `known` determine."""
        for axis, text in self.workload.axes.items():
            if axis != "..." and axis not in known:
                known[axis] = size_of(text, known)

    def with_workload(self, **changes: Any) -> Operation:
        """Return a copy whose workload differs in the given fields."""
        return replace(self, workload=replace(self.workload, **changes))

    @property
    def leading(self) -> Names:
        """The names of the documented sizes that the contract's axes `...` stand for."""
        if "..." in self.workload.axes:
            return tuple(self.workload.axes["..."].split())
        required = (entry for entry in self.contract.inputs if not entry.optional)
        letters = {axis for entry in required for axis in entry.axes}
        return tuple(name for name in self.workload.sizes if name not in letters)

    @property
    def cases(self) -> tuple[Case, ...]:
        """The cases in `Workload.small`, each as a pair (sizes, attributes)."""
        return tuple(
            (
                {name: size for name, size in each.items() if name in self.workload.sizes},
                {name: value for name, value in each.items() if name not in self.workload.sizes},
            )
            for each in self.workload.small
        )

    @property
    def table(self) -> tuple[Variant, ...]:
        """All kernels of the operation and of its steps: their variants and parts."""
        in_steps = (each for step in self.steps for each in (*step.variants, *step.parts))
        return tuple(dict.fromkeys((*self.variants, *self.parts, *in_steps)))

    @property
    def auxiliary(self) -> tuple[Variant, ...]:
        """Kernels in `table` that are not variants of the operation and do not run on their own."""
        return self.table[len(self.variants) :]

    @cached_property
    def contract(self) -> Contract:
        """The contract parsed from `line`, or else of the reference function of the same name."""
        if self.line:
            return Contract.parse(self.line)
        return reference.CONTRACTS[self.name]

    def variant(self, name: str | int) -> Variant:
        """Return a variant by name. Raises InputError, which lists the known names."""
        for variant in self.variants:
            if variant.name == str(name):
                return variant
        known = ", ".join(variant.name for variant in self.variants)
        problem: tuple[object, ...] = "unknown ", Argument("variant"), f" {name!r}"
        if any(kernel.name == name for kernel in self.auxiliary):
            problem = Argument("variant"), f" {name!r} does not run by itself"
        hint = nearest(name, (variant.name for variant in self.variants))
        raise InputError(f"{self.name}: ", *problem, f": expected one of {known}{hint}")

    def bound_to(self, call: Call) -> Bound:
        """Return a call's launches by variant `call.variant` or, for None, by the first supported.

        If the call has an option `block`, `call.block` becomes the variant's block size, and
        `call.requested` whether the caller chose it. Raises InputError with the reason if no
        variant supports the call.
        """
        options = vars(call)
        name = options.get("variant")
        candidates = call.order or tuple(reversed(self.variants))
        if name is not None:
            candidates = (self.variant(name),)
        requested, why = options.get("block"), ""
        for candidate in candidates:
            chosen = self.variant(candidate) if isinstance(candidate, str) else candidate
            if "block" in options:
                wanted = requested if chosen.blocks else None
                call.block = check_block(self.name, chosen, wanted)
                call.requested = requested is not None
            try:
                launches = chosen.launch(call)
            except UnsupportedCall as problem:
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
    """Return the block size of a launch. Raises InputError, which lists the supported sizes."""
    if block is None:
        return variant.block
    if block not in (variant.blocks or (variant.block,)):
        known = ", ".join(map(str, variant.blocks or (variant.block,)))
        raise InputError(
            f"{operation} variant {variant.name}: block size {block}: expected one of {known}"
        )
    return block
