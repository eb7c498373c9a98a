"""LayerNorm and GELU in one kernel: y = GELU((x - mean) · rstd · γ + β).

Kernels: layernorm/gelu.cu, one for each variant.
"""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

import numpy as np

from gpt2block.config import check_eps
from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    check,
    contiguous,
    device_attribute,
    output,
    row_alignment,
    same_memory,
)
from gpt2block.cuda.kernels import Launch, launch
from gpt2block.ops._rows import THREADS, share
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant, check_block
from gpt2block.ops.warm import call

FILE = "layernorm/gelu.cu"
BLOCK = 256
BLOCKS = (32, 64, 128, 256, 512, 1024)


class Job(NamedTuple):
    """A checked call: x and out (..., C) as `rows` rows, loaded `width` (4 or 1) at a time."""

    x: CudaArray
    gamma: CudaArray | None
    beta: CudaArray | None
    out: CudaArray
    eps: float
    rows: int
    C: int
    width: int
    sms: int
    block: int | None  # None: the variant's default


def _launch_baseline(job: Job) -> tuple[Launch, ...]:
    block = job.block or BLOCK
    grid = (ceil(job.rows * job.C / block),)
    args = (job.x, job.out, job.rows, job.C, job.eps)
    return (launch(FILE, "layernorm_gelu_baseline", grid, (block,), args),)


def _launch_optimized(job: Job) -> tuple[Launch, ...]:
    block, grid = job.block or BLOCK, (job.rows,)
    args = (job.x, job.out, job.rows, job.C, job.eps)
    shared = 2 * 4 * block
    return (launch(FILE, "layernorm_gelu_optimized", grid, (block,), args, shared=shared),)


def _launch_rows(job: Job) -> tuple[Launch, ...]:
    """Here `block` is the number of threads that share a row; None chooses it."""
    shape = share(job.rows, job.C, job.width, job.sms, job.block)
    defines = (
        ("LG_HIDDEN", job.C),
        ("LG_WIDTH", job.width),
        ("LG_THREADS", shape.threads),
        ("LG_ROWS", shape.rows),
        ("LG_AFFINE", int(job.gamma is not None or job.beta is not None)),
    )
    args = (job.x, job.out, job.gamma, job.beta, job.rows, job.eps)
    grid, block = (shape.grid,), (shape.block,)
    return (launch(FILE, "layernorm_gelu_rows", grid, block, args, defines=defines),)


def _documented_problem(job: Job) -> str | None:
    if job.gamma is not None or job.beta is not None:
        return "has no gamma and beta: use variant 'rows'"
    if same_memory(job.x, job.out):
        return "out: overlaps x: expected another array"
    return None


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
    x, gamma, beta = (*inputs, None, None)[:3]
    check_eps(eps)
    check("x", x)
    C = x.shape[-1]
    affine = {"gamma": gamma, "beta": beta}
    for name, array in affine.items():
        if array is not None:
            check(name, array, (C,))
    out = output(out, x.shape, apart=affine, in_place={"x": x})
    width = 4 if row_alignment(C, x, gamma, beta, out) == 16 else 1
    sms = device_attribute("MultiProcessorCount")
    job = Job(x, gamma, beta, out, float(eps), x.size // C, C, width, sms, block)
    chosen = OPERATION.choose(job, variant)
    check_block(OPERATION.name, chosen, block)
    return Bound(out, chosen.launch(job))


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    x = rng.standard_normal((sizes["N"], sizes["C"]), dtype=np.float32)
    return (x + np.float32(0.5),)


OPERATION = Operation(
    name="layernorm_gelu",
    document="gpt2block",
    idea="y = GELU((x - mean) · rstd · γ + β), tanh GELU",
    sizes={"N": 1024, "C": 1024},
    variants=(
        Variant(
            "baseline",
            FILE,
            ("layernorm_gelu_baseline",),
            "one thread per element, each sums its whole row",
            BLOCKS,
            launch=_launch_baseline,
            problem=_documented_problem,
        ),
        Variant(
            "optimized",
            FILE,
            ("layernorm_gelu_optimized",),
            "one block per row, sum and sum of squares in one pass, tree over shared memory",
            BLOCKS,
            launch=_launch_optimized,
            problem=_documented_problem,
        ),
        Variant(
            "rows",
            FILE,
            ("layernorm_gelu_rows",),
            "rows in registers, 16-byte loads, shuffles and at most one barrier; γ and β",
            tuple(block for block in BLOCKS if block <= THREADS),
            launch=_launch_rows,
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
