"""Replace files atomically: a reader sees either the old content or the new content."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from stat import S_IMODE, S_ISREG
from tempfile import TemporaryDirectory
from typing import BinaryIO
from uuid import uuid4

from gpt2block.errors import InputError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file to write, which replaces `path` after the with block.

    After an error or a crash, the old file is complete; after an error, the new file is removed.
    The file keeps its permissions. If `path` is a link, its target is replaced. A pipe or a device,
    such as /dev/stdout, is written directly. Raises OSError, also if the old file is read-only.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:  # also raised for a dangling link
        mode = None
    target = Path(os.path.realpath(path))
    if mode is not None and not (S_ISREG(mode) and target.is_file()):
        with path.open("wb") as stream:
            yield stream
        return
    if mode is not None:
        os.close(os.open(target, os.O_WRONLY))  # raises if the old file is read-only
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
    with suppress(OSError):  # make the rename durable; not every file system supports this
        _sync_folder(target.parent)


def write_file(path: Path, data: bytes) -> None:
    """Write or replace a file atomically. Raises InputError if it cannot be written."""
    check_file(path)
    try:
        with replacing(path) as file:
            file.write(data)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot be written: {reason}") from error


def check_file(path: Path) -> None:
    """Raise InputError unless a file can be written to `path`, before a long computation."""
    if path.is_dir():
        raise InputError(f"{path}: expected a file, got a directory")
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no directory {path.parent}: create it first")


def put_in_place(new: Path, path: Path) -> None:
    """Rename a new file to `path`, with the permissions of the file that it replaces."""
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


@contextmanager
def temporary_folder(directory: Path, name: str) -> Iterator[Path]:
    """Create a folder `.name-…` in `directory`, yield its path, and remove it afterwards.

    The folder is locked until then. Folders of this name without a lock, which killed processes
    have left behind, are removed first. If folders cannot be locked, as on Windows and NFS, the new
    folder has another name, and no other folder is removed. Raises OSError.
    """
    with ExitStack() as held:
        with cleared(directory, name) as locks:  # no process sees the new folder before its lock
            prefix = f".{name}-" if locks else f".unlocked-{name}-"
            new = Path(held.enter_context(TemporaryDirectory(dir=directory, prefix=prefix)))
            if locks:
                held.enter_context(_lock(new))
        yield new


@contextmanager
def cleared(directory: Path, name: str) -> Iterator[bool]:
    """Remove folders `.name-…` of killed processes, and lock `directory` during the with block.

    Yields whether folders can be locked; if not, none is removed. Raises OSError.
    """
    with _lock(directory) as locks:
        for left in directory.glob(f".{name}-*") if locks else ():
            if left.is_symlink() or not left.is_dir():
                continue
            with suppress(OSError), _lock(left, wait=False) as dead:
                if dead:
                    shutil.rmtree(left, ignore_errors=True)
        yield locks


@contextmanager
def _lock(folder: Path, wait: bool = True) -> Iterator[bool]:
    """Lock a folder during the with block. Yield whether locking succeeded."""
    if fcntl is None:
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY)
    locked = False
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            locked = True
        yield locked
    finally:
        os.close(descriptor)
