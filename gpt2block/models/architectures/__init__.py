"""The model architectures that the package computes, with one module for each.

gpt2      GPT-2
llama     Llama 1 to 3, SmolLM2, TinyLlama and others
qwen2     Qwen2.5
qwen3     The dense models of Qwen3
qwen3_moe  Qwen3's mixtures of experts
qwen3_5   The text models of Qwen3.5 and Qwen3.6, without mixtures of experts
mistral   Mistral 7B and Mistral Nemo
ministral3  Ministral 3
granite   Granite 3, 4.1 and 4.2
granitemoehybrid  The dense models of Granite 4.0
smollm3   SmolLM3
phi3      Phi-3 and Phi-4-mini
lfm2      LFM2 and LFM2.5
lfm2_moe  LFM2's mixtures of experts
olmo2     OLMo 2
olmo3     OLMo 3
olmoe     OLMoE
nanochat  nanochat
gemma3    The text models of Gemma 3
gemma4    The text models of Gemma 4 without mixtures of experts
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpt2block.models.architectures import (
    gemma3,
    gemma4,
    gpt2,
    granite,
    granitemoehybrid,
    lfm2,
    lfm2_moe,
    llama,
    ministral3,
    mistral,
    nanochat,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    smollm3,
)
from gpt2block.models.architectures.architecture import Architecture
from gpt2block.models.config import ModelConfig

_ALL: Sequence[Architecture] = (
    gpt2, llama, qwen2, qwen3, qwen3_moe, qwen3_5, mistral, ministral3, granite, granitemoehybrid,
    smollm3, phi3, lfm2, lfm2_moe, olmo2, olmo3, olmoe, nanochat, gemma3, gemma4,
)  # fmt: skip
# Architectures whose GGUF files have another architecture's name, and architectures of files that
# have a sliding window
_NAMESAKES = (mistral, granitemoehybrid, olmo3)
GGUF_WITH_WINDOW: Mapping[str, Architecture] = {olmo3.GGUF: olmo3}
ARCHITECTURES = {each.CONFIG.MODEL_TYPE: each for each in _ALL}  # keys: model_type in config.json
# Keys are general.architecture in GGUF files.
GGUF_ARCHITECTURES = {each.GGUF: each for each in _ALL if each.GGUF and each not in _NAMESAKES}


def architecture_of(config: ModelConfig) -> Architecture:
    """Return the module that describes the architecture of a model with this config."""
    return ARCHITECTURES[config.MODEL_TYPE]
