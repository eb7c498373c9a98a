"""Token plus position embedding of rows with their own positions: out = wte[ids] + wpe[positions].

Without wpe, rows of wte alone, for models that encode positions otherwise. Kernel:
embedding/encoder_rows.cu.
"""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

import numpy as np

from gpt2block.config import LARGEST_COUNT
from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    alignment,
    check,
    check_matrix,
    contiguous,
    launch_at,
    output,
)
from gpt2block.cuda.kernels import FP8, Geometry, Launch
from gpt2block.errors import InputError
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant
from gpt2block.ops.warm import call
from gpt2block.weights.matrix import WeightMatrix

FILE = "embedding/encoder_rows.cu"
MOST_THREADS = 256


def geometry(N: int, C: int, alignment: int) -> Geometry:
    """For N rows; alignment: in bytes, of the arrays, counting every element as 4 bytes."""
    width = 4
    while C % width or 4 * width > alignment:
        width //= 2
    threads = min(32 * ceil(C / (32 * width)), MOST_THREADS)
    return Geometry("encoder_rows", (N,), (threads,), defines=(("ER_WIDTH", width),))


class Job(NamedTuple):
    """A checked call: ids and positions (N,), wte (V, C), wpe (n_ctx, C) or None, out (N, C)."""

    ids: CudaArray
    positions: CudaArray
    wte: WeightMatrix
    wpe: CudaArray | None
    out: CudaArray


def _launch(job: Job) -> tuple[Launch, ...]:
    wte, data, (N, C) = job.wte, job.wte.data, job.out.shape
    floats = [array.data.ptr for array in (job.wpe, job.out) if array is not None]
    aligned = min(alignment(*floats), alignment(data.data.ptr) * 4 // data.itemsize)
    n_ctx = LARGEST_COUNT if job.wpe is None else len(job.wpe)
    args = (job.ids, job.positions, data, wte.scale, job.wpe, job.out, C, wte.N, n_ctx)
    fp8 = wte.dtype if wte.dtype in FP8 else None
    stored = "float32" if fp8 else wte.dtype
    return (launch_at(FILE, geometry(N, C, aligned), args, stored, fp8),)


def bind(inputs: tuple[Any, ...], out: CudaArray | None = None) -> Bound:
    """inputs (ids (N,), positions (N,), both int32, wte, wpe (n_ctx, C) or None), out (N, C).

    wte: float32 (V, C), or a WeightMatrix of layout "NK" with V outputs. ids and positions are not
    read back: one that is outside its table makes its row NaN. wpe and out are float32.
    """
    ids, positions, wte, wpe = (*inputs, None)[:4]
    if not isinstance(wte, WeightMatrix):
        check_matrix("wte", wte)
        wte = WeightMatrix(wte, "float32", layout="NK")
    if wte.layout != "NK":
        raise InputError(f'wte: expected layout "NK", a row a token, got "{wte.layout}"')
    check("wte", wte.data, dtype="uint8" if wte.dtype in FP8 else wte.dtype)
    if wte.scale is not None:
        check("wte's scale", wte.scale, (wte.N,))
    check("ids", ids, dtype="int32")
    if ids.ndim != 1:
        raise InputError(f"ids: expected (N,), got shape {ids.shape}")
    check("positions", positions, ids.shape, "int32")
    if wpe is not None:
        check("wpe", wpe)
        if wpe.ndim != 2 or wpe.shape[1] != wte.K:
            raise InputError(f"wpe: expected (n_ctx, {wte.K}), got {wpe.shape}")
    given = {"ids": ids, "positions": positions, "wte": wte, "wpe": wpe}
    out = output(out, (ids.size, wte.K), apart=given)
    job = Job(ids, positions, wte, wpe, out)
    return Bound(out, OPERATION.variants[0].launch(job))


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    N, C = sizes["N"], sizes["C"]
    ids, positions = (rng.integers(sizes[rows], size=N, dtype=np.int32) for rows in ("V", "T"))
    wte, wpe = (
        rng.standard_normal((sizes[rows], C), dtype=np.float32) + np.float32(0.5)
        for rows in ("V", "T")
    )
    return ids, positions, wte, wpe


OPERATION = Operation(
    name="encoder_rows",
    document="gpt2block",
    idea="out = wte[ids] + wpe[positions], one position per row",
    sizes={"N": 8192, "T": 1024, "C": 768, "V": 50257},
    variants=(
        Variant(
            "rows",
            "embedding/encoder_rows.cu",
            ("encoder_rows",),
            "one block per row, one thread per 4 channels; ids and positions in device memory, wte "
            "in any weight dtype",
            launch=_launch,
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
    wpe: CudaArray | None = None,
) -> CudaArray:
    """`reference.encoder_rows` on CuPy arrays; raises InputError.

    wte: float32, or a WeightMatrix of layout "NK" in any dtype. ids and positions, int32, are not
    read back: an id that wte has no row for, or a position beyond wpe, makes its row NaN.
    """
    return call(bind, contiguous(ids, positions, wte, wpe)).out
