"""Print figures of the package's structure: call walks, import cycles, names, options, lines.

    python tools/house.py                  # prints all of it
    python tools/house.py > tests/golden/house.txt

A walk follows a call on the emulator, as a reader would. It counts the files whose functions are
entered, the calls, and the changes of file between consecutive calls of a thread. Functions of the
emulator and comprehensions are not counted. Each walk runs in a separate process; "first" is the
first call in it, after the objects are created. The walk "check" includes the imports.

An import cycle is a set of files which import each other, directly or indirectly, including imports
for types and in functions. Names of several classes are listed with their number. The files of an
option are the files that contain its name.
"""

from __future__ import annotations

import argparse
import ast
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.request import Request, urlopen

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "gpt2block"
OPTIONS = ("kv_dtype", "repetition_penalty", "frequency_penalty", "overflow")
FOLDERS = ("gpt2block", "tests", "tools")
USER, CHECK = "kernel of a user", "check in a fresh process"
PROMPTS = [1, 2, 3], [4, 5], [6]


class Way:
    """Counts of the calls while a walk is recorded."""

    _follows = False

    @contextmanager
    def following(self) -> Iterator[None]:
        self.files: set[str] = set()
        self.calls = self.changes = 0
        self._last: dict[int, str] = {}  # file of the latest call of each thread
        self._follows = True
        try:
            yield
        finally:
            self._follows = False

    def enter(self, frame: FrameType, event: str, argument: object) -> None:
        """Count a call; a callback of `sys.setprofile`."""
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not self._follows or event != "call" or name.startswith("<"):
            return
        if not file.startswith(f"{PACKAGE}/") or re.search("/(emulator|ptx)/", file):
            return
        self.calls += 1
        self.files.add(file)
        thread = threading.get_ident()
        self.changes += self._last.get(thread) != file
        self._last[thread] = file

    def of(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
        sys.setprofile(self.enter)
        with self.following():
            call(*arguments, **options)
        sys.setprofile(None)
        return str(self)

    def __str__(self) -> str:
        return f"{len(self.files)} files, {self.calls} calls, {self.changes} changes of file"


def of_block(kernels: str) -> Iterator[tuple[str, str]]:
    import gpt2block  # noqa: PLC0415
    from gpt2block.cuda import cupy  # noqa: PLC0415

    config = gpt2block.GPT2Config(n_layer=1, n_head=1, n_embd=64, n_ctx=64, vocab_size=64)
    weights = gpt2block.BlockWeights.random(0, config)
    options: Any = {"device": "cuda", "dtype": "float32", "kernels": kernels}
    block, x = gpt2block.Block(weights, **options), np.full((3, 64), 0.1, np.float32)
    yield "first", Way().of(block, x)  # walks of later calls depend on the addresses of arrays
    on_device = cupy.asarray(x)
    out = cupy.empty_like(on_device)
    for _ in range(2):
        block(on_device, out)
    yield "repeated on device arrays", Way().of(block, on_device, out)


def of_generate() -> Iterator[tuple[str, str]]:
    import gpt2block  # noqa: PLC0415

    config = gpt2block.GPT2Config(n_layer=6, n_head=1, n_embd=64, n_ctx=256, vocab_size=256)
    model = gpt2block.GPT2(gpt2block.GPT2Weights.random(0, config), device="cuda")
    prompts = [*map(list, PROMPTS)]
    yield "first, 3 prompts, 2 tokens", Way().of(model.generate, prompts, max_new_tokens=2)
    yield "second, 3 tokens", Way().of(model.generate, prompts, max_new_tokens=3)


def of_mine() -> Iterator[tuple[str, str]]:
    from gpt2block.judge.kernel_check import check_kernel  # noqa: PLC0415
    from gpt2block.ops.registry import find  # noqa: PLC0415

    find("layernorm")  # imports the module of the operation
    template = PACKAGE / "judge" / "templates" / "layernorm.cu"
    yield "layernorm", Way().of(check_kernel, "layernorm", template, device="cpu", seed=0)


def of_check() -> Iterator[tuple[str, str]]:
    """Record the imports of the package, too, which enter functions and classes."""

    def check() -> None:
        from gpt2block.judge import check  # noqa: PLC0415

        check(PACKAGE / "judge/templates/layernorm.cu", "layernorm", device="cpu", seed=0)

    yield "layernorm", Way().of(check)


def of_http() -> Iterator[tuple[str, str]]:
    """Record completions of one token after a first one, which does late imports.

    Each one ends when the engine's thread waits for the next request. The result is the longest
    of five: a connection may close after its completion's end.
    """
    import gpt2block  # noqa: PLC0415
    from gpt2block.apps.serve.engine_host import EngineHost  # noqa: PLC0415
    from gpt2block.apps.serve.engine_server import EngineServer  # noqa: PLC0415
    from gpt2block.apps.serve.settings import ServerSettings  # noqa: PLC0415

    model = gpt2block.GPT2.from_pretrained("shakespeare", device="cpu")
    way = Way()
    threading.setprofile(way.enter)  # for new threads, such as threads of the server
    host: Any = EngineHost(model, model.tokenizer, ServerSettings(names=("shakespeare",)))
    server = EngineServer(host, lambda: None, lambda: None)
    listening = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=server.run, args=(listening,), daemon=True).start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1/completions"
    body = b'{"prompt": "JULIET:", "max_tokens": 1, "seed": 0}'

    def complete() -> None:
        urlopen(Request(url, body, {"Content-Type": "application/json"})).close()
        while not host.service._changed._waiters:
            time.sleep(0.001)

    def recorded() -> tuple[int, int, str]:
        with way.following():
            complete()
        return len(way.files), way.calls, str(way)

    complete()
    yield "one token", max(recorded() for _ in range(5))[-1]


WALKS: Mapping[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "block, skeleton": lambda: of_block("skeleton"),
    "block, fused": lambda: of_block("fused"),
    "generate": of_generate,
    USER: of_mine,
    CHECK: of_check,
    "server": of_http,
}


def walk(name: str) -> Iterator[str]:
    """Return the lines of a walk, recorded in this process."""
    with emulated() if name not in (USER, CHECK) else nullcontext():  # these enter it themselves
        for call, way in WALKS[name]():
            yield f"{name}: {call}: {way}"


def emulated() -> AbstractContextManager[None]:
    from gpt2block import emulator  # noqa: PLC0415

    return emulator.emulated()


def walked(name: str) -> list[str]:
    """Return the lines of a walk, recorded in a separate process."""
    command = [sys.executable, __file__, "--walk", name]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{name}: {ran.stderr[-2000:]}")
    return ran.stdout.splitlines()


def sources(folder: Path = PACKAGE) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def statements(path: Path) -> list[ast.Import | ast.ImportFrom | ast.ClassDef]:
    """Return the imports and classes of a file, also those in functions."""
    every = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [each for each in every if isinstance(each, ast.Import | ast.ImportFrom | ast.ClassDef)]


def imported(path: Path, modules: Mapping[str, Path]) -> set[str]:
    """Return the modules of the package that a file imports anywhere."""
    found = set()
    for node in statements(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{each.name}" for each in node.names)
            found |= {name if name in modules else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return found & modules.keys() - {module_of(path)}


def circles() -> list[list[str]]:
    """Return sets of modules that import each other, directly or indirectly."""
    modules = {module_of(path): path for path in sources()}
    imports = {name: imported(path, modules) for name, path in modules.items()}

    def reach(start: str) -> set[str]:
        found, waiting = set[str](), [start]
        while waiting:
            new = imports[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    reached = {name: reach(name) for name in modules}
    inside = {n: frozenset(m for m in reached[n] if n in reached[m]) for n in modules}
    return sorted(sorted(each) for each in set(inside.values()) if each)


def classes_twice() -> dict[str, int]:
    """Return names that several classes have, and the number of these classes."""
    every = (node for path in sources() for node in statements(path))
    count = Counter(node.name for node in every if isinstance(node, ast.ClassDef))
    return {name: n for name, n in sorted(count.items()) if n > 1}


def files_of(option: str) -> int:
    named = re.compile(rf"\b{option}\b")
    return sum(bool(named.search(path.read_text(encoding="utf-8"))) for path in sources())


def lines() -> Iterator[str]:
    """Return the lines of Python by folder."""
    for top in FOLDERS:
        count: defaultdict[str, int] = defaultdict(int)
        for path in sources(ROOT / top):
            parts = path.relative_to(ROOT / top).parts
            count[parts[0] if len(parts) > 1 else "."] += path.read_text("utf-8").count("\n")
        yield f"lines: {top}: {sum(count.values()):,}"
        yield from (f"lines: {top}/{name}: {n:,}" for name, n in sorted(count.items()))


def structure() -> Iterator[str]:
    """Return all lines of tests/golden/house.txt except the walks."""
    for circle in circles():
        yield f"circle of {', '.join(circle)}: {len(circle)} files"
    twice = classes_twice()
    yield f"names of several classes: {len(twice)}"
    yield from (f"classes with the name {name}: {n}" for name, n in twice.items())
    yield from (f"files with the option {each}: {files_of(each)}" for each in OPTIONS)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--walk", choices=WALKS, help="only this walk, in this process")
    parser.add_argument("--lines", action="store_true", help="lines of Python by folder, too")
    options = parser.parse_args(arguments)
    if options.walk:
        found = [*walk(options.walk)]
    else:
        found = [line for name in WALKS for line in walked(name)] + [*structure()]
    print("\n".join([*found, *(lines() if options.lines else ())]))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
