"""Turn a `.cu` file into launches: parse signatures, compile with NVRTC, check arguments.

A kernel's parameters are declared only in its source. The prototype is parsed, and every launch is
checked against the prototype, because CuPy passes arguments unchecked. CuPy is imported when the
first kernel is loaded.
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
from gpt2block.cuda import cupy
from gpt2block.cuda.cards import capability_of, compiled_for, dotted, gpu
from gpt2block.cuda.formats import GGUF, own_cache_dtype
from gpt2block.cuda.requests import Function, Scalar
from gpt2block.cuda.requests import Launch as Launch  # noqa: PLC0414  (`launch_at` returns it)
from gpt2block.cuda.tensor_maps import NO_MAP, TensorMap
from gpt2block.errors import KernelError

SOURCE_DIR = Path(kernels_cu.__file__).parent
Defines = tuple[tuple[str, str | int], ...]  # (macro, value) pairs; hashable, as a key of caches

_KERNEL = re.compile(
    r'(?P<own>extern\s+"C"\s+)?__global__\s+(?:__\w+__\([^)]*\)\s*)*void\s+'
    r"(?:__\w+__\([^)]*\)\s*)*(?P<name>\w+)\s*\((?P<parameters>[^)]*)\)"
)
_ALIAS = re.compile(
    r"\btypedef\s+(?P<old>[\w:][\w:\s*]*?)\s*\b(?P<new>\w+)\s*;|"
    r"\busing\s+(?P<name>\w+)\s*=\s*(?P<type>[\w:][\w:\s*]*?)\s*;"
)
_C_BLOCK = re.compile(r'extern\s+"C"\s*(?={)')
_ARCHITECTURE = re.compile(r"^// architecture: (sm_\w+)$", re.MULTILINE)
_IDEA = re.compile(
    r"^//   (?P<names>\w+(?:, \w+)*)(?P<variant>(?: \(\w+\))?):(?P<text>.*(?:\n//    .*)*)",
    re.MULTILINE,
)
_LITERAL = r'"(?:[^"\\\n]|\\.)*"|(?<!\w)\'(?:[^\'\\\n]|\\.)+\''
_COMMENT = re.compile(rf"({_LITERAL})|//[^\n]*|/\*.*?\*/", re.DOTALL)
_DIRECTIVE = r"^[ \t]*#(?:[^\\\n]|\\.)*"  # a preprocessor directive with its continuation lines
_CLOSING = re.compile(rf"{_LITERAL}|{_DIRECTIVE}|[{{}};]", re.DOTALL | re.MULTILINE)
# Headers whose #include is removed: prelude.cuh has the declarations, or no compiler needs them.
_HOST_HEADER = re.compile(
    r"^[ \t]*#[ \t]*include[ \t]*<(?:(?:assert|float|limits|math|stddef|stdint|stdio|stdlib|string|"
    r"cuda|cuda_runtime(?:_api)?|device_launch_parameters)\.h|c(?:assert|float|limits|math|stddef|"
    r"stdint|stdio|stdlib|string)|algorithm|utility)>",
    re.MULTILINE,
)
_ALL_OF_CUB = re.compile(r"^([ \t]*#[ \t]*include[ \t]*)<cub/cub\.cuh>", re.MULTILINE)
SCALARS: Mapping[str, type[np.generic]] = {
    "int": np.int32,
    "long long": np.int64,
    "float": np.float32,
    "double": np.float64,
    "unsigned char": np.uint8,
}
TENSOR_MAP = TensorMap.__name__  # type of parameters that are tensor maps, passed by value
POINTERS, NULL = frozenset(f"{name}*" for name in (*SCALARS, "T", "W", "KV")), np.uintp(0)
# Arguments of parameters that a launch does not use; null for pointers.
UNUSED: Mapping[str, TensorMap | int] = {TENSOR_MAP: NO_MAP, **dict.fromkeys(SCALARS, 0)}

# Macros by dtype, for the types `T`, `W` and `KV` of a source (kernels_cu/lib/storage.cuh). FP8
# values are stored in arrays of uint8. `W` and `KV` are the same type as `T` unless they are FP8.
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
# CUfunction_attribute that allows clusters of more than PORTABLE blocks.
_LARGE_CLUSTERS, PORTABLE = 14, 8
WGMMA = 90  # compute capability of the architectures that files require
HI_LO = "hi_lo"  # weights in two float16 parts, for products with float32 activations
IN_BYTES = (*FP8, GGUF)  # weight formats stored in arrays of uint8
WEIGHTS: Mapping[str, Defines] = {  # format of weights, if type `W` differs from `T` → macros
    **FP8,
    HI_LO: (("WEIGHT_HI_LO", 1),),
    GGUF: (("WEIGHT_GGUF", 1),),
}


def cache_dtype(weights: str) -> str:
    """Return the default dtype of a kv_cache for weights stored as this dtype."""
    return "float32" if weights == HI_LO else own_cache_dtype(weights)


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter. ctype: type without const and __restrict__, such as "float*" or "int"."""

    ctype: str
    name: str
    const: bool = False  # whether the parameter is a pointer to const
    restrict: bool = False  # whether the parameter is declared __restrict__


@dataclass(frozen=True)
class Signature:
    """A kernel's prototype. `file`: path of its source, relative to kernels_cu."""

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
        """Return the same launch configuration with additional macros."""
        return self._replace(defines=(*self.defines, *more))


def sources() -> list[str]:
    """Return the paths of all `.cu` files, relative to kernels_cu."""
    return sorted(path.relative_to(SOURCE_DIR).as_posix() for path in SOURCE_DIR.rglob("*.cu"))


def read_source(file: str) -> str:
    """Return the text of a `.cu` file. Raises KernelError, which lists the known files."""
    path = SOURCE_DIR / file
    if not path.is_file():
        raise KernelError(f"no kernel file {file!r}: expected one of {', '.join(sources())}")
    return path.read_text(encoding="utf-8-sig")  # some editors begin a file with U+FEFF


@cache
def signatures(file: str) -> dict[str, Signature]:
    """Return {kernel name: signature} for every kernel of a file, in the file's order."""
    return parse(read_source(file), file)


def parse(text: str, file: str, any_linkage: bool = False) -> dict[str, Signature]:
    """Return {kernel name: signature} from the text of a source. any_linkage: see `_prototypes`."""
    plain = without_comments(text)
    aliases = {a["new"] or a["name"]: a["old"] or a["type"] for a in _ALIAS.finditer(plain)}
    return {
        each["name"]: Signature(file, each["name"], _parameters(each["parameters"], aliases))
        for each in _prototypes(plain, any_linkage)
    }


def _prototypes(plain: str, any_linkage: bool = False) -> list[re.Match[str]]:
    """Find prototypes of kernels with C linkage: `extern "C"` precedes the kernel or its block.

    any_linkage: find the prototypes of all kernels.
    """
    blocks = [
        range(each.start(), _end(plain, each, len(plain))) for each in _C_BLOCK.finditer(plain)
    ]
    return [
        found
        for found in _KERNEL.finditer(plain)
        if any_linkage or found["own"] or any(found.start() in block for block in blocks)
    ]


@lru_cache(maxsize=64)
def without_comments(text: str) -> str:
    """Replace comments in a source by spaces, so that offsets in the text do not change."""
    return _COMMENT.sub(lambda found: found[1] or re.sub(r"[^\n]", " ", found[0]), text)


@cache
def ideas(file: str) -> dict[str, str]:
    """Return {kernel name: summary in one sentence} from the comment at the top of a file.

        //   add_kernel: one thread per element. Text after the first full stop is left out.

    Continuation lines are indented further. Kernels can share an idea: "mean, rstd: …". If variants
    of an operation launch one kernel in different ways, the key contains the variant, such as
    "to_fp8_kernel (vectors)".
    """
    texts: dict[str, str] = {}
    lines = read_source(file).splitlines(keepends=True)
    head = "".join(takewhile(lambda line: line.startswith("//"), lines))
    for each in _IDEA.finditer(head):
        text = " ".join(each["text"].replace("\n//", " ").split())
        sentence = re.split(r"\.(?: |$)", text)[0]
        texts |= {name + each["variant"]: sentence for name in each["names"].split(", ")}
    return texts


def idea_of(file: str, kernel: str, variant: str) -> str:
    """Return the one-sentence summary of a kernel that a variant launches. Raises KernelError."""
    known = ideas(file)
    idea = known.get(f"{kernel} ({variant})") or known.get(kernel)
    if not idea:
        raise KernelError(
            f"{file}: kernel {kernel} has no idea: state it in the comment that opens the file, in "
            f"a line such as //   {kernel}: one thread per element"
        )
    return idea


def without_host_headers(text: str) -> str:
    """Remove includes of host headers, which NVRTC lacks, from the text of a user's file."""
    return _HOST_HEADER.sub("", text)


def with_only(kernel: str, text: str) -> str:
    """Return a source's text with all kernels except one replaced by empty lines.

    All other text stays, such as functions that kernels share.
    """
    parts, at = [], 0
    for name, start, end in extents(text):
        if name != kernel:
            parts += [text[at:start], "\n" * text.count("\n", start, end)]
            at = end
    return "".join((*parts, text[at:]))


@lru_cache(maxsize=64)
def extents(text: str) -> list[tuple[str, int, int]]:
    """Return (name, start, end) of each kernel in a source; end = start for unbalanced braces."""
    plain = without_comments(text)
    return [(m["name"], m.start(), _end(plain, m, m.start())) for m in _prototypes(plain)]


def _end(plain: str, start: re.Match[str], unclosed: int) -> int:
    """Return the offset at which the function or block that begins at `start` ends.

    Return `unclosed` if a brace is missing.
    """
    depth = 0
    for found in _CLOSING.finditer(plain, start.end()):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0 and found[0] in (";", "}"):
            return found.end()
    return unclosed


def _parameters(text: str, aliases: Mapping[str, str]) -> tuple[Parameter, ...]:
    return tuple(_parameter(each, aliases) for each in text.split(",") if each.strip())


def _parameter(text: str, aliases: Mapping[str, str]) -> Parameter:
    """Parse a parameter. aliases: {name: type}; the type of an alias may be another alias."""
    declared, arrays = re.subn(r"\[[^]]*\]", "", text.partition("=")[0])
    left, before = dict(aliases), ""
    while declared != before:
        before = declared
        declared = re.sub(r"\w+(?=\W+\w)", lambda word: left.pop(word[0], word[0]), before)
    spaced = declared.replace("*", "* ")
    words = re.sub(r"\bconst\b|\b__restrict(__)?\b|__grid_constant__", " ", spaced).split()
    ctype = " ".join(words[:-1]).replace(" *", "*") + "*" * arrays  # x[] declares a pointer
    const = bool(re.search(r"\bconst\b", declared.partition("*")[0]))
    return Parameter(ctype, words[-1], const, restrict="__restrict" in declared)


def launch_at(
    file: str,
    geometry: Geometry,
    args: tuple[object, ...] | Mapping[str, object],
    storage: str = "float32",
    weights: str | None = None,
    cache: str | None = None,
) -> Launch:
    """Return a launch with checked arguments, and start compiling its kernel if necessary.

    The first run of the launch waits for the kernel. args: CuPy arrays (or None for a null pointer)
    and Python numbers, in the prototype's order, or by name (`in_order`). storage: the dtype of the
    source's type `T`, a key of `STORAGE`. weights, cache: the formats of its types `W` and `KV`,
    keys of `WEIGHTS` and `FP8_CACHE`, or None. Raises KernelError if the arguments do not match the
    prototype, or if the grid exceeds CUDA's limits.
    """
    name, grid, block, shared, defines = geometry
    signature = signatures(file)[name]
    ordered = in_order(signature, args) if isinstance(args, Mapping) else args
    typed = typed_arguments(signature, ordered, storage, weights, cache)
    if not (0 < grid[0] < 2**31 and all(0 < size < 2**16 for size in grid[1:])):
        raise KernelError(f"{name}: grid {grid} exceeds CUDA's limits (2147483647, 65535, 65535)")
    function = load(file, name, (*stored_as(storage, weights, cache), *defines))
    function.allow_shared(shared)
    return Launch(name, function, grid, block, typed, shared)


def float_define(name: str, value: float | None, default: float | None = None) -> Defines:
    """Return a macro that sets a kernel's float constant, or () if the value is the default."""
    return () if value == default else ((name, f"{float(np.float32(value))!r}f"),)


def size_defines(prefix: str, sizes: Any, names: str) -> Defines:
    """Return macros of attributes of a tile or layout: ("LT_ROWS", sizes.rows) for "rows"."""
    return tuple([(f"{prefix}_{n.upper()}", int(getattr(sizes, n))) for n in names.split()])


def defines_of(**values: str | int) -> Defines:
    """Return macros by name."""
    return tuple(values.items())


def nonzero_defines(**values: int) -> Defines:
    """Return the macros of the values that are not 0, or not False; True counts as 1."""
    return tuple([(name, int(value)) for name, value in values.items() if value])


def stored_as(storage: str, weights: str | None = None, cache: str | None = None) -> Defines:
    """Return the macros that define the types `T`, `W` and `KV` of a source."""
    return STORAGE[storage] + WEIGHTS.get(weights or "", ()) + FP8_CACHE.get(cache or "", ())


def in_order(signature: Signature, args: Mapping[str, object]) -> tuple[object, ...]:
    """Return arguments in the prototype's order.

    A parameter without an argument is null or 0. Raises KernelError for an argument without a
    parameter.
    """
    names = [parameter.name for parameter in signature.parameters]
    if unknown := ", ".join(sorted(args.keys() - set(names))):
        raise KernelError(f"{signature.name}: no parameter {unknown}: has {', '.join(names)}")
    return tuple([args.get(p.name, UNUSED.get(p.ctype)) for p in signature.parameters])


def typed_arguments(
    signature: Signature,
    args: tuple[object, ...],
    storage: str = "float32",
    weights: str | None = None,
    cache: str | None = None,
) -> tuple[Scalar, ...]:
    """Convert arguments to NumPy scalars of the prototype's types. Raises KernelError."""
    if len(args) != len(signature.parameters):
        expected = ", ".join(f"{p.ctype} {p.name}" for p in signature.parameters)
        raise KernelError(f"{signature.name}: expected ({expected}), got {len(args)} arguments")
    name, dtypes = signature.name, (storage, weights, cache)
    return tuple(
        [
            NULL if arg is None and p.ctype in POINTERS else _typed(name, p, arg, dtypes)
            for p, arg in zip(signature.parameters, args, strict=True)
        ]
    )


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
    dtype = getattr(arg, "dtype", None)
    if dtype is None or dtype_name(dtype) != expected:
        raise KernelError(f"{label}: got {dtype or type(arg).__name__}")
    return np.uintp(arg.data.ptr)


@cache
def dtype_name(dtype: np.dtype) -> str:
    """Return the cached `dtype.name`, or a string such as ">f4" for a non-native byte order."""
    return str(dtype.name if dtype.isnative else dtype.str)


@cache
def element(
    kernel: str,
    parameter: Parameter,
    storage: str,
    weights: str | None = None,
    cache: str | None = None,
) -> tuple[str, str]:
    """Return the dtype name of a pointer's elements, and a description of them for messages."""
    types = {"T": None, "W": weights, "KV": cache}
    name = parameter.ctype.removesuffix("*")
    if name in types and name != parameter.ctype:
        dtype = "uint8" if types[name] in IN_BYTES else storage
        if types[name] == HI_LO:
            dtype = "float16"
        return dtype, f"{kernel}: {name}* {parameter.name}, where {name} is {dtype}"
    scalar, label = _dtype(kernel, parameter)
    return np.dtype(scalar).name, label


def typed_scalar(kernel: str, parameter: Parameter, arg: object) -> Scalar:
    """Convert a Python number to a NumPy scalar of the prototype's type. Raises KernelError."""
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
    """Return the NumPy type of a parameter or its elements, and its description in messages."""
    label = f"{kernel}: {parameter.ctype} {parameter.name}"
    dtype = SCALARS.get(parameter.ctype.removesuffix("*"))
    if dtype is None:
        raise KernelError(f"{label}: the loader does not know this type")
    return dtype, label


def load(file: str, name: str, defines: Defines = ()) -> Function:
    """Request a kernel for the current device. Uses of the returned `Function` wait for the kernel.

    Raises KernelError if the file requires another architecture.
    """
    return _function(cupy.cuda.Device().id, file, name, defines)


@cache
def _function(device: int, file: str, name: str, defines: Defines) -> Function:
    options(file, capability_of(device))  # raises for a wrong device
    return Function(_compiled, (device, file, name, defines))


def _compiled(device: int, file: str, name: str, defines: Defines) -> Any:
    """Return a `cupy.RawKernel`, compiled or from CuPy's cache. Raises KernelError."""
    cupy.cuda.Device(device).use()  # a new thread has no current device
    compiled_for()
    flags = options(file, capability_of(device))
    module = cupy.RawModule(code=program(file, defines, name), options=flags, backend="nvrtc")
    try:
        module.compile()
    except cupy.cuda.compiler.CompileException as error:
        raise KernelError(compile_message(file, error.get_message())) from error
    function = module.get_function(name)
    if architecture(file) and gpu(device).most_clustered > PORTABLE:
        cupy.cuda.driver.funcSetAttribute(function.kernel.ptr, _LARGE_CLUSTERS, 1)
    return function


def program(file: str, defines: Defines = (), kernel: str | None = None) -> str:
    """Return the text to compile: macros, then the source with its name and line numbers.

    kernel: the only kernel to keep, as each other kernel takes as long to compile. A file outside
    of kernels_cu is kept whole, as it may use syntax that the parser does not know; prelude.cuh is
    put before it, and lib/cub.cuh replaces cub/cub.cuh, which NVRTC does not compile.

    CuPy's cache of compiled kernels is keyed by this text and the options, but not by included
    headers; the text therefore contains a hash of the headers. The macros are in the text, not in
    the options, because CuPy runs the compiler one more time for every new set of options.
    """
    constants = "".join(f"#define {name} {value}\n" for name, value in defines)
    text = read_source(file)
    if Path(file).is_absolute():
        text = _ALL_OF_CUB.sub(r'\1"lib/cub.cuh"', without_host_headers(text))
        constants += prelude()
    elif kernel:
        text = with_only(kernel, text)
    return f'// headers {_headers_hash(SOURCE_DIR)}\n{constants}#line 1 "{file}"\n{text}'


@cache
def prelude() -> str:
    """Return the text to insert before a source that is not in kernels_cu."""
    return Path(__file__).with_name("prelude.cuh").read_text("ascii")


@cache
def _headers_hash(folder: Path) -> str:
    headers = sorted(folder.rglob("*.cuh"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in headers)).hexdigest()[:16]


@cache
def architecture(file: str) -> str | None:
    """Return the architecture that a file requires, from its opening comment; None for any GPU.

    "sm_90a" stands for this architecture alone, "sm_90" also for newer ones.
    """
    match = _ARCHITECTURE.search(read_source(file))
    return match.group(1) if match else None


def options(file: str, capability: int) -> tuple[str, ...]:
    """Return NVRTC options for a file and a device of compute capability such as 90.

    Raises KernelError if the file requires another architecture; sm_90a, for example, requires
    exactly compute capability 9.0.
    """
    common = ("-std=c++17", f"-I{SOURCE_DIR}")
    required = architecture(file)
    if required is None:
        return common
    if capability == WGMMA:
        return (*common, f"-arch=sm_{WGMMA}a")
    if required[-1] == "a" or capability < WGMMA:
        alone = "9.0, Hopper" if required[-1] == "a" else "9.0 or newer"
        raise KernelError(
            f"{file}: expected a device for {required} (compute capability {alone}), "
            f"got {dotted(capability)}"
        )
    return common


def compile_message(file: str, log: str) -> str:
    """Return the errors in a compiler log as "file:line: message", and advice to fix them."""
    errors = re.findall(r"^(.+?)\((\d+)\): (?:catastrophic )?error: (.+)$", log, re.MULTILINE)
    if not errors:
        return f"{file} does not compile: {log.strip() or 'the compiler gave no reason'}"
    lines = [f"{path}:{line}: {message}" for path, line, message in errors]
    if "cannot open source file" in log:
        todo = "a header is missing: `gpt2block check` names the package to install"
    else:
        todo = f"fix it there (in {SOURCE_DIR}); the next start compiles again"
    return "\n".join([f"{file} does not compile:", *lines, todo])
