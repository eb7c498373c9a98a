"""A `.cu` file of the user's: its kernels, their prototypes and launch lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from gpt2block.cuda import kernels
from gpt2block.cuda.kernels import Parameter
from gpt2block.errors import InputError

BLOCK = "256"
LARGEST_FILE = 1 << 20  # bytes
_LAUNCH = re.compile(r"^[ \t]*//[ \t]*launch:(.*)$", re.MULTILINE)
_SETTING = re.compile(r"(\w+)\s*=\s*(.*?)\s*(?=\w+\s*=|$)")
_GLOBAL = re.compile(r"__global__\s[^;{(]*?(\w+)\s*\(")
_KEYS = ("grid", "block", "shared")


@dataclass(frozen=True)
class LaunchText:
    """Grid and block, one to three expressions each, and bytes of dynamic shared memory."""

    grid: str
    block: str = BLOCK
    shared: str = "0"


@dataclass(frozen=True)
class Source:
    """One kernel of a file. `lines` are those of the file, for messages."""

    path: Path
    text: str
    name: str
    parameters: tuple[Parameter, ...]
    launch: LaunchText

    @property
    def file(self) -> str:
        return self.path.name

    def place(self, parameter: str | None = None) -> str:
        """File and line of the kernel's name, or of one of its parameters: my.cu:12."""
        plain = kernels.without_comments(self.text)
        found = re.search(rf"__global__[^;{{]*?\b{self.name}\s*(?=\()", plain)
        end = found.end() if found else 0
        if parameter:
            named = rf"[^)]*?\b{re.escape(parameter)}(?=\s*[,)])"
            inside = re.compile(named).match(plain, end)
            end = inside.end() if inside else end
        return f"{self.file}:{plain.count(chr(10), 0, end) + 1}"

    def line(self, number: int) -> str:
        lines = self.text.splitlines()
        return lines[number - 1] if 0 < number <= len(lines) else ""


def read(
    path: Path,
    kernel: str | None = None,
    grid: str | None = None,
    block: str | None = None,
    shared: str | None = None,
) -> Source:
    """The kernel of a file, by name if there are several, with its launch line.

    grid, block, shared: replace those of the launch line. Raises InputError, which says what to
    write in the file or on the command line.
    """
    text = _text(path)
    found = kernels.parse(text, str(path.resolve()))
    if not found:
        raise InputError(f"{path}{_no_kernel(text)}")
    if kernel is None and len(found) > 1:
        raise InputError(
            f"{path} has {len(found)} kernels: choose one with --kernel {'|'.join(found)}"
        )
    name = kernel or next(iter(found))
    if name not in found:
        near = get_close_matches(name, found, 1) or list(found)
        raise InputError(f"--kernel {name}: {path.name} has no such kernel: use {', '.join(near)}")
    source = Source(path.resolve(), text, name, found[name].parameters, LaunchText(""))
    stated = _stated(source)
    given = {"grid": grid, "block": block, "shared": shared}
    settings = {**stated, **{key: value for key, value in given.items() if value is not None}}
    if "grid" not in settings:
        raise InputError(
            f"{source.place()}: the grid of {name} is not stated: pass --grid, or write a launch "
            "line above the kernel, as in --template"
        )
    return replace(source, launch=LaunchText(**settings))


def _text(path: Path) -> str:
    try:
        if any(not c.isprintable() or c in '"\\' for c in str(path.resolve())):
            raise InputError(f"--mine {path}: a path with quotes or backslashes: rename it")
        if path.stat().st_size > LARGEST_FILE:
            raise InputError(
                f"--mine {path}: more than {LARGEST_FILE:,} bytes: expected a .cu file"
            )
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise InputError(f"--mine {path}: byte {error.start} is not UTF-8") from None
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"--mine {path}: {why}") from None


def _no_kernel(text: str) -> str:
    """What a file without a readable prototype lacks, to be written after its name."""
    plain = kernels.without_comments(text)
    found = _GLOBAL.search(plain)
    if found is None:
        return ': no kernel: expected extern "C" __global__ void name(...), see --template'
    line = plain.count("\n", 0, found.end()) + 1
    return (
        f':{line}: kernel {found[1]}: expected extern "C" __global__ void {found[1]}(...), so that '
        "it can be found by name"
    )


def _stated(source: Source) -> Mapping[str, str]:
    """The settings of the last launch line before the kernel."""
    text = source.text
    at = re.search(rf"^[^/\n]*__global__[^;{{]*?\b{source.name}\s*\(", text, re.MULTILINE)
    above = [found for found in _LAUNCH.finditer(text) if at is None or found.start() < at.start()]
    if not above:
        return {}
    settings = dict(_SETTING.findall(above[-1][1]))
    unknown = [key for key in settings if key not in _KEYS]
    if unknown or not settings:
        number = text[: above[-1].start()].count("\n") + 1
        what = f"unknown setting {unknown[0]!r}" if unknown else "it has no settings"
        raise InputError(
            f"{source.file}:{number}: launch line: {what}: expected 'grid=', 'block=' and "
            "'shared=', as in --template"
        )
    return settings
