"""Tiles and geometry of matmul/decode/cores_tiles.cu, which reads weights once for many rows."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from gpt2block.cuda.kernels import Geometry
from gpt2block.ops.engines.linear_matvec import order
from gpt2block.ops.products import fastest

FILE, KERNEL = "matmul/decode/cores_tiles.cu", "decode_cores_tiles"
MIN_WIDTH = 4  # minimum weights per load in the order of additions
SPAN = 4  # columns per thread
PAD = 16  # floats after each row of a stage, so that neighbouring rows are in different banks


class MatvecTile(NamedTuple):
    """Compile-time constants that determine the speed of a kernel, but not its results."""

    rows: int  # rows of x per tile
    columns: int  # columns of the product (rows of w) per tile
    lanes: int  # threads that share the additions of an output
    speed: float  # speed of a multiprocessor on such tiles, relative to the largest tile
    side: int = 8  # rows per thread
    stage: int = 64  # values of K per row in shared memory


# Larger tiles read x and w less often from the L2 cache.
TILES = (
    MatvecTile(64, 32, 4, 1.0),
    MatvecTile(32, 32, 8, 0.9),
    MatvecTile(32, 16, 8, 0.8),
    MatvecTile(16, 32, 8, 0.7),
    MatvecTile(16, 16, 8, 0.6),
)


@lru_cache(maxsize=1024)
def geometry(
    M: int,
    N: int,
    K: int,
    weight: int,
    *,
    sms: int = 132,
    whole_N: int | None = None,
    tile: MatvecTile | None = None,
) -> Geometry | None:
    """Return the launch for x (M, K), or None if K is no multiple of MIN_WIDTH.

    weight: bytes per weight. whole_N: `WeightMatrix.whole_N`; None if the matrix is whole. tile: by
    default, the fastest one.
    """
    width, split, steps = order(whole_N or N, K, weight)
    if width < MIN_WIDTH:
        return None
    tile = tile or fastest(TILES, M, N, sms)
    defines = (
        ("DECODE_WIDTH", width),
        ("DECODE_SPLIT", split),
        ("DECODE_STEPS", steps),
        ("DECODE_ROWS", tile.rows),
        ("DECODE_COLUMNS", tile.columns),
        ("DECODE_SIDE", tile.side),
        ("DECODE_LANES", tile.lanes),
        ("DECODE_STAGE", tile.stage),
    )
    grid = ceil(N / tile.columns), ceil(M / tile.rows)
    threads = tile.rows // tile.side * (tile.columns // SPAN) * tile.lanes
    return Geometry(KERNEL, grid, (threads,), shared_bytes(tile), defines)


def shared_bytes(tile: MatvecTile) -> int:
    """Return the bytes of dynamic shared memory per block: two stages of x and w."""
    return 2 * 4 * (tile.rows + tile.columns) * (tile.stage + PAD)
