"""The linear layer for many rows, matmul/prompt/cores.cu: its tiles and its geometry."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from gpt2block.cuda.kernels import Geometry
from gpt2block.ops._rows import WARP
from gpt2block.ops.products import count_tiles, fastest

FILE = "matmul/prompt/cores.cu"
KERNEL = "linear_tiles"
MOST_LOADED = 8  # narrow weights in a copy
MAX_SIZE = 2**31 - 1024  # of M and N: what an int holds, and a tile more
MAX_K = 2**23  # with which the rows of a tile are less than 4 GB from each other


class LinearTile(NamedTuple):
    """The constants of linear_tiles that decide how fast it is, never what it computes."""

    rows: int
    columns: int
    side: int  # rows of a thread
    span: int  # columns of a thread
    depth: int  # of a slice along K
    stages: int  # slices in shared memory, or fewer where they do not fit
    blocks: int  # that an SM should have registers for
    speed: float  # of an SM that is busy with such tiles, relative to the largest


# Larger ones first: of equals the first is taken. Smaller ones have fewer outputs a thread, so that
# even one tile on an SM has a warp for each of its four schedulers.
TILES = (
    LinearTile(128, 128, 8, 8, 16, 2, 2, 1.0),
    LinearTile(64, 96, 8, 6, 32, 2, 4, 0.97),
    LinearTile(32, 96, 4, 6, 32, 3, 4, 0.86),
    LinearTile(32, 32, 2, 4, 32, 3, 4, 0.62),
)


def shared_bytes(tile: LinearTile, size: int) -> int:
    """For weights of `size` bytes; narrow ones have a place for what arrives, too."""
    floats = 4 * (tile.rows + 4 + tile.columns + 4)
    return tile.stages * tile.depth * (floats + (tile.columns * size if size < 4 else 0))


@lru_cache(maxsize=1024)
def geometry(
    M: int,
    N: int,
    size: int,
    load: int,
    store: int,
    gelu: bool,
    sms: int,
    most_shared: int,
    tile: LinearTile | None = None,
) -> Geometry:
    """For x (M, K) and weights (N, K) of `size` bytes an element.

    load: narrow weights in a copy, a power of two up to 8 that divides K, and to whose bytes the
    weights are aligned. store: 4 where rows of out and residual lie on 16 bytes, else 1.
    most_shared: bytes of shared memory that a block can have. tile: instead of the fastest.
    """
    tile = tile or fastest(TILES, M, N, sms)
    while shared_bytes(tile, size) > most_shared and tile.stages > 2:
        tile = tile._replace(stages=tile.stages - 1)
    threads = WARP * tile.rows // (8 * tile.side) * (tile.columns // (4 * tile.span))
    defines = (
        ("LT_ROWS", tile.rows),
        ("LT_COLUMNS", tile.columns),
        ("LT_SIDE", tile.side),
        ("LT_SPAN", tile.span),
        ("LT_DEPTH", tile.depth),
        ("LT_STAGES", tile.stages),
        ("LT_BLOCKS", tile.blocks),
        ("LT_LOAD", 1 if size == 4 else load),
        ("LT_STORE", store),
        ("LT_GELU", int(gelu)),
    )
    grid = (count_tiles(tile, M, N),)
    return Geometry(KERNEL, grid, (threads,), shared_bytes(tile, size), defines)
