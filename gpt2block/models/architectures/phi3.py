"""Phi-3 and Phi-4-mini: Llama's block, where RoPE may rotate only a part of each head.

Files have gate and up in one matrix, and q, k and v in another. RoPE rotates the first `rotary`
channels of a head, as pairs from their two halves, and leaves the rest. Here the channels of heads
of q and k are reordered, which changes no score: the rotated pairs become the first pairs of the
whole head, and other pairs have frequency zero, so that Llama's RoPE kernels can be used.

With longrope, RoPE has a factor for each frequency and multiplies the pairs that it rotates. There
are two sets of factors. A sequence has one set at all positions, chosen when it begins: the
short set if it may have at most original_context tokens, else the long set. So each row of a
kv_cache has its own frequencies (`SequenceFrequencies`), and the RoPE kernels are the variants that
read them. Source: Microsoft, "Phi-3 Technical Report" (2024), and Phi3 in `transformers`, which
changes to the long set when a text grows above original_context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gpt2block.models.architectures import llama
from gpt2block.models.config import ModelConfig
from gpt2block.models.config.llama import ORIGINAL, PARTIAL, PartlyRotatedConfig, WindowedConfig


@dataclass(frozen=True)
class Phi3Config(PartlyRotatedConfig, WindowedConfig):
    """Sizes of a Phi-3 model, which may have an attention window and has no biases."""

    NAME: ClassVar[str] = "Phi3"
    MODEL_TYPE: ClassVar[str] = "phi3"
    FLAGS: ClassVar[tuple[str, ...]] = ModelConfig.FLAGS
    ABSENT: ClassVar[Mapping[str, object]] = {"n_ctx": 4096, "eps": 1e-5}
    HONOURED: ClassVar[tuple[str, ...]] = (*WindowedConfig.HONOURED, PARTIAL, "long_factor")
    GGUF_KEYS: ClassVar[Mapping[str, str]] = {
        "rope.dimension_count": "rotary", "attention.sliding_window": "window",
    }  # fmt: skip

    @classmethod
    def _fields_in(cls, config: Mapping[str, object]) -> dict[str, Any]:
        """Convert the content of a config.json to {field of this class: value}."""
        return super()._fields_in({ORIGINAL: 4096, **config})

    def to_hugging_face(self) -> dict[str, object]:
        """Return the content of a `config.json` with which `transformers` loads this model."""
        original = {} if self.scaling is None else {ORIGINAL: self.scaling.original_context}
        # The default pad_token_id of transformers is not a valid id in a smaller vocabulary.
        own = {PARTIAL: self.rotary_part, "pad_token_id": None}
        return super().to_hugging_face() | original | own


CONFIG: type[ModelConfig] = Phi3Config
NAMES: Mapping[str, tuple[str, str]] = {
    **llama.NAMES,
    "w_qkv b_qkv": ("self_attn.qkv_proj", "attn_qkv"),
    "w_gate b_gate": ("mlp.gate_up_proj", "ffn_up"),
    "w_up b_up": ("mlp.gate_up_proj", "ffn_up"),  # up's rows follow gate's rows
}
GGUF, GGUF_ROPE_INTERLEAVED = "phi3", False

attention, feed_forward, final = llama.attention, llama.feed_forward, llama.final
constants = llama.constants
