"""Describe a problem of a user's kernel, with the lines of its source file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import ml_dtypes  # noqa: F401  (makes "bfloat16" a dtype's name)
import numpy as np

from gpt2block.cuda import kernels
from gpt2block.cuda.launch_lines import evaluated
from gpt2block.emulator.ptx import engine, nvrtc
from gpt2block.errors import InputError, NotJudged
from gpt2block.judge.source import UserSource, numbers

MAX_ERRORS = 3  # maximum number of compiler errors shown
_NO_LIBRARY = (
    "\n(Kernels have no C++ library, only what <cmath>, <cfloat>, <climits> and <cstdint> declare, "
    "std::min and std::max. For std::numeric_limits write FLT_MAX or INFINITY, for std::cout "
    "printf.)"
)
_HEADER_OF_CUDA = re.compile(
    r'cannot open source file "((?:cu(?:rand|blas|fft|sparse|solver|da|b/)|thrust/|nv/|nvtx|'
    r'cooperative_groups|mma\.h)[^"\n]*)"'
)
# Messages about a missing semicolon, which NVRTC reports at the next word's line.
_NO_SEMICOLON = re.compile(r"""expected (?:a ";"|.,. or .;.)""")
HOST = (
    "a function without __device__ is a host function, which the compiler of kernels (NVRTC) "
    "refuses: write __device__ before it"
)
MAIN = "gpt2block launches the kernel, and no file has a main function: delete it"
_HOST_OF_NVRTC = re.compile(r"A function without execution space annotations .*")
# C++ type → dtype of a value; types of vectors have the dtype of an array.
_DTYPES = {
    "bool": "u1", "char": "i1", "unsigned char": "u1", "uint8_t": "u1", "unsigned int": "u4",
    "uint32_t": "u4", "long long": "i8", "unsigned long long": "u8", "short": "i2",
    "half": "f2", "__half": "f2", "__nv_bfloat16": "bfloat16", "int": "i4", "unsigned": "u4",
    "float": "f4", "long": "i8",
    "double": "f8", "size_t": "u8", "half2": "2f2", "__half2": "2f2", "int2": "2i4",
    "float2": "2f4", "float3": "3f4", "int4": "4i4", "uint4": "4u4", "float4": "4f4",
}  # fmt: skip
_BETWEEN = {True: "no barrier is between them", False: "nothing orders two blocks"}
_BARRIER = "divergent barrier: {found.now} waits at {at}{reached}: {found.text}"
# Kind of the emulator's finding → description; the text of the finding by default.
_SAID = {
    "race": "race: {found.now} {found.verb} {element} at {at}; {other} {found.other_verb} it at "
    "{there}, and {between}",
    "read-only": "read-only load: {found.now} reads {element} at {at} by the read-only cache, and "
    "{other} wrote it at {there}: the cache may hold the old value until the kernel ends",
    "barrier": _BARRIER,
    "mask": _BARRIER,
    "out of bounds": "{found.verb} out of bounds: byte {found.byte:,} of {found.array}{has}",
    "before the wait": "{found.verb} before wait_for_previous(): byte {found.byte:,} of "
    "{found.array}{has}\n(Only what const __restrict__ points to may be read before: no earlier "
    "kernel writes it.)",
    "misaligned": "misaligned access: the address of {found.bytes} bytes must be divisible by "
    "{found.bytes}: {found.verb} byte {found.byte:,} of {found.array}",
    "unwritten": "reads {element}, which no thread has written",
    "kept": "reads {element}, which an earlier launch left changed: __device__ variables keep "
    "their values between launches: set them back in the kernel",
    "constant": "stores to {found.array}: a kernel can only read __constant__ variables",
    "assert": "assertion fails: {found.text}",
    "trap": "the kernel calls __trap(), or stores to a __constant__ variable",
    "endless": "{name} does not end: {found.now} still runs",
}
# Texts for a race with one known access, a local variable, and an array that is not known.
_SAID_BRIEFLY = {
    "race": "race: {found.now} {found.verb} a local variable of {found.other} at {at}: each thread "
    "has its own ones, which no other can reach",
    "out of bounds": "{found.verb} {found.bytes} bytes at an address that belongs to no argument, "
    "such as a null pointer",
    "before the wait": "{found.text}",
    "misaligned": "misaligned access: {found.text}",
    "unwritten": "reads the local variable {found.array}, which nothing has written",
}

# Kind of a finding → regex of the beginning of its text; the first one that matches counts.
_KINDS = {
    "fragile": "fragile: ",
    "kept_state": "right in the first launch|.* which an earlier launch left",
    "uninitialized": "right if the output holds NaN|.* which (?:no thread|nothing) has written",
    "assertion": "assertion fails|the kernel calls __trap",
    "race": "race: ",
    "read_only": "read-only load: ",
    "divergent_barrier": "divergent barrier",
    "does_not_compile": r".* does not compile|.*host function|.* bytes of __\w+__ variables",
    "launch": r"(?:grid|block|shared)\b|\S+: launch line|\w+ takes \d+ registers|.* of extern ",
    "does_not_end": r".*\bstill run",
    "early_access": r".* before wait_for_previous|no thread of the block waits",
    "out_of_bounds": r"(?:reads|writes|index|accesses) .*(?:out of bounds|outside|no argument)",
    "misaligned": ".*misaligned",
    "changed_input": "the kernel changes its input",
    "wrong_result": "[0-9,]+ of [0-9,]+ elements of |wrong at the benchmark's sizes",
}
KINDS = (*_KINDS, "other")
_THREAD = re.compile(r"thread \(\d+, \d+, \d+\)")
_SIZES = re.compile(r"(?:^|\b(?:at|times) )(\w+=\d+(?:, \w+=\d+)*)")


@dataclass(frozen=True)
class Finding:
    """A problem of a user's kernel, as it is described to the user.

    text: a description of one or a few lines. lines: line numbers in the file. at: when and where
    the problem occurs, with a preposition. printed: text that the kernel printed. max_abs, max_rel:
    the largest error of a wrong result, absolute and relative to the largest value. bound: the
    relative error that rounding explains.
    """

    text: str
    lines: tuple[int, ...] = ()
    at: str = ""
    printed: str = ""
    max_abs: float | None = None
    max_rel: float | None = None
    bound: float | None = None

    @property
    def kind(self) -> str:
        """One of `KINDS`: "fragile" for a kernel that is wrong only for special inputs."""
        return next((kind for kind, begin in _KINDS.items() if re.match(begin, self.text)), "other")

    @property
    def threads(self) -> tuple[str, ...]:
        """Threads that the report names, such as "thread (1, 0, 0)"."""
        return tuple(dict.fromkeys(_THREAD.findall(f"{self.text}\n{self.at}")))

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes at which the problem occurs; {} if it does not depend on the sizes."""
        stated = _SIZES.search(self.at) or _SIZES.search(self.text)
        pairs = (each.split("=") for each in stated[1].split(", ")) if stated else ()
        return {name: int(size) for name, size in pairs}

    def as_dict(self) -> dict[str, object]:
        """Return the finding as a dict that can be written as JSON; NaN and infinity are None."""
        names = ("kind", "text", "lines", "threads", "sizes", "at", "max_abs", "max_rel", "bound")
        return as_json(self, names)


def as_json(of: object, names: Iterable[str]) -> dict[str, object]:
    """Return attributes as JSON can hold them: None for NaN and infinity, lists for tuples."""
    fields = {name: getattr(of, name) for name in names}
    for name, value in fields.items():
        if isinstance(value, float):
            fields[name] = float(value) if isfinite(value) else None
        elif isinstance(value, tuple):
            fields[name] = list(value)
    return fields


def headline(source: UserSource, problem: Finding) -> str:
    """Return a problem's description after the file's name and the first affected line number."""
    place = f"{source.file}:{problem.lines[0]}: " if problem.lines else f"{source.file}: "
    return problem.text if problem.text.startswith(source.file) else place + problem.text


def numbered(source: UserSource, found: Finding) -> list[str]:
    """Return the source lines that a problem concerns, each after its line number."""
    lines = sorted({*found.lines})
    return [f"{number:>5} | {source.line(number).expandtabs(4)}" for number in lines]


def compiler_finding(source: UserSource, log: str) -> Finding:
    """Return the Finding with the first errors in the log of NVRTC, or of a GPU's compilation.

    Raises NotJudged if a header of CUDA is missing, which is no mistake of the file.
    """
    if missing := _HEADER_OF_CUDA.search(log):
        raise NotJudged(
            f"{source.file}: not judged: CUDA's header {missing[1]} is not installed: install a "
            f"CUDA toolkit that has it in {nvrtc.TOOLKIT}, or write the kernel without it"
        )
    file = re.escape(source.file)
    found = re.findall(
        rf"^(?:.*/)?{file}(?:\((\d+)\): (?:catastrophic )?error: |:(\d+): )(.+)$", log, re.MULTILINE
    )
    errors = [(int(a or b), said) for a, b, said in found]
    if not errors and "At end of source" in log:
        return Finding(
            f"{source.file} does not compile: a brace is missing, or there is one too many"
        )
    refused = re.search(r"(?:ptxas|line \d+;) (?:error|fatal) +: (.+)", log)
    if not errors and refused:
        said = re.sub(r"0x[0-9a-f]+", lambda number: f"{int(number[0], 16):,}", refused[1])
        if function := re.search(r"function '(\w+)'", said):
            return _missing_body(source, said, function[1])
        return Finding(f"{source.file} does not compile: {said}", (source.number,))
    if not errors:
        plain = re.sub(r"(?:/[^\s/:(]+)+/", "", log.strip())  # without folders of this machine
        return Finding(f"{source.file} does not compile:\n{plain}")
    shown = errors[:MAX_ERRORS]
    rest = len(errors) - len(shown)
    more = f"\nand {rest} more error{'s' if rest > 1 else ''}" if rest else ""
    what = "\n".join(f"{source.file}:{each[0]}: {_explain_host(source, *each)}" for each in shown)
    library = re.search('cannot open source file|"std" has no|not.* of .std', what)
    hint = _NO_LIBRARY if library else ""
    lines = _lines_of_error(source, *shown[0])
    return Finding(f"{source.file} does not compile:\n{what}{more}{hint}", lines)


def _missing_body(source: UserSource, said: str, symbol: str) -> Finding:
    """Return the Finding for a function that the file declares and calls, but does not define."""
    name = engine.plain_name(symbol)
    code = kernels.without_comments(source.text).splitlines()
    lines = [number for number, text in enumerate(code, 1) if re.search(rf"\b{name}\b", text)]
    said = f"{said.replace(symbol, name).strip()}: no function {name} of the file has a body"
    return Finding(f"{source.file} does not compile: {said}", tuple(lines[:2] or [source.number]))


def _explain_host(source: UserSource, line: int, message: str) -> str:
    """Explain NVRTC's message about a host function."""
    text = "".join(source.text.splitlines()[line - 1 : line])
    return _HOST_OF_NVRTC.sub(MAIN if re.search(r"\bmain\s*\(", text) else HOST, message)


def _lines_of_error(source: UserSource, line: int, message: str) -> tuple[int, ...]:
    """Return the line of an error, after the line that probably lacks a semicolon."""
    if _NO_SEMICOLON.match(message):
        code = kernels.without_comments(source.text).splitlines()
        before = [number for number in range(1, line) if code[number - 1].strip()]
        return (*before[-1:], line)
    return (line,)


def engine_finding(source: UserSource, problem: engine.Finding, at: str) -> Finding:
    """Return the Finding for an error that the emulator has found in a launch."""
    now = problem.now
    where = f"in block {now.block}, thread {now.thread}, {at}"
    of_user = [
        each.line
        for each in (now, problem.other)
        if each and each.line and Path(each.file).name == source.file
    ]
    return Finding(_describe(source, problem), tuple(dict.fromkeys(of_user)), where)


def _describe(source: UserSource, found: engine.Finding) -> str:
    """Describe an error that the emulator has found."""
    now, other = found.now, found.other
    same = other is None or now.block == other.block
    brief = {"race": not found.other_verb, "unwritten": found.local}
    texts = _SAID | (_SAID_BRIEFLY if brief.get(found.kind, not found.array) else {})
    return texts.get(found.kind, "{found.text}").format(
        found=found,
        name=source.name,
        element=element(source, found.array, found.byte, found.bytes, now.line),
        at=_place(now),
        other=f"{other}{'' if same else ' of another block'}",
        there=_place(other) if other else "",
        reached=f", {other} has come to {_place(other)}" if other else "",
        between=found.text or _BETWEEN[same],
        has=f", which has {found.size:,} bytes" if found.size else "",
    )


def element(source: UserSource, array: str, byte: int, size: int, line: int) -> str:
    """Return an accessed element with its indexes, such as x[12], tile[3][0] or count.

    size: bytes of the access, which counts if the type is not known. line: of the access.
    """
    ctype, extents = declared(source, array, line)
    index = byte // (dtype_of(ctype).itemsize or size or 1)
    further: list[str] = []
    for extent in extents[:0:-1]:
        index, inner = divmod(index, extent or 1)
        further.insert(0, f"[{inner}]")
    return f"{array}[{index}]{''.join(further)}" if extents else array


def dtype_of(ctype: str, storage: str = "V0") -> np.dtype:
    """Return the dtype of a C++ type, of 0 bytes if not known. storage: of the types T and W."""
    return np.dtype(storage if ctype in ("T", "W") else _DTYPES.get(ctype, "V0"))


def declared(source: UserSource, name: str, line: int) -> tuple[str, list[int]]:
    """Return the type and the extents of a variable; a pointer has one that is not known: 0.

    Of several declarations, it is the last one before the line.
    """
    known = {each.name: each.ctype for each in source.parameters}
    if name in known:
        return known[name].removesuffix("*"), [0]
    plain = kernels.without_comments(source.text)
    pattern = re.compile(
        r"\b((?:(?:unsigned|long) )*\w+)([\s*&]+)(?:\w+\s*(?:\[[^;\]]*\]\s*)*,\s*)*"
        rf"{re.escape(name)}\s*((?:\[[^;]*?\]\s*)*)[;,={{]"
    )  # if the type is not known, "*" and "&" are operators
    lines = [
        m
        for m in pattern.finditer(plain)
        if m[1] != "return" and (dtype_of(m[1]).itemsize or m[2].isspace())
    ]
    if not lines:
        return "", [0]
    before = [each for each in lines if plain.count("\n", 0, each.end()) < line]
    last = (before or lines)[-1]
    ctype = last[1] + "*" * last[2].count("*")
    try:
        text = re.findall(r"\[([^\]]*)\]", last[3])
        return ctype, [evaluated(each or "0", numbers(source.text)) for each in text]
    except InputError:
        return ctype, [0]


def _place(where: engine.Where) -> str:
    return f"{Path(where.file).name}:{where.line}"
