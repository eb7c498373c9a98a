"""Tiles and launches of matmul/prompt/rmsnorm_wgmma.cu: products of normalized rows with wgmma."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from gpt2block.cuda.arrays import CudaArray, multiprocessors
from gpt2block.cuda.kernels import Geometry, Launch, defines_of, launch_at
from gpt2block.cuda.tensor_maps import tensor_map
from gpt2block.ops.engines.gemm_wgmma import (
    BUFFERS,
    SLICE,
    WgmmaGemmTile,
    choose_tile,
    grid_geometry,
    shared_bytes,
)
from gpt2block.ops.products import gate_define

FILE = "matmul/prompt/rmsnorm_wgmma.cu"

# Times of the tiles are fitted to Llama's products in float16. K is always 4,096, so that slice_us
# can include all time. With few rows, blocks wait for weights, and the best tile gives nearly every
# SM one block: 64x64 with K split in two makes 128 blocks for 4,096 columns, and 64x192 makes 115
# blocks for the 2 · 11,008 columns of the feed-forward.
MATMUL_TILES = (
    WgmmaGemmTile(256, 128, (128, 128), 4, 32, 1, 1, 0.0, 0.673, 0.0),
    WgmmaGemmTile(128, 128, (64, 128), 6, 32, 1, 1, 0.0, 0.390, 0.0),
    WgmmaGemmTile(128, 64, (64, 64), 8, 32, 1, 2, 0.0, 0.278, 0.0),
    WgmmaGemmTile(128, 64, (64, 64), 8, 32, 2, 1, 0.0, 0.361, 0.0),
    WgmmaGemmTile(64, 64, (64, 32), 8, 16, 2, 1, 0.0, 0.327, 0.0),
)

# Tiles of the feed-forward, by layout of the weights. Columns of a tile count both weight matrices.
# In layout (N, K), 128x224 makes 396 tiles for 500 rows and Llama's 2 · 11,008 columns: three per
# SM. In layout (K, N), weights are loaded in boxes of 64 columns.
FFN_TILES = {
    "NK": (
        WgmmaGemmTile(128, 192, (128, 192), 4, 32, 1, 2, 0.0, 0.515, 0.0),
        WgmmaGemmTile(128, 224, (64, 224), 4, 16, 1, 2, 0.0, 0.632, 0.0),
        WgmmaGemmTile(128, 192, (64, 192), 4, 32, 1, 1, 0.0, 0.780, 0.0),
        WgmmaGemmTile(64, 192, (64, 96), 6, 16, 1, 1, 0.0, 0.730, 0.0),
    ),
    "KN": (
        WgmmaGemmTile(128, 256, (64, 256), 4, 32, 1, 1, 1.8, 0.83, 2.4),
        WgmmaGemmTile(64, 256, (64, 128), 5, 32, 1, 1, 0.5, 0.45, 1.2),
    ),
}


def tiles(matrices: int, layout: str) -> tuple[WgmmaGemmTile, ...]:
    """Return the tiles to choose from, for one or two weight matrices stored in `layout`."""
    return MATMUL_TILES if matrices == 1 else FFN_TILES[layout]


def launch(
    n: CudaArray,
    matrices: tuple[CudaArray, ...],
    layout: str,
    out: CudaArray,
    *turn: float,
    gelu: bool = False,
) -> Launch:
    """Return the launch that writes n @ w to `out`, or for two matrices silu(n @ w1) * (n @ w3).

    n (..., K): normalized rows. gelu: whether GELU replaces SiLU. turn: arguments of RoPE with one
    matrix: rows per sequence, head_dim (0 for no RoPE), first position, and the step of the
    exponents in two parts.
    """
    K, N = n.shape[-1], out.shape[-1]
    M, count = n.size // K, len(matrices)
    sms, head_dim = multiprocessors(), turn[1] if turn else 0
    chosen, tile = geometry(count, M, N, K, layout=layout, turns=head_dim > 0, sms=sms)
    box = weight_box(tile, count, layout)
    maps = (
        tensor_map(n.reshape(1, M, K), (1, rows_loaded(tile, M), SLICE)),
        *(tensor_map(w.reshape(1, *w.shape), box) for w in matrices),
        tensor_map(out.reshape(1, M, N), (1, 64, tile.chunk)),
    )
    chosen = chosen.with_defines(gate_define(gelu))
    return launch_at(FILE, chosen, (*maps, M, N, K, *turn), n.dtype.name)


@lru_cache(maxsize=1024)
def geometry(
    matrices: int,
    M: int,
    N: int,
    K: int,
    *,
    layout: str,
    turns: bool = False,
    sms: int,
    tile: WgmmaGemmTile | None = None,
) -> tuple[Geometry, WgmmaGemmTile]:
    """Return the geometry for M rows and one or two matrices with N outputs, and the chosen tile.

    layout: layout of w, "KN" or "NK". turns: whether the kernel computes RoPE. tile: used instead
    of the best of `tiles`.
    """
    columns = matrices * N
    tile = tile or choose_tile(tiles(matrices, layout), M, columns, K, True, sms)
    ends = (
        *defines_of(GEMM_A_ROWS=rows_loaded(tile, M), NORM_W_NK=int(layout == "NK")),
        *defines_of(NORM_TURNS=int(turns)),
    )
    kernel = "rmsnorm_matmul_wgmma" if matrices == 1 else "rmsnorm_ffn_wgmma"
    shared = shared_bytes(tile, 1, BUFFERS, tile.warpgroup[1] // tile.split_k)
    return grid_geometry(kernel, tile, M, columns, sms, shared, ends), tile


def rows_loaded(tile: WgmmaGemmTile, M: int) -> int:
    """Rows that a TMA copy for a tile includes; no more than needed, as all rows take time."""
    return min(tile.rows, ceil(M / 16) * 16)


def weight_box(tile: WgmmaGemmTile, matrices: int, layout: str) -> tuple[int, int, int]:
    """Shape of the box of w, an array (1, N, K) or (1, K, N), that a block loads at a time."""
    if layout == "KN":
        return 1, SLICE // tile.shares, SLICE
    columns = tile.columns if matrices == 1 else tile.warpgroup[1] // 2  # columns of one matrix
    return 1, columns // tile.shares, SLICE
