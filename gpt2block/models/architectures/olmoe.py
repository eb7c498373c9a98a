"""OLMoE: Llama's block, with experts as the feed-forward, and norms of q and k before RoPE.

One norm applies to all heads of q, and one to all heads of k. A router chooses the experts of each
token, as in `qwen3_moe`. Source: Muennighoff et al., "OLMoE: Open Mixture-of-Experts Language
Models" (2024), and Olmoe in `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gpt2block.models.architectures import llama, qwen3, qwen3_moe
from gpt2block.models.config import ModelConfig, Shapes
from gpt2block.models.config.mixture import MixtureConfig


@dataclass(frozen=True)
class OlmoeConfig(MixtureConfig):
    """Sizes of an OLMoE model. n_ff: channels of an expert."""

    NAME: ClassVar[str] = "Olmoe"
    MODEL_TYPE: ClassVar[str] = "olmoe"
    ABSENT: ClassVar[Mapping[str, object]] = {"n_ctx": 4096, "eps": 1e-5}

    def _shapes(self, experts: bool) -> Shapes:
        heads = {"gamma_q": (self.q_width,), "gamma_k": (self.kv_width,)}
        return {**super()._shapes(experts), **heads}


CONFIG: type[ModelConfig] = OlmoeConfig
NAMES: Mapping[str, tuple[str, str]] = qwen3_moe.NAMES
GGUF, GGUF_ROPE_INTERLEAVED = "olmoe", False
attention, feed_forward, final = qwen3.attention, qwen3_moe.feed_forward, llama.final
constants = llama.constants
