"""Compile kernel files for an architecture by NVRTC, without a GPU.

    python tools/compile_for.py < jobs

reads a job per line, JSON [file, architecture, constants, kernel or null], and prints a line for
each: JSON of the kernels in the machine code, the compiler's log, and the code in hexadecimal.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1]))  # a script finds only modules of its own folder

from gpt2block import KernelError
from gpt2block.cuda import cupy, kernels
from gpt2block.cuda.doctor import compiler_options


class Compiled(NamedTuple):
    """The machine code of a kernel file, and the compiler's log."""

    cubin: bytes
    log: str


def compile_for(
    file: str, arch: str, defines: kernels.Defines = (), kernel: str | None = None
) -> Compiled:
    """Compile a file for an architecture such as "sm_80"; needs NVRTC, but no device or driver.

    kernel: name of the only kernel to compile; by default all. The log contains registers, shared
    memory and spills of each kernel. Raises KernelError.
    """
    nvrtc = cupy.cuda.nvrtc
    flags = (
        *kernels.options(file, int(arch.removeprefix("sm_").rstrip("af"))),
        *(flag for flag in compiler_options(cupy) if flag.startswith("-I")),  # CUDA's headers
        f"-arch={arch}",
        "-ftz=true",
        "--ptxas-options=-v",
        "--no-cache",  # programs from NVRTC's cache come without a log
    )
    handle = nvrtc.createProgram(kernels.program(file, defines, kernel), file, (), ())
    try:
        nvrtc.compileProgram(handle, flags)
        # CuPy removes the last byte of a cubin, which is a zero.
        return Compiled(nvrtc.getCUBIN(handle) + b"\0", nvrtc.getProgramLog(handle))
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(handle) or str(error)
        raise KernelError(kernels.compile_message(file, log)) from error
    finally:
        nvrtc.destroyProgram(handle)


def main() -> None:
    for line in sys.stdin:
        file, arch, defines, kernel = json.loads(line)
        cubin, log = compile_for(file, arch, tuple(map(tuple, defines)), kernel)
        there = [n for n in kernels.signatures(file) if f".text.{n}\0".encode() in cubin]
        print(json.dumps([there, log, cubin.hex()]), flush=True)


if __name__ == "__main__":
    main()
