"""The linear layer for many rows with weights in blocks of GGUF: geometry of decode_gguf.cu."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from gpt2block.cuda.kernels import Geometry
from gpt2block.ops._linear_mma import FLOAT, UNIT, splits
from gpt2block.ops._linear_mma_tiles import CLUSTER_CAPABILITY
from gpt2block.ops._products import room
from gpt2block.ops._rows import WARP, power_of_two
from gpt2block.weights.gguf import BORDER

FILE = "matmul/decode_gguf.cu"
COLUMNS = BORDER  # of a warp
WARPS = (8, 4, 2, 1)  # of a block
MOST_ROWS = 32  # of a block: 64 need so many registers that an SM has one block
FLIGHT, BLOCKS = 2, 2  # units of K in flight, and blocks of an SM, measured on an H100


@lru_cache(maxsize=1024)
def geometry(
    kernel: str,
    M: int,
    N: int,
    K: int,
    *,
    terms: int,
    begins: tuple[int, ...],
    capability: int,
    sms: int,
    most_shared: int,
) -> Geometry | None:
    """The launch for x (M, K) and weights (N, K); None where a row does not fit.

    terms: of x. begins: the first outputs of all types, multiples of COLUMNS. most_shared: bytes
    of shared memory that a block can have.
    """
    parts, each = splits(K)
    cluster = parts if capability >= CLUSTER_CAPABILITY else 1
    fitting = [n for n in WARPS if not any(at % (COLUMNS * n) for at in begins)]
    rows = min(MOST_ROWS, power_of_two(M))
    while shared_bytes(rows, fitting[0], K, terms, cluster) > most_shared:
        rows //= 2
        if not rows:
            return None

    def blocks(warps: int) -> int:
        return cluster * ceil(N / (COLUMNS * warps)) * ceil(M / rows)

    warps = next((n for n in fitting if blocks(n) >= sms), fitting[-1])
    shared = shared_bytes(rows, warps, K, terms, cluster)
    defines = (
        ("LM_K", K),
        ("LM_ROWS", rows),
        ("LM_WARPS", warps),
        ("LM_FLIGHT", min(each, FLIGHT)),
        ("LM_BLOCKS", BLOCKS if shared <= room(most_shared, BLOCKS) else 1),
        ("GGUF_CLUSTER", cluster),
    )
    grid = cluster * ceil(N / (COLUMNS * warps)), ceil(M / rows)
    return Geometry(kernel, grid, (WARP * warps,), shared, defines)


def shared_bytes(rows: int, warps: int, K: int, terms: int, cluster: int) -> int:
    """Bytes of shared memory: a split of rows of x, sums of the outputs."""
    length, padding = splits(K)[1] * UNIT, 64
    split = terms * (2 * length + padding)
    row = ceil(split / 128) * 128 + padding
    plane = FLOAT * (COLUMNS * warps + 8) if cluster > 1 else 0
    return rows * (row + plane)
