"""The linear layer for many rows of decoding, matmul/decode_tiles.cu: its geometry."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from gpt2block.cuda.kernels import Geometry
from gpt2block.ops._linear_mma import BYTES, UNIT, splits
from gpt2block.ops._matrix import count_tiles
from gpt2block.ops._tensor_cores import room

FILE = "matmul/decode_tiles.cu"
WARP = 32
CLUSTER_CAPABILITY = 90
FILLED = 1.4  # blocks on each multiprocessor
FEWEST_STAGES = 2
PAD = 16  # floats after a row of sums


class Tile(NamedTuple):
    """The constants of a kernel that decide how fast it is, never what it computes."""

    rows: int
    columns: int
    warps: tuple[int, int]  # along rows and columns
    stages: int
    chunks: int = 1  # of a slice of K: 64 bytes of a row of w
    cluster: int = 1  # blocks that share K
    blocks: int = 1  # that an SM has registers for


# Warps of 16x32 need at most 128 registers a thread, so that an SM has room for 16 of them: with 8,
# which larger tiles have, tensor cores wait for instructions. Where there are tiles enough, 64x96
# reads x and w less often from the L2 cache; with float weights it needs too many registers.
FEW = Tile(32, 64, (2, 2), 4, blocks=2)  # up to 32 rows
WIDE = Tile(32, 128, (2, 4), 4, blocks=2)  # for lm_head
MANY = Tile(64, 64, (4, 2), 4, blocks=2)
LARGE = Tile(64, 96, (2, 2), 4, blocks=2)
TILES = FEW, WIDE, MANY, LARGE


def shared_bytes(tile: Tile, K: int, dtype: str) -> int:
    """The dynamic shared memory of a block: sums, and slices of x and w. dtype: of the weights."""
    weight = BYTES.get(dtype, 1)
    parts, units = splits(K)
    each = ceil(parts / tile.cluster) * units * UNIT  # of K, of a block
    part = tile.chunks * 64 // weight  # of K, of a slice
    stages = min(tile.stages, ceil(min(each, K) / part))
    planes = parts if tile.cluster > 1 else 1
    sums = 4 * planes * ceil(tile.rows / tile.cluster) * (tile.columns + PAD)
    return ceil(sums / 128) * 128 + stages * part * (4 * tile.rows + weight * tile.columns)


@lru_cache(maxsize=1024)
def choose(
    M: int, N: int, K: int, dtype: str, *, capability: int, sms: int, most_shared: int
) -> Tile:
    """The tile for x (M, K) and weights (N, K) on a GPU with `sms` multiprocessors.

    dtype: of the weights. most_shared: bytes of shared memory that a block can have. The cluster is
    the smallest one with which the grid fills the GPU, and shares the splits of K equally.
    """
    clusters = capability >= CLUSTER_CAPABILITY
    full = FILLED * sms
    if FEW.rows >= M:
        tile = WIDE if count_tiles(WIDE, M, N) >= full else FEW
    elif dtype != "float32" and count_tiles(LARGE, M, N) >= full:
        tile = LARGE
    else:
        tile = MANY if clusters or count_tiles(MANY, M, N) >= sms else FEW
    parts = splits(K)[0]
    fitting = [n for n in range(1, parts + 1) if parts % n == 0] if clusters else [1]
    tiles = count_tiles(tile, M, N)
    cluster = next((n for n in fitting if tiles * n >= full), fitting[-1])
    half = room(most_shared, 2)
    for most in (half if tiles * cluster > sms else most_shared, most_shared):
        for one in _pipelines(tile._replace(cluster=cluster), dtype):
            size = shared_bytes(one, K, dtype)
            if size <= most:
                return one if size <= half else one._replace(blocks=1)
    return tile._replace(stages=FEWEST_STAGES)


def _pipelines(tile: Tile, dtype: str) -> list[Tile]:
    """The tile with fewer and fewer bytes in flight.

    The short K of a block of a cluster is in flight as a whole: longer slices save barriers.
    """
    longer = [tile._replace(chunks=2)] if tile.cluster > 1 and dtype in BYTES else []
    return longer + [tile._replace(stages=n) for n in range(tile.stages, FEWEST_STAGES - 1, -1)]


@lru_cache(maxsize=1024)
def geometry(kernel: str, M: int, N: int, K: int, dtype: str, tile: Tile) -> Geometry:
    """The launch of a kernel for x (M, K) and weights (N, K) of `dtype`."""
    warps_m, warps_n = tile.warps
    defines = (
        ("DT_ROWS", tile.rows),
        ("DT_COLUMNS", tile.columns),
        ("DT_WARPS_M", warps_m),
        ("DT_WARPS_N", warps_n),
        ("DT_CHUNKS", tile.chunks),
        ("DT_STAGES", tile.stages),
        ("DT_CLUSTER", tile.cluster),
        ("DT_BLOCKS", tile.blocks),
    )
    grid = (tile.cluster * count_tiles(tile, M, N),)
    block = (WARP * warps_m * warps_n,)
    return Geometry(kernel, grid, block, shared_bytes(tile, K, dtype), defines)
