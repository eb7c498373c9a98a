"""What a GPU does at best, measured in the run whose figures are held against it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import nan

import numpy as np

from gpt2block.bench import measure
from gpt2block.cuda import cupy, timing

SIZE = 8192  # of the square matrices


@dataclass(frozen=True)
class Ceilings:
    """cuBLAS on large square matrices, and a copy from device to device; NaN without cuBLAS."""

    copy_gb_s: float  # bytes read and written
    tflop_s: Mapping[str, float]  # of "float32", "tf32", "float16", "bfloat16"


def ceilings() -> Ceilings:
    """Measured on the current device, in some seconds."""
    known = measure.ceilings()
    rates = {
        "float32": known.fp32_tflop_s,
        "tf32": _product("float32", tf32=True),
        "float16": known.fp16_tflop_s,
        "bfloat16": _product("bfloat16"),
    }
    return Ceilings(known.copy_gb_s, rates)


def _product(dtype: str, tf32: bool = False) -> float:
    """TFLOP/s; NaN where CuPy finds no cuBLAS, or one that does not take the dtype."""
    linalg = cupy._core._routines_linalg
    host = np.random.default_rng(0).standard_normal((SIZE, SIZE), dtype=np.float32)
    m = cupy.asarray(host.astype(dtype))
    out = cupy.empty_like(m)
    before = linalg.get_compute_type(np.float32)
    if tf32:
        linalg.set_compute_type(np.float32, linalg.COMPUTE_TYPE_TF32)
    try:
        ms = timing.interleaved_ms({"": lambda: cupy.dot(m, m, out=out)})[""]
    except (ImportError, TypeError, ValueError):
        return nan
    finally:
        linalg.set_compute_type(np.float32, before)
    return 2e-9 * SIZE**3 / ms
