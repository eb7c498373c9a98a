"""However a command ends, a shell sees an exit code and at most one line on stderr.

Real processes have full, closed or broken streams, Ctrl-C at any time, or a deleted folder.
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

from gpt2block import doctor
from tests.command_line import Ended, gpt2block

ROOT = Path(__file__).parent.parent
COMMANDS = {
    "generate": ["generate", "KING", "--max-new-tokens", "3", "--device", "cpu"],
    "endless": ["generate", "KING", "--max-new-tokens=999999", "--overflow=truncate",
                "--device=cpu"],
    "score": ["score", str(ROOT / "pyproject.toml"), "--device", "cpu", "--stride", "255"],
    "info": ["info", "--json"],
    "block": ["block", "--text", "KING", "--device", "cpu"],
    "kernels": ["kernels"],
    "check": ["check"],
    "bench": ["bench"],  # without a GPU an error, which is written to stderr
    "help": ["--help"],
    "map help": ["map", "score", "-h"],
    "version": ["--version"],
}  # fmt: skip
CODES = {"check": 1, "bench": 2}  # exit codes without a GPU; the others end with 0
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}

pytestmark = pytest.mark.skipif(os.name == "nt", reason="streams and signals as POSIX has them")


def shell(line: str, arguments: list[str]) -> Ended:
    """Run a line in a shell, with the command as "$@"."""
    done = subprocess.run(
        ["bash", "-c", line, "bash", sys.executable, "-m", "gpt2block", *arguments],
        capture_output=True, text=True, check=False, timeout=100, env=ENVIRONMENT,
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("target", "reason", "names"),
    [
        (">&-", "Bad file descriptor", ["generate", "info", "help"]),
        ("> /dev/full", "No space left on device", ["block", "check", "map help"]),
    ],
)
def test_output_that_cannot_be_written_is_one_line(
    target: str, reason: str, names: list[str]
) -> None:
    if target == "> /dev/full" and not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    for name in names:
        done = shell(f'"$@" {target}', COMMANDS[name])
        assert (done.code, done.err) == (1, f"error: cannot write to standard output: {reason}\n")


@pytest.mark.parametrize(
    ("name", "reader"), [("generate", "true"), ("kernels", "true"), ("endless", "head -c 6")]
)
def test_a_closed_pipe_is_quiet(name: str, reader: str) -> None:
    """The reader ends before anything is written, or after the first words."""
    done = shell(f'{{ sleep 0.1; "$@"; echo $? >&2; }} | {reader}', COMMANDS[name])
    assert done.err == "141\n"


@pytest.mark.parametrize("name", ["generate", "check", "bench"])
def test_a_closed_input_and_a_closed_standard_error_change_nothing(name: str) -> None:
    done = shell('"$@" <&- 2>&-', COMMANDS[name])
    assert (done.code, done.err) == (CODES.get(name, 0), "")
    assert bool(done.out) == (name != "bench")


@pytest.mark.parametrize("name", ["generate", "check"])
def test_all_streams_closed(name: str) -> None:
    assert shell('"$@" <&- >&- 2>&-', COMMANDS[name]).code == 1


def test_standard_error_that_is_full_is_ignored() -> None:
    done = shell('"$@" 2> /dev/full', COMMANDS["generate"])
    assert (done.code, done.out[:4]) == (0, "KING")


def test_standard_input_that_is_closed_is_empty() -> None:
    assert shell('"$@" <&-', ["score", "-", "--device", "cpu"]).error
    done = shell('"$@" <&-', ["generate", "--device", "cpu", "--max-new-tokens", "3"])
    assert (done.code, done.out[:7]) == (0, "JULIET:")


def test_standard_input_that_only_writes(tmp_path: Path) -> None:
    done = shell(f'"$@" 0> {tmp_path}/file', ["generate", "-"])
    assert done.error.startswith("stdin: cannot be read: ")


def test_a_file_is_never_opened_as_standard_output(tmp_path: Path) -> None:
    """The system assigns the descriptor of a closed stream to the next opened file."""
    text = tmp_path / "text"
    text.write_text("To be, or not to be")
    shell('"$@" >&- <&-', ["score", str(text), "--device", "cpu"])
    assert text.read_text() == "To be, or not to be"


def test_a_deleted_working_directory(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    for name in ("generate", "check"):
        gone.mkdir()
        done = shell(f'cd {gone}; rmdir {gone}; "$@"', COMMANDS[name])
        assert "Traceback" not in done.err
        assert done.code == CODES.get(name, 0)


@pytest.mark.parametrize(
    "arguments",
    [["score", "text"], ["info", "./model"], ["block", "--weights", "model.safetensors"],
     ["generate", "x", "--tokenizer", "tokenizer.json"], ["info", "."]],
)  # fmt: skip
def test_a_relative_path_in_a_deleted_working_directory(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert gpt2block(*arguments).error


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "x", "--model", "~nosuchuser/model"],
        ["generate", "x", "--tokenizer", "~nosuchuser/tokenizer.json"],
        ["score", "~nosuchuser/text"],
        ["score", "~nosuchuser/tokens.npy"],
        ["score", "~nosuchuser/tokens", "--tokens"],
        ["info", "~nosuchuser/model.safetensors"],
        ["block", "--weights", "~nosuchuser/model"],
        ["kernels", "softmax", "--plot", "~nosuchuser/chart.png"],
    ],
)
def test_an_unknown_user_is_one_line(arguments: list[str]) -> None:
    assert "~nosuchuser" in gpt2block(*arguments).error


@pytest.mark.parametrize("arguments", [["score"], ["score", "--tokens"], ["score", "--text"]])
@pytest.mark.parametrize("kind", ["fifo", "zero", "folder"])
def test_what_is_no_regular_file_is_refused(
    kind: str, arguments: list[str], tmp_path: Path
) -> None:
    path = {"fifo": tmp_path / "fifo", "zero": Path("/dev/zero"), "folder": tmp_path}[kind]
    if kind == "fifo":
        os.mkfifo(path)
    assert gpt2block(*arguments, path).error.startswith(f"{path}: expected a regular file")


def test_a_text_without_end_is_refused() -> None:
    said = gpt2block("generate", "-", stdin=bytes(2**24 + 1)).error
    assert said == "stdin: expected at most 16 MiB of text, got more"


# Ctrl-C

LAUNCHERS = {
    "module": "import runpy; runpy.run_module('gpt2block', run_name='__main__', alter_sys=True)",
    "console script": "import re, sys; from gpt2block.cli import main; sys.exit(main())",
}
# Prints to stderr when `main` has begun, after Python's own start.
BEGUN = """
import os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "gpt2block.cli.app":
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
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("launcher", "after"), [("module", 0), ("module", 0.1), ("console script", 0.05)]
)
def test_ctrl_c_during_the_imports_is_quiet(launcher: str, after: float) -> None:
    code, out, err = interrupted(launcher, COMMANDS["endless"], after)
    assert (code, out, err) == (130, "", "")


@pytest.mark.parametrize(
    ("name", "after"),
    [("score", 0.2), ("score", 0.5), ("score", 0.8), ("score", 1.0), ("block", 0.3),
     ("block", 0.6), ("check", 0.4), ("check", 0.7)],
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
from gpt2block import doctor
doctor.PROGRAM += "".join(f"__device__ int f{i}(int x) {{ return x + {i}; }}" for i in range(8000))
compile_log = doctor.compile_log
def announced(*arguments):
    os.write(2, b"compiling\\n")
    return compile_log(*arguments)
doctor.compile_log = announced
"""


@pytest.mark.parametrize("after", [0.05, 0.2])
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
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.endswith("ended: interrupted\n")
    assert err.count("\n") == 1


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    """SIGINT is ignored under nohup, or in the background of a script."""
    process = start("module", ["--version"], signal.SIG_IGN)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, f"gpt2block {doctor.version()}\n", "")


def test_what_comes_before_main_is_little() -> None:
    """Python itself reports Ctrl-C before `main` runs, so nothing slow may be imported before."""
    code = (
        "import sys; before = {*sys.modules}\n"
        "import gpt2block, gpt2block.cli; print(*sorted({*sys.modules} - before))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True, text=True, check=True, env=ENVIRONMENT,
    )  # fmt: skip
    loaded = done.stdout.split()
    assert [name for name in loaded if name.startswith("gpt2block")] == [
        "gpt2block",
        "gpt2block.cli",
        "gpt2block.cli.codes",
        "gpt2block.cli.interrupts",
    ]
    assert not {*loaded} & {"numpy", "typer", "rich", "click", "json", "typing"}
