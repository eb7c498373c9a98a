"""Engines, which run passes: with NumPy on the CPU, with CUDA kernels on a GPU."""
