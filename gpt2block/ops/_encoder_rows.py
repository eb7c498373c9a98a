"""Token plus position embedding of rows on CUDA: kernels_cu/embedding/encoder_rows.cu."""

from __future__ import annotations

from typing import Any

from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    alignment,
    check,
    contiguous,
    launch_at,
    output,
)
from gpt2block.cuda.kernels import FP8
from gpt2block.errors import InputError
from gpt2block.operations.encoder_rows import OPERATION, geometry
from gpt2block.ops._warm import call
from gpt2block.weights.matrix import WeightMatrix


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
