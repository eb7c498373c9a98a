"""Compile and launch CUDA kernels through CuPy: everything that touches the GPU."""
