"""Solutions of the exercises in docs/learn: a folder per operation, a `.cu` file per exercise."""

from __future__ import annotations

from pathlib import Path

from gpt2block.errors import InputError
from gpt2block.ops.operation import Operation

HERE = Path(__file__).parent


def names(operation: str) -> list[str]:
    """The exercises of an operation that have a solution, such as 2.1: chapter 2, exercise 1."""
    found = (path.stem for path in HERE.glob(f"{operation}/*.cu"))
    return sorted(found, key=lambda name: tuple(map(int, name.split("."))))


def operations() -> list[str]:
    """The operations that have solutions."""
    return sorted({path.parent.name for path in HERE.glob("*/*.cu")})


def solution(operation: Operation, which: str) -> str:
    """The text of the file for an exercise, such as "2.1"; for a chapter alone, for its last one.

    Raises InputError, which lists what there is.
    """
    known = names(operation.name)
    if not known:
        raise InputError(
            f"{operation.name} has no solution, as no exercise is about it: expected one of "
            f"{', '.join(operations())}"
        )
    found = [name for name in known if which in (name, name.partition(".")[0])]
    if not found:
        raise InputError(
            f"--solution {which}: expected a chapter with an exercise about {operation.name}, or "
            f"one of its exercises: {', '.join(known)}"
        )
    return (HERE / operation.name / f"{found[-1]}.cu").read_text(encoding="utf-8")
