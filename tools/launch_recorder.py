"""Record the launches on a GPU of any card, which `gpt2block.emulator.dry` imitates."""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from gpt2block.cuda import kernels, tensor_maps
from gpt2block.cuda.cards import CARDS, dotted
from gpt2block.emulator.dry import DryKernel, dry
from gpt2block.errors import DeviceError, InputError, KernelError

DEVICES = tuple(map(dotted, CARDS))
ERRORS = InputError, DeviceError, KernelError, MemoryError


class _Kernel(DryKernel):
    """Replacement of `cupy.RawKernel`: a call adds a line to a list."""

    def __init__(self, recorder: Recorder, code: str, name: str) -> None:
        super().__init__(code, name)
        constants, _, text = code.partition("#line 1 ")
        self.recorder, self.file = recorder, text.partition("\n")[0].strip('"')
        self.defines = " ".join(f"{k}={v}" for k, v in re.findall(r"#define (\w+) (.*)", constants))
        self.parameters = kernels.signatures(self.file)[name].parameters

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


@contextmanager
def recording(capability: str) -> Iterator[Recorder]:
    """Emulate a GPU of this compute capability whose launches are recorded, not run."""
    recorder = Recorder()
    nvtx = SimpleNamespace(RangePush=recorder.steps.append, RangePop=recorder.steps.pop)
    kernel = partial(_Kernel, recorder)
    number = int(capability.replace(".", ""))
    with dry(number, kernel, recorder.launch_early, recorder.encode, nvtx):
        yield recorder
