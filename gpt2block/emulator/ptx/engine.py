"""Launch kernels of a PTX module on the CPU: build the engine, pass arguments, return findings."""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import platform
import re
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt2block.emulator.ptx import cache as kept
from gpt2block.emulator.ptx import nvrtc
from gpt2block.emulator.ptx.counters import Counts, Line, by_line
from gpt2block.emulator.ptx.encode import CODE, Encoded, address_of, encode
from gpt2block.emulator.ptx.parse import Module, Place, Variable
from gpt2block.emulator.ptx.tensor_maps import TensorMap

Order = Literal["forward", "reverse", "shuffled", "interleaved"]
ORDERS: tuple[Order, ...] = ("forward", "reverse", "shuffled", "interleaved")
MAX_THREADS = 1024  # threads of a block
BUDGET = 100_000_000  # warp instructions of a launch
LARGE_BUDGET = 100 * BUDGET  # a launch without checks has it
SOURCES = Path(__file__).parent / "cpp"
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-fno-gnu-unique")
NO_COMPILER = "g++, which compiles the engine once, is not installed: apt install g++"
IN_SHARED, IN_LOCAL, IN_PARAMS = -2, -3, -4  # Finding::Where of machine.h
_BUILDING = threading.Lock()
Thread = tuple[tuple[int, int, int], tuple[int, int, int]]  # block and thread


class Where(NamedTuple):
    """A thread, and the line that it executes. file: as the compiler was told."""

    block: tuple[int, int, int]
    thread: tuple[int, int, int]
    file: str
    line: int

    def __str__(self) -> str:
        return f"thread {self.thread}"


@dataclass(frozen=True)
class Finding:
    """An error that a launch has found in a kernel.

    kind: "race", "out of bounds", "constant", "before the wait", "misaligned", "unwritten", "kept",
    "barrier", "mask", "async", "division", "branch", "assert", "trap", "read-only" or "endless".
    array: the name of the accessed array or variable, or "". size: its bytes, or 0. local: whether
    it is in local memory. other: the thread of the second access, or None.
    """

    kind: str
    text: str
    kernel: str
    now: Where
    other: Where | None = None
    verb: str = ""
    other_verb: str = ""
    array: str = ""
    byte: int = 0
    bytes: int = 0
    size: int = 0
    local: bool = False

    @property
    def fatal(self) -> bool:
        """Return whether the finding has ended the launch, as all kinds but two do."""
        return self.kind not in ("unwritten", "kept")

    @property
    def element(self) -> str:
        """Return the array with the index of an element of the size of the access."""
        return f"{self.array}[{self.byte // max(1, self.bytes)}]" if self.array else "no array"

    def __str__(self) -> str:
        here, there = (
            f"{each} of block {each.block}, line {each.line}" if each else ""
            for each in (self.now, self.other)
        )
        if self.other_verb:
            why = self.text or "nothing orders the two accesses"
            both = f"{here}, {self.verb} {self.element}; {there}, {self.other_verb} it"
            return f"{self.kind}: {both}: {why}"
        if self.kind == "race":
            return f"race: {here}, {self.verb} {self.text}: {there}"
        if self.verb:
            place = f"byte {self.byte} of {self.array or 'no array'}"
            return f"{self.kind}: {here}, {self.verb} {self.bytes} bytes at {place}"
        return f"{self.kind}: {here}: {self.text}" + (f"; {there}" if there else "")


class Trace(NamedTuple):
    """A request for the steps of threads, of which a launch keeps the last 20,000.

    threads: whose steps. element: name of an array and number of a byte, whose writes by any thread
    are steps, too.
    """

    threads: Sequence[Thread] = ()
    element: tuple[str, int] | None = None


class TraceStep(NamedTuple):
    """A step of a thread, in the order of the launch.

    kind: "reads", "writes", "atomically changes"; in an exchange of lanes "gathers" or "receives";
    or "waits at the barrier", "arrives at the barrier", "passes the barrier", "__threadfence()",
    "__threadfence_block()" or "returns".
    array, byte, size: the accessed bytes. size of an exchange: of the value that the lane sends or
    receives; byte: the mask of the lanes; source: the lane whose value a shuffle takes, or -1.
    value: the first 16 bytes, or b"" if they are not known. before: those that an atomic operation
    changes. opcode, function: of the instruction.
    """

    at: Where
    kind: str
    opcode: str = ""
    function: str = ""
    array: str = ""
    byte: int = 0
    size: int = 0
    source: int = -1
    value: bytes = b""
    before: bytes = b""


@dataclass(frozen=True)
class Result:
    """The findings of a launch.

    instructions: number of executed instructions of warps. counts: by line of the source, if they
    were requested. steps: of the threads of a Trace; left_out: number of earlier steps, which are
    not kept.
    """

    findings: tuple[Finding, ...]
    instructions: int
    printed: str
    counts: Mapping[Line, Counts]
    steps: tuple[TraceStep, ...] = ()
    left_out: int = 0


class Pointer(NamedTuple):
    """An argument that points into an array, a number of bytes after its start."""

    array: np.ndarray
    offset: int


class Checks(NamedTuple):
    """Settings of launches.

    errors: whether to search for races and for memory that is read before it is written; accesses
    out of bounds are always errors. budget: number of instructions of warps after which a launch
    counts as endless. variant: chooses values on which no result may depend, such as the number of
    the multiprocessor and the addresses of arguments. debug: whether to compile without
    optimisation (-G), so that no access is removed. seen: receives the result of each launch.
    counters: whether to count accesses and other events of each line. trace: the threads whose
    steps are recorded.
    """

    errors: bool = False
    budget: int = LARGE_BUDGET
    variant: int = 0
    debug: bool = False
    seen: Callable[[Result], None] = lambda _: None
    counters: bool = False
    trace: Trace | None = None


CHECKED = Checks(errors=True, budget=BUDGET)


class LaunchError(RuntimeError):
    """The engine cannot run a kernel: a tool is missing, or arguments do not fit."""


def launch(
    module: Module,
    kernel: str,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[object],
    *,
    shared: int = 0,
    order: Order = "forward",
    checks: Checks = CHECKED,
    names: Sequence[str] = (),
    early: Sequence[bool] | None = None,
) -> Result:
    """Launch a kernel.

    args: NumPy arrays, which the launch changes; numbers; bytes for structures; None for a null
    pointer. names: of the parameters. early: for a launch that overlaps the previous kernel,
    whether each argument may be accessed before the wait for that kernel.

    Raises encode.UnsupportedError if the engine does not know an instruction of the kernel.
    """
    loaded = _load(module, kernel)
    encoded = loaded.encoded
    cluster = encoded.directives.get("reqnctapercluster", ())
    _check_sizes(kernel, grid, block, cluster)
    # Threads that launch kernels at the same time share the variables of a module.
    with module.lock if encoded.variables else nullcontext():
        arrays = _Arrays(module, encoded, checks.variant)
        params = arrays.arguments(args, names)
        data = _LaunchData()
        data.grid, data.block, data.cluster = _three(grid), _three(block), _three(cluster)
        data.shared, data.order = shared, ORDERS.index(order)
        data.checks = checks.errors or checks.trace is not None
        data.variant, data.entry, data.budget = checks.variant, encoded.entry, checks.budget
        data.params = ctypes.cast(ctypes.create_string_buffer(params, len(params) + 1), _BYTES)
        data.param_bytes, data.array_count = len(params), len(arrays.all)
        table = arrays.table()
        data.variables, data.arrays = len(encoded.variables), table.ctypes.data
        if checks.trace:
            _request(checks.trace, data, [each.name for each in arrays.all])
        counted = np.zeros((len(encoded.places), len(Counts._fields)), np.int64)
        data.counts = counted.ctypes.data if checks.counters else None
        if early is not None:
            accessible = arrays.early(early)
            data.early = accessible.ctypes.data
        text = loaded.library.ptx_launch(loaded.handle, ctypes.byref(data)).decode(errors="replace")
        found, traced, printed = text.split("\x1d", 2)
        read = _Findings(module, arrays, data.grid, data.block)
        findings = tuple(read.finding(each) for each in found.split("\x1e")[:-1])
        if not any(each.fatal for each in findings):
            arrays.keep(module)
        steps = tuple(read.step(each) for each in traced.split("\x1e")[:-1])
        counts = by_line(counted, encoded.places, module.files) if checks.counters else {}
        return Result(findings, data.executed, printed, counts, steps, data.left_out)


def _request(trace: Trace, data: _LaunchData, names: Sequence[str]) -> None:
    """Pass a Trace to the C++ side."""
    numbers: list[int] = []
    for block, thread in trace.threads:
        numbers += _number(block, data.grid), _number(thread, data.block)
    data.traced = (ctypes.c_int64 * (len(numbers) + 1))(*numbers)
    data.traced_count, data.array = len(trace.threads), -1
    if trace.element:
        data.array, data.byte = names.index(trace.element[0]), trace.element[1]


def _number(at: Sequence[int], sizes: Sequence[int]) -> int:
    return int(at[0] + sizes[0] * (at[1] + sizes[1] * at[2]))


def _check_sizes(
    kernel: str, grid: Sequence[int], block: Sequence[int], cluster: Sequence[int]
) -> None:
    if not 0 < math.prod(block) <= MAX_THREADS:
        raise LaunchError(f"{kernel}: a block has 1 to {MAX_THREADS} threads, got {tuple(block)}")
    if min(grid) < 1 or any(n % m for n, m in zip(grid, cluster, strict=False)):
        raise LaunchError(
            f"{kernel}: expected a grid of whole clusters {tuple(cluster)}, got {tuple(grid)}"
        )


def _three(sizes: Sequence[int]) -> ctypes.Array[ctypes.c_uint32]:
    return (ctypes.c_uint32 * 3)(*sizes, *(1,) * (3 - len(sizes)))


_BYTES = ctypes.POINTER(ctypes.c_uint8)


_TABLES = {  # attributes of Encoded, as in main.cpp and machine.h
    "code": np.dtype("i4"),
    "operands": np.dtype("i4,i4,i4,i8", align=True),
    "parts": np.dtype("i4"),
    "constants": np.dtype("u8"),
    "gaps": np.dtype("i8"),
}
_SIZES = "rows", "predicates", "shared_bytes", "local_bytes", "granule"


class _Table(ctypes.Structure):
    _fields_ = (("first", ctypes.c_void_p), ("count", ctypes.c_int64))


class _ProgramData(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_char_p) for name in ("forms", "specials")),
        *((name, _Table) for name in _TABLES),
        *((name, ctypes.c_uint32) for name in _SIZES),
    )


class _LaunchData(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint32 * 3) for name in ("grid", "block", "cluster")),
        *((name, ctypes.c_uint32) for name in ("shared", "order", "checks", "variant")),
        *((name, ctypes.c_uint32) for name in ("entry", "variables")),
        ("budget", ctypes.c_int64),
        ("params", _BYTES),
        *((name, ctypes.c_int64) for name in ("param_bytes", "array_count")),
        *((name, ctypes.c_void_p) for name in ("arrays", "early", "counts")),
        ("executed", ctypes.c_int64),
        ("traced", ctypes.POINTER(ctypes.c_int64)),
        *((name, ctypes.c_int64) for name in ("traced_count", "array", "byte", "left_out")),
    )


class _Array(NamedTuple):
    """An array of a launch. written: 1 for each byte that has a value; None if all have one."""

    name: str
    data: NDArray[np.uint8]
    address: int
    written: NDArray[np.uint8] | None = None
    constant: bool = False


class _Arrays:
    """Memory of a launch: variables of the module, then arguments.

    A variant other than 0 changes the addresses of arguments: their distances, and by unused arrays
    before them their upper bits. If it is odd, the order of the arguments in memory is reversed.
    """

    def __init__(self, module: Module, encoded: Encoded, variant: int) -> None:
        self.encoded, self.variant = encoded, variant
        self.all: list[_Array] = []
        self.of_arguments: dict[int, int] = {}  # argument → number of its array
        for number, variable in enumerate(encoded.variables):
            first = _initial(variable, module, encoded)
            data = np.frombuffer(module.memory.setdefault(variable.name, first), np.uint8).copy()
            written = (np.array(first, np.uint8) == data).view(np.uint8)
            name, constant = plain_name(variable.name), variable.space == "const"
            self.all.append(_Array(name, data, address_of(number), written, constant))

    def arguments(self, args: Sequence[object], names: Sequence[str]) -> bytes:
        """Return the parameters' bytes, and add arrays."""
        parameters = self.encoded.parameters
        if len(args) != len(parameters):
            raise LaunchError(
                f"{self.encoded.kernel} has {len(parameters)} parameters, got {len(args)}"
            )
        block = bytearray(self.encoded.parameter_bytes)
        # (address, bytes) → number: an array that is passed twice has one address.
        numbers: dict[tuple[int, int], int] = {}
        rng, most = np.random.default_rng(self.variant), 2**28 if self.variant else 1
        unused, *starts = map(int, rng.integers(most, size=1 + len(args)))
        self.all += [_Array("", np.empty(0, np.uint8), 0)] * (unused % 64)
        given = list(enumerate(zip(parameters, args, strict=True)))
        for k, ((offset, parameter), value) in given[:: -1 if self.variant % 2 else 1]:
            array, start = value[:2] if isinstance(value, Pointer | TensorMap) else (value, 0)
            if not isinstance(array, np.ndarray):
                block[offset : offset + parameter.bytes] = _scalar(value, parameter)
                continue
            if not array.flags.c_contiguous:
                raise LaunchError(f"argument {k} of {self.encoded.kernel} is not contiguous")
            key = array.ctypes.data, array.nbytes
            number = self.of_arguments[k] = numbers.setdefault(key, len(self.all))
            if number == len(self.all):
                name, first = names[k] if names else f"argument {k}", 32 * starts[k]
                data = array.reshape(-1).view(np.uint8)
                self.all.append(_Array(name, data, address_of(number) + first))
            address = self.all[number].address
            if isinstance(value, TensorMap):
                block[offset : offset + parameter.bytes] = value.encoded(address)
            else:
                block[offset : offset + 8] = (address + start).to_bytes(8, "little")
        return bytes(block)

    def table(self) -> NDArray[np.uint64]:
        """Return the members of ArrayData of machine.h, a row per array."""
        rows = []
        for _, data, address, written, constant in self.all:
            shadow = 0 if written is None else written.ctypes.data
            rows.append((data.ctypes.data, shadow, data.nbytes, address, constant))
        return np.array(rows, np.uint64)

    def early(self, early: Sequence[bool]) -> NDArray[np.bool_]:
        """Return for each array whether it may be accessed before the wait."""
        known = {*range(len(self.encoded.variables))}
        known |= {number for k, number in self.of_arguments.items() if early[k]}
        return np.isin(np.arange(len(self.all)), [*known])

    def keep(self, module: Module) -> None:
        """Keep the values of variables for later launches."""
        for variable, each in zip(self.encoded.variables, self.all, strict=False):
            module.memory[variable.name] = bytearray(each.data.tobytes())


def _scalar(value: Any, parameter: Variable) -> bytes:
    if value is None:
        return bytes(parameter.bytes)
    if isinstance(value, bytes):
        return value.ljust(parameter.bytes, b"\0")[: parameter.bytes]
    if isinstance(value, np.generic):
        return value.tobytes().ljust(parameter.bytes, b"\0")[: parameter.bytes]
    if parameter.type in ("f32", "f64"):
        return struct.pack("<f" if parameter.type == "f32" else "<d", value)
    return (int(value) & (1 << 8 * parameter.bytes) - 1).to_bytes(parameter.bytes, "little")


def _initial(variable: Variable, module: Module, encoded: Encoded) -> bytearray:
    """Return the bytes of a variable before the first launch."""
    data = bytearray(variable.bytes)
    values = re.findall(r"[^\s{},]+(?:\([^)]*\))?(?:\s*\+\s*\d+)?", variable.value)
    for k, text in enumerate(values):
        literal = re.fullmatch(r"0[fFdD]([0-9a-fA-F]+)", text)
        symbol = re.fullmatch(r"(?:generic\()?([A-Za-z_$][\w$]*)\)?(?:\s*\+\s*(\d+))?", text)
        if literal:
            value = int(literal[1], 16)
        elif symbol:
            value = _address(symbol[1], module, encoded) + int(symbol[2] or 0)
        else:
            value = int(text.rstrip("U"), 0)
        size = variable.element
        data[k * size : (k + 1) * size] = (value & (1 << 8 * size) - 1).to_bytes(size, "little")
    return data


def _address(name: str, module: Module, encoded: Encoded) -> int:
    if name in encoded.functions:
        return CODE + encoded.functions[name]
    return address_of(encoded.variables.index(module.variables[name]))


def plain_name(name: str) -> str:
    """Return the last part of a mangled name: "flags" for _ZZ4spinE5flags."""
    rest, last = name, ""
    if not name.startswith("_Z"):
        return name
    while match := re.search(r"(\d+)([A-Za-z_]\w*)", rest):
        length = int(match[1])
        word = rest[match.start(2) : match.start(2) + length]
        last, rest = word or last, rest[match.start(2) + length :]
        if name[2].isdigit() or (rest.startswith("E") and not name.startswith("_ZZ")):
            break  # types of parameters follow
    return last or name


class _Findings:
    """Turns the C++ side's findings into values with names."""

    def __init__(self, module: Module, arrays: _Arrays, grid: Any, block: Any) -> None:
        self.module, self.encoded, self.arrays = module, arrays.encoded, arrays
        self.grid, self.block = list(grid), list(block)
        self.places = list(self.encoded.places)
        self.forms = list(self.encoded.forms)

    def finding(self, text: str) -> Finding:
        kind, why, verb, other_verb, *numbers = text.split("\x1f")
        block, thread, place, block2, thread2, place2, array, byte, size = map(int, numbers)
        if kind == "unwritten" and 0 <= array < len(self.encoded.variables):
            kind = "kept"
        name, start, whole = self._locate(array, byte)
        now = self._where(block, thread, place)
        other = self._where(block2, thread2, place2) if thread2 >= 0 else None
        kernel = self.encoded.kernel
        return Finding(
            kind, why, kernel, now, other, verb, other_verb, name, byte - start, size, whole,
            array == IN_LOCAL,
        )  # fmt: skip

    def step(self, text: str) -> TraceStep:
        *numbers, kind, value, before = text.split("\x1f")
        block, thread, place, pc, array, byte, size, source = map(int, numbers)
        begun = [(start, name) for name, start in self.encoded.functions.items() if start <= pc]
        opcode, function = self.forms[self.encoded.code[pc][0]], max(begun)[1]
        name, start, *_ = self._locate(array, byte)
        known = bytes.fromhex(value), bytes.fromhex(before)
        at = self._where(block, thread, place)
        return TraceStep(at, kind, opcode, function, name, byte - start, size, source, *known)

    def _where(self, block: int, thread: int, place: int) -> Where:
        at = self.places[place] if place >= 0 else Place(0, 0)
        file = self.module.files.get(at.file, "")
        return Where(_split(block, self.grid), _split(thread, self.block), file, at.line)

    def _locate(self, array: int, byte: int) -> tuple[str, int, int]:
        """Return the name of an array, where it starts, and its bytes, or 0 if not known."""
        encoded = self.encoded
        if array >= 0:
            return self.arrays.all[array].name, 0, self.arrays.all[array].data.nbytes
        if array == IN_SHARED:
            for offset, variable in reversed(encoded.shared):
                if offset <= byte < encoded.shared_bytes:
                    return plain_name(variable.name), offset, variable.bytes
            name = encoded.dynamic.name if encoded.dynamic else "the dynamic shared memory"
            return plain_name(name), encoded.shared_bytes, 0
        if array == IN_LOCAL and (found := self._local(byte)):
            return *found, 0
        places = {IN_LOCAL: "local memory", IN_PARAMS: "the parameters"}
        return places.get(array, ""), 0, 0

    def _local(self, byte: int) -> tuple[str, int] | None:
        """Return the local variable before a byte of local memory, and where it starts."""
        known = self.module.locals
        at = [(start, each.name) for start, each in self.encoded.local if start <= byte]
        start, array = max(at, default=(0, ""))
        inside = [(start + k, name) for k, name in known.get(array, ()) if start + k <= byte]
        return max(inside)[::-1] if inside else None


def _split(number: int, sizes: list[int]) -> tuple[int, int, int]:
    x, y = sizes[:2]
    return number % x, number // x % y, number // x // y


@dataclass
class _Loaded:
    """A kernel that the library has loaded."""

    library: ctypes.CDLL
    handle: int
    encoded: Encoded

    def __del__(self) -> None:
        self.library.ptx_unload(self.handle)


def _load(module: Module, kernel: str) -> _Loaded:
    with module.lock:
        if kernel not in module.loaded:
            module.loaded[kernel] = _load_program(encode(module, kernel))
        loaded: _Loaded = module.loaded[kernel]
    return loaded


def _load_program(encoded: Encoded) -> _Loaded:
    tables = [np.array(getattr(encoded, name), dtype) for name, dtype in _TABLES.items()]
    specials = "\n".join(f"{row} {name}" for name, row in encoded.specials.items())
    data = _ProgramData(
        "\n".join(encoded.forms).encode(),
        specials.encode(),
        *(_Table(each.ctypes.data, len(each)) for each in tables),
        *(getattr(encoded, name) for name in _SIZES),
    )
    library = _library()
    handle = library.ptx_load(ctypes.byref(data))
    unknown = library.ptx_unknown(handle).decode().split()
    if unknown:
        raise LaunchError(f"no handler for {', '.join(unknown)}")
    return _Loaded(library, handle, encoded)


def _library() -> ctypes.CDLL:
    """Return the engine's library, which is built if the cache does not have it."""
    with _BUILDING:
        library = _open()
    if isinstance(library, str):
        raise LaunchError(library)
    return library


@cache
def _open() -> ctypes.CDLL | str:
    """Return the library, or why there is none: a build that has failed is not tried again."""
    try:
        library = ctypes.CDLL(str(_built()))
    except LaunchError as error:
        return str(error)
    library.ptx_load.restype = ctypes.c_void_p
    library.ptx_unknown.restype = library.ptx_launch.restype = ctypes.c_char_p
    for function in (library.ptx_unknown, library.ptx_unload):
        function.argtypes = (ctypes.c_void_p,)
    library.ptx_launch.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return library


def missing() -> str | None:
    """Say what the engine needs but this computer lacks, and how to install it, or return None."""
    if isinstance(library := nvrtc.find_library(), nvrtc.Refused):
        return library.reason
    return None if shutil.which("g++") else NO_COMPILER


def _built() -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        raise LaunchError(NO_COMPILER)
    texts = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]*")))
    key = hashlib.sha256(texts + "".join((*FLAGS, compiler, _processor())).encode()).hexdigest()
    target = kept.folder() / f"engine-{key[:20]}.so"
    with kept.lock("engine"):  # other processes that need the engine wait
        if not target.is_file():
            _build(compiler, target)
    os.utime(target)  # not one of the files that were not used for longest
    return target


def _build(compiler: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as own:
        built = Path(own) / "engine.so"
        objects = [built.with_name(f"{path.stem}.o") for path in sorted(SOURCES.glob("*.cpp"))]
        commands = [
            [compiler, *FLAGS, "-c", str(SOURCES / f"{each.stem}.cpp"), "-o", str(each)]
            for each in objects
        ]
        with ThreadPoolExecutor(len(commands)) as pool:
            list(pool.map(_compile, commands))
        _compile([compiler, "-shared", *map(str, objects), "-o", str(built)])
        built.replace(target)  # in one step: a process may end while it writes
    kept.trim()


def _compile(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(f"g++ cannot compile the engine: {done.stderr[:2000]}")


def _processor() -> str:
    """Return what distinguishes processors whose machine code differs."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        if flags := re.search(r"^(?:flags|Features)\s*:.*$", text, re.MULTILINE):
            return flags[0]
    return platform.machine()
