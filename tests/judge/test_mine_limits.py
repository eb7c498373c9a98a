"""Sizes of the checks, kernels that are right by chance, and limits of launches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpt2block import check_kernel
from gpt2block.emulator.ptx import nvrtc
from gpt2block.errors import InputError, NotJudged
from gpt2block.judge import on_cpu, sizes
from gpt2block.judge.cases import cases, resolved_seed
from gpt2block.judge.kernel import matched
from gpt2block.judge.limits import limit
from gpt2block.judge.source import largest_number, read
from gpt2block.judge.templates import names, path_of
from gpt2block.ops.registry import find
from tests.devices import on_emulator

ADD = """// launch: grid=ceil(n / block) block=64
extern "C" __global__ void my_add(const float* a, const float* b, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    BODY
}
"""
RIGHT = "if (i < n) y[i] = a[i] + b[i];"


def add(body: str = RIGHT, head: str = "") -> str:
    return head + ADD.replace("BODY", body)


# Sizes


@pytest.mark.parametrize("name", names())
def test_sizes_are_random_unusual_and_those_of_a_gpu(name: str) -> None:
    operation = find(name)
    drawn = [list(sizes.random(operation, seed)) for seed in range(20)]
    assert drawn[3] == list(sizes.random(operation, 3))
    assert len({tuple(at.values()) for each in drawn for at, _ in each}) > 20
    row, _ = sizes.unusual(operation)
    assert any(size % sizes.COLUMNS == 0 for size in row.values())
    full = operation.workload.sizes
    parts = [at for at, _ in sizes.parts(operation, full, ())]
    assert all(any(at[each] == full[each] for at in parts) for each in full)
    for stated in full:
        of_stated = sizes.parts(operation, full, {stated})
        assert all(at[stated] == full[stated] for at, _ in of_stated)
    kernel = matched(read(path_of(operation)), operation, ("float32", operation.workload.layout))
    smallest = min(parts, key=lambda at: sum(at.values()))
    assert cases(kernel, operation.workload.layout, smallest)


@pytest.mark.parametrize(
    ("text", "number", "row"),
    [
        ("float row[6144];", 6144, 6152),
        ("#define HELD (1 << 13)\nconstexpr int C = HELD * 2; // 50000", 16384, 8200),
        ("float row[64 * 0x30u * 4]; if (m == 0xffffffff) x = 30000.0f + 2e4f;", 12288, 12296),
        ("#define HELD 30\n    float4 held[HELD]; int i[2];\n__shared__ float s[999];", 7680, 7688),
        ("", 0, 5001),
    ],
)
def test_rows_are_longer_than_the_numbers_of_a_file(
    tmp_path: Path, text: str, number: int, row: int
) -> None:
    assert largest_number(text, sizes.LONGEST, 64) == number
    operation = find("rmsnorm")
    (tmp_path / "my.cu").write_text(text + path_of(operation).read_text())
    kernel = matched(read(tmp_path / "my.cu", shared="4 * C"), operation, ("float16", "KN"))
    assert row == max(each.sizes["C"] for each in cases(kernel, "KN", seed=1))


@pytest.mark.parametrize("name", names())
def test_limits_grow_with_sums_alone(name: str) -> None:
    operation = find(name)
    at = [{**operation.workload.attrs, **attrs, **each} for each, attrs in operation.cases]
    found = [limit(operation, "float32", each) * 2**24 for each in at]
    assert 2 <= found[0] <= 170
    if name in ("add", "encoder", "gelu", "silu_mul"):
        assert found == [10 if name in ("gelu", "silu_mul") else 2] * len(at)


def test_a_seed_is_0_or_more() -> None:
    assert resolved_seed(0) == 0
    assert resolved_seed(None) in range(1_000_000)
    with pytest.raises(InputError, match="seed: expected 0 or more, got -1"):
        check_kernel("add", add(), seed=-1)


# Kernels that are right only at the documented sizes, or in a first launch

ONLY_SOME: dict[str, tuple[str, str]] = {
    "an address of large sizes": (
        "if (i < n) y[i] = a[n > 1000000 ? i + 40000000 : i] + b[i];",
        "reads out of bounds: byte 160,000,0",
    ),
    "a count of launches": (
        "static __device__ int launches[1 << 16];\n    "
        "if (i < n) y[i] = threadIdx.x || launches[blockIdx.x]++ < 20 ? a[i] + b[i] : 0.0f;",
        "reads launches[0], which an earlier launch left changed",
    ),
    "a name of the emulator's compiler": (
        "constexpr char c = __PRETTY_FUNCTION__[0];\n    "
        "if (i < n) y[i] = c == 'v' ? a[i] - b[i] : a[i] + b[i];",
        "are wrong",
    ),
    "80 bits": (
        "const long double little = 1e-18L * n;\n    "
        "if (i < n) y[i] = a[i] + (1 + little > 1 ? b[i] : -b[i]);",
        "are wrong",
    ),
    "arguments with side effects": (
        "int k = i;\n    const bool first = second(k += 1, k += 1) == i + 1;\n    "
        "if (i < n) y[i] = a[i] + (first ? b[i] : -b[i]);",
        "are wrong",
    ),
    "the number of multiprocessors": (
        'unsigned count;\n    asm("mov.u32 %0, %%nsmid;" : "=r"(count));\n    '
        "if (i < n) y[i] = a[i] + (count > 120 ? 0 : b[i]);",
        "are wrong",
    ),
    "the multiprocessor": (
        'unsigned number;\n    asm("mov.u32 %0, %%smid;" : "=r"(number));\n    '
        "if (i < n) y[i] = number < 108 && (number != 7 || blockIdx.x == 7) ? a[i] + b[i] : 0;",
        "depends on the multiprocessor",
    ),
    "the number of blocks in flight": (
        "if (threadIdx.x == 0) atomicAdd(&calls, 1);\n    __syncthreads();\n    "
        "if (i < n) y[i] = atomicAdd(&calls, 0) < 2 ? a[i] + b[i] : 0;\n    __syncthreads();\n    "
        "if (threadIdx.x == 0) atomicSub(&calls, 1);",
        "depends on the order of threads",
    ),
    "another architecture": (
        "#if __CUDA_ARCH__ < 900\n    if (i < n) y[i] = a[i] + b[i];\n#endif",
        "are wrong",
    ),
}


@on_emulator
@pytest.mark.parametrize("name", ONLY_SOME)
def test_a_kernel_that_is_right_at_some_sizes_or_once_is_wrong(name: str, request: Any) -> None:
    body, said = ONLY_SOME[name]
    if name != "an address of large sizes":  # wrong at small sizes
        request.getfixturevalue("fewer_runs")
    head = "static __device__ int calls;\n__device__ int second(int, int k) { return k; }\n"
    found = check_kernel("add", add(body, head), device="cpu", seed=0)
    assert found.verdict == "wrong"
    assert said in str(found)


@on_emulator
def test_a_read_only_load_of_a_written_value_is_reported() -> None:
    body = "if (i < n) {\n y[i] = a[i] + b[i];\n y[i] = __ldg(y + i);\n}"
    found = check_kernel("add", add(body), device="cpu")
    assert found.problem
    assert found.problem.kind == "read_only"
    assert found.problem.lines == (6, 5)


# Limits


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return tmp_path / "my.cu"


@on_emulator
def test_a_slow_kernel_is_not_judged_if_the_template_is_slow(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = "for (volatile int k = 0; k < {}; ++k) {{}}\n    " + RIGHT
    slow = small.with_name("slow.cu")
    small.write_text(add(loop.format(400000)))
    slow.write_text(add(loop.format(4000)))
    kernel = matched(read(small), find("add"), ("float32", "KN"))
    monkeypatch.setattr(on_cpu, "path_of", lambda operation: slow)  # a slow template
    monkeypatch.setattr(on_cpu, "BUDGET", 10_000)
    monkeypatch.setattr(on_cpu, "MAX_BUDGET", 1_000_000)
    with pytest.raises(NotJudged, match="a launch still runs after 1,000,000 instructions of w"):
        list(on_cpu.check_kernel(kernel, cases(kernel, "KN")))


@on_emulator
def test_a_file_that_the_compiler_cannot_finish_is_not_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    defaults: Any = nvrtc.compile.__kwdefaults__
    monkeypatch.setitem(defaults, "limits", nvrtc.Limits(memory_bytes=2**28))
    bomb = "#define A(x) x x x x x x x x\n#define B(x) A(A(A(A(A(x)))))\n"
    found = check_kernel("add", add(RIGHT + " B(B(B(y[0] += 0;)))", bomb), device="cpu")
    assert found.verdict == "not judged"
    assert "the compiler" in (found.reason or "")


@on_emulator
def test_stated_sizes_are_checked_at_the_sizes_that_a_gpu_times_too() -> None:
    found = check_kernel("add", add(), shape={"N": 3}, device="cpu")
    assert [each.sizes["C"] for each in found.checks] == [769, 769, 768]
    with pytest.raises(InputError, match="shape N=100000: too large for the emulator"):
        check_kernel("add", add(), shape={"N": 100000}, device="cpu")
