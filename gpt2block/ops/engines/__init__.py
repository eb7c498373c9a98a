"""Groups of kernels that compute matrix products and attention, and the choice among them.

Only the modules of `gpt2block.ops` import this folder.
"""
