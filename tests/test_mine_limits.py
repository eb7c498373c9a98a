"""Files that are not judged, sizes of the checks, and limits of time and output."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpt2block import check_kernel, emulator
from gpt2block.errors import InputError, NotJudged
from gpt2block.mine import on_cpu, reserved, sizes
from gpt2block.mine.cases import cases, resolved_seed
from gpt2block.mine.kernel import matched
from gpt2block.mine.limits import limit
from gpt2block.mine.source import largest_number, read
from gpt2block.mine.templates import names, path_of
from gpt2block.ops.registry import find

NO_EMULATOR = emulator.missing()
on_emulator = pytest.mark.skipif(
    NO_EMULATOR is not None, reason=f"no CUDA on the CPU: {NO_EMULATOR}"
)
ADD = """// launch: grid=ceil(n / block) block=64
extern "C" __global__ void my_add(const float* a, const float* b, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    BODY
}
"""
RIGHT = "if (i < n) y[i] = a[i] + b[i];"


def add(body: str = RIGHT, head: str = "") -> str:
    return head + ADD.replace("BODY", body)


# Files that are not judged


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ('#include "/etc/passwd"\n', r'my\.cu:1: not judged: #include "/etc/passwd": a file may'),
        ("#include <../secret.h>\n", "only headers by a plain name"),
        ("#define H <cmath>\n#include H\n", r"my\.cu:2: not judged: #include H"),
        ("#inc\\\nlude </etc/passwd>\n", "#include </etc/passwd>"),
        ("%:include </etc/passwd>\n", "#include </etc/passwd>"),
        ("__device__ void __asan_load4(void*) {}\n", "__asan_load4: it would change how"),
        ("#define NO(x) no_##x\n__attribute__((NO(sanitize)(1))) int f();\n", "no_sanitize"),
        ('__attribute__((section(".init"))) __device__ int z;\n', "not judged: section"),
        ("[[gnu::optimize(0)]] __device__ void f() {}\n", "not judged: optimize"),
        ("#pragma GCC optimize 3\n", "pragma GCC optimize"),
        ("#define __shared__\n", "#define __shared__: a name of CUDA"),
        ("#ifdef __GNUC__\n#endif\n", "__GNUC__: a condition on it may choose other code"),
        ("#if defined(__SANITIZE_ADDRESS__)\n#endif\n", "__SANITIZE_ADDRESS__"),
        ("#if __has_include(<cstdio>)\n#endif\n", "__has_include"),
    ],
)
def test_a_file_that_would_be_another_program_is_not_judged(
    tmp_path: Path, head: str, said: str
) -> None:
    (tmp_path / "my.cu").write_text(add(head=head))
    with pytest.raises(NotJudged, match=said):
        reserved.check_text(read(tmp_path / "my.cu"))


@pytest.mark.parametrize(
    "head",
    [
        "",
        "#include <cuda_fp16.h>\n#include <cmath>\n",
        "#if __CUDA_ARCH__ >= 800 && defined(__CUDACC__)\n#endif\n",
        "#ifndef M_PI\n#define M_PI 3.14\n#endif\n#ifdef OWN_NAME\n#endif\n",
        "#define WARP 32\n#if WARP == 32\n#endif\n#pragma unroll\n",
        "#define JOIN(a, b) a##b\n__device__ int JOIN(x, y)() { return 1; }\n",
    ],
)
def test_usual_directives_are_judged(tmp_path: Path, head: str) -> None:
    (tmp_path / "my.cu").write_text(add(head=head))
    reserved.check_text(read(tmp_path / "my.cu"))


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
        of_stated = sizes.timed(operation, full, {stated})
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
        ("", 0, 5001),
    ],
)
def test_rows_are_longer_than_the_numbers_of_a_file(
    tmp_path: Path, text: str, number: int, row: int
) -> None:
    assert largest_number(text, sizes.LONGEST) == number
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
        "accesses an address that belongs to no argument",
    ),
    "a capped grid": ("if (i < n && blockIdx.x < 8192) y[i] = a[i] + b[i];", "N=8192, C=768"),
    "a count of launches": (
        "static __device__ int launches[1 << 16];\n    "
        "if (i < n) y[i] = threadIdx.x || launches[blockIdx.x]++ < 20 ? a[i] + b[i] : 0.0f;",
        "right in the first launch of a process, wrong in a later one",
    ),
    "a stored sum": (
        "static __device__ float kept[8], first;\n    "
        "if (i == 1 && n < 8 && first != a[0]) for (int k = 0; k < n; ++k) kept[k] = a[k] + b[k];\n"
        "    if (i == 1) first = a[0];\n    "
        "if (i == 1 && n < 8) for (int k = 0; k < n; ++k) y[k] = kept[k];\n    "
        "if (n >= 8 && i < n) y[i] = a[i] + b[i];",
        "right in the first launch of a process, wrong in a later one",
    ),
}


@on_emulator
@pytest.mark.parametrize("name", ONLY_SOME)
def test_a_kernel_that_is_right_at_some_sizes_or_once_is_wrong(name: str) -> None:
    body, said = ONLY_SOME[name]
    found = check_kernel("add", add(body), device="cpu", seed=0)
    assert found.verdict == "wrong"
    assert said in str(found)


@on_emulator
def test_a_read_only_load_of_a_written_value_is_reported() -> None:
    found = check_kernel("add", add("if (i < n) {\n y[i] = a[i] + b[i];\n y[i] = __ldg(y + i);\n}"))
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
    small.write_text(add("for (volatile int k = 0; k < 100000000; ++k) {}\n    " + RIGHT))
    operation = find("add")
    kernel = matched(read(small), operation, ("float32", "KN"))
    monkeypatch.setattr(on_cpu, "path_of", lambda operation: small)  # the template is slow too
    with pytest.raises(NotJudged, match=r"a launch still runs after 0.2 s of CPU time at N=1, C=5"):
        list(on_cpu.check_kernel(kernel, cases(kernel, "KN"), 0.2))


@on_emulator
def test_a_block_that_waits_for_a_later_one_is_named(small: Path) -> None:
    waits = (
        "static __device__ volatile int here;\n"
        "    if (threadIdx.x == 0) atomicAdd((int*)&here, 1);\n"
        "    while (n > 64 && here < gridDim.x) {}\n    " + RIGHT
    )
    small.write_text(add(waits))
    kernel = matched(read(small), find("add"), ("float32", "KN"))
    *_, found = on_cpu.check_kernel(kernel, cases(kernel, "KN"), 0.5)
    assert "only a cooperative launch" in getattr(found, "text", "")


@on_emulator
def test_a_copy_without_a_commit_is_named() -> None:
    body = (
        "__shared__ float s[64];\n"
        "    if (i < n) __pipeline_memcpy_async(&s[threadIdx.x], a + i, 4);\n"
        "    __pipeline_wait_prior(0);\n    if (i < n) y[i] = s[threadIdx.x] + b[i];"
    )
    found = check_kernel("add", add(body, "#include <cuda_pipeline.h>\n"), device="cpu")
    assert "Possibly because a thread waits for an asynchronous copy that neither" in str(found)


@on_emulator
def test_stated_sizes_are_checked_at_the_sizes_that_a_gpu_times_too() -> None:
    found = check_kernel("add", add(), shape={"N": 3}, device="cpu")
    assert [each.sizes for each in found.checks] == [{"N": 3, "C": 769}, {"N": 3, "C": 768}]
