"""Output of the commands, without times and folders, and the files that `map` writes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import typer

from gpt2block.apps import cli
from gpt2block.apps.cli.app import application

Made = Iterator[tuple[str, Any]]

ROOT = Path(__file__).parents[2]
RECORDS = '{"text": "ROMEO:", "n": 1}\n{"text": "O"}\n{"text": 7}\n[]\n{"text": [72, 105]}\n'
RUNS = (  # {files} is a temporary folder, {data} the folder of the tests' checkpoints
    *("", "--version", "check", "check --json", "nothing", "kernels", "kernels --json"),
    *("info", "info --json", "info shakespeare-llama", "info {data}/data/pytorch/nanogpt.pt"),
    *("info {data}/golden/llama-grouped", "info nowhere/at-all", "kernels linear --source 1"),
    *("kernels layernorm --device cpu", "kernels layernorm --device cpu --json"),
    *("kernels layernorm --template", "kernels layernorm --mine {files}/mine.cu --device cpu"),
    *("kernels nothing", "kernels layernorm --variant nothing --device cpu"),
    "generate ROMEO: --device cpu --max-new-tokens 8 --temperature 0",
    "generate ROMEO: --device cpu --max-new-tokens 8 --seed 3 --top-k 9 --samples 2 --json",
    "generate ROMEO: --model shakespeare-llama --device cpu --max-new-tokens 8 --seed 3",
    *("generate ROMEO: --device cpu --top-p 2", "generate ROMEO: --dtype float99"),
    *("score {files}/text.txt --device cpu", "score {files}/text.txt --device cpu --json"),
    *("score {files}/nothing.txt --device cpu", "score {files}/text.txt --stride 0 --device cpu"),
    *("compare --device cpu", "compare O --device cpu --cached --layer 1", "compare O --layer 9"),
    "compare O --model shakespeare-llama --device cpu --dtype bfloat16 --json",
    "convert {data}/data/pytorch/nanogpt.pt {files}/converted",
    "convert {data}/data/pytorch/nanogpt.pt {files}/converted --dtype float16",  # exists: error
    "convert {data}/data/pytorch/nanogpt.pt {files}/converted --overwrite --dtype bfloat16",
    *("block --device cpu", "block --device cpu --size gpt2 --seq-len 4 --json"),
    *("block --size gpt2 --layer 1", "explain O --device cpu -o {files}/page.html"),
    "map score {files}/nothing.jsonl --output {files}/never --device cpu",
)
MAPS = (
    "score --shard-size 2 --logprobs --keep n",
    "generate --max-new-tokens 5 --seed 3 --samples 2 --logprobs",
    "generate --model shakespeare-llama --max-new-tokens 5 --top-k 5",
    "embed --pooling last",
)
END = "--- stderr\n"  # the end of standard output
_NUMBER = r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?"
_VARYING = (  # pattern of text that differs from run to run → replacement
    (re.compile(rf'("(?:ms|seconds\w*|tokens_per_second)": ?){_NUMBER}'), r"\1#"),
    (re.compile(rf"{_NUMBER} (tokens/s|s\b|ms\b)"), r"# \1"),
    (re.compile(r"(?<=\dx)(\d+) +\d+\.\d{4}(?= )"), r"\1 #"),  # shape, ms: the table of `block`
    (re.compile(r"[\d,]+ files, [\d,.]+ \w+"), "# files"),
    (re.compile(r"python -m tools\.digests|__main__\.py"), "gpt2block"),
    (re.compile(r"(?<=\S)  +"), "  "),  # columns are as wide as their longest number or path
)


def command_line(small: bool) -> Made:
    """The help of every command, and runs on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder)
        (files / "text.txt").write_text("To be, or not to be.\n")
        template, _, _ = printed(["kernels", "layernorm", "--template"]).partition(END)
        (files / "mine.cu").write_text(template)
        for command in helps(typer.main.get_command(application())):
            yield shlex.join(command), normal(printed(command), folder)
        for run in RUNS:
            arguments = shlex.split(run.format(files=files, data=ROOT / "tests"))
            yield run, normal(printed(arguments), folder)
        yield "page.html", normal((files / "page.html").read_text(encoding="utf-8"), folder)
        for path in sorted((files / "converted").iterdir()):
            yield f"converted {path.name}", path.read_bytes()


def helps(command: Any, names: tuple[str, ...] = ()) -> Iterator[list[str]]:
    yield [*names, "--help"]
    for name, inner in getattr(command, "commands", {}).items():
        yield from helps(inner, (*names, name))


def printed(arguments: list[str]) -> str:
    """Standard output, standard error and the exit code of a command, run in this process."""
    out, err = StringIO(), StringIO()
    code: Any = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            cli.main(arguments)
        except SystemExit as end:
            code = end.code
    return f"{out.getvalue()}{END}{err.getvalue()}--- exit code {code or 0}\n"


def normal(text: str, folder: str) -> str:
    """The text without times, and with names in place of this machine's folders."""
    for place, name in ((folder, "FILES"), (str(ROOT), "ROOT"), (sys.prefix, "PYTHON"),
                        (str(Path.home()), "HOME")):  # fmt: skip
        text = text.replace(place, name)
    for pattern, stands_for in _VARYING:
        text = pattern.sub(stands_for, text)
    return text


def jobs(small: bool) -> Made:
    """Files of results and errors of `map`, whose workers are processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder, "records.jsonl")
        records.write_text(RECORDS)
        for number, job in enumerate(MAPS):
            task, *options = job.split()
            output = Path(folder, str(number))
            command = ["map", task, str(records), "--output", str(output), *options]
            fixed = ["--device", "cpu", "--workers", "1"]
            subprocess.run(
                [sys.executable, "-m", "gpt2block", *command, *fixed],
                check=False, capture_output=True, env=dict(os.environ),
            )  # fmt: skip
            for path in sorted(output.rglob("part-*")):
                yield f"map {job}: {path.relative_to(output)}", path.read_text(encoding="utf-8")
