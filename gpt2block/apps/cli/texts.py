"""Read the texts of commands from files and from standard input."""

from __future__ import annotations

import sys
from pathlib import Path
from stat import S_ISREG

from gpt2block.apps.cli.options import path_of
from gpt2block.errors import InputError

RECEIPT = "Append the receipt of each text, which verify checks, to this file: a line of JSON."
BYTE_ORDER_MARK = "\ufeff"  # some editors begin a file in UTF-8 with it


def read_text(file: str, most: int, or_tokens: bool = False) -> str:
    """Return a file's text, or stdin's for "-". Raises InputError for more than `most` bytes.

    or_tokens: whether the file can also hold tokens, which the error for another text then says.
    """
    name = "stdin" if file == "-" else file
    try:
        if file == "-":
            data = sys.stdin.buffer.read(most + 1)
        else:
            with regular_file(file).open("rb") as opened:
                data = opened.read(most + 1)
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror or error}") from error
    if len(data) > most:
        raise InputError(f"{name}: expected at most {most // 2**20} MiB of text, got more")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        hint = ": for a token file give --tokens" if or_tokens and file != "-" else ""
        raise InputError(
            f"{name}: expected UTF-8 text, byte {error.start} is invalid{hint}"
        ) from error


def regular_file(file: str) -> Path:
    """Return the path of a regular file. Raises InputError for pipes, devices and folders."""
    path = path_of(file)
    try:
        regular = S_ISREG(path.stat().st_mode)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from error
    if not regular:
        raise InputError(
            f"{file}: expected a regular file; to read from a pipe or a device, redirect it to "
            "standard input and give -"
        )
    return path
