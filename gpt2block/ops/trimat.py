"""The causal half of attention's scores: out[i, j] = Q_i · K_j / sqrt(HS) for j ≤ i.

A ladder of variants: naive, registers, tri3 and tri4 (learn/trimat/ladder.cu), tri5
(learn/trimat/pipelined.cu) and tri6 on tensor cores (learn/trimat/mma.cu).
"""

from __future__ import annotations

import math
from math import ceil
from typing import Any

import numpy as np

from gpt2block.cuda.arrays import CudaArray, on_16_bytes
from gpt2block.cuda.kernels import Defines, Geometry, Launch, launch_at
from gpt2block.errors import InputError
from gpt2block.ops.call import Call, UncheckedCall, accept, needs, refuse
from gpt2block.ops.operation import Operation, Sizes, Workload, as_stated, variant
from gpt2block.ops.products import RESERVED, limits
from gpt2block.ops.warm import call

FILE = "learn/trimat/ladder.cu"
PIPELINED = "learn/trimat/pipelined.cu"
MMA = "learn/trimat/mma.cu"
BLOCKS = (32, 64, 128, 256)
TILE = 128  # side of the tile of outputs that a block of tri6 computes, for short heads
MAX_HEADS = 65535  # maximum heads of all sequences: limit of an axis of the grid
MAX_BLOCKS = 2**31 - 1  # maximum blocks of a grid

# Constants of variant tri6, which runs on tensor cores.
MMA_LARGEST_HEAD = 128
MMA_THREADS = 128
MMA_BLOCKS = 3  # maximum blocks per multiprocessor: limit of registers and shared memory
MAX_SPAN = 8  # maximum tiles of K that a block multiplies by a tile of Q
CACHED = 24 << 20  # bytes of Q and K that stay in the L2 cache while out passes through it


def mma_geometry(
    B: int,
    T: int,
    NH: int,
    HS: int,
    *,
    sms: int,
    max_shared: int,
    span: int | None = None,
    together: int | None = None,
    tile: int | None = None,
) -> tuple[Geometry, tuple[int, int, int]]:
    """Return the geometry of variant tri6, and its arguments `heads`, `span` and `together`.

    sms: multiprocessors of the GPU. max_shared: bytes of shared memory that a block can have.
    span, together, tile: used instead of the best values; the bits of the result do not change.
    Raises InputError if the grid is too large.
    """
    heads, max_blocks = B * NH, MMA_BLOCKS if HS <= 64 else MMA_BLOCKS - 1
    tile = tile or (TILE if HS <= 64 else TILE // 2)
    of_row = 2 * (4 * 16 * ceil(HS / 16) + 16) + 12  # bytes of shared memory
    if tile * of_row > max_shared:
        tile = TILE // 2
    tiles, shared = ceil(T / tile), tile * of_row
    blocks = max(1, min(max_blocks, (max_shared + RESERVED) // (shared + RESERVED)))
    if span is None:  # the longest span with which there are enough blocks to fill the GPU
        span = max(1, min(MAX_SPAN, heads * tiles * (tiles + 1) // 2 // (blocks * sms)))
    if together is None:
        bands = ceil(8 * heads * T * HS / CACHED)
        together = ceil(heads / bands)
    whole, rest = divmod(tiles, span)
    segments = span * whole * (whole + 1) // 2 + rest * (whole + 1)
    if heads * segments > MAX_BLOCKS:
        raise InputError(
            f"B {B:,}, T {T:,} and {NH:,} heads make a grid of {heads * segments:,} blocks, CUDA "
            f"takes {MAX_BLOCKS:,}: use smaller batches"
        )
    defines = (("NH", NH), ("HS", HS), ("TRI_TILE", tile), ("TRI_BLOCKS", blocks))
    geometry = Geometry("matmul_tri6", (heads * segments,), (MMA_THREADS,), shared, defines)
    return geometry, (heads, span, together)


def _args(c: Call) -> tuple[object, ...]:
    return c.qkv, c.output("out"), c.T


def _heads(c: Call) -> Defines:
    return ("NH", c.NH), ("HS", c.HS)


_naive = as_stated("naive", FILE, "matmul_tri_naive", _args, _heads, blocks=BLOCKS)
_registers = as_stated("registers", FILE, "matmul_tri_registers", _args, _heads, blocks=BLOCKS)
_tri3 = as_stated("tri3", FILE, "matmul_tri3", _args, _heads, blocks=BLOCKS)
_tri4 = as_stated("tri4", FILE, "matmul_tri4", _args, _heads)
_tri5 = as_stated("tri5", PIPELINED, "matmul_tri5", _args, _heads, source="gpt2block")
_fill = as_stated(
    "fill",
    FILE,
    "trimat_fill",  # runs after each variant if `fill` is not None
    lambda c: (c.output("out"), c.T, c.B * c.NH * c.T, c.fill),
    _heads,
)


@variant("tri6", MMA, "matmul_tri6", block=MMA_THREADS, source="gpt2block")
def _tri6(c: Call) -> Launch:
    largest = f"takes heads of up to {MMA_LARGEST_HEAD} channels, got {c.HS}: use variant tri5"
    refuse(c.HS > MMA_LARGEST_HEAD, largest)
    accept(needs("has_mma", ": use variant tri5"))
    geometry, more = mma_geometry(c.B, c.T, c.NH, c.HS, **limits())
    shared, most = geometry.shared, limits()["max_shared"]
    too_large = f"heads of {c.HS} channels take {shared:,} bytes of shared memory, this GPU "
    refuse(shared > most, f"{too_large}has {most:,}: use variant tri5")
    return launch_at(MMA, geometry, (*_args(c), *more))


def _prepare(unchecked: UncheckedCall) -> Call:
    c = unchecked.checked(fill=_checked_fill(unchecked.options["fill"]))
    if c.HS % 4:
        raise InputError(
            f"qkv: head size {c.HS}: expected a multiple of 4: kernels load rows in 16 bytes"
        )
    if c.B * c.NH > MAX_HEADS:
        raise InputError(f"B · NH {c.B * c.NH:,}: expected at most {MAX_HEADS:,} heads in a call")
    c.check_addresses("qkv", "out")
    c.order = (_tri6, _tri5)
    if c.fill is not None and c.T > 1:
        c.after = (_fill.launch(c),)
    return c


def _checked_fill(fill: Any) -> float | None:
    """Return `fill` as a float, or None. Raises InputError unless float32 can represent it."""
    if fill is None:
        return None
    number = isinstance(fill, (int, float, np.floating)) and not isinstance(fill, bool)
    if not number or float(np.finfo(np.float32).max) < abs(fill) != math.inf:
        raise InputError(
            f"fill: expected None or a float32 number such as 0.0, -inf or nan, got {fill!r}"
        )
    return float(fill)


def _outputs(sizes: Sizes) -> int:
    """Number of elements of all outputs on and below the diagonal."""
    return sizes["B"] * sizes["NH"] * sizes["T"] * (sizes["T"] + 1) // 2


OPERATION = Operation(
    name="trimat",
    variants=(_naive, _registers, _tri3, _tri4, _tri5, _tri6),
    options={"fill": None, "variant": None, "block": None},
    prepare=_prepare,
    parts=(_fill,),
    workload=Workload(
        document="llm.c's trimat kernels",
        idea="out[i, j] = Q_i · K_j / sqrt(HS) for j ≤ i",
        sizes={"B": 8, "T": 1024, "NH": 12, "HS": 64},
        traffic=lambda s: 4 * (2 * s["B"] * s["T"] * s["NH"] * s["HS"] + _outputs(s)),
        flops=lambda sizes: 2 * sizes["HS"] * _outputs(sizes),
        bound="compute",
        attrs={"fill": None},
        small=(
            {"B": 1, "T": 5, "NH": 3, "HS": 8},
            {"B": 2, "T": 33, "NH": 1, "HS": 64},
            {"B": 1, "T": 70, "NH": 2, "HS": 12},
        ),
        aliases={"C": "NH*HS"},
    ),
)


def trimat(
    qkv: CudaArray, fill: float | None = None, variant: str | None = None, block: int | None = None
) -> CudaArray:
    """Compute `reference.trimat` on a float32 CuPy array. Raises InputError.

    The default variant is tri6 on GPUs of compute capability 7.5 or newer for heads of at most 128
    channels (112 with 64 KB of shared memory per block), else tri5. tri6 runs on tensor cores and
    is at least as accurate as the other variants, which sum in float32. tri6 splits each value into
    two float16 numbers, with a scale for each row. A value keeps 22 bits, counted from the largest
    value of its row. Source: Ootomo and Yokota, "Recovering single precision accuracy from Tensor
    Cores while surpassing the FP32 theoretical peak performance" (2022).

    With `fill` None, values above the diagonal are undefined. A variant writes at most the values
    in the 8×8 tiles that the diagonal crosses (naive, registers, tri3), in such 128×128 tiles
    (tri4), or in such groups of four in a row (tri5 and tri6, if T is a multiple of 4). HS must be
    a multiple of 4, and B · NH at most 65,535.
    """
    qkv = on_16_bytes("qkv", qkv)
    return call(OPERATION, (qkv,), fill=fill, variant=variant, block=block).out
