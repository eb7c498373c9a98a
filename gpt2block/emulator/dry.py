"""A GPU of any card on the CPU that runs nothing, to plan or list the launches of any code.

Only CuPy and functions of the driver are replaced; all other code is the package's. Kernels are
neither compiled nor run, and memory holds zeros, which occupy no memory until they are written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from gpt2block.cuda import overlap, tensor_maps
from gpt2block.cuda.cards import CARDS, MAX_SHARED
from gpt2block.emulator import emulated, stand_in

MEMORY = 1 << 40  # bytes of the device
DRIVER = 12080  # version of a driver with overlapping launches
_device_ids = itertools.count(-10_000, -1)  # a new id for each device: caches are per device


class DryKernel:
    """Replacement of `cupy.RawKernel`, whose calls do nothing."""

    shared_size_bytes = local_size_bytes = 0
    max_dynamic_shared_size_bytes = 48 * 1024  # bytes that a launch can use without a request

    def __init__(self, code: str, name: str) -> None:
        self.name = name
        self.kernel = SimpleNamespace(ptr=self)

    def __call__(self, *args: Any, **options: Any) -> None:
        """Do nothing."""


def empty(shape: Any, dtype: Any = "float64") -> Any:
    """Return an emulated array of zeros."""
    sizes = tuple(np.atleast_1d(shape)) if np.ndim(shape) == 0 else tuple(shape)
    nbytes = int(np.prod(sizes, dtype=np.int64)) * np.dtype(dtype).itemsize
    memory = np.zeros(nbytes + stand_in.ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % stand_in.ALIGNMENT
    return np.ndarray(sizes, dtype, memory, start).view(stand_in.ndarray)


def _pointer(array: Any) -> Any:
    """`array.data`, made once, and without `array.ctypes`, which takes several times as long."""
    if not hasattr(array, "pointer"):
        array.pointer = stand_in._Pointer(array.__array_interface__["data"][0])
    return array.pointer


@contextmanager
def dry(
    capability: int,
    kernel: Callable[[str, str], Any] = DryKernel,
    launch_early: Callable[..., int] = lambda *_: 0,
    encode: Callable[..., int] = lambda *_: 0,
    nvtx: Any = None,
) -> Iterator[None]:
    """Emulate a card of `CARDS`, by its compute capability, such as 90.

    kernel: called with the code of a module and the name of a kernel in place of RawModule.
    launch_early, encode: in place of cuLaunchKernelEx and cuTensorMapEncodeTiled. nvtx: in place of
    `cupy.cuda.nvtx`.
    """
    device, cuda, card = stand_in.Device, stand_in.cuda, CARDS[capability]

    def module(code: str, **options: Any) -> Any:
        return SimpleNamespace(compile=lambda: None, get_function=lambda name: kernel(code, name))

    replaced: tuple[tuple[Any, str, Any], ...] = (
        (device, "id", next(_device_ids)),
        (device, "compute_capability", str(capability)),
        (device, "mem_info", (MEMORY, MEMORY)),
        (cuda.runtime, "driverGetVersion", lambda: DRIVER),
        (cuda, "nvtx", nvtx or cuda.nvtx),
        (stand_in, "RawModule", module),
        (stand_in, "empty", empty),
        (stand_in, "zeros", empty),
        (stand_in, "_allocation", lambda address: (address, 0)),
        (stand_in.ndarray, "data", property(_pointer)),
        (overlap, "replaced", lambda: False),
        (overlap, "_launch_kernel", lambda: launch_early),
        (tensor_maps, "_encode", lambda: encode),
    )
    with emulated(), ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(patch.object(owner, name, value))
        sizes = {"MultiProcessorCount": card.sms, MAX_SHARED: card.max_shared}
        stack.enter_context(patch.dict(stand_in.ATTRIBUTES, sizes))
        stack.callback(tensor_maps._encoded.cache_clear)  # the cached maps belong to this device
        yield
