"""Pages of the site for the files of kernels_cu: users of a file, its header comment, its source.

A page is Markdown, with links relative to the folder of its file.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from textwrap import dedent, indent

from gpt2block import reference
from gpt2block.cuda.kernels import SOURCE_DIR
from gpt2block.engine.explain.sources import function_source, line_of
from gpt2block.ops.registry import OPERATIONS

FOLDER = SOURCE_DIR.name
FIGURES = "docs/performance.md"
Page = tuple[str, str]  # title, path in the repository
_ARCHITECTURE = re.compile(r"^// architecture: (\w+)$", re.MULTILINE)
_INCLUDE = re.compile(r'^\s*#\s*include "([^"]+)"', re.MULTILINE)
_FUNCTION = re.compile(
    r"__device__[^;{}()=]*?(?:\([^)]*\)[^;{}()=]*?)?\b(?!operator)(\w*[a-z]\w*)\("
)
_CODE = re.compile(r"`[^`]+`|\b(?:\w+/)+\w+\.cuh?\b|\b[A-Za-z]\w*_\w+\b")  # code in a comment
_SPECIAL = re.compile(r"[\\*_{}\[\]()#+!|-]")  # characters with a meaning in Markdown


class KernelPages:
    """Pages of all `.cu` and `.cuh` files. `sources`: texts by path in kernels_cu."""

    def __init__(self) -> None:
        found = sorted(path for path in SOURCE_DIR.rglob("*") if path.suffix in (".cu", ".cuh"))
        self.sources = {
            path.relative_to(SOURCE_DIR).as_posix(): path.read_text("utf-8") for path in found
        }
        self.includes = {file: _INCLUDE.findall(text) for file, text in self.sources.items()}
        self.variants = [
            (operation.name, variant)
            for operation in OPERATIONS.values()
            for variant in operation.table
        ]

    def page(self, file: str, mentions: Sequence[Page] = ()) -> str:
        """Return the page of a file. mentions: pages of the site that link to it."""
        source = self.sources[file]
        parts = [f"# {file}", self._summary(file, mentions), *self._variants_of(file)]
        parts += [*header(source), *self._in_numpy(file), *_functions(source)]
        parts += [
            '## Source {data-search-exclude=""}',
            f'```{{.cuda .source linenums="1"}}\n{source}```\n',
        ]
        return "\n\n".join(parts)

    def used_by(self, file: str) -> list[str]:
        """Return the operations with a variant in this file, or in a file that includes it."""
        found = (name for name, variant in self.variants if file in self._closure(variant.file))
        return list(dict.fromkeys(found))

    def _closure(self, file: str) -> set[str]:
        return {file}.union(*map(self._closure, self.includes[file]))

    def _summary(self, file: str, mentions: Sequence[Page]) -> str:
        """Return a table of operations, files and pages related to a file."""
        users = [each for each, included in self.includes.items() if file in included]
        compiled = _ARCHITECTURE.search(self.sources[file])
        rows = {
            "operations": [_figures(file, name) for name in self.used_by(file)],
            "explained in": [f"[{title}]({_to(file, path)})" for title, path in mentions],
            "includes": [_linked(file, each) for each in self.includes[file]],
            "included by": [_linked(file, each) for each in users],
            "compiled for": [compiled[1]] if compiled else [],
        }
        lines = [f"| {name} | {', '.join(found)} |" for name, found in rows.items() if found]
        return "\n".join(["| | |", "|---|---|", *lines])

    def _variants_of(self, file: str) -> Iterator[str]:
        """Return a table of the variants whose kernels are in a file; nothing for a header."""
        rows = []
        for name, variant in self.variants:
            if variant.file == file:
                kernels = [f"[`{each}`](#L{line_of(file, each)})" for each in variant.kernels]
                cells = (_figures(file, name), variant.name, ", ".join(kernels), variant.idea)
                rows.append(f"| {' | '.join(cells)} |")
        if rows:
            yield "\n".join(
                ["| operation | variant | kernels | idea |", "|---|---|---|---|", *rows]
            )

    def _in_numpy(self, file: str) -> Iterator[str]:
        """Return the NumPy functions of the operations whose kernels are in a file, collapsed."""
        for name in dict.fromkeys(name for name, variant in self.variants if variant.file == file):
            if hasattr(reference, name):
                found = function_source(name)
                code = indent(f"```python\n{found['text']}```", "    ")
                yield f'??? note "{name} in NumPy ({found["file"]})"\n{code}'


def header(source: str) -> Iterator[str]:
    """Yield the head comment of a file as paragraphs, lists and, if indented, blocks of code."""
    lines = []
    for line in source.splitlines():
        if not line.startswith("//"):
            break
        lines.append("" if _ARCHITECTURE.match(line) else line[3:])
    for indented, group in groupby(lines, lambda line: line.startswith(" ") if line else None):
        text = dedent("\n".join(group))
        if indented is None:  # an empty line
            continue
        if text.startswith("- "):
            yield "\n".join(line[:2] + _prose(line[2:]) for line in text.splitlines())
        else:
            yield f"```text\n{text}\n```" if indented else _prose(text)


def _prose(text: str) -> str:
    """Return a comment as Markdown, with file names and names with an underscore as code."""
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    parts, at = [], 0
    for match in _CODE.finditer(text):
        parts += [_SPECIAL.sub(r"\\\g<0>", text[at : match.start()]), f"`{match[0].strip('`')}`"]
        at = match.end()
    return "".join([*parts, _SPECIAL.sub(r"\\\g<0>", text[at:])])


def _functions(source: str) -> Iterator[str]:
    """Yield a list of the device functions of a source, linked to their first definitions."""
    code = re.sub("//.*", lambda comment: " " * len(comment[0]), source)
    lines: dict[str, int] = {}
    for match in _FUNCTION.finditer(code):
        lines.setdefault(match[1], code.count("\n", 0, match.start(1)) + 1)
    if lines:
        yield f"Device functions: {', '.join(f'[`{n}`](#L{line})' for n, line in lines.items())}."


def _to(file: str, path: str) -> str:
    """Return the link from a file of kernels_cu to a path in the repository."""
    return posixpath.relpath(path, posixpath.dirname(f"{FOLDER}/{file}"))


def _linked(file: str, other: str) -> str:
    return f"[`{other}`]({_to(file, f'{FOLDER}/{other}')})"


def _figures(file: str, operation: str) -> str:
    return f"[{operation}]({_to(file, FIGURES)}#{operation})"
