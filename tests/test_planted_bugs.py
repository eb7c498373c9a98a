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


def test_every_bug_names_a_test_that_runs_without_slow(request: pytest.FixtureRequest) -> None:
    pytest.importorskip("tomllib")
    of, args = request.config.option, request.config.args
    if of.keyword or of.markexpr or of.part or any("::" in each for each in args):
        pytest.skip("only some tests are selected")
    ids = [item.nodeid for item in request.session.items if "slow" not in item.keywords]
    found = {each.partition(end)[0] for each in ids for end in ("[", "::")}.union(ids)
    tests = {bug.test for bug in planted_bugs.read_bugs()}
    assert not [test for test in tests - found if test.partition("::")[0] in found]
