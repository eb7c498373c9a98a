"""Excerpts of source files for the documentation, found by their text, so that they never go stale.

A page names an excerpt and links to its file:

    <!-- source: layernorm_forward_kernel1( -->
    [`layernorm/ladder.cu`](../../kernels_cu/layernorm/ladder.cu)

In a checkout the reader sees the link; on the site the excerpt is above it, and the link leads to
its first line. `<!-- source -->` alone shows the whole file. Both may be indented, as in an answer
that the reader opens.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from textwrap import indent
from typing import Any

MARK = re.compile(
    r"^(?P<indent> *)<!-- source(?:: (?P<text>.+))? -->\n"
    r" *(?P<name>\[[^]]*\])\((?P<path>[^)]+)\)$",
    re.MULTILINE,
)
LANGUAGES = {".cu": "cuda", ".cuh": "cuda", ".py": "python"}
LEADING = ("//", "template", "#pragma")  # lines above an excerpt that belong to it


def insert(page: str, folder: Path) -> str:
    """A page of `folder` with the excerpts that it names."""

    def with_link(match: re.Match[str]) -> str:
        file, text, link = folder / match["path"], match["text"], f"{match['name']}({match['path']}"
        if text:
            code, line = excerpt(file, text)
            link += f"#L{line}"
        else:
            code = file.read_text(encoding="utf-8").strip()
        block = f"```{LANGUAGES[file.suffix]}\n{code}\n```\n\n{link})"
        return indent(block, match["indent"])

    return MARK.sub(with_link, page)


def excerpt(file: Path, text: str) -> tuple[str, int]:
    """The lines of a file from the only one that contains `text` to the brace that closes it.

    Returns them, and the number of the first one.

    In a Python file `text` is the name of a function, or of a class and its method, Class.method.
    Raises ValueError.
    """
    source = file.read_text(encoding="utf-8")
    lines = source.splitlines()
    if file.suffix == ".py":
        found: list[Any] = [ast.parse(source)]
        for name in text.split("."):
            inside = (node for outer in found for node in outer.body)
            found = [node for node in inside if getattr(node, "name", "") == name]
        spans = [(node.lineno - 1, node.end_lineno or 0) for node in found]
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
    """The lines of the statement at a line: those of LEADING above it, and its block."""
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
