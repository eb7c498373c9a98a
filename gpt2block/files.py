"""Files that are replaced as a whole: whoever opens one finds the old content or the new."""

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


@contextmanager
def temporary_folder(directory: Path, name: str) -> Iterator[Path]:
    """Yield a new folder `.name-…` in `directory`, which is removed after the block.

    It is locked until then. The folders of this name without a lock, which killed processes have
    left, are removed first. Where folders cannot be locked, as on Windows and NFS, the new one has
    another name, and none is removed. Raises OSError.
    """
    with ExitStack() as held:
        with _lock(directory) as locks:  # nobody sees the new folder before it is locked
            for left in directory.glob(f".{name}-*") if locks else ():
                if left.is_symlink() or not left.is_dir():
                    continue
                with suppress(OSError), _lock(left, wait=False) as dead:
                    if dead:
                        shutil.rmtree(left, ignore_errors=True)
            prefix = f".{name}-" if locks else f".unlocked-{name}-"
            new = Path(held.enter_context(TemporaryDirectory(dir=directory, prefix=prefix)))
            if locks:
                held.enter_context(_lock(new))
        yield new


@contextmanager
def _lock(folder: Path, wait: bool = True) -> Iterator[bool]:
    """Lock a folder during the block, if that is possible: yields whether it is."""
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
