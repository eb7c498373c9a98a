"""Token plus position embedding: out[b, t] = wte[ids[b, t]] + wpe[t].

Kernels: embedding/encoder.cu, one for each variant.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import Bound, CudaArray, check, contiguous, row_alignment
from gpt2block.cuda.kernels import Launch, launch
from gpt2block.errors import InputError
from gpt2block.ops.call import Call
from gpt2block.ops.operation import Inputs, Operation, Sizes, unfit, variant
from gpt2block.ops.warm import call

FILE = "embedding/encoder.cu"
BLOCKS = (32, 64, 128, 256, 512, 1024)


def _launch(c: Call, kernel: str, threads: int) -> Launch:
    """With `threads` threads for each token."""
    grid = (ceil(c.ids.size * threads / c.block),)
    args = (c.ids, c.wte, c.wpe, c.out, c.ids.size, c.T, c.C, c.V)
    return launch(FILE, kernel, grid, (c.block,), args)


def _check_vectors(c: Call) -> None:
    unfit(
        row_alignment(c.C, c.wte, c.wpe, c.out) != 16,
        f"expected C to be a multiple of 4, got {c.C}, and rows that start on a multiple of 16 "
        f"bytes: use variant 1",
    )


@variant("1", FILE, "encoder_forward_kernel1", idea="one thread per element", blocks=BLOCKS)
def _elements(c: Call) -> Launch:
    return _launch(c, "encoder_forward_kernel1", c.C)


@variant("2", FILE, "encoder_forward_kernel2", idea="one thread per 4 channels", blocks=BLOCKS)
def _vectors(c: Call) -> Launch:
    _check_vectors(c)
    return _launch(c, "encoder_forward_kernel2", c.C // 4)


@variant(
    "3",
    FILE,
    "encoder_forward_kernel3",
    idea="one warp per row, several 16-byte loads in flight",
    blocks=BLOCKS,
)
def _warps(c: Call) -> Launch:
    _check_vectors(c)
    return _launch(c, "encoder_forward_kernel3", 32)


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    variant: str | int | None = None,
    block: int | None = None,
) -> Bound:
    """The ids are not read back: an id outside 0..V-1 makes its row NaN.

    Without a variant: 3, or 1 where rows do not start on a multiple of 16 bytes.
    """
    c = OPERATION.checked(inputs, out, variant=variant, block=block)
    if c.P < c.T:
        raise InputError(f"ids: {c.T:,} positions, but wpe has {c.P:,} rows")
    return OPERATION.bound_to(c, (_warps, _elements))


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    ids = rng.integers(sizes["V"], size=(sizes["B"], sizes["T"]), dtype=np.int32)
    wte, wpe = (
        rng.standard_normal((rows, sizes["C"]), dtype=np.float32) + np.float32(0.5)
        for rows in (sizes["V"], sizes["T"])
    )
    return ids, wte, wpe


def _traffic(sizes: Sizes) -> int:
    """An id, a row of wte and a row of out for each token; wpe once."""
    rows, C = sizes["B"] * sizes["T"], sizes["C"]
    return 4 * (rows + 2 * rows * C + sizes["T"] * C)


OPERATION = Operation(
    name="encoder",
    document="named after llm.c's encoder kernels",
    idea="out = wte[ids] + wpe[position]",
    sizes={"B": 8, "T": 1024, "C": 768, "V": 50257},
    variants=(_elements, _vectors, _warps),
    draw=_make,
    traffic=_traffic,
    flops=lambda sizes: sizes["B"] * sizes["T"] * sizes["C"],
    bound="memory",
    small=(
        {"B": 1, "T": 5, "C": 24, "V": 11},
        {"B": 1, "T": 3, "C": 769, "V": 5},
        {"B": 2, "T": 33, "C": 128, "V": 70},
    ),
    aliases={"rows": "B*T", "N": "B*T"},
    binder=bind,
)


def on_device(ids: Any, V: int) -> CudaArray:
    """Copy host ids to the device as int32; InputError names the first outside 0..V-1."""
    try:
        host = np.asarray(ids)
    except ValueError as error:  # rows of different lengths
        raise InputError(f"ids: expected an array of integers: {error}") from error
    if host.size and host.dtype.kind not in "iu":
        raise InputError(f"ids: expected integers, got {host.dtype}")
    wrong = np.argwhere((host < 0) | (host >= V))
    if wrong.size:
        at = tuple(int(i) for i in wrong[0])
        place = at[0] if len(at) == 1 else at
        raise InputError(f"ids: id {int(host[at])} at {place}: expected 0 to {V - 1}")
    return cupy.asarray(host, dtype=cupy.int32, order="C")


def encoder(
    ids: Any,
    wte: CudaArray,
    wpe: CudaArray,
    variant: str | int | None = None,
    block: int | None = None,
) -> CudaArray:
    """`reference.encoder` on CuPy arrays; raises InputError.

    `ids` on the host (NumPy, a list) are checked and copied. On the device they are not read back:
    an id that wte has no row for makes its row NaN. Without a variant: the fastest that fits.
    """
    ids, wte, wpe = contiguous(ids, wte, wpe)
    check("wte", wte)
    if not isinstance(ids, cupy.ndarray):
        ids = on_device(ids, wte.shape[0])
    return call(bind, (ids, wte, wpe), variant=variant, block=block).out
