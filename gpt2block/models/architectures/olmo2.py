"""OLMo 2: Llama's block with norms of the outputs of attention and FFN, not of their inputs.

Products read the residual stream itself. Before RoPE, one norm applies to all heads of q, and one
to all heads of k.
Source: OLMo Team, "2 OLMo 2 Furious" (2024), and Olmo2 in `transformers`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gpt2block.models.architectures import llama
from gpt2block.models.architectures.architecture import RowNorms, Value
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


def attention(o: Any, h: str, x: Value) -> Value:
    """Compute a block's first half, attention, with norms of q and k before RoPE."""
    y = o.operand(f"{h}attn_in", x, to=(f"{h}w_qkv",))
    y = o.qkv(h, y, rope="frequencies", norms=(f"{h}gamma_q", f"{h}gamma_k"))
    return o.attend(h, y, to=(f"{h}w_o",))


def feed_forward(o: Any, h: str, x: Value, y: Value) -> Value:
    """Compute x1 = x + norm(projected attention), and return the output x1 + norm(ffn(x1))."""
    y = o.product(f"{h}proj", y, f"{h}w_o", f"{h}b_o")
    x = o.add_norm(f"{h}x1", x, y, f"{h}gamma_attn")
    y = o.operand(f"{h}ff_in", x, to=(f"{h}w_gate", f"{h}w_up"))
    y = o.gated(h, y, to=(f"{h}w_down",))
    y = o.product(f"{h}down", y, f"{h}w_down", f"{h}b_down")
    return o.add_norm(f"{h}output", x, y, f"{h}gamma_ff")


final, constants = llama.final, llama.constants


def _halves(config: Olmo2Config, largest: Mapping[str, float]) -> Iterator[float]:
    """Yield upper bounds of the residual stream before each half of a block, and after the last.

    An RMSNorm's C values are at most sqrt(C) before γ, and so is their Euclidean norm.
    """
    stream = largest["wte"]
    for h in (f"h.{layer}." for layer in range(config.n_layer)):
        for gamma in ("gamma_attn", "gamma_ff"):
            yield stream
            stream += math.sqrt(config.n_embd) * largest[h + gamma]
    yield stream


def stream_bounds(config: Olmo2Config, largest: Mapping[str, float]) -> Iterator[float]:
    """Yield upper bounds of the residual stream, for any input, after embedding and each block."""
    for n, bound in enumerate(_halves(config, largest)):
        if n % 2 == 0:
            yield bound


def operand_bounds(
    config: Olmo2Config, largest: Mapping[str, float], norms: RowNorms
) -> dict[str, float]:
    """Return {name: upper bound of the magnitudes} of each layer's operands and intermediates.

    Products read rows of the residual stream; their Euclidean norm is at most the norm of wte's row
    plus the norms of all rows added. Rows of v have no norm. Rows of q and k are bounded before
    their norm, too; a pair after norm and RoPE is at most sqrt(channels) times the largest γ.
    """
    C, widths = config.n_embd, {"q": config.q_width, "k": config.kv_width}
    # `stream` includes largest["wte"]; a row of wte has a norm of up to sqrt(C) · largest["wte"].
    spread = (math.sqrt(C) - 1) * largest["wte"]
    bounds = {"rms_f": math.sqrt(C) * largest["gamma_f"]}
    stream = list(_halves(config, largest))
    for layer in range(config.n_layer):
        h, (first, second) = f"h.{layer}.", stream[2 * layer : 2 * layer + 2]

        def product(x: float, name: str, h: str = h) -> np.ndarray:
            sums = (x + spread) * norms(f"{h}w_{name}", "")
            return np.asarray(sums + largest.get(f"{h}b_{name}", 0.0))

        gate, up = product(second, "gate"), product(second, "up")
        heads = max(math.sqrt(n) * largest[f"{h}gamma_{name}"] for name, n in widths.items())
        bounds |= {f"{h}attn_in": first, f"{h}ff_in": second}
        bounds[f"{h}rope"] = max(math.sqrt(2) * float(product(first, "qkv").max()), heads)
        bounds |= {f"{h}gate": float(gate.max()), f"{h}up": float(up.max())}
        bounds[f"{h}ff"] = float((gate * up).max())
    return bounds
