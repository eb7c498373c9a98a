"""The engine that executes PTX: right kernels give NumPy's results, wrong ones give findings."""

from __future__ import annotations

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block.cuda import kernels
from gpt2block.emulator.ptx import cache as programs
from gpt2block.emulator.ptx import engine, nvrtc
from gpt2block.emulator.ptx.encode import UnsupportedError, encode
from gpt2block.emulator.ptx.engine import CHECKED, ORDERS, Finding, Order, Result, launch
from gpt2block.emulator.ptx.parse import Module

pytestmark = pytest.mark.skipif(engine.missing() is not None, reason="no NVRTC or no g++")

HERE = Path(__file__).parents[1] / "corpus" / "kernels"
N = 1000
X = np.random.default_rng(0).standard_normal(N, np.float32)
SETTINGS = re.compile(
    r'^// (.*=.*)$(?:\n(?!//).*)*?\nextern "C" __global__ void (?:__launch_bounds__\(.*?\) )?(\w+)',
    re.MULTILINE,
)
KERNEL = 'extern "C" __global__ void k(const float* x, float* out, int n) {'


class Case(NamedTuple):
    """A launch of a kernel. right: the expected first elements of `out`, or None."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    right: NDArray[Any] | None
    said: str


@cache
def module(source: str, name: str = "k.cu", *options: str) -> Module:
    text = f'{kernels.prelude()}#line 1 "{name}"\n{source}'
    made = nvrtc.compile(text, name=name, arch="sm_80", options=options)
    assert isinstance(made, nvrtc.Compiled), made
    return Module(made.ptx)


def read(file: str) -> list[Case]:
    cases = []
    for line, kernel in SETTINGS.findall((HERE / file).read_text("ascii")):
        settings, _, said = line.partition(" | ")
        given = dict(part.split("=", 1) for part in settings.split())
        grid, block = (tuple(map(int, given.get(k, "1").split(","))) for k in ("grid", "block"))
        names = {"np": np, "x": X, "abs": abs, "max": max}
        right = np.ravel(eval(given["right"], names)) if "right" in given else None
        cases.append(Case(kernel, grid, block, int(given.get("shared", 0)), right, said))
    return cases


def of_file(file: str, *options: str) -> Module:
    return module((HERE / file).read_text("ascii"), file, *options)


def run(made: Module, case: Case, order: Order) -> tuple[Result, bool]:
    """Return the result of a launch, and whether `out` is as expected."""
    out = np.zeros(N, np.float32)
    options: Any = {"shared": case.shared, "order": order, "names": ("x", "out", "n")}
    options["checks"] = CHECKED._replace(budget=2_000_000)
    args = [X.copy(), out, N]
    result = launch(made, case.kernel, case.grid, case.block, args, **options)
    right = case.right
    return result, right is None or np.allclose(out[: right.size], right, rtol=1e-4, atol=1e-4)


def findings(result: Result) -> list[Finding]:
    return [each for each in result.findings if each.fatal]


@pytest.mark.parametrize("case", read("right.cu"), ids=lambda case: case.kernel)
def test_a_right_kernel_is_accepted(case: Case) -> None:
    for order in ORDERS:
        result, right = run(of_file("right.cu"), case, order)
        assert not findings(result)
        assert right, order


KINDS = {
    "race": {"race"},
    "READ out of bounds": {"out of bounds"},
    "global-buffer-overflow": {"out of bounds"},
    "divergent barrier": {"barrier", "mask"},
    "misaligned": {"misaligned"},
}


@pytest.mark.parametrize("case", read("wrong.cu"), ids=lambda case: case.kernel)
def test_a_wrong_kernel_is_found(case: Case) -> None:
    """Code that the compiler removes is found in the program that it does not optimise."""
    said = set()
    for options in ((), ("-G",)):
        for order in ORDERS:
            result, right = run(of_file("wrong.cu", *options), case, order)
            said |= {each.kind for each in findings(result)} | (set() if right else {"result"})
    expected = {"race", "result"} if case.said.startswith("result") else set()
    for words, kinds in KINDS.items():
        expected |= kinds if words in case.said else set()
    assert said & expected


FINDINGS = dict(
    re.findall(
        r'(?m)^// says: (.*)\n#line 1\nextern "C" __global__ void (\w+)',
        (HERE / "findings.cu").read_text("ascii"),
    )
)


@pytest.mark.parametrize(("says", "kernel"), FINDINGS.items())
def test_a_finding_names_threads_lines_and_elements(says: str, kernel: str) -> None:
    case = Case(kernel, (1,), (64,), 0, None, "")
    result, _ = run(of_file("findings.cu"), case, "forward")
    assert [each for each in findings(result) if re.match(says, str(each))]


def test_memory_without_a_value_is_noted() -> None:
    body = "__shared__ float s[64]; if (threadIdx.x < 40) s[threadIdx.x] = x[0]; __syncthreads();\n"
    source = f"{KERNEL} {body} out[threadIdx.x] = s[threadIdx.x]; }}"
    result, _ = run(module(source), Case("k", (1,), (64,), 0, None, ""), "reverse")
    (found,) = result.findings
    said = "unwritten: thread (40, 0, 0) of block (0, 0, 0), line 2, reads 4 bytes at byte 160 of s"
    assert str(found) == said


def test_printed_text() -> None:
    source = (
        f"{KERNEL} if (threadIdx.x % 16 == 0)"
        ' printf("%d: %5.2f %s %llx\\n", threadIdx.x, 1.5, "text", 1ull << 40); }'
    )
    result, _ = run(module(source), Case("k", (1,), (32,), 0, None, ""), "forward")
    assert result.printed == "0:  1.50 text 10000000000\n16:  1.50 text 10000000000\n"


def test_variables_keep_their_values() -> None:
    """A launch that does not end leaves them as they were."""
    made = module(f"__device__ int calls = 3;\n{KERNEL} out[0] = ++calls; if (!n) __trap(); }}")
    out = np.zeros(1, np.float32)
    for n, expected in ((1, 4), (0, 5), (1, 5)):
        launch(made, "k", (1,), (1,), [X, out, n])
        assert out[0] == expected


def test_threads_share_the_variables_of_a_module() -> None:
    made = module(
        f"__device__ unsigned calls;\n{KERNEL} if (threadIdx.x == 0) {{"
        " for (int i = 0; i < 1000; ++i) calls = calls + 1; out[0] = calls; } }"
    )

    def one(_: int) -> float:
        out = np.zeros(1, np.float32)
        launch(made, "k", (1,), (32,), [X, out, N])
        return float(out[0])

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(one, range(16))) == [1000.0 * k for k in range(1, 17)]


def test_a_build_that_fails_is_reported_and_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(f"#!/bin/sh\necho x >> {tmp_path}/calls\necho no header >&2; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    made = module(f"{KERNEL} }}")
    made.loaded.clear()
    engine._open.cache_clear()
    try:
        for _ in range(3):
            with pytest.raises(engine.LaunchError, match=r"cannot compile .* no header"):
                launch(made, "k", (1,), (1,), [X, X, N])
        assert (tmp_path / "calls").read_text().count("x") <= 2  # at most one for each source
    finally:
        engine._open.cache_clear()


def test_one_of_several_processes_builds_the_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def build_slowly(_: str, target: Path) -> None:
        time.sleep(0.1)
        target.touch()

    build = Mock(side_effect=build_slowly)
    monkeypatch.setattr(programs, "folder", lambda: tmp_path)
    monkeypatch.setattr(engine, "_build", build)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: engine._built(), range(2))
    assert first == second
    build.assert_called_once()


@pytest.mark.parametrize(
    "value",
    [
        'asm volatile("mov.u32 %0, %%nsmid;" : "=r"(v));',
        "v = x < out;",
        "v = ((size_t)out - (size_t)x) & 0xffffff;",
        *(f"v = (size_t)x >> {bits} & 0xff;" for bits in (5, 10, 25, 36)),
    ],
)
def test_the_variant_changes_what_no_result_may_depend_on(value: str) -> None:
    out = np.zeros((2, 1), np.float32)
    for variant in (0, 1):
        args, checks = [X, out[variant], N], CHECKED._replace(variant=variant)
        source = f"{KERNEL} unsigned v; {value} out[0] = v; }}"
        launch(module(source), "k", (1,), (1,), args, checks=checks)
    assert out[0] != out[1]


def test_an_unknown_instruction_has_its_text_and_line() -> None:
    asm = 'asm volatile("vadd.u32.u32.u32 %0, %1, %1;" : "=r"(*(unsigned*)out) : "r"(n));'
    with pytest.raises(UnsupportedError, match=r"vadd\.u32\.u32\.u32") as raised:
        encode(module(f"{KERNEL}\n{asm} }}"), "k")
    assert raised.value.place is not None
    assert raised.value.place.line == 2


def test_a_symbol_has_the_name_that_the_source_gives_it() -> None:
    symbols = ("_ZZ4spinE5flags", "_Z1f5Float", "_ZNK2ns1S1gE5Float", "f")
    assert [engine.plain_name(each) for each in symbols] == ["flags", "f", "g", "f"]


@pytest.mark.parametrize(
    ("grid", "block", "args", "said"),
    [
        ((1,), (1,), [X], "3 parameters, got 1"),
        ((1,), (1,), [X[::2], X, N], "argument 0 of k is not contiguous"),
        ((1,), (33, 32), [X, X, N], "1 to 1024 threads"),
        ((0,), (32,), [X, X, N], "expected a grid"),
    ],
)
def test_wrong_launches(
    grid: tuple[int, ...], block: tuple[int, ...], args: list[Any], said: str
) -> None:
    with pytest.raises(engine.LaunchError, match=said):
        launch(module(f"{KERNEL} }}"), "k", grid, block, args)
