"""The CUDA sources of gpt2block, one operation a file, as package data."""
