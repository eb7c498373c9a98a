"""Draw passages of the project's prose at random, for a reader who does not know the project.

`python tools/passages.py --seed 11` prints 200 passages with their places: first paragraphs of
docstrings, comments of Python files, heads and comments of kernels, sentences of pages. A reader
marks each passage that cannot be restated exactly after one reading. A comment at the end of a line
is shown with its line, and such comments on neighbouring lines are one passage.

`python tools/passages.py --check` names docstrings and comments whose first words leave out the
subject or the verb. The exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import tokenize
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DRAWN = {"docstring": 110, "comment": 40, "kernel head": 10, "kernel comment": 20, "page": 20}
MARKS = {"docstring": "", "comment": "#", "kernel head": "", "kernel comment": "//"}
WORDS = "those|these|that|what|of|the same|it|its|as|at|by|or|and|but|which|so|none|both"
OPENING = re.compile(rf"({WORDS})\b", re.IGNORECASE)
CLAUSE = re.compile(r"(as|at|by) [^.,]*, \w+", re.IGNORECASE)  # "At most 8 rows, a block ..."
UNLESS = re.compile(r"(?<![\w.])(?<!Raise )(?<!raise )(?<!Raises )(?<!or )\w+Error unless")
PRAGMA = re.compile(r"#\s*(noqa|type:|fmt:|pragma|!)|#:|#!/")


class Passage(NamedTuple):
    """A passage of prose. place: file and line, from 1."""

    place: str
    text: str


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and first paragraph of each docstring of a Python file."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        text = ast.get_docstring(node) if isinstance(node, kinds) else None
        if text and isinstance(node, kinds):
            yield node.body[0].lineno, text.partition("\n\n")[0]


def comments(file: Path) -> Iterator[tuple[int, str]]:
    """Yield first line and text of each comment of a Python file, with the code of its lines."""
    text = file.read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    own = [t for t in tokens if t.type == tokenize.COMMENT and not PRAGMA.match(t.string)]
    yield from _joined(text.splitlines(), [(t.start[0], t.start[1]) for t in own], "#")


def kernel_comments(file: Path, head: bool) -> Iterator[tuple[int, str]]:
    """Yield first line and text of the head of a kernel file, or of its other comments."""
    lines = file.read_text(encoding="utf-8").splitlines()
    starts = [(n, line.find("//")) for n, line in enumerate(lines, 1) if "//" in line]
    ends = next((n for n, line in enumerate(lines, 1) if not line.startswith("//")), 0)
    chosen = [(n, column) for n, column in starts if (n < ends) == head]
    yield from _joined(lines, chosen, "//")


def sentences(file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each sentence of a page, without its code and tables."""
    text = re.sub(
        r"```.*?```|<!--.*?-->|^[#|!<].*?$",
        lambda found: "\n" * found[0].count("\n"),
        file.read_text(encoding="utf-8"),
        flags=re.DOTALL | re.MULTILINE,
    )
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", text):
        joined = " ".join(paragraph.split())
        for sentence in re.split(r"(?<=[.!?]) (?=[A-Z`\[*])", joined):
            if re.fullmatch(r"[A-Z`[*].{24,}[.!?]", sentence):
                yield line, sentence
        line += paragraph.count("\n")


def _joined(
    lines: list[str], starts: list[tuple[int, int]], mark: str
) -> Iterator[tuple[int, str]]:
    """Yield comments (line, column), joined where their lines are neighbours and of one kind."""

    def run(item: tuple[int, tuple[int, int]]) -> tuple[int, bool]:
        index, (line, column) = item
        return line - index, bool(lines[line - 1][:column].strip())

    for (_, trailing), group in groupby(enumerate(starts), run):
        places = [at for _, at in group]
        shown = [lines[n - 1].strip() if trailing else lines[n - 1][c:].strip() for n, c in places]
        text = "\n".join(shown)
        if any(len(re.sub(r"\W", "", lines[n - 1][c:])) > 8 for n, c in places):
            yield places[0][0], text if trailing else text.replace(mark, "").strip()


def passages(kind: str, root: Path = ROOT) -> list[Passage]:
    """Return all passages of a kind of DRAWN, in the order of their files."""
    python = sorted((root / "gpt2block").rglob("*.py"))
    kernels = sorted(p for p in (root / "kernels_cu").rglob("*.cu*"))
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]
    every: list[Passage] = []
    files = {"docstring": python, "comment": python, "page": pages}.get(kind, kernels)
    for file in files:
        if kind == "docstring":
            items = docstrings(file)
        elif kind == "comment":
            items = comments(file)
        elif kind == "page":
            items = sentences(file)
        else:
            items = kernel_comments(file, head=kind == "kernel head")
        every += [Passage(f"{file.relative_to(root)}:{line}", text) for line, text in items]
    return every


def drawn(seed: int, root: Path = ROOT) -> dict[str, list[Passage]]:
    """Draw passages of each kind, in the numbers of DRAWN, determined by the seed and the files."""
    chosen = random.Random(seed)
    return {kind: chosen.sample(passages(kind, root), count) for kind, count in DRAWN.items()}


def fragments(kind: str, root: Path) -> Iterator[str]:
    """Yield place and text of each passage of a kind that begins without a subject or a verb."""
    mark = MARKS[kind]
    for place, text in passages(kind, root):
        trailing = bool(mark) and mark in text  # one comment for each line of code
        for part in text.splitlines() if trailing else [" ".join(text.split())]:
            comment = part.partition(mark)[2].strip() if trailing else part
            if (OPENING.match(comment) and not CLAUSE.match(comment)) or UNLESS.search(comment):
                yield f"{place}: {comment}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--seed", type=int)
    choice.add_argument("--check", action="store_true")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to read")
    arguments = parser.parse_args()
    if arguments.check:
        problems = [fragment for kind in MARKS for fragment in fragments(kind, arguments.root)]
        print(*(problems or ["every passage names its subject"]), sep="\n")
        return 1 if problems else 0
    number = 0
    for kind, found in drawn(arguments.seed, arguments.root).items():
        for each in found:
            number += 1
            print(f"--- {number} · {kind} · {each.place}\n{each.text}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
