"""LayerNorm and GELU in one kernel: its variants, and the launch of each."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

import numpy as np

from gpt2block.operations._rows import THREADS, share
from gpt2block.operations._types import Geometry, Inputs, Operation, Sizes, Variant

FILE = "layernorm/gelu.cu"
BLOCKS = (32, 64, 128, 256, 512, 1024)


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    x = rng.standard_normal((sizes["N"], sizes["C"]), dtype=np.float32)
    return (x + np.float32(0.5),)


OPERATION = Operation(
    name="layernorm_gelu",
    document="fused LayerNorm and GELU",
    idea="y = GELU((x - mean) · rstd · γ + β), tanh GELU",
    sizes={"N": 1024, "C": 1024},
    variants=(
        Variant(
            "baseline",
            FILE,
            ("layernorm_gelu_baseline",),
            "a thread an element, each adds up its whole row",
            BLOCKS,
        ),
        Variant(
            "optimized",
            FILE,
            ("layernorm_gelu_optimized",),
            "a block a row, sum and sum of squares in one pass, tree over shared memory",
            BLOCKS,
        ),
        Variant(
            "rows",
            FILE,
            ("layernorm_gelu_rows",),
            "rows in registers, 16-byte loads, shuffles and at most one barrier; γ and β",
            tuple(block for block in BLOCKS if block <= THREADS),
            source="beyond the documents",
        ),
    ),
    make=_make,
    traffic=lambda sizes: 8 * sizes["N"] * sizes["C"],
    flops=lambda sizes: 20 * sizes["N"] * sizes["C"],
    bound="memory",
    attrs={"eps": 1e-5},
)


@lru_cache(maxsize=1024)
def geometry(
    variant: Variant, rows: int, hidden: int, width: int, sms: int, block: int | None, affine: bool
) -> Geometry:
    """For `rows` of `hidden` values, `width` a load (4 or 1), on a GPU with `sms` multiprocessors.

    `block` None: the best there is; for the variant `rows` it is the threads that share a row.
    """
    (kernel,) = variant.kernels
    if variant.name == "rows":
        shape = share(rows, hidden, width, sms, block)
        defines = (
            ("LG_HIDDEN", hidden),
            ("LG_WIDTH", width),
            ("LG_THREADS", shape.threads),
            ("LG_ROWS", shape.rows),
            ("LG_AFFINE", int(affine)),
        )
        return Geometry(kernel, (shape.grid,), (shape.block,), defines=defines)
    block = block or variant.block
    if variant.name == "optimized":
        return Geometry(kernel, (rows,), (block,), shared=2 * 4 * block)
    return Geometry(kernel, (ceil(rows * hidden / block),), (block,))
