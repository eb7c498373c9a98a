"""Read checkpoints of Hugging Face, PyTorch, nanoGPT and llama.cpp (GGUF), and write them.

`Checkpoint.open` opens a checkpoint; `save_pretrained` writes a checkpoint that `transformers`
loads, and `save_gguf` writes a file that llama.cpp loads.
"""

from gpt2block.files.checkpoints.checkpoint import BUNDLED, BUNDLED_NAMES, Checkpoint
from gpt2block.files.checkpoints.gguf_saving import save_gguf
from gpt2block.files.checkpoints.saving import TensorSource, save_pretrained
from gpt2block.files.checkpoints.stored import Stored

__all__ = [
    "BUNDLED",
    "BUNDLED_NAMES",
    "Checkpoint",
    "Stored",
    "TensorSource",
    "save_gguf",
    "save_pretrained",
]
