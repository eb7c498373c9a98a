"""Qwen2.5: Llama's block with biases of q, k and v, although config.json mentions no biases.

`sliding_window` has no effect where `use_sliding_window` is false, which holds for all Qwen2.5
models of up to 72B. Source: Qwen Team, "Qwen2.5 Technical Report" (2024), and Qwen2 in
`transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gpt2block.models.architectures import llama
from gpt2block.models.config import ModelConfig, Shapes
from gpt2block.models.config.llama import LlamaConfig


class QwenConfig(LlamaConfig):
    """Base class of Qwen2.5's and Qwen3's configs; use_sliding_window false disables the window."""

    HONOURED: ClassVar[tuple[str, ...]] = ("sliding_window",)

    def to_hugging_face(self) -> dict[str, object]:
        """Return the content of a `config.json` with which `transformers` loads this model."""
        return super().to_hugging_face() | {"use_sliding_window": False}


@dataclass(frozen=True)
class Qwen2Config(QwenConfig):
    """Sizes of a Qwen2.5 model; only the product that computes q, k and v has biases."""

    NAME: ClassVar[str] = "Qwen2"
    MODEL_TYPE: ClassVar[str] = "qwen2"
    FLAGS: ClassVar[tuple[str, ...]] = ModelConfig.FLAGS
    ABSENT: ClassVar[Mapping[str, object]] = {"n_ctx": 32768, "eps": 1e-6, "n_kv_head": 32}

    def block_shapes(self) -> Shapes:
        """Return {name: shape} of a block's tensors: Llama's tensors and b_qkv."""
        shapes = super().block_shapes()
        return {**shapes, "b_qkv": shapes["w_qkv"][1:]}


CONFIG: type[ModelConfig] = Qwen2Config
NAMES: Mapping[str, tuple[str, str]] = llama.NAMES
GGUF, GGUF_ROPE_INTERLEAVED = "qwen2", False

# Llama's functions compute Qwen2.5's block: a product adds a bias if its matrix has a bias.
attention, feed_forward, final = llama.attention, llama.feed_forward, llama.final
constants = llama.constants
