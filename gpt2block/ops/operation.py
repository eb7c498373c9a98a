"""What an operation and its kernels are, for the command, the tests, the bench and the docs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt2block.cuda.kernels import Defines
from gpt2block.errors import InputError

Sizes = Mapping[str, int]  # "B", "T", "C", "NH", "HS", "N" … of one run
Inputs = tuple[NDArray[Any], ...]
Count = Callable[[Sizes], int]


@dataclass(frozen=True)
class Variant:
    """One way to compute an operation: its kernels, in launch order, and what is new about it."""

    name: str
    file: str  # in kernels_cu
    kernels: tuple[str, ...]
    idea: str  # one line
    blocks: tuple[int, ...] = ()  # block sizes it can be run with; () when there is one only
    block: int = 256  # the one it takes when none is asked for
    source: str = ""  # where it comes from, if not from the operation's document
    dtypes: tuple[str, ...] = ()  # of the operation's, those it takes; () for all


class Geometry(NamedTuple):
    """How a kernel is launched."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int = 0  # bytes of dynamic shared memory
    defines: Defines = ()


@dataclass(frozen=True)
class Operation:
    """An operation by its name in `gpt2block.ops` and `gpt2block.reference`.

    `make(sizes, rng)` gives float32 inputs; `attrs` are keyword arguments of both functions;
    `traffic` counts the bytes that have to move through device memory, `flops` the arithmetic.
    `traffic` finds among its sizes "itemsize" and "weight" too, the bytes of an element of an
    activation and of a weight.
    """

    name: str
    document: str  # where it comes from
    idea: str  # the formula in one line
    sizes: Sizes  # the documented ones
    variants: tuple[Variant, ...]
    make: Callable[[Sizes, np.random.Generator], Inputs]
    traffic: Count
    flops: Count
    bound: str  # "memory" or "compute": what a figure is compared with; "either" by the sizes
    attrs: Mapping[str, Any]
    beside: tuple[Variant, ...] = ()  # kernels of the operation that are no rung of the ladder
    dtypes: tuple[str, ...] = ("float32",)  # that the arrays can have; the first by default
    matrices: tuple[int, ...] = ()  # inputs that are weights (K, N), which alone can be FP8
    layout: str = "KN"  # of those in memory, as documented
    series: tuple[str, int] | None = None  # a size that is run from 1 to this power of two

    def variant(self, name: str | int) -> Variant:
        """A variant by name; InputError lists the known ones."""
        for variant in self.variants:
            if variant.name == str(name):
                return variant
        known = ", ".join(variant.name for variant in self.variants)
        raise InputError(f"{self.name}: unknown variant {name!r}: expected one of {known}")


def check_block(operation: str, variant: Variant, block: int | None) -> int:
    """The block size to launch with; InputError lists those the variant takes."""
    if block is None:
        return variant.block
    if block not in (variant.blocks or (variant.block,)):
        known = ", ".join(map(str, variant.blocks or (variant.block,)))
        raise InputError(
            f"{operation} variant {variant.name}: block size {block}: expected one of {known}"
        )
    return block
