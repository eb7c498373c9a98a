"""Evaluate the integer expressions of launch settings, such as grid=ceil(N / 256), exactly."""

from __future__ import annotations

import ast
import re
import threading
from collections.abc import Callable, Mapping
from fractions import Fraction
from math import ceil, floor

from gpt2block.errors import InputError

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
