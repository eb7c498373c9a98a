"""tools/fuzz.py: a short run of every area, and how the runner reports failing cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fuzz
import numpy as np
import pytest
from fuzzing import NUMPY_AREAS, Area, Difference, Refused, area, attempt, generator, op_calls

from gpt2block import InputError, TwoPartMatrix, emulator

TOOL = Path(__file__).parent.parent / "tools" / "fuzz.py"
CALLS = 700
AREAS = [name for name in NUMPY_AREAS if name != "tokenizers" or find_spec("tokenizers")]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), *arguments],
        capture_output=True, text=True, timeout=300, check=False, cwd=TOOL.parent.parent,
    )  # fmt: skip


def test_a_short_run_of_every_area_finds_nothing(tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    areas = [argument for name in AREAS for argument in ("--area", name)]
    found = run(*areas, "--calls", str(CALLS), "--seed", "0", "--json", str(summary))
    assert found.returncode == 0, found.stdout + found.stderr
    tallies = json.loads(summary.read_text())
    assert [tally["area"] for tally in tallies] == AREAS
    assert sum(tally["calls"] for tally in tallies) == pytest.approx(CALLS, abs=len(AREAS))
    for tally in tallies:
        assert tally["calls"] == tally["right"] + tally["refused"]
        assert min(tally["right"], tally["refused"]) > 0  # every area has both kinds of cases


@pytest.mark.parametrize("rule", op_calls.RULES, ids=lambda rule: rule.op)
def test_drawn_calls_of_an_operation_are_valid(rule: op_calls.Rule) -> None:
    with emulator.emulated():
        for number in range(5):
            call = op_calls.drawn_call(op_calls.Draw(generator(0, rule.op, number)), rule)
            host = {
                name: value.joined() if isinstance(value, TwoPartMatrix) else value
                for name, value in call.arrays.items()
            }
            with np.errstate(all="ignore"):
                assert all(result.size for result in call.truth(host, call.options))


def failing(case: Any) -> Area:
    return Area("failing", 1, case)


def test_a_case_that_fails_is_reported_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(rng: np.random.Generator, folder: Path) -> None:
        raise Difference("1 is not 2")

    def broken(rng: np.random.Generator, folder: Path) -> None:
        raise KeyError("text")

    def slow(rng: np.random.Generator, folder: Path) -> None:
        while True:
            try:
                time.sleep(9)
            except BaseException:  # as in code that catches everything
                return

    monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    found = [fuzz.judged(failing(case), 7, 3) for case in (wrong, broken, slow)]
    failures = [failure for failure in found if isinstance(failure, fuzz.Failure)]
    kinds = [failure.kind for failure in failures]
    assert kinds == ["silent difference", "traceback", "hang"]
    assert "KeyError: 'text' at test_fuzz.py" in failures[1].message
    assert failures[1].command == "tools/fuzz.py --area failing --seed 7 --case 3"


@pytest.mark.parametrize("message", ["two\nlines", "x" * 501, "\x1b[2J", ""])
def test_a_refusal_must_be_one_printable_line(
    message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        error = InputError("fine")
        error.args = (message,)
        raise error

    with pytest.raises(Difference, match="message of"):
        attempt(False, refuse)


def test_only_errors_of_the_package_are_refusals() -> None:
    def fail(error: Exception) -> None:
        raise error

    with pytest.raises(KeyError):
        attempt(False, fail, KeyError("x"))
    with pytest.raises(Refused):
        attempt(False, fail, InputError("x"))
    with pytest.raises(Difference, match="a valid input: x"):
        attempt(True, fail, InputError("x"))


def test_a_case_depends_only_on_seed_area_and_number(tmp_path: Path) -> None:
    draws = [generator(1, "api", 5).random(), generator(1, "api", 5).random()]
    assert draws[0] == draws[1]
    others = [generator(2, "api", 5), generator(1, "bulk", 5), generator(1, "api", 6)]
    assert all(rng.random() != draws[0] for rng in others)
    cases = [*fuzz.cases_of([area("configs"), area("api")], 100)]
    assert len({*cases}) == len(cases) == 100


def test_a_process_that_dies_or_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 1 ends the process, and case 2 hangs."""
    monkeypatch.setattr(fuzz, "GRACE", 2 - fuzz.SECONDS)
    monkeypatch.setattr(fuzz, "work", stubborn)
    worker = fuzz.Worker(["api"])
    first = worker._process
    outcomes = [worker.run("api", 0, case) for case in range(4)]
    assert worker._process is not first
    worker.close()
    assert [outcome == "right" for outcome in outcomes] == [True, False, False, True]
    failures = [outcome for outcome in outcomes if isinstance(outcome, fuzz.Failure)]
    assert [(failure.case, failure.kind) for failure in failures] == [(1, "traceback"), (2, "hang")]
    assert "exit code 3" in failures[0].message


def stubborn(connection: Any, names: Any) -> None:
    connection.send("ready")
    while (case := connection.recv()) is not None:
        if case[2] == 1:
            os._exit(3)
        time.sleep(60 * (case[2] == 2))
        connection.send("right")
