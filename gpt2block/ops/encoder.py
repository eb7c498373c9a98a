"""Token plus position embedding: out[b, t] = wte[ids[b, t]] + wpe[t].

Kernels: embedding/encoder.cu, one for each variant.
"""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

import numpy as np

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import (
    Bound,
    CudaArray,
    check,
    check_matrix,
    contiguous,
    output,
    row_alignment,
)
from gpt2block.cuda.kernels import Launch, launch
from gpt2block.errors import InputError
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant, check_block
from gpt2block.ops.warm import call

FILE = "embedding/encoder.cu"
BLOCK = 256
BLOCKS = (32, 64, 128, 256, 512, 1024)


class Job(NamedTuple):
    """A checked call: ids (..., T), wte (V, C), wpe (n_ctx, C), out (..., T, C)."""

    ids: CudaArray
    wte: CudaArray
    wpe: CudaArray
    out: CudaArray
    block: int | None  # None: the default

    @property
    def C(self) -> int:  # noqa: N802
        return int(self.wte.shape[1])


def _launch(job: Job, kernel: str, threads: int) -> tuple[Launch, ...]:
    """With `threads` threads for each token."""
    ids, wte, block = job.ids, job.wte, job.block or BLOCK
    grid = (ceil(ids.size * threads / block),)
    args = (ids, wte, job.wpe, job.out, ids.size, ids.shape[-1], job.C, wte.shape[0])
    return (launch(FILE, kernel, grid, (block,), args),)


def _vectors_problem(job: Job) -> str | None:
    if row_alignment(job.C, job.wte, job.wpe, job.out) == 16:
        return None
    return (
        f"expected C to be a multiple of 4, got {job.C}, and rows that start on a multiple of 16 "
        f"bytes: use variant 1"
    )


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    variant: str | int | None = None,
    block: int | None = None,
) -> Bound:
    """inputs (ids (T,) or (B, T) of int32, wte (V, C), wpe (n_ctx, C)), out (..., T, C).

    The ids are not read back: an id outside 0..V-1 makes its row NaN. Without a variant: 3, or 1
    where rows do not start on a multiple of 16 bytes.
    """
    ids, wte, wpe = inputs
    check("ids", ids, dtype="int32")
    C = check_matrix("wte", wte)[1]
    n_ctx = check_matrix("wpe", wpe)[0]
    check("wpe", wpe, (n_ctx, C))
    if n_ctx < ids.shape[-1]:
        raise InputError(f"ids: {ids.shape[-1]:,} positions, but wpe has {n_ctx:,} rows")
    out = output(out, (*ids.shape, C), apart={"ids": ids, "wte": wte, "wpe": wpe})
    job = Job(ids, wte, wpe, out, block)
    chosen = OPERATION.choose(job, variant, ("3", "1"))
    check_block(OPERATION.name, chosen, block)
    return Bound(out, chosen.launch(job))


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    ids = rng.integers(sizes["V"], size=(sizes["B"], sizes["T"]), dtype=np.int32)
    wte, wpe = (
        rng.standard_normal((rows, sizes["C"]), dtype=np.float32) + np.float32(0.5)
        for rows in (sizes["V"], sizes["T"])
    )
    return ids, wte, wpe


def _traffic(sizes: Sizes) -> int:
    """An id, a row of wte and a row of out for each token; wpe once."""
    rows, C = sizes["B"] * sizes["T"], sizes["C"]
    return 4 * (rows + 2 * rows * C + sizes["T"] * C)


OPERATION = Operation(
    name="encoder",
    document="named after llm.c's encoder kernels",
    idea="out = wte[ids] + wpe[position]",
    sizes={"B": 8, "T": 1024, "C": 768, "V": 50257},
    variants=(
        Variant(
            "1",
            FILE,
            ("encoder_forward_kernel1",),
            "one thread per element",
            BLOCKS,
            launch=lambda job: _launch(job, "encoder_forward_kernel1", job.C),
        ),
        Variant(
            "2",
            FILE,
            ("encoder_forward_kernel2",),
            "one thread per 4 channels",
            BLOCKS,
            launch=lambda job: _launch(job, "encoder_forward_kernel2", job.C // 4),
            problem=_vectors_problem,
        ),
        Variant(
            "3",
            FILE,
            ("encoder_forward_kernel3",),
            "one warp per row, several 16-byte loads in flight",
            BLOCKS,
            launch=lambda job: _launch(job, "encoder_forward_kernel3", 32),
            problem=_vectors_problem,
        ),
    ),
    make=_make,
    traffic=_traffic,
    flops=lambda sizes: sizes["B"] * sizes["T"] * sizes["C"],
    bound="memory",
    attrs={},
    binder=bind,
)


def on_device(ids: Any, V: int) -> CudaArray:
    """Copy host ids to the device as int32; InputError names the first outside 0..V-1."""
    try:
        host = np.asarray(ids)
    except ValueError as error:  # rows of different lengths
        raise InputError(f"ids: expected an array of integers: {error}") from error
    if host.size and host.dtype.kind not in "iu":
        raise InputError(f"ids: expected integers, got {host.dtype}")
    wrong = np.argwhere((host < 0) | (host >= V))
    if wrong.size:
        at = tuple(int(i) for i in wrong[0])
        place = at[0] if len(at) == 1 else at
        raise InputError(f"ids: id {int(host[at])} at {place}: expected 0 to {V - 1}")
    return cupy.asarray(host, dtype=cupy.int32, order="C")


def encoder(
    ids: Any,
    wte: CudaArray,
    wpe: CudaArray,
    variant: str | int | None = None,
    block: int | None = None,
) -> CudaArray:
    """`reference.encoder` on CuPy arrays; raises InputError.

    `ids` on the host (NumPy, a list) are checked and copied. On the device they are not read back:
    an id that wte has no row for makes its row NaN. Without a variant: the fastest that fits.
    """
    ids, wte, wpe = contiguous(ids, wte, wpe)
    check("wte", wte)
    if not isinstance(ids, cupy.ndarray):
        ids = on_device(ids, wte.shape[0])
    return call(bind, (ids, wte, wpe), variant=variant, block=block).out
