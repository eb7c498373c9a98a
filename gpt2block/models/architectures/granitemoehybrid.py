"""Granite 4.0's dense models: Granite 3's block, with gate and up in one tensor of a file.

Their `model_type` also has mixtures of experts and layers of Mamba2, which are refused. Some models
have no RoPE: their frequencies are zero. GGUF files of dense models are files of Granite 3, with
separate gate and up. Source: IBM, "Granite 4.0 Language Models" (2025), and GraniteMoeHybrid in
`transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from gpt2block.models.architectures import granite
from gpt2block.models.architectures.granite import GraniteConfig
from gpt2block.models.config import ModelConfig, Settings

POSITIONS = "position_embedding_type"


@dataclass(frozen=True)
class GraniteHybridConfig(GraniteConfig):
    """Sizes of a dense Granite 4.0 model. position_embedding_type: "rope", "nope" or None."""

    NAME: ClassVar[str] = "GraniteMoeHybrid"
    MODEL_TYPE: ClassVar[str] = "granitemoehybrid"
    SIZES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **GraniteConfig.SIZES, "n_ff": ("shared_intermediate_size",)
    }  # fmt: skip
    FLAGS: ClassVar[tuple[str, ...]] = (*ModelConfig.FLAGS, "attention_bias")
    OTHERS: ClassVar[Mapping[str, str]] = {**GraniteConfig.OTHERS, POSITIONS: POSITIONS}
    HONOURED: ClassVar[tuple[str, ...]] = (*GraniteConfig.HONOURED, "layer_types")
    ABSENT: ClassVar[Mapping[str, object]] = {**GraniteConfig.ABSENT, POSITIONS: None}
    SETTINGS: ClassVar[Settings] = (
        *GraniteConfig.SETTINGS,
        (POSITIONS, ("rope", "nope", None), "all layers have RoPE or none"),
        ("num_local_experts", (0,), "mixtures of experts are not supported"),
        ("layer_types", ("attention", "full_attention"), "layers of Mamba2 are not supported"),
    )

    position_embedding_type: str | None = "rope"

    def frequencies(self) -> NDArray[np.float64]:
        """Return the radians per position by which RoPE rotates each pair, zero without RoPE."""
        return super().frequencies() * (self.position_embedding_type == "rope")

    def to_hugging_face(self) -> dict[str, object]:
        """Return the content of a `config.json` with which `transformers` loads this model."""
        # transformers checks mamba_n_heads even if there are no such layers.
        dense = {"num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 1}
        return super().to_hugging_face() | dense | {"layer_types": ["attention"] * self.n_layer}


CONFIG: type[ModelConfig] = GraniteHybridConfig
NAMES: Mapping[str, tuple[str, str]] = {
    **granite.NAMES,
    "w_gate b_gate": ("shared_mlp.input_linear", "ffn_gate"),
    "w_up b_up": ("shared_mlp.input_linear", "ffn_up"),  # up's rows follow gate's rows
    "w_down b_down": ("shared_mlp.output_linear", "ffn_down"),
}
GGUF, GGUF_ROPE_INTERLEAVED = granite.GGUF, granite.GGUF_ROPE_INTERLEAVED

attention, feed_forward, final = granite.attention, granite.feed_forward, granite.final
constants = granite.constants
