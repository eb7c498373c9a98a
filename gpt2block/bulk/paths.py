"""Paths as people type them: `~`, relative, empty, too long."""

from __future__ import annotations

from pathlib import Path

from gpt2block.errors import InputError

_GONE = "the working directory was deleted: change to one that exists"


def absolute(name: str, given: str | Path) -> Path:
    """The path `given`, absolute and with `~` expanded; InputError by its `name` where it is none.

    Nothing is looked up on the disk except the working directory.
    """
    text = str(given)
    if not text:
        raise InputError(f"{name}: expected a path, got an empty text")
    if "\0" in text:
        raise InputError(f"{name} {text!r}: a path cannot hold a NUL character")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise InputError(f"{name} {text}: no home directory is known for this user") from error
    except OSError as error:
        raise InputError(f"{name} {text}: {_GONE}") from error


def require_working_directory() -> None:
    """Raise InputError where it was deleted: no process can be started from there."""
    try:
        Path.cwd()
    except OSError as error:
        raise InputError(_GONE) from error


def why(error: OSError | ValueError) -> str:
    """What the system says of a path, without the path."""
    return str(getattr(error, "strerror", None) or error)
