"""FP8 numbers and two float16 parts in NumPy: conversions, as a part of the module `reference`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gpt2block.checks import check_choice
from gpt2block.contract import takes
from gpt2block.errors import InputError

Array = NDArray[np.floating]

SMALLEST_SCALE = 2.0**-126  # smallest scale in `hi_lo`; its inverse is also a float32


class _Fp8(NamedTuple):
    """An FP8 format: a byte has a sign, an exponent and `fraction` fraction bits."""

    dtype: type[np.generic]
    fraction: int
    bias: int  # bias of the exponent
    largest: int  # byte of the largest finite number; byte + 1 is infinity or NaN
    nan: int  # byte of NaN


FP8_FORMATS: Mapping[str, _Fp8] = {
    # largest: 57344; 0x7c: infinity
    "float8_e5m2": _Fp8(ml_dtypes.float8_e5m2, 2, 15, 0x7B, 0x7E),
    # largest: 448; 0x7f: the only NaN, no infinity
    "float8_e4m3fn": _Fp8(ml_dtypes.float8_e4m3fn, 3, 7, 0x7E, 0x7F),
}


def _fp8_format(name: str) -> _Fp8:
    check_choice("format", name, FP8_FORMATS)
    return FP8_FORMATS[name]


@takes("x any ...; scale? f32 N -> out u8 ...")
def to_fp8(
    x: Array,
    format: str = "float8_e5m2",
    saturate: bool = True,
    scale: Array | None = None,
    layout: str = "KN",
) -> NDArray[np.uint8]:
    """Convert x, of any float dtype, to FP8 bytes (uint8), rounded to nearest even.

    With `saturate`, numbers beyond the largest number, ±57344 (E5M2) or ±448 (E4M3FN), including
    infinity, become ± the largest number; else infinity (E5M2) or NaN (E4M3FN). NaN stays NaN, with
    its sign. scale (N,), float32: one number for each output channel of a matrix (K, N) or, with
    layout "NK", (N, K); then x / scale, rounded to float32, is converted.
    Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022).
    """
    fp8 = _fp8_format(format)
    wide = x if x.dtype == np.float64 else x.astype(np.float32)
    check_choice("layout", layout, ("KN", "NK"))
    if scale is not None:
        outputs = x.shape[layout.index("N")] if x.ndim == 2 else None
        if scale.shape != (outputs,):
            raise InputError(
                f"scale: expected a number for each output of a matrix with layout {layout}, "
                f"got {scale.shape} for {x.shape}"
            )
        wide = wide / (scale if layout == "KN" else scale[:, None])
    lowest = 1 - fp8.bias  # exponent of the smallest normal number; subnormals are equally spaced
    beyond = 2 * _fp8_numbers(format)[fp8.largest]
    magnitude = np.fmin(np.abs(wide), beyond)
    e = np.frexp(np.maximum(magnitude, 2.0**lowest))[1] - 1  # 2^e <= magnitude < 2^(e+1)
    # With F fraction bits, FP8 numbers from 2^e to 2^(e+1) are multiples of 2^(e-F). Division by a
    # power of two is exact, and rint rounds ties to even. The leading bit 2^F of `steps`
    # adds one to the exponent field of the byte, as a carry from rounding does.
    steps = np.rint(np.ldexp(magnitude, fp8.fraction - e)).astype(np.int32)
    code = (e - lowest << fp8.fraction) + steps
    code = np.minimum(code, fp8.largest if saturate else fp8.largest + 1)
    code = np.where(np.isnan(wide), fp8.nan, code)
    return np.where(np.signbit(wide), code | 0x80, code).astype(np.uint8)


@takes("x u8 ...")
def from_fp8(x: NDArray[np.uint8], format: str = "float8_e5m2") -> NDArray[np.float32]:
    """Convert FP8 bytes (uint8) to float32, exactly."""
    values: NDArray[np.float32] = _fp8_numbers(format)[x]
    return values


@cache
def _fp8_numbers(format: str) -> NDArray[np.float32]:
    """Return the numbers that the bytes 0x00 … 0xff represent."""
    return np.arange(256, dtype=np.uint8).view(_fp8_format(format).dtype).astype(np.float32)


@takes("x float32 ... K -> out hi_lo ... K")
def hi_lo(x: Array) -> tuple[Array, Array]:
    """Split each row of float32 numbers into two float16 parts: x = (hi + lo 2^-11) scale.

    x (..., K) → parts (2, rows, K), hi = x / scale and lo = (x / scale - hi) 2^11, both rounded to
    float16; scale (rows,), float32: the power of two, at least 2^-126, for which the row's largest
    finite magnitude divided by scale is in 2^14 … 2^15. A row of zeros has scale 1. Subnormal
    numbers count as zero, as on the GPU. lo is 0 if hi is not finite.
    Source: Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores while
    surpassing the FP32 theoretical peak performance" (2022).
    """
    rows = x.reshape(-1, x.shape[-1])
    magnitude = np.abs(rows)
    rows = np.where(magnitude < np.finfo(np.float32).tiny, np.copysign(0, rows), rows)
    largest = np.where(np.isfinite(rows), np.abs(rows), 0).max(axis=-1)
    scale = np.ldexp(np.float32(1), np.frexp(largest)[1] - 15)
    scale = np.where(largest > 0, np.maximum(scale, SMALLEST_SCALE), 1).astype(np.float32)
    with np.errstate(invalid="ignore"):
        scaled = (rows * (1 / scale)[:, None]).astype(np.float32)
        hi = scaled.astype(np.float16)
        lo = ((scaled - hi.astype(np.float32)) * 2048).astype(np.float16)
    return np.stack([hi, np.where(np.isfinite(hi), lo, np.float16(0))]), scale


def joined(parts: Array, scale: Array) -> Array:
    """Invert `hi_lo`: return the float32 numbers (rows, K) that the parts represent exactly."""
    both = ("parts", parts, "float16", 3), ("scale", scale, "float32", 1)
    for name, array, dtype, ndim in both:
        # NumPy and CuPy arrays both have the attributes shape and dtype.
        shape, kind = getattr(array, "shape", ()), getattr(array, "dtype", None)
        masked = isinstance(array, np.ma.MaskedArray)
        if masked or kind != dtype or len(shape) != ndim:
            raise InputError(f"{name}: expected {dtype} of {ndim} axes, got {kind} {shape}")
    if parts.shape[:2] != (2, len(scale)):
        raise InputError(f"parts: expected (2, {len(scale)}, K), as scale has, got {parts.shape}")
    hi, lo = parts[0].astype("float32"), parts[1].astype("float32")
    result: Array = (hi + lo * np.float32(2**-11)) * scale[:, None]
    return result
