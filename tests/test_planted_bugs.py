"""The list of planted bugs fits the current code and tests."""

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


def test_the_share_of_bugs_that_quick_tests_find_is_stated() -> None:
    pytest.importorskip("tomllib")
    bugs = planted_bugs.read_bugs()
    stated = f"finds {sum(bug.quick for bug in bugs)} of the {len(bugs)} planted bugs"
    assert stated in (planted_bugs.ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert all("::" in bug.test for bug in bugs if bug.quick)
