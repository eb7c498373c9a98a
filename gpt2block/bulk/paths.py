"""Checks of paths given by the user, and hashes of files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from gpt2block.errors import InputError

NAMED = 3  # files listed in a message at most
_GONE = "the working directory was deleted: change to one that exists"


def absolute(name: str, given: str | Path) -> Path:
    """Return the path `given`, absolute and with `~` expanded; it need not exist.

    Raises InputError, with the argument's `name`, where it is not a path.
    """
    text = str(given)
    if not text:
        raise InputError(f"{name}: expected a path, got an empty string")
    if "\0" in text:
        raise InputError(f"{name} {text!r}: a path cannot hold a NUL character")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise InputError(f"{name} {text}: no home directory is known for this user") from error
    except OSError as error:
        raise InputError(f"{name} {text}: {_GONE}") from error


def require_working_directory() -> None:
    """Raise InputError where the working directory was deleted: no process starts from there."""
    try:
        Path.cwd()
    except OSError as error:
        raise InputError(_GONE) from error


def listed(names: Sequence[str]) -> str:
    """Return the first names for a message, with an ellipsis for the others."""
    return ", ".join(names[:NAMED]) + ", …" * (len(names) > NAMED)


def reason(error: Exception) -> str:
    """Return the system's error message without the path."""
    return str(getattr(error, "strerror", None) or error)


def sha256(files: Iterable[Path], start: bytes = b"") -> bytes:
    """Return the SHA-256 of `start` and the content of the files. Raises OSError."""
    found = hashlib.sha256(start)
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(2**24):
                found.update(chunk)
    return found.digest()
