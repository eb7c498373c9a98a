"""What every CUDA op checks of its arrays, and what binding one gives."""

from __future__ import annotations

from typing import Any, NamedTuple

import cupy

from gpt2block.errors import InputError
from gpt2block.kernels import Launch

CudaArray = Any  # cupy.ndarray, which has no type stubs
Shape = tuple[int, ...]


class Bound(NamedTuple):
    """An op bound to its arrays: everything is checked, only `run` is left."""

    out: CudaArray
    launches: tuple[Launch, ...]

    def run(self) -> CudaArray:
        """Launch on the current stream; returns `out`."""
        for launch in self.launches:
            launch.run()
        return self.out


def check(name: str, array: Any, shape: tuple[int, ...] | None = None) -> None:
    """Raise InputError unless `array` is a C-contiguous float32 CuPy array on the current device.

    Also unless it has exactly `shape`, when one is given, and at least one element.
    """
    if not isinstance(array, cupy.ndarray):
        raise InputError(
            f"{name}: expected a CuPy array, got {type(array).__name__}: use cupy.asarray"
        )
    if shape is not None and array.shape != shape:
        raise InputError(f"{name}: expected shape {shape}, got {array.shape}")
    if array.ndim == 0 or array.size == 0:
        raise InputError(f"{name}: expected at least one element, got shape {array.shape}")
    if array.dtype != cupy.float32:
        raise InputError(f"{name}: expected float32, got {array.dtype}: use .astype('float32')")
    if not array.flags.c_contiguous:
        raise InputError(f"{name}: expected a C-contiguous array: use cupy.ascontiguousarray")
    device = cupy.cuda.Device().id
    if array.device.id != device:
        raise InputError(
            f"{name}: expected an array on the current device {device}, it is on device "
            f"{array.device.id}: use `with cupy.cuda.Device({array.device.id}):`"
        )


def output(out: CudaArray | None, shape: tuple[int, ...]) -> CudaArray:
    """`out` itself, checked, or a new array of `shape`."""
    if out is None:
        return cupy.empty(shape, dtype=cupy.float32)
    check("out", out, shape)
    return out


def contiguous(*arrays: Any) -> tuple[Any, ...]:
    """Copies of those CuPy arrays that are not C-contiguous; everything else as it is."""
    return tuple(
        cupy.ascontiguousarray(array) if isinstance(array, cupy.ndarray) else array
        for array in arrays
    )
