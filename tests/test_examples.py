"""The examples run, and say what they are meant to show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpt2block.emulator import missing

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


def test_real_gpt2_with_the_bundled_model() -> None:
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


def printed(cells: list[dict[str, Any]]) -> list[str]:
    """What each cell of a notebook prints."""
    return ["".join("".join(o.get("text", "")) for o in cell.get("outputs", [])) for cell in cells]


@pytest.mark.parametrize("name", ["from_text_to_logits", "write_your_own_layernorm"])
def test_a_notebook_runs_and_prints_what_it_shows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient = pytest.importorskip("nbclient", reason="running a notebook needs nbclient")
    pytest.importorskip("ipykernel", reason="running a notebook needs ipykernel")
    nbformat = pytest.importorskip("nbformat", reason="nbclient brings nbformat")
    if name == "write_your_own_layernorm" and (why := missing()):
        pytest.skip(why)
    file = ROOT / "examples" / f"{name}.ipynb"
    shown = printed(json.loads(file.read_text(encoding="utf-8"))["cells"])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    notebook = nbformat.read(file, as_version=4)
    options = {"timeout": 120, "resources": {"metadata": {"path": str(file.parent)}}}
    nbclient.NotebookClient(notebook, **options).execute()
    assert printed(notebook.cells) == shown
