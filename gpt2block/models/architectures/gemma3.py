"""Gemma 3's text models: Llama's block with four norms; 5 of 6 layers have an attention window.

Norms also follow attention and the feed-forward, before the residual additions. Each head of q and
k has a norm. Files of `transformers` store norm weights as w, GGUF files as the factors 1 + w. RoPE
rotates by other frequencies in layers with a window than in layers without. The feed-forward's gate
is GELU, rows of wte are multiplied by sqrt(n_embd), and logits may be capped.

Source: Gemma Team, "Gemma 3 Technical Report" (2025), and Gemma3 in `transformers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from gpt2block.checks import FLOATS, check_choice, check_number, set_fields
from gpt2block.models.architectures import llama, qwen3
from gpt2block.models.architectures.architecture import Value
from gpt2block.models.config import ModelConfig, Scales, Settings, Shapes
from gpt2block.models.config.llama import LlamaConfig, PartlyWindowedConfig

LAYERS_27B = 62
EMBEDDING_DTYPE = "embedding_dtype"  # a key of config.json and GGUF that other software ignores
CAP, SCALE, THETA = "final_logit_softcapping", "query_pre_attn_scalar", "rope_local_base_freq"
NORMS = ("gamma1", "gamma_q", "gamma_k", "gamma_attn", "gamma2", "gamma_ff")


@dataclass(frozen=True)
class Gemma3Config(PartlyWindowedConfig):
    """Sizes of a Gemma 3 model. attention_bias: whether Q, K, V and output projections have biases.

    scalar: scores are multiplied by 1 / sqrt(scalar); 0 stands for this model size's value, which
    GGUF files lack: the head size, or n_embd / n_head with 62 layers (27B). logits_cap: the limit
    of the magnitudes of logits, or None. embedding_dtype: the dtype that the embedding factor
    sqrt(n_embd) is rounded to. `transformers` rounds to the dtype of the loaded weights, llama.cpp
    to float32. Here the dtype is part of the model: a checkpoint converted to another dtype or
    format keeps it.
    """

    NAME: ClassVar[str] = "Gemma3"
    MODEL_TYPE: ClassVar[str] = "gemma3_text"
    EVERY: ClassVar[int] = 6
    GATE: ClassVar[Literal["silu", "gelu"]] = "gelu"
    ADDED_TO_NORMS: ClassVar[float] = 1.0
    FLAGS: ClassVar[tuple[str, ...]] = (*ModelConfig.FLAGS, "attention_bias")
    HONOURED: ClassVar[tuple[str, ...]] = (
        *PartlyWindowedConfig.HONOURED, "sliding_window_pattern", CAP, SCALE,
    )  # fmt: skip
    OTHERS: ClassVar[Mapping[str, str]] = {
        **PartlyWindowedConfig.OTHERS, "logits_cap": CAP, "scalar": SCALE, "local_theta": THETA,
    }  # fmt: skip
    GGUF_KEYS: ClassVar[Mapping[str, str]] = {
        "attention.sliding_window": "window", "rope.freq_base_swa": "local_theta",
        EMBEDDING_DTYPE: EMBEDDING_DTYPE,
    }  # fmt: skip
    ABSENT: ClassVar[Mapping[str, object]] = {
        "n_ctx": 131072, "eps": 1e-6, "n_kv_head": 4, "head_size": 256, "theta": 1e6,
        "window": 4096, "scalar": 256, "tie_word_embeddings": True,
    }  # fmt: skip
    SETTINGS: ClassVar[Settings] = (
        ("hidden_activation", ("gelu_pytorch_tanh",), "the gate is GELU in its tanh approximation"),
        ("use_bidirectional_attention", (None, False), "a token sees no later ones"),
        *(each for each in LlamaConfig.SETTINGS if each[0] == "quantization_config"),
    )

    local_theta: float = 10000.0
    scalar: float = 0
    logits_cap: float | None = None
    embedding_dtype: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("embedding_dtype", self.embedding_dtype, FLOATS)
        limits = {"scalar": (2.0**-20, 2.0**40)}
        limits |= {"logits_cap": (2.0**-20, 2.0**20)} if self.logits_cap is not None else {}
        if not self.scalar:
            size = self.n_embd / self.n_head if self.n_layer == LAYERS_27B else self.head_size
            set_fields(self, scalar=size)
        for name, (least, most) in limits.items():
            number = check_number(name, getattr(self, name), least, most, f"{least:g} to {most:g}")
            set_fields(self, **{name: number})

    @property
    def scales(self) -> Scales:
        """Return the scalar factors and limits of a forward pass."""
        root = float(np.asarray(math.sqrt(self.n_embd)).astype(FLOATS[self.embedding_dtype]))
        return Scales(self.eps, root, self.scalar**-0.5, cap=self.logits_cap)

    def block_shapes(self) -> Shapes:
        """Return {name: shape} of a block's tensors: Llama's, and weights of additional norms."""
        C, D = (self.n_embd,), (self.head_size,)
        own = {"gamma_q": D, "gamma_k": D, "gamma_attn": C, "gamma_ff": C}
        return {**super().block_shapes(), **own}

    @classmethod
    def _fields_in(cls, config: Mapping[str, object]) -> dict[str, Any]:
        """Convert the content of a config.json to {field of this class: value}."""
        fields = super()._fields_in(config)
        keys = (EMBEDDING_DTYPE, "dtype", "torch_dtype")
        key = next((key for key in keys if config.get(key) is not None), keys[0])
        dtype = str(config.get(key) or "float32").removeprefix("torch.")
        check_choice(key, dtype, (*FLOATS, "float64"))
        dtype = "float32" if dtype == "float64" else dtype  # float64 weights are read as float32
        return fields | {EMBEDDING_DTYPE: dtype}

    def to_hugging_face(self) -> dict[str, object]:
        """Return the content of a `config.json` with which `transformers` loads this model."""
        content = super().to_hugging_face()
        del content["hidden_act"]
        own: dict[str, object] = {"hidden_activation": "gelu_pytorch_tanh", "pad_token_id": None}
        own |= {SCALE: int(self.scalar) if self.scalar % 1 == 0 else self.scalar}
        return content | own | {EMBEDDING_DTYPE: self.embedding_dtype}


CONFIG: type[ModelConfig] = Gemma3Config
NAMES: Mapping[str, tuple[str, str]] = {
    **qwen3.NAMES,
    "gamma_attn": ("post_attention_layernorm", "post_attention_norm"),
    "gamma2": ("pre_feedforward_layernorm", "ffn_norm"),
    "gamma_ff": ("post_feedforward_layernorm", "post_ffw_norm"),
}
GGUF, GGUF_ROPE_INTERLEAVED = "gemma3", False


def constants(config: Gemma3Config, vectors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return {name: tensor} of the RoPE frequencies and of 1 + w for the weights w of all norms."""
    names = [f"h.{n}.{norm}" for n in range(config.n_layer) for norm in NORMS]
    return {
        **config.layer_frequencies(),
        **{_of(name): 1 + vectors[name] for name in (*names, "gamma_f")},
    }


def _of(gamma: str) -> str:
    """Return the name of the tensor 1 + w for a norm's weight w."""
    return f"{gamma}_and_1"


def attention(o: Any, h: str, x: Value) -> Value:
    """Compute a block's first half, attention, with norms of q and k before RoPE."""
    return llama.attention(o, h, x, _of("gamma1"), (_of("gamma_q"), _of("gamma_k")))


def before_last_norm(
    o: Any, h: str, x: Value, y: Value, of: Callable[[str], str]
) -> tuple[Value, Value]:
    """Return x1 = x + norm(projected attention), and ffn(norm(x1)).

    of: returns the name of the tensor by which a norm with these weights multiplies.
    """
    y = o.product(f"{h}proj", y, f"{h}w_o", f"{h}b_o")
    x = o.add_norm(f"{h}x1", x, y, of(f"{h}gamma_attn"))
    y = o.norm(f"{h}rms2", x, of(f"{h}gamma2"))
    y = o.gated(h, y)
    return x, o.product(f"{h}down", y, f"{h}w_down")


def feed_forward(o: Any, h: str, x: Value, y: Value) -> Value:
    """Compute x1 = x + norm(projected attention); return the output x1 + norm(ffn(norm(x1)))."""
    x, y = before_last_norm(o, h, x, y, _of)
    return o.add_norm(f"{h}output", x, y, _of(f"{h}gamma_ff"))


def final(o: Any, x: Value, head: bool = False) -> Value:
    """Return the final norm of x, from which the logits are computed."""
    return o.norm("rms_f", x, _of("gamma_f"))
