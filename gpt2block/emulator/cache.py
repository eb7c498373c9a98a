"""The folder that keeps the programs of the emulator, so that later processes need not compile."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

VARIABLE = "GPT2BLOCK_CPU_CUDA_CACHE"
MOST_BYTES = 512 * 2**20  # size of the folder above which the least recently used files are deleted
IN_USE_S = 3600  # seconds for which a used program is kept: another process may be about to run it


@cache
def folder() -> Path:
    """Return the folder of compiled programs, which exists.

    The folder is $GPT2BLOCK_CPU_CUDA_CACHE or a folder in the user's cache, $XDG_CACHE_HOME or
    ~/.cache. If this folder cannot be written, or belongs to another user, the programs of this
    process are kept in a temporary folder.
    """
    return _persistent() or _temporary()


def lasts() -> bool:
    """Return whether later processes find the programs of this process."""
    return _persistent() is not None


@cache
def _persistent() -> Path | None:
    with suppress(OSError, RuntimeError):  # RuntimeError: there is no home folder
        kept = Path(os.environ.get(VARIABLE) or _of_user() / "gpt2block" / "emulator")
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=kept):
            return kept.resolve() if kept.stat().st_uid == os.getuid() else None
    return None


def _of_user() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    return Path(given) if os.path.isabs(given) else Path.home() / ".cache"


def _temporary() -> Path:
    made = tempfile.mkdtemp(prefix="gpt2block-cpu-cuda-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def found(target: Path) -> bool:
    """Return whether the folder has this program. The program then counts as used now."""
    with suppress(OSError):
        os.utime(target)
        return True
    return False


def trim(most: int = MOST_BYTES) -> None:
    """If the folder has more than `most` bytes, reduce it to three quarters of this size.

    The least recently used files are deleted first. Folders that a killed process has left are
    always deleted. Other processes may delete files at the same time.
    """
    kept: list[tuple[float, int, Path]] = []
    before = time.time() - IN_USE_S
    for path in folder().iterdir():
        with suppress(OSError):  # another process has deleted it
            stat = path.stat()
            if not path.is_dir():
                kept.append((stat.st_mtime, stat.st_size, path))
            elif stat.st_mtime < before:
                shutil.rmtree(path, ignore_errors=True)
    total = sum(size for _, size, _ in kept)
    if total <= most:
        return
    for used, size, path in sorted(kept):
        if total <= most * 3 // 4 or used >= before:
            break
        path.unlink(missing_ok=True)
        total -= size
