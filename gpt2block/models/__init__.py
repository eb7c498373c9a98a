"""What a model is: its sizes, its architecture, and its weights in their stored formats.

Imports NumPy, `gpt2block.cuda` and `gpt2block.reference`; every room above may import it.
"""
