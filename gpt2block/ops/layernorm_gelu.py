"""LayerNorm and GELU in one kernel: its variants, and the launch of each."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Any

import numpy as np

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
from gpt2block.cuda.kernels import Geometry
from gpt2block.errors import InputError
from gpt2block.ops._rows import THREADS, share
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant, check_block
from gpt2block.ops.warm import call

FILE = "layernorm/gelu.cu"
BLOCKS = (32, 64, 128, 256, 512, 1024)


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    x = rng.standard_normal((sizes["N"], sizes["C"]), dtype=np.float32)
    return (x + np.float32(0.5),)


@lru_cache(maxsize=1024)
def geometry(
    variant: Variant, rows: int, hidden: int, width: int, sms: int, block: int | None, affine: bool
) -> Geometry:
    """For `rows` of `hidden` values, `width` a load (4 or 1), on a GPU with `sms` multiprocessors.

    `block` None: the best there is; for the variant `rows` it is the threads that share a row.
    """
    (kernel,) = variant.kernels
    if variant.name == "rows":
        shape = share(rows, hidden, width, sms, block)
        defines = (
            ("LG_HIDDEN", hidden),
            ("LG_WIDTH", width),
            ("LG_THREADS", shape.threads),
            ("LG_ROWS", shape.rows),
            ("LG_AFFINE", int(affine)),
        )
        return Geometry(kernel, (shape.grid,), (shape.block,), defines=defines)
    block = block or variant.block
    if variant.name == "optimized":
        return Geometry(kernel, (rows,), (block,), shared=2 * 4 * block)
    return Geometry(kernel, (ceil(rows * hidden / block),), (block,))


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


OPERATION = Operation(
    name="layernorm_gelu",
    document="fused LayerNorm and GELU",
    idea="y = GELU((x - mean) · rstd · γ + β), tanh GELU",
    sizes={"N": 1024, "C": 1024},
    variants=(
        Variant(
            "baseline",
            FILE,
            ("layernorm_gelu_baseline",),
            "a thread an element, each adds up its whole row",
            BLOCKS,
        ),
        Variant(
            "optimized",
            FILE,
            ("layernorm_gelu_optimized",),
            "a block a row, sum and sum of squares in one pass, tree over shared memory",
            BLOCKS,
        ),
        Variant(
            "rows",
            FILE,
            ("layernorm_gelu_rows",),
            "rows in registers, 16-byte loads, shuffles and at most one barrier; γ and β",
            tuple(block for block in BLOCKS if block <= THREADS),
            source="beyond the documents",
        ),
    ),
    make=_make,
    traffic=lambda sizes: 8 * sizes["N"] * sizes["C"],
    flops=lambda sizes: 20 * sizes["N"] * sizes["C"],
    bound="memory",
    attrs={"eps": 1e-5},
    binder=bind,
)


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
