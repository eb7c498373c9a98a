"""Calls that operations and weights refuse, with their exact errors.

tests/golden/refused_calls.txt has a section of Python for each subject. A line with `!` states the
error of the call above it. `python -m tests.ops.test_refusals` writes these lines again.
test_contracts.py tests arrays that a contract excludes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt2block import HiLoMatrix, InputError, WeightMatrix, ops, reference
from gpt2block.cuda import cupy
from gpt2block.ops.operands import Operand
from gpt2block.ops.registry import OPERATIONS, STEPS
from tests.devices import moved, running_on

FILE = Path(__file__).parents[1] / "golden" / "refused_calls.txt"
pytestmark = pytest.mark.filterwarnings("ignore:the matrix subclass")
HEAD, *SECTIONS = FILE.read_text("utf-8").strip().split("\n\n# ")


def zeros(shape: Any, dtype: str = "float32") -> Any:
    return cupy.zeros(shape, dtype)


def off_by_one(*shape: int, dtype: str = "float32") -> Any:
    """Return an array that begins one element after a multiple of 512 bytes."""
    return moved(np.zeros(shape, dtype), 1)


def weights(rows: int, columns: int, dtype: str = "float32", layout: str = "NK") -> WeightMatrix:
    """Return zeros with this shape in memory."""
    zero = np.zeros((rows, columns), np.float32)
    return WeightMatrix.quantize(zero, dtype, layout).mapped(cupy.asarray)


def bind(name: str, *inputs: Any, out: Any = None, on_device: bool = False, **options: Any) -> None:
    operation = OPERATIONS.get(name) or STEPS[name]
    (operation.bind_on_device if on_device else operation.bind)(inputs, out, **options)


NAMES: dict[str, Any] = {
    **{name: partial(bind, name) for name in [*STEPS, *OPERATIONS]},
    **{each.__name__: each for each in (zeros, off_by_one, weights, HiLoMatrix, WeightMatrix)},
    **{"np": np, "ops": ops, "reference": reference, "replace": replace, "Operand": Operand},
}


def with_errors(section: str) -> str:
    """Run the lines of a section; return them with the errors that they raise."""
    names, (title, *lines) = NAMES.copy(), section.splitlines()
    done = [title]
    with running_on("hopper" if title.endswith("on Hopper") else "forward"):
        for line in lines:
            if line.startswith("! "):
                continue
            done.append(line)
            try:
                exec(line, names)
            except InputError as error:
                done.append(f"! {error}")
    return "\n".join(done)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.partition("\n")[0])
def test_calls_are_refused(section: str) -> None:
    assert with_errors(section).splitlines() == section.splitlines()


if __name__ == "__main__":
    FILE.write_text("\n\n# ".join([HEAD, *map(with_errors, SECTIONS)]) + "\n", "utf-8")
