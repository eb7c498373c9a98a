"""What NVRTC says of a kernel file, for many architectures and constants at once; no GPU needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, zip_longest

import pytest

from gpt2block.cuda import kernels

Job = tuple[str, str, kernels.Defines]  # file, architecture, constants

_COMPILE = """
import json, sys
from gpt2block.cuda import kernels
for file, arch, defines in json.load(sys.stdin):
    compiled = kernels.compile_for(file, arch, tuple(map(tuple, defines)))
    there = [name for name in kernels.signatures(file) if name.encode() in compiled.cubin]
    print(json.dumps([there, compiled.log]), flush=True)
"""


def compile_apart(jobs: Sequence[Job]) -> list[tuple[list[str], str]]:
    """Kernels found and the compiler's log, of each job; in fresh processes, one for each core.

    As users compile: what ptxas makes of a kernel at the limit of its registers was seen to depend,
    rarely, on hundreds of compiles before it in the process.
    """
    processes = min(len(jobs), os.cpu_count() or 1, 4)
    shares = [range(first, len(jobs), processes) for first in range(processes)]
    with ThreadPoolExecutor(processes) as pool:
        lists = pool.map(lambda share: _compile_in_turn([jobs[i] for i in share]), shares)
        found = dict(zip((i for share in shares for i in share), chain(*lists), strict=True))
    return [found[i] for i in range(len(jobs))]


def _compile_in_turn(jobs: list[Job]) -> list[tuple[list[str], str]]:
    command, text = [sys.executable, "-c", _COMPILE], json.dumps(jobs)
    done = subprocess.run(command, check=False, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def assert_clean(jobs: Sequence[Job], only: Sequence[str] = ()) -> None:
    """Every kernel of every file is there, without spills, and the compiler warns of nothing.

    only: of each job the kernel that its constants are for, where the file's others may spill.
    """
    pytest.importorskip("cupy", reason="compiling needs CuPy and NVRTC")
    different = list(dict.fromkeys(jobs))
    found = dict(zip(different, compile_apart(different), strict=True))
    for job, kernel in zip_longest(jobs, only):
        there, log = found[job]
        expected = list(kernels.signatures(job[0]))
        assert there == expected
        spills = [line for line in log.splitlines() if "spill" in line]
        assert len(spills) >= len(expected)  # functions that are not inlined have lines, too
        if kernel:
            own = log.split(f"Function properties for {kernel}\n")[1]
            spills = own.splitlines()[:1]
        clean = "0 bytes spill stores, 0 bytes spill loads"
        assert all(clean in line for line in spills), (job, spills)
        assert "instructions are serialized" not in log, job
        warnings = [line for line in log.splitlines() if "warning" in line]
        # CUDA 12.9 announces by itself that sm_70 will go; nothing else may be said.
        assert all(job[1] == "sm_70" and "Architectures prior to" in line for line in warnings), job
