"""Engines that run forward passes, with NumPy on the CPU or with CUDA kernels on a GPU."""
