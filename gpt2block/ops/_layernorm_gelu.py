"""LayerNorm and GELU in one kernel on CUDA: kernels_cu/layernorm/gelu.cu."""

from __future__ import annotations

from typing import Any

from gpt2block.config import check_eps
from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    check,
    contiguous,
    device_attribute,
    launch_at,
    output,
)
from gpt2block.errors import InputError
from gpt2block.operations._types import check_block
from gpt2block.operations.layernorm_gelu import FILE, OPERATION, geometry
from gpt2block.ops._warm import call


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    eps: float = 1e-5,
    variant: str | int = "rows",
    block: int | None = None,
) -> Bound:
    """inputs (x (..., C),) or (x, gamma (C,) or None, beta (C,) or None), out (..., C).

    With variant "rows" out may be x.
    """
    chosen = OPERATION.variant(variant)
    x, gamma, beta = (*inputs, None, None)[:3]
    check_eps(eps)
    check("x", x)
    hidden = x.shape[-1]
    affine = [array for array in (gamma, beta) if array is not None]
    for name, array in (("gamma", gamma), ("beta", beta)):
        if array is not None:
            check(name, array, (hidden,))
    if affine and chosen.name != "rows":
        raise InputError(
            f"layernorm_gelu variant {chosen.name}: has no gamma and beta: use variant 'rows'"
        )
    others = {"gamma": gamma, "beta": beta}
    if chosen.name == "rows":
        out = output(out, x.shape, apart=others, in_place={"x": x})
    else:
        out = output(out, x.shape, apart={"x": x, **others})

    rows = x.size // hidden
    if block is not None:
        check_block(OPERATION.name, chosen, block)
    on_16_bytes = hidden % 4 == 0 and all(a.data.ptr % 16 == 0 for a in (x, out, *affine))
    width = 4 if on_16_bytes else 1
    sms = device_attribute("MultiProcessorCount")
    where = geometry(chosen, rows, hidden, width, sms, block, bool(affine))
    args: tuple[Any, ...] = (x, out, rows, hidden, float(eps))
    if chosen.name == "rows":
        args = (x, out, gamma, beta, rows, float(eps))
    return Bound(out, (launch_at(FILE, where, args),))


def layernorm_gelu(
    x: CudaArray,
    gamma: CudaArray | None = None,
    beta: CudaArray | None = None,
    eps: float = 1e-5,
    variant: str | int = "rows",
    block: int | None = None,
) -> CudaArray:
    """`reference.layernorm_gelu` on float32 CuPy arrays; raises InputError.

    The documented variants "baseline" and "optimized" have neither gamma nor beta. "rows" takes
    rows of up to 16,384 values and shares a row among more threads when there are few rows, so
    the same row may differ in its last bits in a batch of another size; `block` fixes it.
    """
    arrays = contiguous(x, gamma, beta)
    return call(bind, arrays, eps=eps, variant=variant, block=block).out
