"""Run CUDA kernels on the CPU: NVRTC compiles them, and an engine executes their PTX.

`run` launches one kernel on NumPy arrays. Within `emulated()`, all code that uses a GPU through
CuPy runs on the CPU. A launch needs NVRTC, and g++, which compiles the engine once.

Imports `gpt2block.cuda`, whose CuPy it replaces; `ptx` imports nothing of the package.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from gpt2block.cuda import kernels, replaced_by
from gpt2block.cuda.doctor import Check
from gpt2block.emulator import stand_in
from gpt2block.emulator.ptx import engine, nvrtc
from gpt2block.emulator.ptx.engine import ORDERS, Order, missing

__all__ = ["ORDERS", "Order", "adopted", "check", "emulated", "missing", "run"]


@contextmanager
def emulated(
    order: Order = "forward",
    multiprocessors: int = 4,
    checks: engine.Checks | None = None,
    capability: str = "80",
) -> Iterator[Any]:
    """Emulate a GPU on the CPU, in the whole process, until the context ends.

    order: the order of the warps of a block, and of the blocks. multiprocessors: the number of
    multiprocessors that the device reports, on which launches depend. checks: the errors that every
    launch searches for; by default only accesses out of bounds. capability: the compute capability,
    "80" or "90". Yields the replacement of the cupy module, whose arrays every function of this
    package accepts.
    """
    chosen = checks or stand_in.USUAL
    with replaced_by(stand_in), stand_in.device(order, multiprocessors, chosen, capability):
        yield stand_in


def adopted(value: object) -> Any:
    """Return a NumPy array as an emulated device array, and any other value unchanged.

    A C-contiguous array is not copied.
    """
    return stand_in.adopt(value) if isinstance(value, np.ndarray) else value


def run(
    file: str,
    kernel: str,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: Sequence[object],
    *,
    shared: int = 0,
    defines: kernels.Defines = (),
    storage: str = "float32",
    cache: str | None = None,
    order: Order = "forward",
    capability: str = "80",
    early: Collection[str] | None = None,
    checks: engine.Checks = engine.CHECKED,
) -> None:
    """Launch a kernel on NumPy arrays, which the launch changes; None is a null pointer.

    file: a file of kernels_cu, or the path of another file. storage: the dtype of the type `T`.
    cache: the FP8 format of the type `KV`, if it is not `T`. early: for a launch that overlaps the
    previous kernel (lib/overlap.cuh), which capability "90" permits, names of parameters that
    may be accessed before the wait, in addition to const __restrict__ parameters. checks: by
    default all. An array that is passed twice becomes the same pointer twice. Raises EmulatorError
    for an error of the kernel, and KernelError for arguments that do not fit.
    """
    device = emulated(order, checks=checks, capability=capability)
    with device, stand_in.early_launches(early):
        values = tuple(map(adopted, args))
        geometry = kernels.Geometry(kernel, grid, block, shared, defines)
        kernels.launch_at(file, geometry, values, storage, None, cache).run()


def check() -> Check:
    """Report whether the emulator can run here, and the command that installs what it lacks."""
    library = nvrtc.examined()
    problem = library.reason if isinstance(library, nvrtc.Refused) else missing()
    if problem is None:
        return Check("emulator", True, f"{library} and g++")
    what, _, rest = problem.partition(": ")
    fix, _, failures = rest.partition("\n")
    return Check("emulator", False, " ".join((what, *failures.split())), fix)
