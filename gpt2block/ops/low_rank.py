"""Low-rank terms of products (LoRA), of a different adapter for each sequence.

Kernels: matmul/low_rank.cu. A row has the same bits next to any other rows.
"""

from __future__ import annotations

from math import ceil, gcd

from gpt2block.cuda.kernels import Geometry, Launch, launch_at
from gpt2block.errors import InputError
from gpt2block.ops.call import Call, UncheckedCall, storage
from gpt2block.ops.operands import check_operand, stored_defines
from gpt2block.ops.operation import Operation, variant

FILE = "matmul/low_rank.cu"
# Constants of the kernel, which calls COLUMNS TILE
COLUMNS, THREADS, BLOCK_ROWS, ROWS, RANKS, CHUNK = 256, 256, 64, 8, 2, 1024
KERNELS = {  # names by whether x and y are float32
    (True, True): "add_low_rank",
    (False, False): "add_low_rank_narrow",
    (False, True): "add_low_rank_mixed",
}
MAX_SPAN = 768  # most rows of a span: ranks of up to 256 of Q, K and V


@variant("terms", FILE, *KERNELS.values(), dtypes=("float32", "float16", "bfloat16"))
def _terms(c: Call) -> Launch:
    """Launch one of KERNELS. row and adapter are not read back to the host."""
    c.check_addresses("x", "a", loaded=gcd(4, c.K))
    span = RANKS * ceil(min(c.R, MAX_SPAN) / RANKS)
    defines = (
        ("LOW_RANK_WIDTH", gcd(4, c.K)),
        ("LOW_RANK_SPAN", span),
        ("LOW_RANK_UP", int(c.up is not None)),
        ("LOW_RANK_STORED", int(c.stored)),
        *stored_defines("LOW_RANK_TERMS", c.operand),
    )
    grid = (c.S, c.L, ceil(c.M / BLOCK_ROWS))
    args = (c.x, c.a, c.b, c.spans, c.row, c.adapter, c.y, c.up, c.M, c.N, c.K, c.B)
    shared = 4 * (ROWS * (CHUNK + span) + BLOCK_ROWS + 1)
    geometry = Geometry(c.kernel, grid, (THREADS,), 16 * ceil(shared / 16), defines)
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
    narrow = c.x_storage if c.storage != "float32" else "float32"
    c.kernel = KERNELS.get((c.x_storage == "float32", c.storage == "float32"))
    if c.kernel is None or c.storage != narrow:
        raise InputError(f"y: expected float32, or the dtype of x, {c.x_storage}, got {c.storage}")
    return c


ADD_LOW_RANK = Operation(
    name="add_low_rank",
    variants=(_terms,),
    options={"operand": None, "stored": False},
    prepare=_prepare,
)
