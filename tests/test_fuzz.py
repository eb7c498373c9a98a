"""tools/fuzz.py: a short run of every area, and how the runner reports failing cases."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fuzz
import numpy as np
import pytest
from fuzzing import NUMPY_AREAS, Area, Difference, Outcome, area, generator, op_calls, refused_or

from gpt2block import InputError, TwoPartMatrix, emulator

TOOL = Path(__file__).parent.parent / "tools" / "fuzz.py"
CALLS = 1500
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
        calls = [op_calls.drawn_call(generator(0, rule.op, n), rule) for n in range(5)]
        for call in calls:
            host = {
                name: value.joined() if isinstance(value, TwoPartMatrix) else value
                for name, value in call.arrays.items()
            }
            with np.errstate(all="ignore"):
                assert all(result.size for result in call.truth(host, call.options))


def failing(case: Any) -> Area:
    return Area("failing", 1, case)


def test_a_case_that_fails_is_reported_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(rng: np.random.Generator, folder: Path) -> Outcome:
        raise Difference("1 is not 2")

    def broken(rng: np.random.Generator, folder: Path) -> Outcome:
        raise KeyError("text")

    def slow(rng: np.random.Generator, folder: Path) -> Outcome:
        while True:
            try:
                time.sleep(9)
            except BaseException:  # as in code that catches everything
                return "right"

    monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    found = [fuzz.judged(failing(case), 7, 3) for case in (wrong, broken, slow)]
    assert all(isinstance(failure, fuzz.Failure) for failure in found)
    kinds = [failure.kind for failure in found if isinstance(failure, fuzz.Failure)]
    assert kinds == ["silent difference", "traceback", "hang"]
    assert isinstance(found[1], fuzz.Failure)
    assert "KeyError: 'text' at test_fuzz.py" in found[1].message
    assert found[1].command == "tools/fuzz.py --area failing --seed 7 --case 3"


@pytest.mark.parametrize("message", ["two\nlines", "x" * 501, "\x1b[2J", ""])
def test_a_refusal_must_be_one_printable_line(
    message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        error = InputError("fine")
        error.args = (message,)
        raise error

    with pytest.raises(Difference, match="message of"):
        refused_or(refuse)


def test_only_allowed_errors_are_refusals() -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        refused_or(fail)
    assert refused_or(fail, KeyError) == "refused"


def test_a_case_depends_only_on_seed_area_and_number(tmp_path: Path) -> None:
    draws = [generator(1, "api", 5).random(), generator(1, "api", 5).random()]
    assert draws[0] == draws[1]
    others = [generator(2, "api", 5), generator(1, "bulk", 5), generator(1, "api", 6)]
    assert all(rng.random() != draws[0] for rng in others)
    chunks = fuzz.chunks_of([area("configs"), area("api")], 100, 3)
    cases = [(chunk.area, n) for chunk in chunks for n in range(chunk.first, chunk.end)]
    assert len(set(cases)) == len(cases) == 100


def test_a_process_that_dies_is_one_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead:
        exitcode = -11

        def is_alive(self) -> bool:
            return False

        def join(self, timeout: float | None = None) -> None: ...

        def kill(self) -> None: ...

    class Line:
        def __init__(self, worker: fuzz.Worker) -> None:
            self.worker = worker

        def send(self, chunk: Any) -> None:
            self.chunk = chunk

        def poll(self, timeout: float = 0) -> bool:
            if self.chunk.first <= 2 < self.chunk.end:  # case 2 ends the process
                self.worker._current.value = 2
                return False
            return True

        def recv(self) -> fuzz.Tally:
            calls = self.chunk.end - self.chunk.first
            return fuzz.Tally(self.chunk.area, calls=calls, right=calls)

    def start(worker: Any) -> None:
        worker._process, worker._connection = Dead(), Line(worker)

    monkeypatch.setattr(fuzz.Worker, "_start", start)
    found = fuzz.Worker(["api"]).run(fuzz.Chunk("api", 0, 0, 6))
    assert (found.calls, found.right) == (6, 5)
    assert [(failure.case, failure.kind) for failure in found.failures] == [(2, "traceback")]
    assert "exit code -11" in found.failures[0].message
