"""Weights as they are stored for products: matrices of every dtype, blocks, whole models."""
