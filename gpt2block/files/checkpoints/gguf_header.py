"""Read the header of a GGUF file: its metadata, and types, shapes and offsets of its tensors.

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

from gpt2block.errors import CheckpointError, printable
from gpt2block.files.checkpoints.files import about, file_size
from gpt2block.files.checkpoints.gguf_types import Encoded, dtype_of, library

MAGIC = b"GGUF"
PREFIX = "tokenizer.ggml."  # prefix of the tokenizer's keys
TOKEN_ID = "_token_id"  # suffix of keys whose value is a token id
_VERSIONS = (2, 3)  # version 1, with lengths of 32 bits, is not supported
_LONGEST = 2**28  # maximum bytes of a header; 1,000,000 tokens need a tenth of this limit
_MAX_DIMS = 4
# GGUF type of a number → NumPy dtype
_NUMBERS: Mapping[int, str] = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4",
                               6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8"}  # fmt: skip
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
_NO_TOKEN = (-1, 2**32 - 1)  # llama.cpp's LLAMA_TOKEN_NULL, as int32 and as uint32


class _TruncatedError(ValueError):
    """Raised if the file ends before the data that its header declares."""


class _UnusableError(ValueError):
    """Raised for a value of an unsupported kind, after the value has been read to its end."""


@dataclass(frozen=True)
class Header:
    """Header of a GGUF file: metadata by key, and tensors by name.

    metadata: numbers, bool, str, NumPy arrays and lists of str, without token ids that mean "no
    token". unusable: key → reason, for text that is not UTF-8 and for arrays of arrays.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Encoded]
    unusable: Mapping[str, str]

    def check_usable(self, *prefixes: str) -> None:
        """Raise CheckpointError if a key with one of `prefixes` has an unusable value."""
        for key, reason in self.unusable.items():
            if key.startswith(prefixes):
                raise CheckpointError(f"{printable(key, 100)}: {reason} is not supported")


def under(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the metadata whose keys begin with `prefix`, by the rest of the key."""
    keys = (key for key in metadata if key.startswith(prefix))
    return {key.removeprefix(prefix): metadata[key] for key in keys}


def read_header(file: Path) -> Header:
    """Read and check the header of a GGUF file, version 2 or 3, little-endian.

    Raises CheckpointError for a damaged or a big-endian file, for types of tensors that the package
    `gguf` does not know, and where that package is missing.
    """
    size = file_size(file)
    words = f"truncated or not a GGUF file, {size:,} bytes ({{}}): download it again"
    missing = about(file, (_TruncatedError,), words)
    other = about(file, (ValueError,), "not a GGUF file that can be read: {}")
    with other, missing, file.open("rb") as stream:
        return _read(file, _Bytes(stream, min(size, _LONGEST)), size)


class _Bytes:
    """Reader of binary values from a stream, of which at most `left` more bytes may be read."""

    def __init__(self, stream: BinaryIO, left: int) -> None:
        self.stream, self.left = stream, left

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes. Raises _TruncatedError if fewer than `count` are left."""
        if count > self.left:
            raise _TruncatedError(f"it states a length of {count:,} bytes, {self.left:,} are left")
        self.left -= count
        data = self.stream.read(count)
        if len(data) != count:
            raise _TruncatedError("it has become shorter")
        return data

    def count(self, least: int = 1) -> int:
        """Read a uint64 number of entries. Raises unless `least` bytes per entry are left."""
        number = int.from_bytes(self.take(8), "little")
        if number * least > self.left:
            raise _TruncatedError(
                f"it states {number:,} entries of {least} bytes or more, {self.left:,} bytes are "
                "left"
            )
        return number

    def integer(self) -> int:
        """Read an unsigned integer of 32 bits."""
        return int.from_bytes(self.take(4), "little")

    def raw(self) -> bytes:
        """Read the length of a string, then return the string's bytes."""
        return self.take(self.count())


def _read(file: Path, data: _Bytes, size: int) -> Header:
    start = data.take(4)
    if start != MAGIC:
        raise ValueError(f"it starts with {start!r}")
    version = data.integer()
    if version not in _VERSIONS:
        if int.from_bytes(version.to_bytes(4, "big"), "little") in _VERSIONS:
            raise CheckpointError("a big-endian GGUF file: expected a little-endian one, which "
                                  "gguf-convert-endian of the package gguf writes")  # fmt: skip
        raise ValueError(f"expected version 2 or 3, got {version}: write it again with a current "
                         "llama.cpp")  # fmt: skip
    n_tensors, n_keys = data.count(24), data.count(13)  # 24 and 13: minimum bytes of an entry
    metadata: dict[str, object] = {}
    unusable: dict[str, str] = {}
    for _ in range(n_keys):
        key = data.raw().decode(errors="backslashreplace")
        if key in metadata or key in unusable:
            raise ValueError(f"it has {key} twice")
        try:
            with _naming(key):
                metadata[key] = _value(data, data.integer())
        except _UnusableError as error:
            unusable[key] = str(error)
        is_id, value = key.startswith(PREFIX) and key.endswith(TOKEN_ID), metadata.get(key)
        if is_id and isinstance(value, int) and value in _NO_TOKEN:
            del metadata[key]
    tensors = {tensor.label: tensor for tensor in _tensors(file, data, n_tensors)}
    if len(tensors) != n_tensors:
        raise ValueError("it has a tensor twice")
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment: expected a power of two from 8, got {alignment!r}")
    located = dict(_located(tensors.values(), data.stream.tell(), alignment, size))
    return Header(metadata, located, unusable)


def _value(data: _Bytes, kind: int) -> Any:
    """Read a value of GGUF type `kind`. Raises _UnusableError after reading the whole value."""
    if kind == _STRING:
        return _decoded([data.raw()])[0]
    if kind != _ARRAY:
        return as_python(_numbers(data, kind, 1)[0])
    of = data.integer()
    if of == _ARRAY:
        _skip_arrays(data, data.count(12))
        raise _UnusableError("an array of arrays")
    if of == _STRING:
        return _decoded([data.raw() for _ in range(data.count(8))])
    return _numbers(data, of, data.count())


def as_python(number: Any) -> Any:
    """Convert a NumPy scalar to a bool, an int, or a float (from float32: its shortest decimal)."""
    # np.float32(1e-5) becomes 1e-5, not 9.999999747378752e-06.
    return float(str(number)) if number.dtype == np.float32 else number.item()


def _decoded(strings: Iterable[bytes]) -> list[str]:
    try:
        return [string.decode() for string in strings]
    except UnicodeDecodeError:
        raise _UnusableError("text that is not UTF-8") from None


def _skip_arrays(data: _Bytes, count: int) -> None:
    """Skip `count` arrays, which may be nested. An array begins with element type and length."""
    while count:
        count -= 1
        of = data.integer()
        if of == _ARRAY:
            count += data.count(12)
        elif of == _STRING:
            for _ in range(data.count(8)):
                data.raw()
        else:
            _numbers(data, of, data.count())


def _numbers(data: _Bytes, kind: int, count: int) -> Any:
    if kind not in _NUMBERS:
        raise ValueError(f"a value of the unknown type {kind}")
    dtype = np.dtype(_NUMBERS[kind])
    raw = data.take(count * dtype.itemsize)
    if dtype.kind == "b" and raw.strip(b"\0\1"):
        raise ValueError("a bool that is neither 0 nor 1")
    return np.frombuffer(raw, dtype)


def _tensors(file: Path, data: _Bytes, count: int) -> Iterator[Encoded]:
    """Read `count` entries that describe tensors; offsets count from the start of tensor data."""
    sizes = library().GGML_QUANT_SIZES
    for _ in range(count):
        name = data.raw().decode()
        with _naming(name):
            n_dims = data.integer()
            if not 1 <= n_dims <= _MAX_DIMS:
                raise ValueError(f"expected 1 to {_MAX_DIMS} dimensions, got {n_dims:,}")
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
    """Yield (name, tensor), with tensor offsets counted from the start of the file.

    end: bytes of the header. size: bytes of the file. Raises ValueError for gaps except padding.
    """
    start = end = -(-end // alignment) * alignment
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset or 0):
        name, offset = tensor.label, start + (tensor.offset or 0)
        if offset != end:
            raise ValueError(f"{name}: expected it at byte {end:,}, it is at {offset:,}")
        if offset + tensor.nbytes > size:
            raise _TruncatedError(f"{name}: it ends at byte {offset + tensor.nbytes:,}")
        end = -(-(offset + tensor.nbytes) // alignment) * alignment
        yield name, replace(tensor, offset=offset)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Prefix the messages of ValueErrors with the name of a key or a tensor."""
    try:
        yield
    except (CheckpointError, _UnusableError):
        raise
    except ValueError as error:
        kind = _TruncatedError if isinstance(error, _TruncatedError) else ValueError
        raise kind(f"{printable(name, 100)}: {error}") from error
