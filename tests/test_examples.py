"""The examples run, and real weights do what they were trained for."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.real_gpt2 import Model
from gpt2block import GPT2Weights

ROOT = Path(__file__).parent.parent


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{name}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_block_forward() -> None:
    lines = run("block_forward").splitlines()
    assert 0 < float(lines[-1].split(":")[1]) < 1e-5


def test_real_gpt2_with_the_model_on_board() -> None:
    text = "GREMIO:\nGood morrow, neighbour Baptist"
    lines = run("real_gpt2", text, "--weights", "shakespeare").splitlines()
    checks = [line for line in lines if "residual stream" in line]
    assert len(checks) == 6
    assert all(float(line.split()[5]) < 1e-5 for line in checks)
    assert len(lines) == 1 + 6 + 2 * 5  # the text has a line break
    assert lines[8].endswith("'a'")


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_the_sorting_model_sorts_all_729_inputs(data: Path, device: str) -> None:
    model = Model(GPT2Weights.from_pretrained(str(data / "gpt-nano-sort")), device)
    inputs = np.array(list(itertools.product(range(3), repeat=6)))
    ids = inputs
    for _ in range(6):
        ids = np.concatenate([ids, model.logits(ids).argmax(axis=-1)[:, None]], axis=1)
    np.testing.assert_array_equal(ids[:, 6:], np.sort(inputs, axis=1))
