"""To FP8, and the largest magnitudes that scales are made of: their variants and launches."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

import numpy as np

from gpt2block.operations._types import Geometry, Inputs, Operation, Sizes, Variant
from gpt2block.weights.matrix import LAYOUTS

FILE = "fp8/convert.cu"
BLOCKS = (64, 128, 256, 512, 1024)
ELEMENTS = 16  # of a thread, all on their way at once
LANES = 4  # threads side by side in a row of absmax_kn_kernel
ABSMAX_BLOCK = 512


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    return (rng.standard_normal((sizes["K"], sizes["N"]), dtype=np.float32) + np.float32(0.5),)


OPERATION = Operation(
    name="to_fp8",
    document="Llama operations",
    idea="x as a byte, E5M2 or E4M3FN, rounded to nearest even",
    sizes={"K": 4096, "N": 11008},
    variants=(
        Variant("element", FILE, ("to_fp8_kernel",), "a thread an element", BLOCKS),
        Variant(
            "vectors",
            FILE,
            ("to_fp8_kernel",),
            "a thread 16 elements, 16-byte loads, all of them on their way first",
            BLOCKS,
        ),
    ),
    make=_make,
    traffic=lambda s: (s["itemsize"] + 1) * s["K"] * s["N"],
    flops=lambda s: s["K"] * s["N"],
    bound="memory",
    attrs={"format": "float8_e5m2"},
    beside=(
        Variant(
            "absmax",
            FILE,
            ("absmax_kn_kernel", "absmax_nk_kernel"),
            "the largest magnitude of each output channel, for scales; finds infinity and NaN",
        ),
    ),
    dtypes=("float32", "float16", "bfloat16"),
)


def _width(itemsize: int, row: int, alignment: int) -> int:
    """The most elements a load, a power of two, 16 bytes at most, that divides both."""
    width = 16 // itemsize
    while row % width or alignment % width:
        width //= 2
    return width


@lru_cache(maxsize=1024)
def geometry(
    variant: Variant,
    size: int,
    itemsize: int,
    alignment: int,
    row: int | None = None,
    layout: str = "KN",
    saturate: bool = True,
    block: int | None = None,
) -> Geometry:
    """For `size` elements, aligned to `alignment` of them; with scales, in rows of `row`."""
    block = block or variant.block
    width, vectors = 1, 1
    if variant.name == "vectors":
        width = _width(itemsize, row or 0, alignment)  # without rows the kernel sees to the end
        vectors = ELEMENTS // width
    defines = (
        ("FP8_WIDTH", width),
        ("FP8_VECTORS", vectors),
        ("FP8_SATURATE", int(saturate)),
        ("FP8_SCALE", 0 if row is None else 1 + LAYOUTS.index(layout)),
    )
    grid = (ceil(size / (block * width * vectors)),)
    return Geometry("to_fp8_kernel", grid, (block,), defines=defines)


def absmax(layout: str, rows: int, columns: int, itemsize: int, alignment: int) -> Geometry:
    """For a matrix as it lies in memory: rows are K of layout "KN", N of "NK"."""
    width = _width(itemsize, columns, alignment)
    defines = (("FP8_WIDTH", width), ("FP8_BLOCK", ABSMAX_BLOCK), ("FP8_LANES", LANES))
    if layout == "KN":
        kernel, grid = "absmax_kn_kernel", (ceil(columns / (LANES * width)),)
    else:
        kernel, grid = "absmax_nk_kernel", (rows,)
    return Geometry(kernel, grid, (ABSMAX_BLOCK,), defines=defines)
