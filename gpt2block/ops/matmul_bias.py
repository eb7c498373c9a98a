"""Matrix product with bias: its variants, and the launch of each."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np

from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    Shape,
    check,
    contiguous,
    device_attribute,
    launch_at,
    output,
)
from gpt2block.cuda.kernels import Geometry
from gpt2block.errors import InputError
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant, largest_product
from gpt2block.ops.warm import call

FILE = "matmul/ladder.cu"
REGISTERS = "matmul/registers.cu"
NAMED = "named with the LayerNorm kernels"
GPT2_FC = {"M": 1024, "K": 768, "N": 3072}
TILE = 16  # side of matmul_bias_tiled's block and tile
WARP = 32
BLOCK = (32, 8)  # of kernels 1 and 2
SPAN = 64  # rows of kernel 2's tile


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    M, K, N = sizes["M"], sizes["K"], sizes["N"]
    shapes = ((M, K), (K, N), (N,))
    return tuple(rng.standard_normal(s, dtype=np.float32) + np.float32(0.5) for s in shapes)


class Tile(NamedTuple):
    """The constants of matmul_forward_kernel3, but for the number of groups and the width."""

    rows: int
    columns: int
    side: int  # rows of a thread; its columns are 8
    depth: int  # of a slice along K
    groups: int  # of warps that share a tile, where an SM has several tiles
    stages: int
    speed: float  # of an SM that is busy with such tiles, relative to the largest


# Larger ones first: of equals the first is taken. The speeds are those with which the rule finds
# the fastest tile, or one within 3 %, for GPT-2's products at M = 128, 1024 and 8192 on an H200.
TILES = (
    Tile(128, 128, 8, 16, 1, 2, 1.0),
    Tile(64, 128, 8, 16, 2, 2, 0.88),
    Tile(32, 96, 4, 32, 2, 3, 0.81),
    Tile(32, 32, 4, 64, 4, 3, 0.53),
)


def tiles(tile: Tile, M: int, N: int) -> int:
    """How many make (M, N)."""
    return ceil(M / tile.rows) * ceil(N / tile.columns)


def choose_tile(M: int, N: int, sms: int) -> tuple[Tile, int]:
    """The tile that gets the outputs done first on `sms` multiprocessors, and its groups.

    Where an SM has one tile at most, twice the groups: else it would have too few warps.
    """

    def duration(tile: Tile) -> float:
        return ceil(tiles(tile, M, N) / sms) * tile.rows * tile.columns / tile.speed

    tile = min(TILES, key=duration)
    return tile, tile.groups * (2 if tiles(tile, M, N) <= sms else 1)


@lru_cache(maxsize=1024)
def geometry(variant: Variant, M: int, N: int, width: int, sms: int) -> Geometry:
    """For (M, K) · (K, N); `width` 4 where rows of w and of the output lie on 16 bytes, else 1."""
    (kernel,) = variant.kernels
    if variant.name == "registers":
        return registers_geometry(kernel, *choose_tile(M, N, sms), M, N, width)
    if variant.name == "tiled":
        return Geometry(kernel, (ceil(N / TILE), ceil(M / TILE)), (TILE, TILE))
    rows = BLOCK[1] if variant.name == "naive" else SPAN
    return Geometry(kernel, (ceil(M / rows) * ceil(N / BLOCK[0]),), BLOCK)


def registers_geometry(
    kernel: str, tile: Tile, groups: int, M: int, N: int, width: int
) -> Geometry:
    """Of matmul_forward_kernel3 with a given tile."""
    warps = tile.rows // (8 * tile.side) * (tile.columns // WARP) * groups
    buffers = tile.stages * tile.depth * (tile.rows + 4 + tile.columns)
    sums = groups // 2 * tile.rows * tile.columns
    defines = (
        ("MM_ROWS", tile.rows),
        ("MM_COLUMNS", tile.columns),
        ("MM_SIDE", tile.side),
        ("MM_DEPTH", tile.depth),
        ("MM_GROUPS", groups),
        ("MM_STAGES", tile.stages),
        ("MM_BLOCKS", 2 if warps <= 8 else 1),
        ("MM_WIDTH", width),
    )
    return Geometry(kernel, (tiles(tile, M, N),), (WARP * warps,), 4 * max(buffers, sums), defines)


MAX_ROWS = 65535 * TILE  # of the variant tiled: the grid's second axis
MAX_SIZE = 2**31 - 1024  # of M, K and N: what an int holds, and a tile more


def bind(inputs: tuple[Any, ...], out: CudaArray | None = None, *, variant: str = "tiled") -> Bound:
    """inputs (a (..., K), w (K, N), bias (N,) or None), out (..., N)."""
    a, w, bias = inputs
    chosen = OPERATION.variant(variant)
    check("a", a)
    check("w", w)
    K = a.shape[-1]
    if w.ndim != 2 or w.shape[0] != K:
        raise InputError(f"w: expected shape ({K}, N) to match a {a.shape}, got {w.shape}")
    N = w.shape[1]
    if bias is not None:
        check("bias", bias, (N,))
    if chosen.name == "tiled":
        check_limits(a.shape)
    M = a.size // K
    if max(M, K, N) > MAX_SIZE:
        raise InputError(f"a {a.shape}, w {w.shape}: expected at most {MAX_SIZE:,} rows or columns")
    out = output(out, (*a.shape[:-1], N), apart={"a": a, "w": w, "bias": bias})

    width = 1 if N % 4 or w.data.ptr % 16 or out.data.ptr % 16 else 4
    how = geometry(chosen, M, N, width, device_attribute("MultiProcessorCount"))
    return Bound(out, (launch_at(chosen.file, how, (a, w, bias, out, M, K, N)),))


def check_limits(a: Shape, *_: Shape) -> None:
    """InputError when the rows pass the grid's second axis."""
    rows = prod(a[:-1])
    if rows > MAX_ROWS:
        raise InputError(f"{rows:,} rows (B · T): matmul_bias_tiled takes at most {MAX_ROWS:,}")


OPERATION = Operation(
    name="matmul_bias",
    document="ten-step block",
    idea="a · w + bias",
    sizes=GPT2_FC,
    variants=(
        Variant(
            "naive",
            FILE,
            ("matmul_forward_kernel1",),
            "a thread an output, straight from global memory",
            source=NAMED,
        ),
        Variant(
            "tiled",
            "matmul/skeleton.cu",
            ("matmul_bias_tiled",),
            "a thread an output, 16x16 tiles in shared memory, the next tile on its way",
        ),
        Variant(
            "coarsened",
            FILE,
            ("matmul_forward_kernel2",),
            "thread coarsening: a thread 8 outputs of a column, a value of w loaded once for them",
            source=NAMED,
        ),
        Variant(
            "registers",
            REGISTERS,
            ("matmul_forward_kernel3",),
            "a thread 8x8 outputs in registers, 16-byte loads, cp.async, no bank conflicts",
            source=NAMED,
        ),
    ),
    make=_make,
    traffic=lambda s: 4 * (s["M"] * s["K"] + s["K"] * s["N"] + s["M"] * s["N"]),
    flops=lambda s: 2 * s["M"] * s["K"] * s["N"],
    bound="compute",
    attrs={},
    shape=lambda a, w, bias=None: (*a[:-1], w[1]),
    largest=largest_product,
    check_limits=check_limits,
    binder=bind,
)


def matmul_bias(
    a: CudaArray, w: CudaArray, bias: CudaArray | None = None, variant: str = "tiled"
) -> CudaArray:
    """`reference.matmul_bias` on float32 CuPy arrays; raises InputError.

    a (..., K), w (K, N), bias (N,) or None → (..., N). Variants: naive, tiled, coarsened,
    registers. The variant tiled takes at most 1,048,560 rows: its grid's second axis counts tiles
    of 16 rows. All but registers add the products of an output in the order of k.
    """
    return call(bind, contiguous(a, w, bias), variant=variant).out
