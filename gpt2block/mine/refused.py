"""Find errors that g++ accepts but NVRTC or a GPU does not, before the emulator runs a kernel.

If CuPy is installed, NVRTC compiles the file, which needs no GPU. Without NVRTC, the file is
searched for the most frequent errors. Errors that NVRTC accepts, but that prevent a launch on a
GPU, are checked in both cases.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from gpt2block.cuda import kernels
from gpt2block.errors import DeviceError, InputError, KernelError
from gpt2block.mine.expressions import evaluated
from gpt2block.mine.finding import HOST, MAIN, Finding, of_compiler
from gpt2block.mine.kernel import Geometry, Kernel
from gpt2block.mine.source import UserSource, numbers

MOST_STATIC = 48 << 10  # maximum bytes of a kernel's static shared memory
MOST_CONSTANT = 64 << 10  # maximum bytes of a file's constant memory
REGISTERS = 1 << 16  # registers per block
WARP, UNIT = 32, 8  # threads per warp; registers of a thread are allocated in multiples of UNIT
ARCHITECTURE = "sm_80"  # architecture that the emulator imitates
_BYTES = {
    "bool": 1, "char": 1, "short": 2, "half": 2, "__half": 2, "__nv_bfloat16": 2,
    "int": 4, "unsigned": 4, "float": 4, "half2": 4, "__half2": 4, "__nv_bfloat162": 4,
    "long": 8, "double": 8, "size_t": 8, "int2": 8, "float2": 8, "float3": 12,
    "int4": 16, "uint4": 16, "float4": 16,
}  # fmt: skip
_DECLARED = (
    r"\b{kind}\s+(?:(?:static|const|volatile|unsigned|__align__\(\w+\)|alignas\(\w+\))\s+)*"
    r"(?P<type>\w+)\s+(?P<names>[^;={{]+)"
)
_NAMED = re.compile(r"(\w+)\s*((?:\[[^\]]*\]\s*)*)")
# Headers of the C++ library that NVRTC does not have.
_LIBRARY_HEADER = re.compile(
    r"^[ \t]*#[ \t]*include[ \t]*<(any|array|atomic|bit|bitset|chrono|compare|complex|concepts|"
    r"deque|exception|execution|filesystem|format|forward_list|fstream|functional|future|"
    r"initializer_list|iomanip|ios|iostream|istream|iterator|limits|list|locale|map|memory|mutex|"
    r"new|numbers|numeric|optional|ostream|queue|random|ranges|ratio|regex|set|span|sstream|stack|"
    r"stdexcept|string|string_view|thread|tuple|type_traits|typeinfo|unordered_map|unordered_set|"
    r"valarray|variant|vector)>",
    re.MULTILINE,
)
_TRANSPARENT = re.compile(r'(extern\s+"[^"]*"|namespace(\s+\w+)*)\s*$')
_FUNCTION = re.compile(r"(\w+)\s*\((?:[^()]|\([^()]*\))*\)\s*(?:const|noexcept|\s)*$")
_TYPE = re.compile(r"\b(struct|class|union|enum)\s+\w*\s*(:[^{]*)?$|=\s*$")
_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"|(?<!\w)\'(?:[^\'\\\n]|\\.)+\'')


class ResourceUsage(NamedTuple):
    """Registers and shared memory of a kernel as ptxas reports them; 0 if not known."""

    registers: int = 0  # registers per thread
    shared: int = 0  # bytes of static shared memory
    accepted: bool = False  # whether NVRTC has compiled the file


def refused(kernel: Kernel) -> Finding | ResourceUsage:
    """Compile the file of a kernel; return the kernel's resources, or a Finding for an error."""
    text = without_literals(kernel.source.text)
    needs = _compiled(kernel)
    if isinstance(needs, Finding):
        return needs
    if needs is None:
        found = next(filter(None, (find(kernel.source, text) for find in _WITHOUT_NVRTC)), None)
        if found:
            return found
    return _stored_constant(kernel.source, text) or needs or ResourceUsage()


def too_many(
    kernel: Kernel, needs: ResourceUsage, geometry: Geometry, most_shared: int
) -> Finding | None:
    """Return the reason why no GPU can launch a block of this size, or None.

    most_shared: maximum bytes of shared memory per block.
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
    if dynamic and needs.shared + dynamic > most_shared:
        return Finding(
            f"{name} has {needs.shared:,} bytes of shared variables and {dynamic:,} of extern "
            f"__shared__ memory: at most {most_shared:,} together",
            (line,),
        )
    return None


def _compiled(kernel: Kernel) -> Finding | ResourceUsage | None:
    """Compile with NVRTC; return None if NVRTC or a header that it needs is not installed."""
    file = str(kernel.source.path)
    stored = kernels.stored_as(kernel.dtype)
    try:
        try:
            log = kernels.compile_for(file, ARCHITECTURE, stored).log
        except KernelError as error:
            if not (needed := re.findall(r"requires \.target (sm_\d+) or higher", str(error))):
                raise
            log = kernels.compile_for(file, max(needed, key=lambda each: int(each[3:])), stored).log
    except KernelError as error:
        if re.search(r'cannot open source file "(cuda|cooperative|crt/|mma\.h)', str(error)):
            return None  # a header of CUDA is not installed
        return of_compiler(kernel.source, str(error))
    except (DeviceError, ImportError, OSError, RuntimeError):  # CuPy or NVRTC is not installed
        return None
    own = log.partition(f"'{kernel.source.name}'")[2]
    used = re.search(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?", own)
    found = (int(used[1]), int(used[2] or 0)) if used else (0, 0)
    return ResourceUsage(*found, accepted=True)


def _library_header(source: UserSource, text: str) -> Finding | None:
    if found := _LIBRARY_HEADER.search(text):
        line = text.count("\n", 0, found.start()) + 1
        log = f'{source.file}({line}): error: cannot open source file "{found[1]}"'
        return of_compiler(source, log)
    return None


def _host_function(source: UserSource, text: str) -> Finding | None:
    for name, header, start in _functions(text):
        if not re.search(r"__(device|global)__", header):
            line = text.count("\n", 0, start) + 1
            return Finding(f"{name}: {MAIN if name == 'main' else HOST}", (line,))
    return None


def _functions(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield (name, text before the body, offset) of each function at namespace scope."""
    begin, depth = 0, 0
    for found in re.finditer(r"^[ \t]*#(?:[^\\\n]|\\.)*|[{};]", text, re.MULTILINE | re.DOTALL):
        mark, header = found[0], text[begin : found.start()]
        if mark == "{":
            if depth == 0 and _TRANSPARENT.search(header):
                begin = found.end()
                continue
            function = _FUNCTION.search(header)
            if depth == 0 and function and not _TYPE.search(header):
                yield function[1], header, begin + function.start()
            depth += 1
        elif mark == "}":
            depth = max(0, depth - 1)
        if depth == 0:
            begin = found.end()


def _too_large(source: UserSource, text: str) -> Finding | None:
    own = kernels.with_only(source.name, text)
    for kind, most, what in (
        ("__shared__", MOST_STATIC, "shared variables: take an extern __shared__ array for more"),
        ("__constant__", MOST_CONSTANT, "constants"),
    ):
        taken = sum(bytes_ for _, bytes_ in _declared(kind, own, source))
        if taken > most:
            line = own.count("\n", 0, own.index(kind)) + 1
            return Finding(f"{taken:,} bytes of {kind} variables: a GPU has {most:,} for {what}",
                           (line,))  # fmt: skip
    return None


_WITHOUT_NVRTC = _library_header, _host_function, _too_large  # checks without NVRTC


def _declared(kind: str, text: str, source: UserSource) -> Iterator[tuple[str, int]]:
    """Yield (name, bytes) of each __shared__ or __constant__ variable; 0 bytes if not known."""
    known = numbers(source.text)
    for found in re.finditer(_DECLARED.format(kind=kind), text):
        for name, extents in _NAMED.findall(found["names"]):
            try:
                sizes = [evaluated(each, known) for each in re.findall(r"\[([^\]]*)\]", extents)]
            except InputError:
                sizes = [0]
            yield name, _BYTES.get(found["type"], 0) * prod(sizes)


def _stored_constant(source: UserSource, text: str) -> Finding | None:
    """Find a store to a __constant__ variable, which compiles but fails or is ignored on a GPU."""
    for name, _ in _declared("__constant__", text, source):
        place = rf"\b{name}\s*(?:\[[^\]]*\]\s*)*(?:\.\w+\s*)?"
        stored = rf"{place}(?:[-+*/|&^]|<<|>>)?=(?!=)|{place}(?:\+\+|--)|(?:\+\+|--)\s*{name}\b"
        declared = re.compile(rf"__constant__[^;]*?\b{name}\b[^;=]*")
        begins = [range(*each.span()) for each in declared.finditer(text)]
        for found in re.finditer(stored, text):
            if not any(found.start() in each for each in begins):
                line = text.count("\n", 0, found.start()) + 1
                return Finding(f"stores to {name}: a kernel can only read __constant__ variables",
                               (line,))  # fmt: skip
    return None


def without_literals(text: str) -> str:
    """Replace comments by blanks and the contents of string literals by underscores."""
    plain = kernels.without_comments(text)
    return _LITERAL.sub(lambda found: f'"{"_" * (len(found[0]) - 2)}"', plain)
