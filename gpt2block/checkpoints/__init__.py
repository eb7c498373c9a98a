"""Checkpoints of GPT-2 (Hugging Face, PyTorch, nanoGPT, llm.c) and of Llama (Hugging Face).

`Checkpoint.open` opens a checkpoint; `save_pretrained` writes one that `transformers` loads, and
`save_gguf` one that llama.cpp loads.
"""

from gpt2block.checkpoints.checkpoint import BUNDLED, BUNDLED_NAMES, Checkpoint
from gpt2block.checkpoints.gguf_saving import save_gguf
from gpt2block.checkpoints.saving import TensorSource, save_pretrained
from gpt2block.checkpoints.stored import Stored

__all__ = [
    "BUNDLED",
    "BUNDLED_NAMES",
    "Checkpoint",
    "Stored",
    "TensorSource",
    "save_gguf",
    "save_pretrained",
]
