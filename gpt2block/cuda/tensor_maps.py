"""Create tensor maps, which describe arrays to TMA, by the CUDA driver API.

Source: CUDA driver API, "Tensor Map Object Management"; CUDA programming guide, "Tensor Memory
Access".
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from gpt2block.cuda import CudaArray, cupy, replaced
from gpt2block.errors import DeviceError

BYTES = 128  # bytes of a tensor map, which must be aligned to 64 bytes
_DTYPES = {"uint8": 0, "float16": 6, "float32": 7, "bfloat16": 9}  # values of CUtensorMapDataType
_ITEM_BYTES = {"uint8": 1, "float16": 2, "float32": 4, "bfloat16": 2}
_SWIZZLES = {32: 1, 64: 2, 128: 3}  # bytes of a box's row → value of CUtensorMapSwizzle
_LONG_LINES = 3  # value of CUtensorMapL2promotion: promote L2 fetches to 256 bytes


def _encode() -> Callable[..., int]:
    """Return cuTensorMapEncodeTiled, with a current context, which a new thread does not have."""
    cupy.cuda.Device().use()
    return cupy.encode_tensor_map if replaced() else _driver_call()


@cache
def _driver_call() -> Callable[..., int]:
    call = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    call.argtypes = (
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_uint64),
        ctypes.POINTER(ctypes.c_uint64),
        ctypes.POINTER(ctypes.c_uint32),
        ctypes.POINTER(ctypes.c_uint32),
        *(ctypes.c_int,) * 4,
    )
    return call


class TensorMap(NamedTuple):
    """The contents of a tensor map, which kernels take as `const __grid_constant__ TensorMap`.

    A map does not keep the array alive.
    """

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes between elements along each axis
    box: tuple[int, ...]

    def encoded(self) -> np.void:
        """Encode the tensor map in the format of TMA. Raises DeviceError."""
        return _encoded(*self) if self.address else np.void(bytes(BYTES))


NO_MAP = TensorMap(0, "uint8", (), (), ())  # argument for a parameter that a kernel does not use


def tensor_map(array: CudaArray, box: tuple[int, ...]) -> TensorMap:
    """Return the tensor map of a CuPy array whose last axis is contiguous.

    box: shape of the copied boxes, in the same axis order. The last axis of a box has 32, 64 or 128
    bytes, which determines the swizzle; other axes have at most 256 elements. The array and its
    rows must be aligned to 16 bytes. In a kernel, the coordinates of a box start with the last
    axis. Elements outside the array are read as zeros and are not written.
    """
    return TensorMap(array.data.ptr, str(array.dtype.name), array.shape, array.strides, box)


@lru_cache(maxsize=1024)
def _encoded(
    address: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> np.void:
    rank, item = len(shape), _ITEM_BYTES[dtype]
    sizes = (ctypes.c_uint64 * rank)(*reversed(shape))
    distances = (ctypes.c_uint64 * (rank - 1))(*reversed(strides[:-1]))
    boxes = (ctypes.c_uint32 * rank)(*reversed(box))
    steps = (ctypes.c_uint32 * rank)(*(1,) * rank)
    memory = ctypes.create_string_buffer(BYTES + 64)
    place = -(-ctypes.addressof(memory) // 64) * 64
    swizzle = _SWIZZLES[box[-1] * item]
    layout = (sizes, distances, boxes, steps)
    status = _encode()(place, _DTYPES[dtype], rank, address, *layout, 0, swizzle, _LONG_LINES, 0)
    if status:
        raise DeviceError(
            f"cuTensorMapEncodeTiled failed with CUDA error {status} for {dtype} {shape}, "
            f"strides {strides}, boxes {box}"
        )
    made: np.void = np.void(ctypes.string_at(place, BYTES))
    return made
