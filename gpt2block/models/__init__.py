"""Models: their sizes and architectures, and their weights in the formats in which they are stored.

Imports `gpt2block.cuda` and the checks of arguments; every room above may import it.
"""
