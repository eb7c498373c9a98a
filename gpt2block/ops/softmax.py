"""Softmax over rows, optionally causal: y = exp(x - max) / Σ exp(x - max).

Kernels: softmax/ladder.cu, one for each variant.
"""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

import numpy as np

from gpt2block.checks import check_flag
from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    check,
    contiguous,
    device_attribute,
    output,
    row_alignment,
)
from gpt2block.cuda.kernels import Launch, launch
from gpt2block.errors import InputError
from gpt2block.ops._rows import LONGEST_IN_REGISTERS, THREADS, check_rows, power_of_two, share
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant, check_block
from gpt2block.ops.warm import call

FILE = "softmax/ladder.cu"
BLOCK = 256
BLOCKS = (32, 64, 128, 256, 512, 1024)


class Job(NamedTuple):
    """A checked call: `rows` rows of n scores, loaded `width` (4 or 1) at a time."""

    scores: CudaArray
    out: CudaArray
    rows: int
    n: int
    causal: bool
    width: int
    sms: int
    block: int | None  # None: the variant's default


def _launch(
    job: Job, kernel: str, grid: int, block: int, *defines: tuple[str, int]
) -> tuple[Launch, ...]:
    defines = (("SOFTMAX_CAUSAL", int(job.causal)), *defines)
    args = (job.scores, job.out, job.rows, job.n)
    return (launch(FILE, kernel, (grid,), (block,), args, defines=defines),)


def _launch_three_pass(job: Job) -> tuple[Launch, ...]:
    block = job.block or BLOCK
    return _launch(job, "softmax_forward_kernel1", job.rows, block, ("SOFTMAX_BLOCK", block))


def _launch_online_warp(job: Job) -> tuple[Launch, ...]:
    block = job.block or BLOCK
    return _launch(job, "softmax_forward_kernel2", ceil(job.rows / (block // 32)), block)


def _launch_online_block(job: Job) -> tuple[Launch, ...]:
    block = job.block or BLOCK
    return _launch(job, "softmax_forward_kernel3", job.rows, block, ("SOFTMAX_WIDTH", job.width))


def _launch_rows(job: Job) -> tuple[Launch, ...]:
    """Here `block` is the number of threads that share a row; None chooses it."""
    shape = share(job.rows, job.n, job.width, job.sms, job.block)
    held = power_of_two(shape.held)  # few kernels for many lengths
    return _launch(
        job,
        "softmax_forward_kernel4",
        shape.grid,
        shape.block,
        ("SOFTMAX_WIDTH", job.width),
        ("SOFTMAX_THREADS", shape.threads),
        ("SOFTMAX_HELD", held),
        ("SOFTMAX_ROWS", shape.rows),
    )


def _rows_problem(job: Job) -> str | None:
    if job.n <= LONGEST_IN_REGISTERS:
        return None
    return (
        f"rows of {job.n:,} values: expected at most {LONGEST_IN_REGISTERS:,}, which fit in "
        f"registers: use another variant"
    )


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    causal: bool = False,
    variant: str | int | None = None,
    block: int | None = None,
) -> Bound:
    """inputs (scores (..., n),), with `causal` (..., T, T); out as scores, or scores itself.

    Without a variant: "rows" where a row fits in registers, else "online_block".
    """
    (scores,) = inputs
    causal = check_flag("causal", causal)
    check("scores", scores)
    n = scores.shape[-1]
    if causal and scores.shape[-2:] != (n, n):
        raise InputError(f"scores: expected (..., T, T) with causal, got {scores.shape}")
    rows = check_rows("scores", scores)
    out = output(out, scores.shape, apart={}, in_place={"scores": scores})
    width = 4 if row_alignment(n, scores, out) == 16 else 1
    sms = device_attribute("MultiProcessorCount")
    job = Job(scores, out, rows, n, causal, width, sms, block)
    chosen = OPERATION.choose(job, variant, ("rows", "online_block"))
    check_block(OPERATION.name, chosen, block)
    return Bound(out, chosen.launch(job))


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    shape = (sizes["B"], sizes["NH"], sizes["T"], sizes["T"])
    return (rng.standard_normal(shape, dtype=np.float32) + np.float32(0.5),)


def _scores(sizes: Sizes) -> int:
    return sizes["B"] * sizes["NH"] * sizes["T"] ** 2


OPERATION = Operation(
    name="softmax",
    document="named after llm.c's softmax kernels",
    idea="y = exp(x - max) / Σ exp(x - max) over each row",
    sizes={"B": 2, "NH": 12, "T": 1024},
    variants=(
        Variant(
            "three_pass",
            FILE,
            ("softmax_forward_kernel1",),
            "one block per row: maximum, sum, quotient, three passes over x",
            BLOCKS,
            launch=_launch_three_pass,
        ),
        Variant(
            "online_warp",
            FILE,
            ("softmax_forward_kernel2",),
            "one warp per row: maximum and sum in one pass",
            BLOCKS,
            launch=_launch_online_warp,
        ),
        Variant(
            "online_block",
            FILE,
            ("softmax_forward_kernel3",),
            "one block per row, 16-byte loads: rows of any length",
            BLOCKS,
            launch=_launch_online_block,
        ),
        Variant(
            "rows",
            FILE,
            ("softmax_forward_kernel4",),
            "rows in registers: x is read once",
            tuple(block for block in BLOCKS if block <= THREADS),
            launch=_launch_rows,
            problem=_rows_problem,
        ),
    ),
    make=_make,
    traffic=lambda sizes: 8 * _scores(sizes),
    flops=lambda sizes: 5 * _scores(sizes),
    bound="memory",
    attrs={},
    binder=bind,
)


def softmax(
    scores: CudaArray,
    causal: bool = False,
    variant: str | int | None = None,
    block: int | None = None,
    out: CudaArray | None = None,
) -> CudaArray:
    """`reference.softmax` on a float32 CuPy array; in place with `out=scores`. Raises InputError.

    With `causal` row t of each (T, T) sees columns 0..t: the others become 0 and are never read.
    A row that sees only -inf becomes NaN, as in NumPy. Without a variant: the fastest that fits.
    """
    if out is not scores:
        (scores,) = contiguous(scores)
    return call(bind, (scores,), out, causal=causal, variant=variant, block=block).out
