"""Layouts and launch geometry of matmul/decode/cores.cu, the linear layer for few rows."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, gcd
from typing import NamedTuple

from gpt2block.cuda.cards import gpu
from gpt2block.cuda.formats import GGUF
from gpt2block.cuda.kernels import HI_LO, Geometry, defines_of, size_defines
from gpt2block.ops.call import Refusal
from gpt2block.ops.engines import linear_mma as mma
from gpt2block.ops.engines.rows import WARP, power_of_two
from gpt2block.ops.products import Matmul, count_tiles, fastest, limits

FILE, KERNEL = "matmul/decode/cores.cu", "decode_cores"
MANY_COLUMNS = 16384  # minimum outputs N of a whole matrix for which blocks loop over columns
PART = 256  # preferred number of values of K per warp
MAX_STEPS = 3  # maximum loads per column that a thread has in flight
MAX_WARPS = 12  # maximum warps that divide K
PREFERRED_WARPS = (6, 12), (12, 18)  # (fewest, most) warps per block, by `rows >= MORE_ROWS`
# minimum rows of x per block for the second entries of PREFERRED_WARPS and MIN_COLUMNS
MORE_ROWS = 4
MAX_ROWS = 8, 16  # maximum rows of x per block, by `N >= MANY_COLUMNS`
MAX_LOADED = 12  # maximum loads of weights that a thread has in flight
HELD = 32  # maximum values of a single row of x that a thread keeps in registers
ROW_BYTES = 103_000  # maximum bytes of x in shared memory per block with several rows
COLUMNS = (1, 2, 3, 4, 5, 6)  # possible numbers of columns per group
BEST_COLUMNS = 6  # preferred columns per group
MIN_COLUMNS = 4, 12  # minimum columns per block, by `rows >= MORE_ROWS`; fewer would take as long
TILE_WIDTH = 4  # minimum weights per load for a tile
TILE_PAD = 16  # floats after each row of a tile in shared memory
LARGE = 1 << 25  # minimum bytes of a matrix that blocks do not read again from the L2 cache
MOST_READS = 4  # maximum times that blocks read a smaller matrix
EACH_BLOCK = 4  # number of columns whose products take as long as loading x into a block


class MatvecTile(NamedTuple):
    """A tile of outputs of a block, which reads its weights once. Results do not depend on it."""

    rows: int  # rows of x
    columns: int  # columns of the product (rows of w)
    lanes: int  # threads that share the additions of an output
    speed: float  # speed of a multiprocessor on such tiles, relative to the first tile
    side: int = 8  # rows per thread
    span: int = 4  # columns per thread
    stage: int = 64  # values of K in shared memory at once

    def fits(self, width: int, steps: int) -> bool:
        """Return whether the code of the kernel fits its cache, and its sums the registers.

        With many sums, registers spill if the loads of a lane end within a stage.
        """
        sums = self.side * self.span
        whole = self.lanes * width * steps % self.stage == 0
        unrolled = WARP // self.lanes * width * steps * sums  # multiply-adds per thread and chunk
        return unrolled <= MAX_UNROLLED and (whole or sums <= MAX_SUMS)


# The first of equally fast tiles is chosen. Tiles of 4 rows per thread have more threads, for
# products with few outputs.
TILES = (
    MatvecTile(64, 32, 4, 1.0),
    MatvecTile(64, 24, 8, 1.0, span=6),
    MatvecTile(32, 32, 8, 0.86),
    MatvecTile(32, 16, 8, 0.83, side=4, stage=128),
    MatvecTile(16, 16, 8, 0.65, side=4, stage=128),
    MatvecTile(8, 32, 8, 0.4, side=4),
)
MAX_UNROLLED = 3072  # maximum multiply-adds per thread and chunk: instructions fit their cache
MAX_SUMS = 32  # maximum sums per thread if the loads of a lane end within a stage


class MatvecLayout(NamedTuple):
    """Partition of a product among warps. Only `width`, `split` and `steps` affect results."""

    width: int  # weights per load
    split: int  # warps per group, which divide K
    steps: int  # loads per column that a thread has in flight
    columns: int  # columns of the product (rows of w) per group
    groups: int  # groups per block
    loop: bool  # whether blocks loop over the columns of the product
    blocks: int  # minimum blocks per multiprocessor (__launch_bounds__)
    rows: int  # rows of x per block
    tile: MatvecTile | None = None  # computes more rows; then only the order of additions counts


def order(N: int, K: int, weight: int) -> tuple[int, int, int]:
    """Return a layout's `width`, `split` and `steps`, which fix the order of additions.

    N: outputs of the whole matrix, also if the product is with a share of them. weight: bytes per
    weight.
    """
    width = 16 // weight
    while K % width:
        width //= 2
    if weight == 1 and width > 1 and K % (WARP * width) and not K % (WARP * width // 2):
        width //= 2  # with half the width, all lanes have the same number of loads
    split = 1
    if N < MANY_COLUMNS:
        parts = ceil(K / PART)
        split = ceil(parts / ceil(parts / MAX_WARPS))
        split = min(split, ceil(K / (WARP * width)))
    units = ceil(K / (WARP * width * split))  # loads per column and thread
    return width, split, ceil(units / ceil(units / MAX_STEPS))


def layout(
    M: int, N: int, K: int, weight: int, sms: int, whole_N: int | None = None
) -> MatvecLayout:
    """Return the layout for x (M, K) on a GPU with `sms` multiprocessors.

    weight: bytes per weight. whole_N: `WeightMatrix.whole_N`; None if the matrix is whole.
    """
    whole_N = whole_N or N
    loop = whole_N >= MANY_COLUMNS
    width, split, steps = order(whole_N, K, weight)
    rows = min(MAX_ROWS[loop], power_of_two(M))
    while rows > 1 and 4 * rows * K > ROW_BYTES:
        rows //= 2
    if loop:
        blocks = 2 if rows <= 4 else 1
        columns, groups = 4, 8 if blocks == 2 else 12
    else:
        columns, groups = _columns(N, split, steps, rows, sms)
        blocks = 1
    return MatvecLayout(width, split, steps, columns, groups, loop, blocks, rows)


def _columns(N: int, split: int, steps: int, rows: int, sms: int) -> tuple[int, int]:
    """Return (columns per group, groups per block) that minimize the columns of the busiest SM.

    With MORE_ROWS rows per block, PREFERRED_WARPS take precedence.
    """
    more = rows >= MORE_ROWS
    fewest, most = PREFERRED_WARPS[more]

    def cost(candidate: tuple[int, int]) -> tuple[int, int, int]:
        columns, groups = candidate
        block, warps = columns * groups, groups * split
        busiest = ceil(ceil(N / block) / sms) * (max(block, MIN_COLUMNS[more]) + EACH_BLOCK)
        odd = max(0, fewest - warps) + max(0, warps - most)
        cost = (odd, busiest) if more else (busiest, odd)
        return *cost, abs(columns - BEST_COLUMNS)

    candidates = [
        (columns, groups)
        for columns in COLUMNS
        if columns * steps <= MAX_LOADED
        for groups in range(1, max(1, most // split) + 1)
    ]
    return min(candidates, key=cost)


@lru_cache(maxsize=1024)
def geometry(
    M: int,
    N: int,
    K: int,
    weight: int,
    *,
    norm: bool = False,
    sms: int = 132,
    max_shared: int = 232_448,
    whole_N: int | None = None,
    tiled: bool = False,
    cut: MatvecLayout | None = None,
) -> Geometry | None:
    """Return the launch of the kernel, or None if a row of x does not fit in `max_shared` bytes.

    weight: bytes per weight. norm: whether the kernel computes LayerNorm of x. whole_N: as in
    `layout`. tiled: whether blocks compute tiles where this is faster than reading weights
    again. cut: the layout to use; by default, the result of `layout`.
    """
    cut = cut or layout(M, N, K, weight, sms, whole_N)
    while (shared := 4 * shared_floats(cut, K, norm)) > max_shared and cut.rows > 1:
        cut = cut._replace(rows=cut.rows // 2)
    fits = shared <= max_shared
    reads = ceil(M / cut.rows)
    many = reads > (1 if N * K * weight >= LARGE else MOST_READS) or not fits
    if tiled and many and not norm and cut.width >= TILE_WIDTH:
        tiles = [tile for tile in TILES if tile.fits(cut.width, cut.steps)]
        cut = cut._replace(tile=fastest(tuple(tiles), M, N, sms))
    if cut.tile:
        return _tile_geometry(M, N, K, weight, cut, cut.tile)
    if not fits:
        return None
    defines = (
        *defines_of(DECODE_K=K, DECODE_NORM=int(norm)),
        *size_defines("DECODE", cut, "rows width split columns groups steps loop blocks"),
        *defines_of(DECODE_X=gcd(4, K)),
    )
    blocks = ceil(N / (cut.columns * cut.groups))
    grid = (min(blocks, sms * cut.blocks) if cut.loop else blocks, ceil(M / cut.rows))
    return Geometry(KERNEL, grid, (WARP * cut.groups * cut.split,), shared, defines)


def _tile_geometry(
    M: int, N: int, K: int, weight: int, cut: MatvecLayout, tile: MatvecTile
) -> Geometry:
    loads = WARP // tile.lanes * cut.steps * cut.width  # values of K per thread and chunk
    stage = tile.stage
    while loads * tile.lanes % (2 * stage):  # a chunk has whole pairs of stages
        stage //= 2
    defines = (
        *defines_of(DECODE_K=K, DECODE_NORM=0, DECODE_ROWS=tile.rows, DECODE_WIDTH=cut.width),
        *defines_of(DECODE_SPLIT=cut.split, DECODE_COLUMNS=tile.columns, DECODE_STEPS=cut.steps),
        *size_defines("DECODE", tile, "side span lanes"),
        *defines_of(DECODE_STAGE=stage),
    )
    threads = tile.rows // tile.side * (tile.columns // tile.span) * tile.lanes
    row = 4 * tile.rows + (2 if weight == 2 else 4) * tile.columns  # FP8 weights become floats
    shared = 2 * row * (stage + TILE_PAD)
    return Geometry(KERNEL, (count_tiles(tile, M, N), 1), (threads,), shared, defines)


def shared_floats(cut: MatvecLayout, K: int, norm: bool) -> int:
    """Return the number of floats in shared memory: rows of x, gamma, beta, and sums of warps."""
    chunk = WARP * cut.width * cut.split * cut.steps
    padded = chunk * ceil(K / chunk)
    held = cut.rows == 1 and padded <= HELD * WARP * cut.split
    rows = 0 if held and not norm else cut.rows + 2 * norm
    return rows * padded + cut.split * cut.rows * cut.groups * cut.columns


def refusal(p: Matmul) -> Refusal | None:
    """Return a refusal if only kernels on tensor cores support the weights or the rounding of x."""
    return Refusal.first(
        (p.dtype == HI_LO, "takes no HiLoMatrix: use variant mma, or a WeightMatrix"),
        (p.dtype == GGUF, "takes no GgufMatrix: use variant tiles"),
        (p.rounded, "does not round x: use variant mma"),
    )


def plan(p: Matmul) -> Geometry | Refusal:
    """Return the launch of the kernel for a product, or the reason to refuse."""
    refused = Refusal.first(
        (p.to_operand, mma.FLOATS_ALONE),
        refusal(p),
        (p.norm == mma.RMSNORM, "takes no gamma without beta: use variant mma"),
        (p.operand, mma.FLOATS_ALONE),
        (p.up, mma.ONE_MATRIX),
    )
    options = {"norm": p.norm > 0, "whole_N": p.whole_N, "tiled": not gpu().has_bf16}
    sizes = p.M, p.N, p.K, mma.itemsize_of(p.dtype)
    return refused or mma.fit(geometry(*sizes, **options, **limits(mma.STATIC)), p)
