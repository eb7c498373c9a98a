"""The linear layer for many rows of decoding, matmul/decode_tiles.cu: its tiles and its geometry."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from gpt2block.cuda.kernels import Geometry
from gpt2block.ops._linear_mma import BYTES, UNIT, splits
from gpt2block.ops._matrix import count_tiles

FILE = "matmul/decode_tiles.cu"
WARP = 32
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


def shared_bytes(tile: Tile, K: int, dtype: str) -> int:
    """The dynamic shared memory of a block: sums, and slices of x and w. dtype: of the weights."""
    weight = BYTES.get(dtype, 1)
    parts, units = splits(K)
    each = ceil(parts / tile.cluster) * units * UNIT  # of K, of a block
    part = tile.chunks * 64 // weight  # of K, of a slice
    stages = min(tile.stages, ceil(min(each, K) / part))
    value = 6 if dtype == "bfloat16" else 4  # bytes of x, in terms
    planes = parts if tile.cluster > 1 else 1
    sums = 4 * planes * ceil(tile.rows / tile.cluster) * (tile.columns + PAD)
    return ceil(sums / 128) * 128 + stages * part * (value * tile.rows + weight * tile.columns)


TILES = (
    Tile(32, 64, (2, 2), 3),
    Tile(64, 64, (2, 2), 3),
    Tile(64, 128, (2, 4), 3),
    Tile(128, 128, (4, 2), 3),
)


@lru_cache(maxsize=1024)
def choose(
    M: int, N: int, K: int, dtype: str, *, capability: int, sms: int, most_shared: int
) -> Tile:
    return TILES[0]


@lru_cache(maxsize=1024)
def geometry(kernel: str, M: int, N: int, K: int, dtype: str, tile: Tile) -> Geometry:
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
