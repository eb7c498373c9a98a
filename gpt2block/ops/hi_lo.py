"""Split float32 rows into hi/lo matrices: high and low float16 parts, and a scale per row.

`gemm`, `attention` and `layernorm` take or return such matrices. Operation `take` selects rows of
them or of an array. Kernels: elementwise/hi_lo.cu and elementwise/take_rows.cu.
"""

from __future__ import annotations

from math import ceil
from typing import cast

from gpt2block.cuda.arrays import CudaArray, contiguous
from gpt2block.cuda.kernels import Geometry, Launch, launch_at
from gpt2block.errors import InputError
from gpt2block.models.weights import conversions
from gpt2block.models.weights.conversions import (
    HI_LO_FILE,
    HI_LO_WARPS,
    LARGEST_OPERAND,
    vector_width,
)
from gpt2block.models.weights.hi_lo import HiLoMatrix
from gpt2block.ops.call import Call, UncheckedCall, storage
from gpt2block.ops.operation import Operation, variant

TAKE_FILE = "elementwise/take_rows.cu"
JOIN_THREADS = 256  # maximum threads per block of join_rows and take_rows


@variant("split rows", HI_LO_FILE, "split_rows")
def _split_rows(c: Call) -> Launch:
    conversions.check_sizes("x", (c.rows, c.K), LARGEST_OPERAND)
    return conversions.hi_lo(c.x, c.output("out").parts, c.out.scale, c.out.one_scale)


OPERATION = Operation(name="hi_lo", variants=(_split_rows,))


@variant("join rows", HI_LO_FILE, "join_rows")
def _join_rows(c: Call) -> Launch:
    width = vector_width(c.C, c.output("out"))
    block = min(JOIN_THREADS, 32 * ceil(c.C / (32 * width)))
    defines = (("SPLIT_WIDTH", width), ("SPLIT_ROWS", HI_LO_WARPS))
    geometry = Geometry("join_rows", (c.B,), (block,), defines=defines)
    args = (c.x.parts, c.x.scale, c.indices, c.out, c.N, c.C)
    return launch_at(HI_LO_FILE, geometry, args, "float16")


@variant("rows", TAKE_FILE, "take_rows")
def _take_rows(c: Call) -> Launch:
    width = vector_width(c.C, c.x, c.output("out"))
    block = min(JOIN_THREADS, 32 * ceil(c.C / (32 * width)))
    geometry = Geometry("take_rows", (c.B,), (block,), defines=(("TAKE_WIDTH", width),))
    return launch_at(TAKE_FILE, geometry, (c.x, c.indices, c.out, c.C), c.storage)


def _prepare_take(unchecked: UncheckedCall) -> Call:
    """Check a call of `take`, but not its indices. Rows of a HiLoMatrix become float32."""
    hi_lo = isinstance(unchecked.inputs[0], HiLoMatrix)
    c = unchecked.checked(out_dtype="float32" if hi_lo else storage(unchecked.inputs[0]))
    c.order = (_join_rows if hi_lo else _take_rows,)
    return c


TAKE = Operation(name="take", variants=(_join_rows, _take_rows), prepare=_prepare_take)


def hi_lo(x: CudaArray) -> HiLoMatrix:
    """Convert float32 (..., K) to a HiLoMatrix, bitwise as `reference.hi_lo` does."""
    inputs = contiguous(x)  # keep a reference: a launch does not keep arrays alive
    return cast("HiLoMatrix", OPERATION.bind_on_device(inputs).run())


def check_one_scale(out: HiLoMatrix, bound: float | None) -> None:
    """Raise InputError unless out has a single scale, as from `HiLoMatrix.empty(shape, bound)`.

    A bound is an argument of `empty` and must not be passed in addition to its result.
    """
    if bound is not None or out.one_scale is None:
        raise InputError("out: expected one scale for all rows and no bound: HiLoMatrix.empty")
