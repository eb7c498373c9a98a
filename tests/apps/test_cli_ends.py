"""However a command ends after Ctrl-C, a shell sees an exit code and at most one line on stderr.

Full, closed and broken streams are in tests/golden/commands/streams.txt.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpt2block.cuda import doctor
from tests.devices import slow

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "endless": ["generate", "KING", "--max-new-tokens=999999", "--overflow=truncate",
                "--device=cpu"],
    "score": ["score", str(ROOT / "pyproject.toml"), "--device", "cpu", "--stride", "255"],
    "block": ["block", "--text", "KING", "--device", "cpu"],
    "check": ["check"],
}  # fmt: skip
CODES = {"check": 1}  # exit codes without a GPU; the others end with 0
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}

pytestmark = pytest.mark.skipif(os.name == "nt", reason="streams and signals as POSIX has them")


# Ctrl-C

LAUNCHERS = {
    "module": "import runpy; runpy.run_module('gpt2block', run_name='__main__', alter_sys=True)",
    "console script": "import re, sys; from gpt2block.apps.cli import main; sys.exit(main())",
}
# Prints to stderr when `main` has begun, after Python's own start.
BEGUN = """
import os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "gpt2block.apps.cli.app":
            os.write(2, b"begun\\n")
            exec(SETUP, {})
sys.meta_path.insert(0, Finder())
sys.argv[0] = "gpt2block"
"""


def start(
    launcher: str, arguments: list[str], on_ctrl_c: Any, setup: str = ""
) -> subprocess.Popen[str]:
    """Start a command; return it when its `main` has begun, which then runs `setup`."""
    before = signal.signal(signal.SIGINT, on_ctrl_c)  # ignored signals are inherited
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", f"SETUP = {setup!r}" + BEGUN + LAUNCHERS[launcher], *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=ENVIRONMENT,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stderr is not None
    assert process.stderr.readline() == "begun\n"
    return process


def interrupted(launcher: str, arguments: list[str], after: float) -> tuple[int, str, str]:
    """Send SIGINT to a command `after` seconds; return exit code, stdout and stderr."""
    process = start(launcher, arguments, signal.default_int_handler)
    time.sleep(after)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("launcher", "after"), [slow("module", 0), slow("module", 0.1), ("console script", 0.05)]
)
def test_ctrl_c_during_the_imports_is_quiet(launcher: str, after: float) -> None:
    code, out, err = interrupted(launcher, COMMANDS["endless"], after)
    assert (code, out, err) == (130, "", "")


@pytest.mark.parametrize(
    ("name", "after"),
    [slow("score", 0.2), ("score", 0.5), slow("block", 0.6), slow("check", 0.4)],
)  # fmt: skip
def test_ctrl_c_at_any_time_leaves_no_traceback(name: str, after: float) -> None:
    code, _, err = interrupted("module", COMMANDS[name], after)
    assert "Traceback" not in err
    assert "Exception" not in err
    assert err.count("\n") <= 1
    assert code in (130, CODES.get(name, 0))  # the latter if it had already ended


# Makes `check` compile for about a second, and prints to stderr when compilation begins.
LONG_PROGRAM = """
import os
from gpt2block.cuda import doctor
from tests.devices import slow
doctor.PROGRAM += "".join(f"__device__ int f{i}(int x) {{ return x + {i}; }}" for i in range(8000))
compile_log = doctor.compile_log
def announced(*arguments):
    os.write(2, b"compiling\\n")
    return compile_log(*arguments)
doctor.compile_log = announced
"""


@pytest.mark.parametrize("after", [slow(0.05), 0.2])
def test_ctrl_c_while_nvrtc_compiles_is_quiet(after: float) -> None:
    """NVRTC's own handler of SIGINT would exit with 4, or crash in another thread."""
    pytest.importorskip("cupy", reason="compiling needs CuPy and NVRTC")
    process = start("module", ["check"], signal.default_int_handler, LONG_PROGRAM)
    assert process.stderr is not None
    assert process.stderr.readline() == "compiling\n"
    time.sleep(after)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=100) == ("", "")
    assert process.returncode == 130


def test_ctrl_c_while_it_writes_says_so() -> None:
    process = start("module", COMMANDS["endless"], signal.default_int_handler)
    assert process.stdout is not None
    assert process.stdout.read(12).startswith("KING")  # then its continuation
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert err.endswith("ended: interrupted\n")
    assert err.count("\n") == 1


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    """SIGINT is ignored under nohup, or in the background of a script."""
    process = start("module", ["--version"], signal.SIG_IGN)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert (process.returncode, out, err) == (0, f"gpt2block {doctor.version()}\n", "")


def test_what_comes_before_main_is_little() -> None:
    """Python itself reports Ctrl-C before `main` runs, so nothing slow may be imported before."""
    code = (
        "import sys; before = {*sys.modules}\n"
        "import gpt2block, gpt2block.apps.cli; print(*sorted({*sys.modules} - before))"
    )
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
    loaded = done.stdout.split()
    assert [name for name in loaded if name.startswith("gpt2block")] == [
        "gpt2block",
        "gpt2block.apps",
        "gpt2block.apps.cli",
        "gpt2block.apps.cli.codes",
        "gpt2block.apps.cli.interrupts",
    ]
    assert not {*loaded} & {"numpy", "typer", "rich", "click", "json", "typing"}
