"""Compile kernel files with NVRTC for many architectures and constants; no GPU is needed."""

from __future__ import annotations

import atexit
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import chain, repeat
from pathlib import Path

import compile_for
import pytest

from gpt2block.cuda import kernels
from gpt2block.emulator.ptx import cache, nvrtc

Job = tuple[str, str, kernels.Defines]  # file, architecture, constants
SPILLS = re.compile(r"\b[1-9]\d* bytes spill")


class Compiler:
    """Compile in another process, which is replaced by a fresh one after MAX_FILES files.

    Earlier compiles in a process were seen to change, rarely, whether ptxas spills registers of a
    kernel at the limit. A kernel that spills is therefore compiled again in a fresh process, as
    users compile it. A process compiles many files, as importing CuPy takes as long as a small one.
    """

    MAX_FILES = 100

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._left = 0

    def compile(self, job: Job, kernel: str | None = None) -> tuple[list[str], str]:
        """Return the names of the kernels in the cubin, and the compiler's log.

        kernel: the only kernel to compile; None: all of the file. The result is kept for later runs
        of the tests.
        """
        file, arch, defines = job
        library = nvrtc.find_library()
        assert isinstance(library, Path)
        tool = Path(compile_for.__file__).read_text("utf-8")
        request = [kernels.program(file, defines, kernel), file, arch, tool]
        key = nvrtc._key(library, request, [str(kernels.SOURCE_DIR)])
        assert key
        if kept := cache.read(key):
            there, log = json.loads(kept)
            return there, log
        if self._process is None or self._left == 0:
            self.close()
            self._process = subprocess.Popen(
                [sys.executable, compile_for.__file__],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            self._left = self.MAX_FILES
        self._left -= 1
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{json.dumps([*job, kernel])}\n")
        stdin.flush()
        line = stdout.readline()
        assert line, (job, self.close())
        there, log, _ = json.loads(line)
        # perhaps due to earlier compiles
        if SPILLS.search(log) and self._left < self.MAX_FILES - 1:
            self.close()
            return self.compile(job, kernel)
        cache.write(key, json.dumps([there, log]))
        return there, log

    def close(self) -> str:
        """End the process; return its output on stderr."""
        process, self._process = self._process, None
        return process.communicate()[1] if process else ""


COMPILER = Compiler()
atexit.register(COMPILER.close)


def assert_clean(jobs: Sequence[Job], only: Sequence[str] = (), max_registers: int = 255) -> None:
    """Assert that every kernel of every file compiles without spills and without warnings.

    only: for each job, the only kernel to compile, if its constants would let other kernels of the
    file spill. max_registers: limit per thread.
    """
    pytest.importorskip("cupy", reason="compiling needs CuPy and NVRTC")
    for job, kernel in dict.fromkeys(zip(jobs, chain(only, repeat("")), strict=False)):
        there, log = COMPILER.compile(job, kernel)
        expected = [kernel] if kernel else list(kernels.signatures(job[0]))
        assert there == expected
        spills = [line for line in log.splitlines() if "spill" in line]
        assert len(spills) >= len(expected)  # functions that are not inlined have lines, too
        clean = "0 bytes spill stores, 0 bytes spill loads"
        assert all(clean in line for line in spills), (job, spills)
        registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
        assert all(n <= max_registers for n in registers), (job, registers)
        assert "instructions are serialized" not in log, job
        warnings = [line for line in log.splitlines() if "warning" in line]
        if kernel:  # constants of the file's other kernels are unused
            warnings = [w for w in warnings if "never referenced" not in w and "Remark" not in w]
        # CUDA 12.9 always announces that sm_70 will be removed; no other warning may appear.
        assert all(job[1] == "sm_70" and "Architectures prior to" in line for line in warnings), job
