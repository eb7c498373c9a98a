"""The folder that keeps the engine and compiled PTX, so that later processes need not compile."""

from __future__ import annotations

import atexit
import fcntl
import gzip
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path

VARIABLE = "GPT2BLOCK_CPU_CUDA_CACHE"
MAX_BYTES = 512 * 2**20  # size of the files above which the least recently used ones are deleted
TRIM_EVERY = 64  # writes of a process from one look at all files to the next
_writes = count()


@cache
def folder() -> Path:
    """Return the folder, which exists.

    The folder is $GPT2BLOCK_CPU_CUDA_CACHE or a folder in the user's cache, $XDG_CACHE_HOME or
    ~/.cache. If this folder cannot be written, or belongs to another user, this process uses a
    temporary folder.
    """
    # RuntimeError: there is no home folder; AttributeError: Windows has no getuid
    with suppress(OSError, RuntimeError, AttributeError):
        stated = os.environ.get("XDG_CACHE_HOME", "")
        user = Path(stated) if os.path.isabs(stated) else Path.home() / ".cache"
        kept = Path(os.environ.get(VARIABLE) or user / "gpt2block" / "emulator").absolute()
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=kept):
            if kept.stat().st_uid == os.getuid():
                return kept
    made = tempfile.mkdtemp(prefix="gpt2block-emulator-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def read(name: str) -> str | None:
    """Return a kept text, which then counts as used now; None if there is none or it is damaged."""
    with suppress(OSError, EOFError, zlib.error):
        text = gzip.decompress((folder() / name).read_bytes()).decode()
        os.utime(folder() / name)
        return text
    return None


def write(name: str, text: str) -> None:
    """Keep a text, if the folder has room for it."""
    with suppress(OSError):
        with tempfile.NamedTemporaryFile(dir=folder(), delete=False) as file:
            file.write(gzip.compress(text.encode(), 1))
        os.replace(file.name, folder() / name)
        if next(_writes) % TRIM_EVERY == 0:
            trim()


@contextmanager
def lock(name: str) -> Iterator[None]:
    """Let one process at a time make what `name` stands for."""
    with (folder() / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def trim(most: int = MAX_BYTES) -> None:
    """If the files have more than `most` bytes, delete those that were not used for longest."""
    files = [(path.stat(), path) for path in folder().iterdir() if path.is_file()]
    total = sum(stat.st_size for stat, _ in files)
    for stat, path in sorted(files, key=lambda each: each[0].st_mtime) if total > most else ():
        if total > most * 3 // 4:
            path.unlink(missing_ok=True)
            total -= stat.st_size
