"""The interface of an architecture: the functions and constants that its module must have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from gpt2block.models.config import ModelConfig

Value = Any  # the result of a step, whose type differs between NumPy and CUDA
To = tuple[str, ...]
Divided = tuple[tuple[str, tuple[str, ...], str], ...]
RowNorms = Callable[[str, str], np.ndarray]


class CheckpointLayout(NamedTuple):
    """The names and the matrix layout of an architecture's tensors in files of `transformers`.

    prefix: text before all names except lm_head's. block: text in the place of "h.", before the
    number of the layer. matrices: the layout of a block's matrices, "KN" or "NK". ignored: a
    pattern that matches the names of buffers that are not weights.
    """

    prefix: str
    block: str
    matrices: str
    ignored: str = "(?!)"


class Architecture(Protocol):
    """Interface of an architecture's module: names of tensors, and functions that compute a model.

    NAMES: gpt2block's names of a weight and its bias → the module's name in `transformers` and in
    GGUF; {} stands for q, k and v, whose rows gpt2block has in one tensor; a module name that
    ends with "." is a tensor without the suffix ".weight". FILES: the layout in
    `transformers`. An engine needs the other fields in addition to the shapes in its config.
    """

    CONFIG: type[ModelConfig]
    NAMES: Mapping[str, tuple[str, str]]
    FILES: CheckpointLayout
    GGUF: str  # general.architecture in GGUF files; "" if there are no such files
    GGUF_ROPE_INTERLEAVED: bool  # whether GGUF files order the rows of q and k for Meta's RoPE

    NORM: str  # the name of the architecture's norms in messages
    QKV: str  # the step whose result is the rows [Q | K | V] that attention reads
    TENSOR_HEADS: tuple[int, ...]  # head sizes for which a prefill can use tensor cores
    # Weights w of a step, results that are linear in w, and the weights of the next product. With
    # FP8 weights, the step may use w / s and the product its weights times s, to keep the results
    # in float16's range; () if this is not possible.
    DIVIDED: Divided

    def constants(self, config: Any, vectors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return {name: tensor} of tensors computed from the config and the model's vectors."""

    def operand_bounds(
        self, config: Any, largest: Mapping[str, float], norms: RowNorms
    ) -> dict[str, float]:
        """Return {name: upper bound of the magnitudes} of matrix products' operands.

        Products with hi/lo or FP8 weights need the bounds, which cover the layers' operands and
        intermediates and the final norm, for all tokens.

        largest: the largest magnitude of every tensor. norms(w, gamma): upper bounds of the
        Euclidean norms of w's rows (N, K), each column multiplied by its gamma, or by 1 for "".
        """

    def stream_bounds(self, config: Any, largest: Mapping[str, float]) -> Iterator[float]:
        """Yield upper bounds of the residual stream after the embedding and each block."""

    def attention(self, o: Any, h: str, x: Value) -> Value:
        """Compute the first half of a block: attention without the output projection."""

    def feed_forward(self, o: Any, h: str, x: Value, y: Value) -> Value:
        """Compute a block's output from its input x and from y, the result of `attention`."""

    def final(self, o: Any, x: Value, to: To = ()) -> Value:
        """Return the final norm of x, from which the logits are computed."""
