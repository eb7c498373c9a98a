"""Read the `// launch:` comment above a kernel: its grid, block and shared memory.

Their integer expressions, such as grid=ceil(N / 256), are evaluated exactly.
"""

from __future__ import annotations

import ast
import re
import threading
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache, lru_cache
from math import ceil, floor, prod
from typing import Any, NamedTuple

from gpt2block.cuda.kernels import Defines, Geometry, launch_at, read_source, signatures
from gpt2block.cuda.requests import Launch
from gpt2block.errors import InputError

EXAMPLE = "// launch: grid=ceil(N / block) block=256"
_LAUNCH = re.compile(r"^[ \t]*//[ \t]*launch:(.*)$", re.MULTILINE)
_SETTING = re.compile(r"(\w+)\s*=\s*(.*?)\s*(?=\w+\s*=|$)")
_KEYS = ("grid", "block", "shared")
LONGEST = 200  # maximum length of an expression in characters
LARGEST = 2**63
# CPython 3.11 may raise SystemError if two threads parse at once, and one of them collects garbage.
_parsing = threading.Lock()
_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: lambda a, b: a % b,
    ast.LShift: lambda a, b: a * 2 ** min(int(b), 64),
}
_FUNCTIONS: Mapping[str, Callable[[list[Fraction]], Fraction]] = {
    "ceil": lambda values: Fraction(ceil(values[0])),
    "floor": lambda values: Fraction(floor(values[0])),
    "min": min,
    "max": max,
}


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
def launch_of(file: str, kernel: str) -> tuple[list[str], tuple[int, ...], str]:
    """Return what a file of kernels_cu states for a kernel: grid, block and shared memory."""
    text = read_source(file)
    launch = LaunchText(**stated(file, text, text.index(f" {kernel}("))[1])
    return split(launch.grid), tuple(map(int, split(launch.block))), launch.shared


def default_block(file: str, kernel: str) -> int:
    """Return the threads per block that a file of kernels_cu states for a kernel."""
    return prod(launch_of(file, kernel)[1])


def stated_launch(
    file: str,
    kernel: str,
    args: tuple[object, ...],
    known: Mapping[str, Any],
    threads: int | None = None,
    defines: Defines = (),
) -> Launch:
    """Return the launch that a file of kernels_cu states for a kernel, with its arguments.

    known: attributes of the call. The expressions may use its integers, and the integers of the
    kernel by parameter name. threads: as in `stated_geometry`.
    """
    parameters = signatures(file)[kernel].parameters
    values = {**known, **{each.name: arg for each, arg in zip(parameters, args, strict=True)}}
    sizes = tuple((name, value) for name, value in values.items() if type(value) is int)
    geometry = stated_geometry(file, kernel, sizes, threads, defines)
    return launch_at(file, geometry, args, known.get("storage", "float32"))


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
    parts, block, shared = launch_of(file, kernel)
    if threads is not None:
        block = (*block[:-1], threads // prod(block[:-1]))
    named = {**dict(sizes), "block": prod(block)}
    grid = tuple(evaluated(part, named) for part in parts)
    return Geometry(kernel, grid, block, evaluated(shared, named) if shared != "0" else 0, defines)


def evaluated(text: str, sizes: Mapping[str, int]) -> int:
    """Evaluate an expression of + - * / // % <<, ceil, floor, min, max and the names in `sizes`.

    `/` is exact, so that ceil(N / 8) is correct for any N. Raises InputError for any other syntax,
    and if the result is not an integer.
    """
    try:
        if len(text) > LONGEST:
            raise InputError(f"more than {LONGEST} characters")
        with _parsing:
            tree = ast.parse(text.strip(), mode="eval")
        value = _value(tree.body, sizes)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        why = error if isinstance(error, InputError) else "expected something like ceil(N / 256)"
        if re.search(r"\d\s*x\s*\d", text):
            why = f"separate the dimensions by commas: {re.sub(r' *x *', ', ', text.strip())}"
        raise InputError(f"{text.strip()[:LONGEST]!r}: {why}") from None
    except ZeroDivisionError:
        raise InputError(f"{text.strip()!r}: division by zero") from None
    if value != int(value):
        raise InputError(f"{text.strip()!r} is {value}, no whole number: use ceil(...) or //")
    return int(value)


def _value(node: ast.expr, sizes: Mapping[str, int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = Fraction(node.value)
    elif isinstance(node, ast.Name):
        if node.id not in sizes:
            raise InputError(f"unknown name {node.id}: expected one of {', '.join(sizes)}")
        value = Fraction(sizes[node.id])
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, sizes), _value(node.right, sizes)
        value = _OPERATORS[type(node.op)](left, right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_value(node.operand, sizes)
    elif isinstance(node, ast.Call) and not node.keywords and ast.unparse(node.func) in _FUNCTIONS:
        name, values = ast.unparse(node.func), [_value(each, sizes) for each in node.args]
        if not values or (name in ("ceil", "floor") and len(values) > 1):
            raise InputError(f"{name}: expected {'one number' if len(values) > 1 else 'a number'}")
        value = _FUNCTIONS[name](values)
    else:
        raise InputError("expected + - * / // % <<, ceil, floor, min, max, numbers and names")
    if abs(value) > LARGEST:
        raise InputError("a number is too large")
    return value
