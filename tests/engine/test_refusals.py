"""Wrong input is refused with the messages that tests/golden/refusals records.

A file has blocks, each with a title, statements, and expressions that are refused:

    # A title
    @ from gpt2block import Sampling
    > Sampling(top_k=-1)
    InputError: top_k: expected the number of tokens to keep, 0 to keep all, got -1

In a message, … stands for any text. The current folder is empty. This writes the messages of now to
the files, for blocks that -k chooses:

    GPT2BLOCK_WRITE_REFUSALS=1 pytest -n0 tests/engine/test_refusals.py
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

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
        for file in sorted((GOLDEN / "refusals").glob("*.txt"))
        for text in f"\n{file.read_text('utf-8')}".split("\n# ")[1:]
    ]


def refusal(expression: str, names: dict[str, Any]) -> str:
    """Return the error of an expression, which is one printable line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            eval(expression, names)
    except PrintableError as error:
        found = f"{type(error).__name__}: {error}"
        assert found.isprintable()
        return found.replace(str(Path.cwd()), "FOLDER").replace(str(GOLDEN), "GOLDEN")
    return "no error"


@pytest.mark.parametrize("block", blocks(), ids=lambda block: f"{block.file.stem}: {block.title}")
def test_refusals(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    title, *parts = re.split(r"\n(?=> |@ )", block.text)
    names: dict[str, Any] = {"GOLDEN": GOLDEN, "Path": Path, "monkeypatch": monkeypatch, "np": np}
    names["__name__"] = __name__
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
        found = refusal(expression, names)
        if not re.fullmatch(re.escape(expected).replace("…", ".*"), found):
            differ.append(f"{expression}\n  expected {expected}\n  got      {found}")
            expected = found
        now += [f"> {expression}", expected]
    if os.environ.get("GPT2BLOCK_WRITE_REFUSALS"):
        text = block.file.read_text("utf-8")
        assert text.count(f"# {block.text}") == 1
        block.file.write_text(text.replace(f"# {block.text}", "# " + "\n".join(now)), "utf-8")
    else:
        assert not differ, "\n".join(differ)
