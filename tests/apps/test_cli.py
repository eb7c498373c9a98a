"""Terminals, threads, the report of `block`, and the help; outputs are in tests/golden/commands."""

from __future__ import annotations

import contextlib
import io
import os
import platform
import re
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpt2block import Block, Comparison
from gpt2block.apps.cli import display, kernels_run
from gpt2block.apps.cli.block import BlockReport, _print_report, _sequences
from gpt2block.cuda import requests
from gpt2block.emulator.ptx import cache
from gpt2block.engine import threads
from tests.command_line import gpt2block, printed, python


def test_threads_are_set_before_numpy_is_imported() -> None:
    code = (
        "import atexit, os, sys; from gpt2block.apps.cli import main; "
        "name = 'OPENBLAS_NUM_THREADS'; "
        "atexit.register(lambda: print(os.environ[name], 'numpy' in sys.modules)); main()"
    )
    words = ["generate", "KING", "--model", "./missing", "--threads=3"]
    done = python(code, *words)
    assert (done.stdout, done.returncode) == ("3 True\n", 2)


def test_a_command_imports_what_it_needs() -> None:
    code = """
import sys
from gpt2block.apps.cli import main
for words in (["--version"], ["kernels", "add", "--mine", "x.cu"], ["generate", "--help"]):
    try: main(words)
    except SystemExit: print("MODULES", *sys.modules)
import gpt2block.cuda.doctor, gpt2block.cuda.kernels
print("cupy" in sys.modules)
"""
    done = python(code, check=True)
    version, kernels, generate = (
        {*each.split()} for each in re.findall("(?m)^MODULES (.*)", done.stdout)
    )
    assert "gpt2block.apps.cli.app" in version
    assert not {"gpt2block.files.checkpoints", "gpt2block.engine.model"} & version
    assert not {"gpt2block.engine.generation", "gpt2block.apps.cli.generate"} & kernels
    assert done.stdout.endswith("\nFalse\n")
    slow = "engine.numpy.model", "engine.generation.generate", "engine.generation.scoring"
    assert "gpt2block.apps.cli.generate" in generate
    assert not {"cupy", "huggingface_hub", *(f"gpt2block.{name}" for name in slow)} & generate


def test_one_thread_is_advised_once_before_the_text_if_products_are_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time with one thread is measured if this machine has no time of the last hour."""
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)
    assert 0 < threads.seconds_with_one_thread() == threads.seconds_with_one_thread() < 1
    note = r"note: while other programs use the cores, a matrix product is {} times as fast .*\n\w"
    for seconds, kept, ratio in (
        (5.0, f"{time.time() - 3500} 2.0", "2.5"), (2.9, f"{time.time()} 2.0", None),
        (5.0, f"{time.time() - 3700} 2.0", r"\d\d+\.\d"), (5.0, "2.0", r"\d\d+\.\d"),
        (4e-3, f"{time.time()} 1e-3", None),
    ):  # fmt: skip
        cache.write(f"product-{platform.node()}", kept)
        monkeypatch.setattr(threads, "seconds_of_product", lambda each=seconds: each)
        threads.advise_one_thread.cache_clear()
        words = ("generate", "KING", "--max-new-tokens", "1", "--device", "cpu")
        first, second = (gpt2block(*words).err for _ in range(2))
        assert len(re.findall(note.format(ratio), first)) == first.count("note: ") == bool(ratio)
        assert "note: " not in second


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_step_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"COLUMNS": "80", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    given: Any = [SimpleNamespace(label=label) for label in ("N=1", "N=2")]
    with contextlib.redirect_stderr(Terminal()) as err:
        with display.working(lambda: "reading 120 tokens"):
            time.sleep(1)
            requests._watchers[-1](2, 3)
            time.sleep(0.5)
        for _ in kernels_run._with_progress(iter("abc"), given, False):
            time.sleep(0.3)
    said = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", err.getvalue())
    assert "reading 120 tokens, 1 s" in said
    assert "compiling kernels, at the first start only: 2 of 3, 1 s" in said
    assert re.search(r"compiling, then at N=1 .*at N=2 .*at sizes that a GPU", said, re.DOTALL)
    with contextlib.redirect_stderr(io.StringIO()) as file, display.working(lambda: "x"):
        time.sleep(0.5)
    assert file.getvalue() == ""


@pytest.mark.parametrize("width", [80, 120])
def test_long_names_are_folded_and_numbers_are_whole(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(display, "WIDTH_WHEN_PIPED", width)
    errors = 4.1e-07, 1.4e-07, 4.3e-06, 5.1e-07
    steps = [
        Comparison("ln1", "layernorm768_kernel", (64, 128, 768), 0.0023, *errors),
        Comparison("qkv", "reference.matmul_bias", (64, 128, 2304), 1458.6942, *errors),
    ]
    _print_report(BlockReport("a GPU", "float32", "fused", "random", "none", "x", steps))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if "…" in line]
    rows = {line.split()[0]: line.split() for line in lines}
    texts = [f"{error:.1e}" for error in errors]
    assert rows["ln1"] == ["ln1", "layernorm768_kernel", "64x128x768", "0.0023", *texts]
    assert rows["qkv"][2:] == ["64x128x2304", "1458.6942", *texts]
    if width == 120:
        heading = "step kernel shape ms max abs max rel total abs total rel"
        assert rows["step"] == heading.split()
        assert rows["qkv"][1] == "reference.matmul_bias"


def test_rows_of_a_batch_are_rotations_of_the_text() -> None:
    rows = _sequences([1, 2, 3, 4], 3, 2)
    assert rows.tolist() == [[1, 2, 3], [2, 3, 4]]
    assert _sequences([1, 2], None, 1).tolist() == [1, 2]


def test_a_trained_directory_without_a_tokenizer(data: Path) -> None:
    said = gpt2block("block", "--weights", data / "gpt-nano-sort").error
    assert "expected tokenizer.json for a vocabulary of 3 tokens" in said


def test_the_stream_goes_through_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Block.__call__
    monkeypatch.setattr(Block, "__call__", lambda self, x: honest(self, x) * 1.01)
    wrong = gpt2block("block", "--text", "KING", "--device", "cpu", "--json").json
    assert len(wrong["stream"]) == 6
    assert min(wrong["stream"]) > 5e-3


def test_nan_is_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    values = {"a": float("nan"), "b": [float("-inf"), 0.5, "x"], "c": (1, {"d": float("inf")})}
    display.print_json(values)
    assert capsys.readouterr().out == (
        '{"a": null, "b": [null, 0.5, "x"], "c": [1, {"d": null}]}\n'
    )


# The help

COMMANDS = [
    "convert", "compare", "explain", "generate", "score", "info", "block", "check", "profile",
    "kernels", "judge", "map", "map score", "map generate", "map embed",
]  # fmt: skip


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_the_help_of_a_command(command: str) -> None:
    text = printed(*command.split(), "--help")
    assert text == printed(*command.split(), "-h")
    assert "Usage:" in text
    assert command in ("", "map") or f"Example: gpt2block {command}" in text
    lines = [line.rstrip() for line in text.split("Options ─")[0].splitlines()[2:-1]]
    width = max(map(len, text.splitlines()))
    for line, following in pairwise(lines):  # lines of a paragraph are filled
        if line and following[:1] == " ":
            assert len(line) + len(following.split()[0]) + 2 > width, (line, following)


def test_no_command_shows_the_help() -> None:
    for arguments in ([], ["map"]):
        ended = gpt2block(*arguments)
        assert ended.code in (0, 2)  # depends on the version of Click
        assert ended.err == ""
        assert "Commands" in ended.out


@pytest.mark.parametrize(
    ("columns", "terminal", "width"),
    [("70", False, 70), ("200", False, 200), ("0", False, 120), ("x", False, 120),
     ("", False, 120), ("", True, 63), ("80", True, 80)],
)  # fmt: skip
def test_tables_have_the_width_of_columns_or_of_the_terminal(
    columns: str, terminal: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("os.get_terminal_size", lambda *_: os.terminal_size((63, 20)))
    monkeypatch.setattr("sys.stdout", Terminal() if terminal else io.StringIO())
    assert display.console().width == width


@pytest.mark.gpu
def test_block_on_the_gpu_names_its_kernels() -> None:
    out: Any = gpt2block("block", "--json", "--kernels", "skeleton").json
    assert "compute capability" in out["device"]
    assert [step["kernel"] for step in out["steps"]][:3] == [
        "layernorm_kernel",
        "matmul_bias_tiled",
        "mha_causal_kernel",
    ]
    assert all(0 < step["max_rel"] < 1e-5 for step in out["steps"])


@pytest.mark.gpu
def test_check_is_content_with_this_machine() -> None:
    assert gpt2block("check").code == 0
