"""Log-likelihoods of tokens: the launch of the kernel."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from gpt2block.cuda.arrays import Bound, CudaArray, check, contiguous, launch_at, output
from gpt2block.cuda.kernels import Geometry
from gpt2block.errors import InputError
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant
from gpt2block.ops.warm import call

FILE = "tokens/log_likelihood.cu"
THREADS = 512


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    N, V = sizes["N"], sizes["V"]
    logits = np.float32(3) * rng.standard_normal((N, V), dtype=np.float32)
    return logits, rng.integers(V, size=N, dtype=np.int32)


@lru_cache(maxsize=1024)
def geometry(rows: int, threads: int = THREADS) -> Geometry:
    """For `rows` rows of any length."""
    (kernel,) = OPERATION.variants[0].kernels
    defines = () if threads == THREADS else (("LL_THREADS", threads),)
    return Geometry(kernel, (rows,), (threads,), defines=defines)


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


OPERATION = Operation(
    name="log_likelihood",
    document="the loss of language models",
    idea="out = logits[target] - log Σ exp(logits) of each row",
    sizes={"N": 1024, "V": 50257},
    variants=(
        Variant(
            "block",
            FILE,
            ("log_likelihood_kernel",),
            "a block a row: maximum and sum in one pass",
            block=THREADS,
        ),
    ),
    make=_make,
    traffic=lambda sizes: sizes["N"] * (4 * sizes["V"] + 8),
    flops=lambda sizes: 5 * sizes["N"] * sizes["V"],
    bound="memory",
    attrs={},
    binder=bind,
)


def log_likelihood(
    logits: CudaArray, targets: CudaArray, variant: str | int | None = None
) -> CudaArray:
    """`reference.log_likelihood` on CuPy arrays, float32 and int32; raises InputError.

    logits (..., V), targets (...) → (...). A target outside 0..V-1 gives NaN.
    """
    logits, targets = contiguous(logits, targets)
    return call(bind, (logits, targets), variant=variant).out
