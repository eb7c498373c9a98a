"""Granite 3, 4.1 and 4.2: Llama's block with four scalar multipliers, without additional steps.

The model multiplies the results of attention and of the feed-forward by residual_multiplier m
before it adds them to the residual stream x. A pass computes x / m instead of x, so that the sums
need no factor: the rows of wte are multiplied by embedding_multiplier / m, and the norms, which
do not depend on the size of their rows, have eps / m^2. Scores have attention_multiplier instead
of 1 / sqrt(head_size), and the norm before the logits has gamma / logits_scaling.

Source: Granite Team, "Granite 3.0 Language Models" (2024), and Granite in `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gpt2block.checks import check_number, set_fields
from gpt2block.models.architectures import llama
from gpt2block.models.architectures.architecture import Value
from gpt2block.models.config import ModelConfig, Scales
from gpt2block.models.config.llama import LlamaConfig

MULTIPLIERS = (
    "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling",
)  # fmt: skip


@dataclass(frozen=True)
class GraniteConfig(LlamaConfig):
    """Sizes of a Granite 3 model and its four scalars, named as in `transformers`."""

    NAME: ClassVar[str] = "Granite"
    MODEL_TYPE: ClassVar[str] = "granite"
    HONOURED: ClassVar[tuple[str, ...]] = MULTIPLIERS
    OTHERS: ClassVar[Mapping[str, str]] = {
        **LlamaConfig.OTHERS, **{name: name for name in MULTIPLIERS}
    }  # fmt: skip
    GGUF_KEYS: ClassVar[Mapping[str, str]] = {
        "embedding_scale": "embedding_multiplier", "attention.scale": "attention_multiplier",
        "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
    }  # fmt: skip
    # false: no RoPE
    GGUF_NEUTRAL: ClassVar[Mapping[str, object]] = {"rope.scaling.finetuned": True}

    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in MULTIPLIERS:
            value = check_number(name, getattr(self, name), 2.0**-20, 2.0**20, "2^-20 to 2^20")
            set_fields(self, **{name: value})

    @property
    def scales(self) -> Scales:
        """Return the scalar factors and limits of a forward pass."""
        m = self.residual_multiplier
        return Scales(self.eps / m**2, self.embedding_multiplier / m, self.attention_multiplier, m)


CONFIG: type[ModelConfig] = GraniteConfig
NAMES: Mapping[str, tuple[str, str]] = llama.NAMES
GGUF, GGUF_ROPE_INTERLEAVED = "granite", True

attention, feed_forward = llama.attention, llama.feed_forward


def constants(config: GraniteConfig, vectors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return {name: tensor}: Llama's constants, and the final norm's weight / logits_scaling."""
    gamma = vectors["gamma_f"] / config.logits_scaling
    return {**llama.constants(config, vectors), "gamma_logits": gamma}


def final(o: Any, x: Value, head: bool = False) -> Value:
    """Return the final norm of x; divided by logits_scaling if lm_head reads it."""
    return o.norm("rms_f", x, "gamma_logits" if head else "gamma_f")
