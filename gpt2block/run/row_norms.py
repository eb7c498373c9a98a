"""Euclidean norms of the rows of an FP8 matrix, which bound its products."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import CudaArray
from gpt2block.cuda.kernels import launch
from gpt2block.ops.to_fp8 import NORMS_FILE
from gpt2block.weights.matrix import WeightMatrix, on_host

BLOCK = 256
MARGIN = 1.01  # for what float16 activations and float32 sums are rounded by


def row_norms(w: WeightMatrix, gamma: CudaArray) -> NDArray[np.float64]:
    """Upper bounds of the norms of w's rows (N, K), with each column multiplied by gamma (K,).

    w: FP8 on the GPU, layout "NK", K a multiple of 4. The stored numbers count, with their scales.
    """
    squares = cupy.empty(w.N, "float32")
    args = (w.data, gamma, squares, w.K)
    launch(NORMS_FILE, "row_norms", (w.N,), (BLOCK,), args, weights=w.dtype).run()
    norms: NDArray[np.float64] = MARGIN * np.sqrt(on_host(squares).astype(np.float64))
    return norms if w.scale is None else norms * on_host(w.scale)
