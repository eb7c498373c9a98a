"""Read the `// launch:` comment above a kernel: its grid, block and shared memory."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from math import prod
from typing import NamedTuple

from gpt2block.cuda.expressions import evaluated
from gpt2block.cuda.kernels import Defines, Geometry, read_source
from gpt2block.errors import InputError

EXAMPLE = "// launch: grid=ceil(N / block) block=256"
_LAUNCH = re.compile(r"^[ \t]*//[ \t]*launch:(.*)$", re.MULTILINE)
_SETTING = re.compile(r"(\w+)\s*=\s*(.*?)\s*(?=\w+\s*=|$)")
_KEYS = ("grid", "block", "shared")


class LaunchText(NamedTuple):
    """Expressions of a launch: grid and block (one to three each), bytes of shared memory."""

    grid: str
    block: str = "256"
    shared: str = "0"


def stated(file: str, text: str, end: int) -> tuple[int, dict[str, str]]:
    """Return (line number, settings) of the last `// launch:` comment before an offset.

    Without a comment, return (0, {}). Raises InputError, which names the file, for other settings.
    """
    above = [found for found in _LAUNCH.finditer(text) if found.start() < end]
    if not above:
        return 0, {}
    number = text[: above[-1].start()].count("\n") + 1
    settings = dict(_SETTING.findall(above[-1][1]))
    unknown = [key for key in settings if key not in _KEYS]
    if unknown or not settings:
        what = f"unknown setting {unknown[0]!r}" if unknown else "it has no settings"
        raise InputError(
            f"{file}:{number}: launch line: {what}: expected 'grid=', 'block=' and 'shared=', as "
            f"in `{EXAMPLE}`"
        )
    return number, settings


def split(text: str) -> list[str]:
    """Split a text at commas outside parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


@cache
def launch_of(file: str, kernel: str) -> LaunchText:
    """Return the launch that a file of kernels_cu states for a kernel."""
    text = read_source(file)
    return LaunchText(**stated(file, text, text.index(f" {kernel}("))[1])


def default_block(file: str, kernel: str) -> int:
    """Return the threads per block that a file of kernels_cu states for a kernel."""
    return prod(map(int, split(launch_of(file, kernel).block)))


@lru_cache(maxsize=1024)
def stated_geometry(
    file: str,
    kernel: str,
    sizes: tuple[tuple[str, int], ...],
    threads: int | None = None,
    defines: Defines = (),
) -> Geometry:
    """Return the launch that a file of kernels_cu states for a kernel.

    sizes: names in the expressions, with their values. threads: threads per block, which the last
    extent of the block follows; None for the stated ones.
    """
    text, named = launch_of(file, kernel), dict(sizes)
    block = tuple(map(int, split(text.block)))
    if threads is not None:
        block = (*block[:-1], threads // prod(block[:-1]))
    named["block"] = prod(block)
    grid = tuple(evaluated(part, named) for part in split(text.grid))
    return Geometry(kernel, grid, block, evaluated(text.shared, named), defines)
