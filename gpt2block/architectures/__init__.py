"""The architectures of models, a file for each.

gpt2      GPT-2
llama     Llama 1 to 3, SmolLM2, TinyLlama and others
qwen2     Qwen2.5
qwen3     Qwen3, its dense models
mistral   Mistral 7B and Mistral Nemo
granite   Granite 3
smollm3   SmolLM3
phi3      Phi-3 and Phi-4-mini
olmo2     OLMo 2
nanochat  nanochat
gemma3    Gemma 3, its models of text
"""

from __future__ import annotations

from collections.abc import Sequence

from gpt2block.architectures import (
    gemma3,
    gpt2,
    granite,
    llama,
    mistral,
    nanochat,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    smollm3,
)
from gpt2block.architectures.architecture import Architecture
from gpt2block.config import ModelConfig

_ALL: Sequence[Architecture] = (
    gpt2, llama, qwen2, qwen3, mistral, granite, smollm3, phi3, olmo2, nanochat, gemma3,
)  # fmt: skip
ARCHITECTURES = {each.CONFIG.MODEL_TYPE: each for each in _ALL}  # by that of config.json
# By general.architecture; a file of a Mistral says that it is a Llama
GGUF_ARCHITECTURES = {each.GGUF: each for each in _ALL if each.GGUF and each is not mistral}


def architecture_of(config: ModelConfig) -> Architecture:
    """The module that describes the architecture of a model with this config."""
    return ARCHITECTURES[config.MODEL_TYPE]
