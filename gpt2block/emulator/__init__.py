"""CUDA kernels on the CPU: the shipped sources, compiled by g++ with AddressSanitizer.

`run` launches one kernel on NumPy arrays; within `emulated()` all work for a GPU through CuPy runs
on the CPU. g++ is required to launch a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpt2block.cuda import replaced_by
from gpt2block.emulator.loader import (
    INSTALL,
    ORDERS,
    USUAL,
    Build,
    Checks,
    Order,
    ShimError,
    Source,
    check,
    compile_kernel_file,
    missing,
    run,
    unset_variables,
)

__all__ = [
    "INSTALL",
    "ORDERS",
    "Build",
    "Checks",
    "Order",
    "ShimError",
    "Source",
    "adopted",
    "check",
    "compile_kernel_file",
    "emulated",
    "missing",
    "run",
    "unset_variables",
]


@contextmanager
def emulated(
    order: Order = "forward", multiprocessors: int = 4, checks: Checks = USUAL
) -> Iterator[Any]:
    """Emulate a GPU on the CPU, in the whole process, until the context ends.

    order: the order of the threads of a block between two barriers, and of the blocks.
    multiprocessors: the number that the device reports, on which launches depend. checks: what
    every launch looks for. Yields the replacement of the cupy module, whose arrays every function
    of this package accepts.
    """
    from gpt2block.emulator import stand_in  # noqa: PLC0415  (it replaces CuPy only when used)

    with replaced_by(stand_in), stand_in.device(order, multiprocessors, checks):
        yield stand_in


def adopted(array: Any) -> Any:
    """A NumPy array on the emulated device, sharing its memory if it is C-contiguous."""
    from gpt2block.emulator import stand_in  # noqa: PLC0415

    return stand_in.adopt(array)
