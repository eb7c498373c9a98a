"""Ministral 3: Mistral's block with YaRN; after RoPE, queries grow with their position.

The query at position t is multiplied by 1 + β log(1 + ⌊t / n⌋), where n is the context of the
training without YaRN. RoPE's kernels apply this factor, which is 1 for the first n tokens. Files
that can read images have the same text model in `text_config`. Source: Mistral AI, "Ministral 3"
(2025), and Ministral3 in `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gpt2block.checks import check_number, set_fields
from gpt2block.errors import CheckpointError, InputError
from gpt2block.models.architectures import llama
from gpt2block.models.config import ModelConfig, Scales, agreed
from gpt2block.models.config.llama import ORIGINAL, WindowedConfig, rope_objects

BETA = "llama_4_scaling_beta"


@dataclass(frozen=True)
class Ministral3Config(WindowedConfig):
    """Sizes of a Ministral 3 model. beta: growth of queries by YaRN's original context."""

    NAME: ClassVar[str] = "Ministral3"
    MODEL_TYPE: ClassVar[str] = "ministral3"
    FLAGS: ClassVar[tuple[str, ...]] = ModelConfig.FLAGS
    HONOURED: ClassVar[tuple[str, ...]] = (*WindowedConfig.HONOURED, BETA)
    ABSENT: ClassVar[Mapping[str, object]] = {
        "n_ctx": 262144, "eps": 1e-5, "n_kv_head": 8, "head_size": 128,
    }  # fmt: skip
    GGUF_KEYS: ClassVar[Mapping[str, str]] = {"attention.temperature_scale": "beta"}

    beta: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        set_fields(self, beta=check_number(BETA, self.beta, 0, 2.0**20, "a number from 0 to 2^20"))
        if self.beta and (self.scaling is None or self.scaling.kind != "yarn"):
            raise InputError(f"{BETA}: expected 0 without yarn, got {self.beta:g}")

    @property
    def scales(self) -> Scales:
        """Return the scalar factors of a forward pass."""
        growth = (self.beta, self.scaling.original_context) if self.beta and self.scaling else None
        return super().scales._replace(growth=growth)

    @classmethod
    def _fields_in(cls, config: Mapping[str, object]) -> dict[str, Any]:
        """Convert the content of a config.json to {field of this class: value}."""
        objects = rope_objects(config)
        if not objects:
            raise CheckpointError("config.json: expected rope_parameters: missing")
        given = {f"{name}: {BETA}": each[BETA] for name, each in objects.items() if BETA in each}
        return super()._fields_in(config) | {"beta": agreed(given or {BETA: 0.0})}

    def to_hugging_face(self) -> dict[str, object]:
        """Return the content of a `config.json` with which `transformers` loads this model."""
        content = super().to_hugging_face()
        rope = content.pop("rope_scaling") or {"rope_type": "default", ORIGINAL: self.n_ctx}
        rope |= {"rope_theta": content.pop("rope_theta"), BETA: self.beta}
        # The default pad_token_id of transformers is not a valid id in a smaller vocabulary.
        return content | {"rope_parameters": rope, "pad_token_id": None}


CONFIG: type[ModelConfig] = Ministral3Config
NAMES = llama.NAMES
GGUF, GGUF_ROPE_INTERLEAVED = "mistral3", True

attention, feed_forward, final = llama.attention, llama.feed_forward, llama.final
constants = llama.constants
