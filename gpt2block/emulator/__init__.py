"""Run CUDA kernels on the CPU: the shipped sources, compiled by g++ with AddressSanitizer.

`run` launches one kernel on NumPy arrays. Within `emulated()`, all code that uses a GPU through
CuPy runs on the CPU. A launch needs g++.
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
    OverBudget,
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
    "OverBudget",
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
    multiprocessors: the number of multiprocessors that the device reports, on which launches
    depend. checks: the errors that every launch searches for. Yields the replacement of the cupy
    module, whose arrays every function of this package accepts.
    """
    from gpt2block.emulator import stand_in  # noqa: PLC0415  (replaces CuPy only if it is used)

    with replaced_by(stand_in), stand_in.device(order, multiprocessors, checks):
        yield stand_in


def adopted(array: Any) -> Any:
    """Return a NumPy array as an emulated device array; a C-contiguous array is not copied."""
    from gpt2block.emulator import stand_in  # noqa: PLC0415

    return stand_in.adopt(array)
