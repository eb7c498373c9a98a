"""Forward passes by CUDA kernels, on one GPU or several."""
