"""The README is true: its commands, and the shape of the output it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpt2block.cuda import kernels

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
STEPS = ("ln1", "qkv", "attn", "proj", "x1", "ln2", "ff1", "gelu", "ff2", "output")
SET_UP = "python3 -m venv .venv && .venv/bin/pip install -q -e "


def commands() -> list[str]:
    return [line for line in README.splitlines() if line.startswith(SET_UP)]


def shown(name: str) -> list[str]:
    """The lines of the block of output after the comment of this name."""
    found = re.search(rf"<!-- output: {name} -->\n```\n(.*?)\n```", README, re.DOTALL)
    assert found, name
    return found[1].splitlines()


def test_two_commands_of_one_line_that_set_themselves_up() -> None:
    run, test = commands()
    assert run == f"{SET_UP}'.[cuda12]' && .venv/bin/gpt2block generate --seed 7"
    assert test == f"{SET_UP}'.[cuda12,plot,test]' && .venv/bin/pytest -q -n auto --dist loadfile"


def test_ci_takes_both_commands_from_the_readme() -> None:
    """The very `sed` lines of .ci/run, on the README as it stands."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    found = re.findall(r"^(?:run|test)=\$\((sed .*)\)$", script, re.MULTILINE)
    printed = [
        subprocess.run(["bash", "-c", sed], cwd=ROOT, capture_output=True, text=True, check=True)
        for sed in found
    ]
    assert [done.stdout.strip() for done in printed] == commands()


def test_the_output_of_the_tests_is_a_closing_line() -> None:
    assert re.fullmatch(r"\d+ passed, \d+ skipped in .*", shown("tests")[-1])


def columns(lines: list[str]) -> list[list[str]]:
    """Step, kernel and shape of every row of the table of steps."""
    rows = [line.split() for line in lines]
    return [row[:3] for row in rows if len(row) == 8 and row[0] in STEPS]


def test_the_output_without_a_gpu_is_what_the_command_prints() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpt2block", "block", "--device", "cpu"],
        capture_output=True,
        text=True,
        check=True,
        encoding="utf-8",
    )
    printed = done.stdout.splitlines()
    assert columns(printed) == columns(shown("cpu"))
    assert len(columns(printed)) == 10
    without_figures = [re.sub(r"[\d.]+(e-\d+)?", "#", line) for line in printed]
    expected = [re.sub(r"[\d.]+(e-\d+)?", "#", line) for line in shown("cpu")]
    assert [line.split() for line in without_figures[1:]] == [line.split() for line in expected[1:]]


def test_the_output_on_a_gpu_shows_real_kernels() -> None:
    names = {name for file in kernels.sources() for name in kernels.signatures(file)}
    rows = columns(shown("gpu"))
    assert [row[0] for row in rows] == [row[0] for row in columns(shown("cpu"))]
    assert {row[1] for row in rows} <= names
    assert "NVIDIA" in shown("gpu")[0]


@pytest.mark.gpu
def test_the_output_on_a_gpu_is_what_the_command_prints() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpt2block", "block", "--kernels", "skeleton"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert columns(done.stdout.splitlines()) == columns(shown("gpu"))


def test_the_model_on_board_writes_what_is_shown() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpt2block", "generate", "--seed", "7", "--device", "cpu"],
        capture_output=True,
        text=True,
        check=True,
        encoding="utf-8",
    )
    assert done.stdout.splitlines() == shown("generate")


@pytest.mark.gpu
def test_it_writes_the_same_on_a_gpu() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpt2block", "generate", "--seed", "7"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == shown("generate")


def test_the_score_shown(data: Path, tmp_path: Path) -> None:
    text = (data / "tinyshakespeare" / "input.txt").read_bytes()[-4096:]
    (tmp_path / "end.txt").write_bytes(text)
    done = subprocess.run(
        [sys.executable, "-m", "gpt2block", "score", "end.txt", "--stride=64", "--device=cpu"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        encoding="utf-8",
    )
    printed = {line.split("  ")[0].strip(): line for line in done.stdout.splitlines()}
    for line in shown("score"):
        name = line.split("  ")[0]
        if name not in ("model", "time"):
            assert printed[name].split() == line.split()


def test_every_environment_variable_that_is_read_is_documented() -> None:
    files = [*(ROOT / "gpt2block").rglob("*.py"), ROOT / "tests" / "conftest.py"]
    read = {
        name
        for file in files
        for name in re.findall(r"environ(?:\.get\(|\[)\s*\"(\w+)\"", file.read_text("utf-8"))
    }
    documented = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    assert {"CUDA_VISIBLE_DEVICES", "CUPY_CACHE_DIR", "GPT2BLOCK_DATA"} <= read
    assert [name for name in sorted(read) if f"`{name}`" not in documented] == []


def test_links_and_named_files_are_there() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
    for name in re.findall(r"`((?:tests|tools|examples|gpt2block)/[\w./]+)`", README):
        assert (ROOT / name).exists(), name


def test_the_python_snippets_run() -> None:
    model, block = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    model = model.replace("from_pretrained()", "from_pretrained(device='cpu')")
    block = block.replace("(weights, causal=True)", "(weights, causal=True, device='cpu')", 1)
    printed = []
    for code in (model, block):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.splitlines())
    assert printed[0] == shown("python")
    assert printed[1][2].startswith("attn reference.attention")
