"""CUDA kernels on the CPU: the shipped sources, compiled by g++ under AddressSanitizer.

`run` launches one kernel on NumPy arrays; within `emulated()` everything that runs on a GPU through
CuPy runs here instead. g++ is needed once a kernel is launched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpt2block.cuda import replaced_by
from gpt2block.emulator.loader import (
    ORDERS,
    Order,
    ShimError,
    Source,
    compile_kernel_file,
    missing,
    run,
)

__all__ = [
    "ORDERS",
    "Order",
    "ShimError",
    "Source",
    "adopted",
    "compile_kernel_file",
    "emulated",
    "missing",
    "run",
]


@contextmanager
def emulated(order: Order = "forward", multiprocessors: int = 4) -> Iterator[Any]:
    """The CPU in the place of the GPU, for the whole process, until the context ends.

    order: in which the threads of a block run between two barriers, and the blocks.
    multiprocessors: how many the device claims to have, which launches depend on. Gives the
    stand-in for the cupy module, whose arrays every function of this package takes.
    """
    from gpt2block.emulator import stand_in  # noqa: PLC0415  (it replaces CuPy only when used)

    with replaced_by(stand_in), stand_in.device(order, multiprocessors):
        yield stand_in


def adopted(array: Any) -> Any:
    """A NumPy array as memory of the emulated device: the same memory, where it is C-contiguous."""
    from gpt2block.emulator import stand_in  # noqa: PLC0415

    return stand_in.adopt(array)
