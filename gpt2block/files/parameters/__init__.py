"""Weights of blocks and models as NumPy arrays, for each architecture."""
