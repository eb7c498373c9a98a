"""The sizes from which one engine of `linear` is faster than another, as measured.

An engine is a kernel that multiplies rows of decoding: mma, mma_tiles, or wgmma, which uses wgmma.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class Threshold(NamedTuple):
    """The size of a matrix from which `engine` is faster than mma and mma_tiles.

    rows: maximum rows of x. of: kind of product, "" for all: "fused" if mma fuses RMSNorm, RoPE and
    the gate, "fp8" for FP8 weights, "gated" for 16-bit models with a gate, which wgmma fuses.
    weights, products: minimum N K, and minimum M N K. measured: us of a step of models of
    the sizes of the named ones (in brackets: weights of the smallest matrix).
    """

    rows: float
    of: str
    weights: int
    products: int
    engine: str = "wgmma"
    measured: str = ""
    card: str = "NVIDIA H200"


# Up to SAME_ENGINE rows, the smallest matrix of a layer decides for all, except for matrices that
# are much smaller than the largest one (`linear.MUCH_SMALLER`): if two kinds of products alternate,
# launches overlap less. Of the entries that apply, the first counts.
SAME_ENGINE = 16
THRESHOLDS = (
    Threshold(1, "", 10_000_000, 0),
    Threshold(
        SAME_ENGINE, "fused", 0, 10_000_000,
        measured="SmolLM2-135M (332,000 weights), 16 rows: mma 529, wgmma 706; SmolLM2-360M "
        "(922,000 weights), 8 rows: mma 651, wgmma 695; 16 rows: mma 955, wgmma 826",
    ),
    Threshold(SAME_ENGINE, "fp8", 0, 9_000_000),
    Threshold(SAME_ENGINE, "", 0, 4_000_000),
    Threshold(
        32, "gated", 900_000, 0,
        measured="SmolLM2-135M, 32 rows: mma 747, wgmma 928; SmolLM2-360M, 24 rows: mma 1,063, "
        "wgmma 967; Qwen3-0.6B (2.1 million weights), 32 rows: mma 1,546, wgmma 1,366",
    ),
    Threshold(32, "", 4_000_000, 0),
    Threshold(float("inf"), "", 500_000, 0),
)  # fmt: skip


def min_weights(M: int, kinds: Collection[str] = ()) -> int:
    """Return the minimum N K for which wgmma is faster with M rows of x.

    kinds: kinds of the products, as in `Threshold.of`.
    """
    of = ("", *kinds)
    threshold = next(each for each in THRESHOLDS if each.rows >= M and each.of in of)
    return max(threshold.weights, -(-threshold.products // M))
