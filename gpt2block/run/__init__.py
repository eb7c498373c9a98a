"""Engines: classes that run forward passes, with NumPy on the CPU or CUDA kernels on a GPU."""
