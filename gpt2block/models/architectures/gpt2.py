"""GPT-2: its forward pass, names of its tensors, and upper bounds of its activations.

Rows of several sequences are packed into one matrix (N, C); only attention, the embedding and the
kv_cache distinguish sequences. Names of layers begin with "h.0.", "h.1." and so on.
Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gpt2block.models.architectures.architecture import RowNorms, Value
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
    y = o.norm(f"{h}ln1", x, f"{h}gamma1", f"{h}beta1", to=(f"{h}w_qkv",))
    y = o.qkv(h, y)
    return o.attend(h, y, to=(f"{h}w_attn",))


def feed_forward(o: Any, h: str, x: Value, y: Value) -> Value:
    """Compute x1 = x + projected attention, and return the block's output x1 + ffn(norm(x1))."""
    x = o.product(f"{h}proj", y, f"{h}w_attn", f"{h}b_attn", add=(f"{h}x1", x))
    del y  # free y's memory for the result of the norm
    y = o.norm(f"{h}ln2", x, f"{h}gamma2", f"{h}beta2", to=(f"{h}w_fc",))
    y = o.product(f"{h}ff1", y, f"{h}w_fc", f"{h}b_fc", gelu=f"{h}gelu", to=(f"{h}w_proj",))
    return o.product(f"{h}ff2", y, f"{h}w_proj", f"{h}b_proj", add=(f"{h}output", x))


def final(o: Any, x: Value, to: tuple[str, ...] = ()) -> Value:
    """Return the final norm of x, from which the logits are computed."""
    return o.norm("ln_f", x, "gamma_f", "beta_f", to=to)


def constants(config: GPT2Config, vectors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return {}: no tensor of GPT-2 is computed from the config."""
    return {}


def operand_bounds(
    config: GPT2Config, largest: Mapping[str, float], norms: RowNorms
) -> dict[str, float]:
    """Return {name: upper bound of the magnitudes} of the operands of each layer's products.

    If `largest` has infinity or NaN, so have the bounds. The C values of a LayerNorm
    before γ and β have variance 1, so each is at most sqrt(C), and so is their Euclidean norm.
    Their product with a row of weights, times γ, is at most sqrt(C) times the row's norm. The same
    limit holds for the product of C ones with the row, times β. GELU increases no magnitude.
    """
    root = math.sqrt(config.n_embd)
    bounds = {"ln_f": root * largest["gamma_f"] + largest["beta_f"]}
    for n in range(config.n_layer):
        h = f"h.{n}."
        for norm, result, name in (("1", "qkv", "qkv"), ("2", "gelu", "fc")):
            gamma, beta = f"{h}gamma{norm}", f"{h}beta{norm}"
            bounds[f"{h}ln{norm}"] = root * largest[gamma] + largest[beta]
            rows = norms(f"{h}w_{name}", gamma) + norms(f"{h}w_{name}", beta)
            bounds[h + result] = root * float(rows.max()) + largest[f"{h}b_{name}"]
    return bounds


def stream_bounds(config: GPT2Config, largest: Mapping[str, float]) -> Iterator[float]:
    """Yield upper bounds, for any input, of the residual stream after the embedding and each block.

    A LayerNorm's C values of variance 1 are at most sqrt(C), attention computes weighted means of
    rows of v, GELU increases no magnitude, and a product of K inputs is at most K times the largest
    input times the largest weight. The bundled model's bound is 6e6; the limit is 6e17.
    """
    C = config.n_embd

    def product(a: float, K: int, layer: str, name: str) -> float:
        return a * K * largest[f"{layer}w_{name}"] + largest[f"{layer}b_{name}"]

    stream = largest["wte"] + largest["wpe"]
    yield stream
    for layer in (f"h.{n}." for n in range(config.n_layer)):
        norm1, norm2 = (
            math.sqrt(C) * largest[f"{layer}gamma{n}"] + largest[f"{layer}beta{n}"] for n in "12"
        )
        v, ff = product(norm1, C, layer, "qkv"), product(norm2, C, layer, "fc")
        stream += product(v, C, layer, "attn") + product(ff, 4 * C, layer, "proj")
        yield stream
