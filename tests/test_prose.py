"""Docstrings and comments whose first words leave out the subject are refused."""

import re
from collections.abc import Iterator
from pathlib import Path

import passages
import pytest

WORDS = "those|these|that|what|of|the same|it|its|as|at|by|or|and|but|which|so|none|both"
OPENING = re.compile(rf"({WORDS})\b", re.IGNORECASE)
CLAUSE = re.compile(r"(as|at|by) [^.,]*, \w+", re.IGNORECASE)  # "At most 8 rows, a block ..."
UNLESS = re.compile(r"(?<![\w.])(?<!Raise )(?<!raise )(?<!Raises )(?<!or )\w+Error unless")
MARKS = {"docstring": None, "comment": "#", "kernel head": "//", "kernel comment": "//"}


def refused(kind: str, root: Path = passages.ROOT) -> Iterator[str]:
    """Yield place and text of each passage of a kind that begins without a subject or a verb."""
    mark = MARKS[kind]
    for place, text in passages.passages(kind, root):
        trailing = mark is not None and mark in text  # one comment for each line of code
        parts = text.splitlines() if trailing else [" ".join(text.split())]
        for part in parts:
            comment = part.partition(mark)[2].strip() if trailing and mark else part
            if (OPENING.match(comment) and not CLAUSE.match(comment)) or UNLESS.search(comment):
                yield f"{place}: {comment}"


@pytest.mark.parametrize("kind", MARKS)
def test_a_passage_names_its_subject(kind: str) -> None:
    found = list(refused(kind))
    assert not found, "begin with a verb, or a noun that stands alone:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        '"""Those of a row."""',
        '"""InputError unless x is finite."""',
        "x = 8  # of a row of x",
        "# that wait for others\nx = 8",
    ],
)
def test_a_fragment_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "gpt2block").mkdir()
    (tmp_path / "gpt2block/a.py").write_text(line + "\n", encoding="utf-8")
    assert [*refused("docstring", tmp_path), *refused("comment", tmp_path)]
