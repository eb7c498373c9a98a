"""Show the source file of one variant without the kernels of other variants."""

from __future__ import annotations

from gpt2block.cuda import kernels
from gpt2block.errors import InputError
from gpt2block.ops.operation import Operation, Variant


def rung(operation: Operation, which: str) -> Variant:
    """Return a variant by its name, or by its position counted from 1. Raises InputError."""
    named = {variant.name: variant for variant in operation.table}
    if which in named:
        return named[which]
    if which.isdecimal() and 0 < int(which) <= len(operation.variants):
        return operation.variants[int(which) - 1]
    raise InputError(
        f"--source {which}: expected a number from 1 to {len(operation.variants)}, or one of "
        f"{', '.join(named)}"
    )


def listing(variant: Variant) -> list[tuple[int, str]]:
    """Return (number of the first line, text) of each part of a variant's file to show.

    The kernels of other variants, which lie between the parts, are left out. Functions that only
    they call are not left out.
    """
    source = kernels.read_source(variant.file)
    left_out: set[int] = set()
    for name, start, end in kernels.extents(source):
        if name not in variant.kernels:
            left_out.update(_lines(source, start, end))
    parts: list[tuple[int, list[str]]] = []
    for number, line in enumerate(source.splitlines(), 1):
        if number - 1 in left_out:
            continue
        if not parts or parts[-1][0] + len(parts[-1][1]) != number:
            parts.append((number, []))
        parts[-1][1].append(line)
    texts = [(start, "\n".join(part)) for start, part in parts]
    return [(start, text) for start, text in texts if text.strip()]


def _lines(text: str, start: int, end: int) -> range:
    """Return the indices, from 0, of a kernel's lines and of the lines of the comment above it."""
    lines, first = text.splitlines(), text.count("\n", 0, start)
    while first and lines[first - 1].startswith(("//", "template")):
        first -= 1
    return range(first, text.count("\n", 0, end) + 1)
