"""The file of one variant, without the kernels of the others."""

from __future__ import annotations

import re

from gpt2block.cuda import kernels
from gpt2block.errors import InputError
from gpt2block.ops.operation import Operation, Variant


def rung(operation: Operation, which: str) -> Variant:
    """A variant by its name, or by its place from 1; InputError lists both."""
    named = {variant.name: variant for variant in (*operation.variants, *operation.auxiliary)}
    if which in named:
        return named[which]
    if which.isdecimal() and 0 < int(which) <= len(operation.variants):
        return operation.variants[int(which) - 1]
    raise InputError(
        f"--source {which}: expected a number from 1 to {len(operation.variants)}, or one of "
        f"{', '.join(named)}"
    )


def listing(variant: Variant) -> list[tuple[int, str]]:
    """The first line and the text of each part of the variant's file.

    Between two parts are kernels of other variants. What these alone call is included.
    """
    lines = kernels.read_source(variant.file).splitlines()
    left_out: set[int] = set()
    for name in kernels.signatures(variant.file):
        if name not in variant.kernels:
            left_out.update(_extent(lines, name))
    parts: list[tuple[int, list[str]]] = []
    for number, line in enumerate(lines, 1):
        if number - 1 in left_out:
            continue
        if not parts or parts[-1][0] + len(parts[-1][1]) != number:
            parts.append((number, []))
        parts[-1][1].append(line)
    texts = [(start, "\n".join(part)) for start, part in parts]
    return [(start, text) for start, text in texts if text.strip()]


def _extent(lines: list[str], name: str) -> range:
    """The lines of a kernel, with the comment above it: indices from 0."""
    prototype = re.compile(rf'^extern "C" __global__.*\b{name}\s*\(')
    start = end = next(i for i, line in enumerate(lines) if prototype.search(line))
    depth, opened = 0, False
    for end in range(start, len(lines)):
        code = re.sub(r"//.*|\"[^\"]*\"|'[^']*'", "", lines[end])
        depth += code.count("{") - code.count("}")
        opened = opened or "{" in code
        if opened and depth == 0:
            break
    while start and lines[start - 1].startswith(("//", "template")):
        start -= 1
    return range(start, end + 1)
