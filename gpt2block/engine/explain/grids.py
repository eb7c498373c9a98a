"""Convert tensors to small grids of numbers for an HTML page: downsample, encode as base64."""

from __future__ import annotations

import math
from base64 import b64encode

import numpy as np
from numpy.typing import NDArray

from gpt2block.ops.workload import largest

MAX_COLUMNS = 256
Array = NDArray[np.floating]


def grid_shape(rows: int, columns: int, cells: int) -> tuple[int, int]:
    """Return the shape of a grid that shows a tensor (rows, columns) in at most `cells` cells.

    A small tensor keeps its shape. A larger tensor gets twice as many columns as rows, or keeps all
    rows if they are few.
    """
    kept = min(rows, max(1, math.isqrt(cells // 2)))
    return kept, min(columns, MAX_COLUMNS, max(1, cells // kept))


def starts(size: int, parts: int) -> NDArray[np.int64]:
    """Divide `size` indices into `parts`; return each part's first index ⌊part · size / parts⌋."""
    return np.arange(parts) * size // parts


def ends(size: int, parts: int) -> NDArray[np.int64]:
    """Divide `size` indices into `parts`; return each part's last index; the last is size - 1."""
    return (np.arange(parts) + 1) * size // parts - 1


def downsampled(tensor: Array, rows: int, columns: int) -> Array:
    """Reduce a tensor to a grid: a cell is the signed value of largest magnitude in its area.

    tensor (R, C) → (rows, columns), with rows ≤ R and columns ≤ C. A cell is NaN if its area
    contains a NaN.
    """
    if tensor.shape == (rows, columns):
        return tensor
    at = starts(tensor.shape[0], rows), starts(tensor.shape[1], columns)

    def reduced(function: np.ufunc) -> Array:
        return function.reduceat(function.reduceat(tensor, at[1], axis=1), at[0], axis=0)

    high, low = reduced(np.maximum), reduced(np.minimum)
    return np.where(high >= -low, high, low)


def grid(tensor: Array, cells: int) -> dict[str, object]:
    """Downsample a tensor (R, C) to a grid of at most `cells` cells, and return its encoding."""
    rows, columns = grid_shape(tensor.shape[0], tensor.shape[1], cells)
    return {"rows": rows, "columns": columns, **encoded(downsampled(tensor, rows, columns))}


def encoded(values: Array) -> dict[str, object]:
    """Encode values in row-major order as base64 of little-endian float16 multiples of `scale`.

    The scale is a power of two; the largest finite magnitude divided by it is in [2^14, 2^15). A
    value is rounded to 11 significant bits. A value below 2^-29 of the largest magnitude is rounded
    to a multiple of 2^-39 of it. float16 and bfloat16 numbers above that limit are exact.
    """
    wide = values.astype(np.float64)
    most = largest(wide)
    scale = math.ldexp(1.0, math.frexp(most)[1] - 15) if most else 0.0
    narrow = (wide / scale if scale else wide).astype("<f2")
    return {"scale": scale, "values": b64encode(narrow.tobytes()).decode()}


def exact(values: Array) -> dict[str, str]:
    """Encode values in row-major order as base64 of little-endian float32."""
    return {"values": b64encode(values.astype("<f4").tobytes()).decode()}
