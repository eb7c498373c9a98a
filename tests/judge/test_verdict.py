"""The verdict on a user's kernel: kinds of findings, JSON and its schema, hints and messages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpt2block import InputError, Verdict, check_kernel
from gpt2block import judge as mine
from gpt2block.judge.comparison import BenchmarkResult, Checked
from gpt2block.judge.finding import KINDS, Finding
from gpt2block.judge.kernel import Kernel, matched
from gpt2block.judge.source import read
from gpt2block.ops.bench.ceilings import Ceilings
from gpt2block.ops.bench.variants import Measurement
from gpt2block.ops.registry import find
from tests.devices import on_emulator

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs" / "verdict.schema.json").read_text(encoding="utf-8"))
STORED = ROOT / "tests" / "data" / "verdicts_of_schema_1.json"
SHAPE = {"N": 3, "C": 20}
ADD = """// launch: grid=ceil(n / 64) block=64 shared=512
extern "C" __global__ void NAME(const float* a, const float* b, float* y, int n) {
    const int i = blockIdx.x * 64 + threadIdx.x;
    BODY
}
"""
RIGHT = "if (i < n) y[i] = a[i] + b[i];"
TEXTS = {
    "race: thread (1, 0, 0) writes y[0] at my.cu:9": "race",
    "divergent barrier: thread (0, 0, 0) waits at my.cu:15": "divergent_barrier",
    "misaligned access: the address of 16 bytes must be divisible by 16": "misaligned",
    "60 of 60 elements of y are wrong": "wrong_result",
    "the kernel changes its input a": "changed_input",
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


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("", {}, "my.cu: no kernel: the source is empty"),
        ("my.cu", {"device": "tpu"}, "device: expected 'cpu', 'cuda' or None, got 'tpu'"),
        ("my.cu", {"girds": "1"}, "check: unknown keyword 'girds': did you mean 'grid'?"),
        ("my.cu", {"block": 64}, "block: expected a text such as '256', got 64"),
        ("my.cu", {"shape": "C=4"}, "shape: expected sizes such as {'C': 768}, got 'C=4'"),
    ],
)
def test_a_call_that_cannot_be_judged_is_refused(
    source: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        check_kernel("add", source, **options)


@pytest.mark.parametrize("text", TEXTS)
def test_the_kind_of_a_text(text: str) -> None:
    assert Finding(text).kind == TEXTS[text]


def test_the_schema_lists_every_kind_and_key(tmp_path: Path) -> None:
    properties = SCHEMA["$defs"]["finding"]["properties"]
    assert properties["kind"]["enum"] == list(KINDS)
    assert set(TEXTS.values()) == set(KINDS)
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
def test_a_verdict_is_a_text_and_a_page_with_hints() -> None:
    found = verdict("extern __shared__ float s[];\n    extern __shared__ float t[];\n    y[i] = q;")
    assert found.hints == ()  # it does not compile
    found = verdict("if (i < n) y[i] = (a[i] - b[i]) * 1.0;")
    assert "hint: my.cu:4: 1.0 is a double: write 1.0f" in str(found)
    assert "1.0 is a double" in found._repr_html_()
    assert "60 of 60 elements of y are wrong" in found.summary


# Hints and messages
