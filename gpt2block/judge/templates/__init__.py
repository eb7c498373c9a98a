"""Starter files, one `.cu` file for each operation: slow but correct kernels."""

from __future__ import annotations

from pathlib import Path

from gpt2block.errors import InputError
from gpt2block.ops.operation import Operation

HERE = Path(__file__).parent


def names() -> list[str]:
    """Return the names of the operations that have a template."""
    return sorted(path.stem for path in HERE.glob("*.cu"))


def path_of(operation: Operation) -> Path:
    """Return the path of an operation's template. Raises InputError if it has none."""
    path = HERE / f"{operation.name}.cu"
    if not path.is_file():
        raise InputError(f"{operation.name} has no template: expected one of {', '.join(names())}")
    return path


def template(operation: Operation) -> str:
    """Return the text of an operation's template. Raises InputError if it has none."""
    return path_of(operation).read_text(encoding="utf-8")
