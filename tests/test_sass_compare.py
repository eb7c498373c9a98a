"""Machine code that counts as equal, and builds of two trees that belong together."""

from __future__ import annotations

from pathlib import Path

import pytest
from sass_compare import Build, code_of, pairs_of, verdict

from gpt2block.cuda import kernels

SOURCE = 'extern "C" __global__ void f({}float* x, int n) {{ if (threadIdx.x < n) x[n] = {}; }}'


def build(file: str, kernel: str, constants: str = "") -> Build:
    return file, kernel, constants, "sm_80"


def test_builds_belong_together_by_their_place_then_by_their_names() -> None:
    old = {("a", 0): build("x.cu", "f"), ("a", 1): build("x.cu", "g"), ("b", 0): build("z.cu", "k")}
    new = {
        ("a", 0): build("y.cu", "h", "END=1"),
        ("c", 0): build("y.cu", "g"),
        ("c", 1): build("w.cu", "m"),
    }
    assert pairs_of(old, new, {"x.cu": "y.cu"}) == [
        (old["a", 0], new["a", 0]),
        (old["a", 1], new["c", 0]),
        (old["b", 0], None),
        (None, new["c", 1]),
    ]


@pytest.mark.parametrize(
    ("parameters", "value", "expected"),
    [("", "2", "equal"), ("const float* more, ", "2", "parameters"), ("", "3", "different")],
)
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_code_is_compared(
    parameters: str, value: str, expected: str, arch: str, tmp_path: Path
) -> None:
    """Changed offsets of parameters are "parameters", another changed constant "different"."""
    pytest.importorskip("cupy", reason="compiling needs CuPy and NVRTC")
    found = []
    for n, each in enumerate(((("", "2")), (parameters, value))):
        file = tmp_path / f"{n}.cu"
        file.write_text(SOURCE.format(*each))
        found.append((code_of(kernels.compile_for(str(file), arch).cubin), "Used 8 registers"))
    assert len(found[0][0]) >= 16 * 8
    assert verdict(*found)[0] == expected
