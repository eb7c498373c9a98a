"""The linear layer for decoding by wgmma, matmul/decode_hopper.cu: its geometry."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from gpt2block.cuda.kernels import Geometry
from gpt2block.ops._linear_mma import BYTES, LOADED, UNIT, splits
from gpt2block.ops._rows import power_of_two
from gpt2block.ops._tensor_cores import room

FILE = "matmul/decode_hopper.cu"
TERM_ROWS = 64  # of a tile of terms, and the most that a block has
FEWEST_ROWS = 4
LINE = 128  # bytes of a row of W, in a slice
GROUP_COLUMNS, GROUP_WARPS = 64, 4  # of A, and of a warpgroup
ALIGNMENT = 1024  # of shared memory
STATIC = 1024  # bytes of barriers, at most
PAIR = 8  # bytes of two sums


class Tile(NamedTuple):
    """The constants of a kernel that decide how fast it is, never what it computes."""

    rows: int
    groups: int  # warpgroups that multiply, 64 columns each
    cluster: int  # blocks that share K
    blocks: int  # that a multiprocessor should have room for
    stages: int = 2

    @property
    def threads(self) -> int:
        return 32 * (GROUP_WARPS * self.groups + 1)

    def columns(self, gated: bool) -> int:
        return GROUP_COLUMNS * self.groups // (1 + gated)


def width(dtype: str) -> int:
    """Values of a row of weights that a lane loads at once, which the order of terms depends on."""
    return LOADED // BYTES.get(dtype, 1)


def _stage(tile: Tile, dtype: str) -> int:
    """Bytes of a slice of K: of W, and of x."""
    return LINE * GROUP_COLUMNS * tile.groups + 4 * (LINE // BYTES.get(dtype, 1)) * tile.rows


def _sums(tile: Tile, K: int) -> int:
    """Bytes of the sums that a block receives."""
    if tile.cluster == 1:
        return LINE  # wgmma may read columns of B that no row has, after the last slice
    own = ceil(GROUP_WARPS * tile.groups * tile.rows // FEWEST_ROWS / tile.cluster)
    return splits(K)[0] * own * 32 * PAIR


def shared_bytes(tile: Tile, K: int, dtype: str) -> int:
    """The dynamic shared memory of a block: the ring, and received sums. dtype: of the weights."""
    return ALIGNMENT + tile.stages * _stage(tile, dtype) + _sums(tile, K)


def _tiles(rows: int, M: int, N: int, K: int, gated: bool, sms: int) -> Iterator[Tile]:
    """The tiles in the order in which they are tried, fastest first, as measured on an H200."""
    parts = splits(K)[0]

    def filling(groups: int, blocks: int, fewest: float) -> Tile:
        """With the smallest cluster that shares K equally and gives so many blocks."""
        tile = Tile(rows, groups, 1, blocks)
        grid = ceil(N / tile.columns(gated)) * ceil(M / TERM_ROWS)
        fitting = [n for n in (1, 2, 4, 8) if parts % n == 0 and n * FEWEST_ROWS <= 4 * rows]
        cluster = next((n for n in fitting if n * grid >= fewest), fitting[-1])
        return tile._replace(cluster=cluster)

    if rows > TERM_ROWS // 2:
        large = filling(2, 1, 0.6 * sms)
        yield large if large.cluster == 1 else filling(1, 1, 0.9 * sms)
    else:
        waves = ceil(N / (GROUP_COLUMNS // (1 + gated))) / sms
        yield filling(1, 2 if 3 < waves < 4 else 3, 1.8 * sms)
    yield filling(1, 1, 0)


@lru_cache(maxsize=1024)
def choose(M: int, N: int, K: int, dtype: str, gated: bool, sms: int, most_shared: int) -> Tile:
    """The tile for x (M, K) and weights (N, K); gated: of two matrices, N outputs."""
    rows = max(FEWEST_ROWS, power_of_two(min(M, TERM_ROWS)))
    slices = ceil(K * BYTES.get(dtype, 1) / LINE)
    for tile in _tiles(rows, M, N, K, gated, sms):
        left = room(most_shared, tile.blocks) - STATIC - shared_bytes(tile, K, dtype)
        stages = tile.stages + left // _stage(tile, dtype)
        if stages >= tile.stages:
            return tile._replace(stages=min(stages, max(2, slices // tile.cluster)))
    return tile._replace(stages=2)


@lru_cache(maxsize=1024)
def geometry(
    kernel: str,
    M: int,
    N: int,
    K: int,
    dtype: str,
    tile: Tile,
    *,
    gated: bool = False,
    to_terms: bool = False,
) -> Geometry:
    """The launch of a kernel for x (M, K) and weights (N, K) of `dtype`.

    gated: of two matrices. to_terms: whether the result has terms.
    """
    defines = (
        ("DH_ROWS", tile.rows),
        ("DH_GROUPS", tile.groups),
        ("DH_CLUSTER", tile.cluster),
        ("DH_STAGES", tile.stages),
        ("DH_BLOCKS", tile.blocks),
        *((("DH_GATED", 1),) if gated else ()),
        *((("DH_OUT_TERMS", 1),) if to_terms else ()),
    )
    grid = (tile.cluster * ceil(M / TERM_ROWS) * ceil(N / tile.columns(gated)),)
    return Geometry(kernel, grid, (tile.threads,), shared_bytes(tile, K, dtype), defines)


def problem(K: int) -> str | None:
    """Why products with this K are for other kernels."""
    return f"K {K:,}: expected a multiple of {UNIT}: use variant mma_tiles" if K % UNIT else None
