"""Check paths that the user passed, and hash files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from gpt2block.errors import InputError

NAMED = 3  # maximum number of files listed in a message
_GONE = "the working directory was deleted: change to one that exists"


def absolute(name: str, path: str | Path) -> Path:
    """Return `path` as an absolute path with `~` expanded. The path need not exist.

    name: the argument's name for error messages. Raises InputError if `path` is not a valid path.
    """
    text = str(path)
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
    """Raise InputError if the working directory was deleted, as no process can start in it."""
    try:
        Path.cwd()
    except OSError as error:
        raise InputError(_GONE) from error


def listed(names: Sequence[str]) -> str:
    """Join the first NAMED names for a message; an ellipsis stands for the others."""
    return ", ".join(names[:NAMED]) + ", …" * (len(names) > NAMED)


def reason(error: Exception) -> str:
    """Return the operating system's message for an error, without the path."""
    return str(getattr(error, "strerror", None) or error)


def sha256(path: Path) -> bytes:
    """Return the SHA-256 of a file's content. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**24):
            digest.update(chunk)
    return digest.digest()
