"""The command line: what is printed, the exit codes, one line for every error."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import gpt2block as gpt2block_package
from gpt2block import Block, Comparison, cli, doctor, walkthrough
from gpt2block.cli import app as cli_app
from gpt2block.cli import display
from gpt2block.emulator import loader
from gpt2block.walkthrough import Walkthrough, with_trained_weights

TEN = ["ln1", "qkv", "attn", "proj", "x1", "ln2", "ff1", "gelu", "ff2", "output"]


def gpt2block(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpt2block", *arguments],
        capture_output=True,
        text=True,
        check=False,
        encoding="utf-8",
    )


def printed(*arguments: str) -> str:
    done = gpt2block(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_block_without_arguments_takes_a_passage_through_the_trained_model() -> None:
    before = os.times()
    out = printed("block", "--device", "cpu")
    used = os.times().children_user - before.children_user  # whatever else the machine does
    assert used < 10
    rows = [line.split() for line in out.splitlines()]
    steps = [row for row in rows if row and row[0] in TEN]
    assert [row[0] for row in steps] == TEN
    assert steps[1][1:3] == ["reference.matmul_bias", "256x768"]
    assert all(0 < float(value) < 1e-4 for row in steps for value in row[4:])
    assert "weights  shakespeare, block 0 of 6, mask: causal" in out
    assert "kernels  none run: float32 NumPy compared with float64" in out
    assert "Most likely next tokens: 'a' 99" in out  # "… a daughter, sir, called Katharin"


@pytest.mark.skipif(os.name == "nt", reason="pseudo-terminals of POSIX")
@pytest.mark.parametrize("kernels", ["auto", "skeleton"])
def test_a_terminal_of_80_columns_shows_every_number(kernels: str) -> None:
    main, terminal = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "gpt2block", "block", "--device", "cpu", "--kernels", kernels],
        stdout=terminal,
        env={**os.environ, "COLUMNS": "80", "TERM": "xterm", "NO_COLOR": "1"},
    )
    os.close(terminal)
    out = b""
    with contextlib.suppress(OSError):  # at the end, on Linux
        while piece := os.read(main, 4096):
            out += piece
    os.close(main)
    assert process.wait() == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", out.decode()).splitlines()
    rows = [line.split() for line in lines]
    steps = [row for row in rows if row and row[0] in TEN]
    assert [row[0] for row in steps] == TEN
    assert steps[1][1:3] == ["reference.matmul_bias", "256x768"]
    assert all(0 < float(value) < 1e-4 for row in steps for value in row[4:])
    assert [len(row) for row in steps] == [8] * 10
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "…" in line and not line.startswith("input")]


def comparison(step: str, kernel: str, shape: tuple[int, ...], ms: float) -> Comparison:
    return Comparison(step, kernel, shape, ms, 4.1e-07, 1.4e-07, 4.3e-06, 5.1e-07)


@pytest.mark.parametrize("width", [80, 120])
def test_long_names_are_folded_and_numbers_are_whole(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(display, "WIDTH_WHEN_PIPED", width)
    steps = [
        comparison("ln1", "layernorm768_kernel", (64, 128, 768), 0.0023),
        comparison("qkv", "reference.matmul_bias", (64, 128, 2304), 1458.6942),
    ]
    cli_app._print_walkthrough(
        Walkthrough("a GPU", "float32", "fused", "random", "none", "x", steps, [], [])
    )
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if "…" in line]
    rows = {line.split()[0]: line.split() for line in lines}
    errors = ["4.1e-07", "1.4e-07", "4.3e-06", "5.1e-07"]
    assert rows["ln1"] == ["ln1", "layernorm768_kernel", "64x128x768", "0.0023", *errors]
    assert rows["qkv"][2:] == ["64x128x2304", "1458.6942", *errors]
    if width == 120:
        heading = ["step", "kernel", "shape", "ms", "max", "abs", "max", "rel", "total", "abs"]
        assert rows["step"] == [*heading, "total", "rel"]
        assert rows["qkv"][1] == "reference.matmul_bias"


def test_json_has_exactly_the_documented_keys() -> None:
    out = json.loads(printed("block", "--json", "--device", "cpu", "--layer", "3"))
    assert list(out) == [
        "device", "dtype", "kernels", "weights", "mask", "input", "steps", "stream", "next_tokens",
    ]  # fmt: skip
    assert out["weights"] == "shakespeare, block 3 of 6"
    assert (out["dtype"], out["kernels"], out["mask"]) == ("float32", "skeleton", "causal")
    assert out["input"].startswith("256 tokens of 'GREMIO:")
    assert len(out["stream"]) == 6
    assert all(0 < error < 1e-5 for error in out["stream"])
    assert out["next_tokens"][0] == ["a", pytest.approx(0.995, abs=1e-3)]
    assert [step["name"] for step in out["steps"]] == TEN
    for step in out["steps"]:
        assert list(step) == [
            "name", "kernel", "shape", "ms", "max_abs", "max_rel", "total_abs", "total_rel",
        ]  # fmt: skip
        assert step["shape"][0] == 256
        assert 0 < step["max_rel"] < 1e-5


@pytest.mark.parametrize(("size", "width"), [("gpt2", 768), ("gpt2-xl", 1600)])
def test_random_weights_of_a_size(size: str, width: int) -> None:
    out = json.loads(
        printed("block", "--size", size, "--seq-len", "5", "--batch", "2", "--device", "cpu",
                "--no-causal", "--json")
    )  # fmt: skip
    assert out["steps"][0]["shape"] == [2, 5, width]
    assert out["weights"] == f"random, the shape of {size}"


def test_text_batch_and_length() -> None:
    out = json.loads(
        printed("block", "--text", "To be, or not to be", "--seq-len", "7", "--batch", "3",
                "--device", "cpu", "--json")
    )  # fmt: skip
    assert out["steps"][9]["shape"] == [3, 7, 256]


def test_rows_of_a_batch_are_rotations_of_the_text() -> None:
    rows = walkthrough._rows([1, 2, 3, 4], 3, 2)
    assert rows.tolist() == [[1, 2, 3], [2, 3, 4]]
    assert walkthrough._rows([1, 2], None, 1).tolist() == [1, 2]


def test_a_trained_directory(data: Path) -> None:
    done = gpt2block("block", "--weights", str(data / "gpt-nano-sort"))
    assert done.returncode == 2
    assert "expected tokenizer.json for a vocabulary of 3 tokens" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layer", "6"], "--layer 6 is out of range: it has 6 layers, 0…5"),
        (["--size", "gpt3"], "unknown --size 'gpt3': expected one of gpt2, gpt2-medium"),
        (["--size", "gpt2", "--text", "x"], "--size uses random weights: leave out --weights"),
        (["--text", ""], "expected at least one character, got none"),
        (["--text", "abc", "--seq-len", "4"], "--seq-len 4: the text has 3 tokens"),
        (["--text", "x" * 257], "257 tokens: shakespeare has positions for n_ctx = 256"),
        (["--seq-len", "0"], "expected --batch and --seq-len of at least 1, got 1, 0"),
        (["--batch", "0"], "expected --batch and --seq-len of at least 1"),
        (["--weights", "no/such/dir"], "no such file or directory"),
        (["--weights", "model.bin"], "model.bin: no such file or directory"),
        (["--device", "gpu"], "--device: expected 'cuda', 'cuda:N', 'cpu', got 'gpu'"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = gpt2block("block", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_check_prints_every_finding_and_its_mend() -> None:
    done = gpt2block("check", "--json")
    found = json.loads(done.stdout)
    assert found["ok"] == all(check["ok"] for check in found["checks"] if check["name"] != "g++")
    assert done.returncode == (0 if found["ok"] else 1)
    assert found["runs"]["GPU"] == found["ok"]
    names = [check["name"] for check in found["checks"]]
    assert [*names[1:4], names[-1]] == ["Python", "NumPy", "CuPy", "g++"]
    assert all(check["ok"] or check["fix"] for check in found["checks"])
    table = gpt2block("check")
    assert table.returncode == done.returncode
    for check in found["checks"]:
        assert check["name"] in table.stdout


def test_without_a_gpu_block_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cuda_problem", lambda: "no driver today")
    result = with_trained_weights("shakespeare", 0, None, 5, 1, True, None)
    assert result.device.startswith("CPU")
    assert result.device.endswith(", because no driver today: `gpt2block check` says what to do")
    asked = with_trained_weights("shakespeare", 0, None, 5, 1, True, "cpu")
    assert "because" not in asked.device


def test_the_stream_goes_through_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    result = with_trained_weights("shakespeare", 2, "KING", None, 1, True, "cpu")
    assert len(result.stream) == 6
    assert all(0 < error < 1e-5 for error in result.stream)
    honest = Block.__call__
    monkeypatch.setattr(Block, "__call__", lambda self, x: honest(self, x) * 1.01)
    wrong = with_trained_weights("shakespeare", 2, "KING", None, 1, True, "cpu")
    assert min(wrong.stream) > 5e-3


def test_nan_is_null_in_json() -> None:
    assert display.for_json(float("nan")) is None
    assert display.for_json(float("inf")) is None
    assert display.for_json(0.5) == 0.5
    assert display.for_json((1, 2)) == (1, 2)


def test_a_terminal_without_unicode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    assert "most likely next tokens" in printed("block", "--device", "cpu").lower()
    assert "Traceback" not in gpt2block("check").stderr


@pytest.mark.parametrize("option", ["--batch", "--seq-len"])
def test_more_tokens_than_can_be_compared(option: str) -> None:
    for source in (["--size", "gpt2"], ["--text", "KING"]):
        done = gpt2block("block", *source, option, "1000000000000", "--device", "cpu")
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert "tokens: at most 131,072 are compared" in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["block", "check", "bench"])
def test_help_shows_an_example(command: str) -> None:
    assert f"Example: gpt2block {command}" in printed(command, "--help")


def test_the_version() -> None:
    assert printed("--version") == f"gpt2block {gpt2block_package.__version__}\n"
    assert gpt2block_package.__version__ == doctor.version()


@pytest.mark.parametrize("command", ["bench", "check", "compare"])
def test_paragraphs_of_the_help_fill_its_lines(command: str) -> None:
    text = printed(command, "--help")
    lines = [line.rstrip() for line in text.split("Options ─")[0].splitlines()[2:-1]]
    width = max(map(len, text.splitlines()))
    for line, following in pairwise(lines):
        if line and following[:1] == " ":
            assert len(line) + len(following.split()[0]) + 2 > width, (line, following)


def test_no_command_shows_the_help() -> None:
    for arguments in ([], ["map"]):
        done = gpt2block(*arguments)
        assert done.returncode in (0, 2)  # by the version of Click
        assert done.stderr == ""
        assert "Commands" in done.stdout


def test_completion_can_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_GPT2BLOCK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "gpt2block gen")
    monkeypatch.setenv("COMP_CWORD", "1")
    code = "import sys; sys.argv = ['gpt2block']; from gpt2block.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["generate"], "")


def test_kernels_without_a_gpu_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "cuda_problem", lambda: "no driver today")
    with pytest.raises(SystemExit) as end:
        cli.main(["kernels", "softmax", "--json", "--device", "cuda"])
    out, err = capsys.readouterr()
    assert end.value.code == 1
    assert json.loads(out) == {
        "run": False,
        "why": "softmax: no kernel was run: no driver today: this needs a GPU, and "
        f"{doctor.ADVICE}",
    }
    assert err == ""


def test_a_note_of_the_check_has_a_mark_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = [doctor.Check("A", True, "fine"), doctor.Check("B", True, "works", "change it")]
    monkeypatch.setattr(doctor, "examine", lambda: notes)
    with pytest.raises(SystemExit) as end:
        cli.main(["check"])
    assert end.value.code == 0
    marks = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert marks[:3] == [["ok", "A", "fine"], ["note", "B", "works"], ["→", "change", "it"]]


@pytest.mark.parametrize(
    ("numpy", "gpu", "compiler", "line"),
    [
        (True, True, True, "runs here: NumPy, emulator, GPU"),
        (True, True, False, "runs here: NumPy, GPU; not here: emulator"),
        (True, False, True, "runs here: NumPy, emulator; not here: GPU"),
        (True, False, False, "runs here: NumPy; not here: emulator, GPU"),
        (False, False, True, "runs here: nothing; not here: NumPy, emulator, GPU"),
    ],
)
def test_the_check_ends_with_what_runs_here(
    numpy: bool,
    gpu: bool,
    compiler: bool,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts = [doctor.Check("NumPy", numpy, "2"), doctor.Check("driver", gpu, "CUDA", "install it")]
    monkeypatch.setattr(doctor, "examine", lambda: parts)
    monkeypatch.setattr(loader, "missing", lambda: None if compiler else "g++ is not installed")
    monkeypatch.setattr(loader, "_output", lambda *command: "12.3.0")
    for options in ([], ["--json"]):
        with pytest.raises(SystemExit) as end:
            cli.main(["check", *options])
        assert end.value.code == (0 if gpu else 1)
    *table, last, as_json = capsys.readouterr().out.splitlines()
    assert last == line
    assert any("g++" in row and ("12.3.0" in row) == compiler for row in table)
    assert any("apt install g++" in row for row in table) != compiler
    found = json.loads(as_json)
    assert found["runs"] == {"NumPy": numpy, "emulator": numpy and compiler, "GPU": gpu}


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("generate --model sha", ["shakespeare", "shakespeare-llama"]),
        ("score --model gpt2-", ["gpt2-medium", "gpt2-large", "gpt2-xl"]),
        ("generate --dtype bf", ["bfloat16"]),
        ("convert a b --dtype f", ["float32", "float16"]),
        ("kernels --dtype float8_e5", ["float8_e5m2"]),
        ("generate --device ", ["cpu", "cuda"]),
        ("kernels lay", ["layernorm", "layernorm_gelu"]),
        ("kernels trimat --variant tri", ["tri3", "tri4", "tri5", "tri6"]),
        ("kernels trimat --source n", ["naive"]),
        ("kernels --variant n", []),
    ],
)
def test_the_shell_completes_values(
    words: str,
    values: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["gpt2block"])
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)  # a script, not pytest
    monkeypatch.setenv("_GPT2BLOCK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"gpt2block {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" "))))
    with pytest.raises(SystemExit) as end:
        cli.main([])
    assert end.value.code == 0
    assert capsys.readouterr().out.split() == values


@pytest.mark.parametrize(("columns", "width"), [("70", 70), ("200", 200), ("0", 120), ("x", 120)])
def test_piped_tables_have_the_width_that_columns_states(
    columns: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    assert display.console().width == width
    monkeypatch.delenv("COLUMNS")
    assert display.console().width == 120


def test_bench_without_a_gpu_runs_nothing() -> None:
    if doctor.cuda_problem() is None:
        assert "times faster" in printed("bench")
    else:
        done = gpt2block("bench")
        assert done.returncode == 2
        assert done.stderr.startswith("error: the bench cannot be used: ")


@pytest.mark.gpu
def test_block_on_the_gpu_names_its_kernels() -> None:
    out = json.loads(printed("block", "--json", "--kernels", "skeleton"))
    assert "compute capability" in out["device"]
    assert [step["kernel"] for step in out["steps"]][:3] == [
        "layernorm_kernel",
        "matmul_bias_tiled",
        "mha_causal_kernel",
    ]
    assert all(0 < step["max_rel"] < 1e-5 for step in out["steps"])


@pytest.mark.gpu
def test_check_is_content_with_this_machine() -> None:
    assert gpt2block("check").returncode == 0
