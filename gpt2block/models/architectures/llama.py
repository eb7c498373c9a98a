"""Llama: its forward pass, names of its tensors, and upper bounds of its activations.

Q, K and V of a token are one row [Q | K | V]; with grouped queries, K and V have fewer heads than
Q. The tensor "frequencies" has the radians per position by which RoPE rotates each pair of
channels, `LlamaConfig.frequencies`. Names of layers begin with "h.0.", "h.1." and so on.
Source: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gpt2block.models.architectures.architecture import RowNorms, Value
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


def attention(o: Any, h: str, x: Value) -> Value:
    """Compute a block's first half, attention, with RoPE applied to q and k."""
    y = o.norm(f"{h}rms1", x, f"{h}gamma1", to=(f"{h}w_qkv",))
    y = o.qkv(h, y, rope="frequencies")
    return o.attend(h, y, to=(f"{h}w_o",))


def feed_forward(
    o: Any, h: str, x: Value, y: Value, out: str = "o", gamma: str = "gamma2"
) -> Value:
    """Compute x1 = x + projected attention; return the block's output x1 + gated_ffn(norm(x1)).

    out: the end of the names of the projection's weights. gamma: the name of the norm's weights.
    """
    x = o.product(f"{h}proj", y, f"{h}w_{out}", f"{h}b_{out}", add=(f"{h}x1", x))
    del y  # free y's memory for the result of the norm
    y = o.norm(f"{h}rms2", x, f"{h}{gamma}", to=(f"{h}w_gate", f"{h}w_up"))
    y = o.gated(h, y, to=(f"{h}w_down",))
    return o.product(f"{h}down", y, f"{h}w_down", f"{h}b_down", add=(f"{h}output", x))


def final(o: Any, x: Value, to: tuple[str, ...] = ()) -> Value:
    """Return the final norm of x, from which the logits are computed."""
    return o.norm("rms_f", x, "gamma_f", to=to)


def constants(config: LlamaConfig, vectors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return {name: tensor} of tensors computed from the config: the RoPE frequencies."""
    return {"frequencies": config.frequencies()}


def stream_bounds(config: LlamaConfig, largest: Mapping[str, float]) -> Iterator[float]:
    """Yield upper bounds of magnitudes in the residual stream, after the embedding and each block.

    A bound holds for every element and any input; `largest` has the largest magnitudes of tensors.

    A row of an RMSNorm has a Euclidean norm of at most sqrt(C) times the largest γ, so its product
    with K = C weights is at most C times the largest γ times the largest weight of the matrix.
    Attention computes weighted means of rows of v, RoPE rotates pairs of q and k only, and SiLU
    increases no magnitude.
    """
    C = config.n_embd

    def normed(h: str, n: int, name: str) -> float:
        product = C * largest[f"{h}gamma{n}"] * largest[f"{h}w_{name}"]
        return product + largest.get(f"{h}b_{name}", 0.0)

    stream = largest["wte"]
    yield stream
    for h in (f"h.{layer}." for layer in range(config.n_layer)):
        v, ff = normed(h, 1, "qkv"), normed(h, 2, "gate") * normed(h, 2, "up")
        stream += v * config.q_width * largest[f"{h}w_o"] + largest.get(f"{h}b_o", 0.0)
        stream += ff * config.n_ff * largest[f"{h}w_down"] + largest.get(f"{h}b_down", 0.0)
        yield stream


def operand_bounds(
    config: LlamaConfig, largest: Mapping[str, float], norms: RowNorms
) -> dict[str, float]:
    """Return {name: upper bound of the magnitudes} of each layer's operands and intermediates.

    A row of an RMSNorm before γ has a Euclidean norm of at most sqrt(C), so its product with a row
    of weights, times γ, is at most sqrt(C) times the row's norm. RoPE rotates pairs, attention
    computes weighted means, and SiLU increases no magnitude: the sums of gate and up are multiplied
    channel by channel, which is why `norms` returns a number for each channel.
    """
    root, turned = math.sqrt(config.n_embd), math.sqrt(2) * max(1.0, config.scales.rope)
    bounds = {"rms_f": root * largest["gamma_f"]}
    for h in (f"h.{layer}." for layer in range(config.n_layer)):

        def product(n: int, name: str, h: str = h) -> np.ndarray:
            sums = root * norms(f"{h}w_{name}", f"{h}gamma{n}")
            return np.asarray(sums + largest.get(f"{h}b_{name}", 0.0))

        gate, up = product(2, "gate"), product(2, "up")
        bounds |= {f"{h}rms{n}": root * largest[f"{h}gamma{n}"] for n in (1, 2)}
        bounds[f"{h}rope"] = turned * float(product(1, "qkv").max())
        bounds |= {f"{h}gate": float(gate.max()), f"{h}up": float(up.max())}
        bounds[f"{h}ff"] = float((gate * up).max())
    return bounds
