"""Typical kernels of users, judged by `check_kernel`: right kernels pass, wrong ones do not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import gpt2block
from gpt2block import DeviceError, InputError, check_kernel
from gpt2block.judge import kernel_check
from gpt2block.judge.cases import Case, cases
from gpt2block.judge.kernel import matched
from gpt2block.judge.refused import ResourceUsage, too_many
from gpt2block.judge.solutions import HERE
from gpt2block.judge.source import read
from gpt2block.judge.templates import template
from gpt2block.ops.registry import find
from tests.devices import on_emulator, slow

pytestmark = [
    on_emulator,
    pytest.mark.usefixtures("fewer_runs"),
]

LAYERNORM = """// launch: grid=ceil(N / 64) block=64
extern "C" __global__ void ln(const float* x, const float* gamma, const float* beta, float* out,
                              float eps, int N, int C) {
    const int row = blockIdx.x * 64 + threadIdx.x;
    if (row >= N) return;
    x += (size_t)row * C;
    out += (size_t)row * C;
    float mean = 0, var = 0;
    VARIANCE
    const float rstd = RSTD;
    for (int c = 0; c < C; ++c) out[c] = (x[c] - mean) * rstd * gamma[c] + beta[c];
}
"""
TWO_PASS = """for (int c = 0; c < C; ++c) mean += x[c];
    mean /= C;
    for (int c = 0; c < C; ++c) var += (x[c] - mean) * (x[c] - mean);
    var /= C;"""
ONE_PASS = """for (int c = 0; c < C; ++c) mean += x[c], var += x[c] * x[c];
    mean /= C;
    var = var / C - mean * mean;"""
WELFORD = """for (int c = 0; c < C; ++c) {
        const float d = x[c] - mean;
        mean += d / (c + 1);
        var += d * (x[c] - mean);
    }
    var /= C;"""
SOFTMAX = """// launch: grid=ceil(rows / 64) block=64
extern "C" __global__ void sm(const float* x, float* y, int rows, int n) {
    const int row = blockIdx.x * 64 + threadIdx.x;
    if (row >= rows) return;
    x += (size_t)row * n;
    y += (size_t)row * n;
    float m = START, sum = 0;
    for (int i = 0; i < n; ++i) {
        const float larger = fmaxf(m, x[i]);
        sum = sum * expf(m - larger) + expf(x[i] - larger);
        m = larger;
    }
    for (int i = 0; i < n; ++i) y[i] = expf(x[i] - m) / sum;
}
"""
GELU = """FIRST// launch: grid=ceil(n / 256) block=256
extern "C" __global__ void g(float* x, int n) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i >= n) return;
    const float v = x[i], u = 0.7978845608f * (v + 0.044715f * v * v * v);
    BODY
}
"""
GELU_TANH = "x[i] = 0.5f * v * (1.0f + tanhf(u));"
LINEAR = """// launch: grid=ceil(N / 64), M block=64
extern "C" __global__ void lin(const float* x, const float* w, const float* bias, float* out,
                               int N, int K) {
    const int m = blockIdx.y, n = blockIdx.x * 64 + threadIdx.x;
    if (n >= N) return;
    float sum = bias[n];
    int k = 0;
    for (; k + 4 <= K; k += 4)
        for (int j = k; j < k + 4; ++j) sum += x[m * K + j] * w[n * K + j];
    TAIL
    out[m * N + n] = sum;
}
"""
ADD = """FIRST// launch: grid=ceil(n / 64) block=64
extern "C" __global__ void add(const float* a, const float* b, float* y, int n) {
    const int i = blockIdx.x * 64 + threadIdx.x;
    BODY
}
"""
ADD_RIGHT = "if (i < n) y[i] = a[i] + b[i];"


def layernorm(variance: str, rstd: str = "rsqrtf(var + eps)") -> str:
    return LAYERNORM.replace("VARIANCE", variance).replace("RSTD", rstd)


def gelu(body: str = GELU_TANH, first: str = "") -> str:
    return GELU.replace("BODY", body).replace("FIRST", first)


def add(body: str = ADD_RIGHT, first: str = "") -> str:
    return ADD.replace("BODY", body).replace("FIRST", first)


OF_HEADERS = """#include <algorithm>
#include <cfloat>
#include <cmath>
#include <math_constants.h>
#include <stdint.h>
#include "lib/common.cuh"
struct Max { float value; };
struct Sum { float value; };
"""
IN_C_BLOCK = (
    '/* no asm here */ extern "C" {\n__device__ float twice(float v) { return v + v; }\n'
    "// launch: grid=4 block=32\n__global__ void add(const float* __restrict a, const float* b,\n"
    "    float* y, unsigned long long n) {\n"
    "    for (unsigned long long i = blockIdx.x * 32 + threadIdx.x; i < n; i += 128)\n"
    "        y[i] = 0.5f * twice(a[i] + b[i]);\n}\n}\n"
)
RIGHT = {
    "a sum in a variable that no result needs": (
        "add",
        add(f"{ADD_RIGHT}\n    if (i == 0) atomicMax(&calls, n);", "__device__ int calls;\n"),
    ),
    "layernorm, Welford": ("layernorm", layernorm(WELFORD)),
    "softmax, online": ("softmax", SOFTMAX.replace("START", "-3.0e38f")),
    "linear with a tail": (
        "linear",
        LINEAR.replace("TAIL", "for (; k < K; ++k) sum += x[m * K + k] * w[n * K + k];"),
    ),
    "a block of C linkage": ("add", IN_C_BLOCK),
    "names of headers": (
        "add",
        add(
            "const uint32_t k = i;\n    if (k >= n || k > INT_MAX) return;\n"
            "    const Max top = {fminf(FLT_MAX, CUDART_INF_F)};\n"
            "    const Sum sum = {std::max(a[k] + b[k], -INFINITY)};\n"
            "    y[k] = std::min(sum.value, top.value) + (float)(sin(M_PI) < -1);",
            OF_HEADERS,
        ),
    ),
    "a byte order mark, asm in a string": (
        "gelu",
        gelu('if (v != v) printf("asm\\n");\n    ' + GELU_TANH, "\ufeff"),
    ),
    "constants that are read": (
        "gelu",
        gelu(GELU_TANH.replace("0.5f", "half[0]"), "__constant__ float half[2] = {0.5f, 1};\n"),
    ),
    "a counter that is set back": (
        "add",
        add(
            "if (threadIdx.x == 0 && atomicAdd(&done, 1) == gridDim.x - 1) done = 0;\n    "
            + ADD_RIGHT,
            "__device__ unsigned done;\n",
        ),
    ),
}
EXP = "x[i] = 0.5f * v * (1 + (expf(2 * u) - 1) / (expf(2 * u) + 1));"
WRONG: dict[str, tuple[str, str, str]] = {  # operation, source, expected message
    "E[x^2] - E[x]^2": ("layernorm", layernorm(ONE_PASS), "E[x^2] - E[x]^2 cancels"),
    "no eps": ("layernorm", layernorm(TWO_PASS, "rsqrtf(var)"), "of out are wrong"),
    "largest score from 0": ("softmax", SOFTMAX.replace("START", "0.0f"), "begin with -infinity"),
    "-inf - -inf": (
        "softmax",
        SOFTMAX.replace("START", "__int_as_float(0xff800000)"),
        "-inf - (-inf) is NaN",
    ),
    "inf / inf": ("gelu", gelu(EXP), "fragile: right for ordinary inputs"),
    "tanh of 11 bits": (
        "gelu",
        gelu('asm("tanh.approx.f32 %0, %1;" : "=f"(x[i]) : "f"(u)); x[i] = (x[i] + 1) * v / 2;'),
        "elements of x are wrong",
    ),
    "no tail of K": ("linear", LINEAR.replace("TAIL", ""), "at M=3, K=37, N=19"),
    "at most 64 blocks": (
        "add",
        add().replace("grid=ceil(n / block)", "grid=64").replace("ceil(n / 64)", "64"),
        "right at the sizes before",
    ),
    "one of two counters that is not set back": (
        "add",
        add(
            "__shared__ int before;\n    if (threadIdx.x == 0) before = atomicAdd(&calls, 1);\n"
            "    __syncthreads();\n    if (i < n) y[i] = a[i] + b[i] + (before >= gridDim.x);\n"
            "    if (threadIdx.x == 0 && atomicAdd(&done, 1) == gridDim.x - 1)\n"
            "        atomicExch(&calls, 0);",
            "__device__ int calls, done;\n",
        ),
        "reads done, which an earlier launch left changed",
    ),
    "a maximum with lanes outside the mask": (
        "softmax",
        SOFTMAX.replace(
            "    for (int i = 0; i < n; ++i) y",
            "    if (row < 8) m = fmaxf(m, __shfl_down_sync(0xff, m, 8));\n"
            "    for (int i = 0; i < n; ++i) y",
        ).replace("START", "-3.0e38f"),
        "are wrong",
    ),
    "results kept for the next launch": (
        "add",
        add(
            "if (i < n && !have[i]) kept[i] = a[i] + b[i], have[i] = true;\n"
            "    if (i < n) y[i] = kept[i];",
            "__device__ float kept[1 << 14];\n__device__ bool have[1 << 14];\n",
        ),
        "keep their values between launches",
    ),
    "a store to a constant": (
        "gelu",
        gelu("c[1] = v;\n    " + GELU_TANH, "__constant__ float c[2] = {1, 2};\n"),
        "stores to a __constant__ variable",
    ),
    "too much shared memory": (
        "gelu",
        gelu(
            "__shared__ float s[4][4096];\n    s[i % 4][threadIdx.x] = v;\n    "
            + GELU_TANH.replace("f * v", "f * s[i % 4][threadIdx.x]")
        ),
        "uses too much shared data (65,536 bytes, 49,152 max)",
    ),
    "too many constants": (
        "gelu",
        gelu(
            GELU_TANH.replace("0.5f", "c[n]"), "#define MOST 20000\n__constant__ float c[MOST];\n"
        ),
        "does not compile",
    ),
}

# Mistakes in the solutions of docs/learn: file, original text, mistake, expected message.
MISTAKES: dict[str, tuple[str, str, str, str]] = {
    "no last barrier": ("layernorm/2.2", "    __syncthreads();  // all threads have", "//", "race"),
    "a return before a barrier": ("layernorm/2.2", "    float sum = 0.0f;",
                                  "if (threadIdx.x >= C) return; float sum = 0;", "divergent"),
    "an offset of 16 bits": ("layernorm/2.2", "x + (long long)blockIdx.x * C",
                             "x + (unsigned short)(blockIdx.x * C)", "at B=1, T=65, C=1032"),
    "an output that is read": ("layernorm/2.2", "out_row[c] = (", "out_row[c] += (", "NaN or inf"),
    "vectors of any row": ("layernorm/3.1", "C % 4 == 0", "C >= 4", "misaligned access"),
    "vectors in pairs": ("layernorm/3.1", "n4 = C / 4;", "n4 = C / 8 * 2;", "at B=1, T=2, C=4100"),
    "rows that do not fit": ("layernorm/3.2", "C <= 4 *", "C <= 16 *", "at B=1, T=2, C=4100"),
    "a lane that returns": ("softmax/7.2", "(row >= rows)", "(row >= rows || lane >= n)", "diverg"),
    "a maximum from 0": ("softmax/7.2", "{-INFINITY, 0", "{0.0f, 0", "scores near -1024"),
    "a maximum of three": ("softmax/3.4", "fmaxf(held[k].z, held[k].w)", "held[k].z", "one large"),
    "no zeros after K": ("matmul_bias/4.1", "m < M && k + tx < K ?", "m < M ?", "out of bounds"),
    "an input of 16 bits": ("matmul_bias/5.2", "A[(long long)m * K + k + tx]",
                            "A[(unsigned short)(m * K + k + tx)]", "at M=65, K=1032, N=8"),
    "sums of vectors in pairs": ("linear/9.2", "k < K; k +=", "k < (K % 4 ? K : K & ~7); k +=",
                                 "at M=4, K=1036, N=76"),
    "a tail of 3": ("to_fp8/11.1", "first + 4 <= size", "first + 3 <= size", "out of bounds"),
    "no end of keys": ("attention/8.2", "first + key < T;", "true;", "out of bounds"),
    "memory that grows with T": ("attention/8.1", "shared=4 * T", "shared=4 * T * HS", "a GPU"),
    "sums of float16": ("trimat/6.2", "sum += a.hi * c.hi;",
                        "sum = hi_lo(sum + a.hi * c.hi).hi;", "are wrong"),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_passes(name: str) -> None:
    operation, source = RIGHT[name]
    found = check_kernel(operation, source, device="cpu")
    assert found.right, str(found)
    assert "Right in forward, reverse, shuffled and interleaved thread order." in str(found)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_does_not(name: str) -> None:
    operation, source, said = WRONG[name]
    found = check_kernel(operation, source, device="cpu")
    assert not found.right
    assert said in str(found)
    assert said in found.summary


ALIKE = {  # others have the same findings
    "rows that do not fit", "a lane that returns", "a maximum from 0", "no zeros after K",
    "an input of 16 bits", "sums of vectors in pairs", "no end of keys",
}  # fmt: skip


@pytest.mark.parametrize("name", [slow(name) if name in ALIKE else name for name in MISTAKES])
def test_a_mistake_in_a_right_kernel_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the case that the message names is run, because all cases take long."""

    def some(*given: Any) -> tuple[Case, ...]:
        every = cases(*given)
        return tuple(each for each in every if said.removeprefix("at ") in each.label) or every

    monkeypatch.setattr(kernel_check, "cases", some)
    file, text, mistake, said = MISTAKES[name]
    right = (HERE / f"{file}.cu").read_text("ascii")
    assert text in right
    found = check_kernel(file.split("/")[0], right.replace(text, mistake, 1), device="cpu").problem
    assert found
    assert said in f"{found.text} {found.at}"


def test_a_kernel_for_some_sizes_is_checked_at_one() -> None:
    source = LINEAR.replace("TAIL", "")
    found = check_kernel("linear", source, shape={"K": 64, "N": 24}, device="cpu")
    assert found.right
    assert [row.sizes for row in found.checks] == [{"M": 17, "K": 64, "N": 24}] * 2
    with pytest.raises(InputError, match="linear has no size C"):
        check_kernel("linear", source, shape={"C": 64}, device="cpu")


def test_a_wrong_result_has_its_error_and_the_bound() -> None:
    found = check_kernel("add", add("if (i < n) y[i] = a[i] - b[i];"), device="cpu").problem
    assert found
    assert found.max_abs is not None
    assert found.max_rel is not None
    assert found.bound is not None
    assert found.max_rel > found.bound == 2.0**-23
    assert f"largest error {found.max_abs:.1e}" in found.text


@pytest.mark.parametrize(
    ("bounds", "block", "said"),
    [("__launch_bounds__(MOST)", "256", "allows 128"), ("", "2048", "at most 1024")],
)
def test_a_block_that_no_launch_can_have(bounds: str, block: str, said: str) -> None:
    source = gelu(first="#define MOST (4 * 32)\n").replace("void g", f"void {bounds} g")
    with pytest.raises(InputError, match=f"^block {block}: {block} threads: .*{said}"):
        check_kernel("gelu", source, block=block, device="cpu")


def test_registers_and_shared_memory_limit_the_block(tmp_path: Path) -> None:
    file = tmp_path / "my.cu"
    file.write_text(gelu(), encoding="utf-8")
    kernel = matched(read(file), find("gelu"), ("float32", "KN"))
    assert too_many(kernel, ResourceUsage(64, 100), ((1,), (1024,), 900), 1000) is None
    found = too_many(kernel, ResourceUsage(65), ((1,), (1000,), 0), 1000)
    assert found
    assert found.text.startswith("g takes 65 registers per thread: a block of 1000 has 64 for each")
    assert found.lines == (2,)
    found = too_many(kernel, ResourceUsage(64, 101), ((1,), (32, 32), 900), 1000)
    assert found
    assert "101 bytes of shared variables and 900 of extern __shared__ memory" in found.text


def test_the_result_is_shown_as_text_and_in_a_notebook(tmp_path: Path) -> None:
    file = tmp_path / "<my>.cu"
    file.write_text(template(find("gelu")), encoding="utf-8")
    found = check_kernel("gelu", file, device="cpu")
    assert (found.right, found.device, found.problem, found.printed) == (True, "cpu", None, "")
    title = "gelu: my_gelu of <my>.cu, on the CPU, by an emulator of CUDA"
    assert str(found).startswith(title)
    assert "N=7 C=33, large values" in str(found)
    html = found._repr_html_()
    assert "&lt;my&gt;.cu" in html
    assert html.count("<tr>") == 1 + len(found.checks) == 14
    wrong = check_kernel("gelu", gelu(EXP), device="cpu")
    assert "color: #c62828" in wrong._repr_html_()
    assert wrong.problem
    assert wrong.problem.kind == "fragile"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nope", "x"), "unknown operation 'nope'"),
        (("add", 3), "source: expected the text of a .cu file or its path, got 3"),
        (("add", "nope.cu"), "source nope.cu: no such file"),
        (("add", "int x;\n"), "no kernel: expected extern"),
        (
            ("add", add(first="int main() { }\n")),
            "my.cu: gpt2block allocates the arrays and launches",
        ),
        (
            ("add", template(find("gelu")).replace("float* x", "float* q")),
            "name the argument of each",
        ),
    ],
)
def test_what_cannot_be_checked_is_an_error(arguments: tuple[Any, Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        check_kernel(*arguments, device="cpu")
    assert said in str(error.value)
    assert "--a" not in str(error.value)


@pytest.mark.parametrize(
    ("first", "body", "said"),
    [
        ("", 'asm("{.reg .u32 u; mov.u32 u, 1; vadd.u32.u32.u32 u, u, u;}");',
         ":4: .* execute vadd.u32.u32.u32"),
        ("", "int* p = (int*)malloc(4);\n *p = i; y[i] = *p;", ":4: .* of malloc: .* no heap"),
        ("", "int* p = new int[i];\n *p = i; y[i] = *p;", ":4: .* of malloc: .* no heap"),
        ("struct P { __device__ virtual ~P() {} };\n", 'P p, *q = &p; asm("" : "+l"(q)); delete q;',
         ":3: .* of free: .* no heap"),  # a destructor has no line
        ('extern "C" __device__ int cudaGraphLaunch();\n', "cudaGraphLaunch();", ":5: .*launches"),
        ('extern "C" __device__ int vprintf(int);\n', "vprintf(1);", ":5: .* it knows no such"),
    ],
)  # fmt: skip
def test_what_the_emulator_cannot_run_is_not_judged(first: str, body: str, said: str) -> None:
    found = check_kernel("add", add(body + ADD_RIGHT, first), device="cpu")
    assert (found.verdict, found.right, found.findings) == ("not judged", False, ())
    assert re.match(f"my.cu{said}", found.reason or "")
    assert str(found).endswith(f"Not judged: {found.reason}")


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt2block.cuda.doctor, "cuda_problem", lambda: "no driver today")
    assert check_kernel("add", add()).device == "cpu"
    with pytest.raises(DeviceError, match="device 'cuda': no driver today"):
        check_kernel("add", add(), device="cuda")
    with pytest.raises(InputError, match="device: expected 'cpu', 'cuda' or None, got 'tpu'"):
        check_kernel("add", add(), device="tpu")
