"""Files of models: checkpoints, tokenizers, weights as arrays, and the bundled models.

Imports `gpt2block.models`; `gpt2block.engine` and the rooms above it may import it.
"""
