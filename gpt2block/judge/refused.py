"""Find what NVRTC and ptxas, CUDA's compilers, refuse before the emulator runs a kernel.

Both run without a GPU. Errors that they accept, but that prevent a launch on a GPU, are found, too.
"""

from __future__ import annotations

import re
from math import prod
from typing import NamedTuple

from gpt2block.cuda import kernels
from gpt2block.emulator.ptx import nvrtc
from gpt2block.errors import NotJudged
from gpt2block.judge.finding import Finding, compiler_finding
from gpt2block.judge.kernel import Geometry, Kernel

REGISTERS = 1 << 16  # registers per block
_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"|(?<!\w)\'(?:[^\'\\\n]|\\.)+\'')
WARP, UNIT = 32, 8  # threads per warp; registers of a thread are allocated in multiples of UNIT
USUAL, WGMMA = "80", "90"  # compute capabilities
ASSEMBLED = ("--ptxas-options=-v", "--no-cache")  # programs from NVRTC's cache have no log


class ResourceUsage(NamedTuple):
    """Resources of a kernel, as ptxas reports them, and the compute capability of its program."""

    registers: int = 0  # registers per thread
    shared: int = 0  # bytes of static shared memory
    capability: str = USUAL


def refused(kernel: Kernel) -> Finding | ResourceUsage:
    """Compile the file of a kernel; return the kernel's resources, or a Finding for an error.

    Raises NotJudged if the compiler needs too much time or memory.
    """
    usual = capability_of(kernel)
    asked = kernels.architecture(str(kernel.source.path))
    build = _compile(kernel, asked or f"sm_{usual}")
    above = re.search(r"requires \.target|not supported on \.target", build.log)
    if isinstance(build, nvrtc.Refused) and above:
        build = _compile(kernel, "sm_90a")
    if isinstance(build, nvrtc.Refused):
        if build.reason and "ptxas error" not in build.log:
            raise NotJudged(f"{kernel.source.file}: not judged: {build.reason}")
        return compiler_finding(kernel.source, build.log)
    own = build.log.partition(f"'{kernel.source.name}'")[2]
    used = re.search(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?", own)
    resources = (int(used[1]), int(used[2] or 0)) if used else (0, 0)
    return ResourceUsage(*resources, WGMMA if above else usual)


def capability_of(kernel: Kernel) -> str:
    """Return the compute capability that a file asks for, or on which its launches can overlap."""
    asks = kernel.source.waits or kernels.architecture(str(kernel.source.path))
    return WGMMA if asks else USUAL


def too_many(
    kernel: Kernel, needs: ResourceUsage, geometry: Geometry, max_shared: int
) -> Finding | None:
    """Return the reason why no GPU can launch a block of this size, or None.

    max_shared: maximum bytes of shared memory per block.
    """
    _, block, dynamic = geometry
    warps = -(-prod(block) // WARP)
    taken = warps * WARP * -(-needs.registers // UNIT) * UNIT
    name, line = kernel.source.name, kernel.source.number
    if taken > REGISTERS:
        return Finding(
            f"{name} takes {needs.registers} registers per thread: a block of {prod(block)} "
            f"has {REGISTERS // (warps * WARP)} for each: write __launch_bounds__({prod(block)}) "
            "before the name of the kernel, or choose a smaller block",
            (line,),
        )
    if dynamic and needs.shared + dynamic > max_shared:
        return Finding(
            f"{name} has {needs.shared:,} bytes of shared variables and {dynamic:,} of extern "
            f"__shared__ memory: at most {max_shared:,} together",
            (line,),
        )
    return None


def _compile(kernel: Kernel, arch: str) -> nvrtc.Compiled | nvrtc.Refused:
    """Compile the file to machine code of an architecture, so that the log has what ptxas says."""
    return nvrtc.compile(
        kernels.program(str(kernel.source.path), kernels.stored_as(kernel.dtype)),
        name="kernel.cu",
        arch=arch,
        options=(f"-I{kernels.SOURCE_DIR}", *ASSEMBLED),
        assemble=True,
    )


def without_literals(text: str) -> str:
    """Replace comments by blanks and the contents of string literals by underscores."""
    plain = kernels.without_comments(text)
    return _LITERAL.sub(lambda found: f'"{"_" * (len(found[0]) - 2)}"', plain)
