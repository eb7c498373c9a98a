"""Divide the input (JSONL, Parquet, lines of text) into shards, and read the records of a shard."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

import numpy as np

from gpt2block.bulk import paths
from gpt2block.bulk.tasks import Problem, problem_of
from gpt2block.errors import InputError, require

_KINDS = {
    ".txt": "text", ".text": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"
}  # fmt: skip
_EXPECTED = f"a file that ends in {', '.join(_KINDS)}"
LONGEST = 2**24  # maximum bytes of a line; a longer line becomes an error
_CHUNK = 2**24  # bytes read from a file at once


class ChangedError(RuntimeError):
    """Raised when the input has changed since the job divided the input into shards."""


@dataclass(frozen=True)
class Span:
    """A range of bytes from `start` to `end` in a file, or a range of rows in a Parquet file."""

    path: str
    start: int
    end: int
    line: int  # number of the first line in the file, from 0
    lines: int  # number of lines


@dataclass(frozen=True)
class Shard:
    """A range of input lines that are computed together and written to one part file."""

    number: int
    first: int  # index of the first line in the whole input
    lines: int
    spans: tuple[Span, ...]
    sha256: str  # hash of the shard's bytes or, for Parquet files, of the files' hashes


@dataclass(frozen=True)
class Cell:
    """A value in an Arrow column; Python may have no equivalent of its type."""

    column: Any  # pyarrow.ChunkedArray
    row: int

    def value(self) -> Any:
        """Return the value as a Python object. Raises an Arrow error if Python cannot hold it."""
        return self.column[self.row].as_py()

    def chunks(self) -> list[Any]:
        """Return Arrow arrays that hold only this value."""
        return list(self.column.slice(self.row, 1).chunks)


@dataclass(frozen=True)
class Record:
    """A record, read from one line of the input.

    index: the line's number in the whole input. line: its number in the file. value: a text or
    token ids, or the Problem of a line that cannot be read. kept: fields to copy into the results,
    as Cells for a Parquet file.
    """

    index: int
    file: str
    line: int
    value: Any
    kept: dict[str, Any] = field(default_factory=dict)


def find_files(
    given: Sequence[str | Path], say: Callable[[str], None] = lambda line: None
) -> list[Path]:
    """Return the input's files in the order of `given`; a folder yields its files sorted by name.

    say: called with a message about ignored entries of a folder: subfolders and other file types.
    Raises InputError.
    """
    files: list[Path] = []
    for name in given:
        path = paths.absolute("input", name)
        with _reading(path):
            mode = path.stat().st_mode
            if S_ISDIR(mode):
                files += _in_folder(path, say)
            elif not S_ISREG(mode):
                raise InputError(f"{path}: expected a regular file or a folder")
            elif not _known(path):
                raise InputError(f"{path}: expected {_EXPECTED}")
            else:
                files.append(path)
    return files


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Convert the operating system's errors about a path to InputErrors."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except (OSError, UnicodeEncodeError) as error:  # UnicodeEncodeError: a lone surrogate in `path`
        raise InputError(f"{path}: cannot be read: {paths.reason(error)}") from error


def _in_folder(folder: Path, say: Callable[[str], None]) -> list[Path]:
    inside = sorted(folder.iterdir())
    files = [path for path in inside if _known(path) and path.is_file()]
    if not files:
        raise InputError(f"{folder}: expected {_EXPECTED} in this folder, found none")
    others = [path.name + "/" * path.is_dir() for path in inside if path not in set(files)]
    if others:
        several = f"{len(others):,} entries are not read ({paths.listed(others)})"
        say(f"{folder}: {several}: expected {_EXPECTED}")
    return files


def _known(path: Path) -> bool:
    return kind_of(path) is not None and not path.name.startswith(".")


def kind_of(path: Path) -> str | None:
    """Return the file's format by its extension: "text", "jsonl", "parquet" or None."""
    return _KINDS.get(path.suffix.lower())


def sizes(files: Iterable[Path]) -> list[tuple[Path, int]]:
    """Return (file, size in bytes) for each file. Raises InputError."""
    file_sizes = []
    for path in files:
        with _reading(path):
            file_sizes.append((path, path.stat().st_size))
    return file_sizes


def described(files: Sequence[tuple[Path, int]]) -> dict[str, object]:
    """Return the manifest's description of the input: names, formats and sizes of the files.

    files: pairs of a file and its size in bytes.
    """
    kinds = dict.fromkeys(kind_of(path) for path, _ in files)
    names = hashlib.sha256()
    for path, size in files:
        names.update(b"%s\0%s\0%d\n" % (os.fsencode(path.name), str(kind_of(path)).encode(), size))
    return {
        "kinds": ", ".join(map(str, kinds)),
        "files": len(files),
        "bytes": sum(size for _, size in files),
        "names_sha256": names.hexdigest(),
    }


def check_kept(files: Sequence[Path], column: str, keep: Sequence[str]) -> None:
    """Raise InputError if a kept field is not `column` and the input includes a text file."""
    other = next((name for name in keep if name != column), None)
    text = next((path for path in files if kind_of(path) == "text"), None)
    if text is not None and other is not None:
        raise InputError(
            f"keep: {text} is a text file, whose lines have only the field {column!r}: omit "
            f"{other!r}, or give the input as .jsonl"
        )


def are_typed(files: Sequence[Path], keep: Sequence[str]) -> bool:
    """Return whether the fields to keep have Arrow types: only if all input files are Parquet.

    Raises InputError for a field whose types differ between files.
    """
    if not keep or any(kind_of(path) != "parquet" for path in files):
        return False
    types: dict[str, tuple[object, Path]] = {}
    for path in files:
        with _reading(path):
            found = arrow_types(path, keep)
        for name, kind in found.items():
            known, first = types.setdefault(name, (kind, path))
            if kind != known:
                raise InputError(
                    f"keep: {name!r} is {known} in {first.name} and {kind} in {path.name}: "
                    "convert it to one type, or use --format jsonl"
                )
    return True


def arrow_types(path: Path, columns: Sequence[str]) -> dict[str, object]:
    """Return the Arrow types of a Parquet file's columns by name. Raises InputError, OSError."""
    schema = _parquet_file(path, columns).schema_arrow
    return {name: schema.field(name).type for name in columns}


def cut(files: Iterable[Path], size: int, columns: Sequence[str]) -> list[Shard]:
    """Divide the input into shards of `size` lines; the last shard may have fewer.

    Reads and hashes every byte once. columns: names of columns that a Parquet file must have.
    Raises InputError.
    """
    cutter = _Cutter(size)
    for path in files:
        with _reading(path):
            if kind_of(path) == "parquet":
                cutter.add_rows(path, int(_parquet_file(path, columns).metadata.num_rows))
            else:
                cutter.add_lines(path)
    cutter.end_shard()
    return cutter.shards


class _Cutter:
    """Collect spans (ranges of a file's lines) into shards of a fixed number of lines."""

    def __init__(self, size: int) -> None:
        self.shards: list[Shard] = []
        self._size, self._first = size, 0
        self._room = size  # lines that the current shard still needs
        self._spans: list[Span] = []
        self._hash = hashlib.sha256()

    def _add(self, span: Span) -> None:
        if span.lines:
            self._spans.append(span)
            self._room -= span.lines
        if not self._room:
            self.end_shard()

    def end_shard(self) -> None:
        lines = self._size - self._room
        if lines:
            sha256 = self._hash.hexdigest()
            number = len(self.shards)
            self.shards.append(Shard(number, self._first, lines, tuple(self._spans), sha256))
            self._first, self._room = self._first + lines, self._size
            self._spans, self._hash = [], hashlib.sha256()

    def add_lines(self, path: Path) -> None:
        start = at = line = lines = 0  # start, line, lines: current Span; at: chunk's offset
        ended = True
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + 1
                taken = used = 0  # line ends and bytes of the chunk in finished Spans
                while len(ends) - taken >= self._room - lines:
                    taken += self._room - lines
                    lines = self._room
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
        digest, row = paths.sha256(path), 0
        while row < rows:
            count = min(self._room, rows - row)
            self._hash.update(digest)
            self._add(Span(str(path), row, row + count, row, count))
            row += count


def read(shard: Shard, column: str, keep: Sequence[str] = ()) -> Iterator[Record]:
    """Yield the records of a shard; blank lines are skipped.

    Raises OSError for a file that cannot be read, and at the end ChangedError if the hash of the
    bytes differs from the shard's hash.
    """
    digest, index = hashlib.sha256(), shard.first
    for span in shard.spans:
        path = Path(span.path)
        try:
            if kind_of(path) == "parquet":
                digest.update(paths.sha256(path))
                yield from _rows(span, index, column, keep)
            else:
                as_json = kind_of(path) == "jsonl"
                for number, line in enumerate(_lines(span, digest)):
                    place = (index + number, path.name, span.line + number)
                    record = _record(place, line, column, keep, as_json)
                    if record is not None:
                        yield record
        except OSError as error:
            raise OSError(f"{path}: cannot be read: {paths.reason(error)}") from error
        index += span.lines
    if digest.hexdigest() != shard.sha256:
        names = ", ".join(dict.fromkeys(span.path for span in shard.spans))
        raise ChangedError(f"{names}: changed since the job began, or differs on this worker")


def begins_with_text(shards: Sequence[Shard], column: str) -> bool:
    """Return whether the first readable record of the first shard is a text. Raises OSError."""
    values = (record.value for shard in shards[:1] for record in read(shard, column))
    return isinstance(next((v for v in values if not isinstance(v, Problem)), None), str)


def _lines(span: Span, found: Any) -> Iterator[bytes | None]:
    """Yield the span's lines without line ends, or None for a line longer than LONGEST.

    Every byte of the span is added to the hash.
    """
    with open(span.path, "rb") as file:
        file.seek(span.start)
        at, whole = span.start, True
        while at < span.end:
            line = file.readline(min(LONGEST + 1, span.end - at))  # with the line end
            found.update(line)
            at += len(line)
            if not line:
                return  # the file has become shorter: `read` reports a wrong hash
            begins, whole = whole, line.endswith(b"\n") or at == span.end
            if whole:
                yield line.removesuffix(b"\n").removesuffix(b"\r") if begins else None


def _record(
    place: tuple[int, str, int], line: bytes | None, column: str, keep: Sequence[str], as_json: bool
) -> Record | None:
    """Parse a line of JSONL or text into a Record. Return None for a blank line."""
    if line is None:
        return Record(*place, Problem(f"a line of more than {LONGEST:,} bytes"))
    try:
        text = line.decode("utf-8-sig" if place[2] == 0 else "utf-8")
        if not text.strip():
            return None
        if not as_json:
            return Record(*place, text, dict.fromkeys(keep, text))
        entry = json.loads(text)
    except UnicodeDecodeError as error:
        problem = f"not UTF-8: byte {error.start} of the line"
    except (ValueError, RecursionError) as error:
        problem = f"not JSON: {error}"
    else:
        if isinstance(entry, dict) and column in entry:
            return Record(*place, entry[column], {name: entry.get(name) for name in keep})
        expected = f"expected an object, got {type(entry).__name__}"
        problem = f"no field {column!r}" if isinstance(entry, dict) else expected
    return Record(*place, Problem(problem))


def require_pyarrow() -> Any:
    """Import and return pyarrow with pyarrow.parquet. Raises InputError if it is not installed."""
    require("Parquet", "parquet", "pyarrow")
    import pyarrow.parquet  # noqa: PLC0415

    return pyarrow


def _parquet_file(path: Path, columns: Sequence[str]) -> Any:
    """Open a Parquet file. Raises InputError unless it has each of these columns once."""
    pyarrow = require_pyarrow()
    try:
        file = pyarrow.parquet.ParquetFile(path)
        present = list(file.schema_arrow.names)
    except (pyarrow.ArrowException, ValueError) as error:
        raise InputError(f"{path}: not a Parquet file: {error}") from error
    for name in columns:
        if present.count(name) != 1:
            found = f"found {', '.join(present)}" if name not in present else "found several"
            raise InputError(f"{path}: expected a column {name!r}, {found}")
    return file


def _rows(span: Span, index: int, column: str, keep: Sequence[str]) -> Iterator[Record]:
    file, first = require_pyarrow().parquet.ParquetFile(span.path), 0
    names = list(dict.fromkeys((column, *keep)))
    for group in range(file.num_row_groups):
        end = first + file.metadata.row_group(group).num_rows
        start, stop = max(span.start, first), min(span.end, end)
        if start < stop:
            table = file.read_row_group(group, names).slice(start - first, stop - start)
            columns = {name: table[name] for name in names}
            for row in range(stop - start):
                place = (index + start - span.start + row, Path(span.path).name, start + row)
                kept = {name: Cell(columns[name], row) for name in keep}
                try:
                    value = Cell(columns[column], row).value()
                except UnicodeDecodeError as error:
                    value = Problem(f"not UTF-8: byte {error.start}")
                except BaseException as error:
                    value = Problem(f"{column}: {problem_of(error).reason}")
                yield Record(*place, value, kept)
        first = end
