"""Rotary position embedding: its variant, and the launch."""

from __future__ import annotations

import math
from functools import lru_cache
from math import ceil

import numpy as np

from gpt2block.operations._types import Geometry, Inputs, Operation, Sizes, Variant

FILE = "llama/rope.cu"
BLOCKS = (32, 64, 128, 256, 512)
FILLED = 256  # threads on an SM: with so many each may take several heads
MOST_POSITIONS = (
    2**20
)  # llama/rotation.cuh: further on its angles would leave its polynomials' range
_HELD = 8  # loads of a thread on their way
_LAST_AXIS = 64  # threads of a block along its third axis: CUDA's limit


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    shape = sizes["T"], sizes["H"], sizes["D"]
    return (rng.standard_normal(shape, dtype=np.float32) + np.float32(0.5),)


OPERATION = Operation(
    name="rope",
    document="Llama operations",
    idea="(r, i) → (r cos a - i sin a, r sin a + i cos a), a = position / theta^(2k / D)",
    sizes={"T": 16, "H": 32, "D": 128},
    variants=(
        Variant(
            "pairs",
            FILE,
            ("rope_pairs",),
            "a thread the same pairs of several heads: sines and cosines are taken once for all",
            BLOCKS,
            block=256,
        ),
    ),
    make=_make,
    traffic=lambda s: 2 * s["itemsize"] * s["T"] * s["H"] * s["D"],
    flops=lambda s: 3 * s["T"] * s["H"] * s["D"],
    bound="memory",
    attrs={},
    dtypes=("float16", "bfloat16", "float32"),
)


def exponent_step(theta: float, D: int) -> tuple[float, float]:
    """2 log2(theta) / D as the sum of two float32 numbers.

    Pair k turns by 2^(-k step) a position.
    """
    step = 2 * math.log2(theta) / D
    high = float(np.float32(step))
    return high, float(np.float32(step - high))


@lru_cache(maxsize=1024)
def geometry(
    variant: Variant,
    B: int,
    T: int,
    H: int,
    D: int,
    half_split: bool,
    width: int,
    sms: int,
    block: int | None = None,
) -> Geometry:
    """For B sequences of T positions and H heads of D channels, on `sms` multiprocessors.

    width: elements a load at most; few threads get fewer pairs each, as it is their arithmetic
    that is waited for. block: threads of a block at most.
    """
    (kernel,) = variant.kernels
    block = block or variant.block

    def across(width: int) -> int:
        """Threads for a head of a position."""
        return ceil(D // 2 / (width if half_split else max(1, width // 2)))

    heads, smallest = B * T * H, 1 if half_split else 2
    while width > smallest and heads * across(width // 2) <= FILLED * sms:
        width //= 2
    loads = 2 if half_split or width == 1 else 1
    together = 1  # heads a thread
    while 2 * together <= min(H, _HELD // loads) and (
        heads * across(width) >= 2 * together * FILLED * sms
    ):
        together *= 2
    x = min(across(width), block)
    y = min(ceil(H / together), block // x)
    z = min(T, max(1, block // (x * y)), _LAST_AXIS)
    defines = (
        ("ROPE_D", D),
        ("ROPE_HALF_SPLIT", int(half_split)),
        ("ROPE_WIDTH", width),
        ("ROPE_THREADS", x),
        ("ROPE_HEADS", together),
    )
    grid = (ceil(T / z), ceil(H / (y * together)), B)
    return Geometry(kernel, grid, (x, y, z), defines=defines)
