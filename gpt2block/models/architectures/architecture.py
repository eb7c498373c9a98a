"""The interface of an architecture: the functions and constants that its module must have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from gpt2block.models.config import ModelConfig

Value = Any  # the result of a step, whose type differs between NumPy and CUDA


class Architecture(Protocol):
    """Interface of an architecture's module: names of tensors, and functions that compute a model.

    NAMES: gpt2block's names of a weight and its bias → the module's name in `transformers` and in
    GGUF; {} stands for q, k and v, whose rows gpt2block has in one tensor; a module name that
    ends with "." is a tensor without the suffix ".weight". An engine needs the
    functions in addition to the shapes and constants of the config.
    """

    CONFIG: type[ModelConfig]
    NAMES: Mapping[str, tuple[str, str]]
    GGUF: str  # general.architecture in GGUF files; "" if there are no such files
    GGUF_ROPE_INTERLEAVED: bool  # whether GGUF files order the rows of q and k for Meta's RoPE

    def constants(self, config: Any, vectors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return {name: tensor} of tensors computed from the config and the model's vectors."""

    def attention(self, o: Any, h: str, x: Value) -> Value:
        """Compute the first half of a block: attention without the output projection."""

    def feed_forward(self, o: Any, h: str, x: Value, y: Value) -> Value:
        """Compute a block's output from its input x and from y, the result of `attention`."""

    def final(self, o: Any, x: Value, head: bool = False) -> Value:
        """Return the final norm of x, from which the logits are computed.

        head: whether the product with lm_head reads the result.
        """
