"""The linear layer for decoding by wgmma, matmul/decode_hopper.cu: its geometry."""

from __future__ import annotations

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
    splits: int = 1  # blocks that share K
    shares: int = 1  # blocks that share x
    blocks: int = 1  # that a multiprocessor should have room for
    stages: int = 2

    @property
    def threads(self) -> int:
        return 32 * (GROUP_WARPS * self.groups + 1)

    def columns(self, gated: bool) -> int:
        return GROUP_COLUMNS * self.groups // (1 + gated)

    def grid(self, M: int, N: int, gated: bool) -> int:
        """Blocks of a product (M, N); gated: of two matrices."""
        clusters = ceil(N / (self.columns(gated) * self.shares)) * ceil(M / TERM_ROWS)
        return self.splits * self.shares * clusters


def width(dtype: str) -> int:
    """Values of a row of weights that a lane loads at once, which the order of terms depends on."""
    return LOADED // BYTES.get(dtype, 1)


def _stage(tile: Tile, dtype: str) -> int:
    """Bytes of a slice of K: of W, and of x."""
    return LINE * GROUP_COLUMNS * tile.groups + 4 * (LINE // BYTES.get(dtype, 1)) * tile.rows


def _sums(tile: Tile, K: int) -> int:
    """Bytes of the sums that a block receives."""
    if tile.splits == 1:
        return 0
    own = ceil(GROUP_WARPS * tile.groups * tile.rows // FEWEST_ROWS / tile.splits)
    return splits(K)[0] * own * 32 * PAIR


def shared_bytes(tile: Tile, K: int, dtype: str) -> int:
    """The dynamic shared memory of a block: the ring, and received sums. dtype: of the weights."""
    return ALIGNMENT + tile.stages * _stage(tile, dtype) + _sums(tile, K)


def _many_rows(M: int, N: int, K: int, gated: bool, sms: int) -> Tile:
    """A tile of more than 32 rows. wgmma and shared memory are the bound: one block on an SM.

    Large clusters find fewer places. x is read less often with two warpgroups, and with shares.
    """
    wide = Tile(TERM_ROWS, 2)
    waves = wide.grid(M, N, gated) / sms
    if waves >= 0.5:
        return wide._replace(shares=4 if waves < 1.4 and M <= TERM_ROWS else 2)
    parts = splits(K)[0]
    pairs = (2, 4), (2, 8), (1, 4), (1, 8), (1, 2), (1, 1)
    candidates = [Tile(TERM_ROWS, groups, n) for groups, n in pairs if parts % n == 0]
    grids = {tile: tile.grid(M, N, gated) for tile in candidates}
    fitting = [t for t, n in grids.items() if n <= sms * (1 if t.splits <= 2 else 0.75)]
    return max(fitting, key=lambda tile: grids[tile], default=Tile(TERM_ROWS, 1, blocks=2))


def _few_rows(rows: int, M: int, N: int, K: int, gated: bool, sms: int) -> Tile:
    """A tile of up to 32 rows. Memory is the bound: many blocks, the next kernel's among them."""
    tile, parts = Tile(rows, 1, blocks=3), splits(K)[0]
    grid = tile.grid(M, N, gated)
    for n in (1, 2, 4, 8):
        if parts % n == 0 and n <= rows:
            tile = tile._replace(splits=n)
            if n * grid >= 1.8 * sms:
                break
    if tile.splits > 1:
        return tile
    once = grid <= 3 * sms
    shares = 4 if once and rows >= 16 else 2
    return tile._replace(shares=shares, blocks=2 if 3 < grid / sms < 4 or grid <= 2 * sms else 3)


@lru_cache(maxsize=1024)
def choose(M: int, N: int, K: int, dtype: str, gated: bool, sms: int, most_shared: int) -> Tile:
    """The tile for x (M, K) and weights (N, K), as measured on an H200.

    gated: of two matrices, with N outputs.
    """
    rows = max(FEWEST_ROWS, power_of_two(min(M, TERM_ROWS)))
    few = rows < TERM_ROWS
    tile = _few_rows(rows, M, N, K, gated, sms) if few else _many_rows(M, N, K, gated, sms)
    slices = ceil(K * BYTES.get(dtype, 1) / LINE)
    for blocks in range(tile.blocks, 0, -1):
        left = room(most_shared, blocks) - STATIC - shared_bytes(tile, K, dtype)
        stages = tile.stages + left // _stage(tile, dtype)
        if stages >= tile.stages:
            return tile._replace(blocks=blocks, stages=min(stages, max(2, slices // tile.splits)))
    return tile._replace(splits=1, blocks=1)


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
        ("DH_SPLITS", tile.splits),
        ("DH_SHARES", tile.shares),
        ("DH_STAGES", tile.stages),
        ("DH_BLOCKS", tile.blocks),
        *((("DH_GATED", 1),) if gated else ()),
        *((("DH_OUT_TERMS", 1),) if to_terms else ()),
    )
    grid = (tile.grid(M, N, gated),)
    return Geometry(kernel, grid, (tile.threads,), shared_bytes(tile, K, dtype), defines)


def problem(K: int) -> str | None:
    """Why products with this K are for other kernels."""
    return f"K {K:,}: expected a multiple of {UNIT}: use variant mma_tiles" if K % UNIT else None
