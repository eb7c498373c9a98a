"""Set-ups of tests/apps/test_transcripts.py, and what varies between machines."""

from __future__ import annotations

import errno
import functools
import importlib.metadata
import itertools
import os
import re
import shlex
import shutil
import sys
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpt2block import emulator, errors
from gpt2block.apps.cli import chat, generate, score
from gpt2block.apps.profiling import runs
from gpt2block.cuda import doctor
from gpt2block.cuda.formats import USUAL
from gpt2block.emulator.ptx import nvrtc
from gpt2block.engine import timeline
from gpt2block.engine.numpy import executor as numpy_executor
from gpt2block.errors import CheckpointError
from gpt2block.files.tokenizers.tokenizer import from_path
from gpt2block.judge import on_cpu
from gpt2block.judge.templates import template
from gpt2block.ops.registry import find
from tests.markov import LINES, MarkovEngine, byte_encoding, cycle

VARIES = [
    (re.compile(pattern), instead)
    for pattern, instead in (
        (re.escape(str(Path(__file__).parents[1])), "PROJECT"),
        (rf"(?<![\w.]){re.escape(doctor.version())}(?![\w.])", "VERSION"),
        (r"(?<=\S)   *", "  "),  # columns
        (r"\b\d\.\d+e-(0[5-9]|1\d|[4-9]\d)\b", "TINY"),  # errors of float32 depend on the compiler
        (r"/tmp\w{8}\b", "/TEMPORARY"),
        (r"\b\d+ instructions,", "N instructions,"),  # depends on NVRTC
        (r"\b[\d,]+\.\d+ s\b", "TIME s"),
        (r"\b[\d,.]+ (tokens|texts)/s", r"RATE \1/s"),
        (r"-?\d[\d.e-]* \(0x[\da-f]{8}\)", "NUMBER"),  # a log-probability with its bits
        (r", RATE tokens/s(?=, first after)", ""),
        (r"CPU \(\w+\), NumPy [\d.]+", "CPU, NumPy"),
        (r'("(?:ms|seconds\w*|tokens_per_second)": )[\d.e+-]+', r"\1TIME"),
        (r"(?m)^ {9,}", 8 * " "),  # indentation of a folded cell
        (r"((?:right|wrong|not judged)  )\d+\.\d\b", r"\1TIME"),
        (r"(\d+x\d+  )\d+\.\d+(  [\dT])", r"\1MS\2"),  # milliseconds of a step
        # Versions of Typer and Click have other words.
        (
            r"\.?( \(did you mean| Did you mean| \(Possible options:)[^(]*(?= \(see)|\.(?= \(see)",
            "",
        ),
        (r"(Invalid value for '[^']*': )(Input should|.* is not ).*(?= \(see)", r"\1…"),
        (r"(?<=Invalid value) for '\w+'|(?<=extra argument)\(s\)", ""),
        (r"(?<=Missing argument) '\w+'", ""),
    )
]
ERRORS = {100: b"CUDA_ERROR_NO_DEVICE", 803: b"CUDA_ERROR_MISMATCH", 999: b"CUDA_ERROR_UNKNOWN"}
HONEST = {name: getattr(doctor, name) for name in ("cuda_problem", "probe_driver", "probe_apart")}
FIRST_PROBLEM: Any = doctor._first_problem


class Setup:
    """The set-ups of one block: each method is one, with its argument and the lines below it."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.patch, self.folder = patch, folder
        patch.setattr(sys, "argv", ["gpt2block"])  # as in a script
        patch.setattr(sys.modules["__main__"], "__package__", None)
        for name in ("FORCE_COLOR", "NO_COLOR"):
            patch.delenv(name, raising=False)
        patch.setattr(doctor, "cuda_problem", lambda: "no driver today")

    def file(self, name: str, text: str) -> None:
        (self.folder / name).write_text(dedent(text) + "\n", encoding="utf-8")

    def template(self, operation: str, _: str) -> None:
        """Write the template of an operation to my.cu."""
        self.file("my.cu", template(find(operation)).removesuffix("\n"))

    def environment(self, values: str, _: str) -> None:
        for each in shlex.split(values):
            self.patch.setenv(*each.split("=", 1))

    def completion(self, words: str, _: str) -> None:
        """Ask for what a shell completes after `gpt2block WORDS`; "..." is a word not begun."""
        self.patch.setenv("_GPT2BLOCK_COMPLETE", "complete_bash")
        self.patch.setenv("COMP_WORDS", f"gpt2block {words.removesuffix('...')}")
        self.patch.setenv("COMP_CWORD", str(len(words.split(" "))))

    def emulator(self, *_: str) -> None:
        if problem := emulator.missing():
            pytest.skip(f"no CUDA on the CPU: {problem}")

    def extra(self, package: str, _: str) -> None:
        pytest.importorskip(package)

    def without(self, package: str, _: str) -> None:
        self.patch.setitem(sys.modules, package, None)

    def installed(self, package: str, _: str) -> None:
        """Let an optional package seem installed, or all be missing without a name."""
        self.patch.setattr(errors, "find_spec", lambda name: name if package else None)

    def no_compiler(self, library: str, _: str) -> None:
        """Hide g++, and NVRTC's library unless its name is given."""
        found = Path(library) if library else nvrtc.Refused(nvrtc.MISSING)
        self.patch.setattr(nvrtc, "find_library", lambda: found)
        self.patch.setattr(shutil, "which", lambda name: None)

    def fewer_sizes(self, *_: str) -> None:
        self.patch.setattr(on_cpu._Judge, "_check_large", lambda *_: [])

    def browser(self, *_: str) -> None:
        """Print the address that a browser would open."""
        self.patch.setattr(webbrowser, "open", lambda url: print("opened", url) is None)

    def clock(self, rates: str, _: str) -> None:
        """Let a clock of NumPy's steps advance by a time at each look, and state a rate of copies.

        As in "50 us, 10 GB/s".
        """
        us, gb_s = map(float, re.findall(r"[\d.]+", rates))
        looks = itertools.count()
        for module in (numpy_executor, timeline):
            self.patch.setattr(module, "perf_counter", lambda: 1e-6 * us * next(looks))
        self.patch.setattr(runs, "copy_gb_s", lambda _: gb_s)

    def deleted_folder(self, *_: str) -> None:
        (self.folder / "gone").mkdir()
        self.patch.chdir(self.folder / "gone")
        (self.folder / "gone").rmdir()

    def full_disk(self, *_: str) -> None:
        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        self.patch.setattr(os, "fsync", full)

    def tokens(self, name: str, _: str) -> None:
        """Write the ids 0 to 8 as NumPy does."""
        np.save(self.folder / name, np.arange(9, dtype=np.uint16))

    def model(self, facts: str = "", _: str = "") -> tuple[MarkovEngine, list[Any]]:
        """Replace the model of `generate` and `score` by a table: after a byte comes the next one.

        After "a", "c" is impossible. Facts: "end" for a token that ends a text, after which comes
        an "a"; "no tokenizer"; "name NAME"; or "script TEXT TEXT" for the texts of its rows, in
        which ^C is an interruption.
        """
        kind, *texts = shlex.split(facts) or [""]
        table = cycle(256 + (kind == "end"), 10)
        table[ord("a"), ord("c")] = -np.inf
        table[256:, ord("a")] = 20
        rows = [interruptible(text) for text in texts] if kind == "script" else None
        engine = MarkovEngine(table, script=rows)
        encoding = None if kind == "no" else byte_encoding(end=kind == "end")
        made: Any = SimpleNamespace(
            engine=engine, config=engine.config, tokenizer=encoding, formats=USUAL,
            name=unescaped(texts[0]) if kind == "name" else "a table",
            dtypes="float32", device="no device",
        )  # fmt: skip

        asked: list[Any] = []  # options of the model

        def load(options: Any, hint: str | None, adapters: Any = None) -> Any:
            asked.append(options)
            found = from_path(options.tokenizer, len(table)) if options.tokenizer else encoding
            if found is None and hint:
                raise CheckpointError(f"no tokenizer; {hint}")
            return made, found

        self.patch.setattr(score, "MAX_TEXT", 2**20)
        for module in (generate, score):
            self.patch.setattr(module, "load_model", load)
        return engine, asked

    def talk(self, *_: str) -> None:
        """Replace the model of `chat` by a table with a template: after a byte comes the next."""
        made: Any = SimpleNamespace(
            engine=MarkovEngine(cycle(257)), name="a table", dtypes="float32", device="no device",
            chat_template=LINES, chat_sampling={"temperature": 0.2, "top_p": 0.9},
        )  # fmt: skip
        self.patch.setattr(chat, "load_model", lambda options, hint: (made, byte_encoding()))

    def machine(self, facts: str, _: str = "") -> NVRTC:
        """Replace CuPy, NVRTC and the driver by working ones, except for these facts."""
        fact = dict(each.split("=", 1) for each in shlex.split(facts.replace(r"\n", "\n")))
        driver, compiler = Driver(fact), NVRTC(fact)
        cupy = {name: fact[name] for name in fact if "cupy" in name} or {"cupy-cuda12x": "14.2.0"}
        cupy = {name: version for name, version in cupy.items() if version != "no"}
        include = Path("nothing" if "header" in fact else "include")
        include.mkdir(exist_ok=True)
        if "header" not in fact:
            (include / doctor.HEADER).touch()
        module = SimpleNamespace(
            cuda=SimpleNamespace(
                driver=SimpleNamespace(get_build_version=lambda: int(fact.get("build", 12090))),
                runtime=SimpleNamespace(is_hip="hip" in fact),
                nvrtc=compiler,
            ),
            _core=SimpleNamespace(
                core=SimpleNamespace(assemble_cupy_compiler_options=lambda _: [f"-I{include}"])
            ),
        )

        def imported(name: str = "cupy") -> Any:
            if name == "numpy":
                if fact.get(name) == "missing":
                    raise ModuleNotFoundError("No module named 'numpy'")
                return SimpleNamespace(__version__=fact.get(name, "2.2.0"))
            if "broken" in fact:
                raise ImportError("\n===\nFailed to import CuPy.") from ImportError(fact["broken"])
            return module

        replaced = {
            "cuda_problem": HONEST["cuda_problem"],
            "_first_problem": functools.cache(FIRST_PROBLEM.__wrapped__),
            "installed_cupy": lambda: cupy,
            "import_cupy": imported,
            "importlib": SimpleNamespace(import_module=imported, metadata=importlib.metadata),
            "probe_driver": functools.partial(HONEST["probe_driver"], driver.load),
            "probe_apart": functools.partial(HONEST["probe_apart"], load=driver.load),
        }
        for name, value in replaced.items():
            self.patch.setattr(doctor, name, value)
        self.patch.setattr(sys, "platform", fact.get("platform", "linux"))
        self.patch.setattr(emulator, "missing", lambda: fact.get("emulator"))
        self.patch.setattr(nvrtc, "examined", lambda: "NVRTC 12.9.86 (libnvrtc.so.12)")
        self.patch.setenv("CUPY_CACHE_DIR", fact.get("cache", "cache"))
        self.patch.setenv("COLUMNS", "200")
        self.patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if "visible" in fact:
            self.patch.setenv("CUDA_VISIBLE_DEVICES", fact["visible"])
        return compiler


def unescaped(text: str) -> str:
    r"""Replace \n, \x1b and such; each byte of another character becomes a character."""
    return text.encode().decode("unicode_escape")


def interruptible(text: str) -> Iterator[int]:
    """Yield the bytes of a text; a ^C in it raises KeyboardInterrupt."""
    begin, interrupted, _ = unescaped(text).partition("^C")
    yield from begin.encode("latin-1")
    if interrupted:
        raise KeyboardInterrupt


class NVRTC:
    """An NVRTC with the facts `nvrtc`, its version or an error, and `log`, of each program."""

    def __init__(self, fact: dict[str, str]) -> None:
        self.fact, self.compiled, self.destroyed = fact, 0, 0

    def getVersion(self) -> tuple[int, ...]:  # noqa: N802
        version = self.fact.get("nvrtc", "12.9")
        if not version[0].isdecimal():
            raise RuntimeError(version)
        return tuple(map(int, version.split(".")))

    def createProgram(self, *_: Any) -> int:  # noqa: N802
        return 1

    def compileProgram(self, *_: Any) -> None:  # noqa: N802
        self.compiled += 1
        if "log" in self.fact:
            raise RuntimeError("NVRTC_ERROR_COMPILATION (6)")

    def getProgramLog(self, _: int) -> str:  # noqa: N802
        return self.fact["log"]

    def destroyProgram(self, _: int) -> None:  # noqa: N802
        self.destroyed += 1


class Driver:
    """The driver's library with the facts `version`, `devices` (their capabilities) and `apart`.

    A function's name is the fact of the error code that it returns. `lacks`: a function that the
    library does not have. `load`: the error of loading it.
    """

    def __init__(self, fact: dict[str, str]) -> None:
        self.fact = fact
        self.devices = [each.split(".") for each in fact.get("devices", "9.0").split(",") if each]

    def load(self, library: str) -> Driver:
        if "load" in self.fact:
            raise OSError(f"{library}: {self.fact['load']}\nsecond line")
        return self

    def __getattr__(self, function: str) -> Any:
        if function == self.fact.get("lacks"):
            raise AttributeError(f"{function}: undefined symbol")
        return functools.partial(self._call, function)

    def _call(self, function: str, *given: Any) -> int:
        """Answer a call: pointers are `ctypes.byref`, or an array. A device's handle is 40 + i."""
        out, *more = (getattr(each, "_obj", each) for each in given)
        handle = getattr(more[-1], "value", 40) if more else 40
        device = handle - 40 if isinstance(handle, int) else 0
        major, minor = self.devices[device] if self.devices else ("0", "0")
        match function:
            case "cuDriverGetVersion":
                out.value = int(self.fact.get("version", 13000))
            case "cuDeviceGetCount":
                out.value = len(self.devices)
            case "cuGetErrorName":
                more[0].value = ERRORS.get(out)
            case "cuDeviceGet":
                out.value = 40 + more[0]
            case "cuDeviceGetName":
                out.value = f"GPU {major}000".encode()
            case "cuDeviceTotalMem_v2":
                out.value = (device + 1) << 36
            case "cuDeviceCanAccessPeer":
                out.value = f"{more[0].value - 40}-{device}" not in self.fact.get("apart", "")
            case "cuDeviceGetAttribute":
                out.value = {75: int(major), 76: int(minor), 16: 100}[more[0]]
        return int(self.fact.get(function, 0))
