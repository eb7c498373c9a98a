"""Weights in the dtype and the layout of products. Kernel: matmul/store.cu."""

from __future__ import annotations

from typing import Any

from gpt2block.checks import FLOATS, meant
from gpt2block.contract import Contract
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import Bound, CudaArray
from gpt2block.cuda.requests import Launch
from gpt2block.errors import InputError
from gpt2block.ops.call import Call, checked
from gpt2block.ops.operation import Operation, variant
from gpt2block.weights.conversions import STORE_FILE, check_sizes, store

KEPT = "w any R C -> out? dtype R C"
TRANSPOSED = Contract.parse("w any R C -> out? dtype C R")


@variant("store", STORE_FILE, "store_weights")
def _store(c: Call) -> Launch:
    return store(c.w, c.out, c.transposed)


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    dtype: str,
    transposed: bool = False,
) -> Bound:
    """inputs (w (R, C),), out (R, C) or, transposed, (C, R): w rounded to a float dtype.

    w: C-contiguous, or the transposed view of such a matrix. Without out, the result is a view of w
    if no element moves. Raises InputError.
    """
    (w,) = inputs
    if dtype not in FLOATS:
        known = f"expected one of {', '.join(FLOATS)}{meant(dtype, FLOATS)}"
        raise InputError(f"dtype {dtype!r}: {known}")
    if isinstance(w, cupy.ndarray) and w.flags.f_contiguous and not w.flags.c_contiguous:
        w, transposed = w.T, not transposed
    contract = TRANSPOSED if transposed else OPERATION.contract
    c = checked(contract, (w,), out, dtype=dtype, transposed=transposed)
    check_sizes("w", w.shape)
    if c.storage == dtype and not transposed and out is None:
        return Bound(w, ())
    c.make("out")
    return OPERATION.bound_to(c)


OPERATION = Operation(name="store", variants=(_store,), binder=bind, line=KEPT)


def stored(w: CudaArray, dtype: str, transposed: bool = False) -> CudaArray:
    """A matrix (R, C) rounded to a float dtype, as (R, C) or, transposed, (C, R); see `bind`."""
    return bind((w,), dtype=dtype, transposed=transposed).run()
