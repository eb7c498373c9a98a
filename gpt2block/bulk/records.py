"""The input: JSONL, Parquet or lines of text, cut into shards that a worker reads by itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gpt2block.errors import InputError

TEXT, JSONL, PARQUET = (".txt", ".text"), (".jsonl", ".ndjson"), (".parquet",)
LONGEST = 2**24  # bytes of a line; what is longer is not read
_CHUNK = 2**24


class ChangedError(RuntimeError):
    """The input is not what it was when the job was cut into shards."""


@dataclass(frozen=True)
class Span:
    """Part of a file: the bytes from `start` to `end`, or those rows of a Parquet file."""

    path: str
    start: int
    end: int
    line: int  # the first one's number, from 0
    lines: int


@dataclass(frozen=True)
class Shard:
    """What is computed and written as one. `first` is its first line's index in all the input."""

    number: int
    first: int
    lines: int
    spans: tuple[Span, ...]
    sha256: str  # of the bytes; of a Parquet file, of all of it


@dataclass(frozen=True)
class Record:
    """A text or token ids. `index` counts the lines of all the input, `line` those of the file."""

    index: int
    file: str
    line: int
    value: Any
    kept: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Unreadable:
    """A record that cannot be read, and why."""

    index: int
    file: str
    line: int
    reason: str


def find_files(given: Sequence[str | Path]) -> list[Path]:
    """The input's files in order, those of a folder by name. Raises InputError."""
    files: list[Path] = []
    for path in (Path(name).expanduser().absolute() for name in given):
        if path.is_dir():
            inside = [file for file in sorted(path.iterdir()) if _known(file) and file.is_file()]
            if not inside:
                raise InputError(f"{path}: expected {_expected()} in this folder, found none")
            files += inside
        elif not path.is_file():
            raise InputError(f"{path}: no such file")
        elif not _known(path):
            raise InputError(f"{path}: expected {_expected()}")
        else:
            files.append(path)
    return files


def _known(path: Path) -> bool:
    return path.suffix.lower() in (*TEXT, *JSONL, *PARQUET) and not path.name.startswith(".")


def _expected() -> str:
    return f"a file that ends in {', '.join((*TEXT, *JSONL, *PARQUET))}"


def cut(files: Iterable[Path], size: int, columns: Sequence[str]) -> list[Shard]:
    """The input in shards of `size` lines, the last one shorter. Every byte is read once.

    columns: those a Parquet file must have. Raises InputError.
    """
    cutter = _Cutter(size)
    for path in files:
        try:
            if path.suffix.lower() in PARQUET:
                cutter.add_rows(path, _parquet_rows(path, columns))
            else:
                cutter.add_lines(path)
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    return cutter.finish()


class _Cutter:
    """Gathers spans until a shard is full."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._shards: list[Shard] = []
        self._begin(0)

    def _begin(self, first: int) -> None:
        self._first, self._lines = first, 0
        self._spans: list[Span] = []
        self._hash = hashlib.sha256()

    def _add(self, span: Span) -> None:
        if span.lines:
            self._spans.append(span)
            self._lines += span.lines
        if self._lines == self._size:
            self._end()

    def _end(self) -> None:
        digest = self._hash.hexdigest()
        shard = Shard(len(self._shards), self._first, self._lines, tuple(self._spans), digest)
        self._shards.append(shard)
        self._begin(self._first + self._lines)

    def finish(self) -> list[Shard]:
        if self._lines:
            self._end()
        return self._shards

    def add_lines(self, path: Path) -> None:
        start = at = line = lines = 0  # of the span that is being read
        ended = True
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + 1
                taken = used = 0  # line ends, bytes of the chunk
                while len(ends) - taken >= self._size - self._lines - lines:
                    taken += self._size - self._lines - lines
                    lines = self._size - self._lines
                    end = int(ends[taken - 1])
                    self._hash.update(chunk[used:end])
                    self._add(Span(str(path), start, at + end, line, lines))
                    start, line, lines, used = at + end, line + lines, 0, end
                lines += len(ends) - taken
                self._hash.update(chunk[used:])
                at += len(chunk)
                ended = chunk.endswith(b"\n")
        self._add(Span(str(path), start, at, line, lines + (not ended)))

    def add_rows(self, path: Path, rows: int) -> None:
        digest, row = _digest(path), 0
        while row < rows:
            count = min(self._size - self._lines, rows - row)
            self._hash.update(digest)
            self._add(Span(str(path), row, row + count, row, count))
            row += count


def _digest(path: Path) -> bytes:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.digest()


def read(shard: Shard, column: str, keep: Sequence[str] = ()) -> Iterator[Record | Unreadable]:
    """The records of a shard; blank lines of JSONL are none. Raises ChangedError in the end."""
    found, index = hashlib.sha256(), shard.first
    for span in shard.spans:
        path = Path(span.path)
        try:
            if path.suffix.lower() in PARQUET:
                found.update(_digest(path))
                yield from _rows(span, index, column, keep)
            else:
                as_json = path.suffix.lower() in JSONL
                for number, line in enumerate(_lines(span, found)):
                    place = (index + number, path.name, span.line + number)
                    record = _record(place, line, column if as_json else None, keep)
                    if record is not None:
                        yield record
        except OSError as error:
            raise ChangedError(f"{path}: cannot be read: {error}") from error
        index += span.lines
    if found.hexdigest() != shard.sha256:
        names = ", ".join(dict.fromkeys(span.path for span in shard.spans))
        raise ChangedError(f"{names}: has changed, or is another file where this worker runs")


def _lines(span: Span, found: Any) -> Iterator[bytes | None]:
    """The lines without their ends, None for one that is too long."""
    with open(span.path, "rb") as file:
        file.seek(span.start)
        at = span.start
        while at < span.end:
            line = file.readline(min(LONGEST, span.end - at))
            found.update(line)
            at += len(line)
            whole = line.endswith(b"\n") or at == span.end
            if not line:
                return  # the file has become shorter: the hash will tell
            while not whole:
                rest = file.readline(min(LONGEST, span.end - at))
                found.update(rest)
                at += len(rest)
                whole = not rest or rest.endswith(b"\n") or at == span.end
                line = b""
            yield line.removesuffix(b"\n").removesuffix(b"\r") if line else None


def _record(
    place: tuple[int, str, int], line: bytes | None, column: str | None, keep: Sequence[str]
) -> Record | Unreadable | None:
    """What a line holds: text, or, with a column, a JSON object."""
    if line is None:
        return Unreadable(*place, f"a line of more than {LONGEST:,} bytes")
    try:
        text = line.decode("utf-8-sig" if place[2] == 0 else "utf-8")
    except UnicodeDecodeError as error:
        return Unreadable(*place, f"not UTF-8: byte {error.start} of the line")
    if column is None:
        return Record(*place, text)
    return _object(place, text, column, keep) if text.strip() else None


def _object(
    place: tuple[int, str, int], text: str, column: str, keep: Sequence[str]
) -> Record | Unreadable:
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Unreadable(*place, f"not JSON: {error}")
    if not isinstance(entry, dict):
        return Unreadable(*place, f"expected an object, got {type(entry).__name__}")
    if column not in entry:
        return Unreadable(*place, f"no field {column!r}")
    return Record(*place, entry[column], {name: entry.get(name) for name in keep})


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError as error:
        raise InputError("Parquet needs pyarrow: pip install 'gpt2block[parquet]'") from error
    return pyarrow


def _parquet_rows(path: Path, columns: Sequence[str]) -> int:
    pyarrow = _pyarrow()
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise InputError(f"{path}: not a Parquet file: {error}") from error
    absent = [name for name in columns if name not in file.schema_arrow.names]
    if absent:
        there = ", ".join(file.schema_arrow.names)
        raise InputError(f"{path}: expected a column {absent[0]!r}, found {there}")
    return int(file.metadata.num_rows)


def _rows(
    span: Span, index: int, column: str, keep: Sequence[str]
) -> Iterator[Record | Unreadable]:
    file, first = _pyarrow().parquet.ParquetFile(span.path), 0
    for group in range(file.num_row_groups):
        end = first + file.metadata.row_group(group).num_rows
        start, stop = max(span.start, first), min(span.end, end)
        if start < stop:
            table = file.read_row_group(group, [column, *keep]).slice(start - first, stop - start)
            columns = [table[name] for name in (column, *keep)]
            for row in range(stop - start):
                place = (index + start - span.start + row, Path(span.path).name, start + row)
                try:
                    value, *kept = (cells[row].as_py() for cells in columns)
                except UnicodeDecodeError as error:
                    yield Unreadable(*place, f"not UTF-8: byte {error.start}")
                    continue
                yield Record(*place, value, dict(zip(keep, kept, strict=True)))
        first = end
