"""RMSNorm over rows: its variant, and the launch."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

import numpy as np

from gpt2block.operations._rows import THREADS, VALUES, share
from gpt2block.operations._types import Geometry, Inputs, Operation, Sizes, Variant

FILE = "llama/rmsnorm.cu"
BLOCKS = (32, 64, 128, 256, 512)
LONGEST_IN_REGISTERS = VALUES * THREADS
MOST_THREADS = 1024  # of a longer row


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    M, C = sizes["M"], sizes["C"]
    normal = (rng.standard_normal(shape, dtype=np.float32) for shape in ((M, C), C))
    return tuple(array + np.float32(0.5) for array in normal)


OPERATION = Operation(
    name="rmsnorm",
    document="Llama operations",
    idea="x / sqrt(mean(x²) + eps) · weight over each row",
    sizes={"M": 16, "C": 4096},
    variants=(
        Variant(
            "rows",
            FILE,
            ("rmsnorm_rows",),
            "rows in registers, x read once, the weight asked for with it; at most one barrier",
            BLOCKS,
        ),
    ),
    make=_make,
    traffic=lambda s: s["itemsize"] * (2 * s["M"] * s["C"] + s["C"]),
    flops=lambda s: 4 * s["M"] * s["C"],
    bound="memory",
    attrs={"eps": 1e-6},
    dtypes=("float16", "bfloat16", "float32"),
)


@lru_cache(maxsize=1024)
def geometry(
    variant: Variant,
    rows: int,
    C: int,
    width: int,
    sms: int,
    block: int | None = None,
    residual: bool = False,
) -> Geometry:
    """For `rows` of C channels, `width` a load, on a GPU with `sms` multiprocessors.

    `block`: the threads that share a row; None: the best there is. residual: whether there is one
    to be added first. Raises InputError when a row
    does not fit in the registers of so few threads.
    """
    (kernel,) = variant.kernels
    if C > LONGEST_IN_REGISTERS:
        threads, held, together = block or MOST_THREADS, 0, 1
    else:
        shape = share(rows, C, width, sms, block)
        threads, held, together = shape.threads, shape.held, shape.rows
    defines = (
        ("RMS_C", C),
        ("RMS_WIDTH", width),
        ("RMS_THREADS", threads),
        ("RMS_VECTORS", held),
        ("RMS_ROWS", together),
        ("RMS_RESIDUAL", int(residual)),
    )
    return Geometry(kernel, (ceil(rows / together),), (threads * together,), defines=defines)
