"""Tensor maps, which describe arrays to TMA, as arguments of kernels."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

BYTES = 128
# Address, rank, bytes of an element, swizzle, 0; strides, sizes and box of up to five dimensions.
LAYOUT = struct.Struct("<Q4I5Q5I5I")


class TensorMap(NamedTuple):
    """A tensor map. Sizes, strides and boxes begin with the dimension whose elements are adjacent.

    strides: bytes between elements along each other dimension. swizzle: bytes of a row of a
    swizzled box, 32, 64 or 128; 0 without swizzle.
    """

    array: np.ndarray
    offset: int  # bytes from the array's start
    item: int  # bytes of an element
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0

    def encoded(self, address: int) -> bytes:
        """Return the map's bytes for an array at an address; see Map in cpp/async.h."""
        rank, unused = len(self.sizes), (0,) * (5 - len(self.sizes))
        head = address + self.offset, rank, self.item, self.swizzle, 0
        layout = self.item, *self.strides, *unused, *self.sizes, *unused, *self.box, *unused
        return LAYOUT.pack(*head, *layout).ljust(BYTES, b"\0")
