"""Tensors as small grids of numbers for a page: downsampled, and encoded as base64."""

from __future__ import annotations

import math
from base64 import b64encode
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_COLUMNS = 256
Array = NDArray[np.floating[Any]]


def grid_shape(rows: int, columns: int, cells: int) -> tuple[int, int]:
    """Rows and columns of a grid of at most `cells` cells for a tensor (rows, columns).

    A tensor that fits keeps its shape; one that does not keeps twice as many columns as rows, or
    all of its rows where they are few.
    """
    kept = min(rows, max(1, math.isqrt(cells // 2)))
    return kept, min(columns, MOST_COLUMNS, max(1, cells // kept))


def starts(size: int, parts: int) -> NDArray[np.int64]:
    """The first index of each of `parts` parts of `size` indices: ⌊part · size / parts⌋."""
    return np.arange(parts) * size // parts


def ends(size: int, parts: int) -> NDArray[np.int64]:
    """The last index of each of these parts, so that `size - 1` is among them."""
    return (np.arange(parts) + 1) * size // parts - 1


def downsampled(tensor: Array, rows: int, columns: int) -> Array:
    """The value of largest magnitude, with its sign, in each cell's area; NaN if one is NaN.

    tensor (R, C) → (rows, columns), with rows ≤ R and columns ≤ C.
    """
    if tensor.shape == (rows, columns):
        return tensor
    at = starts(tensor.shape[0], rows), starts(tensor.shape[1], columns)

    def reduced(function: np.ufunc) -> Array:
        found: Array = function.reduceat(function.reduceat(tensor, at[1], axis=1), at[0], axis=0)
        return found

    high, low = reduced(np.maximum), reduced(np.minimum)
    return np.where(high >= -low, high, low)


def grid(tensor: Array, cells: int) -> dict[str, Any]:
    """A tensor (R, C) as a grid of at most `cells` cells."""
    rows, columns = grid_shape(tensor.shape[0], tensor.shape[1], cells)
    return {"rows": rows, "columns": columns, **encoded(downsampled(tensor, rows, columns))}


def encoded(values: Array) -> dict[str, Any]:
    """Values in row-major order, as base64 of little-endian float16 multiples of `scale`.

    The scale is a power of two with which the largest finite magnitude becomes at least 2^14, less
    than 2^15. A value is rounded to 11 bits; one that is smaller than 2^-29 of the largest, to
    2^-39 of it. float16 and bfloat16 numbers in this range stay as they are.
    """
    wide = values.astype(np.float64)
    largest = float(np.abs(wide).max(where=np.isfinite(wide), initial=0.0))
    scale = math.ldexp(1.0, math.frexp(largest)[1] - 15) if largest else 0.0
    narrow = (wide / scale if scale else wide).astype("<f2")
    return {"scale": scale, "values": b64encode(narrow.tobytes()).decode()}


def exact(values: Array) -> dict[str, Any]:
    """Values in row-major order, as base64 of little-endian float32."""
    return {"values": b64encode(values.astype("<f4").tobytes()).decode()}
