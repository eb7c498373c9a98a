"""From a `.cu` file to a launch: signatures, compilation by NVRTC, typed arguments.

A kernel's parameters are declared only in its source. The prototype is parsed, and every launch is
checked against it, because CuPy passes arguments unchecked. CuPy is imported when the first kernel
is loaded.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import kernels_cu
from gpt2block.config.formats import GGUF, own_cache_dtype
from gpt2block.cuda import cupy
from gpt2block.cuda.requests import Function, Launch, Scalar
from gpt2block.cuda.tensor_maps import TensorMap
from gpt2block.errors import KernelError

SOURCE_DIR = Path(kernels_cu.__file__).parent
Defines = tuple[tuple[str, str | int], ...]  # hashable, so that kernels can be cached by it

_KERNEL = re.compile(
    r'(?P<own>extern\s+"C"\s+)?__global__\s+(?:__\w+__\([^)]*\)\s*)*void\s+'
    r"(?:__\w+__\([^)]*\)\s*)*(?P<name>\w+)\s*\((?P<parameters>[^)]*)\)"
)
_C_BLOCK = re.compile(r'extern\s+"C"\s*(?={)')
_ARCHITECTURE = re.compile(r"^// architecture: (sm_\w+)$", re.MULTILINE)
_IDEA = re.compile(
    r"^//   (?P<names>\w+(?:, \w+)*)(?P<variant>(?: \(\w+\))?):(?P<text>.*(?:\n//    .*)*)",
    re.MULTILINE,
)
_LITERAL = r'"(?:[^"\\\n]|\\.)*"|(?<!\w)\'(?:[^\'\\\n]|\\.)+\''
_COMMENT = re.compile(rf"({_LITERAL})|//[^\n]*|/\*.*?\*/", re.DOTALL)
_DIRECTIVE = r"^[ \t]*#(?:[^\\\n]|\\.)*"  # with the lines that continue it
_CLOSING = re.compile(rf"{_LITERAL}|{_DIRECTIVE}|[{{}};]", re.DOTALL | re.MULTILINE)
# Headers whose names NVRTC gets from prelude.cuh, or for which it and g++ need none.
_HOST_HEADER = re.compile(
    r"^[ \t]*#[ \t]*include[ \t]*<(?:(?:assert|float|limits|math|stddef|stdint|stdio|stdlib|string|"
    r"cuda|cuda_runtime_api|device_launch_parameters)\.h|c(?:assert|float|limits|math|stddef|stdint|"
    r"stdio|stdlib|string)|algorithm|utility)>",
    re.MULTILINE,
)
SCALARS: Mapping[str, type[np.generic]] = {
    "int": np.int32,
    "long long": np.int64,
    "float": np.float32,
    "double": np.float64,
    "unsigned char": np.uint8,
}
TENSOR_MAP = TensorMap.__name__  # by value

# Constants that define the types `T`, `W` and `KV` of a source (kernels_cu/lib/storage.cuh), by
# dtype. FP8 is stored in arrays of uint8; W and KV are T unless they are FP8.
STORAGE: Mapping[str, Defines] = {
    "float32": (),
    "float16": (("STORAGE_FP16", 1),),
    "bfloat16": (("STORAGE_BF16", 1),),
}
FP8: Mapping[str, Defines] = {
    "float8_e5m2": (("WEIGHT_E5M2", 1),),
    "float8_e4m3fn": (("WEIGHT_E4M3", 1),),
}
FP8_CACHE: Mapping[str, Defines] = {
    "float8_e5m2": (("CACHE_E5M2", 1),),
    "float8_e4m3fn": (("CACHE_E4M3", 1),),
}
_LARGE_CLUSTERS = 14  # CUfunction_attribute: whether clusters may have more than 8 blocks
TWO_PART = "two_part"  # weights in two float16 parts, with activations of float32
IN_BYTES = (*FP8, GGUF)  # weights in arrays of uint8
WEIGHTS: Mapping[str, Defines] = {  # that are not T
    **FP8,
    TWO_PART: (("WEIGHT_TWO_PART", 1),),
    GGUF: (("WEIGHT_GGUF", 1),),
}


def cache_dtype(weights: str) -> str:
    """The dtype of a KV cache that has none of its own, for weights stored as this dtype."""
    return "float32" if weights == TWO_PART else own_cache_dtype(weights)


@dataclass(frozen=True)
class Parameter:
    """One kernel argument: `ctype` without const and __restrict__, such as "float*" or "int"."""

    ctype: str
    name: str
    const: bool = False  # a pointer the kernel only reads through
    restrict: bool = False  # declared __restrict__


@dataclass(frozen=True)
class Signature:
    """A kernel's prototype; `file` is relative to kernels_cu."""

    file: str
    name: str
    parameters: tuple[Parameter, ...]


class Geometry(NamedTuple):
    """The launch configuration of a kernel."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int = 0  # bytes of dynamic shared memory
    defines: Defines = ()

    def with_defines(self, more: Defines) -> Geometry:
        """The same launch of a kernel with further constants."""
        return self._replace(defines=(*self.defines, *more))


def sources() -> list[str]:
    """Every `.cu` file, relative to kernels_cu."""
    return sorted(path.relative_to(SOURCE_DIR).as_posix() for path in SOURCE_DIR.rglob("*.cu"))


def read_source(file: str) -> str:
    """The text of a `.cu` file; KernelError lists the known files."""
    path = SOURCE_DIR / file
    if not path.is_file():
        raise KernelError(f"no kernel file {file!r}: expected one of {', '.join(sources())}")
    return path.read_text(encoding="utf-8-sig")  # some editors begin a file with U+FEFF


@cache
def signatures(file: str) -> dict[str, Signature]:
    """Kernel name → signature, for every kernel of a file, in the file's order."""
    return parse(read_source(file), file)


def parse(text: str, file: str) -> dict[str, Signature]:
    """Kernel name → signature, from the text of a source."""
    return {
        each["name"]: Signature(file, each["name"], _parameters(each["parameters"]))
        for each in _prototypes(without_comments(text))
    }


def _prototypes(plain: str) -> list[re.Match[str]]:
    """The kernels with C linkage: `extern "C"` is before each, or before a block around them."""
    blocks = [
        range(each.start(), _end(plain, each, len(plain))) for each in _C_BLOCK.finditer(plain)
    ]
    return [
        found
        for found in _KERNEL.finditer(plain)
        if found["own"] or any(found.start() in block for block in blocks)
    ]


@lru_cache(maxsize=64)
def without_comments(text: str) -> str:
    """The text of a source with spaces in place of comments: every place in it stays."""
    return _COMMENT.sub(lambda found: found[1] or re.sub(r"[^\n]", " ", found[0]), text)


@cache
def ideas(file: str) -> dict[str, str]:
    """Kernel name → its idea in one sentence, as the comment that opens the file states it.

        //   add_kernel: one thread per element. What follows the first full stop is no part of it

    Lines that continue it are indented further. Kernels can share one: "mean, rstd: …". Where
    variants of an operation launch one kernel in different ways, each has its own, by a name such
    as "to_fp8_kernel (vectors)".
    """
    found: dict[str, str] = {}
    lines = read_source(file).splitlines(keepends=True)
    head = "".join(takewhile(lambda line: line.startswith("//"), lines))
    for each in _IDEA.finditer(head):
        text = " ".join(each["text"].replace("\n//", " ").split())
        sentence = re.split(r"\.(?: |$)", text)[0]
        found |= {name + each["variant"]: sentence for name in each["names"].split(", ")}
    return found


def idea_of(file: str, kernel: str, variant: str) -> str:
    """The idea of a kernel, as a variant of an operation launches it. Raises KernelError."""
    known = ideas(file)
    found = known.get(f"{kernel} ({variant})") or known.get(kernel)
    if not found:
        raise KernelError(
            f"{file}: kernel {kernel} has no idea: state it in the comment that opens the file, in "
            f"a line such as //   {kernel}: one thread per element"
        )
    return found


def without_host_headers(text: str) -> str:
    """The text of a user's file without the headers that a compiler for the host has."""
    return _HOST_HEADER.sub("", text)


def with_only(kernel: str, text: str) -> str:
    """The text of a source without its other kernels, with as many lines.

    Everything else stays, such as functions that kernels share.
    """
    parts, at = [], 0
    for name, start, end in extents(text):
        if name != kernel:
            parts += [text[at:start], "\n" * text.count("\n", start, end)]
            at = end
    return "".join((*parts, text[at:]))


@lru_cache(maxsize=64)
def extents(text: str) -> list[tuple[str, int, int]]:
    """Name, start and end of each kernel of a source; one that lacks a brace ends at its start."""
    plain = without_comments(text)
    return [(m["name"], m.start(), _end(plain, m, m.start())) for m in _prototypes(plain)]


def _end(plain: str, start: re.Match[str], unclosed: int) -> int:
    """The end of the function or block that begins there; `unclosed` if a brace is missing."""
    depth = 0
    for found in _CLOSING.finditer(plain, start.end()):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0 and found[0] in (";", "}"):
            return found.end()
    return unclosed


def _parameters(text: str) -> tuple[Parameter, ...]:
    return tuple(map(_parameter, filter(str.strip, text.split(","))))


def _parameter(text: str) -> Parameter:
    plain = re.sub(r"\bconst\b|\b__restrict(__)?\b|__grid_constant__", " ", text.replace("*", "* "))
    words = plain.split()
    ctype = " ".join(words[:-1]).replace(" *", "*")
    const = bool(re.search(r"\bconst\b", text))
    return Parameter(ctype, words[-1], const, restrict="__restrict" in text)


def launch_at(
    file: str,
    geometry: Geometry,
    args: tuple[Any, ...],
    storage: str = "float32",
    weights: str | None = None,
    cache: str | None = None,
) -> Launch:
    """A checked launch on the current device; requests the kernel, which its first run waits for.

    args: CuPy arrays (or None for a null pointer) and Python numbers, in the prototype's order.
    storage: the dtype of the source's `T`, one of `STORAGE`. weights, cache: those of its `W` and
    `KV` if they are one of `FP8`, of `W` also `TWO_PART`. Raises KernelError when the arguments do
    not match the prototype, or the grid exceeds CUDA's limits.
    """
    name, grid, block, shared, defines = geometry
    typed = typed_arguments(signatures(file)[name], args, storage, weights, cache)
    if not (0 < grid[0] < 2**31 and all(0 < size < 2**16 for size in grid[1:])):
        raise KernelError(f"{name}: grid {grid} exceeds CUDA's limits (2147483647, 65535, 65535)")
    function = load(file, name, (*stored_as(storage, weights, cache), *defines))
    function.allow_shared(shared)
    return Launch(name, function, grid, block, typed, shared)


def float_define(name: str, value: float | None, default: float | None = None) -> Defines:
    """A constant of a kernel, or none where it has the value that the kernel has without it."""
    return () if value == default else ((name, f"{float(np.float32(value))!r}f"),)


def stored_as(storage: str, weights: str | None = None, cache: str | None = None) -> Defines:
    """The constants that define `T`, `W` and `KV` of a source."""
    return STORAGE[storage] + WEIGHTS.get(weights or "", ()) + FP8_CACHE.get(cache or "", ())


def typed_arguments(
    signature: Signature,
    args: tuple[Any, ...],
    storage: str = "float32",
    weights: str | None = None,
    cache: str | None = None,
) -> tuple[Scalar, ...]:
    """The arguments as NumPy scalars of exactly the prototype's types; KernelError otherwise."""
    if len(args) != len(signature.parameters):
        expected = ", ".join(f"{p.ctype} {p.name}" for p in signature.parameters)
        raise KernelError(f"{signature.name}: expected ({expected}), got {len(args)} arguments")
    dtypes, pairs = (storage, weights, cache), zip(signature.parameters, args, strict=True)
    return tuple([_typed(signature.name, parameter, arg, dtypes) for parameter, arg in pairs])


def _typed(
    kernel: str, parameter: Parameter, arg: Any, dtypes: tuple[str, str | None, str | None]
) -> Scalar:
    if parameter.ctype == TENSOR_MAP:
        if not isinstance(arg, TensorMap):
            raise KernelError(f"{kernel}: {parameter.name}: expected a tensor map, got {arg!r}")
        return arg
    if not parameter.ctype.endswith("*"):
        return typed_scalar(kernel, parameter, arg)
    expected, label = element(kernel, parameter, *dtypes)
    if arg is None:
        return np.uintp(0)
    dtype = getattr(arg, "dtype", None)
    if dtype is None or dtype_name(dtype) != expected:
        raise KernelError(f"{label}: got {dtype or type(arg).__name__}")
    return np.uintp(arg.data.ptr)


@cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """`dtype.name`, which NumPy computes each time; such as ">f4" for another byte order."""
    return str(dtype.name if dtype.isnative else dtype.str)


@cache
def element(
    kernel: str,
    parameter: Parameter,
    storage: str,
    weights: str | None = None,
    cache: str | None = None,
) -> tuple[str, str]:
    """The name of a pointer's element dtype, and a description of the argument for messages."""
    types = {"T": None, "W": weights, "KV": cache}
    name = parameter.ctype.removesuffix("*")
    if name in types and name != parameter.ctype:
        dtype = "uint8" if types[name] in IN_BYTES else storage
        if types[name] == TWO_PART:
            dtype = "float16"
        return dtype, f"{kernel}: {name}* {parameter.name}, where {name} is {dtype}"
    scalar, label = _dtype(kernel, parameter)
    return np.dtype(scalar).name, label


def typed_scalar(kernel: str, parameter: Parameter, arg: Any) -> Scalar:
    """A Python number as the NumPy scalar of the prototype's type, unchanged in value."""
    scalar, label = _dtype(kernel, parameter)
    integral = issubclass(scalar, np.integer)
    if isinstance(arg, bool) or not isinstance(arg, int if integral else (int, float)):
        kind = "an integer" if integral else "a number"
        raise KernelError(f"{label}: expected {kind}, got {type(arg).__name__}")
    try:
        return scalar(arg)
    except OverflowError as error:
        raise KernelError(f"{label}: {arg} does not fit") from error


@cache
def _dtype(kernel: str, parameter: Parameter) -> tuple[type[np.generic], str]:
    """The NumPy type of an argument or its elements, and its description for messages."""
    label = f"{kernel}: {parameter.ctype} {parameter.name}"
    dtype = SCALARS.get(parameter.ctype.removesuffix("*"))
    if dtype is None:
        raise KernelError(f"{label}: the loader does not know this type")
    return dtype, label


def load(file: str, name: str, defines: Defines = ()) -> Any:
    """Request a kernel for the current device: a `Function`, whose first use waits for it.

    Raises KernelError if the file is for another architecture.
    """
    return _function(cupy.cuda.Device().id, file, name, defines)


@cache
def _function(device: int, file: str, name: str, defines: Defines) -> Any:
    options(file, cupy.cuda.Device(device).compute_capability)  # raises for another architecture
    return Function(_compiled, (device, file, name, defines))


def _compiled(device: int, file: str, name: str, defines: Defines) -> Any:
    """A `cupy.RawKernel`, compiled or from CuPy's cache; KernelError if it does not compile."""
    found = cupy.cuda.Device(device)
    found.use()  # a new thread has no device yet
    flags = options(file, found.compute_capability)
    module = cupy.RawModule(code=program(file, defines, name), options=flags, backend="nvrtc")
    try:
        module.compile()
    except cupy.cuda.compiler.CompileException as error:
        raise KernelError(compile_message(file, error.get_message())) from error
    function = module.get_function(name)
    if architecture(file) == "sm_90a":
        cupy.cuda.driver.funcSetAttribute(function.kernel.ptr, _LARGE_CLUSTERS, 1)
    return function


def program(file: str, defines: Defines = (), kernel: str | None = None) -> str:
    """The text to compile: constants, then the source under its own name and line numbers.

    kernel: leave out the file's other kernels, which take as long to compile. A file that is not
    in kernels_cu stays whole: it may have what the loader does not know. prelude.cuh precedes it.

    CuPy's cache of compiled kernels is keyed by this text and the options but not by included
    headers, so their hash is part of it. The constants are in the text, not in the options, because
    CuPy runs the compiler once at start for every new set of options.
    """
    constants = "".join(f"#define {name} {value}\n" for name, value in defines)
    text = read_source(file)
    if Path(file).is_absolute():
        text = without_host_headers(text)
        constants += prelude()
    elif kernel:
        text = with_only(kernel, text)
    return f'// headers {_headers_hash(SOURCE_DIR)}\n{constants}#line 1 "{file}"\n{text}'


@cache
def prelude() -> str:
    """What precedes a file that is not in kernels_cu."""
    return Path(__file__).with_name("prelude.cuh").read_text("ascii")


@cache
def _headers_hash(folder: Path) -> str:
    headers = sorted(folder.rglob("*.cuh"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in headers)).hexdigest()[:16]


@cache
def architecture(file: str) -> str | None:
    """The architecture that a file requires, such as "sm_90a", by its opening comment.

    None for a file for any GPU.
    """
    found = _ARCHITECTURE.search(read_source(file))
    return found.group(1) if found else None


def options(file: str, capability: str) -> tuple[str, ...]:
    """NVRTC options for a device of compute capability such as "90".

    Raises KernelError if the file requires another architecture; sm_90a, for example, requires
    capability 9.0 exactly.
    """
    common = ("-std=c++17", f"-I{SOURCE_DIR}")
    required = architecture(file)
    if required is None:
        return common
    if required != f"sm_{capability}a":
        raise KernelError(
            f"{file}: expected a device for {required} (compute capability 9.0, Hopper), "
            f"got {capability[:-1]}.{capability[-1]}"
        )
    return (*common, f"-arch={required}")


@cache
def toolkit_includes() -> tuple[str, ...]:
    """Options for the folders of CUDA's own headers, which CuPy gives NVRTC in every compile."""
    return tuple(
        flag for flag in cupy._core.core.assemble_cupy_compiler_options(()) if flag.startswith("-I")
    )


@dataclass(frozen=True)
class Compiled:
    """A kernel file compiled without a device: machine code, and the compiler's report."""

    cubin: bytes
    log: str


def compile_for(file: str, arch: str, defines: Defines = (), kernel: str | None = None) -> Compiled:
    """Compile for an architecture such as "sm_80" with NVRTC alone; no device or driver needed.

    kernel: one of the file's, by default all. The log holds registers, shared memory and spills of
    each. Raises KernelError.
    """
    nvrtc = cupy.cuda.nvrtc
    flags = (
        *options(file, arch.removeprefix("sm_").rstrip("af")),
        *toolkit_includes(),
        f"-arch={arch}",
        "-ftz=true",
        "--ptxas-options=-v",
        "--no-cache",  # results from NVRTC's cache have no report
    )
    handle = nvrtc.createProgram(program(file, defines, kernel), file, (), ())
    try:
        nvrtc.compileProgram(handle, flags)
        # CuPy drops the last byte of a cubin, which is a zero.
        return Compiled(nvrtc.getCUBIN(handle) + b"\0", nvrtc.getProgramLog(handle))
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(handle) or str(error)
        raise KernelError(compile_message(file, log)) from error
    finally:
        nvrtc.destroyProgram(handle)


def compile_message(file: str, log: str) -> str:
    """The compiler's log as file:line: message, then advice."""
    errors = re.findall(r"^(.+?)\((\d+)\): (?:catastrophic )?error: (.+)$", log, re.MULTILINE)
    if not errors:
        return f"{file} does not compile: {log.strip() or 'the compiler gave no reason'}"
    lines = [f"{path}:{line}: {message}" for path, line, message in errors]
    if "cannot open source file" in log:
        todo = "a header is missing: `gpt2block check` names the package to install"
    else:
        todo = f"fix it there (in {SOURCE_DIR}); the next start compiles again"
    return "\n".join([f"{file} does not compile:", *lines, todo])
