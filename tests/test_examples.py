"""The examples run, and say what they are meant to show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(name: str, *arguments: str) -> str:
    done = ran(name, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ran(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"examples.{name}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        encoding="utf-8",
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent"},
    )


def test_real_gpt2_that_cannot_be_had_is_one_line() -> None:
    done = ran("real_gpt2", "The capital of France is", "--model", "gpt2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_block_forward() -> None:
    lines = run("block_forward").splitlines()
    assert 0 < float(lines[-1].split(":")[1]) < 1e-5


def test_real_gpt2_with_the_model_on_board() -> None:
    text = "GREMIO:\nGood morrow, neighbour Baptist"
    lines = run("real_gpt2", text, "--model", "shakespeare", "--device", "cpu").splitlines()
    assert lines[0].startswith("38 tokens on CPU")
    checks = [line for line in lines if "residual stream" in line]
    assert len(checks) == 1 + 6
    assert [line.split("residual")[0].strip() for line in checks[:2]] == [
        "embedding", "after block 0",
    ]  # fmt: skip
    assert all(float(line.split("within")[1].split()[0]) < 1e-5 for line in checks)
    assert lines[8].endswith("%  'a'")
    assert "\n".join(lines[13:]).startswith(text + "a")
