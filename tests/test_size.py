"""tools/size.py: which lines count, and which counts exceed their limits."""

from __future__ import annotations

from pathlib import Path

import pytest
import size

CODE = '''"""A module.

Two lines."""

import os  # a comment

TEXT = """a string,
not a docstring"""


def f():
    """A docstring."""
    # a comment
    return os
'''


def test_lines_that_count() -> None:
    assert size.python_lines(CODE) == 5  # import, two of TEXT, def, return
    assert size.cuda_lines("// head\n\nint a;  // b\n/* c\n d */ int e;\n/* f */\n") == 2
    assert size.words("two words\n\n") == 2


@pytest.mark.parametrize(
    ("path", "room"),
    [
        ("gpt2block/apps/serve/app.py", "gpt2block/apps"),
        ("gpt2block/emulator/cooperative_groups/reduce.h", "gpt2block/emulator"),
        ("gpt2block/block.py", "gpt2block"),
        ("tools/fuzzing/bulk.py", "tools"),
        ("docs/learn/index.md", "all documents"),
    ],
)
def test_rooms(path: str, room: str) -> None:
    assert size.room(Path(path)) == room


def test_a_count_above_its_limit_or_without_one_is_reported() -> None:
    problems = size.excesses(
        {"python a": 3, "python b": 2, "python c": 1}, {"python a": 2, "python b": 2}
    )
    assert [problem.split(":")[0] for problem in problems] == ["python a", "python c"]
