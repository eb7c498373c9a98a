"""Mistral: Llama's block, with windowed attention in Mistral 7B, and another head size in Nemo.

Mistral 7B v0.1 attends to the last 4,096 tokens only; later models and Mistral Nemo see all. GGUF
files of these models say "llama". Source: Jiang et al., "Mistral 7B" (2023), and
Mistral in `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gpt2block.models.architectures import llama
from gpt2block.models.config import ModelConfig
from gpt2block.models.config.llama import WindowedConfig

WINDOW = 4096  # attention window in tokens if config.json has no sliding_window


@dataclass(frozen=True)
class MistralConfig(WindowedConfig):
    """Sizes of a Mistral model, which may have an attention window and has no biases."""

    NAME: ClassVar[str] = "Mistral"
    MODEL_TYPE: ClassVar[str] = "mistral"
    FLAGS: ClassVar[tuple[str, ...]] = ModelConfig.FLAGS
    ABSENT: ClassVar[Mapping[str, object]] = {
        "n_ctx": 131072, "eps": 1e-6, "n_kv_head": 8, "window": WINDOW,
    }  # fmt: skip


CONFIG: type[ModelConfig] = MistralConfig
NAMES: Mapping[str, tuple[str, str]] = llama.NAMES
GGUF, GGUF_ROPE_INTERLEAVED = llama.GGUF, llama.GGUF_ROPE_INTERLEAVED

attention, feed_forward, final = llama.attention, llama.feed_forward, llama.final
constants = llama.constants
