"""The compiler of PTX: its text, its options, and the limits that end it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpt2block.ptx import nvrtc

pytestmark = pytest.mark.slow  # the engine is compiled first

KERNEL = 'extern "C" __global__ void f(float* a) { a[threadIdx.x] = a[threadIdx.x] * 2 + 1; }'
BOMB = """#define A(x) x x x x x x x x x x
#define B(x) A(A(A(A(x))))
__global__ void f() { int a = 0; B(B(++a;)) }"""


def _compile(
    source: str, arch: str = "sm_80", limits: nvrtc.Limits | None = None
) -> nvrtc.Compiled | nvrtc.Refused:
    return nvrtc.compile(source, name="mine.cu", arch=arch, limits=limits or nvrtc.Limits())


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_source_becomes_ptx_with_lines_contracted_and_flushed(arch: str) -> None:
    compiled = _compile(KERNEL, arch)
    assert isinstance(compiled, nvrtc.Compiled)
    assert f".target {arch}" in compiled.ptx
    assert ".loc\t1 1 " in compiled.ptx
    assert "fma.rn.ftz.f32" in compiled.ptx


@pytest.mark.parametrize(
    "header", ["cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "mma.h", "cuda/barrier"]
)
def test_the_headers_of_cuda_are_found(header: str) -> None:
    compiled = _compile(f"#include <{header}>\n{KERNEL}")
    assert isinstance(compiled, nvrtc.Compiled), compiled


def test_the_compiler_has_no_random_addresses() -> None:
    """With them, it joins other loads in one process than in the next."""
    if subprocess.run(["setarch", "-R", "true"], check=False).returncode:
        pytest.skip("this system does not permit it")
    assert isinstance(_compile(KERNEL), nvrtc.Compiled)
    process = nvrtc._Child.idle[-1].process
    assert int(Path(f"/proc/{process.pid}/personality").read_text(), 16) & nvrtc.FIXED_ADDRESSES


def test_errors_of_the_source_are_in_the_log() -> None:
    refused = _compile(KERNEL.replace("* 2", "* two"))
    assert isinstance(refused, nvrtc.Refused)
    assert refused.reason == ""
    assert 'mine.cu(1): error: identifier "two" is undefined' in refused.log


@pytest.mark.parametrize(
    ("source", "limits", "reason"),
    [
        (BOMB, nvrtc.Limits(memory_bytes=2**29), "the compiler needs more than 0.5 GiB of memory"),
        (BOMB, nvrtc.Limits(cpu_seconds=1), "the compiler was stopped after 1 CPU seconds"),
    ],
)
def test_a_limit_refuses_the_source_and_not_the_next_one(
    source: str, limits: nvrtc.Limits, reason: str
) -> None:
    refused = _compile(source, limits=limits)
    assert isinstance(refused, nvrtc.Refused)
    assert refused.reason.startswith(reason)
    assert isinstance(_compile(KERNEL), nvrtc.Compiled)


def test_one_process_compiles_several_sources() -> None:
    _compile(KERNEL)
    before = nvrtc._Child.idle[-1].process.pid
    _compile(KERNEL.replace("2", "3"))
    assert nvrtc._Child.idle[-1].process.pid == before


def test_a_process_that_has_ended_is_named_and_replaced() -> None:
    _compile(KERNEL)
    nvrtc._Child.idle[-1].process.kill()
    refused = _compile(KERNEL)
    assert isinstance(refused, nvrtc.Refused)
    assert refused.reason == "the compiler ended by SIGKILL; it may use 3.0 GiB of memory"
    assert isinstance(_compile(KERNEL), nvrtc.Compiled)


def test_a_machine_without_nvrtc_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvrtc, "find_library", lambda: None)
    refused = _compile(KERNEL)
    assert isinstance(refused, nvrtc.Refused)
    assert "pip install" in refused.reason
