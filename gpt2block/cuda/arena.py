"""Memory that recordings share: an array's part is free again when Python drops the array.

A recording binds kernels in the order in which they will run, so an array that is no longer used
then will not be used later. Recordings that never run at the same time can share an arena.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from math import prod
from typing import Any

import numpy as np

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import CudaArray, Shape

ALIGNMENT = 512  # of each part, in bytes


def bytes_of(shape: Shape, dtype: Any) -> int:
    return prod(shape) * int(np.dtype(dtype).itemsize)


class ArenaFull(Exception):  # noqa: N818  (the caller takes a larger one)
    """An array does not fit."""


class Offsets:
    """Parts of one piece of memory: each gets the lowest place where it fits.

    limit: bytes; None: as many as are needed. `peak` is the end of the highest part so far.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit, self.peak = limit, 0
        self._taken: list[tuple[int, int]] = []  # first byte and end of each part, sorted

    def take(self, nbytes: int) -> int:
        """The first byte of a new part. Raises ArenaFull."""
        size = -(-max(1, nbytes) // ALIGNMENT) * ALIGNMENT
        at = 0
        for first, end in self._taken:
            if at + size <= first:
                break
            at = end
        if self.limit is not None and at + size > self.limit:
            raise ArenaFull
        insort(self._taken, (at, at + size))
        self.peak = max(self.peak, at + size)
        return at

    def give_back(self, at: int) -> None:
        """Free the part that begins there."""
        del self._taken[bisect_left(self._taken, (at, 0))]


class Lease:
    """A part of an arena, which is free again when nothing refers to the lease."""

    def __init__(self, offsets: Offsets, nbytes: int) -> None:
        """Raises ArenaFull."""
        self.at = offsets.take(nbytes)
        self._offsets = offsets

    def __del__(self) -> None:
        if hasattr(self, "_offsets"):  # else there was no room
            self._offsets.give_back(self.at)


class Arena:
    """Device memory of `nbytes`, zeros at first, on the current device."""

    def __init__(self, nbytes: int) -> None:
        self._memory = cupy.zeros(max(ALIGNMENT, nbytes), "uint8")
        self._offsets = Offsets(nbytes)
        self._filled: dict[tuple[str, float], CudaArray] = {}

    @property
    def nbytes(self) -> int:
        return int(self._memory.nbytes)

    def empty(self, shape: Shape, dtype: Any) -> CudaArray:
        """An array whose part is free when Python drops it and its views. Raises ArenaFull."""
        nbytes = bytes_of(shape, dtype)
        lease = Lease(self._offsets, nbytes)
        base = self._memory.data
        owner = cupy.cuda.UnownedMemory(base.ptr + lease.at, nbytes, lease, base.device_id)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(owner, 0))

    def filled(self, name: str, rows: int, value: float) -> CudaArray:
        """A float32 array (rows,) of one value, apart from the arena: no kernel writes it.

        Arrays of the same name are shared by all layers.
        """
        known = self._filled.get((name, value))
        if known is None or len(known) < rows:
            known = self._filled[name, value] = cupy.full((rows,), value, "float32")
        return known[:rows]

    def view(self, array: CudaArray) -> CudaArray:
        """The same elements, without keeping their part; an array of other memory itself."""
        offset = array.data.ptr - self._memory.data.ptr
        if not 0 <= offset < self._memory.nbytes:
            return array
        part = self._memory[offset : offset + array.nbytes]
        return part.view(array.dtype).reshape(array.shape)
