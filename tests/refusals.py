"""An assertion on checkpoints that cannot be opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpt2block import CheckpointError
from gpt2block.checkpoints import Checkpoint


def refused(name: str | Path, *words: str, read: Callable[[Any], Any] = Checkpoint.open) -> str:
    """Expect a CheckpointError with these words in one printable line; return it."""
    with pytest.raises(CheckpointError) as caught:
        read(name)
    message = str(caught.value)
    assert message.isprintable()
    for word in words:
        assert word in message
    return message
