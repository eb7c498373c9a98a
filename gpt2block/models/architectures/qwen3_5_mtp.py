"""The block of Qwen3.5 that drafts tokens (multi-token prediction, MTP), as a model of its own.

Its input for a position is the product of w_eh with the norms of two rows: the embedding of the
next token, and the model's residual stream before the final norm. A layer with gated attention and
a norm follow; the embedding and lm_head are the model's. The logits are those of the token after
the next one. To draft further tokens, the layer's output takes the place of the model's stream.
Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from gpt2block.models.architectures import qwen3_5
from gpt2block.models.architectures.architecture import RowNorms
from gpt2block.models.architectures.qwen3_5 import Qwen35DraftConfig

CONFIG: type[Qwen35DraftConfig] = Qwen35DraftConfig
NAMES, FILES = qwen3_5.NAMES, qwen3_5.FILES
GGUF, GGUF_ROPE_INTERLEAVED = "", False
NORM, QKV, DIVIDED = qwen3_5.NORM, qwen3_5.QKV, qwen3_5.DIVIDED
TENSOR_HEADS = qwen3_5.TENSOR_HEADS
attention, feed_forward, final = qwen3_5.attention, qwen3_5.feed_forward, qwen3_5.final


def constants(config: Qwen35DraftConfig, vectors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constants of Qwen3.5, and 1 + w of the weights w of the inputs' norms."""
    norms = {f"gamma_{n}_and_1": 1 + vectors[f"gamma_{n}"] for n in "eh"}
    return {**qwen3_5.constants(config, vectors), **norms}


def stream_bounds(config: Qwen35DraftConfig, largest: Mapping[str, float]) -> Iterator[float]:
    """Yield upper bounds of the residual stream, as Qwen3.5 does."""
    joined = sum((1 + largest[f"gamma_{n}"]) * largest[f"w_{n}"] for n in "eh") * config.n_embd
    yield from qwen3_5.stream_bounds(config, {**largest, "wte": joined})


def operand_bounds(
    config: Qwen35DraftConfig, largest: Mapping[str, float], norms: RowNorms
) -> dict[str, float]:
    """Bound operands as Qwen3.5 does, and the norms of the inputs."""
    root = math.sqrt(config.n_embd)
    inputs = {f"rms_{n}": root * (1 + largest[f"gamma_{n}"]) for n in "eh"}
    return qwen3_5.operand_bounds(config, largest, norms) | inputs
