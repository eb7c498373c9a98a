"""Tiles and launch geometry of matmul/prompt/wgmma*.cu: matrix products with wgmma."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, inf
from typing import NamedTuple

from gpt2block.cuda.kernels import Defines, Geometry, defines_of, nonzero_defines
from gpt2block.models.weights.gguf import ROW_GROUP
from gpt2block.ops.engines.gemm_mma import epilogue

FILE = "matmul/prompt/wgmma.cu"
KERNEL = "gemm_wgmma"
FP8_FILE = "matmul/prompt/wgmma_fp8.cu"
FP8_KERNEL = "gemm_fp8_wgmma"
GGUF_FILE = "matmul/prompt/wgmma_gguf.cu"
GGUF_KERNEL = "gemm_gguf_wgmma"
HI_LO_FILE = "matmul/prompt/wgmma_hi_lo.cu"
HI_LO_KERNEL = "gemm_split_wgmma"
SLICE = 64  # values along K in a slice
CONSUMERS = 2  # warpgroups of a block that multiply
THREADS = 128 * (1 + CONSUMERS)
BUFFERS = 2  # output chunks per warpgroup that can be in flight to device memory
ALIGNMENT = 1024  # bytes to which the ring of slices in shared memory is aligned
MAX_SHARED = 227 * 1024  # maximum bytes of shared memory per block
MAX_GGUF_STAGES = 3  # maximum slices of K in the ring of GGUF blocks


class WgmmaGemmTile(NamedTuple):
    """Sizes of a tile (constants of lib/matmul/wgmma.cuh) and its estimated times on an H200."""

    rows: int
    columns: int
    warpgroup: tuple[int, int]  # rows, columns of a warpgroup: the whole tile or half of it
    stages: int  # slices of K in the ring in shared memory
    chunk: int  # columns of an output chunk (a warpgroup's outputs that are stored at a time)
    split_k: int  # blocks of a cluster, each of which multiplies 1 / split_k of K
    shares: int  # blocks of a cluster among which loads of w are divided
    start_us: float  # us per launch
    slice_us: float  # us per slice of K
    wave_us: float  # us per tile, in addition to its slices
    stream: bool = False  # whether clusters get equal numbers of slices instead of whole tiles

    @property
    def cluster(self) -> int:
        return self.split_k * self.shares


# start_us, slice_us and wave_us are fitted to products of GPT-2 (M from 128 to 8192) and of Llama
# 7B (M from 512 to 2048). The times were measured in sequences of overlapping launches, which
# separate the three times only roughly. slice_us is mostly shared-memory traffic: writing the
# slice, and reading its rows for wgmma. Epilogues take little time if each warpgroup has its own
# tile. For tiles with 176 columns, times are estimated from tiles with 192 columns. For N = 11008,
# 176 columns save 4 % of the time at 1,024 rows and nothing at 512 rows.
TILES = (
    WgmmaGemmTile(128, 192, (128, 192), 4, 64, 1, 2, 2.4, 0.437, 1.1),
    WgmmaGemmTile(128, 192, (64, 192), 4, 64, 1, 2, 0.8, 0.436, 2.5),
    WgmmaGemmTile(128, 176, (128, 176), 5, 16, 1, 2, 2.4, 0.415, 1.1),
    WgmmaGemmTile(128, 144, (64, 144), 5, 16, 1, 2, 0.7, 0.400, 2.5),
    WgmmaGemmTile(128, 128, (128, 128), 6, 32, 1, 2, 2.4, 0.380, 0.8),
    WgmmaGemmTile(128, 128, (64, 128), 6, 32, 1, 2, 0.8, 0.382, 1.8),
    WgmmaGemmTile(128, 96, (128, 96), 6, 32, 1, 2, 2.2, 0.275, 0.5),
    WgmmaGemmTile(128, 96, (64, 96), 7, 32, 1, 1, 0.6, 0.285, 1.5),
    WgmmaGemmTile(64, 96, (64, 96), 8, 32, 1, 2, 2.0, 0.151, 0.4),
    WgmmaGemmTile(64, 64, (64, 32), 8, 32, 1, 1, 1.2, 0.154, 0.7),
    WgmmaGemmTile(128, 96, (64, 96), 6, 16, 2, 1, 0.0, 0.247, 3.5),
    WgmmaGemmTile(128, 64, (64, 64), 8, 16, 2, 1, 0.0, 0.195, 2.8),
    WgmmaGemmTile(64, 64, (64, 32), 8, 16, 2, 1, 0.0, 0.168, 2.1),
    WgmmaGemmTile(128, 64, (64, 64), 8, 16, 4, 1, 0.0, 0.228, 2.7),
)

# Tiles of kernels that keep weights in registers: rows of a tile are rows of w, and its columns are
# rows of a. The times are fitted to products of GPT-2 and Llama 7B with FP8 weights and M from 128
# to 2048. Other measured tiles, most of them with a single warpgroup, were never the fastest.
OF_REGISTERS = (
    WgmmaGemmTile(128, 256, (64, 256), 5, 32, 1, 2, 0.4, 0.655, 2.2),
    WgmmaGemmTile(128, 192, (64, 192), 6, 32, 1, 2, 0.0, 0.500, 2.7),
    WgmmaGemmTile(128, 128, (64, 128), 8, 32, 1, 2, 0.7, 0.367, 1.2),
    WgmmaGemmTile(128, 96, (64, 96), 8, 32, 1, 1, 0.7, 0.327, 1.1),
    WgmmaGemmTile(64, 64, (64, 64), 8, 32, 1, 1, 1.9, 0.246, 0.0),
)

# STREAMED: tiles for calls that provide memory for partial sums, which one cluster passes to the
# next. STREAM_K_US: time of this transfer in us, estimated from products of Llama 7B with 512 rows
# on an H100.
STREAMED = tuple(tile._replace(stream=True) for tile in OF_REGISTERS if tile.shares > 1)
STREAM_K_US = 4.0
FLAGS = 1024  # floats before the partial sums: flags that say whether a warpgroup's sums are stored

MAX_ROWS = max(tile.rows for tile in OF_REGISTERS)

# Tiles for HiLoMatrix operands, whose kernel keeps three accumulators per output.
HI_LO_TILES = (
    WgmmaGemmTile(64, 128, (64, 128), 4, 32, 1, 2, 2.2, 0.471, 1.6),
    WgmmaGemmTile(64, 96, (64, 96), 5, 32, 1, 2, 2.0, 0.355, 1.5),
    WgmmaGemmTile(64, 48, (64, 48), 7, 16, 1, 1, 2.0, 0.246, 0.7),
)


def choose_tile(
    tiles: tuple[WgmmaGemmTile, ...], M: int, N: int, K: int, split_k: bool, sms: int
) -> WgmmaGemmTile:
    """Return the tile with the shortest estimated time. split_k: whether a tile may split K."""
    slices = ceil(K / SLICE)

    def us(tile: WgmmaGemmTile) -> float:
        waves = _tiles(tile, M, N) / _concurrent_clusters(tile, sms)
        if tile.stream:
            ends = STREAM_K_US + ceil(waves) * tile.wave_us
            return tile.start_us + ends + waves * slices * tile.slice_us if waves >= 1 else inf
        waves = ceil(waves)
        return tile.start_us + waves * (ceil(slices / tile.split_k) * tile.slice_us + tile.wave_us)

    allowed = (t for t in tiles if t.split_k == 1 or (split_k and t.split_k <= slices))
    return min(allowed, key=us)


def _tiles(tile: WgmmaGemmTile, M: int, N: int) -> int:
    """Number of units of work in (M, N): groups of `tile.shares` tiles that share loads of w."""
    return ceil(M / (tile.rows * tile.shares)) * ceil(N / tile.columns)


def _concurrent_clusters(tile: WgmmaGemmTile, sms: int) -> int:
    """Estimated number of clusters that run at once. Clusters of 3+ blocks leave SMs unused."""
    return sms // tile.cluster if tile.cluster < 3 else 8 * sms // (9 * tile.cluster)


@lru_cache(maxsize=1024)
def geometry(
    M: int,
    N: int,
    K: int,
    *,
    hi_lo: bool = False,
    gelu: bool = False,
    residual: bool = False,
    other_out: bool = False,
    scaled: bool = False,
    early: bool = True,
    split_k: bool = False,
    fp8: bool = False,
    row_group: int = 0,
    streams: bool = False,
    sms: int,
    tile: WgmmaGemmTile | None = None,
) -> tuple[Geometry, WgmmaGemmTile]:
    """Return a gemm_*wgmma kernel's launch geometry, and the tile from which tensor maps follow.

    a is (M, K), w (N, K). other_out, scaled, early, tile: as in `geometry` of `_gemm_mma`. Unless K
    is split, the result has the same bits for any tile. fp8: whether w is FP8, for gemm_fp8_wgmma.
    row_group: bytes of eight rows of w in GGUF blocks, for gemm_gguf_wgmma; 0 for other weights.
    These two kernels multiply w by a, in this order, and do not split K. streams: whether the call
    provides `workspace_floats` floats of memory to these two kernels.
    """
    turned = fp8 or row_group > 0
    of_registers = OF_REGISTERS + STREAMED * streams
    candidates = HI_LO_TILES if hi_lo else of_registers if turned else TILES
    if turned:
        M, N = N, M
    tile = tile or choose_tile(candidates, M, N, K, split_k and candidates is TILES, sms)
    chunks = BUFFERS * (hi_lo == other_out)  # only 16-bit results pass through shared memory
    if hi_lo:
        kernel, floats = HI_LO_KERNEL, 2 * tile.warpgroup[1]
    elif turned:
        kernel = FP8_KERNEL if fp8 else GGUF_KERNEL
        floats = (1 + scaled) * tile.warpgroup[0]
    else:
        kernel, floats = KERNEL, (1 + scaled) * tile.warpgroup[1] // tile.split_k
    # chunks and floats (of bias and scales) are numbers per warpgroup
    of_rows = 0 if row_group else 1 if fp8 else 2  # bytes per value of the tile's rows
    shared = shared_bytes(tile, 1 + hi_lo, chunks, floats, of_rows)
    if row_group:
        shared += MAX_GGUF_STAGES * (tile.rows // ROW_GROUP * row_group + 16) + 16
        while shared > MAX_SHARED:
            tile = tile._replace(stages=tile.stages - 1)
            shared -= 2 * SLICE * tile.columns + 16  # bytes of a stage, and of its barriers
    ends = epilogue(hi_lo, gelu, residual, other_out, scaled)
    if not early:
        ends += (("GEMM_EARLY", 0),)
    return grid_geometry(kernel, tile, M, N, sms, shared, ends), tile


def grid_geometry(
    kernel: str, tile: WgmmaGemmTile, M: int, N: int, sms: int, shared: int, ends: Defines
) -> Geometry:
    """Return the launch geometry of a kernel based on lib/matmul/wgmma.cuh, for a result (M, N).

    ends: compile-time constants that only this kernel has.
    """
    rows, columns = tile.warpgroup
    defines = (
        *defines_of(GEMM_M=tile.rows, GEMM_N=tile.columns, GEMM_GROUP_M=rows, GEMM_GROUP_N=columns),
        *defines_of(GEMM_STAGES=tile.stages, GEMM_SPLITS=tile.split_k, GEMM_SHARES=tile.shares),
        *defines_of(GEMM_CHUNK=tile.chunk),
        *nonzero_defines(GEMM_STREAM=tile.stream),
        *ends,
    )
    # A cluster processes several tiles, one after the other, or only one tile if K is split.
    clusters = _tiles(tile, M, N)
    if tile.split_k == 1:
        clusters = min(clusters, sms // tile.shares)
    return Geometry(kernel, (clusters * tile.cluster,), (THREADS,), shared, defines)


def workspace_floats(sms: int) -> int:
    """Number of floats, initially 0, for flags and sums that clusters pass to each other."""
    return FLAGS + sms * max(tile.rows * tile.columns for tile in STREAMED)


def shared_bytes(
    tile: WgmmaGemmTile, parts: int, chunks: int, floats: int, of_rows: int = 2
) -> int:
    """Bytes of shared memory per block: slices, output, received sums, bias and scales, barriers.

    chunks, floats: numbers per warpgroup. of_rows: bytes per element of the tile's rows in the
    ring of slices; an element of its columns has 2 bytes.
    """
    received = 4 * (tile.split_k - 1) * tile.rows * (tile.columns // tile.split_k)
    stage = SLICE * parts * (of_rows * tile.rows + 2 * tile.columns)
    each = chunks * 64 * tile.chunk * 2 + 4 * floats
    barriers = 8 * (2 * tile.stages + CONSUMERS * (BUFFERS + 2))
    return ALIGNMENT + tile.stages * stage + received + CONSUMERS * each + barriers
