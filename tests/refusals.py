"""Assertions on checkpoints that cannot be opened, or are read completely."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt2block import CheckpointError
from gpt2block.checkpoints import Checkpoint, TensorSource


def refused(name: str | Path, *words: str, read: Callable[[Any], Any] = Checkpoint.open) -> str:
    """Expect a CheckpointError with these words in one printable line; return it."""
    with pytest.raises(CheckpointError) as caught:
        read(name)
    message = str(caught.value)
    assert message.isprintable()
    for word in words:
        assert word in message
    return message


def assert_same_tensors(found: TensorSource, expected: TensorSource, dtype: Any = None) -> None:
    """Expect the same tensors, bit for bit; matrices may have another layout in the file.

    dtype: the one as which `expected` is read, if it is another one than that of its tensors.
    """
    for ours, theirs in zip(found.tensors(), expected.tensors(), strict=True):
        (name, array, layout), (their_name, truth, their_layout) = ours, theirs
        assert name == their_name
        truth = np.ascontiguousarray(truth if layout == their_layout else truth.T, dtype)
        assert (array.dtype, array.shape) == (truth.dtype, truth.shape)
        assert array.tobytes() == truth.tobytes(), name
