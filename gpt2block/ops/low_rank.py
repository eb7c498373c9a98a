"""Low-rank terms of products (LoRA), of a different adapter for each sequence.

Kernels: matmul/low_rank.cu. A row has the same bits next to any other rows.
"""

from __future__ import annotations

from math import ceil, gcd

from gpt2block.cuda.cards import gpu
from gpt2block.cuda.kernels import PORTABLE, Geometry, Launch, launch_at
from gpt2block.errors import InputError
from gpt2block.ops.call import Call, UncheckedCall, storage
from gpt2block.ops.operands import check_operand, stored_defines
from gpt2block.ops.operation import Operation, variant

FILE = "matmul/low_rank.cu"
COLUMNS = 1024  # columns of a tile of spans; the kernel calls COLUMNS TILE
# Constants of the kernel, which calls BLOCK_COLUMNS COLUMNS
BLOCK_COLUMNS, THREADS, BLOCK_ROWS, ROWS = 128, 256, 64, 8
MAX_CHUNK = 512  # most channels of x in shared memory
WIDE_CHUNK = 256  # most channels next to which there are 32 rows of a in shared memory, else 16
KERNELS = {
    True: "add_low_rank",
    False: "add_low_rank_mixed",
}  # keys: whether x and y have one dtype


@variant("terms", FILE, *KERNELS.values(), dtypes=("float32", "float16", "bfloat16"))
def _terms(c: Call) -> Launch:
    """Launch one of KERNELS. row and adapter are not read back to the host."""
    width, b_width = gcd(4, c.K), gcd(4, c.N)
    c.check_addresses("x", "a", loaded=width)
    c.check_addresses("b", loaded=b_width)
    parts = PORTABLE if gpu().has_clusters else 1
    chunk = min(MAX_CHUNK, 32 * width * ceil(c.K / (32 * width * parts)))
    ranks = 32 if chunk <= WIDE_CHUNK else 16
    defines = (
        ("LOW_RANK_WIDTH", width),
        ("LOW_RANK_B_WIDTH", b_width),
        ("LOW_RANK_PARTS", parts),
        ("LOW_RANK_CHUNK", chunk),
        ("LOW_RANK_UP", int(c.up is not None)),
        ("LOW_RANK_STORED", int(c.stored)),
        *stored_defines("LOW_RANK_TERMS", c.operand),
    )
    blocks = parts * ceil(c.P / (parts * BLOCK_COLUMNS))
    grid = (blocks, min(c.L, c.M, BLOCK_ROWS), ceil(c.M / BLOCK_ROWS))
    args = (c.x, c.a, c.b, c.spans, c.row, c.adapter, c.y, c.up, c.M, c.N, c.K, c.B, c.L)
    floats = (ROWS + ranks) * chunk + ranks * (BLOCK_COLUMNS + (2 * parts + 1) * ROWS)
    shared = 16 * ceil((floats + BLOCK_ROWS + 2) / 4)
    geometry = Geometry(c.kernel, grid, (THREADS,), shared, defines)
    return launch_at(FILE, geometry, args, c.x_storage)


def _prepare(unchecked: UncheckedCall) -> Call:
    """Check a call, but not the numbers in spans, row and adapter.

    operand: x in float32 has the values of this `Operand`'s terms, in which it is stored if
    `stored`.
    """
    c = unchecked.checked(x_storage=storage(unchecked.inputs[1]))
    c.operand = c.operand and c.operand._replace(summed=False)  # sums follow the terms
    check_operand(c.operand, c.K)
    columns = c.N if c.up is None else 2 * c.N
    tiles = ceil(columns / COLUMNS)
    if (columns, tiles) != (c.P, c.S):
        raise InputError(f"b: expected {columns} columns in {tiles} tiles, got {c.P} in {c.S}")
    c.kernel = KERNELS[c.x_storage == c.storage]
    if c.storage not in ("float32", c.x_storage):
        raise InputError(f"y: expected float32, or the dtype of x, {c.x_storage}, got {c.storage}")
    return c


ADD_LOW_RANK = Operation(
    name="add_low_rank",
    variants=(_terms,),
    options={"operand": None, "stored": False},
    prepare=_prepare,
)
