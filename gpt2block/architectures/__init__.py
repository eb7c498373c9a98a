"""Model architectures as plans: which steps a forward pass consists of, on which tensors.

`architecture_of` returns the module of a config's architecture, as `Architecture` describes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

from numpy.typing import NDArray

from gpt2block.architectures import gpt2, llama
from gpt2block.architectures.steps import Steps
from gpt2block.config import ModelConfig
from gpt2block.config_llama import LlamaConfig
from gpt2block.plan import Step

RowNorms = Callable[[str, str], NDArray[Any]]


class Architecture(Protocol):
    """What an engine needs to know of an architecture, besides the shapes in its config."""

    NORM: str  # the name of its norms, for messages
    QKV: str  # the step whose rows are [Q | K | V] as attention reads them
    FINAL: str  # the final norm
    FEED_FORWARD: tuple[str, ...]  # buffers of the feed-forward
    TENSOR_HEADS: tuple[int, ...]  # channels of a head of a prefill on tensor cores
    BUFFERS: Mapping[str, str]  # the last part of a tensor's name → the buffer that it shares
    DIVIDED: tuple[str, ...]  # a product, the activation it is a factor of, its product; or ()

    def embedding(self) -> Step:
        """The step before the first block."""

    def model_block(self, config: Any, attention: Sequence[Step], h: str, x: str) -> Steps:
        """A block, a step per operation; attention: the steps after QKV, to `attn`.

        h: the prefix of the names of its weights and tensors; x: the name of its input. The results
        of its halves are `x1` and `output`.
        """

    def final_norm(self, config: Any, x: str) -> Step:
        """The norm before the logits."""

    def into_cache(self, config: Any, h: str, step: Step, cache: tuple[str, ...]) -> Step:
        """The step of decoding in place of `step`, QKV: returns q, appends K and V to the cache."""

    def widths(self, config: Any) -> dict[str, int]:
        """Channels of the tensors of a prefill that have buffers of their own."""

    def fuse(self, steps: Iterable[Step]) -> list[Step]:
        """The steps of a block as fewer steps; each has the name and result of its last one."""

    def constants(self, config: Any) -> dict[str, Any]:
        """Inputs of the plans that the config determines, by name."""

    def operand_bounds(
        self, config: Any, largest: Mapping[str, float], norms: RowNorms
    ) -> dict[str, float]:
        """Upper bounds of the operands of products in two parts or with FP8 weights, by name.

        They hold for any tokens: those of the layers, what these follow from, and the final norm.

        largest: the largest magnitude of every tensor. norms(w, gamma): upper bounds of the
        Euclidean norms of w's rows (N, K), with each column multiplied by its gamma.
        """

    def stream_bounds(self, config: Any, largest: Mapping[str, float]) -> Iterator[float]:
        """Upper bounds of the magnitudes after the embedding and after each block."""


def architecture_of(config: ModelConfig) -> Architecture:
    """The module that describes the architecture of a model with this config."""
    return cast(Architecture, llama if isinstance(config, LlamaConfig) else gpt2)
