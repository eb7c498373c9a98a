"""The positional encoder: its variants, and the launch of each."""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import Bound, CudaArray, check, contiguous, output
from gpt2block.cuda.kernels import launch
from gpt2block.errors import InputError
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant, check_block
from gpt2block.ops.warm import call

FILE = "embedding/encoder.cu"
BLOCKS = (32, 64, 128, 256, 512, 1024)


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


def grid(variant: Variant, rows: int, C: int, block: int) -> tuple[int, ...]:
    """Blocks for `rows` tokens of C channels."""
    if variant.name == "3":
        return (ceil(rows / (block // 32)),)
    return (ceil(rows * (C // 4 if variant.name == "2" else C) / block),)


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    variant: str | int | None = None,
    block: int | None = None,
) -> Bound:
    """inputs (ids (T,) or (B, T) of int32, wte (V, C), wpe (n_ctx, C)), out (..., T, C).

    The ids are not read back: an id outside 0..V-1 makes its row NaN. Without a variant: 3, or 1
    where rows do not start on 16 bytes.
    """
    ids, wte, wpe = inputs
    check("ids", ids, dtype="int32")
    for name, table in (("wte", wte), ("wpe", wpe)):
        check(name, table)
        if table.ndim != 2:
            raise InputError(f"{name}: expected two axes, got shape {table.shape}")
    V, C = wte.shape
    n_ctx = wpe.shape[0]
    check("wpe", wpe, (n_ctx, C))
    T = ids.shape[-1]
    if n_ctx < T:
        raise InputError(f"ids: {T:,} positions, but wpe has {n_ctx:,} rows")
    out = output(out, (*ids.shape, C), apart={"ids": ids, "wte": wte, "wpe": wpe})

    on_16_bytes = C % 4 == 0 and all(a.data.ptr % 16 == 0 for a in (wte, wpe, out))
    if variant is None:
        variant = 3 if on_16_bytes else 1
    chosen = OPERATION.variant(variant)
    if chosen.name != "1" and not on_16_bytes:
        raise InputError(
            f"encoder variant {chosen.name}: expected C to be a multiple of 4, got {C}, and rows "
            f"that start on 16 bytes: use variant 1"
        )
    block = check_block(OPERATION.name, chosen, block)
    args = (ids, wte, wpe, out, ids.size, T, C, V)
    (kernel,) = chosen.kernels
    return Bound(out, (launch(FILE, kernel, grid(chosen, ids.size, C, block), (block,), args),))


def on_device(ids: Any, V: int) -> CudaArray:
    """Ids of the host on the device, as int32; InputError names the first that is not in 0..V-1."""
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
    return cupy.asarray(host, dtype=cupy.int32)


OPERATION = Operation(
    name="encoder",
    document="named with the LayerNorm kernels",
    idea="out = wte[ids] + wpe[position]",
    sizes={"B": 8, "T": 1024, "C": 768, "V": 50257},
    variants=(
        Variant("1", FILE, ("encoder_forward_kernel1",), "a thread an element", BLOCKS),
        Variant("2", FILE, ("encoder_forward_kernel2",), "a thread 4 channels", BLOCKS),
        Variant(
            "3",
            FILE,
            ("encoder_forward_kernel3",),
            "a warp a row, several 16-byte loads on their way",
            BLOCKS,
        ),
    ),
    make=_make,
    traffic=_traffic,
    flops=lambda sizes: sizes["B"] * sizes["T"] * sizes["C"],
    bound="memory",
    attrs={},
    binder=bind,
)


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
