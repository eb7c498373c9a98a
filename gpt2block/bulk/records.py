"""The input: JSONL, Parquet or lines of text, cut into shards that a worker reads by itself."""

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
from gpt2block.bulk.problems import problem_of
from gpt2block.errors import InputError

TEXT, JSONL, PARQUET = (".txt", ".text"), (".jsonl", ".ndjson"), (".parquet",)
_KINDS = {"text": TEXT, "jsonl": JSONL, "parquet": PARQUET}
LONGEST = 2**24  # bytes of a line; what is longer is not read
_CHUNK = 2**24
_NAMED = 3  # files of a folder that are left out, and shown


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
class Cell:
    """A value in an Arrow column, which has a type that Python may not have."""

    column: Any  # pyarrow.ChunkedArray
    row: int

    def value(self) -> Any:
        """As a Python object; raises what Arrow does for what Python cannot hold."""
        return self.column[self.row].as_py()

    def chunks(self) -> list[Any]:
        """As Arrow arrays that hold this value alone."""
        return list(self.column.slice(self.row, 1).chunks)


@dataclass(frozen=True)
class Record:
    """A text or token ids. `index` counts the lines of all the input, `line` those of the file.

    kept: fields to carry into the results; those of a Parquet file are Cells.
    """

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


def find_files(
    given: Sequence[str | Path], say: Callable[[str], None] = lambda line: None
) -> list[Path]:
    """The input's files in order, those of a folder by name. Raises InputError.

    say: hears of what is left out of a folder: its subfolders and files of other types.
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
                raise InputError(f"{path}: expected {_expected()}")
            else:
                files.append(path)
    return files


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Make the system's errors InputErrors."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except (OSError, UnicodeEncodeError) as error:  # half of a surrogate pair in the name
        raise InputError(f"{path}: cannot be read: {paths.why(error)}") from error


def _in_folder(folder: Path, say: Callable[[str], None]) -> list[Path]:
    inside = sorted(folder.iterdir())
    files = [path for path in inside if _known(path) and path.is_file()]
    if not files:
        raise InputError(f"{folder}: expected {_expected()} in this folder, found none")
    others = [path.name + "/" * path.is_dir() for path in inside if path not in set(files)]
    if others:
        names = ", ".join(others[:_NAMED]) + ", …" * (len(others) > _NAMED)
        say(f"{folder}: {len(others):,} entries are not read ({names}): expected {_expected()}")
    return files


def _known(path: Path) -> bool:
    return kind_of(path) is not None and not path.name.startswith(".")


def kind_of(path: Path) -> str | None:
    """How its records are read: "text", "jsonl" or "parquet", by its extension."""
    ending = path.suffix.lower()
    return next((kind for kind, endings in _KINDS.items() if ending in endings), None)


def any_text(files: Iterable[Path]) -> bool:
    """Whether one of the files holds lines of text, which need a tokenizer."""
    return any(path.suffix.lower() in TEXT for path in files)


def _expected() -> str:
    return f"a file that ends in {', '.join((*TEXT, *JSONL, *PARQUET))}"


def sizes(files: Iterable[Path]) -> list[tuple[Path, int]]:
    """The files with their lengths in bytes. Raises InputError."""
    found = []
    for path in files:
        with _reading(path):
            found.append((path, path.stat().st_size))
    return found


def described(files: Sequence[tuple[Path, int]]) -> dict[str, Any]:
    """What identifies the input except for its bytes: each file's name, kind and length."""
    kinds = dict.fromkeys(kind_of(path) for path, _ in files)
    named = hashlib.sha256()
    for path, size in files:
        named.update(b"%s\0%s\0%d\n" % (os.fsencode(path.name), str(kind_of(path)).encode(), size))
    return {
        "kinds": ", ".join(map(str, kinds)),
        "files": len(files),
        "bytes": sum(size for _, size in files),
        "names_sha256": named.hexdigest(),
    }


def check_kept(files: Sequence[Path], column: str, keep: Sequence[str]) -> None:
    """Raise InputError for a field other than `column` of a text file, which has only that one."""
    other = next((name for name in keep if name != column), None)
    text = next((path for path in files if kind_of(path) == "text"), None)
    if text is not None and other is not None:
        raise InputError(
            f"keep: {text} is a text file, whose lines have only the field {column!r}: leave out "
            f"{other!r}, or give the input as .jsonl"
        )


def are_typed(files: Sequence[Path], keep: Sequence[str]) -> bool:
    """Whether the kept fields have Arrow types: all of the input is Parquet.

    Raises InputError for a field whose types differ between files.
    """
    if not keep or any(kind_of(path) != "parquet" for path in files):
        return False
    types: dict[str, tuple[Any, Path]] = {}
    for path in files:
        with _reading(path):
            found = arrow_types(path, keep)
        for name, kind in found.items():
            known, first = types.setdefault(name, (kind, path))
            if kind != known:
                raise InputError(
                    f"keep: {name!r} is {known} in {first.name} and {kind} in {path.name}: "
                    "expected one type, or the format jsonl"
                )
    return True


def arrow_types(path: Path, columns: Sequence[str]) -> dict[str, Any]:
    """The types of a Parquet file's columns by name. Raises InputError, OSError."""
    schema = _parquet_file(path, columns).schema_arrow
    return {name: schema.field(name).type for name in columns}


def cut(files: Iterable[Path], size: int, columns: Sequence[str]) -> list[Shard]:
    """The input in shards of `size` lines, the last one shorter. Every byte is read once.

    columns: those a Parquet file must have. Raises InputError.
    """
    cutter = _Cutter(size)
    for path in files:
        with _reading(path):
            if kind_of(path) == "parquet":
                cutter.add_rows(path, int(_parquet_file(path, columns).metadata.num_rows))
            else:
                cutter.add_lines(path)
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
    """The records of a shard; blank lines of JSONL are none.

    Raises OSError for a file that cannot be read, and in the end ChangedError.
    """
    found, index = hashlib.sha256(), shard.first
    for span in shard.spans:
        path = Path(span.path)
        try:
            if kind_of(path) == "parquet":
                found.update(_digest(path))
                yield from _rows(span, index, column, keep)
            else:
                as_json = kind_of(path) == "jsonl"
                for number, line in enumerate(_lines(span, found)):
                    place = (index + number, path.name, span.line + number)
                    record = _record(place, line, column, keep, as_json)
                    if record is not None:
                        yield record
        except OSError as error:
            raise OSError(f"{path}: cannot be read: {paths.why(error)}") from error
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
    place: tuple[int, str, int],
    line: bytes | None,
    column: str,
    keep: Sequence[str],
    as_json: bool,
) -> Record | Unreadable | None:
    """What a line holds: a JSON object, or the text of its only field, `column`."""
    if line is None:
        return Unreadable(*place, f"a line of more than {LONGEST:,} bytes")
    try:
        text = line.decode("utf-8-sig" if place[2] == 0 else "utf-8")
    except UnicodeDecodeError as error:
        return Unreadable(*place, f"not UTF-8: byte {error.start} of the line")
    if not as_json:
        return Record(*place, text, dict.fromkeys(keep, text))
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


def require_pyarrow() -> Any:
    """pyarrow with its `parquet`; InputError where it is not installed."""
    try:
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError as error:
        raise InputError("Parquet needs pyarrow: pip install 'gpt2block[parquet]'") from error
    return pyarrow


def _parquet_file(path: Path, columns: Sequence[str]) -> Any:
    """The file, opened; InputError unless it has each of these columns once."""
    pyarrow = require_pyarrow()
    try:
        file = pyarrow.parquet.ParquetFile(path)
        there = list(file.schema_arrow.names)
    except (pyarrow.ArrowException, ValueError) as error:
        raise InputError(f"{path}: not a Parquet file: {error}") from error
    for name in columns:
        if there.count(name) != 1:
            found = f"found {', '.join(there)}" if name not in there else "found several"
            raise InputError(f"{path}: expected a column {name!r}, {found}")
    return file


def _rows(
    span: Span, index: int, column: str, keep: Sequence[str]
) -> Iterator[Record | Unreadable]:
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
                    yield Unreadable(*place, f"not UTF-8: byte {error.start}")
                except BaseException as error:
                    yield Unreadable(*place, f"{column}: {problem_of(error).reason}")
                else:
                    yield Record(*place, value, kept)
        first = end
