"""Types of the public interface, as mypy infers them in a user's program."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gpt2block
from gpt2block.emulator.ptx import cache
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
RIGHT_AND_WRONG = (ROOT / "tests" / "golden" / "types.txt").read_text("utf-8").split("# wrong\n")
TYPES, WRONG = (dict(re.findall("(?m)^(.*) -> (.*)$", part)) for part in RIGHT_AND_WRONG)
CHECKS = [f"assert_type({code}, {expected})" for code, expected in TYPES.items()]


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run mypy on the program; return line → error."""
    pytest.importorskip("mypy", reason="the test needs mypy")
    lines = [*BEGIN.splitlines(), *CHECKS, *WRONG]
    folder = tmp_path_factory.mktemp("types")
    file = folder / "program.py"
    file.write_text("\n".join(lines))
    kept = cache.folder() / "mypy"
    options = ["--follow-imports=silent", "--no-pretty", f"--cache-dir={kept}"]
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
