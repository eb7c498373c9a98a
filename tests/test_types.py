"""Types of the public interface, as mypy infers them in a user's program."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gpt2block
from gpt2block.engine.generation.options import GenerateOptions
from gpt2block.model import Model

ROOT = Path(__file__).parent.parent
BEGIN = """\
import numpy as np
from typing_extensions import Any, assert_type
import gpt2block
from gpt2block import *
from gpt2block.engine.model import Floats
ids: list[int] = [1, 2]
rows: np.ndarray[tuple[int, int], np.dtype[np.int32]]
count: int
model = gpt2block.from_pretrained()
"""
TYPES = {  # expression → its type
    'model.generate("a")': "Generation",
    'model.generate("a", temperature=0.5, seed=7)': "Generation",
    'model.generate("a", samples=1)': "Generation",
    "model.generate(ids)": "Generation",
    'model.generate(["a"])': "list[Generation]",
    "model.generate(rows)": "list[Generation]",
    "model.generate([ids, ids])": "list[Generation]",
    'model.generate("a", samples=2)': "list[Generation]",
    'model.generate("a", samples=count)': "list[Generation]",
    'model.generate(["a"], samples=2)': "list[list[Generation]]",
    'next(model.stream("a"))': "str",
    'model.score("a")': "Score",
    "model.score(ids, stride=3).tokens[0]": "ScoredToken",
    'model.score(["a", "b"])': "list[Score]",
    'model.embed("a")': "Floats",
    'model.embed(["a", "b"])': "Floats",
    "model(ids)": "Floats",
    "model(rows)": "Floats",
    "model([ids], last=True)": "Floats",
    "model([ids])": "Floats | list[Floats]",
    "model.hidden_states(ids)": "Floats",
    "model.compare(ids)": "Comparisons",
    "model.compare(ids)[0]": "Comparison",
    'model.logit_lens("a")': "LogitLens",
    'model.explain("a")': "Page",
    "model.new_cache()": "KVCache",
    'GPT2.from_pretrained("a").config': "GPT2Config",
    "gpt2block.files.checkpoints.Checkpoint.open('a')": "Checkpoint",
    "gpt2block.cuda.doctor.version()": "str",
    "gpt2block.emulator.__name__": "str",
    "abs(2 * gpt2block.ops.gelu(gpt2block.cuda.cupy.zeros(3)) - 1).max()": "Any",
}
WRONG = {  # line → its error
    "from gpt2block import GTP2": '"GTP2"',
    "gpt2block.nothing": '"nothing"',
    'model.generate("a", max_tokens=3)': "generate",
    "model.generate(5)": "generate",
    "model([0.5])": "list-item",
    'model.embed("a", pooling="max")': "Literal",
}


CHECKS = [f"assert_type({code}, {expected})" for code, expected in TYPES.items()]


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run mypy on the program; return line → error."""
    pytest.importorskip("mypy", reason="the test needs mypy")
    lines = [*BEGIN.splitlines(), *CHECKS, *WRONG]
    folder = tmp_path_factory.mktemp("types")
    file = folder / "program.py"
    file.write_text("\n".join(lines))
    options = ["--follow-imports=silent", "--no-pretty", f"--cache-dir={folder / 'cache'}"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.findall(r"program\.py:(\d+): error: (.*)", done.stdout)
    assert found, done.stdout + done.stderr
    return {lines[int(number) - 1]: text for number, text in found}


@pytest.mark.parametrize("line", CHECKS)
def test_the_type_of_an_expression(errors: dict[str, str], line: str) -> None:
    assert line not in errors, errors[line]


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_line_is_an_error(errors: dict[str, str], line: str) -> None:
    assert WRONG[line] in errors[line]


def test_the_other_lines_are_right(errors: dict[str, str]) -> None:
    assert set(errors) <= {*CHECKS, *WRONG}


def test_the_options_of_generate_are_its_keywords() -> None:
    keywords = set(inspect.signature(Model.generate).parameters)
    assert keywords == {"self", "prompts", "samples", *GenerateOptions.__annotations__}


def test_every_public_name_can_be_imported() -> None:
    for name in gpt2block.__all__:
        assert getattr(gpt2block, name) is not None
    assert set(gpt2block.__all__) == {*gpt2block._MODULE_OF, "reference"}
