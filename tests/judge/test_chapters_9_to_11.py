"""Statements of chapters 9 to 12 of docs/learn: figures, a snippet, and results of exercises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import charts
import numpy as np
import pytest

from gpt2block import GPT2Config
from gpt2block.judge.solutions import solution
from gpt2block.models.config import model_shapes
from gpt2block.ops.registry import find
from tests.command_line import gpt2block
from tests.devices import on_emulator

DOCS = Path(__file__).parents[2] / "docs"
TOKEN, FUSION, BITS, DRAFT = (
    (DOCS / "learn" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("9-one-token", "10-fusion", "11-eight-bits", "12-draft-and-verify")
)


def figures(page: str) -> dict[str, list[str]]:
    """Return the cells of all table rows of a page, by their first cell."""
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
    """Every figure in a table of times is in the page from which it was taken."""
    steps = {row["rows"]: [row["µs a step"], row["tokens/s"]] for row in charts.table("Decoding")}
    assert all(figures(TOKEN)[rows][:2] == steps[rows] for rows in ("1", "8", "64", "256"))
    assert f"the measured step takes {steps['8'][0]} µs." in TOKEN
    assert f"but the step takes {steps['1'][0]} µs" in re.sub(r"\s+", " ", FUSION)
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
@pytest.mark.usefixtures("fewer_runs")
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
@pytest.mark.usefixtures("fewer_runs")
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


# Chapter 12 contains the program that checks the kernels of its exercises.
(CHECK,) = re.findall(r"```python\n(.*?)```", DRAFT, re.DOTALL)
SOLUTIONS = re.findall(r"```cuda\n(// Chapter 12, exercise \d: .*?)```", DRAFT, re.DOTALL)
KERNELS = ("count_taken", "find_latest", "find_drafts")
RUNS = ("forward", "reverse", "shuffled", "interleaved")


def checked(folder: Path, *texts: str) -> subprocess.CompletedProcess[str]:
    """Run the page's program on a file of these kernels."""
    (folder / "check.py").write_text(CHECK)
    (folder / "my.cu").write_text("\n".join(texts))
    command = [sys.executable, "check.py", "my.cu"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def replaced(text: str, old: str, new: str = "") -> str:
    assert text.count(old) == 1
    return text.replace(old, new)


def test_what_draft_tokens_cost_and_bring_is_measured() -> None:
    page = (DOCS / "performance.md").read_text("utf-8")
    measured = figures(page.partition("### Draft tokens")[2].partition("###")[0])
    names = ("Llama 7B, float16", "Llama 7B, E5M2", "GPT-2 small, bfloat16")
    for name in names:
        assert figures(DRAFT)[name] == [cell.split(" (")[0] for cell in measured[name][1:]]
    told = "takes 3.0, 3.0 and 4.7 µs per step of a text of 500, 2,000 and 8,000 tokens"
    assert told in re.sub(r"\s+", " ", page)
    answer = re.findall(r"(\d\.\d+) at s = (\d\.\d+)", DRAFT)
    costs = [figures(DRAFT)[name][0].split(" / ")[1] for name in names[::2]]
    assert costs == [tokens for tokens, _ in answer[:2]]
    for tokens, share in answer:
        given = sum(float(share) ** n for n in range(8))
        assert given == pytest.approx(float(tokens), abs=0.05 if float(share) > 0.5 else 0.006)


@on_emulator
def test_the_solutions_of_chapter_12_are_right(tmp_path: Path) -> None:
    assert [re.findall(r"void (\w+)\(", text) for text in SOLUTIONS] == [[name] for name in KERNELS]
    done = checked(tmp_path, *SOLUTIONS)
    right = [f"{name}, {run}: 0 of 30 sequences are wrong" for name in KERNELS for run in RUNS]
    assert (done.returncode, done.stderr, done.stdout.splitlines()) == (0, "", right)


@pytest.mark.slow
@on_emulator
def test_mistakes_in_the_kernels_of_drafts_are_found(tmp_path: Path) -> None:
    """Mistakes are those that the exercises name, and other easy ones."""
    count, latest, copy = SOLUTIONS
    at_most = "if (found >= 0) atomicMax(&latest, found);"
    done = checked(tmp_path, replaced(latest, at_most, "if (found > latest) latest = found;"))
    assert re.search(r"race: .* latest.* read it: nothing orders", done.stderr)

    done = checked(
        tmp_path, replaced(copy, "&best, found);\n    __syncthreads();", "&best, found);")
    )
    assert re.search(r"race: .* best.* nothing orders the two accesses", done.stderr)

    done = checked(tmp_path, replaced(count, "count_taken(", "count_token("))
    assert "expected a kernel with the name count_taken" in done.stderr
    wrong = r"forward: [1-9]\d* of 30 sequences"
    early = replaced(latest, "int at = 1 + threadIdx.x", "int at = threadIdx.x")
    for text, found in (
        (replaced(count, "id >= 0 && "), wrong),
        (replaced(count, "lane < R - 1", "lane < R"), "out of bounds: .* of draft"),
        (early, "out of bounds: .* of tokens"),
        (replaced(copy, "length <= at && "), "out of bounds: .* of tokens"),
        (replaced(copy, "i % followed", "i + 0 * followed"), wrong),
        (replaced(copy, "if (length) found", "if (length == MATCH) found"), wrong),
    ):
        done = checked(tmp_path, text)
        assert re.search(found, done.stdout + done.stderr), found
        assert done.returncode == 1
