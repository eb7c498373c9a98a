"""Qwen3: Llama's block, in which each head of q and k is normalized before RoPE.

The dense models, 0.6B to 32B, have a separate head size. Source: Qwen Team, "Qwen3
Technical Report" (2025), and Qwen3 in `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gpt2block.models.architectures import llama
from gpt2block.models.architectures.architecture import Value
from gpt2block.models.architectures.qwen2 import QwenConfig
from gpt2block.models.config import ModelConfig, Shapes


@dataclass(frozen=True)
class Qwen3Config(QwenConfig):
    """Sizes of a Qwen3 model. attention_bias: whether Q, K, V, output projections have biases."""

    NAME: ClassVar[str] = "Qwen3"
    MODEL_TYPE: ClassVar[str] = "qwen3"
    FLAGS: ClassVar[tuple[str, ...]] = (*ModelConfig.FLAGS, "attention_bias")
    ABSENT: ClassVar[Mapping[str, object]] = {
        "n_ctx": 32768, "eps": 1e-6, "n_kv_head": 32, "head_size": 128
    }  # fmt: skip

    def block_shapes(self) -> Shapes:
        """Return {name: shape} of a block's tensors: Llama's, and weights of the norms of heads."""
        D = (self.head_size,)
        return {**super().block_shapes(), "gamma_q": D, "gamma_k": D}


CONFIG: type[ModelConfig] = Qwen3Config
NAMES: Mapping[str, tuple[str, str]] = {
    **llama.NAMES,
    "gamma_q": ("self_attn.q_norm", "attn_q_norm"),
    "gamma_k": ("self_attn.k_norm", "attn_k_norm"),
}
GGUF, GGUF_ROPE_INTERLEAVED = "qwen3", False


def attention(o: Any, h: str, x: Value) -> Value:
    """Compute a block's first half, attention, with norms of q and k before RoPE."""
    return llama.attention(o, h, x, norms=("gamma_q", "gamma_k"))


feed_forward, final = llama.feed_forward, llama.final
constants = llama.constants
