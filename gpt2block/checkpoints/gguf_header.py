"""The header of a GGUF file: its metadata and where its tensors are.

The package `gguf` reads a header without checking lengths, maps the file into memory and takes
seconds for a vocabulary of 49,152 tokens. This reader checks each length against the file before it
reads, takes a tenth of a second, and uses the package's tables of types.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gpt2block.checkpoints.files import about, file_size
from gpt2block.checkpoints.gguf_types import Encoded, dtype_of, library
from gpt2block.errors import CheckpointError, printable

MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # version 1 has lengths of 32 bits
_LONGEST = 2**28  # bytes of a header, of which a vocabulary of a million tokens takes a tenth
_MOST_DIMS = 4
# Type of a value → its NumPy dtype; strings and arrays have none
_NUMBERS: Mapping[int, str] = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4",
                               6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8"}  # fmt: skip
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class Header:
    """Metadata by key (numbers, bool, str, NumPy arrays, lists of str), and tensors by name."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Encoded]

    def under(self, prefix: str) -> dict[str, Any]:
        """The metadata whose keys begin with this prefix, by the rest of the key."""
        keys = (key for key in self.metadata if key.startswith(prefix))
        return {key.removeprefix(prefix): self.metadata[key] for key in keys}


def read_header(file: Path) -> Header:
    """Read and check the header of a GGUF file, version 2 or 3, little-endian.

    Raises CheckpointError for a damaged file, for types of tensors that the package `gguf` does not
    know, and where that package is missing.
    """
    size = file_size(file)
    words = f"truncated or not a GGUF file, {size:,} bytes ({{}}): download it again"
    with about(file, (ValueError,), words), file.open("rb") as stream:
        return _read(file, _Bytes(stream, min(size, _LONGEST)), size)


class _Bytes:
    """A stream of which at most `left` bytes may still be read."""

    def __init__(self, stream: BinaryIO, left: int) -> None:
        self._stream, self.left = stream, left

    def take(self, count: int) -> bytes:
        """The next bytes. Raises ValueError before anything is read where there are fewer."""
        if count > self.left:
            raise ValueError(f"it states a length of {count:,} bytes, {self.left:,} are left")
        self.left -= count
        data = self._stream.read(count)
        if len(data) != count:
            raise ValueError("it has become shorter")
        return data

    def count(self, least: int = 1) -> int:
        """A number of things that take `least` bytes each."""
        number = int.from_bytes(self.take(8), "little")
        if number * least > self.left:
            raise ValueError(
                f"it states {number:,} entries of {least} bytes or more, {self.left:,} bytes are "
                "left"
            )
        return number

    def integer(self) -> int:
        """An unsigned integer of 32 bits."""
        return int.from_bytes(self.take(4), "little")

    def text(self) -> str:
        """A string. Raises ValueError where it is not UTF-8."""
        return self.take(self.count()).decode()

    @property
    def position(self) -> int:
        """Bytes from the start of the file."""
        return self._stream.tell()


def _read(file: Path, data: _Bytes, size: int) -> Header:
    start = data.take(4)
    if start != MAGIC:
        raise ValueError(f"it starts with {start!r}")
    version = data.integer()
    if version not in _VERSIONS:
        swapped = struct.unpack("<I", struct.pack(">I", version))[0] in _VERSIONS
        big = ", big-endian" if swapped else ""
        raise ValueError(f"expected version 2 or 3, little-endian, got {version}{big}")
    n_tensors, n_keys = data.count(24), data.count(13)  # the shortest tensor, the shortest key
    metadata: dict[str, Any] = {}
    for _ in range(n_keys):
        key = data.text()
        if key in metadata:
            raise ValueError(f"it has {key} twice")
        with _naming(key):
            metadata[key] = _value(data, data.integer())
    tensors = {tensor.label: tensor for tensor in _tensors(file, data, n_tensors)}
    if len(tensors) != n_tensors:
        raise ValueError("it has a tensor twice")
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment: expected a power of two from 8, got {alignment!r}")
    return Header(metadata, dict(_located(tensors.values(), data.position, alignment, size)))


def _value(data: _Bytes, kind: int) -> Any:
    """A value of this type."""
    if kind == _STRING:
        return data.text()
    if kind != _ARRAY:
        number = _numbers(data, kind, 1)[0]
        # 1e-5, not 9.999999747378752e-06: the shortest number with this value in float32
        return float(str(number)) if number.dtype == np.float32 else number.item()
    of = data.integer()
    if of == _ARRAY:
        raise ValueError("an array of arrays")
    if of == _STRING:
        return [data.text() for _ in range(data.count(8))]
    return _numbers(data, of, data.count())


def _numbers(data: _Bytes, kind: int, count: int) -> Any:
    if kind not in _NUMBERS:
        raise ValueError(f"a value of the unknown type {kind}")
    dtype = np.dtype(_NUMBERS[kind])
    raw = data.take(count * dtype.itemsize)
    if dtype.kind == "b" and raw.strip(b"\0\1"):
        raise ValueError("a bool that is neither 0 nor 1")
    return np.frombuffer(raw, dtype)


def _tensors(file: Path, data: _Bytes, count: int) -> Iterator[Encoded]:
    """Yield the tensors, with offsets that are relative to the first one."""
    sizes = library().GGML_QUANT_SIZES
    for _ in range(count):
        name = data.text()
        with _naming(name):
            n_dims = data.integer()
            if not 1 <= n_dims <= _MOST_DIMS:
                raise ValueError(f"expected 1 to {_MOST_DIMS} dimensions, got {n_dims:,}")
            shape = struct.unpack(f"<{n_dims}Q", data.take(8 * n_dims))[::-1]
            kind, offset = data.integer(), int.from_bytes(data.take(8), "little")
            if kind not in sizes:
                raise CheckpointError(
                    f"{printable(name, 100)}: type {kind} is not known to the package gguf: update "
                    "it, or use a file with other types, such as Q8_0"
                )
            block, nbytes = sizes[kind]
            if shape[-1] % block or not all(shape):
                expected = f"a positive multiple of {block} in a row"
                raise ValueError(f"expected {expected}, got shape {shape}")
            length = math.prod(shape) // block * nbytes
            yield Encoded(name, file, offset, shape, dtype_of(kind), kind=kind, length=length)


def _located(
    tensors: Iterable[Encoded], end: int, alignment: int, size: int
) -> Iterator[tuple[str, Encoded]]:
    """Yield name and tensor with its offset in the file, where they follow each other without gaps.

    end: of the header. size: of the file.
    """
    start = end = -(-end // alignment) * alignment
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset or 0):
        name, offset = tensor.label, start + (tensor.offset or 0)
        if offset != end:
            raise ValueError(f"{name}: expected it at byte {end:,}, it is at {offset:,}")
        if offset + tensor.nbytes > size:
            raise ValueError(f"{name}: it ends at byte {offset + tensor.nbytes:,}")
        end = -(-(offset + tensor.nbytes) // alignment) * alignment
        yield name, replace(tensor, offset=offset)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Put the name of a key or a tensor before what is wrong with it."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        raise ValueError(f"{printable(name, 100)}: {error}") from error
