"""Refuse files with which the emulator would not judge the program that a GPU runs.

Such a file reads other files, changes names that the checks need, or compiles different code for
the emulator than for a GPU. The text is searched with continued lines joined, and if it pastes
tokens (##), also after its own macros have been expanded.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from typing import NoReturn

from gpt2block.cuda import cupy, kernels
from gpt2block.emulator import loader
from gpt2block.errors import DeviceError, NotJudged
from gpt2block.mine.refused import without_literals
from gpt2block.mine.source import UserSource

_HASH = r"^[ \t]*(?:#|%:|\?\?=)[ \t]*"
_INCLUDE = re.compile(_HASH + r"(include\w*|embed|import)\b[ \t]*(.*)$", re.MULTILINE)
_PLAIN_PATH = re.compile(r'<(?!/)[\w./+-]+>|"(?!/)[\w./+-]+"')
_NAMES = re.compile(
    r"\b(__(?:asan|tsan|ubsan|msan|hwasan|sanitizer|cxa|cyg)_\w*|\w*cuda_on_cpu\w*"
    r"|no_sanitize\w*|no_address_safety_analysis|disable_sanitizer_instrumentation"
    r"|no_instrument_function|no_profile_instrument_function)"
)
_ATTRIBUTE = re.compile(
    r"\b_*(constructor|destructor|ifunc|alias|weakref|section|naked|cleanup|optimize|target)_*\b"
)
_ATTRIBUTES = re.compile(r"__attribute(?:__)?\s*\(\((.*?)\)\)|\[\[(.*?)\]\]", re.DOTALL)
_PRAGMA = re.compile(r"#[ \t]*pragma[ \t]+GCC[ \t]+(?!unroll|diagnostic|ivdep)\w+|_Pragma\s*\(")
_DEFINED = re.compile(_HASH + r"(define|undef)[ \t]+(\w+)", re.MULTILINE)
_CONDITION = re.compile(_HASH + r"(?:if|ifdef|ifndef|elif|elifdef|elifndef)\b(.*)$", re.MULTILINE)
_WORD = re.compile(r"\b[A-Za-z_]\w*")
_OF_OPTIONS = "__(SANITIZE_|OPTIMIZE|NO_(INLINE|MATH_ERRNO)__|SSP_|[pP][iI][cCeE]__)"
SAME = ("__CUDA_ARCH__", "__CUDACC__", "__CUDACC_RTC__", "__cplusplus", "defined", "true", "false")


def check_text(source: UserSource) -> None:
    """Raise NotJudged if a file has a construct that the module's docstring describes."""
    literal = _joined(kernels.without_comments(source.text))
    text = _joined(without_literals(source.text))
    for found in _INCLUDE.finditer(literal):
        path = found[2].strip()
        if found[1] != "include" or not _PLAIN_PATH.fullmatch(path) or ".." in path:
            why = "a file may include only headers by a plain name"
            _refuse(source, literal, found.start(), f"#{found[1]} {path}", why)
    expanded = _expanded(text) if "##" in text or "%:%:" in text else ""
    for searched in (text, expanded):
        _check_names(source, searched)
    for found in _DEFINED.finditer(text):
        if found[2] in _of_cuda():
            _refuse(source, text, found.start(), f"#{found[1]} {found[2]}", "a name of CUDA")
    _check_conditions(source, text)


def _check_names(source: UserSource, text: str) -> None:
    names = [*_NAMES.finditer(text), *_PRAGMA.finditer(text)]
    for attributes in _ATTRIBUTES.finditer(text):
        names += _ATTRIBUTE.finditer(text, *attributes.span())
    for found in names:
        _refuse(source, text, found.start(), found[0], "it would change how the emulator checks")


def _check_conditions(source: UserSource, text: str) -> None:
    """Refuse conditions on macros that have another value in g++ than in CUDA's compiler."""
    own = {name for _, name in _DEFINED.findall(text)}
    known = {*SAME, *own, *re.findall(r"#define (\w+)", kernels.prelude())}
    for found in _CONDITION.finditer(text):
        for name in _WORD.findall(found[1]):
            if name not in known and (_of_gcc(name) or _of_nvrtc(name)):
                why = "a condition on it may choose other code for the emulator than for a GPU"
                _refuse(source, text, found.start(), name, why)


def _refuse(source: UserSource, text: str, offset: int, name: str, why: str) -> NoReturn:
    inside = text.count("\n", 0, offset) + 1 if text else source.number
    raise NotJudged(f"{source.file}:{inside}: not judged: {name}: {why}: leave it out")


def _joined(text: str) -> str:
    """Join continued lines; a later line keeps its number, as newlines follow the joined line."""

    def joined(found: re.Match[str]) -> str:
        parts = re.split(r"\\[ \t]*\n", found[0])
        return "".join(parts) + "\n" * (len(parts) - 1)

    return re.sub(r"(?:[^\n]*\\[ \t]*\n)+[^\n]*", joined, text)


def _expanded(text: str) -> str:
    """Return the text after g++ has expanded its macros, without the headers."""
    plain = _INCLUDE.sub("", text)
    command = ("g++", "-E", "-P", "-w", "-x", "c++", "-")
    return subprocess.run(command, input=plain, capture_output=True, text=True, check=False).stdout


@cache
def _of_cuda() -> frozenset[str]:
    """Return the names of CUDA that the emulator's first header defines as macros."""
    return frozenset(_macros((loader.HERE / "cuda_on_cpu.h").read_text("ascii")))


def _of_gcc(name: str) -> bool:
    """Return whether g++ defines a macro, always or only with some options of the programs."""
    return name in _known() or re.match(_OF_OPTIONS, name) is not None


@cache
def _known() -> frozenset[str]:
    """Return the names of all macros that g++ knows after the emulator's first header."""
    command = ("g++", "-std=c++17", "-dM", "-E", "-x", "c++", str(loader.HERE / "cuda_on_cpu.h"))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return frozenset(_macros(done.stdout))


@cache
def _of_nvrtc(name: str) -> bool:
    """Return whether NVRTC defines a macro; without NVRTC, whether the name is a reserved one."""
    reserved = re.match(r"_[_A-Z]", name) is not None
    if name.startswith("__has_"):
        return True
    try:
        nvrtc = cupy.cuda.nvrtc
        handle = nvrtc.createProgram(f"#ifdef {name}\n#error defined\n#endif\n", "probe.cu", (), ())
        try:
            nvrtc.compileProgram(handle, ("-std=c++17",))
        except nvrtc.NVRTCError:
            return "probe.cu(2)" in nvrtc.getProgramLog(handle)
        finally:
            nvrtc.destroyProgram(handle)
    except (DeviceError, ImportError, OSError, RuntimeError):  # CuPy or NVRTC is not installed
        return reserved
    return False


def _macros(text: str) -> Iterator[str]:
    return (name for _, name in _DEFINED.findall(text))
