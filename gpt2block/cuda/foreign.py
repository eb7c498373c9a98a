"""View CUDA arrays of other libraries as CuPy arrays, without a copy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpt2block.array_checks import FLOATS, host_array, imported
from gpt2block.cuda import cupy
from gpt2block.errors import InputError

CudaArray = Any  # cupy.ndarray, which has no type stubs
MOST_VIEWS = 64  # cached, of torch tensors; the oldest is dropped first
_views: dict[tuple[Any, ...], CudaArray] = {}


def as_cupy(array: Any) -> CudaArray:
    """View a CUDA array of any library; the current stream waits for the library's queued work.

    array: an object with DLPack or `__cuda_array_interface__`. Raises InputError for anything else.
    """
    if isinstance(array, cupy.ndarray):
        return array
    view = _torch_view(array)
    if view is not None:
        return view
    if hasattr(array, "__dlpack__") and host_array(array) is None:
        # Preferred to the interface below, since it makes our stream wait for the array's.
        return imported(cupy.from_dlpack, array)
    if hasattr(array, "__cuda_array_interface__"):
        return imported(cupy.asarray, array)
    raise InputError(
        "expected x and out as NumPy arrays, or both as CUDA arrays (CuPy, DLPack or "
        f"__cuda_array_interface__), got {type(array).__name__}"
    )


def _torch_view(array: Any) -> CudaArray | None:
    """The same view of a plain torch tensor as by DLPack, in a fifth of the host time.

    None for other types, and for tensors that torch does not export.
    """
    torch = sys.modules.get("torch")
    if torch is None or type(array) is not torch.Tensor:
        return None
    if not array.is_cuda or array.requires_grad or array.layout != torch.strided:
        return None
    device = array.get_device()
    key = array.data_ptr(), array.dtype, array.shape, array.stride(), device
    view = _views.get(key)
    if view is None:
        view = _new_view(*key)
        if view is None:
            return None
        if len(_views) >= MOST_VIEWS:
            _views.pop(next(iter(_views)), None)
        _views[key] = view
    stream, theirs = cupy.cuda.get_current_stream(), torch.cuda.current_stream(device).cuda_stream
    if stream.ptr != theirs:
        queued = cupy.cuda.Event(disable_timing=True)
        cupy.cuda.runtime.eventRecord(queued.ptr, theirs)
        stream.wait_event(queued)
    return view


def _new_view(
    pointer: int, dtype: Any, shape: Sequence[int], strides: Sequence[int], device: int
) -> CudaArray | None:
    """A view that does not keep the memory alive; None for empty arrays and other dtypes."""
    stored = FLOATS.get(str(dtype).removeprefix("torch."))
    if stored is None or 0 in shape:
        return None
    item = np.dtype(stored).itemsize
    in_bytes = [item * stride for stride in strides]
    extent = sum((n - 1) * step for n, step in zip(shape, in_bytes, strict=True)) + item
    memory = cupy.cuda.UnownedMemory(pointer, extent, None, device)
    place = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(tuple(shape), np.dtype(stored), place, in_bytes)
