"""Describe a problem of a user's kernel, with the lines of its source file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from gpt2block.cuda import kernels
from gpt2block.emulator.loader import END
from gpt2block.mine.source import UserSource

MOST_ERRORS = 3  # maximum number of compiler errors shown
_CONTEXT = re.compile(r": (note|warning):|: {2,}(recursively )?required (from|by) ")
_NO_LIBRARY = (
    "\n(Kernels have no C++ library, only what <cmath>, <cfloat>, <climits> and <cstdint> declare, "
    "std::min and std::max. For std::numeric_limits write FLT_MAX or INFINITY, for std::cout "
    "printf.)"
)
# Messages about a missing semicolon. NVRTC, and g++ after a declaration, name the next word's line.
_NO_SEMICOLON = re.compile(r"""expected (?:a ";"|.,. or .;.)""")
HOST = (
    "a function without __device__ is a host function, which the compiler of kernels (NVRTC) "
    "refuses: write __device__ before it"
)
MAIN = "gpt2block launches the kernel, and no file has a main function: delete it"
_HOST_OF_NVRTC = re.compile(r"A function without execution space annotations .*")
_OUTSIDE = re.compile(r"(READ|WRITE) out of bounds: (byte .*)")
_EARLY = re.compile(r"(READ|WRITE) (before wait_for_previous\(\): byte .*)")
_MAY_BE_READ = (
    "\n(Only what const __restrict__ points to may be read before: no earlier kernel writes it.)"
)
_ACCESS = re.compile(r"^(READ|WRITE) of size (\d+)", re.MULTILINE)
_SUMMARY = re.compile(r"SUMMARY: AddressSanitizer: ([\w-]+)")
_MISALIGNED = re.compile(
    r"misaligned address \S+ for type '(?:const )?(?:struct )?(.+)', which requires (\d+) byte"
)
_PLACE = re.compile(r"^in \w+, (block .*)$", re.MULTILINE)
_VERBS = {"READ": "reads", "WRITE": "writes"}
_SUMMARIES = {
    "heap-buffer-overflow": "outside the dynamic shared memory",
    "global-buffer-overflow": "outside a shared or constant variable",
    "stack-buffer-overflow": "outside a local array",
    "stack-overflow": "uses more local memory than a thread has here, 256 KiB",
    "SEGV": "accesses an address that belongs to no argument, such as a null pointer",
}


# Kind of a finding → regex of the beginning of its text; the first one that matches counts.
_KINDS = {
    kind: re.compile(pattern)
    for kind, pattern in {
        "fragile": "fragile: ",
        "kept_state": "right in the first launch",
        "uninitialized": "right if the output holds NaN",
        "assertion": "assertion fails|the kernel calls __trap",
        "race": "race: ",
        "read_only": "read-only load: ",
        "divergent_barrier": "divergent barrier",
        "does_not_compile": r".* does not compile|.*host function|.* bytes of __\w+__ variables",
        "launch": r"(?:grid|block|shared)\b|\S+: launch line|\w+ takes \d+ registers|.* of extern ",
        "does_not_end": r".*\bstill run",
        "early_access": r".* before wait_for_previous|.*no thread waits for the previous kernel",
        "out_of_bounds": r"(?:reads|writes|index|accesses) .*(?:out of bounds|outside|no argument)",
        "misaligned": ".*misaligned",
        "changed_input": "the kernel changes its input",
        "wrong_result": "[0-9,]+ of [0-9,]+ elements of |wrong at the benchmark's sizes",
    }.items()
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
        return next((kind for kind, begin in _KINDS.items() if begin.match(self.text)), "other")

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

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as a dict that can be written as JSON; NaN and infinity are None."""
        return {
            "kind": self.kind,
            "text": self.text,
            "lines": list(self.lines),
            "threads": list(self.threads),
            "sizes": self.sizes,
            "at": self.at,
            "max_abs": finite(self.max_abs),
            "max_rel": finite(self.max_rel),
            "bound": finite(self.bound),
        }


def finite(value: float | None) -> float | None:
    """Return a number as JSON can hold it: None for NaN and infinity."""
    return None if value is None or not isfinite(value) else float(value)


def headline(source: UserSource, found: Finding) -> str:
    """Return a problem's description after the file's name and the first affected line number."""
    place = f"{source.file}:{found.lines[0]}: " if found.lines else f"{source.file}: "
    return found.text if found.text.startswith(source.file) else place + found.text


def numbered(source: UserSource, found: Finding) -> list[str]:
    """Return the source lines that a problem concerns, each after its line number."""
    return [
        f"{number:>5} | {source.line(number).expandtabs(4)}" for number in sorted({*found.lines})
    ]


def of_compiler(source: UserSource, log: str) -> Finding:
    """Return the Finding with the first errors in the log of g++ or NVRTC."""
    file = re.escape(source.file)
    found = re.findall(
        rf"^(?:.*/)?{file}:(\d+)(?::\d+)?: (?:(?:fatal )?error: )?(.+)$|"
        rf"^(?:.*/)?{file}\((\d+)\): (?:catastrophic )?error: (.+)$",
        "\n".join(line for line in log.splitlines() if not _CONTEXT.search(line)),
        re.MULTILINE,
    )
    errors = [(int(a or c), b or d) for a, b, c, d in found if "In function" not in (b or d)]
    if not errors and (f"{END}:" in log or "At end of source" in log):
        return Finding(
            f"{source.file} does not compile: a brace is missing, or there is one too many"
        )
    refused = re.search(r"ptxas error +: (.+)", log)
    if not errors and refused:
        said = re.sub(r"0x[0-9a-f]+", lambda number: f"{int(number[0], 16):,}", refused[1])
        return Finding(f"{source.file} does not compile: {said}", (source.number,))
    inside = re.search(rf" from (?:.*/)?{file}:(\d+)(?:.|\n)*?: error: (.+)", log)
    if not errors and inside:
        errors = [(int(inside[1]), f"in the header: {inside[2]}{_NO_LIBRARY}")]
    if not errors:
        return Finding(f"{source.file} does not compile:\n{log.strip()}")
    shown = errors[:MOST_ERRORS]
    rest = len(errors) - len(shown)
    more = f"\nand {rest} more error{'s' if rest > 1 else ''}" if rest else ""
    what = "\n".join(f"{source.file}:{each[0]}: {_explained_host(source, *each)}" for each in shown)
    hint = (
        _NO_LIBRARY if re.search('cannot open source file|"std" has no|not.* of .std', what) else ""
    )
    lines = _with_line_before(source, *shown[0])
    return Finding(f"{source.file} does not compile:\n{what}{more}{hint}", lines)


def _explained_host(source: UserSource, line: int, message: str) -> str:
    """Explain NVRTC's message about a host function."""
    text = "".join(source.text.splitlines()[line - 1 : line])
    return _HOST_OF_NVRTC.sub(MAIN if re.search(r"\bmain\s*\(", text) else HOST, message)


def _with_line_before(source: UserSource, line: int, message: str) -> tuple[int, ...]:
    """Return the line of an error, after the line that probably lacks a semicolon."""
    if _NO_SEMICOLON.match(message):
        code = kernels.without_comments(source.text).splitlines()
        before = [number for number in range(1, line) if code[number - 1].strip()]
        return (*before[-1:], line)
    return (line,)


def of_emulator(source: UserSource, report: str, at: str) -> Finding:
    """Return the Finding for a report of an emulated launch, such as AddressSanitizer's."""
    place = _PLACE.search(report)
    where = f"in {place[1]}, {at}" if place else at
    lines = _lines(source, report)
    return Finding(_said(source, report), lines, where)


def explained(source: UserSource, found: Finding, notes: Sequence[str]) -> Finding:
    """Add possible causes, noted by the emulator, to the Finding of a wrong result."""
    said = "".join(f"\nPossibly because {note}" for note in dict.fromkeys(notes))
    return replace(found, text=found.text + said, lines=_lines(source, said))


def _said(source: UserSource, report: str) -> str:
    return _of_an_access(report) or _of_a_program(source, report)


def _of_an_access(report: str) -> str:
    """Describe the invalid array access in an emulator's report; return "" if there is none."""
    if outside := _OUTSIDE.search(report):
        return f"{_VERBS[outside[1]]} out of bounds: {outside[2]}"
    if early := _EARLY.search(report):
        return f"{_VERBS[early[1]]} {early[2]}{_MAY_BE_READ}"
    if misaligned := _MISALIGNED.search(report.splitlines()[0]):
        kind, bytes_ = misaligned.groups()
        return f"misaligned access: the address of a {kind} must be divisible by {bytes_}"
    return ""


def _of_a_program(source: UserSource, report: str) -> str:
    first = report.splitlines()[0]
    if "runtime error: " in first:
        return first.partition("runtime error: ")[2]
    if summary := _SUMMARY.search(report):
        what = _SUMMARIES.get(summary[1], summary[1])
        access = _ACCESS.search(report)
        verb = f"{_VERBS[access[1]]} {access[2]} bytes " if access and "outside" in what else ""
        return verb + what
    if first.endswith(":DEADLYSIGNAL"):  # a report that AddressSanitizer could not complete
        return _SUMMARIES["SEGV"]
    cooperative = next((line for line in report.splitlines() if "cooperative launch" in line), "")
    if cooperative:
        first += f"\n{cooperative}"
    named = re.sub(rf" in {re.escape(source.name)}(?=[:,])", "", first)
    return named.replace("after 1 barriers", "after 1 barrier")


def _lines(source: UserSource, report: str) -> tuple[int, ...]:
    """Return the distinct line numbers of the user's file in a report, at most two.

    A race or a divergent barrier has two lines, every other problem one.
    """
    numbers = re.findall(rf"{re.escape(source.file)}:(\d+)", report)
    distinct = tuple(dict.fromkeys(map(int, numbers)))
    several = re.search("race in |read-only load in |divergent barrier", report) is not None
    return distinct[: 2 if several else 1]
