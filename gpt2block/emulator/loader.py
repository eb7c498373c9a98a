"""Compile a kernel file with g++ and AddressSanitizer, and run its kernels on NumPy arrays.

The source is the shipped file, unchanged except for `extern __shared__`. Launches run in separate
processes, in which each array is a heap block of exactly its size. An error ends only the process.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import struct
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt2block.cuda import kernels
from gpt2block.doctor import Check
from gpt2block.emulator import cache as cached
from gpt2block.emulator import places, programs, ptx
from gpt2block.emulator.cache import folder as cache_folder
from gpt2block.emulator.library import with_library
from gpt2block.emulator.trace import Trace
from gpt2block.errors import KernelError, NotJudged

HERE = Path(__file__).parent
Order = Literal["forward", "reverse", "shuffled"]
# Modes of compilation. "patterned": uninitialized variables hold large negative numbers.
# "unoptimised": uninitialized variables hold large positive numbers, g++ removes no memory access,
# and two barriers in the same source line count as different barriers. "fast": no checks.
Build = Literal["usual", "patterned", "unoptimised", "fast"]
ORDERS: tuple[Order, ...] = ("forward", "reverse", "shuffled")
TIMEOUT_S = 60.0  # default limit of a launch, in seconds of CPU time
END = "after the file"  # file name in g++'s errors past the last line, as for a missing brace
WALL = 10  # a program is killed after WALL times its limit of CPU time plus GRACE_S seconds
GRACE_S = 30.0
TIMED_OUT, PRINTED = 6, 7  # exit status of a program that exceeded its limit of time, of output
MOST_PRINTED = "1 MiB"
FAULTS = -signal.SIGSEGV, -signal.SIGBUS  # exit status of a program that an access has ended
OUTSIDE = "accesses memory outside its arrays, which has ended the program"
KILLED = (-9, -24, 128 + 9, 128 + 24)  # exit status of a program that SIGKILL or SIGXCPU has ended
STAND_INS = {
    "lib/sm80.cuh": "mma_ptx.h",
    "lib/fast.cuh": "fast.h",
    "lib/overlap.cuh": "overlap.h",
}  # header of kernels_cu → replacement in this folder

_FLAGS = (
    "-std=c++17",
    "-g1",  # line numbers for reports; -g, with locations of variables, doubles the compile time
    "-Og",  # compiles in a sixth less time than -O1
    "-fira-region=one",  # simpler register allocation: saves an eighth of the compile time
    "-fno-omit-frame-pointer",
    "-ffp-contract=off",
    *(("-fuse-ld=gold",) if shutil.which("ld.gold") else ()),  # gold links twice as fast as ld
)
_SANITIZERS = (
    "-fsanitize=address,undefined",
    # The next two options leave out checks that would lengthen compilation by 50 %.
    # AddressSanitizer reports invalid accesses anyway, with the array's name.
    "-fno-sanitize=object-size,pointer-overflow",
    "-fno-sanitize-address-use-after-scope",
    "-fno-sanitize-recover=all",
    # Check accesses by function calls: inline checks lengthen compilation by a fifth, and
    # compilation takes most of the time of an emulated kernel.
    "--param=asan-instrumentation-with-call-threshold=0",
)
# -fno-pie: addresses at run time equal addresses in the file. DWARF 4: some addr2line versions
# confuse the file names of DWARF 5.
_THREADS = ("-fsanitize=thread", "-fno-pie", "-gdwarf-4", "-g1")
_VOLATILE = "--param=tsan-distinguish-volatile=1"  # supported since GCC 11
_PATTERN = "-ftrivial-auto-var-init=pattern"  # supported since GCC 12
_TURNS = "-fsanitize-coverage=trace-pc"  # inserts a call in each basic block, see cuda_on_cpu.cpp
_WAITS = re.compile(
    r"(?<!asm )(?<!asm__ )\bvolatile\b|\batomic\w*|\b__ldcv\b|\b__nanosleep\b"
    r"|\b(?:atom|red|mbarrier|nanosleep)\.|\bld\.(?:volatile|relaxed|acquire)"
)
# Order of threads → byte that fills shared memory and, in unoptimised programs, local variables.
# As floats, these bytes are NaN, a large positive and a large negative number. A maximum, minimum
# or sum that reads unwritten memory is therefore wrong in at least one order.
_FILLS = {"forward": 0xFF, "reverse": 0x7B, "shuffled": 0xFB}
_WARNINGS = (
    "-fno-strict-aliasing",  # a float array read as float4 is usual in CUDA
    "-Wall",
    "-Wno-unknown-pragmas",  # g++ does not know #pragma unroll
    "-Wno-sign-compare",  # threadIdx.x < n is usual, and NVRTC does not warn either
    "-Wno-unused-function",  # a file does not use all functions of its headers
    "-Wno-maybe-uninitialized",  # false alarms under AddressSanitizer
)
_ALIGNED = r"(?:(?:__align__|alignas)\s*\((?:[^()]|\([^()]*\))*\)\s*)?"
_DYNAMIC_SHARED = re.compile(
    rf"{_ALIGNED}extern\s+(volatile\s+)?{_ALIGNED}__shared__\s+{_ALIGNED}"
    rf"([\w:<>, ]+?)\s+{_ALIGNED}(\w+)\s*\[\s*\]\s*;"
)
# `static` before __shared__ is removed: the emulator's macro __shared__ expands to `static`.
_STATIC_SHARED = re.compile(r"\bstatic\s+(?=(?:volatile\s+)?__shared__)")
_SHARED_ALIGNED = re.compile(
    r"\b__shared__\s+(alignas\s*\((?:[^()]|\([^()]*\))*\))"
)  # g++ requires alignas before `static`, to which __shared__ expands
_DEVICE_VARIABLE = re.compile(  # variables that outlive a launch: __device__ or static
    r"\b__device__\s(?:(?:__align__|alignas)\s*\([^()]*\)|[^(){};=])*[=;{]"
    r"|\bstatic\s+(?!const|__)[\w:<> ]+\s\w+\s*(?:\[[^]]*\]\s*)*[=;{]"
)
_TELLING = re.compile(
    r"cuda_on_cpu: |SUMMARY: |.*runtime error: |.*(READ|WRITE) of size|.* is located \d+ bytes "
    r"|.*hard rss limit"
    r"| +#\d \w+ in (?!.*cuda_on_cpu).*\.cuh?:\d"
)


# Macros of CUDA's compiler that users' files test.
_OF_CUDA = "#define __CUDACC__ 1\n#define __CUDACC_RTC__ 1\n#define __CUDA_ARCH__ 800\n"
# Errors of g++ about a name of a CUDA library that the emulator lacks or defines differently.
_LACKING = re.compile(
    r"^(?:.*/)?(\S+): error: (.*\{anonymous\}::(?:cg|cooperative_groups|cub|cuda)\b.*)$",
    re.MULTILINE,
)
_PLACE = re.compile(r"\{(variable )?(0x[0-9a-f]+)\}")  # address in a program's report
_FOLDER = r"(?<![\w.])/\S*/(?=[\w.-]+:\d)"  # folder of an absolute path
_NOTE = re.compile(r"^cuda_on_cpu: note: (.*)$\n?", re.MULTILINE)

_COMPILE_S = 60  # seconds of CPU time after which g++ is stopped
_stopped: set[str] = set()  # files whose compilation was stopped; not tried again
_HEADER = "cuda_on_cpu.h"
_WITH_HALVES = "with_halves.h"
_POOL = ThreadPoolExecutor(2)
_ahead: dict[tuple[Source, kernels.Defines, bool, Build], Future[Path]] = {}
_messages: dict[Path, str] = {}  # program compiled ahead → g++'s messages, not yet shown


class ShimError(Exception):
    """A kernel does not compile, or a launch of it failed.

    report: the report of the compiler or of the launch. The message also names the launch.
    """

    def __init__(self, message: str, report: str = "") -> None:
        super().__init__(message)
        self.report = report or message


class OverBudget(ShimError):  # noqa: N818  (no error of the kernel)
    """A launch has exceeded its limit of CPU time, limit_s."""

    def __init__(self, message: str, report: str, limit_s: float) -> None:
        super().__init__(message, report)
        self.limit_s = limit_s


class Checks(NamedTuple):
    """Settings of a launch: checks, time limit, and functions that receive the kernel's output."""

    races: bool = False  # search for data races instead of accesses out of bounds
    limit_s: float | None = None  # limit of CPU time in seconds; None: TIMEOUT_S
    printed: Callable[[str], None] = lambda _: None  # receives the text that a kernel prints
    rehearsed: int = 0  # launches on rotated arrays that come first, in the same process
    within: tuple[str, ...] = ()  # command prefix that runs the program, such as prlimit
    build: Build = "usual"
    noted: Callable[[str], None] = lambda _: None  # receives possible causes of a wrong result
    trace: Trace | None = None  # with `races`: receives the steps of threads
    # Whether further launches, on slightly changed arrays, come "before" or "after" the launch.
    varied: Literal["", "before", "after"] = ""


USUAL = Checks()


@dataclass(frozen=True)
class Source:
    """The text of a kernel file, and of headers that replace headers of kernels_cu."""

    name: str
    text: str
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def shipped(cls, name: str) -> Source:
        """Read a file of kernels_cu, and headers that implement PTX instructions in C++."""
        headers = tuple(
            (header, (HERE / own).read_text("ascii")) for header, own in STAND_INS.items()
        )
        return cls(name, kernels.read_source(name), headers)

    def with_only(self, kernel: str) -> Source:
        """Return a copy with only one kernel, because each kernel adds to the compile time.

        A file outside of kernels_cu is returned unchanged, as in `kernels.program`.
        """
        if Path(self.name).is_absolute():
            return self
        return replace(self, text=kernels.with_only(kernel, self.text))

    def edited(self, old: str, new: str, *, header: str = "") -> Source:
        """Return a copy in which `new` replaces the only occurrence of `old`, also in a header."""
        headers = dict(self.headers)
        if header and header not in headers:
            headers[header] = (kernels.SOURCE_DIR / header).read_text("ascii")
        text = headers[header] if header else self.text
        if text.count(old) != 1:
            raise ValueError(f"{header or self.name} has {old!r} {text.count(old)} times")
        text = text.replace(old, new)
        if not header:
            return Source(self.name, text, self.headers)
        return Source(self.name, self.text, tuple((headers | {header: text}).items()))


def run(
    source: Source | str,
    kernel: str,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: Sequence[Any],
    *,
    shared: int = 0,
    defines: kernels.Defines = (),
    storage: str = "float32",
    cache: str | None = None,
    order: Order = "forward",
    seed: int = 0,
    copies_at_once: bool = False,
    early: Collection[str] | None = None,
    races: bool = False,
    build: Build = "usual",
    noted: Callable[[str], None] = lambda _: None,
) -> None:
    """Launch a kernel on NumPy arrays, which it changes in place; None is a null pointer.

    source: a file of kernels_cu by name, or a Source. storage: the dtype of the type `T`. cache:
    the FP8 format of the type `KV`, if it is not `T`. order: the order of the threads of a block
    between two barriers, and of the blocks. copies_at_once: cp.async copies when it is issued,
    instead of as late as its semantics allow. early: None, or for a launch that overlaps the
    previous kernel (lib/overlap.cuh), names of parameters that the kernel may access before the
    wait, in addition to const __restrict__ parameters; other early accesses are errors. races: find
    unordered accesses of two threads to the same memory (races.cpp), instead of accesses out of
    bounds. build, noted: as in Checks. An array that is passed twice becomes the same pointer
    twice. Raises ShimError with the report; the arrays are then unchanged.
    """
    source = Source.shipped(source) if isinstance(source, str) else source
    if not 0 < int(np.prod(block)) <= 1024:
        raise ShimError(f"{kernel}: a block has 1 to 1024 threads, got {block}")
    signature = _prototypes(source).get(kernel)
    if signature is None:
        raise ShimError(f"{source.name} has no kernel {kernel!r}")
    parameters = signature.parameters
    if len(parameters) != len(args):
        raise ShimError(f"{kernel}: expected {len(parameters)} arguments, got {len(args)}")
    pairs = list(zip(args, parameters, strict=True))
    spans: dict[int, DevicePointer] = {}  # id(array) → pointer to a copy of the array
    values: list[DevicePointer | np.generic] = []
    for arg, parameter in pairs:
        if not _is_pointer(parameter):
            values.append(kernels.typed_scalar(kernel, parameter, arg))
        elif arg is None:
            values.append(np.uintp(0))
        else:
            label = _check_array(kernel, parameter, arg, storage, cache)
            if id(arg) not in spans:
                earlier = [other for other, _ in pairs if id(other) in spans]
                if any(np.may_share_memory(other, arg) for other in earlier):
                    raise ShimError(
                        f"{label}: overlaps an earlier argument and is not the same array"
                    )
                spans[id(arg)] = DevicePointer(arg.reshape(-1).view(np.uint8).copy(), 0)
            values.append(spans[id(arg)])
    defines = (*kernels.stored_as(storage, None, cache), *defines)
    options = (order, early, Checks(races, build=build, noted=noted), seed, copies_at_once)
    run_spans(source, kernel, grid, block, values, shared, defines, *options)
    written = {id(arg): arg for arg, parameter in pairs if id(arg) in spans and not parameter.const}
    for arg, parameter in pairs:
        only_read = id(arg) in spans and id(arg) not in written
        if only_read and spans[id(arg)].memory.tobytes() != arg.tobytes():
            raise ShimError(f"{kernel}: wrote to {parameter.name}, which is const")
    for key, array in written.items():
        array.reshape(-1).view(np.uint8)[...] = spans[key].memory


def _check_array(
    kernel: str, parameter: kernels.Parameter, array: Any, storage: str, cache: str | None
) -> str:
    """Return a pointer parameter's label for messages. Raises ShimError if `array` does not fit."""
    try:
        expected, label = kernels.element(kernel, parameter, storage, None, cache)
    except KernelError as error:
        raise ShimError(str(error)) from error
    fits = isinstance(array, np.ndarray) and kernels.dtype_name(array.dtype) == expected
    if not fits or not array.flags.c_contiguous:
        raise ShimError(f"{label}: expected a contiguous array of {expected}")
    return label


class DevicePointer(NamedTuple):
    """A pointer: an allocation (several pointers may share it), and an offset in bytes."""

    memory: NDArray[np.uint8]
    offset: int


def run_spans(
    source: Source,
    kernel: str,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: Sequence[DevicePointer | np.generic],
    shared: int = 0,
    defines: kernels.Defines = (),
    order: Order = "forward",
    early: Collection[str] | None = None,
    checks: Checks = USUAL,
    seed: int = 0,
    copies_at_once: bool = False,
) -> None:
    """Launch a kernel on allocations, which several pointers can share.

    args: a DevicePointer or 0 for each pointer; scalars of the types in the prototype. Other
    arguments and errors: as in `run`.
    """
    parameters = _prototypes(source)[kernel].parameters
    first: dict[int, int] = {}  # address of an allocation → first argument that points into it
    message = []
    for i, arg in enumerate(args):
        if not isinstance(arg, DevicePointer):
            message.append(struct.pack("<q", -1) + arg.tobytes().ljust(8, b"\0"))
            continue
        known = first.setdefault(arg.memory.ctypes.data, i)
        if known == i:
            packed = struct.pack("<qq", arg.memory.nbytes, arg.offset)
            message.append(packed + arg.memory.tobytes())
        else:
            message.append(struct.pack("<qqq", -2, known, arg.offset))
    environment = {"COPIES_AT_ONCE": "1"} if copies_at_once or early is not None else {}
    if early is not None:
        environment["LATE_ARRAYS"] = _late(parameters, args, early)
    environment |= _conditions(source, shared, order, checks.build)
    numbers = [*grid, *(1,) * (3 - len(grid)), *block, *(1,) * (3 - len(block))]
    words = [kernel, *numbers, order, seed, *(p.name for p in parameters)]
    launch = f"{kernel}, grid {grid}, block {block}, order {order}"
    program = compile_kernel_file(source, defines, checks.races, checks.build)

    def detailed() -> Path:
        return _compile(source, defines, checks.races, checks.build, variables=True)

    output = _execute(program, words, b"".join(message), launch, environment, checks, detailed)
    written = [arg.memory for i in first.values() if isinstance(arg := args[i], DevicePointer)]
    # The output consists of the text that the kernel printed, followed by the arrays.
    start = len(output) - sum(memory.nbytes for memory in written)
    if start < 0:
        ended = "ended before all threads have returned, as by exit()"
        raise ShimError(f"{launch}: {ended}", ended)
    checks.printed(output[:start].decode(errors="replace"))
    for memory in written:
        memory[...] = np.frombuffer(output, np.uint8, memory.nbytes, start)
        start += memory.nbytes


def _conditions(source: Source, shared: int, order: Order, build: Build) -> dict[str, str]:
    """Return a launch's environment variables: shared memory's size, fill byte, other settings."""
    found = {"DYNAMIC_BYTES": str(shared)}
    if build != "usual":
        found["FILL"] = str(_FILLS[order])
    if build == "unoptimised":
        found["EXACT_PLACES"] = "1"
    if _has_variables(source):
        found["VARIABLES"] = "1"
    return found


@cache
def _has_variables(source: Source) -> bool:
    return bool(_DEVICE_VARIABLE.search(kernels.without_comments(source.text)))


def _late(
    parameters: Sequence[kernels.Parameter],
    args: Sequence[DevicePointer | np.generic],
    early: Collection[str],
) -> str:
    """Return ",a,b,": names of pointers not to be accessed before the previous kernel has ended.

    Memory that a const __restrict__ parameter shares with another parameter may be accessed early.
    """
    pointers = [
        (parameter, arg.memory.ctypes.data if isinstance(arg, DevicePointer) else 0)
        for parameter, arg in zip(parameters, args, strict=True)
        if _is_pointer(parameter)
    ]
    constant = {at for p, at in pointers if (p.const and p.restrict) or p.name in early}
    return f",{','.join(p.name for p, at in pointers if at not in constant)},"


@cache
def _prototypes(source: Source) -> dict[str, kernels.Signature]:
    return kernels.parse(source.text, source.name)


def _is_pointer(parameter: kernels.Parameter) -> bool:
    return parameter.ctype.endswith("*")


def _execute(
    program: Path,
    words: Sequence[object],
    message: bytes,
    launch: str,
    extra: Mapping[str, str],
    checks: Checks,
    detailed: Callable[[], Path],
) -> bytes:
    """Run a program and return its output. `detailed` returns the program with more debug info."""

    def place(found: re.Match[str]) -> str:
        address = int(found[2], 16)
        if not found[1]:
            return places.line(program, address)
        return places.variable(detailed(), address) or "a shared variable"

    limit_s = TIMEOUT_S if checks.limit_s is None else checks.limit_s
    own = {**extra, "TIME_LIMIT": str(limit_s)}  # seconds; then the program reports its source line
    if checks.rehearsed:
        own["REHEARSAL"] = str(checks.rehearsed)
    if checks.varied:
        own["VARIED"] = checks.varied
    if checks.trace:
        own |= checks.trace.environment
    timeout_s = WALL * limit_s + GRACE_S
    try:
        done = programs.launch(program, words, message, own, timeout_s, checks.within)
    except subprocess.TimeoutExpired as error:
        raise NotJudged(
            f"{launch}: not judged: stopped after {timeout_s:g} s, in which it did not get "
            f"{limit_s:g} s of CPU time: run it on a less busy computer"
        ) from error
    report = done.stderr.decode(errors="replace")
    if checks.trace:
        report = checks.trace.read(report, program, detailed)
    report = _PLACE.sub(place, report)
    for note in _NOTE.findall(report):
        checks.noted(re.sub(_FOLDER, "", note))
    if done.returncode == 0:
        return done.stdout
    checks.printed(done.stdout.decode(errors="replace"))
    report = _NOTE.sub("", report)
    ended = OUTSIDE if done.returncode in FAULTS else f"exit status {done.returncode}"
    found = _readable(report) or ended
    if done.returncode in KILLED or "hard rss limit" in report:
        raise NotJudged(
            f"{launch}: not judged: the system has ended the program, which takes too much time or "
            "memory"
        )
    if done.returncode == PRINTED:
        raise NotJudged(f"{launch}: not judged: prints more than {MOST_PRINTED}: let it print less")
    if done.returncode == TIMED_OUT:
        found = f"still running after {limit_s:g} s of CPU time\n{found}"
        raise OverBudget(f"{launch}: {found}", found, limit_s)
    raise ShimError(f"{launch}: {found}", found)


def _readable(report: str) -> str:
    """Return the lines of a sanitizer's report about the kernel, the most informative first."""
    report = re.sub(_FOLDER, "", report)
    lines = [line for line in report.splitlines() if _TELLING.match(line)] or report.splitlines()
    for most in (
        "divergent barrier",
        "race in ",
        "read-only load in ",
        "does not end: ",
        "out of bounds: ",
        "before wait",
        "runtime error: ",
        "SUMMARY: ",
    ):
        lines.sort(key=lambda line: most not in line)
        if lines and most in lines[0]:
            break
    return "\n".join(line.replace("cuda_on_cpu: ", "") for line in lines)


INSTALL = "apt install g++ (Debian, Ubuntu) or dnf install gcc-c++ libasan libubsan (Fedora)"


def check() -> Check:
    """Return whether the emulator can run on this computer. Never raises."""
    try:
        problem = missing()
        version = "" if problem else _output("g++", "-dumpfullversion")
    except (OSError, subprocess.SubprocessError) as error:
        problem = f"g++ does not run: {error}"
    if problem:
        return Check("g++", False, f"{problem}: the emulator compiles kernels with it", INSTALL)
    return Check("g++", True, f"{version}, for the emulator on the CPU")


def missing() -> str | None:
    """Name a program or library that the emulator needs but this computer lacks, or return None."""
    if shutil.which("g++") is None:
        return "g++ is not installed"
    for library in ("libasan.so", "libubsan.so"):  # g++ prints a path only if a file is installed
        if os.sep not in _output("g++", f"-print-file-name={library}"):
            return f"g++ has no {library}"
    return None


def compile_kernel_file(
    source: Source | str,
    defines: kernels.Defines = (),
    races: bool = False,
    build: Build = "usual",
) -> Path:
    """Compile a program that can run every kernel of a file; compiled programs are reused.

    races: build the program that finds races, instead of the program with AddressSanitizer. Issues
    warnings with the messages of g++, in the thread of the caller.
    """
    known = Source.shipped(source) if isinstance(source, str) else source
    begun = _ahead.get((known, defines, races, build))
    program = begun.result() if begun else _compile(known, defines, races, build)
    if not cached.found(program):  # another process has deleted it
        _compile.cache_clear()
        program = _compile(known, defines, races, build)
    if text := _messages.pop(program, None):
        warnings.warn(text, stacklevel=2)
    return program


def compile_ahead(
    source: Source | str,
    defines: kernels.Defines = (),
    races: bool = False,
    build: Build = "usual",
) -> None:
    """Start compiling a file's program in another thread, for a later launch."""
    cache_folder(), _runtime()  # create the folder and the runtime before several threads need them
    known = Source.shipped(source) if isinstance(source, str) else source
    key = known, defines, races, build
    if key not in _ahead:
        _ahead[key] = _POOL.submit(_compile, *key)


def unset_variables(source: Source, defines: kernels.Defines = ()) -> list[str]:
    """Return a sentence for each variable that g++ suspects to be read before it is set.

    Use this only to explain a wrong result: these warnings can be false alarms.
    """
    warn = ("-Wuninitialized", "-Wmaybe-uninitialized")
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        files = {"unit.cpp": _translation_unit(source, defines), **dict(source.headers)}
        _write(Path(folder), files)
        paths = (f"-I{HERE}", f"-I{kernels.SOURCE_DIR}")
        command = ("g++", "-std=c++17", "-O1", "-c", "unit.cpp", "-o", os.devnull, *warn, *paths)
        env = {**os.environ, "LC_ALL": "C"}  # in locale C, g++ prints ASCII quotes
        said = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, env=env
        ).stderr
    file = re.escape(Path(source.name).name)
    declared = rf"{file}:(\d+):\d+: note: '(\w+)' (?:was )?declared here"
    return [
        f"{name}, declared at {Path(source.name).name}:{line}, may be read before it has a value"
        for line, name in dict.fromkeys(re.findall(declared, said))
    ]


@cache
def confiner() -> Path:
    """Return the program that runs another program with restricted rights (confine.cpp)."""
    return _build("confine", {}, (str(HERE / "confine.cpp"), "-std=c++17", "-O1"))


@cache
def readable() -> tuple[str, ...]:
    """Return words for the confiner: the folders that g++ and its programs read."""
    found = shutil.which("g++")
    own = (str(Path(found).resolve().parent.parent),) if found else ()
    paths = (*own, "/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/proc/self")
    return tuple(f"r={path}" for path in dict.fromkeys(paths))


def _confined_compiler(folder: str) -> tuple[str, ...]:
    """Return the command prefix with which g++ reads no files but its own and the emulator's."""
    own = (f"r={path}" for path in (HERE, kernels.SOURCE_DIR, cache_folder()))
    return str(confiner()), *readable(), *own, f"w={folder}", "w=/dev/null", "--"


@cache
def _runtime(name: str = "cuda_on_cpu.cpp") -> Path:
    return _build(f"{Path(name).stem}.o", {}, ("-c", str(HERE / name), *_FLAGS, "-O2"))


@cache
def _precompiled(header: str, flags: tuple[str, ...]) -> dict[str, Path]:
    """Precompile the header that all programs include; return {} if no folder keeps programs.

    The precompiled header saves a third of the compile time of a program. A process whose folder is
    temporary compiles only two or three programs, too few to gain from it.
    """
    if not cached.lasts():
        return {}
    precompiled = f"{header}.gch"
    arguments = ("-x", "c++-header", str(HERE / header), *flags, "-w")
    return {precompiled: _build(precompiled, {}, arguments)}


def _first_header(source: Source) -> str:
    """Return the name of the header that a program includes first.

    For a shipped file, if programs are kept, this is a precompiled header with the 16-bit types. It
    hides a missing include, which NVRTC reports. A user's file must include the types itself.
    """
    shipped = not Path(source.name).is_absolute()
    return _WITH_HALVES if shipped and cached.lasts() else _HEADER


@cache
def _compile(
    source: Source,
    defines: kernels.Defines,
    races: bool = False,
    build: Build = "usual",
    variables: bool = False,
) -> Path:
    """Compile a program. `variables`: add debug information on variables; addresses stay equal."""
    headers = {str(p): p.read_text("ascii") for p in kernels.SOURCE_DIR.rglob("*.cuh")}
    files = {"unit.cpp": _translation_unit(source, defines), **dict(source.headers)}
    options = _options(source, races, build)
    flags = (f"-I{HERE}", f"-I{kernels.SOURCE_DIR}", *options)
    salt, links = repr(sorted(headers.items())), _precompiled(_first_header(source), options)
    first, last = str(_runtime()), str(_runtime("shared_end.cpp"))  # events.h explains the order
    if build == "fast":
        without_asan = str(_runtime("no_asan.cpp"))
        inputs = (first, "unit.cpp", last, without_asan)
        return _build(source.name, files, (*inputs, *flags), salt, links)
    if not races:
        return _build(source.name, files, (first, "unit.cpp", last, *flags), salt, links)
    # The program is linked without -fsanitize=thread, so that races.cpp replaces libtsan.
    detail, links = (("-g",), {}) if variables else ((), links)
    unit = _build(f"{source.name}.o", files, ("unit.cpp", "-c", *flags, *detail), salt, links)
    others = (str(_runtime(name)) for name in ("races.cpp", "no_asan.cpp"))
    parts = (first, str(unit), last, *others)
    program = _build(source.name, {}, (*parts, "-no-pie"))
    if unit in _messages:
        _messages[program] = _messages.pop(unit)
    return program


def _options(source: Source, races: bool, build: Build) -> tuple[str, ...]:
    version = _version()
    checks = ("-O2",) if build == "fast" else _THREADS if races else _SANITIZERS
    options = [*_FLAGS, *_WARNINGS, *checks]
    if races and version >= 11:
        options.append(_VOLATILE)
    if build == "unoptimised":
        options.append("-O0")
    if build == "patterned" and version >= 12:
        options.append(_PATTERN)
    if build != "usual" and _WAITS.search(kernels.without_comments(source.text)):
        options.append(_TURNS)
    return tuple(options)


def _version() -> int:
    """Return the major version of g++."""
    return int(_output("g++", "-dumpversion").partition(".")[0])


def translated(source: Source, defines: kernels.Defines) -> str | None:
    """Return a user's file with C++ in place of inline PTX, or None if it has no inline PTX.

    Raises NotJudged for PTX that the emulator does not support.
    """
    own = kernels.without_host_headers(source.text)
    return ptx.translated(own, source.name, _OF_CUDA + _constants(defines))


def _constants(defines: kernels.Defines) -> str:
    return "".join(f"#define {name} {value}\n" for name, value in defines)


def _translation_unit(source: Source, defines: kernels.Defines) -> str:
    own, prelude = source.text, ""
    if Path(source.name).is_absolute():
        without_ptx = translated(source, defines)
        system, own = with_library(without_ptx or kernels.without_host_headers(own))
        prelude = system + (ptx.HEADER if without_ptx else "") + ptx.POISON + _OF_CUDA
    text = _DYNAMIC_SHARED.sub(_dynamic, _STATIC_SHARED.sub("", own))
    text = _SHARED_ALIGNED.sub(r"\1 __shared__", text)
    if re.search(r"extern\s+__shared__", kernels.without_comments(text)):
        raise NotJudged(f"{source.name}: the loader does not understand its `extern __shared__`")
    entries = "".join(
        f'{{"{name}", cuda_on_cpu::Call<&{name}>::call, cuda_on_cpu::Call<&{name}>::elements}},\n'
        for name in _prototypes(source)
    )
    # The anonymous namespace gives templates internal linkage. With external linkage,
    # AddressSanitizer would put no redzones around the static variables of template functions.
    return (
        f'#include "{_first_header(source)}"\n{prelude}{_constants(defines)}'
        f'namespace {{\n#line 1 "{source.name}"\n{text}\n#line 1 "{END}"\n'
        f"const cuda_on_cpu::Entry cuda_on_cpu_entries[] = {{\n{entries}{{}}}};\n}}\n"
        "const cuda_on_cpu::Entry* const cuda_on_cpu::entries = cuda_on_cpu_entries;\n"
    )


def dynamic_arrays(text: str) -> dict[str, str]:
    """Return the C++ element type of each `extern __shared__` array in a source, by name."""
    found = _DYNAMIC_SHARED.finditer(kernels.without_comments(text))
    return {each[3]: each[2] for each in found}


def _dynamic(found: re.Match[str]) -> str:
    """Replace `extern __shared__ T name[];` by a pointer, in the same number of lines."""
    element, name = (found[1] or "") + found[2], found[3]
    memory = f'cuda_on_cpu::dynamic_shared("{name}", sizeof({element}))'
    return f"{element}* {name} = static_cast<{element}*>({memory});" + "\n" * found[0].count("\n")


def _build(
    name: str,
    files: Mapping[str, str],
    arguments: tuple[str, ...],
    salt: str = "",
    links: Mapping[str, Path] = MappingProxyType({}),
) -> Path:
    """Run g++ in a temporary folder, and move the result into the cache atomically.

    links: name in the folder → file of the cache, which does not change the result. The messages of
    g++ are kept next to the result, so that each process shows them. Raises ShimError for a file
    that does not compile, and NotJudged for one that takes too long.
    """
    own = "".join(
        path.read_text("ascii") for path in sorted([*HERE.rglob("*.h"), *HERE.rglob("*.cpp")])
    )
    key = repr((files, arguments, salt, own, _output("g++", "--version")))
    target = cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}-{Path(name).name}"
    said = target.with_name(f"{target.name}.said")
    if not cached.found(target):
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            _write(Path(folder), files)
            for link, path in links.items():
                (Path(folder) / link).symlink_to(path)
            users = Path(name).is_absolute()
            text = _compiled(name, arguments, folder, _confined_compiler(folder) if users else ())
            if text:
                (Path(folder) / "said").write_text(text, "utf-8")
                os.replace(Path(folder) / "said", said)
            os.replace(Path(folder) / "result", target)
        cached.trim()
    if cached.found(said):
        _messages[target] = f"{name}: g++ says\n{said.read_text('utf-8')}"
    return target


def _compiled(
    name: str, arguments: tuple[str, ...], folder: str, within: tuple[str, ...] = ()
) -> str:
    """Run g++ in a folder, for at most _COMPILE_S seconds of CPU time, and return its messages.

    within: command prefix of g++.
    """
    file = name.removesuffix(".o")
    if file in _stopped:
        raise _too_long(file)
    limited = ("/bin/sh", "-c", f'ulimit -t {_COMPILE_S}; exec g++ "$@"', "g++")
    env = {**os.environ, "TMPDIR": folder, "LC_ALL": "C"}  # in locale C, g++ prints ASCII quotes
    done = subprocess.run(
        (*within, *limited, *arguments, "-o", "result"),
        cwd=folder, capture_output=True, text=True, check=False, env=env,
    )  # fmt: skip
    if "signal terminated program" in done.stderr:
        _stopped.add(file)
        raise _too_long(file)
    if lacking := done.returncode and _LACKING.search(done.stderr):
        what = lacking[2].replace("{anonymous}::", "")
        raise NotJudged(f"{lacking[1]}: the emulator lacks a part of CUDA: {what}: use a GPU")
    if done.returncode:
        ptx.check_replaced(done.stderr)
        raise ShimError(f"{name} does not compile for the CPU:\n{done.stderr}", done.stderr)
    return done.stderr


def _too_long(file: str) -> NotJudged:
    return NotJudged(
        f"{file}: not judged: g++ needs more than {_COMPILE_S} s of CPU time, or more memory than "
        "there is: expected a file that compiles in less"
    )


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for file, text in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text, "utf-8")


@cache
def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
