"""View CUDA arrays of other libraries as CuPy arrays, and order work on them between streams."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from gpt2block.checks import FLOATS, host_array, imported
from gpt2block.cuda import CudaArray, cupy
from gpt2block.errors import InputError

MAX_VIEWS = 64  # maximum number of cached views of torch tensors
LEGACY = 1  # default stream in `__cuda_array_interface__`; CUDA's functions also accept 0


class InOrder:
    """Order a call on CuPy's current stream after the previous call and other libraries' work.

    The work in the with block runs after the previous call, whose end is the event `done`, which
    this call records again. CUDA itself orders only the default stream with blocking streams.
    PyTorch's streams are non-blocking, and CuPy's can be. Therefore the call's stream waits by the
    event `queued` for each different stream of another library, and each of these streams waits
    for the call. Raises InputError if a stream is capturing a graph.
    """

    def __init__(self, done: Any, queued: Any) -> None:
        self.stream = cupy.cuda.get_current_stream()
        self._done, self._queued = done, queued
        self._others: set[int | None] = set()
        if self.stream.is_capturing():
            raise _capturing("the current stream")

    def __enter__(self) -> InOrder:
        self.stream.wait_event(self._done)
        return self

    def join(self, array: object) -> None:
        """Make the call's stream wait for the work that the array's library has queued."""
        theirs = _stream_of(array)
        if theirs == self.stream.ptr or theirs in self._others:
            return
        if theirs is not None:
            if cupy.cuda.runtime.streamIsCapturing(theirs):
                raise _capturing(f"the current stream of {type(array).__module__}")
            cupy.cuda.runtime.eventRecord(self._queued.ptr, theirs)
            self.stream.wait_event(self._queued)
        self._others.add(theirs)

    def __exit__(self, *_: object) -> None:
        """Make other streams wait for the call. If a stream is unknown, the host waits."""
        self._done.record(self.stream)
        for theirs in self._others:
            if theirs is None:
                self._done.synchronize()
            else:
                cupy.cuda.runtime.streamWaitEvent(theirs, self._done.ptr)


def _capturing(stream: str) -> InputError:
    return InputError(f"{stream} is capturing a graph: a Block captures graphs itself")


def _stream_of(array: object) -> int | None:
    """Return the stream on which the array's library works, 0 for the default stream.

    Return None if it is not known. In `__cuda_array_interface__`, None also stands for the default
    stream, as in Numba.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _torch_stream(torch, array.get_device())
    interface = getattr(array, "__cuda_array_interface__", {})
    if "stream" not in interface:
        return None
    stream = interface["stream"] or 0
    return 0 if stream == LEGACY else int(stream)


def _torch_stream(torch: Any, device: int) -> int:
    """Return torch's current stream of a device.

    torch's private function is preferred, as the public function spends most of its time on
    creating a Stream object.
    """
    try:
        return int(torch._C._cuda_getCurrentRawStream(device))
    except AttributeError:
        return int(torch.cuda.current_stream(device).cuda_stream)


def as_cupy(array: object) -> CudaArray:
    """Return a CuPy view of a CUDA array for which `direct_view` returns None.

    array: an object that supports DLPack or `__cuda_array_interface__`. Raises InputError for other
    objects.
    """
    if hasattr(array, "__dlpack__") and host_array(array) is None:
        # DLPack is preferred, as it orders streams even if the library's stream is not known.
        return imported(cupy.from_dlpack, array)
    if hasattr(array, "__cuda_array_interface__"):
        return imported(cupy.asarray, array)
    raise InputError(
        "expected x and out as NumPy arrays, or both as CUDA arrays (CuPy, DLPack or "
        f"__cuda_array_interface__), got {type(array).__name__}"
    )


def direct_view(array: Any) -> CudaArray | None:
    """Return a CuPy array itself, or a view of a torch tensor in a fifth of DLPack's host time.

    Return None for other types, and for tensors that torch does not export.
    """
    if isinstance(array, cupy.ndarray):
        return array
    torch = sys.modules.get("torch")
    if torch is None or type(array) is not torch.Tensor:
        return None
    if not array.is_cuda or array.requires_grad or array.layout is not torch.strided:
        return None
    device = array.get_device()
    return _new_view(array.data_ptr(), array.dtype, array.shape, array.stride(), device)


@lru_cache(MAX_VIEWS)  # lru_cache is thread-safe
def _new_view(
    pointer: int, dtype: object, shape: Sequence[int], strides: Sequence[int], device: int
) -> CudaArray | None:
    """Return a view that does not own its memory; None for an empty array or unknown dtype."""
    stored = FLOATS.get(str(dtype).removeprefix("torch."))
    if stored is None or 0 in shape:
        return None
    item = np.dtype(stored).itemsize
    in_bytes = [item * stride for stride in strides]
    extent = sum((n - 1) * step for n, step in zip(shape, in_bytes, strict=True)) + item
    memory = cupy.cuda.UnownedMemory(pointer, extent, None, device)
    place = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(tuple(shape), np.dtype(stored), place, in_bytes)
