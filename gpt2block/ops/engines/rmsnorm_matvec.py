"""Launch geometry of matmul/decode/rmsnorm_cores.cu, which reads all weights once for four rows."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Literal

from gpt2block.cuda.kernels import Geometry, defines_of
from gpt2block.ops.engines.rows import WARP, power_of_two

FILE = "matmul/decode/rmsnorm_cores.cu"
MAX_ROWS = 4  # maximum rows of x per block
MAX_SUMS = 64  # maximum sums that a thread keeps in registers
Pairing = Literal["neighbours", "halves", "two matrices"]


@lru_cache(maxsize=1024)
def geometry(
    M: int,
    N: int,
    K: int,
    x_width: int,
    weight: int,
    layout: str,
    pairing: Pairing,
    head_dim: int,
    alignment: int,
    max_shared: int,
) -> Geometry | None:
    """Return the geometry of a matvec kernel, or None if a row does not fit in shared memory.

    x_width: values of x per load. weight: bytes of a weight. pairing: the two columns that a thread
    combines: neighbours, columns half a head apart, or columns of two matrices. alignment:
    alignment of the weights in bytes. Threads, strips and unrolling were the fastest for one row on
    an H200.
    """
    two = pairing == "two matrices"
    halves = pairing == "halves"
    rows = min(MAX_ROWS, power_of_two(M))
    strips = 2 if layout == "NK" or pairing != "neighbours" else 1
    unit = K if layout == "NK" else head_dim // 2 if halves else N  # must be divisible by `width`
    width = 16 // weight
    if layout == "KN":
        width = min(width, MAX_SUMS // (strips * rows))
    while unit % width or alignment % (width * weight):
        width //= 2
    if layout == "NK":
        threads, lanes = 256, WARP
        step, pairs = WARP * width, threads // WARP
        unroll = 8 if weight > 1 else 2 if two else 4
        parts = 0
    else:
        threads = 256 if two else 512
        lanes = min(WARP, max(1, (64 if two else 32 // strips) // width))
        while halves and unit % (lanes * width):
            lanes //= 2
        step, pairs = threads // lanes, lanes * width * strips // 2
        unroll = 8 if weight > 1 and strips == 1 else 4
        parts = 4 * threads // WARP * strips * lanes * width
    row = 4 * step * ceil(K / step) + parts
    while rows > 1 and rows * row > max_shared:
        rows //= 2
    if row > max_shared:
        return None
    defines = (
        *defines_of(MV_NK=int(layout == "NK"), MV_ROWS=rows, MV_X=x_width, MV_WIDTH=width),
        *defines_of(MV_UNROLL=min(unroll, ceil(K / step)), MV_THREADS=threads, MV_LANES=lanes),
        *defines_of(MV_STRIPS=strips, MV_HALF_SPLIT=int(halves)),
    )
    columns = N if two else ceil(N / 2)
    kernel = "rmsnorm_ffn_matvec" if two else "rmsnorm_matvec"
    grid = (ceil(columns / pairs), ceil(M / rows))
    return Geometry(kernel, grid, (threads,), rows * row, defines)
