"""Forward passes: an architecture is three functions, for every pass and every machine.

gpt2, llama   the architectures
forward       the order of the halves of the blocks, and what a pass ends with
blocks        a step for each operation, and the fused block
prefill       the new tokens of all sequences as rows of one matrix
decoding      a token for each row of a kv_cache
machine       what runs steps; others are in `gpt2block.run`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, cast

from numpy.typing import NDArray

from gpt2block.config import ModelConfig, model_shapes
from gpt2block.config_llama import LlamaConfig
from gpt2block.passes import forward as _forward
from gpt2block.passes import gpt2, llama
from gpt2block.passes.blocks import BlockPass, ModelStepPass, Settings, StepPass
from gpt2block.passes.machine import Outline, Step

# The int32 arrays that describe a batch of packed sequences: tokens (N,), their positions (N,) and
# sequences (N,); the start of each sequence in the rows (B + 1,) and in the kv_cache (B,); the row
# of its last token (ends,); the token after each one (N,).
BATCH = ("tokens", "positions", "row", "cu_seqlens", "start", "last", "targets")
RowNorms = Callable[[str, str], NDArray[Any]]


class Architecture(_forward.Architecture, Protocol):
    """What an engine needs to know of an architecture, besides the shapes in its config."""

    NORM: str  # the name of its norms, for messages
    QKV: str  # the step whose rows are [Q | K | V] as attention reads them
    TENSOR_HEADS: tuple[int, ...]  # channels of a head of a prefill on tensor cores
    DIVIDED: tuple[str, ...]  # a product, the activation it is a factor of, its product; or ()

    def constants(self, config: Any) -> dict[str, Any]:
        """Tensors of the passes that the config determines, by name."""

    def operand_bounds(
        self, config: Any, largest: Mapping[str, float], norms: RowNorms
    ) -> dict[str, float]:
        """Upper bounds of the operands of products, two-part or with FP8 weights, by name.

        They hold for any tokens: those of the layers, what these follow from, and the final norm.

        largest: the largest magnitude of every tensor. norms(w, gamma): upper bounds of the
        Euclidean norms of w's rows (N, K), with each column multiplied by its gamma.
        """

    def stream_bounds(self, config: Any, largest: Mapping[str, float]) -> Iterator[float]:
        """Upper bounds of the magnitudes after the embedding and after each block."""


def architecture_of(config: ModelConfig) -> Architecture:
    """The module that describes the architecture of a model with this config."""
    return cast(Architecture, llama if isinstance(config, LlamaConfig) else gpt2)


def names_of(config: ModelConfig) -> set[str]:
    """The names of the tensors of a model's passes."""
    constants = architecture_of(config).constants(config)
    caches = (f"h.{n}.{half}" for n in range(config.n_layer) for half in "kv")
    return {*model_shapes(config), "lm_head", *constants, *BATCH, *caches}


def model_steps(config: ModelConfig) -> list[Step]:
    """The steps from tokens to logits, one for each operation, without arrays."""
    do = Outline(names_of(config))
    _forward.forward(
        ModelStepPass(do, Settings.of(config), 1), architecture_of(config), config, "logits"
    )
    return do.steps


def fused_steps(config: ModelConfig, h: str, x: str) -> list[Step]:
    """The steps of a fused block; h: the prefix of its names, x: the name of its input."""
    do = Outline(names_of(config) | {x})
    _forward.block(BlockPass(do, Settings.of(config)), architecture_of(config), x, h)
    return do.steps


def final_step(config: ModelConfig) -> Step:
    """The norm before the logits."""
    do = Outline(names_of(config) | {"x"})
    architecture_of(config).final(StepPass(do, Settings.of(config)), "x")
    return do.steps[0]
