"""Small kernels like those of users: right kernels are accepted, wrong ones refused.

Each has four launches, as with `gpt2block kernels OP --mine my.cu --device cpu`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block.emulator import ShimError, Source, loader, missing, run
from gpt2block.mine.on_cpu import RUNS

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no CUDA on the CPU: {missing()}")

HERE = Path(__file__).parent / "kernels"
N = 1000
KERNEL = re.compile(
    r'^// (.*=.*)$(?:\n(?!//).*)*?\nextern "C" __global__ void (?:__launch_bounds__\(.*?\) )?(\w+)',
    re.MULTILINE,
)


class Case(NamedTuple):
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    right: str  # an expression of x
    said: str


def read(file: str) -> tuple[Source, list[Case]]:
    text = (HERE / file).read_text("ascii")
    cases = []
    for line, kernel in KERNEL.findall(text):
        settings, _, said = line.partition(" | ")
        given = dict(part.split("=", 1) for part in settings.split())
        grid, block = (tuple(map(int, given.get(k, "1").split(","))) for k in ("grid", "block"))
        shared = int(given.get("shared", "0"))
        cases.append(Case(kernel, grid, block, shared, given.get("right", ""), said))
    assert len(cases) == text.count("__global__"), "a kernel has no line of settings"
    return Source(f"/kernels/{file}", text), cases


def outcome(source: Source, case: Case) -> str:
    """Return the message to a user, "" if all launches are right, or "result" if one is wrong."""
    x = np.random.default_rng(0).standard_normal(N, np.float32)
    expected = eval(case.right, {"np": np, "x": x, "abs": abs}) if case.right else None
    wrong = ""
    for each in RUNS:
        out: NDArray[np.float32] = np.zeros(N, np.float32)
        checks: dict[str, Any] = {
            "order": each.order, "races": each.races, "build": each.build
        }  # fmt: skip
        try:
            args = [x.copy(), out, N]
            run(source, case.kernel, case.grid, case.block, args, shared=case.shared, **checks)
        except ShimError as error:
            return error.report
        if expected is not None:
            flat = np.asarray(expected, float).reshape(-1)
            if not np.allclose(out[: flat.size], flat, rtol=1e-4, atol=1e-4):
                wrong = "result"
    return wrong


RIGHT, RIGHTS = read("right.cu")
WRONG, WRONGS = read("wrong.cu")


def ahead(source: Source) -> None:
    for each in RUNS:
        loader.compile_ahead(source, races=each.races, build=each.build)


@pytest.mark.parametrize("case", RIGHTS, ids=lambda case: case.kernel)
def test_a_right_kernel_is_accepted(case: Case) -> None:
    ahead(RIGHT)
    assert outcome(RIGHT, case) == ""


@pytest.mark.parametrize("case", WRONGS, ids=lambda case: case.kernel)
def test_a_wrong_kernel_is_refused(case: Case) -> None:
    ahead(WRONG)
    assert re.search(case.said, outcome(WRONG, case))
