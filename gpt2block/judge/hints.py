"""Find properties of a user's kernel that are no errors, but may be slow or explain a problem."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpt2block.cuda import kernels
from gpt2block.judge.refused import without_literals
from gpt2block.judge.source import UserSource

MAX_HINTS = 3  # maximum number of hints about double
SLOW = "arithmetic in double is slow on most GPUs"
# A literal of type double next to an arithmetic operator or comparison. In other places, such as an
# initializer of a float, the compiler converts it.
_LITERAL = r"(?<![\w.])(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|(?<![\w.])\d+[eE][-+]?\d+"
_OPERAND = re.compile(
    rf"(?:[\w)\]]\s*(?:[-+*/<>]|[-+*/<>=!]=)\s*)(?P<after>{_LITERAL})(?![\w.])"
    rf"|(?P<before>{_LITERAL})(?![\w.])(?=\s*(?:[-+*/<>]|[<>=!]=))"
)
_DOUBLE = re.compile(r"\bdouble\s+(\w+)")
_UNCALLED = re.compile(r"(?:[;{})]|\belse|\bdo)\s*(__\w+)(?=\s*;)")
_SHARED = re.compile(r"\bextern\s+__shared__\s[^;]*?(\w+)\s*\[\s*\]")


def hints(source: UserSource, wrong: bool) -> tuple[str, ...]:
    """Return hints about a kernel, each with file and line.

    wrong: whether the kernel is wrong; possible causes are then included.
    """
    text = kernels.with_only(source.name, without_literals(source.text))
    doubles = [f"{source.file}:{line}: {what}; {SLOW}" for line, what in _doubles(text)]
    found = [*_uncalled(text), *(_shared(text) if wrong else ())]
    causes = [f"{source.file}:{line}: {what}" for line, what in found]
    return (*causes, *list(dict.fromkeys(doubles))[:MAX_HINTS])


def _doubles(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, hint) for arithmetic in double in lines that use no variable of type double.

    A function such as exp or tanh of a float is no arithmetic in double: CUDA overloads it.
    """
    intended = re.compile("|".join([r"\bdouble\b", *(rf"\b{n}\b" for n in _DOUBLE.findall(text))]))
    for number, line in enumerate(text.splitlines(), 1):
        if intended.search(line):
            continue
        for match in _OPERAND.finditer(line):
            value = match["after"] or match["before"]
            yield number, f"{value} is a double: write {value}f"


def _uncalled(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, hint) for statements that are only the name of a function, such as a barrier."""
    for match in _UNCALLED.finditer(text):
        line = text.count("\n", 0, match.start(1)) + 1
        yield line, f"{match[1]}; calls nothing: a call has parentheses: {match[1]}();"


def _shared(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, hint) for a second array in dynamic shared memory."""
    arrays = {each[1]: each.start() for each in _SHARED.finditer(text)}
    if len(arrays) > 1:
        first, second, *_ = arrays
        line = text.count("\n", 0, arrays[second]) + 1
        same = f"the extern __shared__ arrays {first} and {second} start at the same address"
        yield line, f"{same}: declare one array, and add an offset for the other one"
