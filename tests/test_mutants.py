"""tools/mutants.py: the changes of a module that it tries."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray")
import mutants

TEXT = '''"""A text."""


def limited(n: int | None = 3) -> int | str:
    """Another text."""
    return n if n < 4 else "many"
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("one.py", "other.py"):
        (tmp_path / name).write_text(TEXT)
    return tmp_path


def test_annotations_and_docstrings_mean_nothing() -> None:
    same = TEXT.replace("int | None", "int & None").replace("Another text", "A third one")
    assert mutants.meaning(same) == mutants.meaning(TEXT)
    assert mutants.meaning(TEXT.replace("n < 4", "n > 4")) != mutants.meaning(TEXT)


def test_a_seed_gives_the_same_list_spread_over_the_modules(folder: Path) -> None:
    lists = [mutants.chosen(folder, ["one.py", "other.py"], seed, 4) for seed in (1, 1, 2)]
    assert lists[0] == lists[1] != lists[2]
    for found in lists:
        assert sorted(mutant.module for mutant in found) == ["one.py", "one.py", "other.py",
                                                             "other.py"]  # fmt: skip
        assert {(mutant.module, mutant.line) for mutant in found} == {
            (name, line) for name in ("one.py", "other.py") for line in (4, 6)
        }
        assert all(mutants.shown(TEXT, mutant).count("\n") == 1 for mutant in found)
