"""Llama as a forward pass, with its names and the magnitudes that its tensors can have.

Q, K and V of a token are one row [Q | K | V], with fewer heads of K and V than of Q where queries
are grouped. "frequencies": the radians per position by which RoPE turns each pair of channels,
`LlamaConfig.frequencies`. Names of layers begin with "h.0.", "h.1." and so on.
Source: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block.architectures.architecture import CheckpointLayout, RowNorms, Value
from gpt2block.config import ModelConfig
from gpt2block.config.llama import LlamaConfig

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
# Older files have frequencies, of the model or of each layer.
FILES = CheckpointLayout("model.", "layers.", "NK", r"(.+\.)?rotary_emb\w*\..+")
GGUF, GGUF_ROPE_INTERLEAVED = "llama", True
NORM = "RMSNorm"
QKV = "rope"  # the step whose rows are [Q | K | V] as attention reads them
TENSOR_HEADS: tuple[int, ...] = (64, 128, 256)  # channels of a head of a prefill on tensor cores
# FP8 prompts may divide up, and so ff, by what the product of ff is then multiplied by.
DIVIDED: tuple[str, ...] = ("up", "ff", "down")


def attention(o: Any, h: str, x: Value) -> Value:
    """The first half of a block: rows of attention, whose q and k RoPE has turned."""
    y = o.norm(f"{h}rms1", x, f"{h}gamma1", to=(f"{h}w_qkv",))
    y = o.qkv(h, y, rope="frequencies")
    return o.attend(h, y, to=(f"{h}w_o",))


def feed_forward(o: Any, h: str, x: Value, y: Value) -> Value:
    """The second half: x + attention, and the gated feed-forward of its norm added to it."""
    x = o.product(f"{h}proj", y, f"{h}w_o", f"{h}b_o", add=(f"{h}x1", x))
    del y  # its memory is that of the norm
    y = o.norm(f"{h}rms2", x, f"{h}gamma2", to=(f"{h}w_gate", f"{h}w_up"))
    y = o.gated(h, y, to=(f"{h}w_down",))
    return o.product(f"{h}down", y, f"{h}w_down", f"{h}b_down", add=(f"{h}output", x))


def final(o: Any, x: Value, to: tuple[str, ...] = ()) -> Value:
    """The norm before the logits."""
    return o.norm("rms_f", x, "gamma_f", to=to)


def constants(config: LlamaConfig, vectors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors of the passes that the config determines, by name."""
    return {"frequencies": config.frequencies()}


def stream_bounds(config: LlamaConfig, largest: Mapping[str, float]) -> Iterator[float]:
    """Upper bounds of the magnitudes after the embedding and after each block, for any input.

    A row of an RMSNorm has a Euclidean norm of at most sqrt(C) times the largest weight, so its
    product with K = C weights is at most C times that times the largest weight of the matrix.
    Attention computes weighted means of rows of v, RoPE turns pairs of q and k only, and SiLU
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
    """The largest magnitude that each layer's operands and what they follow from can have, by name.

    A row of an RMSNorm before γ has a Euclidean norm of at most sqrt(C), so its product with a row
    of weights, times γ, is at most sqrt(C) times the norm of that row. RoPE turns pairs, attention
    computes weighted means, and SiLU increases no magnitude: the sums of gate and up are multiplied
    channel by channel, which is why `norms` has a number for each.
    """
    root, turned = math.sqrt(config.n_embd), math.sqrt(2) * max(1.0, config.scales.rope)
    bounds = {"rms_f": root * largest["gamma_f"]}
    for h in (f"h.{layer}." for layer in range(config.n_layer)):

        def product(n: int, name: str, h: str = h) -> NDArray[Any]:
            sums = root * norms(f"{h}w_{name}", f"{h}gamma{n}")
            return np.asarray(sums + largest.get(f"{h}b_{name}", 0.0))

        gate, up = product(2, "gate"), product(2, "up")
        bounds |= {f"{h}rms{n}": root * largest[f"{h}gamma{n}"] for n in (1, 2)}
        bounds[f"{h}rope"] = turned * float(product(1, "qkv").max())
        bounds |= {f"{h}gate": float(gate.max()), f"{h}up": float(up.max())}
        bounds[f"{h}ff"] = float((gate * up).max())
    return bounds
