"""Counters of the PTX engine: kernels of one line whose counts follow from the hardware's rules."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from gpt2block.emulator.ptx import engine, nvrtc
from gpt2block.emulator.ptx.engine import ORDERS, Result
from gpt2block.emulator.ptx.parse import Module

pytestmark = pytest.mark.skipif(engine.missing() is not None, reason="no NVRTC or no g++")

FILE = Path(__file__).parents[1] / "corpus" / "kernels" / "counted.cu"
HEAD, LIST = FILE.read_text("ascii").split("// lines\n")
LINES = dict(re.findall("(?m)^(.*?)  // ?(.*)$", LIST))  # a line: its counters
SHARED = "__shared__ __align__(16) float tile[4096]; tile[t] = t; __syncwarp();"


def kernel(number: int, line: str) -> str:
    shared = SHARED if "tile" in line else ""
    return f"""extern "C" __global__ void k{number}(float* x, float* out, int n) {{
    const int t = threadIdx.x; float v = t; unsigned d[4] = {{}}; float own[8] = {{}}; {shared}
#line {number} "lines.cu"
    {line}
#line 1000 "lines.cu"
    out[t] = v + d[0] + d[1] + d[2] + d[3] + own[(n + 1) & 7];
}}
"""


@cache
def module() -> Module:
    kernels = "".join(kernel(number, line) for number, line in enumerate(LINES, 1))
    made = nvrtc.compile(HEAD + kernels, name="lines.cu", arch="sm_80")
    assert isinstance(made, nvrtc.Compiled), made
    return Module(made.ptx)


def launch(line: str, **options: object) -> Result:
    args = np.zeros(4096, np.float32), np.zeros(4096, np.float32), 5
    name = f"k{list(LINES).index(line) + 1}"
    return engine.launch(module(), name, (1,), (32,), args, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("line", LINES)
def test_a_line_has_the_counts_that_the_rules_of_the_hardware_give(line: str) -> None:
    for order in (ORDERS[0], ORDERS[3]):
        result = launch(line, order=order, checks=engine.Checks(counters=True))
        assert not result.findings
        counts = {at.number: each for at, each in result.counts.items()}
        found = counts[list(LINES).index(line) + 1]._asdict()
        assert found.pop("instructions") > 0
        assert " ".join(f"{name}={value}" for name, value in found.items() if value) == LINES[line]
        assert sum(each.instructions for each in counts.values()) == result.instructions


def test_nothing_is_counted_unless_asked_for() -> None:
    assert launch("v = x[t];").counts == {}
