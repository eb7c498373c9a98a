"""OLMo 2: Llama's block with norms of the outputs of attention and FFN, not of their inputs.

Products read the residual stream itself. Before RoPE, one norm applies to all heads of q, and one
to all heads of k.
Source: OLMo Team, "2 OLMo 2 Furious" (2024), and Olmo2 in `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gpt2block.models.architectures import llama
from gpt2block.models.architectures.architecture import Value
from gpt2block.models.config import ModelConfig, Shapes
from gpt2block.models.config.llama import LlamaConfig


@dataclass(frozen=True)
class Olmo2Config(LlamaConfig):
    """Sizes of an OLMo 2 model. attention_bias: whether Q, K, V, output products have biases."""

    NAME: ClassVar[str] = "Olmo2"
    MODEL_TYPE: ClassVar[str] = "olmo2"
    FLAGS: ClassVar[tuple[str, ...]] = (*ModelConfig.FLAGS, "attention_bias")
    ABSENT: ClassVar[Mapping[str, object]] = {"n_ctx": 2048, "eps": 1e-5}

    def block_shapes(self) -> Shapes:
        """Return {name: shape} of a block's tensors: Llama's, with weights of OLMo 2's norms."""
        shapes, C = dict(super().block_shapes()), (self.n_embd,)
        del shapes["gamma1"], shapes["gamma2"]
        heads = {"gamma_q": (self.q_width,), "gamma_k": (self.kv_width,)}
        return {**shapes, **heads, "gamma_attn": C, "gamma_ff": C}


CONFIG: type[ModelConfig] = Olmo2Config
NAMES: Mapping[str, tuple[str, str]] = {
    **{name: names for name, names in llama.NAMES.items() if name not in ("gamma1", "gamma2")},
    "gamma_q": ("self_attn.q_norm", "attn_q_norm"),
    "gamma_k": ("self_attn.k_norm", "attn_k_norm"),
    "gamma_attn": ("post_attention_layernorm", "post_attention_norm"),
    "gamma_ff": ("post_feedforward_layernorm", "post_ffw_norm"),
}
GGUF, GGUF_ROPE_INTERLEAVED = "olmo2", False


def attention(o: Any, h: str, x: Value, end: str = "") -> Value:
    """Compute a block's first half, attention, with norms of q and k before RoPE.

    end: ends the names of the weights of these norms.
    """
    y = o.operand(f"{h}attn_in", x)
    y = o.qkv(h, y, norms=(f"{h}gamma_q{end}", f"{h}gamma_k{end}"))
    return o.attend(h, y)


def feed_forward(o: Any, h: str, x: Value, y: Value) -> Value:
    """Compute x1 = x + norm(projected attention), and return the output x1 + norm(ffn(x1))."""
    y = o.product(f"{h}proj", y, f"{h}w_o", f"{h}b_o")
    x = o.add_norm(f"{h}x1", x, y, f"{h}gamma_attn")
    y = o.operand(f"{h}ff_in", x)
    y = o.gated(h, y)
    y = o.product(f"{h}down", y, f"{h}w_down", f"{h}b_down")
    return o.add_norm(f"{h}output", x, y, f"{h}gamma_ff")


final, constants = llama.final, llama.constants
