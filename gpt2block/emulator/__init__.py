"""CUDA kernels on the CPU, for tests: the shipped sources, compiled by g++ under sanitizers."""

from gpt2block.emulator.loader import ORDERS, ShimError, Source, compile_kernel_file, missing, run

__all__ = ["ORDERS", "ShimError", "Source", "compile_kernel_file", "missing", "run"]
