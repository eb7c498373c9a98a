"""What an architecture is: a module of this package with these functions and constants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from gpt2block.config import ModelConfig

Value = Any  # a result of a step: whatever its machine makes
To = tuple[str, ...]
RowNorms = Callable[[str, str], NDArray[Any]]


class CheckpointLayout(NamedTuple):
    """How the files of `transformers` have an architecture's tensors.

    prefix: before all names except lm_head's. block: what stands for "h.", followed by the number
    of the layer. matrices: the layout of a block's matrices, "KN" or "NK". ignored: a pattern of
    the names of buffers that are no weights.
    """

    prefix: str
    block: str
    matrices: str
    ignored: str = "(?!)"


class Architecture(Protocol):
    """An architecture: three functions of a pass `o`, the two halves of a block and the end.

    NAMES: gpt2block's names of a weight and its bias → the module's name in `transformers` and in
    GGUF; {} stands for q, k and v, whose rows one of our tensors has. FILES: of `transformers`. The
    rest is what an engine needs to know in addition to the shapes in its config.
    """

    CONFIG: type[ModelConfig]
    NAMES: Mapping[str, tuple[str, str]]
    FILES: CheckpointLayout
    GGUF: str  # general.architecture of its GGUF files; "" if there are none
    GGUF_ROPE_INTERLEAVED: bool  # whether these have rows of q and k in the order of Meta's RoPE

    NORM: str  # the name of its norms, for messages
    QKV: str  # the step whose rows are [Q | K | V] as attention reads them
    TENSOR_HEADS: tuple[int, ...]  # channels of a head of a prefill on tensor cores
    DIVIDED: tuple[str, ...]  # a product, the activation it is a factor of, its product; or ()

    def constants(self, config: Any, vectors: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors of the passes that the config and the model's vectors determine, by name."""

    def operand_bounds(
        self, config: Any, largest: Mapping[str, float], norms: RowNorms
    ) -> dict[str, float]:
        """Upper bounds of the operands of products, two-part or with FP8 weights, by name.

        They hold for any tokens: those of the layers, what these follow from, and the final norm.

        largest: the largest magnitude of every tensor. norms(w, gamma): upper bounds of the
        Euclidean norms of w's rows (N, K), with each column multiplied by its gamma; "": by 1.
        """

    def stream_bounds(self, config: Any, largest: Mapping[str, float]) -> Iterator[float]:
        """Upper bounds of the magnitudes after the embedding and after each block."""

    def attention(self, o: Any, h: str, x: Value) -> Value:
        """Rows of attention."""

    def feed_forward(self, o: Any, h: str, x: Value, y: Value) -> Value:
        """x + attention, and the feed-forward of its norm added to it. y: rows of attention."""

    def final(self, o: Any, x: Value, to: To = ()) -> Value:
        """The norm before the logits."""
