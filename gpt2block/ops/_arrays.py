"""What every CUDA op checks of its arrays, and what binding one gives."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import cupy

from gpt2block.errors import InputError
from gpt2block.kernels import Launch

CudaArray = Any  # cupy.ndarray, which has no type stubs
Shape = tuple[int, ...]


class Bound(NamedTuple):
    """An op bound to its arrays: everything is checked, only `run` is left.

    `extra` holds further outputs, such as a LayerNorm's mean and rstd: launches keep none alive.
    """

    out: CudaArray
    launches: tuple[Launch, ...]
    extra: tuple[CudaArray, ...] = ()

    def run(self) -> CudaArray:
        """Launch on the current stream; returns `out`."""
        for launch in self.launches:
            launch.run()
        return self.out


def check(
    name: str, array: Any, shape: tuple[int, ...] | None = None, dtype: str = "float32"
) -> None:
    """Raise InputError unless `array` is a C-contiguous CuPy array on the current device.

    Also unless it has exactly `dtype` and `shape`, when one is given, and at least one element.
    """
    if not isinstance(array, cupy.ndarray):
        raise InputError(
            f"{name}: expected a CuPy array, got {type(array).__name__}: use cupy.asarray"
        )
    if shape is not None and array.shape != shape:
        raise InputError(f"{name}: expected shape {shape}, got {array.shape}")
    if array.ndim == 0 or array.size == 0:
        raise InputError(f"{name}: expected at least one element, got shape {array.shape}")
    if array.dtype.name != dtype:
        raise InputError(f"{name}: expected {dtype}, got {array.dtype}: use .astype('{dtype}')")
    if not array.flags.c_contiguous:
        raise InputError(f"{name}: expected a C-contiguous array: use cupy.ascontiguousarray")
    device = cupy.cuda.Device().id
    if array.device.id != device:
        raise InputError(
            f"{name}: expected an array on the current device {device}, it is on device "
            f"{array.device.id}: use `with cupy.cuda.Device({array.device.id}):`"
        )


def output(
    out: CudaArray | None, shape: tuple[int, ...], dtype: str = "float32", name: str = "out"
) -> CudaArray:
    """`out` itself, checked, or a new array of `shape`."""
    if out is None:
        return cupy.empty(shape, dtype=dtype)
    check(name, out, shape, dtype)
    return out


def device_attribute(name: str) -> int:
    """An attribute of the current device, such as "MultiProcessorCount", asked for only once."""
    return _attribute(cupy.cuda.Device().id, name)


@cache
def _attribute(device: int, name: str) -> int:
    return int(cupy.cuda.Device(device).attributes[name])


def contiguous(*arrays: Any) -> tuple[Any, ...]:
    """Copies of those CuPy arrays that are not C-contiguous; everything else as it is."""
    return tuple(
        cupy.ascontiguousarray(array) if isinstance(array, cupy.ndarray) else array
        for array in arrays
    )
