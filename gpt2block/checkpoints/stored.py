"""Tensors stored in files, read one at a time and never memory-mapped."""

from __future__ import annotations

import math
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gpt2block.errors import CheckpointError

DTYPES: Mapping[str, Any] = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
_NAMED_AT_MOST = 4
_COMPARED = 1 << 22  # numbers of each of two tensors that are in memory while they are compared


def itemsize(dtype: str) -> int:
    """Bytes of one number."""
    return int(np.dtype(DTYPES[dtype]).itemsize)


class Entry(NamedTuple):
    """A file's description of one tensor, before it is compared with a model."""

    file: Path
    offset: int | None  # in bytes from the start of the file; None: not stored, all zeros
    shape: tuple[int, ...]
    dtype: str  # one of `DTYPES`, else the name in the file
    order: str | None  # "C" or "F" (a transposed matrix); None: not contiguous

    def transposed(self) -> Entry:
        """Return the transposed matrix, which has the same bytes."""
        order = {"C": "F", "F": "C"}.get(self.order or "")
        return self._replace(shape=self.shape[::-1], order=order)


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: C-contiguous, little-endian, `dtype` one of `DTYPES`.

    layout: of a matrix, "KN" for (inputs, outputs) or "NK" for (outputs, inputs).
    """

    label: str  # its name in the file
    file: Path
    offset: int | None  # in bytes from the start of the file; None: not stored, all zeros
    shape: tuple[int, ...]
    dtype: str
    layout: str | None

    @property
    def nbytes(self) -> int:
        """The size in bytes in the file; for a tensor of zeros that is not stored, the same."""
        return math.prod(self.shape) * itemsize(self.dtype)

    @property
    def types(self) -> tuple[str, ...]:
        """The types of its numbers in the file: its dtype, or quantized types of GGUF."""
        return (self.dtype,)

    @property
    def pieces(self) -> tuple[Stored, ...]:
        """The tensors in files that it consists of: itself, unless it is Joined."""
        return (self,)

    def read(self) -> NDArray[Any]:
        """Return a new array in the stored dtype; float64 becomes float32.

        Raises CheckpointError, also for a float64 number out of the range of float32.
        """
        array = np.empty(self.shape, DTYPES[self.dtype])
        row = 0
        for piece in self.pieces:
            rows = piece.shape[0]
            piece.read_into(array[row : row + rows])
            row += rows
        if self.dtype != "float64":
            return array
        narrow, beyond = converted(array, "float32")
        if beyond:
            raise CheckpointError(
                f"{self.file}: {self.label}: {beyond:,} weights are out of the range of float32, "
                "as which float64 is read"
            )
        return narrow

    def numbers(self, begin: int, end: int) -> NDArray[Any]:
        """Return the numbers begin…end - 1 of the tensor, in order, as `read` does."""
        offset = None if self.offset is None else self.offset + begin * itemsize(self.dtype)
        return replace(self, offset=offset, shape=(end - begin,)).read()

    def read_into(self, array: NDArray[Any]) -> None:
        """Read into a C-contiguous array of this shape and dtype. Raises CheckpointError."""
        if self.offset is None:
            array[...] = 0
            return
        with reading(self.file), self.file.open("rb") as stream:
            stream.seek(self.offset)
            got = stream.readinto(array.reshape(-1).view(np.uint8).data)
        if got != self.nbytes:
            raise CheckpointError(
                f"{self.file}: {self.label}: expected {self.nbytes:,} bytes at {self.offset:,}, "
                f"got {got:,}: the file has become shorter since it was opened"
            )


@dataclass(frozen=True)
class Joined(Stored):
    """Several tensors in files, of one dtype, whose rows follow each other in one."""

    parts: tuple[Stored, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[Stored]) -> Joined:
        """Join tensors (rows, …) of the same dtype and layout."""
        first = parts[0]
        shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
        label = f"{first.label} … {parts[-1].label}"
        return cls(label, first.file, None, shape, first.dtype, first.layout, tuple(parts))

    @property
    def pieces(self) -> tuple[Stored, ...]:
        return self.parts

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for part in self.parts for name in part.types))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def equal(a: Stored, b: Stored) -> bool:
    """Return whether two tensors of one shape have the same numbers; NaN equals NaN.

    They are read in pieces, unless they are one tensor in the file. Raises CheckpointError.
    """
    if (a.file, a.offset, a.dtype) == (b.file, b.offset, b.dtype):
        return True
    count = math.prod(a.shape)
    spans = ((begin, min(begin + _COMPARED, count)) for begin in range(0, count, _COMPARED))
    return all(np.array_equal(a.numbers(*s), b.numbers(*s), equal_nan=True) for s in spans)


def converted(array: NDArray[Any], dtype: str) -> tuple[NDArray[Any], int]:
    """Return the array in a dtype of `DTYPES`, C-contiguous, and its count of new infinities."""
    with np.errstate(over="ignore"):
        narrow = np.ascontiguousarray(array, DTYPES[dtype])
    if narrow.dtype == array.dtype:
        return narrow, 0
    return narrow, int((np.isinf(narrow) & np.isfinite(array)).sum())


_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert an OSError about `path` to a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def is_file(path: Path) -> bool:
    """Return whether a regular file, or a link to one, exists; False where nothing has this name.

    Raises CheckpointError where the name exists but is not a file: a folder, a named pipe, a broken
    link, or a path without permission.
    """
    with reading(path):
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            if not path.is_symlink():
                return False
            raise CheckpointError(f"{path}: a link to a file that does not exist") from None
        except ValueError:  # a null character or a lone surrogate: no file has such a name
            return False
    if not stat.S_ISREG(mode):
        kind = next((words for is_kind, words in _KINDS if is_kind(mode)), "something else")
        raise CheckpointError(f"{path}: expected a file, found {kind}")
    return True


def file_size(file: Path) -> int:
    """Return the size in bytes. Raises CheckpointError."""
    with reading(file):
        return file.stat().st_size


def check_pointer(file: Path, start: bytes) -> None:
    """Raise CheckpointError for a Git-LFS pointer. start: the file's first bytes."""
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{file}: a Git-LFS pointer of {file_size(file)} bytes, not the weights: "
            "run `git lfs pull` in that repository"
        )


def read_start(file: Path, length: int) -> bytes:
    """Return the first `length` bytes of a file; fewer if it is shorter. Raises CheckpointError."""
    with reading(file), file.open("rb") as stream:
        return stream.read(length)


def first_names(names: Iterable[str]) -> str:
    """Join the first few names for a message."""
    listed = list(names)
    rest = ", …" if len(listed) > _NAMED_AT_MOST else ""
    return ", ".join(listed[:_NAMED_AT_MOST]) + rest
