"""Solutions of the exercises in docs/learn: a folder per operation, a `.cu` file per exercise."""

from __future__ import annotations

from pathlib import Path

from gpt2block.errors import InputError
from gpt2block.ops.operation import Operation

HERE = Path(__file__).parent


def names(operation: str) -> list[str]:
    """Return the exercises of an operation that have a solution, such as 2.1 (chapter.exercise)."""
    found = (path.stem for path in HERE.glob(f"{operation}/*.cu"))
    return sorted(found, key=lambda name: tuple(map(int, name.split("."))))


def operations() -> list[str]:
    """Return the names of the operations that have solutions."""
    return sorted({path.parent.name for path in HERE.glob("*/*.cu")})


def solution(operation: Operation, which: str) -> str:
    """Return the solution of an exercise, such as "2.1", or of the last exercise of a chapter.

    Raises InputError, which lists the exercises that have solutions.
    """
    known = names(operation.name)
    if not known:
        raise InputError(
            f"{operation.name} has no solution, as no exercise is about it: expected one of "
            f"{', '.join(operations())}"
        )
    matching = [name for name in known if which in (name, name.partition(".")[0])]
    if not matching:
        raise InputError(
            f"--solution {which}: expected a chapter with an exercise about {operation.name}, or "
            f"one of its exercises: {', '.join(known)}"
        )
    return (HERE / operation.name / f"{matching[-1]}.cu").read_text(encoding="utf-8")
