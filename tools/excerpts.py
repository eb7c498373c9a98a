"""Excerpts of source files in the documentation, which `tools/pages.py` updates.

A page names an excerpt and links to its file:

    <!-- source: layernorm_forward_kernel1( -->
    [`learn/layernorm/ladder.cu`](../../kernels_cu/learn/layernorm/ladder.cu)

`insert` writes the code between the two lines, and links to its first line. `<!-- source -->` alone
stands for the whole file.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

MARK = re.compile(
    r"^(?P<mark><!-- source(?:: (?P<text>.+))? -->)\n"
    r"(?:```\w+\n(?:(?!```).*\n)*```\n\n)?"
    r"(?P<name>\[[^]]*\])\((?P<path>[^)#]+)(?:#L\d+)?\)$",
    re.MULTILINE,
)
LANGUAGES = {".cu": "cuda", ".cuh": "cuda", ".py": "python"}
LEADING = ("//", "template", "#pragma")  # lines above an excerpt that belong to it


def insert(page: str, folder: Path) -> str:
    """Return a page of `folder` with its excerpts updated from the current files."""

    def shown(match: re.Match[str]) -> str:
        file, text = folder / match["path"], match["text"]
        code, line = excerpt(file, text) if text else (file.read_text("utf-8").strip(), 1)
        block = f"```{LANGUAGES[file.suffix]}\n{code}\n```"
        return f"{match['mark']}\n{block}\n\n{match['name']}({match['path']}#L{line})"

    return MARK.sub(shown, page)


def excerpt(file: Path, text: str) -> tuple[str, int]:
    """Return the lines of a file from the only line that contains `text` to its closing brace.

    Also returns the number of the first line.

    In a Python file `text` is the name of a function, or of a class and its method, Class.method;
    after "@", the excerpt includes the decorators. Raises ValueError.
    """
    source = file.read_text(encoding="utf-8")
    lines = source.splitlines()
    if file.suffix == ".py":
        nodes: list[Any] = [ast.parse(source)]
        for name in text.removeprefix("@").split("."):
            nodes = [n for outer in nodes for n in outer.body if getattr(n, "name", "") == name]
        first = 0 if text.startswith("@") else -1
        spans = [((*n.decorator_list, n)[first].lineno - 1, n.end_lineno or 0) for n in nodes]
    else:
        spans = [_braces(lines, i) for i, line in enumerate(lines) if text in line]
    if len(spans) != 1:
        raise ValueError(f"{file}: {text!r} is there {len(spans)} times, expected once")
    start, end = spans[0]
    shown = lines[start:end]
    margin = min(len(line) - len(line.lstrip()) for line in shown if line and line[0] != "#")
    code = "\n".join(line if line.startswith("#") else line[margin:] for line in shown)
    return code, start + 1


def _braces(lines: list[str], at: int) -> tuple[int, int]:
    """Return the lines of the statement at a line: LEADING lines above it, and its block."""
    start = at
    while start and lines[start - 1].strip().startswith(LEADING):
        start -= 1
    depth = 0
    for end in range(at, len(lines)):
        code = lines[end].split("//")[0]
        depth += code.count("{") - code.count("}")
        if depth == 0 and re.search(r"[};]\s*$", code):
            return start, end + 1
    raise ValueError(f"line {at + 1}: a block without an end")
