"""Tensor maps: what Hopper's copy engine (TMA) is told of an array. By the driver's own call.

Source: CUDA driver API, "Tensor Map Object Management"; CUDA programming guide, "Tensor Memory
Access".
"""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any

import numpy as np

from gpt2block.cuda import cupy
from gpt2block.errors import DeviceError

BYTES = 128  # of a map, which lies on 64
Map = np.void  # type of one; passed to a kernel by value, as `const __grid_constant__ TensorMap`
NO_MAP = Map(bytes(BYTES))  # where a kernel uses none
_DTYPES = {"uint8": 0, "float16": 6, "float32": 7, "bfloat16": 9}  # CUtensorMapDataType
_ITEM_BYTES = {"uint8": 1, "float16": 2, "float32": 4, "bfloat16": 2}
_SWIZZLES = {32: 1, 64: 2, 128: 3}  # bytes of a box's row → CUtensorMapSwizzle
_LONG_LINES = 3  # CUtensorMapL2promotion: 256 bytes


def _encode() -> Any:
    """The driver's call. It takes the thread's context, which a new thread does not have yet."""
    cupy.cuda.Device().use()
    return _driver_call()


@cache
def _driver_call() -> Any:
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
    call.restype = ctypes.c_int
    return call


def tensor_map(array: Any, box: tuple[int, ...]) -> Map:
    """A map of a CuPy array, C-contiguous in its last axis, for boxes of a shape in the same order.

    The box's last axis has 32, 64 or 128 bytes, which fixes the swizzle; its others at most 256.
    The array starts on 16 bytes, and so do its rows. A box's coordinates, in the kernel, come last
    axis first. What lies outside the array is read as zeros and not written. The map holds the
    array's address: it keeps nothing alive. Raises DeviceError.
    """
    return _encoded(array.data.ptr, array.dtype.name, array.shape, array.strides, box)


@lru_cache(maxsize=1024)
def _encoded(
    address: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> Map:
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
    made: Map = np.void(ctypes.string_at(place, BYTES))
    return made
