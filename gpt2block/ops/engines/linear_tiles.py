"""Tiles and launch geometry of matmul/prompt/cores.cu, the linear layer for many rows."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from gpt2block.cuda.kernels import Geometry, defines_of, size_defines
from gpt2block.ops.engines.rows import WARP
from gpt2block.ops.products import count_tiles, fastest

FILE = "matmul/prompt/cores.cu"
KERNEL = "linear_tiles"
MAX_LOADED = 8  # maximum number of weights per copy, if a weight has less than 4 bytes
MAX_SIZE = 2**31 - 1024  # maximum M and N: an int still holds them plus the size of a tile
MAX_K = 2**23  # maximum K: the first and last row of a tile are less than 4 GB apart


class LinearTile(NamedTuple):
    """Constants of linear_tiles that determine its speed, but not its results."""

    rows: int  # rows of x per tile
    columns: int  # columns of the product (rows of w) per tile
    side: int  # rows per thread
    span: int  # columns per thread
    depth: int  # values of K per slice
    stages: int  # slices in shared memory; `geometry` reduces them if they do not fit
    blocks: int  # minimum blocks per multiprocessor (__launch_bounds__)
    speed: float  # speed of a multiprocessor on such tiles, relative to the largest tile


# Larger tiles come first: `fastest` takes the first of equally fast tiles. Smaller tiles have fewer
# outputs per thread, so that even a single tile has a warp for each scheduler of a multiprocessor.
TILES = (
    LinearTile(128, 128, 8, 8, 16, 2, 2, 1.0),
    LinearTile(64, 96, 8, 6, 32, 2, 4, 0.97),
    LinearTile(32, 96, 4, 6, 32, 3, 4, 0.86),
    LinearTile(32, 32, 2, 4, 32, 3, 4, 0.62),
)


def shared_bytes(tile: LinearTile, size: int) -> int:
    """Return the bytes of shared memory per block.

    size: bytes per weight. Weights of less than 4 bytes arrive in an additional buffer.
    """
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
    max_shared: int,
    tile: LinearTile | None = None,
) -> Geometry:
    """Return the launch for x (M, K) and weights (N, K) of `size` bytes per weight.

    load: weights per copy if size is below 4, a power of two up to 8 that divides K; the weights
    are aligned to a copy. store: 4 if rows of out and residual are aligned to 16 bytes, else 1.
    max_shared: maximum bytes of shared memory per block. tile: by default, the fastest one.
    """
    tile = tile or fastest(TILES, M, N, sms)
    while shared_bytes(tile, size) > max_shared and tile.stages > 2:
        tile = tile._replace(stages=tile.stages - 1)
    threads = WARP * tile.rows // (8 * tile.side) * (tile.columns // (4 * tile.span))
    defines = (
        *size_defines("LT", tile, "rows columns side span depth stages blocks"),
        *defines_of(LT_LOAD=1 if size == 4 else load, LT_STORE=store, LT_GELU=int(gelu)),
    )
    grid = (count_tiles(tile, M, N),)
    return Geometry(KERNEL, grid, (threads,), shared_bytes(tile, size), defines)
