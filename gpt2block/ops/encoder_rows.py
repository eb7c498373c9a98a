"""Token plus position embedding of rows with a position each: its variant, and the launch."""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np

from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    alignment,
    check,
    contiguous,
    launch_at,
    output,
)
from gpt2block.cuda.kernels import FP8, Geometry
from gpt2block.errors import InputError
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant
from gpt2block.ops.warm import call
from gpt2block.weights.matrix import WeightMatrix

MOST_THREADS = 256


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    N, C = sizes["N"], sizes["C"]
    ids, positions = (rng.integers(sizes[rows], size=N, dtype=np.int32) for rows in ("V", "T"))
    wte, wpe = (
        rng.standard_normal((sizes[rows], C), dtype=np.float32) + np.float32(0.5)
        for rows in ("V", "T")
    )
    return ids, positions, wte, wpe


def geometry(N: int, C: int, itemsize: int, alignment: int) -> Geometry:
    """For N rows. itemsize: of wte; alignment: in bytes, of the arrays, as 16 bytes of floats."""
    width = 4
    while C % width or 4 * width > alignment:
        width //= 2
    threads = min(32 * ceil(C / (32 * width)), MOST_THREADS)
    return Geometry("encoder_rows", (N,), (threads,), defines=(("ER_WIDTH", width),))


def bind(inputs: tuple[Any, ...], out: CudaArray | None = None, *, variant: str = "rows") -> Bound:
    """inputs (ids (N,), positions (N,), both int32, wte, wpe (n_ctx, C)), out (N, C) float32.

    wte: float32 (V, C), or a WeightMatrix of layout "NK" with V outputs. ids and positions are not
    read back: one that is outside its table makes its row NaN.
    """
    ids, positions, wte, wpe = inputs
    chosen = OPERATION.variant(variant)
    weights = wte if isinstance(wte, WeightMatrix) else _as_weights(wte)
    if weights.layout != "NK":
        raise InputError(f'wte: expected layout "NK", a row a token, got "{weights.layout}"')
    check("wte", weights.data, dtype="uint8" if weights.dtype in FP8 else weights.dtype)
    check("ids", ids, dtype="int32")
    if ids.ndim != 1:
        raise InputError(f"ids: expected (N,), got shape {ids.shape}")
    check("positions", positions, ids.shape, "int32")
    V, C = weights.N, weights.K
    check("wpe", wpe)
    if wpe.ndim != 2 or wpe.shape[1] != C:
        raise InputError(f"wpe: expected (n_ctx, {C}), got {wpe.shape}")
    if weights.scale is not None:
        check("wte's scale", weights.scale, (V,))
    N = ids.size
    out = output(
        out, (N, C), apart={"ids": ids, "positions": positions, "wte": weights, "wpe": wpe}
    )
    itemsize = weights.data.itemsize
    aligned = min(
        alignment(wpe.data.ptr, out.data.ptr),
        alignment(weights.data.data.ptr) * 4 // itemsize,  # as many elements, of 4 bytes
    )
    where = geometry(N, C, itemsize, aligned)
    args = (ids, positions, weights.data, weights.scale, wpe, out, C, V, wpe.shape[0])
    fp8 = weights.dtype if weights.dtype in FP8 else None
    stored = "float32" if fp8 else weights.dtype
    return Bound(out, (launch_at(chosen.file, where, args, stored, fp8),))


def _as_weights(wte: Any) -> WeightMatrix:
    check("wte", wte)
    if wte.ndim != 2:
        raise InputError(f"wte: expected two axes, got shape {wte.shape}")
    return WeightMatrix(wte, "float32", layout="NK")


OPERATION = Operation(
    name="encoder_rows",
    document="beyond the documents",
    idea="out = wte[ids] + wpe[positions], a position a row",
    sizes={"N": 8192, "T": 1024, "C": 768, "V": 50257},
    variants=(
        Variant(
            "rows",
            "embedding/encoder_rows.cu",
            ("encoder_rows",),
            "a block a row, a thread 4 channels; ids and positions in device memory, wte in any "
            "weight dtype",
        ),
    ),
    make=_make,
    traffic=lambda s: 4 * (2 * s["N"] + 2 * s["N"] * s["C"] + s["T"] * s["C"]),
    flops=lambda s: s["N"] * s["C"],
    bound="memory",
    attrs={},
    binder=bind,
)


def encoder_rows(
    ids: CudaArray,
    positions: CudaArray,
    wte: CudaArray | WeightMatrix,
    wpe: CudaArray,
    variant: str = "rows",
) -> CudaArray:
    """`reference.encoder_rows` on CuPy arrays; raises InputError.

    wte: float32, or a WeightMatrix of layout "NK" in any dtype. ids and positions, int32, are not
    read back: an id that wte has no row for, or a position beyond wpe, makes its row NaN.
    """
    return call(bind, contiguous(ids, positions, wte, wpe), variant=variant).out
