"""What chapters 9 to 11 of docs/learn state: figures, a snippet, and what exercises show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import charts
import numpy as np
import pytest

from gpt2block import GPT2Config, emulator
from gpt2block.config import model_shapes
from gpt2block.mine.solutions import solution
from gpt2block.ops.registry import find
from tests.command_line import gpt2block

DOCS = Path(__file__).parent.parent / "docs"
TOKEN, FUSION, BITS = (
    (DOCS / "learn" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("9-one-token", "10-fusion", "11-eight-bits")
)
on_emulator = pytest.mark.skipif(
    emulator.missing() is not None, reason=f"no CUDA on the CPU: {emulator.missing()}"
)


def figures(page: str) -> dict[str, list[str]]:
    """The cells of the rows of a page's tables, by the first one."""
    rows = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("|")
    )
    return {name: cells for name, *cells in rows}


def test_the_bytes_of_a_step() -> None:
    c = GPT2Config(12, 12, 768, 1024, 50257)
    weights = 2 * sum(int(np.prod(shape)) for shape in model_shapes(c).values())
    token = c.n_layer * 2 * c.n_embd * 2
    row = 512 * token
    assert f"{weights / 1e6:.0f} MB in 16 bits" in TOKEN
    assert f"{token:,} bytes in 16 bits" in TOKEN
    assert f"= {row / 1e6:.1f} MB. 8 rows" in TOKEN
    assert (
        f"{(weights + 8 * row) / 1e6:.0f} MB, which take {(weights + 8 * row) / 4.23e6:.0f} µs"
        in (re.sub(r"\s+", " ", TOKEN))
    )
    for rows in (1, 64, 256):
        floor = float(figures(TOKEN)[str(rows)][2].replace(",", ""))
        assert (weights + rows * row) / 4.23e6 == pytest.approx(floor, rel=0.005)
    assert weights / row == pytest.approx(13.2, abs=0.05)
    assert weights / (2 * row) == pytest.approx(6.6, abs=0.05)


def test_the_times_are_those_of_the_measurements() -> None:
    """Every figure of a table with times is in the page that it was taken from."""
    steps = {row["rows"]: [row["µs a step"], row["tokens/s"]] for row in charts.table("Decoding")}
    assert all(figures(TOKEN)[rows][:2] == steps[rows] for rows in ("1", "8", "64", "256"))
    assert f"the step takes {steps['8'][0]}." in TOKEN
    assert f"and takes {steps['1'][0]} on an NVIDIA H200" in FUSION
    sources = "".join(
        (DOCS / name).read_text("utf-8")
        for name in ("performance.md", "experiments.md", "llama.md")
    )
    for page, names in (
        (FUSION, ("empty", "10", "+ CUDA graph", "+ overlapping launches")),
        (BITS, ("a feed-forward, 2 × 4096 × 11008, one row", "a step of Llama 7B, one row")),
    ):
        for name in names:
            for figure in re.findall(r"\d[\d,.]*", figures(page)[name][0]):
                assert re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", sources), (name, figure)


def test_a_snippet_prints_what_the_page_shows() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", BITS, re.DOTALL)
    (shown,) = re.findall(r"```\n(float8_.*?)```", BITS, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == shown


SHORTCUT = """// launch: grid=ceil(size / block)
#include <cuda_fp16.h>
extern "C" __global__ void my_to_fp8(const float* x, unsigned char* out, long long size) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    const unsigned bits = __half_as_ushort(__float2half_rn(x[i]));
    out[i] = (unsigned char)(bits + 0x7f + (bits >> 8 & 1) >> 8);
}
"""


@on_emulator
def test_rounding_twice_is_found_in_more_than_a_few_elements(tmp_path: Path) -> None:
    file = tmp_path / "my.cu"
    file.write_text(SHORTCUT)
    ended = gpt2block("kernels", "to_fp8", "--mine", str(file), "--device", "cpu")
    assert ended.code == 1
    assert re.search(r"K=1 N=5 .* ok", ended.out)
    wrong = re.search(r"my\.cu: (\d+) of ([\d,]+) elements of out are wrong", ended.out)
    assert wrong
    assert int(wrong[1]) < int(wrong[2].replace(",", "")) / 50


@on_emulator
def test_splits_that_are_not_scaled_are_wrong_except_with_one_key(tmp_path: Path) -> None:
    file = tmp_path / "my.cu"
    text = solution(find("attention"), "9.3")
    factor = "expf(m_of[p] - largest)"
    assert text.count(factor) == 1
    file.write_text(text.replace(factor, "1.0f"))
    ended = gpt2block("kernels", "attention", "--mine", str(file), "--device", "cpu")
    assert ended.code == 1
    assert "96 of 120 elements of out are wrong: out[0, 1, 0]" in ended.out
    assert "96 of 120" in TOKEN
