"""Read names, shapes and offsets of the tensors in files of `torch.save`, without PyTorch.

Two containers are in use. The zip archive (PyTorch ≥ 1.6) has entries `NAME/data.pkl`, the pickle,
`NAME/data/KEY`, the bytes of a storage, and `NAME/byteorder`. The legacy file is a sequence of
pickles (a magic number, a protocol version, facts about the machine, the object, the storages'
keys), then for each key the number of elements as int64 and the bytes.

Source: the documentation of `torch.save` ("Serialization semantics"), and files that it wrote.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from gpt2block.errors import CheckpointError
from gpt2block.files.checkpoints.files import READ, about, check_supported, first_names, read_start
from gpt2block.files.checkpoints.pickles import Unpickler, describe
from gpt2block.files.checkpoints.pytorch_objects import FUNCTIONS, ITEMSIZES, Storages, Tensor
from gpt2block.files.checkpoints.stored import Stored

SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_ZIP = b"PK\x03\x04"
_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # pickled magic number of a legacy file
_MAX_READ = 1 << 22  # maximum bytes per read; the zip directory of gpt2-xl's file has 0.2 MB
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # zip entry: signature, lengths of name and extra field
_ENCRYPTED = 1  # flag bit of an encrypted zip entry
# Exceptions that zipfile and the parsers raise for damaged files
_DAMAGE = (ArithmeticError, BadZipFile, RuntimeError, OSError, ValueError, struct.error)


class Content(NamedTuple):
    """Tensors of a file written by `torch.save`, and model_args of a nanoGPT checkpoint."""

    tensors: dict[str, Stored]  # tensors by their names in the file
    model_args: dict[str, Any] | None  # sizes of the model in a nanoGPT checkpoint, else None


def is_pickle(file: Path) -> bool:
    """Return whether `torch.save` wrote the file, judged by the file's first bytes or suffix."""
    return read_start(file, len(_LEGACY)).startswith((_ZIP, _LEGACY)) or file.suffix in SUFFIXES


def read(file: Path) -> Content:
    """Return the tensors of a state dict or a nanoGPT checkpoint, without reading their data.

    Raises CheckpointError for any other content, for a damaged file, and for a pickle that refers
    to anything except tensors and plain values.
    """
    start = read_start(file, 64)
    check_supported(file, start)
    words = "truncated or damaged ({}): download it again"
    with about(file, _DAMAGE, words), _BoundedReader(io.FileIO(file)) as stream:
        if start.startswith(_ZIP):
            value, offsets = _read_zip(stream)
        elif start.startswith(_LEGACY):
            value, offsets = _read_legacy(stream)
        else:
            raise CheckpointError(
                "expected a file of torch.save, as a zip archive or in its legacy layout, got a "
                f"file that starts with {start[:8]!r}: "
                "write it with torch.save and its default protocol"
            )
        return _content(file, value, offsets)


class _BoundedReader(io.BufferedReader):
    """A file whose read() has a size limit: zipfile would read a zip directory of any size."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            size = _MAX_READ
        if size > _MAX_READ:
            raise CheckpointError(
                f"expected a part of at most {_MAX_READ:,} bytes, its header has {size:,}"
            )
        return super().read(size)


# Readers of zip files and of legacy files: each returns the pickled value and storage offsets


def _read_zip(stream: BinaryIO) -> tuple[object, dict[str, int]]:
    with ZipFile(stream) as archive:
        entries = archive.infolist()
    sizes = {entry.filename: entry.file_size for entry in entries}
    pickles = [name for name in sizes if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError(
            f"expected a zip archive of torch.save with data.pkl, found "
            f"{first_names(sizes) or 'nothing'}: give {READ}"
        )
    begins = _zip_offsets(stream, entries)
    if len(begins) < len(entries):
        raise CheckpointError("a zip archive with two entries of one name")
    root = pickles[0].removesuffix("data.pkl")
    order = root + "byteorder"
    if order in sizes:
        stream.seek(begins[order])
        if sizes[order] > 10 or stream.read(sizes[order]) != b"little":
            raise CheckpointError("expected numbers in byte order 'little'")
    stream.seek(begins[pickles[0]])
    storages = Storages()
    value = Unpickler(stream, sizes[pickles[0]], FUNCTIONS, storages).load()
    for key, storage in storages.by_key.items():
        got = sizes.get(f"{root}data/{key}")
        if got != storage.nbytes:
            raise CheckpointError(
                f"storage {key[:40]}: expected {storage.nbytes:,} bytes, "
                + ("it is missing" if got is None else f"got {got:,}")
            )
    return value, {key: begins[f"{root}data/{key}"] for key in storages.by_key}


def _zip_offsets(stream: BinaryIO, entries: list[ZipInfo]) -> dict[str, int]:
    """Return the byte offset of the data of each zip entry, by the entry's name.

    Raises CheckpointError unless all entries are uncompressed, inside the file and without overlap.
    """
    size = stream.seek(0, io.SEEK_END)
    begins, free = {}, 0
    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        name = entry.filename[:80]
        if entry.compress_type != ZIP_STORED or entry.flag_bits & _ENCRYPTED:
            raise CheckpointError(
                f"zip entry {name}: compressed or encrypted: torch.save writes entries uncompressed"
            )
        if entry.header_offset < free or entry.compress_size != entry.file_size:
            raise CheckpointError(
                f"zip entry {name}: overlaps another entry, or its two sizes differ"
            )
        begin = entry.header_offset + _LOCAL_HEADER.size
        if begin + entry.file_size <= size:
            stream.seek(entry.header_offset)
            signature, *lengths = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
            begin += sum(lengths)
            if signature != _ZIP:
                raise CheckpointError(f"zip entry {name}: no local header at its offset")
        free = begin + entry.file_size
        if free > size:
            raise CheckpointError(f"zip entry {name}: goes beyond the end of the file")
        begins[entry.filename] = begin
    return begins


def _read_legacy(stream: BinaryIO) -> tuple[object, dict[str, int]]:
    size = stream.seek(0, io.SEEK_END)
    stream.seek(len(_LEGACY))
    storages = Storages()

    def load() -> Any:
        return Unpickler(stream, size - stream.tell(), FUNCTIONS, storages).load()

    version, machine = load(), load()
    if type(version) is not int or version != 1001:
        raise CheckpointError(f"expected PyTorch's legacy layout 1001, got {describe(version)}")
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise CheckpointError("expected numbers in byte order 'little'")
    value, keys = load(), load()
    if not isinstance(keys, list) or not all(type(key) is str for key in keys):
        raise CheckpointError("expected the names of the storages after the pickle")
    offsets: dict[str, int] = {}
    for key in keys:
        storage = storages.by_key.get(key)
        count = stream.read(8)
        begin = stream.tell()
        if storage is None or key in offsets or count != storage.numel.to_bytes(8, "little"):
            raise CheckpointError(f"storage {key[:40]}: it does not match the pickle")
        if begin + storage.nbytes > size:
            raise CheckpointError(
                f"truncated: storage {key[:40]} of {storage.nbytes:,} bytes goes beyond the end"
            )
        offsets[key] = begin
        stream.seek(begin + storage.nbytes)
    absent = [key[:40] for key in storages.by_key if key not in offsets]
    if absent:
        raise CheckpointError(f"{len(absent)} storages missing: {first_names(absent)}")
    return value, offsets


# Conversion of an unpickled value to tensors


def _content(file: Path, value: object, offsets: Mapping[str, int]) -> Content:
    """Return the tensors in an unpickled state dict, or in the dict of a nanoGPT checkpoint."""
    state, model_args = value, None
    if isinstance(value, dict) and isinstance(value.get("model"), dict):
        state, model_args = value["model"], value.get("model_args")
        if not isinstance(model_args, dict):
            raise CheckpointError(
                "expected model_args, a dictionary of sizes, next to model, as in a checkpoint of "
                "nanoGPT"
            )
    if not isinstance(state, dict):
        raise CheckpointError(f"expected a state dict, got {describe(state)}")
    foreign = [
        str(name)[:80]
        for name, tensor in state.items()
        if not isinstance(name, str) or not isinstance(tensor, Tensor)
    ]
    if foreign or not state:
        raise CheckpointError(
            "expected a state dict (names and tensors) or a nanoGPT checkpoint, "
            + (f"got other entries: {first_names(foreign)}" if foreign else "got nothing")
        )
    tensors = {}
    for name, tensor in state.items():
        offset = offsets[tensor.storage.key] + tensor.offset * ITEMSIZES[tensor.dtype]
        tensors[name] = Stored(name, file, offset, tensor.shape, tensor.dtype, order=tensor.order)
    return Content(tensors, model_args)
