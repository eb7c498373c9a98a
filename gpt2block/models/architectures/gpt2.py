"""GPT-2: its forward pass, and names of its tensors.

Rows of several sequences are packed into one matrix (N, C); only attention, the embedding and the
kv_cache distinguish sequences. Names of layers begin with "h.0.", "h.1." and so on.
Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpt2block.models.architectures.architecture import Value
from gpt2block.models.config import GPT2Config, ModelConfig

CONFIG: type[ModelConfig] = GPT2Config
NAMES: Mapping[str, tuple[str, str]] = {
    "wte": ("wte", "token_embd"),
    "wpe": ("wpe", "position_embd"),
    "gamma1 beta1": ("ln_1", "attn_norm"),
    "w_qkv b_qkv": ("attn.c_attn", "attn_qkv"),
    "w_attn b_attn": ("attn.c_proj", "attn_output"),
    "gamma2 beta2": ("ln_2", "ffn_norm"),
    "w_fc b_fc": ("mlp.c_fc", "ffn_up"),
    "w_proj b_proj": ("mlp.c_proj", "ffn_down"),
    "gamma_f beta_f": ("ln_f", "output_norm"),
    "lm_head": ("lm_head", "output"),
}
GGUF, GGUF_ROPE_INTERLEAVED = "gpt2", False


def attention(o: Any, h: str, x: Value) -> Value:
    """Compute a Pre-LN block's first half, attention. `h`: prefix of the block's tensor names."""
    y = o.norm(f"{h}ln1", x, f"{h}gamma1", f"{h}beta1")
    y = o.qkv(h, y)
    return o.attend(h, y)


def feed_forward(o: Any, h: str, x: Value, y: Value) -> Value:
    """Compute x1 = x + projected attention, and return the block's output x1 + ffn(norm(x1))."""
    x = o.product(f"{h}proj", y, f"{h}w_attn", f"{h}b_attn", add=(f"{h}x1", x))
    y = o.norm(f"{h}ln2", x, f"{h}gamma2", f"{h}beta2")
    y = o.product(f"{h}ff1", y, f"{h}w_fc", f"{h}b_fc", gelu=f"{h}gelu")
    return o.product(f"{h}ff2", y, f"{h}w_proj", f"{h}b_proj", add=(f"{h}output", x))


def final(o: Any, x: Value, head: bool = False) -> Value:
    """Return the final norm of x, from which the logits are computed."""
    return o.norm("ln_f", x, "gamma_f", "beta_f")


def constants(config: GPT2Config, vectors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return {}: no tensor of GPT-2 is computed from the config."""
    return {}
