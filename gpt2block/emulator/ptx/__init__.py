"""Run the PTX of CUDA kernels on the CPU, with checks."""
