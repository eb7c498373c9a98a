"""Convert weights to the dtype and layout that products read. Kernel:
elementwise/store_weights.cu."""

from __future__ import annotations

from gpt2block.checks import FLOATS, nearest
from gpt2block.contract import Contract
from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import Bound, CudaArray
from gpt2block.cuda.requests import Launch
from gpt2block.errors import InputError
from gpt2block.models.weights.conversions import STORE_FILE, check_sizes, store
from gpt2block.ops.call import Call, UncheckedCall
from gpt2block.ops.operation import REQUIRED, Operation, variant

TRANSPOSED = Contract.parse("w any R C -> out? dtype C R")


@variant("store", STORE_FILE, "store_weights")
def _store(c: Call) -> Launch:
    return store(c.w, c.output("out"), c.transposed)


def _prepare(unchecked: UncheckedCall) -> Call | Bound:
    """Check a call of `store`. w must be a C-contiguous matrix or the transposed view of one.

    Without out, the result is a view of w if neither dtype nor order of the elements changes.
    """
    (w,), dtype = unchecked.inputs, unchecked.options["dtype"]
    transposed = unchecked.options["transposed"]
    if dtype not in FLOATS:
        known = f"expected one of {', '.join(FLOATS)}{nearest(dtype, FLOATS)}"
        raise InputError(f"dtype {dtype!r}: {known}")
    if isinstance(w, cupy.ndarray) and w.flags.f_contiguous and not w.flags.c_contiguous:
        w, transposed = w.T, not transposed
    contract = TRANSPOSED if transposed else unchecked.contract
    c = unchecked._replace(inputs=(w,)).checked(contract, transposed=transposed)
    check_sizes("w", w.shape)
    if c.storage == dtype and not transposed and unchecked.out is None:
        return Bound(w, ())
    c.output("out")
    return c


OPERATION = Operation(
    name="store",
    variants=(_store,),
    options={"dtype": REQUIRED, "transposed": False},
    prepare=_prepare,
    line="w any R C -> out? dtype R C",
)


def stored(w: CudaArray, dtype: str, transposed: bool = False) -> CudaArray:
    """Return a matrix (R, C) rounded to a float dtype, as (R, C) or, transposed, as (C, R).

    The result is a view of w if neither dtype nor order of the elements changes. Raises InputError.
    """
    return OPERATION.bind_on_device((w,), dtype=dtype, transposed=transposed).run()
