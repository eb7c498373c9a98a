"""The positional encoder: its variants, and the launch of each."""

from __future__ import annotations

from math import ceil

import numpy as np

from gpt2block.operations._types import Inputs, Operation, Sizes, Variant

FILE = "embedding/encoder.cu"
BLOCKS = (32, 64, 128, 256, 512, 1024)


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    ids = rng.integers(sizes["V"], size=(sizes["B"], sizes["T"]), dtype=np.int32)
    wte, wpe = (
        rng.standard_normal((rows, sizes["C"]), dtype=np.float32) + np.float32(0.5)
        for rows in (sizes["V"], sizes["T"])
    )
    return ids, wte, wpe


def _traffic(sizes: Sizes) -> int:
    """An id, a row of wte and a row of out for each token; wpe once."""
    rows, C = sizes["B"] * sizes["T"], sizes["C"]
    return 4 * (rows + 2 * rows * C + sizes["T"] * C)


OPERATION = Operation(
    name="encoder",
    document="named with the LayerNorm kernels",
    idea="out = wte[ids] + wpe[position]",
    sizes={"B": 8, "T": 1024, "C": 768, "V": 50257},
    variants=(
        Variant("1", FILE, ("encoder_forward_kernel1",), "a thread an element", BLOCKS),
        Variant("2", FILE, ("encoder_forward_kernel2",), "a thread 4 channels", BLOCKS),
        Variant(
            "3",
            FILE,
            ("encoder_forward_kernel3",),
            "a warp a row, several 16-byte loads on their way",
            BLOCKS,
        ),
    ),
    make=_make,
    traffic=_traffic,
    flops=lambda sizes: sizes["B"] * sizes["T"] * sizes["C"],
    bound="memory",
    attrs={},
)


def grid(variant: Variant, rows: int, C: int, block: int) -> tuple[int, ...]:
    """Blocks for `rows` tokens of C channels."""
    if variant.name == "3":
        return (ceil(rows / (block // 32)),)
    return (ceil(rows * (C // 4 if variant.name == "2" else C) / block),)
