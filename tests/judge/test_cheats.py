"""The sets of kernels in tests/corpus/cheats: their tables, and the verdicts on a few of them.

`gpt2block judge tests/corpus/cheats/SET` judges all kernels of a set, which takes minutes.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from gpt2block.judge import folder
from gpt2block.judge.templates import names
from tests.devices import on_emulator

SETS = sorted(
    path for path in (Path(__file__).parents[1] / "corpus" / "cheats").iterdir() if path.is_dir()
)
KERNELS = {path.name: folder.entries(path) for path in SETS}
EVERY = 30  # one in this many kernels is judged here


@pytest.mark.parametrize("path", SETS, ids=lambda path: path.name)
def test_every_file_has_a_row_with_a_kind_and_a_note(path: Path) -> None:
    kernels = KERNELS[path.name]
    assert sorted(each.file for each in kernels) == sorted(p.name for p in path.glob("*.cu"))
    assert all(each.expected and each.kind and each.note for each in kernels)
    assert {each.operation for each in kernels} <= set(names())


def test_the_sets_are_large() -> None:
    count = Counter(each.expected for kernels in KERNELS.values() for each in kernels)
    assert count["wrong"] >= 150
    assert count["right"] >= 100
    assert len({each.operation for kernels in KERNELS.values() for each in kernels}) >= 12


@pytest.mark.slow
@on_emulator
def test_a_few_verdicts_are_as_expected() -> None:
    kernels = [each for found in KERNELS.values() for each in found][::EVERY]
    found = list(folder.judge(kernels, 2, device="cpu", seed=0))
    assert not [(each.entry.file, each.said) for each in folder.disagreements(found)]
