"""Log-likelihoods of tokens: logits[target] - log Σ exp(logits) of each row.

Kernel: tokens/log_likelihood.cu.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpt2block.cuda.arrays import Bound, CudaArray, check, contiguous, launch_at, output
from gpt2block.cuda.kernels import Geometry, Launch
from gpt2block.ops._rows import check_rows
from gpt2block.ops.operation import Inputs, Operation, Sizes, Variant
from gpt2block.ops.warm import call

FILE = "tokens/log_likelihood.cu"
THREADS = 512


def choose_geometry(rows: int, threads: int = THREADS) -> Geometry:
    """One block per row; tests pass fewer threads than the default."""
    defines = () if threads == THREADS else (("LL_THREADS", threads),)
    return Geometry("log_likelihood_kernel", (rows,), (threads,), defines=defines)


def _launch(job: tuple[CudaArray, CudaArray, CudaArray]) -> tuple[Launch, ...]:
    """job: logits, targets, out."""
    logits, targets, _ = job
    return (launch_at(FILE, choose_geometry(targets.size), (*job, logits.shape[-1])),)


def bind(inputs: tuple[Any, ...], out: CudaArray | None = None) -> Bound:
    """inputs (logits (..., V), targets (...) of int32), out (...).

    The targets are not read back: one outside 0..V-1 gives NaN.
    """
    logits, targets = inputs
    check("logits", logits)
    check("targets", targets, logits.shape[:-1], "int32")
    check_rows("logits", logits)
    out = output(out, targets.shape, apart={"logits": logits, "targets": targets})
    return Bound(out, _launch((logits, targets, out)))


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    N, V = sizes["N"], sizes["V"]
    logits = np.float32(3) * rng.standard_normal((N, V), dtype=np.float32)
    return logits, rng.integers(V, size=N, dtype=np.int32)


OPERATION = Operation(
    name="log_likelihood",
    document="gpt2block",
    idea="out = logits[target] - log Σ exp(logits) of each row",
    sizes={"N": 1024, "V": 50257},
    variants=(
        Variant(
            "block",
            FILE,
            ("log_likelihood_kernel",),
            "one block per row: maximum and sum in one pass",
            block=THREADS,
            launch=_launch,
        ),
    ),
    make=_make,
    traffic=lambda sizes: sizes["N"] * (4 * sizes["V"] + 8),
    flops=lambda sizes: 5 * sizes["N"] * sizes["V"],
    bound="memory",
    attrs={},
    binder=bind,
)


def log_likelihood(logits: CudaArray, targets: CudaArray) -> CudaArray:
    """`reference.log_likelihood` on CuPy arrays, float32 and int32; raises InputError.

    logits (..., V), targets (...) → (...). A target outside 0..V-1 gives NaN.
    """
    return call(bind, contiguous(logits, targets)).out
