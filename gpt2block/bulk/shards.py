"""Write a job's output: part files, each complete or absent, and the manifest that lists them."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from gpt2block.bulk.paths import reason, sha256
from gpt2block.bulk.records import Cell, require_pyarrow
from gpt2block.bulk.tasks import Kind
from gpt2block.errors import InputError
from gpt2block.files.writing import replacing

MANIFEST, LOCK, ERRORS = "manifest.ndjson", ".lock", "errors"
FORMATS = ("jsonl", "parquet")
_TO_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=str)


@dataclass(frozen=True)
class ShardEntry:
    """The entry of a finished shard in the manifest."""

    shard: int
    records: int
    errors: int
    tokens: int  # sum of the results' n_tokens
    sha256: str  # hash of the part file
    errors_sha256: str | None  # hash of the errors file; None without errors, when no file exists


def part_name(shard: int, form: str) -> str:
    return f"part-{shard:05}.{form}"


def errors_name(shard: int) -> str:
    return f"{ERRORS}/part-{shard:05}.ndjson"


def replace_file(path: Path, data: bytes) -> str:
    """Write a file atomically with `files.replacing`; return its SHA-256. Raises OSError."""
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as file:
        file.write(data)
    return hashlib.sha256(data).hexdigest()


def json_lines(rows: Iterable[Mapping[str, object]]) -> bytes:
    """Encode one JSON object per line in UTF-8; NaN and infinity, which JSON lacks, become null."""
    return b"".join(_json(_plain(row)) + b"\n" for row in rows)


def _json(value: object) -> bytes:
    try:
        return _TO_JSON.encode(value).encode()
    except UnicodeEncodeError:  # a lone surrogate in a kept field
        return json.dumps(value, allow_nan=False, default=str).encode()


def _plain(value: object) -> object:
    """Convert a value to JSON types. A float32 gets the fewest digits that identify it."""
    if isinstance(value, Cell):
        return _plain(value.value())
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, np.ndarray) and value.dtype == np.float32:
        numbers = map(float, value.ravel().astype("S32").tolist())
        return [number if math.isfinite(number) else None for number in numbers]
    if isinstance(value, (list, tuple, np.ndarray)):
        # A list that holds only int and str, such as token ids, needs no conversion.
        simple = type(value) is list and {*map(type, value)} <= {int, str}
        return value if simple else [_plain(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value


class JsonPart:
    """A shard's JSONL file. Each line is an object with index, kept fields and result columns."""

    def __init__(self, columns: Iterable[str]) -> None:
        self._columns = tuple(columns)
        self._lines: list[bytes] = []

    def add(self, index: int, kept: Mapping[str, object], row: Mapping[str, object]) -> None:
        """Add a record's kept fields and results. Raises an error if they cannot be encoded."""
        results = {name: row[name] for name in self._columns}
        self._lines.append(json_lines([{"index": index, **kept, **results}]))

    def data(self) -> bytes:
        """Return the bytes of the JSONL file."""
        return b"".join(self._lines)


class ParquetPart:
    """A shard's Parquet file, whose columns are the fields of a `JsonPart`'s objects.

    types: the Arrow types of kept fields whose values are Cells. A field without a type becomes
    text: a string is unchanged, another value is written as JSON.
    """

    def __init__(
        self, columns: Mapping[str, Kind], keep: Iterable[str], types: Mapping[str, object]
    ) -> None:
        self._pa = pa = require_pyarrow()
        of_kind = {
            "float": pa.float64(), "int": pa.int64(), "text": pa.string(),
            "texts": pa.list_(pa.string()), "vector": pa.list_(pa.float32()),
            "floats": pa.list_(pa.float32()), "ints": pa.list_(pa.int32()),
        }  # fmt: skip
        if "texts" in columns.values():  # several samples per record: lists of lists
            of_kind |= {kind: pa.list_(of_kind[kind]) for kind in ("floats", "ints")}
        self._kept = {name: types.get(name, pa.string()) for name in keep}
        self._typed = frozenset(types)
        results = {name: of_kind[kind] for name, kind in columns.items()}
        self._types = {"index": pa.int64(), **self._kept, **results}
        self._values: dict[str, list[Any]] = {name: [] for name in self._types}

    def add(self, index: int, kept: Mapping[str, object], row: Mapping[str, object]) -> None:
        """Add a record's kept fields and results, as `JsonPart.add` does."""
        fields = {name: self._field(name, kept[name]) for name in self._kept}
        entry = {**row, "index": index, **fields}
        for name, values in self._values.items():
            values.append(entry[name])

    def _field(self, name: str, value: object) -> object:
        if name in self._typed:
            return value
        plain = _plain(value)
        text = plain if isinstance(plain, str) else _json(plain).decode()
        text.encode()  # raises for a lone surrogate, here rather than in `data`
        return text

    def data(self) -> bytes:
        """Return the bytes of the Parquet file."""
        pa = self._pa
        columns = []
        for name, kind in self._types.items():
            if name in self._typed:
                chunks = [chunk for cell in self._values[name] for chunk in cell.chunks()]
                columns.append(pa.chunked_array(chunks, kind))
            else:
                columns.append(pa.array(self._values[name], kind))
        table = pa.table(columns, pa.schema(list(self._types.items()))).combine_chunks()
        sink = pa.BufferOutputStream()
        pa.parquet.write_table(table, sink)
        data: bytes = sink.getvalue().to_pybytes()
        return data


Part = JsonPart | ParquetPart


class Manifest:
    """DIR/manifest.ndjson: the job's description in line 1, then a line for each finished shard.

    `add` appends a line when a shard finishes; `write` sorts the lines.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / MANIFEST
        self.job: dict[str, Any] | None = None
        self.done: dict[int, ShardEntry] = {}
        if self.path.exists():
            self._read()

    def _read(self) -> None:
        try:
            if not self.path.is_file():
                raise ValueError("not a regular file")
            lines = self.path.read_bytes().split(b"\n")[:-1]  # without an incomplete last line
            if not lines:
                raise ValueError("it has no lines")
            self.job, *rest = (json.loads(line) for line in lines)
            if not isinstance(self.job, dict):
                raise ValueError("its first line is not a job")
            entries = [_parse_entry(entry) for entry in rest]
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read: {reason(error)}") from error
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{self.path}: damaged, or not a manifest: {error}: choose another --output"
            ) from error
        self.done = {entry.shard: entry for entry in entries}

    def check(self, lines: Sequence[int]) -> None:
        """Raise InputError if an entry counts more records than its shard has lines."""
        for entry in self.done.values():
            if entry.shard >= len(lines) or entry.records + entry.errors > lines[entry.shard]:
                raise InputError(
                    f"{self.path}: damaged: shard {entry.shard} with {entry.records} records and "
                    f"{entry.errors} errors is not of this input: choose another --output"
                )

    def unknown_parts(self, form: str, shards: int) -> list[str]:
        """Return the names of part files in the folder that this job does not write."""
        folder = self.path.parent
        ours = {part_name(shard, form) for shard in range(shards)}
        ours |= {errors_name(shard) for shard in range(shards)}
        present = [*folder.glob("part-*"), *folder.glob(f"{ERRORS}/part-*")]
        names = sorted(path.relative_to(folder).as_posix() for path in present)
        return [name for name in names if name not in ours]

    def write(self, job: dict[str, object]) -> None:
        """Rewrite the manifest with this job and the finished shards, sorted by number."""
        self.job = job
        entries = [asdict(self.done[shard]) for shard in sorted(self.done)]
        replace_file(self.path, json_lines([job, *entries]))

    def add(self, entry: ShardEntry) -> None:
        """Append the entry of a finished shard to the file, and sync the file to disk."""
        with self.path.open("ab") as file:
            file.write(json_lines([asdict(entry)]))
            file.flush()
            os.fsync(file.fileno())
        self.done[entry.shard] = entry

    def forget_damaged(self, form: str) -> list[str]:
        """Remove entries of shards whose files are missing or changed; return the files' names."""
        folder, damaged = self.path.parent, []
        for shard, entry in list(self.done.items()):
            files = [(folder / part_name(shard, form), entry.sha256)]
            if entry.errors_sha256 is not None:
                files.append((folder / errors_name(shard), entry.errors_sha256))
            wrong = [path.name for path, digest in files if _sha256(path) != digest]
            if wrong:
                damaged += wrong
                del self.done[shard]
        return damaged


def _parse_entry(entry: object) -> ShardEntry:
    """Parse a manifest entry. Raises ValueError for an entry that `Manifest.add` never writes."""
    names = [field.name for field in fields(ShardEntry)]
    if not isinstance(entry, dict) or sorted(entry) != sorted(names):
        raise ValueError(f"expected an object with {', '.join(names)}, got {reprlib.repr(entry)}")
    for name, value in entry.items():
        if name.endswith("sha256"):
            absent = value is None and name == "errors_sha256"
            digest = isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value)
            valid = absent or bool(digest)
        else:
            valid = type(value) is int and 0 <= value < 2**63
        if not valid:
            raise ValueError(f"{name} is {reprlib.repr(value)}")
    if (entry["errors_sha256"] is None) != (entry["errors"] == 0):
        raise ValueError(f"{entry['errors']} errors, errors_sha256 {entry['errors_sha256']!r}")
    return ShardEntry(**entry)


def _sha256(path: Path) -> str | None:
    """Return a file's SHA-256, or None if it cannot be read or is not a regular file."""
    try:
        return sha256(path).hex() if path.is_file() else None
    except OSError:
        return None


@contextmanager
def folder_lock(folder: Path, token: str) -> Iterator[None]:
    """Create the folder and hold its lock, which the system releases when the process ends.

    The lock file contains the token, by which workers recognize their client's folder. Folders that
    this function created and that stayed empty are removed at the end. Raises InputError if the
    folder is locked, contains other files or cannot be written.
    """
    with ExitStack() as at_end:
        with output_errors(folder):
            _check_output(folder)
            for path in (*reversed(folder.parents), folder):
                if not path.exists():
                    at_end.callback(_remove_empty, path)
            folder.mkdir(parents=True, exist_ok=True)
            # O_NONBLOCK: opening a FIFO raises OSError instead of waiting for a reader.
            flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
            lock = os.open(folder / LOCK, flags, 0o666)
            at_end.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InputError(
                    f"{folder}: another gpt2block map writes to this folder"
                ) from error
            at_end.callback(_remove_lock, folder)
            os.ftruncate(lock, 0)
            os.write(lock, token.encode())
        yield


def _check_output(folder: Path) -> None:
    """Raise InputError unless the folder is new, empty or contains a job's output."""
    if folder.is_symlink() and not folder.exists():
        raise InputError(f"--output {folder}: a broken link, expected a folder")
    if not folder.exists() or (folder / MANIFEST).exists():
        return
    if not folder.is_dir():
        raise InputError(f"--output {folder}: not a folder")
    if any(path.name != LOCK for path in folder.iterdir()):
        raise InputError(
            f"--output {folder}: not empty, and not written by gpt2block map: choose another folder"
        )


def _remove_lock(folder: Path) -> None:
    if not (folder / MANIFEST).exists():
        (folder / LOCK).unlink(missing_ok=True)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError, ValueError):
        folder.rmdir()


@contextmanager
def output_errors(folder: Path) -> Iterator[None]:
    """Convert the operating system's errors about the output folder to InputErrors."""
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"--output {folder}: cannot be written: {reason(error)}") from error


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of workers that were killed while they wrote to the folder."""
    for pattern in (".part-*.tmp", f".{MANIFEST}.*.tmp", f"{ERRORS}/.part-*.tmp"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
