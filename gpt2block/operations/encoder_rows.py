"""Token plus position embedding of rows with a position each: its variant, and the launch."""

from __future__ import annotations

from math import ceil

import numpy as np

from gpt2block.operations._types import Geometry, Inputs, Operation, Sizes, Variant

MOST_THREADS = 256


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    N, C = sizes["N"], sizes["C"]
    ids, positions = (rng.integers(sizes[rows], size=N, dtype=np.int32) for rows in ("V", "T"))
    wte, wpe = (
        rng.standard_normal((sizes[rows], C), dtype=np.float32) + np.float32(0.5)
        for rows in ("V", "T")
    )
    return ids, positions, wte, wpe


OPERATION = Operation(
    name="encoder_rows",
    document="beyond the documents",
    idea="out = wte[ids] + wpe[positions], a position a row",
    sizes={"N": 8192, "T": 1024, "C": 768, "V": 50257},
    variants=(
        Variant(
            "rows",
            "embedding/encoder_rows.cu",
            ("encoder_rows",),
            "a block a row, a thread 4 channels; ids and positions in device memory, wte in any "
            "weight dtype",
        ),
    ),
    make=_make,
    traffic=lambda s: 4 * (2 * s["N"] + 2 * s["N"] * s["C"] + s["T"] * s["C"]),
    flops=lambda s: s["N"] * s["C"],
    bound="memory",
    attrs={},
)


def geometry(N: int, C: int, itemsize: int, alignment: int) -> Geometry:
    """For N rows. itemsize: of wte; alignment: in bytes, of the arrays, as 16 bytes of floats."""
    width = 4
    while C % width or 4 * width > alignment:
        width //= 2
    threads = min(32 * ceil(C / (32 * width)), MOST_THREADS)
    return Geometry("encoder_rows", (N,), (threads,), defines=(("ER_WIDTH", width),))
