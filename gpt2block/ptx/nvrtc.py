"""Compile CUDA C++ to PTX with NVRTC, in a process of its own that has limits.

A source can make the compiler use any amount of time and memory. NVRTC therefore runs in a child
process, which stays for later sources and ends with this process. The child runs this file as a
program, without the packages of this process.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from signal import SIGXCPU, Signals
from typing import IO, Any, NamedTuple

# The options of CuPy's own compilations, so that the PTX is the text that a GPU would run.
OPTIONS = ("-std=c++17", "-ftz=true", "--device-as-default-execution-space", "-lineinfo")
MOST_TEXT = 2**26  # bytes of PTX or of a log that a child returns
MISSING = (
    "NVRTC, CUDA's run-time compiler, is not installed: "
    "pip install 'cuda-toolkit[nvrtc,cudart]==12.*,>=12.8'"
)


class Limits(NamedTuple):
    """The limits of the compiler for one source."""

    cpu_seconds: int = 60
    memory_bytes: int = 3 * 2**30

    @property
    def gib(self) -> str:
        return f"{self.memory_bytes / 2**30:.1f} GiB"


class Compiled(NamedTuple):
    """The PTX of a source, and the compiler's warnings."""

    ptx: str
    log: str


class Refused(NamedTuple):
    """A source without PTX.

    reason: why the compiler did not finish, or "" if the log has the errors of the source.
    """

    reason: str
    log: str = ""


def compile(
    source: str,
    *,
    name: str,
    arch: str,
    options: Sequence[str] = (),
    limits: Limits = Limits(),  # noqa: B008  (a constant)
    assemble: bool = False,
) -> Compiled | Refused:
    """Compile a source for an architecture such as "sm_90a".

    name: its file in messages. assemble: whether ptxas compiles the PTX, too: the log then has its
    messages.
    """
    library = find_library()
    if library is None:
        return Refused(MISSING)
    target = arch if assemble else arch.replace("sm_", "compute_")
    flags = (f"-arch={target}", *OPTIONS, *options, *includes())
    with suppress(IndexError):
        return _Child.idle.pop().compile(source, name, flags, limits)
    return _Child(library).compile(source, name, flags, limits)


@cache
def find_library() -> Path | None:
    """Return the path of NVRTC's library, in a wheel or in a CUDA toolkit."""
    found = [
        path
        for folder in (*_of_wheels("lib"), *_of_toolkit("lib64"))
        for path in sorted(folder.glob("libnvrtc.so*"))
    ]
    return found[0] if found else None


@cache
def includes() -> tuple[str, ...]:
    """Return the options that name the folders of CUDA's headers."""
    cupy = find_spec("cupy")
    own = Path(cupy.origin).parent / "_core" / "include" if cupy and cupy.origin else Path()
    core = own / "cupy" / "_cccl"  # cub, thrust and libcu++
    folders = [core / "cub", core / "thrust", core / "libcudacxx", own] if core.is_dir() else []
    of_cuda = [*_of_wheels("include"), *_of_toolkit("include")]
    return tuple(
        f"-I{folder}"
        for folder in (*folders, *of_cuda)
        if folder in folders or (folder / "cuda_fp16.h").is_file()
    )


def _of_wheels(folder: str) -> list[Path]:
    spec = find_spec("nvidia")  # a namespace: each of NVIDIA's wheels adds a folder
    parents = spec.submodule_search_locations if spec else None
    return [path for each in parents or () for path in sorted(Path(each).glob(f"*/{folder}"))]


def _of_toolkit(folder: str) -> list[Path]:
    return [Path("/usr/local/cuda") / folder]


class _Child:
    """A process that compiles one source after another."""

    idle: list[_Child] = []  # noqa: RUF012  (shared by all threads)

    def __init__(self, library: Path) -> None:
        command = [sys.executable, "-I", "-S", __file__, str(library)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )

    def compile(
        self, source: str, name: str, options: Sequence[str], limits: Limits
    ) -> Compiled | Refused:
        assert self.process.stdin
        assert self.process.stdout
        request = {"source": source, "name": name, "options": options, "limits": limits}
        with suppress(BrokenPipeError):
            print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer.endswith("\n"):
            return Refused(self._end(limits))
        status, ptx, log = json.loads(answer)
        if status == "NVRTC_ERROR_OUT_OF_MEMORY" or "catastrophic error: out of memory" in log:
            self.process.kill()  # the memory of the child is in pieces
            self.process.wait()
            return Refused(f"the compiler needs more than {limits.gib} of memory", log)
        _Child.idle.append(self)
        if status == "NVRTC_SUCCESS":
            return Compiled(ptx, log)
        if status == "NVRTC_ERROR_COMPILATION" and log:
            return Refused("", log)
        return Refused(f"NVRTC failed: {status}", log)

    def _end(self, limits: Limits) -> str:
        """Return why the process has ended while it compiled a source."""
        code = self.process.wait()
        if code == -SIGXCPU:
            return f"the compiler was stopped after {limits.cpu_seconds} CPU seconds"
        ended = f"by {Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"the compiler ended {ended}; it may use {limits.gib} of memory"


def _forget_children() -> None:
    _Child.idle.clear()  # a forked process shares no pipe with its parent


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_children)


class _Library:
    """NVRTC's functions, in the child."""

    def __init__(self, path: str) -> None:
        self.functions = ctypes.CDLL(path)
        self.functions.nvrtcGetErrorString.restype = ctypes.c_char_p

    def compile(self, source: str, name: str, options: list[str]) -> tuple[str, str, str]:
        """Return the status, the PTX and the log."""
        program = ctypes.c_void_p()
        texts = [each.encode(errors="surrogateescape") for each in (source, name, *options)]
        call = self.functions.nvrtcCreateProgram
        status = call(ctypes.byref(program), texts[0], texts[1], 0, None, None)
        if status == 0:
            flags = (ctypes.c_char_p * len(options))(*texts[2:])
            status = self.functions.nvrtcCompileProgram(program, len(options), flags)
        ptx = self._text("PTX", program) if status == 0 else ""
        log = self._text("ProgramLog", program)
        self.functions.nvrtcDestroyProgram(ctypes.byref(program))
        return self.functions.nvrtcGetErrorString(status).decode(), ptx, log

    def _text(self, what: str, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        if getattr(self.functions, f"nvrtcGet{what}Size")(program, ctypes.byref(size)):
            return ""
        if size.value > MOST_TEXT:
            sys.exit(f"more than {MOST_TEXT} bytes of {what}")
        text = ctypes.create_string_buffer(size.value)
        getattr(self.functions, f"nvrtcGet{what}")(program, text)
        return text.raw.replace(b"\0", b"").decode(errors="replace")


def _limit(cpu_seconds: int, memory_bytes: int) -> None:
    """Limit this process from now on; the seconds that it has used before do not count."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    until = math.ceil(usage.ru_utime + usage.ru_stime) + cpu_seconds
    for kind, value in ((resource.RLIMIT_CPU, until), (resource.RLIMIT_AS, memory_bytes)):
        most = resource.getrlimit(kind)[1]
        soft = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (soft, most))


def _serve(requests: IO[str], library: _Library) -> None:
    for line in requests:
        request: dict[str, Any] = json.loads(line)
        _limit(*request["limits"])
        answer = library.compile(request["source"], request["name"], request["options"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _serve(sys.stdin, _Library(sys.argv[1]))
