"""Tensors where they lie in a file, read one by one and never mapped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def itemsize(dtype: str) -> int:
    """Bytes of one number."""
    return int(np.dtype(DTYPES[dtype]).itemsize)


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: C-contiguous, little-endian, `dtype` one of `DTYPES`.

    layout: of a matrix, "KN" for (inputs, outputs) or "NK" for (outputs, inputs).
    """

    label: str  # what the file calls it
    file: Path
    offset: int
    shape: tuple[int, ...]
    dtype: str
    layout: str | None

    @property
    def nbytes(self) -> int:
        """In the file."""
        return math.prod(self.shape) * itemsize(self.dtype)

    def read(self) -> NDArray[Any]:
        """A new array in the stored dtype, but float64 as float32. Raises CheckpointError."""
        array = np.empty(self.shape, DTYPES[self.dtype])
        try:
            with self.file.open("rb") as stream:
                stream.seek(self.offset)
                got = stream.readinto(array.reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise CheckpointError(f"{self.file}: cannot be read: {error.strerror}") from error
        if got != self.nbytes:
            raise CheckpointError(
                f"{self.file}: {self.label}: expected {self.nbytes:,} bytes at {self.offset:,}, "
                f"got {got:,}: the file has become shorter since it was opened"
            )
        return array.astype(np.float32) if self.dtype == "float64" else array


def check_pointer(file: Path, start: bytes) -> None:
    """CheckpointError when a file that starts so is a Git-LFS pointer."""
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{file}: a Git-LFS pointer of {file.stat().st_size} bytes, not the weights: "
            "run `git lfs pull` in that repository"
        )


def read_start(file: Path, length: int) -> bytes:
    """The first bytes of a file, fewer where it ends before."""
    try:
        with file.open("rb") as stream:
            return stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error


def some(names: Iterable[str]) -> str:
    """The first few of many names."""
    listed = list(names)
    rest = ", …" if len(listed) > _NAMED_AT_MOST else ""
    return ", ".join(listed[:_NAMED_AT_MOST]) + rest
