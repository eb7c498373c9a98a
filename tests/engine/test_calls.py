"""Calls return what tests/golden/calls records, or are refused with the recorded messages.

A file has blocks, each with a title, statements and expressions:

    # A title
    @ from gpt2block import Sampling
    > Sampling(temperature=0.5, top_k=9).top_k
    9
    > Sampling(top_k=-1)
    InputError: top_k: expected the number of tokens to keep, 0 to keep all, got -1

In a result, … stands for any text. The current folder is empty. This writes the results of now to
the files, for blocks that -k chooses:

    GPT2BLOCK_WRITE_CALLS=1 pytest -n0 tests/engine/test_calls.py
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from gpt2block.engine.generation.sequences import Generation
from gpt2block.errors import PrintableError

GOLDEN = Path(__file__).parents[1] / "golden"


class Block(NamedTuple):
    file: Path
    text: str

    @property
    def title(self) -> str:
        return self.text.partition("\n")[0]


def blocks() -> list[Block]:
    return [
        Block(file, text.rstrip("\n"))
        for file in sorted((GOLDEN / "calls").glob("*.txt"))
        for text in f"\n{file.read_text('utf-8')}".split("\n# ")[1:]
    ]


def result(expression: str, names: dict[str, Any]) -> str:
    """Return the value of an expression, or its error, which is one printable line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = format_value(eval(expression, names))
    except PrintableError as error:
        found = f"{type(error).__name__}: {error}"
        assert found.isprintable()
    return found.replace(str(Path.cwd()), "FOLDER").replace(str(GOLDEN), "GOLDEN")


def format_value(value: Any) -> str:
    """Return the `repr` of a value; numbers have six digits, and generations are short."""
    if isinstance(value, Generation):
        value = value.text, value.tokens, value.finish_reason
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        texts = ", ".join(map(format_value, value))
        return f"[{texts}]" if isinstance(value, list) else f"({texts})"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.mark.parametrize("block", blocks(), ids=lambda block: f"{block.file.stem}: {block.title}")
def test_calls(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    monkeypatch.chdir(tmp_path)
    title, *parts = re.split(r"\n(?=> |@ )", block.text)
    names: dict[str, Any] = {"GOLDEN": GOLDEN, "Path": Path, "monkeypatch": monkeypatch, "np": np}
    names |= {"__name__": __name__, "stack": stack}
    statements, now, differ = "", [title], []
    for part in parts:
        kind, line = part[:2], part[2:]
        if kind == "@ ":
            statements += line + "\n"
            now.append(part)
            continue
        exec(statements, names)
        statements = ""
        expression, _, expected = line.partition("\n")
        found = result(expression, names)
        if not re.fullmatch(re.escape(expected).replace("…", ".*"), found):
            differ.append(f"{expression}\n  expected {expected}\n  got      {found}")
            expected = found
        now += [f"> {expression}", expected]
    if os.environ.get("GPT2BLOCK_WRITE_CALLS"):
        text = block.file.read_text("utf-8")
        assert text.count(f"# {block.text}") == 1
        block.file.write_text(text.replace(f"# {block.text}", "# " + "\n".join(now)), "utf-8")
    else:
        assert not differ, "\n".join(differ)
