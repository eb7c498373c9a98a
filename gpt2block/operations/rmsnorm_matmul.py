"""RMSNorm with the product behind it, as in Llama: projections, and the feed-forward."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Literal

import numpy as np

from gpt2block.cuda.kernels import FP8
from gpt2block.operations import _hopper_rmsnorm
from gpt2block.operations._types import Geometry, Inputs, Operation, Sizes, Variant

FILE = "llama/rmsnorm_matmul.cu"
TILES = "llama/rmsnorm_matmul_mma.cu"
DTYPES = ("float16", "bfloat16", "float32", *FP8)
WARP = 32
MOST_ROWS = 4  # of x that a block of the matvec kernels takes
MOST_SUMS = 64  # that a thread of them keeps in registers
Pairing = Literal["neighbours", "halves", "two matrices"]


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def _make_matmul(s: Sizes, rng: np.random.Generator) -> Inputs:
    x, gamma = _normal(rng, s["M"], s["K"]), 1 + _normal(rng, s["K"]) / 10
    return x, gamma, _normal(rng, s["K"], s["N"]) / np.float32(s["K"] ** 0.5)


def _make_ffn(s: Sizes, rng: np.random.Generator) -> Inputs:
    return *_make_matmul(s, rng), _normal(rng, s["K"], s["N"]) / np.float32(s["K"] ** 0.5)


def _matrix(s: Sizes) -> int:
    return s["weight"] * s["K"] * s["N"]


def _activations(s: Sizes) -> int:
    return s["itemsize"] * s["M"] * (s["K"] + s["N"])


def _variants(matvec: str, mma: str, hopper: str, after: str, beside: str) -> tuple[Variant, ...]:
    return (
        Variant(
            "matvec",
            FILE,
            (matvec,),
            "few rows: every weight read once, asked for before x; the norm's factor at the end",
        ),
        Variant(
            "mma",
            TILES,
            (mma,),
            "many rows: tiles on tensor cores (mma.sync), the norm in the same loop over K",
        ),
        Variant(
            "unfused",
            TILES,
            (mma,),
            f"rmsnorm by itself first, then the product{after}: x is normalised once",
        ),
        Variant(
            "hopper",
            _hopper_rmsnorm.FILE,
            (hopper,),
            f"the product by TMA and wgmma, which fetches weights while rmsnorm runs; {beside}",
            dtypes=("float16", "bfloat16"),
        ),
    )


RMSNORM_MATMUL = Operation(
    name="rmsnorm_matmul",
    document="Llama operations",
    idea="(x · rms · γ) W, with RoPE on heads of head_dim columns if asked for",
    sizes={"M": 16, "K": 4096, "N": 4096},
    variants=_variants(
        "rmsnorm_matvec",
        "rmsnorm_matmul_mma",
        "rmsnorm_matmul_hopper",
        ", then rope",
        "rope in its epilogue",
    ),
    make=_make_matmul,
    traffic=lambda s: _matrix(s) + _activations(s),
    flops=lambda s: 2 * s["M"] * s["K"] * s["N"],
    bound="either",
    attrs={"head_dim": 128},
    dtypes=DTYPES,
    matrices=(2,),
    series=("M", 512),
)

RMSNORM_FFN = Operation(
    name="rmsnorm_ffn",
    document="Llama operations",
    idea="n = (x + residual) · rms · γ, then silu(n W1) · (n W3)",
    sizes={"M": 16, "K": 4096, "N": 11008},
    variants=_variants(
        "rmsnorm_ffn_matvec",
        "rmsnorm_ffn_mma",
        "rmsnorm_ffn_hopper",
        "s",
        "columns of W1 and W3 beside each other",
    ),
    make=_make_ffn,
    traffic=lambda s: 2 * _matrix(s) + _activations(s),
    flops=lambda s: 4 * s["M"] * s["K"] * s["N"],
    bound="either",
    attrs={},
    dtypes=DTYPES,
    matrices=(2, 3),
    layout="NK",
    series=("M", 512),
)


@lru_cache(maxsize=1024)
def matvec(
    M: int,
    N: int,
    K: int,
    x_width: int,
    weight: int,
    layout: str,
    pairing: Pairing,
    head_dim: int,
    alignment: int,
    most_shared: int,
) -> Geometry | None:
    """The launch of a matvec kernel; None when a row does not fit in `most_shared` bytes.

    x_width: values of x in a load. weight: bytes of one. pairing: how columns go together,
    neighbours, those half a head apart, or those of two matrices. alignment: of the weights, in
    bytes. Threads, strips and unrolling are the best ones measured on an H200 at one row.
    """
    two = pairing == "two matrices"
    halves = pairing == "halves"
    rows = min(MOST_ROWS, 1 << (M - 1).bit_length())
    strips = 2 if layout == "NK" or pairing != "neighbours" else 1
    unit = K if layout == "NK" else head_dim // 2 if halves else N  # vectors do not cross its end
    width = 16 // weight
    if layout == "KN":
        width = min(width, MOST_SUMS // (strips * rows))
    while unit % width or alignment % (width * weight):
        width //= 2
    if layout == "NK":
        threads, lanes = 256, WARP
        step, pairs = WARP * width, threads // WARP
        unroll = 8 if weight > 1 else 2 if two else 4
        parts = 0
    else:
        threads = 256 if two else 512
        lanes = min(WARP, max(1, (64 if two else 32 // strips) // width))
        while halves and unit % (lanes * width):
            lanes //= 2
        step, pairs = threads // lanes, lanes * width * strips // 2
        unroll = 8 if weight > 1 and strips == 1 else 4
        parts = 4 * threads // WARP * strips * lanes * width
    row = 4 * step * ceil(K / step) + parts
    while rows > 1 and rows * row > most_shared:
        rows //= 2
    if row > most_shared:
        return None
    defines = (
        ("MV_NK", int(layout == "NK")),
        ("MV_ROWS", rows),
        ("MV_X", x_width),
        ("MV_WIDTH", width),
        ("MV_UNROLL", min(unroll, ceil(K / step))),
        ("MV_THREADS", threads),
        ("MV_LANES", lanes),
        ("MV_STRIPS", strips),
        ("MV_HALF_SPLIT", int(halves)),
    )
    columns = N if two else ceil(N / 2)
    kernel = "rmsnorm_ffn_matvec" if two else "rmsnorm_matvec"
    grid = (ceil(columns / pairs), ceil(M / rows))
    return Geometry(kernel, grid, (threads,), rows * row, defines)
