"""Show the source file of one variant without the kernels of other variants."""

from __future__ import annotations

from itertools import groupby

from gpt2block.cuda import kernels
from gpt2block.errors import InputError
from gpt2block.ops.operation import Operation, Variant


def rung(operation: Operation, which: str) -> Variant:
    """Return a variant by its name, or by its position counted from 1. Raises InputError."""
    named = {variant.name: variant for variant in operation.table}
    if which in named:
        return named[which]
    if which.isdecimal() and 0 < int(which) <= len(operation.table):
        return operation.table[int(which) - 1]
    raise InputError(
        f"--source {which}: expected a number from 1 to {len(operation.table)}, or one of "
        f"{', '.join(named)}"
    )


def listing(variant: Variant) -> list[tuple[int, str]]:
    """Return (number of the first line, text) of each part of a variant's file to show.

    The kernels of other variants, which lie between the parts, are left out. Functions that only
    they call are not left out.
    """
    source = kernels.read_source(variant.file)
    lines, left_out = source.splitlines(), set[int]()
    for name, start, end in kernels.extents(source):
        if name not in variant.kernels:
            first = source.count("\n", 0, start)
            while first and lines[first - 1].startswith(("//", "template")):
                first -= 1  # the comment above the kernel
            left_out.update(range(first, source.count("\n", 0, end) + 1))
    runs = groupby(range(len(lines)), left_out.__contains__)
    parts = [list(numbers) for left, numbers in runs if not left]
    texts = [(part[0] + 1, "\n".join(lines[number] for number in part)) for part in parts]
    return [(start, text) for start, text in texts if text.strip()]
