"""Matrix product with bias in float32, a w + bias: a simple kernel and several faster kernels.

Use it for plain float32 matrices (K, N), as in LeetGPU's GPT-2 block challenge. `linear` takes
weights of any dtype and fuses LayerNorm or GELU; `gemm` uses tensor cores. Kernels:
learn/matmul/skeleton.cu, learn/matmul/ladder.cu, learn/matmul/registers.cu.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from gpt2block.cuda.arrays import CudaArray, contiguous, multiprocessors, row_alignment
from gpt2block.cuda.kernels import Geometry, Launch, launch_at, size_defines
from gpt2block.ops.call import Call, refuse
from gpt2block.ops.engines.rows import WARP
from gpt2block.ops.operation import Operation, Workload, as_stated, variant
from gpt2block.ops.products import count_tiles, fastest
from gpt2block.ops.warm import call

SKELETON = "learn/matmul/skeleton.cu"
LADDER = "learn/matmul/ladder.cu"
REGISTERS = "learn/matmul/registers.cu"
LLM_C = "named after llm.c's matmul kernels"
TILE = 16  # side of the square thread block, and of the output tile, of matmul_bias_tiled
MAX_ROWS = 65535 * TILE  # maximum rows of variant tiled: limit of the grid's second axis
TOO_MANY_ROWS = f"{{:,}} rows (B · T): matmul_bias_tiled takes at most {MAX_ROWS:,}"
MAX_SIZE = 2**31 - 1024  # maximum of M, K and N: range of an int, minus one tile


class MatmulTile(NamedTuple):
    """Sizes of a tile, constants of matmul_forward_kernel3, and an SM's speed on such tiles."""

    rows: int
    columns: int
    side: int  # output rows per thread, for 8 columns
    depth: int  # values along K in a slice
    groups: int  # groups of warps per tile; doubled if an SM has at most one tile
    stages: int
    speed: float  # speed of an SM that computes such tiles, relative to the largest tile


# Larger tiles come first: `fastest` returns the first of equally fast tiles. With these speeds, the
# estimate selects the fastest tile, or one within 3 %, for GPT-2's products with M 128, 1024 and
# 8192 on an H200.
TILES = (
    MatmulTile(128, 128, 8, 16, 1, 2, 1.0),
    MatmulTile(64, 128, 8, 16, 2, 2, 0.88),
    MatmulTile(32, 96, 4, 32, 2, 3, 0.81),
    MatmulTile(32, 32, 4, 64, 4, 3, 0.53),
)


@lru_cache(maxsize=1024)
def choose_tile(M: int, N: int, sms: int) -> tuple[MatmulTile, int]:
    """Return the tile estimated to be fastest on `sms` multiprocessors, and its groups of warps.

    The groups are doubled if an SM has at most one tile, because one tile has too few warps.
    """
    tile = fastest(TILES, M, N, sms)
    return tile, tile.groups * (2 if count_tiles(tile, M, N) <= sms else 1)


def registers_geometry(tile: MatmulTile, groups: int, M: int, N: int, width: int) -> Geometry:
    """Geometry of variant registers. width: 4 if rows of w and out align to 16 bytes, else 1."""
    warps = tile.rows // (8 * tile.side) * (tile.columns // WARP) * groups
    buffers = tile.stages * tile.depth * (tile.rows + 4 + tile.columns)
    sums = groups // 2 * tile.rows * tile.columns
    sizes = tile._replace(groups=groups)
    defines = (
        *size_defines("MM", sizes, "rows columns side depth groups stages"),
        ("MM_BLOCKS", 2 if warps <= 8 else 1),
        ("MM_WIDTH", width),
    )
    grid, shared = (count_tiles(tile, M, N),), 4 * max(buffers, sums)
    return Geometry("matmul_forward_kernel3", grid, (WARP * warps,), shared, defines)


def _args(c: Call) -> tuple[object, ...]:
    M, K, N = c.rows, c.K, c.N
    expected = f"a {c.a.shape}, w {c.w.shape}: expected at most {MAX_SIZE:,} rows or columns"
    refuse(max(M, K, N) > MAX_SIZE, expected)
    return c.a, c.w, c.bias, c.output("out"), M, K, N


def _tiled_args(c: Call) -> tuple[object, ...]:
    refuse(c.rows > MAX_ROWS, TOO_MANY_ROWS.format(c.rows))
    return _args(c)


_naive = as_stated("naive", LADDER, "matmul_forward_kernel1", _args, source=LLM_C)
_tiled = as_stated("tiled", SKELETON, "matmul_bias_tiled", _tiled_args)
_coarsened = as_stated("coarsened", LADDER, "matmul_forward_kernel2", _args, source=LLM_C)


@variant("registers", REGISTERS, "matmul_forward_kernel3", source=LLM_C)
def _registers(c: Call) -> Launch:
    width = 4 if row_alignment(c.N, c.w, c.output("out")) == 16 else 1
    chosen = choose_tile(c.rows, c.N, multiprocessors())
    geometry = registers_geometry(*chosen, c.rows, c.N, width)
    return launch_at(REGISTERS, geometry, _args(c))


OPERATION = Operation(
    name="matmul_bias",
    variants=(_naive, _tiled, _coarsened, _registers),
    options={"variant": "tiled"},
    workload=Workload(
        document="LeetGPU's GPT-2 block challenge",
        idea="a · w + bias",
        sizes={"M": 1024, "K": 768, "N": 3072},  # first feed-forward product of GPT-2
        optional=("bias",),
        traffic=lambda s: 4 * (s["M"] * s["K"] + s["K"] * s["N"] + s["M"] * s["N"]),
        flops=lambda s: 2 * s["M"] * s["K"] * s["N"],
        bound="compute",
        small=({"M": 1, "K": 5, "N": 7}, {"M": 17, "K": 40, "N": 19}, {"M": 33, "K": 70, "N": 130}),
        arrays={"a": "A", "w": "B", "out": "C"},
    ),
)


def matmul_bias(
    a: CudaArray, w: CudaArray, bias: CudaArray | None = None, variant: str = "tiled"
) -> CudaArray:
    """Compute `reference.matmul_bias` on float32 CuPy arrays. Raises InputError.

    a (..., K), w (K, N), bias (N,) or None → (..., N). Variants: naive, tiled, coarsened,
    registers. Variant tiled takes at most 1,048,560 rows, because the second axis of its grid
    counts tiles of 16 rows. All variants except registers add an output's products in order of k.
    """
    return call(OPERATION, contiguous(a, w, bias), variant=variant).out
