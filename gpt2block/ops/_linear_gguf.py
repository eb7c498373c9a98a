"""The linear layer for many rows with weights in blocks of GGUF: geometry of decode_gguf.cu."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from gpt2block.cuda.kernels import Geometry
from gpt2block.ops._linear_mma import FLOAT, UNIT, splits
from gpt2block.ops._rows import WARP, power_of_two
from gpt2block.ops.gguf import CLUSTER_CAPABILITY

FILE = "matmul/decode_gguf.cu"
COLUMNS = 16  # of a warp
CHUNK = 32  # of K, of which blocks with minimums need the sum of x
CUT: list[tuple[int, int, int, int]] = []
WARPS = (8, 4, 2, 1)  # of a block
MOST_ROWS = 64  # of a block
MOST_FLIGHT = 2  # units of K in flight


@lru_cache(maxsize=1024)
def geometry(
    kernel: str,
    M: int,
    N: int,
    K: int,
    *,
    terms: int,
    bounds: tuple[int, ...],
    capability: int,
    sms: int,
    most_shared: int,
) -> Geometry | None:
    """The launch for x (M, K) and weights (N, K); None where types begin at other columns.

    terms: of x. bounds: the first outputs of all types but the first one. most_shared: bytes of
    shared memory that a block can have.
    """
    parts, each = splits(K)
    cluster = parts if capability >= CLUSTER_CAPABILITY else 1
    fitting = [n for n in WARPS if not any(at % (COLUMNS * n) for at in bounds)]
    if not fitting:
        return None
    rows = min(MOST_ROWS, power_of_two(M))
    while shared_bytes(rows, fitting[0], K, terms, cluster) > most_shared:
        rows //= 2
        if not rows:
            return None

    def blocks(warps: int) -> int:
        return cluster * ceil(N / (COLUMNS * warps)) * ceil(M / rows)

    warps = next((n for n in fitting if blocks(n) >= sms), fitting[-1])
    flight, of_sm = min(each, MOST_FLIGHT), 1
    if CUT:
        r, flight, w, of_sm = CUT[0]
        flight = min(each, flight)
        rows = min(rows, r)
        warps = next(n for n in fitting if n <= w)
        while of_sm > 1 and (shared_bytes(rows, warps, K, terms, cluster) + 1024) * of_sm > most_shared + 1024:
            of_sm -= 1
    defines = (
        ("LM_K", K),
        ("LM_ROWS", rows),
        ("LM_WARPS", warps),
        ("LM_FLIGHT", flight),
        ("LM_BLOCKS", of_sm),
        ("GGUF_CLUSTER", cluster),
    )
    grid = cluster * ceil(N / (COLUMNS * warps)), ceil(M / rows)
    shared = shared_bytes(rows, warps, K, terms, cluster)
    return Geometry(kernel, grid, (WARP * warps,), shared, defines)


def shared_bytes(rows: int, warps: int, K: int, terms: int, cluster: int) -> int:
    """Bytes of shared memory: a split of rows of x, sums of its chunks, sums of the outputs."""
    length, padding = splits(K)[1] * UNIT, 64
    split = terms * (2 * length + padding + FLOAT * length // CHUNK)
    row = ceil(split / 128) * 128 + padding
    plane = FLOAT * (COLUMNS * warps + 8) if cluster > 1 else 0
    return rows * (row + plane)
