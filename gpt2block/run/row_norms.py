"""Euclidean norms of the rows of an FP8 matrix, which bound its products."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpt2block.cuda.arrays import CudaArray
from gpt2block.ops import _widened as widened
from gpt2block.weights.matrix import WeightMatrix, on_host

AT_ONCE = 2**23  # weights that are processed together
MARGIN = 1.01  # for what float16 activations and float32 sums are rounded by


def row_norms(w: WeightMatrix, gamma: CudaArray) -> NDArray[np.float64]:
    """Upper bounds of the norms of w's rows (N, K), with each column multiplied by gamma (K,).

    w: FP8 on the GPU, layout "NK". The stored numbers count, with their scales.
    """
    wide = widened.bind(w).run()
    rows = max(1, AT_ONCE // w.K)
    squares = []
    for first in range(0, w.N, rows):
        part = wide[first : first + rows].astype("float32") * gamma
        squares.append(on_host((part * part).sum(axis=1, dtype="float64")))
    norms: NDArray[np.float64] = MARGIN * np.sqrt(np.concatenate(squares))
    return norms if w.scale is None else norms * on_host(w.scale)
