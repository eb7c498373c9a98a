"""Measure the GB/s of a copy and the TFLOP/s of cuBLAS, as upper bounds for rates of kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import nan

import numpy as np

from gpt2block.cuda import cupy, timing

SIZE = 8192  # rows and columns of the matrices that cuBLAS multiplies
COPIED = 1 << 30  # bytes copied in device memory
HOST_COPIED = 1 << 27  # bytes copied in host memory: more than the caches of a CPU hold
TF32 = "tf32"
ARITHMETICS = ("float32", TF32, "float16", "bfloat16")


@dataclass(frozen=True)
class Ceilings:
    """GB/s of a copy within device memory, and TFLOP/s of cuBLAS for each dtype and for TF32.

    The copy's rate counts bytes read and bytes written. cuBLAS multiplies square matrices;
    arithmetic "float32" does not use TF32. A cuBLAS rate is NaN if CuPy finds no cuBLAS.
    """

    copy_gb_s: float
    tflop_s: Mapping[str, float]


def measured(arithmetics: Iterable[str] = ARITHMETICS) -> Ceilings:
    """Measure the copy and cuBLAS rates of the current device, which takes a few seconds."""
    return Ceilings(copy_gb_s(), {name: _cublas_tflop_s(name) for name in arithmetics})


def copy_gb_s(nbytes: int = COPIED) -> float:
    """Measure the GB/s of a copy of `nbytes` bytes within the memory of the current device."""
    a, b = cupy.zeros(nbytes, "uint8"), cupy.zeros(nbytes, "uint8")
    ms = timing.interleaved_ms({"": lambda: b.data.copy_from_device_async(a.data, nbytes)})[""]
    return 2e-6 * nbytes / ms


def host_copy_gb_s() -> float:
    """Measure the GB/s of a copy of HOST_COPIED bytes within host memory by one thread."""
    a, b = np.ones(HOST_COPIED, np.uint8), np.ones(HOST_COPIED, np.uint8)
    ms = timing.interleaved_host_ms({"": lambda: np.copyto(b, a)})[""]
    return 2e-6 * HOST_COPIED / ms


def _cublas_tflop_s(arithmetic: str) -> float:
    """Return cuBLAS's TFLOP/s; NaN if CuPy finds no cuBLAS or cuBLAS does not support the dtype."""
    host = np.random.default_rng(0).standard_normal((SIZE, SIZE), dtype=np.float32)
    matrix = cupy.asarray(host.astype("float32" if arithmetic == TF32 else arithmetic))
    out = cupy.empty_like(matrix)
    linalg = cupy._core._routines_linalg
    before = linalg.get_compute_type(np.float32)
    if arithmetic == TF32:
        linalg.set_compute_type(np.float32, linalg.COMPUTE_TYPE_TF32)
    try:
        ms = timing.interleaved_ms({"": lambda: cupy.dot(matrix, matrix, out=out)})[""]
    except (ImportError, TypeError, ValueError):
        return nan
    finally:
        linalg.set_compute_type(np.float32, before)
    return 2e-9 * SIZE**3 / ms
