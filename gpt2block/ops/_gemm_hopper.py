"""Tiles and geometry of matmul/hopper*.cu, by wgmma."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, inf
from typing import NamedTuple

from gpt2block.cuda.kernels import Defines, Geometry
from gpt2block.ops._gemm_mma import epilogue
from gpt2block.weights.gguf import OCTET

FILE = "matmul/hopper.cu"
KERNEL = "gemm_hopper"
FP8_FILE = "matmul/hopper_fp8.cu"
FP8_KERNEL = "gemm_fp8_hopper"
GGUF_FILE = "matmul/hopper_gguf.cu"
GGUF_KERNEL = "gemm_gguf_hopper"
TWO_PART_FILE = "matmul/hopper_two_part.cu"
TWO_PART_KERNEL = "gemm_split_hopper"
SLICE = 64  # of K
CONSUMERS = 2  # warpgroups that multiply
THREADS = 128 * (1 + CONSUMERS)
BUFFERS = 2  # chunks of a warpgroup's output in flight
ALIGNMENT = 1024  # of shared memory
MOST_SHARED = 227 * 1024  # of a block
MOST_GGUF_STAGES = 3  # of blocks


class HopperGemmTile(NamedTuple):
    """The constants of matmul/hopper.cuh, and the time such tiles take on an H200."""

    rows: int
    columns: int
    group: tuple[int, int]  # rows and columns of a warpgroup: all of the tile, or half
    stages: int
    chunk: int
    split_k: int  # parts that K is divided into, a block each
    shares: int  # blocks that load w together
    start_us: float  # once
    slice_us: float  # for a slice of K
    wave_us: float  # for a tile, besides its slices
    stream: bool = False  # whether clusters have equal parts of all slices, not whole tiles

    @property
    def cluster(self) -> int:
        return self.split_k * self.shares


# Fitted to the products of GPT-2 at M from 128 to 8192, and of Llama 7B at 512 to 2048, in a row of
# overlapping launches: the three times are apart only roughly. What a slice takes is mostly shared
# memory's, which takes it in and gives its rows to wgmma. Where each warpgroup has a tile of its
# own, epilogues cost little. The times of 176 columns are estimated from those of 192: of N = 11008
# they save 4 % at 1,024 rows and nothing at 512.
TILES = (
    HopperGemmTile(128, 192, (128, 192), 4, 64, 1, 2, 2.4, 0.437, 1.1),
    HopperGemmTile(128, 192, (64, 192), 4, 64, 1, 2, 0.8, 0.436, 2.5),
    HopperGemmTile(128, 176, (128, 176), 5, 16, 1, 2, 2.4, 0.415, 1.1),
    HopperGemmTile(128, 144, (64, 144), 5, 16, 1, 2, 0.7, 0.400, 2.5),
    HopperGemmTile(128, 128, (128, 128), 6, 32, 1, 2, 2.4, 0.380, 0.8),
    HopperGemmTile(128, 128, (64, 128), 6, 32, 1, 2, 0.8, 0.382, 1.8),
    HopperGemmTile(128, 96, (128, 96), 6, 32, 1, 2, 2.2, 0.275, 0.5),
    HopperGemmTile(128, 96, (64, 96), 7, 32, 1, 1, 0.6, 0.285, 1.5),
    HopperGemmTile(64, 96, (64, 96), 8, 32, 1, 2, 2.0, 0.151, 0.4),
    HopperGemmTile(64, 64, (64, 32), 8, 32, 1, 1, 1.2, 0.154, 0.7),
    HopperGemmTile(128, 96, (64, 96), 6, 16, 2, 1, 0.0, 0.247, 3.5),
    HopperGemmTile(128, 64, (64, 64), 8, 16, 2, 1, 0.0, 0.195, 2.8),
    HopperGemmTile(64, 64, (64, 32), 8, 16, 2, 1, 0.0, 0.168, 2.1),
    HopperGemmTile(128, 64, (64, 64), 8, 16, 4, 1, 0.0, 0.228, 2.7),
)

# For weights in registers: rows are those of w, columns those of a. Fitted, with FP8 ones, to
# products of GPT-2 and of Llama 7B at M from 128 to 2048. Other tiles, most of them of one
# warpgroup, were never the fastest.
OF_REGISTERS = (
    HopperGemmTile(128, 256, (64, 256), 5, 32, 1, 2, 0.4, 0.655, 2.2),
    HopperGemmTile(128, 192, (64, 192), 6, 32, 1, 2, 0.0, 0.500, 2.7),
    HopperGemmTile(128, 128, (64, 128), 8, 32, 1, 2, 0.7, 0.367, 1.2),
    HopperGemmTile(128, 96, (64, 96), 8, 32, 1, 1, 0.7, 0.327, 1.1),
    HopperGemmTile(64, 64, (64, 64), 8, 32, 1, 1, 1.9, 0.246, 0.0),
)

# Where there is memory for sums that a cluster hands to the next one. HANDED_US is what that takes,
# estimated from products of 512 rows of Llama 7B on an H100.
STREAMED = tuple(tile._replace(stream=True) for tile in OF_REGISTERS if tile.shares > 1)
HANDED_US = 4.0
FLAGS = 1024  # floats before the sums, for flags that say which of them are there

MOST_ROWS = max(tile.rows for tile in OF_REGISTERS)

# For two-part matrices: three accumulators an output.
TWO_PART_TILES = (
    HopperGemmTile(64, 128, (64, 128), 4, 32, 1, 2, 2.2, 0.471, 1.6),
    HopperGemmTile(64, 96, (64, 96), 5, 32, 1, 2, 2.0, 0.355, 1.5),
    HopperGemmTile(64, 48, (64, 48), 7, 16, 1, 1, 2.0, 0.246, 0.7),
)


def choose_tile(
    tiles: tuple[HopperGemmTile, ...], M: int, N: int, K: int, split_k: bool, sms: int
) -> HopperGemmTile:
    """The tile with the shortest estimated time; K is not divided unless `split_k`."""
    slices = ceil(K / SLICE)

    def us(tile: HopperGemmTile) -> float:
        waves = _tiles(tile, M, N) / _at_once(tile, sms)
        if tile.stream:
            ends = HANDED_US + ceil(waves) * tile.wave_us
            return tile.start_us + ends + waves * slices * tile.slice_us if waves >= 1 else inf
        waves = ceil(waves)
        return tile.start_us + waves * (ceil(slices / tile.split_k) * tile.slice_us + tile.wave_us)

    allowed = (t for t in tiles if t.split_k == 1 or (split_k and t.split_k <= slices))
    return min(allowed, key=us)


def _tiles(tile: HopperGemmTile, M: int, N: int) -> int:
    """Tiles, or where blocks of a cluster have tiles below each other, such groups of tiles."""
    return ceil(M / (tile.rows * tile.shares)) * ceil(N / tile.columns)


def _at_once(tile: HopperGemmTile, sms: int) -> int:
    """Estimated clusters that run at once; GPU partitions differ in their number of SMs."""
    return sms // tile.cluster if tile.cluster < 3 else 8 * sms // (9 * tile.cluster)


@lru_cache(maxsize=1024)
def geometry(
    M: int,
    N: int,
    K: int,
    *,
    two_part: bool = False,
    gelu: bool = False,
    residual: bool = False,
    other_out: bool = False,
    scaled: bool = False,
    early: bool = True,
    split_k: bool = False,
    fp8: bool = False,
    octet: int = 0,
    streams: bool = False,
    sms: int,
    tile: HopperGemmTile | None = None,
) -> tuple[Geometry, HopperGemmTile]:
    """The launch of gemm_*hopper, and its tile.

    a is (M, K), w (N, K). The tile is for the tensor maps. other_out, scaled, early, tile: as for
    the geometry of mma. Without splits of K the bits are the same for any tile. fp8: w is FP8, for
    gemm_fp8_hopper; octet: w is in blocks of GGUF, with so many bytes of eight rows, for
    gemm_gguf_hopper. Both multiply w and a in this order and do not split K; streams: they have
    memory of `handed_floats`.
    """
    turned = fp8 or octet > 0
    of_registers = OF_REGISTERS + STREAMED * streams
    candidates = TWO_PART_TILES if two_part else of_registers if turned else TILES
    if turned:
        M, N = N, M
    tile = tile or choose_tile(candidates, M, N, K, split_k and candidates is TILES, sms)
    if two_part:
        kernel, chunks, floats = TWO_PART_KERNEL, BUFFERS * other_out, 2 * tile.group[1]
    elif turned:
        kernel = FP8_KERNEL if fp8 else GGUF_KERNEL
        chunks, floats = BUFFERS * (not other_out), (1 + scaled) * tile.group[0]
    else:
        kernel, chunks = KERNEL, BUFFERS * (not other_out)
        floats = (1 + scaled) * tile.group[1] // tile.split_k  # of bias and scales
    of_w = 0 if octet else 1 if fp8 else 2
    shared = shared_bytes(tile, 1 + two_part, chunks, floats, of_w)
    if octet:
        shared += MOST_GGUF_STAGES * (tile.rows // OCTET * octet + 16) + 16
        while shared > MOST_SHARED:
            tile = tile._replace(stages=tile.stages - 1)
            shared -= 2 * SLICE * tile.columns + 16
    ends = epilogue(two_part, gelu, residual, other_out, scaled)
    if not early:
        ends += (("GEMM_EARLY", 0),)
    return launched(kernel, tile, M, N, sms, shared, ends), tile


def launched(
    kernel: str, tile: HopperGemmTile, M: int, N: int, sms: int, shared: int, ends: Defines
) -> Geometry:
    """The launch of a kernel on matmul/hopper.cuh for a result (M, N); ends: its own constants."""
    rows, columns = tile.group
    defines = (
        ("GEMM_M", tile.rows),
        ("GEMM_N", tile.columns),
        ("GEMM_GROUP_M", rows),
        ("GEMM_GROUP_N", columns),
        ("GEMM_STAGES", tile.stages),
        ("GEMM_SPLITS", tile.split_k),
        ("GEMM_SHARES", tile.shares),
        ("GEMM_CHUNK", tile.chunk),
        *((("GEMM_STREAM", 1),) if tile.stream else ()),
        *ends,
    )
    # A cluster goes from tile to tile; where K is split, each has one.
    clusters = _tiles(tile, M, N)
    if tile.split_k == 1:
        clusters = min(clusters, sms // tile.shares)
    return Geometry(kernel, (clusters * tile.cluster,), (THREADS,), shared, defines)


def handed_floats(sms: int) -> int:
    """The size of memory for sums that clusters hand on, zeros at first."""
    return FLAGS + sms * max(tile.rows * tile.columns for tile in STREAMED)


def shared_bytes(
    tile: HopperGemmTile, parts: int, chunks: int, floats: int, of_rows: int = 2
) -> int:
    """Bytes: the ring, a warpgroup's chunks, received sums, its floats of columns, barriers.

    of_rows: bytes of an element of a tile's rows in the ring.
    """
    received = 4 * (tile.split_k - 1) * tile.rows * (tile.columns // tile.split_k)
    stage = SLICE * parts * (of_rows * tile.rows + 2 * tile.columns)
    each = chunks * 64 * tile.chunk * 2 + 4 * floats
    barriers = 8 * (2 * tile.stages + CONSUMERS * (BUFFERS + 2))
    return ALIGNMENT + tile.stages * stage + received + CONSUMERS * each + barriers
