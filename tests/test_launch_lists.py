"""The launches of passes and operations, for four GPUs, are those of a golden file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launch_lists import digest, lists
from launch_recorder import DEVICES

GOLDEN = Path(__file__).parent / "golden" / "launches.txt"
COMPARE = """launches differ from {golden} in: {names}
Print them with this change, and without it, and compare the files:
    python tools/launch_lists.py --only '{first}' > after.txt
If the change is intended:
    python tools/launch_lists.py --digests > {golden}"""
TELLING = (  # programs of the golden file, which has more than can run in a few seconds
    r"9.0 model (gpt2 3x64|llama 4/2x128|llama 6/2x64).* (float32|bfloat16) own",
    r"9.0 model (gpt2 3x64|gpt2 3x11|llama 4/2x128|llama 4/1x32).* float8_e4m3fn .*",
    r"9.0 model large (gpt2 24x64|llama 32/8x64) bfloat16 own",
    r"9.0 (block .* (2/2|4/1|2/1)x.*|stages (bfloat16|float8_e5m2)|conversions)",
    r"9.0 (attention bfloat16|products linear bfloat16|products gemm (float32|bfloat16))",
    r"9.0 operation .*",
    r"9.0 model (large gpt2 12x64|llama 4/1x32|gpt2 3x11) float16 own",
    r"9.0 model gpt2 2x18 bfloat16 own",
    r"8.0 (model (gpt2 2x64|llama 6/2x64).* (float32|float8_e5m2) .*|products \w+ float16)",
    r"10.0 (model llama 2/1x64 (bfloat16|float8_e5m2) own|operation (attention|rmsnorm_\w+) .*)",
    r"7.5 (model (gpt2 2x64|llama 4/1x32) float32 .*|products linear float8_e5m2|operation gemm.*)",
)


@pytest.mark.parametrize("programs", TELLING)
def test_launches_are_those_of_the_golden_file(programs: str) -> None:
    wanted = re.compile(programs).fullmatch
    known = [line.split(maxsplit=2) for line in GOLDEN.read_text("utf-8").splitlines()]
    expected = {name: f"{sha} {count}" for sha, count, name in known if wanted(name)}
    got = {
        name: " ".join(digest(lines).split())
        for capability in DEVICES
        for name, lines in lists(capability, lambda name: wanted(name) is not None)
    }
    names = sorted(name for name in {*expected, *got} if expected.get(name) != got.get(name))
    assert expected
    assert not names, COMPARE.format(
        golden="tests/golden/launches.txt", names=", ".join(names), first=names[0]
    )
