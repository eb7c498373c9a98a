"""The verdict on a user's kernel: kinds of findings, JSON and its schema, hints and messages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpt2block import InputError, Verdict, check_kernel, emulator, mine
from gpt2block.bench import Ceilings, Measurement
from gpt2block.mine.comparison import BenchmarkResult, Checked
from gpt2block.mine.finding import KINDS, Finding
from gpt2block.mine.kernel import Kernel, matched
from gpt2block.mine.source import read
from gpt2block.ops.registry import find
from tests.command_line import gpt2block

ROOT = Path(__file__).parent.parent
SCHEMA = json.loads((ROOT / "docs" / "verdict.schema.json").read_text(encoding="utf-8"))
STORED = ROOT / "tests" / "data" / "verdicts_of_schema_1.json"
on_emulator = pytest.mark.skipif(
    emulator.missing() is not None, reason=f"no CUDA on the CPU: {emulator.missing()}"
)
SHAPE = {"N": 3, "C": 20}
ADD = """// launch: grid=ceil(n / 64) block=64 shared=512
extern "C" __global__ void NAME(const float* a, const float* b, float* y, int n) {
    const int i = blockIdx.x * 64 + threadIdx.x;
    BODY
}
"""
RIGHT = "if (i < n) y[i] = a[i] + b[i];"
FIRST, SECOND = "thread (0, 0, 0)", "thread (1, 0, 0)"
FOUND: dict[str, tuple[str, tuple[int, ...], tuple[str, ...]]] = {  # body, lines, threads
    "out_of_bounds": ("y[i] = a[i] + b[i];", (4,), ("thread (60, 0, 0)",)),
    "race": ("y[0] = i;", (4,), (SECOND, FIRST)),
    "divergent_barrier": ("if (i) return;\n    __syncthreads();", (5, 6), (FIRST, SECOND)),
    "wrong_result": ("if (i < n) y[i] = a[i] - b[i];", (), ()),
    "changed_input": (RIGHT + " if (i < n) ((float*)a)[i] = 0;", (), ()),
    "assertion": ("assert(n < 0);", (4,), (FIRST,)),
    "uninitialized": ("if (i < n) y[i] = fmaxf(y[i], a[i] + b[i]);", (), ()),
    "misaligned": (
        "const float4 v = ((const float4*)(a + 1))[i % 9];\n    y[i % n] = v.x + v.y + v.z + v.w;",
        (4,),
        (FIRST,),
    ),
    "": (f'if (i == 0) printf("%d\\n", n);\n    {RIGHT}', (), ()),
}
TEXTS = {  # texts of findings that take long to reproduce, or need a GPU
    "k does not end: thread (0, 0, 0) still runs after 100 instructions": "does_not_end",
    "my_add still runs after 20 s, and was ended: --device cpu shows the line": "does_not_end",
    "block 2048: 2048 threads: at most 1024": "launch",
    "my.cu:2: launch line: block=2048: 2048 threads: at most 1024": "launch",
    "k takes 65 registers per thread: a block of 1000 has 64 for each": "launch",
    "k has 101 bytes of shared variables and 900 of extern __shared__ memory": "launch",
    "my.cu does not compile: a brace is missing": "does_not_compile",
    "reads before wait_for_previous(): byte 0 of a": "early_access",
    "no thread of the block waits for the previous kernel": "early_access",
    "writes 4 bytes at an address that belongs to no argument": "out_of_bounds",
    "reads or writes out of bounds: --device cpu shows the line": "out_of_bounds",
    "right in the first launch of a process, wrong in a later one": "kept_state",
    "reads calls, which an earlier launch left changed: ": "kept_state",
    "reads s[3], which no thread has written": "uninitialized",
    "fragile: right for ordinary inputs, wrong for these": "fragile",
    "assertion fails: race == 0": "assertion",
    "read-only load: thread (0, 0, 0) reads y[0] at my.cu:4": "read_only",
    "an integer is divided by zero": "other",
}


def file_of(folder: Path, bodies: dict[str, str]) -> Path:
    """Write a file with a kernel for each body, which is one program for the emulator."""
    file = folder / "my.cu"
    texts = (ADD.replace("NAME", f"k_{k}").replace("BODY", b) for k, b in bodies.items())
    file.write_text("".join(texts), encoding="utf-8")
    return file


def verdict(source: str, operation: str = "add", **options: Any) -> Verdict:
    """Return the verdict on a kernel with this body."""
    text = ADD.replace("NAME", "k").replace("BODY", source)
    return mine.check(text, operation, **{"shape": SHAPE, "device": "cpu", **options})


def validate(found: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="validation needs jsonschema")
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(json.dumps(found)))


@on_emulator
@pytest.mark.parametrize("kind", FOUND)
def test_a_finding_has_a_kind_lines_threads_and_sizes(kind: str, tmp_path: Path) -> None:
    file = file_of(tmp_path, {name: body for name, (body, *_) in FOUND.items()})
    _, lines, threads = FOUND[kind]
    found = mine.check(file, "add", kernel=f"k_{kind}", shape=SHAPE, device="cpu")
    text = file.read_text(encoding="utf-8")
    before = text[: text.index(f"k_{kind}(")].count("\n") - 1
    if kind:
        (finding,) = found.findings
        assert (finding.kind, finding.sizes) == (kind, SHAPE)
        assert finding.threads == threads
        assert finding.lines == tuple(before + line for line in lines)
        assert (finding.max_rel is None) == (kind not in ("wrong_result", "uninitialized"))
    assert found.verdict == ("wrong" if kind else "right")
    assert (found.printed, found.reason) == ("" if kind else "60\n", None)
    assert 0 < found.seconds < 600
    validate(found.as_dict())


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("", {}, "my.cu: no kernel: the source is empty"),
        ("my.cu", {"device": "tpu"}, "device: expected 'cpu', 'cuda' or None, got 'tpu'"),
        ("my.cu", {"girds": "1"}, "check: unknown keyword 'girds': did you mean 'grid'?"),
    ],
)
def test_a_call_that_cannot_be_judged_is_refused(
    source: str, options: dict[str, str], said: str
) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        check_kernel("add", source, **options)


@pytest.mark.parametrize("text", TEXTS)
def test_the_kind_of_a_text(text: str) -> None:
    assert Finding(text).kind == TEXTS[text]


def test_the_schema_lists_every_kind_and_key(tmp_path: Path) -> None:
    properties = SCHEMA["$defs"]["finding"]["properties"]
    assert properties["kind"]["enum"] == list(KINDS)
    assert set(TEXTS.values()) | set(FOUND) - {""} == set(KINDS)
    found = benchmarked(tmp_path, 1.0).as_dict()
    of_benchmark = SCHEMA["properties"]["benchmark"]["properties"]
    for part, described in (
        (found, SCHEMA),
        (found["findings"][0], SCHEMA["$defs"]["finding"]),
        (found["checks"][0], SCHEMA["$defs"]["check"]),
        (found["benchmark"]["rows"][0], of_benchmark["rows"]["items"]),
    ):
        assert (
            set(part)
            == set(described["properties"]) - {"why", "counters"}
            == set(described["required"])
        )
    validate(found)


def kernel_of(folder: Path) -> Kernel:
    return matched(read(file_of(folder, {"": RIGHT})), find("add"), ("float32", "KN"))


def benchmarked(folder: Path, error: float) -> Verdict:
    row = Measurement("add", "mine", None, SHAPE, 2.0, None, 4.0, "GB/s", 5.0, error, error)
    timed = BenchmarkResult([row], [], Ceilings(1.0, {}))
    checked = Checked(SHAPE, ((1,), (64,), 0), 0.0, 0.0, 1e-5)
    return Verdict.of(kernel_of(folder), "cuda", [checked, timed])


def test_a_result_that_is_wrong_when_it_is_timed_is_a_finding(tmp_path: Path) -> None:
    assert benchmarked(tmp_path, 0.0).right
    for error, said in ((0.5, "5.0e-01 of the largest value"), (float("nan"), "not finite")):
        found = benchmarked(tmp_path, error)
        assert (found.verdict, found.findings[0].kind) == ("wrong", "wrong_result")
        assert f"largest error {said}" in found.findings[0].text
        validate(found.as_dict())


@on_emulator
def test_outputs_have_the_keys_and_types_of_stored_ones_of_this_schema() -> None:
    """A program that reads the stored outputs also reads current outputs."""
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    found = [each.as_dict() for each in samples()]
    assert [each["verdict"] for each in stored] == [each["verdict"] for each in found]
    for before, now in zip(stored, found, strict=True):
        validate(before)
        assert types_of(before) == types_of(now)


def samples() -> list[Verdict]:
    bodies = (
        RIGHT,
        "y[0] = i;",
        "if (i < n) y[i] = 1;",
        'asm("{.reg .u32 u; mov.u32 u, 1; vadd.u32.u32.u32 u, u, u;}");',
    )
    return [verdict(body) for body in bodies]


def types_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: types_of(each) for key, each in value.items()}
    return [types_of(each) for each in value[:1]] if isinstance(value, list) else type(value)


@on_emulator
@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (RIGHT, 0, "right"),
        ("y[0] = i;", 1, "wrong"),
        ('asm("{.reg .u32 u; mov.u32 u, 1; vadd.u32.u32.u32 u, u, u;}");', 2, "not judged"),
    ],
)
def test_the_command_prints_the_verdict_as_json(
    body: str, code: int, said: str, tmp_path: Path
) -> None:
    file = file_of(tmp_path, {"": body})
    options = ("--shape", "N=3,C=20", "--device", "cpu")
    ended = gpt2block("kernels", "add", "--mine", file, *options, "--json")
    assert (ended.code, ended.json["verdict"]) == (code, said)
    assert (ended.json["reason"] is None) == (code < 2)
    validate(ended.json)
    ended = gpt2block("kernels", "add", "--mine", file, *options)
    assert ended.code == code
    assert (
        code < 2 or "my.cu:4: not judged: the emulator does not execute vadd.u32.u32" in ended.error
    )


# Hints and messages


@on_emulator
@pytest.mark.parametrize(
    ("body", "hints"),
    [
        ("if (i < n) y[i] = (a[i] + b[i]) * 1.0;", ["my.cu:4: 1.0 is a double: write 1.0f; ar"]),
        (f"{RIGHT} if (n < 1e-3) y[0] += -.5 * i;", ["my.cu:4: 1e-3", "my.cu:4: .5 is a double"]),
        ("y += 0 * 1.5, y += 0 / 2., y -= 0 * 3.5, y += 0 * 4.5;\n    " + RIGHT, ["my.cu:4"] * 3),
        ("__shared__ float s[1]; if (i) __syncwarp;\n    __syncthreads ;\n    " + RIGHT,
         ["my.cu:4: __syncwarp; calls nothing: a call has parentheses: __syncwarp();",
          "my.cu:5: __syncthreads; calls nothing"]),
        ("int __x; int __y = n; __x = i;\n    if (__x < __y) y[__x] = a[i] + b[i];", []),
        ("double d = 0.5 * i;\n    d = d * 0.5;\n    const float z = 0.0;\n    // 2.0 * i\n    "
         "if (i < n) y[i] = a[i] + b[i] + z * 1.0f * 0x1p3f * (float)d * 0;", []),
    ],
)  # fmt: skip
def test_arithmetic_in_double_and_a_name_without_a_call_are_hints(
    body: str, hints: list[str], tmp_path: Path
) -> None:
    source = ADD.replace("NAME", "k").replace("BODY", body)
    (tmp_path / "my.cu").write_text(source, encoding="utf-8")
    kernel = matched(read(tmp_path / "my.cu"), find("add"), ("float32", "KN"))
    found = Verdict(kernel, "cpu").hints
    assert len(found) == len(hints)
    for hint, begin in zip(found, hints, strict=True):
        assert hint.startswith(begin)


@on_emulator
def test_two_dynamic_arrays_are_a_possible_cause() -> None:
    body = (
        "extern __shared__ float s[];\n    extern __shared__ float t[];\n    "
        "if (i < n) s[i] = a[i];\n    if (i < n) t[i] = b[i];\n    if (i < n) y[i] = s[i] + t[i];"
    )
    found = verdict(body)
    assert "hint: my.cu:5: the extern __shared__ arrays s and t start at the same" in str(found)
    assert "arrays s and t" in found._repr_html_()
    assert verdict(body.replace("+ t[i]", "+ a[i]").replace("s[i] +", "b[i] +")).hints == ()


@on_emulator
def test_a_missing_semicolon_shows_the_line_before() -> None:
    found = verdict(f"const float two = 2\n\n    {RIGHT}")
    assert [each.lines for each in found.findings] == [(4, 6)]
    assert "    4 |     const float two = 2\n    6 |     if (i < n)" in found.summary


@on_emulator
def test_a_race_with_an_asynchronous_copy_has_the_line_of_the_copy() -> None:
    body = "__shared__ float s[64];\n    __pipeline_memcpy_async(&s[threadIdx.x], &a[i % n], 4);\n"
    body += "    __pipeline_commit();\n    __pipeline_wait_prior(0);\n    y[i % n] = s[i ^ 1];"
    text = "#include <cuda_pipeline.h>\n" + ADD.replace("NAME", "k").replace("BODY", body)
    (found,) = mine.check(text, "add", shape=SHAPE, device="cpu").findings
    assert (found.kind, found.lines) == ("race", (9, 6))
    assert "wrote it at my.cu:6, and no barrier is between them" in found.text


@on_emulator
def test_values_that_are_not_finite_are_counted() -> None:
    (found,) = verdict("if (i < n) y[i] = i % 2 ? 1 / 0.0f : a[i] + b[i];").findings
    assert "30 of 60 elements of y are wrong, 30 of them NaN or infinite: y[0, 1]" in found.text
    assert "largest error: NaN or infinity: look for a division by 0, for expf" in found.text
