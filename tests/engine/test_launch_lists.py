"""Golden files: the launches of passes and operations on seven GPUs, and the uses of kernels."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from kernel_uses import CAPABILITIES, NOT_RUN, ORDER, Use, Uses, read, text_of, uses_of
from kernel_uses import GOLDEN as GOLDEN_KERNELS
from launch_lists import digest, lists
from launch_models import CONFIGS
from launch_recorder import DEVICES

from gpt2block.cuda.kernels import signatures, sources
from tests.devices import slow

GOLDEN = Path(__file__).parents[1] / "golden" / "launches.txt"
COMPARE = """launches differ from {golden} in: {names}
Print them with this change, and without it, and compare the files:
    python tools/launch_lists.py --only '{first}' > after.txt
If the change is intended:
    python tools/launch_lists.py --digests > {golden}
    python tools/kernel_uses.py > tests/golden/kernels.txt"""
TELLING = (  # tested programs of the golden file, which has too many to run in a few seconds
    r"9.0 model (gpt2 3x64.* bfloat16|llama 4/2x128.* (float32|bfloat16)) own",
    slow(r"9.0 model (gpt2 3x64|gpt2 3x11|llama 4/2x128|llama 4/1x32).* float8_e4m3fn .*"),
    slow(r"9.0 model (large (gpt2 24x64|llama 32/8x64)|llama 6/2x64.*) bfloat16 own"),
    slow(r"9.0 (block .* (2/2|4/1|2/1)x.*|stages (bfloat16|float8_e5m2)|conversions)"),
    slow(r"9.0 (attention bfloat16|products linear bfloat16|products gemm (float32|bfloat16))"),
    r"9.0 operation .* (float32|bfloat16|float8_e5m2)",
    slow(r"9.0 model (large gpt2 12x64|llama 4/1x32|gpt2 3x11) float16 own"),
    slow(r"9.0 model (gpt2 2x18 bfloat16|(gpt2 3x64|llama 6/2x64).* float32) own"),
    slow(r"8.0 (model (gpt2 2x64|llama 6/2x64).* (float32|float8_e5m2) .*|products \w+ float16)"),
    slow(r"10.0 (model llama 2/1x64 (bfloat16|float8_e5m2) own|operation attention .*)"),
    slow(r"(10.0 operation rmsnorm_\w+ .*|9.0 operation .* float(16|8_e4m3fn))"),
    slow(r"7.5 model (gpt2 2x64|llama 4/1x32) float32 .*"),
    slow(r"7.5 (products linear float8_e5m2|operation gemm.*)"),
    r"9.0 generation (gpt2 (float32|Q4_K)|llama Q4_K|qwen3_5 Q4_K_M)",
    slow(r"9.0 generation ((gpt2|llama) (e4m3/e4m3|Q8_0/e4m3|Q4_K_M)|llama float32)"),
    slow(
        r"9.0 generation ((gemma3|lfm2|nanochat|olmo2|phi3|qwen3|qwen3_5) Q4_K_M|gemma4 bfloat16)"
    ),
    slow(r"9.0 generation (gemma3|lfm2|nanochat|olmo2|phi3|qwen3|qwen3_5) (?!Q4_K_M).*"),
    slow(r"9.0 generation (gpt2-768 float32|(gpt2-768|llama-2048) e4m3/e4m3|llama-2048 Q4_K_M)"),
    slow(r"8.0 generation (llama (float32|Q8_0)|gpt2 e4m3/e4m3|(nanochat|gemma3) Q4_K_M)"),
    slow(r"7.5 generation (gpt2-odd float32|(gemma3|llama) bfloat16)"),
    slow(r"8.6 generation (gpt2 float32|llama (bfloat16|Q4_K_M))"),
    r"8.9 generation qwen3 Q4_K_M",
    slow(r"8.9 generation ((llama|qwen3) bfloat16|llama Q4_K_M|llama-2048 (e4m3/e4m3|Q4_K_M))"),
    slow(r"12.0 generation (llama (bfloat16|e4m3/e4m3|Q4_K)|qwen3 bfloat16)"),
)


@pytest.mark.parametrize("programs", TELLING)
def test_launches_are_those_of_the_golden_file(programs: str) -> None:
    wanted = re.compile(programs).fullmatch
    known = [line.split(maxsplit=2) for line in GOLDEN.read_text("utf-8").splitlines()]
    expected = {name: f"{sha} {count}" for sha, count, name in known if wanted(name)}
    recorded = [
        each
        for capability in DEVICES
        for each in lists(capability, lambda name: wanted(name) is not None)
    ]
    got = {name: " ".join(digest(lines).split()) for name, lines in recorded}
    names = sorted(name for name in {*expected, *got} if expected.get(name) != got.get(name))
    assert expected
    assert not names, COMPARE.format(
        golden="tests/golden/launches.txt", names=", ".join(names), first=names[0]
    )
    of_models = [each for each in recorded if " generation " in each[0]]
    assert_same_uses([each for each in of_models if each[0].split()[0] in CAPABILITIES])


def assert_same_uses(programs: list[tuple[str, list[str]]]) -> None:
    """Assert that the golden file has exactly the uses of kernels by these programs."""
    got = uses_of(programs)
    of_programs = {use[:3] for uses in got.values() for use in uses}
    expected = {
        kernel: found
        for kernel, uses in golden_uses().items()
        if (found := {use for use in uses if use[:3] in of_programs})
    }
    assert len(of_programs) == len(programs)
    differ = [name for name in {*got, *expected} if got.get(name) != expected.get(name)]
    assert not differ, f"{differ}: python tools/kernel_uses.py > tests/golden/kernels.txt"


@cache
def golden_uses() -> Uses:
    return read(GOLDEN_KERNELS.read_text("utf-8"))


def test_a_kernel_runs_in_a_list_or_has_a_reason() -> None:
    """Reasons are given only for existing kernels that run in no list."""
    every = [f"{file} {kernel}" for file in sources() for kernel in signatures(file)]
    none = [kernel for kernel in every if kernel not in golden_uses()]
    reasons = {each for kernel in none for each in (kernel, kernel.split()[0]) if each in NOT_RUN}
    print(*none, sep="\n")
    assert [each for each in none if not {each, each.split()[0]} & reasons] == []
    assert reasons == NOT_RUN.keys(), "a reason of no kernel, or of one that runs"
    of_files = {kernel.split()[0] for kernel in golden_uses()}
    assert not of_files & NOT_RUN.keys(), "a reason of a file whose kernels run"
    assert golden_uses().keys() <= set(every)


def test_uses_are_read_as_they_were_written() -> None:
    every = {Use(f, c, m, p) for f in ORDER[0][:2] for c in CAPABILITIES
             for m in CONFIGS for p in ORDER[3][:3]}  # fmt: skip
    uses = {"a.cu f": every - {Use("float32", "8.0", "gpt2", "load")}, "b.cu g": {min(every)}}
    assert read("\n".join(text_of(uses))) == uses
    assert list(text_of(golden_uses())) == GOLDEN_KERNELS.read_text("utf-8").splitlines()
