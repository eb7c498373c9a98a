"""Tensors stored in files, read one at a time and never memory-mapped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from gpt2block.checks import FLOATS
from gpt2block.errors import CheckpointError
from gpt2block.files.checkpoints.files import about

if TYPE_CHECKING:
    from typing_extensions import Self

DTYPES: Mapping[str, type[np.generic]] = {"float64": np.float64, **FLOATS}
AnyStored = TypeVar("AnyStored", bound="Stored")
_COMPARED = 1 << 22  # numbers per read of each tensor while two tensors are compared


def itemsize(dtype: str) -> int:
    """Return the bytes per number of a dtype."""
    return int(np.dtype(DTYPES[dtype]).itemsize)


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, stored as little-endian numbers.

    The tensors of a Checkpoint are C-contiguous and have a dtype of `DTYPES`. layout: layout of a
    matrix, "KN" for (inputs, outputs) or "NK" for (outputs, inputs).
    """

    label: str  # name of the tensor in the file
    file: Path
    offset: int | None  # bytes from the start of the file; None for zeros that are not stored
    shape: tuple[int, ...]
    dtype: str  # one of `DTYPES`, or an unsupported dtype's name in the file, until it is checked
    layout: str | None = None
    order: str | None = "C"  # memory order: "C", "F" (Fortran), or None if not contiguous
    parts: tuple[Stored, ...] = ()  # stored tensors whose rows are joined into this tensor
    head_order: tuple[int, ...] = ()  # new order of the rows in each head, see `reorder`
    in_heads: int = 0  # number of leading rows that `head_order` reorders

    def transposed(self) -> Stored:
        """Return the transposed matrix, which has the same bytes."""
        order = {"C": "F", "F": "C"}.get(self.order or "")
        return replace(self, shape=self.shape[::-1], order=order)

    @property
    def nbytes(self) -> int:
        """Size in bytes; zeros that are not stored in the file count as if they were stored."""
        if self.parts:
            return sum(part.nbytes for part in self.parts)
        return math.prod(self.shape) * itemsize(self.dtype)

    @property
    def types(self) -> tuple[str, ...]:
        """Types of the tensor's numbers in the file: one dtype, or the GGUF types of its parts."""
        found = dict.fromkeys(name for part in self.parts for name in part.types)
        return tuple(found) or (self.dtype,)

    @property
    def pieces(self) -> tuple[Stored, ...]:
        """The stored tensors joined into this tensor, or only this tensor if none are joined."""
        return self.parts or (self,)

    @property
    def sources(self) -> tuple[Stored, ...]:
        """The tensors of files from which the numbers are read: several for a matrix of 4 bits."""
        return tuple(each for part in self.parts for each in part.sources) or (self,)

    def read(self) -> np.ndarray:
        """Read the tensor into a new array of the stored dtype; float64 becomes float32.

        Raises CheckpointError, also for a float64 number out of the range of float32.
        """
        array = np.empty(self.shape, DTYPES[self.dtype])
        row = 0
        for piece in self.pieces:
            rows = array[row : row + piece.shape[0]]
            if piece.dtype == self.dtype:
                piece.read_into(rows)
            else:
                rows[...] = piece.read()
            row += piece.shape[0]
        reorder(array[: self.in_heads], self.head_order)
        if self.dtype != "float64":
            return array
        narrow, beyond = converted(array, "float32")
        if beyond:
            raise CheckpointError(
                f"{self.file}: {self.label}: {beyond:,} weights are out of the range of float32, "
                "as which float64 is read"
            )
        return narrow

    def rows(self, begin: int, end: int) -> Self:
        """Return the rows `begin` to `end` - 1 as a Stored with the same label."""
        skipped = begin * (self.nbytes // self.shape[0])
        offset = None if self.offset is None else self.offset + skipped
        return replace(self, offset=offset, shape=(end - begin, *self.shape[1:]))

    def of_spans(self, spans: Sequence[tuple[int, int]]) -> Stored:
        """Return the rows in `spans`, ranges (begin, end), one after another, as a Stored.

        If the tensor has a `head_order`, spans begin and end between heads.
        """
        heads = sum(max(0, min(end, self.in_heads) - begin) for begin, end in spans)
        shape = (sum(end - begin for begin, end in spans), *self.shape[1:])
        whole = self.label, self.file, None, shape, self.dtype, self.layout
        parts = tuple(cut(self.pieces, spans))
        return Stored(*whole, parts=parts, head_order=self.head_order, in_heads=heads)

    def numbers(self, begin: int, end: int) -> np.ndarray:
        """Read numbers `begin` to `end` - 1 of the flattened tensor, in the dtype of `read()`."""
        offset = None if self.offset is None else self.offset + begin * itemsize(self.dtype)
        return replace(self, offset=offset, shape=(end - begin,)).read()

    def read_into(self, array: np.ndarray) -> None:
        """Read the tensor into a C-contiguous array of the tensor's shape and dtype.

        Raises CheckpointError if the file has become shorter.
        """
        if self.offset is None:
            array[...] = 0
            return
        with about(self.file), self.file.open("rb") as stream:
            stream.seek(self.offset)
            got = stream.readinto(array.reshape(-1).view(np.uint8).data)
        if got != self.nbytes:
            raise CheckpointError(
                f"{self.file}: {self.label}: expected {self.nbytes:,} bytes at {self.offset:,}, "
                f"got {got:,}: the file has become shorter since it was opened"
            )


def reorder(rows: np.ndarray, head_order: Sequence[int]) -> None:
    """Reorder each head's rows in place: row n becomes the former row head_order[n]."""
    for first in range(0, len(rows), len(head_order) or 1):
        head = rows[first : first + len(head_order)]
        head[...] = head[list(head_order)]


def joined(parts: Sequence[Stored]) -> Stored:
    """Join tensors (rows, …) of one layout along the rows; a single tensor is returned unchanged.

    Parts of several dtypes are read as float32, such as Q and K of type Q4_K and V of F16.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    dtype = first.dtype if len({part.dtype for part in parts}) == 1 else "float32"
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    label = f"{first.label} … {parts[-1].label}"
    return Stored(label, first.file, None, shape, dtype, first.layout, parts=tuple(parts))


def cut(pieces: Sequence[AnyStored], spans: Sequence[tuple[int, int]]) -> Iterator[AnyStored]:
    """Yield the parts of `pieces`, tensors whose rows are joined, that are in ranges of rows."""
    for begin, end in spans:
        first = 0
        for piece in pieces:
            own = max(begin - first, 0), min(end - first, piece.shape[0])
            if own[0] < own[1]:
                yield piece.rows(*own)
            first += piece.shape[0]


def same(a: Stored, b: Stored) -> bool:
    """Return whether two tensors have the same shape, dtype, memory order and numbers.

    NaN equals NaN. False for tensors whose dtype or order cannot be read. Raises CheckpointError.
    """
    alike = (a.shape, a.dtype, a.order) == (b.shape, b.dtype, b.order)
    return alike and a.dtype in DTYPES and a.order is not None and equal(a, b)


def equal(a: Stored, b: Stored) -> bool:
    """Return whether two tensors of equal shape have the same numbers; NaN equals NaN.

    The tensors are read in pieces, unless both are the same tensor in a file. Raises
    CheckpointError.
    """
    if (a.file, a.offset, a.dtype) == (b.file, b.offset, b.dtype):
        return True
    count = math.prod(a.shape)
    spans = ((begin, min(begin + _COMPARED, count)) for begin in range(0, count, _COMPARED))
    return all(np.array_equal(a.numbers(*s), b.numbers(*s), equal_nan=True) for s in spans)


def converted(array: np.ndarray, dtype: str) -> tuple[np.ndarray, int]:
    """Return a C-contiguous `dtype` array, and the count of finite values that became infinite."""
    with np.errstate(over="ignore"):
        narrow = np.ascontiguousarray(array, DTYPES[dtype])
    if narrow.dtype == array.dtype:
        return narrow, 0
    return narrow, int((np.isinf(narrow) & np.isfinite(array)).sum())
