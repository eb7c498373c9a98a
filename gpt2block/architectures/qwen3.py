"""Qwen3: Llama's block with a norm of each head of q and of k, before RoPE turns them.

The dense models, of 0.6B to 32B. Heads have a size of their own. Source: Qwen Team, "Qwen3
Technical Report" (2025), and Qwen3 in `transformers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gpt2block.architectures import llama
from gpt2block.architectures.architecture import CheckpointLayout, RowNorms, Value
from gpt2block.architectures.qwen2 import QwenConfig
from gpt2block.config import ModelConfig, Shapes


@dataclass(frozen=True)
class Qwen3Config(QwenConfig):
    """Sizes of a Qwen3, as in LlamaConfig; attention_bias is of all its four products."""

    NAME: ClassVar[str] = "Qwen3"
    MODEL_TYPE: ClassVar[str] = "qwen3"
    FLAGS: ClassVar[tuple[str, ...]] = (*ModelConfig.FLAGS, "attention_bias")
    ABSENT: ClassVar[Mapping[str, Any]] = {
        "n_ctx": 32768, "eps": 1e-6, "n_kv_head": 32, "head_size": 128
    }  # fmt: skip

    def block_shapes(self) -> Shapes:
        """As in LlamaConfig, and the weights of the norms of heads."""
        D = (self.head_size,)
        return {**super().block_shapes(), "gamma_q": D, "gamma_k": D}


CONFIG: type[ModelConfig] = Qwen3Config
NAMES: Mapping[str, tuple[str, str]] = {
    **llama.NAMES,
    "gamma_q": ("self_attn.q_norm", "attn_q_norm"),
    "gamma_k": ("self_attn.k_norm", "attn_k_norm"),
}
FILES: CheckpointLayout = llama.FILES
GGUF, GGUF_ROPE_INTERLEAVED = "qwen3", False


def attention(o: Any, h: str, x: Value) -> Value:
    """The first half of a block: rows of attention, whose q and k have norms before RoPE."""
    y = o.norm(f"{h}rms1", x, f"{h}gamma1", to=(f"{h}w_qkv",))
    y = o.qkv(h, y, rope="frequencies", norms=(f"{h}gamma_q", f"{h}gamma_k"))
    return o.attend(h, y, to=(f"{h}w_o",))


feed_forward, final = llama.feed_forward, llama.final
constants, stream_bounds = llama.constants, llama.stream_bounds
NORM, QKV, TENSOR_HEADS, DIVIDED = llama.NORM, llama.QKV, llama.TENSOR_HEADS, llama.DIVIDED


def operand_bounds(
    config: Qwen3Config, largest: Mapping[str, float], norms: RowNorms
) -> dict[str, float]:
    """As for Llama. Rows of v are not normalized, those of q and k are before they are.

    A head before γ has a Euclidean norm of at most sqrt(D), and a pair that RoPE turns has one of
    at most that times the larger γ.
    """
    bounds, root = llama.operand_bounds(config, largest, norms), math.sqrt(config.head_size)
    for h in (f"h.{layer}." for layer in range(config.n_layer)):
        heads = root * max(largest[f"{h}gamma_q"], largest[f"{h}gamma_k"])
        bounds[f"{h}rope"] = max(bounds[f"{h}rope"], heads)
    return bounds
