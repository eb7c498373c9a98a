"""Operations and their kernels, as plans, the command line, tests, bench and docs use them.

A module of `gpt2block.ops` describes one operation, with the same name and signature as its
function in `gpt2block.reference`. Other modules find it in `gpt2block.ops.registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block.checks import meant
from gpt2block.cuda import replaced
from gpt2block.cuda.arrays import Bound
from gpt2block.errors import InputError, KernelError
from gpt2block.weights.matrix import WeightMatrix
from gpt2block.weights.two_part import TwoPartMatrix

Sizes = Mapping[str, int]  # "B", "T", "C", "NH", "HS", "N" … of one run
Inputs = tuple[NDArray[Any], ...]
Count = Callable[[Sizes], int]
Shape = tuple[int, ...]
Names = tuple[str, ...]


def _never(job: Any) -> str | None:
    """No problem: the variant supports all jobs of its operation, on any device."""
    return None


def _no_launch(job: Any) -> Any:
    """The `launch` of auxiliary kernels, which no `bind` chooses."""
    raise KernelError("an auxiliary kernel is not launched by itself: call the public function")


@dataclass(frozen=True)
class Variant:
    """One implementation of an operation: its kernels, in launch order, and its main idea.

    `launch` makes the launches for a job, the checked arguments of the operation's `bind`.
    `problem` returns why the variant cannot compute a job on the current device (dtype, size,
    alignment or compute capability), or None if it can.
    """

    name: str
    file: str  # in kernels_cu
    kernels: tuple[str, ...]
    idea: str  # one line
    blocks: tuple[int, ...] = ()  # supported block sizes; () for a fixed one
    block: int = 256  # the default block size
    source: str = ""  # of the kernels, if not the operation's document
    dtypes: tuple[str, ...] = ()  # those of the operation that it supports; () for all
    own: bool = False  # a user's kernel, which no public function calls
    launch: Callable[..., Any] = _no_launch
    problem: Callable[[Any], str | None] = _never

    def described(self) -> dict[str, Any]:
        """Everything but the functions, for a report on built-in variants."""
        found = {name: value for name, value in vars(self).items() if not callable(value)}
        del found["own"]
        return found


def like_first(first: Shape, *_: Shape | None, **attrs: Any) -> Shape:
    """The shape of a result that has the shape of its first input."""
    return first


@dataclass(frozen=True)
class Operation:
    """An operation by its name in `gpt2block.ops` and `gpt2block.reference`.

    `make(sizes, rng)` gives float32 inputs; `attrs` are keyword arguments of both functions;
    `traffic` counts the bytes that must be transferred from and to device memory, `flops` the
    floating-point operations. The sizes passed to `traffic` include "itemsize" and "weight", the
    bytes of an element of an activation and of a weight.

    For plans: `shape` is the shape of the result, from those of the inputs and the step's
    attributes. `largest` is an
    upper bound of the result's magnitude, from that of the first input (None: unknown), the weights
    by name and the inputs' names; None if unknown. `check_limits` raises InputError for input
    shapes that the float32 kernels do not support.
    """

    name: str
    document: str  # the source of the operation and its kernels
    idea: str  # the formula in one line
    sizes: Sizes  # the documented ones
    variants: tuple[Variant, ...]
    make: Callable[[Sizes, np.random.Generator], Inputs]
    traffic: Count
    flops: Count
    bound: str  # by "memory" or "compute", the ceiling of figures; "either" by the sizes
    attrs: Mapping[str, Any]
    binder: Callable[..., Bound]
    shape: Callable[..., Shape] = like_first
    largest: Callable[[float | None, Mapping[str, Any], Names], float | None] | None = None
    check_limits: Callable[..., None] | None = None
    auxiliary: tuple[Variant, ...] = ()  # kernels of the operation that are not variants
    dtypes: tuple[str, ...] = ("float32",)  # that the arrays can have; the first by default
    matrices: tuple[int, ...] = ()  # inputs that are weights (K, N), which alone can be FP8
    layout: str = "KN"  # default layout of the weights
    series: tuple[str, int] | None = None  # a size that is run from 1 to this power of two

    def bind(self, inputs: tuple[Any, ...], out: Any = None, **options: Any) -> Bound:
        """Check the arrays and options once; the result can `run` many times.

        inputs, out: CuPy arrays, or NumPy arrays, for which the kernels run on the CPU (see
        `gpt2block.emulator`); matrices as WeightMatrix or TwoPartMatrix where the operation accepts
        them. Raises InputError.
        """
        if replaced() or not any(isinstance(each, np.ndarray) for each in map(_data, inputs)):
            return self.binder(inputs, out, **options)
        from gpt2block import emulator  # noqa: PLC0415  (needed for host arrays alone)

        def adopted(value: Any) -> Any:
            return emulator.adopted(value) if isinstance(value, np.ndarray) else value

        with emulator.emulated():
            arrays = tuple(_mapped(value, adopted) for value in inputs)
            options = {name: adopted(value) for name, value in options.items()}
            return self.binder(arrays, _mapped(out, adopted), **options)

    def variant(self, name: str | int) -> Variant:
        """A variant by name; InputError lists the known ones."""
        for variant in self.variants:
            if variant.name == str(name):
                return variant
        known = ", ".join(variant.name for variant in self.variants)
        problem = f"unknown variant {name!r}"
        if any(kernel.name == name for kernel in self.auxiliary):
            problem = f"variant {name!r} does not run by itself"
        hint = meant(name, (variant.name for variant in self.variants))
        raise InputError(f"{self.name}: {problem}: expected one of {known}{hint}")

    def choose(self, job: Any, name: str | int | None, order: tuple[str, ...] = ()) -> Variant:
        """The variant of that name, or the first one without a problem; InputError with the reason.

        order: names of variants, the preferred one first, where `name` is None; by default all,
        the last one first.
        """
        if name is not None:
            variant = self.variant(name)
            problem = variant.problem(job)
            if problem:
                raise InputError(f"{self.name} variant {variant.name}: {problem}")
            return variant
        names = order or tuple(variant.name for variant in reversed(self.variants))
        for candidate in map(self.variant, names):
            problem = candidate.problem(job)
            if problem is None:
                return candidate
        raise InputError(f"{self.name}: {problem}")


def _data(value: Any) -> Any:
    """The array of an input."""
    value = value.parts if isinstance(value, TwoPartMatrix) else value
    return value.data if isinstance(value, WeightMatrix) else value


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """An input with a function applied to each of its arrays."""
    if isinstance(value, TwoPartMatrix):
        return replace(value, parts=function(value.parts), scale=function(value.scale))
    if isinstance(value, WeightMatrix):
        return replace(value, data=function(value.data), scale=function(value.scale))
    return function(value)


def largest_product(a: float | None, weights: Mapping[str, Any], names: Names) -> float | None:
    """An upper bound of the magnitudes of a product without a residual; GELU increases none."""
    _, w, bias, residual = (*names, "", "")[:4]
    if a is None or residual:
        return None
    sums = np.abs(weights[w]).sum(axis=0, dtype=np.float64)
    return a * float(sums.max()) + (float(np.abs(weights[bias]).max()) if bias else 0.0)


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
