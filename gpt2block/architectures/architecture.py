"""The interface of an architecture: the functions and constants that its module must have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from gpt2block.config import ModelConfig

Value = Any  # the result of a step; each kind of engine has its own type
To = tuple[str, ...]
RowNorms = Callable[[str, str], NDArray[Any]]


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
    """An architecture: a pass `o` calls its three functions, for each block's halves and the end.

    NAMES: gpt2block's names of a weight and its bias → the module's name in `transformers` and in
    GGUF; {} stands for q, k and v, whose rows gpt2block has in one tensor. FILES: the layout in
    `transformers`. An engine needs the other fields in addition to the shapes in its config.
    """

    CONFIG: type[ModelConfig]
    NAMES: Mapping[str, tuple[str, str]]
    FILES: CheckpointLayout
    GGUF: str  # general.architecture in its GGUF files; "" if there are none
    GGUF_ROPE_INTERLEAVED: bool  # whether GGUF files order the rows of q and k for Meta's RoPE

    NORM: str  # the name of its norms in messages
    QKV: str  # the step whose result is the rows [Q | K | V] that attention reads
    TENSOR_HEADS: tuple[int, ...]  # head sizes for which a prefill can use tensor cores
    DIVIDED: tuple[str, ...]  # a product, the activation it scales, a later product; or ()

    def constants(self, config: Any, vectors: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors that the config and the model's vectors determine, by name."""

    def operand_bounds(
        self, config: Any, largest: Mapping[str, float], norms: RowNorms
    ) -> dict[str, float]:
        """Return upper bounds of the operands of two-part or FP8-weight products, by name.

        Bounds cover the layers' operands and intermediates and the final norm, for all tokens.

        largest: the largest magnitude of every tensor. norms(w, gamma): upper bounds of the
        Euclidean norms of w's rows (N, K), each column multiplied by its gamma, or by 1 for "".
        """

    def stream_bounds(self, config: Any, largest: Mapping[str, float]) -> Iterator[float]:
        """Yield upper bounds of the magnitudes after the embedding and after each block."""

    def attention(self, o: Any, h: str, x: Value) -> Value:
        """Return the rows of attention, before the output projection."""

    def feed_forward(self, o: Any, h: str, x: Value, y: Value) -> Value:
        """Return x + projected attention + the feed-forward's result. y: rows of attention."""

    def final(self, o: Any, x: Value, to: To = ()) -> Value:
        """Return the final norm of x, which the logits are computed from."""
