"""`HiLoMatrix`: matrices for products of float32 accuracy on half-precision tensor cores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2block.checks import check_integer, check_span, is_plain, real
from gpt2block.cuda import cupy, is_array
from gpt2block.cuda.arrays import Composite, CudaArray, check, contiguous
from gpt2block.errors import InputError, shown
from gpt2block.models.number_formats import SMALLEST_SCALE, hi_lo, joined
from gpt2block.models.weights import conversions
from gpt2block.models.weights.matrix import check_together, kind, on_host

LARGEST_BOUND = 2.0**127  # largest magnitude for which `scale_for` has a scale


@dataclass(frozen=True, eq=False)
class HiLoMatrix(Composite):
    """A matrix of float32 numbers (..., K), stored as (hi + lo 2^-11) scale, with a scale per row.

    parts: (2, rows, K), hi and lo in float16. scale: (rows,), float32 powers of two. Both are NumPy
    or CuPy arrays, C-contiguous. shape: (..., K), where the product of the leading axes is rows.
    `hi_lo` defines the parts: they keep 22 significant bits of each number, or its
    bits above 2^-50 times the largest number in the row. one_scale: the scale of all rows if it was
    chosen before the numbers were known, as in `empty`; else None.

    The arrays are not copied. Scales in device memory are not checked. Raises InputError for arrays
    that do not match.
    """

    PARTS = (".parts", "parts"), (".scale", "scale")

    parts: Any
    scale: Any
    shape: tuple[int, ...]
    one_scale: float | None = None

    def __post_init__(self) -> None:
        rows, K = _rows("shape", self.shape)
        for name, array, shape, dtype in (
            ("parts", self.parts, (2, rows, K), "float16"),
            ("scale", self.scale, (rows,), "float32"),
        ):
            if not is_plain(array) and not is_array(array):
                raise InputError(f"{name}: expected a NumPy or CuPy array, got {kind(array)}")
            if array.shape != shape or array.dtype.name != dtype:
                raise InputError(
                    f"{name}: expected {dtype} {shape} for a matrix {tuple(self.shape)}, "
                    f"got {array.dtype} {array.shape}"
                )
            if not array.flags.c_contiguous:
                raise InputError(f"{name}: expected a C-contiguous array")
        check_together(self.scale, self.parts, "parts", "is")
        if is_array(self.parts):
            return
        wrong = (np.frexp(self.scale)[0] != 0.5) | (self.scale < SMALLEST_SCALE)
        if wrong.any():
            n = int(np.flatnonzero(wrong)[0])
            raise InputError(
                f"scale: expected powers of two from 2^-126 on, got {self.scale[n]} at {n}"
            )

    @classmethod
    def from_float32(cls, x: Any) -> HiLoMatrix:
        """Return a float32 array (..., K) as a HiLoMatrix.

        A NumPy array is converted on the host, a CuPy array on the GPU; both conversions give equal
        parts and scales. Raises InputError.
        """
        if is_array(x):
            (x,) = contiguous(x)
            check("x", x)
            conversions.check_sizes("x", _rows("x", x.shape), conversions.LARGEST_OPERAND)
            matrix = cls.empty(x.shape)
            conversions.hi_lo(x, matrix.parts, matrix.scale).run()
            return matrix
        if not is_plain(x):
            raise InputError(f"x: expected a NumPy or CuPy array, got {kind(x)}")
        if x.dtype != np.float32:
            raise InputError(f"x: expected float32, got {x.dtype}: use .astype('float32')")
        _rows("x", x.shape)
        return cls(*hi_lo(x), x.shape)

    @classmethod
    def empty(
        cls, shape: tuple[int, ...], bound: float | None = None, parts: CudaArray | None = None
    ) -> HiLoMatrix:
        """Allocate a matrix on the current GPU for a kernel to write.

        bound: the largest magnitude of the result, which determines one scale for all rows; None
        if the kernel computes the scales. parts: an array to reuse. Raises InputError.
        """
        rows, K = _rows("shape", shape)
        if parts is None:
            parts = cupy.empty((2, rows, K), dtype="float16")
        if bound is None:
            return cls(parts, cupy.empty((rows,), dtype="float32"), shape)
        one = scale_for(bound)
        return cls(parts, cupy.full((rows,), one, dtype="float32"), shape, one)

    def __repr__(self) -> str:
        return f"HiLoMatrix(shape={self.shape}, {kind(self.parts)}, {self.nbytes:,} bytes)"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the parts and the scales."""
        return int(self.parts.nbytes) + int(self.scale.nbytes)

    def columns(self, begin: int, end: int) -> HiLoMatrix:
        """Return the share with outputs (rows) begin … end - 1 of weights (N, K), a copy."""
        check_span(begin, end, len(self.scale))
        parts, scale = self.parts[:, begin:end].copy(), self.scale[begin:end].copy()
        return HiLoMatrix(parts, scale, parts.shape[1:], self.one_scale)

    def joined(self) -> Any:
        """Return the numbers as a float32 array (..., K), NumPy or CuPy."""
        return joined(self.parts, self.scale).reshape(self.shape)

    def get(self) -> NDArray[np.float32]:
        """Return the numbers as a NumPy array."""
        return on_host(self.joined())


def scale_for(bound: float) -> float:
    """Return the scale for rows of magnitudes up to `bound`: bound / scale is at most 2^15.

    Raises InputError unless bound is a number from 0 to 2^127.
    """
    if real(bound) is None or not 0 <= bound <= LARGEST_BOUND:
        raise InputError(f"bound: expected a magnitude from 0 to 2^127, got {shown(bound)}")
    mantissa, exponent = math.frexp(bound)
    whole = exponent - (mantissa == 0.5)  # frexp returns 2^n as 0.5 · 2^(n + 1)
    return max(2.0 ** (whole - 15), SMALLEST_SCALE) if bound else 1.0


def _rows(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (number of rows, K) for a shape (..., K). Raises InputError for an invalid shape."""
    expected = "(..., K) with at least one element"
    if not isinstance(shape, tuple) or not shape:
        raise InputError(f"{name}: expected {expected}, got {shown(shape)}")
    sizes = [check_integer(name, size, 1, math.inf, expected) for size in shape]
    return math.prod(sizes[:-1]), sizes[-1]
