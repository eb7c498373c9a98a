"""Emulate a GPU of any compute capability on the CPU, which records launches and does not run them.

Only CuPy and two functions of the driver are replaced; all other code is the package's. Kernels are
neither compiled nor run, and memory holds zeros, which occupy no memory until they are written.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from gpt2block import emulator
from gpt2block.cuda import kernels, overlap, tensor_maps
from gpt2block.cuda.cards import CARDS, MAX_SHARED, dotted
from gpt2block.emulator import stand_in
from gpt2block.errors import DeviceError, InputError, KernelError

DEVICES: Mapping[str, dict[str, int]] = {  # attributes by compute capability
    dotted(each): {"MultiProcessorCount": card.sms, MAX_SHARED: card.max_shared}
    for each, card in CARDS.items()
}
ERRORS = InputError, DeviceError, KernelError, MemoryError
MEMORY = 1 << 40  # bytes of the device
DRIVER = 12080  # version of a driver with overlapping launches
_device_ids = itertools.count(-10_000, -1)  # a new id for each device: caches are per device


class _Kernel:
    """Replacement of `cupy.RawKernel`: a call adds a line to a list."""

    shared_size_bytes = local_size_bytes = 0
    max_dynamic_shared_size_bytes = 48 * 1024  # bytes that a launch can use without a request

    def __init__(self, recorder: Recorder, code: str, name: str) -> None:
        constants, _, text = code.partition("#line 1 ")
        self.recorder, self.name, self.file = recorder, name, text.partition("\n")[0].strip('"')
        self.defines = " ".join(f"{k}={v}" for k, v in re.findall(r"#define (\w+) (.*)", constants))
        self.parameters = kernels.signatures(self.file)[name].parameters
        self.kernel = SimpleNamespace(ptr=self)

    def __call__(self, grid: Any, block: Any, args: Sequence[Any], shared_mem: int = 0) -> None:
        self.record(grid, block, shared_mem, [arg.tobytes() for arg in args])

    def record(
        self, grid: Any, block: Any, shared: int, args: Sequence[bytes], early: str = ""
    ) -> None:
        sizes = [",".join(map(str, (*size, 1, 1)[:3])) for size in (grid, block)]
        beyond = " beyond its limit" if shared > self.max_dynamic_shared_size_bytes else ""
        where = f"{self.name} {self.file} grid {sizes[0]} block {sizes[1]} shared {shared}{beyond}"
        values = [self.recorder.shown(*each) for each in zip(self.parameters, args, strict=True)]
        self.recorder.add(f"{where}{early} | {self.defines} | {' '.join(values)}")


class Recorder:
    """Lines of all launches, with the step named by CuPy's NVTX ranges."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.steps = [""]  # open NVTX ranges
        self._call = ""
        self._maps: dict[bytes, str] = {bytes(tensor_maps.BYTES): "none"}

    def call(self, label: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return the function's result, or None after an error, whose message becomes a line."""
        self._call = label
        try:
            return function(*args, **options)
        except ERRORS as error:
            self.add(f"{type(error).__name__}: {error}")

    def add(self, line: str) -> None:
        self.lines.append(f"{self._call} | {self.steps[-1]} | {line}")

    def shown(self, parameter: kernels.Parameter, raw: bytes) -> str:
        """Return the text of an argument; for a pointer, whether it is null."""
        if parameter.ctype.endswith("*"):
            return f"{parameter.name}{'' if any(raw) else '=null'}"
        if parameter.ctype == kernels.TENSOR_MAP:
            return f"{parameter.name}={self._maps[raw]}"
        return f"{parameter.name}={np.frombuffer(raw, kernels.SCALARS[parameter.ctype])[0]}"

    def module(self, code: str, **options: Any) -> Any:
        """Replace `cupy.RawModule`."""
        return SimpleNamespace(compile=lambda: None, get_function=partial(_Kernel, self, code))

    def launch_early(self, config: Any, kernel: _Kernel, values: Any, _: Any) -> int:
        """Replace cuLaunchKernelEx, which lets a launch overlap the previous launch."""
        c, maps = config._obj, tensor_maps.BYTES
        sizes = [_bytes_of(parameter, maps) for parameter in kernel.parameters]
        args = [ctypes.string_at(values[i], size) for i, size in enumerate(sizes)]
        kernel.record(c.grid, c.block, c.shared_bytes, args, " early")
        return 0

    def encode(self, place: int, dtype: int, rank: int, address: int, *rest: Any) -> int:
        """Replace cuTensorMapEncodeTiled."""
        sizes, strides, boxes, _, _, swizzle, *_ = rest
        numbers = ["x".join(map(str, each)) for each in (sizes, strides, boxes)]
        text = "dtype {} shape {} strides {} box {} swizzle {}".format(dtype, *numbers, swizzle)
        digest = hashlib.sha512(text.encode()).digest() * 2
        self._maps[digest] = f"({text}{'' if address % 16 == 0 else ' misaligned'})"
        ctypes.memmove(place, digest, len(digest))
        return 0


def _bytes_of(parameter: kernels.Parameter, of_map: int) -> int:
    if parameter.ctype == kernels.TENSOR_MAP:
        return of_map
    return 8 if parameter.ctype.endswith("*") else kernels.SCALARS[parameter.ctype]().itemsize


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
def recording(capability: str) -> Iterator[Recorder]:
    """Emulate a GPU of this compute capability whose launches are recorded, not run."""
    recorder, device, cuda = Recorder(), stand_in.Device, stand_in.cuda
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (device, "id", next(_device_ids)),
        (device, "compute_capability", capability.replace(".", "")),
        (device, "mem_info", (MEMORY, MEMORY)),
        (cuda.runtime, "driverGetVersion", lambda: DRIVER),
        (cuda.nvtx, "RangePush", recorder.steps.append),
        (cuda.nvtx, "RangePop", recorder.steps.pop),
        (stand_in, "RawModule", recorder.module),
        (stand_in, "empty", empty),
        (stand_in, "zeros", empty),
        (stand_in, "_allocation", lambda address: (address, 0)),
        (stand_in.ndarray, "data", property(_pointer)),
        (overlap, "replaced", lambda: False),
        (overlap, "_launch_kernel", lambda: recorder.launch_early),
        (tensor_maps, "_encode", lambda: recorder.encode),
    )
    with emulator.emulated(), ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(patch.dict(stand_in.ATTRIBUTES, DEVICES[capability]))
        stack.callback(tensor_maps._encoded.cache_clear)  # its maps belong to this recorder
        yield recorder
