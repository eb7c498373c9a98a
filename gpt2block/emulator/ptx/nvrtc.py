"""Compile CUDA C++ to PTX with NVRTC, in a process of its own that has limits.

A source can make the compiler use any amount of time and memory. NVRTC therefore runs in a child
process, which stays for later sources and ends with this process. The child runs this file as a
program, without the packages of this process.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from signal import SIGXCPU, Signals
from typing import IO, Any, NamedTuple

# The options of CuPy's own compilations, so that the PTX is the text that a GPU would run.
OPTIONS = ("-std=c++17", "-ftz=true", "--device-as-default-execution-space", "-lineinfo")
ASK, FIXED_ADDRESSES = 0xFFFFFFFF, 0x0040000  # arguments of personality(2)
PYTHON = (sys.executable, "-I", "-S")  # a process without the packages and variables of this one
PADDING, ARGUMENTS = "PADDING", 2**16  # a child's variable; bytes of what starts a child
MAX_TEXT = 2**26  # bytes of PTX or of a log that a child returns
TOOLKIT = Path("/usr/local/cuda")
NO_BUILTINS = 7  # NVRTC_ERROR_BUILTIN_OPERATION_FAILURE
INSTALL = "pip install 'nvidia-cuda-nvrtc>=13.3,<14'"
MISSING = f"NVRTC, CUDA's run-time compiler, is not installed: {INSTALL}"
# Names of included files, "" for an include or a macro whose effect the text does not tell.
_INCLUDED = re.compile(
    r'^[ \t]*#[ \t]*include[ \t]*(?:["<]([^">\n]+))?|__has_include|__(?:DATE|TIME|TIMESTAMP)__',
    re.MULTILINE,
)

_USERS_FILE = re.compile(r'^#line 1 "(/.+/)(.+)"$', re.MULTILINE)  # its folder and its name


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
    """Compile a source for an architecture such as "sm_90a". name: its file in messages.

    PTX is kept for later processes, until the source, an included file or NVRTC changes. The log
    does not name the folder of a user's file: equal files of two folders are compiled once.
    assemble: whether ptxas compiles the PTX, too: the log then has its messages.
    """
    if own := _USERS_FILE.search(source):
        line, folder, file = own[0], *own.groups()
        source = source.replace(line, f'#line 1 "/{file}"', 1)
        made = compile(
            source, name=name, arch=arch, options=options, limits=limits, assemble=assemble
        )
        if isinstance(made, Refused):
            return made
        return made._replace(ptx=made.ptx.replace(f'"/{file}"', f'"{folder}{file}"'))
    library = find_library()
    if isinstance(library, Refused):
        return library
    target = arch if assemble else arch.replace("sm_", "compute_")
    flags = (f"-arch={target}", *OPTIONS, *options, *_includes_of_cupy())
    folders = [each[2:] for each in options if each.startswith("-I")]
    key = _key(library, [source, name, *flags], folders)
    from gpt2block.emulator.ptx import cache  # noqa: PLC0415  (a child has no packages)

    if key and (kept := cache.read(key)):
        return Compiled(*json.loads(kept))
    try:
        child = _Child.idle.pop()
    except IndexError:
        child = _Child(library, cache.folder())
    compiled = child.compile(source, name, flags, limits)
    if child.process.returncode is None:
        _Child.idle.append(child)
    if key and isinstance(compiled, Compiled):
        cache.write(key, json.dumps(compiled))
    return compiled


def _key(library: Path, request: Sequence[str], folders: Sequence[str]) -> str | None:
    """Return the name of the file that keeps the PTX; None if unknown files can change the PTX.

    request: the source, its name and options. folders: of included files that are not CUDA's.
    """
    source, name, *_ = request
    here = Path(name).absolute().parent
    digest = hashlib.sha256(json.dumps([request, _installed(library)]).encode())
    waiting, seen = [(source, here)], set()
    with suppress(OSError, ValueError):  # such as an include of a name with a null byte
        while waiting:
            text, parent = waiting.pop()
            included = _included(text)
            if "" in included:
                return None
            for path in (Path(each, file) for file in included for each in (str(parent), *folders)):
                if path not in seen and path.is_file():
                    seen.add(path)
                    with path.open(encoding="utf-8", errors="replace") as opened:
                        waiting.append((opened.read(MAX_TEXT), path.parent))
                    digest.update(f"{path} {waiting[-1][0]}".encode())
        return f"{digest.hexdigest()[:32]}.ptx.gz"
    return None


@lru_cache(maxsize=256)  # a header is read for each kernel that includes it
def _included(text: str) -> tuple[str, ...]:
    """Return the names that `_INCLUDED` finds."""
    return tuple(_INCLUDED.findall(text))


@cache
def _installed(library: Path) -> list[object]:
    """Return texts that change if another NVRTC, or other headers of CUDA, are installed.

    The same versions, installed again, have the same texts.
    """
    includes = (*_includes_of_cuda(library), *_includes_of_cupy())
    folders = {each.parent for each in (*map(Path, _folders_of_nvidia()), _cupy())}
    packages = [each.name for folder in folders for each in folder.glob("*.dist-info")]
    versions = sorted(each for each in packages if re.match("cuda|cupy|nvidia", each))
    return [*includes, *versions, *_file_sizes(library, *TOOLKIT.glob("version.json"))]


def _file_sizes(*paths: Path) -> list[tuple[str, int]]:
    """Return the name and the size of each file."""
    return [(str(each), each.stat().st_size) for each in paths]


@cache
def find_library() -> Path | Refused:
    """Return the NVRTC of CuPy's version of CUDA, or else the newest one; or why none compiles.

    Several libraries are tried once, with an empty kernel: the choice is kept for later processes.
    """
    libraries = _libraries()
    if len(libraries) < 2:
        return libraries[0] if libraries else Refused(MISSING)
    from gpt2block.emulator.ptx import cache  # noqa: PLC0415  (a child has no packages)

    files = [path for each in libraries for path in sorted(each.parent.glob("libnvrtc*.so*"))]
    major = _major_of_cupy()
    state = json.dumps([major, _file_sizes(*filter(Path.is_file, files))])
    key = f"{hashlib.sha256(state.encode()).hexdigest()[:32]}.nvrtc.gz"
    if kept := cache.read(key):
        return libraries[int(kept)]
    versions = _versions(libraries)
    if isinstance(versions, Refused):
        return versions
    chosen = max(versions, key=lambda each: (versions[each][0] == major, versions[each]))
    cache.write(key, str(libraries.index(chosen)))
    return chosen


def examined() -> str | Refused:
    """Return the version and the path of NVRTC, which has compiled an empty kernel."""
    library = find_library()
    versions = library if isinstance(library, Refused) else _versions([library])
    if isinstance(versions, Refused):
        return versions
    return f"NVRTC {'.'.join(map(str, *versions.values()))} ({library})"


def _libraries() -> list[Path]:
    """Return each NVRTC in a wheel or in a CUDA toolkit, by one of its names."""
    folders = (*_wheel_folders("lib"), TOOLKIT / "lib64")
    paths = [path for each in folders for path in sorted(each.glob("libnvrtc.so*"))]
    return [*{path.resolve(): path for path in paths[::-1] if path.is_file()}.values()][::-1]


def _versions(libraries: Sequence[Path]) -> dict[Path, tuple[int, ...]] | Refused:
    """Return the versions, such as (12, 9, 86), of the libraries that compile an empty kernel.

    If there is none, the result names all failures.
    """
    fix = INSTALL.replace("install", "install --force-reinstall")
    versions, failures = {}, [f"NVRTC compiles no empty kernel: {fix}"]
    for library in libraries:
        child = _Child(library, None)
        compiled = child.compile("__global__ void f() {}", "f.cu", ("-arch=compute_80",), Limits())
        child.process.communicate()  # ends it
        if isinstance(compiled, Compiled):
            stated = re.search(r"release [\d.]+, V([\d.]+)", compiled.ptx)
            versions[library] = tuple(map(int, stated[1].split("."))) if stated else (0,)
        else:
            failures.append(f"{library}: {compiled.reason.removeprefix(f'{library} ')}")
    return versions or Refused("\n".join(failures))


def _cupy() -> Path:
    """Return the folder of CuPy, which is not imported; a path without files if there is none."""
    found = PathFinder.find_spec("cupy")  # also if a test has replaced the module
    return Path(found.origin).parent if found and found.origin else Path(os.devnull)


def _major_of_cupy() -> int:
    """Return the major version of CUDA for which CuPy's wheel was built; 0 if it is not known."""
    with suppress(OSError, ValueError, KeyError):
        wheel = json.loads((_cupy() / ".data" / "_wheel.json").read_bytes())
        return int(wheel["cuda"].split(".")[0])
    return 0


@cache
def _includes_of_cupy() -> tuple[str, ...]:
    """Return the options for CUDA's C++ libraries in CuPy, if CuPy is installed."""
    own = _cupy() / "_core" / "include"
    core = own / "cupy" / "_cccl"  # cub, thrust and libcu++
    folders = (core / "cub", core / "thrust", core / "libcudacxx", own) if core.is_dir() else ()
    return tuple(f"-I{folder}" for folder in folders)


@cache
def _includes_of_cuda(library: Path) -> tuple[str, ...]:
    """Return the options for CUDA's headers in wheels and in a toolkit.

    First come the headers that were installed with the library, last those of another version.
    """
    known = ("cuda_fp16.h", "crt/mma.h")
    folders = [*_wheel_folders("include"), TOOLKIT / "include"]
    folders = [each for each in folders if any((each / name).is_file() for name in known)]
    own = re.search(rb"\.so\.(\d+)", os.fsencode(library.resolve().name))

    def rank(folder: Path) -> tuple[bool, bool]:
        header = folder / "cuda_runtime_api.h"
        text = header.read_bytes() if header.is_file() else b""
        major = re.search(rb"define CUDART_VERSION +(\d+)\d{3}\b", text)
        return folder.parent != library.parent.parent, bool(major and own and major[1] != own[1])

    return tuple(f"-I{each}" for each in sorted(folders, key=rank))


def _wheel_folders(folder: str) -> list[Path]:
    parents = map(Path, _folders_of_nvidia())
    return [path for each in parents for path in sorted(each.glob(f"*/{folder}"))]


def _folders_of_nvidia() -> list[str]:
    spec = PathFinder.find_spec("nvidia")  # a namespace: each of NVIDIA's wheels adds a folder
    return list(spec.submodule_search_locations or ()) if spec else []


class _Child:
    """A process that compiles one source after another.

    folder: where it puts the headers that a library contains, if sources include headers.
    """

    idle: list[_Child] = []  # noqa: RUF012  (shared by all threads)

    def __init__(self, library: Path, folder: Path | None) -> None:
        self.library = library
        installed = hashlib.sha256(str(_installed(library)).encode()).hexdigest()
        headers = str(folder / f"headers-{installed[:20]}") if folder else ""
        paths = json.dumps([str(library), headers, *_includes_of_cuda(library)])
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [*PYTHON, __file__, paths],
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,
            text=True,
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
        if status == "NVRTC_SUCCESS":
            return Compiled(ptx, log)
        no_memory = "catastrophic error: out of memory" in log
        if status == "NVRTC_ERROR_COMPILATION" and log and not no_memory:
            return Refused("", log)
        self.process.kill()  # the memory of the child is in pieces, or its library is broken
        self.process.wait()
        if status == "NVRTC_ERROR_OUT_OF_MEMORY" or no_memory:
            return Refused(f"the compiler needs more than {limits.gib} of memory", log)
        return Refused(" ".join((f"{self.library} failed: {status}", *log.split())), log)

    def _end(self, limits: Limits) -> str:
        """Return why the process has ended while it compiled a source."""
        code = self.process.wait()
        if code == -SIGXCPU:
            return f"the compiler was stopped after {limits.cpu_seconds} CPU seconds"
        ended = f"by {Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"the compiler ended {ended}; it may use {limits.gib} of memory"


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_Child.idle.clear)  # a fork shares no pipe with its parent


class _Library:
    """NVRTC's functions, in the child.

    NVRTC 13.3 and later contain CUDA's headers, which become the folder `headers`, once. includes:
    options for other headers.
    """

    def __init__(self, path: str, headers: str, *includes: str) -> None:
        self.functions = ctypes.CDLL(path)
        self.functions.nvrtcGetErrorString.restype = ctypes.c_char_p
        install = getattr(self.functions, "nvrtcInstallBundledHeaders", lambda *_: 1)
        installed = install(headers.encode(), 0, None) == 0
        own = (f"-I{headers}", f"-I{headers}/cccl") if installed else ()
        self.includes = (*own, *includes)

    def compile(self, source: str, name: str, options: list[str]) -> tuple[str, str, str]:
        """Return the status, the PTX and the log."""
        program = ctypes.c_void_p()
        options = [*options, *self.includes]
        texts = [each.encode(errors="surrogateescape") for each in (source, name, *options)]
        call = self.functions.nvrtcCreateProgram
        status = call(ctypes.byref(program), texts[0], texts[1], 0, None, None)
        if status == 0:
            flags = (ctypes.c_char_p * len(options))(*texts[2:])
            status = self.functions.nvrtcCompileProgram(program, len(options), flags)
            if status == NO_BUILTINS:  # NVRTC 13.0 does not look for them in its own folder
                for path in sorted(Path(self.functions._name).parent.glob("libnvrtc-builtins.so*")):
                    with suppress(OSError):
                        ctypes.CDLL(str(path))
                status = self.functions.nvrtcCompileProgram(program, len(options), flags)
        ptx = self._text("PTX", program) if status == 0 else ""
        log = self._text("ProgramLog", program)
        self.functions.nvrtcDestroyProgram(ctypes.byref(program))
        return self.functions.nvrtcGetErrorString(status).decode(), ptx, log

    def _text(self, what: str, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        if getattr(self.functions, f"nvrtcGet{what}Size")(program, ctypes.byref(size)):
            return ""
        if size.value > MAX_TEXT:
            sys.exit(f"more than {MAX_TEXT} bytes of {what}")
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


def _serve(requests: IO[str], paths: Sequence[str]) -> None:
    try:
        library = _Library(*paths)
    except (OSError, AttributeError) as error:  # no library of this machine, or another one
        requests.readline()
        print(json.dumps(("it cannot be loaded:", "", str(error))), flush=True)
        return
    for line in requests:
        request: dict[str, Any] = json.loads(line)
        _limit(*request["limits"])
        answer = library.compile(request["source"], request["name"], request["options"])
        print(json.dumps(answer), flush=True)


def _fix_addresses() -> None:
    """Start this program again without random addresses, if the system permits it.

    NVRTC's optimisations depend on addresses: which neighbouring loads it joins, for example. The
    stack begins below the arguments and the environment, which therefore get a constant size.
    """
    personality = ctypes.CDLL(None).personality
    if (now := personality(ASK)) >= 0:
        personality(now | FIXED_ADDRESSES)
    command, libraries = [*PYTHON, *sys.argv], os.environ.get("LD_LIBRARY_PATH", "")
    used = sum(len(os.fsencode(each)) for each in (*command, sys.executable, libraries))
    variables = {"LD_LIBRARY_PATH": libraries, PADDING: "-" * (ARGUMENTS - used)}
    os.execve(sys.executable, command, variables)


if __name__ == "__main__":
    if PADDING not in os.environ:
        _fix_addresses()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _serve(sys.stdin, json.loads(sys.argv[1]))
