"""Llama: its forward pass, and names of its tensors.

Q, K and V of a token are one row [Q | K | V]; with grouped queries, K and V have fewer heads than
Q. The tensor "frequencies" has the radians per position by which RoPE rotates each pair of
channels, `LlamaConfig.frequencies`. Names of layers begin with "h.0.", "h.1." and so on.
Source: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpt2block.models.architectures.architecture import Value
from gpt2block.models.config import ModelConfig
from gpt2block.models.config.llama import LlamaConfig

CONFIG: type[ModelConfig] = LlamaConfig
NAMES: Mapping[str, tuple[str, str]] = {
    "wte": ("embed_tokens", "token_embd"),
    "gamma1": ("input_layernorm", "attn_norm"),
    "w_qkv b_qkv": ("self_attn.{}_proj", "attn_{}"),
    "w_o b_o": ("self_attn.o_proj", "attn_output"),
    "gamma2": ("post_attention_layernorm", "ffn_norm"),
    "w_gate b_gate": ("mlp.gate_proj", "ffn_gate"),
    "w_up b_up": ("mlp.up_proj", "ffn_up"),
    "w_down b_down": ("mlp.down_proj", "ffn_down"),
    "gamma_f": ("norm", "output_norm"),
    "lm_head": ("lm_head", "output"),
}
GGUF, GGUF_ROPE_INTERLEAVED = "llama", True


def attention(
    o: Any, h: str, x: Value, gamma: str = "gamma1", norms: tuple[str, ...] = ()
) -> Value:
    """Compute a block's first half, attention, with RoPE applied to q and k.

    gamma: the name of the norm's weights. norms: names of weights, for the norms of q and k.
    """
    y = o.norm(f"{h}rms1", x, f"{h}{gamma}")
    y = o.qkv(h, y, tuple(f"{h}{name}" for name in norms))
    return o.attend(h, y)


def feed_forward(
    o: Any, h: str, x: Value, y: Value, out: str = "o", gamma: str = "gamma2"
) -> Value:
    """Compute x1 = x + projected attention; return the block's output x1 + gated_ffn(norm(x1)).

    out: the end of the names of the projection's weights. gamma: the name of the norm's weights.
    """
    x = o.product(f"{h}proj", y, f"{h}w_{out}", f"{h}b_{out}", add=(f"{h}x1", x))
    y = o.norm(f"{h}rms2", x, f"{h}{gamma}")
    y = o.gated(h, y)
    return o.product(f"{h}down", y, f"{h}w_down", f"{h}b_down", add=(f"{h}output", x))


def final(o: Any, x: Value, head: bool = False) -> Value:
    """Return the final norm of x, from which the logits are computed."""
    return o.norm("rms_f", x, "gamma_f")


def constants(config: LlamaConfig, vectors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return {name: tensor} of tensors computed from the config: the RoPE frequencies."""
    return {"frequencies": config.frequencies()}
