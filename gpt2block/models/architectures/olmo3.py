"""OLMo 3: OLMo 2's block; three of four layers have an attention window, the others may have YaRN.

YaRN multiplies q and k after their norms; here, weights of the norms contain its factor. Source:
OLMo Team, "Olmo 3" (2025), and Olmo3 in `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gpt2block.checks import check_count
from gpt2block.models.architectures import olmo2
from gpt2block.models.architectures.architecture import Value
from gpt2block.models.architectures.olmo2 import Olmo2Config
from gpt2block.models.config import ModelConfig, Scales
from gpt2block.models.config.llama import KINDS, PartlyWindowedConfig


@dataclass(frozen=True)
class Olmo3Config(PartlyWindowedConfig, Olmo2Config):
    """Sizes of an OLMo 3 model, as in Olmo2Config and PartlyWindowedConfig."""

    NAME: ClassVar[str] = "Olmo3"
    MODEL_TYPE: ClassVar[str] = "olmo3"
    EVERY: ClassVar[int] = 4
    ABSENT: ClassVar[Mapping[str, object]] = {**Olmo2Config.ABSENT, "theta": 500000.0}
    GGUF_KEYS: ClassVar[Mapping[str, str]] = {
        "attention.sliding_window": "window", "rope.freq_base_swa": "local_theta",
        "attention.sliding_window_pattern": "sliding_layers",
    }  # fmt: skip

    window: int | None = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("sliding_window", self.window)

    @property
    def scales(self) -> Scales:
        """Return the scalar factors of a forward pass, of which none is YaRN's."""
        return Scales(self.eps)

    def to_hugging_face(self) -> dict[str, object]:
        """Return the content of a `config.json` with which `transformers` loads this model."""
        content, default = super().to_hugging_face(), {"rope_type": "default"}
        full = (content.pop("rope_scaling") or default) | {"rope_theta": content.pop("rope_theta")}
        rope = zip(KINDS, (full, default | {"rope_theta": self.local_theta}), strict=True)
        # The default pad_token_id of transformers is not a valid id in a smaller vocabulary.
        return content | {"rope_parameters": dict(rope), "pad_token_id": None}


CONFIG: type[ModelConfig] = Olmo3Config
NAMES = olmo2.NAMES
GGUF, GGUF_ROPE_INTERLEAVED = olmo2.GGUF, olmo2.GGUF_ROPE_INTERLEAVED

feed_forward, final = olmo2.feed_forward, olmo2.final


def attention(o: Any, h: str, x: Value) -> Value:
    """Compute a block's first half, attention, with norms of q and k before RoPE."""
    return olmo2.attention(o, h, x, "_yarn")


def constants(config: Olmo3Config, vectors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return {name: tensor} for RoPE's frequencies and the norms of q and k.

    In layers without a window, the weights are multiplied by YaRN's factor.
    """
    found: dict[str, np.ndarray] = {**config.layer_frequencies()}
    yarn = 1.0 if config.scaling is None else config.scaling.attention_factor
    for n, sliding in enumerate(config.sliding_layers):
        for name in (f"h.{n}.gamma_q", f"h.{n}.gamma_k"):
            found[f"{name}_yarn"] = vectors[name] * (1.0 if sliding else yarn)
    return found
