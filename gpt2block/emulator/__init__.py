"""CUDA kernels on the CPU: the shipped sources, compiled by g++ under AddressSanitizer.

`run` launches one kernel on NumPy arrays; within `emulated()` everything that runs on a GPU through
CuPy runs here instead. g++ is needed once a kernel is launched.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from gpt2block.cuda import replaced_by
from gpt2block.emulator.loader import ORDERS, ShimError, Source, compile_kernel_file, missing, run

__all__ = [
    "ORDERS",
    "ShimError",
    "Source",
    "adopted",
    "compile_kernel_file",
    "emulated",
    "missing",
    "run",
]


def emulated() -> AbstractContextManager[None]:
    """The CPU in the place of the GPU, for the whole process, until the context ends."""
    from gpt2block.emulator import stand_in  # noqa: PLC0415  (it replaces CuPy only when used)

    return replaced_by(stand_in)


def adopted(array: Any) -> Any:
    """A NumPy array as memory of the emulated device: the same memory, where it is C-contiguous."""
    from gpt2block.emulator import stand_in  # noqa: PLC0415

    return stand_in.adopt(array)
