"""Token plus position embedding: out[b, t] = wte[ids[b, t]] + wpe[t].

`encoder` (learn/embedding/encoder.cu) has a kernel for each variant. `encoder_rows`
(embedding/encoder_rows.cu) takes a position for each row: out = wte[ids] + wpe[positions]. Without
wpe, out = wte[ids], for models that encode positions in attention.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from gpt2block.checks import LARGEST_COUNT
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import CudaArray, alignment, check, contiguous, row_alignment
from gpt2block.cuda.kernels import FP8, Geometry, float_define, launch_at
from gpt2block.errors import InputError
from gpt2block.models.weights.gguf import GgufMatrix
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops import gguf
from gpt2block.ops.call import Call, UncheckedCall, refuse
from gpt2block.ops.operation import Operation, Sizes, Workload, as_stated, variant
from gpt2block.ops.warm import call

FILE = "learn/embedding/encoder.cu"
ROWS = "embedding/encoder_rows.cu"
BLOCKS = (32, 64, 128, 256, 512, 1024)
MAX_THREADS = 256  # maximum threads per row of kernel encoder_rows


def _args(c: Call) -> tuple[object, ...]:
    return c.ids, c.wte, c.wpe, c.output("out"), c.ids.size, c.T, c.C, c.V


def _vector_args(c: Call) -> tuple[object, ...]:
    expected = f"expected C to be a multiple of 4, got {c.C}, and rows that start on a multiple of "
    others = row_alignment(c.C, c.wte, c.wpe, c.output("out")) != 16
    refuse(others, f"{expected}16 bytes: use variant 1")
    return _args(c)


_elements = as_stated("1", FILE, "encoder_forward_kernel1", _args, blocks=BLOCKS)
_vectors = as_stated("2", FILE, "encoder_forward_kernel2", _vector_args, blocks=BLOCKS)
_warps = as_stated("3", FILE, "encoder_forward_kernel3", _vector_args, blocks=BLOCKS)


@variant("rows", ROWS, "encoder_rows")
def _rows(c: Call) -> Any:
    """Launch encoder_rows. The host does not check the values of ids and positions.

    An id or position outside its table makes the row NaN.
    """
    if isinstance(c.wte, GgufMatrix):
        return gguf.encoder_rows.launch(c)
    is_matrix = isinstance(c.wte, WeightMatrix)
    wte = c.wte if is_matrix else WeightMatrix(c.wte, "float32", layout="NK")
    floats = [array.data.ptr for array in (c.wpe, c.output("out")) if array is not None]
    # aligned: alignment of the arrays in bytes, scaled as if elements of wte had 4 bytes each.
    aligned = min(alignment(*floats), alignment(wte.data.data.ptr) * 4 // wte.data.itemsize)
    width = 4  # elements per load
    while c.C % width or 4 * width > aligned:
        width //= 2
    threads = min(32 * ceil(c.C / (32 * width)), MAX_THREADS)
    defines = (("ER_WIDTH", width), *float_define("ER_FACTOR", c.factor, 1.0))
    geometry = Geometry("encoder_rows", (c.N,), (threads,), defines=defines)
    n_ctx = LARGEST_COUNT if c.wpe is None else c.P
    args = (c.ids, c.positions, wte.data, wte.scale, c.wpe, c.output("out"), c.C, c.V, n_ctx)
    fp8 = wte.dtype if wte.dtype in FP8 else None
    stored = "float32" if fp8 else wte.dtype
    return launch_at(ROWS, geometry, args, stored, fp8)


def _prepare(unchecked: UncheckedCall) -> Call:
    c = unchecked.checked()
    if c.P < c.T:
        raise InputError(f"ids: {c.T:,} positions, but wpe has {c.P:,} rows")
    c.order = (_warps, _elements)
    return c


def _traffic(sizes: Sizes) -> int:
    """Bytes transferred: an id, a row of wte and a row of out per token, and wpe once."""
    rows, C = sizes["B"] * sizes["T"], sizes["C"]
    return 4 * (rows + 2 * rows * C + sizes["T"] * C)


OPERATION = Operation(
    name="encoder",
    variants=(_elements, _vectors, _warps),
    options={"variant": None, "block": None},
    prepare=_prepare,
    workload=Workload(
        document="named after llm.c's encoder kernels",
        idea="out = wte[ids] + wpe[position]",
        sizes={"B": 8, "T": 1024, "C": 768, "V": 50257},
        below={"ids": "V"},
        axes={"P": "T"},
        traffic=_traffic,
        flops=lambda sizes: sizes["B"] * sizes["T"] * sizes["C"],
        small=(
            {"B": 1, "T": 5, "C": 24, "V": 11},
            {"B": 1, "T": 3, "C": 769, "V": 5},
            {"B": 2, "T": 33, "C": 128, "V": 70},
        ),
        aliases={"rows": "B*T", "N": "B*T"},
    ),
)
ENCODER_ROWS = Operation(
    name="encoder_rows",
    variants=(_rows,),
    parts=(gguf.encoder_rows,),
    options={"factor": 1.0},
    workload=Workload(
        idea="out = wte[ids] + wpe[positions], one position per row",
        sizes={"N": 8192, "T": 1024, "C": 768, "V": 50257},
        below={"ids": "V", "positions": "T"},
        optional=("wpe",),
        axes={"P": "T"},
        traffic=lambda s: 4 * (2 * s["N"] + 2 * s["N"] * s["C"] + s["T"] * s["C"]),
        flops=lambda s: s["N"] * s["C"],
        small=({"N": 19, "T": 33, "C": 128, "V": 70},),
    ),
)


def on_device(ids: object, V: int) -> CudaArray:
    """Copy host ids to the device as int32. Raises InputError with the first id outside 0..V-1."""
    try:
        host = np.asarray(ids)
    except ValueError as error:  # ids has rows of different lengths
        raise InputError(f"ids: expected an array of integers: {error}") from error
    if host.size and host.dtype.kind not in "iu":
        raise InputError(f"ids: expected integers, got {host.dtype}")
    wrong = np.argwhere((host < 0) | (host >= V))
    if wrong.size:
        index = tuple(int(i) for i in wrong[0])
        shown = index[0] if len(index) == 1 else index
        raise InputError(f"ids: id {int(host[index])} at {shown}: expected 0 to {V - 1}")
    return cupy.asarray(host, dtype=cupy.int32, order="C")


def encoder(
    ids: ArrayLike | CudaArray,
    wte: CudaArray,
    wpe: CudaArray,
    variant: str | int | None = None,
    block: int | None = None,
) -> CudaArray:
    """Compute `reference.encoder` on CuPy arrays. Raises InputError.

    `ids` on the host (NumPy, a list) are checked and copied. `ids` on the device are not read back
    to the host: an id without a row in wte makes its output row NaN. The default is the fastest
    variant that supports the call.
    """
    ids, wte, wpe = contiguous(ids, wte, wpe)
    check("wte", wte)
    if not isinstance(ids, cupy.ndarray):
        ids = on_device(ids, wte.shape[0])
    return call(OPERATION, (ids, wte, wpe), variant=variant, block=block).out


def encoder_rows(
    ids: CudaArray,
    positions: CudaArray,
    wte: CudaArray | WeightMatrix,
    wpe: CudaArray | None = None,
    factor: float = 1.0,
) -> CudaArray:
    """Compute `reference.encoder_rows` on CuPy arrays. Raises InputError.

    wte: float32, or a WeightMatrix of layout "NK" in any dtype. ids and positions, int32, are not
    read back to the host: an id without a row in wte, or a position beyond wpe, makes its output
    row NaN.
    """
    return call(ENCODER_ROWS, contiguous(ids, positions, wte, wpe), factor=factor).out
