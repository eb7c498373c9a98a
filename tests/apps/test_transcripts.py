"""Commands print what the transcripts in tests/golden/commands record.

A file has blocks, each with a title, set-ups (methods of tests/setups.py::Setup) and commands:

    # A title
    @ model: no tokenizer
    @ file: a.txt
        its text
    $ printf 'abc' | gpt2block score - --json | json .tokens
    the standard output
    ! a line of standard error
    exit code 1

Each block has a folder of its own. A command runs in this process; a shell runs other programs,
and commands whose streams are redirected. {x*9} is xxxxxxxxx. What varies between machines is
replaced (tests/setups.py::VARIES); numbers with two digits after the point may differ by 0.2 %.
This writes what the commands print now to the files, for blocks that -k chooses:

    GPT2BLOCK_WRITE_TRANSCRIPTS=1 pytest -n0 tests/apps/test_transcripts.py

Blocks of a file NAME-slow.txt run only with --slow: they start many processes.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.command_line import Ended, gpt2block
from tests.devices import slow
from tests.setups import VARIES, Setup, unescaped

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests" / "golden" / "commands").glob("*.txt"))
COMMAND = re.compile(
    r"(?:printf (?P<typed>'[^']*') \| )?gpt2block(?P<words>.*?)"
    r"(?: \| (?P<filter>(?:json|grep|head|tail) .+))?"
)
IN_A_SHELL = re.compile(r"(^|\s)[0-9]?[<>]")
NUMBER = re.compile(r"(?<![\w.])-?\d+\.(?:\d+e[-+]\d+|\d\d+)(?![\w.])")
KEYWORD = re.compile(r"(?<![\w-])(?!n_ctx|kv_cache|cuda_fp|pytorch_)[a-z]+_[a-z_]+|\b[a-z]+=['\d]")


class Block(NamedTuple):
    file: Path
    text: str

    @property
    def title(self) -> str:
        return self.text.partition("\n")[0].removeprefix("# ")


def blocks() -> list[Block]:
    return [
        Block(file, f"# {text}")
        for file in FILES
        for text in f"\n{file.read_text('utf-8')}".split("\n# ")[1:]
    ]


def steps(text: str) -> Iterator[tuple[str, str]]:
    """Yield each line of a block that begins with "@" or "$", with the lines below it."""
    for part in re.split(r"(?m)^(?=[@$] )", text)[1:]:
        line, _, rest = part.partition("\n")
        yield line, rest.strip("\n")


def in_a_shell(line: str, folder: Path) -> Ended:
    function = f'gpt2block() {{ {sys.executable} -m gpt2block "$@"; }}; '
    done = subprocess.run(
        ["bash", "-c", function + line], cwd=folder, capture_output=True, text=True, check=False,
        timeout=100, env={**os.environ, "PROJECT": str(ROOT), "PYTHONPATH": str(ROOT),
             "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr)


def selected(text: str, path: str) -> str:
    """Return a part of JSON at a path such as .samples[0].text; "." is all, "keys" its keys."""
    value = json.loads(text)
    if path == "keys":
        return " ".join(value)
    for name, index in re.findall(r"\.(\w+)|\[(-?\d+)\]", path):
        value = value[name] if name else value[int(index)]
    return json.dumps(rounded(value), ensure_ascii=False)


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def filtered(text: str, program: str) -> str:
    """Filter as `json PATH…`, `grep [-v] PATTERN`, `head -n N` and `tail -n N` do."""
    name, *words = shlex.split(program)
    if name == "json":
        return "\n".join(selected(text, path) for path in words)
    lines = text.splitlines()
    if name == "grep":
        lines = [each for each in lines if bool(re.search(words[-1], each)) != ("-v" in words)]
    else:
        lines = lines[: int(words[-1])] if name == "head" else lines[-int(words[-1]) :]
    return "\n".join(lines)


def ran(line: str, folder: Path) -> Ended:
    """Run a line of a transcript."""
    line = re.sub(r"\{(\w)\*(\d+)\}", lambda many: many[1] * int(many[2]), line)
    parts = COMMAND.fullmatch(line)
    if IN_A_SHELL.search(line) or not parts:
        return in_a_shell(line, folder)
    typed = unescaped(parts["typed"][1:-1]).encode("latin-1") if parts["typed"] else None
    words = re.sub(r"\$('[^']*')", lambda quoted: unescaped(quoted[1]), parts["words"])
    ended = gpt2block(*shlex.split(words), stdin=typed)
    return ended._replace(out=filtered(ended.out, parts["filter"])) if parts["filter"] else ended


def shown(ended: Ended, folder: Path) -> str:
    lines = ended.out.removesuffix("\n").split("\n") if ended.out else []
    lines += [f"! {line}" for line in ended.err.split("\n") if line]
    lines += [f"exit code {ended.code}"] * bool(ended.code)
    text = "\n".join(line.rstrip(" ") for line in lines).replace(str(folder), "FOLDER")
    text = re.sub(r"[\0-\x09\x0b-\x1f\x7f]", lambda each: ascii(each[0])[1:-1], text)
    for varies, instead in VARIES:
        text = varies.sub(instead, text)
    return text


@pytest.mark.parametrize(
    "block",
    [slow(each) if each.file.stem.endswith("-slow") else each for each in blocks()],
    ids=lambda block: f"{block.file.stem}: {block.title}",
)
def test_a_transcript(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    setup, now, before = Setup(monkeypatch, tmp_path), [f"# {block.title}"], block.text.rstrip("\n")
    for line, below in steps(block.text):
        now += [line]
        if line.startswith("@"):
            name, _, argument = line.removeprefix("@ ").partition(": ")
            getattr(setup, name.replace(" ", "_"))(argument, below)
            now += filter(None, [below])
        else:
            now += filter(None, [shown(ran(line.removeprefix("$ "), tmp_path), tmp_path)])
    after = "\n".join(now)
    if os.environ.get("GPT2BLOCK_WRITE_TRANSCRIPTS"):
        text = block.file.read_text("utf-8")
        assert text.count(before) == 1
        block.file.write_text(text.replace(before, after), "utf-8")
        return
    for command, error in re.findall(r"(?m)^\$ gpt2block (\w+).*\n! error: (.*)", after):
        # an option has the name that is typed; operations have arguments with such names
        assert command in ("kernels", "judge") or not KEYWORD.search(error), error
    if NUMBER.sub("#", after) == NUMBER.sub("#", before):
        numbers = ([float(each) for each in NUMBER.findall(text)] for text in (after, before))
        assert next(numbers) == pytest.approx(next(numbers), rel=0.002)
    else:
        texts = before.split("\n"), after.split("\n")
        pytest.fail("\n".join(unified_diff(*texts, "recorded", "now", n=2, lineterm="")), False)
