"""LFM2 and LFM2.5: Llama's block; most layers have a short convolution in place of attention.

A layer with a convolution computes [B | C | x] = norm(h) · w_in, u = B · x, y = C · (taps ∗ u), and
y · w_out. The convolution ∗ adds, in each channel, u of the last conv_length tokens, each times a
weight. The rows of u are the layer's keys in the kv_cache; the layer has no values. Other layers
have attention with norms of heads, as in Qwen3. Source: Liquid AI, "LFM2 Technical Report" (2025),
and Lfm2 in `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gpt2block.checks import check_count, check_number, set_fields
from gpt2block.errors import InputError
from gpt2block.models.architectures import llama, qwen3
from gpt2block.models.architectures.architecture import Value
from gpt2block.models.config import (
    ALL_LIMITS,
    CONV_LAYERS,
    Divided,
    LayerCache,
    ModelConfig,
    Settings,
    Shapes,
    agreed,
    check_settings,
)
from gpt2block.models.config.llama import LlamaConfig, are_of_type, layers_in, set_layers

KINDS = ("full_attention", "conv")
MAX_TAPS = 8  # maximum terms of a convolution
# Names of tensors that only one kind of layers has
OF_ATTENTION = "w_qkv", "gamma_q", "gamma_k", "w_o"
OF_CONV = "w_in", "b_in", "taps", "b_taps", "w_out", "b_out"


@dataclass(frozen=True)
class Lfm2Config(LlamaConfig):
    """Sizes of an LFM2 model. conv_layers: whether each layer has a convolution; () means none has.

    conv_length: terms of a convolution. conv_bias: whether it and its two products have biases.
    """

    NAME: ClassVar[str] = "Lfm2"
    MODEL_TYPE: ClassVar[str] = "lfm2"
    FLAGS: ClassVar[tuple[str, ...]] = (*ModelConfig.FLAGS, "conv_bias")
    OTHERS: ClassVar[Mapping[str, str]] = {
        **LlamaConfig.OTHERS, "eps": "norm_eps", "conv_length": "conv_L_cache",
    }  # fmt: skip
    ABSENT: ClassVar[Mapping[str, object]] = {
        "n_ctx": 128_000, "eps": 1e-5, "n_kv_head": 8, "theta": 1e6, "tie_word_embeddings": True,
    }  # fmt: skip
    HONOURED: ClassVar[tuple[str, ...]] = ("layer_types",)
    SETTINGS: ClassVar[Settings] = (
        *LlamaConfig.SETTINGS,
        ("block_use_swiglu", (True,), "the feed-forward has a gate"),
        ("use_pos_enc", (True,), "attention has RoPE"),
    )
    GGUF_KEYS: ClassVar[Mapping[str, str]] = {
        "shortconv.l_cache": "conv_length", CONV_LAYERS: "conv_layers",
    }  # fmt: skip
    DIVIDED: ClassVar[Divided] = (*LlamaConfig.DIVIDED, ("taps", ("conv",), "w_out"))

    conv_layers: tuple[bool, ...] = ()
    conv_length: int = 3
    conv_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        set_layers(self, "conv_layers", (False,) * self.n_layer)
        if all(self.conv_layers):
            raise InputError("conv_layers: expected at least one layer with attention, got none")
        set_fields(self, conv_length=check_count("conv_L_cache", self.conv_length, MAX_TAPS))

    @property
    def layer_caches(self) -> tuple[LayerCache, ...]:
        """The part of a kv_cache that each layer reads: keys and values, or rows of u."""
        caches, C = enumerate(super().layer_caches), self.n_embd
        of_conv = [LayerCache(layer, C, 0, narrow=False) for layer in range(self.n_layer)]
        return tuple(of_conv[n] if self.conv_layers[n] else each for n, each in caches)

    def block_shapes(self) -> Shapes:
        """Return {name: shape} of the tensors in both kinds of layers."""
        C, D = self.n_embd, (self.head_size,)
        shapes = {**super().block_shapes(), "gamma_q": D, "gamma_k": D}
        if any(self.conv_layers):
            shapes |= {"w_in": (C, 3 * C), "taps": (C, 1, self.conv_length), "w_out": (C, C)}
            biases = {"b_in": (3 * C,), "b_taps": (C,), "b_out": (C,)}
            shapes |= biases if self.conv_bias else {}
        return shapes

    def shapes_of(self, layer: int) -> Shapes:
        """Return {name: shape} of the tensors of a layer with attention or with a convolution."""
        others = OF_ATTENTION if self.conv_layers[layer] else OF_CONV
        return {name: shape for name, shape in self.block_shapes().items() if name not in others}

    @classmethod
    def _fields_in(cls, config: Mapping[str, object]) -> dict[str, Any]:
        """Convert the content of a config.json to {field of this class: value}."""
        renamed = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}
        given = {theirs: config[key] for key, theirs in renamed.items() if key in config}
        fields = super()._fields_in({**config, **given})
        width = (fields["n_embd"],)
        others = {"block_dim": width, "conv_dim": width, "conv_dim_out": width}
        others |= {"num_heads": (fields["n_head"],)}
        check_settings(config, [(key, own, "all sizes are one") for key, own in others.items()])
        if config.get("block_auto_adjust_ff_dim", True):
            fields["n_ff"] = _adjusted_n_ff(config, fields["n_ff"])
        return fields | {"conv_layers": _conv_layers(config, fields["n_layer"])}

    def to_hugging_face(self) -> dict[str, object]:
        """Return the content of a `config.json` with which `transformers` loads this model."""
        kinds = [KINDS[conv] for conv in self.conv_layers]
        content = super().to_hugging_face() | {"layer_types": kinds, "pad_token_id": None}
        return content | {"block_auto_adjust_ff_dim": False}


def _adjusted_n_ff(config: Mapping[str, object], n_ff: int) -> int:
    """Return two thirds of n_ff times a factor, rounded up to a multiple, as in `transformers`."""
    name, several = "block_ffn_dim_multiplier", "block_multiple_of"
    expected = "a number from 2^-20 to 2^20"
    factor = check_number(name, config.get(name, 1.0), 2.0**-20, 2.0**20, expected)
    multiple = check_count(several, config.get(several, 256), ALL_LIMITS["n_ff"])
    return -(-int(factor * int(2 * n_ff / 3)) // multiple) * multiple


def _conv_layers(config: Mapping[str, object], n_layer: int) -> tuple[bool, ...]:
    """Return whether each layer has a convolution, from layer_types or full_attn_idxs."""
    kinds, full = config.get("layer_types"), config.get("full_attn_idxs")
    given = {} if kinds is None else {"layer_types": kinds}
    if full is not None:
        full = layers_in("full_attn_idxs", full, n_layer)
        given["full_attn_idxs"] = [KINDS[n not in full] for n in range(n_layer)]
    return are_of_type(agreed(given) if given else [], KINDS)


CONFIG: type[ModelConfig] = Lfm2Config
NAMES: Mapping[str, tuple[str, str]] = {
    **llama.NAMES,
    "gamma1": ("operator_norm", "attn_norm"),
    "gamma_q": ("self_attn.q_layernorm", "attn_q_norm"),
    "gamma_k": ("self_attn.k_layernorm", "attn_k_norm"),
    "w_o b_o": ("self_attn.out_proj", "attn_output"),
    "w_in b_in": ("conv.in_proj", "shortconv.in_proj"),
    "taps b_taps": ("conv.conv", "shortconv.conv"),
    "w_out b_out": ("conv.out_proj", "shortconv.out_proj"),
    "gamma2": ("ffn_norm", "ffn_norm"),
    "w_gate b_gate": ("feed_forward.w1", "ffn_gate"),
    "w_up b_up": ("feed_forward.w3", "ffn_up"),
    "w_down b_down": ("feed_forward.w2", "ffn_down"),
    "gamma_f": ("embedding_norm", "token_embd_norm"),
}
GGUF, GGUF_ROPE_INTERLEAVED = "lfm2", False
final, constants = llama.final, llama.constants


def attention(o: Any, h: str, x: Value) -> Value:
    """Compute a block's first half: attention with norms of heads, or a short convolution."""
    if not o.c.has_conv(h):
        return qwen3.attention(o, h, x)
    y = o.norm(f"{h}rms_in", x, f"{h}gamma1")
    y = o.product(f"{h}bcx", y, f"{h}w_in", f"{h}b_in")
    return o.short_conv(h, y)


def feed_forward(o: Any, h: str, x: Value, y: Value) -> Value:
    """Compute a block's second half as Llama does; w_out projects the result of a convolution."""
    return llama.feed_forward(o, h, x, y, out="out" if o.c.has_conv(h) else "o")
