"""Read a user's `.cu` file: its kernels, their parameters and their `// launch:` comments."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from stat import S_ISREG

from gpt2block.cuda import kernels
from gpt2block.cuda.kernels import Parameter
from gpt2block.cuda.launch_lines import EXAMPLE, LaunchText, evaluated
from gpt2block.cuda.launch_lines import stated as stated_launch
from gpt2block.errors import Argument, InputError

OWN = Argument("mine")  # option that names the file, for messages
TEMPLATE = "`gpt2block kernels OPERATION --template`"
LARGEST_FILE = 1 << 20  # maximum bytes of a file
_GLOBAL = re.compile(r"__global__\s[^;{(]*?(\w+)\s*\(")
_NUMBER = re.compile(
    r"(?:^[ \t]*#[ \t]*define[ \t]+|\b(?:constexpr|const)\s+(?:unsigned\s+)?\w+\s+)(\w+)"
    r"(?:[ \t]+|\s*=\s*)([\w \t+*/()<-]+)",
    re.MULTILINE,
)
_LITERAL = r"(?:0[xX][\da-fA-F]+|\d+)[uUlL]*"
_CHAIN = re.compile(rf"(?<![\w.]){_LITERAL}(?:\s*(?:\*|<<)\s*{_LITERAL})*(?![\w.])")
# An array of a thread, such as float4 held[8]: numbers of elements of its type and of the array.
_LOCAL = re.compile(r"^(?!.*__)[^;=(\n]*?[a-z]([24]?)\s+\w+\s*\[([^\]\n]+)\]", re.MULTILINE)
_HOST = re.compile(
    r"\b(?:int|void)\s+(main)\s*\(|(<<<)|\b(cuda(?:Malloc|Memcpy|Memset|Free|Get|Set|Device|Event"
    r"|Stream)\w*)\s*\("
)
_HEADER = re.compile(r"^[ \t]*#[ \t]*include[ \t]*(<\w+>)", re.MULTILINE)
_WAIT = re.compile(r"\bwait_for_previous\(|\bgriddepcontrol\.wait\b")


@dataclass(frozen=True)
class UserSource:
    """A kernel in a user's file.

    launch_line: line number of the `// launch:` comment. stated: settings in this comment.
    problems: parts of messages about what must change; `matched` raises them.
    """

    path: Path
    text: str
    name: str
    parameters: tuple[Parameter, ...]
    launch: LaunchText
    launch_line: int = 0
    stated: frozenset[str] = frozenset()
    problems: tuple[tuple[object, ...], ...] = ()

    @property
    def file(self) -> str:
        return self.path.name

    def place(self, parameter: str | None = None) -> str:
        """Return file and line of the kernel's name or of a parameter, such as my.cu:12."""
        plain, end = kernels.without_comments(self.text), self._named[1]
        if parameter:
            named = rf"[^)]*?\b{re.escape(parameter)}(?=\s*[,)])"
            inside = re.compile(named).match(plain, end)
            end = inside.end() if inside else end
        return f"{self.file}:{plain.count(chr(10), 0, end) + 1}"

    def setting(self, key: str, value: str = "") -> tuple[object, ...]:
        """Return message parts that name a setting: the option, or the `// launch:` comment."""
        if key not in self.stated:
            return Argument(key), f" {value}" if value else ""
        written = f"{key}={value}" if value else key
        return (f"{self.file}:{self.launch_line}: launch line: {written}",)

    @property
    def host_code(self) -> list[str]:
        """The first place of each kind of host code, such as "main (line 9)"; headers come last."""
        plain = _outside_conditions(kernels.without_comments(self.text))
        numbers: dict[str, int] = {}
        for each in _HOST.finditer(plain):
            numbers.setdefault(next(filter(None, each.groups())), each.start())
        for each in _HEADER.finditer(plain):
            if kernels.without_host_headers(each[0]):
                numbers[f"#include {each[1]}"] = each.start()
        return [f"{name} (line {plain.count(chr(10), 0, at) + 1})" for name, at in numbers.items()]

    @property
    def number(self) -> int:
        """Line number of the kernel's name in the file."""
        return self.text.count("\n", 0, self._named[1]) + 1

    @property
    def max_threads(self) -> int | None:
        """Threads per block that `__launch_bounds__` allows, or None if it states no number."""
        start, end = self._named
        plain = kernels.without_comments(self.text)[start:end]
        stated = re.search(r"__launch_bounds__\s*\(([^,()]*)", plain)
        try:
            return evaluated(stated[1], numbers(self.text)) if stated else None
        except InputError:
            return None

    @property
    def _named(self) -> tuple[int, int]:
        """Offsets in the file: start of the kernel's definition, and end of the kernel's name.

        Of several definitions, such as in #if and #else, it is the last one. A declaration counts
        only without a definition.
        """
        plain = kernels.without_comments(self.text)
        prototype = rf"__global__[^;{{]*?\b{self.name}\s*(?=\([^;{{]*"
        for end in (r"\{)", ")"):
            if found := [each.span() for each in re.finditer(prototype + end, plain)]:
                return found[-1]
        return 0, 0

    def line(self, number: int) -> str:
        lines = self.text.splitlines()
        return lines[number - 1] if 0 < number <= len(lines) else ""

    @property
    def waits(self) -> bool:
        """Whether the kernel supports overlapping launches (kernels_cu/lib/overlap.cuh)."""
        return bool(_WAIT.search(kernels.without_comments(self.text)))


def read(
    path: Path,
    kernel: str | None = None,
    grid: str | None = None,
    block: str | None = None,
    shared: str | None = None,
) -> UserSource:
    """Read a kernel from a user's file, with the settings in its `// launch:` comment.

    kernel: name of the kernel, if the file has several. grid, block, shared: expressions that
    replace the launch line's. Raises InputError, which says what to write in the file or on the
    command line; the result has problems that do not prevent further checks.
    """
    text = read_text(path)
    linked = kernels.parse(text, str(path.resolve()))
    prototypes = linked or kernels.parse(text, str(path.resolve()), any_linkage=True)
    if not prototypes:
        raise InputError(f"{path}{_no_kernel(text)}")
    if kernel is None and len(prototypes) > 1:
        raise InputError(
            f"{path} has {len(prototypes)} kernels: choose one with ",
            Argument("kernel"),
            f" {'|'.join(prototypes)}",
        )
    name = kernel or next(iter(prototypes))
    if name not in prototypes:
        near = get_close_matches(name, prototypes, 1) or list(prototypes)
        use = f"use {', '.join(near)}"
        raise InputError(Argument("kernel"), f" {name}: {path.name} has no such kernel: {use}")
    source = UserSource(path.resolve(), text, name, prototypes[name].parameters, LaunchText(""))
    problems: list[tuple[object, ...]] = []
    if not linked:
        problems.append((f"{source.place()}{_not_linked(name, text)}",))
    line, stated = stated_launch(source.file, text, source._named[0])
    options = {"grid": grid, "block": block, "shared": shared}
    own = {key: value for key, value in options.items() if value is not None}
    settings = {**stated, **own}
    if "grid" not in settings:
        advice = f", or write a launch line above the kernel, such as `{EXAMPLE}`"
        what = f"{source.place()}: the grid of {name} is not stated: pass "
        problems.append((what, Argument("grid"), advice))
    return replace(
        source,
        launch=LaunchText(**{"grid": "", **settings}),
        launch_line=line,
        stated=frozenset(stated) - frozenset(own),
        problems=tuple(problems),
    )


def numbers(text: str) -> dict[str, int]:
    """Return the integers that a file defines by #define, const or constexpr, by name."""
    values: dict[str, int] = {}
    for name, value in _NUMBER.findall(kernels.without_comments(text)):
        with suppress(InputError):
            values[name] = evaluated(value, values)
    return values


def largest_number(text: str, most: int, threads: int) -> int:
    """Return the largest integer up to `most` in a file: a constant, or a product or shift.

    The elements of arrays in the registers of all threads of a block are such a number, too.
    """
    known, plain = numbers(text), kernels.without_comments(text)
    plain = re.sub(r"\b[A-Za-z_]\w*", lambda word: str(known.get(word[0], word[0])), plain)
    factors = {(each, 1) for each in _CHAIN.findall(plain)}
    factors |= {(extent, int(width or 1) * threads) for width, extent in _LOCAL.findall(plain)}
    values = [0]
    for each, times in factors:
        with suppress(InputError):
            values.append(evaluated(re.sub("[uUlL]", "", each), {}) * times)
    return max(value for value in values if value <= most)


def read_text(path: Path) -> str:
    """Return the text of a `.cu` file. Raises InputError for an unreadable or unsuitable file."""
    try:
        if any(not c.isprintable() or c in '"\\' for c in str(path.resolve())):
            raise InputError(OWN, f" {path}: a path with quotes or backslashes: rename it")
        status = path.stat()
        if not S_ISREG(status.st_mode):  # compiling reads the file again: no pipe
            kind = "a directory" if path.is_dir() else "a pipe or a device"
            what = f" {path}: expected a regular file, got {kind}: write the kernel to a .cu file"
            raise InputError(OWN, what)
        if status.st_size > LARGEST_FILE:
            raise InputError(OWN, f" {path}: more than {LARGEST_FILE:,} bytes: expected a .cu file")
        data = path.read_bytes()
        if data.startswith((b"\xff\xfe", b"\xfe\xff")):  # > in Windows PowerShell writes UTF-16
            raise InputError(OWN, f" {path}: expected UTF-8, got UTF-16: save the file as UTF-8")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(OWN, f" {path}: expected UTF-8, byte {error.start} is not") from None
    except FileNotFoundError:
        what = f" {path}: no such file: {TEMPLATE} prints one to start from"
        raise InputError(OWN, what) from None
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(OWN, f" {path}: {why}") from None


def _no_kernel(text: str) -> str:
    """Return the reason why a file has no readable kernel, as text after the file's name."""
    plain = kernels.without_comments(text)
    match = _GLOBAL.search(plain)
    if not text.strip():
        return f": no kernel: the source is empty: {TEMPLATE} prints one to start from"
    if match is None:
        return ': no kernel: expected extern "C" __global__ void name(...), as in ' + TEMPLATE
    return f":{plain.count(chr(10), 0, match.end()) + 1}" + _not_linked(match[1], text)


def _not_linked(name: str, text: str) -> str:
    template = re.search(rf"\btemplate\s*<[^;{{]*\b{name}\s*\(", kernels.without_comments(text))
    advice = ", which a template cannot have: write the types instead" if template else ""
    return (
        f': kernel {name}: expected extern "C" __global__ void {name}(...), so that it can be '
        f"found by name{advice}"
    )


def _outside_conditions(text: str) -> str:
    """Replace lines inside of #if ... #endif by empty lines."""
    depth, kept = 0, []
    for line in text.splitlines():
        depth += bool(re.match(r"\s*#\s*if", line))
        kept.append("" if depth else line)
        depth -= bool(re.match(r"\s*#\s*endif", line))
    return "\n".join(kept)
