"""Model architectures as plans: which steps a forward pass consists of, on which tensors.

`architecture_of` returns the module of a config's architecture, as `Architecture` describes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, cast

from gpt2block.architectures import gpt2, llama
from gpt2block.config import ModelConfig
from gpt2block.config_llama import LlamaConfig
from gpt2block.plan import Plan, Step


class Architecture(Protocol):
    """What an engine needs to know of an architecture, besides the shapes in its config."""

    NORM: str  # the name of its norms, for messages
    QKV: str  # the step whose rows are [Q | K | V] as attention reads them

    def model_plan(self, config: Any, want: Any, longest: int) -> Plan:
        """Tokens to logits or hidden states, a step per operation."""

    def fuse(self, steps: Iterable[Step]) -> list[Step]:
        """The steps of a block as fewer steps; each has the name and result of its last one."""

    def constants(self, config: Any) -> dict[str, Any]:
        """Inputs of the plans that the config determines, by name."""

    def stream_bounds(self, config: Any, largest: Mapping[str, float]) -> Iterator[float]:
        """Upper bounds of the magnitudes after the embedding and after each block."""


def architecture_of(config: ModelConfig) -> Architecture:
    """The module that describes the architecture of a model with this config."""
    return cast(Architecture, llama if isinstance(config, LlamaConfig) else gpt2)
