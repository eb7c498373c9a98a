"""Engines of models: passes on NumPy and CUDA, batching, grammars, chats, and views of a pass.

Imports `gpt2block.ops` and `gpt2block.files`; `gpt2block.block`, `gpt2block.model` and the rooms
above them may import it.
"""
