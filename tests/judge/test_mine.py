"""A user's kernel: its file, launch line and arguments, the checks, and the child process."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from compile_for import compile_for

from gpt2block import InputError, emulator
from gpt2block.apps.cli.listing import listing, rung
from gpt2block.cuda import doctor, kernels, timing
from gpt2block.cuda.launch_lines import LaunchText, evaluated
from gpt2block.errors import KernelError, NotJudged
from gpt2block.judge import on_cpu, on_gpu, sizes
from gpt2block.judge.arguments import check_known, sizes_at, values
from gpt2block.judge.cases import POWERS, SPECIAL, Case
from gpt2block.judge.cases import cases as every_case
from gpt2block.judge.child import ProcessExited, Stage, supervised
from gpt2block.judge.comparison import BenchmarkResult, Checked
from gpt2block.judge.finding import Finding, compiler_finding
from gpt2block.judge.kernel import MINE, Kernel, matched
from gpt2block.judge.sizes import FURTHER
from gpt2block.judge.source import read
from gpt2block.judge.templates import HERE, names, template
from gpt2block.judge.why import EmulatedRun
from gpt2block.ops import workload
from gpt2block.ops.bench import ceilings, race, variants
from gpt2block.ops.bench.ceilings import Ceilings
from gpt2block.ops.registry import OPERATIONS, find
from gpt2block.sampling import Sampling, probabilities, random_bits
from tests import children
from tests.devices import on_emulator, slow

BEST = Ceilings(4000.0, {"float32": 50.0, "float16": 700.0})
ADD = """// launch: grid=ceil(n / block) block=64
extern "C" __global__ void my_add(const float* a, const float* b, float* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    BODY
}
"""
RIGHT = "if (i < n) y[i] = a[i] + b[i];"


def written(folder: Path, text: str, name: str = "my.cu") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def add(folder: Path, body: str = RIGHT, **options: str) -> Kernel:
    operation = find("add")
    file = written(folder, ADD.replace("BODY", body))
    return matched(read(file, **options), operation, ("float32", "KN"))


def cases(kernel: Kernel) -> tuple[Case, ...]:
    return every_case(kernel, kernel.operation.workload.layout)


# Arithmetic of launch lines


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("256", 256), ("ceil(N / 8)", 13), ("N // 8", 12), ("(N + 7) // 8 * 2", 26),
        ("min(N, C)", 3), ("max(N, C, 500)", 500), ("floor(N / 8)", 12), ("-C + 4", 1),
        ("N % 7", 2), ("(" * 50 + "1" + ")" * 50, 1),
        ("ceil(9007199254740993 / 1)", 9007199254740993),
    ],
)  # fmt: skip
def test_an_expression_is_exact(text: str, value: int) -> None:
    assert evaluated(text, {"N": 100, "C": 3}) == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("N / 8", r"is 25/2, no whole number: use ceil"),
        ("M", "unknown name M: expected one of N, C"),
        ("__import__('os').system('x')", "expected"),
        ("N.real", "expected"), ("N ** 9", "expected"), ("[N][0]", "expected"),
        ("N if N else C", "expected"),
        ("1.5", "expected"), ("True", "expected"), ("'N'", "expected"), ("lambda: 1", "expected"),
        ("", "expected something like"), ("N +", "expected something like"), ("N\x00", "expected"),
        ("N / 0", "division by zero"), ("N % (C - 3)", "division by zero"), ("ceil()", "expected"),
        ("ceil(N, C)", "expected one number"), ("open(N)", "expected"), ("max(*N)", "expected"),
        ("9" * 80, "too large"), ("+".join("N" * 101), "more than 200"),
        ("9" * 5000, "more than 200"),
    ],
)  # fmt: skip
def test_an_expression_of_anything_else_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        evaluated(text, {"N": 100, "C": 3})


def test_threads_evaluate_expressions_at_once() -> None:
    """Threads parse while garbage is collected, which makes CPython 3.11 raise without a lock."""

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            for _ in range(50):  # long enough for a change of threads
                pass

    def at_depth(depth: int) -> int:
        if depth:
            return at_depth(depth - 1)
        return sum(bool(Cycle()) * evaluated("ceil(N / 256)", {"N": 300}) for _ in range(2000))

    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(5)
    try:
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(at_depth, (3, 30, 60))) == [4000] * 3
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)


# The file


def test_a_launch_line_and_options(tmp_path: Path) -> None:
    file = written(tmp_path, ADD)
    assert read(file).launch == LaunchText("ceil(n / block)", "64")
    assert read(file, block="32", shared="4").launch == LaunchText("ceil(n / block)", "32", "4")
    bare = written(tmp_path, ADD.partition("\n")[2], "bare.cu")
    with pytest.raises(
        InputError,
        match=r"bare\.cu:1: the grid of my_add is not stated: pass grid.*// launch: grid=",
    ):
        matched(read(bare), find("add"), ("float32", "KN"))
    assert read(bare, grid="n").launch == LaunchText("n", "256")


def test_each_kernel_has_the_launch_line_above_it(tmp_path: Path) -> None:
    one = 'extern "C" __global__ void {name}(float* x) {{ }}\n'
    text = "".join(
        f"// launch: grid={i} block={i + 1},2 shared=4 * n\n" + one.format(name=f"k{i}")
        for i in (1, 2)
    )
    file = written(tmp_path, text)
    with pytest.raises(InputError, match=r"has 2 kernels: choose one with kernel k1\|k2"):
        read(file)
    assert read(file, "k1").launch == LaunchText("1", "2,2", "4 * n")
    assert read(file, "k2").launch == LaunchText("2", "3,2", "4 * n")
    with pytest.raises(InputError, match=r"kernel k3: my\.cu has no such kernel: use k"):
        read(file, "k3")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("int x;", "no kernel: expected extern"),
        ("__global__ void k(float* x) { }", r'my\.cu:1: kernel k: expected extern "C"'),
        ("template <int N>\n__global__ void k(float* y) { }", "name, which a template cannot have"),
        (
            "#include <cmath>\n#include <iostream>\n"
            "__global__ void k(const float* a, float* p, int m) { }\n"
            "int main() {\n  cudaMalloc(0, 4);\n  k<<<1, 2>>>(0, 0, 1);\n}\n",
            r"(?s)5 changes.*cu:3: kernel k: expected extern.*cu:3: the grid.*'p': expected.*'m'\n"
            r".*main \(line 4\), cudaMalloc \(line 5\), <<< .*6\), #.*iostream> \(line 2\)$",
        ),
        (f"#ifdef HOST\nint main() {{ }}\n#endif\n{ADD}int main() {{ }}", r"^my.cu: .*line 9\)$"),
        ('// extern "C" __global__ void k(float* x) { }', "no kernel"),
        (
            '// launch: blocks=3\nextern "C" __global__ void k(float* x) { }',
            r"my\.cu:1: launch line: unknown setting 'blocks': expected 'grid='",
        ),
        ("", "no kernel: the source is empty: `gpt2block kernels OPERATION --template` prints"),
        ('\n/*\n*/extern "C" __global__ int k() { }', r"my\.cu:3: kernel k: expected"),
    ],
)
def test_a_file_without_a_kernel_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        matched(read(written(tmp_path, text)), find("add"), ("float32", "KN"))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.cu").write_bytes(b"\x80")
    (tmp_path / "powershell.cu").write_text(ADD, encoding="utf-16")
    with pytest.raises(InputError, match="a path with quotes or backslashes"):
        read(tmp_path / 'a"b.cu')
    (tmp_path / "large.cu").write_bytes(b"x" * (1 << 21))
    os.mkfifo(tmp_path / "pipe.cu")
    for name, said in (
        ("none.cu", "no such file: `gpt2block kernels OPERATION --template` prints one"),
        ("", "expected a regular file, got a directory: write the kernel to a .cu file"),
        ("pipe.cu", "expected a regular file, got a pipe or a device"),
        ("binary.cu", "expected UTF-8, byte 0 is not"),
        ("large.cu", "more than 1,048,576 bytes"),
        ("powershell.cu", "expected UTF-8, got UTF-16: save the file as UTF-8"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            read(tmp_path / name)


# Its arguments


def test_arguments_are_matched_by_name_or_in_order(tmp_path: Path) -> None:
    assert add(tmp_path).names == ("a", "b", "y", "n")
    text = ADD.replace(
        "a, const float* b, float* y, int n", "p, const float* q, float* o, size_t m"
    )
    source = read(written(tmp_path, text))
    with pytest.raises(InputError, match="add has no argument 'p': expected a, b, y, n; or name"):
        matched(source, find("add"), ("float32", "KN"))
    kernel = matched(source, find("add"), ("float32", "KN"), "a, b, out, n")
    assert kernel.names == ("a", "b", "y", "n")
    with pytest.raises(InputError, match=r"args a,b: my\.cu:2: my_add has 4 parameters, not 2"):
        matched(source, find("add"), ("float32", "KN"), "a,b")


@pytest.mark.parametrize(
    ("prototype", "said", "line"),
    [
        ("const float* a, const float* b, float* y, int nn", r"'nn' \(did you mean n\?\)", 5),
        ("const float* A, const float* b, float* y, int n", r"'A' \(did you mean a\?\)", 2),
        (
            "const double* a, const float* b, float* y, int n",
            r"double\* a: expected const float\* a",
            2,
        ),
        ("const float a, const float* b, float* y, int n", r"float a: expected const float\* a", 2),
        (
            "const float* a, const float* b, float* y, float n",
            "float n: expected int n or long long n",
            5,
        ),
        (
            "const float* a, const float* b, const float* y, int n",
            "y is const, but the kernel must",
            4,
        ),
        ("const float* a, const float* b, int n", "has no parameter y, the result", 2),
        ("", "has no parameter y, the result", 2),
        ("float*", "no argument", 2),
        ("void", "no argument", 2),
    ],
)
def test_a_prototype_that_does_not_match_is_refused(
    tmp_path: Path, prototype: str, said: str, line: int
) -> None:
    lines = prototype.replace(", ", ",  // b, n\n")  # a parameter a line
    text = f'// launch: grid=n\nextern "C" __global__ void k({lines}) {{ }}\n'
    source = read(written(tmp_path, text))
    with pytest.raises(InputError, match=rf"my\.cu:{line}: k.*{said}"):
        matched(source, find("add"), ("float32", "KN"))


OLD = """extern "C" __global__ void k(const float* a, const float* b, float* y, int n) {
    for (int i = threadIdx.x; i < n; i += 32) y[i] = a[i] + b[i];
}
"""
NEW = """// launch: grid=ceil(n / block) block=256
extern "C" __global__ void k(const float* a, const float* b, float* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a[i] + b[i];
}
"""


@on_emulator
@pytest.mark.parametrize(
    "text",
    [
        f"// launch: grid=1 block=32\n/* first attempt:\n{OLD}*/\n{NEW}",
        f"{OLD.partition('{')[0].rstrip()};\n{NEW}",
        f"#if 0\n// launch: grid=1 block=32\n{OLD}#else\n{NEW}#endif\n",
        NEW.replace("const float* b", "const float b[]").replace("int n)", "int n = 5)"),
        "typedef float real; using R = real;\n"
        + NEW.replace("float", "R").replace("* y", "* const y").replace("int n", "size_t n"),
    ],
)
def test_a_kernel_beside_its_older_forms(tmp_path: Path, text: str) -> None:
    """The launch line above the definition counts, and each form of a parameter is read."""
    source = read(written(tmp_path, text))
    assert source.launch.block == "256"
    assert source.line(source.number).startswith('extern "C" __global__ void k(')
    assert_right(matched(source, find("add"), ("float32", "KN")))


def test_eps_is_a_number_and_t_the_dtype(tmp_path: Path) -> None:
    text = template(find("rmsnorm")).replace("float eps", "int eps")
    with pytest.raises(InputError, match="int eps: expected float"):
        matched(read(written(tmp_path, text)), find("rmsnorm"), ("float16", "KN"))
    plain = template(find("rmsnorm")).replace("const T* x", "const float* x")
    with pytest.raises(InputError, match=r"expected const T\* x \(float16: dtype chooses"):
        matched(read(written(tmp_path, plain)), find("rmsnorm"), ("float16", "KN"))
    with pytest.raises(InputError, match="dtype float8_e5m2"):
        matched(read(written(tmp_path, plain)), find("gemm"), ("float8_e5m2", "NK"))


def test_every_operation_is_known() -> None:
    assert all(operation.cases for operation in OPERATIONS.values())
    built_in = {"encoder_rows", "attention_cached", "rope_qkv"}
    assert set(names()) == set(OPERATIONS) - built_in == set(FURTHER)
    assert {*SPECIAL, *POWERS} <= set(names())
    with pytest.raises(InputError, match="rope_qkv supports no user's kernel"):
        check_known(find("rope_qkv"))


def test_the_fields_of_an_object_are_numbers(tmp_path: Path) -> None:
    """A seed of 2^31 or more needs a 64-bit type; labels name fields that are not default."""
    operation = find("sample_token")
    kernel = matched(read(HERE / "sample_token.cu"), operation, ("float32", "KN"))
    assert cases(kernel)[1].label == "B=3, V=33 (temperature 1.5, top_k 5, seed 2)"
    text = template(operation).replace("long long seed, int sample", "int seed, int sample")
    for seed in (2**31, 2**32):
        attrs = {**operation.workload.attrs, "sampling": Sampling(1.0, seed=seed)}
        with pytest.raises(InputError, match="int seed: expected long long seed"):
            matched(
                read(written(tmp_path, text)),
                operation.with_workload(attrs=attrs),
                ("float32", "KN"),
            )


def test_a_sampled_token_does_not_depend_on_rounding() -> None:
    """u is far from the bounds of the token's interval, so float32 sums give the same token."""
    kernel = matched(read(HERE / "sample_token.cu"), find("sample_token"), ("float32", "KN"))
    for case in cases(kernel):
        sampling, (logits,) = case.attrs["sampling"], case.inputs
        u = random_bits(sampling.seed, case.attrs["step"], sampling.sample) / 2**64
        for row, token in zip(logits, case.truths["token"], strict=True):
            p = probabilities(row, sampling)
            before, after = p[:token].sum(), p[token + 1 :].sum()
            assert before == 0 or u - before > 0.0009
            assert after == 0 or 1 - after - u > 0.0009


def test_first_rungs_name_arguments_that_are_known() -> None:
    """Users can copy the prototype of an operation's first kernel, except for scratch arrays."""
    for name in ("layernorm", "trimat", "encoder", "softmax", "matmul_bias", "add", "gelu"):
        operation = find(name)
        first = operation.variants[0]
        sizes, attrs = operation.cases[0]
        options = {**operation.workload.attrs, **attrs}
        host, _ = workload.inputs_and_truth(operation, sizes)
        found = values(operation, host, options)
        known = {*found.inputs, *found.outputs, *found.numbers, *found.aliases}
        signature = kernels.signatures(first.file)[first.kernels[0]]
        assert {p.name for p in signature.parameters} <= known


# On the emulator


def special_cases(name: str) -> int:
    return 3 * len(SPECIAL.get(name, ())) + (name in POWERS)


def test_every_ladder_has_a_template() -> None:
    ladders = {name for name, operation in OPERATIONS.items() if len(operation.variants) > 1}
    assert ladders <= set(names())


@on_emulator
@pytest.mark.usefixtures("fewer_runs")
@pytest.mark.parametrize("name", [
    slow(name) if name in ("attention", "sample_token") else name for name in names()
])  # fmt: skip
def test_a_template_is_right(name: str) -> None:
    operation = find(name)
    kernel = matched(read(HERE / f"{name}.cu"), operation, workload.check_storage(operation))
    fidelity, *found = on_cpu.check_kernel(kernel, cases(kernel))
    assert isinstance(fidelity, str)
    count = len(operation.cases) + len(FURTHER[name]) + special_cases(name) + 1 + sizes.RANDOM
    longer = name == "blocks_matmul"  # its rows are longer than the numbers of the file
    assert [type(each) for each in found] == [Checked] * (count + longer)
    for each in found:
        assert isinstance(each, Checked)
        assert each.max_rel <= each.bound
        assert each.bound < workload.tolerance(kernel.dtype) or each.inputs or "V" in each.sizes
    for made in cases(kernel):
        own = operation.with_workload(attrs=made.attrs)
        assert sizes_at(own, made.sizes) == values(own, made.inputs, made.attrs).sizes


@on_emulator
def test_launches_of_few_instructions_run_in_every_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches of many instructions, and special inputs, run once."""
    ran: dict[str, list[EmulatedRun]] = {}

    def run(_: Any, case: Case, each: EmulatedRun) -> on_cpu._Ran:
        ran.setdefault(case.label, []).append(each)
        checked = Checked(case.sizes, ((1,), (1,), 0), 0.0, 0.0, 1.0)
        return on_cpu._Ran(checked, (), on_cpu.MAX_AGAIN if "C=772" in case.label else 1)

    monkeypatch.setattr(on_cpu._Judge, "_run", run)
    file = written(tmp_path, template(find("gelu")))
    kernel = matched(read(file), find("gelu"), ("float32", "KN"))
    _, *found = on_cpu.check_kernel(kernel, cases(kernel))
    assert len(found) == len(ran) > len(FURTHER["gelu"]) + 2
    for case in cases(kernel):
        once = case.once or "C=772" in case.label
        runs = on_cpu.RUNS[: 1 if once else None]
        assert ran[case.label] == [
            each._replace(variant=each.variant + case.variant) for each in runs
        ]
    variants = [each.variant for runs in ran.values() for each in runs]
    assert len(variants) == len(set(variants))


def problem(kernel: Kernel) -> Finding:
    *_, last = on_cpu.check_kernel(kernel, cases(kernel))
    assert isinstance(last, Finding)
    return last


def assert_right(kernel: Kernel) -> None:
    """Assert that a kernel is judged right at its operation's small sizes."""
    small = [case for case in cases(kernel) if not case.hint]
    _, *found = on_cpu.check_kernel(kernel, small)
    assert found
    assert all(isinstance(each, Checked) for each in found)


def one_of(folder: Path, bodies: Sequence[str], index: int) -> tuple[Kernel, int]:
    """Return kernel `index` of a file with all bodies (one program), and its line offset."""
    texts = [ADD.replace("my_add", f"my_add{i}").replace("BODY", b) for i, b in enumerate(bodies)]
    source = read(written(folder, "".join(texts)), f"my_add{index}")
    kernel = matched(source, find("add"), ("float32", "KN"))
    return kernel, "".join(texts[:index]).count("\n")


WRONG: list[tuple[str, str, tuple[int, ...]]] = [  # body, report, lines of the kernel
    ("y[i] = a[i] + b[i];", "reads out of bounds: byte 20 of a, which has 20 bytes", (4,)),
    ("if (i < n + 1) y[i] = 1.0f;", "writes out of bounds: byte 20 of y", (4,)),
    ("if (i < n) y[i] = a[i] - b[i];", "5 of 5 elements of y are wrong: y[0, 0] is", ()),
    ("if (i < n - 1) y[i] = a[i] + b[i];", "1 of 5 elements of y are wrong: they are NaN", ()),
    (RIGHT + " if (i < n) ((float*)a)[i] = 0;", "the kernel changes its input a", ()),
    ("if (i) return;\n    __syncthreads();\n", "divergent barrier: thread (0, 0, 0) waits", (5, 7)),
    ("y[0] = i;", "race: thread (1, 0, 0) writes y[0] at my.cu:{4}", (4,)),
    ("y[i % n] = (i + 7) / (n - 5);", "an integer is divided by zero", (4,)),
    ("*(float*)(4096LL * n) = 1;", "writes 4 bytes at an address that belongs to no argu", (4,)),
    ("((void (*)(int))8)(n);", "a pointer to a function has another value", (4,)),
    (
        "__shared__ int at;\n    if (i % 64 == 0) at = 0;\n    __syncthreads();\n    "
        "if (i < n) y[i] = a[i - threadIdx.x + atomicAdd(&at, 1)] + b[i];",
        "order, and the result is right if they run one after the other from the first",
        (),
    ),
    ("__shared__ float s[2];\n    s[i] = 0;", "writes out of bounds: byte 8 of s", (5,)),
    (
        "if (i >= n - 4) return;\n    const float4 v = reinterpret_cast<const float4*>(a + 1)[i];\n"
        "    y[i] = v.x + v.y + v.z + v.w;",
        "misaligned access: the address of 16 bytes must be divisible by 16: reads byte 4 of a",
        (5,),
    ),
    ("while (n) {\n        y[i % n] += b[0];\n    }", "race: ", (5,)),
    ("while (i == 0)\n        __syncwarp(1);", "still runs after 20,000 instructions", (4, 5)),
    ("while (n)\n        __syncthreads();", "still runs after 20,000 instructions", (4, 5)),
    ("if (i == 0) for (short j = 0; j < n; ++j) y[j] = a[j] + b[j];",
     "1 of 68,441 elements of y are wrong: they are NaN", ()),
    ("assert(n < 0);", "assertion fails: n < 0", (4,)),
    ("if (i == 3)\n        __trap();", "the kernel calls __trap()", (5,)),
    ("if (i < n) y[i] = fmaxf(y[i], a[i] + b[i]);", "right if the output holds NaN before", ()),
    ("if (i < n) y[i] = fminf(y[i], a[i] + b[i]);", "right if the output holds NaN before", ()),
    ("float s[2];\n    s[i % 2] = 0;\n    if (i < n) y[i] = a[i] + b[i] + s[1 - i % 2];",
     "reads the local variable s, which nothing has written", (6,)),
]  # fmt: skip


@on_emulator
@pytest.mark.parametrize("index", range(len(WRONG)))
def test_what_is_wrong_is_said_with_its_line(
    tmp_path: Path, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_cpu, "BUDGET", 20_000)
    _, said, lines = WRONG[index]
    kernel, before = one_of(tmp_path, [body for body, *_ in WRONG], index)
    found = problem(kernel)
    assert said.replace("{4}", str(before + 4)) in found.text
    expected = [before + line for line in lines]
    if "still runs" in said:
        assert set(found.lines) <= set(expected)
        assert len(found.lines) == 1
    else:
        assert list(found.lines) == expected


@on_emulator
@pytest.mark.parametrize(
    ("body", "said", "lines"),
    [
        ("if (i < n) y[i] = undefined;", 'compile:\nmy.cu:4: identifier "undefined" is', (4,)),
        ("if (i < n) {", "does not compile: a brace is missing", ()),
        ("if (i < n) y[i] = a[i]", 'does not compile:\nmy.cu:5: expected a ";"', (4, 5)),
        ("__device__ float f(float4);\n    y[i] = f({a[i]});", "no function f of the file", (4, 5)),
        ("void* (*f)(size_t) = malloc;\n    y[i] = (size_t)f;", "of function 'malloc'", (4,)),
    ],
)  # fmt: skip
def test_what_does_not_compile_is_said_with_its_line(
    tmp_path: Path, body: str, said: str, lines: tuple[int, ...]
) -> None:
    found = problem(add(tmp_path, body))
    assert said in found.text
    assert found.lines == lines


MISTAKES = [  # operation, code of its template, the mistake, the report
    ("matmul_bias", "A[(long long)m * K + k]", "A[k * M + m]", "indexes of A, of shape (17, 40)"),
    ("trimat", "* T + i) * T + j]", "* T + j) * T + i]", "right if two indexes of out, of shape"),
    (
        "encoder",
        "ids[row]",
        "ids[row % T * (rows / T) + row / T]",
        "right if two indexes of ids, of shape (2, 33)",
    ),
    ("gelu", "0.044715f", "0.04471f", "elements of x are wrong: x[0, "),
    ("linear", "n >= N", "n >= (K % 8 ? N : N & ~7)", "45 of 549 elements of out are wrong"),
    ("matmul_bias", "k < K;", "k < (N % 8 ? K : K & ~7);", "elements of C are wrong"),
    ("layernorm", "mean += x_row[c]", "mean += c < 6144 ? x_row[c] : 0", "out are wrong: out[0, 0"),
    ("softmax", "expf(x", "logf(x", "error: NaN or infinity: look for a division by 0"),
    ("qk_norm", "head < n_head ? gamma_q : gamma_k", "gamma_q", "elements of out are wrong"),
    ("qk_norm", "D + eps)", "D)", "fragile: right for ordinary inputs, wrong for these (zeros)"),
    ("qk_norm", "D + eps)", "D + eps + 1e-5f)", "wrong for these (mean square near eps)"),
    ("rope", "start + t", "t", "149 of 150 elements of out are wrong"),
    ("rope", "const double angle =", "const float angle =", "wrong for these (positions from 100"),
    ("sample_token", "top_p * sum", "top_p", "elements of token are wrong"),
    ("sample_token", "token[row] = chosen;", "", "-1, the first is token[0]: never written"),
    ("sample_token", "(chosen < 0", "(temperature == 0 || chosen < 0", "(equal largest logits)"),
    ("add", "i < n", "i < n && a < y", "the clock or the addresses of arrays"),
    ("add", "i < n", "i < n && (size_t)y % 256 == 0", "the clock or the addresses of arrays"),
    ("gelu", "i >= n", "i >= n || (size_t)x >> 36 != 4", "the clock or the addresses of arrays"),
    ("add", "= a[i]", "= llrint(a[i] * 0x1p40) * 0x1p-40", "wrong for these (other magnitudes)"),
    ("layernorm", "mean += x_row[c]", "mean += llrint(x_row[c] * 0x1p40) * 0x1p-40", "integers"),
]


@on_emulator
@pytest.mark.usefixtures("fewer_runs")
@pytest.mark.parametrize(("name", "old", "new", "said"), MISTAKES)
def test_a_mistake_in_a_template_is_found(
    tmp_path: Path, name: str, old: str, new: str, said: str
) -> None:
    text = template(find(name))
    assert old in text
    source = read(written(tmp_path, text.replace(old, new)))
    found = problem(matched(source, find(name), workload.check_storage(find(name))))
    assert said in found.text
    assert ("largest error" in found.text) == (
        name != "sample_token"
    )  # tokens are compared exactly


@on_emulator
def test_what_a_kernel_prints_is_kept(tmp_path: Path) -> None:
    text = 'if (i < 2) printf("thread %d of %d\\n", i, n);\n    '
    bodies = [text + RIGHT, text + "if (i < n) y[i] = 0;", text + "y[n] = 0;"]
    bodies.append('for (int k = 0; i == 0 && k < 999; ++k) printf("%0999d\\n", n);\n    ' + RIGHT)
    right, wrong, outside, much = (one_of(tmp_path, bodies, i)[0] for i in range(4))
    _, first, *_ = on_cpu.check_kernel(right, cases(right))
    assert isinstance(first, Checked)
    assert first.printed == "thread 0 of 5\nthread 1 of 5\n"
    assert problem(wrong).printed == first.printed
    assert problem(outside).printed == first.printed
    _, first, *_ = on_cpu.check_kernel(much, cases(much)[:1])
    assert isinstance(first, Checked)
    assert len(first.printed) == 2**16


@on_emulator
@pytest.mark.parametrize(
    ("begin", "value", "said", "line"),
    [
        ("#include <vector>\n", "a[i]", "Kernels have no C++ library", 1),
        ("#include <iostream>\n", "a[i]", "for std::cout printf", 1),
        ("template <typename T>\n__device__ T f(T a) { return a.x; }\n", "f(a[i])", "class", 2),
    ],
)
def test_an_error_in_a_header_or_template_has_the_line(
    tmp_path: Path, begin: str, value: str, said: str, line: int
) -> None:
    text = begin + ADD.replace("BODY", f"if (i < n) y[i] = {value};")
    found = problem(matched(read(written(tmp_path, text)), find("add"), ("float32", "KN")))
    assert found.text.startswith(f"my.cu does not compile:\nmy.cu:{line}: ")
    assert said in found.text
    assert found.lines == (line,)


@on_emulator
def test_a_missing_header_of_cuda_is_no_mistake(tmp_path: Path) -> None:
    text = "#include <curand_of_tomorrow.h>\n" + ADD.replace("BODY", RIGHT)
    kernel = matched(read(written(tmp_path, text)), find("add"), ("float32", "KN"))
    with pytest.raises(NotJudged, match=r"my\.cu: not judged: .* curand_of_tomorrow\.h is not"):
        problem(kernel)


@on_emulator
def test_dynamic_shared_memory(tmp_path: Path) -> None:
    """Each thread passes its sum through shared memory, which may be too small."""
    body = (
        "extern __shared__ float s[];\n    s[threadIdx.x] = i < n ? a[i] + b[i] : 0;\n"
        "    __syncthreads();\n    if (i < n) y[i] = s[threadIdx.x];"
    )
    assert_right(add(tmp_path, body, shared="4 * block"))
    found = problem(add(tmp_path, body, shared="4 * 63"))
    assert (found.text, found.lines) == ("writes out of bounds: byte 252 of s", (5,))


EARLY = [  # type of a's pointer, code before the wait, the report
    ("const float* __restrict__", "const float first = a[0];", ""),
    ("const float*", "const float first = a[0];", "reads before wait_for_previous(): byte 0 of a,"),
    ("const float*", "y[0] = 1.0f;", "writes before wait_for_previous(): byte 0 of y,"),
    ("const float*", "if (n > 2) return;", "no thread of the block waits for the previous"),
]


@on_emulator
@pytest.mark.parametrize("index", range(len(EARLY)))
def test_a_kernel_of_overlapping_launches_waits_first(tmp_path: Path, index: int) -> None:
    text = '#include "lib/overlap.cuh"\n'
    for i, (pointer, before, _) in enumerate(EARLY):
        right = RIGHT.replace("a[i] +", "a[i] + first - a[0] +") if "first" in before else RIGHT
        body = f"{before}\n    let_next_start();\n    wait_for_previous();\n    {right}"
        own = ADD.replace("const float* a", f"{pointer} a").replace("BODY", body)
        text += own.replace("my_add", f"my_add{i}")
    source = read(written(tmp_path, text), f"my_add{index}")
    kernel = matched(source, find("add"), ("float32", "KN"))
    said = EARLY[index][2]
    if said:
        found = problem(kernel)
        assert said in found.text
        assert found.lines == (1 + 8 * index + (8 if index == 3 else 4),)
    else:
        assert_right(kernel)


@on_emulator
def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    assert "are wrong: y[0" in problem(add(tmp_path, "if (i < n) y[i] = 0.0f;")).text
    assert_right(add(tmp_path))


@on_emulator
def test_letters_beyond_ascii_and_a_path_with_spaces(tmp_path: Path) -> None:
    folder = tmp_path / "my kernels é"
    folder.mkdir()
    assert_right(add(folder, f"// γ · x\n    {RIGHT}"))
    assert problem(add(folder, "// γ\n    y[n] = 0;")).lines == (5,)


@on_emulator
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"block": "2048"}, "block 2048: 2048 threads: at most 1024"),
        ({"block": "0"}, r"block 0 is \(0,\) at n=5: expected one to three"),
        ({"grid": "1,1,1,1"}, "grid 1,1,1,1 is"),
        ({"grid": "1, 65536"}, r"grid 1, 65536 is \(1, 65536\)"),
        ({"grid": "m"}, "grid: 'm': unknown name m: expected one of n, block"),
        (
            {"shared": "1000000"},
            "is 1,000,000 bytes at n=5: expected 0 to 166,912 for a b",
        ),
        ({"shared": "-1"}, "shared -1 is -1 bytes"),
    ],
)
def test_a_launch_that_no_device_has_is_refused(
    tmp_path: Path, options: dict[str, str], said: str
) -> None:
    kernel = add(tmp_path, **options)
    with pytest.raises(InputError, match=said):
        list(on_cpu.check_kernel(kernel, cases(kernel)))


@on_emulator
def test_a_variable_without_a_value_is_named(tmp_path: Path) -> None:
    body = "__shared__ float s[64];\n    if (i < n) y[i] = s[i] + a[i] + b[i];"
    found = problem(add(tmp_path, body))
    assert found.text == "reads s[0], which no thread has written"
    assert found.lines == (5,)


@on_emulator
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("grid=1 block=2048", "block=2048: 2048 threads: at most 1024"),
        ("grid=n // 9", r"grid=n // 9 is \(0,\) at n=5: expected one to three"),
        (
            "grid=ceil(n / blok)",
            "grid: 'ceil\\(n / blok\\)': unknown name blok: expected one of n, b",
        ),
        ("grid=n / block", "grid: 'n / block' is 5/256, no whole number: use ceil"),
        ("grid=1 shared=1000000", "shared=1000000 is 1,000,000 bytes"),
    ],
)
def test_a_wrong_launch_line_is_named_by_file_and_line(
    tmp_path: Path, line: str, said: str
) -> None:
    text = ADD.partition("\n")[2].replace("BODY", RIGHT)
    file = written(tmp_path, f"// Adds.\n// launch: {line}\n{text}")
    kernel = matched(read(file), find("add"), ("float32", "KN"))
    with pytest.raises(InputError, match=rf"^my\.cu:2: launch line: {said}"):
        list(on_cpu.check_kernel(kernel, cases(kernel)))


@on_emulator
def test_further_outputs_are_compared(tmp_path: Path) -> None:
    text = template(find("layernorm")).replace("float* out, ", "float* out, float* rstd,  ")
    text = text.replace("eps);\n", "eps);\n    FACTOR\n").replace(
        "const float rstd", "const float r"
    )
    text = text.replace("* rstd * gamma", "* r * gamma")
    for factor, right in (("rstd[row] = r;", True), ("rstd[row] = 2 * r;", False)):
        source = read(written(tmp_path, text.replace("FACTOR", factor)))
        kernel = matched(source, find("layernorm"), ("float32", "KN"))
        *_, last = on_cpu.check_kernel(kernel, cases(kernel))
        assert isinstance(last, Checked) == right
        if isinstance(last, Finding):
            assert "elements of rstd are wrong" in last.text
            assert last.max_rel is not None
            assert last.max_rel > 0.5  # the error of rstd, not of out


# The child process for GPUs, on the emulator


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use the emulator, with replays of 1 ms: one round over two copies of the inputs."""
    if problem := emulator.missing():
        pytest.skip(problem)
    monkeypatch.setattr(race, "MAX_SETS", 2)
    monkeypatch.setattr(variants, "MAX_LAUNCHES", 2)
    monkeypatch.setattr(timing, "CALLS", 1)
    monkeypatch.setattr(timing, "REPLAYS", 1)
    monkeypatch.setattr(ceilings, "measured", lambda names: BEST)
    with emulator.emulated():
        yield


def served(kernel: Kernel, variants: tuple[str, ...] = ()) -> list[Any]:
    """Return the messages that the child process sends, without stages."""
    sent: list[Any] = []
    stored = workload.check_storage(kernel.operation)
    sizes, _ = kernel.operation.cases[1]
    on_gpu.serve(sent.append, on_gpu.ChildJob(kernel, cases(kernel), variants, sizes, stored))
    return [each for each in sent if not isinstance(each, Stage)]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("name", "chosen"), [("gelu", ("gelu",))])
def test_the_race_has_the_chosen_variants_and_the_users(name: str, chosen: tuple[str]) -> None:
    operation = find(name)
    kernel = matched(read(HERE / f"{name}.cu"), operation, workload.check_storage(operation))
    *checked, raced = served(kernel, chosen)
    count = len(operation.cases) + len(FURTHER[name]) + special_cases(name) + 1 + sizes.RANDOM
    assert [type(each) for each in checked] == [Checked] * count
    assert [row.variant for row in raced.rows] == [*chosen, MINE]
    assert all(row.right for row in raced.rows)
    assert [row.call_us is None for row in raced.rows] == [
        row.variant == MINE for row in raced.rows
    ]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (RIGHT + " y[n] = 1;", "writes out of bounds: byte 20 of y, which has 20 bytes"),
        (RIGHT + " y[-3] = 1;", "writes out of bounds: byte -12 of y, which has 20 bytes"),
        ("if (i < n) y[i] = 1;", "of 5 elements of y are wrong"),
        ("if (i < n) y[i] = fmaxf(y[i], a[i] + b[i]);", "right if the output holds NaN before"),
    ],
)
def test_what_outputs_hold_finds_wrong_accesses(tmp_path: Path, body: str, said: str) -> None:
    (found,) = served(add(tmp_path, body))
    assert isinstance(found, Finding)
    assert said in found.text


@pytest.mark.usefixtures("emulated")
def test_a_size_that_no_launch_can_have_reaches_the_parent(tmp_path: Path) -> None:
    (error,) = served(add(tmp_path, grid="n - 5"))
    assert isinstance(error, InputError)
    assert "grid n - 5 is (0,) at n=5" in str(error)


def test_a_child_sends_what_it_finds() -> None:
    assert list(supervised(children.finishes, (3,), Stage("all", 60.0))) == [0, 1, 2]


def test_a_child_that_hangs_is_ended() -> None:
    begun = time.monotonic()
    found = list(supervised(children.hangs, (), Stage("the first stage", 60.0)))
    assert found == ["begun", ProcessExited(Stage("the second stage", 0.5), None)]
    assert time.monotonic() - begun < 60


def test_a_child_that_dies_is_noticed(tmp_path: Path) -> None:
    begun, end = supervised(children.dies, (), Stage("all", 60.0))
    assert (begun, end) == ("begun", ProcessExited(Stage("all", 60.0), 7))
    found = on_gpu._describe_exit(add(tmp_path), end)
    assert found == Finding("the process of the kernel ended with exit code 7", at="during all")


@pytest.mark.skipif(doctor.cuda_problem() is None, reason="there is a GPU")
def test_a_job_reaches_a_child_which_has_no_gpu(tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="the child imports CuPy")
    kernel = add(tmp_path)
    job = on_gpu.ChildJob(kernel, cases(kernel), ("add",), {"N": 1, "C": 5}, ("float32", "KN"))
    (found,) = on_gpu.run(job)
    assert isinstance(found, Finding)
    assert found.text == "the process of the kernel ended with exit code 1"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            "cudaErrorIllegalAddress: an illegal memory access was encountered",
            "out of bounds: --dev",
        ),
        ("CUDA_ERROR_MISALIGNED_ADDRESS: misaligned address", "a misaligned access"),
        ("cudaErrorLaunchFailure: unspecified launch failure", "unspecified launch failure"),
    ],
)
def test_errors_of_cuda_are_findings(error: str, said: str) -> None:
    found = on_gpu._describe_error(CUDARuntimeError(error), "n=5")
    assert said in found.text
    assert found.at == "at n=5"


def test_other_errors_are_not() -> None:
    with pytest.raises(TypeError, match="a bug"):
        on_gpu._describe_error(TypeError("a bug"), "n=5")


class CUDARuntimeError(RuntimeError):
    """An error with the name of CuPy's class."""


# NVRTC and listings


def test_errors_of_nvrtc_have_the_users_line(tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy")
    kernel = add(tmp_path, "// γ\n    y[i] = undefined;")
    with pytest.raises(KernelError) as error:
        compile_for(str(kernel.source.path), "sm_80")
    found = compiler_finding(kernel.source, str(error.value))
    assert found == Finding(
        'my.cu does not compile:\nmy.cu:5: identifier "undefined" is undefined', (5,)
    )


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda o: o.name)
def test_a_listing_has_the_kernels_of_its_variant_alone(operation: Any) -> None:
    for variant in operation.table:
        parts = listing(variant)
        text = "\n\n".join(text for _, text in parts)
        assert set(kernels.parse(text, "")) == set(variant.kernels)
        code = kernels.without_comments(text)
        assert code.count("{") == code.count("}")
        lines = kernels.read_source(variant.file).splitlines()
        for start, part in parts:
            assert part.splitlines() == lines[start - 1 : start - 1 + len(part.splitlines())]


def test_a_rung_has_a_name_or_a_place() -> None:
    layernorm, softmax = find("layernorm"), find("softmax")
    assert rung(layernorm, "3").name == "3"
    assert rung(layernorm, "skeleton").kernels[0] == "layernorm768_kernel"
    assert rung(softmax, "2").name == rung(softmax, "online_warp").name == "online_warp"
    for wrong in ("0", "5", "-1", "x", "²"):
        with pytest.raises(InputError, match=r"from 1 to 4, or one of three_pass, online_warp"):
            rung(softmax, wrong)


# On a GPU


@pytest.mark.gpu
def test_a_template_is_raced_on_the_gpu() -> None:
    operation = find("layernorm")
    stored = workload.check_storage(operation)
    kernel = matched(read(HERE / "layernorm.cu"), operation, stored)
    every = tuple(each.name for each in operation.variants)
    sizes = {"B": 2, "T": 128, "C": 768}
    *checked, raced = on_gpu.run(on_gpu.ChildJob(kernel, cases(kernel), every, sizes, stored))
    assert [type(each) for each in checked] == [Checked] * len(cases(kernel))
    assert isinstance(raced, BenchmarkResult)
    assert [row.variant for row in raced.rows] == [*every, MINE]
    assert all(row.right and row.gpu_us > 0 for row in raced.rows)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("while (n) y[0] += 1;", "my_add still runs after 5 s, and was ended"),
        ("y[1LL << 40] = 1;", "out of bounds: --device cpu shows the line"),
        (RIGHT + " y[n] = 1;", "writes out of bounds: byte 20 of y"),
        ("if (i < n) y[i] = undefined;", "my.cu:4: identifier"),
        ("if (i < n - 1) y[i] = a[i] + b[i];", "they are NaN"),
    ],
)
def test_the_process_survives_a_wrong_kernel_on_the_gpu(
    tmp_path: Path, body: str, said: str
) -> None:
    import cupy  # noqa: PLC0415

    kernel = add(tmp_path, body)
    stored = ("float32", "KN")
    sizes = {"N": 64, "C": 64}
    limit_s = 5.0 if "5 s" in said else on_gpu.CHECK_S  # CuPy may compile kernels of its own
    job = on_gpu.ChildJob(kernel, cases(kernel), ("add",), sizes, stored, check_s=limit_s)
    *_, last = on_gpu.run(job)
    assert isinstance(last, Finding)
    assert said in last.text
    assert int(cupy.arange(5).sum()) == 10
