"""What is wrong with a kernel, in words, with the lines of its file."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpt2block.emulator.loader import END
from gpt2block.mine.source import Source

MOST_ERRORS = 3  # of a compiler
_CONTEXT = re.compile(r": (note|warning):|: {2,}(recursively )?required (from|by) ")
_NO_LIBRARY = "\n(Kernels have no headers of the C and C++ libraries. printf and assert need none.)"
_OUTSIDE = re.compile(r"(READ|WRITE) out of bounds: (byte .*)")
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


@dataclass(frozen=True)
class Finding:
    """`what` is one or a few lines; `lines` are numbers of lines in the file.

    `at` says when and where, with a preposition. `printed` is the text that the kernel has printed.
    """

    what: str
    lines: tuple[int, ...] = ()
    at: str = ""
    printed: str = ""


def of_compiler(source: Source, log: str) -> Finding:
    """The first errors of g++ or of NVRTC."""
    file = re.escape(source.file)
    found = re.findall(
        rf"^(?:.*/)?{file}:(\d+)(?::\d+)?: (?:(?:fatal )?error: )?(.+)$|"
        rf"^(?:.*/)?{file}\((\d+)\): (?:catastrophic )?error: (.+)$",
        "\n".join(line for line in log.splitlines() if not _CONTEXT.search(line)),
        re.MULTILINE,
    )
    errors = [(int(a or c), b or d) for a, b, c, d in found if "In function" not in (b or d)]
    if not errors and f"{END}:" in log:
        return Finding(
            f"{source.file} does not compile: a brace is missing, or there is one too many"
        )
    inside = re.search(rf"In file included from (?:.*/)?{file}:(\d+)(?:.|\n)*?: error: (.+)", log)
    if not errors and inside:
        errors = [(int(inside[1]), f"in the header: {inside[2]}{_NO_LIBRARY}")]
    if not errors:
        return Finding(f"{source.file} does not compile:\n{log.strip()}")
    shown = errors[:MOST_ERRORS]
    rest = len(errors) - len(shown)
    more = f"\nand {rest} more error{'s' if rest > 1 else ''}" if rest else ""
    what = "\n".join(f"{source.file}:{line}: {message}" for line, message in shown)
    return Finding(f"{source.file} does not compile:\n{what}{more}", (shown[0][0],))


def of_emulator(source: Source, report: str, at: str) -> Finding:
    """A report of the emulator's launch, such as AddressSanitizer's."""
    place = _PLACE.search(report)
    where = f"in {place[1]}, {at}" if place else at
    lines = _lines(source, report)
    return Finding(_said(source, report), lines, where)


def _said(source: Source, report: str) -> str:
    first = report.splitlines()[0]
    if outside := _OUTSIDE.search(report):
        return f"{_VERBS[outside[1]]} out of bounds: {outside[2]}"
    if misaligned := _MISALIGNED.search(first):
        kind, bytes_ = misaligned.groups()
        return f"misaligned access: the address of a {kind} must be divisible by {bytes_}"
    if "runtime error: " in first:
        return first.partition("runtime error: ")[2]
    if summary := _SUMMARY.search(report):
        what = _SUMMARIES.get(summary[1], summary[1])
        access = _ACCESS.search(report)
        verb = f"{_VERBS[access[1]]} {access[2]} bytes " if access and "outside" in what else ""
        return verb + what
    named = re.sub(rf" in {re.escape(source.name)}(?=[:,])", "", first)
    return named.replace("after 1 barriers", "after 1 barrier")


def _lines(source: Source, report: str) -> tuple[int, ...]:
    """The lines of the file in a report, each once; of an overrun, that of the access alone."""
    numbers = re.findall(rf"{re.escape(source.file)}:(\d+)", report)
    distinct = tuple(dict.fromkeys(map(int, numbers)))
    several = "race in " in report or "divergent barrier" in report
    return distinct[: 2 if several else 1]
