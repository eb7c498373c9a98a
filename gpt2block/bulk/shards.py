"""The output: parts that are there whole or not at all, and the manifest of those that are done."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from gpt2block.bulk.tasks import Kind
from gpt2block.errors import InputError

MANIFEST, LOCK, ERRORS = "manifest.ndjson", ".lock", "errors"
FORMATS = ("jsonl", "parquet")
_TO_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=str)


@dataclass(frozen=True)
class Done:
    """A finished shard, as the manifest has it. `tokens` are those of its results."""

    shard: int
    records: int
    errors: int
    tokens: int
    sha256: str
    errors_sha256: str | None  # None: no errors, no file


def part_name(shard: int, form: str) -> str:
    return f"part-{shard:05}.{form}"


def errors_name(shard: int) -> str:
    return f"{ERRORS}/part-{shard:05}.ndjson"


def replace_file(path: Path, data: bytes) -> str:
    """Write a file so that it is there whole or not at all, whatever happens; its SHA-256.

    Raises OSError, and leaves nothing behind then.
    """
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)
    return hashlib.sha256(data).hexdigest()


def _sync_folder(path: Path) -> None:
    """A name is on the disk when its folder is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def json_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """An object a line, UTF-8; NaN and infinity, which JSON does not have, as null."""
    return b"".join(_json(_plain(row)) + b"\n" for row in rows)


def _json(value: Any) -> bytes:
    try:
        return _TO_JSON.encode(value).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, in a field that was kept
        return json.dumps(value, allow_nan=False, default=str).encode()


def _plain(value: Any) -> Any:
    """As JSON has it. A float32 gets the fewest digits that tell it from its neighbours."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, np.ndarray) and value.dtype == np.float32:
        numbers = map(float, value.ravel().astype("S32").tolist())
        return [number if math.isfinite(number) else None for number in numbers]
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value


def parquet(
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, Kind],
    keep: Sequence[str],
    single: bool,
) -> bytes:
    """The same as a Parquet file. Kept fields are text: strings as they are, all else as JSON.

    single: whether columns that are lists belong to one sample rather than several.
    """
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet  # noqa: PLC0415

    types = {
        "float": pa.float64(), "int": pa.int64(), "text": pa.string(),
        "texts": pa.list_(pa.string()), "vector": pa.list_(pa.float32()),
        "floats": pa.list_(pa.float32()), "ints": pa.list_(pa.int32()),
    }  # fmt: skip
    fields = [("index", pa.int64()), *((name, pa.string()) for name in keep)]
    for name, kind in columns.items():
        several = kind in ("floats", "ints") and not single
        fields.append((name, pa.list_(types[kind]) if several else types[kind]))
    kept = [
        {name: row[name] if isinstance(row[name], str) else _json(_plain(row[name])).decode()
         for name in keep}
        for row in rows
    ]  # fmt: skip
    table = pa.Table.from_pylist(
        [{**row, **texts} for row, texts in zip(rows, kept, strict=True)], pa.schema(fields)
    )
    sink = pa.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink)
    data: bytes = sink.getvalue().to_pybytes()
    return data


class Manifest:
    """DIR/manifest.ndjson: the job in its first line, then a line for each shard that is done.

    Lines are added as shards are finished; `finish` puts them in order.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / MANIFEST
        self.job: dict[str, Any] | None = None
        self.done: dict[int, Done] = {}
        if self.path.exists():
            self._read()

    def _read(self) -> None:
        lines = self.path.read_bytes().split(b"\n")[:-1]  # what has no end was never finished
        try:
            self.job, *rest = (json.loads(line) for line in lines)
            if not isinstance(self.job, dict):
                raise ValueError("no job in its first line")
            found = [Done(**entry) for entry in rest]
        except (ValueError, TypeError) as error:
            raise InputError(f"{self.path}: damaged, or of another program: {error}") from error
        self.done = {entry.shard: entry for entry in found}

    def begin(self, job: dict[str, Any]) -> None:
        """Write it anew: the job, and what is done of it, in order."""
        self.job = job
        entries = [asdict(self.done[shard]) for shard in sorted(self.done)]
        replace_file(self.path, json_lines([job, *entries]))

    def add(self, entry: Done) -> None:
        """A shard is done."""
        with self.path.open("ab") as file:
            file.write(json_lines([asdict(entry)]))
            file.flush()
            os.fsync(file.fileno())
        self.done[entry.shard] = entry

    def finish(self) -> None:
        """All is done: the lines in order."""
        assert self.job is not None
        self.begin(self.job)

    def forget_damaged(self, form: str) -> list[str]:
        """Drop what is no longer as it was written; the names of those files."""
        folder, damaged = self.path.parent, []
        for shard, entry in list(self.done.items()):
            files = [(folder / part_name(shard, form), entry.sha256)]
            if entry.errors_sha256 is not None:
                files.append((folder / errors_name(shard), entry.errors_sha256))
            wrong = [path.name for path, sha256 in files if _sha256(path) != sha256]
            if wrong:
                damaged += wrong
                del self.done[shard]
        return damaged


def _sha256(path: Path) -> str | None:
    found = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(2**24):
                found.update(chunk)
    except OSError:
        return None
    return found.hexdigest()


@contextmanager
def locked(folder: Path, token: str) -> Iterator[None]:
    """Alone in this folder, which is made; the system ends it with the process, however that ends.

    The lock holds the token, by which workers know whom they write for. What was made is removed
    again where nothing came to stand in it.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(f"{folder}: another gpt2block map is writing here") from error
        try:
            file.truncate(0)
            file.write(token)
            file.flush()
            yield
        finally:
            if not (folder / MANIFEST).exists():
                (folder / LOCK).unlink(missing_ok=True)
                if made:
                    with suppress(OSError):
                        folder.rmdir()


def remove_leftovers(folder: Path) -> None:
    """Files that were being written when a worker was killed."""
    for pattern in (".part-*.tmp", f".{MANIFEST}.*.tmp", f"{ERRORS}/.part-*.tmp"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
