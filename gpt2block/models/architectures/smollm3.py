"""SmolLM3: Llama's block; in every fourth layer RoPE has no effect, so positions are not encoded.

Such layers have frequencies of zero, so that RoPE's angles are zero at every position and no other
kernel is needed. Source: SmolLM3 in `transformers`; Yang et al., "RoPE to NoPE
and Back Again: A New Hybrid Attention Strategy" (2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gpt2block.checks import check_count
from gpt2block.errors import CheckpointError, shown
from gpt2block.models.architectures import llama
from gpt2block.models.config import ModelConfig
from gpt2block.models.config.llama import LlamaConfig, all_but_every, set_layers

EVERY = 4  # period in layers: every 4th layer has no RoPE
STILL = "still_frequencies"


@dataclass(frozen=True)
class SmolLM3Config(LlamaConfig):
    """Sizes of a SmolLM3 model, in which some layers have no RoPE.

    rope_layers: whether RoPE rotates q and k of each layer; () means all but every fourth.
    """

    NAME: ClassVar[str] = "SmolLM3"
    MODEL_TYPE: ClassVar[str] = "smollm3"
    HONOURED: ClassVar[tuple[str, ...]] = (
        "no_rope_layers", "no_rope_layer_interval", "sliding_window",
    )  # fmt: skip
    ABSENT: ClassVar[Mapping[str, object]] = {
        "n_ctx": 32768, "eps": 1e-6, "n_kv_head": 4, "theta": 2e6, "tie_word_embeddings": True,
    }  # fmt: skip

    rope_layers: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        set_layers(self, "rope_layers", all_but_every(EVERY, self.n_layer))

    @property
    def frequencies_of_layers(self) -> tuple[str, ...]:
        """Return, for each layer, the name of the tensor of RoPE frequencies."""
        return tuple("frequencies" if turned else STILL for turned in self.rope_layers)

    @classmethod
    def _fields_in(cls, config: Mapping[str, object]) -> dict[str, Any]:
        """Convert a config.json to config fields. In no_rope_layers, 1 means a layer with RoPE."""
        fields, given = super()._fields_in(config), config.get("no_rope_layers")
        if given is None:
            key = "no_rope_layer_interval"
            every = check_count(key, config.get(key, EVERY))
            return fields | {"rope_layers": all_but_every(every, fields["n_layer"])}
        if not isinstance(given, list) or any(each not in (0, 1) for each in given):
            raise CheckpointError(f"config.json: no_rope_layers: expected a list of 0 and 1, got "
                                  f"{shown(given)}")  # fmt: skip
        return fields | {"rope_layers": tuple(map(bool, given[: fields["n_layer"]]))}

    def to_hugging_face(self) -> dict[str, object]:
        """Return the content of a `config.json` with which `transformers` loads this model."""
        layers = {"no_rope_layers": list(map(int, self.rope_layers)), "use_sliding_window": False}
        padding = {"pad_token_id": None}  # the default id is invalid in a smaller vocabulary
        return super().to_hugging_face() | layers | padding


CONFIG: type[ModelConfig] = SmolLM3Config
NAMES: Mapping[str, tuple[str, str]] = llama.NAMES
GGUF, GGUF_ROPE_INTERLEAVED = "smollm3", True  # GGUF files omit rope_layers


def constants(config: SmolLM3Config, vectors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return {name: tensor} of tensors computed from the config: the RoPE frequencies."""
    known = {"frequencies": config.frequencies(), STILL: np.zeros(config.head_size // 2)}
    return {name: known[name] for name in dict.fromkeys(config.frequencies_of_layers)}


attention, feed_forward, final = llama.attention, llama.feed_forward, llama.final
