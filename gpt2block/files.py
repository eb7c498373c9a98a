"""Files that are replaced as a whole: whoever opens one finds the old content or the new."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_IMODE, S_ISREG
from typing import BinaryIO
from uuid import uuid4

from gpt2block.errors import InputError


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file to write, which takes the place of `path` after the block.

    After an error, a crash included, the old file is complete; after an error no other file is
    left. A file keeps its permissions, and of a link the target is replaced. A pipe or a device,
    such as /dev/stdout, is written directly. Raises OSError, also where the old file is read-only.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:  # also a link to nothing
        mode = None
    target = Path(os.path.realpath(path))
    if mode is not None and not (S_ISREG(mode) and target.is_file()):
        with path.open("wb") as stream:
            yield stream
        return
    if mode is not None:
        os.close(os.open(target, os.O_WRONLY))  # as to write into it
    new = target.with_name(f".{target.name[:40]}.{uuid4().hex}.tmp")
    try:
        with new.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        put_in_place(new, target)
    except BaseException:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # not every file system can; it makes the new name permanent
        _sync_folder(target.parent)


def write_file(path: Path, data: bytes) -> None:
    """Write or replace a file as a whole. Raises InputError where it cannot."""
    check_file(path)
    try:
        with replacing(path) as file:
            file.write(data)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot be written: {reason}") from error


def check_file(path: Path) -> None:
    """Raise InputError unless a file can have this path; to be called before a long computation."""
    if path.is_dir():
        raise InputError(f"{path}: expected a file, got a directory")
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no directory {path.parent}: create it first")


def put_in_place(new: Path, path: Path) -> None:
    """Rename a new file to `path`; a file that it replaces passes on its permissions."""
    with suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if S_ISREG(mode):
            new.chmod(S_IMODE(mode))
    os.replace(new, path)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
