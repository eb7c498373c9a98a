"""Options and fixtures shared by the tests."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import threading
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import planted_bugs
import pytest

from gpt2block.emulator.ptx import cache as programs
from gpt2block.emulator.ptx import engine
from tests.devices import EMULATED, device, small_blocks  # noqa: F401  (fixtures of every test)
from tests.gpus import allocations, context_problem  # noqa: F401  (a fixture)

# Text that differs between compilations: the time, the folder of a file, and the last sections of
# PTX, in JSON, which have debug information that names the working directory of the compiler.
OF_A_COMPILATION = re.compile(
    r"""Compile time = [\d.]+ ms|(?<=\.file)\\t\d+ \\"[^"]*/|\.section(?:[^"\\]|\\.)*"""
)
ON_GPU = pytest.StashKey[int]()  # number of tests that are deselected without --gpu
CPU_SECONDS = pytest.StashKey[float]()  # CPU time of the workers and of their programs

hypothesis.settings.register_profile(
    "repeatable", derandomize=True, deadline=None, max_examples=25, database=None
)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def smollm2_files() -> Path:
    """Return the folder of SmolLM2's files; skip the test if they are not installed."""
    from gpt2block import CheckpointError  # noqa: PLC0415
    from gpt2block.files.checkpoints.locating import find_smollm2  # noqa: PLC0415

    try:
        return find_smollm2()
    except CheckpointError as error:
        pytest.skip(str(error))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run the tests that need a CUDA device")
    parser.addoption("--slow", action="store_true", help="run the tests that take minutes")
    parser.addoption("--part", metavar="I/N", help="run part I of N of the selected tests")
    parser.addoption("--failures", metavar="FILE", help="append each failure to a file at once")
    parser.addoption(
        "--recompile",
        type=int,
        metavar="N",
        help="compile one of N kept programs of the emulator again, and compare the PTX",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the environment of the tests and of the programs that they start.

    Such programs can be interrupted, even if a shell runs the tests in the background with `&`. All
    processes share the emulator's engine and the PTX of kernels, which the user's cache keeps. With
    --gpu, a machine without a usable device is an error, never a silent skip.
    """
    os.environ[programs.VARIABLE] = str(programs.folder())  # also if a test changes HOME
    if share := config.getoption("--recompile"):
        compile_again(share)
    if config.getoption("numprocesses", None):
        # Workers keep byte code: compiling the tests takes each worker eight seconds. A process
        # alone obeys the variable: tools/planted_bugs.py edits sources several times a second.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        if engine.missing() is None:
            threading.Thread(target=engine._built).start()  # workers that need the engine wait
    os.environ.pop("COLUMNS", None)  # tables have their usual width
    os.unsetenv("COLUMNS")  # pytest imports readline, which sets it without os.environ
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Workers share the cores. Programs that tests start print no advice to set this variable.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if hasattr(config.option, "loadscopereorder"):  # keep the order: tests that wait come early
        config.option.loadscopereorder = False
    if config.getoption("--failures") and not is_worker(config):
        config.pluginmanager.register(Failures(Path(config.getoption("--failures"))))
    if config.getoption("--gpu"):
        from gpt2block.cuda import doctor  # noqa: PLC0415

        problem = doctor.cuda_problem()
        if problem:
            raise pytest.UsageError(f"--gpu: no CUDA device can be used: {problem}")


def ids_of(nodeid: str) -> set[str]:
    """Return the ids that name a test: its own, its function's and its file's."""
    return {nodeid, nodeid.partition("[")[0], nodeid.partition("::")[0]}


def compile_again(share: int) -> None:
    """Compile one of `share` kept programs again, drawn at random.

    Keeping a program then raises AssertionError if its text differs from the kept text.
    """
    read, write, kept = programs.read, programs.write, dict[str, str]()
    usual = programs.folder()

    def read_some(name: str) -> str | None:
        text = read(name)
        in_use = programs.folder() == usual  # not the folder of a test
        if text is None or name in kept or not in_use or random.randrange(share):
            return text
        kept[name] = text
        return None

    def write_the_same(name: str, text: str) -> None:
        texts = [OF_A_COMPILATION.sub("", each) for each in (kept.get(name, text), text)]
        assert texts[0] == texts[1], f"{name}: another compilation gave another text"
        write(name, text)

    vars(programs).update(read=read_some, write=write_the_same)


def is_worker(config: pytest.Config) -> bool:
    """Return whether this process is a worker of pytest-xdist."""
    return hasattr(config, "workerinput")


class Failures:
    """Append each failure to a file as soon as it is reported, in case the run is killed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.write_text("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self.path.open("a") as file:
                file.write(f"FAILED {report.nodeid} ({report.when})\n{report.longreprtext}\n\n")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than cores: tests wait for subprocesses in a third of their time."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Mark cases of a function as slow that its other cases on the emulator cover."""
    found = yield
    for item in covered(found) if isinstance(found, list) else ():
        item.add_marker("slow")
    return found


def covered(items: list[pytest.Function]) -> list[pytest.Function]:
    """Return the cases on the emulator that repeat what others cover.

    The others have every value of every parameter, and every thread order. All cases that a planted
    bug names are among them.
    """
    every = {item: facts(item) for item in items if "slow" not in item.keywords}
    rest = {item: found for item, found in every.items() if not EMULATED.isdisjoint(found)}
    missing = set[Any]().union(*rest.values())
    for item in list(rest):
        if not tests_of_bugs().isdisjoint(ids_of(item.nodeid)):
            missing -= rest.pop(item)
    while missing:  # max() prefers the last order, which searches for races
        best = max(reversed(rest), key=lambda item: len(rest[item] & missing))
        missing -= rest.pop(best)
    return list(rest)


def facts(item: pytest.Function) -> set[Any]:
    """Return the names and values of a case's parameters, and its thread order."""
    simple, given = (str, int, float, tuple), getattr(item, "callspec", None)
    values = {
        (name, repr(value) if isinstance(value, simple) else id(value))
        for name, value in (given.params.items() if given else ())
    }
    orders = {value for _, value in values if value in EMULATED}
    return {*orders, *(each for each in values if each[1] not in EMULATED)}


@cache
def tests_of_bugs() -> frozenset[str]:
    """Return the tests that planted bugs name; Python 3.10 cannot read TOML."""
    text = planted_bugs.BUGS.read_text("utf-8")
    return frozenset(test for _, test in re.findall(r"""(?m)^test = (["'])(.*)\1$""", text))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt collected tests from garbage collection, which would visit them many times.

    Later collections are rare: with Python's thresholds, they take 4 % of the time of many tests.
    """
    gc.set_threshold(0)
    result = yield
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    return result


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that need a GPU or --slow, and tests of other parts.

    Files outside the folders come first: each takes long, which would leave other workers idle.
    Last come folders whose files are all short, so that workers end together.
    """
    if not config.getoption("--slow") and not config.getoption("--gpu"):
        deselect(config, items, "slow")
    if not config.getoption("--gpu"):
        config.stash[ON_GPU] = deselect(config, items, "gpu")
        if is_worker(config):
            config.workeroutput["on_gpu"] = config.stash[ON_GPU]  # type: ignore[attr-defined]
    if config.getoption("--part"):
        items[:] = part_of(items, config.getoption("--part"))
    places = {"tests": -1, "files": 1, "models": 1}
    items.sort(key=lambda item: places.get(item.path.parent.name, 0))


def deselect(config: pytest.Config, items: list[pytest.Item], mark: str) -> int:
    """Deselect the tests with a mark; return how many they are."""
    found = [item for item in items if mark in item.keywords]
    items[:] = [item for item in items if mark not in item.keywords]
    config.hook.pytest_deselected(items=found)
    return len(found)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if is_worker(session.config):
        session.config.workeroutput["cpu_seconds"] = sum(os.times()[:4])  # type: ignore[attr-defined]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take figures from a worker. The main process collects no tests."""
    output, stash = getattr(node, "workeroutput", {}), node.config.stash
    stash[ON_GPU] = output.get("on_gpu", 0)
    stash[CPU_SECONDS] = stash.get(CPU_SECONDS, 0.0) + output.get("cpu_seconds", 0.0)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    of_workers = config.stash.get(CPU_SECONDS, None)  # ended workers count as children, too
    seconds = sum(os.times()[:4]) if of_workers is None else of_workers + sum(os.times()[:2])
    terminalreporter.write_line(f"{seconds:,.0f} CPU seconds")
    count = config.stash.get(ON_GPU, 0)
    if count:
        line = f"{count:,} GPU tests deselected: --gpu runs them"
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            line += f"; no other test was selected, hence exit code {int(exitstatus)}"
        terminalreporter.write_line(line)


def part_of(items: list[pytest.Item], part: str) -> list[pytest.Item]:
    """Return part "I/N": every N-th test from the I-th on, so that all parts take about as long."""
    number, _, parts = part.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 0 < int(number) <= int(parts)):
        raise pytest.UsageError(f"--part: expected I/N, as in 1/2, got {part!r}")
    return items[int(number) - 1 :: int(parts)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """End the process after a failure that leaves its CUDA context unusable.

    All later tests of this process would fail. pytest-xdist reports the failed test and starts
    another worker.
    """
    report = yield
    if report.failed and "gpu" in item.keywords and item.config.getoption("--gpu"):
        problem = context_problem()
        if problem:
            message = f"{item.nodeid}: the CUDA context is lost: {problem}"
            if not is_worker(item.config):
                pytest.exit(f"{message}\n{report.longreprtext}", returncode=3)
            os.write(2, f"{message}\n".encode())
            if path := item.config.getoption("--failures"):  # os._exit below loses this report
                with Path(path).open("a") as file:
                    file.write(f"{message}\n{report.longreprtext}\n\n")
            os._exit(3)
    return report


@pytest.fixture
def fewer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge a user's kernel at the same sizes in each run, without the runs that take most time.

    Left out are the sizes that a GPU times, long launches in further orders, and the longest arrays
    of to_fp8, softmax and sample_token, which have many further inputs.
    """
    from gpt2block.judge import cases, on_cpu, sizes  # noqa: PLC0415

    monkeypatch.setattr(cases, "MAX_SEED", 1)
    monkeypatch.setattr(on_cpu._Judge, "_check_large", lambda *_: [])
    monkeypatch.setattr(on_cpu, "MAX_AGAIN", 50_000)
    for name in ("softmax", "to_fp8", "sample_token"):
        monkeypatch.setitem(vars(sizes)["FURTHER"], name, sizes.FURTHER[name][:-1])


@pytest.fixture(scope="session")
def data() -> Path:
    """Return $GPT2BLOCK_DATA, the folder of test data outside the project; skip if not set."""
    folder = os.environ.get("GPT2BLOCK_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("GPT2BLOCK_DATA names no folder of test data")
    return Path(folder)
