"""Assertions that a checkpoint is refused, or that all its tensors are read exactly."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt2block import CheckpointError
from gpt2block.files.checkpoints import Checkpoint, TensorSource

TABLES = Path(__file__).parent / "golden" / "refused.txt"


def cases(name: str) -> list[Any]:
    """Return the rows of a table of golden/refused.txt as cases: values, and words of the error."""
    table = re.search(rf"(?m)^= {re.escape(name)}\n((?:.+\n)*)", TABLES.read_text("utf-8"))
    assert table, name
    rows = [line.split(" | ") for line in table[1].splitlines()]
    return [pytest.param(*map(json.loads, values), words, id=words) for *values, words in rows]


def refused(name: str | Path, *words: str, read: Callable[[Any], Any] = Checkpoint.open) -> str:
    """Expect a CheckpointError whose message is one printable line with these words; return it."""
    with pytest.raises(CheckpointError) as caught:
        read(name)
    message = str(caught.value)
    assert message.isprintable()
    for word in words:
        assert word in message
    return message


def assert_same_tensors(found: TensorSource, expected: TensorSource, dtype: Any = None) -> None:
    """Assert that tensors are equal bit for bit, except that matrices may be stored transposed.

    dtype: convert the expected tensors to this dtype first.
    """
    for ours, theirs in zip(found.tensors(), expected.tensors(), strict=True):
        (name, array, layout), (their_name, truth, their_layout) = ours, theirs
        assert name == their_name
        truth = np.ascontiguousarray(truth if layout == their_layout else truth.T, dtype)
        assert (array.dtype, array.shape) == (truth.dtype, truth.shape)
        assert array.tobytes() == truth.tobytes(), name
