"""Log-likelihoods of tokens on CUDA: kernels_cu/tokens/log_likelihood.cu."""

from __future__ import annotations

from typing import Any

from gpt2block.cuda.arrays import Bound, CudaArray, check, contiguous, launch_at, output
from gpt2block.errors import InputError
from gpt2block.operations.log_likelihood import FILE, OPERATION, geometry
from gpt2block.ops._warm import call

MAX_ROWS = 2**31 - 1
MAX_V = 2**30


def bind(
    inputs: tuple[Any, ...],
    out: CudaArray | None = None,
    *,
    variant: str | int | None = None,
) -> Bound:
    """inputs (logits (..., V), targets (...) of int32), out (...).

    The targets are not read back: one outside 0..V-1 gives NaN.
    """
    logits, targets = inputs
    check("logits", logits)
    check("targets", targets, logits.shape[:-1], "int32")
    V, rows = logits.shape[-1], targets.size
    if rows > MAX_ROWS or V > MAX_V:
        raise InputError(f"logits: at most {MAX_ROWS:,} rows of {MAX_V:,}, got {logits.shape}")
    OPERATION.variant(variant or OPERATION.variants[0].name)
    out = output(out, targets.shape, apart={"logits": logits, "targets": targets})
    return Bound(out, (launch_at(FILE, geometry(rows), (logits, targets, out, V)),))


def log_likelihood(
    logits: CudaArray, targets: CudaArray, variant: str | int | None = None
) -> CudaArray:
    """`reference.log_likelihood` on CuPy arrays, float32 and int32; raises InputError.

    logits (..., V), targets (...) → (...). A target outside 0..V-1 gives NaN.
    """
    logits, targets = contiguous(logits, targets)
    return call(bind, (logits, targets), variant=variant).out
