"""Programs that launch lists name compile without spilled registers, and with few registers.

The lists (tools/launch_lists.py) have every kernel, with the constants of models and operations.
"""

from __future__ import annotations

import re
from collections import defaultdict

import pytest
from launch_lists import lists

from gpt2block.cuda import kernels
from tests.compiling import Job, assert_clean

PROGRAMS = r"(products|attention|operation|generation (llama|gpt2)(-\d+)?) .*|conversions"
# Part of the kernels: names of their files, and how many of their programs are compiled.
PARTS = {"attention": 6, "matmul/decode": 20, "matmul/prompt": 6, "(?!attention|matmul)": 5}
KNOWN = [  # CUDA 12 spills a few bytes of these programs
    {"12.0", "attention_mma"},
    {"12.0", "attention_cached_mma"},
    {"7.5", "decode_mma", "WEIGHT_E4M3=1"},
    *({kernel, f"WEIGHT_{fp8}=1"} for kernel in ("rmsnorm_matvec", "rmsnorm_ffn_matvec")
      for fp8 in ("E4M3", "E5M2")),
]  # fmt: skip
MOST_REGISTERS = {"matmul/prompt/cores.cu": 128}  # so that two blocks fit on a multiprocessor


@pytest.mark.slow
@pytest.mark.parametrize("card", ["7.5", "8.0", "9.0", "12.0"])
@pytest.mark.parametrize("part", PARTS)
def test_no_listed_program_spills(card: str, part: str) -> None:
    """Compile one of `PARTS[part]` programs of each kernel, but at least one."""
    wanted = re.compile(rf"{card} ({PROGRAMS})").fullmatch
    programs: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for _, lines in lists(card, lambda name: wanted(name) is not None):
        for line in lines:
            launch, constants = [*line.split(" | "), "", ""][2:4]
            kernel, file, *_ = [*launch.split(" "), ""]
            if file.endswith(".cu") and re.match(part, file):
                assert "beyond its limit" not in launch
                programs[file, kernel][constants] = None
    assert programs
    for (file, kernel), builds in programs.items():
        arch, jobs = kernels.architecture(file) or f"sm_{card.replace('.', '')}", list[Job]()
        for constants in list(builds)[:: PARTS[part]]:
            pairs = [each.partition("=")[::2] for each in constants.split()]
            if not any(known <= {card, kernel, *constants.split()} for known in KNOWN):
                jobs.append((file, arch, tuple(pairs)))
        assert_clean(jobs, [kernel] * len(jobs), MOST_REGISTERS.get(file, 255))
