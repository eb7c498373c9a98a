"""Token plus position embedding of rows with their own positions: out = wte[ids] + wpe[positions].

Without wpe, rows of wte alone, for models that encode positions otherwise. Kernel:
embedding/encoder_rows.cu.
"""

from __future__ import annotations

from math import ceil

import numpy as np

from gpt2block.config import LARGEST_COUNT
from gpt2block.cuda.arrays import CudaArray, alignment, contiguous, launch_at
from gpt2block.cuda.kernels import FP8, Geometry, Launch
from gpt2block.ops.call import Call
from gpt2block.ops.operation import Inputs, Operation, Sizes, variant
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


@variant(
    "rows",
    FILE,
    "encoder_rows",
    idea="one block per row, one thread per 4 channels; ids and positions in device memory, wte "
    "in any weight dtype",
)
def _rows(c: Call) -> Launch:
    """ids and positions are not read back: one that is outside its table makes its row NaN."""
    given = isinstance(c.wte, WeightMatrix)
    wte = c.wte if given else WeightMatrix(c.wte, "float32", layout="NK")
    floats = [array.data.ptr for array in (c.wpe, c.out) if array is not None]
    aligned = min(alignment(*floats), alignment(wte.data.data.ptr) * 4 // wte.data.itemsize)
    n_ctx = LARGEST_COUNT if c.wpe is None else c.P
    args = (c.ids, c.positions, wte.data, wte.scale, c.wpe, c.out, c.C, c.V, n_ctx)
    fp8 = wte.dtype if wte.dtype in FP8 else None
    stored = "float32" if fp8 else wte.dtype
    return launch_at(FILE, geometry(c.N, c.C, aligned), args, stored, fp8)


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
    variants=(_rows,),
    draw=_make,
    traffic=lambda s: 4 * (2 * s["N"] + 2 * s["N"] * s["C"] + s["T"] * s["C"]),
    flops=lambda s: s["N"] * s["C"],
    bound="memory",
    attrs={},
    small=({"N": 19, "T": 33, "C": 128, "V": 70},),
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
    return call(OPERATION.bind_on_device, contiguous(ids, positions, wte, wpe)).out
