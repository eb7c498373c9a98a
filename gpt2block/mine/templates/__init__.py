"""A `.cu` file to begin with for each operation: slow, but right."""

from __future__ import annotations

from pathlib import Path

from gpt2block.errors import InputError
from gpt2block.ops.operation import Operation

HERE = Path(__file__).parent


def names() -> list[str]:
    """The operations that have a template."""
    return sorted(path.stem for path in HERE.glob("*.cu"))


def template(operation: Operation) -> str:
    """The text of a file; InputError for an operation whose kernels need more than it shows."""
    path = HERE / f"{operation.name}.cu"
    if not path.is_file():
        raise InputError(f"{operation.name} has no template: expected one of {', '.join(names())}")
    return path.read_text(encoding="utf-8")
