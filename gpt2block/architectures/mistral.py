"""Mistral: Llama's block, with a head size of its own in Mistral Nemo.

Mistral 7B v0.1 attends to the last 4,096 tokens only, which is supported in contexts of so many
tokens; later models, and Mistral Nemo, see all. GGUF files of these models say that they are
Llamas. Source: Jiang et al., "Mistral 7B" (2023), and Mistral in `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from gpt2block.architectures import llama
from gpt2block.architectures.architecture import Files
from gpt2block.config import ModelConfig
from gpt2block.config.llama import LlamaConfig

WINDOW = 4096  # where config.json has no sliding_window
Config = TypeVar("Config", bound="MistralConfig")


@dataclass(frozen=True)
class MistralConfig(LlamaConfig):
    """Sizes of a Mistral, as in LlamaConfig; without biases."""

    NAME: ClassVar[str] = "Mistral"
    MODEL_TYPE: ClassVar[str] = "mistral"
    FLAGS: ClassVar[tuple[str, ...]] = ModelConfig.FLAGS
    ABSENT: ClassVar[Mapping[str, Any]] = {"n_ctx": 131072, "eps": 1e-6, "n_kv_head": 8}

    @classmethod
    def from_hugging_face(cls: type[Config], config: Any) -> Config:
        """As in ModelConfig; a window that is shorter than the context is not supported."""
        if isinstance(config, dict):
            config = {"sliding_window": WINDOW, **config}
        return super().from_hugging_face(config)

    def to_hugging_face(self) -> dict[str, Any]:
        """As in ModelConfig."""
        return super().to_hugging_face() | {"sliding_window": None}


CONFIG: type[ModelConfig] = MistralConfig
NAMES: Mapping[str, tuple[str, str]] = llama.NAMES
FILES: Files = llama.FILES
GGUF, TURNED = "", False

attention, feed_forward, final = llama.attention, llama.feed_forward, llama.final
constants = llama.constants
stream_bounds, operand_bounds = llama.stream_bounds, llama.operand_bounds
NORM, QKV, TENSOR_HEADS, DIVIDED = llama.NORM, llama.QKV, llama.TENSOR_HEADS, llama.DIVIDED
