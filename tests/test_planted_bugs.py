"""The list of planted bugs stays true while the code that they change is edited."""

from __future__ import annotations

import planted_bugs
import pytest


def test_every_bug_can_be_planted_and_names_a_test() -> None:
    pytest.importorskip("tomllib")
    bugs = planted_bugs.read_bugs()
    assert len(bugs) == len({bug.id for bug in bugs})
    for bug in bugs:
        assert not bug.problem(), bug.id
        assert bug.old != bug.new, bug.id
        path, _, name = bug.test.partition("::")
        tests = (planted_bugs.ROOT / path).read_text("utf-8")
        assert not name or f"def {name.partition('[')[0]}(" in tests, bug.test
