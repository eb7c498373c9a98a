"""The options and hooks of the test suite itself, and its use of device memory."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpt2block.cuda import cupy
from tests import conftest, gpus
from tests.devices import running_on


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_parts_are_all_tests_once(parts: int) -> None:
    items: list[Any] = list(range(10))
    found: list[Any] = [conftest.part_of(items, f"{number + 1}/{parts}") for number in range(parts)]
    assert sorted(chain(*found)) == items
    assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "a/b", "1/2/3", "-1/2"])
def test_a_part_that_is_none(part: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"--part: expected I/N, as in 1/2, got '{part}'"):
        conftest.part_of([], part)


PROGRAM = "import pytest\n@pytest.mark.gpu\ndef test_a(): pass\n"
EACH = f"{PROGRAM}@pytest.mark.gpu\n@pytest.mark.parametrize('i', range(2))\ndef test_b(i): pass\n"
BOTH = f"{PROGRAM}def test_c(): pass\n"


@pytest.mark.parametrize(
    ("program", "code", "line", "processes"),
    [
        (BOTH, 0, "1 GPU tests deselected: --gpu runs them\n", ("-n", "1", "--dist", "loadfile")),
        (EACH, 5, "3 GPU tests deselected: --gpu runs them; no other test was selected", ()),
    ],
    ids=["workers", "one process"],
)
def test_gpu_tests_are_deselected(
    tmp_path: Path, program: str, code: int, line: str, processes: tuple[str, ...]
) -> None:
    if processes:
        pytest.importorskip("xdist")
    (tmp_path / "test_x.py").write_text(program)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", "pyproject.toml"]
    done = subprocess.run(
        [*command, *processes, str(tmp_path)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert line in done.stdout
    assert "skipped" not in done.stdout


def test_failures_are_written_at_once(tmp_path: Path) -> None:
    failures = conftest.Failures(tmp_path / "failures.txt")
    for name, failed in (("a", False), ("b", True), ("c", True)):
        report: Any = SimpleNamespace(
            nodeid=f"test_x.py::{name}", when="call", failed=failed, longreprtext=f"why {name}"
        )
        failures.pytest_runtest_logreport(report)
    assert failures.path.read_text() == (
        "FAILED test_x.py::b (call)\nwhy b\n\nFAILED test_x.py::c (call)\nwhy c\n\n"
    )


def reported(failed: bool, worker: bool, failures: Path | None = None) -> Any:
    """Run the hook on a report of a GPU test; return its result."""
    options = {"--gpu": True, "--failures": failures}
    config = SimpleNamespace(getoption=options.__getitem__)
    if worker:
        config.workerinput = {}
    item: Any = SimpleNamespace(keywords={"gpu"}, nodeid="test_x.py::b", config=config)
    hook = conftest.pytest_runtest_makereport(item)
    next(hook)
    with pytest.raises(StopIteration) as end:
        hook.send(SimpleNamespace(failed=failed, longreprtext="why"))  # type: ignore[arg-type]
    return end.value.value


def test_a_lost_context_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker ends at once, with an exit status that pytest-xdist reports with the test's name."""
    monkeypatch.setattr(conftest, "context_problem", lambda: "an illegal memory access")
    assert not reported(failed=False, worker=True).failed
    with pytest.raises(
        pytest.exit.Exception, match=r"test_x\.py::b: the CUDA context is lost: an il"
    ):
        reported(failed=True, worker=False)
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)
    reported(failed=True, worker=True, failures=tmp_path / "failures.txt")
    assert ends == [3]
    written = (tmp_path / "failures.txt").read_text()
    assert written == "test_x.py::b: the CUDA context is lost: an illegal memory access\nwhy\n\n"
    monkeypatch.setattr(conftest, "context_problem", lambda: None)
    assert reported(failed=True, worker=True).failed
    assert ends == [3]


def test_a_context_is_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise error

    with running_on("forward"):
        assert gpus.context_problem() is None
        monkeypatch.setattr(cupy.cuda.Device, "synchronize", fail)
        error: Exception = RuntimeError("cudaErrorIllegalAddress")
        assert gpus.context_problem() == "RuntimeError: cudaErrorIllegalAddress"
        error = MemoryError()  # another process may use the memory
        assert gpus.context_problem() is None


def test_large_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "WAIT_S", 0.0)
    with running_on("forward"):
        device = cupy.cuda.Device
        ran = False
        with gpus.large_memory(1 << 30):
            ran = True
        assert ran
        with pytest.raises(pytest.skip.Exception, match="needs 5 GB"), gpus.large_memory(5 << 30):
            raise AssertionError
        monkeypatch.setattr(device, "mem_info", (1 << 30, 1 << 40))
        with (
            pytest.raises(pytest.skip.Exception, match="other processes leave less than 4 GB free"),
            gpus.large_memory(4 << 30),
        ):
            raise AssertionError
