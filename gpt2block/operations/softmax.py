"""Softmax over rows: its variants, and the launch of each."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

import numpy as np

from gpt2block.operations._rows import THREADS, VALUES, share
from gpt2block.operations._types import Geometry, Inputs, Operation, Sizes, Variant

FILE = "softmax/ladder.cu"
BLOCKS = (32, 64, 128, 256, 512, 1024)
LONGEST_IN_REGISTERS = VALUES * THREADS


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    shape = (sizes["B"], sizes["NH"], sizes["T"], sizes["T"])
    return (rng.standard_normal(shape, dtype=np.float32) + np.float32(0.5),)


def _scores(sizes: Sizes) -> int:
    return sizes["B"] * sizes["NH"] * sizes["T"] ** 2


OPERATION = Operation(
    name="softmax",
    document="named with the LayerNorm kernels",
    idea="y = exp(x - max) / Σ exp(x - max) over each row",
    sizes={"B": 2, "NH": 12, "T": 1024},
    variants=(
        Variant(
            "three_pass",
            FILE,
            ("softmax_forward_kernel1",),
            "a block a row: maximum, sum, quotient, each a pass over x",
            BLOCKS,
        ),
        Variant(
            "online_warp",
            FILE,
            ("softmax_forward_kernel2",),
            "a warp a row: maximum and sum in one pass",
            BLOCKS,
        ),
        Variant(
            "online_block",
            FILE,
            ("softmax_forward_kernel3",),
            "a block a row, 16-byte loads: rows of any length",
            BLOCKS,
        ),
        Variant(
            "rows",
            FILE,
            ("softmax_forward_kernel4",),
            "rows in registers: x is read once",
            tuple(block for block in BLOCKS if block <= THREADS),
        ),
    ),
    make=_make,
    traffic=lambda sizes: 8 * _scores(sizes),
    flops=lambda sizes: 5 * _scores(sizes),
    bound="memory",
    attrs={},
)


@lru_cache(maxsize=1024)
def geometry(
    variant: Variant, rows: int, n: int, width: int, sms: int, block: int | None, causal: bool
) -> Geometry:
    """For `rows` of n values, `width` a load (4 or 1), on a GPU with `sms` multiprocessors.

    `block` None: the best there is; for the variant `rows` it is the threads that share a row.
    """
    (kernel,) = variant.kernels
    mask = ("SOFTMAX_CAUSAL", int(causal))
    if variant.name == "rows":
        shape = share(rows, n, width, sms, block)
        held = 1 << (shape.held - 1).bit_length()  # few kernels for many lengths
        defines = (
            mask,
            ("SOFTMAX_WIDTH", width),
            ("SOFTMAX_THREADS", shape.threads),
            ("SOFTMAX_HELD", held),
            ("SOFTMAX_ROWS", shape.rows),
        )
        return Geometry(kernel, (shape.grid,), (shape.block,), defines=defines)
    block = block or variant.block
    if variant.name == "three_pass":
        return Geometry(kernel, (rows,), (block,), defines=(mask, ("SOFTMAX_BLOCK", block)))
    if variant.name == "online_warp":
        return Geometry(kernel, (ceil(rows / (block // 32)),), (block,), defines=(mask,))
    return Geometry(kernel, (rows,), (block,), defines=(mask, ("SOFTMAX_WIDTH", width)))
