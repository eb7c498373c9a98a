"""Log-likelihoods of tokens: the launch of the kernel."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gpt2block.operations._types import Geometry, Inputs, Operation, Sizes, Variant

FILE = "tokens/log_likelihood.cu"
THREADS = 512


def _make(sizes: Sizes, rng: np.random.Generator) -> Inputs:
    N, V = sizes["N"], sizes["V"]
    logits = np.float32(3) * rng.standard_normal((N, V), dtype=np.float32)
    return logits, rng.integers(V, size=N, dtype=np.int32)


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
)


@lru_cache(maxsize=1024)
def geometry(rows: int, threads: int = THREADS) -> Geometry:
    """For `rows` rows of any length."""
    (kernel,) = OPERATION.variants[0].kernels
    defines = () if threads == THREADS else (("LL_THREADS", threads),)
    return Geometry(kernel, (rows,), (threads,), defines=defines)
